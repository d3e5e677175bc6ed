"""Checkpoint each block of any model with one call, and undo it with another."""

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
    """Checkpoint the blocks of a model, in place, until the handle is removed.

    A block is any module that is called. Its arguments and outputs may be anything. Hooks on a
    block run once per forward pass; hooks on modules inside it run once more in the recomputation.
    Names in the state dict stay the same. Without gradients nothing changes. A copy of the model
    (deepcopy, pickle) has no checkpoints. The model or its blocks may be compiled before or after,
    by `torch.compile(block)` or `block.compile()`, also with `fullgraph=True`. Inside a compiled
    graph the checkpoints are PyTorch's. With a `policy` these print a warning about in-place
    operators, and there is no warning about listed operators that never run.

    Args:
        model: Model to change in place: its blocks get a new `forward`.
        blocks: Names of the blocks as in `model.named_modules()`, with wildcards that match one
            part between dots: "layers.*", "model.layers.*", ["encoder.block.*", "decoder.block.*"].
            None selects the blocks in every list of two or more modules of one type
            (`nn.ModuleList` or `nn.Sequential`) that is not inside another such list, such as those
            of an encoder and a decoder, of any lengths. A module that is never called, such as an
            `nn.ModuleList`, is not a block. Lists of one module are used only if there are no
            longer ones, and single layers, such as `nn.Linear`, only if there is nothing else.
        every: Checkpoint only each `every`-th block: with 2, the second, the fourth, and so on.
        first: Consider only this many of the first blocks, in the order of the model, across all
            lists. The last block can be left out, because all of its activations are live at the
            peak anyway, when backward starts.
        policy: None recomputes everything. A list of operators, or a policy as for
            `create_selective_checkpoint_contexts`, determines which outputs are kept. `nn.Linear`
            calls `torch.ops.aten.addmm.default` with a bias and `torch.ops.aten.mm.default` without
            one. If none of the listed operators has run when the first block is recomputed, a
            warning names the matrix products that the blocks did run.
        preserve_rng_state: Whether a block that draws random numbers draws the same ones in its
            recomputation.
        preserve_module_state: Whether to preserve the attributes of a block's modules (tensors,
            numbers, containers of these, and generators) and the states of Python's and NumPy's
            generators. The recomputation starts from their values before the first run, and
            afterwards they have their values after the first run. Has no effect inside a compiled
            model.

    Returns:
        A handle with the `names` of the blocks. `handle.remove()` undoes the change, and so does
        leaving a `with` block. After a forward pass, `handle.check()` raises an error if none of
        the blocks was called with gradients.

    Raises:
        ValueError: No module that is called has such a name, or one is checkpointed already.
        TypeError: An argument has the wrong type.

    Example:
        >>> from course_lib.models import Decoder, random_tokens
        >>> decoder = Decoder(vocabulary=100, hidden=32, layers=2, heads=2, sequence=16)
        >>> with checkpoint_blocks(decoder, "layers.*"):
        ...     decoder.loss(random_tokens(4, 16, 100)).backward()

    All other side effects of a block happen twice, and the recomputation starts from the changed
    values. Examples are running statistics, spectral norms, and a key-value cache that grows (train
    Hugging Face models with `use_cache=False`). Without `preserve_module_state`, attributes are
    such side effects, too.
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


# ---- replacing the forward of blocks


class BlocksInPlace:
    """Blocks with a replaced forward, until `remove()` or the end of a `with` block.

    Attributes:
        names: Names of the blocks, as in `model.named_modules()`.
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
        """Run instead of the forward of block i; subclasses implement this."""
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
        advice: Advice on what to do instead of using checkpoints, for the error of a recomputation
            that differs from the first run. If None, the runs are not compared.
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
        # A list is checked for operators that never run; a function may keep nothing on purpose.
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
        """After a forward pass, raise an error if none of the blocks was called with gradients.

        Nothing was checkpointed then. This happens if the model's own autograd function, or a
        reentrant checkpoint, runs the blocks.
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

        @wraps(forward)  # keeps its name, for errors
        def run(args, kwargs):  # not unpacked, so no name can be mistaken for an option
            nonlocal again
            if again and self._listed is not None:
                self._listed.warn_if_none_was_met(self.names)
            again = True
            return forward(*args, **kwargs)

        # in compiled code, PyTorch's own checkpoint is used
        preserved = self._preserve_module_state and not torch.compiler.is_compiling()
        if preserved and torch.is_grad_enabled():
            comparison = self.advice and Comparison(self.names[i], self.advice)
            run = Repeatable(run, BlockState(self._forwards[i].block(), comparison or None))
        return checkpoint(run, args, kwargs, use_reentrant=False, **self._options)


class _ListedOperators:
    """A policy that keeps the outputs of listed operators, and warns if none of them ever runs.

    A list may name another operator than the model calls, such as `addmm` although its Linears have
    no bias. Without the warning this would cost a full recomputation and look like a working
    policy.
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
        """When a block is recomputed, warn once if no block has run a listed operator."""
        if self._met:
            return
        self._met = True  # so that the warning is given once
        listed = ", ".join(sorted(f"torch.ops.{operator}" for operator in self._operators))
        blocks = " to ".join(dict.fromkeys((names[0], names[-1])))
        message = (
            f"policy keeps {listed}, but {blocks} ran no such operator, so everything is computed"
            " again."
        )
        if self._products:
            message += f" Matrix products that were run: {', '.join(self._products)}."
        warnings.warn(message, stacklevel=2)


class _Forward:
    """A replacement for a block's `forward`, as an attribute, so that the block's hooks still run.

    It refers to the block weakly, because a reference cycle would keep the block alive until
    garbage collection.

    Args:
        around: Function of (the block's own forward, args, kwargs) that returns the block's output.
    """

    def __init__(self, block: nn.Module, around: Callable[[Callable, tuple, dict], Any]):
        self.block = weakref.ref(block)
        self.around = around
        # another library, such as accelerate, may already have replaced it
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
        # if another library has replaced it since, `active = False` is enough
        if block is not None and vars(block).get("forward") is self:
            del block.forward
            if self.before is not None:
                block.forward = self.before

    def __reduce__(self):
        """Give a copy of the block the forward of its class, since a policy cannot be pickled."""
        return getattr, (self.block(), "forward")  # the copy has no attributes yet


# ---- selecting blocks


def names_of(model: nn.Module, blocks: str | Sequence[str] | None) -> list[str]:
    """Return the names of the selected blocks, for checkpoints, schedules, recipes and sharding."""
    return (
        [name for names in lists_of(model) for name in names]
        if blocks is None
        else _matching(model, blocks)
    )


def lists_of(model: nn.Module) -> list[list[str]]:
    """Return the names of the blocks in each list of modules of one type, in model order.

    Raises:
        ValueError: The model has no such list.
    """
    several, any_number = list(_lists(model)), list(_lists(model, least=1))
    # Single layers, such as a model's heads for several tasks, save only their input anyway.
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
    """Return whether a module can be called: an nn.ModuleList, for example, has no forward."""
    return (
        "forward" in vars(module) or type(module).forward is not nn.Module.forward
    )  # an instance has its own forward, for example, if it is compiled


def _matches(name: str, pattern: str) -> bool:
    return name.count(".") == pattern.count(".") and fnmatchcase(name, pattern)


def _lists(
    module: nn.Module, prefix: str = "", least: int = 2, seen: set | None = None
) -> Iterator[list[str]]:
    """Yield the names in each list of at least two modules of one type.

    These modules are not searched for further lists. With `least=1`, an `nn.ModuleList` of one
    module counts too, for a model with one layer.
    """
    seen = set() if seen is None else seen
    if module in seen:  # an encoder that is also the decoder counts once
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
