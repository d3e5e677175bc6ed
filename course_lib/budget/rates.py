"""A machine's rates, and what a step costs by them: stated for some devices, measured for this
one."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from course_lib._check import number, positive, whole
from course_lib._torch import wait_for
from course_lib.labels import listed, text, verbatim

from .optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from .estimate import Estimate
    from .recipe import Recipe


@dataclass(frozen=True)
class Rates:
    """Work that a machine does in a second. A step's cost is the seconds that result, by `seconds`.

    Attributes:
        fp32_flops: FLOPs per second of matrix products in fp32.
        bf16_flops: FLOPs per second of matrix products in bf16.
        link_bytes: bytes per second, each way, between the device and its store.
        source: where the figures are from.
        host_bytes: read and written by the host in its memory, for the optimizer's update there;
            infinity leaves that work out.
        memory_bytes: what the device has; None if that is not known.
        flops_share: share of `fp32_flops` or `bf16_flops` that a training step reaches.
        link_share: share of `link_bytes` that a copy reaches.
        peer_bytes: from one device to another, one way, within a machine of `peers`; infinity
            leaves that out.
        network_bytes: likewise, where there are more ranks than `peers`.
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
        whole("peers", self.peers, 1)
        for name in ("flops_share", "link_share"):
            number(name, getattr(self, name), 0, 1)
        if self.memory_bytes is not None:
            whole("memory_bytes", self.memory_bytes, 1, of="bytes")

    def parts(self, estimate: Estimate) -> dict[str, float]:
        """The seconds of each part, as if each ran alone: "compute", copies "down" and "up",
        "update" on the host, and what goes to other "ranks", of which a ring sends (N - 1)/N.

        Copies for the optimizer's state on the host are "gradients" and "parameters", apart from
        those of activations.
        """
        recipe = estimate.recipe
        link = self.link_bytes * self.link_share
        flops = self.flops_share * (
            self.fp32_flops if recipe.dtype == torch.float32 else self.bf16_flops
        )
        wire = self.peer_bytes if recipe.ranks <= self.peers else self.network_bytes
        # gradients down, and as many bytes of parameters up
        sent = estimate.host_parameters * recipe.dtype.itemsize
        return {
            "compute": estimate.flops / flops,
            "down": max(0, estimate.bytes_down - sent) / link,
            "up": max(0, estimate.bytes_up - sent) / link,
            "gradients": sent / link,
            "update": _host_update_bytes(estimate) / self.host_bytes,
            "parameters": sent / link,
            "ranks": estimate.sent_bytes * (1 - 1 / recipe.ranks) / wire,
        }

    def seconds(self, estimate: Estimate) -> float:
        """Seconds of the step: parts that overlap count as the longest of them, the others as their
        sum.

        With a file below, nothing overlaps. With the host below, activations are copied beside the
        compute, as far as `exposed_seconds` says, and ranks communicate; and in the optimizer's
        step gradients, update and parameters follow one another for different parameters; not so
        for steps in backward, which have one parameter at a time.
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
    """Bytes that the host reads and writes to update the parameters whose state is offloaded."""
    if estimate.host_parameters == 0:
        return 0  # also for optimizers whose state cannot be offloaded, which have no such bytes
    return estimate.host_parameters * OPTIMIZERS[estimate.recipe.optimizer].host_update_bytes


def exposed_seconds(recipe: Recipe, compute: float, down: float, up: float) -> float:
    """Seconds in which the compute waits for copies of activations to the host and back, which it
    does not hide.

    Copies down, D seconds in all, run beside forward, F; copies up, U, beside backward, G. On
    average n storages are saved at the same moment, and then something is computed. Of those, the
    last f (`in_flight`) go down beside it, and forward waits for the others; backward fetches p
    (`prefetch`) ahead, and waits for the others:

        max(D - F, max(0, 1 - f/n) D) + max(U - G, max(0, 1 - p/n) U)

    n is 2 (a product saves its input, and what came before the product its own), and F a third of
    the step's FLOPs; with checkpoints n is 1 (the input of a block) and F a quarter. At p and f of
    n or more this is layer by layer the longer of compute and copy, as in vDNN (Rhu et al. 2016,
    arXiv:1602.08124).

    By the clock of `SimulatedDevice`, on links where D is half of F to four times F, p of 0 to 2
    and f of 1 and 2, a step of an MLP of 16 layers takes what this says within 3 %; one of a
    decoder, whose products are of unlike size, up to 23 % more (16 % more with checkpoints around 8
    layers), and hardly ever less.
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
_DESKTOP = text("host memory of a desktop, 2 channels of DDR5-5600")
_EPYC = text("host memory of one EPYC 7742, 8 channels of DDR4-3200")
_XEON = text("host memory of one Xeon 8480C, 8 channels of DDR5-4800")
_HOST_BYTES = {_DESKTOP: 89.6e9, _EPYC: 204.8e9, _XEON: 307.2e9}
# Generation of the link -> rate of each direction, and the share of it that a copy reaches.
_LINKS = {
    _PCIE3: (15.75e9, 24.8 / 31.5),
    _PCIE4: (31.5e9, 24.8 / 31.5),
    _PCIE5: (63e9, 55.6 / 63),
}
_FLOPS_SHARE = 0.4  # as Llama 3 reached on H100s


def _gpu(
    teraflops: tuple[float, float],
    sheet: str,
    mebibytes: int,
    *,
    link: str,
    host: str,
    peer_bytes: float | None = None,
    network_bytes: float = 12.5e9,
) -> Rates:
    """Rates of a GPU.

    Args:
        teraflops: rates of matrix products in fp32 and bf16, dense, with sums in fp32.
        sheet: where they are from.
        mebibytes: memory.
        link, host: keys of `_LINKS` and `_HOST_BYTES`.
        peer_bytes: bytes per second to another GPU of the machine, one way; the link's rate if left
            out.
        network_bytes: bytes per second to another machine; a round figure of 100 Gb/s if left out.
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
        listed([dense, link, host, _SIZE], "; "),
        host_bytes=_HOST_BYTES[host],
        memory_bytes=mebibytes * MIB,
        flops_share=_FLOPS_SHARE,
        link_share=link_share,
        peer_bytes=peer_bytes or link_bytes,
        network_bytes=network_bytes,
    )


_ADA = text("NVIDIA Ada whitepaper, fp32 accumulate")
_A100 = text("NVIDIA A100 datasheet")
_ON_DESKTOP = {"link": _PCIE4, "host": _DESKTOP}
_ON_EPYC = {"link": _PCIE4, "host": _EPYC}
_ON_XEON = {"link": _PCIE5, "host": _XEON}
# NVLink 3 and 200 Gb/s a GPU: DGX A100 datasheet. NVLink 4 and 400 Gb/s: DGX H100 datasheet.
_DGX_A100 = {**_ON_EPYC, "peer_bytes": 300e9, "network_bytes": 25e9}
_DGX_H100 = {**_ON_XEON, "peer_bytes": 450e9, "network_bytes": 50e9}
_INFINITY_FABRIC = 448e9  # seven links of 64 GB/s one way: AMD MI300X data sheet

RATES = {
    "laptop": Rates(
        1e11,
        1e11,
        1e9,
        text("round figures: two cores of a CPU, a disk; all at the best"),
        peer_bytes=1e9,
        network_bytes=1e9,
    ),
    "T4": _gpu(
        (8.1, 8.1),
        text("NVIDIA T4 datasheet; without tensor cores for bf16, at the rate of fp32"),
        15_360,
        link=_PCIE3,
        host=_EPYC,
    ),
    "L4": _gpu((30.3, 121), text("NVIDIA L4 datasheet"), 23_034, **_ON_EPYC),
    "A10": _gpu((31.2, 125), text("NVIDIA A10 datasheet"), 23_028, **_ON_EPYC),
    "L40S": _gpu((91.6, 362), text("NVIDIA L40S datasheet"), 46_068, **_ON_EPYC),
    "RTX 3090": _gpu(
        (35.6, 71), text("NVIDIA GA102 whitepaper, fp32 accumulate"), 24_576, **_ON_DESKTOP
    ),
    "RTX 4080": _gpu((48.7, 97.5), _ADA, 16_376, **_ON_DESKTOP),
    "RTX 4090": _gpu((82.6, 165.2), _ADA, 24_564, **_ON_DESKTOP),
    "RTX 5090": _gpu(
        (104.8, 209.5),
        text("NVIDIA RTX Blackwell whitepaper, fp32 accumulate"),
        32_607,
        link=_PCIE5,
        host=_DESKTOP,
    ),
    "A100": _gpu((19.5, 312), _A100, 81_920, **_DGX_A100),
    "A100 40GB": _gpu((19.5, 312), _A100, 40_960, **_DGX_A100),
    "H100": _gpu((67, 989), text("NVIDIA H100 SXM datasheet"), 81_559, **_DGX_H100),
    "H200": _gpu((67, 989), text("NVIDIA H200 SXM datasheet"), 143_771, **_DGX_H100),
    "MI300X": _gpu(
        (163.4, 1307.4),
        text("AMD MI300X data sheet"),
        196_592,
        **{**_ON_XEON, "peer_bytes": _INFINITY_FABRIC, "network_bytes": 50e9},
    ),
}
#: Names that people type -> names of `RATES`.
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


# ---- this machine


def this_machine(file: Path | str | None = None) -> Rates:
    """The rates of this machine, as they were measured by the first call; `file` keeps them as
    JSON.

    Left out, the file is `course_lib/rates.json` in the user's cache folder (XDG_CACHE_HOME, else
    ~/.cache). Delete it to have them measured again. What was measured on another device, or by
    another torch, is not used.
    """
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    file = Path(file or Path(folder, "course_lib", "rates.json"))
    here = _here()
    try:
        kept = json.loads(file.read_text("utf-8"))
        if kept.pop("measured_on") == here:
            return Rates(**{**kept, "source": _measured_on(here)})
    # none yet, or one that cannot be read
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass
    rates = measured_rates()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            json.dumps({"measured_on": here, **asdict(rates)}, indent=1), encoding="utf-8"
        )
    except OSError:  # not kept, then
        pass
    return rates


def measured_rates(seconds: float = 2.0) -> Rates:
    """Rates of this machine, measured in about so many seconds; on CUDA with its link to the host,
    else with a file.

    Matrix products in both precisions, a copy to the tier below and back, and an addition that
    reads two large tensors and writes a third in the host's memory. They are what such a loop
    reaches, and a training step reaches less.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size, turn = (8192, seconds / 5) if device.type == "cuda" else (1024, seconds / 5)
    flops = []
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(size, size, dtype=dtype, device=device)
        out = torch.empty_like(a)
        flops.append(
            2 * size**3 / _fastest(lambda a=a, out=out: torch.mm(a, a, out=out), turn, device)
        )
    a, b, out = (torch.ones(1 << 23) for _ in range(3))  # 32 MiB each: more than caches hold
    host = 3 * a.nbytes / _fastest(lambda: torch.add(a, b, out=out), turn, torch.device("cpu"))
    link = _link(device, turn)
    memory = (
        torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    )
    source = _measured_on(_here())
    return Rates(flops[0], flops[1], link, source, host_bytes=host, memory_bytes=memory)


def _measured_on(machine: str) -> str:
    """The source of rates that were measured here."""
    return text("measured on this machine, {machine}", machine=machine)


def _link(device: torch.device, seconds: float) -> float:
    """Bytes a second to the tier below and back."""
    count = 1 << 26
    if device.type == "cuda":
        above, below = (
            torch.ones(count, dtype=torch.uint8, device=device),
            torch.ones(count, dtype=torch.uint8),
        )
        below = below.pin_memory()

        def there_and_back() -> None:
            below.copy_(above, non_blocking=True)
            above.copy_(below, non_blocking=True)

        return 2 * count / _fastest(there_and_back, seconds, device)
    data = bytes(count)
    with tempfile.TemporaryFile() as file:

        def written_and_read() -> None:
            file.seek(0)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            file.read()

        return 2 * count / _fastest(written_and_read, seconds, torch.device("cpu"))


def _fastest(work: Callable[[], object], seconds: float, device: torch.device) -> float:
    """The seconds of the quickest of several runs, the first one aside."""
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


def _here() -> str:
    """The device and the version of torch that measured rates hold for."""
    device: str = text("a CPU with {count} threads", count=torch.get_num_threads())
    if torch.cuda.is_available():
        device = verbatim(torch.cuda.get_device_name())
    return text("{device}, torch {version}", device=device, version=verbatim(torch.__version__))
