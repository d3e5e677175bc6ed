"""Communication among the ranks that do a training step together.

`Ranks` decides in which backward passes gradients are reduced over the ranks, and computes sums
over the ranks. In a single process it does nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._check import one_of
from .._torch.symbolic import is_symbolic


class Ranks:
    """The processes (ranks) that do a training step together, or this process alone.

    With a DDP or FSDP2 model, these are the processes of the model's process group.

    Args:
        model: The model of the step.
        sync: "last" if only the last micro-batch of a step reduces gradients over the ranks, "each"
            if every micro-batch does.

    Attributes:
        model: The module that is replicated or sharded, or None in a single process. For a compiled
            DDP model, this is the DDP module inside it.
        replica: The attribute `model` if it is a DDP module, otherwise None.
        group: The process group, or None in a single process.
        count: Number of ranks.
        has_views: Whether gradients are views of DDP's buckets (`gradient_as_bucket_view=True`).

    Raises:
        TypeError, ValueError: `sync` is invalid, or the model has several modules that synchronize
            gradients.
    """

    def __init__(self, model: nn.Module, sync: str):
        self.model = _parallel_module(model)
        self.sync = one_of("sync", sync, ("last", "each"))
        self.replica = self.model if isinstance(self.model, DistributedDataParallel) else None
        self.group, self.count = None, 1
        if self.model is not None:
            meshes = (p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh"))
            self.group = self.replica.process_group if self.replica else next(meshes).get_group()
            self.count = torch.distributed.get_world_size(self.group)
        self.has_views = self.replica is not None and self.replica.gradient_as_bucket_view

    def validate_in_buckets(self, scaler: torch.amp.GradScaler, in_buckets: bool) -> bool:
        """Check two options of `AccumulatedStep` for this model, and return `in_buckets` unchanged.

        Args:
            scaler: Gradient scaler. It must be disabled for an FSDP2 model.
            in_buckets: Whether gradients are accumulated in DDP's buckets. This needs a DDP model
                with `gradient_as_bucket_view=True` and without `find_unused_parameters`.

        Raises:
            ValueError: The model does not support one of the options.
        """
        if scaler.is_enabled() and self.model is not self.replica:
            raise ValueError(
                "scaler must be None for an FSDP2 model, got a GradScaler: it could skip a step"
                " on one rank but not on another"
            )
        if in_buckets and (not self.has_views or self.replica.find_unused_parameters):
            raise ValueError(
                "in_buckets must be False for this model, got True: in_buckets needs a"
                " DistributedDataParallel with gradient_as_bucket_view=True and"
                " find_unused_parameters=False"
            )
        return in_buckets

    @contextmanager
    def gradient_reduction(self, last: bool) -> Iterator[None]:
        """Turn the reduction of gradients over ranks on or off for a `with` block.

        The backward pass in the `with` block reduces gradients if it belongs to the last
        micro-batch, or if `sync` is "each". Otherwise, it only adds to the gradients of this rank.

        Args:
            last: Whether the `with` block runs the last micro-batch.
        """
        if self.model is None or last or self.sync == "each":
            yield
        elif self.replica:
            with self.replica.no_sync():
                yield
        else:
            self.model.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                self.model.set_requires_gradient_sync(True)

    def sum_over_ranks(self, *values: float) -> list[float]:
        """Return each value summed over the ranks.

        With symbolic tensors, which have no values, the values of this rank are returned.
        """
        if self.model is None:
            return list(values)
        sums = torch.tensor(
            values, dtype=torch.float64, device=next(self.model.parameters()).device
        )
        torch.distributed.all_reduce(sums, group=self.group)
        return list(values) if is_symbolic(sums) else sums.tolist()

    @torch.no_grad()
    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of all gradients of the model, taken together as one vector.

        Each rank of an FSDP2 model has only a shard of each gradient. The norms of all shards are
        combined in one collective, while DTensor's own norm would need one collective per gradient.

        Args:
            gradients: The gradients on this rank.
        """
        norm = nn.utils.get_total_norm(
            [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
        )
        if self.model is self.replica:
            return norm
        square = norm.double().square()
        torch.distributed.all_reduce(square, group=self.group)
        return square.sqrt().to(norm.dtype)


def _parallel_module(model: nn.Module) -> nn.Module | None:
    """Return the DDP or FSDP2 module of a model, or None if the model has no such module.

    Raises:
        TypeError: The model has several DDP modules, or modules of another kind that synchronize
            gradients.
    """
    # DDP and FSDP have the first of these methods, and FSDP2 has the second one.
    methods = ("no_sync", "set_requires_gradient_sync")
    wrappers = [
        module for module in model.modules() if any(hasattr(module, method) for method in methods)
    ]
    if wrappers == [] or (len(wrappers) == 1 and isinstance(wrappers[0], DistributedDataParallel)):
        return wrappers[0] if wrappers else None
    from torch.distributed.fsdp import FSDPModule  # not at the top, because importing it is slow

    if not isinstance(model, FSDPModule):
        counts = Counter(type(module).__name__ for module in wrappers)
        found = ", ".join(f"{count} of class {name}" for name, count in counts.items())
        raise TypeError(
            "model must synchronize its gradients by a single DistributedDataParallel, or by"
            " fully_shard called on the whole model, got a model with modules that synchronize"
            f" their own gradients: {found}"
        )
    return model
