"""Compare symbolic operators with real ones, on the samples of PyTorch's operator database.

    python tests/tools/sweep_operators.py  # all samples in float32 and bfloat16
    python tests/tools/sweep_operators.py --dtype float32 --names mse,unfold
    python tests/tools/sweep_operators.py --most 2                 # two samples of each operator
    python tests/tools/sweep_operators.py --ones                   # each dimension of them set to 1

The database, `torch.testing._internal.common_methods_invocations.op_db`, has for each operator the
calls by which PyTorch tests it. Each call runs forward and backward.

`test_symbolic_operators.py` runs one sample of each operator, this script all of them. Samples that
have shapes or steps that depend on values, such as those of `unique` and `nonzero`, are rejected,
and so are samples with a sparse CSR tensor. The results are described in `docs/exact.md`.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import chain, groupby, islice
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core as opinfo_core
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib._torch.tensors import map_tensors, tensors_in
from course_lib.memory import MemoryMeter, symbolic

DTYPES = (torch.float32, torch.bfloat16)
# Operators whose kernels read out of bounds if arguments have dimensions that do not match, as with
# `--ones`.
UNCHECKED = {
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
    "nn.functional.ctc_loss",
}
CANDIDATES = 4  # samples of an operator, of which the largest are selected
VERDICTS = ("equal", "different", "rejected", "fails")


class Finding(NamedTuple):
    """Result of a check of one sample.

    Attributes:
        verdict: One of `VERDICTS`. "rejected" means that the library rejects a sample that PyTorch
            runs; "fails" means that PyTorch itself does not run the sample here.
        reason: Why the sample is not equal, in the same words for all samples of one kind.
    """

    verdict: str
    reason: str = ""


Check = Callable[[OpInfo, SampleInput], Any]


# ---- samples

# Name -> function from the number of dimensions to their order in memory; None keeps the order.
LAYOUTS: dict[str, Callable[[int], tuple[int, ...] | None]] = {
    "as_given": lambda dims: None,
    "channels_last": lambda dims: (0, *range(2, dims), 1) if dims in (4, 5) else None,
    "transposed": lambda dims: tuple(reversed(range(dims))),
}


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Put the dimensions of a tensor in another order in memory."""
    order = LAYOUTS[layout](tensor.dim())
    if order is None or tensor.layout is not torch.strided:
        return tensor
    inverse = [order.index(i) for i in range(len(order))]
    reordered = tensor.detach().permute(order).contiguous().permute(inverse)
    return reordered.requires_grad_(tensor.requires_grad)


def samples_of(
    operator: OpInfo, dtype: torch.dtype, most: int | None, layout: str
) -> list[SampleInput]:
    """Return samples of an operator, or [] if it has no kernel for the dtype on a CPU.

    The samples are the `most` largest of the first `CANDIDATES`, or all if `most` is None.
    """
    if dtype not in operator.supported_dtypes("cpu"):
        return []
    seed()
    with_gradients = operator.supports_autograd and dtype in operator.supported_backward_dtypes(
        "cpu"
    )
    # PyTorch would search all frames for its own test to seed each call.
    with (
        patch.object(common_utils, "extract_test_fn", lambda: None),
        patch.object(opinfo_core, "extract_test_fn", lambda: None),
    ):
        samples = operator.sample_inputs("cpu", dtype, requires_grad=with_gradients)
        found = list(islice(samples, CANDIDATES if most else None))

    def bytes_of(sample: SampleInput) -> int:
        tensors = tensors_in((sample.input, sample.args, sample.kwargs))
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors)

    if most:
        found = sorted(found, key=bytes_of, reverse=True)[:most]
    if layout == "as_given":
        return found
    return [
        each.transform(lambda x: laid_out(x, layout) if torch.is_tensor(x) else x) for each in found
    ]


# Seeds PyTorch, Python and NumPy, so that two runs draw the same numbers.
seed = partial(common_utils.set_rng_seed, 0)


def inputs_of(
    sample: SampleInput, leaf: Callable[[Tensor], Tensor]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a sample's call with each tensor replaced by `leaf(tensor)`."""
    leaf_of = cache(lambda tensor: leaf(tensor).requires_grad_(tensor.requires_grad))
    args, kwargs = [sample.input, *sample.args], dict(sample.kwargs)
    return map_tensors(leaf_of, args, copied=(list,)), map_tensors(leaf_of, kwargs, copied=(dict,))


def run_sample(operator: OpInfo, sample: SampleInput, args: list, kwargs: dict) -> list[Tensor]:
    """Run a sample's call and its backward pass; return the gradients of its inputs."""
    seed()
    output = sample.output_process_fn_grad(operator(*args, **kwargs))
    outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(tensor) for tensor in outputs])
    inputs = (tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad)
    return [tensor.grad for tensor in inputs if tensor.grad is not None]


def with_ones(sample: SampleInput) -> Iterator[SampleInput]:
    """Return the sample with one dimension of all its tensors set to 1, for each dimension.

    Each occurs twice: with the strides of a new tensor, and with other strides along dimensions of
    size 1, which are valid as well.
    """
    tensors = tensors_in((sample.input, sample.args, sample.kwargs))
    for dimension in range(max((tensor.dim() for tensor in tensors), default=0)):
        for stride in (None, 3):
            leaf = partial(_with_one, dimension=dimension, stride=stride)
            yield sample.transform(lambda x, leaf=leaf: leaf(x) if torch.is_tensor(x) else x)


def _with_one(tensor: Tensor, dimension: int, stride: int | None) -> Tensor:
    """Return a tensor with one dimension set to 1 and this stride along dimensions of size 1."""
    if tensor.layout is not torch.strided or tensor.dim() <= dimension:
        return tensor
    narrowed = torch.empty_like(
        tensor.detach().narrow(dimension, 0, min(tensor.size(dimension), 1))
    )
    narrowed.copy_(tensor.detach().narrow(dimension, 0, narrowed.size(dimension)))
    if stride:
        steps = zip(narrowed.size(), narrowed.stride(), strict=True)
        narrowed = narrowed.as_strided(
            narrowed.size(), [stride if n == 1 else step for n, step in steps]
        )
    return narrowed.requires_grad_(tensor.requires_grad)


# ---- the check


_NOT_COUNTED = {torch.ops.aten.as_strided.default, torch.ops.prim.device.default}


class Outlines(TorchDispatchMode):
    """Mode that counts operators with the shapes and strides of their results.

    It does not count `as_strided`, with which PyTorch makes some views of real tensors. It makes
    the same views of symbolic tensors with other operators.
    """

    def __init__(self):
        super().__init__()
        self.found: Counter[tuple] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        outputs = [x for x in tensors_in(result) if x.layout is torch.strided]
        if outputs and func not in _NOT_COUNTED:
            self.found[str(func), *((tuple(x.shape), x.stride()) for x in outputs)] += 1
        return result


def check_results(operator: OpInfo, sample: SampleInput) -> Finding:
    """Compare live bytes after each operator, and strides of all results, with symbolic tensors."""
    try:
        real, outlines = _live_bytes(operator, sample, lambda tensor: tensor.detach())
    except Exception as error:
        return Finding("fails", kind_of(error))
    try:
        with symbolic():
            predicted, symbolic_outlines = _live_bytes(operator, sample, _symbolic_like)
    except Exception as error:
        return Finding("rejected", kind_of(error))
    if real != predicted:
        peaks = max(real, default=0), max(predicted, default=0)
        return Finding("different", "a peak of {}, not of {}".format(*peaks))
    for name, *_ in outlines - symbolic_outlines:
        return Finding("different", f"strides of {name}")
    return Finding("equal")


def _live_bytes(
    operator: OpInfo, sample: SampleInput, leaf: Callable[[Tensor], Tensor]
) -> tuple[list[int], Counter[tuple]]:
    """Return the changes of live bytes over time, and the outlines of all results."""
    args, kwargs = inputs_of(sample, leaf)
    with MemoryMeter() as meter, Outlines() as outlines:
        run_sample(operator, sample, args, kwargs)
    live = meter.trace(events=False).live_bytes
    return [int(live) for live, _ in groupby(live)], outlines.found


def _symbolic_like(tensor: Tensor) -> Tensor:
    """Return a symbolic tensor with the storage and strides of a real one; keep integers."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        return tensor.detach()
    if tensor.layout is not torch.strided:
        raise NotImplementedError(f"a symbolic tensor cannot have layout {tensor.layout}")
    elements = tensor.untyped_storage().nbytes() // tensor.itemsize
    whole = torch.empty(elements, dtype=tensor.dtype, device=tensor.device)
    return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).detach()


def kind_of(error: Exception) -> str:
    """Return an error's type and first line without the numbers, which differ between samples."""
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {re.sub(r'[0-9]+', 'N', line)[:110]}"


# ---- the sweep


def findings(
    check: Check,
    dtype: torch.dtype,
    most: int | None = None,
    names: Sequence[str] = (),
    layout: str = "as_given",
    ones: bool = False,
) -> Iterator[tuple[str, int, Any]]:
    """Yield (operator, number of the sample, result of the check) for each sample.

    Args:
        check: Function of an operator and a sample, such as `check_results`.
        dtype: Dtype of the samples.
        most: Number of samples per operator, or None for all.
        names: Parts of operators' names; all operators if empty.
        layout: Memory layout of the samples' tensors, one of `LAYOUTS`.
        ones: Whether each dimension of the samples is set to 1, as in `with_ones`.
    """
    for operator in op_db:
        name = operator.name + (
            f".{operator.variant_test_name}" if operator.variant_test_name else ""
        )
        if names and not any(part in name for part in names):
            continue
        if ones and name in UNCHECKED:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            samples: Iterable = samples_of(operator, dtype, most, layout)
            if ones:
                samples = chain.from_iterable(map(with_ones, samples))
            for number, sample in enumerate(samples):
                yield name, number, check(operator, sample)


def report(title: str, found: Iterable[tuple[str, int, Finding]]) -> None:
    """Print the number of samples with each verdict, and the reasons with their operators."""
    totals: Counter[str] = Counter()
    reasons: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for name, _, finding in found:
        totals[finding.verdict] += 1
        if finding.verdict != "equal":
            reasons[finding.verdict, finding.reason][name] += 1
    print(f"\n{title}: " + ", ".join(f"{totals[each]:,} {each}" for each in VERDICTS))
    for (verdict, reason), names in sorted(
        reasons.items(), key=lambda row: (row[0][0], -row[1].total())
    ):
        print(f"{verdict}: {names.total():5,}  {reason}\n         {dict(names.most_common())}")


def sweep(
    description: str, check: Check
) -> Iterator[tuple[torch.dtype, Iterator[tuple[str, int, Any]]]]:
    """Yield (dtype, findings) for the samples that the command's options select."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--dtype", action="append", help="such as float32; twice for two")
    parser.add_argument("--layout", choices=LAYOUTS, default="as_given", help="of the tensors")
    parser.add_argument("--most", type=int, help="samples of each operator")
    parser.add_argument("--names", default="", help="parts of operators' names, with commas")
    parser.add_argument("--ones", action="store_true", help="set each dimension to 1")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = list(filter(None, options.names.split(",")))
    for dtype in [getattr(torch, name) for name in options.dtype or ()] or DTYPES:
        yield dtype, findings(check, dtype, options.most, names, options.layout, options.ones)


def main() -> None:
    for dtype, found in sweep(__doc__, check_results):
        report(str(dtype), found)


if __name__ == "__main__":
    main()
