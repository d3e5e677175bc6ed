"""Code made by `torch.compile` under a meter: whether it was called, and which buffers it allocates
without an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import UntypedStorage

from .._torch.compiler import generated_modules, guards, load_eval_frame
from .._torch.modes import TorchDispatchMode, dispatch_modes

# Functions with which TorchInductor's generated code allocates buffers. A generated module binds
# each of these functions of `torch._C._dynamo.guards` to the same name without its underscore.
_ALLOCATES = (
    "_empty_strided_cpu",
    "_empty_strided_cpu_pinned",
    "_empty_strided_cuda",
    "_empty_strided_xpu",
    "_empty_strided_mtia",
)


@contextmanager
def buffers_of_generated_code(
    mode: TorchDispatchMode, made: Callable[[UntypedStorage], None]
) -> Iterator[None]:
    """Call `made(storage)` for each buffer that generated code allocates while the mode is active.

    TorchInductor's code allocates without the dispatcher, so that no mode sees the buffers. Code
    that is C++ as a whole (`cpp_wrapper`) and replayed CUDA graphs allocate where Python cannot see
    it.
    """

    def wrap(allocate: Callable) -> Callable:
        def call(*args: Any) -> torch.Tensor:
            buffer = allocate(*args)
            if mode in dispatch_modes():
                made(buffer.untyped_storage())
            return buffer

        return call

    own = {name: getattr(guards, name) for name in _ALLOCATES if hasattr(guards, name)}
    counted = {name: wrap(function) for name, function in own.items()}

    def bind(functions: dict[str, Callable]) -> None:
        for name, function in functions.items():
            for module in generated_modules():
                if name.removeprefix("_") in vars(module):
                    setattr(module, name.removeprefix("_"), function)

    bind(counted)
    try:
        with ExitStack() as stack:
            for name, function in counted.items():
                # Code that is generated inside the block binds this function.
                stack.enter_context(patch.object(guards, name, function))
            yield
    finally:
        bind(own)


class BuffersForBackward:
    """Buffers that compiled functions have allocated in the forward pass.

    A buffer that is still live when the backward pass of the same compiled function begins was kept
    for it.
    """

    def __init__(self) -> None:
        # The key is the number of the function's autograd node, or None in a recomputation.
        self._of_node: dict[int | None, list[Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._of_node)

    def add(self, record: Any, made_in: str) -> None:
        if made_in != "elsewhere":
            # A Function's node is made immediately before its forward pass runs.
            number = torch.autograd._get_sequence_nr() - 1 if made_in == "forward" else None
            self._of_node.setdefault(number, []).append(record)

    def read_by(self, node: Any, made_in: str) -> list[Any]:
        """Return the records of live buffers that were kept for this node, and remove them."""
        numbers = (node._sequence_nr(), None) if made_in == "elsewhere" else ()
        records = [record for number in numbers for record in self._of_node.pop(number, ())]
        return [record for record in records if record() is not None]


@contextmanager
def compiled_calls(called: Callable[[], None]) -> Iterator[None]:
    """Call `called()` whenever a function made by `torch.compile` is called inside the block."""
    # This loads the compiler, as a meter's first operator does.
    dynamo = load_eval_frame()
    chosen = dynamo._callback_from_stance

    def wrap(callback: Any) -> Any:
        callback = chosen(callback)
        if callback is not None:  # None runs the function without compiling it
            called()
        return callback

    with patch.object(dynamo, "_callback_from_stance", wrap):
        yield
