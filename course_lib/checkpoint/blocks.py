"""A checkpoint around each block of a model, whatever the model: one call, undone by another."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import noop_context_fn

from .._check import kind, whole
from .nonreentrant import checkpoint
from .selective import create_selective_checkpoint_contexts


def checkpoint_blocks(
    model: nn.Module,
    blocks: str | Sequence[str] | None = "layers.*",
    *,
    every: int = 1,
    first: int | None = None,
    policy: Callable | list | None = None,
) -> CheckpointedBlocks:
    """Let the blocks of a model forget their activations: in place, until the handle is removed.

    A block is any module that is called. Its arguments and what it returns may be anything; hooks on it run once a
    forward pass, those on modules inside it once more in the recomputation. Names in the state dict stay. Without
    gradients nothing changes; a copy of the model (deepcopy, pickle) is a plain one.

    Args:
        model: changed in place: its blocks get a `forward` of their own.
        blocks: the blocks' names as in `model.named_modules()`, with wildcards that stand for a part between two dots:
            "layers.*", "model.layers.*", ["encoder.block.*", "decoder.block.*"]. None takes the longest list of like
            modules (`nn.ModuleList` or `nn.Sequential`) that lies in no other such list; all of them if several are as
            long.
        every: checkpoint each `every`-th block only: with 2 the second, the fourth, ...
        first: look at the first blocks only. At the peak, when backward starts, the last block is there in full anyway.
        policy: None forgets everything; a list of operators, or a policy as for `create_selective_checkpoint_contexts`,
            says what to keep.

    Returns:
        A handle with the `names` of the blocks. `handle.remove()` undoes; so does leaving a `with` block.

    Raises:
        ValueError: no module has such a name; or one of them, or a module around or inside it, is checkpointed already.
        TypeError: arguments of other types.

    Example::

        with checkpoint_blocks(decoder, "layers.*"):
            decoder.loss(tokens).backward()

    What a block changes besides its outputs, it changes twice: running statistics, and a key-value cache that grows
    (with Hugging Face models, train with `use_cache=False`).
    """
    kind("model", model, nn.Module, "an nn.Module")
    every = whole("every", every, 1)
    first = None if first is None else whole("first", first, 1)
    kind("policy", policy, (list, Callable, type(None)), "a list of operators to keep, a policy function, or None")
    if policy is not None:
        create_selective_checkpoint_contexts(policy)  # says what is wrong with a list
    names = _like_modules(model) if blocks is None else _matching(model, blocks)
    names = names[:first][every - 1 :: every]
    if not names:
        raise ValueError(f"every is {every}; it takes the number of blocks or less")
    _refuse_overlaps(model, names)
    return CheckpointedBlocks(model, names, policy)


class CheckpointedBlocks:
    """What `checkpoint_blocks` did, and how to undo it: `remove()`, or the end of a `with` block.

    Attributes:
        names: of the blocks, as in `model.named_modules()`.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], policy: Callable | list | None):
        context_fn = noop_context_fn if policy is None else partial(create_selective_checkpoint_contexts, policy)
        self.names = tuple(names)
        self._forwards = [_Forward(model.get_submodule(name), context_fn) for name in names]
        for forward in self._forwards:
            forward.block().forward = forward

    def remove(self) -> None:
        """The blocks are as they were; a second call does nothing."""
        for forward in self._forwards:
            forward.undo()

    def __enter__(self) -> CheckpointedBlocks:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"CheckpointedBlocks({', '.join(self.names)})"


class _Forward:
    """Stands in a block's attributes as its `forward`, so that `block(...)` still runs the block's hooks around it.

    It knows the block weakly: a block that held itself would live until the garbage collector comes.
    """

    def __init__(self, block: nn.Module, context_fn: Callable):
        self.block, self.context_fn = weakref.ref(block), context_fn
        self.before = vars(block).get("forward")  # others may have replaced it before us, as accelerate does
        self.active = True

    def plain(self) -> Callable:
        if self.before is not None:
            return self.before
        block = self.block()
        return type(block).forward.__get__(block)

    def __call__(self, *args, **kwargs):
        forward = self.plain()
        if not self.active:
            return forward(*args, **kwargs)
        run = partial(_run, forward)  # args and kwargs as they are: no name of the block's is taken for an option
        run.__qualname__ = type(self.block()).__qualname__  # for errors
        return checkpoint(run, args, kwargs, use_reentrant=False, context_fn=self.context_fn)

    def undo(self) -> None:
        block, self.active = self.block(), False
        if block is None or vars(block).get("forward") is not self:
            return  # somebody has replaced it after us, and calls this one: it steps aside
        if self.before is None:
            del block.forward
        else:
            block.forward = self.before

    def __reduce__(self):
        """In a copy of the block stands what the block would have had: a policy cannot be pickled."""
        if self.before is not None:
            return _itself, (self.before,)
        return getattr, (self.block(), "forward")  # of a copy that has no attributes yet: the class's


def _run(forward: Callable, args: tuple, kwargs: dict) -> Any:
    return forward(*args, **kwargs)


def _itself(value: Any) -> Any:
    return value


# ---- which blocks


def _matching(model: nn.Module, blocks: str | Sequence[str]) -> list[str]:
    patterns = list(blocks) if isinstance(blocks, (list, tuple)) else [blocks]
    for pattern in patterns:
        kind("blocks", pattern, str, "names with wildcards, or None")
    # An nn.ModuleList has no forward of its own: nobody calls it, so nothing would be forgotten.
    runs = [name for name, module in model.named_modules() if type(module).forward is not nn.Module.forward]
    names = [name for name in runs if name]
    found = [name for name in names if any(_matches(name, pattern) for pattern in patterns)]
    if not found:
        lists = [f"{name}.*" for name, _ in _lists(model)]
        raise ValueError(
            f"blocks is {' or '.join(map(repr, patterns))}, the name of no module that is called; it takes names such "
            f"as {', '.join(map(repr, (lists or names)[:5]))}"
        )
    return found


def _matches(name: str, pattern: str) -> bool:
    return name.count(".") == pattern.count(".") and fnmatchcase(name, pattern)


def _lists(model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """The lists of at least two modules of one type: the list's name, and those of its modules."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1 and len(set(map(type, module))) == 1:
            yield name, [f"{name}.{child}".lstrip(".") for child, _ in module.named_children()]


def _like_modules(model: nn.Module) -> list[str]:
    outermost: dict[str, list[str]] = {}
    for name, children in _lists(model):  # a list comes before those inside its modules
        if not any(name.startswith(f"{outer}.") for outer in outermost):
            outermost[name] = children
    longest = max(map(len, outermost.values()), default=0)
    if not longest:
        raise ValueError("blocks is None, but the model has no list of like modules; it takes names with wildcards")
    return [name for children in outermost.values() if len(children) == longest for name in children]


def _refuse_overlaps(model: nn.Module, names: list[str]) -> None:
    taken = [name for name, module in model.named_modules() if isinstance(vars(module).get("forward"), _Forward)]
    for name in names:
        for other in (*taken, *(set(names) - {name})):
            if f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}."):
                raise ValueError(
                    f"blocks is {name!r} and others, and {other!r} is checkpointed too; it takes modules that are not, "
                    "and lie in none that is"
                )
