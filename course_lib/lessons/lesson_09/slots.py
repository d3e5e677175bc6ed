"""Checks of a reader's own model, batch and loss, before anything is measured with them."""

from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from course_lib._hugging_face_losses import has_loss_sum, own_loss, samples_in
from course_lib._torch.tensors import tensors_in
from course_lib.accumulation import split
from course_lib.budget import Recipe, estimate, run
from course_lib.checkpoint.blocks import names_of
from course_lib.labels import verbatim
from course_lib.memory import Trace
from course_lib.teaching import Verdict, text
from course_lib.teaching.exercises import exercise, not_answered, right, wrong

Make = Callable[..., Any]


def check_slots(make_model: Make, make_batch: Make, loss_sum: Make | None = None) -> Verdict:
    """Check what this lesson needs from a reader's own model.

    The model is built three times. One step runs on symbolic tensors and one for real, so the
    baseline must fit into this machine's memory.

    Args:
        make_model: Function that returns a new module.
        make_batch: Function (number of the step) -> its batch: tensors, alone or in tuples and
            dictionaries.
        loss_sum: Function (model, batch) -> (sum of losses, weight), or None for the model's own.
    """
    return _slots((make_model, make_batch, loss_sum))


def own_model(
    make_model: Make | None, make_batch: Make | None, loss_sum: Make | None
) -> Verdict | str:
    """Check the model of the reader's project, if its fill-ins are complete."""
    if make_model is None or make_batch is None:
        return text("The fill-ins are still empty.")
    return check_slots(make_model, make_batch, loss_sum)


@exercise(
    hint=(
        "The check calls `make_model()`, `make_batch(0)` and `loss_sum(model, batch)` in this"
        " order. Then it does one step with symbolic tensors and one with real ones."
    )
)
def _slots(slots: tuple[Make, Make, Make | None]) -> Verdict:
    make_model, make_batch, loss_sum = slots
    functions = {"make_model": make_model, "make_batch": make_batch, "loss_sum": loss_sum}
    for name, given in functions.items():
        if given is not None and (isinstance(given, nn.Module) or not callable(given)):
            return wrong(
                text(
                    "`{name}` must be a function, got a `{kind}`.",
                    name=name,
                    kind=type(given).__name__,
                ),
                exact=True,
            )
    model = make_model()
    if model is None:
        return not_answered()
    if not isinstance(model, nn.Module) or not any(p.requires_grad for p in model.parameters()):
        return wrong(
            "`make_model()` must return a module that has trainable parameters.", exact=True
        )
    if any(
        p.requires_grad and p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters()
    ):
        return wrong(
            "`make_model()` must return a model in fp32. The recipe sets the precision.", exact=True
        )
    if make_model() is model:
        return wrong(
            "`make_model()` returned the same model twice. Build a new model in each call.",
            exact=True,
        )
    batches = [make_batch(step) for step in (0, 1)]
    if batches[0] is None:
        return not_answered()
    for problem in (_batch_problem(batches), _token_problem(model, batches[0])):
        if (
            problem is not None
        ):  # a verdict on a wrong answer is false, so `if problem` would skip it
            return problem
    if loss_sum is None and not has_loss_sum(model):
        return wrong(
            "The check cannot tell what the model's own loss is averaged over, so write"
            " `loss_sum`.",
            exact=True,
        )
    problem = _loss_problem(model, batches[0], loss_sum)
    return _check_step(make_model, make_batch, loss_sum) if problem is None else problem


def _batch_problem(batches: list[Any]) -> Verdict | None:
    first, second = (list(tensors_in(batch)) for batch in batches)
    if not first:
        return wrong(
            "`make_batch(step)` must return one tensor, or a tuple or dictionary of tensors.",
            exact=True,
        )
    if len({len(tensor) for tensor in first}) > 1:
        return wrong(
            "The tensors of your batch have different numbers of samples. They must have the"
            " same first dimension.",
            exact=True,
        )
    if len(first) == len(second) and all(map(torch.equal, first, second)):
        return wrong(
            "`make_batch` returned the same batch for steps 0 and 1, so nothing new is learned.",
            exact=True,
        )
    return None


def _token_problem(model: nn.Module, batch: Any) -> Verdict | None:
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    rows = max((embedding.num_embeddings for embedding in embeddings), default=0)
    tokens = [t for t in tensors_in(batch) if not t.is_floating_point() and t.dtype != torch.bool]
    most = max((int(tensor.max()) for tensor in tokens if tensor.numel()), default=0)
    if rows and most >= rows:
        message = text(
            "Your batch has the token {token}, but the embedding has only {rows} rows.",
            token=most,
            rows=rows,
        )
        return wrong(message, exact=True)
    return None


def _loss_problem(model: nn.Module, batch: Any, loss_sum: Make | None) -> Verdict | None:
    """Check that the losses of single samples add up to the batch's."""
    model.eval()  # without dropout, so that the sums are equal
    whole = _loss_of(model, batch, loss_sum)
    if whole is None:
        return not_answered()
    singles = [_loss_of(model, sample, loss_sum) for sample in split(batch, 1)]
    if not all(map(_is_pair, (whole, *singles))):
        return wrong(
            "`loss_sum` must return a pair: the sum, which is one number with a gradient, and"
            " its weight.",
            exact=True,
        )
    names = (
        "The sums that `loss_sum` returns do not add up",
        "The weights that `loss_sum` returns do not add up",
    )
    for i, name in enumerate(names):
        alone, together = sum(_number(single[i]) for single in singles), _number(whole[i])
        if abs(alone - together) > 1e-3 * abs(alone):
            message = text(
                "{name}. Single samples give {pieces} in total, one batch of {count} samples"
                " gives {whole}. Did you return a mean?",
                name=text(name),
                pieces=f"{alone:,.1f}",
                whole=f"{together:,.1f}",
                count=samples_in(batch),
            )
            return wrong(message, exact=True)
    return None


def _loss_of(model: nn.Module, batch: Any, loss_sum: Make | None) -> Any:
    return own_loss(model, batch, micro_batches=2) if loss_sum is None else loss_sum(model, batch)


def _number(value: float | Tensor) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


def _is_pair(found: Any) -> bool:
    if not isinstance(found, tuple | list) or len(found) != 2:
        return False
    loss, weight = found
    one_number = isinstance(weight, Real) or (isinstance(weight, Tensor) and not weight.dim())
    return isinstance(loss, Tensor) and not loss.dim() and loss.requires_grad and one_number


def _check_step(make_model: Make, make_batch: Make, loss_sum: Make | None) -> Verdict:
    """Compare the baseline's prediction with a real step, and list the blocks for checkpoints."""
    recipe, options = Recipe(precision=None, attention=None), {"loss_sum": loss_sum}
    estimated = estimate(make_model, lambda: make_batch(0), recipe, **options)
    predicted = estimated.peak_bytes
    model: list[nn.Module] = []  # the model that does the step
    taken = run(
        lambda: model.append(make_model()) or model[0], lambda: make_batch(0), recipe, **options
    )
    if predicted != taken.meter.peak_bytes:
        message = text(
            "The predicted peak is {predicted} bytes, but the measured one is {taken}."
            " {difference}",
            predicted=f"{predicted:,}",
            taken=f"{taken.meter.peak_bytes:,}",
            difference=first_difference(estimated.trace(), taken.meter.trace()),
        )
        return wrong(message, exact=True)
    values = {
        "count": f"{sum(p.numel() for p in model[0].parameters()):,}",
        "peak": f"{predicted:,}",
    }
    try:
        names = names_of(model[0], None)
    except ValueError:
        return right(
            text(
                "Right: the model has {count} parameters, and the baseline peaks at {peak}"
                " bytes, as predicted. No list of equal blocks was found, so pass `blocks=` for"
                " checkpoints.",
                **values,
            )
        )
    return right(
        text(
            "Right: the model has {count} parameters and {blocks} blocks from `{first}` on. The"
            " baseline peaks at {peak} bytes, as predicted.",
            blocks=len(names),
            first=names[0],
            **values,
        )
    )


def first_difference(predicted: Trace, taken: Trace) -> str:
    """Return a sentence that names the first operator at which two traces of a step differ."""
    pairs = zip(predicted.operators, taken.operators, strict=False)
    for moment, ((expected, _), (ran, _)) in enumerate(pairs):
        place = {
            "number": moment,
            "module": verbatim(f"`{predicted.modules.get(moment) or 'model'}`"),
            "ran": verbatim(f"`{ran}`"),
        }
        if expected is not ran and expected != ran:
            return text(
                "They differ from operator {number} on, in {module}: {expected} was predicted,"
                " but {ran} ran. With real values the step takes another path, for example"
                " because a mask is not all ones or because layers are dropped at random.",
                expected=verbatim(f"`{expected}`"),
                **place,
            )
        bytes_live = [int(trace.live[moment].sum()) for trace in (predicted, taken)]
        if bytes_live[0] != bytes_live[1]:
            return text(
                "They differ from operator {number} on, in {module}: after {ran}, {expected}"
                " live bytes were predicted, but {measured} were measured. Please report this"
                " operator.",
                expected=f"{bytes_live[0]:,}",
                measured=f"{bytes_live[1]:,}",
                **place,
            )
    return text(
        "Both run the same {count} operators, and then one of the two runs more.",
        count=min(len(predicted.operators), len(taken.operators)) - 1,
    )
