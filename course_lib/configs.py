"""Models with the shapes of a Hugging Face `config.json`, built from plain modules.

Nothing is downloaded, and transformers is not imported. Every parameter has the shape of the
published one, so their number is the published number. The bytes that a step saves for backward are
those of the plain formulas below. They are within 1% of what transformers saves with eager
attention; fused kernels save less. Attention is causal over all tokens (no sliding window), there
is no dropout, the rotation of positions is not scaled, and routers are assumed to balance their
experts.

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

from course_lib._check import any_of, describe, kind, must_be, whole
from course_lib.models import Attention, Decoder, Dropout, seed_generators

LLAMAS = ("llama", "mistral", "mixtral", "qwen2", "qwen3")
KNOWN = ("gpt2", *LLAMAS)


def read_config(file: Path | str) -> dict[str, Any]:
    """Read a `config.json`.

    Raises:
        ValueError: The file cannot be read, is not JSON (the message gives line and column), or
            does not hold a JSON object.
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
        config: Its `model_type` must be one of `KNOWN`.
        sequence: Number of tokens per sample that the model must accept.

    Raises:
        ValueError: The kind of model is unknown, a size is missing or invalid, or the model accepts
            only shorter sequences.
    """
    model, sizes = shape_of(config, sequence)
    return model(**sizes, seed=seed)


def shape_of(
    config: Mapping[str, Any], sequence: int
) -> tuple[type[Decoder | Llama], dict[str, Any]]:
    """Check a configuration; return the class and the arguments of its model, except the seed."""
    name = config.get("model_type")
    if name not in KNOWN:
        raise ValueError(
            f"model_type must be {any_of(map(repr, KNOWN))}, got {name!r}; the shapes of"
            " other models are not known here"
        )
    sequence = whole("sequence", sequence, 1)
    longest = _size(
        config, "n_positions" if name == "gpt2" else "max_position_embeddings", sequence
    )
    if sequence > longest:
        raise ValueError(
            f"sequence must be at most {longest} (the limit of the config), got {sequence}"
        )
    return (Decoder, _gpt2(config)) if name == "gpt2" else (Llama, _llama(config, name))


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"config must contain {name} for a {config['model_type']} model, got none")
    return whole(name, value, 1)


def _flag(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = config.get(name)
    return kind(name, default if value is None else value, bool, "true or false")


def _expect(config: Mapping[str, Any], name: str, *values: Any) -> None:
    if config.get(name, values[0]) not in values:
        raise ValueError(must_be(name, any_of(map(repr, values)), repr(config[name])))


def _head_width(config: Mapping[str, Any], width: str, parts: str, otherwise: str = "") -> int:
    """Return the number of features of a head."""
    hidden, heads = _size(config, width), _size(config, parts)
    if hidden % heads:
        raise ValueError(
            f"{width} must be a multiple of {parts} = {heads}{otherwise}, got {hidden}"
        )
    return hidden // heads


def _gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {"vocabulary": "vocab_size", "hidden": "n_embd", "heads": "n_head", "layers": "n_layer"}
    sizes = {
        name: _size(config, key) for name, key in (sizes | {"sequence": "n_positions"}).items()
    }
    _head_width(config, "n_embd", "n_head")
    _expect(config, "n_inner", None, 4 * sizes["hidden"])
    return {**sizes, "tied": _flag(config, "tie_word_embeddings", True)}


def _llama(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    _expect(config, "hidden_act", "silu")
    heads, bias = _size(config, "num_attention_heads"), _flag(config, "attention_bias")
    if config.get("head_dim") is not None or name == "qwen3":
        head_dim = _size(config, "head_dim", 128)
    else:
        head_dim = _head_width(
            config, "hidden_size", "num_attention_heads", " unless head_dim is set"
        )
    if head_dim % 2:
        raise ValueError(
            f"head_dim must be even, got {head_dim}; the rotation of positions acts on"
            " pairs of features"
        )
    return {
        "vocabulary": _size(config, "vocab_size"),
        "hidden": _size(config, "hidden_size"),
        "layers": _size(config, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": _size(config, "num_key_value_heads", heads),
        "head_dim": head_dim,
        "feedforward": _size(config, "intermediate_size"),
        "experts": _size(config, "num_local_experts") if name == "mixtral" else 0,
        "experts_used": _size(config, "num_experts_per_tok") if name == "mixtral" else 0,
        "qkv_bias": bias or name == "qwen2",
        "out_bias": bias,
        "feedforward_bias": _flag(config, "mlp_bias"),
        "head_norms": name == "qwen3",
        "tied": _flag(config, "tie_word_embeddings"),
    }


# ---- the parts


class RMSNorm(nn.Module):
    """Root-mean-square normalization: x / sqrt(mean(x²)) in fp32, times a weight.

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
    """Rotate each pair of features by an angle proportional to the position: (..., s, d).

    Source: Su et al. 2021, arXiv:2104.09864. The two features of a pair are d/2 apart, as in
    Hugging Face's Llama.
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
    """Causal attention with query heads that share key and value heads: (b, s, h) -> (b, s, h).

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
        if (times := q.shape[1] // k.shape[1]) > 1:
            k, v = (x.repeat_interleave(times, dim=1) for x in (k, v))
        s = q.shape[-2]
        ahead = torch.full((s, s), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
        scores = q @ k.mT * self.head_dim**-0.5 + ahead  # (b, a, s, s)
        return scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype) @ v


class GatedFeedForward(nn.Module):
    """Gated feed-forward network: down(silu(gate(x)) * up(x)).

    Source: Shazeer 2020, arXiv:2002.05202.
    """

    def __init__(self, hidden: int, feedforward: int, bias: bool):
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, feedforward, bias=bias) for _ in range(2))
        self.down = nn.Linear(feedforward, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Gated feed-forward networks, each for an equal number of tokens: (b, s, h) -> (b, s, h).

    Each expert chooses the tokens with the highest scores, an equal number each. Shapes are
    therefore static, and bytes and FLOPs are those of a balanced router.

    Source: Zhou et al. 2022, arXiv:2202.09368 (experts choose); Jiang et al. 2024, arXiv:2401.04088
    (Mixtral, where tokens choose).
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
    """Attention and a feed-forward network, each with a norm before and a residual connection."""

    def __init__(self, hidden: int, attention: GroupedAttention, feedforward: nn.Module):
        super().__init__()
        self.norm1, self.attention = RMSNorm(hidden), attention
        self.norm2, self.feedforward = RMSNorm(hidden), feedforward

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feedforward(self.norm2(x))


class Llama(nn.Module):
    """A decoder like Llama and its relatives: tokens (b, s) -> logits (b, s, v).

    Norms, softmax and loss are in fp32, whatever the dtype of the parameters.

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
        """Return the mean cross-entropy of each next token: (b, s + 1) -> scalar."""
        total, count = self.loss_sum(tokens)
        return total / count

    def loss_sum(self, tokens: Tensor) -> tuple[Tensor, int]:
        """Return the sum of the cross-entropies, and the number of tokens in it."""
        logits, targets = self(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten()
        return F.cross_entropy(logits, targets, reduction="sum"), targets.numel()
