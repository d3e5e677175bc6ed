"""Helpers for autograd's graph and for the tensors that it saves for backward."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

AccumulateGrad = torch._C._functions.AccumulateGrad
are_functorch_transforms_active = torch._C._are_functorch_transforms_active
current_graph_task_id = torch._C._current_graph_task_id
current_node = torch._C._current_autograd_node
top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks


# Operators that write into a tensor after it was saved for backward, without increasing its version
# counter. In training mode, rrelu saves its noise tensor before it fills the tensor with random
# numbers. `tests/tools/sweep_gradients.py` looks for other such operators.
WRITES_AFTER_SAVING = (
    torch.ops.aten.rrelu_with_noise.default,
    torch.ops.aten.rrelu_with_noise_.default,
)


def writes_after_saving(node: Any) -> bool:
    """Return whether an autograd node belongs to `rrelu`, which writes into a tensor it saved."""
    return node is not None and node.name().startswith("RreluWithNoiseBackward")


def saved_value_may_differ(node: Any, saved: torch.Tensor) -> bool:
    """Return whether a saved tensor may have other values if the forward pass is run again.

    A comparison of a recomputation with the first run must ignore such tensors. They are:

    - The noise of `rrelu`, which is saved while it is uninitialized.
    - The table of `ctc_loss`, whose padding is never filled or read.
    - The seed and the offset of the random generator that CUDA kernels of
      `scaled_dot_product_attention` save as integers. Without dropout these are uninitialized. With
      dropout, another seed leads to another output, which is saved and compared as well.
    - The running statistics of a batch norm in training mode, which are updated after they are
      saved. The backward pass does not read them.

    Args:
        node: Node of autograd's graph that saved the tensor, or None.
        saved: The tensor.
    """
    if node is None:
        return False
    name = node.name()
    attention = name.startswith("ScaledDotProduct") and not saved.is_floating_point()
    norm = "BatchNorm" in name and saved.dim() == 1
    return attention or norm or name.startswith(("RreluWithNoiseBackward", "CtcLossBackward"))


def check_torch_func(error: BaseException | None, name: str) -> None:
    """Raise an error with advice if `error` says that `torch.func` allows no saved-tensor hooks.

    PyTorch raises such an error if a transform such as `torch.func.grad` runs under saved-tensor
    hooks, or calls code that sets such hooks. For any other error, this function does nothing.

    Args:
        error: Error that was raised under saved-tensor hooks or when they were set. With None, the
            function does nothing.
        name: Name of the context or function that sets the hooks, for the message.

    Raises:
        RuntimeError: `error` is such an error.
    """
    if isinstance(error, RuntimeError) and "support saved tensor hooks" in str(error):
        raise RuntimeError(
            "torch.func.grad, vjp, jacrev and hessian cannot be combined with"
            f" {name}, because PyTorch allows no saved-tensor hooks around these functions. Call"
            " torch.autograd.grad(..., create_graph=True) instead, or call these functions outside"
            f" of {name}"
        ) from error


@contextmanager
def checked_torch_func(name: str) -> Iterator[None]:
    """Raise an error with advice if a `with` block combines saved-tensor hooks with `torch.func`.

    The new error is that of `check_torch_func`, and it replaces PyTorch's error.

    Args:
        name: Name of the context or function that sets the hooks, for the message.
    """
    try:
        yield
    except RuntimeError as error:
        check_torch_func(error, name)
        raise
