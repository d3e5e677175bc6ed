"""Models by recipes that hold every pair of two techniques' values: the gradient is the plain one.

`test_estimate_equals_run` runs the same table."""

from dataclasses import replace
from functools import cache, partial

import pytest
from foreign_models import Decoder as Grouped
from foreign_models import Encoder, adapted, sentences
from measured import feasible
from pairwise import rows
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from course_lib.budget import Recipe, build, estimate, train_step
from course_lib.budget.optimizers import OPTIMIZERS
from course_lib.models import Decoder, random_tokens

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
LEVERS = {
    "model": tuple(MODELS),
    "precision": ("fp32", "bf16", None),
    "optimizer": tuple(name for name, row in OPTIMIZERS.items() if row.load_base is None),
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
    "micro_batches": (1, 2, 3, 5),  # of five samples: 3 and 2; 2, 2 and 1; one each
}


def recipe_of(row):
    fields = {name: value for name, value in row.items() if name not in ("model", "copies")}
    if row["checkpoint"] == "first":
        fields |= {"checkpoint": "layers", "first_blocks": 2}
    elif row["checkpoint"] == "segments":
        fields["segments"] = 2
    elif row["checkpoint"] == "optimal":
        fields["schedule_bytes"] = 1  # `feasible` gives more
    if row["copies"]:
        fields |= dict(zip(("prefetch", "in_flight"), row["copies"], strict=True))
    return Recipe(**fields, min_bytes=1000 if row["offload_activations"] else Recipe.min_bytes)


def goes_together(row):
    if row["copies"] and not row["offload_activations"]:
        return False
    if row["model"] == "dropout" and row["attention"] == "flash":
        return False
    # a model's blocks that form a chain hold their inputs themselves
    chained = row["checkpoint"] == "segments" and MODELS[row["model"]][1] is samples
    if chained and row["offload_activations"]:
        return False
    try:
        recipe_of(row)
    except ValueError:
        return False
    return True


TABLE = [(row["model"], recipe_of(row)) for row in rows(LEVERS, goes_together, seed=0)]


@pytest.mark.parametrize("recipe", [r for name, r in TABLE if name == "decoder"], ids=repr)
def test_flops_are_those_that_pytorch_counts(recipe):
    recipe = feasible(decoder, tokens, recipe)
    model, optimizer = build(decoder, recipe, state=True)  # which may count too
    with FlopCounterMode(display=False) as counter:
        train_step(model, optimizer, tokens(), recipe)
    assert estimate(decoder, tokens, recipe).flops == counter.get_total_flops() > 0


@cache
def plain(name):
    """Gradients by autograd alone in float64, the model's parameters, and its mean loss."""
    make_model, make_batch = MODELS[name]
    model = make_model().double()
    total, weight = model.loss_sum(make_batch())
    (total / weight).backward()
    named = dict(model.named_parameters())
    return {n: p.grad for n, p in named.items() if p.grad is not None}, named, total / weight


@pytest.mark.filterwarnings("ignore:no activation was moved")
@pytest.mark.parametrize(
    ("name", "recipe"),
    # those that are drawn anew would be others
    [(name, recipe) for name, recipe in TABLE if recipe.precision != "bf16" and name != "dropout"],
    ids=repr,
)
def test_the_gradient_is_the_plain_one_and_every_parameter_steps_once(name, recipe):
    make_model, make_batch = MODELS[name]
    gradients, before, loss = plain(name)
    recipe = replace(feasible(*MODELS[name], recipe), optimizer="sgd")
    model, optimizer = build(make_model, recipe, lr=1.0)
    names, seen = {p: name for name, p in model.named_parameters()}, []

    def look(optimizer, *_):
        own = [p for group in optimizer.param_groups for p in group["params"]]
        seen.extend((names[p], p.grad.clone()) for p in own if p.grad is not None)

    optimizer.register_step_pre_hook(look)
    result = train_step(model, optimizer, make_batch(), recipe)
    assert sorted(name for name, _ in seen) == sorted(gradients)
    for name, gradient in seen:
        assert_close(gradient.double(), gradients[name], rtol=2e-4, atol=1e-6)
    for name, p in model.named_parameters():
        stepped = before[name].detach() - gradients.get(name, 0)
        assert p.grad is None
        assert_close(p.double(), stepped, rtol=1e-4, atol=1e-5)
    assert result.stepped and result.loss == pytest.approx(loss.item(), rel=1e-5)
