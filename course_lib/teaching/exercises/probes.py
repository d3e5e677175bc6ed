"""Functions with which several exercises examine an answer that is a program."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.memory import MemoryMeter

from .messages import Messages


def is_close(
    found: Any, wanted: Any, *, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    """Return whether two results are close: numbers, tensors, or sequences of numbers and tensors.

    Args:
        found, wanted: The results. None in `found` is not close to anything.
        rtol, atol: Relative and absolute tolerance, as for `torch.allclose`.
        equal_nan: Whether nan in a tensor is close to nan.
    """
    options: dict[str, Any] = {"rtol": rtol, "atol": atol, "equal_nan": equal_nan}
    if isinstance(wanted, Sequence):
        return len(found) == len(wanted) and all(
            is_close(one, other, **options) for one, other in zip(found, wanted, strict=True)
        )
    if found is None:
        return False
    if isinstance(wanted, Tensor):
        return found.shape == wanted.shape and torch.allclose(found, wanted, **options)
    return abs(found - wanted) <= atol + rtol * abs(wanted)


def reject_mistakes(
    say: Messages,
    found: Any,
    mistakes: Mapping[str, Any],
    *,
    within: str | None = None,
    **tolerance: Any,
) -> None:
    """Reject the learner's answer by an error if its result is the result of a known mistake.

    Args:
        say: The lesson's messages.
        found: Result of the answer: a number, a tensor, or a sequence of tensors.
        mistakes: Dict from the name of a message to the result of the mistake that the message
            explains, or to a tuple of results.
        within: Name of a message with the placeholder {reason}. This message is shown, and the
            message about the mistake replaces {reason}. By default, only the message about the
            mistake is shown.
        tolerance: `rtol`, `atol` and `equal_nan` of `is_close`.

    Raises:
        WrongAnswer: The result is close to the result of a mistake.
    """
    for name, results in mistakes.items():
        for result in results if isinstance(results, tuple) else (results,):
            if is_close(found, result, **tolerance):
                if within is None:
                    say.reject(name)
                say.reject(within, reason=say(name))


def run_forward(function: Callable, *inputs: Any) -> tuple[Any, int]:
    """Run a learner's function, and return a pair: its output and the bytes that it leaves live.

    The bytes of the output do not count. The bytes that count are, for example, those of tensors
    that autograd has saved for backward.

    Args:
        function: The learner's function.
        inputs: Arguments of the function.

    Raises:
        NotImplementedError: The function returned None or `...`, so the learner has not changed it.
    """
    with MemoryMeter() as meter:
        output = function(*inputs)
        if output is None or output is ...:
            raise NotImplementedError
        kept = meter.live_bytes - (output.nbytes if isinstance(output, Tensor) else 0)
    return output, kept


def uneven_gradient(like: Tensor) -> Tensor:
    """Return a gradient with the shape of `like` whose elements all differ and have both signs."""
    return torch.linspace(-1, 2, like.numel()).view_as(like)
