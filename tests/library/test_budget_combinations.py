"""Gradients, FLOPs and dropout of recipes that contain every pair of values of two techniques.

Gradients are compared with autograd's in float64. `test_budget_estimate_equals_run` runs
`OPTION_PAIRS`, and all of `TABLE` on a GPU."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from all_pairs import rows
from estimate_checks import feasible
from third_party_models import VOCABULARY, WIDTH, Encoder, Tower, adapted, sentences
from third_party_models import Decoder as Grouped
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from course_lib.budget import Recipe, build, estimate, train_step
from course_lib.budget.optimizers import OPTIMIZERS
from course_lib.models import Decoder, random_tokens, seed_generators

SIZES = {"vocabulary": 61, "hidden": 32, "heads": 4, "layers": 3, "sequence": 24}
decoder, tokens = partial(Decoder, **SIZES), partial(random_tokens, 5, 24, 61)
samples = partial(sentences, 5)


def frozen():
    model = decoder(tied=False)
    model.tokens.requires_grad_(False)
    return model


MODELS = {
    "decoder": (decoder, tokens),
    "frozen embedding": (frozen, tokens),
    "dropout": (partial(decoder, dropout=0.1), tokens),
    "encoder": (Encoder, samples),
    "encoder without a mask": (partial(Encoder, causal=False), samples),
    "grouped queries": (Grouped, samples),
    "adapters": (adapted, samples),
}
CHOICES = {
    "model": tuple(MODELS),
    "precision": ("fp32", "bf16", None),
    # `test_budget_optimizers` runs Muon, which updates only some parameters, with a model of its
    # own. One more value would change the rows that were measured on a GPU.
    "optimizer": tuple(
        name for name, row in OPTIMIZERS.items() if row.load_base is None and row.rest is None
    ),
    "update": ("loop", "foreach", "fused"),
    "offload_optimizer": (0.0, 0.5, 1.0),
    "page_bytes": (Recipe.page_bytes, 30_000),
    "attention": ("standard", "flash", None),
    "checkpoint": ("none", "layers", "first", "selective", "segments", "optimal"),
    "offload_activations": (False, True),
    "copies": (None, (0, 2), (3, 1)),
    "head_chunk": (None, 7),
    "in_backward": (False, True),
    "accumulate": (None, "fp32"),
    "micro_batches": (1, 2, 3, 5),  # five samples: 3 and 2; 2, 2 and 1; one each
}


def recipe_of(row):
    fields = {name: value for name, value in row.items() if name not in ("model", "copies")}
    if row["checkpoint"] == "first":
        fields |= {"checkpoint": "layers", "first_blocks": 2}
    elif row["checkpoint"] == "segments":
        fields["segments"] = 2
    elif row["checkpoint"] == "optimal":
        fields["schedule_bytes"] = 1  # `feasible` replaces it by a feasible number
    if row["copies"]:
        fields |= dict(zip(("prefetch", "in_flight"), row["copies"], strict=True))
    return Recipe(**fields, min_bytes=1000 if row["offload_activations"] else Recipe.min_bytes)


def is_valid(row):
    if row["copies"] and not row["offload_activations"]:
        return False
    if row["model"] == "dropout" and row["attention"] == "flash":
        return False
    # segments of a model's own blocks keep their inputs on the device
    chained = row["checkpoint"] == "segments" and MODELS[row["model"]][1] is samples
    if chained and row["offload_activations"]:
        return False
    try:
        recipe_of(row)
    except ValueError:
        return False
    return True


ROWS = rows(CHOICES, is_valid)
TABLE = [(row["model"], recipe_of(row)) for row in ROWS]
#: Fewer rows, which contain every pair of options, but not every option with every model. Their
#: chunks are larger, since an estimate takes time for each operator.
OPTION_PAIRS = [
    (row["model"], recipe_of({**row, "head_chunk": row["head_chunk"] and 20}))
    for row in rows(CHOICES, is_valid, draws=20_000, unpaired="model")
]


@pytest.mark.parametrize("recipe", [r for name, r in TABLE if name == "decoder"][::3], ids=repr)
def test_estimated_flops_equal_flops_counted_by_pytorch(recipe):
    recipe = feasible(decoder, tokens, recipe)
    model, optimizer = build(decoder, recipe, state=True)  # outside the counter
    with FlopCounterMode(display=False) as counter:
        train_step(model, optimizer, tokens(), recipe)
    assert estimate(decoder, tokens, recipe).flops == counter.get_total_flops() > 0


# ---- the gradient


def gradients_of(make_model, batch, recipe, **options):
    """Return the gradients that SGD gets in a step, the result of the step, and the model.

    Assert that each parameter is updated at most once.
    """
    recipe = replace(recipe, optimizer="sgd")
    model, optimizer = build(make_model, recipe, lr=0.0)
    names, gradients = {p: name for name, p in model.named_parameters()}, {}

    def record(optimizer, *_):
        updated = [p for group in optimizer.param_groups for p in group["params"]]
        found = {names[p]: p.grad.clone() for p in updated if p.grad is not None}
        assert not found.keys() & gradients.keys()
        gradients.update(found)

    optimizer.register_step_pre_hook(record)
    result = train_step(model, optimizer, batch, recipe, **options)
    assert result.stepped and all(p.grad is None for p in model.parameters())
    return gradients, result, model


def plain_gradients(make_model, batch, loss_sum=None, dtype=torch.float32):
    """Return the gradients and the mean loss as autograd alone computes them in float64."""
    model = make_model().to(dtype).double()
    if isinstance(batch, dict):
        batch = {
            key: x.double() if torch.is_tensor(x) and x.is_floating_point() else x
            for key, x in batch.items()
        }
    total, weight = loss_sum(model, batch) if loss_sum else model.loss_sum(batch)
    (total / weight).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients, (total / weight).item()


def distance(found, gradients):
    difference = sum((found[name].double() - gradients[name]).square().sum() for name in gradients)
    return (difference / sum(g.square().sum() for g in gradients.values())).sqrt().item()


def assert_plain(make_model, batch, recipe, expected, **options):
    """Assert that a step has these gradients and this loss, and return its model."""
    gradients, loss = expected
    found, result, model = gradients_of(make_model, batch, recipe, **options)
    assert found.keys() == gradients.keys()
    for name, gradient in found.items():
        assert_close(gradient.double(), gradients[name], rtol=2e-4, atol=1e-6)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    return model


@cache
def plain(name, dtype=torch.float32):
    make_model, make_batch = MODELS[name]
    return plain_gradients(make_model, make_batch(), dtype=dtype)


@cache
def error_in_bf16(name):
    """Return the distance of the plain step's gradients in bf16 from those in float64."""
    make_model, make_batch = MODELS[name]
    found, *_ = gradients_of(make_model, make_batch(), Recipe("bf16"))
    return distance(found, plain(name, torch.bfloat16)[0])


@pytest.mark.filterwarnings("ignore:no activation was moved")
@pytest.mark.parametrize(
    ("name", "recipe"),
    # the float64 step draws other random numbers for dropout
    [(name, recipe) for name, recipe in TABLE if name != "dropout"],
    ids=repr,
)
def test_gradient_of_each_recipe_equals_gradient_of_baseline(name, recipe):
    make_model, make_batch = MODELS[name]
    recipe = feasible(make_model, make_batch, recipe)
    if recipe.precision == "bf16":
        gradients, loss = plain(name, torch.bfloat16)
        found, result, model = gradients_of(make_model, make_batch(), recipe)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert found.keys() == gradients.keys()
        assert distance(found, gradients) < 3 * error_in_bf16(name) < 0.15
        assert result.loss == pytest.approx(loss, rel=0.01)
        return
    assert_plain(make_model, make_batch(), recipe, plain(name))


class DroppingHead(nn.Linear):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.3, self.training)


def with_dropping_head():
    model = Encoder()
    with seed_generators(9):
        model.head = DroppingHead(WIDTH, VOCABULARY)
    return model


OFFLOAD = {"offload_activations": True, "min_bytes": 1000}
RECOMPUTING = [
    Recipe(checkpoint="layers"),
    Recipe(checkpoint="selective"),
    Recipe(checkpoint="segments", segments=2),
    Recipe(**OFFLOAD),
]
CHUNKED = [*RECOMPUTING, Recipe(head_chunk=9)]
BY_STAGES = [
    Recipe(checkpoint="segments", segments=3, **OFFLOAD),
    Recipe(checkpoint="optimal", schedule_bytes=1),
]


@pytest.mark.parametrize(
    ("make_model", "make_batch", "recipes"),
    [
        (partial(decoder, dropout=0.2), tokens, [*RECOMPUTING, *BY_STAGES]),
        (partial(Grouped, dropout=0.2), samples, CHUNKED),
        (partial(Tower, dropout=0.4), samples, BY_STAGES),
        (with_dropping_head, samples, [Recipe(head_chunk=1000)]),  # one chunk draws as the whole
    ],
    ids=["stages", "functions", "own stages", "head"],
)
def test_recomputation_uses_dropout_masks_of_forward_pass(make_model, make_batch, recipes):
    def gradients(recipe):
        recipe = feasible(make_model, make_batch, recipe)
        torch.manual_seed(7)
        return gradients_of(make_model, make_batch(), recipe)[0]

    expected = gradients(Recipe())
    for recipe in recipes:
        assert_close(gradients(recipe), expected, rtol=1e-4, atol=1e-7)
