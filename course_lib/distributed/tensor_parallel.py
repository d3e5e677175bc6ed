r"""Tensor parallelism, with or without sequence parallelism, by PyTorch's `parallelize_module`.

    tp      the matrices of each layer are cut; activations between them are whole on every rank
    tp-sp   tp, and between the matrices the activations are cut along the sequence

All ranks compute on the same batch. The embeddings and the head are whole on every rank. The model
is the course's `Decoder`, or one whose layers have the same names. Started by torchrun, the module
trains the decoder of the course and prints one line of JSON per mode:

    python -m torch.distributed.run --standalone --nproc-per-node 2 \
        -m course_lib.distributed.tensor_parallel

Sources: Shoeybi et al. 2019, arXiv:1909.08053 (tensor parallelism); Korthikanti et al. 2022,
arXiv:2205.05198 (sequence parallelism).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from course_lib._check import one_of

# absolute imports, because torchrun may run this file by its path
from course_lib.distributed.formulas import STATE, STEP_BYTES, Shapes, shapes_of
from course_lib.distributed.measurement import RankUsage, Watch
from course_lib.distributed.modes import LossSum
from course_lib.distributed.prediction import fake_rank
from course_lib.distributed.training.tasks import Task, task_of
from course_lib.distributed.training.torchrun import end_with_torchrun, process_group

TENSOR_MODES = ("tp", "tp-sp")
#: Ends of the names of parameters that are cut. Norms are whole on every rank, and so are the
#: biases of matrices that are cut by columns, because they are added after the sum over ranks.
CUT = (
    "attention.qkv.weight",
    "attention.qkv.bias",
    "attention.out.weight",
    "feedforward.0.weight",
    "feedforward.0.bias",
    "feedforward.2.weight",
)
STEPS = 2  # the last one is measured; the first creates Adam's state


def plan_of(sequence: bool) -> dict[str, Any]:
    """Return the plan of `parallelize_module` for a `Decoder`.

    Args:
        sequence: Whether to use sequence parallelism, too.
    """
    split, whole = (Shard(1),), (Replicate(),)
    sums = RowwiseParallel(output_layouts=Shard(1)) if sequence else RowwiseParallel()
    plan: dict[str, Any] = {
        "layers.*.attention.qkv": ColwiseParallel(),
        "layers.*.attention.out": sums,
        "layers.*.feedforward.0": ColwiseParallel(),
        "layers.*.feedforward.2": sums,
    }
    if not sequence:
        return plan
    norm = SequenceParallel(use_local_output=True)
    gather = PrepareModuleInput(input_layouts=split, desired_input_layouts=whole)
    first = {"input_layouts": whole, "desired_input_layouts": split, "use_local_output": True}
    last = {"input_layouts": split, "desired_input_layouts": whole, "use_local_output": True}
    return {
        "layers.0": PrepareModuleInput(**first),
        **plan,
        **dict.fromkeys(("layers.*.norm1", "layers.*.norm2", "norm"), norm),
        **dict.fromkeys(("layers.*.attention", "layers.*.feedforward"), gather),
        "head": PrepareModuleInput(**last),
    }


def parallelize(model: nn.Module, mesh: DeviceMesh, *, sequence: bool = False) -> None:
    """Cut the matrices of a `Decoder` among the ranks of a mesh, in place.

    `ColwiseParallel` gives each rank consecutive rows of a weight. The rows of `qkv` are therefore
    reordered first, so that a rank gets the queries, keys and values of the same heads.

    Raises:
        ValueError: The number of ranks does not divide the heads.
    """
    for layer in model.layers:  # pyrefly: ignore[not-iterable]
        heads, ranks = layer.attention.heads, mesh.size()
        if heads % ranks:
            raise ValueError(f"ranks must be a divisor of the model's {heads} heads, got {ranks}")
        for p in layer.attention.qkv.parameters():
            p.data = by_rank(p.detach(), ranks)
    # every rank has built the same model, so no values need to be sent
    parallelize_module(model, mesh, plan_of(sequence), src_data_rank=None)


def by_rank(qkv: Tensor, ranks: int) -> Tensor:
    """Reorder the rows (3, heads, size) of a weight or bias to (ranks, 3, heads / ranks, size)."""
    return qkv.unflatten(0, (3, ranks, -1)).transpose(0, 1).flatten(0, 2)


class TensorParallel:
    """A rank's part of a `Decoder`, and the step with AdamW that all ranks do on the same batch.

    It has the attributes of `Trainer` that a `Watch` reads, so that a `Watch` can measure its
    steps.

    Args:
        mode: One of `TENSOR_MODES`.
        model: Model with equal values on all ranks; changed in place.
        loss_sum: Function (model, batch) -> (sum of losses, weight).
        lr: Learning rate.
    """

    def __init__(self, mode: str, model: nn.Module, loss_sum: LossSum, *, lr: float = 1e-3):
        self.mode, self.model, self.loss_sum = one_of("mode", mode, TENSOR_MODES), model, loss_sum
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parallelize(model, mesh, sequence=mode == "tp-sp")
        # a fused update takes no mixture of DTensors and other tensors
        cut = [p for p in model.parameters() if isinstance(p, DTensor)]
        whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
        groups = [{"params": cut}, {"params": whole}]
        self.optimizer = self.local = torch.optim.AdamW(groups, lr=lr, fused=True)

    def backward(self, batch: Any) -> Tensor:
        """Compute the gradients of the mean loss, and return the loss.

        With sequence parallelism, a rank's gradient of a norm is that of its own tokens. The sum
        over the ranks is made here.
        """
        loss, weight = self.loss_sum(self.model, batch)
        (loss / weight).backward()
        for p in self.model.parameters():
            if isinstance(p, DTensor) and p.grad.placements != p.placements:
                p.grad = p.grad.redistribute(placements=p.placements)
        return loss.detach() / weight

    def __call__(self, batch: Any) -> Tensor:
        """Do one step and return the mean loss."""
        loss = self.backward(batch)
        self.update()
        return loss

    def update(self) -> None:
        """Update the weights and release the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def tensor_held_bytes(shapes: Shapes, ranks: int) -> dict[str, int]:
    """Return the bytes of each of `STATE` that a rank holds when AdamW steps, in either mode."""
    numbers = [w.numbers // (ranks if w.name.endswith(CUT) else 1) for w in shapes.all]
    state = 8 * sum(numbers) + STEP_BYTES * len(numbers)
    return dict(zip(STATE, (4 * sum(numbers), 4 * sum(numbers), state), strict=True))


def tensor_sent_bytes(shapes: Shapes, mode: str, activation_bytes: int) -> int:
    """Return the bytes that a rank communicates per step, as counted by `CommunicationCounter`.

    With tp, each layer has two all-reduces in the forward pass and two in the backward pass. With
    tp-sp, a reduce-scatter and an all-gather replace each of the four all-reduces. The sequence is
    also gathered once before the head in the forward pass, and once in the backward pass, where the
    forward pass had first split it, before layer 0. The gradients of the norms are all-reduced.

    Args:
        activation_bytes: Bytes of one whole activation tensor (batch, sequence, hidden size).
    """
    layers = len(shapes.blocks)
    if one_of("mode", mode, TENSOR_MODES) == "tp":
        return 4 * layers * 2 * activation_bytes
    norms = sum(w.numbers * w.item_bytes for w in shapes.all if "norm" in w.name)
    return (8 * layers + 2) * activation_bytes + 2 * norms


def predict_tensor(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[], Any],
    loss_sum: LossSum,
    mode: str,
    ranks: int,
) -> RankUsage:
    """Predict what a rank's steady step needs, with one symbolic rank, as `predict` does."""
    with fake_rank(ranks, 0), Watch(model := make_model()) as watch:
        trainer = TensorParallel(mode, model, loss_sum)
        batch = make_batch()
        for _ in range(STEPS):
            with watch.step(trainer):
                trainer(batch)
    return watch.taken  # pyrefly: ignore[bad-return]  # not None, since steps were run


def whole_gradients(task: Task) -> dict[str, Tensor]:
    """Return the gradients of the first step's mean loss, as one process alone computes them."""
    model = task.make_model()
    loss, weight = task.loss_sum(model, task.make_batch(0))
    (loss / weight).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradient_difference(model: nn.Module, whole: Mapping[str, Tensor]) -> float:
    """Return the largest difference between the gradients of a rank's model and the whole ones.

    It is the difference of an entry, as a share of the largest entry of its parameter's gradient.
    """
    largest = 0.0
    for name, p in model.named_parameters():
        expected = by_rank(whole[name], dist.get_world_size()) if "qkv" in name else whole[name]
        found = p.grad.full_tensor() if isinstance(p, DTensor) else p.grad
        difference = (found - expected).abs().max() / expected.abs().max()
        largest = max(largest, difference.item())
    return largest


def measure(task: Task, mode: str, whole: Mapping[str, Tensor]) -> dict[str, Any]:
    """Train for `STEPS` steps on the ranks of the process group, and return a line of results.

    Args:
        whole: Gradients of the first step, as `whole_gradients` returns them.
    """
    model = task.make_model()
    shapes, difference = shapes_of(model), 0.0
    with Watch(model) as watch:
        trainer, losses = TensorParallel(mode, model, task.loss_sum), []
        for step in range(STEPS):
            batch = task.make_batch(step)
            with watch.step(trainer):
                loss = trainer.backward(batch)
                if step == 0:
                    difference = gradient_difference(model, whole)
                trainer.update()
            losses.append(loss.item())
            del loss  # it would be live in the next step
    usages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(usages, watch.taken)
    return {
        "mode": mode,
        "ranks": len(usages),
        "losses": losses,
        "gradient_difference": difference,
        "predicted": tensor_held_bytes(shapes, len(usages)),
        "taken": [asdict(usage) for usage in usages],
    }


def main() -> None:
    end_with_torchrun()
    with process_group("gloo"):
        task = task_of()
        whole = whole_gradients(task)
        for mode in TENSOR_MODES:
            line = measure(task, mode, whole)
            if dist.get_rank() == 0:
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
