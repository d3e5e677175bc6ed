"""What a wire carries: bytes on the loopback interface of a network namespace with nothing else in it. Linux only.

    python -m course_lib.lessons.lesson_08.carried --ranks 2
    python -m course_lib.lessons.lesson_08.carried --ranks 4 --what all_reduce,reduce_scatter

No meter looks on and nothing is taken from a collective's meaning: the kernel counts what the ranks' sockets send,
their headers and acknowledgements too. It takes `unshare`, and a kernel that lets everybody make namespaces.
"""

import argparse
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.distributed import MODES, Trainer, process_group, task_of

STEPS, WARM_UP = 4, 2  # the first step makes Adam's state, the second DDP's buckets
TENSOR_BYTES = 4_000_000
COLLECTIVES: dict[str, Callable[[Tensor, Tensor], object]] = {  # of (a whole tensor, a rank's part of it)
    "all_reduce": lambda whole, part: dist.all_reduce(whole),
    "reduce_scatter": lambda whole, part: dist.reduce_scatter_tensor(part, whole),
    "all_gather": lambda whole, part: dist.all_gather_into_tensor(whole, part),
}
STEPPED = ("ddp", "zero1", "fsdp-keep", "fsdp")
_EMPTY = ["unshare", "--map-root-user", "--net"]
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP of <linux/if.h>


def carried(ranks: int, *what: str) -> dict[str, int]:
    """Bytes that a rank sends in a step of the course's decoder by a mode, or in a collective of a tensor of 4 MB.

    Args:
        what: modes of `course_lib.distributed` and names in `COLLECTIVES`; all collectives if there are none.

    Raises:
        RuntimeError: no such namespace can be made here, or the run failed.
    """
    script = ["-m", __spec__.name if __spec__ else __name__, "--what", ",".join(what or COLLECTIVES)]
    command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, "--ranks", str(ranks), "--inside"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        ran = subprocess.run([*_EMPTY, *command, *script[2:]], capture_output=True, text=True, env=environment)
    except FileNotFoundError as error:
        raise RuntimeError(f"no empty network namespace here: {error}") from None
    if ran.returncode:
        raise RuntimeError(f"no bytes were counted: {ran.stderr[-2000:]}")
    return json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("{")))


def _bring_up_loopback() -> None:
    """The interface of a new namespace is down."""
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


def _count_steps(mode: str) -> int:
    task, ranks, rank = task_of(), dist.get_world_size(), dist.get_rank()
    trainer = Trainer(mode, task.make_model(), task.loss_sum)
    return _count(lambda step: trainer(task.part(step, ranks, rank)))


def _count_collective(name: str) -> int:
    whole = torch.zeros(TENSOR_BYTES // 4)
    part = torch.zeros(len(whole) // dist.get_world_size())
    return _count(lambda _: COLLECTIVES[name](whole, part))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--what", default=",".join([*STEPPED, *COLLECTIVES]), help="modes and collectives")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # already in the namespace
    given = parser.parse_args()
    what = given.what.split(",")
    if unknown := [name for name in what if name not in (*MODES, *COLLECTIVES)]:
        parser.error(f"--what is {unknown[0]!r}; it takes some of {', '.join([*MODES, *COLLECTIVES])}")
    if "RANK" in os.environ:
        with process_group("gloo"):
            counts = {name: (_count_collective if name in COLLECTIVES else _count_steps)(name) for name in what}
            if dist.get_rank() == 0:
                print(json.dumps(counts), flush=True)
    elif given.inside:
        _bring_up_loopback()
        started = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(given.ranks)]
        os.execv(sys.executable, [sys.executable, *started, "-m", __spec__.name, *sys.argv[1:]])
    else:
        print(json.dumps(carried(given.ranks, *what)))


if __name__ == "__main__":
    main()
