"""Bytes that ranks send, counted on the loopback interface of an empty network namespace.

    python -m course_lib.lessons.lesson_08.loopback --ranks 2
    python -m course_lib.lessons.lesson_08.loopback --ranks 4 --what hsdp,reduce_scatter

No meter is used, and no assumption about collectives is made. The kernel counts what the sockets of
the ranks send, including headers and acknowledgements. This works on Linux only. It needs
`unshare`, and a kernel that lets every user create namespaces.
"""

import argparse
import json
import multiprocessing
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from course_lib.distributed import MODES, Trainer, task_of

from .wire import TENSOR_BYTES

STEPS, WARM_UP = 4, 2  # the first step creates Adam's state, and the second creates DDP's buckets
# functions of (a whole tensor, a rank's part of it)
COLLECTIVES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "all_reduce": lambda whole, part: dist.all_reduce(whole),
    "reduce_scatter": lambda whole, part: dist.reduce_scatter_tensor(part, whole),
    "all_gather": lambda whole, part: dist.all_gather_into_tensor(whole, part),
}
PORT = 29500  # free, because the namespace has no other processes
WHAT = ("ddp", "zero1", "fsdp-keep", "fsdp", "fsdp-bf16", "hsdp", *COLLECTIVES)
KNOWN = tuple(dict.fromkeys([*MODES, *WHAT]))

_MODULE = "course_lib.lessons.lesson_08.loopback"
_EMPTY = ["unshare", "--map-root-user", "--net"]
# SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP of <linux/if.h>
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1


def bytes_sent(ranks: int, what: Sequence[str] = tuple(COLLECTIVES)) -> dict[str, int]:
    """Measure the bytes that a rank sends over the network, per training step or per collective.

    A step is that of the course's decoder. A collective is called on a tensor of 4 MB. The ranks
    run in an empty network namespace, so that no other process sends bytes.

    Args:
        ranks: Number of ranks.
        what: Names of modes, such as "ddp", and of collectives, such as "all_reduce". All names
            must be in `KNOWN`.

    Returns:
        Dict from each name in `what` to bytes.

    Raises:
        RuntimeError: This machine cannot create an empty network namespace, or the run failed. The
            message has the output.
    """
    command = [
        *_EMPTY,
        sys.executable,
        "-m",
        _MODULE,
        "--ranks",
        str(ranks),
        "--what",
        ",".join(what),
        "--inside",
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTORCH_JIT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    try:
        ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    except OSError as error:  # the program does not exist, or a folder in PATH cannot be read
        raise RuntimeError(
            "sent bytes are counted in a new network namespace of Linux, which this machine cannot"
            f" create: {error}"
        ) from None
    if ran.returncode:
        raise RuntimeError(
            "the process that counts the sent bytes failed; its error output:"
            f" {ran.stderr.strip()[-2000:]}"
        )
    return json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("{")))


def _bring_up_loopback() -> None:
    """Enable the loopback interface, which is down in a new namespace."""
    import fcntl  # not on Windows

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("16sh", b"lo", 0)
        name, flags = struct.unpack("16sh", fcntl.ioctl(any_socket, _GET_FLAGS, asked))
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh", name, flags | _UP))


def _sent_so_far() -> int:
    """Return the bytes that all ranks have sent on the loopback interface so far."""
    with Path("/proc/self/net/dev").open() as file:
        line = next(line for line in file if line.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[8])


def _bytes_per_call(run: Callable[[int], object]) -> int:
    """Return the bytes that a rank sends in one call of `run`, averaged over several calls."""
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
    """Return a function that runs a step with hybrid sharding on two halves of the ranks.

    FSDP2 shards the model over the ranks of each half, and the halves are replicas as in DDP.
    """
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
                print(
                    f"hsdp: loss {mean.item():.6f} in step {number + 1}",
                    file=sys.stderr,
                    flush=True,
                )

    return step


def _function_of(name: str) -> Callable[[int], object]:
    made = _collective if name in COLLECTIVES else _hybrid if name == "hsdp" else _mode
    return made(name)


def _rank(rank: int, ranks: int, what: Sequence[str], connection: Connection) -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{PORT}", rank=rank, world_size=ranks
    )
    counts = {name: _bytes_per_call(_function_of(name)) for name in what}
    dist.destroy_process_group()
    if rank == 0:
        connection.send(counts)


def _run_in_namespace(ranks: int, what: Sequence[str]) -> dict[str, int]:
    """Return the bytes for `what`; the ranks are forked, so modules are imported only once."""
    _bring_up_loopback()
    forked = multiprocessing.get_context("fork")
    receiver, sender = forked.Pipe(duplex=False)
    processes = [
        forked.Process(target=_rank, args=(rank, ranks, what, sender)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    sender.close()  # so that `recv` ends if all ranks have failed
    try:
        return receiver.recv()
    finally:
        for process in processes:
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--what", default=",".join(WHAT), help="with commas between; default %(default)s"
    )
    # this script sets the variable itself, inside the namespace
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    what = given.what.split(",")
    for name in what:
        if name not in KNOWN:
            parser.error(f"--what must be one or several of {', '.join(KNOWN)}, got {name!r}")
    print(json.dumps((_run_in_namespace if given.inside else bytes_sent)(given.ranks, what)))


if __name__ == "__main__":
    main()
