"""The reentrant mode: one autograd node that runs the function again, and a backward pass inside the backward pass."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError, check_backward_validity, detach_variable

from .._torch import tensors_in
from .surroundings import Surroundings, kept_inputs, version, with_tensors, without_tensors


class CheckpointFunction(torch.autograd.Function):
    """The reentrant mode: `CheckpointFunction.apply(function, preserve_rng_state, *args)`.

    In the second run the inputs are leaves, so that the backward pass inside ends at them; a node's `backward` must
    return their gradients, which is why an input has to require some. The parameters get theirs from that inner pass.
    """

    @staticmethod
    def forward(ctx, run_function, preserve_rng_state, *args):
        check_backward_validity(args)
        tensors = list(tensors_in(args))
        ctx.run_function, ctx.args = run_function, without_tensors(args)
        ctx.surroundings = Surroundings(tensors, preserve_rng_state)
        ctx.save_for_backward(*tensors)
        versions = [version(x) for x in tensors]
        with torch.no_grad():
            outputs = run_function(*args)
        ctx.changed = versions != [version(x) for x in tensors]  # autograd itself looks from here on only
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad() or passing an `inputs` "
                "parameter to .backward(). Set use_reentrant=False, or call .backward() without it"
            )
        tensors = iter(kept_inputs(ctx, ctx.run_function, ctx.changed))
        # Leaves, whose gradients are to be returned; tensors in containers keep their history.
        inputs = detach_variable(with_tensors(ctx.args, tensors))
        with torch.enable_grad(), ctx.surroundings.restored():
            outputs = ctx.run_function(*inputs)
        outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        pairs = [(y, g) for y, g in zip(outputs, grads, strict=False) if isinstance(y, Tensor) and y.requires_grad]
        before = [tuple(grad.shape) for y, grad in pairs if grad is not None]
        after = [tuple(y.shape) for y, grad in pairs if grad is not None]
        if len(outputs) != len(grads) or before != after:
            raise CheckpointError(
                f"checkpoint: the forward pass returned {len(grads)} values, tensors of shapes {before} among them; "
                f"the recomputation {len(outputs)}, with {after}. The function must do the same whenever it is run"
            )
        if not pairs:
            raise RuntimeError("none of output has requires_grad=True, this checkpoint() is not necessary")
        torch.autograd.backward(*zip(*pairs, strict=True))
        return None, None, *(x.grad if isinstance(x, Tensor) else None for x in inputs)
