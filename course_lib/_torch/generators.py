"""Generators of random numbers."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch


class RandomState:
    """The states of the CPU's random generator and of the generators of some devices.

    Args:
        devices: Devices whose generators are included in addition to the CPU's. By default all CUDA
            devices in use. The CPU and devices without generators are ignored.
        counted: Whether meters count the tensor that holds the state of the CPU's generator. They
            count it if `torch.get_rng_state` creates the tensor.
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
    """The states of all global generators: PyTorch's, Python's and NumPy's.

    The arguments are those of `RandomState`.
    """

    def __init__(self, devices: Iterable[torch.device] | None = None, *, counted: bool = True):
        self.torch_state = RandomState(devices, counted=counted)
        self.python_state, self.numpy_state = random.getstate(), np.random.get_state()

    def restore(self) -> None:
        self.torch_state.restore()
        random.setstate(self.python_state)
        np.random.set_state(self.numpy_state)


@contextmanager
def random_numbers_undone() -> Iterator[None]:
    """Restore all random generators if an error is raised inside the block."""
    # not counted, because the state is not memory that the block uses
    state = AllRandomState(counted=False)
    try:
        yield
    except BaseException:
        state.restore()
        raise
