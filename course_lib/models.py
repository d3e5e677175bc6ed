"""The networks that the lessons train: small, seeded, and written to be read.

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
    """Use random numbers from `seed` inside the block; the generators are restored afterwards."""
    if is_symbolic():  # symbolic tensors have no values to repeat
        yield
        return
    # without an accelerator, `torch.manual_seed` formats the stack once per kind of device
    everywhere = torch.accelerator.is_available()
    with torch.random.fork_rng():
        (torch.manual_seed if everywhere else torch.default_generator.manual_seed)(seed)
        yield


def deep_mlp(
    depth: int, width: int, *, activation: type[nn.Module] = nn.GELU, seed: int = 0
) -> nn.Sequential:
    """Build `depth` pairs of Linear(width, width) and an activation: (b, width) -> (b, width).

    Raises:
        ValueError: depth or width is below 1.
    """
    _at_least_one(depth=depth, width=width)
    with seed_generators(seed):
        return nn.Sequential(
            *(layer for _ in range(depth) for layer in (nn.Linear(width, width), activation()))
        )


class Dropout(nn.Module):
    """Dropout with a mask of one byte per element on every device.

    On a CPU, `F.dropout` keeps its mask in the activations' dtype. `native_dropout` keeps booleans,
    as on a GPU.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, self.p, True)[0] if self.training and self.p > 0 else x

    def extra_repr(self) -> str:
        return f"p={self.p}"


class Attention(nn.Module):
    """Multi-head self-attention: (b, s, h) -> (b, s, h).

    Args:
        hidden, heads: h and a; a must divide h.
        dropout: Dropout probability of the attention probabilities (standard attention only) and of
            the output.
        causal: Whether each position sees only itself and earlier positions.
        fused: Whether to use PyTorch's fused kernel, which does not keep the probabilities.

    Raises:
        ValueError: heads does not divide hidden, or one of them is below 1.
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
        # (b, a, s, h/a) each
        # -1, because with tensor parallelism a rank computes only some of the heads
        q, k, v = self.qkv(x).view(b, s, 3, -1, h // self.heads).permute(2, 0, 3, 1, 4)
        if self.fused:
            context = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            context = self.standard(q, k, v)
        return self.drop_output(self.out(context.transpose(1, 2).flatten(2)))

    def standard(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s, scale = q.shape[-2], q.shape[-1] ** -0.5
        scores = q @ k.mT * scale  # (b, a, s, s)
        if self.causal:
            # An addition saves nothing for backward; masked_fill would save its mask.
            scores = scores + torch.full(
                (s, s), float("-inf"), dtype=q.dtype, device=q.device
            ).triu(1)
        return self.drop_probabilities(scores.softmax(dim=-1)) @ v  # (b, a, s, h/a)


class DecoderLayer(nn.Module):
    """Attention and a feed-forward network with residual connections: (b, s, h) -> (b, s, h).

    Args:
        hidden, heads: h and a; a must divide h.
        feedforward: Width of the feed-forward network, by default 4 h.
        norm_first: Whether to normalize before each part (pre-norm, as in GPT) or after the
            residual sum (post-norm, as in 2017).
        dropout, causal, fused: Arguments of `Attention`.

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
    """A GPT with embeddings, pre-norm decoder layers and a head: tokens (b, s) -> logits (b, s, v).

    Args:
        vocabulary, hidden, heads, layers: v, h, a and the number of layers.
        sequence: Length of the longest sequence, for the position embedding.
        tied: Whether the head uses the weight of the token embedding.
        dropout, fused: Arguments of `Attention`.

    Raises:
        ValueError: A size is below 1; heads does not divide hidden; tokens are longer than
            `sequence`.
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
        """Return the mean cross-entropy of each next token: (b, s + 1) -> scalar."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def loss_sum(self, tokens: Tensor) -> tuple[Tensor, int]:
        """Return the sum of the cross-entropies, and the number of tokens in it."""
        logits, targets = self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        return F.cross_entropy(logits, targets, reduction="sum"), targets.numel()

    def stages(self, tokens: Tensor) -> list[Callable]:
        """Return `loss_sum` as a chain, for the checkpoints "optimal" and "segments" of a recipe.

        Any model may have such a method. It returns callables: the first takes the batch, each
        other one takes what the previous one returned, and the last returns (sum of losses,
        weight). Modules are the model's own, so changes to them have an effect, such as a chunked
        head or other attention. The first callable here is a function without parameters that takes
        the inputs out of the batch.

        Returns:
            The function for the inputs; the embedding; one block per layer; and the head with its
            loss. A block is an `nn.Sequential` of attention and feed-forward network, or the layer
            itself if it is of another class, is compiled or has hooks.
        """
        blocks = [
            nn.Sequential(*_halves(layer)) if _is_plain(layer) else layer for layer in self.layers
        ]
        return [_inputs, _Embedding(self), *blocks, _HeadLossSum(self, tokens[:, 1:])]

    @property
    def draws_random_numbers(self) -> bool:
        """Return whether a forward pass may draw random numbers, which only `Dropout` layers do."""
        drops = (part for part in self.modules() if isinstance(part, (Dropout, nn.Dropout)))
        return not all(map(_is_plain, self.layers)) or any(d.p > 0 and d.training for d in drops)


def _is_plain(layer: nn.Module) -> bool:
    """Return whether a layer equals the chain of its `_halves`, without changes from outside."""
    own = type(layer) is DecoderLayer and layer.norm_first and "forward" not in vars(layer)
    compiled = layer._compiled_call_impl is not None
    return own and not (compiled or layer._forward_hooks or layer._forward_pre_hooks)


def _halves(layer: DecoderLayer) -> tuple[_Residual, _Residual]:
    return _Residual(layer.norm1, layer.attention), _Residual(layer.norm2, layer.feedforward)


def _inputs(tokens: Tensor) -> Tensor:
    return tokens[:, :-1]


class _Embedding(nn.Module):
    def __init__(self, decoder: Decoder):
        super().__init__()
        self.tokens, self.positions = decoder.tokens, decoder.positions

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[-1]]  # (b, s, h)


class _Residual(nn.Module):
    def __init__(self, norm: nn.Module, inner: nn.Module):
        super().__init__()
        self.norm, self.inner = norm, inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class _HeadLoss(nn.Module):
    def __init__(self, decoder: Decoder, targets: Tensor):
        super().__init__()
        self.norm, self.head = decoder.norm, decoder.head
        self.register_buffer("targets", targets.contiguous(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), self.targets.flatten())


class _HeadLossSum(_HeadLoss):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        logits, targets = self.head(self.norm(x)).flatten(0, 1), self.targets.flatten()
        return F.cross_entropy(logits, targets, reduction="sum"), targets.numel()


def loss_stages(decoder: Decoder, targets: Tensor) -> nn.Sequential:
    """Return a decoder's loss as a chain of embedding, two stages per layer, and head with loss.

    The two stages of a layer are attention and feed-forward network. `loss_stages(decoder,
    tokens[:, 1:])(tokens[:, :-1])` is `decoder.loss(tokens)`. The modules are shared, not copied.

    Args:
        decoder: The decoder.
        targets: (b, s), the tokens to predict. Assign to `stages[-1].targets` for another batch.

    Returns:
        2 * layers + 2 stages, each with one input and one output tensor:
        (b, s) -> (b, s, h) -> ... -> scalar.
    """
    stages: list[nn.Module] = [_Embedding(decoder)]
    for layer in decoder.layers:
        stages += _halves(layer)
    return nn.Sequential(*stages, _HeadLoss(decoder, targets))


def random_tokens(batch: int, sequence: int, vocabulary: int, *, seed: int = 0) -> Tensor:
    """Return token numbers to train on: (batch, sequence + 1), int64.

    Each sample has one token more than the model reads, because each token predicts the next one.

    Example:
        >>> random_tokens(2, 4, 100).shape
        torch.Size([2, 5])
    """
    _at_least_one(batch=batch, sequence=sequence, vocabulary=vocabulary)
    with seed_generators(seed):
        return torch.randint(vocabulary, (batch, sequence + 1))


def _at_least_one(**sizes: int) -> None:
    for name, size in sizes.items():
        whole(name, size, 1)
