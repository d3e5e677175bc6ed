"""Tests of the formulas for training state and activations against metered steps."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from hypothesis_settings import given, settings, st
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from training_steps import at_end, metered, train

from course_lib.memory import (
    attention_saved_bytes,
    saved_tensors,
    training_state_bytes,
    transformer_activation_bytes,
)
from course_lib.models import DecoderLayer, Dropout, deep_mlp


def test_training_state_formula_gives_published_bytes_per_parameter():
    assert training_state_bytes(1, "mixed-adam") == {"parameter": 2, "gradient": 2, "optimizer": 12}
    assert sum(training_state_bytes(7e9, "fp32-sgd").values()) == 8 * 7_000_000_000


@pytest.mark.parametrize(
    ("recipe", "optimizer", "step_counts"),
    [
        ("fp32-momentum", lambda p: torch.optim.SGD(p, momentum=0.9), 0),
        ("fp32-adam", torch.optim.Adam, 4 * 4),
    ],
)
def test_training_state_formula_equals_measured_bytes_of_step(recipe, optimizer, step_counts):
    model, optimizer, step = train(deep_mlp(2, 32), torch.ones(1, 32), optimizer=optimizer)
    meter = metered(step, model, optimizer)
    expected = training_state_bytes(sum(p.numel() for p in model.parameters()), recipe)
    expected["optimizer"] += step_counts
    assert {name: at_end(meter)[name] for name in expected} == expected


# PyTorch's dropout, whose mask has the dtype of the activations.
WIDE_DROPOUT = patch.object(Dropout, "forward", lambda self, x: F.dropout(x, self.p, self.training))


@settings(max_examples=20, derandomize=True, database=None)
@given(
    s=st.integers(2, 12),
    b=st.integers(1, 3),
    a=st.integers(1, 4),
    per_head=st.integers(2, 6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    norm_first=st.booleans(),
    mask=st.sampled_from(["none", "bool", "wide"]),
)
def test_activation_formula_equals_saved_bytes_of_decoder_layer(
    s, b, a, per_head, dtype, norm_first, mask
):
    h, e = a * per_head, dtype.itemsize
    dropout = 0.0 if mask == "none" else 0.1
    layer = DecoderLayer(h, a, norm_first=norm_first, dropout=dropout).to(dtype)
    with WIDE_DROPOUT if mask == "wide" else nullcontext():
        found = saved_tensors(layer, torch.randn(b, s, h, dtype=dtype))
    shape = {"sequence": s, "batch": b, "hidden": h, "heads": a, "dtype_bytes": e}
    masks = {"none": 0, "bool": 1, "wide": e}
    assert found.total_bytes == transformer_activation_bytes(
        **shape, mask_bytes=masks[mask], statistic_bytes=e
    )


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activation_formula_equals_published_formula(recompute):
    s, b, h, a = 2048, 4, 4096, 32
    shape = {"sequence": s, "batch": b, "hidden": h, "heads": a}
    core = 5 * a * s * s * b if recompute == "none" else 0
    expected = (2 if recompute == "full" else 34) * s * b * h + core
    found = transformer_activation_bytes(**shape, layers=7, recompute=recompute)
    assert found == 7 * expected


def test_fused_attention_saves_no_attention_probabilities():
    shape = {"sequence": 64, "batch": 2, "heads": 8, "head_dim": 16, "kv_heads": 2}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        found = saved_tensors(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
            *(torch.randn(2, n, 64, 16, requires_grad=True) for n in (8, 2, 2)),
        )
    expected = attention_saved_bytes(**shape, kind="flash")
    names = {"query": "q", "key": "k", "value": "v", "output": "o", "logsumexp": "lse"}
    saved = {row.argument: row.bytes for row in found}
    assert saved == {name: expected[short] for name, short in names.items()}
    halved = attention_saved_bytes(**shape, kind="flash", dtype_bytes=2)
    assert halved == {name: count // 2 for name, count in expected.items()} | {
        "lse": expected["lse"]  # in fp32
    }
