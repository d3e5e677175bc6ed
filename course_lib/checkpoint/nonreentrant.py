"""The mode without reentry: hooks put an empty slot into the graph for each tensor, and fill all when one is read.

What a maintainer should know before changing a line here:

- **Slots are known weakly.** The graph holds the slots, and with each a hook that holds the region; the region knows
  the slots by weak references only. So there is no cycle, and a region dies with its graph. And a slot that is gone
  says that nobody will read it any more (a part of the graph was freed, or a backward pass inside the function has
  used it): what belongs there is not kept when it is recomputed, and is no error.
- **Reading empties a slot.** With `retain_graph=True` the slots stay, but a recomputed tensor must go as soon as it was
  read, or all of them would be alive at the end of the backward pass.
- **Nesting.** The inputs of an inner checkpoint are saved as those of any operator in the outer function are: they are
  slots of the outer region. Reading one recomputes the outer function first, and with it the inner forward pass.
- **Early stop.** Once as many tensors were saved as in the first run, the rest of the function is not needed.
- **The compiler.** Both runs are hidden from `torch.compile` (see `uncompiled` and `call.checkpoint`): one run compiled
  and one not would save different tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError

from .._torch import tensors_in
from .report import with_operators
from .surroundings import Surroundings, kept_inputs, with_tensors, without_tensors


class _Slot:
    """Stands in the graph for a tensor that was not kept, and holds it from its recomputation until it is read."""

    __slots__ = ("__weakref__", "tensors")

    def __init__(self):
        self.tensors: dict[Any, Tensor | None] = {}  # which backward pass -> the tensor, or None once it was read


class _Stop(BaseException):
    """Everything needed has been recomputed. No `Exception`: the function's own handlers should not see it."""


class _Keep(torch.autograd.Function):
    """A node that keeps tensors as any operator does: by the hooks of an enclosing checkpoint, versions watched."""

    @staticmethod
    def forward(ctx, anchor, tensors):
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)  # a node is made only where something requires gradients

_group = getattr(torch._C, "_get_graph_exec_group", lambda: None)  # from torch 2.10 on


class Region:
    """One call of a checkpointed function: how to run it again, and the slots that this fills.

    Args:
        compare_metadata: whether to compare what both runs save, beyond how much it is.
        context: for the second run.
        logs: those of both runs, for `debug=True`.
    """

    def __init__(self, function, args, kwargs, preserve_rng_state, early_stop, compare_metadata, context, logs):
        tensors = list(tensors_in((args, kwargs)))
        self.function, self.early_stop, self.compare_metadata = function, early_stop, compare_metadata
        self.context, self.logs = context, logs
        self.surroundings = Surroundings(tensors, preserve_rng_state)
        self.inputs = without_tensors((args, kwargs))
        self.kept = _Keep.apply(_ANCHOR, tensors) if tensors else None  # its node lives as long as it does
        self.slots: list[weakref.ref[_Slot]] = []
        self.saved: list[tuple | None] = []  # the metadata of what each slot stands for, if they are compared
        self.complete = False  # whether the forward pass is through

    def forward(self, args: tuple, kwargs: dict, context: AbstractContextManager) -> Any:
        """The first run, which leaves slots in the graph."""
        with saved_tensors_hooks(self.pack, self.unpack), context:
            result = self.function(*args, **kwargs)
            self.complete = True
        if not self.complete:
            raise RuntimeError(
                "torch.utils.checkpoint: the forward context provided by context_fn suppressed an exception raised "
                "during the checkpointed forward"
            )
        self.surroundings.check_device()
        return result

    def pack(self, tensor: Tensor) -> _Slot:
        slot = _Slot()
        self.slots.append(weakref.ref(slot))
        self.saved.append(_metadata(tensor) if self.compare_metadata else None)
        return slot

    def unpack(self, slot: _Slot) -> Tensor:
        group, number = _group(), torch._C._current_graph_task_id()
        key = number if group is None else group  # the same key for backward passes that share a recomputation
        try:
            if key == -1:  # no backward pass, somebody looks at the graph: recompute, return this one, keep nothing
                return _Recomputation(self, key, only=slot).run()
            if key not in slot.tensors:
                _Recomputation(self, key).run()
            tensor, slot.tensors[key] = slot.tensors[key], None
            if tensor is None:
                raise CheckpointError(
                    "torch.utils.checkpoint: Unpack is being triggered for a tensor that was already unpacked once. "
                    "Read ctx.saved_tensors only once in backward. Performing two backward calls that overlap is not "
                    "allowed under GraphExecGroup"
                )
            return tensor
        except CheckpointError as error:
            if self.logs is None:
                raise
            raise with_operators(error, *self.logs) from error


class _Recomputation:
    """Runs a region's function again, and puts the i-th tensor that autograd saves into the i-th slot.

    Args:
        key: the backward pass that it is for.
        only: fill no slot, but return the tensor that belongs to this one.
    """

    def __init__(self, region: Region, key: Any, only: _Slot | None = None):
        self.region, self.key, self.only, self.found = region, key, only, None
        self.count, self.differences = 0, ""

    def run(self) -> Tensor | None:
        region = self.region
        tensors = kept_inputs(region.kept.grad_fn, region.function) if region.kept is not None else ()
        args, kwargs = with_tensors(region.inputs, iter(tensors))
        hooks = saved_tensors_hooks(self.pack, lambda tensor: tensor)
        with hooks, torch.enable_grad(), region.surroundings.restored(), region.context, suppress(_Stop):
            uncompiled(region.function, args, kwargs)
        if self.count < len(region.slots):
            self.fail(
                "A different number of tensors was saved during the original forward and recomputation.\n"
                f"Number of tensors saved during forward: {len(region.slots)}\n"
                f"Number of tensors saved during recomputation: {self.count}"
            )
        if self.differences:
            self.fail(
                "Recomputed values for the following tensors have different metadata than during the forward pass."
            )
        return self.found

    def pack(self, tensor: Tensor) -> Tensor:
        region, position = self.region, self.count
        # Without its history: a slot that held the graph of the recomputation would be part of a cycle.
        tensor = tensor.detach() if tensor.requires_grad else tensor
        self.count += 1
        if position < len(region.slots):
            slot = region.slots[position]()
            if slot is not None:  # else nobody will read it
                self.fill(slot, tensor, position)
            if region.early_stop and self.count == len(region.slots):
                raise _Stop
        elif region.complete and not region.early_stop:  # if not complete: a backward pass inside the function
            self.fail(
                "trying to save more tensors during recomputation than during the original forward pass.\n"
                f"Number of tensors saved during forward: {len(region.slots)}\nOne more: {_metadata(tensor)}"
            )
        return tensor  # the graph of the recomputation holds it too, for a backward pass inside the function

    def fill(self, slot: _Slot, tensor: Tensor, position: int) -> None:
        saved = self.region.saved[position]
        if saved is not None and saved != _metadata(tensor):
            saved, found = (dict(zip(("shape", "dtype", "device"), x, strict=True)) for x in (saved, _metadata(tensor)))
            self.differences += (
                f"tensor at position {position}:\nsaved metadata: {saved}\nrecomputed metadata: {found}\n"
            )
        if self.only is None:
            slot.tensors[self.key] = tensor
        elif slot is self.only:
            self.found = tensor

    def fail(self, what: str) -> None:
        raise CheckpointError(
            f"torch.utils.checkpoint: {what}\n{self.differences}The function must do the same whenever it is run. For "
            "the operators of both runs, pass `debug=True` or use `set_checkpoint_debug_enabled(True)`"
        )


@torch._disable_dynamo
def uncompiled(function: Callable, args: tuple, kwargs: dict) -> Any:
    """Call a function out of the compiler's sight.

    A backward pass may run while `torch.compile` looks at frames (compiled autograd, or a compiled function that calls
    `backward`). It would compile what the recomputation runs, and a compiled graph saves other tensors than the first
    run did. A function of the module, since the decorator keeps what it decorates alive: no region should be in there.
    """
    return function(*args, **kwargs)


def _metadata(tensor: Tensor) -> tuple:
    return tensor.shape, tensor.dtype, tensor.device
