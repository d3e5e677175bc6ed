"""Lines of a training script that compute the loss of a batch.

The functions take a `Lines` object, the builder of the script. They return lines as text, and
register the imports of these lines with the builder.
"""

from __future__ import annotations

from torch import nn

from course_lib._check import describe
from course_lib._hugging_face_losses import has_method
from course_lib.budget.stages import may_draw, own_stages, runs_stages
from course_lib.symbolic import symbolic

from .lines import Lines
from .settings import reject_statistics


def loss_is_mean(lines: Lines) -> bool:
    """Return whether the loss in a script is a mean.

    Otherwise the loss is a pair (sum of losses, weight). The weight is the number by which the sum
    is divided, such as the number of tokens.

    Args:
        lines: Builder of the script.
    """
    if lines.workload.loss_sum is not None or runs_stages(lines.model, lines.recipe):
        return False
    return not has_method(lines.model, "loss_sum")


def loss_code(lines: Lines) -> tuple[list[str], str]:
    """Return the code that computes the loss of the variable `batch` in a script.

    The result is a pair (lines, expression). The lines, often an empty list, must run before the
    expression. The value of the expression is the mean loss if `loss_is_mean(lines)` is true.
    Otherwise it is a pair (sum of losses, weight), in which the weight is the number of tokens or
    samples.

    Args:
        lines: Builder of the script.
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
    """Return the code of the loss for a script that checkpoints segments of the model's stages.

    The stages are the functions that the model's method `stages` returns. The result is a pair
    (lines, expression), as in `loss_code`.
    """
    model, recipe = lines.model, lines.recipe
    with symbolic():
        stages = own_stages(model)(lines.batch)
    modules = [stage for stage in stages if isinstance(stage, nn.Module)]
    reject_statistics(modules, recipe.checkpoint)
    trained = [
        stage in modules and next(stage.parameters(), None) is not None for stage in stages[:2]
    ]
    if trained != [False, True]:
        raise ValueError(
            "to write a script with checkpoint='segments', model.stages(batch) must begin with a"
            " function without weights that selects the inputs from the batch, followed by a module"
            f" with weights, got {describe(model)} whose stages begin otherwise"
        )
    lines.use("torch.utils.checkpoint", "checkpoint_sequential")
    random = "" if may_draw(model) else ", preserve_rng_state=False"
    return [
        "inputs, embed, *blocks, head = model.stages(batch)",
        "x = embed(inputs(batch))",
    ], f"head(checkpoint_sequential(blocks, {recipe.segments}, x, use_reentrant=False{random}))"


def loss_function_code(lines: Lines, parts: int) -> tuple[list[str], str]:
    """Return the code of a function that computes the loss in a script.

    The result is a pair (lines, expression). The lines define the function, and the expression is
    its name. The function takes (model, batch) and returns (sum of losses, weight), in which the
    weight is the number of tokens or samples. If the model or the user already has such a function,
    there are no lines, and the expression is the name of that function.

    Args:
        lines: Builder of the script.
        parts: Number of micro-batches into which the script splits the batch, on all ranks
            together.
    """
    prepared, expression = loss_code(lines)
    if loss_is_mean(lines) and has_method(lines.model, "loss"):
        expression = f"{expression}, 1"  # the batch is not split, so the weight has no effect
    elif loss_is_mean(lines):
        lines.use("course_lib.budget", "hugging_face_loss")
        expression = f"hugging_face_loss(model, batch, micro_batches={parts})"
    around = loss_contexts(lines)
    if not around and lines.workload.loss_sum is not None:
        return [], "make_model.loss_sum"
    if not around and expression == "model.loss_sum(batch)" and _has_loss_sum_method(lines.model):
        return [], "type(model).loss_sum"
    indent = " " * (8 if around else 4)
    return [
        "",
        "def loss_sum(model, batch):",
        *([f"    with {', '.join(around)}:"] if around else []),
        *(indent + each for each in [*prepared, f"return {expression}"]),
        "",
    ], "loss_sum"


def _has_loss_sum_method(model: nn.Module) -> bool:
    """Return whether `loss_sum` is a method of the model's class."""
    return hasattr(type(model), "loss_sum") and "loss_sum" not in vars(model)


def loss_contexts(lines: Lines) -> list[str]:
    """Return the context managers inside which a script computes the loss, as Python expressions.

    An example is "chunked_head(model, 512)". The list is empty if the recipe needs none.

    Args:
        lines: Builder of the script.
    """
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
