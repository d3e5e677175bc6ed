"""Gradient accumulation: `AccumulatedStep` runs the micro-batches of one training step.

`course_lib._batches` cuts a batch into micro-batches. The module `ranks` is responsible for the
communication between several processes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, pairwise
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from .._batches import ALLOWS_BATCH_NORM, mixes_samples
from .._check import describe, kind, one_of, positive
from .._torch.generators import restore_random_state_on_error
from .._torch.steps import check_in_training, check_no_closure
from .._torch.symbolic import is_symbolic
from .ranks import Ranks

LOW_PRECISION = (torch.bfloat16, torch.float16)
NO_GRADIENT = (
    "no parameter of the optimizer got a gradient; the optimizer must hold parameters of this model"
)


@dataclass(frozen=True)
class StepResult:
    """Result of one `AccumulatedStep`: the numbers of one training step over micro-batches.

    With symbolic tensors, which have no values, the numbers are NaN.

    Attributes:
        loss: Mean loss: the sum of losses of all micro-batches on all ranks, divided by `weight`.
        weight: Number of tokens or samples in all micro-batches on all ranks.
        grad_norm: Norm of the mean loss's gradient with respect to the optimizer's parameters,
            before clipping. None without `max_norm`.
        stepped: Whether the optimizer updated the parameters. False if the gradient scaler skipped
            the update because gradients were inf or NaN.
    """

    loss: float
    weight: float
    grad_norm: float | None
    stepped: bool


class AccumulatedStep:
    """Optimizer step over micro-batches: a call `step(micro_batches)` returns a `StepResult`.

    The gradients are those of the full batch's mean loss, up to rounding, if the model treats
    samples independently. They differ if BatchNorm is in training mode, because it computes its
    statistics from each micro-batch. In this case, the first step with several micro-batches gives
    a warning, unless the model or a module in it has an attribute `batch_norm_per_micro_batch` that
    is True. The gradients also differ with dropout, which draws other numbers than for the full
    batch, and with spectral norms, which change with each micro-batch.

    **Several ranks.** With `DistributedDataParallel` or FSDP2, each rank has its own
    `AccumulatedStep`, and `loss_sum` must call the DDP or FSDP2 module. With sync="last", DDP ranks
    may have different numbers of micro-batches, but each rank needs at least one. To find out which
    micro-batch is the last, the step reads the next micro-batch before the current one runs.

    **Errors on several ranks.** An invalid loss or weight raises an error on all ranks. Any other
    error on one rank leaves the other ranks waiting, as usual with collectives. After such an
    error, an FSDP2 model may still have unsharded gradients. A DDP module that received only some
    gradients before the error rejects every further forward pass, even outside of this class. In
    that case, make a new `DistributedDataParallel` of the same model.

    Args:
        model: The model, which is passed to `loss_sum`.
        optimizer: An optimizer whose `step` needs no closure, so not LBFGS. An optimizer with a
            training mode, such as a schedule-free one, must be in its training mode. `optimizer`
            may be a list of optimizers. For a list, the gradients are clipped by the norm of all
            gradients together, and either all optimizers step or none does.
        loss_sum: Function (model, micro_batch) -> (sum of losses, weight). The sum is a scalar
            tensor that requires gradients. The weight is the number of tokens or samples in the
            sum, as a number or a scalar tensor. It may be 0, if all tokens are masked. The mean
            loss of the step is the total of the sums, divided by the total of the weights.
        scaler: Gradient scaler for the losses, which is updated once per step. A disabled scaler is
            the same as None.
        max_norm: Largest norm of the mean loss's gradient. The gradient is clipped once, after
            unscaling. With `math.inf` the norm is only measured, and with None it is not computed.
            Must be None if gradients are sparse.
        autocast_dtype: Autocast dtype of the forward passes, torch.bfloat16 or torch.float16. None
            for no autocast.
        accumulate: "fp32" to sum the gradients of bf16 and fp16 parameters in fp32, in 4 bytes per
            parameter instead of 2. After the last micro-batch, the sums are scaled to the gradient
            of the mean loss, and cast to the parameters' dtype. None sums in the parameters' dtype,
            in which the sum over many small micro-batches is inaccurate. Must be None for a DDP or
            FSDP2 model.
        sync: With "last", only the last micro-batch reduces gradients over the ranks. With "each",
            every micro-batch does. This sends more bytes, but FSDP2 does not keep unsharded
            gradients between micro-batches.
        in_buckets: Whether gradients are accumulated in DDP's buckets, which exist anyway, instead
            of in separate tensors. From the third step on, this saves the memory of one set of
            gradients. It needs DDP with `gradient_as_bucket_view=True`.
        in_backward: Whether the optimizer updates each parameter as soon as its gradient is
            complete. The gradient is then released, so the gradients never exist all at once. The
            step must have a single micro-batch, and the model must not be a DDP or FSDP2 model.
            Cannot be combined with `scaler`, `max_norm` or `accumulate`. The optimizer's `step` is
            called for one parameter at a time, and during the call, no other parameter of the
            optimizer has a gradient. The update of a parameter must therefore not depend on other
            gradients. With reentrant checkpoints, autograd may accumulate a gradient in several
            parts, and each part causes an update. A checkpointed block that uses a detached
            parameter may be recomputed after the parameter's update, with the new value. After an
            error, parameters that were already updated stay updated.

    Source for adding sums of losses instead of averaging means: "Fixing Gradient Accumulation",
    huggingface.co/blog/gradient_accumulation.

    Example:
        >>> model = nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def loss_sum(model, rows):
        ...     return model(rows).square().sum(), len(rows)
        >>> step = AccumulatedStep(model, optimizer, loss_sum, max_norm=1.0)
        >>> step(split(torch.randn(20, 3), 8)).weight
        20.0
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        loss_sum: Callable[[nn.Module, Any], tuple[Tensor, float | Tensor]],
        *,
        scaler: torch.amp.GradScaler | None = None,
        max_norm: float | None = None,
        autocast_dtype: torch.dtype | None = None,
        accumulate: str | None = None,
        sync: str = "last",
        in_buckets: bool = False,
        in_backward: bool = False,
    ):
        self.model = model
        self.ranks = Ranks(model, sync)
        self.optimizer = _as_one_optimizer(optimizer)
        self.loss_sum = loss_sum
        self.max_norm = None if max_norm is None else positive("max_norm", max_norm)
        self.autocast_dtype = one_of("autocast_dtype", autocast_dtype, (None, *LOW_PRECISION))
        self.device_type = _optimized_parameters(self.optimizer)[0].device.type
        self.scaler = _enabled_or_disabled_scaler(scaler, self.device_type, autocast_dtype)
        self.accumulate = one_of("accumulate", accumulate, (None, "fp32"))
        if accumulate is not None and self.ranks.model:
            raise ValueError(
                f"accumulate must be None for a DDP or FSDP2 model, got {accumulate!r}"
            )
        self.in_buckets = self.ranks.validate_in_buckets(self.scaler, in_buckets)
        self.in_backward = in_backward
        if in_backward and self.ranks.model:
            raise ValueError("in_backward must be False for a DDP or FSDP2 model, got True")
        if in_backward:
            _reject_with_in_backward(max_norm, self.scaler, accumulate)
        self._warned = False  # whether the warning about BatchNorm was given
        self._buckets = {}  # gradients in DDP's buckets, by parameter, for `in_buckets`
        # Number by which each sum of losses is divided before its backward pass.
        self._loss_divisor: float | None = None

    def __call__(self, micro_batches: Iterable[Any]) -> StepResult:
        """Run all micro-batches, then do one optimizer step.

        The gradients of the optimizer's parameters are set to None at the beginning and at the end.
        To read the gradients that the optimizer uses, register a hook with
        `register_step_pre_hook`. For parameters of the model that the optimizer does not update,
        the gradient of the mean loss is added to .grad, as backward does. Another optimizer may use
        these gradients. After an error, gradients, random number generators, scaler and `no_sync`
        are reset to their state before the call. Side effects of forward passes, such as
        BatchNorm's running averages, remain.

        Args:
            micro_batches: Iterable of micro-batches, such as `split(batch, 8)` or a list. Each
                micro-batch is passed to `loss_sum`. With `in_backward`, there must be exactly one
                micro-batch.

        Raises:
            TypeError, ValueError: `micro_batches` is a single batch or empty; `loss_sum` did not
                return a pair of a finite sum and a weight of at least 0; or all weights are zero.
            RuntimeError: No parameter of the optimizer got a gradient, the norm of the gradients is
                inf or NaN, or `loss_sum` did not call the DDP model.
        """
        _check_micro_batches(micro_batches)
        for optimizer in getattr(self.optimizer, "optimizers", [self.optimizer]):
            check_in_training(optimizer)
        optimized = dict.fromkeys(_optimized_parameters(self.optimizer))
        others = [parameter for parameter in self.model.parameters() if parameter not in optimized]
        with (
            restore_random_state_on_error(),
            _set_gradients_aside([*optimized], others, self.ranks),
        ):
            if self.in_backward:
                loss, weight = self._update_in_backward(list(micro_batches), optimized)
                grad_norm, stepped = None, True
            else:
                for parameter, gradient in self._buckets.items():
                    parameter.grad = gradient.zero_()
                with _fp32_sums([*optimized, *others] if self.accumulate else []) as sums:
                    loss, weight = self._accumulate(micro_batches)
                if self.in_buckets:
                    self._buckets = {p: p.grad for p in (*optimized, *others) if p.grad is not None}
                # .grad is now the gradient of (sum of losses) / _loss_divisor, averaged over ranks.
                _scale_to_mean(
                    [*optimized, *others], sums, self._loss_divisor * self.ranks.count / weight
                )
                grad_norm, stepped = self._step(_gradients(others))
        # Each step needs `_loss_divisor` before its last forward pass, when the step's own weight
        # is not known yet. The next step therefore uses the weight of this step, which is usually
        # similar.
        self._loss_divisor = _nearest_power_of_two(weight)
        return StepResult(loss / weight, weight, grad_norm, stepped)

    def _accumulate(self, micro_batches: Iterable[Any]) -> tuple[float, float]:
        """Run all micro-batches, and return (sum of losses, sum of weights) over all ranks."""
        losses = []
        weights = []
        marked_micro_batches = (
            _mark_last(micro_batches)
            if self.ranks.model
            else ((item, True) for item in micro_batches)
        )
        for micro_batch, last in marked_micro_batches:
            if len(losses) == 1:
                self._warn_about_batch_norm()
            with self.ranks.gradient_reduction(last):
                loss = self._backward(micro_batch, last, weights)
            losses.append(loss)
        if not losses:
            raise ValueError(
                "micro_batches must contain at least one micro-batch, got none (an iterator"
                " can be used only once)"
            )
        # The values are read only after all micro-batches, because reading makes the host wait for
        # a GPU.
        return self._checked_sums(_values(losses), [_value(weight) for weight in weights])

    def _checked_sums(self, losses: list[float], weights: list[float]) -> tuple[float, float]:
        """Return (sum of losses, sum of weights) over all micro-batches and ranks.

        Raises:
            ValueError: A loss or weight is invalid, on this rank or another one, or all weights are
                zero.
        """
        problem = ""
        for i, (loss, weight) in enumerate(
            () if is_symbolic() else zip(losses, weights, strict=True)
        ):
            if not (math.isfinite(loss) and 0 <= weight < math.inf) and not problem:
                problem = (
                    f"micro-batch {i}: the loss must be finite and the weight finite and at least"
                    f" 0, got loss {loss} and weight {weight}"
                )
        loss, weight = self.ranks.sum_over_ranks(
            math.fsum(losses), math.nan if problem else math.fsum(weights)
        )
        if problem or (math.isnan(weight) and not is_symbolic()):
            raise ValueError(
                problem or "another rank had an invalid loss or weight; see the error on that rank"
            )
        if weight == 0:
            raise ValueError(
                "the sum of the weights of all micro-batches must be above 0, got 0; leave"
                " at least one token or sample unmasked"
            )
        return loss, weight

    def _warn_about_batch_norm(self) -> None:
        """Warn, once, if the gradient differs from that of the full batch because of BatchNorm."""
        if not self._warned and mixes_samples(self.model):
            self._warned = True
            warnings.warn(
                "the model has BatchNorm in training mode, which computes its statistics from each"
                " micro-batch, so the gradient is not that of the full batch; put BatchNorm into"
                f" eval mode, or set model.{ALLOWS_BATCH_NORM} = True to allow such statistics",
                stacklevel=4,
            )

    def _backward(self, micro_batch: Any, last: bool, weights: list) -> Tensor:
        """Add the gradient of one micro-batch to .grad.

        The added gradient is that of the micro-batch's sum of losses, divided by
        `self._loss_divisor`.

        Args:
            micro_batch: The micro-batch.
            last: Whether it is the last micro-batch of the step.
            weights: Weights of the earlier micro-batches. This function appends the weight of
                `micro_batch`.

        Returns:
            The sum of losses, without its autograd history.
        """
        loss, weight = self._forward(micro_batch, f"micro-batch {len(weights)}", last)
        if self._loss_divisor is None:
            self._loss_divisor = _nearest_power_of_two(*self.ranks.sum_over_ranks(_value(weight)))
        # The mean loss is the sum of losses divided by the total weight, which is known only after
        # the last forward pass. Until then .grad has gradients of sums. Sums are much larger than
        # means, so in fp16 they would overflow at a loss scale that is right for means. Therefore
        # each sum is divided by a number close to the total weight. This number is a power of two,
        # so that the division does not round, and it is the same on all ranks.
        scaled = self.scaler.scale(loss)
        weights.append(weight)
        scaled.backward(torch.full_like(scaled, 1 / self._loss_divisor))
        return loss.detach()

    def _forward(
        self, micro_batch: Any, name: str, last: bool = True
    ) -> tuple[Tensor, Real | Tensor]:
        """Return the sum of losses and the weight of a micro-batch, after checking them.

        Args:
            micro_batch: The micro-batch.
            name: Name of the micro-batch, for error messages.
            last: Whether it is the last micro-batch of the step. For the last one, an error is
                raised if `model` is a DDP model that `loss_sum` did not call.
        """
        autocast = (
            torch.autocast(self.device_type, self.autocast_dtype)
            if self.autocast_dtype
            else nullcontext()
        )
        with (
            autocast,
            _recorded_calls(
                self.model if last and self.model is self.ranks.replica else None
            ) as calls,
        ):
            loss, weight = _check_loss_sum(self.loss_sum(self.model, micro_batch), name)
        if not calls:
            raise RuntimeError(
                "loss_sum did not call the DDP model, so gradients would not be synchronized;"
                " loss_sum must call model(...)"
            )
        return loss, weight

    def _step(self, others: list[Tensor]) -> tuple[float | None, bool]:
        """Unscale and clip gradients, let the optimizer step, and update the scaler.

        Args:
            others: Gradients of parameters that are not in the optimizer. They are only unscaled,
                not clipped.

        Returns:
            A pair. The first item is the norm of the gradient before clipping, or None if no norm
            was computed. The second item is whether the optimizer stepped.
        """
        parameters = _optimized_parameters(self.optimizer)
        if not _gradients(parameters):
            raise RuntimeError(NO_GRADIENT)
        scale = self.scaler.get_scale()
        try:
            self.scaler.unscale_(self.optimizer)
            for gradient in others:
                gradient.div_(scale)
            grad_norm = _clip_gradients(
                parameters, self.max_norm, self.ranks, finite=not self.scaler.is_enabled()
            )
            self.scaler.step(self.optimizer)
        except BaseException:
            self.scaler.update(scale)  # keep the scale, and allow the next call to unscale again
            raise
        self.scaler.update()
        # The scaler lowers the scale if, and only if, gradients were inf or NaN.
        return grad_norm, self.scaler.get_scale() >= scale > 0

    def _update_in_backward(
        self, micro_batches: list[Any], parameters: Iterable[nn.Parameter]
    ) -> tuple[float, float]:
        """Update each parameter during backward; return the sum of losses and the weight.

        Raises:
            ValueError: There is not exactly one micro-batch.
        """
        if len(micro_batches) != 1:
            raise ValueError(
                "micro_batches must contain only 1 micro-batch when in_backward is True, got"
                f" {len(micro_batches)}"
            )
        loss, weight = self._forward(micro_batches[0], "micro-batch 0")
        mean = loss / (weight if torch.is_tensor(weight) else float(weight))
        # Check the values before backward, because backward already changes parameters.
        value, weight = self._checked_sums([_value(loss.detach())], [_value(weight)])
        with _updates_in_backward(self.optimizer, parameters) as updated:
            mean.backward()
        if not updated:
            raise RuntimeError(NO_GRADIENT)
        return value, weight


def _reject_with_in_backward(max_norm: Any, scaler: Any, accumulate: Any) -> None:
    """Raise a ValueError for options that cannot be combined with `in_backward`."""
    for name, given, reason in (
        ("max_norm", max_norm, "the gradients never exist all at once"),
        (
            "scaler",
            scaler if scaler.is_enabled() else None,
            "the gradients never exist all at once",
        ),
        ("accumulate", accumulate, "no gradients are accumulated then"),
    ):
        if given is not None:
            raise ValueError(
                f"{name} must be None when in_backward is True, got {describe(given)}: {reason}"
            )


@contextmanager
def _updates_in_backward(
    optimizer: torch.optim.Optimizer | _OptimizerGroup, parameters: Iterable[nn.Parameter]
) -> Iterator[list[nn.Parameter]]:
    """Inside a `with` block, update each parameter as soon as backward has completed its gradient.

    Args:
        optimizer: Optimizer of the parameters.
        parameters: Parameters that are updated.

    Yields:
        A list to which each parameter is appended after its update.
    """
    updated = []

    def update(parameter: nn.Parameter) -> None:
        optimizer.step()  # updates one parameter, because no other one has a gradient
        parameter.grad = None
        updated.append(parameter)

    with ExitStack() as hooks:
        for parameter in parameters:
            if parameter.requires_grad:
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(update))
        yield updated


# ---- gradients


def _optimized_parameters(optimizer: torch.optim.Optimizer | _OptimizerGroup) -> list[nn.Parameter]:
    """Return the parameters in all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradients of those parameters that have a gradient."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


@contextmanager
def _set_gradients_aside(
    optimized: list[nn.Parameter], others: list[nn.Parameter], ranks: Ranks
) -> Iterator[None]:
    """Set all gradients to None for a `with` block, and restore or combine them at its end.

    At the end of the block, `.grad` of each parameter in `others` becomes the sum of its previous
    gradient and its new one. For parameters in `optimized`, `.grad` becomes None. If the block
    raises an error, all parameters get their previous gradients back.
    """
    parameters = [*optimized, *others]
    previous = [parameter.grad for parameter in parameters]
    if ranks.has_views:  # these gradients need a copy, because DDP would write into them
        previous = [gradient if gradient is None else gradient.clone() for gradient in previous]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
        previous[: len(optimized)] = [None] * len(optimized)
        for i, parameter in enumerate(others, len(optimized)):
            if parameter.grad is not None:
                previous[i] = (
                    parameter.grad if previous[i] is None else previous[i].add_(parameter.grad)
                )
    finally:
        for parameter, gradient in zip(parameters, previous, strict=True):
            parameter.grad = gradient


@contextmanager
def _fp32_sums(parameters: Iterable[nn.Parameter]) -> Iterator[dict[nn.Parameter, Tensor]]:
    """Accumulate the gradients of bf16 and fp16 parameters in fp32 inside the `with` block.

    Yields:
        A dict with the sum of gradients of each parameter. Each gradient that backward computes is
        added to its sum and released immediately.
    """
    sums: dict[nn.Parameter, Tensor] = {}

    def add(parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        sums[parameter] = sums[parameter].add_(gradient) if parameter in sums else gradient.float()

    with ExitStack() as hooks:
        for parameter in parameters:
            if parameter.requires_grad and parameter.dtype in LOW_PRECISION:
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(add))
        yield sums


def _scale_to_mean(
    parameters: list[nn.Parameter], sums: dict[nn.Parameter, Tensor], factor: float
) -> None:
    """Turn the sums of gradients into gradients of the mean loss, and store them in `.grad`.

    Args:
        parameters: All parameters.
        sums: Sums of gradients in fp32, by parameter. This function removes them from the dict.
        factor: Number by which all gradients and sums are multiplied.
    """
    gradients = [*_gradients(parameters), *sums.values()]
    # With a factor of 1 nothing is multiplied, because an in-place change would invalidate the
    # copies of gradients that an optimizer may already have made.
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)
    for parameter in list(sums):
        parameter.grad = sums.pop(parameter).to(parameter.dtype)


def _clip_gradients(
    parameters: list[nn.Parameter], max_norm: float | None, ranks: Ranks, *, finite: bool
) -> float | None:
    """Clip the gradients to `max_norm`, and return their norm before clipping.

    Args:
        parameters: Parameters whose gradients are clipped.
        max_norm: Largest norm, or None to do nothing and return None.
        ranks: The ranks, over which the norm is computed.
        finite: Whether a norm of inf or NaN raises an error.

    Raises:
        TypeError: A gradient is sparse.
        RuntimeError: The norm is inf or NaN, and `finite` is True.
    """
    if max_norm is None:
        return None
    gradients = _gradients(parameters)
    if any(gradient.layout is not torch.strided for gradient in gradients):
        raise TypeError(f"max_norm must be None for sparse gradients, got {max_norm}")
    norm = ranks.norm(gradients)
    [grad_norm] = _values([norm])
    if finite and not is_symbolic() and not math.isfinite(grad_norm):
        raise RuntimeError(
            f"the norm of the gradients must be finite for clipping, got {grad_norm}; to skip such"
            " steps, pass a torch.amp.GradScaler"
        )
    if not grad_norm <= max_norm:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return grad_norm


@contextmanager
def _recorded_calls(model: nn.Module | None) -> Iterator[list]:
    """Yield a list to which an item is appended for each call of the model in the `with` block.

    The calls of a compiled model cannot be recorded. For such a model, and if `model` is None, the
    list has one item from the beginning, as if the model had been called.
    """
    if model is None or model._compiled_call_impl is not None:
        yield [True]
        return
    calls: list[bool] = []
    with model.register_forward_pre_hook(lambda *_: calls.append(True)):
        yield calls


def _mark_last(items: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield each item, and whether it is the last one.

    Each item is yielded only after the next item has been read.
    """
    end = object()
    for item, following in pairwise(chain(items, [end])):
        yield item, following is end


def _nearest_power_of_two(weight: float) -> float:
    """Return a power of two close to a weight (number of tokens, for example).

    The result is 1 if the weight is 0, inf or NaN.
    """
    return 2.0 ** round(math.log2(weight)) if 0 < weight < math.inf else 1.0


def _value(scalar: Real | Tensor) -> float:
    """Return the value of a number or scalar tensor as a float; NaN for a symbolic tensor."""
    return math.nan if is_symbolic(scalar) else float(scalar)


def _values(scalars: list[Tensor]) -> list[float]:
    """Return the values of scalar tensors as floats; in a symbolic step, all of them are NaN."""
    return [math.nan] * len(scalars) if is_symbolic() else torch.stack(scalars).tolist()


# ---- argument checks


def _check_loss_sum(pair: Any, name: str) -> tuple[Tensor, Real | Tensor]:
    """Check that the result of `loss_sum` is a pair (sum of losses, weight), and return it.

    Args:
        pair: The result of `loss_sum`.
        name: Name of the batch or micro-batch, for error messages.

    Raises:
        TypeError: The result is not such a pair.
    """
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(
            f"{name}: loss_sum must return a pair (sum of losses, weight), such as the sum over all"
            f" tokens and their number, not a mean, got {describe(pair)}"
        )
    loss, weight = pair
    if (
        not isinstance(loss, Tensor)
        or loss.dim()
        or not loss.is_floating_point()
        or not loss.requires_grad
    ):
        lacks_gradient = isinstance(loss, Tensor) and not loss.requires_grad
        off = " that requires no gradient" if lacks_gradient else ""
        if not torch.is_grad_enabled():
            off += "; gradients are switched off where loss_sum is called"
        raise TypeError(
            f"{name}: the sum of losses must be a floating-point scalar tensor that"
            f" requires a gradient, got {describe(loss)}{off}"
        )
    if not isinstance(weight, (Tensor, Real)) or (
        torch.is_tensor(weight) and (weight.dim() or weight.requires_grad)
    ):
        kept = torch.is_tensor(weight) and weight.requires_grad
        with_gradients = " that requires gradients" if kept else ""
        raise TypeError(
            f"{name}: the weight that loss_sum returns must be a number, or a scalar tensor that"
            f" does not require gradients, got {describe(weight)}{with_gradients}"
        )
    return loss, weight


def _check_micro_batches(given: Any) -> None:
    """Raise a TypeError if the micro-batches are a single batch.

    A batch that is a pair (x, y) of tensors would otherwise be treated as two micro-batches.
    """
    pair = isinstance(given, tuple) and any(isinstance(item, Tensor) for item in given)
    if pair or isinstance(given, (Tensor, Mapping)):
        actual = f"{describe(given)}{' of tensors' if pair else ''}, which may be a single batch"
        raise TypeError(
            "micro_batches must be a list or another iterable of batches, such as split(batch, 8),"
            f" which makes 8 of them, got {actual}"
        )


class _OptimizerGroup:
    """Wrapper that makes several optimizers look like one.

    A gradient scaler then lets all of them step, or none.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def _as_one_optimizer(given: Any) -> torch.optim.Optimizer | _OptimizerGroup:
    """Check one or several optimizers, and return an object that steps them together.

    For a single optimizer, the result is the optimizer itself.

    Raises:
        TypeError: An element is not an optimizer, or its `step` needs a closure.
        ValueError: There are no parameters, or two optimizers share a parameter.
    """
    optimizers = given if isinstance(given, (list, tuple)) else [given]
    for optimizer in optimizers:
        kind(
            "optimizer",
            optimizer,
            torch.optim.Optimizer,
            "a torch.optim.Optimizer or a list of them",
        )
        check_no_closure(optimizer)
    combined = optimizers[0] if len(optimizers) == 1 else _OptimizerGroup(optimizers)
    parameters = _optimized_parameters(combined)
    if not parameters:
        raise ValueError(
            "optimizer must be an optimizer or a list of optimizers that have parameters, got"
            f" {describe(given)} without parameters"
        )
    if len(set(parameters)) < len(parameters):
        raise ValueError(
            "optimizer must contain each parameter only once, got"
            f" {describe(given)} with a parameter that occurs twice"
        )
    return combined


def _enabled_or_disabled_scaler(
    given: torch.amp.GradScaler | None, device: str, autocast_dtype: torch.dtype | None
):
    """Return the given scaler if it is enabled, otherwise a disabled one, which changes nothing.

    A warning is given for fp16 autocast without a scaler.
    """
    if (
        given is not None
        and kind("scaler", given, torch.amp.GradScaler, "a torch.amp.GradScaler").is_enabled()
    ):
        return given
    if autocast_dtype == torch.float16:
        warnings.warn(
            "autocast_dtype is torch.float16 without a scaler, so small gradients become zero in"
            f" the backward pass; pass scaler=torch.amp.GradScaler({device!r})",
            stacklevel=3,
        )
    return torch.amp.GradScaler(device, enabled=False)
