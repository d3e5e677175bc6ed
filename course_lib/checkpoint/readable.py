"""A checkpoint to read in one sitting: both modes of `torch.utils.checkpoint`, in one file.

In lesson 02 you wrote `MyCheckpoint` and `with_hooks`. This file adds what these short versions
lack. `checkpoint_blocks` does not use this file, but PyTorch's `checkpoint`.

`_Reentrant` is `MyCheckpoint` with several arguments and outputs. It runs the function without a
graph. Its backward pass runs the function again, now with a graph, and then runs backward through
this graph.

`_Region` is `with_hooks`. Hooks put an empty *slot* into the graph for each saved tensor, and the
first slot that is read runs the function again, which fills all slots. Four ideas are new:

- **Slots are released.** The graph holds the slots, and the region refers to them only weakly. A
  slot drops its tensor when backward reads it, so a recomputed tensor lives only until its use.
- **Early stop.** The recomputation ends as soon as it has saved as many tensors as the first run.
  Later operators, such as the last matrix product of a block, do not run again.
- **Nesting.** An autograd node saves the function's inputs, as any operator saves its own. Inside
  another checkpoint the inputs are therefore slots of the outer region, and reading them runs the
  outer function first. Autograd also notices if an input has been changed in place.
- **Surroundings.** Random numbers and autocast also determine the result. They are recorded before
  the first run, and restored for the second.

Selective checkpointing is separate from `_Region` and `_Reentrant`: `_KeptOutputs` keeps the
outputs of some operators in the first run, and returns these outputs in the second run.

PyTorch's file has 1,800 lines. These parts of it are left out here, because they add no new idea:

- compiled code (`torch.compile` traces only PyTorch's function), devices other than CPU and CUDA;
- options for debugging, and backward passes that share a recomputation (`GraphExecGroup`);
- the error for a saved tensor that is read twice in a backward pass, which recomputes again here;
- the default device of a `with torch.device(...)` block, which is not restored;
- offloading by a policy, and saved-tensor hooks around what a policy keeps.

Neither PyTorch's file nor this one restores other state: BatchNorm updates its running statistics
twice, and Python's and NumPy's random numbers and global variables are not restored. If `rrelu` is
the last operator, both files need `early_stop=False`, because `rrelu` saves its noise tensor before
it fills the tensor.

Source: Chen et al. 2016, arXiv:1604.06174, for the idea; the modes are those of PyTorch.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from itertools import count, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import CheckpointError


def checkpoint(
    function: Callable,
    *args: Any,
    use_reentrant: bool = False,
    preserve_rng_state: bool = True,
    early_stop: bool = True,
    keep: Collection | Callable[..., bool] | None = None,
    **kwargs: Any,
) -> Any:
    """Run `function(*args, **kwargs)`, drop its activations, and run it again in backward.

    Args:
        function: Function to run. It must do the same in both runs.
        *args: Positional arguments of the function. In the reentrant mode, pass each tensor that
            needs a gradient as an argument of its own. In the non-reentrant mode, such tensors may
            also be in lists, tuples and dicts. The second run then receives new lists, tuples and
            dicts with the same tensors. Parameters that the function uses get gradients in both
            modes.
        use_reentrant: Whether to use the reentrant mode. At least one argument must then be a
            tensor that requires gradients. Compute the gradients with `backward()` without its
            argument `inputs`, and not with `torch.autograd.grad`.
        preserve_rng_state: Whether the second run draws the same random numbers as the first.
        early_stop: Whether the second run ends when it has saved as many tensors as the first run.
            This option has no effect in the reentrant mode.
        keep: Operators whose outputs are kept instead of computed again, such as
            `[torch.ops.aten.mm.default]`, or a function `keep(operator, *args, **kwargs)` that
            returns whether to keep the output. Random operators and casts always run again.
        **kwargs: Keyword arguments of the function.

    Returns:
        The result of `function(*args, **kwargs)`.

    Raises:
        ValueError: `keep` or keyword arguments are passed in the reentrant mode.
        CheckpointError: (In the backward pass of the non-reentrant mode) the second run saved fewer
            tensors than the first run, or tensors of other shapes, dtypes or devices. Values are
            not compared.
        RuntimeError: (In the backward pass) an argument or a kept output was changed in place. In
            the reentrant mode, the error is raised in the forward pass if `function` itself changes
            an argument.
    """
    if use_reentrant:
        if kwargs or keep is not None:
            raise ValueError(
                "with `keep` or with keyword arguments for the function, use_reentrant must be"
                " False, got True"
            )
        return _Reentrant.apply(function, preserve_rng_state, *args)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    first = second = nullcontext()
    if keep is not None:
        chosen = keep if callable(keep) else lambda operator, *args, **kwargs: operator in keep
        kept: dict[tuple, Any] = {}
        first, second = _KeptOutputs(kept, chosen), _KeptOutputs(kept, None)
    region = _Region(function, args, kwargs, preserve_rng_state, early_stop, second)
    with saved_tensors_hooks(region.pack, region.unpack), first:
        return function(*args, **kwargs)


# ---- the non-reentrant mode


class _Slot:
    """An empty place in the graph for a saved tensor, which is filled once per backward pass."""

    def __init__(self):
        self.tensors: dict[int, Tensor] = {}  # by backward pass


class _Stop(BaseException):
    """Exception that ends a recomputation early; `except Exception` does not catch it."""


class _SaveInputs(torch.autograd.Function):
    """Autograd function whose node saves tensors. It needs an `anchor` that requires gradients."""

    @staticmethod
    def forward(context, anchor, *tensors):
        context.save_for_backward(*tensors)
        return torch.empty(0)


class _Region:
    """One call of a checkpointed function: its slots, and all data for running the function again.

    `second` is a context manager in which the second run takes place. The other arguments are
    those of `checkpoint`.
    """

    def __init__(self, function, args, kwargs, preserve_rng_state, early_stop, second):
        self.function, self.early_stop, self.second = function, early_stop, second
        leaves, self.structure = tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        # Only the autograd node of `_SaveInputs` keeps the tensors, so that hooks around this
        # checkpoint can offload them.
        anchor = torch.empty(0, device="cpu", requires_grad=True)
        self.holder = _SaveInputs.apply(anchor, *tensors)  # keeps its autograd node alive
        self.leaves = [_Slot if isinstance(x, Tensor) else x for x in leaves]
        self.surroundings = _Surroundings(tensors, preserve_rng_state)
        self.slots: list[weakref.ref[_Slot]] = []
        self.looks: list[tuple] = []  # shape, dtype and device of each saved tensor

    def pack(self, tensor: Tensor) -> _Slot:
        """In the first run: put a slot into the graph, and release the tensor."""
        slot = _Slot()
        self.slots.append(weakref.ref(slot))
        self.looks.append(_look(tensor))
        return slot

    def unpack(self, slot: _Slot) -> Tensor:
        """In the backward pass: return the tensor of a slot, and empty the slot."""
        backward = torch._C._current_graph_task_id()  # -1 outside of a backward pass
        if backward not in slot.tensors:
            self.recompute(backward)
        return slot.tensors.pop(backward)

    def recompute(self, backward: int) -> None:
        """Run the function again. The i-th tensor that autograd saves goes into the i-th slot."""
        saved = iter(self.holder.grad_fn.saved_tensors)  # raises if an input was changed in place
        leaves = [next(saved) if leaf is _Slot else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.structure)
        numbers, last = count(), len(self.slots) - 1
        found: list[tuple] = []

        def collect(tensor: Tensor) -> Tensor:
            tensor, number = tensor.detach(), next(numbers)  # detached from the second run's graph
            found.append(_look(tensor))
            # The slot is gone if the graph was freed in part. Then nothing will read the tensor.
            slot = self.slots[number]() if number <= last else None
            if slot is not None:
                slot.tensors[backward] = tensor
            if self.early_stop and number == last:
                raise _Stop
            return tensor

        with (
            saved_tensors_hooks(collect, lambda tensor: tensor),
            torch.enable_grad(),
            self.surroundings.restore(),
            self.second,
            suppress(_Stop),
        ):
            self.function(*args, **kwargs)
        for i, pair in enumerate(zip_longest(self.looks[: last + 1], found[: last + 1])):
            if pair[0] != pair[1]:
                raise CheckpointError(
                    "the checkpointed function must save the same tensors in the forward pass and"
                    f" in the recomputation, but saved tensor {i} is {_described(pair[0])} in the"
                    f" forward pass and {_described(pair[1])} in the recomputation; the function"
                    " must not depend on anything that changes between the two runs"
                )


def _look(tensor: Tensor) -> tuple:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _described(look: tuple | None) -> str:
    return "of shape {}, {} on {}".format(*look) if look else "missing"


# ---- the reentrant mode


class _Reentrant(torch.autograd.Function):
    """One autograd node for the whole function, with a backward pass inside its backward pass.

    The inner backward pass ends at the inputs, and adds the gradients of parameters to `.grad`.
    """

    @staticmethod
    def forward(context, function, preserve_rng_state, *args):
        tensors = [x for x in args if isinstance(x, Tensor)]
        versions = [x._version for x in tensors]
        context.function = function
        context.args = [_Slot if isinstance(x, Tensor) else x for x in args]
        context.surroundings = _Surroundings(tensors, preserve_rng_state)
        context.save_for_backward(*tensors)
        with torch.no_grad():
            outputs = function(*args)
        # Autograd itself notices only in-place changes that happen after this method has ended.
        if versions != [x._version for x in tensors]:
            raise RuntimeError(
                "with use_reentrant=True, the function must not change its inputs in place"
            )
        return outputs

    @staticmethod
    def backward(context, *gradients):
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "use_reentrant must be False for torch.autograd.grad and backward(inputs=...),"
                " because the inner backward pass computes the gradients of all parameters"
            )
        saved = iter(context.saved_tensors)
        inputs = [_leaf(next(saved)) if x is _Slot else x for x in context.args]
        with torch.enable_grad(), context.surroundings.restore():
            outputs = context.function(*inputs)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if isinstance(output, Tensor) and output.requires_grad
        ]
        torch.autograd.backward(*zip(*pairs, strict=True))
        return None, None, *(x.grad if isinstance(x, Tensor) else None for x in inputs)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


# ---- random numbers and autocast


class _Surroundings:
    """States of random generators and autocast before the first run, on CPU and inputs' GPUs."""

    def __init__(self, tensors: list[Tensor], preserve_rng_state: bool):
        self.preserved, self.gpus = preserve_rng_state, {x.device for x in tensors if x.is_cuda}
        if self.preserved:
            self.cpu_state = torch.get_rng_state()
            self.gpu_states = [(torch.cuda.get_rng_state(gpu), gpu) for gpu in self.gpus]
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in ("cpu", *(["cuda"] if self.gpus else []))
        ]
        self.cached = torch.is_autocast_cache_enabled()

    @contextmanager
    def restore(self) -> Iterator[None]:
        """Restore the recorded states in a `with` block, and the current states after it."""
        with torch.random.fork_rng(self.gpus, enabled=self.preserved), ExitStack() as stack:
            if self.preserved:
                torch.set_rng_state(self.cpu_state)
                for state_and_gpu in self.gpu_states:
                    torch.cuda.set_rng_state(*state_and_gpu)
            for setting in self.autocast:
                stack.enter_context(torch.autocast(*setting, cache_enabled=self.cached))
            yield


# ---- selective checkpointing

# The calls of these operators are not counted, because one of the two runs may call them more
# often. Saved-tensor hooks call `detach`. Autocast calls `_to_copy` only when a weight is first
# used, which may be before the first run.
_UNCOUNTED = (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default)


class _KeptOutputs(TorchDispatchMode):
    """Mode that keeps chosen outputs in the first run, and returns them in the second run.

    Args:
        kept: Dict from (operator, number of the call) to the kept output. The modes of both runs
            share this dict.
        chosen: Function that takes an operator and its arguments, and returns whether to keep the
            output. None in the second run.
    """

    def __init__(self, kept: dict[tuple, Any], chosen: Callable[..., bool] | None):
        super().__init__()
        self.kept, self.chosen = kept, chosen

    def __enter__(self):
        self.calls = Counter()
        return super().__enter__()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operator in _UNCOUNTED:
            return operator(*args, **kwargs)
        key = operator, self.calls[operator]
        self.calls[operator] += 1
        if key in self.kept:
            kept = self.kept.pop(key)
            check = partial(_check, operator)
            return tree_map(check, kept, is_leaf=lambda x: isinstance(x, _KeptTensor))
        result = operator(*args, **kwargs)
        # Random operators always run again. Otherwise, all later random operators would draw other
        # numbers.
        draws = torch.Tag.nondeterministic_seeded in operator.tags
        if self.chosen is not None and not draws and self.chosen(operator, *args, **kwargs):
            self.kept[key] = tree_map(_detach, result)
        return result


class _KeptTensor(NamedTuple):
    """A kept tensor, and its version counter (number of in-place changes) when it was kept."""

    tensor: Tensor
    version: int


def _detach(value: Any) -> Any:
    """Return a `_KeptTensor` with a detached tensor; return any other value unchanged.

    The tensor is detached because its graph would refer to the `_KeptOutputs` mode. Inside a
    dispatch mode, the detached tensor shares the version counter only if the dispatch key
    `ADInplaceOrView` is active.
    """
    if not isinstance(value, Tensor):
        return value
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        tensor = value.detach()
    return _KeptTensor(tensor, tensor._version)


def _check(operator: Callable, value: Any) -> Any:
    if not isinstance(value, _KeptTensor):
        return value
    if value.tensor._version != value.version:
        raise RuntimeError(
            f"`keep` must not select {operator}, because its output of shape"
            f" {tuple(value.tensor.shape)} was changed in place later"
        )
    return value.tensor
