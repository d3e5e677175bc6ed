"""Modes that run PyTorch operators on a simulated device and report them to its access log."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from course_lib._torch.modes import TorchDispatchMode
from course_lib._torch.operators import written_arguments
from course_lib._torch.tensors import tree_map

aten = torch.ops.aten
#: Operators that write a tensor without reading it. Their schema does not show this.
ONLY_WRITE = (aten.copy_, aten.fill_, aten.zero_, aten.normal_, aten.uniform_)
#: Operators that access no bytes of their tensors, although the schema of `set_` says otherwise.
WITHOUT_ACCESS = (aten.set_, aten.is_pinned, aten.is_same_size)
#: Methods by which the host accesses a tensor's bytes without an operator.
HOST_READS = {
    getattr(Tensor, name)
    for name in ("tolist", "numpy", "__array__", "__dlpack__", "__repr__", "__format__")
}


class HostReads(TorchFunctionMode):
    """Function mode that reports when the host reads values of a tensor without an operator.

    The methods in `HOST_READS`, for example `tolist` and `numpy`, read values in this way. If such
    a method reads device memory, the host waits for the current stream, as on CUDA.

    Args:
        device: The `SimulatedDevice` to whose access log the reads are reported.
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
            device.run_all(actor)
            with device.log.run_early(actor, [tensor], []):
                result = func(*args, **(kwargs or {}))
            device.log.record_access(actor, f"Tensor.{func.__name__}", [tensor], [])
            device.finish(actor.event())
        return result


class Operators(TorchDispatchMode):
    """Dispatch mode that runs each operator as a task of a simulated device or of the host.

    An operator on device tensors is a task of the current stream, and its results are put into
    device memory. An operator on host tensors is a task of the host. An operator without input
    tensors runs on the device.

    Args:
        device: The `SimulatedDevice` that runs the operators.
    """

    def __init__(self, device: Any):
        super().__init__()
        self.device = device

    @classmethod
    # If this method returned True, as PyTorch's own method does, the first operator would import
    # the compiler. This takes longer than a small step.
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        with self.device.log.lock:
            return self._run(func, args, kwargs or {})

    def _run(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run an operator, record its accesses and its simulated time, and return its result."""
        if func.overloadpacket in WITHOUT_ACCESS:
            return func(*args, **kwargs)
        device, tensors = self.device, _tensors((args, kwargs))
        are_on_device = [device.holds(tensor) for tensor in tensors]
        if func is aten.copy_.default and sum(are_on_device) == 1 and args[1].numel() > 1:
            device.transfer(*args[:2])
            if len(args) == 2:  # without `non_blocking`, so the host waits for the copy
                device.finish(device.event())
            return args[0]
        if any(are_on_device):
            _check_all_on_device(
                func,
                [
                    tensor
                    for tensor, is_on_device in zip(tensors, are_on_device, strict=True)
                    if not is_on_device
                ],
            )
        on_device = any(are_on_device) or not tensors
        actor = device.current() if on_device else device.log.host
        device.run_all(actor)
        changed, overwritten = _written_tensors(func, args, kwargs)
        with device.log.run_early(actor, tensors, changed):
            result = func(*args, **kwargs)
        results = _tensors(result)
        new = _new_storages(results, tensors)
        # Making a view does not read the tensor. Only a view of a single element of a host tensor
        # counts as a read, because the program usually reads the element next without an operator.
        if results and not changed and not new:
            if not on_device and func is aten.select.int and result.numel() == 1:
                device.log.record_access(actor, str(func), results, [])
            return result
        nbytes = _bytes([*_without(tensors, overwritten), *changed]) + sum(
            storage.nbytes() for storage in new.values()
        )
        seconds = self._seconds(func, args, kwargs, result, nbytes, "" if on_device else "host_")
        created = []
        if on_device and new:
            result, created = self._into_device_memory(result, new)
        device.log.record_access(
            actor, str(func), _without(tensors, changed), [*changed, *created], seconds
        )
        # An operator whose result is a Python number, such as `item`, makes the host wait.
        if on_device and not results and not changed:
            device.finish(actor.event())
        if created:
            device.samples.append((actor.seconds, device.live_bytes))
        return result

    def _into_device_memory(
        self, result: Any, new: dict[int, UntypedStorage]
    ) -> tuple[Any, list[Tensor]]:
        """Copy the new storages of an operator's result into device memory.

        Args:
            result: Result of the operator.
            new: Storages that the operator created. The keys are the addresses of their C++
                objects.

        Returns:
            The result with each new storage replaced by its copy, and the copies as tensors of
            bytes.
        """
        log, copies = self.device.log, {}
        for key, storage in new.items():
            everything = torch.empty(0, dtype=torch.uint8).set_(
                storage, 0, (storage.nbytes(),), (1,)
            )
            copies[key] = log.new(
                self.device.memory, self.device.current(), everything.shape, torch.uint8
            )
            with log.run_early(self.device.current(), [], [copies[key]]):
                copies[key].copy_(everything)

        def in_device_memory(value: Any) -> Any:
            if (
                not isinstance(value, Tensor)
                or (copy := copies.get(value.untyped_storage()._cdata)) is None
            ):
                return value
            place = value.storage_offset(), value.shape, value.stride()
            return torch.empty(0, dtype=value.dtype).set_(copy.untyped_storage(), *place)

        return tree_map(in_device_memory, result), [*copies.values()]

    def _seconds(
        self, func: Callable, args: tuple, kwargs: dict, result: Any, nbytes: int, prefix: str
    ) -> float:
        """Return the simulated time of an operator in seconds.

        Args:
            func, args, kwargs, result: The operator's call and its result.
            nbytes: Bytes that the operator reads and writes.
            prefix: "host_" for the rates of the host, "" for those of the device.
        """
        rate = self.device.rates[f"{prefix}flops_per_second"]
        count = flop_registry.get(func.overloadpacket) if rate < math.inf else None
        flops = count(*args, **kwargs, out_val=result) if count else 0
        return max(flops / rate, nbytes / self.device.rates[f"{prefix}bytes_per_second"])


def _check_all_on_device(func: Callable, host_tensors: list[Tensor]) -> None:
    """Raise RuntimeError if an operator on device tensors also has a host tensor as input.

    A host tensor with a single element is allowed.
    """
    for tensor in host_tensors:
        if tensor.numel() > 1:
            raise RuntimeError(
                f"all tensors of {func} must be on the device, got one on the host with shape"
                f" {tuple(tensor.shape)}; move it with device.move"
            )


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in an operator's arguments or results, which may be nested containers.

    This function does not use PyTorch's pytrees, which take longer than a small operator.
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


def _without(tensors: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """Return the tensors that are not among `others`, compared by identity."""
    return [tensor for tensor in tensors if not any(tensor is other for other in others)]


def _new_storages(results: list[Tensor], inputs: list[Tensor]) -> dict[int, UntypedStorage]:
    """Return a dict with the storages that an operator created, by address of their C++ objects.

    A tensor with a single element that was created without an input tensor is left out. Such a
    tensor can be combined with tensors on the host and with tensors on the device.
    """
    old = {tensor.untyped_storage()._cdata for tensor in inputs}
    created = (value.untyped_storage() for value in results if inputs or value.numel() > 1)
    return {
        storage._cdata: storage
        for storage in created
        if storage._cdata not in old and storage.nbytes()
    }


def _bytes(tensors: list[Tensor]) -> int:
    """Return the bytes that tensors take in memory; an expanded dimension counts as size 1."""
    return sum(
        tensor.itemsize
        * math.prod(n for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step)
        for tensor in tensors
    )


def _written_tensors(
    func: Callable, args: tuple, kwargs: dict
) -> tuple[list[Tensor], list[Tensor]]:
    """Return two lists of the tensors that an operator writes.

    The first list has all of them. The second list has those whose old values are not read.
    """
    changed = written_arguments(func, args, kwargs)
    # By their schema, fused optimizers write the gradients. Without grad_scale they only read them.
    if kwargs.get("grad_scale") is None:
        changed = [(argument, value) for argument, value in changed if argument.name != "grads"]
    if func.overloadpacket not in ONLY_WRITE:
        return _tensors([value for _, value in changed]), _tensors(
            [value for argument, value in changed if argument.is_out]
        )
    return (written := _tensors([value for _, value in changed])), written
