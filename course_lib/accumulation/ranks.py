"""The ranks that do a step together: when they reduce gradients, and their sums over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._check import one_of, shown
from .._torch import is_symbolic


class Ranks:
    """The processes that do a step together: those of a DDP or FSDP2 model, or only this one.

    Attributes:
        model: The module that is replicated or sharded, or None for a single process. For a
            compiled DDP model, the DDP module inside it.
        replica: The same module if it is a DDP module, else None.
    """

    def __init__(self, model: nn.Module, sync: str):
        self.model = _parallel(model)
        self.sync = one_of("sync", sync, ("last", "each"))
        self.replica = self.model if isinstance(self.model, DistributedDataParallel) else None
        self.group, self.count = None, 1
        if self.model is not None:
            meshes = (p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh"))
            self.group = self.replica.process_group if self.replica else next(meshes).get_group()
            self.count = torch.distributed.get_world_size(self.group)
        self.has_views = self.replica is not None and self.replica.gradient_as_bucket_view

    def checked(self, scaler: torch.amp.GradScaler, in_buckets: bool) -> bool:
        """Return `in_buckets`, after checking it and the scaler against the kind of model."""
        if scaler.is_enabled() and self.model is not self.replica:
            raise ValueError(
                "scaler must be None for an FSDP2 model, got a GradScaler; ranks could"
                " disagree about which steps to skip"
            )
        if in_buckets and (not self.has_views or self.replica.find_unused_parameters):
            raise ValueError(
                "in_buckets must be False unless the model is a DistributedDataParallel with"
                " gradient_as_bucket_view=True and without find_unused_parameters, got True"
            )
        return in_buckets

    @contextmanager
    def reducing(self, last: bool) -> Iterator[None]:
        """Let a micro-batch's backward pass, inside the block, reduce gradients over the ranks.

        If this is not the last micro-batch, it may only add to the local gradients instead.
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

    def sums(self, *values: float) -> list[float]:
        if self.model is None:
            return list(values)
        sums = torch.tensor(
            values, dtype=torch.float64, device=next(self.model.parameters()).device
        )
        torch.distributed.all_reduce(sums, group=self.group)
        return list(values) if is_symbolic(sums) else sums.tolist()

    @torch.no_grad()
    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of all gradients; with FSDP2 each rank has shards of them.

        DTensor's own norm would be reduced over the ranks once per gradient.
        """
        norm = nn.utils.get_total_norm(
            [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
        )
        if self.model is self.replica:
            return norm
        square = norm.double().square()
        torch.distributed.all_reduce(square, group=self.group)
        return square.sqrt().to(norm.dtype)


def _parallel(model: nn.Module) -> nn.Module | None:
    marks = ("no_sync", "set_requires_gradient_sync")  # methods of DDP and FSDP, and of FSDP2
    found = [module for module in model.modules() if any(hasattr(module, mark) for mark in marks)]
    if found == [] or (len(found) == 1 and isinstance(found[0], DistributedDataParallel)):
        return found[0] if found else None
    from torch.distributed.fsdp import FSDPModule  # not at the top, because importing it is slow

    if not isinstance(model, FSDPModule):
        got = f"a model with {', '.join(map(shown, found))}"
        raise TypeError(
            "model must contain one DistributedDataParallel, or be sharded as a whole by"
            f" fully_shard, or contain nothing that synchronizes gradients, got {got}"
        )
    return model
