"""Run a block a second time from the same state: arguments, attributes and random numbers.

PyTorch's `checkpoint` gives the recomputation the arguments of the first run and the states of
PyTorch's global random number generators. The result of a block may depend on more state.
`BlockState` additionally keeps:

- **Generators**: the global random number generators of Python and NumPy, and all generators of
  PyTorch, Python and NumPy that are attributes of the block's modules.
- **Attributes** of the block's modules, except parameters, buffers and submodules. `BlockState`
  records which objects the attributes refer to, and the content of tensors, arrays, lists, tuples,
  dicts, sets and deques. Examples are the load of a mixture-of-experts gate, a running average of
  an activation, and a counter of calls.

A recomputation works on copies of this state. The module `state` makes and restores the copies.
This module adds the comparison of a recomputation with the first run.

Other state is not kept: parameters, buffers (except those of instance norms), other objects that
are changed in place, and anything outside the block's modules, such as global variables and files.
With a `Comparison`, a recomputation that differs because of this other state raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import _StopRecomputationError, checkpoint

from .._torch.autograd import checked_torch_func
from .._torch.modes import modes_when_recomputed
from .._torch.tensors import map_tensors, tensors_in
from .comparison import Comparison, checksum
from .state import StateBeforeFirstRun


class BlockState(StateBeforeFirstRun):
    """State of a block before its first run, with a check that later runs equal the first one.

    The first run is in the forward pass, and later runs recompute the block's activations.
    `StateBeforeFirstRun` records the state and restores it for later runs. The state consists of
    the attributes of the block's modules and the states of random number generators. This class
    adds the check.

    Args:
        block: The module whose state is kept.
        comparison: A `Comparison`, or None. With a `Comparison`, an error is raised if a later run
            changes the block's parameters, buffers or tensor attributes, except the running
            statistics of batch norms. `check_output` also raises an error if the output of a later
            run differs from that of the first run. Outputs and changes are compared by checksums.
            With None, this class compares nothing and raises no such error.
        options: The keyword arguments of `StateBeforeFirstRun`.
    """

    def __init__(self, block: nn.Module, comparison: Comparison | None = None, **options: bool):
        super().__init__(block, **options)
        self.comparison = comparison
        self.output: Any = None  # checksum of the first run's output, if runs are compared

    def check_output(self, output: Tensor, runs_again: bool) -> None:
        """Raise an error if the output of a run differs from that of the block's first run.

        If the block has no `Comparison`, this method does nothing. The first call, after the first
        run, only records the checksum of the output.

        Args:
            output: Output of the run that has just ended.
            runs_again: Whether another run follows. If not, no checksum is recorded.
        """
        if self.comparison is None:
            return
        if difference := self.comparison.describe_difference(
            self.output, output, "the block's output"
        ):
            self.comparison.fail(difference)
        if runs_again and self.output is None:
            self.output = checksum(output)

    @contextmanager
    def later_run(self, last: bool = False) -> Iterator[Any]:
        """Inside a `with` block, give the module the state that it had before its first run.

        The caller runs the module in the `with` block. With a `Comparison`, an error is raised
        after the run if it has changed the module's parameters, buffers or tensor attributes. Only
        running statistics of batch norms may change.

        Args:
            last: Whether no further run follows, so that the state need not be copied again.
        """
        with self._check_unchanged(), super().later_run(last) as detector:
            yield detector

    @contextmanager
    def _check_unchanged(self) -> Iterator[None]:
        """Raise an error if the run inside the `with` block changes the block's own tensors.

        These are its parameters, its buffers and the tensors in its attributes. Running statistics
        may change. Without a comparison, nothing is checked.
        """
        comparison = self.comparison
        if comparison is None:
            yield
            return
        tensors = {**dict(self.block.named_parameters()), **dict(self.block.named_buffers())}
        tensors |= {record.name: record.tensor for record in self.modules.tensors}
        comparison.record_tensors(self.running_statistics, tensors)
        yield  # an error of the run is more specific than an error of the comparison
        comparison.check_unchanged(tensors)


# A function may change the lists and dicts that it receives, so they are copied.
_map_copying = partial(map_tensors, copied=(list, dict))
_PLACEHOLDER = torch.empty(0, device="cpu")


class Repeatable:
    """A checkpoint whose recomputation starts from the arguments and the state of the first run.

    Create one object per call of the function, and call its method `checkpoint`. This method calls
    the function by way of `torch.utils.checkpoint.checkpoint`.

    PyTorch's checkpoint passes the same lists and dicts to both runs, so a block that appends to a
    list would append twice. With this class, the first run receives the caller's own arguments. The
    recomputation receives copies of the lists and dicts, made before the first run.
    Tensors in nested lists, tuples, mappings and dataclasses are passed to PyTorch's checkpoint as
    separate arguments, so the checkpoint saves them too.

    Args:
        function: The block's function, such as its forward method. Error messages show its name.
        state: A new `BlockState` of the block. The recomputation uses it to restore two things: the
            attributes of the block's modules, and the random number generators of Python and NumPy.
            With None, only the arguments are restored.
    """

    def __init__(self, function: Callable, state: BlockState | None = None):
        self.function, self.state = function, state
        self.__qualname__ = getattr(function, "__qualname__", type(function).__name__)

    def checkpoint(self, args: tuple, kwargs: dict[str, Any], **options: Any) -> Any:
        """Return `function(*args, **kwargs)`, computed inside PyTorch's checkpoint.

        Args:
            args, kwargs: The function's arguments.
            options: Options of the non-reentrant `torch.utils.checkpoint.checkpoint`.
        """
        self.first_run_arguments = args, kwargs
        self.modes = modes_when_recomputed()
        tensors = list(tensors_in(self.first_run_arguments))
        self.inputs = _map_copying(lambda tensor: _PLACEHOLDER, self.first_run_arguments)
        return checkpoint(self, *tensors, use_reentrant=False, **options)

    def __call__(self, *tensors: Tensor) -> Any:
        """Run the function; PyTorch's checkpoint calls this with all tensors of the arguments."""
        if self.first_run_arguments is not None:
            # Release the arguments before the run, so that only the checkpoint keeps the tensors
            # alive.
            (args, kwargs), self.first_run_arguments, modes = self.first_run_arguments, None, []
        else:
            remaining, modes = iter(tensors), self.modes
            args, kwargs = _map_copying(lambda placeholder: next(remaining), self.inputs)
        stop = None
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            if self.state is not None:
                stack.enter_context(self.state.next_run())
            stack.enter_context(checked_torch_func("a checkpoint"))
            try:
                return self.function(*args, **kwargs)
            except _StopRecomputationError as early_stop:
                stop = early_stop  # raised below, after the block's state has been checked
        try:
            raise stop
        finally:
            del stop  # avoids a reference cycle, because its traceback refers to this frame
