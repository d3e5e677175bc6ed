"""The engine of exercises: tables of mistakes, messages in both languages, and probes."""

import ast
import math
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from answers import CHECKS, TABLES

from course_lib import labels, lessons
from course_lib.labels import LabelError, in_both_languages
from course_lib.teaching.exercises import Messages, each, exercise, largest, numbers, throughout
from course_lib.teaching.exercises.messages import read
from course_lib.teaching.exercises.probes import is_close, refuse_mistakes, run_forward
from course_lib.teaching.exercises.verdicts import WrongAnswer

FOLDER = Path(lessons.__file__).parent
FILES = sorted(FOLDER.glob("*/messages.toml"))

pytestmark = pytest.mark.usefixtures("fresh")


# The lessons' messages
# --------------------------------------------------------------------------------------------------


def names_in(file):
    """Yield the strings in the code of a lesson, and the words of those that only name messages."""
    messages = {name.partition(".")[2] for name in read(file)}
    for path in file.parent.glob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
                if messages.issuperset(words := node.value.split()):
                    yield from words


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_each_message_is_used_and_belongs_to_an_exercise(file):
    used, number = set(names_in(file)), file.parent.name[-2:]
    # the check of the reader's own model has no exercise
    tables = {name[3:] for name in [*CHECKS, "09.slots"] if name[:2] == number} | {"common"}
    of_all = {"hint", "later_hint", "right", "raised", "keys", "not_a_size"}
    unused = [
        name
        for name in read(file)
        if name not in used and name.partition(".")[2] not in used | of_all
    ]
    assert unused == []
    assert {name.partition(".")[0] for name in read(file)} <= tables


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_messages_are_in_two_languages_and_stand_once(file):
    english, chinese = zip(*read(file).values(), strict=True)
    assert len(set(english)) == len(english), "a message of several exercises is in `common`"
    assert not any(re.search("[\u3400-\u9fff]", words) for words in english)
    assert all(re.search("[\u3400-\u9fff]", words) for words in chinese)
    assert set(english).isdisjoint(labels.catalog()), "in the catalog as well"


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        ('[a.b]\nen = "x"', "message a.b of .* must have `en` and `zh`"),
        ('[a.b]\nen = "x"\nzh = ""', "must have `en` and `zh`"),
        ('[a.b]\nen = "{n} x"\nzh = "{m} 甲"', "the same placeholders"),
    ],
)
def test_message_without_a_language_is_an_error(tmp_path, written, complaint):
    (tmp_path / "messages.toml").write_text(written, "utf-8")
    with pytest.raises(LabelError, match=complaint):
        Messages(tmp_path / "exercises.py")


def test_unknown_message_or_wrong_values_are_errors(tmp_path):
    (tmp_path / "messages.toml").write_text('[a.b]\nen = "{n} x"\nzh = "{n} 甲"', "utf-8")
    say = Messages(tmp_path / "exercises.py")
    assert in_both_languages(say("a.b", n=3)) == ("3 x", "3 甲")
    with pytest.raises(LabelError, match=r"has no message 'a\.c'"):
        say("a.c")
    with pytest.raises(LabelError, match="placeholders"):
        say("a.b", m=3)


def test_reasons_are_messages_by_wrong_number_and_the_first_mistake_counts(tmp_path):
    (tmp_path / "messages.toml").write_text(
        '[a]\nm = {en = "m", zh = "甲"}\nn = {en = "n", zh = "乙"}', "utf-8"
    )
    say = Messages(tmp_path / "exercises.py")
    assert say.reasons("a", {"m": (1, 2.5), "n": (2.5, 3)}) == {1: "m", 2.5: "m", 3: "n"}


# Tables of mistakes
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
def test_each_mistake_of_a_table_is_told_its_own_message(name):
    """So no two mistakes give the same numbers, and no mistake the right ones."""
    check, told = TABLES[name], {}
    for answer, message in check.wrong_answers():
        verdict = check(answer)
        assert not verdict, f"the mistake of {message!r} gives the right numbers"
        assert message in verdict.message, f"{message!r} has the numbers of another mistake"
        told.setdefault(message, verdict)
    assert len(told) == len(check.mistakes)


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


@pytest.fixture
def made(tmp_path):
    """Return the checks of a small module: a table of rows, one number, and a largest size."""
    (tmp_path / "messages.toml").write_text(MESSAGES, "utf-8")
    source = """
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

@largest(range(10), 42, {"zero": 0})
def check_size(size):
    return 10 * size
"""
    path = tmp_path / "made.py"
    path.write_text(source, "utf-8")
    names = {"numbers": numbers, "each": each, "largest": largest}
    exec(compile(source, str(path), "exec"), names)
    return names["check_rows"], names["check_area"], names["check_size"]


def test_table_with_rows_and_cases_names_case_row_and_mistake(made):
    check, *_ = made
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
    ("mistakes", "options"), [({"dubble": 6}, {}), ({}, {"otherwise": "dubble"})]
)
def test_misspelt_name_of_a_message_is_an_error_where_the_exercise_is_defined(
    made, mistakes, options
):
    compute = made[0].__wrapped__
    with pytest.raises(LabelError, match="'dubble' must be a message of 'rows' or `common`"):
        numbers(mistakes, **options)(compute)


def test_number_that_no_mistake_explains_is_shown_beside_the_right_one(made):
    _, check, _ = made
    for answer, message in (
        (lambda sides: 20, "[2, 3]: not 20 but 6."),
        (lambda sides: (sides[0] - 2) * 10, "[2, 3]: not 0 but 6."),
        (lambda sides: 0.006, "For sides = [2, 3]: That is in kB. Give bytes."),
        (lambda sides: 10**400, "[2, 3]: not inf but 6."),
        (lambda sides: -(10**400), "[2, 3]: not -inf but 6."),
        (lambda sides: "6", "For sides = [2, 3]: Expected one number, got a `str`."),
        (lambda sides: math.nan, "For sides = [2, 3]: Expected one number, got a `nan`."),
        (lambda sides: next(iter(())), "It raised StopIteration()."),
        (lambda sides: 0, "Not answered yet."),
    ):
        assert check(answer).message == message
    for answer in (lambda sides: b"6", b"6"):  # the name of a type is the same in Chinese
        assert "`bytes`" in in_both_languages(check(answer).message)[1]
    once = check(lambda sides: 6 if sides == [2, 3] else None)
    assert "returns None for sides = [4, 5]" in once.message


FORMULA = """
[formula]
hint = {en = "hint", zh = "提示"}
right = {en = "Right.", zh = "正确。"}
one_size = {en = "{row}: right for {right}, not {wrong}.", zh = "{row}：{right} 对，{wrong} 不对。"}
halved = {en = "All halved.", zh = "全折半。"}
no_s = {en = "No s.", zh = "漏 s。"}
[common]
no_h = {en = "No h.", zh = "漏 h。"}
"""


@pytest.fixture
def formula(tmp_path):
    """Return the check of a function with rows, of which `bytes` is in bytes."""
    (tmp_path / "messages.toml").write_text(FORMULA, "utf-8")
    source = """
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
    path = tmp_path / "made.py"
    path.write_text(source, "utf-8")
    names = {"numbers": numbers, "each": each, "throughout": throughout}
    exec(compile(source, str(path), "exec"), names)
    return names["check_formula"]


def of_rows(count="10 * s", size="1000 * s * h"):
    return lambda s, h: {
        name: eval(row, {"s": s, "h": h, "torch": torch})
        for name, row in zip(("count", "bytes"), (count, size), strict=True)
    }


def test_table_of_formulas_names_mistakes_of_a_row_of_all_rows_and_of_one_case(formula):
    assert formula(of_rows()) and formula(of_rows(count="5 * s + 5 * s"))
    for answer, message in (
        (of_rows(size="1000 * s"), "`bytes`: Not yet. No h."),
        (of_rows(size="1000"), "`bytes`: Not yet. No s. No h."),
        (of_rows("5 * s", "500 * s * h"), "Not yet. All halved."),
        (of_rows(count="5 * s"), "`count`: Not yet. The number is too small."),
        (of_rows(count="20"), "`count`: right for s = 2, h = 8, not s = 4, h = 6."),
        (of_rows(count="40"), "`count`: right for s = 4, h = 6, not s = 2, h = 8."),
        (of_rows(size="s * h"), "`bytes`: That is in kB. Give bytes."),
        (of_rows(count="s / 100"), "`count`: Not yet. The number is too small."),
        (of_rows("s", "0"), "Not answered yet."),
        (of_rows("s", "1"), "`count`: Not yet. The number is too small."),
        (lambda s, h: s, "Return a dictionary with the keys `count`, `bytes`."),
        (lambda s, h: torch.ones(2), "Return a dictionary with the keys `count`, `bytes`."),
        (
            of_rows(count="torch.ones(2)"),
            "`count`: Expected one number, got a `Tensor`.",
        ),
    ):
        assert formula(answer).message == message


SECONDS = """
[seconds]
hint = {en = "hint", zh = "提示"}
right = {en = "Right: {worst:.2f}.", zh = "对：{worst:.2f}。"}
place = {en = "Case {n}: {message}", zh = "{n} 时：{message}"}
half = {en = "Half.", zh = "一半。"}
"""


def test_table_has_tolerances_of_cases_and_of_mistakes_and_measures_the_answer(tmp_path):
    (tmp_path / "messages.toml").write_text(SECONDS, "utf-8")
    source = """
@numbers(
    {"half": throughout(lambda n: n / 2, tolerance=0.1)},
    cases=[10, 1000],
    tolerance=lambda n: 0.5 if n == 10 else 0.01,
    place="place",
    within=lambda: entered.append(1) or nullcontext(),
    right_values=lambda answers: {"worst": max(abs(given / n - 1) for (n,), given in answers)},
)
def check_seconds(n):
    return n
"""
    (tmp_path / "made.py").write_text(source, "utf-8")
    names = {
        "numbers": numbers,
        "throughout": throughout,
        "nullcontext": nullcontext,
        "entered": [],
    }
    exec(compile(source, str(tmp_path / "made.py"), "exec"), names)
    check = names["check_seconds"]
    assert check(lambda n: n + 4) and check(lambda n: n + 4).message == "Right: 0.40."
    assert check(lambda n: n + 40).message == "Case 10: Not yet. The number is too large."
    assert check(lambda n: n * 1.4).message == "Case 1000: Not yet. The number is too large."
    assert check(lambda n: n * 0.46).message == "Not yet. Half."
    assert check(lambda n: n * 0.55 - 2).message == "Case 10: Not yet. The number is too small."
    assert len(names["entered"]) == 12


def test_table_of_cases_that_are_no_numbers_puts_no_case_before_a_mistake(tmp_path):
    (tmp_path / "messages.toml").write_text(MESSAGES, "utf-8")
    source = """
@numbers({"double": each(lambda count, *_: 2 * count)}, cases=("ab", "c"), place="")
def check_rows(word):
    return len(word)
"""
    (tmp_path / "made.py").write_text(source, "utf-8")
    names = {"numbers": numbers, "each": each}
    exec(compile(source, str(tmp_path / "made.py"), "exec"), names)
    check = names["check_rows"]
    assert check(len) and check(lambda word: 2 * len(word)).message == "Not yet. You doubled it."
    assert "returns None for word = c" in check({"ab": 2}.get).message


def test_largest_size_names_the_peaks_of_the_answer_and_of_the_next_size(made):
    *_, check = made
    assert check(4) and check(4).message == "Right: 40, then 50."
    assert "fits as well" in check(3).message and "too large" in check(5).message
    assert "It fits always" in check(0).message and check(77).message == "No size."


def test_error_of_an_answer_is_told_what_it_means_where_that_is_known(tmp_path):
    (tmp_path / "messages.toml").write_text(
        '[x]\nhint = {en = "h", zh = "提"}\nzero = {en = "Divided by 0.", zh = "除零。"}',
        "utf-8",
    )
    source = '@exercise(errors={"division": "x.zero"})\ndef check_x(answer):\n    answer()'
    (tmp_path / "made.py").write_text(source, "utf-8")
    exec(compile(source, str(tmp_path / "made.py"), "exec"), names := {"exercise": exercise})
    assert names["check_x"](lambda: 1 / 0).message == "Divided by 0."
    assert "KeyError" in names["check_x"](lambda: {}[1]).message


# Probes
# --------------------------------------------------------------------------------------------------


def test_results_are_close_only_if_each_part_is_there_and_close():
    one = torch.ones(3)
    assert is_close([one, 1.0], [one + 1e-7, 1.0]) and is_close(2.0, 2.0 + 1e-9)
    assert not is_close([one, None], [one, one]) and not is_close([one], [one, one])
    assert not is_close(torch.ones(1, 3), one) and not is_close(1.0, 1.1)
    nan = [one, torch.full((2,), torch.nan)]
    assert is_close(nan, nan, equal_nan=True) and not is_close(nan, nan)


def test_result_of_a_known_mistake_is_refused_with_its_message(tmp_path):
    (tmp_path / "messages.toml").write_text(
        '[a]\nm = {en = "m", zh = "甲"}\nin = {en = "It is {reason}.", zh = "是{reason}。"}',
        "utf-8",
    )
    say = Messages(tmp_path / "exercises.py")
    refuse_mistakes(say, 1.0, {"a.m": (2.0, 3.0)})
    for within, told in ((None, "m"), ("a.in", "It is m.")):
        with pytest.raises(WrongAnswer) as caught:
            refuse_mistakes(say, 3.0, {"a.m": (2.0, 3.0)}, within=within)
        assert caught.value.verdict.message == told and caught.value.verdict.exact


def test_forward_keeps_what_is_alive_beside_its_output():
    keep = []
    output, kept = run_forward(lambda x: keep.append(x * 2) or x + 1, torch.ones(100))
    assert output.shape == (100,) and kept == 400
    with pytest.raises(NotImplementedError):
        run_forward(lambda x: None, torch.ones(1))
