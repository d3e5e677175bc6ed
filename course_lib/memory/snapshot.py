"""Copy of everything that a training step may change, from which it can be restored."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from .._torch.generators import AllRandomState
from .._torch.modules import Namespace


class Snapshot:
    """Current state of the model, the gradients, the optimizers and the random number generators.

    Parameters and buffers are copied. Their version counters do not suffice to notice changes,
    because neither batch norm's kernel nor a change through `.data` increases them. Gradients are
    removed from the parameters, so that a step starts without any.

    Args:
        model: The model, or None.
        optimizers: The optimizers.
    """

    def __init__(self, model: nn.Module | None, optimizers: Sequence[torch.optim.Optimizer]):
        parameters = [] if model is None else list(model.parameters())
        self._modules = []  # pairs (a module's dict of tensors, its content)
        self._values = []  # pairs (tensor, a copy of its values)
        if model is not None:
            namespaces = [
                Namespace("", tensors, partial(list, tensors))
                for module in model.modules()
                for tensors in (module._parameters, module._buffers)
            ]
            self._modules = [(namespace, namespace.read()) for namespace in namespaces]
            self._values = [
                (tensor, tensor.detach().clone()) for tensor in (*parameters, *model.buffers())
            ]
        self._kept = {id(tensor) for tensor, _ in self._values}
        self._random = AllRandomState()
        self._optimizers = []
        for optimizer in optimizers:
            parameters += (
                parameter for group in optimizer.param_groups for parameter in group["params"]
            )
            # An optimizer with a method `held_tensors` keeps state outside its attribute `state`,
            # possibly in a file.
            self._optimizers.append(
                (_StateElsewhere if hasattr(optimizer, "held_tensors") else _OwnState)(optimizer)
            )
        # Maps each parameter to (its gradient, its version).
        self._gradients = WeakTensorKeyDictionary()
        for parameter in parameters:
            self.set_aside(parameter)

    def set_aside(self, parameter: torch.Tensor) -> None:
        """Keep a parameter's gradient and remove it from the parameter."""
        if parameter not in self._gradients:
            self._gradients[parameter] = (parameter.grad, parameter._version)
            parameter.grad = None

    def start_over(self, *, first_step: bool) -> None:
        """Remove gradients and restore the random number generators, so that each run starts from
        the same state. If `first_step` is True, restore the optimizers' state too."""
        for parameter in self._gradients:
            parameter.grad = None
        for optimizer in self._optimizers if first_step else ():
            optimizer.start_over()
        self._random.restore()

    def restore(self) -> int:
        """Restore everything.

        Returns:
            The number of parameters that were changed and cannot be restored, because they were not
            part of the model when the snapshot was made.
        """
        for namespace, content in self._modules:
            namespace.write(content)
        for tensor, value in self._values:
            tensor.data.copy_(value)
        changed = 0
        for parameter, (gradient, version) in self._gradients.items():
            parameter.grad = gradient
            changed += id(parameter) not in self._kept and parameter._version != version
        for optimizer in self._optimizers:
            optimizer.restore()
        self._random.restore()
        return changed


class _OwnState:
    """Snapshot of an optimizer whose whole state is in its attribute `state`.

    Steps run on a copy, so that tensors that other objects may hold are not changed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.state = dict(optimizer.state)
        self.groups = [
            {k: copy.deepcopy(v) for k, v in g.items() if k != "params"}
            for g in optimizer.param_groups
        ]
        self.start_over()

    def start_over(self) -> None:
        keep = {id(p): p for group in self.optimizer.param_groups for p in group["params"]}
        self._set({key: copy.deepcopy(value, dict(keep)) for key, value in self.state.items()})

    def restore(self) -> None:
        self._set(self.state)
        for group, values in zip(self.optimizer.param_groups, self.groups, strict=False):
            group.update(values)

    def _set(self, state: dict) -> None:
        self.optimizer.state.clear()
        self.optimizer.state.update(state)


class _StateElsewhere:
    """State of an optimizer that does not keep all of it in `state`, saved and restored by its own
    `state_dict` and `load_state_dict`."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.content = copy.deepcopy(optimizer.state_dict())

    def start_over(self) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self.content))

    restore = start_over
