"""Observe code that `torch.compile` has made: its calls, and the buffers that it allocates.

Compiled code allocates buffers without an operator, so a dispatch mode does not see these buffers.
"""

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
_ALLOCATION_FUNCTIONS = (
    "_empty_strided_cpu",
    "_empty_strided_cpu_pinned",
    "_empty_strided_cuda",
    "_empty_strided_xpu",
    "_empty_strided_mtia",
)


@contextmanager
def buffers_of_generated_code(
    mode: TorchDispatchMode, on_buffer: Callable[[UntypedStorage], None]
) -> Iterator[None]:
    """Call `on_buffer` for each buffer that compiled code allocates inside a `with` block.

    Compiled code is code that `torch.compile` has generated. Two kinds of buffers are not reported,
    because they are not allocated from Python: buffers of code that is C++ as a whole (Inductor's
    option `cpp_wrapper`), and buffers of replayed CUDA graphs.

    Args:
        mode: Dispatch mode that must be active for a buffer to be reported.
        on_buffer: Function that is called with the storage of each new buffer.
    """

    def wrap(allocate: Callable) -> Callable:
        def call(*args: Any) -> torch.Tensor:
            buffer = allocate(*args)
            if mode in dispatch_modes():
                on_buffer(buffer.untyped_storage())
            return buffer

        return call

    own = {name: getattr(guards, name) for name in _ALLOCATION_FUNCTIONS if hasattr(guards, name)}
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
                # Code that is generated later, inside the block, takes its functions from `guards`.
                stack.enter_context(patch.object(guards, name, function))
            yield
    finally:
        bind(own)


class BuffersForBackward:
    """Buffers that compiled functions have allocated and possibly keep for backward.

    A buffer was kept for backward if it is still live when the backward pass of its compiled
    function begins. Such a buffer counts as an activation. Each buffer is represented by the
    `Record` of its storage.
    """

    def __init__(self) -> None:
        # Maps the sequence number of a compiled function's autograd node to the records of the
        # function's buffers. The key is None for buffers of a recomputation.
        self._records_by_node: dict[int | None, list[Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._records_by_node)

    def add(self, record: Any, made_in: str) -> None:
        """Add a buffer, which a compiled function has just allocated, to this object.

        Args:
            record: `Record` of the buffer's storage.
            made_in: Pass in which the buffer was allocated: "forward", "recomputation" or
                "elsewhere". With "elsewhere", the buffer is not added.
        """
        if made_in != "elsewhere":
            # A compiled function is an `autograd.Function`, which makes its node immediately before
            # its forward pass runs. Therefore the last number that was assigned belongs to this
            # node.
            number = torch.autograd._get_sequence_nr() - 1 if made_in == "forward" else None
            self._records_by_node.setdefault(number, []).append(record)

    def pop_kept_for(self, node: Any, made_in: str) -> list[Any]:
        """Return the records of the buffers that were kept for an autograd node.

        The method considers the buffers that the node's compiled function allocated in the forward
        pass, and all buffers that were allocated in a recomputation. It removes all these buffers
        from this object, and returns the records of the buffers that are still live.

        Args:
            node: Autograd node that is about to run.
            made_in: Pass in which the node runs, as `CategoryTracker.inputs` returns it. For
                "forward" and "recomputation", the method does nothing and returns an empty list.
        """
        numbers = (node._sequence_nr(), None) if made_in == "elsewhere" else ()
        records = [record for number in numbers for record in self._records_by_node.pop(number, ())]
        return [record for record in records if record() is not None]


@contextmanager
def compiled_calls(on_call: Callable[[], None]) -> Iterator[None]:
    """Inside a `with` block, call `on_call()` whenever a compiled function is called.

    A compiled function is a function that `torch.compile` has made.
    """
    # This loads Dynamo. The first operator of a meter would load it anyway.
    dynamo = load_eval_frame()
    chosen = dynamo._callback_from_stance

    def wrap(callback: Any) -> Any:
        callback = chosen(callback)
        if callback is not None:  # None runs the function without compiling it
            on_call()
        return callback

    with patch.object(dynamo, "_callback_from_stance", wrap):
        yield
