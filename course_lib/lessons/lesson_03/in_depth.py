"""Measurements of lesson 03's optional sections."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from course_lib.models import deep_mlp
from course_lib.teaching import Table, table

from .exercises import B
from .figures import draw_sweeps, peak_and_flops

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Run = Callable[[nn.Module, Any, Tensor], Tensor]
Cut = Callable[..., list[int]]


def draw_other_depths(
    run: Run, layers: nn.Sequential, predicted: Callable[[int, int], int]
) -> "Figure":
    """Draw predicted and measured peaks against the number of segments for 16, 36 and 64 layers.

    Args:
        run: Function that runs the layers in k checkpointed segments, `run(layers, k, x)`.
        layers: At least 64 layers.
        predicted: Function of the number of layers and k that returns the peak in bytes.
    """
    tried = {16: (2, 4, 5, 6, 8, 16), 36: (3, 6, 8, 9, 12, 13, 36), 64: (4, 8, 11, 16, 22, 64)}
    measured = {
        depth: {k: peak_and_flops(run, layers[:depth], k)[0] for k in ks}
        for depth, ks in tried.items()
    }
    return draw_sweeps(measured, predicted)


def compare_cuts(
    balanced: Cut,
    tapered: Cut,
    predicted: Callable[[Sequence[int]], int],
    measured: Callable[[Sequence[int]], int],
) -> Table:
    """Return a table of the predicted and measured peaks of three ways to cut layers into segments.

    The three ways are √L equal segments, k* = √(2L) equal segments, and segments that become
    shorter.

    Args:
        balanced: Function of the number of layers L and the number of segments. It returns the
            boundaries of equal segments as layer indices, such as [0, 25, 50] for 50 layers.
        tapered: Function of L that returns the boundaries of segments that become shorter.
        predicted: Function that takes such boundaries and returns the predicted peak in bytes.
        measured: Function that takes such boundaries and returns the measured peak in bytes.
    """
    rows = []
    for depth in (16, 36, 50, 64):
        cuttings = {
            "√L": balanced(depth, round(depth**0.5)),
            "tapered": tapered(depth),
            "k*": balanced(depth, round((2 * depth) ** 0.5)),
        }
        for name, cuts in cuttings.items():
            peaks = predicted(cuts) // B, round(measured(cuts) / B, 1)
            rows.append((depth, name, len(cuts) - 1, *peaks))
    columns = ["L", "cut", "segments k", "predicted (units of B)", "measured (units of B)"]
    return table(columns, rows)


def figures_of_older_claims(run: Run, layers: nn.Sequential, cuts: Sequence[int]) -> list[str]:
    """Measure one value for each claim in `OLDER_CLAIMS`, and return the values as text.

    Args:
        run: Function that runs layers in checkpointed segments, `run(layers, cuts, x)`.
        layers: 100 layers.
        cuts: Boundaries of segments that give the lowest peak, as layer indices from 0 to 100.
    """
    shape = {"depth": 1, "width": 25, "activation": nn.Tanh}
    tanh = nn.Sequential(*(deep_mlp(**shape, seed=seed) for seed in range(100)))
    peak, flops = peak_and_flops(run, tanh, range(0, 101, 10))
    whole_peak, whole_flops = peak_and_flops(run, tanh, [0, 100])
    doubled = peak_and_flops(run, layers, cuts)[1] / peak_and_flops(run, layers, [0, 100])[1]
    first = layers[:16]
    peak_and_flops(_detached_segments, first, None)
    trained = sum(bool(layer[0].weight.grad.any()) for layer in first)
    return [
        f"{1 - peak / whole_peak:.0%}",
        f"{flops / whole_flops - 1:.0%}",
        f"{doubled:.2f} ×",
        f"{trained} / 16",
    ]


def _detached_segments(layers: nn.Sequential, _: None, x: Tensor) -> Tensor:
    """Run 16 layers in four segments, and detach the outputs of the first three segments."""
    for start in (0, 4, 8):
        x = checkpoint(layers[start : start + 4], x, use_reentrant=False)
        x = x.detach().requires_grad_()
    return layers[12:](x)
