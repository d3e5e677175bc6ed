"""What a user is told: warnings at their own line of code, and for `debug=True` the operators of both runs."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError

_NOT_THE_USERS = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, __file__))


def _users_frame(frame: FrameType) -> tuple[FrameType, int]:
    """The innermost frame, from this one on, that is neither PyTorch's nor ours; and how far away it is."""
    distance = 0
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame, distance = frame.f_back, distance + 1
    return frame, distance


def warn(message: str) -> None:
    warnings.warn(message, stacklevel=1 + _users_frame(sys._getframe())[1])


class OperatorLog(TorchDispatchMode):
    """Writes down each operator, with the line of code that called it."""

    def __enter__(self):
        self.lines: list[str] = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        frame, _ = _users_frame(sys._getframe(1))
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}:{frame.f_code.co_name}"
        self.lines.append(f"  {func}({_brief(args)}) -> {_brief(result)}\n      {place}")
        return result


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return ", ".join(map(_brief, value)) if isinstance(value, (list, tuple)) else str(value)


def with_operators(error: CheckpointError, forward: OperatorLog, recomputation: OperatorLog) -> CheckpointError:
    """An error that says what this one does, and lists the operators of both runs."""
    hint = (
        "You are seeing this error because you passed `debug=True` to checkpoint, and the original forward and the "
        "recomputation did not save the same tensors. Look for the first operator that differs; `detach` may, and the "
        "recomputation ends as soon as it has what it needs."
    )
    ran = "Operations executed during"
    lines = [hint, f"{ran} the original forward:", *forward.lines, f"{ran} recomputation:", *recomputation.lines]
    return CheckpointError(f"{error}\n\n" + "\n".join(lines))
