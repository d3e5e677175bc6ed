"""Kernels of attention on a GPU, and the bytes that they save, against PyTorch's compiled checks.

`attention_checks.csv` has the answers of these checks (see `attention_calls.py`).
"""

import csv
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from attention_calls import CASES, CHECKS, Case
from torch.nn import functional as F
from training_steps import metered

from course_lib.memory import saved_tensors
from course_lib.symbolic import Gpu, Symbolic, symbolic
from course_lib.symbolic.cuda_kernels import Call, attention_kernel, kernels_in_order, may_run

with CHECKS.open(encoding="utf-8", newline="") as file:
    ANSWERS = {row.pop("case"): row for row in csv.DictReader(file)}
COLUMNS = list(ANSWERS["default"])


def pair(text):
    return tuple(map(int, text.split(".")))


def gpu_of(column):
    _, version, _, capability = column.split()
    return Gpu(pair(capability), pair(version))


@contextmanager
def deterministic_if(case):
    torch.use_deterministic_algorithms(case.deterministic)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def call_of(case, gpu, device="meta"):
    inputs, options, mask = case.positional(device)
    return Call(*inputs, mask, *options, gpu)


def allowed(case, column):
    gpu = gpu_of(column)
    call = call_of(case, gpu)
    with deterministic_if(case):
        return "".join(kernel[0] for kernel in kernels_in_order(gpu) if may_run(kernel, call))


def kept_bytes(case, gpu):
    with symbolic(Symbolic("cuda", gpu)), deterministic_if(case):
        inputs, options = case.arguments()
        attend = partial(F.scaled_dot_product_attention, **options)
        return saved_tensors(attend, *inputs).total_bytes


@pytest.mark.parametrize("column", COLUMNS)
def test_predicted_attention_kernels_equal_kernels_that_pytorch_allows(column):
    wrong = {
        case.name: (allowed(case, column), ANSWERS[case.name][column])
        for case in CASES
        if allowed(case, column) != ANSWERS[case.name][column]
    }
    assert not wrong


def element_bytes(d, tokens=2 * 8 * 1024, itemsize=2):
    return tokens * d * itemsize


LOG_SUM_EXP = 2 * 8 * 1024 * 4


@pytest.mark.parametrize(
    ("case", "kernel", "kept"),
    [
        (Case(), "cudnn", 4 * element_bytes(64) + LOG_SUM_EXP + 16),
        (Case(d=192), "cudnn", 4 * element_bytes(192) + LOG_SUM_EXP + 16),
        # FlashAttention saves query, key, value and result padded to 64, 104 and 8.
        (Case(d=63), "flash", 4 * element_bytes(64) + LOG_SUM_EXP + 24),
        (Case(d=100), "flash", 4 * element_bytes(104) + LOG_SUM_EXP + 24),
        (Case(d=1), "flash", 4 * element_bytes(8) + LOG_SUM_EXP + 24),
        (
            Case(d=100, kv_heads=2),
            "flash",
            2 * element_bytes(104) + 2 * element_bytes(104) // 4 + LOG_SUM_EXP + 24,
        ),
        (Case(mask="float"), "cudnn", 4 * element_bytes(64) + LOG_SUM_EXP + 16 + 2 * 1024**2),
        (Case(mask="bool"), "cudnn", 4 * element_bytes(64) + LOG_SUM_EXP + 16 + 2 * 1024**2),
        # `saved_tensors` does not list a learned mask, as it is a leaf of the graph.
        (Case(mask="learned"), "efficient", 4 * element_bytes(64) + LOG_SUM_EXP),
        (Case(dtype="fp32"), "efficient", 8 * element_bytes(64) + LOG_SUM_EXP),
        # A mask of 63 keys is copied into rows of 64, and its log-sum-exps are padded to 64.
        (
            Case(dtype="fp32", mask="float", queries=63),
            "efficient",
            4 * element_bytes(64, 2 * 8 * 63, 4) + 2 * 8 * 64 * 4 + 63 * 64 * 4,
        ),
    ],
)
def test_predicted_attention_kernel_and_saved_bytes_equal_expected_values(case, kernel, kept):
    assert attention_kernel(call_of(case, Gpu())) == kernel
    assert kept_bytes(case, Gpu()) == kept


@pytest.mark.parametrize(("d", "copies"), [(20, 3), (24, 0)])
def test_flash_attention_pads_head_dim_to_multiple_of_8(d, copies):
    case, gpu = Case(d=d), Gpu((8, 0))
    assert attention_kernel(call_of(case, gpu)) == "flash"
    with symbolic(Symbolic("cuda", gpu)):
        inputs, options = case.arguments()
        meter = metered(partial(F.scaled_dot_product_attention, *inputs, **options))
    operators = [sample.operator for sample in meter.timeline]
    assert operators.count("aten.constant_pad_nd.default") == copies


def test_math_attention_kernel_saves_attention_scores():
    case = Case(d=63, dtype="fp32")
    assert attention_kernel(call_of(case, Gpu())) == "math"
    assert kept_bytes(case, Gpu()) > 2 * 8 * 1024 * 1024 * 4


# ---- on a GPU


def this_gpu():
    if (torch.backends.cudnn.version() or 0) <= 91_500:
        pytest.skip("needs the cuDNN of PyTorch's wheels for CUDA 13")
    return Gpu(torch.cuda.get_device_capability())


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_real_gpu_runs_predicted_kernel_and_saves_its_bytes(case):
    gpu = this_gpu()
    numbers = {"math": 0, "flash": 1, "efficient": 2, "cudnn": 3}
    with deterministic_if(case):
        inputs, options = case.arguments("cuda")
        call = call_of(case, gpu, "cuda")
        assert torch._fused_sdp_choice(*inputs, **options) == numbers[attention_kernel(call)]
        if case.runs:
            attend = partial(F.scaled_dot_product_attention, **options)
            real = saved_tensors(attend, *inputs).total_bytes
            assert real == kept_bytes(case, gpu)
