"""Memory of an optimizer's updates, found by updates of few parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from course_lib.offload import SymbolicStore, Traffic

from .kinds import on_kind
from .process import StepMeter, symbolic_optimizer
from .recipe import Recipe
from .step import make_state


@dataclass
class Update:
    """Memory of an update of some parameters: the state they hold, and, at the peak, how much more
    in each category.

    `totals` are FLOPs, bytes moved down, bytes moved up.
    """

    held: int
    more: np.ndarray
    operator: str
    totals: np.ndarray


class Updates:
    """Updates of the parameters of one model, each measured once, in symbolic mode."""

    def __init__(
        self, trained: Sequence[Tensor], blocks: Sequence[nn.Module], tier: str, kind: str = "cpu"
    ):
        self.trained, self.blocks, self.tier, self.kind = trained, blocks, tier, kind
        self.known: dict[Any, Update] = {}

    def of_all(self, recipe: Recipe, below: set[Tensor]) -> Update:
        """Update of all parameters, one after the other or in pages. Of equal blocks few are run,
        and count for the others."""
        recipe = on_kind(recipe, self.kind)
        key = recipe.offload_optimizer, recipe.optimizer, recipe.update, recipe.page_bytes
        if key not in self.known:
            left_out = self.left_out(recipe, below)
            found = self.stepped([p for p in self.trained if p not in left_out], recipe, below)
            each = [self.of(p, recipe, p in below) for p in left_out]
            held = found.held + sum(e.held for e in each)
            totals = found.totals + sum(e.totals for e in each)
            self.known[key] = Update(held, found.more, found.operator, totals)
        return self.known[key]

    def left_out(self, recipe: Recipe, below: set[Tensor]) -> set[Tensor]:
        """Parameters of blocks with two like them before and two after, among those that go the
        same way.

        What is small shares a page with its neighbours; where nothing large stands between them,
        none is left out. Nor is it where all are updated at once, or share a table.
        """
        if on_kind(recipe, self.kind).update != "loop" or recipe.optimizer == "adam8bit":
            return set()
        found: set[Tensor] = set()
        for way in (True, False):
            rows = [
                [p for p in block.parameters() if p.requires_grad and (p in below) == way]
                for block in self.blocks
            ]
            looks = [[p.shape for p in row] for row in rows]
            for i in range(2, len(rows) - 2):
                ends = not recipe.has_pages or any(
                    4 * p.numel() > recipe.page_bytes for p in rows[i]
                )
                if ends and all(look == looks[i] for look in looks[i - 2 : i + 3]):
                    found.update(rows[i])
        return found

    def of(self, p: Tensor, recipe: Recipe, below: bool) -> Update:
        recipe = on_kind(recipe, self.kind)
        # a page by itself, whatever its size
        key = p.shape, p.dtype, below, recipe.optimizer, recipe.update
        if key not in self.known:
            self.known[key] = self.stepped(
                [p], replace(recipe, offload_optimizer=float(below)), {p} if below else ()
            )
        return self.known[key]

    def stepped(self, parameters: Sequence[Tensor], recipe: Recipe, below: set[Tensor]) -> Update:
        """Update of these parameters alone."""
        size, of_all = (
            sum(p.numel() for p in parameters if p in group) for group in (below, set(parameters))
        )
        # it takes the same ones then
        recipe = replace(recipe, offload_optimizer=max(0.0, size - 0.5) / of_all)
        part = nn.ParameterList(parameters)
        store = SymbolicStore()
        optimizer = symbolic_optimizer(part, recipe, store, self.tier)
        make_state(part, optimizer)
        store.stats = Traffic()
        try:
            for p in parameters:
                p.grad = torch.empty_like(p)
            with StepMeter(part, optimizer, source_lines=False) as meter:
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
