"""The rules of attention on a GPU: which kernel runs, and what it saves.

`attention_checks.csv` has the answers of PyTorch's compiled checks (see `attention_calls.py`).
"""

import csv
import re
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from attention_calls import CASES, CHECKS, Case
from torch.nn import functional as F

from course_lib.memory import saved_tensors
from course_lib.symbolic import Gpu, Symbolic, cuda_kernels, symbolic
from course_lib.symbolic.cuda_kernels import (
    ATTENTION_RULES,
    Call,
    attention_kernel,
    kernels_in_order,
    may_run,
)

with CHECKS.open(encoding="utf-8", newline="") as file:
    ANSWERS = {row.pop("case"): row for row in csv.DictReader(file)}
COLUMNS = list(ANSWERS["default"])
VERSIONS = ((2, 11), (2, 13))


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
    """Return the bytes that a call saves on symbolic tensors."""
    with symbolic(Symbolic("cuda", gpu)), deterministic_if(case):
        inputs, options = case.arguments()
        attend = partial(F.scaled_dot_product_attention, **options)
        return saved_tensors(attend, *inputs).total_bytes


def test_answers_have_every_case_once():
    assert list(ANSWERS) == [case.name for case in CASES]


@pytest.mark.parametrize("column", COLUMNS)
def test_rules_allow_the_kernels_that_pytorch_allows(column):
    wrong = {
        case.name: (allowed(case, column), ANSWERS[case.name][column])
        for case in CASES
        if allowed(case, column) != ANSWERS[case.name][column]
    }
    assert not wrong


@pytest.mark.parametrize("number", range(len(ATTENTION_RULES)))
def test_each_rule_changes_an_answer(number, monkeypatch):
    """Drop a rule for one of its kernels at a time, and compare with PyTorch's answers again."""
    rule = ATTENTION_RULES[number]
    for kernel in rule.kernels:
        others = tuple(name for name in rule.kernels if name != kernel)
        rules = list(ATTENTION_RULES)
        rules[number] = replace(rule, kernels=others)
        monkeypatch.setattr(cuda_kernels, "ATTENTION_RULES", tuple(rules))
        assert any(
            allowed(case, column) != ANSWERS[case.name][column]
            for case in CASES
            for column in reversed(COLUMNS)
        ), (kernel, rule.condition)


@pytest.mark.parametrize("rule", [rule for rule in ATTENTION_RULES if rule.since > (2, 11)])
def test_a_rule_of_2_13_is_not_one_of_2_11(rule, monkeypatch):
    others = tuple(each for each in ATTENTION_RULES if each is not rule)
    monkeypatch.setattr(cuda_kernels, "ATTENTION_RULES", (*others, replace(rule, since=(2, 11))))
    column = "torch 2.11 on 9.0"
    assert any(allowed(case, column) != ANSWERS[case.name][column] for case in CASES)


def element_bytes(d, tokens=2 * 8 * 1024, itemsize=2):
    return tokens * d * itemsize


LOG_SUM_EXP = 2 * 8 * 1024 * 4


@pytest.mark.parametrize("version", VERSIONS)
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
    ],
)
def test_bytes_that_a_kernel_saves(version, case, kernel, kept):
    gpu = Gpu(torch=version)
    assert attention_kernel(call_of(case, gpu)) == kernel
    assert kept_bytes(case, gpu) == kept


def test_memory_efficient_attention_saves_a_mask_with_padded_rows():
    """A mask of 63 keys is copied into rows of 64; its log-sum-exps are padded to 64 as well."""
    case = Case(dtype="fp32", mask="float", queries=63)
    rows = 2 * 8 * 63
    assert kept_bytes(case, Gpu()) == 4 * rows * 64 * 4 + 2 * 8 * 64 * 4 + 63 * 64 * 4


def test_fallback_saves_the_scores():
    case = Case(d=63, dtype="fp32")
    assert attention_kernel(call_of(case, Gpu())) == "math"
    assert kept_bytes(case, Gpu()) > 2 * 8 * 1024 * 1024 * 4


def test_kernel_depends_on_the_gpu():
    """An A100 runs no kernel of cuDNN, so a mask and grouped queries together get none there."""
    case = Case(mask="float", kv_heads=2)
    kernels = [attention_kernel(call_of(case, Gpu(c))) for c in ((8, 0), (9, 0))]
    assert kernels == ["math", "cudnn"]
    assert kept_bytes(case, Gpu((8, 0))) > 4 * kept_bytes(case, Gpu((9, 0)))


@pytest.mark.parametrize("wrong", [{"capability": 9}, {"capability": (9.0, 0)}, {"torch": "2.13"}])
def test_gpu_rejects_what_is_not_two_whole_numbers(wrong):
    with pytest.raises(TypeError, match=f"{next(iter(wrong))} must be two whole numbers"):
        Gpu(**wrong)


@pytest.mark.parametrize("name", ["exact.md", "exact.zh.md"])
def test_documentation_counts_the_rules_and_the_calls(name):
    text = Path(__file__).parents[1].joinpath("docs", name).read_text("utf-8")
    confirmed = sum(rule.measured for rule in ATTENTION_RULES)
    counts = [len(ATTENTION_RULES), confirmed, len(ATTENTION_RULES) - confirmed, len(CASES)]
    paragraph = next(line for line in text.split("\n- ") if "ATTENTION_RULES" in line)
    assert [str(n) for n in counts if not re.search(rf"\b{n}\b", paragraph, re.ASCII)] == []


# ---- On a GPU


def this_gpu():
    if (torch.backends.cudnn.version() or 0) <= 91_500:
        pytest.skip("cuDNN is older than that of PyTorch's wheels for CUDA 13")
    return Gpu(torch.cuda.get_device_capability())


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_this_gpu_runs_the_kernel_of_the_rules_and_saves_its_bytes(case):
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
