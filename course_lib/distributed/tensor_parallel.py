"""Tensor parallelism, with or without sequence parallelism, with PyTorch's `parallelize_module`.

    tp      the matrices of each layer are cut; activations between them are whole on every rank
    tp-sp   tp, and between the matrices the activations are cut along the sequence

All ranks compute on the same batch. The embeddings and the head are whole on every rank. The model
is the course's `Decoder`, or one whose layers have the same names. The script `model_parallel` runs
both modes.

Sources: Shoeybi et al. 2019, arXiv:1909.08053 (tensor parallelism); Korthikanti et al. 2022,
arXiv:2205.05198 (sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from course_lib.distributed.formulas import STATE, STEP_BYTES, Shapes
from course_lib.distributed.measurement import RankUsage, Watch
from course_lib.distributed.modes import LossSum
from course_lib.distributed.prediction import fake_rank
from course_lib.distributed.training.tasks import Task

TENSOR_MODES = ("tp", "tp-sp")
#: Ends of the names of parameters that are cut. Norms are whole on every rank. The biases of
#: `attention.out` and `feedforward.2` are whole as well, because they are added after the sum over
#: ranks.
CUT = (
    "attention.qkv.weight",
    "attention.qkv.bias",
    "attention.out.weight",
    "feedforward.0.weight",
    "feedforward.0.bias",
    "feedforward.2.weight",
)
STEPS = 2  # number of steps; the first one creates Adam's state, and the second one is measured


def plan_of(sequence: bool) -> dict[str, Any]:
    """Return the plan for PyTorch's `parallelize_module` that cuts the matrices of a `Decoder`.

    The plan is a dict from the name of a module to its parallel style, such as `ColwiseParallel()`.

    Args:
        sequence: Whether to use sequence parallelism in addition to tensor parallelism.
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

    `ColwiseParallel` gives each rank consecutive rows of a weight. The rows of the weight and bias
    of `qkv` are therefore reordered first, so that a rank gets the queries, keys and values of the
    same heads.

    Args:
        model: The decoder, with equal values on all ranks.
        mesh: One-dimensional mesh of the ranks.
        sequence: Whether to use sequence parallelism in addition to tensor parallelism.

    Raises:
        ValueError: The number of ranks does not divide the number of heads.
    """
    for layer in model.layers:  # pyrefly: ignore[not-iterable]
        heads, ranks = layer.attention.heads, mesh.size()
        if heads % ranks:
            raise ValueError(f"ranks must be a divisor of the model's {heads} heads, got {ranks}")
        for p in layer.attention.qkv.parameters():
            p.data = by_rank(p.detach(), ranks)
    # Every rank has built the same model, so no values need to be sent.
    parallelize_module(model, mesh, plan_of(sequence), src_data_rank=None)


def by_rank(qkv: Tensor, ranks: int) -> Tensor:
    """Reorder the rows of a `qkv` weight or bias, so that each rank's rows are consecutive.

    The order of the rows changes from (3, heads, size) to (ranks, 3, heads / ranks, size).

    Args:
        qkv: Weight or bias of the layer that computes queries, keys and values.
        ranks: Number of ranks among which the heads are divided.
    """
    return qkv.unflatten(0, (3, ranks, -1)).transpose(0, 1).flatten(0, 2)


class TensorParallel:
    """Training of a `Decoder` with tensor parallelism: each layer's matrices are cut among ranks.

    Call the object with the same batch on all ranks to do one step, in which the ranks update their
    parts with AdamW. The call returns the mean loss. A `Watch` can measure the steps, as it can
    measure those of a `Trainer`.

    Args:
        mode: "tp", or "tp-sp" for sequence parallelism in addition.
        model: Model with equal values on all ranks. It is changed in place.
        loss_sum: Function (model, batch) -> (sum of losses, weight). The weight is the
            number by which the sum is divided, such as the number of tokens.
        lr: Learning rate.
    """

    def __init__(self, mode: str, model: nn.Module, loss_sum: LossSum, *, lr: float = 1e-3):
        self.mode, self.model, self.loss_sum = one_of("mode", mode, TENSOR_MODES), model, loss_sum
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parallelize(model, mesh, sequence=mode == "tp-sp")
        # A fused update cannot mix DTensors with other tensors.
        cut = [p for p in model.parameters() if isinstance(p, DTensor)]
        whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
        groups = [{"params": cut}, {"params": whole}]
        self.optimizer = self.local = torch.optim.AdamW(groups, lr=lr, fused=True)

    def backward(self, batch: Any) -> Tensor:
        """Compute the gradients of the mean loss, and return the loss.

        With sequence parallelism, backward computes a norm layer's gradient only from the tokens of
        this rank. This method then sums these gradients over the ranks.

        Args:
            batch: The batch, which is the same on all ranks.
        """
        loss, weight = self.loss_sum(self.model, batch)
        (loss / weight).backward()
        for p in self.model.parameters():
            if isinstance(p, DTensor) and p.grad.placements != p.placements:
                p.grad = p.grad.redistribute(placements=p.placements)
        return loss.detach() / weight

    def __call__(self, batch: Any) -> Tensor:
        """Do one training step on a batch, and return the mean loss."""
        loss = self.backward(batch)
        self.update()
        return loss

    def update(self) -> None:
        """Update the weights with AdamW, and set all gradients to None."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def tensor_held_bytes(shapes: Shapes, ranks: int) -> dict[str, int]:
    """Return the bytes of parameters, gradients and AdamW's state on one rank of `TensorParallel`.

    These are the bytes that exist when AdamW steps, for parameters in fp32.

    Args:
        shapes: Shapes of the model's parameters.
        ranks: Number of ranks.

    Returns:
        A dict with the keys "parameter", "gradient" and "optimizer".
    """
    numbers = [w.numbers // (ranks if w.name.endswith(CUT) else 1) for w in shapes.all]
    state = 8 * sum(numbers) + STEP_BYTES * len(numbers)
    return dict(zip(STATE, (4 * sum(numbers), 4 * sum(numbers), state), strict=True))


def tensor_sent_bytes(shapes: Shapes, mode: str, activation_bytes: int) -> int:
    """Return the bytes that a rank of `TensorParallel` communicates per training step.

    An all-reduce of n bytes counts as 2n, every other collective as n. In mode tp, each layer has
    two all-reduces in the forward pass and two in the backward pass. In mode tp-sp, a
    reduce-scatter and an all-gather replace each of these four all-reduces. Mode tp-sp also has two
    all-gathers outside the layers. One gathers the activations before the head. The other, in the
    backward pass, gathers the gradient of the input of layer 0. In addition, tp-sp all-reduces the
    gradients of the norms.

    Args:
        shapes: Shapes of the model's parameters.
        mode: "tp" or "tp-sp".
        activation_bytes: Bytes of one whole activation tensor, of shape (batch, sequence, hidden
            size).
    """
    layers = len(shapes.blocks)
    if one_of("mode", mode, TENSOR_MODES) == "tp":
        return 4 * layers * 2 * activation_bytes
    norms = sum(w.numbers * w.item_bytes for w in shapes.all if "norm" in w.name)
    return (8 * layers + 2) * activation_bytes + 2 * norms


def predict_tensor_parallel(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[], Any],
    loss_sum: LossSum,
    mode: str,
    ranks: int,
) -> RankUsage:
    """Predict the memory, communicated bytes and FLOPs of the second training step on rank 0.

    The prediction uses symbolic tensors in this process, and starts no other processes.

    Args:
        make_model: Function that builds the model.
        make_batch: Function that returns the batch, which is the same on all ranks.
        loss_sum: Function (model, batch) -> (sum of losses, weight). The weight is the
            number by which the sum is divided, such as the number of tokens.
        mode: "tp", or "tp-sp" for sequence parallelism in addition.
        ranks: Number of ranks.
    """
    with fake_rank(ranks, 0), Watch(model := make_model()) as watch:
        trainer = TensorParallel(mode, model, loss_sum)
        batch = make_batch()
        for _ in range(STEPS):
            with watch.step(trainer):
                trainer(batch)
    return watch.taken  # pyrefly: ignore[bad-return]  # not None, since steps were run


def whole_gradients(task: Task) -> dict[str, Tensor]:
    """Return the gradients of the first step's mean loss without parallelism, by parameter name.

    Rank 0 computes them, and sends them to all ranks. Every rank must call this function.

    Args:
        task: The model and its batches.
    """
    model = task.make_model()
    if dist.get_rank() == 0:
        loss, weight = task.loss_sum(model, task.make_batch(0))
        (loss / weight).backward()
    gradients = {}
    for name, p in model.named_parameters():
        gradients[name] = torch.zeros_like(p) if p.grad is None else p.grad
        dist.broadcast(gradients[name], src=0)
    return gradients


def gradient_difference(
    model: nn.Module, whole: Mapping[str, Tensor], *, cut: bool = True
) -> float:
    """Return the largest relative difference between the gradients of a parallel model and `whole`.

    For each parameter, the largest absolute difference between two entries is divided by the
    largest absolute entry of the expected gradient.

    Args:
        model: The parallel model, whose gradients were computed on all ranks.
        whole: Expected gradients by parameter name, as `whole_gradients` returns them.
        cut: Whether `parallelize` has reordered the rows of `qkv` in the model. If so, the expected
            gradients of `qkv` are reordered in the same way before the comparison.
    """
    largest = 0.0
    for name, p in model.named_parameters():
        reordered = cut and "qkv" in name
        expected = by_rank(whole[name], dist.get_world_size()) if reordered else whole[name]
        found = p.grad.full_tensor() if isinstance(p, DTensor) else p.grad
        difference = (found - expected).abs().max() / expected.abs().max()
        largest = max(largest, difference.item())
    return largest
