"""Measure the memory of an optimizer's update from updates of only a few parameters.

The equal blocks of a model have parameters of equal shapes, and updates of parameters of equal
shapes need equal numbers of bytes. Therefore the update of one parameter is measured once per
shape, and the update of a deep model is measured without most of its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from course_lib.budget.device_kinds import on_kind
from course_lib.budget.loss import trainable_parameters
from course_lib.budget.optimizers import OPTIMIZERS
from course_lib.budget.recipe import Recipe
from course_lib.budget.step import make_state
from course_lib.budget.traces.process_trace import StepMeter, symbolic_optimizer
from course_lib.offload import SymbolicStore, Traffic


@dataclass
class Update:
    """Memory, FLOPs and copied bytes of one optimizer update of some of a model's parameters.

    Attributes:
        held: Bytes of optimizer state that stay on the device between updates.
        more: Live bytes at the peak of the update minus live bytes before the update. An array of
            shape (categories,), in the order of `course_lib.memory.CATEGORIES`.
        operator: Name of the operator that runs at the peak; empty if no operator ran.
        totals: Array of shape (3,): FLOPs, bytes copied to the lower tier (host memory or disk),
            and bytes copied back.
    """

    held: int
    more: np.ndarray
    operator: str
    totals: np.ndarray


class UpdateCache:
    """Cache of the measured optimizer updates of one model.

    The updates run on symbolic tensors, which need no memory.

    Args:
        model: Model to train.
        blocks: Equal blocks of the model, in their order.
        tier: Lower tier, where offloaded optimizer state is stored: "file", or "host" for host
            memory.
        kind: Kind of device, "cpu" or "cuda".
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], tier: str, kind: str = "cpu"):
        self.model, self.trained = model, trainable_parameters(model)
        self.blocks, self.tier, self.kind = blocks, tier, kind
        self.cache: dict[Any, Update] = {}

    def update_of_all(self, recipe: Recipe, offloaded: set[Tensor]) -> Update:
        """Return the memory, FLOPs and copied bytes of an update of all parameters of the model.

        To save time, the update is run without the parameters that `parameters_left_out` returns,
        because these parameters do not change the peak. Their optimizer state, FLOPs and copied
        bytes are measured separately, by updating one parameter of each shape alone, and are added
        to the result.

        Args:
            recipe: Memory-saving techniques. Only the settings of the optimizer are used.
            offloaded: Parameters whose optimizer state is offloaded.
        """
        recipe = on_kind(recipe, self.kind)
        key = recipe.offload_optimizer, recipe.optimizer, recipe.update, recipe.page_bytes
        if key not in self.cache:
            parameters_left_out = self.parameters_left_out(recipe, offloaded)
            found = self.measure_update(
                [p for p in self.trained if p not in parameters_left_out], recipe, offloaded
            )
            each = [self.update_of(p, recipe, p in offloaded) for p in parameters_left_out]
            held = found.held + sum(e.held for e in each)
            totals = found.totals + sum(e.totals for e in each)
            self.cache[key] = Update(held, found.more, found.operator, totals)
        return self.cache[key]

    def parameters_left_out(self, recipe: Recipe, offloaded: set[Tensor]) -> set[Tensor]:
        """Return parameters without which an update of the model has the same peak.

        The trainable parameters of each block form two groups, one with offloaded optimizer state
        and one without. A group can be left out if it has the same shapes in five consecutive
        blocks: the block itself, the two blocks before it, and the two blocks after it.

        If the recipe uses the class `OffloadedOptimizer`, which updates the parameters page by
        page, there is a second condition. At least one parameter of the group must have more than
        `page_bytes` bytes in fp32. Such a large parameter is a page by itself. The smaller
        parameters between two large parameters are then divided into pages in the same way in every
        block.

        The result is empty if all parameters are updated at once, or if several parameters share a
        tensor of the optimizer state.

        Args:
            recipe: Memory-saving techniques. Only the settings of the optimizer are used.
            offloaded: Parameters whose optimizer state is offloaded.
        """
        shares_state = OPTIMIZERS[recipe.optimizer].shares_state
        if on_kind(recipe, self.kind).update != "loop" or shares_state:
            return set()
        found: set[Tensor] = set()
        for is_offloaded in (True, False):
            rows = [
                [
                    p
                    for p in block.parameters()
                    if p.requires_grad and (p in offloaded) == is_offloaded
                ]
                for block in self.blocks
            ]
            looks = [[p.shape for p in row] for row in rows]
            for i in range(2, len(rows) - 2):
                ends = not recipe.uses_offloaded_optimizer or any(
                    4 * p.numel() > recipe.page_bytes for p in rows[i]
                )
                if ends and all(look == looks[i] for look in looks[i - 2 : i + 3]):
                    found.update(rows[i])
        return found

    def update_of(self, p: Tensor, recipe: Recipe, offloaded: bool) -> Update:
        """Return the memory, FLOPs and copied bytes of an update of one parameter.

        Args:
            p: Parameter of the model.
            recipe: Memory-saving techniques. Only the settings of the optimizer are used.
            offloaded: Whether the optimizer state of the parameter is offloaded.
        """
        recipe = on_kind(recipe, self.kind)
        # A single parameter is one page, so the result does not depend on page_bytes.
        takes = OPTIMIZERS[recipe.optimizer].select_parameters
        taken = takes is None or p in takes(self.model)
        key = p.shape, p.dtype, offloaded, recipe.optimizer, recipe.update, taken
        if key not in self.cache:
            self.cache[key] = self.measure_update(
                [p], replace(recipe, offload_optimizer=float(offloaded)), {p} if offloaded else ()
            )
        return self.cache[key]

    def measure_update(
        self, parameters: Sequence[Tensor], recipe: Recipe, offloaded: set[Tensor]
    ) -> Update:
        """Run and measure an update of only the given parameters.

        The optimizer state is created before the measurement, so the measured update is like any
        update after the first one.

        Args:
            parameters: Parameters to update.
            recipe: Memory-saving techniques. Only the settings of the optimizer are used.
            offloaded: Parameters whose optimizer state is offloaded.
        """
        size, update_of_all = (
            sum(p.numel() for p in parameters if p in group)
            for group in (offloaded, set(parameters))
        )
        # The optimizer offloads the largest parameters first, until their share of all elements
        # reaches `offload_optimizer`. Half an element is subtracted, so that the optimizer chooses
        # exactly the parameters in `offloaded`, despite rounding.
        recipe = replace(recipe, offload_optimizer=max(0.0, size - 0.5) / update_of_all)
        part = nn.ParameterList(parameters)
        store = SymbolicStore()
        optimizer = symbolic_optimizer(part, recipe, store, self.tier, self.model)
        make_state(part, optimizer)
        store.stats = Traffic()
        try:
            for p in parameters:
                p.grad = torch.empty_like(p)
            with StepMeter(part, optimizer, recipe, source_lines=False) as meter:
                optimizer.step()
        finally:
            for p in parameters:
                p.grad = None
        given = sum(p.nbytes for p in parameters)
        entry = {"parameter": given, "gradient": given, "optimizer": meter.entry_bytes - 2 * given}
        trace = meter.trace(events=False)
        more = np.array([count - entry.get(name, 0) for name, count in trace.at_peak().items()])
        totals = np.array([meter.flops, store.stats.bytes_down, store.stats.bytes_up])
        return Update(
            entry["optimizer"], more, trace.peak_operator if meter.operator_count else "", totals
        )
