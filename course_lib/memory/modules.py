"""Find the module in which an operator runs.

For an operator of the backward pass, this is the module that ran the forward operator.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from .._torch.autograd import AccumulateGrad


class ModulePaths(AbstractContextManager):
    """Context manager that finds the path of the running module of a model, such as
    "layers.0.attention", or "" outside the model.

    Autograd numbers the nodes of the graph as they are made. Whenever a module begins or ends, the
    next number is recorded, so that the number of a node determines the module that made it. The
    numbers are those of one thread. Operators that a checkpoint recomputes in a device's own thread
    may therefore be attributed to another module.
    """

    def __init__(self, model: nn.Module):
        self.names = {module: name for name, module in model.named_modules()}
        # The references are weak, because FSDP replaces parameters by their shards and the whole
        # parameters must be released.
        self.owners = WeakIdKeyDictionary()
        for name, p in model.named_parameters():
            self.owners[p] = name.rpartition(".")[0]
        self.inside: list[str] = []
        # Nodes from number `numbers[i]` on are made in the module `since[i]`.
        self.numbers, self.since = [0], [""]

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
        """Return the path for an operator that autograd's `node` runs. `node` is None in the
        forward pass."""
        # This is the forward pass, or the recomputation of a checkpoint.
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
