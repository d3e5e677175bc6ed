"""Speeds of machines, such as FLOPs per second, and the time that a training step takes on them.

`RATES` states the speeds of some devices, and `this_machine` measures the speed of this machine.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from course_lib._check import number, positive, whole
from course_lib._torch.devices import wait_for
from course_lib.distributed.formulas import ring_bytes
from course_lib.labels import join_labels, text, verbatim
from course_lib.options import parse_name
from course_lib.symbolic import Gpu

from .optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from .estimate import Estimate
    from .recipe import Recipe


@dataclass(frozen=True)
class Rates:
    """Speed of a machine in FLOPs and bytes per second, and the memory of its device.

    The method `seconds` computes the duration of an estimated training step from these numbers. For
    a device that is not in the table `RATES`, create an object of this class, or change one from
    the table: `dataclasses.replace(RATES["A100"], memory_bytes=40 << 30)`.

    Attributes:
        fp32_flops: FLOPs per second of matrix products in fp32.
        bf16_flops: FLOPs per second of matrix products in bf16.
        link_bytes: Bytes per second, in each direction, between the device and the lower tier,
            which is host memory or a disk.
        source: Text that names the source of these numbers.
        host_bytes: Bytes per second that the host reads and writes in its memory when it updates
            parameters. With infinity, the time of these updates is not counted.
        memory_bytes: Memory of the device in bytes; None if it is not known.
        flops_share: Share of `fp32_flops` or `bf16_flops` that a training step reaches, from 0 to
            1.
        link_share: Share of `link_bytes` that a copy reaches, from 0 to 1.
        peer_bytes: Bytes per second from one device of the machine to another. With infinity, the
            time of communication within a machine is not counted.
        network_bytes: Bytes per second of one network card, in each direction. This number is used
            only if a step has more ranks than `peers`.
        peers: Number of devices per machine.
        network_cards: Number of network cards per machine.
        capability: Compute capability of an NVIDIA GPU, such as (9, 0); None for any other device.
            The attention kernels and the size of cuBLAS's workspace depend on it.
        context_bytes: Bytes of the device's memory that CUDA occupies for each process. Required if
            `capability` is given.
        context_source: Text that names the source of `context_bytes`.

    Raises:
        TypeError, ValueError: A value has the wrong type or is out of its range, or `context_bytes`
            is missing.
    """

    fp32_flops: float
    bf16_flops: float
    link_bytes: float
    source: str = ""
    host_bytes: float = math.inf
    memory_bytes: int | None = None
    flops_share: float = 1.0
    link_share: float = 1.0
    peer_bytes: float = math.inf
    network_bytes: float = math.inf
    peers: int = 8
    network_cards: int = 1
    capability: tuple[int, int] | None = None
    context_bytes: int | None = None
    context_source: str = ""

    def __post_init__(self):
        for name in (
            "fp32_flops",
            "bf16_flops",
            "link_bytes",
            "host_bytes",
            "flops_share",
            "link_share",
        ):
            positive(name, getattr(self, name))
        for name in ("peer_bytes", "network_bytes"):
            positive(name, getattr(self, name))
        for name in ("peers", "network_cards"):
            whole(name, getattr(self, name), 1)
        for name in ("flops_share", "link_share"):
            number(name, getattr(self, name), 0, 1)
        if self.memory_bytes is not None:
            whole("memory_bytes", self.memory_bytes, 1, of="bytes")
        if self.capability is not None:
            Gpu(self.capability)
            whole("context_bytes", self.context_bytes, 0, of="bytes")

    @property
    def gpu(self) -> Gpu | None:
        """`Gpu` with the compute capability of this device, for the argument `gpu` of `estimate`.

        The value is None if `capability` is None.
        """
        return None if self.capability is None else Gpu(self.capability)

    def parts(self, estimate: Estimate) -> dict[str, float]:
        """Return the duration of each part of an estimated training step, in seconds.

        Each duration is computed as if the part ran alone. The method `seconds` combines the parts.

        Args:
            estimate: Estimate of the step.

        Returns:
            A dict from the name of each part to seconds:

            - "compute": all FLOPs of the step.
            - "down" and "up": copies of activations to the lower tier and back. With the tier
              "file", copies of optimizer state are included.
            - "gradients", "update" and "parameters": copies of gradients to the host, the update of
              parameters on the host, and copies of parameters back. With the tier "file", these
              parts are 0.
            - "ranks": communication of N ranks (processes) in a ring, at the rate `ring_rate`. The
              data of a collective is divided into N parts, of which each rank sends N - 1.
              Therefore each rank sends (N - 1)/N of `estimate.sent_bytes`, the bytes that it passes
              to collectives. The latency of each collective is not counted.
        """
        recipe = estimate.recipe
        link = self.link_bytes * self.link_share
        flops = self.flops_share * (
            self.fp32_flops
            if recipe.dtype == torch.float32 and recipe.precision != "autocast"
            else self.bf16_flops
        )
        # Bytes of the gradients that are copied to the host, and also of the parameters that are
        # copied back.
        sent = estimate.host_parameters * recipe.dtype.itemsize
        return {
            "compute": estimate.flops / flops,
            "down": max(0, estimate.bytes_down - sent) / link,
            "up": max(0, estimate.bytes_up - sent) / link,
            "gradients": sent / link,
            "update": _host_update_bytes(estimate) / self.host_bytes,
            "parameters": sent / link,
            "ranks": ring_bytes(estimate.sent_bytes, recipe.ranks) / self.ring_rate(recipe.ranks),
        }

    def ring_rate(self, ranks: int) -> float:
        """Return the rate of ring collectives, in bytes that each rank sends per second.

        In a ring collective, such as NCCL's all-reduce, each rank sends data to the next rank of a
        ring. Each machine runs `peers` ranks, except the last machine, which may run fewer.

        On a single machine, the rate is `peer_bytes`. On several machines, the rate is the lower of
        two numbers: `peer_bytes`, and `network_bytes` times the number of network cards in use per
        machine. The number of cards in use is `network_cards`, but at most the number of ranks on
        the machine with the fewest ranks. For example, 9 ranks on machines with 8 devices use one
        card per machine.

        A machine cannot use more cards than it has ranks, because NCCL divides the data among
        several rings. Each ring leaves the machine from a different device, through a different
        card.

        Args:
            ranks: Number of ranks in the ring.

        Source: github.com/NVIDIA/nccl, issue 412. According to a maintainer, NCCL uses several
        network cards at once if the devices of a machine exchange data as fast as all of these
        cards together. NVLink is fast enough, and PCIe is not.
        """
        if ranks <= self.peers:
            return self.peer_bytes
        fewest = ranks % self.peers or self.peers
        return min(self.peer_bytes, min(self.network_cards, fewest) * self.network_bytes)

    def seconds(self, estimate: Estimate) -> float:
        """Return the duration of an estimated training step on this machine, in seconds.

        The durations of the parts of the step come from the method `parts`. How they are combined
        depends on the lower tier of the estimate, where offloaded tensors are stored.

        **Tier "file".** No two parts overlap, so the durations are added up.

        **Tier "host", forward and backward.** The compute overlaps with the communication between
        ranks and with the copies of activations. The seconds in which the compute waits for copies
        (see `exposed_seconds`) are added to the compute. Forward and backward take as long as this
        sum, or as long as the communication if that is longer.

        **Tier "host", optimizer step.** For offloaded optimizer state, three parts overlap: copies
        of gradients to the host, updates on the host, and copies of parameters back. The duration
        of the longest of them is added to the duration of forward and backward. If the optimizer
        updates each parameter during backward, all three durations are added, because only one
        parameter is updated at a time.

        Args:
            estimate: Estimate of the step.
        """
        part = self.parts(estimate)
        if estimate.tier == "file":
            copied = estimate.moved_bytes - estimate.sent_bytes
            return part["compute"] + copied / (self.link_bytes * self.link_share) + part["ranks"]
        rest = part["gradients"], part["update"], part["parameters"]
        step = sum(rest) if estimate.recipe.in_backward else max(rest)
        copied = exposed_seconds(estimate.recipe, part["compute"], part["down"], part["up"])
        return max(part["compute"] + copied, part["ranks"]) + step


def _host_update_bytes(estimate: Estimate) -> int:
    """Return the bytes that the host reads and writes to update the offloaded parameters."""
    if estimate.host_parameters == 0:
        # The property `host_update_bytes` in `OPTIMIZERS` raises for an optimizer whose state
        # cannot be offloaded.
        return 0
    return estimate.host_parameters * OPTIMIZERS[estimate.recipe.optimizer].host_update_bytes


def exposed_seconds(recipe: Recipe, compute: float, down: float, up: float) -> float:
    """Return the seconds that a step spends waiting for copies of offloaded activations.

    The result is

        max(D - F, max(0, 1 - f/n) D) + max(U - G, max(0, 1 - p/n) U)

    where

    - D is the time of all copies to the host, which overlap with the forward compute of F seconds;
    - U is the time of all copies back, which overlap with the backward compute of G seconds;
    - n is the number of storages that forward saves in quick succession: 2 without checkpoints, and
      1 with them (the reason is given below);
    - f is `in_flight`, the number of copies to the host that may run at once: if f is below n,
      forward waits for n - f of n copies;
    - p is `prefetch`, the number of storages that backward fetches ahead: if p is below n, backward
      waits for n - p of n copies.

    Without checkpoints, F is a third of `compute`, because backward needs twice the FLOPs of
    forward. n is 2, because a matrix product and the operator before it each save their input. With
    checkpoints, F is a quarter of `compute`, because backward also repeats forward. n is 1, because
    only the input of a block is saved. If p and f are at least n, each pass takes the longer of its
    compute and its copies, max(F, D) or max(G, U). In vDNN (Rhu et al. 2016, arXiv:1602.08124),
    each single layer takes the longer of its compute and its copies.

    The formula was compared with the clock of `SimulatedDevice`. In the comparison, D was between
    half of F and four times F, p was 0, 1 or 2, and f was 1 or 2. For a step of an MLP of 16
    layers, the clock and the formula agree to within 3%. For a step of a decoder, whose matrix
    products differ in size, the formula gives too short a time: on the clock, the step takes up to
    23% longer (16% with checkpoints around 8 layers). The step hardly ever takes less time than the
    formula says.

    Args:
        recipe: Techniques of the step, with the fields `prefetch`, `in_flight` and `checkpoint`.
        compute: Seconds of all FLOPs, F + G.
        down: Seconds of all copies to the host, D.
        up: Seconds of all copies back, U.
    """
    prefetch, in_flight = recipe.copies("host")
    together, share = (2, 1 / 3) if recipe.checkpoint == "none" else (1, 1 / 4)
    forward = share * compute
    waits_down = max(0.0, 1 - in_flight / together) * down
    waits_up = max(0.0, 1 - prefetch / together) * up
    return max(down - forward, waits_down) + max(up - (compute - forward), waits_up)


MIB = 1 << 20
_PCIE3 = text("PCIe 3.0 x16, at the share of its rate that PCIe 4.0 reaches")
_PCIE4 = text("PCIe 4.0 x16, 24.8 of 31.5 GB/s as nvbandwidth measures on an A100")
_PCIE5 = text("PCIe 5.0 x16, 55.6 of 63 GB/s as in NVIDIA's article on nvbandwidth")
_SIZE = text("memory as nvidia-smi shows it")
_USABLE = text("memory as torch reports it on such a GPU, less than nvidia-smi shows")
_DESKTOP = text("host memory of a desktop, 2 channels of DDR5-5600")
_EPYC = text("host memory of one EPYC 7742, 8 channels of DDR4-3200")
_XEON = text("host memory of one Xeon 8480C, 8 channels of DDR5-4800")
_HOST_BYTES = {_DESKTOP: 89.6e9, _EPYC: 204.8e9, _XEON: 307.2e9}
# Maps each generation of PCIe to two numbers: the rate of the link in bytes per second, in each
# direction, and the share of this rate that a copy reaches.
_LINKS = {
    _PCIE3: (15.75e9, 24.8 / 31.5),
    _PCIE4: (31.5e9, 24.8 / 31.5),
    _PCIE5: (63e9, 55.6 / 63),
}
# Size of a CUDA context, measured on an H200 with PyTorch 2.11, CUDA 13.0 and driver 580.159, as
# the device's memory in use minus the reserved bytes. The difference was 552,402,944 bytes when the
# context had been created, 718,077,952 bytes after a matrix product, and 806,158,336 bytes after
# training steps in fp32 and bf16.
_ON_H200 = 806_158_336, text("measured on an H200, PyTorch 2.11")
# Size of a CUDA context that is assumed for NVIDIA GPUs that were not measured. On an RTX 6000 Ada,
# nvidia-smi showed 426 MiB for a process with PyTorch 2.10 and CUDA 13.0 that had only created its
# context. Source: github.com/unslothai/unsloth-zoo, pull request 1053. The context grows later,
# because kernels are loaded into it when they are first used.
_ASSUMED = (
    426 * MIB,
    text("assumed as on an RTX 6000 Ada: nvidia-smi, PyTorch 2.10 (unsloth-zoo, #1053)"),
)
# Share of the peak FLOP/s that a step reaches. Llama 3 reached 38 to 43% on H100s.
_FLOPS_SHARE = 0.4


def _gpu(
    teraflops: tuple[float, float],
    sheet: str,
    mebibytes: int,
    *,
    link: str,
    host: str,
    peer_bytes: float | None = None,
    network_bytes: float = 12.5e9,
    network_cards: int = 1,
    usable_bytes: int | None = None,
    capability: tuple[int, int] | None,
    context: tuple[int, str] = _ASSUMED,
) -> Rates:
    """Return the speed and the memory of a GPU as `Rates`, given the numbers of its data sheet.

    Args:
        teraflops: TFLOPs per second of dense matrix products in fp32 and in bf16, with sums in
            fp32.
        sheet: Text that names the source of `teraflops`.
        mebibytes: Memory in MiB, as nvidia-smi shows it.
        link: Generation of the PCIe link between GPU and host, as a key of `_LINKS`.
        host: Kind of host memory, as a key of `_HOST_BYTES`.
        peer_bytes: Bytes per second to another GPU of the machine, in one direction; by default the
            rate of the link.
        network_bytes: Bytes per second of one network card, in each direction. The default is a
            round number, 100 Gb/s.
        network_cards: Number of network cards per machine.
        usable_bytes: Memory of the device in bytes as torch reports it; None if this was not
            measured. It is smaller than `mebibytes`, because the driver uses a part of the memory.
        capability: Compute capability, from NVIDIA's table "CUDA GPU Compute Capability"; None for
            another maker's GPU.
        context: Bytes that CUDA occupies for each process, and a text that names the source of this
            number.
    """
    link_bytes, link_share = _LINKS[link]
    dense = text(
        "{sheet}, dense, at 40% as Llama 3 reached on H100s (38 to 43%, arXiv:2407.21783)",
        sheet=sheet,
    )
    return Rates(
        teraflops[0] * 1e12,
        teraflops[1] * 1e12,
        link_bytes,
        join_labels([dense, link, host, _USABLE if usable_bytes else _SIZE], "\n- "),
        host_bytes=_HOST_BYTES[host],
        memory_bytes=usable_bytes or mebibytes * MIB,
        flops_share=_FLOPS_SHARE,
        link_share=link_share,
        peer_bytes=peer_bytes or link_bytes,
        network_bytes=network_bytes,
        network_cards=network_cards,
        capability=capability,
        context_bytes=None if capability is None else context[0],
        context_source="" if capability is None else context[1],
    )


_ADA = text("NVIDIA Ada whitepaper, fp32 accumulate")
_A100 = text("NVIDIA A100 datasheet")
_ON_DESKTOP = {"link": _PCIE4, "host": _DESKTOP}
_ON_EPYC = {"link": _PCIE4, "host": _EPYC}
_ON_XEON = {"link": _PCIE5, "host": _XEON}
# Machines of 8 GPUs with a network card per GPU. The DGX A100 datasheet states NVLink 3 and eight
# single-port network cards of 200 Gb/s for compute (NVIDIA ConnectX-6). The DGX H100 datasheet
# states NVLink 4 and eight network cards of 400 Gb/s (ConnectX-7). NVIDIA's documentation of DGX
# BasePOD, "Core Components", states the same for DGX H100 and H200. Table 6 of the DGX H100 User
# Guide lists which GPU each network card belongs to.
_DGX_A100 = {**_ON_EPYC, "peer_bytes": 300e9, "network_bytes": 25e9, "network_cards": 8}
_DGX_H100 = {**_ON_XEON, "peer_bytes": 450e9, "network_bytes": 50e9, "network_cards": 8}
# The AMD MI300X data sheet states seven links of 64 GB/s in each direction. AMD's documentation of
# ROCm ("vLLM distributed inference with MoRI") states eight ConnectX-7 cards, one for each GPU.
_MI300X = {**_ON_XEON, "peer_bytes": 448e9, "network_bytes": 50e9, "network_cards": 8}

RATES = {
    "laptop": Rates(
        1e11,
        1e11,
        1e9,
        text("round numbers for two cores of a CPU and a disk, at their best"),
        peer_bytes=1e9,
        network_bytes=1e9,
    ),
    "T4": _gpu(
        (8.1, 8.1),
        text("NVIDIA T4 datasheet; without tensor cores for bf16, at the rate of fp32"),
        15_360,
        link=_PCIE3,
        host=_EPYC,
        capability=(7, 5),
    ),
    "L4": _gpu((30.3, 121), text("NVIDIA L4 datasheet"), 23_034, **_ON_EPYC, capability=(8, 9)),
    "A10": _gpu((31.2, 125), text("NVIDIA A10 datasheet"), 23_028, **_ON_EPYC, capability=(8, 6)),
    "L40S": _gpu((91.6, 362), text("NVIDIA L40S datasheet"), 46_068, **_ON_EPYC, capability=(8, 9)),
    "RTX 3090": _gpu(
        (35.6, 71),
        text("NVIDIA GA102 whitepaper, fp32 accumulate"),
        24_576,
        **_ON_DESKTOP,
        capability=(8, 6),
    ),
    "RTX 4080": _gpu((48.7, 97.5), _ADA, 16_376, **_ON_DESKTOP, capability=(8, 9)),
    "RTX 4090": _gpu((82.6, 165.2), _ADA, 24_564, **_ON_DESKTOP, capability=(8, 9)),
    "RTX 5090": _gpu(
        (104.8, 209.5),
        text("NVIDIA RTX Blackwell whitepaper, fp32 accumulate"),
        32_607,
        link=_PCIE5,
        host=_DESKTOP,
        capability=(12, 0),
    ),
    "A100": _gpu((19.5, 312), _A100, 81_920, **_DGX_A100, capability=(8, 0)),
    "A100 40GB": _gpu((19.5, 312), _A100, 40_960, **_DGX_A100, capability=(8, 0)),
    "H100": _gpu(
        (67, 989),
        text("NVIDIA H100 SXM datasheet"),
        81_559,
        **_DGX_H100,
        capability=(9, 0),
        context=_ON_H200,
    ),
    "H200": _gpu(
        (67, 989),
        text("NVIDIA H200 SXM datasheet"),
        143_771,
        **_DGX_H100,
        usable_bytes=150_109_880_320,
        capability=(9, 0),
        context=_ON_H200,
    ),
    "MI300X": _gpu(
        (163.4, 1307.4),
        text("AMD MI300X data sheet"),
        196_592,
        **_MI300X,
        capability=None,
    ),
}
#: Maps common spellings of device names to keys of `RATES`.
DEVICE_NAMES = {
    "A100 80GB": "A100",
    "A100 SXM4 80GB": "A100",
    "A100 SXM4 40GB": "A100 40GB",
    "H100 80GB": "H100",
    "H100 SXM": "H100",
    "3090": "RTX 3090",
    "4080": "RTX 4080",
    "4090": "RTX 4090",
    "5090": "RTX 5090",
    "cpu": "laptop",
}


def rates_of(device: str | Rates) -> Rates:
    """Return the rates of a device, given its name or the rates themselves.

    Args:
        device: Name in the table `RATES` or another common spelling of it, such as "RTX 4090" or
            "4090"; or `Rates`, which are returned unchanged.

    Raises:
        ValueError: There is no device of this name. The message gives the most similar name.
    """
    if isinstance(device, Rates):
        return device
    try:
        return RATES[parse_name(RATES, DEVICE_NAMES)(device)]
    except ArgumentTypeError as error:
        raise ValueError(
            f"device {error} (for a device that is not listed, pass a Rates object)"
        ) from None


# ---- Rates of this machine


def _with_this_gpu(rates: Rates) -> Rates:
    """Return the rates with the compute capability and CUDA context size of this machine's GPU.

    Without an NVIDIA GPU, the rates are returned unchanged.
    """
    if not torch.cuda.is_available() or torch.version.hip:
        return rates
    capability, (count, source) = torch.cuda.get_device_capability(), _ASSUMED
    if capability == RATES["H200"].capability:
        count, source = _ON_H200
    return replace(rates, capability=capability, context_bytes=count, context_source=source)


def this_machine(seconds: float = 2.0) -> Rates:
    """Measure the rates of this machine.

    Loops run matrix products in fp32 and bf16, copies to the lower tier and back, and additions of
    large tensors in host memory. The lower tier is host memory if there is a GPU, and a file
    otherwise. The result has the rate of the fastest iteration of each loop. A training step
    reaches lower rates.

    Args:
        seconds: Approximate duration of all measurements together.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size, turn = (8192, seconds / 5) if device.type == "cuda" else (1024, seconds / 5)
    flops = []
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(size, size, dtype=dtype, device=device)
        out = torch.empty_like(a)
        flops.append(
            2 * size**3 / _fastest_call(lambda a=a, out=out: torch.mm(a, a, out=out), turn, device)
        )
    # Each tensor takes 32 MiB, which is more than the caches hold.
    a, b, out = (torch.ones(1 << 23) for _ in range(3))
    host = 3 * a.nbytes / _fastest_call(lambda: torch.add(a, b, out=out), turn, torch.device("cpu"))
    link = _link_rate(device, turn)
    memory = (
        torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    )
    source = text("measured on this machine, {machine}", machine=_device_and_version())
    rates = Rates(flops[0], flops[1], link, source, host_bytes=host, memory_bytes=memory)
    return _with_this_gpu(rates)


def _link_rate(device: torch.device, seconds: float) -> float:
    """Return the rate of copies to the lower tier and back, in bytes per second.

    The lower tier is host memory for a GPU, and a file for a CPU. Copies run back and forth for
    about `seconds` seconds, and the fastest round trip determines the rate.
    """
    count = 1 << 26
    if device.type == "cuda":
        on_device, on_host = (
            torch.ones(count, dtype=torch.uint8, device=device),
            torch.ones(count, dtype=torch.uint8),
        )
        on_host = on_host.pin_memory()

        def round_trip() -> None:
            on_host.copy_(on_device, non_blocking=True)
            on_device.copy_(on_host, non_blocking=True)

        return 2 * count / _fastest_call(round_trip, seconds, device)
    data = bytes(count)
    with tempfile.TemporaryFile() as file:

        def written_and_read() -> None:
            file.seek(0)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            file.read()

        return 2 * count / _fastest_call(written_and_read, seconds, torch.device("cpu"))


def _fastest_call(work: Callable[[], object], seconds: float, device: torch.device) -> float:
    """Call `work` for some seconds, and return the duration of the fastest call in seconds."""
    work()
    best = math.inf
    end = time.perf_counter() + seconds
    while best == math.inf or time.perf_counter() < end:
        wait_for(device)
        start = time.perf_counter()
        work()
        wait_for(device)
        best = min(best, time.perf_counter() - start)
    return best


def _device_and_version() -> str:
    """Return a label of this device and PyTorch version."""
    device: str = text("a CPU with {count} threads", count=torch.get_num_threads())
    if torch.cuda.is_available():
        device = verbatim(torch.cuda.get_device_name())
    return text("{device}, torch {version}", device=device, version=verbatim(torch.__version__))
