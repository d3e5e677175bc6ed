"""Functions on autograd's graph, and on the tensors that the graph saves."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

AccumulateGrad = torch._C._functions.AccumulateGrad
are_functorch_transforms_active = torch._C._are_functorch_transforms_active
current_graph_task_id = torch._C._current_graph_task_id
current_node = torch._C._current_autograd_node
top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks


# In training, rrelu saves the noise tensor for backward before it fills it with random numbers, and
# does not increase the tensor's version counter.
# `tests/sweep_gradients.py` looks for other such operators.
WRITES_AFTER_SAVING = (
    torch.ops.aten.rrelu_with_noise.default,
    torch.ops.aten.rrelu_with_noise_.default,
)


def writes_after_saving(node: Any) -> bool:
    """Return whether a node of autograd's graph belongs to one of `WRITES_AFTER_SAVING`."""
    return node is not None and node.name().startswith("RreluWithNoiseBackward")


def saved_value_may_differ(node: Any, saved: torch.Tensor) -> bool:
    """Return whether a tensor that a node of autograd's graph has saved may differ in an equal run.

    The saved tensors of these nodes may differ:

    - `rrelu` saves an uninitialized tensor before it draws its noise.
    - `ctc_loss` saves a table, whose padding it never fills or reads.
    - CUDA's kernels of `scaled_dot_product_attention` save the random generator's seed and offset
      as integers, which are left uninitialized without dropout. If the seed of a dropout differs,
      so does the output, which is saved and compared as well.
    - A batch norm in training mode saves its running statistics before it updates them. Its
      backward pass does not read them.
    """
    if node is None:
        return False
    name = node.name()
    attention = name.startswith("ScaledDotProduct") and not saved.is_floating_point()
    norm = "BatchNorm" in name and saved.dim() == 1
    return attention or norm or name.startswith(("RreluWithNoiseBackward", "CtcLossBackward"))


def check_torch_func(error: BaseException | None, name: str) -> None:
    """Raise an error with advice if `error` says that `torch.func` does not support hooks.

    PyTorch raises `error` if saved-tensor hooks are set inside a transform such as
    `torch.func.grad`. For any other error, this function does nothing.

    Args:
        error: Error raised under saved-tensor hooks, or when they were set; None if there was none.
        name: Name of the context or function that sets the hooks, for the message.
    """
    if isinstance(error, RuntimeError) and "support saved tensor hooks" in str(error):
        raise RuntimeError(
            "torch.func.grad, vjp, jacrev and hessian cannot be combined with"
            f" {name}, because PyTorch allows no saved-tensor hooks around them. Call"
            f" torch.autograd.grad(..., create_graph=True) instead, or call them outside of {name}"
        ) from error


@contextmanager
def torch_func_refused(name: str) -> Iterator[None]:
    """Apply `check_torch_func` to errors that are raised inside the block."""
    try:
        yield
    except RuntimeError as error:
        check_torch_func(error, name)
        raise
