"""Module in which an operator runs: its own in the forward pass, and in backward that whose
gradient is computed."""

from __future__ import annotations

from bisect import bisect_right
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from .storages import AccumulateGrad


class ModulePaths(AbstractContextManager):
    """Paths of a model's modules, such as "layers.0.attention", while it runs; "" for what is
    outside of it.

    Autograd numbers the nodes of the graph as they are made. A module that is entered or left notes
    the number that is next, so that a node tells the module that has made it. (The numbers are
    those of one thread: what a checkpoint recomputes in a device's own thread may be told as that
    of another module.)
    """

    def __init__(self, model: nn.Module):
        self.names = {module: name for name, module in model.named_modules()}
        # held weakly: FSDP replaces parameters by their shards, and the whole ones must go
        self.owners = WeakIdKeyDictionary()
        for name, p in model.named_parameters():
            self.owners[p] = name.rpartition(".")[0]
        self.inside: list[str] = []
        self.numbers, self.since = [0], [""]  # from this number on, nodes are made in that module

    def __enter__(self) -> ModulePaths:
        self._hooks = [
            register_module_forward_pre_hook(self._enters),
            register_module_forward_hook(self._leaves, always_call=True),
        ]
        return self

    def __exit__(self, *exception) -> None:
        for hook in self._hooks:
            hook.remove()

    def __call__(self, node: Any) -> str:
        """The path for an operator that autograd's `node` runs; None in the forward pass."""
        # or what a checkpoint recomputes
        if node is None or (torch.is_grad_enabled() and self.inside):
            return self.inside[-1] if self.inside else ""
        if isinstance(node, AccumulateGrad):
            return self.owners.get(node.variable, "")
        return self.since[bisect_right(self.numbers, node._sequence_nr()) - 1]

    def _enters(self, module: nn.Module, args: Any) -> None:
        if module in self.names:
            self.inside.append(self.names[module])
            self._note()

    def _leaves(self, module: nn.Module, args: Any, result: Any) -> None:
        if module in self.names:
            self.inside.pop()
            self._note()

    def _note(self) -> None:
        self.numbers.append(torch.autograd._get_sequence_nr())
        self.since.append(self.inside[-1] if self.inside else "")
