"""Gradients compared with plain ones, on the samples of PyTorch's operator database.

    python tests/tools/sweep_gradients.py          # all samples in float32 and bfloat16

The options that choose other samples are those of `sweep_operators.py`.

Each call of the database runs forward and backward: twice plainly, and once in each of `RUNS`, with
its activations recomputed or offloaded. Gradients are compared bit by bit. `sweep_operators.py`
describes the database, its samples and the verdicts.

Of all samples, only those of `svd` may differ, by rounding, in the reentrant mode of the readable
checkpoint and of PyTorch, because the inner backward pass receives zeros for outputs without
gradients. `rrelu` is the last operator of its call, so checkpoints that stop early get other
gradients, and the comparison rejects it. Other devices, double backward and calls that change their
inputs are not covered.

`test_checkpoint_recomputation.py` runs one sample of each operator, this script all of them.
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
from course_lib.checkpoint.comparison import Comparison, FunctionWithSavedTensorCheck
from course_lib.checkpoint.repeatable import BlockState, Repeatable
from course_lib.offload import HostStore, offload_activations

# ---- runs of a call


def _checkpointed(checkpoint: Callable, operator: Callable, **options: Any) -> Callable:
    """Return the operator under the readable checkpoint or PyTorch's."""
    if not options["use_reentrant"]:
        return lambda *args, **kwargs: checkpoint(operator, *args, **options, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        # The reentrant mode gives gradients only to tensors that are arguments themselves.
        tensors = list(dict.fromkeys(tensors_in((args, kwargs))))

        def rebuilt(*renewed: Tensor) -> Any:
            new = dict(zip(map(id, tensors), renewed, strict=True))
            renew = partial(map_tensors, lambda tensor: new[id(tensor)])
            return operator(
                *renew(args, copied=(tuple, list)), **renew(kwargs, copied=(dict, list))
            )

        return checkpoint(rebuilt, *tensors, **options)

    return run


def _selective(operator: Callable, answers: tuple[bool, ...]) -> Callable:
    """Return the operator under the readable checkpoint, which keeps what `answers` say in turn."""

    def run(*args: Any, **kwargs: Any) -> Any:
        turns = cycle(answers)
        keep = lambda *_, **__: next(turns)  # noqa: E731
        return readable.checkpoint(operator, *args, keep=keep, **kwargs)

    return run


def _selective_in_pytorch(operator: Callable, answers: tuple[bool, ...]) -> Callable:
    """Return the operator under PyTorch's selective checkpoint."""

    def contexts() -> tuple:
        turns = cycle(answers)
        return create_selective_checkpoint_contexts(lambda *_, **__: next(turns))

    return _checkpointed(pytorch, operator, use_reentrant=False, context_fn=contexts)


def _compared(operator: Callable) -> Callable:
    """Return the operator under a checkpoint that compares the saved tensors of both runs."""

    def run(*args: Any, **kwargs: Any) -> Any:
        comparison = Comparison("the operator", "leave it out")
        function = FunctionWithSavedTensorCheck(operator, comparison)
        block = Repeatable(function, BlockState(torch.nn.Identity(), comparison))
        return block.checkpoint(args, kwargs)

    return run


def _under(context: Callable, operator: Callable) -> Callable:
    """Return the operator inside a context, such as one of hooks that move nothing."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with context():
            return operator(*args, **kwargs)

    return run


def _both(run: Callable, **options: Any) -> tuple[Callable, Callable]:
    return partial(run, readable.checkpoint, **options), partial(run, pytorch, **options)


def _kept(answers: tuple[bool, ...]) -> tuple[Callable, Callable]:
    return partial(_selective, answers=answers), partial(_selective_in_pytorch, answers=answers)


def _offloaded(prefetch: int) -> tuple[Callable, Callable]:
    def offload() -> Any:
        return offload_activations(HostStore(), min_bytes=0, prefetch=prefetch, in_flight=0)

    def move_nothing() -> Any:
        return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)

    return partial(_under, offload), partial(_under, move_nothing)


# name -> (run by this library, run by PyTorch alone)
RUNS: dict[str, tuple[Callable, Callable]] = {
    "nonreentrant": _both(_checkpointed, use_reentrant=False),
    "reentrant": _both(_checkpointed, use_reentrant=True),
    "kept": _kept((True,)),
    "kept by turns": _kept((True, False)),
    "compared": (_compared, partial(_checkpointed, pytorch, use_reentrant=False)),
    "offloaded": _offloaded(prefetch=1),
    "offloaded at once": _offloaded(prefetch=0),
}


# ---- checks

UNCHANGED = "unchanged"  # not one of `RUNS`


def compare(operator: OpInfo, sample: SampleInput) -> dict[str, Finding]:
    """Return the finding for each of `RUNS`, and under `UNCHANGED` that of the saved tensors."""
    found = {UNCHANGED: writes_after_saving(operator, sample)}
    try:
        plain, again = (gradients(operator, sample) for _ in range(2))
    except Exception as error:
        return found | dict.fromkeys(RUNS, Finding("fails", kind_of(error)))
    if not plain:
        return found | dict.fromkeys(RUNS, Finding("fails", "no input gets a gradient"))
    if not _same(plain, again):
        return found | dict.fromkeys(RUNS, Finding("fails", "two plain runs differ"))
    return found | {name: _compared_with(plain, name, operator, sample) for name in RUNS}


def gradients(call: Callable, sample: SampleInput) -> list[Tensor]:
    """Return the gradients of the inputs of a sample's call."""
    return run_sample(call, sample, *inputs_of(sample, lambda x: x.detach().clone()))


def _compared_with(
    plain: list[Tensor], name: str, operator: OpInfo, sample: SampleInput
) -> Finding:
    ours, pytorchs = RUNS[name]
    try:
        found = gradients(ours(operator), sample)
    except Exception as error:
        try:
            gradients(pytorchs(operator), sample)
        except Exception:
            return Finding("fails", f"PyTorch's too: {kind_of(error)}")
        return Finding("rejected", kind_of(error))
    if _same(plain, found):
        return Finding("equal")
    as_pytorch = _same(found, gradients(pytorchs(operator), sample))
    return Finding("different", "the gradients" + " are those of PyTorch's" * as_pytorch)


def _same(expected: list[Tensor], found: list[Tensor]) -> bool:
    try:
        assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    return True


def writes_after_saving(operator: OpInfo, sample: SampleInput) -> Finding:
    """Check that the tensors that a call saves for backward are not written afterwards."""
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
    for dtype, found in sweep(__doc__, compare):
        rows = defaultdict(list)
        for operator, number, by_run in found:
            for run, finding in by_run.items():
                rows[run].append((operator, number, finding))
        for run in rows:
            report(f"{dtype}, {run}", rows[run])


if __name__ == "__main__":
    main()
