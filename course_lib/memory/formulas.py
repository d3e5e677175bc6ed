"""Predict the memory of training by formulas, for comparison with measurements."""

from __future__ import annotations

from .. import _check

# Maps each recipe to its bytes per parameter for (weights, gradients, optimizer state).
_BYTES_PER_PARAMETER = {
    "fp32-sgd": (4, 4, 0),
    "fp32-momentum": (4, 4, 4),
    "fp32-adam": (4, 4, 8),  # the state is Adam's two moments
    "mixed-adam": (2, 2, 12),  # the state is fp32 master weights and two fp32 moments
}


def training_state_bytes(parameters: int, recipe: str) -> dict[str, int]:
    """Return the bytes of a model's weights, gradients and optimizer state in training.

    The batch size does not change these bytes.

    Args:
        parameters: Number of parameters.
        recipe: "fp32-sgd", "fp32-momentum" (SGD with momentum), "fp32-adam" or "mixed-adam". With
            "mixed-adam", weights and gradients have half precision, and the optimizer state
            consists of fp32 master weights and two fp32 moments. The total is 16 bytes per
            parameter.

    Returns:
        {"parameter": bytes, "gradient": bytes, "optimizer": bytes}

    Raises:
        TypeError, ValueError: `parameters` is not a positive whole number, or `recipe` is unknown.

    Source: Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054, section 3.1.

    Example:
        >>> training_state_bytes(7_000_000_000, "mixed-adam")
        {'parameter': 14000000000, 'gradient': 14000000000, 'optimizer': 84000000000}
    """
    (parameters,) = _checked_counts(parameters=parameters)
    bytes_per_parameter = _BYTES_PER_PARAMETER[
        _check.one_of("recipe", recipe, _BYTES_PER_PARAMETER)
    ]
    return dict(
        zip(
            ("parameter", "gradient", "optimizer"),
            (parameters * n for n in bytes_per_parameter),
            strict=True,
        )
    )


def transformer_activation_bytes(
    *,
    sequence: int,
    batch: int,
    hidden: int,
    heads: int,
    layers: int = 1,
    recompute: str = "none",
    dtype_bytes: int = 2,
    mask_bytes: int = 1,
    statistic_bytes: int = 0,
) -> int:
    """Return the bytes that the layers of a transformer save for backward, by a published formula.

    The layers have dropout, and a feed-forward network that is four times as wide as `hidden`. With
    the defaults the formula is s*b*h*(34 + 5*a*s/h) bytes per layer.

    Args:
        sequence: Tokens per sample (s).
        batch: Samples in the batch (b).
        hidden: Features per token (h).
        heads: Number of attention heads (a).
        layers: Number of layers.
        recompute: Activations that are recomputed in backward instead of being saved. With "none",
            all activations are saved. With "selective", the scores, the softmax and the dropout of
            attention are recomputed, and 34*s*b*h bytes per layer are saved. With "full", only the
            input of each layer is saved, which takes 2*s*b*h bytes per layer.
        dtype_bytes: Bytes of one element of an activation; 2 in half precision.
        mask_bytes: Bytes of one element of a dropout mask: 1 for `native_dropout`, `dtype_bytes`
            for `F.dropout` on a CPU, 0 without dropout.
        statistic_bytes: Bytes of one LayerNorm statistic (a mean or a reciprocal standard
            deviation). Each layer saves four statistics per token. The default is 0, because the
            paper omits them.

    Returns:
        Bytes of all layers, without embeddings and the output head.

    Raises:
        TypeError, ValueError: A count is not a positive whole number, `heads` does not divide
            `hidden`, or `recompute` is unknown.

    Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.
    """
    s, b, h, a = _checked_counts(sequence=sequence, batch=batch, hidden=hidden, heads=heads)
    layers, e = _checked_counts(layers=layers, dtype_bytes=dtype_bytes)
    m, statistic = _checked_counts(0, mask_bytes=mask_bytes, statistic_bytes=statistic_bytes)
    if h % a:
        raise ValueError(f"heads must be a divisor of hidden = {h}, got {a}")
    # Bytes per element of a tensor (s, b, h). The saved tensors are the input of the QKV
    # projection, the input of the output projection, Q, K, V, and the mask of the output's dropout.
    attention = 5 * e + m
    # Bytes per token: the output of softmax, its dropout mask, and the probabilities after dropout.
    core = a * s * ((2 * e + m) if m else e)
    # The inputs of both matrix products and of GELU, and the dropout mask.
    feed_forward = (1 + 4 + 4) * e + m
    norms = 2 * e
    kept = {
        "none": s * b * (h * (attention + feed_forward + norms) + core + 4 * statistic),
        "selective": s * b * (h * (attention + feed_forward + norms) + 4 * statistic),
        "full": s * b * h * e,
    }
    return layers * kept[_check.one_of("recompute", recompute, kept)]


def attention_saved_bytes(
    *,
    sequence: int,
    batch: int,
    heads: int,
    head_dim: int,
    dtype_bytes: int = 4,
    kv_heads: int | None = None,
    kind: str = "standard",
) -> dict[str, int]:
    """Return the bytes of each tensor that attention saves for backward.

    The projections before and after attention are not counted. Standard attention saves Q, K, V and
    the probabilities P. It does not save the scores S, because the gradient of softmax needs only
    the output of softmax. FlashAttention saves Q, K, V, the output O and one fp32 log-sum-exp per
    query and head.

    Args:
        sequence: Tokens per sample.
        batch: Samples in the batch.
        heads: Number of query heads.
        head_dim: Features per head.
        dtype_bytes: Bytes of one element of Q, K, V, P and O.
        kv_heads: Number of heads of K and V, for grouped-query attention. The default is `heads`.
        kind: "standard", or "flash" for FlashAttention.

    Returns:
        A dict from the name of each tensor to its bytes. The names are "q", "k", "v" and "p" for
        standard attention, and "q", "k", "v", "o" and "lse" for FlashAttention.

    Raises:
        TypeError, ValueError: A count is not a positive whole number, `kv_heads` does not divide
            `heads`, or `kind` is unknown.

    Source: Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691, section 3.1 for the
    log-sum-exp.
    """
    n, b, heads, d = _checked_counts(sequence=sequence, batch=batch, heads=heads, head_dim=head_dim)
    e, kv_heads = _checked_counts(
        dtype_bytes=dtype_bytes, kv_heads=heads if kv_heads is None else kv_heads
    )
    if heads % kv_heads:
        raise ValueError(f"kv_heads must be a divisor of heads = {heads}, got {kv_heads}")
    q, kv = b * heads * n * d * e, b * kv_heads * n * d * e
    kept = {
        "standard": {"q": q, "k": kv, "v": kv, "p": b * heads * n * n * e},
        "flash": {"q": q, "k": kv, "v": kv, "o": q, "lse": b * heads * n * 4},
    }
    return kept[_check.one_of("kind", kind, kept)]


def _checked_counts(least: int = 1, **counts: float) -> tuple[int, ...]:
    """Return the values of the keyword arguments as ints, or raise if one is not a whole number.

    A float such as 7e9 is accepted if it is a whole number. Each value must be at least `least`.
    """
    whole = (int(n) if isinstance(n, float) and n.is_integer() else n for n in counts.values())
    return tuple(_check.whole(name, n, least) for name, n in zip(counts, whole, strict=True))
