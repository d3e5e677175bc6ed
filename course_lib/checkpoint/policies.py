"""Policies of selective checkpointing, which determine the outputs that a checkpoint keeps.

PyTorch's `create_selective_checkpoint_contexts` applies a policy. The classes here check what the
policy returns. If the user passes a list of operators, they warn if none of the operators ever
runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from .._torch.autograd import WRITES_AFTER_SAVING


class Policy:
    """A policy of selective checkpointing whose return values are checked.

    PyTorch's `create_selective_checkpoint_contexts` calls the policy for each operator in a
    checkpoint. The policy decides whether the operator's output is kept or recomputed.

    Args:
        policy: Function `policy(context, operator, *args, **kwargs)` that returns a
            `CheckpointPolicy` or a bool. For the subclass `ListedOperators`, a list of the
            operators whose outputs are kept.

    Raises:
        TypeError: `policy` is neither a list nor a function, or (in the forward pass) it returned
            an invalid value.
        ValueError: An element of the list is not an `OpOverload`. In the forward pass, the error is
            also raised if the policy offloads an output, or keeps an output of `rrelu` in training
            mode.
    """

    def __init__(self, policy: Callable | list):
        create_selective_checkpoint_contexts(policy)  # raises an error for a wrong type
        self.user_policy = policy

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the user's decision for an operator, or raise if the decision is invalid."""
        chosen = self._decide(context, operator, *args, **kwargs)
        if not isinstance(chosen, (bool, CheckpointPolicy)):
            raise TypeError(
                f"the policy's return value for {operator} must be a CheckpointPolicy or a bool,"
                f" got {chosen!r}"
            )
        name = {True: "MUST_SAVE", False: "PREFER_RECOMPUTE"}.get(chosen) or chosen.name
        if name.endswith("CPU_OFFLOAD"):
            raise ValueError(
                f"the policy's return value for {operator} must be a bool or a CheckpointPolicy"
                f" that saves or recomputes, got {name}, which PyTorch carries out only in compiled"
                " code. Use offload_activations for offloading"
            )
        if name.endswith("SAVE") and operator in WRITES_AFTER_SAVING:
            raise ValueError(
                f"the policy's return value for {operator} must be MUST_RECOMPUTE,"
                f" PREFER_RECOMPUTE or False, got {name}. The backward of this operator needs the"
                " random numbers of its forward, and a saved output does not contain them"
            )
        return chosen

    def _decide(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the user's decision for an operator: a `CheckpointPolicy` or a bool."""
        return self.user_policy(context, operator, *args, **kwargs)

    def warn_if_none_has_run(self, names: Sequence[str]) -> None:
        """Do nothing, because a policy function may keep no outputs on purpose.

        `ListedOperators` overrides this method, and gives a warning if no listed operator has run.
        """


class ListedOperators(Policy):
    """A policy that keeps the outputs of listed operators, and warns if none of them ever runs.

    If a model calls none of the listed operators, everything is recomputed, and without the warning
    the user might not notice. This happens, for example, if the list has `addmm`, but the linear
    layers have no bias and call `mm`.

    Args:
        operators: The operators, such as `torch.ops.aten.addmm.default`.
    """

    def __init__(self, operators: list):
        super().__init__(operators)
        self._operators = frozenset(operators)
        self._has_run = not operators  # an empty list keeps nothing on purpose
        # Names of the operators with FLOPs, such as matrix products, in the order in which they
        # ran.
        self._matrix_products: dict[str, None] = {}

    def _decide(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
        listed = operator in self._operators
        self._has_run |= listed
        if getattr(operator, "overloadpacket", None) in flop_registry:
            self._matrix_products[f"torch.ops.{operator}"] = None
        return listed

    def warn_if_none_has_run(self, names: Sequence[str]) -> None:
        """Give a warning, once, if no block has run a listed operator.

        Call this method when a block is recomputed. At that time, all blocks have run in the
        forward pass.

        Args:
            names: Names of all checkpointed blocks, for the warning.
        """
        if self._has_run:
            return
        self._has_run = True  # prevents a second warning
        listed = ", ".join(sorted(f"torch.ops.{operator}" for operator in self._operators))
        blocks = " to ".join(dict.fromkeys((names[0], names[-1])))
        message = (
            f"policy keeps the outputs of {listed}, but {blocks} ran no such operator, so"
            " everything is recomputed."
        )
        if self._matrix_products:
            message += f" Matrix products that were run: {', '.join(self._matrix_products)}."
        warnings.warn(message, stacklevel=2)
