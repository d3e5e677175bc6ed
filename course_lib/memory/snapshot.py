"""Save and restore everything that a training step may change, so that it can run again."""

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
    """Saved state of a model, its gradients, its optimizers and the random number generators.

    Making a snapshot saves the current state and removes the gradients from the parameters, so that
    a step starts without gradients. All parameters and buffers are copied, even those that the step
    will not change. PyTorch's version counters do not show reliably which tensors have changed.
    Batch norm's kernel and changes through `.data` do not increase these counters.

    Args:
        model: Model whose parameters and buffers are saved; None if there is no model.
        optimizers: Optimizers whose state and settings are saved.
    """

    def __init__(self, model: nn.Module | None, optimizers: Sequence[torch.optim.Optimizer]):
        parameters = [] if model is None else list(model.parameters())
        # Pairs (namespace, dict of its tensors at the time of the snapshot). A namespace is the
        # dict of a module's parameters or of its buffers.
        self._modules = []
        self._values = []  # pairs (parameter or buffer, copy of its values)
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
        self._restorable = {id(tensor) for tensor, _ in self._values}
        self._random = AllRandomState()
        self._optimizers = []
        for optimizer in optimizers:
            parameters += (
                parameter for group in optimizer.param_groups for parameter in group["params"]
            )
            # An optimizer with a method `held_tensors`, such as `OffloadedOptimizer`, keeps state
            # outside its attribute `state`, possibly in a file.
            self._optimizers.append(
                (_StateInStateDict if hasattr(optimizer, "held_tensors") else _StateInAttribute)(
                    optimizer
                )
            )
        # Maps each parameter to the pair (gradient, version counter of the parameter) that
        # `stash_gradient` found.
        self._gradients = WeakTensorKeyDictionary()
        for parameter in parameters:
            self.stash_gradient(parameter)

    def stash_gradient(self, parameter: torch.Tensor) -> None:
        """Save a parameter's gradient for `restore`, and set `parameter.grad` to None.

        A second call with the same parameter does nothing.
        """
        if parameter not in self._gradients:
            self._gradients[parameter] = (parameter.grad, parameter._version)
            parameter.grad = None

    def start_over(self, *, first_step: bool) -> None:
        """Prepare the next run: remove gradients and restore the random number generators.

        Args:
            first_step: Whether to restore the optimizers' state too, so that the next run is a
                first step of training. With False, the next run continues with the optimizer state
                that the previous run left.
        """
        for parameter in self._gradients:
            parameter.grad = None
        for optimizer in self._optimizers if first_step else ():
            optimizer.start_over()
        self._random.restore()

    def restore(self) -> int:
        """Restore the state that was saved when the snapshot was made.

        Returns:
            The number of parameters that have changed but cannot be restored, because they did not
            belong to the model when the snapshot was made.
        """
        for namespace, content in self._modules:
            namespace.write(content)
        for tensor, value in self._values:
            tensor.data.copy_(value)
        changed = 0
        for parameter, (gradient, version) in self._gradients.items():
            parameter.grad = gradient
            changed += id(parameter) not in self._restorable and parameter._version != version
        for optimizer in self._optimizers:
            optimizer.restore()
        self._random.restore()
        return changed


class _StateInAttribute:
    """Saved state of an optimizer that keeps its whole state in its attribute `state`.

    The steps change a copy of the state. The original tensors, which other objects may hold, keep
    their values, and `restore` gives them back to the optimizer.
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
        """Give the optimizer a new copy of the saved state."""
        keep = {id(p): p for group in self.optimizer.param_groups for p in group["params"]}
        self._set({key: copy.deepcopy(value, dict(keep)) for key, value in self.state.items()})

    def restore(self) -> None:
        """Give the optimizer its original state tensors and settings."""
        self._set(self.state)
        for group, values in zip(self.optimizer.param_groups, self.groups, strict=False):
            group.update(values)

    def _set(self, state: dict) -> None:
        """Replace the contents of the optimizer's attribute `state`."""
        self.optimizer.state.clear()
        self.optimizer.state.update(state)


class _StateInStateDict:
    """Saved state of an optimizer that keeps part of its state outside its attribute `state`.

    The optimizer's own methods `state_dict` and `load_state_dict` save and restore the state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.content = copy.deepcopy(optimizer.state_dict())

    def start_over(self) -> None:
        """Load a copy of the saved state into the optimizer."""
        self.optimizer.load_state_dict(copy.deepcopy(self.content))

    restore = start_over
