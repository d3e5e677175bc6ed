"""Build models with the shapes that a Hugging Face `config.json` describes, from plain modules.

Nothing is downloaded, and transformers is not imported. Every parameter has the same shape as in
the published model, so the number of parameters is the published one. The bytes that a step saves
for backward are within 1% of those of transformers with eager attention; fused kernels save less.

The models are simpler than those of transformers. Attention is causal over all tokens (no sliding
window), there is no dropout, and the rotation of positions is not scaled. Each expert processes
equally many tokens, as with a balanced router.

Shapes use b for batch, s for sequence, h for hidden, a for heads, d for the features of a head and
e for experts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib._check import any_of, argument_message, describe, kind, whole
from course_lib.models import Attention, Decoder, Dropout, seed_generators

# `LLAMAS` has the values of `model_type` for which `Llama` is built. `KNOWN` has all supported
# values.
LLAMAS = ("llama", "mistral", "mixtral", "qwen2", "qwen3")
KNOWN = ("gpt2", *LLAMAS)


def read_config(file: Path | str) -> dict[str, Any]:
    """Read a `config.json` and return its contents as a dict.

    Raises:
        ValueError: The file cannot be read, is not JSON (the message gives line and column), or
            does not contain a JSON object.
    """
    try:
        config = json.loads(Path(file).read_text(encoding="utf-8-sig"))
    except OSError as error:
        message = f"config must be a file that can be read, got {str(file)!r} ({error.strerror})"
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(file)) and not str(file).endswith(".json"):
            message = (
                f"{message}. If this is a model's name on the Hugging Face Hub, save its"
                f" configuration first: hf download {file} config.json --local-dir ."
            )
        raise ValueError(message) from None
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}: {error.msg}"
        raise ValueError(
            f"config must be a JSON file, such as a model's config.json, got {str(file)!r} ({at})"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"config must be a text file, such as a model's config.json, got {str(file)!r}"
            f" ({error})"
        ) from None
    if not isinstance(config, dict):
        raise ValueError(
            "config must hold a JSON object, as a model's config.json does, got"
            f" {str(file)!r}, which holds {describe(config)}"
        )
    return config


def model_from(config: Mapping[str, Any], *, sequence: int, seed: int = 0) -> Decoder | Llama:
    """Build the model that a Hugging Face configuration describes, with random weights, in fp32.

    Args:
        config: Contents of a `config.json`. Its `model_type` must be one of `KNOWN`.
        sequence: Number of tokens per sample that the model must accept.
        seed: Seed of the random weights.

    Raises:
        ValueError: The `model_type` is not supported, a size is missing or invalid, or the model
            accepts only shorter sequences.
    """
    model, sizes = shape_of(config, sequence)
    return model(**sizes, seed=seed)


def shape_of(
    config: Mapping[str, Any], sequence: int
) -> tuple[type[Decoder | Llama], dict[str, Any]]:
    """Check a Hugging Face configuration, and return the class and the sizes of its model.

    The sizes are a dict of keyword arguments with which the class builds the model. Only the
    argument `seed` is not included.

    Args:
        config: Contents of a `config.json`. Its `model_type` must be one of `KNOWN`.
        sequence: Number of tokens per sample that the model must accept.

    Raises:
        ValueError: The `model_type` is not supported, a size is missing or invalid, or the model
            accepts only shorter sequences.
    """
    name = config.get("model_type")
    if name not in KNOWN:
        raise ValueError(
            f"model_type must be {any_of(map(repr, KNOWN))}, got {name!r}; other types"
            " of models are not supported"
        )
    sequence = whole("sequence", sequence, 1)
    longest = _positive_setting(
        config, "n_positions" if name == "gpt2" else "max_position_embeddings", sequence
    )
    if sequence > longest:
        raise ValueError(
            f"sequence must be at most {longest} (the limit of the config), got {sequence}"
        )
    return (Decoder, _gpt2(config)) if name == "gpt2" else (Llama, _llama(config, name))


def _positive_setting(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a setting of a configuration that must be a positive int.

    The default replaces a missing value. Without a default, a missing value is an error.
    """
    value = config.get(name)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"config must contain {name} for a {config['model_type']} model, got none")
    return whole(name, value, 1)


def _bool_setting(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Return a setting of a configuration that must be a bool."""
    value = config.get(name)
    return kind(name, default if value is None else value, bool, "true or false")


def _check_setting(config: Mapping[str, Any], name: str, *values: Any) -> None:
    """Raise ValueError if a setting has an unsupported value.

    `values` are the supported ones. The first one is the default of the setting.
    """
    if config.get(name, values[0]) not in values:
        raise ValueError(argument_message(name, any_of(map(repr, values)), repr(config[name])))


def _head_width(
    config: Mapping[str, Any], hidden_name: str, heads_name: str, exception: str = ""
) -> int:
    """Return the number of features per head, or raise if the heads do not divide the features.

    Args:
        config: The configuration.
        hidden_name, heads_name: Names of its settings for the features and for the heads.
        exception: Clause of the error message that says how to avoid this requirement, or "".
    """
    hidden = _positive_setting(config, hidden_name)
    heads = _positive_setting(config, heads_name)
    if hidden % heads:
        raise ValueError(
            f"{hidden_name} must be a multiple of {heads_name} = {heads}{exception}, got {hidden}"
        )
    return hidden // heads


def _gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Decoder` for the configuration of a GPT-2 model."""
    names = {
        "vocabulary": "vocab_size",
        "hidden": "n_embd",
        "heads": "n_head",
        "layers": "n_layer",
        "sequence": "n_positions",
    }
    sizes = {argument: _positive_setting(config, name) for argument, name in names.items()}
    _head_width(config, "n_embd", "n_head")
    inner = 4 * sizes["hidden"]
    if config.get("n_inner") not in (None, inner):
        raise ValueError(
            f"n_inner must be None or 4 * n_embd = {inner}, the only supported inner width, got"
            f" {config['n_inner']}"
        )
    return {**sizes, "tied": _bool_setting(config, "tie_word_embeddings", True)}


def _llama(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the arguments of `Llama` for a configuration whose `model_type` is `name`."""
    _check_setting(config, "hidden_act", "silu")
    heads = _positive_setting(config, "num_attention_heads")
    bias = _bool_setting(config, "attention_bias")
    is_mixtral = name == "mixtral"
    if config.get("head_dim") is not None or name == "qwen3":
        head_dim = _positive_setting(config, "head_dim", 128)
    else:
        head_dim = _head_width(
            config, "hidden_size", "num_attention_heads", " unless head_dim is set"
        )
    if head_dim % 2:
        raise ValueError(
            f"head_dim must be even, got {head_dim}; rotary position embeddings rotate pairs of"
            " features"
        )
    return {
        "vocabulary": _positive_setting(config, "vocab_size"),
        "hidden": _positive_setting(config, "hidden_size"),
        "layers": _positive_setting(config, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": _positive_setting(config, "num_key_value_heads", heads),
        "head_dim": head_dim,
        "feedforward": _positive_setting(config, "intermediate_size"),
        "experts": _positive_setting(config, "num_local_experts") if is_mixtral else 0,
        "experts_used": _positive_setting(config, "num_experts_per_tok") if is_mixtral else 0,
        "qkv_bias": bias or name == "qwen2",
        "out_bias": bias,
        "feedforward_bias": _bool_setting(config, "mlp_bias"),
        "head_norms": name == "qwen3",
        "tied": _bool_setting(config, "tie_word_embeddings"),
    }


# ---- the parts


class RMSNorm(nn.Module):
    """Root-mean-square normalization of the last dimension: x / sqrt(mean(x²) + eps) * weight.

    The quotient is computed in fp32 and then converted to the dtype of x.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()).to(
            x.dtype
        )


def rotate_pairs(x: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotate each pair of features by an angle proportional to the position (rotary embedding).

    The two features of a pair are d/2 apart, as in Hugging Face's Llama.

    Args:
        x: Queries or keys of shape (..., s, d), for s positions with d features each.
        base: Number that sets the speed of rotation. The first pair rotates by 1 radian per
            position, and the last pair by about 1 / base radians per position.

    Source: Su et al. 2021, arXiv:2104.09864.
    """
    s, d = x.shape[-2:]
    speeds = base ** (-torch.arange(0, d, 2, dtype=torch.float32, device=x.device) / d)
    # (s, d)
    angles = torch.outer(torch.arange(s, dtype=torch.float32, device=x.device), speeds).repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos().to(x.dtype) + torch.cat([-second, first], dim=-1) * angles.sin().to(
        x.dtype
    )


class GroupedAttention(Attention):
    """Causal grouped-query attention (GQA): (samples, tokens, hidden) -> (samples, tokens, hidden).

    Several query heads share one key head and one value head. `rotate_pairs` encodes the positions.

    Args:
        hidden: Features per token.
        heads: Number of query heads.
        kv_heads: Number of key heads, which is also the number of value heads. It must divide
            `heads`.
        head_dim: Features per head.
        qkv_bias: Whether the projections to queries, keys and values have biases.
        out_bias: Whether the output projection has a bias.
        head_norms: Whether the queries and keys of each head are normalized, as in Qwen3.

    Source: Ainslie et al. 2023, arXiv:2305.13245.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        qkv_bias: bool,
        out_bias: bool,
        head_norms: bool,
    ):
        # `Attention.__init__` is skipped, because it makes one projection for Q, K and V.
        nn.Module.__init__(self)
        if heads % kv_heads:
            raise ValueError(
                f"num_key_value_heads must be a divisor of the {heads} attention heads, got"
                f" {kv_heads}"
            )
        self.head_dim, self.causal, self.fused = head_dim, True, False
        self.q = nn.Linear(hidden, heads * head_dim, bias=qkv_bias)
        self.k = nn.Linear(hidden, kv_heads * head_dim, bias=qkv_bias)
        self.v = nn.Linear(hidden, kv_heads * head_dim, bias=qkv_bias)
        self.out = nn.Linear(heads * head_dim, hidden, bias=out_bias)
        self.norm_q, self.norm_k = (
            RMSNorm(head_dim) if head_norms else nn.Identity() for _ in range(2)
        )
        self.drop_probabilities = Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (
            part(x).view(b, s, -1, self.head_dim).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        q, k = rotate_pairs(self.norm_q(q)), rotate_pairs(self.norm_k(k))  # (b, a, s, d)
        if self.fused:
            context = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            )
        else:
            context = self.standard(q, k, v)
        return self.out(context.transpose(1, 2).reshape(b, s, -1))

    def standard(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute attention with separate operators, which save the probabilities for backward.

        The query and the result have the shape (samples, heads, tokens, features). Key and value
        can have fewer heads.
        """
        if (times := q.shape[1] // k.shape[1]) > 1:
            k, v = (x.repeat_interleave(times, dim=1) for x in (k, v))
        s = q.shape[-2]
        ahead = torch.full((s, s), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
        scores = q @ k.mT * self.head_dim**-0.5 + ahead  # (b, a, s, s)
        return scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype) @ v


class GatedFeedForward(nn.Module):
    """Gated feed-forward network: down(silu(gate(x)) * up(x)).

    The linear layers `gate` and `up` map `hidden` features to `feedforward` features, and the
    linear layer `down` maps back.

    Source: Shazeer 2020, arXiv:2002.05202.
    """

    def __init__(self, hidden: int, feedforward: int, bias: bool):
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, feedforward, bias=bias) for _ in range(2))
        self.down = nn.Linear(feedforward, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Mixture of experts, each of which is a gated feed-forward network: (b, s, h) -> (b, s, h).

    The input has b samples of s tokens with h features. Each expert chooses the tokens with the
    highest scores, and all experts choose the same number of tokens. Therefore, all shapes are
    static. In Mixtral, in contrast, the tokens choose their experts. Bytes and FLOPs of this module
    equal those of a Mixtral whose router sends the same number of tokens to each expert.

    Args:
        hidden: Features per token (h).
        feedforward: Width of each expert.
        experts: Number of experts.
        used: Number of experts per token, on average.

    Source: Zhou et al. 2022, arXiv:2202.09368 (experts choose tokens); Jiang et al. 2024,
    arXiv:2401.04088 (Mixtral).
    """

    def __init__(self, hidden: int, feedforward: int, experts: int, used: int):
        super().__init__()
        if used > experts:
            raise ValueError(
                f"num_experts_per_tok must be at most {experts}, the number of experts, got {used}"
            )
        self.used, self.router = used, nn.Linear(hidden, experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * feedforward, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, feedforward))
        for weight in (self.gate_up, self.down):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)  # (b s, h)
        shares = self.router(tokens).softmax(-1, dtype=torch.float32).to(x.dtype)  # (b s, e)
        count = -(-len(tokens) * self.used // len(self.gate_up))  # tokens per expert
        shares, chosen = shares.t().topk(count)  # (e, count)
        gate, up = (tokens[chosen] @ self.gate_up.mT).chunk(2, dim=-1)
        out = (F.silu(gate) * up) @ self.down.mT * shares[..., None]  # (e, count, h)
        return (
            torch.zeros_like(tokens).index_add(0, chosen.flatten(), out.flatten(0, 1)).view(x.shape)
        )


class LlamaLayer(nn.Module):
    """Pre-norm layer with attention and a feed-forward network: (b, s, h) -> (b, s, h).

    The input has b samples of s tokens with h features. Attention and feed-forward network each
    normalize their input with an `RMSNorm` and have a residual connection.

    Args:
        hidden: Features per token (h).
        attention: The attention module.
        feedforward: The feed-forward network, or a mixture of experts.
    """

    def __init__(self, hidden: int, attention: GroupedAttention, feedforward: nn.Module):
        super().__init__()
        self.norm1, self.attention = RMSNorm(hidden), attention
        self.norm2, self.feedforward = RMSNorm(hidden), feedforward

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feedforward(self.norm2(x))


class Llama(nn.Module):
    """Decoder with the architecture of Llama, Mistral, Mixtral or Qwen: tokens (b, s) -> (b, s, v).

    The result contains the logits of b samples of s tokens, for a vocabulary of v tokens. Norms,
    softmax and loss are computed in fp32, whatever the dtype of the parameters is.

    Args:
        vocabulary: Number of different tokens (v).
        hidden: Features per token.
        layers: Number of layers.
        heads: Number of query heads.
        kv_heads: Number of key heads, which is also the number of value heads. It must divide
            `heads`.
        head_dim: Features per head.
        feedforward: Width of the feed-forward networks.
        experts: Number of experts per layer; 0 for a single feed-forward network.
        experts_used: Number of experts per token, on average.
        qkv_bias: Whether the projections to queries, keys and values have biases.
        out_bias: Whether the output projection of the attention has a bias.
        feedforward_bias: Whether the feed-forward networks have biases; ignored with experts.
        head_norms: Whether the queries and keys of each head are normalized, as in Qwen3.
        tied: Whether the output head uses the weight of the token embedding.
        seed: Seed of the random weights.

    Source: Touvron et al. 2023, arXiv:2302.13971, and its code.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        hidden: int,
        layers: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        feedforward: int,
        experts: int = 0,
        experts_used: int = 0,
        qkv_bias: bool = False,
        out_bias: bool = False,
        feedforward_bias: bool = False,
        head_norms: bool = False,
        tied: bool = False,
        seed: int = 0,
    ):
        super().__init__()
        biases = {"qkv_bias": qkv_bias, "out_bias": out_bias, "head_norms": head_norms}

        def layer() -> LlamaLayer:
            attention = GroupedAttention(hidden, heads, kv_heads, head_dim, **biases)
            if experts:
                return LlamaLayer(
                    hidden, attention, Experts(hidden, feedforward, experts, experts_used)
                )
            return LlamaLayer(
                hidden, attention, GatedFeedForward(hidden, feedforward, feedforward_bias)
            )

        with seed_generators(seed):
            self.tokens = nn.Embedding(vocabulary, hidden)
            nn.init.normal_(self.tokens.weight, std=0.02)
            self.layers = nn.ModuleList(layer() for _ in range(layers))
            self.norm = RMSNorm(hidden)
            self.head = nn.Linear(hidden, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)  # (b, s, h)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # (b, s, v)

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the mean cross-entropy of predicting each next token, as a scalar.

        Args:
            tokens: Tokens of shape (samples, sequence + 1). The last token of each sample is only a
                target.
        """
        total, count = self.loss_sum(tokens)
        return total / count

    def loss_sum(self, tokens: Tensor) -> tuple[Tensor, int]:
        """Return the summed cross-entropy of all predicted tokens, and the number of these tokens.

        Args:
            tokens: Tokens of shape (samples, sequence + 1). The last token of each sample is only a
                target.
        """
        logits, targets = self(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten()
        return F.cross_entropy(logits, targets, reduction="sum"), targets.numel()
