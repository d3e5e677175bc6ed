"""The engine of exercises: tables of mistakes, messages in both languages, and probes."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from course_lib import lessons
from course_lib.labels import LabelError, in_both_languages
from course_lib.teaching.exercises import Messages, each, exercise, largest, numbers, throughout
from course_lib.teaching.exercises.messages import read
from course_lib.teaching.exercises.probes import is_close, reject_mistakes, run_forward
from course_lib.teaching.exercises.verdicts import WrongAnswer

FOLDER = Path(lessons.__file__).parent
FILES = sorted(FOLDER.glob("*/messages.toml"))

pytestmark = pytest.mark.usefixtures("fresh")


# The lessons' messages
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_exercise_messages_are_in_two_languages(file):
    english, chinese = zip(*read(file).values(), strict=True)
    assert not any(re.search("[\u3400-\u9fff]", words) for words in english)
    assert all(re.search("[\u3400-\u9fff]", words) for words in chinese)


@pytest.fixture
def define(tmp_path):
    """Return a function that writes messages and returns the names that a source defines."""

    def define(messages, source="", **names):
        (tmp_path / "messages.toml").write_text(messages, "utf-8")
        path = tmp_path / "checks.py"
        path.write_text(source, "utf-8")
        names |= {
            "numbers": numbers,
            "largest": largest,
            "exercise": exercise,
            "each": each,
            "throughout": throughout,
            "say": Messages(path),
        }
        exec(compile(source, str(path), "exec"), names)
        return SimpleNamespace(**names)

    return define


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ('[a.b]\nen = "x"', "message a.b of .* must have `en` and `zh`"),
        ('[a.b]\nen = "x"\nzh = ""', "must have `en` and `zh`"),
        ('[a.b]\nen = "{n} x"\nzh = "{m} 甲"', "the same placeholders"),
    ],
)
def test_incomplete_message_file_raises_label_error(define, messages, problem):
    with pytest.raises(LabelError, match=problem):
        define(messages)


def test_unknown_message_or_placeholder_raises_label_error(define):
    say = define('[a.b]\nen = "{n} x"\nzh = "{n} 甲"').say
    assert in_both_languages(say("a.b", n=3)) == ("3 x", "3 甲")
    with pytest.raises(LabelError, match=r"has no message 'a\.c'"):
        say("a.c")
    with pytest.raises(LabelError, match="placeholders"):
        say("a.b", m=3)


def test_wrong_number_matching_two_mistakes_gets_first_mistakes_message(define):
    say = define('[a]\nm = {en = "m", zh = "甲"}\nn = {en = "n", zh = "乙"}').say
    assert say.reasons("a", {"m": (1, 2.5), "n": (2.5, 3)}) == {1: "m", 2.5: "m", 3: "n"}


# Tables of mistakes
# --------------------------------------------------------------------------------------------------


MESSAGES = """
[rows]
hint = {en = "hint", zh = "提示"}
right = {en = "Right.", zh = "正确。"}
double = {en = "You doubled it.", zh = "翻倍了。"}
swapped = {en = "You swapped them.", zh = "换了。"}
[area]
hint = {en = "hint", zh = "提示"}
right = {en = "Right.", zh = "正确。"}
other = {en = "{sides}: not {given:g} but {wanted}.", zh = "{sides}：是 {wanted}，不是 {given:g}。"}
[size]
hint = {en = "hint", zh = "提示"}
right = {en = "Right: {here}, then {above}.", zh = "对：{here}，{above}。"}
not_a_size = {en = "No size.", zh = "不是大小。"}
zero = {en = "It fits always.", zh = "总放得下。"}
"""
CHECKS_SOURCE = """
@numbers(
    {"swapped": lambda n: {"a": n + 5, "b": n}, "double": each(lambda count, n: 2 * count)},
    cases=(3, 7),
)
def check_rows(n):
    return {"a": n, "b": n + 5}

@numbers(
    {}, cases=([2, 3], [4, 5]), blank=(None, 0), otherwise="other", in_bytes=True
)
def check_area(sides):
    return sides[0] * sides[1]

@largest(range(10), 40, {"zero": 0})
def check_size(size):
    return 10 * size
"""


@pytest.fixture
def checks(define):
    """Return the checks of a table of rows, of one number, and of a largest size."""
    return define(MESSAGES, CHECKS_SOURCE)


def test_verdict_on_wrong_dictionary_names_input_key_and_mistake(checks):
    check = checks.check_rows
    assert check(lambda n: {"a": n, "b": n + 5})
    wrong = check(lambda n: {"a": n + 5 * (n == 7), "b": n + 5 - 5 * (n == 7)})
    assert "n = 7" in wrong.message and "`a`" in wrong.message and "swapped" in wrong.message
    assert "doubled" in check(lambda n: {"a": n, "b": 2 * n + 10}).message
    for incomplete in ({}, {"a": 3}, {"a": 3, "b": 8, "c": 0}):
        assert "keys `a`, `b`" in check(lambda n, rows=incomplete: rows).message
    assert check(lambda n: {"a": None, "b": None}).message == "Not answered yet."
    assert "returns None for n = 7" in check(lambda n: {3: {"a": 3, "b": 8}}.get(n)).message
    assert check(lambda n: {"a": n + 1, "b": n + 5}).hint == "hint"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda sides: 20, "[2, 3]: not 20 but 6."),
        (lambda sides: (sides[0] - 2) * 10, "[2, 3]: not 0 but 6."),
        (lambda sides: 0.006, "For sides = [2, 3]: That is in kB. Give bytes."),
        (lambda sides: -(10**400), "[2, 3]: not -inf but 6."),
        (lambda sides: math.nan, "For sides = [2, 3]: Expected one number, got a `nan`."),
        (lambda sides: next(iter(())), "It raised StopIteration()."),
        (lambda sides: 0, "Not answered yet."),
        (lambda sides: 6 if sides == [2, 3] else None, "returns None for sides = [4, 5]"),
    ],
)
def test_verdict_on_wrong_result_shows_arguments_and_correct_result(checks, answer, message):
    assert message in checks.check_area(answer).message


def test_message_about_wrong_answer_type_is_translated_to_chinese(checks):
    for answer in (lambda sides: b"6", b"6"):
        assert "`bytes`" in in_both_languages(checks.check_area(answer).message)[1]


FORMULA_MESSAGES = """
[formula]
hint = {en = "hint", zh = "提示"}
right = {en = "Right.", zh = "正确。"}
one_size = {en = "{row}: right for {right}, not {wrong}.", zh = "{row}：{right} 对，{wrong} 不对。"}
halved = {en = "All halved.", zh = "全折半。"}
no_s = {en = "No s.", zh = "漏 s。"}
[common]
no_h = {en = "No h.", zh = "漏 h。"}
"""
FORMULA_SOURCE = """
@numbers(
    {
        "halved": throughout(each(lambda count, *_: count // 2)),
        "no_h": lambda s, h: {"bytes": 1000 * s},
        "no_s no_h": lambda s, h: {"bytes": 1000},
    },
    cases=((2, 8), (4, 6)),
    in_bytes=["bytes"],
    blank=lambda given, s, h: given == {"count": s, "bytes": 0},
    elsewhere="one_size",
)
def check_formula(s, h):
    return {"count": 10 * s, "bytes": 1000 * s * h}
"""


@pytest.mark.parametrize(
    ("count", "size", "message"),
    [
        ("10 * s", "1000 * s", "`bytes`: Not yet. No h."),
        ("10 * s", "1000", "`bytes`: Not yet. No s. No h."),
        ("5 * s", "500 * s * h", "Not yet. All halved."),
        ("5 * s", "1000 * s * h", "`count`: Not yet. The number is too small."),
        ("20", "1000 * s * h", "`count`: right for s = 2, h = 8, not s = 4, h = 6."),
        ("40", "1000 * s * h", "`count`: right for s = 4, h = 6, not s = 2, h = 8."),
        ("10 * s", "s * h", "`bytes`: That is in kB. Give bytes."),
        ("s / 100", "1000 * s * h", "`count`: Not yet. The number is too small."),
        ("s", "0", "Not answered yet."),
        ("[s]", "1000 * s * h", "`count`: Expected one number, got a `list`."),
    ],
)
def test_formula_verdict_names_wrong_key_missing_variable_or_failing_input(
    define, count, size, message
):
    check = define(FORMULA_MESSAGES, FORMULA_SOURCE).check_formula
    answer = eval(f"lambda s, h: {{'count': {count}, 'bytes': {size}}}")
    assert check(answer).message == message
    assert check(lambda s, h: {"count": 10 * s, "bytes": 1000 * s * h})
    assert "Return a dictionary with the keys" in check(lambda s, h: s).message


def test_mistake_message_omits_input_if_place_argument_is_empty(define):
    source = """
@numbers({"double": each(lambda count, *_: 2 * count)}, cases=("ab", "c"), place="")
def check_rows(word):
    return len(word)
"""
    check = define(MESSAGES, source).check_rows
    assert check(len) and check(lambda word: 2 * len(word)).message == "Not yet. You doubled it."
    assert "returns None for word = c" in check({"ab": 2}.get).message


def test_verdict_on_largest_fitting_size_shows_its_and_next_peak(checks):
    check = checks.check_size
    assert check(4) and check(4).message == "Right: 40, then 50."
    assert "fits as well" in check(3).message and "too large" in check(5).message
    assert "It fits always" in check(0).message and check(77).message == "No size."
    assert check(3).hint == "hint" and check(77).hint is None


def test_listed_exception_shows_custom_message_of_exercise(define):
    messages = '[x]\nhint = {en = "h", zh = "提"}\nzero = {en = "Divided by 0.", zh = "除零。"}'
    source = '@exercise(errors={"division": "x.zero"})\ndef check_x(answer):\n    answer()'
    check = define(messages, source).check_x
    assert check(lambda: 1 / 0).message == "Divided by 0."
    assert "KeyError" in check(lambda: {}[1]).message


# Probes
# --------------------------------------------------------------------------------------------------


def test_is_close_compares_values_shapes_and_nan_elementwise():
    one = torch.ones(3)
    assert is_close([one, 1.0], [one + 1e-7, 1.0]) and is_close(2.0, 2.0 + 1e-9)
    assert not is_close([one, None], [one, one]) and not is_close([one], [one, one])
    assert not is_close(torch.ones(1, 3), one) and not is_close(1.0, 1.1)
    nan = [one, torch.full((2,), torch.nan)]
    assert is_close(nan, nan, equal_nan=True) and not is_close(nan, nan)


@pytest.mark.parametrize(("within", "message"), [(None, "m"), ("a.in", "It is m.")])
def test_answer_with_listed_mistake_raises_message_of_that_mistake(define, within, message):
    say = define(
        '[a]\nm = {en = "m", zh = "甲"}\nin = {en = "It is {reason}.", zh = "是{reason}。"}'
    ).say
    reject_mistakes(say, 1.0, {"a.m": (2.0, 3.0)})
    with pytest.raises(WrongAnswer) as error:
        reject_mistakes(say, 3.0, {"a.m": (2.0, 3.0)}, within=within)
    assert error.value.verdict.message == message and error.value.verdict.exact


def test_run_forward_counts_live_bytes_except_output():
    keep = []
    output, kept = run_forward(lambda x: keep.append(x * 2) or x + 1, torch.ones(100))
    assert output.shape == (100,) and kept == 400
    with pytest.raises(NotImplementedError):
        run_forward(lambda x: None, torch.ones(1))
