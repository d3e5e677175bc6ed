"""Checkpoint the blocks of any model in place: `checkpoint_blocks`.

`BlocksInPlace` is a handle that replaces the `forward` of a model's blocks until its method
`remove` is called. `checkpoint_blocks` and `course_lib.schedule.schedule_blocks` return instances
of its subclasses. The functions that select the blocks are at the end of this file.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial, wraps
from typing import Any, Self

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from .._check import describe, kind, whole
from .._torch.autograd import are_functorch_transforms_active
from .comparison import STATE_PRESERVED, Comparison, FirstComparison, FunctionWithSavedTensorCheck
from .policies import ListedOperators, Policy
from .repeatable import BlockState, Repeatable

_STATE_NOT_PRESERVED = (
    "The recomputation of a block must compute the same values again, and a block must not change"
    " objects among its arguments, such as a cache (call a model of transformers with"
    " use_cache=False and without past_key_values). If the block changes its attributes, or draws"
    " random numbers from the modules random or numpy, pass preserve_module_state=True to"
    " checkpoint_blocks. Otherwise change the block"
)
_ADVICE = "exclude the block from checkpoint_blocks"


def checkpoint_blocks(
    model: nn.Module,
    blocks: str | Sequence[str] | None = "layers.*",
    *,
    every: int = 1,
    first: int | None = None,
    policy: Callable | list | None = None,
    preserve_rng_state: bool = True,
    preserve_module_state: bool = False,
    compare: bool = True,
) -> CheckpointedBlocks:
    """Checkpoint the blocks of a model, in place, until the returned handle is removed.

    A checkpointed block does not keep its activations for the backward pass. Backward runs the
    block again to compute them, which saves memory and costs a second forward pass of the block.

    Any module that the model calls can be a block, whatever its arguments and outputs are. Hooks on
    a block run once per forward pass; hooks on modules inside it run once more in the
    recomputation. Names in the state dict stay the same. With gradients disabled, the blocks run
    without checkpoints. A copy of the model (deepcopy, pickle) has no checkpoints. Inside a
    transform of `torch.func` the blocks run without checkpoints, and a warning is given.

    The model or its blocks may be compiled before or after this call, by `torch.compile(block)` or
    `block.compile()`, also with `fullgraph=True`. If there is a `policy`, PyTorch warns about
    in-place operators inside a compiled graph. The warning about listed operators that never run
    (see `policy`) is not given for compiled blocks.

    Args:
        model: Model to change in place. Its blocks get a new `forward`.
        blocks: Names of the blocks as in `model.named_modules()`, with wildcards that match one
            part between dots: "layers.*", "model.layers.*", ["encoder.block.*", "decoder.block.*"].
            A module that is never called, such as an `nn.ModuleList`, is not a block.

            None searches the model for lists of modules, such as the layers of an encoder and those
            of a decoder. Lists inside a list that was already found are ignored. If the model has
            lists of several kinds, only one kind is used, the first in this order:

            1. `nn.ModuleList` or `nn.Sequential` of two or more modules of one type;
            2. `nn.ModuleList` of one module;
            3. `nn.ModuleList` of modules of different types, the longest list first.

            Lists of single layers, such as `nn.Linear`, are used only if the model has no list of
            larger modules.
        every: Checkpoint only every n-th block. With 2, these are the second, the fourth, and so
            on.
        first: Checkpoint only blocks among the first n blocks, counted from the beginning of the
            model and across all lists. None considers all blocks. The last block can usually be
            left out without raising the peak, because all of its activations are live when backward
            starts, with or without a checkpoint.
        policy: Selection of outputs that are kept instead of recomputed: a list of operators, or a
            policy function for PyTorch's `create_selective_checkpoint_contexts`. None recomputes
            everything. `nn.Linear` calls `torch.ops.aten.addmm.default` if it has a bias and
            `torch.ops.aten.mm.default` if it has none. If none of the listed operators has run when
            the first block is recomputed, a warning lists the matrix products that the blocks ran.

            If the policy keeps the output of an operator that draws random numbers, this operator
            does not run again. Random operators after it then draw other numbers in the
            recomputation. The comparison raises an error if backward needs these numbers.
        preserve_rng_state: Whether a block that draws random numbers with PyTorch draws the same
            numbers in its recomputation, on the CPU and on the devices of its tensor arguments.
        preserve_module_state: Whether the recomputation starts from the same state as the first
            run. The state is the attributes of the block's modules (tensors, numbers, containers of
            these, and generators) and the global random number generators of Python and NumPy.
            Buffers are not included, except those of instance norms in training mode. After the
            recomputation, the state from just before the recomputation is restored. This option has
            no effect inside a compiled model.
        compare: Whether to compare the first recomputation of each block with its first run, by
            checksums of the tensors saved for backward. This reads each of these tensors twice,
            which added 15% and 21% to the CPU time of the first step of two small language models.
            Later steps compare nothing. Until the recomputation, one checksum per saved tensor is
            kept, which memory meters do not count. On a CPU, checksums are exact. On a GPU they
            allow for rounding, and computing them uses up to 8 MB of GPU memory. This option has no
            effect inside a compiled model or with `preserve_rng_state=False`.

    Returns:
        A handle with the `names` of the blocks. `handle.remove()` undoes the change, as does the
        end of a `with checkpoint_blocks(...)` block. After a forward pass, `handle.check()` raises
        an error if none of the blocks was called with gradients enabled.

    Raises:
        ValueError: `blocks` matches no module that has a forward method, a block is checkpointed
            already, or `every` is larger than the number of blocks.
        TypeError: An argument has the wrong type.
        RuntimeError: (In the backward pass) a block's first recomputation is not equal to its first
            run, so gradients would be wrong. The message names the block. The error is also raised
            in three other cases: a recomputation fails, a tensor among the arguments was changed in
            place, or the last operator of a block is `rrelu` in training mode.

    Example:
        >>> from course_lib.models import Decoder, random_tokens
        >>> decoder = Decoder(vocabulary=100, hidden=32, layers=2, heads=2, sequence=16)
        >>> with checkpoint_blocks(decoder, "layers.*"):
        ...     decoder.loss(random_tokens(4, 16, 100)).backward()

    The recomputation repeats the side effects of a block, such as an update of a buffer. A repeated
    update of a buffer starts from the values that the first run has left behind. The recomputation
    stops as soon as all tensors that backward needs exist, so side effects after this point are not
    repeated. The following side effects happen twice, once in forward and once in backward,
    whatever the value of `preserve_module_state`:

    - Changes of buffers, such as the running statistics of batch norms and the vectors of spectral
      norms. Buffers of instance norms in training mode are the only exception: with
      `preserve_module_state=True` they are updated once.
    - Changes of objects among the arguments, such as a key-value cache. Train Hugging Face models
      with `use_cache=False`, and pass no cache. Lists and dicts are an exception: the recomputation
      gets copies with the original content.
    - Changes of anything outside the block's modules, such as global variables and files.

    Changes of attributes that are not buffers, such as a counter of calls, happen twice by default
    and once with `preserve_module_state=True`. If backward would compute with wrong values because
    a side effect happened twice, the comparison raises an error.
    """
    kind("model", model, nn.Module, "an nn.Module")
    every = whole("every", every, 1)
    first = None if first is None else whole("first", first, 1)
    if policy is not None:
        policy = ListedOperators(policy) if isinstance(policy, list) else Policy(policy)
    selected = names_of(model, blocks)[:first]
    names = selected[every - 1 :: every]
    if not names:
        raise ValueError(
            f"`every` must be at most {len(selected)}, the number of selected blocks, got {every}"
        )
    handle = CheckpointedBlocks(model, names, policy, preserve_rng_state, preserve_module_state)
    handle.compare = compare and preserve_rng_state
    return handle


# ---- replacing the forward of blocks


def blocks_in_place(model: nn.Module) -> list[str]:
    """Return the names of the model's modules that are checkpointed in place at present.

    These are the modules whose `forward` has been replaced by `checkpoint_blocks` or
    `schedule_blocks`. Names are as in `model.named_modules()`.
    """
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module.forward, _ReplacementForward)
    ]


class BlocksInPlace:
    """Handle for blocks (modules of a model) whose `forward` has been replaced.

    The blocks get their original `forward` back when `remove()` is called, or at the end of a
    `with` block of the handle. This is a base class. Its subclasses implement `_call`, which runs
    instead of a block's `forward`.

    Attributes:
        names: Names of the blocks, as in `model.named_modules()`.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]):
        self.names = tuple(names)
        blocks = [model.get_submodule(name) for name in names]
        if any(isinstance(block.forward, _ReplacementForward) for block in blocks):
            raise ValueError(
                f"blocks must be modules that are not checkpointed yet, got {', '.join(names)}"
            )
        self._forwards = [
            _ReplacementForward(block, partial(self._call, i)) for i, block in enumerate(blocks)
        ]

    def _call(self, i: int, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Return the output of block number `i`; subclasses implement this.

        Args:
            i: Position of the block in `names`.
            forward: The block's original forward method.
            args, kwargs: Arguments with which the block is called.
        """
        raise NotImplementedError

    def remove(self) -> None:
        """Restore the original `forward` of all blocks. A second call does nothing."""
        for forward in self._forwards:
            forward.undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()


class CheckpointedBlocks(BlocksInPlace):
    """Handle that `checkpoint_blocks` returns. Its method `remove` removes the checkpoints.

    Attributes:
        compare: Whether each block's recomputations are compared with its first run, until one
            recomputation was equal. A difference raises a RuntimeError.
        advice: Last clause of the error message that is raised if a recomputation differs, such as
            "exclude the block from checkpointing". The default is None. If `advice` is a string,
            every recomputation is compared, whatever the value of `compare`. If in addition
            `preserve_module_state=True`, a recomputation that changes the block's parameters,
            buffers or tensors in attributes raises a RuntimeError. Running statistics may change.
    """

    compare: bool = False
    advice: str | None = None

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        policy: Policy | None,
        preserve_rng_state: bool,
        preserve_module_state: bool,
    ):
        super().__init__(model, names)
        self._policy = policy
        # The compiler does not accept PyTorch's default `context_fn` if it is passed explicitly.
        contexts = partial(create_selective_checkpoint_contexts, policy)
        self._contexts = {} if policy is None else {"context_fn": contexts}
        self._user_policy = None if policy is None else policy.user_policy
        self._preserve_rng_state = preserve_rng_state
        self._preserve_module_state = preserve_module_state
        self._called = False
        self._found_equal: set[str] = set()  # names of the blocks that need no further comparison

    def check(self) -> None:
        """Raise an error if no block has been called with gradients enabled so far.

        Call this after a forward pass. The error means that nothing was checkpointed. This happens
        if the blocks run inside an autograd function of the model, or inside a reentrant
        checkpoint.

        Raises:
            ValueError: No block has been called with gradients enabled.
        """
        if not self._called:
            blocks = " to ".join(map(repr, dict.fromkeys((self.names[0], self.names[-1]))))
            raise ValueError(
                f"none of the checkpointed blocks ({blocks}) was called with gradients enabled,"
                " so no memory was saved. Call the blocks as modules, block(...), outside"
                " torch.no_grad(), or remove the checkpoints"
            )

    def _call(self, i: int, forward: Callable, args: tuple, kwargs: dict) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        self._called = True
        if torch.compiler.is_compiling():
            # PyTorch's checkpoint becomes a part of the compiled graph, which repeats random
            # numbers by itself. The function `run` below cannot be used here, because it changes
            # `has_run`, and the compiler cannot trace a checkpoint whose function changes outer
            # variables.
            function = lambda args, kwargs: forward(*args, **kwargs)  # noqa: E731
            # The user's own policy is used, because on torch 2.9 the compiler cannot trace the
            # checks of a `Policy` either.
            contexts = partial(create_selective_checkpoint_contexts, self._user_policy)
            options = {} if self._user_policy is None else {"context_fn": contexts}
            return checkpoint(function, args, kwargs, use_reentrant=False, **options)
        if are_functorch_transforms_active():
            warnings.warn(
                f"{self.names[i]} runs without a checkpoint inside a transform of torch.func, so"
                " its activations are kept",
                stacklevel=2,
            )
            return forward(*args, **kwargs)
        comparison = self._comparison(self.names[i])
        function = (
            forward if comparison is None else FunctionWithSavedTensorCheck(forward, comparison)
        )
        has_run = False

        @wraps(forward)  # for error messages, which show the name of `forward`
        def run(*args, **kwargs):
            nonlocal has_run
            if has_run and self._policy is not None:
                self._policy.warn_if_none_has_run(self.names)
            has_run = True
            return function(*args, **kwargs)

        state = None
        if self._preserve_module_state:
            strict = comparison if self.advice else None
            state = BlockState(self._forwards[i].block(), strict)
        options = {"preserve_rng_state": self._preserve_rng_state, **self._contexts}
        return Repeatable(run, state).checkpoint(args, kwargs, **options)

    def _comparison(self, name: str) -> Comparison | None:
        """Return the comparison for the block's next run, or None if no comparison is needed."""
        if self.advice:
            return Comparison(name, self.advice)
        if not self.compare or name in self._found_equal:
            return None
        rule = STATE_PRESERVED if self._preserve_module_state else _STATE_NOT_PRESERVED
        return FirstComparison(name, _ADVICE, rule, self._found_equal)


class _ReplacementForward:
    """Replacement for a block's `forward`, set as an attribute of the block.

    `block(...)` still runs the block's hooks, because `nn.Module.__call__` calls this attribute.
    The replacement has only a weak reference to the block, because a reference cycle would keep
    the block alive until garbage collection.

    Args:
        block: The block whose `forward` is replaced.
        call: Function that returns the block's output, called with the original forward, the tuple
            of arguments and the dict of keyword arguments.
    """

    def __init__(self, block: nn.Module, call: Callable[[Callable, tuple, dict], Any]):
        self.block = weakref.ref(block)
        self.call = call
        # The replacement that another library, such as accelerate, has made before, or None.
        self.replaced = vars(block).get("forward")
        self.active = True
        block.forward = self

    def original_forward(self) -> Callable:
        """Return the forward that this object replaced, as a function of the block's arguments."""
        block = self.block()
        return self.replaced or partial(type(block).forward, block)

    def __call__(self, *args, **kwargs):
        return (
            self.call(self.original_forward(), args, kwargs)
            if self.active
            else self.original_forward()(*args, **kwargs)
        )

    def undo(self) -> None:
        """Let the block use its original forward again."""
        block = self.block()
        self.active = False
        # If another library has since replaced this object, that library may still call it. With
        # `active = False`, such a call only runs the original forward.
        if block is not None and vars(block).get("forward") is self:
            del block.forward
            if self.replaced is not None:
                block.forward = self.replaced

    def __reduce__(self):
        """Give a copied block the `forward` of its class, because a policy cannot be pickled."""
        # The copy has no attribute `forward` yet, so `getattr` finds the method of the class.
        return getattr, (self.block(), "forward")


# ---- selecting blocks


def names_of(model: nn.Module, blocks: str | Sequence[str] | None) -> list[str]:
    """Return the names of the modules of a model that an argument `blocks` selects.

    Args:
        model: The model.
        blocks: Names with wildcards such as "layers.*", or None to find the model's lists of
            layers, as in `checkpoint_blocks`.

    Raises:
        ValueError: `blocks` matches no module that has a forward method, or it is None and the
            model has no list of layers.
        TypeError: `blocks` has the wrong type.
    """
    return (
        [name for names in lists_of(model) for name in names]
        if blocks is None
        else _matching_names(model, blocks)
    )


def lists_of(model: nn.Module) -> list[list[str]]:
    """Return the names of the modules in each list of blocks of a model, such as its layers.

    The function finds the lists that `checkpoint_blocks` uses with `blocks=None`.

    Returns:
        One list of names per list of blocks, with names as in `model.named_modules()`. If the
        modules of each list have one type, the lists are in the model's order. Otherwise, the
        longest `nn.ModuleList` is first.

    Raises:
        ValueError: The model has no list of blocks.
    """
    lists_of_several, lists_of_any_length = (
        list(_find_lists(model, kind)) for kind in (_is_list_of_several, _is_list_of_one_type)
    )
    lists_of_any_type = sorted(_find_lists(model, _is_list), key=len, reverse=True)
    # Lists of single layers, such as the heads of a model for several tasks, come last. A
    # checkpoint gains little for a single layer, because the layer keeps only its input anyway.
    larger = [
        [names for names in lists if any(model.get_submodule(names[0]).children())]
        for lists in (lists_of_several, lists_of_any_length)
    ]
    larger_of_any_type = [
        names
        for names in lists_of_any_type
        if any(True for name in names for _ in model.get_submodule(name).children())
    ]
    choices = *larger, larger_of_any_type, lists_of_several, lists_of_any_length, lists_of_any_type
    block_lists = next(filter(None, choices), None)
    if block_lists is None:
        raise ValueError(
            "blocks must be one or several names of modules, got None, and the model has no"
            " nn.ModuleList from which to take blocks. A name may contain wildcards, as in"
            f" '*.block'; {_available_names(model, names_to_choose(model))}"
        )
    return block_lists


def names_to_choose(model: nn.Module) -> list[str]:
    """Return the names of modules that an error message proposes to the user as blocks.

    These are the outermost modules that have a forward and contain other modules. If there is
    exactly one such module, the function searches inside it instead. If there is none, all
    outermost modules that have a forward are returned.
    """
    outer = dict(_modules_with_forward(model))
    larger = {name: module for name, module in outer.items() if any(module.children())}
    if len(larger) == 1:
        [(name, module)] = larger.items()
        inner = names_to_choose(module)
        return [f"{name}.{each}" for each in inner]
    return list(larger or outer)


def _modules_with_forward(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) for each outermost module inside `module` that has a forward."""
    for name, child in module.named_children():
        if _has_forward(child):
            yield name, child
        else:
            yield from ((f"{name}.{inner}", each) for inner, each in _modules_with_forward(child))


def _matching_names(model: nn.Module, blocks: str | Sequence[str]) -> list[str]:
    """Return the names of the modules that match a pattern; raise a ValueError if none does."""
    patterns = (
        [blocks]
        if isinstance(blocks, str)
        else kind("blocks", blocks, (list, tuple), "a name, a list of names, or None")
    )
    callable_names = [name for name, module in model.named_modules() if _has_forward(module)]
    matching = [
        name
        for name in callable_names
        if name and any(_matches(name, pattern) for pattern in patterns)
    ]
    if not matching:
        raise ValueError(
            f"blocks must match the name of a module with a forward method, got {blocks!r};"
            f" {_available_names(model, callable_names[:6])}"
        )
    return matching


def _available_names(model: nn.Module, names: Sequence[str]) -> str:
    """Return a clause for an error message that lists these names of modules in the model."""
    some = ", ".join(map(repr, filter(None, names[:12])))
    return f"the model has {some}" if some else f"{describe(model)} contains no other modules"


def _has_forward(module: nn.Module) -> bool:
    """Return whether a module has a forward method, which an `nn.ModuleList` does not have."""
    return (
        "forward" in vars(module) or type(module).forward is not nn.Module.forward
    )  # a compiled module, for example, has its forward as an attribute


def _matches(name: str, pattern: str) -> bool:
    """Return whether a module's name matches a pattern and has as many dots as the pattern."""
    return name.count(".") == pattern.count(".") and fnmatchcase(name, pattern)


def _find_lists(
    module: nn.Module,
    accept: Callable[[nn.Module], bool],
    prefix: str = "",
    seen: set | None = None,
) -> Iterator[list[str]]:
    """Yield the names of the modules in each list of blocks that `accept` accepts.

    Modules inside such a list are not searched for further lists.

    Args:
        module: Module to search.
        accept: Function that returns whether a module is a list of blocks.
        prefix: Name of the module in the model, followed by a dot, or "" for the model itself.
        seen: Modules that were searched already.
    """
    seen = set() if seen is None else seen
    if module in seen:  # count a module with two names, such as a shared encoder, only once
        return
    seen.add(module)
    children = {f"{prefix}{name}": child for name, child in module.named_children()}
    if accept(module):
        yield list(children)
    else:
        for name, child in children.items():
            yield from _find_lists(child, accept, f"{name}.", seen)


def _is_list(module: nn.Module) -> bool:
    """Return whether a module is an `nn.ModuleList` of modules that have a forward."""
    children = list(module.children())
    return isinstance(module, nn.ModuleList) and bool(children) and all(map(_has_forward, children))


def _is_list_of_one_type(module: nn.Module) -> bool:
    """Return whether a module is an `nn.ModuleList` of modules of one type that have a forward."""
    return _is_list(module) and len({*map(type, module.children())}) == 1


def _is_list_of_several(module: nn.Module) -> bool:
    """Return whether a module is a list or sequence of two or more modules of one type."""
    children = list(module.children())
    return (
        isinstance(module, (nn.ModuleList, nn.Sequential))
        and len(children) > 1
        and len({*map(type, children)}) == 1
        and all(map(_has_forward, children))
    )
