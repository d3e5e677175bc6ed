"""Cases where short checkpoints fail, and what reentrant and non-reentrant checkpoints support."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.memory import MemoryMeter
from course_lib.models import DecoderLayer
from course_lib.teaching import Table, table

Run = Callable[..., Tensor]  # run(block, x): a checkpoint


def gaps(runs: Mapping[str, Run]) -> Table:
    """Return a table of what several checkpoint functions support, with one column per function.

    The first row has the peak in MB if each function checkpoints a block of four layers. Every
    other row is for a test, such as whether the function draws the same dropout mask again. The
    outcome of a test is ✓, ✗ or "error".

    Args:
        runs: Dict from the name of a checkpoint function to the function, `run(block, x)`.
    """
    experiments = {
        "draws the same dropout mask again": _same_mask,
        "runs again under the same autocast": _same_autocast,
        "`autograd.grad` changes no other gradient": _only_the_gradient_asked_for,
        "notices an input that was changed in place": _notices_a_changed_input,
        "notices a different output shape": partial(
            _notices, lambda x: x.exp(), lambda x: x[:2].exp()
        ),
        "notices a different shape of a saved tensor": partial(
            _notices, lambda x: x.exp().sum(), lambda x: x[:1].exp().sum()
        ),
        "notices different values": partial(_notices, lambda x: x.exp(), lambda x: (3 * x).exp()),
    }
    rows = [
        (
            "peak of one block of four layers (MB)",
            *(f"{_peak(run) / 1e6:.2f}" for run in runs.values()),
        )
    ]
    rows += [
        (name, *(_outcome(test, run) for run in runs.values()))
        for name, test in experiments.items()
    ]
    return table(["", *(f"`{name}`" for name in runs)], rows)


def modes(checkpoint: Callable) -> list[tuple[str, ...]]:
    """Test what reentrant and non-reentrant checkpoints support, such as keyword arguments.

    Args:
        checkpoint: PyTorch's `checkpoint`, or a function with the same arguments.

    Returns:
        Rows (case, outcome of the reentrant checkpoint, outcome of the non-reentrant checkpoint).
        The outcome is "✓" if the function runs at least twice and the gradient is the same as
        without a checkpoint. Otherwise it is "✗", or "error" after an exception.
    """
    cases = {
        "input needs no gradient": _input_without_gradient,
        "keyword arguments": _keyword_arguments,
        "tensors only in a list": _tensors_in_a_list_only,
        "`backward(inputs=...)`": _some_inputs_only,
        "second derivative": _second_derivative,
        "backward twice": _backward_twice,
        "checkpoint in checkpoint": _run_nested,
        "`torch.func.grad` inside": _transforms_inside,
    }
    both = [partial(checkpoint, use_reentrant=reentrant) for reentrant in (True, False)]
    return [
        (name, *(_outcome(partial(_works, case), mode) for mode in both))
        for name, case in cases.items()
    ]


def _outcome(test: Callable[[Run], bool], run: Run) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return "✓" if test(run) else "✗"
        except Exception:
            return "error"


def _peak(run: Run) -> int:
    block = nn.Sequential(*(DecoderLayer(64, 4, seed=2 * i) for i in range(4)))
    x = torch.linspace(-1, 1, 4 * 64 * 64).view(4, 64, 64).requires_grad_()
    with MemoryMeter(block) as meter:
        run(block, x).sum().backward()
    return meter.peak_bytes


def _same_mask(run: Run) -> bool:
    x = torch.ones(1000, requires_grad=True)
    output = run(lambda x: F.dropout(x, 0.5), x)
    output.sum().backward()
    return torch.equal(output == 0, x.grad == 0)


def _same_autocast(run: Run) -> bool:
    seen, x, linear = [], torch.ones(2, 4, requires_grad=True), nn.Linear(4, 4)

    def block(x: Tensor) -> Tensor:
        y = linear(x)
        seen.append(y.dtype)
        return y.tanh()

    with torch.autocast("cpu", torch.bfloat16):
        output = run(block, x)
    output.float().sum().backward()
    return seen == 2 * [torch.bfloat16]


def _only_the_gradient_asked_for(run: Run) -> bool:
    x, weight = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    (slope,) = torch.autograd.grad(run(lambda x: (x * weight).exp().sum(), x), x)
    return torch.equal(slope, torch.ones(3).exp()) and weight.grad is None


def _notices_a_changed_input(run: Run) -> bool:
    leaf = torch.ones(3, requires_grad=True)
    x = leaf * 1
    loss = run(lambda x: x.exp(), x).sum()
    with torch.no_grad():
        x.mul_(2)
    return _raises(loss.backward)


def _notices(first: Callable, second: Callable, run: Run) -> bool:
    number, x = count(), torch.ones(4, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        return first(x) if next(number) == 0 else second(x)

    return _raises(lambda: run(block, x).sum().backward())


def _raises(function: Callable[[], Any]) -> bool:
    try:
        function()
    except Exception:
        return True
    return False


# Cases of `modes`: functions that take a checkpoint, an input and a weight, and return a gradient.


def _works(case: Callable, mode: Run) -> bool:
    counted = _CountedCheckpoint(mode)
    expected = case(_plainly, *_fresh())
    return torch.equal(case(counted, *_fresh()), expected) and counted.runs >= 2


def _fresh() -> tuple[Tensor, Tensor]:
    return torch.tensor([0.5, 1.0, 2.0], requires_grad=True), nn.Parameter(torch.ones(3))


def _plainly(function: Callable, *args: Any, **options: Any) -> Tensor:
    return function(*args, **options)


class _CountedCheckpoint:
    """A checkpoint that counts how often the functions run."""

    def __init__(self, mode: Run):
        self.mode, self.runs = mode, 0

    def __call__(self, function: Callable, *args: Any, **options: Any) -> Tensor:
        def counted(*args: Any, **options: Any) -> Tensor:
            self.runs += 1
            return function(*args, **options)

        return self.mode(counted, *args, **options)


def _input_without_gradient(run: Run, x: Tensor, weight: Tensor) -> Tensor | None:
    run(lambda x: (x * weight).exp(), torch.ones(3)).sum().backward()
    return weight.grad


def _keyword_arguments(run: Run, x: Tensor, weight: Tensor) -> Tensor | None:
    run(lambda x, scale: (x * scale * weight).exp(), x, scale=weight).sum().backward()
    return weight.grad


def _tensors_in_a_list_only(run: Run, x: Tensor, weight: Tensor) -> Tensor | None:
    run(lambda pair: (pair[0] * pair[1]).exp(), [x, weight]).sum().backward()
    return x.grad


def _some_inputs_only(run: Run, x: Tensor, weight: Tensor) -> Tensor | None:
    run(lambda x: (x * weight).exp(), x).sum().backward(inputs=[x])
    return x.grad


def _second_derivative(run: Run, x: Tensor, weight: Tensor) -> Tensor | None:
    run(lambda x: (x * weight) ** 3, x).sum().backward(create_graph=True)
    return torch.autograd.grad(x.grad.sum(), x)[0]


def _backward_twice(run: Run, x: Tensor, weight: Tensor) -> Tensor | None:
    loss = run(lambda x: (x * weight).exp(), x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return x.grad


def _run_nested(run: Run, x: Tensor, weight: Tensor) -> Tensor | None:
    run(lambda x: run(lambda y: (y * weight).exp(), x.sin()), x).sum().backward()
    return weight.grad


def _transforms_inside(run: Run, x: Tensor, weight: Tensor) -> Tensor | None:
    slope = torch.func.grad(lambda z: z.sin().sum())
    run(lambda x: (x * slope(x.detach())).exp(), x).sum().backward()
    return x.grad
