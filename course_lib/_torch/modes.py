"""Helpers for autocast, dispatch modes and function modes."""

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
# Names of the modules whose functions PyTorch wraps around the methods of dispatch modes.
WRAPPERS = ("torch._compile", "torch._dynamo.eval_frame", "torch._ops")
# Name of a module that is in `sys.modules` if any function has been compiled.
DYNAMO = "torch._dynamo"


class AutocastState:
    """Saved settings of `torch.autocast` for the CPU and some other types of devices.

    Args:
        device_types: Types of devices in addition to "cpu", such as "cuda".
    """

    def __init__(self, device_types: Iterable[str] = ()):
        kinds = {"cpu", *device_types}
        self.states = {
            kind: _autocast(kind) for kind in kinds if torch.amp.is_autocast_available(kind)
        }

    @contextmanager
    def restore(self, *, cache_enabled: bool | None = None) -> Iterator[None]:
        """Apply the saved autocast settings inside a `with` block.

        Args:
            cache_enabled: Whether autocast caches casts of weights. The default is the saved
                setting.
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
    """Return (enabled, dtype, cache enabled) of autocast for a type of device."""
    return (
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.is_autocast_cache_enabled(),
    )


def autocast_of(tensor: Tensor) -> torch.dtype | None:
    """Return autocast's dtype for the device of a tensor, or None if autocast is off there."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


class ObserverMode(TorchDispatchMode):
    """Base class of dispatch modes under which functions made by `torch.compile` run compiled.

    Under any other dispatch mode, Dynamo runs a frame uncompiled, and never compiles this frame
    later in the process. Dynamo deactivates an `ObserverMode` while it compiles. The compiled code
    then runs under the mode, which sees the operators that the code calls.
    """

    # Compiled code calls higher-order operators, for example to draw the same random numbers again.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def modes_when_recomputed() -> list[TorchFunctionMode]:
    """Return the active function modes that checkpoints must enter again for the recomputation.

    These are the modes with an attribute `when_recomputed` that is true. They must be entered again
    because PyTorch runs the backward pass without the function modes of the forward pass.
    """
    return [
        mode
        for mode in _get_current_function_mode_stack()
        if getattr(mode, "when_recomputed", False)
    ]


def graph_break(reason: str) -> None:
    """End the graph that Dynamo is compiling. If Dynamo raises an error, it shows the reason."""
    torch._dynamo.graph_break(reason)
