"""What a wire carries: bytes on the loopback interface of a network namespace with nothing else in it. Linux only.

    python -m course_lib.lessons.lesson_08.carried --ranks 2
    python -m course_lib.lessons.lesson_08.carried --ranks 4 --what hsdp,reduce_scatter

No meter looks on, and nothing is taken from a collective's meaning: the kernel counts what the ranks' sockets send,
headers and acknowledgements too. It takes `unshare`, and a kernel that lets everybody make namespaces.
"""

import argparse
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from course_lib.distributed import MODES, Trainer, process_group, task_of

STEPS, WARM_UP = 4, 2  # the first step makes Adam's state, the second DDP's buckets
TENSOR_BYTES = 4_000_000
COLLECTIVES: dict[str, Callable[[Tensor, Tensor], object]] = {  # of (a whole tensor, a rank's part of it)
    "all_reduce": lambda whole, part: dist.all_reduce(whole),
    "reduce_scatter": lambda whole, part: dist.reduce_scatter_tensor(part, whole),
    "all_gather": lambda whole, part: dist.all_gather_into_tensor(whole, part),
}
GIVEN_TIMES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}  # its tensor's bytes, as the page counts them
WHAT = ("ddp", "zero1", "fsdp-keep", "fsdp", "fsdp-bf16", "hsdp", *COLLECTIVES)

#: ranks -> what -> bytes a rank and step, by the commands above: torch 2.13.0, gloo, Linux 6, November 2026.
RECORDED: Mapping[int, Mapping[str, int]] = {
    2: {
        "ddp": 27_543_722,
        "zero1": 41_318_593,
        "fsdp-keep": 41_310_723,
        "fsdp": 53_968_914,
        "fsdp-bf16": 40_758_814,
        "all_reduce": 4_004_802,
        "reduce_scatter": 4_009_132,
        "all_gather": 2_002_414,
    },
    4: {
        "ddp": 41_368_448,
        "zero1": 61_987_740,
        "fsdp-keep": 61_994_208,
        "fsdp": 80_981_279,
        "fsdp-bf16": 61_175_489,
        "hsdp": 67_757_818,
        "all_reduce": 6_008_878,
        "reduce_scatter": 6_009_154,
        "all_gather": 3_004_748,
    },
}

_MODULE = "course_lib.lessons.lesson_08.carried"
_EMPTY = ["unshare", "--map-root-user", "--net"]
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP of <linux/if.h>


def carried(ranks: int, what: Sequence[str] = tuple(COLLECTIVES)) -> dict[str, int]:
    """Bytes that a rank sends in a step of the course's decoder, or in a collective of a tensor of 4 MB.

    Args:
        what: some of `MODES`, "hsdp" and names in `COLLECTIVES`.

    Raises:
        RuntimeError: no such namespace can be made here, or the run failed; with what was said.
    """
    command = [*_EMPTY, sys.executable, "-m", _MODULE, "--ranks", str(ranks), "--what", ",".join(what), "--inside"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    except FileNotFoundError as error:
        raise RuntimeError(f"no empty network namespace can be made here: {error}") from None
    if ran.returncode:
        raise RuntimeError(f"no bytes were counted: {ran.stderr.strip()[-2000:]}")
    return json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("{")))


def _bring_up_loopback() -> None:
    """The interface of a new namespace is down."""
    import fcntl  # not on Windows

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("16sh", b"lo", 0)
        name, flags = struct.unpack("16sh", fcntl.ioctl(any_socket, _GET_FLAGS, asked))
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh", name, flags | _UP))


def _sent_so_far() -> int:
    with open("/proc/self/net/dev") as file:
        line = next(line for line in file if line.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[8])


def _count(run: Callable[[int], object]) -> int:
    """Bytes a rank and run, the mean of some that are alike."""
    for step in range(WARM_UP):
        run(step)
    dist.barrier()
    before = _sent_so_far()
    dist.barrier()
    for step in range(WARM_UP, WARM_UP + STEPS):
        run(step)
    dist.barrier()
    return round((_sent_so_far() - before) / STEPS / dist.get_world_size())


def _collective(name: str) -> Callable[[int], object]:
    whole = torch.zeros(TENSOR_BYTES // 4)
    part = torch.zeros(len(whole) // dist.get_world_size())
    return lambda step: COLLECTIVES[name](whole, part)


def _mode(name: str) -> Callable[[int], object]:
    task, ranks, rank = task_of(), dist.get_world_size(), dist.get_rank()
    trainer = Trainer(name, task.make_model(), task.loss_sum)
    return lambda step: trainer(task.part(step, ranks, rank))


def _hybrid(_: str) -> Callable[[int], object]:
    """FSDP2 within each half of the ranks, DDP between the halves."""
    task, ranks, rank = task_of(), dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    model = task.make_model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(number: int) -> None:
        loss, tokens = task.loss_sum(model, task.part(number, ranks, rank))
        (loss / tokens).backward()
        adam.step()
        adam.zero_grad()
        if number == WARM_UP + STEPS - 1:
            mean = loss.detach() / tokens / ranks
            dist.all_reduce(mean)
            if rank == 0:
                print(f"hsdp: loss {mean.item():.6f} in step {number + 1}", file=sys.stderr, flush=True)

    return step


def _run_of(name: str) -> Callable[[int], object]:
    made = _collective if name in COLLECTIVES else _hybrid if name == "hsdp" else _mode
    return made(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--what", default=",".join(WHAT), help="with commas between; default %(default)s")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # the namespace is made
    given = parser.parse_args()
    what = given.what.split(",")
    for name in what:
        if name not in {*MODES, *WHAT}:
            parser.error(f"--what is {name!r}; it takes some of {', '.join({**dict.fromkeys([*MODES, *WHAT])})}")
    if "RANK" in os.environ:
        with process_group("gloo"):
            counts = {name: _count(_run_of(name)) for name in what}
            if dist.get_rank() == 0:
                print(json.dumps(counts), flush=True)
    elif given.inside:
        _bring_up_loopback()
        started = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(given.ranks)]
        os.execv(sys.executable, [sys.executable, *started, "-m", _MODULE, *sys.argv[1:]])
    else:
        print(json.dumps(carried(given.ranks, what)))


if __name__ == "__main__":
    main()
