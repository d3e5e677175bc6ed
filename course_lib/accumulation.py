"""The batch in pieces: a training step over micro-batches whose gradient is that of the full batch.

`split` cuts a batch into micro-batches; `AccumulatedStep` runs them one after the other, so that only one piece's
activations are alive at a time, and takes one optimizer step. The parameters, the optimizer's state and the gradients
stay as large as they are: peak bytes are a floor plus so many bytes a sample of the micro-batch. Lesson 05 explains.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, pairwise
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

__all__ = ["AccumulatedStep", "StepResult", "split"]


def split(batch: Any, micro_batch_size: int) -> Iterator[Any]:
    """Cut a batch into micro-batches along the first dimension of its tensors.

    Args:
        batch: a tensor, or tuples, named tuples, lists and dicts of tensors, nested as you like; None may stand for a
            tensor that is absent. All tensors have the same first dimension, the samples.
        micro_batch_size: samples in each piece.

    Returns:
        Pieces built like the batch, made when asked for, of views: nothing is copied. The last piece holds the
        remainder, so it may be smaller; a batch without samples has no pieces.

    Raises:
        TypeError: the batch holds something else, or micro_batch_size is no int.
        ValueError: the tensors have different numbers of samples, or none; micro_batch_size is below 1.
    """
    if isinstance(micro_batch_size, bool) or not isinstance(micro_batch_size, int):
        raise TypeError(f"micro_batch_size is {micro_batch_size!r}; it takes a whole number of samples")
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size is {micro_batch_size}; it takes 1 sample or more")
    leaves, structure = tree_flatten_with_path(batch)
    first = None
    for path, leaf in leaves:
        where = f"batch{keystr(path)}"
        if leaf is None:
            continue
        if not isinstance(leaf, Tensor):
            raise TypeError(f"{where} is a {type(leaf).__name__}; split takes tensors, in tuples, lists and dicts")
        if leaf.dim() == 0:
            raise ValueError(f"{where} is a tensor without dimensions; split takes samples along the first dimension")
        first = first or (where, len(leaf))
        if len(leaf) != first[1]:
            raise ValueError(f"{where} has {len(leaf)} samples, but {first[0]} has {first[1]}; split takes equal ones")
    if first is None:
        raise ValueError(f"the batch, a {type(batch).__name__}, holds no tensor; split takes one or more")

    def piece(start: int) -> Any:
        end = start + micro_batch_size
        return tree_unflatten([None if leaf is None else leaf[start:end] for _, leaf in leaves], structure)

    return map(piece, range(0, first[1], micro_batch_size))


@dataclass(frozen=True)
class StepResult:
    """What one `AccumulatedStep` did.

    Attributes:
        loss: the mean: the losses of all micro-batches (and ranks) over their weight. NaN for symbolic tensors.
        weight: tokens or samples, of all micro-batches (and ranks).
        grad_norm: of the gradient of that mean over the optimizer's parameters, before clipping; None without max_norm.
        stepped: False where the scaler skipped the optimizer's step because gradients were inf or NaN.
    """

    loss: float
    weight: float
    grad_norm: float | None
    stepped: bool


class AccumulatedStep:
    """One optimizer step over micro-batches, with the gradient of the full batch's mean loss.

    Equal up to rounding for any split, however the weights differ, if the model treats samples independently: BatchNorm
    in training mode sees micro-batches, and dropout draws other numbers. Parameters in bf16 or fp16 accumulate in that
    dtype: keep them in fp32 and give autocast_dtype instead.

    With `DistributedDataParallel`, give each rank's micro-batches to its own `AccumulatedStep` and let `loss_sum` call
    the DDP model. Only the last micro-batch synchronises, so ranks may have different numbers of them, at least one
    each. The iterator is asked for one micro-batch ahead. An error on one rank alone leaves the others waiting, as
    always with DDP; bad losses and weights raise on all ranks.

    Args:
        model: what `loss_sum` gets.
        optimizer: steps without a closure.
        loss_sum: (model, micro_batch) -> (sum of losses, weight): a scalar tensor that requires gradients, and the
            number of tokens or samples that it sums over, a number or a scalar tensor; zero if all are masked.
        scaler: scales the losses, and is updated once a step; a disabled one counts as None.
        max_norm: clip the gradient to this norm, once, after unscaling; `math.inf` only measures the norm. Without a
            scaler a norm that is inf or NaN is an error.
        autocast_dtype: torch.bfloat16 or torch.float16, for the forward passes.

    Raises:
        TypeError, ValueError: an argument is not of its kind, or out of its range; the message names it.

    Source: why sums and not means of means, "Fixing Gradient Accumulation", huggingface.co/blog/gradient_accumulation.

    Example::

        step = AccumulatedStep(model, optimizer, loss_sum, max_norm=1.0)
        result = step(split(batch, 8))
        if result.stepped:
            scheduler.step()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_sum: Callable[[nn.Module, Any], tuple[Tensor, float | Tensor]],
        *,
        scaler: torch.amp.GradScaler | None = None,
        max_norm: float | None = None,
        autocast_dtype: torch.dtype | None = None,
    ):
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}; it takes a torch.nn.Module")
        check_optimizer(optimizer)
        if not callable(loss_sum):
            raise TypeError(f"loss_sum is a {type(loss_sum).__name__}; it takes a function (model, micro_batch)")
        if max_norm is not None and (isinstance(max_norm, bool) or not isinstance(max_norm, Real)):
            raise TypeError(f"max_norm is {max_norm!r}; it takes a number, or None not to clip")
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm}; it takes a positive number, or None not to clip")
        if autocast_dtype not in (None, torch.bfloat16, torch.float16):
            raise ValueError(f"autocast_dtype is {autocast_dtype!r}; it takes torch.bfloat16, torch.float16 or None")
        first = next(model.parameters(), None)
        if first is None:
            raise ValueError("the model has no parameters; it takes one that can be trained")
        self.device_type = first.device.type
        self.scaler = _checked_scaler(scaler, optimizer, self.device_type)
        if autocast_dtype == torch.float16 and self.scaler is None:
            warnings.warn(
                "autocast_dtype is torch.float16 without a scaler: small gradients become zero in the backward pass. "
                f"Pass scaler=torch.amp.GradScaler({self.device_type!r}), or take torch.bfloat16, which needs none",
                stacklevel=2,
            )
        replica = _checked_replica(model)
        self.model, self.optimizer, self.loss_sum = model, optimizer, loss_sum
        self.max_norm, self.autocast_dtype = max_norm, autocast_dtype
        self.replica = replica
        self.ranks = 1 if replica is None else torch.distributed.get_world_size(replica.process_group)
        self._unit: float | None = None  # what each sum of losses is divided by before its backward pass

    def __call__(self, micro_batches: Iterable[Any]) -> StepResult:
        """Run all micro-batches, then step once.

        The gradients begin from None and are None again afterwards; `optimizer.register_step_pre_hook` sees those that
        the optimizer uses. After an error, gradients, random generators, scaler and `no_sync` are as before the call,
        and the optimizer has not stepped unless its own step raised; what forward passes change (BatchNorm's averages)
        stays changed.

        Raises:
            TypeError: `loss_sum` did not return a scalar tensor and a number, or micro_batches is one batch.
            ValueError: there is no micro-batch, a loss does not require gradients or is inf or NaN, a weight is
                negative, inf or NaN, or all weights are zero.
            RuntimeError: no parameter of the optimizer got a gradient; the norm of the gradients is inf or NaN;
                `loss_sum` did not call the DDP model.
        """
        if isinstance(micro_batches, (Tensor, dict)):
            kind = type(micro_batches).__name__
            raise TypeError(f"micro_batches is a {kind}; it takes an iterable of micro-batches, as of split(batch, 8)")
        parameters = list(dict.fromkeys([*self.model.parameters(), *self._optimized()]))
        gradients = [parameter.grad for parameter in parameters]  # to be put back after an error
        if self.replica is not None and self.replica.gradient_as_bucket_view:  # DDP would write into them
            gradients = [None if gradient is None else gradient.clone() for gradient in gradients]
        try:
            for parameter in parameters:
                parameter.grad = None
            with random_numbers_undone():
                loss, weight = self._accumulate(micro_batches)
                # What is in .grad: the gradient of (sum of losses) / unit; with DDP, the mean of that over the ranks.
                grad_norm, stepped = self._step(self._unit * self.ranks / weight)
            gradients = [None] * len(parameters)
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
        # The next step's weight will be similar, and is not known before its last forward pass.
        self._unit = _power_of_two(weight)
        return StepResult(loss / weight, weight, grad_norm, stepped)

    def _accumulate(self, micro_batches: Iterable[Any]) -> tuple[float, float]:
        """Forward and backward passes of all micro-batches: the sums of their losses and weights, over all ranks."""
        losses, weights = [], []
        marked = _with_last(micro_batches) if self.replica else ((item, True) for item in micro_batches)
        for micro_batch, last in marked:
            with nullcontext() if last else self.replica.no_sync():
                loss, weight = self._backward(micro_batch, f"micro-batch {len(losses)}", last)
            losses.append(loss)
            weights.append(weight)
        if not losses:
            raise ValueError("micro_batches is empty; it takes one micro-batch or more (an iterator serves only once)")
        # Read at the end: a GPU would be waited for at every micro-batch otherwise.
        losses, weights = _values(losses), [float(weight) for weight in weights]
        problems = [] if _symbolic() else filter(None, map(_problem, range(len(losses)), losses, weights))
        problem = next(iter(problems), None)
        loss, weight = self._over_ranks(math.fsum(losses), math.nan if problem else math.fsum(weights))
        if problem or math.isnan(weight):
            raise ValueError(problem or "another rank had a loss or weight that is refused; its own error says which")
        if weight == 0:
            raise ValueError("the weights of all micro-batches are 0; a mean takes one token or sample that counts")
        return loss, weight

    def _backward(self, micro_batch: Any, name: str, last: bool) -> tuple[Tensor, float | Tensor]:
        """Add the gradient of one micro-batch's sum of losses, over the unit, to .grad: the sum, and its weight."""
        autocast = torch.autocast(self.device_type, self.autocast_dtype) if self.autocast_dtype else nullcontext()
        with autocast, self._calls_of_replica(last) as calls:
            loss, weight = _checked_pair(self.loss_sum(self.model, micro_batch), name)
        if not calls:
            raise RuntimeError(
                "loss_sum did not call the DDP model, so nothing synchronises; it takes model(...) itself"
            )
        if self._unit is None:
            self._unit = _power_of_two(self._over_ranks(float(weight))[0])
        # The weight of the mean is known only after the last forward pass, so .grad holds the gradients of sums until
        # then; of sums over a unit near that weight, since those of plain sums are so much larger that fp16 overflows
        # at the scale that suits means. A power of two divides without rounding. All ranks have the same unit.
        scaled = self.scaler.scale(loss) if self.scaler else loss
        scaled.backward(torch.full_like(scaled, 1 / self._unit))  # the gradient of scaled / unit
        return loss.detach(), weight

    def _step(self, factor: float) -> tuple[float | None, bool]:
        """Unscale, take the mean, clip, step, update the scaler: the norm, and whether the optimizer has stepped."""
        if all(parameter.grad is None for parameter in self._optimized()):
            raise RuntimeError("no parameter of the optimizer got a gradient; it takes an optimizer of this model")
        if self.scaler is None:
            grad_norm = self._mean_and_clip(factor)
            self.optimizer.step()
            return grad_norm, True
        scale = self.scaler.get_scale()
        try:
            self.scaler.unscale_(self.optimizer)
            grad_norm = self._mean_and_clip(factor)
            self.scaler.step(self.optimizer)
        except BaseException:
            self.scaler.update(scale)  # keeps the scale, forgets that gradients were unscaled
            raise
        self.scaler.update()
        return grad_norm, self.scaler.get_scale() >= scale > 0  # it shrinks where gradients were inf or NaN, only there

    def _mean_and_clip(self, factor: float) -> float | None:
        gradients = [parameter.grad for parameter in self._optimized() if parameter.grad is not None]
        torch._foreach_mul_(gradients, factor)
        if self.max_norm is None:
            return None
        norm = nn.utils.get_total_norm(gradients)
        [grad_norm] = _values([norm])
        if self.scaler is None and not _symbolic() and not math.isfinite(grad_norm):
            raise RuntimeError(f"the norm of the gradients is {grad_norm}; clipping takes a finite one, or a scaler")
        nn.utils.clip_grads_with_norm_(list(self._optimized()), self.max_norm, norm)
        return grad_norm

    def _optimized(self) -> Iterator[nn.Parameter]:
        return (parameter for group in self.optimizer.param_groups for parameter in group["params"])

    @contextmanager
    def _calls_of_replica(self, last: bool) -> Iterator[list]:
        """A list that stays empty if the DDP model is to be called in the block and is not (compiled: not watched)."""
        if not last or self.model is not self.replica or self.model._compiled_call_impl is not None:
            yield [True]
            return
        calls: list[bool] = []
        hook = self.replica.register_forward_pre_hook(lambda *_: calls.append(True))
        try:
            yield calls
        finally:
            hook.remove()

    def _over_ranks(self, *values: float) -> list[float]:
        """The sums of the values over the ranks of the DDP model; without one, the values."""
        if self.replica is None:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64, device=next(self.replica.parameters()).device)
        torch.distributed.all_reduce(sums, group=self.replica.process_group)
        return sums.tolist()


# ---- small things, and what is refused


def _with_last(items: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each item, and whether it is the last: known by asking for the next one first."""
    end = object()
    for item, following in pairwise(chain(items, [end])):
        yield item, following is end


def _power_of_two(weight: float) -> float:
    return 2.0 ** round(math.log2(weight)) if 0 < weight < math.inf else 1.0


@contextmanager
def random_numbers_undone() -> Iterator[None]:
    """After an error inside, the random generators are as before it."""
    if _symbolic():
        yield
        return
    state = torch.default_generator.get_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    except BaseException:
        torch.default_generator.set_state(state)
        torch.cuda.set_rng_state_all(devices)
        raise


def _symbolic() -> bool:
    return torch._guards.detect_fake_mode() is not None


def _values(scalars: list[Tensor]) -> list[float]:
    """Their numbers; symbolic tensors (`course_lib.memory.symbolic`) have none, so NaN."""
    return [math.nan] * len(scalars) if _symbolic() else torch.stack(scalars).tolist()


def _problem(number: int, loss: float, weight: float) -> str | None:
    if not 0 <= weight < math.inf:
        return f"micro-batch {number}: its weight is {weight}; it takes a number of tokens or samples, 0 or more"
    if not math.isfinite(loss):
        return f"micro-batch {number}: its sum of losses is {loss}; it takes a finite number"
    return None


def _checked_pair(pair: Any, name: str) -> tuple[Tensor, float | Tensor]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(
            f"{name}: loss_sum returned a {type(pair).__name__}; it takes (sum of losses, weight), since a mean does "
            "not say how many tokens or samples it is over"
        )
    loss, weight = pair
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        raise TypeError(f"{name}: loss_sum returned {_described(loss)} as loss; it takes the sum, a scalar tensor")
    if isinstance(weight, Tensor):
        usable = weight.dim() == 0 and not (weight.requires_grad or weight.is_complex() or weight.dtype == torch.bool)
    else:
        usable = isinstance(weight, Real) and not isinstance(weight, bool)
    if not usable:
        raise TypeError(
            f"{name}: loss_sum returned {_described(weight)} as weight; it takes a number, or a scalar tensor without "
            "gradients"
        )
    if not loss.requires_grad:
        raise ValueError(
            f"{name}: the loss does not require gradients; it takes one that was computed from the model's parameters, "
            "with gradients enabled"
        )
    return loss, weight


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    grad = ", with gradients," if value.requires_grad else ""
    return f"a tensor of shape {tuple(value.shape)} and {value.dtype}{grad}"


def check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; it takes a torch.optim.Optimizer")
    _self, *arguments = inspect.signature(type(optimizer).step).parameters.values()
    if any(a.default is a.empty and a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD) for a in arguments):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}, whose step takes a closure that runs the batch again; "
            "micro-batches are seen once, so it takes an optimizer that steps without one, such as AdamW"
        )


def _checked_replica(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP model: the model itself, or inside it where it is compiled."""
    replicas = []
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            replicas.append(module)
        elif hasattr(module, "no_sync") or hasattr(module, "set_requires_gradient_sync"):
            raise TypeError(
                f"the model holds a {type(module).__name__}, which averages gradients over ranks without regard to "
                "token counts; it takes a model on one process, or in DistributedDataParallel"
            )
    if len(replicas) > 1:
        raise ValueError(f"the model holds {len(replicas)} DistributedDataParallel modules; it takes one at most")
    return replicas[0] if replicas else None


def _checked_scaler(scaler: Any, optimizer: torch.optim.Optimizer, device_type: str) -> torch.amp.GradScaler | None:
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler is a {type(scaler).__name__}; it takes a torch.amp.GradScaler, or None")
    if scaler is None or not scaler.is_enabled():
        return None
    if scaler._device != device_type:
        raise ValueError(
            f"scaler is for {scaler._device}, but the model is on {device_type}; it takes "
            f"torch.amp.GradScaler({device_type!r})"
        )
    if any(parameter.dtype == torch.float16 for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            "scaler is given, but the optimizer has parameters in torch.float16, whose gradients it cannot unscale; it "
            "takes parameters in torch.float32, with autocast_dtype=torch.float16"
        )
    return scaler
