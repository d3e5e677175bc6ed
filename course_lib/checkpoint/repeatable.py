"""State of a block, in addition to its arguments, that its recomputation needs.

`checkpoint` gives the recomputation the arguments of the first run and the random numbers of
PyTorch's global generators. A block may compute with more than these. `BlockState` keeps:

- **Generators**: the global random number generators of Python and NumPy, and all generators of
  PyTorch, Python and NumPy that are attributes of the block's modules.
- **Attributes** of the block's modules, except parameters, buffers and submodules. It records which
  objects the attributes refer to, and the content of tensors, arrays, lists, tuples, dicts, sets
  and deques. Examples are the load of a mixture-of-experts gate, a running average of an
  activation, and a counter of calls.

A recomputation works on copies. The module `state` makes and restores them; this module adds the
comparison of a recomputation with the first run.

A checkpoint does not keep parameters, buffers (except those of instance norms), other objects that
are changed in place, or anything outside the block's modules, such as global variables and files.
With a `Comparison`, a recomputation that differs because of them raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import _StopRecomputationError, checkpoint

from .._torch.autograd import torch_func_refused
from .._torch.modes import modes_when_recomputed
from .._torch.tensors import map_tensors, tensors_in
from .comparison import Comparison, checksum
from .state import StateBefore


class BlockState(StateBefore):
    """State of a block before its first run, and the comparison of later runs with that run.

    Args:
        block: The module whose state is kept.
        comparison: Comparison of the later runs with the first one, or None to not compare them.
        options: The options of `StateBefore`.
    """

    def __init__(self, block: nn.Module, comparison: Comparison | None = None, **options: bool):
        super().__init__(block, **options)
        self.comparison = comparison
        self.output: Any = None  # checksum of the first run's output, if runs are compared

    def check_output(self, output: Tensor, runs_again: bool) -> None:
        """If runs are compared, raise an error if an output differs from that of the first run.

        Args:
            output: Output of the run that has just ended.
            runs_again: Whether another run follows.
        """
        if self.comparison is None:
            return
        if difference := self.comparison.difference(self.output, output, "its output"):
            self.comparison.fail(difference)
        if runs_again and self.output is None:
            self.output = checksum(output)

    @contextmanager
    def repeat(self, last: bool = False) -> Iterator[Any]:
        with self._check_unchanged(), super().repeat(last) as drawing:
            yield drawing

    @contextmanager
    def _check_unchanged(self) -> Iterator[None]:
        """Raise an error if the run inside the `with` block changes a tensor of the block.

        Running statistics may change. Without a comparison, nothing is checked.
        """
        comparison = self.comparison
        if comparison is None:
            yield
            return
        tensors = {**dict(self.block.named_parameters()), **dict(self.block.named_buffers())}
        tensors |= {record.name: record.tensor for record in self.modules.tensors}
        comparison.start(self.running, tensors)
        try:
            yield
        except Exception:
            raise  # the message of this error is more specific
        except BaseException:  # early stop ends a recomputation with a BaseException
            comparison.finish(tensors)
            raise
        comparison.finish(tensors)


# A function may change the lists and dicts that it receives, so they are copied.
_map_copying = partial(map_tensors, copied=(list, dict))
_PLACEHOLDER = torch.empty(0, device="cpu")


class Repeatable:
    """A block's function, whose recomputation starts from what its first run started from.

    PyTorch's checkpoint saves only tensors that are arguments themselves. It passes the same lists
    and dicts to both runs, so a block that appends to a list would append twice. Therefore the
    checkpoint receives the tensors alone, wherever they are in nested lists, tuples, mappings and
    dataclasses. The first run receives the caller's own arguments. The recomputation receives new
    lists and dicts with their content before the first run, and starts from the block's state
    before the first run.

    An object is used for one call of the function. Error messages name the function.

    Args:
        function: The block's function.
        state: State of the block before its first run, or None to leave the state as it is.
    """

    def __init__(self, function: Callable, state: BlockState | None = None):
        self.function, self.state = function, state
        self.__qualname__ = getattr(function, "__qualname__", type(function).__name__)

    def checkpoint(self, args: tuple, kwargs: dict[str, Any], **options: Any) -> Any:
        """Return `function(*args, **kwargs)`, computed in PyTorch's checkpoint.

        Args:
            args, kwargs: The function's arguments.
            options: Options of `torch.utils.checkpoint.checkpoint` without reentrant autograd.
        """
        self.own_arguments = args, kwargs
        self.modes = modes_when_recomputed()
        tensors = list(tensors_in(self.own_arguments))
        self.inputs = _map_copying(lambda tensor: _PLACEHOLDER, self.own_arguments)
        return checkpoint(self, *tensors, use_reentrant=False, **options)

    def __call__(self, *tensors: Tensor) -> Any:
        """Run the function; the checkpoint calls this with the tensors among the arguments."""
        if self.own_arguments is not None:
            # They are released before the run, because only the checkpoint may hold the tensors.
            (args, kwargs), self.own_arguments, modes = self.own_arguments, None, []
        else:
            remaining, modes = iter(tensors), self.modes
            args, kwargs = _map_copying(lambda placeholder: next(remaining), self.inputs)
        stop = None
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            if self.state is not None:
                stack.enter_context(self.state.next_run())
            stack.enter_context(torch_func_refused("a checkpoint"))
            try:
                return self.function(*args, **kwargs)
            except _StopRecomputationError as early_stop:
                stop = early_stop  # this is not an error of the block, whose state is checked
        try:
            raise stop
        finally:
            del stop  # its traceback refers to this frame
