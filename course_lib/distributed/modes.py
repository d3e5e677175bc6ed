"""One model, one optimizer step over several ranks, by PyTorch's own engines; a mode says which.

    ddp              DistributedDataParallel: every rank holds all, gradients are all-reduced
    zero1            ddp with ZeroRedundancyOptimizer: each parameter's Adam state is on one rank
    fsdp             fully_shard (FSDP2) at each block: its parameters are gathered, used and
                     dropped (ZeRO 3)
    fsdp-keep        gathered parameters are kept from forward to backward: the traffic of ZeRO 2,
                     which would hold them between steps too, where these are sharded
    fsdp-checkpoint  fsdp, and each block forgets its activations
    fsdp-bf16        fsdp, gathered and computed in bf16, reduced and stepped in fp32
    fsdp-cpu         fsdp, shards and optimizer in host memory; takes a device to offload from

Nothing is parallel by code of ours. The process group is there before a `Trainer` is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from course_lib._check import one_of
from course_lib._torch import tensors_in
from course_lib.accumulation import AccumulatedStep, split
from course_lib.checkpoint import checkpoint_blocks

from .formulas import MODES, REPLICATED, SYNCS, blocks_of

LossSum = Callable[[nn.Module, Any], tuple[Tensor, float | Tensor]]


class Trainer:
    """A rank's part of a model, and the step that all ranks take together, with AdamW.

    Attributes:
        model: what was given, by now sharded or replicated; its parameters have the names of a
            plain model's.
        optimizer: what steps; `local` is the optimizer that holds this rank's state, the same one
            but for zero1.
        result: the `StepResult` of the last step.

    Args:
        mode: one of `MODES`.
        model: on the CPU or the device, with equal values on all ranks; changed in place.
        loss_sum: (model, micro-batch) -> (sum of losses, weight), as for `AccumulatedStep`.
        device: where it is trained.
        micro_batches: pieces of a rank's batch, whose gradients are added up.
        sync: "last": gradients are reduced with the last piece only, DDP's `no_sync` and FSDP2's
            `set_requires_gradient_sync(False)` before; "each": with every one.
        blocks: what is sharded, and checkpointed, one by one, as for `checkpoint_blocks`.
        wrapper: fsdp-checkpoint by the framework's `checkpoint_wrapper` in place of
            `checkpoint_blocks`.
        bf16: the precision of fsdp-bf16 in another mode that shards.
        in_buckets: micro-batches of ddp and zero1 add up in DDP's buckets, as for
            `AccumulatedStep`.
        max_norm: clip the gradient of all ranks to this norm.
    """

    def __init__(
        self,
        mode: str,
        model: nn.Module,
        loss_sum: LossSum,
        *,
        device: torch.device | str = "cpu",
        micro_batches: int = 1,
        sync: str = "last",
        blocks: str | list[str] | None = None,
        wrapper: bool = False,
        bf16: bool = False,
        in_buckets: bool = False,
        max_norm: float | None = None,
        lr: float = 1e-3,
    ):
        self.mode = one_of("mode", mode, MODES)
        self.model = model
        self.device = torch.device(device)
        self.micro_batches = micro_batches
        self.sync = one_of("sync", sync, SYNCS)
        if mode in REPLICATED:
            self.run = DistributedDataParallel(
                _Loss(model.to(device), loss_sum), gradient_as_bucket_view=True
            )
            loss_sum = nn.Module.__call__  # run(piece)
        else:
            shard(model, mode, self.device, blocks, wrapper, bf16)
            self.run = model
        parameters = [p for p in model.parameters() if p.requires_grad]
        if mode == "zero1":
            from torch.distributed.optim import ZeroRedundancyOptimizer  # takes long to import

            self.optimizer = ZeroRedundancyOptimizer(
                parameters, torch.optim.AdamW, lr=lr, fused=True
            )
        else:
            self.optimizer = torch.optim.AdamW(parameters, lr=lr, fused=True)
        options = {"sync": sync, "in_buckets": in_buckets, "max_norm": max_norm}
        self.step = AccumulatedStep(self.run, self.optimizer, loss_sum, **options)

    @property
    def local(self) -> torch.optim.Optimizer:
        return self.optimizer.optim if self.mode == "zero1" else self.optimizer

    def __call__(self, batch: Any) -> float:
        """One step on this rank's samples; the mean loss over the tokens of all ranks."""
        size = -(-len(next(tensors_in(batch))) // self.micro_batches)
        self.result = self.step(split(batch, size))
        return self.result.loss


def shard(
    model: nn.Module,
    mode: str,
    device: torch.device,
    blocks=None,
    wrapper: bool = False,
    bf16: bool = False,
) -> None:
    """`fully_shard` at each block and at the root, in place."""
    names = blocks_of(model, blocks)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if mode == "fsdp-checkpoint" and not wrapper:
        checkpoint_blocks(model, list(names))
    options: dict[str, Any] = {"mesh": mesh}
    if bf16 or mode == "fsdp-bf16":
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    if mode == "fsdp-cpu":
        options["offload_policy"] = CPUOffloadPolicy()
    for name in names:
        block = model.get_submodule(name)
        if mode == "fsdp-checkpoint" and wrapper:
            block = checkpoint_wrapper(block)
            model.set_submodule(name, block)
        fully_shard(block, reshard_after_forward=mode != "fsdp-keep", **options)
    fully_shard(model, reshard_after_forward=False, **options)


class _Loss(nn.Module):
    """A model with its loss, since DDP must be called itself to synchronise."""

    def __init__(self, model: nn.Module, loss_sum: LossSum):
        super().__init__()
        self.model, self.loss_sum = model, loss_sum

    def forward(self, piece: Any) -> tuple[Tensor, float | Tensor]:
        return self.loss_sum(self.model, piece)
