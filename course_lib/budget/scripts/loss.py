"""Lines of a script that compute the loss of a batch."""

from __future__ import annotations

from torch import nn

from course_lib._check import describe
from course_lib._hugging_face_losses import has_method
from course_lib.budget.stages import may_draw, own_stages, runs_stages
from course_lib.symbolic import symbolic

from .lines import Lines
from .settings import refuse_statistics


def is_mean(lines: Lines) -> bool:
    """Return whether `loss` computes a mean, whose weight a single batch does not need."""
    if lines.workload.loss_sum is not None or runs_stages(lines.model, lines.recipe):
        return False
    return not has_method(lines.model, "loss_sum")


def loss(lines: Lines) -> tuple[list[str], str]:
    """Return lines that prepare the loss of `batch`, and the expression that computes it.

    The expression is a mean if `is_mean` is true, and otherwise (sum of losses, weight).
    """
    if lines.workload.loss_sum is not None:
        return [], "make_model.loss_sum(model, batch)"
    if runs_stages(lines.model, lines.recipe):
        return _segments(lines)
    for method in ("loss_sum", "loss"):
        if has_method(lines.model, method):
            return [], f"model.{method}(batch)"
    return [], "model(**batch).loss"


def _segments(lines: Lines) -> tuple[list[str], str]:
    """Return the loss of a model that defines its own chain of stages."""
    model, recipe = lines.model, lines.recipe
    with symbolic():
        stages = own_stages(model)(lines.batch)
    modules = [stage for stage in stages if isinstance(stage, nn.Module)]
    refuse_statistics(modules, recipe.checkpoint)
    trained = [
        stage in modules and next(stage.parameters(), None) is not None for stage in stages[:2]
    ]
    if trained != [False, True]:
        raise ValueError(
            "checkpoint='segments' in a script needs a model of whose stages only the first is a"
            " function without parameters, which returns the inputs of a batch, got"
            f" {describe(model)}"
        )
    lines.use("torch.utils.checkpoint", "checkpoint_sequential")
    random = "" if may_draw(model) else ", preserve_rng_state=False"
    return [
        "inputs, embed, *blocks, head = model.stages(batch)",
        "x = embed(inputs(batch))",
    ], f"head(checkpoint_sequential(blocks, {recipe.segments}, x, use_reentrant=False{random}))"


def loss_sum(lines: Lines, parts: int) -> tuple[list[str], str]:
    """Return lines that define the loss of one of `parts` batches, and the expression of it.

    The loss is a function of model and batch that returns (sum of losses, weight).
    """
    prepared, expression = loss(lines)
    if is_mean(lines) and has_method(lines.model, "loss"):
        expression = f"{expression}, 1"  # the batch is not split, so any weight will do
    elif is_mean(lines):
        lines.use("course_lib.budget", "hugging_face_loss")
        expression = f"hugging_face_loss(model, batch, micro_batches={parts})"
    around = contexts(lines)
    if not around and lines.workload.loss_sum is not None:
        return [], "make_model.loss_sum"
    if not around and expression == "model.loss_sum(batch)" and _is_of_class(lines.model):
        return [], "type(model).loss_sum"
    indent = " " * (8 if around else 4)
    return [
        "",
        "def loss_sum(model, batch):",
        *([f"    with {', '.join(around)}:"] if around else []),
        *(indent + each for each in [*prepared, f"return {expression}"]),
        "",
    ], "loss_sum"


def _is_of_class(model: nn.Module) -> bool:
    """Return whether `loss_sum` is a method of the model's class."""
    return hasattr(type(model), "loss_sum") and "loss_sum" not in vars(model)


def contexts(lines: Lines) -> list[str]:
    """Return the context managers that surround the computation of the loss."""
    recipe, found = lines.recipe, []
    if recipe.head_chunk is not None:
        lines.use("course_lib.budget", "chunked_head")
        found.append(f"chunked_head(model, {recipe.head_chunk})")
    if recipe.offload_activations:
        lines.use("course_lib.offload", "offload_activations")
        changed = recipe.changed_fields()
        names = [name for name in ("min_bytes", "prefetch", "in_flight") if name in changed]
        options = ["keep=[model]", *(f"{name}={changed[name]}" for name in names)]
        found.append(f"offload_activations({', '.join(options)})")
    return found
