"""Functions on autocast, dispatch modes and function modes, and parts of the compiler."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

DisableTorchDispatch = torch._C._DisableTorchDispatch
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
disable_current_modes = _python_dispatch._disable_current_modes
disabled_torch_dispatch = torch._C._disabled_torch_dispatch_impl
dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack
dispatch_mode_count = torch._C._len_torch_dispatch_stack
# Modules of the functions in which PyTorch wraps dispatch modes.
WRAPPERS = ("torch._compile", "torch._dynamo.eval_frame", "torch._ops")
DYNAMO = "torch._dynamo"  # a module that is loaded before a function is compiled


class AutocastState:
    """Settings of `torch.autocast` for the CPU and the types of some devices."""

    def __init__(self, device_types: Iterable[str] = ()):
        kinds = {"cpu", *device_types}
        self.states = {
            kind: _autocast(kind) for kind in kinds if torch.amp.is_autocast_available(kind)
        }

    @contextmanager
    def restore(self, *, cache_enabled: bool | None = None) -> Iterator[None]:
        """Restore these settings inside the block.

        Args:
            cache_enabled: Whether autocast caches casts of weights. By default, the stored setting
                is used.
        """
        with ExitStack() as stack:
            for kind, (enabled, dtype, cached) in self.states.items():
                settings = (enabled, dtype, cached if cache_enabled is None else cache_enabled)
                if settings != _autocast(kind):
                    stack.enter_context(
                        torch.autocast(kind, dtype, settings[0], cache_enabled=settings[2])
                    )
            yield


def _autocast(kind: str) -> tuple[bool, torch.dtype, bool]:
    return (
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.is_autocast_cache_enabled(),
    )


def autocast_of(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype of autocast on the tensor's device, or None if autocast is off."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


class ObserverMode(TorchDispatchMode):
    """A dispatch mode that does not disable code compiled by `torch.compile`.

    Under any other mode, Dynamo runs a frame without compiling it, and never compiles this frame
    again in the process. Dynamo sets an `ObserverMode` aside while it compiles. The compiled code
    then runs under the mode, which sees the operators that the code calls.
    """

    # a compiled graph calls higher-order operators, such as those that repeat random numbers
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def modes_when_recomputed() -> list[TorchFunctionMode]:
    """Return the active function modes whose attribute `when_recomputed` is true.

    Checkpoints enter these modes again for the recomputation.
    """
    return [
        mode
        for mode in _get_current_function_mode_stack()
        if getattr(mode, "when_recomputed", False)
    ]


def graph_break(reason: str) -> None:
    """End the compiler's graph. If an error follows, its message has the reason."""
    torch._dynamo.graph_break(reason)
