"""Selective checkpointing: keep what some operators return, recompute the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, SelectiveCheckpointContext
from torch.utils.checkpoint import create_selective_checkpoint_contexts as torchs_contexts

from .._torch import WRITES_AFTER_SAVING, ObserverMode, RandomState, tensors_in
from .reentrant import version

# (pack, unpack), as for `torch.autograd.graph.saved_tensors_hooks`
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class _CachedValue:
    """One value that an operator returned, kept for the recomputation.

    Args:
        hooks: those through which a tensor goes.
    """

    def __init__(self, value: Any, offload: bool, hooks: Hooks | None = None):
        self.device = self.version = self.unpack = None
        if isinstance(value, Tensor) and offload and value.device.type != "cpu":
            self.device = value.device
            value = value.to("cpu")
        elif isinstance(value, Tensor):
            # Detached, since the value itself will get a history that leads back here. With this
            # dispatch key on, the alias shares the version counter, by which a change in place is
            # noticed.
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                value = value.detach()
            if hooks is not None:
                value, self.unpack = hooks[0](value), hooks[1]
            self.version = version(value) if isinstance(value, Tensor) else None
        self.val = value

    def get(self, allow_mutation: bool) -> Any:
        if self.version is not None and self.val._version != self.version and not allow_mutation:
            raise RuntimeError(
                "Tensor cached during selective activation checkpoint has been mutated: its shape"
                f" is {tuple(self.val.shape)}. Change a copy in place, or let the policy"
                " recompute it"
            )
        if self.unpack is not None:
            return self.unpack(self.val)
        return self.val if self.device is None else self.val.to(self.device)


_RECOMPUTE, _USED = object(), object()
_TO_END = object()  # in storage where the recomputation must not end early


class _Mode(ObserverMode):
    """Both runs see the same operators, and share what the first one writes down.

    `storage` maps an operator to what became of its first, second, ... output; and (operator,
    which) to the random numbers after it.
    """


class _CachingTorchDispatchMode(_Mode):
    """The forward pass: asks the policy, and keeps what it says. Named as PyTorch's, which other
    libraries look for.

    Attributes:
        hooks: those through which what is kept goes; a checkpoint sets them.
    """

    hooks: Hooks | None = None

    def __init__(self, policy: Callable, storage: dict):
        super().__init__()
        self.policy, self.storage = policy, storage

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _is_outside(func, args):
            return func(*args, **kwargs)
        random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        before = torch.get_rng_state() if random else None
        result = func(*args, **kwargs)
        context = SelectiveCheckpointContext(is_recompute=False)
        context.op_output = result  # an argument from torch 2.12 on
        policy = _policy(self.policy(context, func, *args, **kwargs), func)
        entries = self.storage[func]
        late = func in WRITES_AFTER_SAVING  # which a value that was kept would not do
        self.storage[_TO_END] += [True] * late
        if late or policy.endswith("RECOMPUTE"):
            entries.append(_RECOMPUTE)
            return result
        if random:
            after = RandomState(tensor.device for tensor in tensors_in(result))
            # those that a run without it must go on with
            if after.devices or not torch.equal(before, after.cpu):
                self.storage[func, len(entries)] = after
        below = policy.endswith("OFFLOAD")
        entries.append(tree_map(lambda value: _CachedValue(value, below, self.hooks), result))
        return result


def _is_outside(func: Any, args: tuple) -> bool:
    """Whether an operator may run more often in one of both runs than in the other, so that it is
    not counted, and what it returns is not kept.

    The hooks detach and look at shapes. Autocast casts a leaf that requires gradients, such as a
    weight, when it is first used, and keeps the cast until its block ends: of a weight that was
    used before the function, the first run casts nothing, and the recomputation does.
    """
    if func is torch.ops.aten._to_copy.default:
        return args[0].is_leaf and args[0].requires_grad
    return func in SAC_IGNORED_OPS


def _policy(answer: Any, func: Any) -> str:
    """A policy's answer as the name of a `CheckpointPolicy`; those for offload exist in newer
    versions only."""
    if isinstance(answer, bool):
        return "MUST_SAVE" if answer else "PREFER_RECOMPUTE"
    if not isinstance(answer, CheckpointPolicy):
        raise TypeError(
            f"the policy's answer for {func} must be a CheckpointPolicy or a bool, got {answer!r}"
        )
    return answer.name


class _CachedTorchDispatchMode(_Mode):
    """The recomputation: returns what was kept, once, instead of computing it."""

    def __init__(self, storage: dict, allow_cache_entry_mutation: bool = False):
        super().__init__()
        self.storage, self.allow_cache_entry_mutation = storage, allow_cache_entry_mutation

    @property
    def to_end(self) -> bool:
        """Whether the function must run to its end, since it writes into what it has saved."""
        return bool(self.storage.get(_TO_END))

    def __enter__(self):
        self.counts: dict[Any, int] = defaultdict(int)
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if _is_outside(func, args):
            return func(*args, **(kwargs or {}))
        entries = self.storage.get(func, ())
        position = self.counts[func]
        self.counts[func] += 1
        if position >= len(entries):
            raise RuntimeError(
                f"{func} encountered during backward but not found in storage: the forward pass ran"
                f" it {len(entries)} times. The function must do the same whenever it is run"
            )
        entry = entries[position]
        if entry is _RECOMPUTE:
            return func(*args, **(kwargs or {}))
        if entry is _USED:
            raise RuntimeError(
                "Trying to backward an extra time. You are only allowed to backward once on any"
                " region computed under selective activation checkpoint"
            )
        entries[position] = _USED
        if (func, position) in self.storage:
            self.storage.pop((func, position)).restore()
        return tree_map(lambda kept: kept.get(self.allow_cache_entry_mutation), entry)


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Callable | list, allow_cache_entry_mutation: bool = False
) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Two contexts, for `checkpoint(..., context_fn=partial(create_selective_checkpoint_contexts,
    policy))`.

    Args:
        policy_fn_or_list: `policy(context, operator, *args, **kwargs)` with a
            `SelectiveCheckpointContext`, which returns a `CheckpointPolicy` (or a bool: keep it?);
            or a list of operators to keep, such as `[torch.ops.aten.mm.default]`. Asked in the
            forward pass only, and not of casts of leaves that require gradients, such as weights
            under autocast: these are always computed again.
        allow_cache_entry_mutation: don't check whether what was kept has been changed in place.

    Raises:
        ValueError: something in the list is not an `OpOverload`.
        TypeError: neither a list nor a function; or (in the forward pass) a policy's answer that
            means nothing.
    """
    if TracingContext.try_get() is not None:
        # The compiler marks the operators of its graph with PyTorch's contexts.
        return torchs_contexts(policy_fn_or_list, allow_cache_entry_mutation)
    policy = policy_fn_or_list
    if isinstance(policy, list):
        for op in policy:
            if not isinstance(op, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
                raise ValueError(
                    f"Expected op in `op_list` to be an OpOverload but got: {op} of type"
                    f" {type(op)}. Please update the OpOverloadPacket to a specific OpOverload: not"
                    " `torch.ops.aten.mm` but `torch.ops.aten.mm.default`"
                )
        operators = frozenset(policy)
        policy = lambda context, op, *args, **kwargs: op in operators  # noqa: E731
    elif not callable(policy):
        raise TypeError("policy_fn_or_list must be either a function or a list of ops.")
    storage: dict = defaultdict(list)
    forward = _CachingTorchDispatchMode(policy, storage)
    return forward, _CachedTorchDispatchMode(storage, allow_cache_entry_mutation)
