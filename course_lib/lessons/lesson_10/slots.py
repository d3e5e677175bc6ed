"""Checks of a learner's own model, batch and loss, before anything is measured with them."""

from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from course_lib._hugging_face_losses import has_loss_sum, own_loss
from course_lib._torch.tensors import tensors_in
from course_lib.accumulation import split
from course_lib.budget import Recipe, estimate, run
from course_lib.checkpoint.blocks import names_of
from course_lib.labels import verbatim
from course_lib.memory import Trace
from course_lib.teaching import Verdict
from course_lib.teaching.exercises import Messages, exercise, not_answered

say = Messages(__file__)

Make = Callable[..., Any]


def verdict_on(make_model: Make, make_batch: Make, loss_sum: Make | None = None) -> Verdict:
    """Check that a learner's own model, batch and loss work with the library's tools.

    The model is built three times. One training step runs on symbolic tensors, and one on real
    tensors. Therefore a step without any technique must fit into this machine's memory.

    Args:
        make_model: Function that returns a new module.
        make_batch: Function that takes the number of a training step and returns its batch: a
            tensor, or tensors in tuples and dicts.
        loss_sum: Function that takes (model, batch) and returns a pair: the sum of the losses, and
            the weight by which it is divided to give the mean loss. The weight is the number of
            tokens or samples in the sum. None uses the loss that the model computes itself.
    """
    return _check_slots((make_model, make_batch, loss_sum))


@exercise()
def _check_slots(slots: tuple[Make, Make, Make | None]) -> Verdict:
    """Check the learner's `make_model`, `make_batch` and `loss_sum`, and run a step with them."""
    make_model, make_batch, loss_sum = slots
    functions = {"make_model": make_model, "make_batch": make_batch, "loss_sum": loss_sum}
    for name, given in functions.items():
        if given is not None and (isinstance(given, nn.Module) or not callable(given)):
            say.reject("slots.no_function", name=name, kind=type(given).__name__)
    model = make_model()
    if model is None:
        return not_answered()
    trained = isinstance(model, nn.Module) and [p for p in model.parameters() if p.requires_grad]
    say.reject_if(not trained, "slots.no_module")
    halves = torch.float16, torch.bfloat16
    say.reject_if(any(p.dtype in halves for p in trained), "slots.fp32")
    say.reject_if(make_model() is model, "slots.same_model")
    first, second = make_batch(0), make_batch(1)
    if first is None:
        return not_answered()
    _reject_batches(first, second)
    _reject_tokens(model, first)
    say.reject_if(loss_sum is None and not has_loss_sum(model), "slots.unknown_loss")
    _reject_loss(model, first, loss_sum)
    return _check_step(make_model, make_batch, loss_sum)


def _reject_batches(*batches: Any) -> None:
    """Reject batches that have no tensors or equal contents."""
    first, second = (list(tensors_in(batch)) for batch in batches)
    say.reject_if(not first, "slots.no_tensors")
    same = len(first) == len(second) and all(map(torch.equal, first, second))
    say.reject_if(same, "slots.same_batch")


def _reject_tokens(model: nn.Module, batch: Any) -> None:
    """Reject token numbers that are too large for the model's embeddings."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    rows = max((embedding.num_embeddings for embedding in embeddings), default=0)
    # a tensor with one number per sample, such as a length or a time step, has no tokens
    tokens = [
        tensor
        for tensor in tensors_in(batch)
        if tensor.dim() > 1 and not tensor.is_floating_point() and tensor.dtype != torch.bool
    ]
    most = max((int(tensor.max()) for tensor in tokens if tensor.numel()), default=0)
    if rows and most >= rows:
        say.reject("slots.token", token=most, rows=rows)


def _reject_loss(model: nn.Module, batch: Any, loss_sum: Make | None) -> None:
    """Reject a loss unless the losses of the single samples add up to the loss of the batch.

    A batch that cannot be split, such as a graph, has no samples to compare.
    """
    model.eval()  # without dropout, so that the sums are equal
    whole = _loss_of(model, batch, loss_sum)
    if whole is None:
        raise NotImplementedError
    say.reject_if(not _is_pair(whole) or not whole[0].requires_grad, "slots.pair")
    try:
        samples = list(split(batch, 1))
    except (TypeError, ValueError):
        return
    again = _loss_of(model, batch, loss_sum)
    random = abs(_number(again[0]) - _number(whole[0])) > 1e-3 * abs(_number(whole[0]))
    say.reject_if(random, "slots.random_loss")
    sums = [0.0, 0.0]
    for sample in samples:
        single = _loss_of(model, sample, loss_sum)
        say.reject_if(not _is_pair(single), "slots.pair")
        sums = [total + _number(value) for total, value in zip(sums, single, strict=True)]
    for i, name in enumerate(("slots.sums", "slots.weights")):
        alone, together = sums[i], _number(whole[i])
        if abs(alone - together) > 1e-3 * abs(alone):
            say.reject(
                "slots.do_not_add_up",
                name=say(name),
                pieces=f"{alone:,.1f}",
                whole=f"{together:,.1f}",
                count=len(samples),
            )


def _loss_of(model: nn.Module, batch: Any, loss_sum: Make | None) -> Any:
    return own_loss(model, batch, micro_batches=2) if loss_sum is None else loss_sum(model, batch)


def _number(value: float | Tensor) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


def _is_pair(found: Any) -> bool:
    if not isinstance(found, tuple | list) or len(found) != 2:
        return False
    loss, weight = found
    one_number = isinstance(weight, Real) or (isinstance(weight, Tensor) and not weight.dim())
    return isinstance(loss, Tensor) and not loss.dim() and one_number


def _check_step(make_model: Make, make_batch: Make, loss_sum: Make | None) -> Verdict:
    """Compare the predicted peak with a real step, and return a verdict.

    If the peaks are equal, the verdict states how many blocks of the model can be checkpointed.
    """
    recipe, options = Recipe(precision=None, attention=None), {"loss_sum": loss_sum}
    estimated = estimate(make_model, lambda: make_batch(0), recipe, **options)
    model: list[nn.Module] = []  # the model that runs the step
    taken = run(
        lambda: model.append(make_model()) or model[0], lambda: make_batch(0), recipe, **options
    )
    peak = f"{estimated.peak_bytes:,}"
    if estimated.peak_bytes != taken.meter.peak_bytes:
        say.reject(
            "slots.another_peak",
            predicted=peak,
            taken=f"{taken.meter.peak_bytes:,}",
            difference=first_difference(estimated.trace(), taken.meter.trace()),
        )
    values = {"count": f"{sum(p.numel() for p in model[0].parameters()):,}", "peak": peak}
    try:
        names = names_of(model[0], None)
    except ValueError:
        return say.right("slots.right_without_blocks", **values)
    return say.right("slots.right", blocks=len(names), first=names[0], **values)


def first_difference(predicted: Trace, taken: Trace) -> str:
    """Return a sentence about the first operator at which two traces of a training step differ.

    Args:
        predicted: Trace of the step on symbolic tensors.
        taken: Trace of the step with real tensors.
    """
    pairs = zip(predicted.operators, taken.operators, strict=False)
    for point, ((expected, _), (ran, _)) in enumerate(pairs):
        place = {
            "number": point,
            "module": verbatim(f"`{predicted.modules.get(point) or 'model'}`"),
            "ran": verbatim(f"`{ran}`"),
        }
        if expected is not ran and expected != ran:
            return say("slots.another_operator", expected=verbatim(f"`{expected}`"), **place)
        expected, measured = (f"{int(each.live[point].sum()):,}" for each in (predicted, taken))
        if expected != measured:
            return say("slots.other_bytes", expected=expected, measured=measured, **place)
    return say("slots.runs_more", count=min(len(predicted.operators), len(taken.operators)) - 1)
