"""Small networks that the lessons train. Their weights depend on a seed, so runs can be repeated.

Shapes use b for batch, s for sequence, h for hidden, a for heads and v for vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib._check import whole
from course_lib._torch.symbolic import is_symbolic


@contextmanager
def seed_generators(seed: int) -> Iterator[None]:
    """Seed PyTorch's random number generators for a `with` block, and restore them at its end."""
    if is_symbolic():  # symbolic tensors have no values, so the seed does not matter
        yield
        return
    # Without an accelerator, seeding only the CPU's generator is faster: `torch.manual_seed`
    # formats the call stack once per kind of device.
    everywhere = torch.accelerator.is_available()
    with torch.random.fork_rng():
        (torch.manual_seed if everywhere else torch.default_generator.manual_seed)(seed)
        yield


def deep_mlp(
    depth: int, width: int, *, activation: type[nn.Module] = nn.GELU, seed: int = 0
) -> nn.Sequential:
    """Build a network of `depth` linear layers, each followed by an activation.

    Input and output of the network have the shape (samples, width).

    Args:
        depth: Number of linear layers.
        width: Number of input and output features of each layer.
        activation: Class of the activation function.
        seed: Seed of the random weights.

    Raises:
        ValueError: `depth` or `width` is below 1.
    """
    _at_least_one(depth=depth, width=width)
    with seed_generators(seed):
        return nn.Sequential(
            *(layer for _ in range(depth) for layer in (nn.Linear(width, width), activation()))
        )


class Dropout(nn.Module):
    """Dropout that saves a mask of one byte per element for backward, on every device.

    On a GPU, `F.dropout` saves a mask of booleans, but on a CPU it saves a mask in the dtype of the
    activations. This module calls `native_dropout`, which saves booleans on a CPU too.

    Args:
        p: Probability that an element is set to zero.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, self.p, True)[0] if self.training and self.p > 0 else x

    def extra_repr(self) -> str:
        return f"p={self.p}"


class Attention(nn.Module):
    """Multi-head self-attention: (samples, tokens, hidden) -> (samples, tokens, hidden).

    Args:
        hidden: Features per token.
        heads: Number of heads, which must divide `hidden`.
        dropout: Dropout probability for the output and, if `fused` is False, for the attention
            probabilities.
        causal: Whether each position attends only to itself and to earlier positions.
        fused: Whether to call `F.scaled_dot_product_attention`, whose fused kernels do not save the
            attention probabilities for backward. If False, the method `standard` computes attention
            with separate operators.
        seed: Seed of the random weights.

    Raises:
        ValueError: `heads` does not divide `hidden`, or one of them is below 1.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        dropout: float = 0.0,
        causal: bool = False,
        fused: bool = False,
        seed: int = 0,
    ):
        super().__init__()
        _at_least_one(hidden=hidden, heads=heads)
        if hidden % heads:
            raise ValueError(f"heads must be a divisor of hidden = {hidden}, got {heads}")
        self.heads, self.causal, self.fused = heads, causal, fused
        with seed_generators(seed):
            self.qkv = nn.Linear(hidden, 3 * hidden)
            self.out = nn.Linear(hidden, hidden)
        self.drop_probabilities = Dropout(dropout)
        self.drop_output = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        # q, k and v have the shape (b, a, s, h/a). The number of heads is -1 here, because with
        # tensor parallelism a rank computes only some of them.
        q, k, v = self.qkv(x).view(b, s, 3, -1, h // self.heads).permute(2, 0, 3, 1, 4)
        if self.fused:
            context = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            context = self.standard(q, k, v)
        return self.drop_output(self.out(context.transpose(1, 2).flatten(2)))

    def standard(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute attention with separate operators, which save the probabilities for backward.

        The arguments and the result have the shape (samples, heads, tokens, hidden / heads).
        """
        s, scale = q.shape[-2], q.shape[-1] ** -0.5
        scores = q @ k.mT * scale  # (b, a, s, s)
        if self.causal:
            # The mask is added, because an addition saves no tensor for backward. `masked_fill`
            # would save its mask.
            scores = scores + torch.full(
                (s, s), float("-inf"), dtype=q.dtype, device=q.device
            ).triu(1)
        return self.drop_probabilities(scores.softmax(dim=-1)) @ v  # (b, a, s, h/a)


class DecoderLayer(nn.Module):
    """Decoder layer: attention and a feed-forward network, each with a residual connection.

    The layer maps (samples, tokens, hidden) to the same shape.

    Args:
        hidden: Features per token.
        heads: Number of attention heads, which must divide `hidden`.
        feedforward: Width of the feed-forward network, by default 4 * hidden.
        norm_first: True for pre-norm, as in GPT: attention and feed-forward network normalize their
            input. False for post-norm, as in the original Transformer: the residual sums are
            normalized.
        dropout: Dropout probability in attention (see `Attention`) and after the feed-forward
            network.
        causal: Whether each position attends only to itself and to earlier positions.
        fused: Whether attention calls `F.scaled_dot_product_attention`.
        seed: Seed of the random weights.

    Source: Vaswani et al. 2017, arXiv:1706.03762 (post-norm); Xiong et al. 2020, arXiv:2002.04745
    (pre-norm).
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        feedforward: int | None = None,
        norm_first: bool = True,
        dropout: float = 0.0,
        causal: bool = True,
        fused: bool = False,
        seed: int = 0,
    ):
        super().__init__()
        feedforward = 4 * hidden if feedforward is None else feedforward
        _at_least_one(feedforward=feedforward)
        self.norm_first = norm_first
        self.attention = Attention(
            hidden, heads, dropout=dropout, causal=causal, fused=fused, seed=seed
        )
        with seed_generators(seed + 1):
            self.feedforward = nn.Sequential(
                nn.Linear(hidden, feedforward),
                nn.GELU(),
                nn.Linear(feedforward, hidden),
                Dropout(dropout),
            )
            self.norm1 = nn.LayerNorm(hidden)
            self.norm2 = nn.LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        if self.norm_first:
            x = x + self.attention(self.norm1(x))
            return x + self.feedforward(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.feedforward(x))


class Decoder(nn.Module):
    """GPT with embeddings, pre-norm decoder layers and a head: tokens (b, s) -> logits (b, s, v).

    The input has b samples of s tokens, and v is the size of the vocabulary.

    Args:
        vocabulary: Number of different tokens (v).
        hidden: Features per token.
        heads: Number of attention heads, which must divide `hidden`.
        layers: Number of decoder layers.
        sequence: Largest number of tokens per sample (s), which is the size of the position
            embedding.
        tied: Whether the output head uses the weight of the token embedding.
        dropout: Dropout probability in the decoder layers.
        fused: Whether attention calls `F.scaled_dot_product_attention`.
        seed: Seed of the random weights.

    Raises:
        ValueError: A size is below 1, or `heads` does not divide `hidden`. The forward pass raises
            the same error if its input is longer than `sequence`.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        hidden: int,
        heads: int,
        layers: int,
        sequence: int,
        tied: bool = True,
        dropout: float = 0.0,
        fused: bool = False,
        seed: int = 0,
    ):
        super().__init__()
        _at_least_one(
            vocabulary=vocabulary, hidden=hidden, heads=heads, layers=layers, sequence=sequence
        )
        with seed_generators(seed):
            self.tokens = nn.Embedding(vocabulary, hidden)
            self.positions = nn.Embedding(sequence, hidden)
            nn.init.normal_(self.tokens.weight, std=0.02)
            nn.init.normal_(self.positions.weight, std=0.02)
            self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.layers = nn.ModuleList(
            DecoderLayer(hidden, heads, dropout=dropout, fused=fused, seed=seed + 2 + 2 * i)
            for i in range(layers)
        )
        self.norm = nn.LayerNorm(hidden)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        longest = self.positions.num_embeddings
        if tokens.shape[-1] > longest:
            raise ValueError(
                f"tokens must be a sequence of at most {longest} tokens, got {tokens.shape[-1]}"
            )
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[-1]]  # (b, s, h)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # (b, s, v)

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the mean cross-entropy of predicting each next token, as a scalar.

        Args:
            tokens: Tokens of shape (samples, sequence + 1). The last token of each sample is only a
                target.
        """
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def loss_sum(self, tokens: Tensor) -> tuple[Tensor, int]:
        """Return the summed cross-entropy of all predicted tokens, and the number of these tokens.

        Args:
            tokens: Tokens of shape (samples, sequence + 1). The last token of each sample is only a
                target.
        """
        logits, targets = self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        return F.cross_entropy(logits, targets, reduction="sum"), targets.numel()

    def stages(self, tokens: Tensor) -> list[Callable]:
        """Return the computation of `loss_sum` as a list of stages, which are called in order.

        The checkpoints "optimal" and "segments" of `course_lib.budget.Recipe` use this method. The
        first stage is called with the batch, and each later stage with the result of the previous
        stage. The last stage returns (sum of losses, number of tokens), as `loss_sum` does. The
        stages use the model's own modules, so a change to the model, such as a chunked head, also
        changes the stages.

        Args:
            tokens: Batch of shape (samples, sequence + 1).

        Returns:
            Callables in this order: a function that selects the model's inputs from the batch, the
            embedding, one block per layer, and the output head with the loss. For an unchanged
            pre-norm `DecoderLayer`, the block is an `nn.Sequential` of its attention and its
            feed-forward network. For any other layer, the block is the layer itself. A
            `DecoderLayer` counts as changed if it is compiled, has forward hooks, or has a replaced
            `forward`.
        """
        blocks = [
            nn.Sequential(*_residual_halves(layer)) if _is_plain(layer) else layer
            for layer in self.layers
        ]
        return [_inputs, _Embedding(self), *blocks, _HeadLossSum(self, tokens[:, 1:])]

    @property
    def draws_random_numbers(self) -> bool:
        """Whether a forward pass possibly draws random numbers.

        The value is True if a dropout layer is active. It is also True if a decoder layer was
        replaced, is compiled or has hooks, because such a layer could draw random numbers.
        """
        drops = (part for part in self.modules() if isinstance(part, (Dropout, nn.Dropout)))
        return not all(map(_is_plain, self.layers)) or any(d.p > 0 and d.training for d in drops)


def _is_plain(layer: nn.Module) -> bool:
    """Return whether a layer can be replaced by its two `_residual_halves`, one after the other.

    This is possible for a pre-norm `DecoderLayer`. The result is False for a post-norm layer and
    for a layer of any other class, even a subclass. It is also False if the layer is compiled, has
    forward hooks, or has a replaced `forward`.
    """
    own = type(layer) is DecoderLayer and layer.norm_first and "forward" not in vars(layer)
    compiled = layer._compiled_call_impl is not None
    return own and not (compiled or layer._forward_hooks or layer._forward_pre_hooks)


def _residual_halves(layer: DecoderLayer) -> tuple[_Residual, _Residual]:
    """Return a pre-norm layer's attention and feed-forward network, each with its residual sum."""
    return _Residual(layer.norm1, layer.attention), _Residual(layer.norm2, layer.feedforward)


def _inputs(tokens: Tensor) -> Tensor:
    """Return the tokens that the model reads, all but each sample's last one, of shape (b, s)."""
    return tokens[:, :-1]


class _Embedding(nn.Module):
    """Sum of a decoder's token and position embeddings: (b, s) -> (b, s, h)."""

    def __init__(self, decoder: Decoder):
        super().__init__()
        self.tokens, self.positions = decoder.tokens, decoder.positions

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[-1]]  # (b, s, h)


class _Residual(nn.Module):
    """Residual connection around a norm and a module: x + inner(norm(x)), of shape (b, s, h)."""

    def __init__(self, norm: nn.Module, inner: nn.Module):
        super().__init__()
        self.norm, self.inner = norm, inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class _HeadLoss(nn.Module):
    """A decoder's last norm, output head and mean loss: (b, s, h) -> scalar.

    The targets (b, s) are a buffer, which can be replaced for another batch.
    """

    def __init__(self, decoder: Decoder, targets: Tensor):
        super().__init__()
        self.norm, self.head = decoder.norm, decoder.head
        self.register_buffer("targets", targets.contiguous(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), self.targets.flatten())


class _HeadLossSum(_HeadLoss):
    """Like `_HeadLoss`, but the result is the pair (sum of losses, number of tokens)."""

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        logits, targets = self.head(self.norm(x)).flatten(0, 1), self.targets.flatten()
        return F.cross_entropy(logits, targets, reduction="sum"), targets.numel()


def loss_stages(decoder: Decoder, targets: Tensor) -> nn.Sequential:
    """Return a decoder and its loss as a chain of stages, for use with `course_lib.schedule`.

    A chain is a list of modules (stages), each of which is called with the result of the previous
    one. The stages are the embedding, two stages per layer (attention and feed-forward network),
    and the output head with the loss. They use the decoder's own modules. If
    `stages = loss_stages(decoder, tokens[:, 1:])`, then `stages(tokens[:, :-1])` is equal to
    `decoder.loss(tokens)`.

    Args:
        decoder: The decoder.
        targets: Tokens to predict, of shape (b, s) for b samples of s tokens. For another batch,
            assign its targets to `stages[-1].targets`.

    Returns:
        A sequence of 2 * layers + 2 stages, each with one input and one output tensor. The shapes
        are (b, s) -> (b, s, hidden) -> ... -> scalar.
    """
    stages: list[nn.Module] = [_Embedding(decoder)]
    for layer in decoder.layers:
        stages += _residual_halves(layer)
    return nn.Sequential(*stages, _HeadLoss(decoder, targets))


def random_tokens(batch: int, sequence: int, vocabulary: int, *, seed: int = 0) -> Tensor:
    """Return random tokens for training as an int64 tensor (batch, sequence + 1).

    Each sample has one token more than the input of a model, because the targets are the next
    tokens.

    Args:
        batch: Number of samples.
        sequence: Number of tokens per sample in the input of the model.
        vocabulary: Number of different tokens. Tokens are numbers from 0 to vocabulary - 1.
        seed: Seed of the random numbers.

    Example:
        >>> random_tokens(2, 4, 100).shape
        torch.Size([2, 5])
    """
    _at_least_one(batch=batch, sequence=sequence, vocabulary=vocabulary)
    with seed_generators(seed):
        return torch.randint(vocabulary, (batch, sequence + 1))


def _at_least_one(**sizes: int) -> None:
    """Raise an error if one of the sizes is not a whole number of at least 1."""
    for name, size in sizes.items():
        whole(name, size, 1)
