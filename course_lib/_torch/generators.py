"""Save and restore the states of random number generators."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch


class RandomState:
    """Saved states of PyTorch's random number generators on the CPU and on some devices.

    Two objects are equal if they have equal states for the same devices.

    Args:
        devices: Devices whose generators are saved in addition to the CPU's. The default is all
            CUDA devices if CUDA is in use. Devices without generators are ignored.
        counted: Whether a `MemoryMeter` counts the tensor with the state of the CPU's generator.
    """

    def __init__(self, devices: Iterable[torch.device] | None = None, *, counted: bool = True):
        if devices is None:
            count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
            devices = [torch.device("cuda", index) for index in range(count)]
        self.cpu = torch.get_rng_state() if counted else torch.default_generator.get_state()
        self.devices = {}
        for device in set(devices):
            if device.type not in ("cpu", "meta") and hasattr(
                getattr(torch, device.type, None), "get_rng_state"
            ):
                self.devices[device] = getattr(torch, device.type).get_rng_state(device)

    def restore(self) -> None:
        """Set the generators to the saved states."""
        torch.set_rng_state(self.cpu)
        for device, state in self.devices.items():
            getattr(torch, device.type).set_rng_state(state, device)

    def __eq__(self, other) -> bool:
        if not isinstance(other, RandomState):
            return NotImplemented
        same = self.devices.keys() == other.devices.keys() and torch.equal(self.cpu, other.cpu)
        return same and all(
            torch.equal(state, other.devices[device]) for device, state in self.devices.items()
        )

    __hash__ = None


class AllRandomState:
    """Saved states of the global random number generators of PyTorch, Python and NumPy.

    The arguments are those of `RandomState`.
    """

    def __init__(self, devices: Iterable[torch.device] | None = None, *, counted: bool = True):
        self.torch_state = RandomState(devices, counted=counted)
        self.python_state, self.numpy_state = random.getstate(), np.random.get_state()

    def restore(self) -> None:
        """Set the generators to the saved states."""
        self.torch_state.restore()
        random.setstate(self.python_state)
        np.random.set_state(self.numpy_state)


@contextmanager
def restore_random_state_on_error() -> Iterator[None]:
    """Restore all global random number generators if a `with` block raises an error."""
    # A meter must not count the saved state, because the block does not use it.
    state = AllRandomState(counted=False)
    try:
        yield
    except BaseException:
        state.restore()
        raise
