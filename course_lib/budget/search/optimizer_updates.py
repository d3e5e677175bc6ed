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
    """Memory, FLOPs and copies of an optimizer's update of some parameters.

    Attributes:
        held: Bytes of optimizer state that are live before and after the update.
        more: Additional live bytes at the peak of the update, compared with before the update. An
            array of shape (categories,), with the categories of `course_lib.memory.CATEGORIES`.
        operator: Name of the operator at the peak; empty if no operator ran.
        totals: FLOPs, bytes copied to the lower tier, and bytes copied back, of shape (3,).
    """

    held: int
    more: np.ndarray
    operator: str
    totals: np.ndarray


class UpdateCache:
    """Cache of the optimizer updates of one model, which are measured on symbolic tensors.

    Args:
        model: The model.
        blocks: Equal blocks of the model, in their order.
        tier: Tier where offloaded state is kept, "file" or "host".
        kind: Kind of device, "cpu" or "cuda".
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], tier: str, kind: str = "cpu"):
        self.model, self.trained = model, trainable_parameters(model)
        self.blocks, self.tier, self.kind = blocks, tier, kind
        self.cache: dict[Any, Update] = {}

    def update_of_all(self, recipe: Recipe, offloaded: set[Tensor]) -> Update:
        """Return the update of all parameters of the model.

        It is measured without the parameters that `parameters_left_out` returns. Their state, FLOPs
        and copies are added from the updates of single parameters.

        Args:
            recipe: Recipe with the optimizer's settings.
            offloaded: Parameters whose state is offloaded.
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
        """Return the parameters that a measured update can leave out without changing its peak.

        These parameters belong to blocks whose two predecessors and two successors have trainable
        parameters of the same shapes. Parameters with offloaded state and all other parameters are
        compared separately, so only one of the two kinds may be left out for a block. In a paged
        update, small parameters share a page with their neighbors. Therefore a block is left out
        only if one of its parameters is larger than a page.

        The set is empty if all parameters are updated at once or share a tensor of the state.
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
        """Return the update of one parameter, whose state is offloaded if `offloaded` is true."""
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
        """Run and measure an update of only the given parameters, whose state exists already.

        Args:
            parameters: Parameters to update.
            recipe: Recipe with the optimizer's settings.
            offloaded: Parameters whose state is offloaded.
        """
        size, update_of_all = (
            sum(p.numel() for p in parameters if p in group)
            for group in (offloaded, set(parameters))
        )
        # The largest parameters are offloaded first. Half an element less than their total makes
        # the optimizer choose exactly those in `offloaded`, despite rounding.
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
