"""Code made by `torch.compile` under a meter: whether it was called, and the buffers that it
allocates without an operator."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

# The functions by which code that TorchInductor generates allocates a buffer: a module of it binds
# each of `torch._C._dynamo.guards` to the same name without its underscore.
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
    """Call `made(storage)` for each buffer that generated code allocates where the mode is active.

    TorchInductor's code allocates past the dispatcher, so that no mode sees it. Code written in
    C++ as a whole (`cpp_wrapper`) and replayed CUDA graphs allocate where Python cannot look.
    """

    def telling(allocate: Callable) -> Callable:
        def call(*args: Any) -> torch.Tensor:
            buffer = allocate(*args)
            if mode in _get_current_dispatch_mode_stack():
                made(buffer.untyped_storage())
            return buffer

        return call

    source = torch._C._dynamo.guards
    own = {name: getattr(source, name) for name in _ALLOCATES if hasattr(source, name)}
    counted = {name: telling(function) for name, function in own.items()}

    def bind(functions: dict[str, Callable]) -> None:
        for name, function in functions.items():
            for module in _generated_modules():
                if name.removeprefix("_") in vars(module):
                    setattr(module, name.removeprefix("_"), function)

    bind(counted)
    try:
        with ExitStack() as stack:
            for name, function in counted.items():
                # Code that is generated inside the block binds this one.
                stack.enter_context(patch.object(source, name, function))
            yield
    finally:
        bind(own)


def _generated_modules() -> list[ModuleType]:
    codecache = sys.modules.get("torch._inductor.codecache")
    return list(codecache.PyCodeCache.modules) if codecache is not None else []


@contextmanager
def compiled_calls(called: Callable[[], None]) -> Iterator[None]:
    """Call `called()` whenever a function made by `torch.compile` is called inside the block."""
    # This loads the compiler, as a meter's first operator does.
    import torch._dynamo.eval_frame as dynamo

    chosen = dynamo._callback_from_stance

    def telling(callback: Any) -> Any:
        callback = chosen(callback)
        if callback is not None:  # None runs the function as it was written
            called()
        return callback

    with patch.object(dynamo, "_callback_from_stance", telling):
        yield


@contextmanager
def compiled_code_set_aside() -> Iterator[None]:
    """Run what `torch.compile` has compiled as it was written, inside the block; afterwards it runs
    compiled again."""
    compile_ = torch.compile
    with ExitStack() as stack:
        forced = []

        def force() -> None:
            if not forced:
                forced.append(stack.enter_context(torch.compiler.set_stance("force_eager")))

        def compiling(*args: Any, **kwargs: Any) -> Any:
            result = compile_(*args, **kwargs)
            force()
            return result

        # Nothing has been compiled before the compiler is loaded, and to load it takes seconds.
        if "torch._dynamo" in sys.modules:
            force()
        else:
            stack.enter_context(patch.object(torch, "compile", compiling))
        yield
