"""All that a training step may change, as it was, and what puts it back."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from .._torch import AllRandomState


class Snapshot:
    """Model, gradients, optimizers and random numbers as they are now.

    Parameters and buffers are kept by value: neither batch norm's kernel nor a change through
    `.data` counts a version on. Gradients are set aside, so that a step starts without any.
    """

    def __init__(self, model: nn.Module | None, optimizers: Sequence[torch.optim.Optimizer]):
        parameters = [] if model is None else list(model.parameters())
        self._modules = []  # (a module's dict of tensors, its content)
        self._values = []  # (tensor, its value)
        if model is not None:
            for module in model.modules():
                self._modules += [
                    (tensors, dict(tensors)) for tensors in (module._parameters, module._buffers)
                ]
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
            # With `held_tensors`, `state` is not all that a step changes, which may be in a file.
            self._optimizers.append(
                (_StateElsewhere if hasattr(optimizer, "held_tensors") else _OwnState)(optimizer)
            )
        self._gradients = WeakTensorKeyDictionary()  # parameter -> (its gradient, its version)
        for parameter in parameters:
            self.set_aside(parameter)

    def set_aside(self, parameter: torch.Tensor) -> None:
        """Keep a parameter's gradient; it has none from here on."""
        if parameter not in self._gradients:
            self._gradients[parameter] = (parameter.grad, parameter._version)
            parameter.grad = None

    def start_over(self, *, first_step: bool) -> None:
        """Gradients and random numbers as a step is to find them; for a first step, the optimizer's
        state too."""
        for parameter in self._gradients:
            parameter.grad = None
        for optimizer in self._optimizers if first_step else ():
            optimizer.start_over()
        self._random.restore()

    def restore(self) -> int:
        """Put everything back; returns how many parameters were changed that could not be, having
        been met later."""
        for tensors, content in self._modules:
            tensors.clear()
            tensors.update(content)
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
    """An optimizer's `state`: steps run on a copy, so that the tensors that others may hold are not
    touched."""

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
    """The state of an optimizer whose `state` is not all of it: what its own `state_dict` gives and
    takes."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.content = copy.deepcopy(optimizer.state_dict())

    def start_over(self) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self.content))

    restore = start_over
