"""Train one model on several ranks with one of PyTorch's engines, selected by a mode.

    ddp              DistributedDataParallel: every rank holds everything, gradients are all-reduced
    zero1            ddp with ZeroRedundancyOptimizer: each parameter's Adam state is on one rank
    fsdp             fully_shard (FSDP2) at each block: its parameters are gathered, used and
                     released (ZeRO 3)
    fsdp-keep        fsdp, and gathered parameters are kept from forward to backward. This sends as
                     many bytes as ZeRO 2, but between steps the parameters are sharded
    fsdp-checkpoint  fsdp, and the activations of each block are recomputed
    fsdp-bf16        fsdp, gathered and computed in bf16, reduced and updated in fp32
    fsdp-cpu         fsdp, shards and optimizer in host memory; needs a GPU to offload from

This module implements no parallelism itself. The process group must exist before a `Trainer` is
created.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from course_lib._batches import Split, parts_of
from course_lib._check import one_of
from course_lib.accumulation import AccumulatedStep
from course_lib.checkpoint import checkpoint_blocks

from .formulas import MODES, REPLICATED, SYNCS, blocks_of

LossSum = Callable[[nn.Module, Any], tuple[Tensor, float | Tensor]]


class Trainer:
    """One rank's part of a model, and the training step with AdamW that all ranks do together.

    Call the object with this rank's batch to do one step. The call returns the mean loss over the
    tokens of all ranks.

    Attributes:
        model: The given model, which is now sharded or replicated. Its parameters keep their names.
        optimizer: The optimizer whose `step` is called.
        local: The optimizer with this rank's state. It differs from `optimizer` only in mode zero1,
            where `optimizer` is a `ZeroRedundancyOptimizer` around it.
        result: The `StepResult` of the last step.

    Args:
        mode: One of `MODES`: "ddp", "zero1", "fsdp", "fsdp-keep", "fsdp-checkpoint", "fsdp-bf16" or
            "fsdp-cpu". `python -m course_lib.distributed --help` describes each of them.
        model: Model on the CPU or on `device`, with equal values on all ranks. It is changed in
            place.
        loss_sum: Function (model, micro-batch) -> (sum of losses, weight). The weight is the number
            by which the sum is divided, such as the number of tokens.
        device: Device on which the model is trained.
        micro_batches: Number of micro-batches in a rank's batch.
        split: Function (batch, parts) -> list of `parts` batches, which splits a rank's batch into
            micro-batches. The default is `course_lib.accumulation.split`.
        sync: "each" if every micro-batch reduces gradients over the ranks, or "last" if only the
            last micro-batch does. With "last", all earlier micro-batches use DDP's `no_sync` or
            FSDP2's `set_requires_gradient_sync(False)`.
        blocks: Names of the blocks that are sharded separately, as in `checkpoint_blocks`. Mode
            fsdp-checkpoint also checkpoints these blocks. Ignored in ddp and zero1.
        bf16: Whether an fsdp mode gathers weights and computes in bf16, and reduces gradients in
            fp32. Always true in mode fsdp-bf16, ignored in ddp and zero1.
        in_buckets: Whether gradients are accumulated in DDP's buckets instead of in separate
            tensors (see `AccumulatedStep`). Only for the modes ddp and zero1.
        max_norm: Largest norm of the gradient over all ranks. A gradient with a larger norm is
            clipped. None for no clipping.
        lr: Learning rate of AdamW.
    """

    def __init__(
        self,
        mode: str,
        model: nn.Module,
        loss_sum: LossSum,
        *,
        device: torch.device | str = "cpu",
        micro_batches: int = 1,
        split: Split | None = None,
        sync: str = "last",
        blocks: str | list[str] | None = None,
        bf16: bool = False,
        in_buckets: bool = False,
        max_norm: float | None = None,
        lr: float = 1e-3,
    ):
        self.mode = one_of("mode", mode, MODES)
        self.model = model
        self.device = torch.device(device)
        self.micro_batches, self.split = micro_batches, split
        self.sync = one_of("sync", sync, SYNCS)
        if mode in REPLICATED:
            self.run = DistributedDataParallel(
                _ModelWithLoss(model.to(device), loss_sum), gradient_as_bucket_view=True
            )
            loss_sum = nn.Module.__call__  # so the step calls `self.run(micro_batch)`
        else:
            shard(model, mode, self.device, blocks, bf16)
            self.run = model
        parameters = [p for p in model.parameters() if p.requires_grad]
        if mode == "zero1":
            from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import

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
        """Do one step on this rank's samples; return the mean loss over the tokens of all ranks."""
        self.result = self.step(parts_of(batch, self.micro_batches, self.split))
        return self.result.loss


def shard(
    model: nn.Module,
    mode: str,
    device: torch.device,
    blocks=None,
    bf16: bool = False,
) -> None:
    """Apply FSDP2's `fully_shard` to each block of a model and to the model itself, in place.

    Args:
        model: The model.
        mode: A mode with FSDP, such as "fsdp". "fsdp-checkpoint" also checkpoints the blocks.
        device: Device on which the model is trained.
        blocks: Names of the blocks that are sharded separately, as in `checkpoint_blocks`.
        bf16: Whether to gather weights and compute in bf16, and to reduce gradients in fp32. Always
            true in mode fsdp-bf16.
    """
    names = blocks_of(model, blocks)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if mode == "fsdp-checkpoint":
        checkpoint_blocks(model, list(names))
    options: dict[str, Any] = {"mesh": mesh}
    if bf16 or mode == "fsdp-bf16":
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    if mode == "fsdp-cpu":
        options["offload_policy"] = CPUOffloadPolicy()
    for name in names:
        fully_shard(model.get_submodule(name), reshard_after_forward=mode != "fsdp-keep", **options)
    fully_shard(model, reshard_after_forward=False, **options)


class _ModelWithLoss(nn.Module):
    """A model and its loss in one module, which DDP wraps.

    DDP reduces gradients only if its own `forward` is called, so `forward` must compute the loss.
    """

    def __init__(self, model: nn.Module, loss_sum: LossSum):
        super().__init__()
        self.model, self.loss_sum = model, loss_sum

    def forward(self, micro_batch: Any) -> tuple[Tensor, float | Tensor]:
        return self.loss_sum(self.model, micro_batch)
