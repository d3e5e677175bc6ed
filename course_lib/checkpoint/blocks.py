"""A checkpoint around each block of a model, whatever the model: one call, undone by another."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from functools import partial, wraps
from typing import Any, Self

import torch
from torch import nn
from torch.utils.checkpoint import noop_context_fn
from torch.utils.flop_counter import flop_registry

from .._check import kind, shown, whole
from .nonreentrant import checkpoint
from .repeatable import BlockState, Comparison, Repeatable
from .selective import create_selective_checkpoint_contexts


def checkpoint_blocks(
    model: nn.Module,
    blocks: str | Sequence[str] | None = "layers.*",
    *,
    every: int = 1,
    first: int | None = None,
    policy: Callable | list | None = None,
    preserve_rng_state: bool = True,
    preserve_module_state: bool = False,
) -> CheckpointedBlocks:
    """Let the blocks of a model forget their activations: in place, until the handle is removed.

    A block is any module that is called. Its arguments and what it returns may be anything; hooks
    on it run once a forward pass, those on modules inside it once more in the recomputation. Names
    in the state dict stay. Without gradients nothing changes; a copy of the model (deepcopy,
    pickle) is a plain one. The model or its blocks may be compiled before or after, by
    `torch.compile(block)` or `block.compile()`, with `fullgraph=True` too: inside a compiled graph
    the checkpoints are PyTorch's, which print a warning about operators in place where there is a
    `policy`, and no warning says that the policy lists operators that never ran.

    Args:
        model: changed in place: its blocks get a `forward` of their own.
        blocks: the blocks' names as in `model.named_modules()`, with wildcards that stand for a
            part between two dots: "layers.*", "model.layers.*", ["encoder.block.*",
            "decoder.block.*"]. None takes every list of two or more modules of one type
            (`nn.ModuleList` or `nn.Sequential`) that lies in no other such list: an encoder's and a
            decoder's, of any lengths. What nobody calls, such as an `nn.ModuleList`, is no block. A
            list of one counts where there are no longer ones, and single layers, such as
            `nn.Linear`, where there is nothing else.
        every: checkpoint each `every`-th block only: with 2 the second, the fourth, ...
        first: look at the first blocks only, in the order in which the model has them, through
            several lists. At the peak, when backward starts, the last block is there in full
            anyway.
        policy: None forgets everything; a list of operators, or a policy as for
            `create_selective_checkpoint_contexts`, says what to keep. `nn.Linear` calls
            `torch.ops.aten.addmm.default` with a bias and `torch.ops.aten.mm.default` without one.
            If no block has run any of the listed operators when the first block is computed again,
            a warning names the matrix products that the blocks did run.
        preserve_rng_state: keep the states of random generators too, for blocks that draw numbers.
        preserve_module_state: keep also the attributes of a block's modules (tensors, numbers,
            containers of these, and generators), and the states of Python's and NumPy's generators.
            The recomputation computes with them, and leaves attributes and generators as the first
            run did. Has no effect inside a compiled model.

    Returns:
        A handle with the `names` of the blocks. `handle.remove()` undoes; so does leaving a `with`
        block. After a forward pass `handle.check()` raises if none of them was called with
        gradients.

    Raises:
        ValueError: no module that is called has such a name, or one is checkpointed already.
        TypeError: arguments of other types.

    Example:
        >>> from course_lib.models import Decoder, random_tokens
        >>> decoder = Decoder(vocabulary=100, hidden=32, layers=2, heads=2, sequence=16)
        >>> with checkpoint_blocks(decoder, "layers.*"):
        ...     decoder.loss(random_tokens(4, 16, 100)).backward()

    A block changes everything else besides its outputs twice, and the second time it computes with
    the changed values: running statistics, spectral norms, and a key-value cache that grows (with
    Hugging Face models, train with `use_cache=False`). Without `preserve_module_state` the same
    holds for attributes.
    """
    kind("model", model, nn.Module, "an nn.Module")
    every = whole("every", every, 1)
    first = None if first is None else whole("first", first, 1)
    if policy is not None:
        create_selective_checkpoint_contexts(policy)  # raises if the policy is wrong
    names = names_of(model, blocks)[:first][every - 1 :: every]
    if not names:
        raise ValueError(f"every must be at most the number of blocks, got {every}")
    return CheckpointedBlocks(model, names, policy, preserve_rng_state, preserve_module_state)


# ---- a forward of its own


class BlocksInPlace:
    """Blocks that do something else for a while, and how to undo it: `remove()`, or the end of a
    `with` block.

    Attributes:
        names: of the blocks, as in `model.named_modules()`.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]):
        self.names = tuple(names)
        blocks = [model.get_submodule(name) for name in names]
        if any(isinstance(block.forward, _Forward) for block in blocks):
            raise ValueError(
                f"blocks must be modules that are not checkpointed yet, got {', '.join(names)}"
            )
        self._forwards = [_Forward(block, partial(self._call, i)) for i, block in enumerate(blocks)]

    def _call(self, i: int, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Stand in for the forward of block i."""
        raise NotImplementedError

    def remove(self) -> None:
        """The blocks are as they were; a second call does nothing."""
        for forward in self._forwards:
            forward.undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()


class CheckpointedBlocks(BlocksInPlace):
    """Result of `checkpoint_blocks`.

    Attributes:
        advice: what to do instead of checkpoints, for the error of a recomputation that differs
            from the first run; None does not compare them.
    """

    advice: str | None = None

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        policy: Callable | list | None,
        preserve_rng_state: bool,
        preserve_module_state: bool,
    ):
        super().__init__(model, names)
        # A list is watched; a policy that is a function may keep nothing on purpose.
        self._listed = _ListedOperators(policy) if isinstance(policy, list) else None

        def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
            return create_selective_checkpoint_contexts(self._listed or policy)

        self._options = {
            "context_fn": noop_context_fn if policy is None else contexts,
            "preserve_rng_state": preserve_rng_state,
        }
        self._preserve_module_state = preserve_module_state
        self._called = False

    def check(self) -> None:
        """Raise, after a forward pass, if none of the blocks was called with gradients, so that
        nothing was forgotten.

        As where an autograd function of the model's own runs them, or a reentrant checkpoint.
        """
        if not self._called:
            blocks = " to ".join(dict.fromkeys((self.names[0], self.names[-1])))
            raise ValueError(
                f"none of the checkpointed blocks ({blocks}) ran with gradients enabled, so"
                " no memory was saved; let the model call them directly, or remove the"
                " checkpoints"
            )

    def _call(self, i: int, forward: Callable, args: tuple, kwargs: dict) -> Any:
        self._called |= torch.is_grad_enabled()
        if torch.compiler.is_dynamo_compiling():
            # A compiled graph must not change variables inside a checkpoint.
            function = lambda args, kwargs: forward(*args, **kwargs)  # noqa: E731
            return checkpoint(function, args, kwargs, use_reentrant=False, **self._options)
        again = False

        @wraps(forward)  # its name, for errors
        def run(args, kwargs):  # as they are: no name of the block's is taken for an option
            nonlocal again
            if again and self._listed is not None:
                self._listed.warn_if_none_was_met(self.names)
            again = True
            return forward(*args, **kwargs)

        # In compiled code, PyTorch's own checkpoint takes over.
        preserved = self._preserve_module_state and not torch.compiler.is_compiling()
        if preserved and torch.is_grad_enabled():
            comparison = self.advice and Comparison(self.names[i], self.advice)
            run = Repeatable(run, BlockState(self._forwards[i].block(), comparison or None))
        return checkpoint(run, args, kwargs, use_reentrant=False, **self._options)


class _ListedOperators:
    """Policy that keeps what the listed operators return, and notices if it never meets one.

    Without the notice a list that names another operator than the model calls, such as `addmm`
    where the Linears have no bias, costs a full recomputation and looks like a working policy.
    """

    def __init__(self, operators: list):
        self._operators = frozenset(operators)
        self._met = not operators  # an empty list keeps nothing on purpose
        self._products: dict[str, None] = {}  # names of matrix products, in the order they ran

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
        listed = operator in self._operators
        self._met |= listed
        if getattr(operator, "overloadpacket", None) in flop_registry:
            self._products[f"torch.ops.{operator}"] = None
        return listed

    def warn_if_none_was_met(self, names: Sequence[str]) -> None:
        """Warn once, where a block is computed again, if no block has run a listed operator."""
        if self._met:
            return
        self._met = True  # one warning is enough
        listed = ", ".join(sorted(f"torch.ops.{operator}" for operator in self._operators))
        blocks = " to ".join(dict.fromkeys((names[0], names[-1])))
        said = (
            f"policy keeps {listed}, but {blocks} ran no such operator, so everything is computed"
            " again."
        )
        if self._products:
            said += f" Matrix products that were run: {', '.join(self._products)}."
        warnings.warn(said, stacklevel=2)


class _Forward:
    """Stands in a block's attributes as its `forward`, so that `block(...)` still runs the block's
    hooks around it.

    It knows the block weakly: a block that held itself would live until the garbage collector
    comes.

    Args:
        around: (the block's own forward, args, kwargs) -> what the block returns.
    """

    def __init__(self, block: nn.Module, around: Callable[[Callable, tuple, dict], Any]):
        self.block = weakref.ref(block)
        self.around = around
        # others may have replaced it before us, as accelerate does
        self.before = vars(block).get("forward")
        self.active = True
        block.forward = self

    def own(self) -> Callable:
        block = self.block()
        return self.before or type(block).forward.__get__(block)

    def __call__(self, *args, **kwargs):
        return self.around(self.own(), args, kwargs) if self.active else self.own()(*args, **kwargs)

    def undo(self) -> None:
        block = self.block()
        self.active = False
        # else others call it, and it steps aside
        if block is not None and vars(block).get("forward") is self:
            del block.forward
            if self.before is not None:
                block.forward = self.before

    def __reduce__(self):
        """Put the method of its class in a copy of the block; a policy cannot be pickled."""
        return getattr, (self.block(), "forward")  # of a copy that has no attributes yet


# ---- which blocks


def names_of(model: nn.Module, blocks: str | Sequence[str] | None) -> list[str]:
    """The one choice of blocks: of checkpoints, schedules, recipes and shards."""
    return (
        [name for names in lists_of(model) for name in names]
        if blocks is None
        else _matching(model, blocks)
    )


def lists_of(model: nn.Module) -> list[list[str]]:
    """The names of the blocks in each list of like modules, in the order in which the model has
    them.

    Raises:
        ValueError: there is none.
    """
    several, any_number = list(_lists(model)), list(_lists(model, least=1))
    # Single layers, such as a model's heads for several tasks, keep no more than their input
    # anyway.
    larger = [
        [names for names in lists if any(model.get_submodule(names[0]).children())]
        for lists in (several, any_number)
    ]
    found = next(filter(None, (*larger, several, any_number)), None)
    if found is None:
        raise ValueError(
            "blocks must be names with wildcards for a model that has no list of modules"
            " of one type, got None"
        )
    return found


def _matching(model: nn.Module, blocks: str | Sequence[str]) -> list[str]:
    patterns = (
        [blocks]
        if isinstance(blocks, str)
        else kind("blocks", blocks, (list, tuple), "names, or None")
    )
    runs = [name for name, module in model.named_modules() if _is_called(module)]
    found = [name for name in runs if name and any(_matches(name, pattern) for pattern in patterns)]
    if not found:
        some = ", ".join(map(repr, filter(None, runs[:6])))
        raise ValueError(
            f"blocks must match the name of a module that is called, got {blocks!r}; "
            + (f"the model has {some}" if some else f"{shown(model)} contains no other modules")
        )
    return found


def _is_called(module: nn.Module) -> bool:
    """An nn.ModuleList has no forward of its own: nobody calls it, so nothing would be
    forgotten."""
    return (
        "forward" in vars(module) or type(module).forward is not nn.Module.forward
    )  # its own, as where it is compiled


def _matches(name: str, pattern: str) -> bool:
    return name.count(".") == pattern.count(".") and fnmatchcase(name, pattern)


def _lists(
    module: nn.Module, prefix: str = "", least: int = 2, seen: set | None = None
) -> Iterator[list[str]]:
    """The names in each list of at least two modules of one type; what is inside these modules is
    not looked at.

    With `least=1` also in an `nn.ModuleList` of one module, for a model of one layer.
    """
    seen = set() if seen is None else seen
    if module in seen:  # an encoder that is the decoder too is one
        return
    seen.add(module)
    children = {f"{prefix}{name}": child for name, child in module.named_children()}
    kinds = (nn.ModuleList, nn.Sequential) if least > 1 else nn.ModuleList
    like = len({*map(type, children.values())}) == 1 and all(map(_is_called, children.values()))
    if isinstance(module, kinds) and len(children) >= least and like:
        yield list(children)
    else:
        for name, child in children.items():
            yield from _lists(child, f"{name}.", least, seen)
