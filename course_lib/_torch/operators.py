"""Private names for PyTorch's operators, and a helper that finds arguments changed in place."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch._C import DispatchKey as DispatchKey
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._prims.rng_prims import run_and_save_rng_state as run_and_save_rng_state
from torch._prims_common import make_channels_last_strides_for as make_channels_last_strides_for
from torch._prims_common import make_contiguous_strides_for as make_contiguous_strides_for
from torch._prims_common import suggest_memory_format as suggest_memory_format


def written_arguments(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[Any, Any]]:
    """Return the arguments that an operator changes in place when it is called.

    Args:
        func, args, kwargs: The operator, and the arguments of the call.

    Returns:
        One pair per argument: its description in the operator's schema, and its value in the call.
    """
    arguments = func._schema.arguments
    bound = [
        *zip(arguments, args, strict=False),
        *((each, kwargs[each.name]) for each in arguments if each.name in kwargs),
    ]
    return [pair for pair in bound if pair[0].alias_info and pair[0].alias_info.is_write]
