"""Modes that report operators, and reads by the host, to the access log of a simulated device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from course_lib._torch import written_arguments

aten = torch.ops.aten
#: Operators that overwrite a tensor without reading it, which their schema does not show.
OVERWRITE = (aten.copy_, aten.fill_, aten.zero_, aten.normal_, aten.uniform_)
#: Operators that access no byte, although the schema of `set_` says that it writes.
BYTELESS = (aten.set_, aten.is_pinned, aten.is_same_size)
#: Methods by which the host accesses a tensor's bytes without an operator.
HOST_READS = {
    getattr(Tensor, name)
    for name in ("tolist", "numpy", "__array__", "__dlpack__", "__repr__", "__format__")
}


class HostReads(TorchFunctionMode):
    """A mode that observes reads by the host without an operator.

    The host then waits if it reads device memory, as on CUDA.
    """

    def __init__(self, device: Any):
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func not in HOST_READS:
            return func(*args, **(kwargs or {}))
        device, tensor = self.device, args[0]
        with device.log.lock:
            actor = device.current() if device.holds(tensor) else device.log.host
            device.done_by(actor)
            with device.log.early(actor, [tensor], []):
                result = func(*args, **(kwargs or {}))
            device.log.record_access(actor, f"Tensor.{func.__name__}", [tensor], [])
            device.finish(actor.event())
        return result


class Operators(TorchDispatchMode):
    """A mode that runs operators on the device's tensors.

    Their results are in device memory, and the current stream determines their order and time.
    """

    def __init__(self, device: Any):
        super().__init__()
        self.device = device

    @classmethod
    # False, because PyTorch's default imports compiler guards, which takes longer than a small step
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        with self.device.log.lock:
            return self._run(func, args, kwargs or {})

    def _run(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        if func.overloadpacket in BYTELESS:
            return func(*args, **kwargs)
        device, tensors = self.device, _tensors((args, kwargs))
        here = [device.holds(tensor) for tensor in tensors]
        if func is aten.copy_.default and sum(here) == 1 and args[1].numel() > 1:
            device.transfer(*args[:2])
            if len(args) == 2:  # the copy was not requested to be non-blocking
                device.finish(device.event())
            return args[0]
        if any(here):
            _refuse_the_host(
                func, [tensor for tensor, is_here in zip(tensors, here, strict=True) if not is_here]
            )
        on_device = any(here) or not tensors
        actor = device.current() if on_device else device.log.host
        device.done_by(actor)
        changed, overwritten = _written(func, args, kwargs)
        with device.log.early(actor, tensors, changed):
            result = func(*args, **kwargs)
        results = _tensors(result)
        new = _new_storages(results, tensors)
        # A view reads nothing, except that a single number is assumed to be read.
        if results and not changed and not new:
            if not on_device and func is aten.select.int and result.numel() == 1:
                device.log.record_access(actor, str(func), results, [])
            return result
        nbytes = _bytes([*_besides(tensors, overwritten), *changed]) + sum(
            storage.nbytes() for storage in new.values()
        )
        seconds = self._seconds(func, args, kwargs, result, nbytes, "" if on_device else "host_")
        made = []
        if on_device and new:
            result, made = self._at_home(result, new)
        device.log.record_access(
            actor, str(func), _besides(tensors, changed), [*changed, *made], seconds
        )
        # The result is a Python number, like that of `item`, so the host waits for it.
        if on_device and not results and not changed:
            device.finish(actor.event())
        if made:
            device.samples.append((actor.seconds, device.live_bytes))
        return result

    def _at_home(self, result: Any, new: dict[int, UntypedStorage]) -> tuple[Any, list[Tensor]]:
        """Move new storages into device memory; return the result there, and their bytes."""
        log, homes = self.device.log, {}
        for key, storage in new.items():
            everything = torch.empty(0, dtype=torch.uint8).set_(
                storage, 0, (storage.nbytes(),), (1,)
            )
            homes[key] = log.new(
                self.device.memory, self.device.current(), everything.shape, torch.uint8
            )
            with log.early(self.device.current(), [], [homes[key]]):
                homes[key].copy_(everything)

        def at_home(value: Any) -> Any:
            if (
                not isinstance(value, Tensor)
                or (home := homes.get(value.untyped_storage()._cdata)) is None
            ):
                return value
            place = value.storage_offset(), value.shape, value.stride()
            return torch.empty(0, dtype=value.dtype).set_(home.untyped_storage(), *place)

        return tree_map(at_home, result), [*homes.values()]

    def _seconds(
        self, func: Callable, args: tuple, kwargs: dict, result: Any, nbytes: int, whose: str
    ) -> float:
        rate = self.device.rates[f"{whose}flops_per_second"]
        count = flop_registry.get(func.overloadpacket) if rate < math.inf else None
        flops = count(*args, **kwargs, out_val=result) if count else 0
        return max(flops / rate, nbytes / self.device.rates[f"{whose}bytes_per_second"])


def _refuse_the_host(func: Callable, tensors: list[Tensor]) -> None:
    for tensor in tensors:
        if tensor.numel() > 1:
            raise RuntimeError(
                f"all tensors of {func} must be on the device, got one on the host with shape"
                f" {tuple(tensor.shape)}; move it with device.move"
            )


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in an operator's arguments or results.

    This is recursive by hand, because PyTorch's pytrees take longer than small operators.
    """
    if isinstance(value, Tensor):
        return [value]
    parts = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple)
        else ()
    )
    return [tensor for part in parts for tensor in _tensors(part)]


def _besides(tensors: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if not any(tensor is other for other in others)]


def _new_storages(results: list[Tensor], given: list[Tensor]) -> dict[int, UntypedStorage]:
    """Return the storages that an operator created, by key.

    Single numbers made from nothing are left out, since they can be combined with any tensor.
    """
    old = {tensor.untyped_storage()._cdata for tensor in given}
    made = (value.untyped_storage() for value in results if given or value.numel() > 1)
    return {
        storage._cdata: storage
        for storage in made
        if storage._cdata not in old and storage.nbytes()
    }


def _bytes(tensors: list[Tensor]) -> int:
    """Return the bytes of tensors in memory, where an expanded dimension counts once."""
    return sum(
        tensor.itemsize
        * math.prod(n for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step)
        for tensor in tensors
    )


def _written(func: Callable, args: tuple, kwargs: dict) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that an operator writes into, and those of them that it does not read."""
    changed = written_arguments(func, args, kwargs)
    # without grad_scale, fused optimizers only read gradients, although their schema says written
    if kwargs.get("grad_scale") is None:
        changed = [(each, value) for each, value in changed if each.name != "grads"]
    if func.overloadpacket not in OVERWRITE:
        return _tensors([value for _, value in changed]), _tensors(
            [value for each, value in changed if each.is_out]
        )
    return (written := _tensors([value for _, value in changed])), written
