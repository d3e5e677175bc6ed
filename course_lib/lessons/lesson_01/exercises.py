"""The exercises of lesson 01."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any

import torch

from course_lib._torch.tensors import tree_leaves
from course_lib.labels import verbatim
from course_lib.lessons.ledger import LAYER_BYTES
from course_lib.lessons.ledger import PARAMETERS as WEIGHTS
from course_lib.memory import MemoryMeter, symbolic
from course_lib.models import Decoder, random_tokens
from course_lib.teaching import Verdict
from course_lib.teaching.exercises import (
    Messages,
    cases,
    draw_case,
    each,
    exercise,
    largest,
    not_answered,
    numbers,
    throughout,
)

say = Messages(__file__)

# Bytes of a step


def _roundings(count: int) -> tuple[int, ...]:
    """Return a number of bytes rounded to 10^3, to 10^4, to 10^5 and to 10^6."""
    return tuple(round(count, -digits) for digits in range(3, 7))


#: Mistake -> number of weights that it leaves out, for h = 256. The vocabulary is 8h, so the word
#: embedding has 8h² weights, as many as one h × h matrix in each of the eight layers.
_MISSING = {
    "biases": 8 * 9 * 256,
    "norms_of_layers": 8 * 4 * 256,
    "biases_and_norms": 8 * 13 * 256,
    "words_or_matrix": 2048 * 256,
    "positions": 128 * 256,
    "last_norm": 2 * 256,
    "half_of_each_norm": 17 * 256,
    "half_of_layers_norms": 16 * 256,
    "words_twice_or_matrix": -2048 * 256,
}


def _counts_with_mistakes() -> dict[str, dict[str, int]]:
    """Return a dict from one or two mistakes to the wrong number of weights that they give."""
    found: dict[int, str] = {}
    for names in chain(combinations(_MISSING, 1), combinations(_MISSING, 2)):
        found.setdefault(WEIGHTS - sum(_MISSING[name] for name in names), " ".join(names))
    return {names: {"weights": count} for count, names in found.items() if count != WEIGHTS}


#: Kind of memory -> its bytes
_KINDS = {"parameter": 4 * WEIGHTS, "gradient": 4 * WEIGHTS, "optimizer": 8 * WEIGHTS}


@numbers(
    _counts_with_mistakes()
    | {
        "not_bytes": {"weights": 4 * WEIGHTS},
        "rounded": {kind: _roundings(count) for kind, count in _KINDS.items()},
        "count": {"parameter": WEIGHTS, "gradient": WEIGHTS, "optimizer": 2 * WEIGHTS},
        "two_bytes": {"parameter": 2 * WEIGHTS, "gradient": 2 * WEIGHTS},
        "two_numbers": {"parameter": 8 * WEIGHTS, "gradient": 8 * WEIGHTS},
        "per_sequence": {"gradient": 4 * 8 * WEIGHTS},
        "one_number": {"optimizer": 4 * WEIGHTS},
        "master_weights": {"optimizer": 12 * WEIGHTS},
        "all_kinds": {"optimizer": 16 * WEIGHTS},
    },
    also={"optimizer": 8 * WEIGHTS + 400},  # Adam's step counters may be included
    in_bytes=_KINDS,
    hint_below="hint_on_bytes",
)
def check_training_state() -> dict[str, int]:
    """Check the learner's count of the decoder's weights, and of the bytes of its training state.

    The training state has three parts: weights, gradients and Adam's state. The decorated function
    computes the right answer, and the decorator `numbers` turns it into a check.
    """
    return {"weights": WEIGHTS, **_KINDS}


# Bytes of a tensor (b, s, h), of the statistics of a LayerNorm, and of the logits
_WIDTH, _STATISTICS, _LOGITS = 4 * 8 * 128 * 256, 8 * 8 * 128, 4 * 8 * 128 * 2048
_NORM_AND_HEAD = 2 * _WIDTH + _STATISTICS


@numbers(
    {
        "rounded": each(_roundings),
        "elements": each(lambda count: count // 4),
        "weights_alone": {"state": 4 * WEIGHTS},
        "adam_alone": {"state": 8 * WEIGHTS},
        "gradients": {"state": (16 * WEIGHTS, 16 * WEIGHTS + 400)},
        "one_layer": {"layers": LAYER_BYTES},
        "whole_decoder": {"layers": 8 * LAYER_BYTES + _NORM_AND_HEAD + _LOGITS + 16_452},
        "no_probabilities": {"layers": 8 * (LAYER_BYTES - 4 * 8 * 8 * 128**2)},
        "no_layer_statistics": {"layers": 8 * (LAYER_BYTES - 2 * _STATISTICS)},
        "one_input": {"norm and head": _WIDTH},
        "norm_weights": {"norm and head": _NORM_AND_HEAD + 2 * 4 * 256},
        "same_tensor": {"norm and head": (3 * _WIDTH, 3 * _WIDTH + _STATISTICS)},
        "no_norm_statistics": {"norm and head": 2 * _WIDTH},
        "one_of_two_inputs": {"norm and head": _WIDTH + _STATISTICS},
        "batch": {
            "norm and head": tuple(
                _NORM_AND_HEAD + size for size in (8_256, 8_192, 8_196, 16_448, 16_452)
            )
        },
        "log_softmax": {
            "norm and head": tuple(_NORM_AND_HEAD + _LOGITS + size for size in (0, 16_452))
        },
        "one_tensor": {"logits": _LOGITS},
        "two_tensors": {"logits": 2 * _LOGITS},
        "logits_themselves": {"logits": 4 * _LOGITS},
    },
    # Adam's step counters are left out; the loss and its gradient are included
    also={"state": 12 * WEIGHTS, "logits": 3 * _LOGITS + 8},
    in_bytes=True,
)
def check_whole_peak() -> dict[str, int]:
    """Check the learner's four byte counts whose sum is the peak of the decoder's training step.

    The sum does not include the loss and its gradient, which are two scalars of 4 bytes each. The
    decorated function computes the right answer, and the decorator `numbers` turns it into a check.
    """
    return {
        "state": 12 * WEIGHTS + 400,
        "layers": 8 * LAYER_BYTES,
        "norm and head": _NORM_AND_HEAD,
        "logits": 3 * _LOGITS,
    }


_FROZEN, _TRAINED = 7 * 10**9, 2 * 10**7


@numbers(
    {
        "rounded": 14_300_000_000,
        "frozen_alone": 2 * _FROZEN,
        "adapters_alone": 16 * _TRAINED,
        "state_of_frozen": (
            16 * _FROZEN,
            16 * (_FROZEN + _TRAINED),
            14 * _FROZEN + 16 * _TRAINED,
        ),
        "frozen_in_fp32": 4 * _FROZEN + 16 * _TRAINED,
        "few_bytes_per_trained": tuple(2 * _FROZEN + size * _TRAINED for size in (2, 4, 8, 12)),
    },
    in_bytes=True,
)
def check_adapter_bytes() -> int:
    """Check the learner's bytes of weights, gradients and Adam's state for a model with adapters.

    The model's 7e9 weights are in bf16 and frozen. The adapters have 2e7 weights, which are trained
    in fp32. The decorated function computes the right answer, and the decorator `numbers` turns it
    into a check.
    """
    return 2 * _FROZEN + 16 * _TRAINED


# A straight line through two measured peaks gives a wrong size if one of the two is the peak of a
# single sequence: sizes 1 and 8 give 51, and sizes 1 and 4 give 54.
@largest(
    range(1, 10_001),
    1_300_000_000,
    {"one_sequence": (51, 54), "first_steps": 52, "sum_of_kinds": 53},
)
def check_largest_batch(batch: int) -> int:
    """Check the learner's answer: the largest batch whose training step needs at most 1,300 MB.

    The decorated function returns the step's peak in bytes for a batch size. The decorator
    `largest` turns it into a check.
    """
    with symbolic():
        model = Decoder(vocabulary=2048, hidden=256, heads=8, layers=8, sequence=128)
        adam = torch.optim.Adam(model.parameters())
        tokens = random_tokens(batch, 128, 2048)
        for _ in range(2):  # in the second step Adam's state exists from the start
            model.zero_grad()
            with MemoryMeter(model, adam) as meter:
                model.loss(tokens).backward()
                adam.step()
    return meter.peak_bytes


# Formulas for the bytes that one layer keeps for backward

#: Rows that the learner fills in
_OPEN_ROWS = ("attention", "probabilities", "feed-forward")
#: Mistakes that are possible in each row
_EACH_ROW = {
    "empty": each(lambda count, *_: 0),
    "one_sequence": each(lambda count, b, *_: count // b),
    "elements": each(lambda count, *_: count // 4),
}


def _gpt_rows(b: int, s: int, h: int, a: int) -> dict[str, int]:
    return {
        "norms": 8 * s * b * h,
        "statistics": 16 * s * b,
        "attention": 20 * s * b * h,
        "probabilities": 4 * a * s * s * b,
        "feed-forward": 36 * s * b * h,
    }


def _draw_gpt(rng: random.Random) -> tuple[int, ...]:
    a = rng.randint(3, 9)
    return rng.randint(2, 9), rng.randint(20, 60), a * rng.randint(5, 15), a


@numbers(
    {
        "halved": throughout(each(lambda count, *_: count // 2)),
        "one_norm": lambda b, s, h, a: {"norms": 4 * s * b * h},
        "outputs_of_norms": lambda b, s, h, a: {"norms": 16 * s * b * h},
        "half_of_statistics": lambda b, s, h, a: {"statistics": 8 * s * b},
        "per_feature": lambda b, s, h, a: {"statistics": 16 * h},
        "one_matrix": lambda b, s, h, a: {"probabilities": (4 * s * s * b, 4 * s * s)},
        "times_h": lambda b, s, h, a: {"probabilities": 4 * h * s * s * b},
        "two_matrices": lambda b, s, h, a: {"probabilities": 8 * a * s * s * b},
        "half_of_matrix": lambda b, s, h, a: {"probabilities": 2 * a * s * s * b},
        "triangle": lambda b, s, h, a: {"probabilities": 2 * a * s * (s + 1) * b},
        "no_inputs": lambda b, s, h, a: {"attention": 12 * s * b * h},
        "four_of_five": lambda b, s, h, a: {"attention": 16 * s * b * h},
        "times_a": lambda b, s, h, a: {
            "attention": tuple(4 * n * s * b * h for n in (5 * a, 2 + 3 * a, 1 + 4 * a))
        },
        "six": lambda b, s, h, a: {"attention": 24 * s * b * h},
        "input_three_times": lambda b, s, h, a: {"attention": 28 * s * b * h},
        "own_row": lambda b, s, h, a: {"attention": 20 * s * b * h + 4 * a * s * s * b},
        "width": lambda b, s, h, a: {
            "feed-forward": tuple(4 * width * s * b * h for width in (3, 5, 6))
        },
        "own_input": lambda b, s, h, a: {"feed-forward": 32 * s * b * h},
        "result": lambda b, s, h, a: {"feed-forward": 40 * s * b * h},
        "twice": lambda b, s, h, a: {"feed-forward": 52 * s * b * h},
        "weights": lambda b, s, h, a: {
            "norms": 8 * s * b * h + 16 * h,
            "attention": 20 * s * b * h + 16 * h * h,
            "feed-forward": 36 * s * b * h + 32 * h * h,
        },
        "two_bytes": lambda b, s, h, a: {
            "attention": 10 * s * b * h,
            "feed-forward": 18 * s * b * h,
        },
        **_EACH_ROW,
    },
    # The second case is the lesson's layer, in which b equals a, so that a formula with these two
    # letters swapped gives the right numbers.
    cases=lambda: cases([(7, 44, 70, 5), (8, 128, 256, 8)], _draw_gpt),
    blank=lambda given, *sizes: given == _gpt_rows(*sizes) | dict.fromkeys(_OPEN_ROWS, 0),
    elsewhere="some_sizes",
)
def check_layer_formula(b: int, s: int, h: int, a: int) -> dict[str, int]:
    """Check the learner's function for the bytes that a decoder layer saves for backward.

    The learner's function and this one return a dict from the kind of tensor, such as "attention",
    to bytes. The decorator `numbers` turns this function into a check.

    Args:
        b, s, h, a: Batch size, sequence length, hidden size and number of heads.
    """
    return _gpt_rows(b, s, h, a)


def _draw_llama(rng: random.Random) -> tuple[int, ...]:
    n = rng.randint(2, 4)
    a = n * rng.randint(2, 5)
    return (*_draw_gpt(rng)[:2], a * rng.randint(5, 15), a, n, rng.randint(20, 90))


def _is_unchanged(given: Any, b: int, s: int, h: int, a: int, *_: int) -> bool:
    """Return whether every row of an answer is still 0, or still the formula of exercise 3."""
    rows = _gpt_rows(b, s, h, a)
    return (
        isinstance(given, Mapping)
        and given.get("norms") == rows["norms"]
        and all(given.get(row, 1) in (0, count) for row, count in rows.items())
    )


@numbers(
    {
        "halved": throughout(each(lambda count, *_: count // 2)),
        "old_row one_tensor_per_norm": lambda b, s, h, *_: {"norms": 8 * s * b * h},
        "old_row two_statistics": lambda b, s, *_: {"statistics": 16 * s * b},
        "old_row as_many_heads": lambda b, s, h, *_: {"attention": 20 * s * b * h},
        "old_row p": lambda b, s, h, a, *_: {"probabilities": 4 * a * s * s * b},
        "old_row other_operators": lambda b, s, h, *_: {"feed-forward": 36 * s * b * h},
        "three_tensors_per_norm": lambda b, s, h, *_: {"norms": 24 * s * b * h},
        "one_norm_of_two": lambda b, s, *_: {"statistics": 4 * s * b},
        "one_of_k_and_v": lambda b, s, h, a, n, f: {"attention": 4 * s * b * (3 * h + n * h // a)},
        "two_of_three": lambda b, s, h, a, n, f: {
            "attention": 4 * s * b * (2 * h + 2 * n * h // a)
        },
        "y_three_times": lambda b, s, h, a, n, f: {
            "attention": 4 * s * b * (5 * h + 2 * n * h // a)
        },
        "one_too_many": lambda b, s, h, a, n, f: {
            "attention": 4 * s * b * (4 * h + 2 * n * h // a)
        },
        "rotated_twice": lambda b, s, h, a, n, f: {
            "attention": 4 * s * b * (4 * h + 3 * n * h // a)
        },
        "heads_as_numbers": lambda b, s, h, a, n, f: {"attention": 4 * s * b * (3 * h + 2 * n)},
        "per_query": lambda b, s, *_: {"probabilities": 4 * s * b},
        "heads_of_k": lambda b, s, h, a, n, f: {"probabilities": 4 * n * s * b},
        "own_input": lambda b, s, h, a, n, f: {"feed-forward": 16 * s * b * f},
        "input_twice": lambda b, s, h, a, n, f: {"feed-forward": 4 * s * b * (2 * h + 4 * f)},
        "three_of_four": lambda b, s, h, a, n, f: {"feed-forward": 4 * s * b * (h + 3 * f)},
        "two_of_four": lambda b, s, h, a, n, f: {"feed-forward": 4 * s * b * (h + 2 * f)},
        "five_of_four": lambda b, s, h, a, n, f: {"feed-forward": 4 * s * b * (h + 5 * f)},
        "weights": lambda b, s, h, a, n, f: {
            "norms": 16 * s * b * h + 8 * h,
            "feed-forward": 4 * s * b * (h + 4 * f) + 12 * h * f,
        },
        "two_bytes": lambda b, s, h, a, n, f: {
            "attention": 2 * s * b * (3 * h + 2 * n * h // a),
            "probabilities": 2 * a * s * b,
            "feed-forward": 2 * s * b * (h + 4 * f),
        },
        **_EACH_ROW,
    },
    cases=lambda: cases([(3, 44, 70, 10, 2, 50), (8, 128, 256, 8, 2, 896)], _draw_llama),
    blank=_is_unchanged,
    elsewhere="some_sizes",
)
def check_llama_formula(b: int, s: int, h: int, a: int, n: int, f: int) -> dict[str, int]:
    """Check the learner's function for the bytes that a Llama layer saves for backward.

    The learner's function and this one return a dict from the kind of tensor, such as "attention",
    to bytes. The decorator `numbers` turns this function into a check.

    Args:
        b, s, h, a: Batch size, sequence length, hidden size and number of query heads.
        n, f: Number of key-value heads, and inner width of the feed-forward network.
    """
    return {
        "norms": 16 * s * b * h,
        "statistics": 8 * s * b,
        "attention": 4 * s * b * (3 * h + 2 * n * h // a),
        "probabilities": 4 * a * s * b,
        "feed-forward": 4 * s * b * (h + 4 * f),
    }


def storages(values: Any) -> dict[int, torch.UntypedStorage]:
    """Return the storages of all tensors in nested lists, tuples and dicts, each storage once.

    Returns:
        Dict from an integer that identifies a storage to the storage.
    """
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    found = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage for storage in found}


@dataclass(frozen=True)
class _Case:
    """Code that runs under the learner's meter; its variables exist until the meter is read.

    Attributes:
        code: Statements on one line, because messages show the code.
        live, peak: Correct numbers of bytes at the end, and at the peak.
        before: Code that runs before the meter starts.
    """

    code: str
    live: int
    peak: int
    before: str = ""


_NEW = _Case("x = torch.empty(100)", 400, 400)
# Only the storage stays alive, not the tensor that was created first.
_A_VIEW = _Case("x = torch.empty(100).view(10, 10).t()[1:].detach()", 400, 400)
# The old tensor is released after the new one was created.
_REPLACED = _Case("x = torch.empty(100); x = x * 2; x = x * 2", 400, 800)
# A value and its index have two storages. The input is released.
_TWO_RESULTS = _Case("value, index = torch.empty(100).max(0)", 12, 412)
_EVERY_FOURTH = _Case("x = torch.empty_strided((10,), (4,))", 148, 148)
_QKV = _Case(
    "q, k, v = torch._transform_bias_rescale_qkv(torch.empty(1, 5, 12), torch.empty(12), 2)",
    240,
    528,
)
# Hundreds of storages are released, so some of the new storages certainly reuse an address.
_USED_AGAIN = _Case(
    "x = [torch.empty(100) for _ in range(300)]; del x; x = [torch.empty(100) for _ in range(300)]",
    120_000,
    120_000,
)
#: Test case -> key of the message for a meter that counts this case wrongly
_ARGUMENTS = {
    _Case("x = torch.empty(100); x.add_(1); x.add_(1)", 400, 400): "common.in_place",
    _Case("x, y = torch.empty(100), torch.empty(100); torch.neg(x, out=y)", 800, 800): "common.out",
    _Case("y = x.view(10, 10)", 0, 0, before="x = torch.empty(100)"): "common.earlier_tensor",
}


def _draw_meter_cases(rng: random.Random) -> dict[_Case, str]:
    """Return test cases with new, viewed and released storages of a random size."""
    n = rng.randint(200, 900)
    code = f"x = torch.empty({n}); y = x.view(-1, 1); z = x * 2; w = x + z; del w"
    return {_Case(code, 8 * n, 12 * n): "common.released"}


def _run_under_meter(meter: Any, case: _Case) -> tuple[int, int]:
    """Run the code of a case under a meter; return the meter's live bytes and peak."""
    names: dict[str, Any] = {"torch": torch}
    exec(case.before, names)
    with meter:
        exec(case.code, names)
        return meter.live, meter.peak


def _reject_wrong_counts(answer: Any, cases: Mapping[_Case, str]) -> None:
    """Reject a meter that counts a case wrongly, with the message of the first such case."""
    # This case comes first, because it always detects a meter that never forgets an address. Such
    # a meter misses new storages at old addresses. No other mistake counts too few bytes here. In
    # the other cases, addresses are reused only by chance.
    live, peak = _run_under_meter(answer(), _USED_AGAIN)
    if peak > 0 and 0 <= live < _USED_AGAIN.live:
        _reject_counts(_USED_AGAIN, live, peak, "common.used_again")
    for case, reason in {**cases, **draw_case({}, _draw_meter_cases)}.items():
        live, peak = _run_under_meter(answer(), case)
        if (live, peak) != (case.live, case.peak):
            gone = case is _A_VIEW and live < case.live
            _reject_counts(case, live, peak, "common.storage_alive" if gone else reason)


def _reject_counts(case: _Case, live: int, peak: int, reason: str) -> None:
    right = {"right": case.live, "most": case.peak}
    values = {"code": verbatim(case.code), "live": live, "peak": peak, "reason": say(reason)}
    say.reject("common.counts", **values, **right)


@exercise()
def check_new_storages(answer: Any) -> Verdict:
    """Check the learner's condition by which a memory meter detects new storages.

    A storage is new if the meter has not counted it yet. The meter must count each storage once.

    Args:
        answer: Class of a meter that uses this condition. Instances have the attributes `live` and
            `peak`, in bytes.
    """
    new, view = _run_under_meter(answer(), _NEW), _run_under_meter(answer(), _A_VIEW)
    if new == view == (0, 0):
        return not_answered()
    say.reject_if(new == (0, 0), "new_storages.of_arguments")
    # A wrong condition can only leave out a storage or count it twice.
    views = {_A_VIEW: "new_storages.view"}
    results = {_REPLACED: "new_storages.result", _TWO_RESULTS: "new_storages.several"}
    _reject_wrong_counts(answer, views | _ARGUMENTS | results)
    return say.right("new_storages.right")


@exercise()
def check_meter(answer: Any) -> Verdict:
    """Check the learner's memory meter, a dispatch mode that counts the bytes of live storages.

    Args:
        answer: Class of the meter. Instances have the attributes `live` and `peak`, in bytes.
    """
    if _run_under_meter(answer(), _A_VIEW) == (0, 0):
        return not_answered()
    results = {
        _REPLACED: "common.released",
        _TWO_RESULTS: "meter.several",
        _EVERY_FOURTH: "meter.own_bytes",
        _QKV: "meter.shared",
    }
    _reject_wrong_counts(answer, {_A_VIEW: "meter.view"} | _ARGUMENTS | results)
    return say.right("meter.right")
