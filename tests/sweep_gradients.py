"""Gradients compared with plain ones, on the samples of PyTorch's operator database.

    python tests/sweep_gradients.py          # all samples in float32 and bfloat16

The options that choose other samples are those of `sweep_operators.py`.

Each call of the database runs forward and backward: twice plainly, and once in each of `WAYS`, in
which its activations are recomputed or offloaded. Gradients are compared bit by bit. The database,
its samples and the verdicts are described in `sweep_operators.py`.

Of all samples, only those of `svd` may differ, by rounding, in the reentrant mode of the readable
checkpoint and of PyTorch: the backward pass inside the backward pass gets zeros for outputs without
gradients, and then runs other formulas. `rrelu` is the last operator of its call, so checkpoints
that stop early get other gradients, and the comparison refuses it. Selective checkpoints of a call
that changes a kept value in place are refused, as PyTorch's are. Not covered: other devices, double
backward, and calls that change their inputs.

`tests/test_recomputation.py` runs one sample of each operator, this script all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import torch
from sweep_operators import Finding, inputs_of, kind_of, report, run_sample, seed, sweep
from torch import Tensor
from torch.testing import assert_close
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils.checkpoint import checkpoint as pytorch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from course_lib._torch.tensors import map_tensors, tensors_in
from course_lib.checkpoint import readable
from course_lib.checkpoint.comparison import ComparedFunction, Comparison
from course_lib.checkpoint.repeatable import BlockState, Repeatable
from course_lib.offload import HostStore, offload_activations

# ---- ways to run a call


def _checkpointed(checkpoint: Callable, operator: Callable, **options: Any) -> Callable:
    """The operator's call under the readable checkpoint, or under PyTorch's own."""
    if not options["use_reentrant"]:
        return lambda *args, **kwargs: checkpoint(operator, *args, **options, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        # this mode finds gradients only for tensors that are arguments themselves
        tensors = list(dict.fromkeys(tensors_in((args, kwargs))))

        def rebuilt(*given: Tensor) -> Any:
            new = dict(zip(map(id, tensors), given, strict=True))
            put = partial(map_tensors, lambda tensor: new[id(tensor)])
            return operator(*put(args, copied=(tuple, list)), **put(kwargs, copied=(dict, list)))

        return checkpoint(rebuilt, *tensors, **options)

    return run


def _selective(operator: Callable, answers: tuple[bool, ...]) -> Callable:
    """The operator's call under the readable checkpoint, which keeps by turns, as `answers` say."""

    def run(*args: Any, **kwargs: Any) -> Any:
        turns = cycle(answers)
        keep = lambda *_, **__: next(turns)  # noqa: E731
        return readable.checkpoint(operator, *args, keep=keep, **kwargs)

    return run


def _selective_in_pytorch(operator: Callable, answers: tuple[bool, ...]) -> Callable:
    """The same under PyTorch's checkpoint."""

    def contexts() -> tuple:
        turns = cycle(answers)
        return create_selective_checkpoint_contexts(lambda *_, **__: next(turns))

    return _checkpointed(pytorch, operator, use_reentrant=False, context_fn=contexts)


def _compared(operator: Callable) -> Callable:
    """The operator's call under a checkpoint that compares what both runs save."""

    def run(*args: Any, **kwargs: Any) -> Any:
        comparison = Comparison("the operator", "leave it out")
        function = ComparedFunction(operator, comparison)
        block = Repeatable(function, BlockState(torch.nn.Identity(), comparison))
        return block.checkpoint(args, kwargs)

    return run


def _under(context: Callable, operator: Callable) -> Callable:
    """The operator's call inside a context, such as one of hooks that move nothing."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with context():
            return operator(*args, **kwargs)

    return run


def _both(way: Callable, **options: Any) -> tuple[Callable, Callable]:
    return partial(way, readable.checkpoint, **options), partial(way, pytorch, **options)


def _kept(answers: tuple[bool, ...]) -> tuple[Callable, Callable]:
    return partial(_selective, answers=answers), partial(_selective_in_pytorch, answers=answers)


def _offloaded(prefetch: int) -> tuple[Callable, Callable]:
    def offload() -> Any:
        return offload_activations(HostStore(), min_bytes=0, prefetch=prefetch, in_flight=0)

    def move_nothing() -> Any:
        return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)

    return partial(_under, offload), partial(_under, move_nothing)


# name -> (the operator's call as this library runs it, and as PyTorch alone does)
WAYS: dict[str, tuple[Callable, Callable]] = {
    "nonreentrant": _both(_checkpointed, use_reentrant=False),
    "reentrant": _both(_checkpointed, use_reentrant=True),
    "kept": _kept((True,)),
    "kept by turns": _kept((True, False)),
    "compared": (_compared, partial(_checkpointed, pytorch, use_reentrant=False)),
    "offloaded": _offloaded(prefetch=1),
    "offloaded at once": _offloaded(prefetch=0),
}


# ---- checks

UNCHANGED = "unchanged"  # not one of `WAYS`


def compare(operator: OpInfo, sample: SampleInput) -> dict[str, Finding]:
    """The finding for each of `WAYS`; under `UNCHANGED`, whether saved tensors stay equal."""
    found = {UNCHANGED: writes_after_saving(operator, sample)}
    try:
        plain, again = (gradients(operator, sample) for _ in range(2))
    except Exception as error:
        return found | dict.fromkeys(WAYS, Finding("fails", kind_of(error)))
    if not plain:
        return found | dict.fromkeys(WAYS, Finding("fails", "no input gets a gradient"))
    if not _same(plain, again):
        return found | dict.fromkeys(WAYS, Finding("fails", "two plain runs differ"))
    return found | {way: _compared_with(plain, way, operator, sample) for way in WAYS}


def gradients(call: Callable, sample: SampleInput) -> list[Tensor]:
    """Gradients of the inputs of a sample's call."""
    return run_sample(call, sample, *inputs_of(sample, lambda x: x.detach().clone()))


def _compared_with(plain: list[Tensor], way: str, operator: OpInfo, sample: SampleInput) -> Finding:
    mine, its = WAYS[way]
    try:
        found = gradients(mine(operator), sample)
    except Exception as error:
        try:
            gradients(its(operator), sample)
        except Exception:
            return Finding("fails", f"PyTorch's too: {kind_of(error)}")
        return Finding("refused", kind_of(error))
    if _same(plain, found):
        return Finding("equal")
    as_pytorch = _same(found, gradients(its(operator), sample))
    return Finding("different", "the gradients" + " are those of PyTorch's" * as_pytorch)


def _same(expected: list[Tensor], found: list[Tensor]) -> bool:
    try:
        assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    return True


def writes_after_saving(operator: OpInfo, sample: SampleInput) -> Finding:
    """Whether what a call saves for backward stays as it was when it was saved."""
    saved: list[tuple[Tensor, int, Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append((tensor, tensor._version, tensor.detach().clone()))
        return tensor

    try:
        args, kwargs = inputs_of(sample, lambda x: x.detach().clone())
        seed()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            operator(*args, **kwargs)
        same = all(
            tensor._version != version or _same([tensor.detach()], [value])
            for tensor, version, value in saved
        )
    except Exception as error:
        return Finding("fails", kind_of(error))
    if same:
        return Finding("equal")
    return Finding("different", "written after it was saved, and not counted as a change")


# ---- the sweep


def main() -> None:
    for dtype, found, verbose in sweep(__doc__, compare):
        rows = defaultdict(list)
        for name, number, by_way in found:
            for way, finding in by_way.items():
                rows[way].append((name, number, finding))
        for way in rows:
            report(f"{dtype}, {way}", rows[way], verbose)


if __name__ == "__main__":
    main()
