"""One optimizer step over the micro-batches that `split` cuts from a batch."""

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

from .._check import kind, one_of, positive, shown, whole
from .._torch import (
    check_in_training,
    check_no_closure,
    is_symbolic,
    map_tensors,
    random_numbers_undone,
    tensors_in,
)
from .ranks import Ranks

NARROW = (torch.bfloat16, torch.float16)


def split(batch: Any, micro_batch_size: int) -> Iterator[Any]:
    """Cut a batch into micro-batches along the first dimension of its tensors.

    Args:
        batch: A tensor, or tuples, lists, mappings and dataclasses with tensors, nested
            arbitrarily. The first dimension of all tensors is the samples. Values other than
            tensors are in every micro-batch unchanged.
        micro_batch_size: Number of samples in each micro-batch.

    Returns:
        An iterator over micro-batches with the structure of the batch. They are views, so nothing
        is copied. The last one holds the remainder, so it may be smaller. A batch without samples
        has no micro-batches.

    Raises:
        TypeError, ValueError: The batch contains no tensor, a nested or sparse tensor, or tensors
            with different numbers of samples.

    Example:
        >>> [len(each) for each in split(torch.zeros(20, 3), 8)]
        [8, 8, 4]
    """
    size = whole("micro_batch_size", micro_batch_size, 1, of="samples")
    for tensor in tensors_in(batch):
        if tensor.is_nested or tensor.layout is not torch.strided:
            nested = "a nested tensor" if tensor.is_nested else "a tensor"
            raise TypeError(
                f"batch must hold dense tensors, got {nested} with the layout {tensor.layout},"
                " which PyTorch cannot cut into views along the first dimension. Make a tensor of"
                " each micro-batch from its samples, and pass the micro-batches in a list"
            )
    samples = {tuple(tensor.shape[:1]) for tensor in tensors_in(batch)}
    if not samples:
        raise TypeError(
            f"batch must be a tensor or a container of tensors, got {shown(batch)}, which"
            " contains no tensor"
        )
    if len(samples) > 1 or () in samples:
        counts = " and ".join("no" if not length else str(*length) for length in sorted(samples))
        raise ValueError(
            "batch must have the same number of samples in each tensor, got"
            f" {shown(batch)} whose tensors have {counts} samples"
        )
    [[length]] = samples
    starts = range(0, length, size)
    return (
        map_tensors(lambda tensor, start=start: tensor[start : start + size], batch)
        for start in starts
    )


@dataclass(frozen=True)
class StepResult:
    """Result of one `AccumulatedStep`. For symbolic tensors, which have no values, numbers are NaN.

    Attributes:
        loss: Mean loss: the losses of all micro-batches (and ranks), divided by their weight.
        weight: Tokens or samples of all micro-batches (and ranks).
        grad_norm: Norm, before clipping, of the mean loss's gradient over the optimizer's
            parameters. None without max_norm.
        stepped: False if the scaler skipped the optimizer's step because gradients were inf or NaN.
    """

    loss: float
    weight: float
    grad_norm: float | None
    stepped: bool


class AccumulatedStep:
    """One optimizer step over micro-batches, with the gradient of the full batch's mean loss.

    The gradients are equal up to rounding if the model treats samples independently. BatchNorm does
    not, because it sees micro-batches; dropout draws other numbers; and spectral norms change with
    each micro-batch.

    With `DistributedDataParallel` or FSDP2, each rank has its own step, and `loss_sum` calls the
    module that is replicated or sharded. If only the last micro-batch synchronizes, DDP ranks may
    have different numbers of micro-batches, but at least one each. The iterator of micro-batches is
    then read one ahead. An invalid loss or weight raises an error on all ranks. Any other error on
    one rank leaves the other ranks waiting, as usual. After such an error FSDP2 may also still hold
    unsharded gradients.

    Args:
        model: First argument of `loss_sum`.
        optimizer: An optimizer that steps without a closure, unlike LBFGS. One with a training
            mode, such as a schedule-free optimizer, must be in it. Several optimizers in a list are
            clipped together, and either all of them step or none does.
        loss_sum: Function (model, micro_batch) -> (sum of losses, weight). The sum is a scalar
            tensor that requires gradients. The weight is the number of tokens or samples in the
            sum, as a number or a scalar tensor; it is zero if all of them are masked.
        scaler: Scales the losses, and is updated once per step. A disabled scaler counts as None.
        max_norm: Largest norm of the gradient, which is clipped to it once, after unscaling. With
            `math.inf` the norm is only measured.
        autocast_dtype: torch.bfloat16 or torch.float16, for the forward passes.
        accumulate: "fp32" sums the gradients of bf16 and fp16 parameters in fp32, which needs 4
            more bytes per parameter instead of 2, and casts their mean once. None sums in the
            parameters' dtype, where the sum over many small micro-batches drifts.
        sync: With "last", only the last micro-batch reduces gradients over the ranks; with "each",
            every micro-batch does. Then more bytes are sent, and FSDP2 never holds whole gradients.
        in_buckets: Whether micro-batches add up in DDP's buckets, which exist anyway, instead of
            next to them. This saves one set of gradients from the third step on. It needs DDP with
            `gradient_as_bucket_view=True`.

    Source: why sums and not means of means, "Fixing Gradient Accumulation",
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
    ):
        self.model = model
        self.ranks = Ranks(model, sync)
        self.optimizer = _one_optimizer(optimizer)
        self.loss_sum = loss_sum
        self.max_norm = None if max_norm is None else positive("max_norm", max_norm)
        self.autocast_dtype = one_of("autocast_dtype", autocast_dtype, (None, *NARROW))
        self.device_type = _optimized(self.optimizer)[0].device.type
        self.scaler = _scaler(scaler, self.device_type, autocast_dtype)
        self.accumulate = one_of("accumulate", accumulate, (None, "fp32"))
        if accumulate is not None and self.ranks.model:
            raise ValueError(
                f"accumulate must be None for a DDP or FSDP2 model, got {accumulate!r}"
            )
        self.in_buckets = self.ranks.checked(self.scaler, in_buckets)
        self._buckets = {}
        # divisor of each sum of losses before its backward pass
        self._unit: float | None = None

    def __call__(self, micro_batches: Iterable[Any]) -> StepResult:
        """Run all micro-batches, then step once.

        The gradients of the optimizer's parameters are None at the beginning, and again at the end;
        a `register_step_pre_hook` sees those that the optimizer uses. For other parameters of the
        model, the gradient of the mean is added to .grad, as backward does, so that another
        optimizer may use it. After an error, gradients, random generators, scaler and `no_sync` are
        as before the call. Side effects of forward passes (BatchNorm's averages) remain.

        Raises:
            TypeError, ValueError: micro_batches is a single batch, or empty; `loss_sum` did not
                return a finite sum and a weight of at least 0; all weights are zero.
            RuntimeError: No parameter of the optimizer got a gradient; the norm of the gradients is
                inf or NaN; `loss_sum` did not call the DDP model.
        """
        _check_micro_batches(micro_batches)
        for optimizer in getattr(self.optimizer, "optimizers", [self.optimizer]):
            check_in_training(optimizer)
        own = dict.fromkeys(_optimized(self.optimizer))
        others = [parameter for parameter in self.model.parameters() if parameter not in own]
        with (
            random_numbers_undone(),
            _gradients_apart([*own], others, self.ranks),
            ExitStack() as sending,
        ):
            for parameter, gradient in self._buckets.items():
                parameter.grad = gradient.zero_()
            with _fp32_sums([*own, *others] if self.accumulate else []) as sums:
                loss, weight = self._accumulate(micro_batches, sending)
            if self.in_buckets:
                self._buckets = {p: p.grad for p in (*own, *others) if p.grad is not None}
            # .grad is now the gradient of (sum of losses) / unit; with ranks, its mean over them.
            _take_mean([*own, *others], sums, self._unit * self.ranks.count / weight)
            grad_norm, stepped = self._step(_gradients(others))
        # The weight of the next step is unknown before its last forward pass, but will be similar.
        self._unit = _power_of_two(weight)
        return StepResult(loss / weight, weight, grad_norm, stepped)

    def _accumulate(self, micro_batches: Iterable[Any], sending: ExitStack) -> tuple[float, float]:
        """Run all micro-batches and return the sums of their losses and weights over all ranks."""
        losses = []
        weights = []
        senders = _senders(self)
        marked = (
            _with_last(micro_batches)
            if senders or self.ranks.model
            else ((item, True) for item in micro_batches)
        )
        for micro_batch, last in marked:
            with self.ranks.reducing(last):
                loss = self._backward(micro_batch, last, weights, senders if last else [], sending)
            losses.append(loss)
        if not losses:
            raise ValueError(
                "micro_batches must contain at least one micro-batch, got none (an iterator"
                " can be used only once)"
            )
        # Read only here, because reading a value makes the host wait for a GPU.
        losses = _values(losses)
        weights = [math.nan if is_symbolic(weight) else float(weight) for weight in weights]
        problem = ""
        for i, (loss, weight) in enumerate(
            () if is_symbolic() else zip(losses, weights, strict=True)
        ):
            if not (math.isfinite(loss) and 0 <= weight < math.inf) and not problem:
                problem = (
                    f"micro-batch {i}: the loss must be finite and the weight finite and at least"
                    f" 0, got loss {loss} and weight {weight}"
                )
        loss, weight = self.ranks.sums(
            math.fsum(losses), math.nan if problem else math.fsum(weights)
        )
        if problem or (math.isnan(weight) and not is_symbolic()):
            raise ValueError(
                problem
                or "another rank got an invalid loss or weight; the error on that rank says which"
            )
        if weight == 0:
            raise ValueError(
                "the weight of all micro-batches together must be above 0, got 0; at least"
                " one token or sample must count"
            )
        return loss, weight

    def _backward(
        self, micro_batch: Any, last: bool, weights: list, senders: list, sending: ExitStack
    ) -> Tensor:
        """Add the gradient of one micro-batch's loss sum, divided by the unit, to .grad.

        Its weight is appended to `weights`.
        """
        name = f"micro-batch {len(weights)}"
        autocast = (
            torch.autocast(self.device_type, self.autocast_dtype)
            if self.autocast_dtype
            else nullcontext()
        )
        with (
            autocast,
            _calls(self.model if last and self.model is self.ranks.replica else None) as calls,
        ):
            loss, weight = check_loss_sum(self.loss_sum(self.model, micro_batch), name)
        if not calls:
            raise RuntimeError(
                "loss_sum did not call the DDP model, so no gradients would be synchronized;"
                " loss_sum must call model(...)"
            )
        if self._unit is None:
            self._unit = _power_of_two(
                *self.ranks.sums(math.nan if is_symbolic(weight) else float(weight))
            )
        # The total weight, by which a mean divides, is known only after the last forward pass.
        # Until then .grad holds gradients of sums. Plain sums are much larger than means, so in
        # fp16 they would overflow at a scale that suits means. They are therefore divided by a unit
        # near the total weight. It is a power of two, so that dividing does not round, and equal on
        # all ranks.
        scaled = self.scaler.scale(loss)
        weights.append(weight)
        # if weights add up to the unit, the gradients will not be rescaled, so copies stay valid
        for optimizer in senders if _is_sum(weights, self._unit) else ():
            sending.enter_context(optimizer.sending())
        scaled.backward(torch.full_like(scaled, 1 / self._unit))  # the gradient of scaled / unit
        return loss.detach()

    def _step(self, others: list[Tensor]) -> tuple[float | None, bool]:
        """Unscale, clip, step and update the scaler; return the norm and whether it stepped."""
        parameters = _optimized(self.optimizer)
        if not _gradients(parameters):
            raise RuntimeError(
                "no parameter of the optimizer got a gradient; the optimizer must hold"
                " parameters of this model"
            )
        scale = self.scaler.get_scale()
        try:
            self.scaler.unscale_(self.optimizer)
            for gradient in others:
                gradient.div_(scale)
            grad_norm = _clip(
                parameters, self.max_norm, self.ranks, finite=not self.scaler.is_enabled()
            )
            self.scaler.step(self.optimizer)
        except BaseException:
            self.scaler.update(scale)  # keeps the scale, but forgets that gradients were unscaled
            raise
        self.scaler.update()
        # the scale shrinks if, and only if, gradients were inf or NaN
        return grad_norm, self.scaler.get_scale() >= scale > 0


# ---- gradients


def _optimized(optimizer: torch.optim.Optimizer | _Together) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


@contextmanager
def _gradients_apart(
    own: list[nn.Parameter], others: list[nn.Parameter], ranks: Ranks
) -> Iterator[None]:
    """Set `.grad` of all these parameters to None when the block starts.

    When the block ends, `.grad` is None for the parameters in `own`. The new gradients of `others`
    are added to their previous gradients. If the block raises, all previous gradients are restored.
    """
    parameters = [*own, *others]
    before = [parameter.grad for parameter in parameters]
    if ranks.has_views:  # DDP would write into these gradients
        before = [gradient if gradient is None else gradient.clone() for gradient in before]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
        before[: len(own)] = [None] * len(own)
        for i, parameter in enumerate(others, len(own)):
            if parameter.grad is not None:
                before[i] = parameter.grad if before[i] is None else before[i].add_(parameter.grad)
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


@contextmanager
def _fp32_sums(parameters: Iterable[nn.Parameter]) -> Iterator[dict[nn.Parameter, Tensor]]:
    """Sum gradients in fp32 inside the block: parameter -> sum.

    Each gradient that backward computes is added to the sum and dropped immediately.
    """
    sums: dict[nn.Parameter, Tensor] = {}

    def add(parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        sums[parameter] = sums[parameter].add_(gradient) if parameter in sums else gradient.float()

    narrow = [p for p in parameters if p.requires_grad and p.dtype in NARROW]
    hooks = [parameter.register_post_accumulate_grad_hook(add) for parameter in narrow]
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()


def _take_mean(
    parameters: list[nn.Parameter], sums: dict[nn.Parameter, Tensor], factor: float
) -> None:
    gradients = [*_gradients(parameters), *sums.values()]
    # multiplying by 1 would invalidate copies that an optimizer has already made
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)
    for parameter in list(sums):
        parameter.grad = sums.pop(parameter).to(parameter.dtype)


def _clip(
    parameters: list[nn.Parameter], max_norm: float | None, ranks: Ranks, *, finite: bool
) -> float | None:
    """Clip the gradients to max_norm, and return their norm before clipping."""
    if max_norm is None:
        return None
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout is torch.sparse_coo:
            # Rows that occur several times must be summed before the norm is computed.
            parameter.grad = parameter.grad.coalesce()
    dense = [
        gradient.values() if gradient.layout is torch.sparse_coo else gradient
        for gradient in _gradients(parameters)
    ]
    norm = ranks.norm(dense)
    [grad_norm] = _values([norm])
    if finite and not is_symbolic() and not math.isfinite(grad_norm):
        raise RuntimeError(
            f"the norm of the gradients must be finite for clipping, got {grad_norm}; a"
            " torch.amp.GradScaler would skip such a step"
        )
    if not grad_norm <= max_norm:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return grad_norm


@contextmanager
def _calls(model: nn.Module | None) -> Iterator[list]:
    """Return a list that stays empty if the model is not called inside the block.

    For None, or a compiled model, the list is not empty from the start.
    """
    if model is None or model._compiled_call_impl is not None:
        yield [True]
        return
    calls: list[bool] = []
    hook = model.register_forward_pre_hook(lambda *_: calls.append(True))
    try:
        yield calls
    finally:
        hook.remove()


def _with_last(items: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield each item, and whether it is the last, by reading one item ahead."""
    end = object()
    for item, following in pairwise(chain(items, [end])):
        yield item, following is end


def _senders(step: AccumulatedStep) -> list[Any]:
    """Return the optimizers that may copy gradients down during backward.

    This is possible only if the gradients need no change afterwards.
    """
    changed = (
        step.ranks.model or step.scaler.is_enabled() or step.max_norm is not None or step.accumulate
    )
    optimizers = getattr(step.optimizer, "optimizers", [step.optimizer])
    if changed or any(optimizer._optimizer_step_pre_hooks for optimizer in optimizers):
        return []
    return [optimizer for optimizer in optimizers if getattr(optimizer, "state_on_host", False)]


def _is_sum(weights: list[float | Tensor], unit: float) -> bool:
    """Return whether the weights add up to the unit.

    False if a weight is a tensor, because reading it might make the host wait for a GPU.
    """
    return all(isinstance(weight, Real) for weight in weights) and math.fsum(weights) == unit


def _power_of_two(weight: float) -> float:
    return 2.0 ** round(math.log2(weight)) if 0 < weight < math.inf else 1.0


def _values(scalars: list[Tensor]) -> list[float]:
    return [math.nan] * len(scalars) if is_symbolic() else torch.stack(scalars).tolist()


# ---- argument checks


def check_loss_sum(pair: Any, name: str = "the batch") -> tuple[Tensor, Real | Tensor]:
    """Check and return the result of a `loss_sum`, which must be (sum of losses, weight)."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(
            f"{name}: loss_sum must return (sum of losses, weight), not a mean, got {shown(pair)}"
        )
    loss, weight = pair
    if (
        not isinstance(loss, Tensor)
        or loss.dim()
        or not loss.is_floating_point()
        or not loss.requires_grad
    ):
        raise TypeError(
            f"{name}: the sum of losses must be a floating-point scalar tensor that"
            f" requires a gradient, got {shown(loss)}"
        )
    if not isinstance(weight, (Tensor, Real)) or (
        torch.is_tensor(weight) and (weight.dim() or weight.requires_grad)
    ):
        raise TypeError(
            f"{name}: the weight must be a number or a scalar tensor without gradients,"
            f" got {shown(weight)}"
        )
    return loss, weight


def _check_micro_batches(given: Any) -> None:
    """Reject a single batch: a pair (x, y), for example, would pass for two micro-batches."""
    pair = isinstance(given, tuple) and any(isinstance(item, Tensor) for item in given)
    if pair or isinstance(given, (Tensor, Mapping)):
        got = f"{shown(given)}{' of tensors' if pair else ''}, which may be a single batch"
        raise TypeError(
            f"micro_batches must be several batches, such as split(batch, 8) or a list, got {got}"
        )


class _Together:
    """Several optimizers as one, so that with a scaler either all of them step or none does."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def _one_optimizer(given: Any) -> torch.optim.Optimizer | _Together:
    optimizers = given if isinstance(given, (list, tuple)) else [given]
    for optimizer in optimizers:
        kind(
            "optimizer",
            optimizer,
            torch.optim.Optimizer,
            "a torch.optim.Optimizer or a list of them",
        )
        check_no_closure(optimizer)
    together = optimizers[0] if len(optimizers) == 1 else _Together(optimizers)
    parameters = _optimized(together)
    if not parameters or len(set(parameters)) < len(parameters):
        raise ValueError(
            "optimizer must have parameters, and several optimizers must not share any,"
            f" got {shown(given)}"
        )
    return together


def _scaler(given: torch.amp.GradScaler | None, device: str, autocast_dtype: torch.dtype | None):
    """Return `given` if it is an enabled scaler, else a disabled one.

    A disabled scaler only calls `optimizer.step()`.
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
