"""Observe code that `torch.compile` has made: its calls, and the buffers that it allocates.

This code allocates buffers without an operator, so that a dispatch mode does not see them.
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
    """Call `on_buffer(storage)` for each buffer that compiled code allocates in a `with` block.

    Buffers are reported only while `mode` is active. The buffers of code that is C++ as a whole
    (Inductor's option `cpp_wrapper`) and of replayed CUDA graphs are not reported, because they are
    not allocated from Python.
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
    """Buffers that compiled functions have allocated in the forward pass, as storage records.

    If a buffer is still live when the backward pass of the same compiled function begins, it was
    kept for this backward pass and counts as an activation.
    """

    def __init__(self) -> None:
        # Maps the sequence number of the compiled function's autograd node to the records. The key
        # is None for buffers of a recomputation.
        self._records_by_node: dict[int | None, list[Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._records_by_node)

    def add(self, record: Any, made_in: str) -> None:
        """Add the record of a new buffer. `made_in` is the pass in which the buffer was made."""
        if made_in != "elsewhere":
            # An `autograd.Function` makes its node immediately before its forward pass runs.
            number = torch.autograd._get_sequence_nr() - 1 if made_in == "forward" else None
            self._records_by_node.setdefault(number, []).append(record)

    def pop_kept_for(self, node: Any, made_in: str) -> list[Any]:
        """Remove and return the records of live buffers that were kept for this autograd node.

        `made_in` says in which pass the node runs, as `CategoryTracker.inputs` returns it. Only
        "elsewhere", which includes backward, has such buffers.
        """
        numbers = (node._sequence_nr(), None) if made_in == "elsewhere" else ()
        records = [record for number in numbers for record in self._records_by_node.pop(number, ())]
        return [record for record in records if record() is not None]


@contextmanager
def compiled_calls(on_call: Callable[[], None]) -> Iterator[None]:
    """Call `on_call()` whenever a function made by `torch.compile` is called in a `with` block."""
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
