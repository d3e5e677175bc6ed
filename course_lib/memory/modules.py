"""Find the path of the module to which an operator belongs, such as "layers.0.attention".

An operator of the backward pass belongs to the module whose forward pass made its autograd node.
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
    """Context manager that finds the module to which each operator belongs.

    Inside the `with` block, call the object with the autograd node that runs the current operator,
    or with None in the forward pass. The result is the path of the operator's module, such as
    "layers.0.attention", or "" outside the model.

    An operator of the backward pass belongs to the module whose forward pass made its autograd
    node. This module is found from the node's number. However, autograd numbers the nodes of each
    thread separately, and on a GPU backward runs in its own thread. If a checkpoint recomputes
    layers on a GPU, operators of the backward pass may be attributed to a wrong module.

    Args:
        model: The model whose modules are found.
    """

    def __init__(self, model: nn.Module):
        self.names = {module: name for name, module in model.named_modules()}
        # Maps each parameter to its module's path. The references are weak because FSDP replaces
        # the full parameters by shards, after which the full parameters must be released.
        self.owners = WeakIdKeyDictionary()
        for name, p in model.named_parameters():
            self.owners[p] = name.rpartition(".")[0]
        # Paths of the modules that are running, from the outermost to the innermost.
        self.inside: list[str] = []
        # An autograd node belongs to the module with the path `since[i]` if its sequence number is
        # at least `numbers[i]` and less than `numbers[i + 1]`.
        self.numbers, self.since = [0], [""]

    def __enter__(self) -> ModulePaths:
        self._hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        return self

    def __exit__(self, *exception) -> None:
        for hook in self._hooks:
            hook.remove()

    def __call__(self, node: Any) -> str:
        """Return the path of the module to which the current operator belongs.

        Args:
            node: Autograd node that runs the operator; None in the forward pass.
        """
        # In a forward pass or a recomputation, the innermost running module ran the operator.
        if node is None or (torch.is_grad_enabled() and self.inside):
            return self.inside[-1] if self.inside else ""
        if isinstance(node, AccumulateGrad):
            return self.owners.get(node.variable, "")
        return self.since[bisect_right(self.numbers, node._sequence_nr()) - 1]

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if module in self.names:
            self.inside.append(self.names[module])
            self._record_module()

    def _leave_module(self, module: nn.Module, args: Any, result: Any) -> None:
        if module in self.names:
            self.inside.pop()
            self._record_module()

    def _record_module(self) -> None:
        """Record that the next autograd nodes are made in the module that is now the innermost."""
        self.numbers.append(torch.autograd._get_sequence_nr())
        self.since.append(self.inside[-1] if self.inside else "")
