"""Selective checkpointing: keep the outputs of some operators, and recompute the rest."""

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
    """One output of an operator, kept for the recomputation.

    Args:
        hooks: Saved-tensor hooks through which a tensor goes.
    """

    def __init__(self, value: Any, offload: bool, hooks: Hooks | None = None):
        self.device = self.version = self.unpack = None
        if isinstance(value, Tensor) and offload and value.device.type != "cpu":
            self.device = value.device
            value = value.to("cpu")
        elif isinstance(value, Tensor):
            # Detached, because the output itself will get a history that refers to this object.
            # With this dispatch key on, the alias shares the version counter, which shows changes
            # in place.
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
_TO_END = object()  # key in `storage` if the recomputation must not end early


class _Mode(ObserverMode):
    """Both runs see the same operators and share the records of the first run.

    `storage` maps an operator to the records of its first, second, ... call, and (operator, call
    number) to the state of the random numbers after that call.
    """


class _CachingTorchDispatchMode(_Mode):
    """The forward pass: asks the policy, and keeps the outputs that it selects.

    The class has PyTorch's name, because other libraries look for it.

    Attributes:
        hooks: Saved-tensor hooks through which kept outputs go; set by a checkpoint.
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
        context.op_output = result  # torch passes it as an argument since version 2.12
        policy = _policy(self.policy(context, func, *args, **kwargs), func)
        entries = self.storage[func]
        late = func in WRITES_AFTER_SAVING  # a kept output would lack what the operator writes
        self.storage[_TO_END] += [True] * late
        if late or policy.endswith("RECOMPUTE"):
            entries.append(_RECOMPUTE)
            return result
        if random:
            after = RandomState(tensor.device for tensor in tensors_in(result))
            # if the recomputation skips this operator, it must continue with these numbers
            if after.devices or not torch.equal(before, after.cpu):
                self.storage[func, len(entries)] = after
        below = policy.endswith("OFFLOAD")
        entries.append(tree_map(lambda value: _CachedValue(value, below, self.hooks), result))
        return result


def _is_outside(func: Any, args: tuple) -> bool:
    """Return whether an operator may run more often in one of the two runs than in the other.

    Such an operator is not counted, and its output is not kept. Hooks detach tensors and look at
    shapes. Autocast casts a leaf that requires gradients, such as a weight, when it is first used,
    and caches the cast until its block ends. If a weight was used before the function, the first
    run casts nothing, but the recomputation does.
    """
    if func is torch.ops.aten._to_copy.default:
        return args[0].is_leaf and args[0].requires_grad
    return func in SAC_IGNORED_OPS


def _policy(answer: Any, func: Any) -> str:
    """Return a policy's answer as the name of a `CheckpointPolicy`.

    The offload policies exist only in newer versions of torch, hence names.
    """
    if isinstance(answer, bool):
        return "MUST_SAVE" if answer else "PREFER_RECOMPUTE"
    if not isinstance(answer, CheckpointPolicy):
        raise TypeError(
            f"the policy's answer for {func} must be a CheckpointPolicy or a bool, got {answer!r}"
        )
    return answer.name


class _CachedTorchDispatchMode(_Mode):
    """The recomputation: returns each kept output once, instead of computing it."""

    def __init__(self, storage: dict, allow_cache_entry_mutation: bool = False):
        super().__init__()
        self.storage, self.allow_cache_entry_mutation = storage, allow_cache_entry_mutation

    @property
    def to_end(self) -> bool:
        """Whether the function must run to its end, as an operator writes into saved tensors."""
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
    """Return a context for each run, for the `context_fn` of `checkpoint`.

    Pass `context_fn=partial(create_selective_checkpoint_contexts, policy)`.

    Args:
        policy_fn_or_list: A list of operators whose outputs are kept, such as
            `[torch.ops.aten.mm.default]`, or a function `policy(context, operator, *args,
            **kwargs)` of a `SelectiveCheckpointContext`. The function returns a `CheckpointPolicy`,
            or a bool that says whether to keep the output. It is called only in the forward pass,
            and not for casts of leaves that require gradients, such as weights under autocast:
            these are always recomputed.
        allow_cache_entry_mutation: If True, kept outputs are not checked for changes in place.

    Raises:
        ValueError: An element of the list is not an `OpOverload`.
        TypeError: The argument is neither a list nor a function, or (in the forward pass) a
            policy's answer is invalid.
    """
    if TracingContext.try_get() is not None:
        # The compiler uses PyTorch's contexts to mark the operators of its graph.
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
