"""Checkpoint the blocks of any model in place: `checkpoint_blocks`.

`BlocksInPlace` replaces the `forward` of blocks and restores it; `schedule_blocks` uses it, too.
The functions that select the blocks are at the end of this file.
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
from .comparison import STATE_PRESERVED, ComparedFunction, Comparison, FirstComparison
from .policies import ListedOperators, Policy
from .repeatable import BlockState, Repeatable

_STATE_NOT_PRESERVED = (
    "A block that is recomputed must compute the same again. With preserve_module_state=True it may"
    " also change its attributes and draw random numbers of random and numpy. Change the block"
)
_ADVICE = "exclude it from checkpoint_blocks"


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
    """Checkpoint the blocks of a model, in place, until the handle is removed.

    A block is any module that is called, with any arguments and outputs. Hooks on a block run once
    per forward pass; hooks on modules inside it run once more in the recomputation. Names in the
    state dict stay the same. With gradients disabled, the blocks run as before. A copy of the model
    (deepcopy, pickle) has no checkpoints. The model or its blocks may be compiled before or after
    this call, by `torch.compile(block)` or `block.compile()`, also with `fullgraph=True`. Inside a
    compiled graph, PyTorch warns about in-place operators if there is a `policy`, but nothing warns
    if none of the listed operators runs. Inside a transform of `torch.func` the blocks run without
    a checkpoint, with a warning.

    Args:
        model: Model to change in place: its blocks get a new `forward`.
        blocks: Names of the blocks as in `model.named_modules()`, with wildcards that match one
            part between dots: "layers.*", "model.layers.*", ["encoder.block.*", "decoder.block.*"].
            None selects the blocks in every list of two or more modules of one type
            (`nn.ModuleList` or `nn.Sequential`) that is not inside another such list, such as those
            of an encoder and a decoder, of any lengths. A module that is never called, such as an
            `nn.ModuleList`, is not a block. Lists of one module are used only if the model has no
            longer list, and lists of single layers, such as `nn.Linear`, only if it has no list of
            larger modules. If there is no list of one type, the modules of each `nn.ModuleList` are
            the blocks, whatever their types, beginning with the longest list.
        every: Checkpoint only every n-th block: with 2, the second, the fourth, and so on.
        first: Number of blocks to consider, from the beginning of the model and across all lists;
            None considers all. The last block may be left out without raising the peak, because
            all of its activations are live at the peak anyway, when backward starts.
        policy: None recomputes everything. A list of operators, or a policy as for PyTorch's
            `create_selective_checkpoint_contexts`, determines which outputs are kept. `nn.Linear`
            calls `torch.ops.aten.addmm.default` with a bias and `torch.ops.aten.mm.default` without
            one. If none of the listed operators has run when the first block is recomputed, a
            warning names the matrix products that the blocks did run. After an operator that draws
            random numbers and whose output is kept, the recomputation draws other numbers. The
            comparison raises an error if backward needs these numbers.
        preserve_rng_state: Whether a block that draws random numbers draws the same ones in its
            recomputation, on the CPU and on the devices of the tensors among its arguments.
        preserve_module_state: Whether to preserve the attributes of a block's modules (tensors,
            numbers, containers of these, and generators) and the states of the global random number
            generators of Python and NumPy. The recomputation starts from their values before the
            first run. Afterwards they have their values after the first run. Has no effect inside
            a compiled model.
        compare: Whether to compare the first recomputation of each block with its first run, by
            checksums of the tensors saved for backward. These tensors are read twice, which added
            15% and 21% to the CPU time of the first step of two small language models. Later steps
            compare nothing. Until the recomputation, one checksum per saved tensor is kept, which
            meters do not count. On a CPU, checksums are exact. On a GPU they allow for rounding,
            and take up to 8 MB of GPU memory while they are computed. Has no effect inside a
            compiled model or with `preserve_rng_state=False`.

    Returns:
        A handle with the `names` of the blocks. `handle.remove()` undoes the change, and so does
        leaving a `with` block. After a forward pass, `handle.check()` raises an error if none of
        the blocks was called with gradients.

    Raises:
        ValueError: No module that is called has such a name, a block is checkpointed already, or
            `every` is larger than the number of blocks.
        TypeError: An argument has the wrong type.
        RuntimeError: (In the backward pass) a block's first recomputation is not equal to its
            first run, so gradients would be wrong. The message names the block and an argument
            that has changed. Also if a recomputation fails and such an argument has changed, if a
            tensor among the arguments was changed in place, or if the last operator of a block is
            `rrelu` in training mode.

    Example:
        >>> from course_lib.models import Decoder, random_tokens
        >>> decoder = Decoder(vocabulary=100, hidden=32, layers=2, heads=2, sequence=16)
        >>> with checkpoint_blocks(decoder, "layers.*"):
        ...     decoder.loss(random_tokens(4, 16, 100)).backward()

    All other side effects of a block happen twice, and the recomputation starts from the changed
    values. Examples are updates of running statistics and spectral norms, and a key-value cache
    among the arguments (train Hugging Face models with `use_cache=False`, and pass no cache). Lists
    and dicts among the arguments are an exception: the recomputation gets their original content.
    Without `preserve_module_state`, changes of attributes also happen twice. A comparison raises an
    error if backward would compute with the changed values.
    """
    kind("model", model, nn.Module, "an nn.Module")
    every = whole("every", every, 1)
    first = None if first is None else whole("first", first, 1)
    if policy is not None:
        policy = ListedOperators(policy) if isinstance(policy, list) else Policy(policy)
    names = names_of(model, blocks)[:first][every - 1 :: every]
    if not names:
        raise ValueError(f"every must be at most the number of blocks, got {every}")
    handle = CheckpointedBlocks(model, names, policy, preserve_rng_state, preserve_module_state)
    handle.compare = compare and preserve_rng_state
    return handle


# ---- replacing the forward of blocks


def blocks_in_place(model: nn.Module) -> list[str]:
    """Return the names of the modules whose forward is replaced by `BlocksInPlace`."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module.forward, _ReplacementForward)
    ]


class BlocksInPlace:
    """Blocks whose forward is replaced until `remove()` or the end of a `with` block.

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
        """Compute what block i returns, given its original forward; subclasses implement this."""
        raise NotImplementedError

    def remove(self) -> None:
        """Restore the original blocks. A second call does nothing."""
        for forward in self._forwards:
            forward.undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()


class CheckpointedBlocks(BlocksInPlace):
    """Checkpointed blocks; the result of `checkpoint_blocks`.

    Attributes:
        compare: Whether the first recomputation of each block is compared with its first run.
        advice: Advice in the error message that is raised if a recomputation differs from the first
            run, such as "exclude it from checkpointing". If it is set, all recomputations are
            compared, and the blocks' buffers as well.
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
        self._given_policy = None if policy is None else policy.given
        self._preserve_rng_state = preserve_rng_state
        self._preserve_module_state = preserve_module_state
        self._called = False
        self._equal: set[str] = set()  # names of the blocks that need no further comparison

    def check(self) -> None:
        """After a forward pass, raise an error if no block was called with gradients enabled.

        In this case nothing was checkpointed. It happens if an autograd function of the model, or
        a reentrant checkpoint, runs the blocks.
        """
        if not self._called:
            blocks = " to ".join(dict.fromkeys((self.names[0], self.names[-1])))
            raise ValueError(
                f"none of the checkpointed blocks ({blocks}) ran with gradients enabled, so"
                " no memory was saved; let the model call them directly, or remove the"
                " checkpoints"
            )

    def _call(self, i: int, forward: Callable, args: tuple, kwargs: dict) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        self._called = True
        if torch.compiler.is_compiling():
            # PyTorch's checkpoint becomes a part of the compiled graph, which repeats random
            # numbers in its own way. The compiler cannot trace variables that change in between.
            function = lambda args, kwargs: forward(*args, **kwargs)  # noqa: E731
            # Nor can it trace the checks of a `Policy`, on torch 2.9.
            contexts = partial(create_selective_checkpoint_contexts, self._given_policy)
            options = {} if self._given_policy is None else {"context_fn": contexts}
            return checkpoint(function, args, kwargs, use_reentrant=False, **options)
        if are_functorch_transforms_active():
            warnings.warn(
                f"{self.names[i]} runs without a checkpoint inside a transform of torch.func, so"
                " its activations are kept",
                stacklevel=2,
            )
            return forward(*args, **kwargs)
        comparison = self._comparison(self.names[i])
        function = forward if comparison is None else ComparedFunction(forward, comparison)
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
        if self.advice:
            return Comparison(name, self.advice)
        if not self.compare or name in self._equal:
            return None
        rule = STATE_PRESERVED if self._preserve_module_state else _STATE_NOT_PRESERVED
        return FirstComparison(name, _ADVICE, rule, self._equal)


class _ReplacementForward:
    """Replacement for a block's `forward`, set as an attribute of the block.

    `block(...)` still runs the block's hooks, because `nn.Module.__call__` calls this attribute.
    The replacement holds only a weak reference to the block, because a reference cycle would keep
    the block alive until garbage collection.

    Args:
        block: The block, whose `forward` is replaced.
        call: Function of (the original forward, args, kwargs) that returns the block's output.
    """

    def __init__(self, block: nn.Module, call: Callable[[Callable, tuple, dict], Any]):
        self.block = weakref.ref(block)
        self.call = call
        # set if another library, such as accelerate, has already replaced the forward
        self.replaced = vars(block).get("forward")
        self.active = True
        block.forward = self

    def original_forward(self) -> Callable:
        block = self.block()
        return self.replaced or partial(type(block).forward, block)

    def __call__(self, *args, **kwargs):
        return (
            self.call(self.original_forward(), args, kwargs)
            if self.active
            else self.original_forward()(*args, **kwargs)
        )

    def undo(self) -> None:
        block = self.block()
        self.active = False
        # If another library has since replaced this object, that library may still call it. With
        # `active = False`, such a call only runs the original forward.
        if block is not None and vars(block).get("forward") is self:
            del block.forward
            if self.replaced is not None:
                block.forward = self.replaced

    def __reduce__(self):
        """Let a copied block use the `forward` of its class, because a policy cannot be pickled."""
        # the copy has no attribute `forward` yet, so `getattr` finds the method of the class
        return getattr, (self.block(), "forward")


# ---- selecting blocks


def names_of(model: nn.Module, blocks: str | Sequence[str] | None) -> list[str]:
    """Return the names of the blocks that `blocks` selects, as described in `checkpoint_blocks`.

    Raises:
        ValueError: No module that is called has such a name.
        TypeError: `blocks` has the wrong type.
    """
    return (
        [name for names in lists_of(model) for name in names]
        if blocks is None
        else _matching_names(model, blocks)
    )


def lists_of(model: nn.Module) -> list[list[str]]:
    """Return the names of the blocks in each list of modules of one type, in the model's order.

    If the model has no such list, return those of each `nn.ModuleList`, the longest first.

    Raises:
        ValueError: The model has no list of modules that are called.
    """
    lists_of_several, lists_of_any_length = (
        list(_lists(model, kind)) for kind in (_is_list_of_several, _is_list_of_one_type)
    )
    lists_of_any_type = sorted(_lists(model, _is_list), key=len, reverse=True)
    # Lists of single layers, such as the heads of a model for several tasks, come last, because a
    # single layer saves only its input anyway.
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
            "blocks must be one or several names, with wildcards, for a model without a list of"
            f" blocks (nn.ModuleList), got None; {_names_shown(model, names_to_choose(model))}"
        )
    return block_lists


def names_to_choose(model: nn.Module) -> list[str]:
    """Return the names of the outermost modules that a user may choose as blocks.

    These are the larger ones, which have modules inside. If there is one alone, those inside it are
    returned.
    """
    outer = dict(_called_modules(model))
    larger = {name: module for name, module in outer.items() if any(module.children())}
    if len(larger) == 1:
        [(name, module)] = larger.items()
        inner = names_to_choose(module)
        return [f"{name}.{each}" for each in inner]
    return list(larger or outer)


def _called_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules inside a module that are called, with their names."""
    for name, child in module.named_children():
        if _is_called(child):
            yield name, child
        else:
            yield from ((f"{name}.{inner}", each) for inner, each in _called_modules(child))


def _matching_names(model: nn.Module, blocks: str | Sequence[str]) -> list[str]:
    patterns = (
        [blocks]
        if isinstance(blocks, str)
        else kind("blocks", blocks, (list, tuple), "names, or None")
    )
    callable_names = [name for name, module in model.named_modules() if _is_called(module)]
    matching = [
        name
        for name in callable_names
        if name and any(_matches(name, pattern) for pattern in patterns)
    ]
    if not matching:
        raise ValueError(
            f"blocks must match the name of a module that is called, got {blocks!r};"
            f" {_names_shown(model, callable_names[:6])}"
        )
    return matching


def _names_shown(model: nn.Module, names: Sequence[str]) -> str:
    """Return a clause with names of modules in the model."""
    some = ", ".join(map(repr, filter(None, names[:12])))
    return f"the model has {some}" if some else f"{describe(model)} contains no other modules"


def _is_called(module: nn.Module) -> bool:
    """Return whether a module has a forward, unlike `nn.ModuleList`, for example."""
    return (
        "forward" in vars(module) or type(module).forward is not nn.Module.forward
    )  # a compiled module, for example, has its forward as an attribute


def _matches(name: str, pattern: str) -> bool:
    return name.count(".") == pattern.count(".") and fnmatchcase(name, pattern)


def _lists(
    module: nn.Module,
    accept: Callable[[nn.Module], bool],
    prefix: str = "",
    seen: set | None = None,
) -> Iterator[list[str]]:
    """Yield the names of the modules in each list that `accept` accepts.

    These modules are not searched for further lists.

    Args:
        module: Module to search.
        accept: Function of a module that returns whether its children are blocks.
        prefix: Name of the module in the model, with a dot, or "".
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
            yield from _lists(child, accept, f"{name}.", seen)


def _is_list(module: nn.Module) -> bool:
    """Return whether a module is an `nn.ModuleList` of modules that are called."""
    children = list(module.children())
    return isinstance(module, nn.ModuleList) and bool(children) and all(map(_is_called, children))


def _is_list_of_one_type(module: nn.Module) -> bool:
    """Return whether a module is an `nn.ModuleList` of modules of one type that are called."""
    return _is_list(module) and len({*map(type, module.children())}) == 1


def _is_list_of_several(module: nn.Module) -> bool:
    """Return whether a module is a list or sequence of several modules of one type."""
    children = list(module.children())
    return (
        isinstance(module, (nn.ModuleList, nn.Sequential))
        and len(children) > 1
        and len({*map(type, children)}) == 1
        and all(map(_is_called, children))
    )
