"""Selective checkpointing: keep the outputs of some operators, and recompute the rest.

`create_selective_checkpoint_contexts` returns two dispatch modes, which `checkpoint` enters around
its two runs. The first mode keeps outputs, and the second returns them instead of computing them.
"""

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
from torch.utils.checkpoint import create_selective_checkpoint_contexts as torch_contexts

from .._torch import WRITES_AFTER_SAVING, ObserverMode, RandomState, tensors_in
from .comparison import Hooks
from .reentrant import version


class _CachedValue:
    """One output of an operator, kept for the recomputation.

    Args:
        value: The output, a tensor or any other value.
        offload: Whether to copy a tensor to the CPU.
        hooks: Saved-tensor hooks that pack a tensor which is not offloaded; None does not pack it.
    """

    def __init__(self, value: Any, offload: bool, hooks: Hooks | None = None):
        self.device = self.version = self.unpack = None
        if isinstance(value, Tensor) and offload and value.device.type != "cpu":
            self.device = value.device
            value = value.to("cpu")
        elif isinstance(value, Tensor):
            # The tensor is detached, because autograd will give the output a history that refers
            # to this object, which would form a reference cycle. The detached tensor shares the
            # version counter, which counts in-place changes, only if the dispatch key below is not
            # excluded.
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


# entries of `storage` for an output that is not kept, and for one that was already returned
_RECOMPUTE, _USED = object(), object()
_TO_END = object()  # key in `storage` of a list that is not empty if early stop is not allowed


class _Mode(ObserverMode):
    """Base class of the modes for the two runs, which share `storage`.

    For each operator, `storage` has a list with one entry per call in the first run: its kept
    outputs, or `_RECOMPUTE`. For (operator, number of the call), it has the state of the random
    number generators after that call, if its output is kept and it drew random numbers.
    """


class _CachingTorchDispatchMode(_Mode):
    """The mode of the first run: calls the policy, and keeps the outputs that it selects.

    The class has the same name as PyTorch's, because other libraries look for that name.

    Attributes:
        hooks: Saved-tensor hooks that pack and unpack the kept outputs, or None. `checkpoint` sets
            them.
    """

    hooks: Hooks | None = None

    def __init__(self, policy: Callable, storage: dict):
        super().__init__()
        self.policy, self.storage = policy, storage

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _is_uncounted(func, args):
            return func(*args, **kwargs)
        random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        state_before = torch.get_rng_state() if random else None
        result = func(*args, **kwargs)
        context = SelectiveCheckpointContext(is_recompute=False)
        context.op_output = result  # since torch 2.12 this is an argument of the constructor
        policy = _policy_name(self.policy(context, func, *args, **kwargs), func)
        entries = self.storage[func]
        # If its output were kept, the recomputation would skip it and lack what it writes.
        writes_later = func in WRITES_AFTER_SAVING
        self.storage[_TO_END] += [True] * writes_later
        if writes_later or policy.endswith("RECOMPUTE"):
            entries.append(_RECOMPUTE)
            return result
        if random:
            after = RandomState(tensor.device for tensor in tensors_in(result))
            # The recomputation skips this operator, and must then continue from this state.
            if after.devices or not torch.equal(state_before, after.cpu):
                self.storage[func, len(entries)] = after
        offload = policy.endswith("OFFLOAD")
        entries.append(tree_map(lambda value: _CachedValue(value, offload, self.hooks), result))
        return result


def _is_uncounted(func: Any, args: tuple) -> bool:
    """Return whether an operator may run more often in one of the two runs than in the other.

    Such an operator is not counted, and its output is not kept. One kind are the operators with
    which hooks detach tensors and read their shapes. The other kind are autocast's casts of a leaf
    that requires gradients, such as a weight: autocast caches the cast until its block ends. If the
    weight was already used before the checkpoint, only the recomputation casts it.
    """
    if func is torch.ops.aten._to_copy.default:
        return args[0].is_leaf and args[0].requires_grad
    return func in SAC_IGNORED_OPS


def _policy_name(returned: Any, func: Any) -> str:
    """Return the name of the `CheckpointPolicy` that a policy returned for an operator.

    Names are used because older versions of torch do not have the policies that offload.
    """
    if isinstance(returned, bool):
        return "MUST_SAVE" if returned else "PREFER_RECOMPUTE"
    if not isinstance(returned, CheckpointPolicy):
        raise TypeError(
            f"the policy's return value for {func} must be a CheckpointPolicy or a bool,"
            f" got {returned!r}"
        )
    return returned.name


class _CachedTorchDispatchMode(_Mode):
    """The mode of the recomputation: returns each kept output once, instead of computing it."""

    def __init__(self, storage: dict, allow_cache_entry_mutation: bool = False):
        super().__init__()
        self.storage, self.allow_cache_entry_mutation = storage, allow_cache_entry_mutation

    @property
    def to_end(self) -> bool:
        """Whether the recomputation must run to the end of the function, without early stop.

        This is so if an operator writes into a tensor after saving it.
        """
        return bool(self.storage.get(_TO_END))

    def __enter__(self):
        self.counts: dict[Any, int] = defaultdict(int)
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if _is_uncounted(func, args):
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
        return tree_map(
            lambda cached_value: cached_value.get(self.allow_cache_entry_mutation), entry
        )


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Callable | list, allow_cache_entry_mutation: bool = False
) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return two context managers, for the first run and the recomputation.

    Pass `context_fn=partial(create_selective_checkpoint_contexts, policy)` to `checkpoint`.

    Args:
        policy_fn_or_list: A list of operators whose outputs are kept, such as
            `[torch.ops.aten.mm.default]`, or a function `policy(context, operator, *args,
            **kwargs)`, where the context is a `SelectiveCheckpointContext`. The function returns a
            `CheckpointPolicy`, or True to keep the output and False to recompute it. It is called
            only in the forward pass. It is not called for casts of leaves that require gradients,
            such as weights under autocast, because these are always recomputed.
        allow_cache_entry_mutation: If True, kept outputs are not checked for in-place changes.

    Raises:
        ValueError: An element of the list is not an `OpOverload`.
        TypeError: The argument is neither a list nor a function, or (in the forward pass) a
            policy returned an invalid value.
    """
    if TracingContext.try_get() is not None:
        # The compiler uses PyTorch's contexts to mark the operators of its graph.
        return torch_contexts(policy_fn_or_list, allow_cache_entry_mutation)
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
