"""Formulas for training state and activations, compared with the meter and with `saved_tensors`."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from training_steps import at_end, train

from course_lib.memory import (
    MemoryMeter,
    attention_saved_bytes,
    saved_tensors,
    training_state_bytes,
    transformer_activation_bytes,
)
from course_lib.models import DecoderLayer, Dropout, deep_mlp


def test_mixed_precision_adam_takes_16_bytes_a_parameter():
    assert training_state_bytes(1, "mixed-adam") == {"parameter": 2, "gradient": 2, "optimizer": 12}
    totals = {name: sum(training_state_bytes(7_000_000_000, name).values()) for name in RECIPES}
    assert totals == {name: 7_000_000_000 * each for name, each in RECIPES.items()}
    assert training_state_bytes(7e9, "fp32-adam") == training_state_bytes(
        7_000_000_000, "fp32-adam"
    )


RECIPES = {"fp32-sgd": 8, "fp32-momentum": 12, "fp32-adam": 16, "mixed-adam": 16}


@pytest.mark.parametrize(
    ("recipe", "make"),
    [
        ("fp32-momentum", lambda p: torch.optim.SGD(p, momentum=0.9)),
        ("fp32-adam", torch.optim.Adam),
    ],
)
def test_a_recipes_bytes_are_those_that_the_meter_finds(recipe, make):
    model, optimizer, step = train(deep_mlp(2, 32), torch.ones(1, 32), optimizer=make)
    with MemoryMeter(model, optimizer) as meter:
        step()
    expected = training_state_bytes(sum(p.numel() for p in model.parameters()), recipe)
    expected["optimizer"] += 4 * 4 if recipe == "fp32-adam" else 0  # Adam's step counts
    assert {name: at_end(meter)[name] for name in expected} == expected


def layer_saves(s, b, h, a, dtype, **options):
    layer = DecoderLayer(h, a, **options).to(dtype)
    return saved_tensors(layer, torch.randn(b, s, h, dtype=dtype)).total_bytes


def test_a_layers_formula_is_exact_for_any_shape():
    hypothesis = pytest.importorskip("hypothesis")
    shapes = hypothesis.strategies

    @hypothesis.settings(max_examples=20, deadline=None, derandomize=True, database=None)
    @hypothesis.given(
        s=shapes.integers(2, 12),
        b=shapes.integers(1, 3),
        a=shapes.integers(1, 4),
        per_head=shapes.integers(2, 6),
        dtype=shapes.sampled_from([torch.float32, torch.bfloat16]),
        norm_first=shapes.booleans(),
        dropout=shapes.sampled_from([0.0, 0.1]),
    )
    def exact(s, b, a, per_head, dtype, norm_first, dropout):
        h = a * per_head
        expected = transformer_activation_bytes(
            sequence=s,
            batch=b,
            hidden=h,
            heads=a,
            dtype_bytes=dtype.itemsize,
            mask_bytes=1 if dropout else 0,
            statistic_bytes=dtype.itemsize,
        )
        assert layer_saves(s, b, h, a, dtype, norm_first=norm_first, dropout=dropout) == expected

    exact()


def test_the_formula_is_that_of_the_paper():
    for s, b, h, a in ((2048, 4, 4096, 32), (1024, 1, 768, 12), (128, 2, 64, 1)):
        shape = {"sequence": s, "batch": b, "hidden": h, "heads": a}
        assert transformer_activation_bytes(**shape) == s * b * h * 34 + 5 * a * s * s * b
        assert transformer_activation_bytes(**shape, recompute="selective") == 34 * s * b * h
        assert transformer_activation_bytes(**shape, recompute="full") == 2 * s * b * h
        for recompute in ("none", "selective", "full"):
            one = transformer_activation_bytes(**shape, recompute=recompute)
            assert transformer_activation_bytes(**shape, layers=7, recompute=recompute) == 7 * one


def test_masks_in_the_activations_dtype_cost_an_eighth_more(monkeypatch):
    s, b, h, a = 512, 1, 512, 8
    native = layer_saves(s, b, h, a, torch.bfloat16, dropout=0.1)
    monkeypatch.setattr(Dropout, "forward", lambda self, x: F.dropout(x, self.p, self.training))
    wide = layer_saves(s, b, h, a, torch.bfloat16, dropout=0.1)
    shape = {"sequence": s, "batch": b, "hidden": h, "heads": a}
    assert (
        native
        == transformer_activation_bytes(**shape, statistic_bytes=2)
        == s * b * h * (34 + 5 * 8) + 8 * s * b
    )
    assert wide == transformer_activation_bytes(**shape, statistic_bytes=2, mask_bytes=2)
    assert wide / native - 1 == pytest.approx(0.1351, abs=1e-4)


def standard_core(q, k, v):
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(dim=-1) @ v


def heads_of(batch, heads, sequence, head_dim, kv_heads=None):
    q = torch.randn(batch, heads, sequence, head_dim, requires_grad=True)
    k, v = (
        torch.randn(batch, kv_heads or heads, sequence, head_dim, requires_grad=True)
        for _ in range(2)
    )
    return q, k, v


def test_standard_attention_keeps_q_k_v_and_p_but_not_s():
    shape = {"sequence": 512, "batch": 1, "heads": 12, "head_dim": 64}
    q, k, v = heads_of(1, 12, 512, 64)
    found = saved_tensors(standard_core, q, k, v)
    expected = attention_saved_bytes(**shape)
    assert expected == {"q": 1_572_864, "k": 1_572_864, "v": 1_572_864, "p": 12_582_912}
    assert found.total_bytes == sum(expected.values()) == 17_301_504
    # P, and no S
    assert sum(row.shape == (1, 12, 512, 512) for row in found if row.shared_with is None) == 1


def test_fused_attention_keeps_no_probabilities():
    shape = {"sequence": 512, "batch": 1, "heads": 12, "head_dim": 64, "kind": "flash"}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        found = saved_tensors(F.scaled_dot_product_attention, *heads_of(1, 12, 512, 64))
    expected = attention_saved_bytes(**shape)
    assert found.total_bytes == sum(expected.values()) == 6_316_032
    assert attention_saved_bytes(**shape, dtype_bytes=2)["lse"] == expected["lse"]  # in fp32
    assert {row.argument: row.bytes for row in found} == {
        "query": expected["q"],
        "key": expected["k"],
        "value": expected["v"],
        "output": expected["o"],
        "logsumexp": expected["lse"],
    }


def test_grouped_query_attention_keeps_fewer_keys_and_values():
    expected = attention_saved_bytes(
        sequence=64, batch=2, heads=8, head_dim=16, kv_heads=2, kind="flash"
    )
    assert expected["k"] == expected["v"] == expected["q"] // 4
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        found = saved_tensors(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
            *heads_of(2, 8, 64, 16, 2),
        )
    assert found.total_bytes == sum(expected.values())
    standard = attention_saved_bytes(sequence=64, batch=2, heads=8, head_dim=16, kv_heads=2)
    assert standard == {"q": 65_536, "k": 16_384, "v": 16_384, "p": 2 * 8 * 64 * 64 * 4}
