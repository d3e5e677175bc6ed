"""Measured steps of lesson 04: training steps, optimizer steps and single copies."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from course_lib.checkpoint import checkpoint_blocks
from course_lib.memory import MemoryMeter
from course_lib.models import Decoder, random_tokens
from course_lib.offload import DiskStore, OffloadedOptimizer, offload_activations
from course_lib.symbolic import symbolic


def _decoder(layers: int = 8) -> Decoder:
    return Decoder(vocabulary=2048, hidden=256, heads=8, layers=layers, sequence=128)


def metered_step(checkpointed: bool, p: int | None) -> tuple[MemoryMeter, int]:
    """Run a training step of the course's decoder, with activations offloaded to a file.

    Args:
        checkpointed: Whether each layer has a checkpoint.
        p: Number of storages that are fetched ahead in backward, or None to offload nothing.

    Returns:
        The meter that has measured the step, and the number of bytes that were copied to the file.
    """
    decoder, file = _decoder(), DiskStore()
    adam, tokens = torch.optim.Adam(decoder.parameters()), random_tokens(8, 128, 2048)
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)
    adam.step()  # creates Adam's state
    decoder.zero_grad()
    if checkpointed:
        checkpoint_blocks(decoder, "layers.*")
    with MemoryMeter(decoder, adam) as meter:
        with nullcontext() if p is None else offload_activations(file, min_bytes=2**17, prefetch=p):
            loss = decoder.loss(tokens)
        loss.backward()
        adam.step()
    return meter, file.stats.bytes_down


def checkpointed_peak(layers: int, tokens_per_h: int, p: int | None, frozen: bool = False) -> int:
    """Return the peak in bytes of forward and backward of a decoder with checkpointed layers.

    The decoder runs on symbolic tensors, which have no values.

    Args:
        layers: Number of layers.
        tokens_per_h: Tokens per step, divided by the hidden size of 256.
        p: Number of storages that are fetched ahead in backward, or None to offload nothing.
        frozen: Whether the weights of the layers require no gradients.
    """
    with symbolic(), MemoryMeter() as meter:
        decoder = _decoder(layers)
        decoder.layers.requires_grad_(not frozen)
        checkpoint_blocks(decoder, "layers.*")
        with nullcontext() if p is None else offload_activations(min_bytes=2**17, prefetch=p):
            loss = decoder.loss(random_tokens(2 * tokens_per_h, 128, 2048))
        loss.backward()
    return meter.peak_bytes


def step_peak(mib: int, fraction: float = 1.0) -> int:
    """Return the peak in bytes of the method `OffloadedOptimizer.step` for the course's decoder.

    Args:
        mib: Size in MiB of a page, the unit in which the state is copied.
        fraction: Fraction of the state that is offloaded.
    """
    decoder = _decoder()
    adam = OffloadedOptimizer(decoder.parameters(), fraction=fraction, page_bytes=mib << 20)
    for _ in range(2):  # the first step creates the state
        for parameter in decoder.parameters():
            parameter.grad = torch.ones_like(parameter)
        with MemoryMeter(decoder, adam) as meter:
            adam.step()
    return meter.peak_bytes


def whole(tensor: Tensor) -> Tensor:
    """Return a view of all elements of a tensor's storage as a one-dimensional tensor."""
    count = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.detach().as_strided((count,), (1,), 0)


def start_to_host(device: Any, y: Tensor) -> tuple[Tensor, Any]:
    """Start a copy from a simulated GPU to the host.

    Returns:
        The host tensor, and an event that is reached when the copy is complete.
    """
    host = device.pinned(y.shape, y.dtype)
    return host, device.copy(host, y, "down")


def start_to_device(device: Any, host: Tensor) -> tuple[Tensor, Any]:
    """Start a copy from the host to a simulated GPU.

    Returns:
        The device tensor, and an event that is reached when the copy is complete.
    """
    x = torch.zeros(host.shape)  # created inside the device's block, so it belongs to the device
    return x, device.copy(x, host, "up")
