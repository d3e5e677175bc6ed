"""Labels: English in code, Chinese in one catalog, which has what is shown and nothing else."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from course_lib import labels
from course_lib.labels import (
    LabelError,
    chinese,
    entries,
    in_both_languages,
    join_labels,
    markup,
    say,
    text,
    verbatim,
)

ROOT = Path(__file__).parents[1]
HAN = re.compile("[\u3400-\u9fff]")

pytestmark = pytest.mark.usefixtures("fresh")


# The course's own labels
# ----------------------------------------------------------------------------------------------


@cache
def trees():
    """Every script of a lesson and every module, as a tree."""
    folders = ("course_lib", "publish", "notebooks")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return {path.relative_to(ROOT): ast.parse(path.read_text("utf-8")) for path in sorted(paths)}


def constants(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node


# Functions of `course_lib.teaching.marks` whose arguments are labels.
MARKS = ("label_axes", "note", "write")


def labels_in(tree):
    """(line, label) of each label that is written in a call of `text` or of a function in MARKS."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            words = node.args[:1] if ast.unparse(node.func) in ("text", "labels.text") else []
            if ast.unparse(node.func) in MARKS:
                words = [
                    *node.args,
                    *(each.value for each in node.keywords if each.arg in ("x", "y")),
                ]
            for each in words:
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    yield each.lineno, each.value


def sentences_in(tree):
    """Return (line, sentence) of all sentences in a lesson's module, also those of verdicts, which
    are not arguments of `text`."""
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= set(node.values)
        if isinstance(node, ast.Expr):  # a docstring
            skipped.add(node.value)
    for node in constants(tree):
        if node not in skipped and re.match(r"\S.*\s.*[.?:!]$", node.value, re.DOTALL):
            yield node.lineno, node.value


def without_chinese(found):
    known = labels.catalog()
    missing = [(n, each) for n, each in found if labels.is_english(each) and each not in known]
    return [f"line {n}: {each!r}" for n, each in missing]


@pytest.mark.parametrize(("read", "where"), [(labels_in, ""), (sentences_in, "lessons/lesson_")])
def test_every_label_and_every_sentence_of_a_lesson_has_its_chinese(read, where):
    found = {path: [*read(tree)] for path, tree in trees().items() if where in str(path)}
    assert sum(map(len, found.values())) > 40
    problems = {path: without_chinese(each) for path, each in found.items()}
    assert {path: each for path, each in problems.items() if each} == {}


def test_every_entry_of_the_catalog_is_shown_somewhere():
    shown = {node.value for tree in trees().values() for node in constants(tree)}
    # made by `join_labels`
    shown |= {f"{{first}}{mark}{{rest}}" for mark in (", ", "; ", " ", "\n- ")}
    assert [english for english in labels.catalog() if english not in shown] == []


def test_the_chinese_of_the_catalog_is_chinese_and_its_punctuation_too():
    catalog = labels.catalog()
    assert [english for english in catalog if HAN.search(english)] == []
    odd = re.compile(r"[\u3400-\u9fff][,;:?!(]|[\u3400-\u9fff]\.(?=\s|$)|[,;:?!)][\u3400-\u9fff]")
    close = re.compile(r"[\u3400-\u9fff](?=[A-Za-z0-9])|[A-Za-z0-9](?=[\u3400-\u9fff])")
    words = {zh: re.sub(r"`[^`]*`|\$[^$]*\$", "", zh) for zh in catalog.values()}
    assert [zh for zh, plain in words.items() if odd.search(plain) or close.search(plain)] == []


def test_one_language_alone_stays_chosen_whatever_the_environment_says(monkeypatch):
    monkeypatch.setenv("COURSE_LANG", "zh")
    labels.choose_only("en")
    assert labels.current() == "en" and say("bytes") == "bytes"


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: entries({"library": {"{n} tokens": "{m}"}}), r"of '\{n\} tokens' in \[library\]"),
        (lambda: entries({"library": {"a": "甲"}, "x": {"a": "乙"}}), r"'a' is in \[x\]"),
        (lambda: text("{n} tokens", m=1), r"\['n'\], but got \['m'\]"),
    ],
)
def test_other_placeholders_and_an_entry_in_two_sections_are_refused(call, complaint):
    with pytest.raises(LabelError, match=complaint):
        call()


# What a label is
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def more(monkeypatch):
    """A few entries beside the course's own, and no label made so far."""
    more = {"{n:,} tokens": "{n:,} 个 token", "a step of {arm}": "{arm}的一步", "slow": "慢"}
    found = {**labels.catalog(), **more, "slow ones": "慢的几个"}
    monkeypatch.setattr(labels, "_made", {})
    monkeypatch.setattr(labels, "_fixed", {})
    monkeypatch.setattr(labels, "catalog", lambda: found)


def test_a_label_is_english_and_is_said_in_chinese_with_its_values(more):
    label = text("{n:,} tokens", n=1024)
    assert in_both_languages(label) == ("1,024 tokens", "1,024 个 token")
    assert in_both_languages("slow") == ("slow", "慢") and in_both_languages(3) == ("3", "3")
    nested = text("a step of {arm}", arm=label)
    assert in_both_languages(nested) == ("a step of 1,024 tokens", "1,024 个 token的一步")


def test_a_label_is_known_again_after_it_was_copied_or_put_into_longer_words(more):
    label = text("{n:,} tokens", n=7)
    assert chinese("".join(list(label))) == "7 个 token"
    assert chinese(f"{label} · 3 MB · {text('slow')}") == "7 个 token · 3 MB · 慢"
    assert chinese(f"{text('slow ones')} · {text('slow')}") == "慢的几个 · 慢", "the longest first"
    assert chinese(f"nobody knows {label}") is None, "half a translation is none"
    assert chinese(f"{text('slow')}er") is None, "part of another word"


def test_labels_that_were_made_are_known_again_but_not_kept_without_end(more):
    fixed, used = text("slow"), text("{n:,} tokens", n=-1)
    for n in range(20_000):
        text("{n:,} tokens", n=n)
        if n % 1000 == 0:
            used = text("{n:,} tokens", n=-1)
    assert len(labels._made) < 10_000
    assert chinese(f"{fixed} · {used} · {n:,} tokens") == "慢 · -1 个 token · 19,999 个 token"
    assert chinese("0 tokens") is None, "made long ago"


def test_lists_of_labels_have_the_marks_of_their_language(more):
    shown = in_both_languages(join_labels(["slow", "slow", "slow"], "; "))
    assert shown == ("slow; slow; slow", "慢；慢；慢")
    assert in_both_languages(join_labels(["slow", "slow"])) == ("slow, slow", "慢、慢")
    assert join_labels([]) == ""


def test_markup_has_an_element_a_language_escaped_with_code(more):
    shown = markup(text("a step of {arm}", arm="`x<y`"))
    assert shown.count("<code>x&lt;y</code>") == 2 and 'lang="en"' in shown and 'lang="zh"' in shown
    assert markup("GFLOPs") == "GFLOPs" and markup("<b>") == "&lt;b&gt;"
    assert text("slow")._repr_html_() == f"<div>{markup('slow')}</div>"


ENGLISH = ["peak", "Peak, MB", "vs first", "{n} tokens", "a `code` word"]
NOT_ENGLISH = ["GFLOPs", "MB", "fp32", "`nn.Linear`", "torch.mm", "$x \\leq y$", "Adam", "n"]
NOT_ENGLISH += ["2.13.0+cpu", "d_model", "{n} MB", "12,345", "–", ""]


def test_english_words_are_told_from_code_units_and_numbers():
    assert list(filter(labels.is_english, ENGLISH + NOT_ENGLISH)) == ENGLISH


@pytest.mark.parametrize("show", [say, markup, in_both_languages])
def test_a_label_or_a_value_without_chinese_is_an_error_only_where_the_course_is_built(
    more, monkeypatch, show
):
    nested = text("a step of {arm}", arm="my own label")
    inside, listing = text("a step of {arm}", arm=nested), join_labels(["slow", "my own label"])
    assert in_both_languages("my own label") == ("my own label",) * 2
    assert in_both_languages(nested) == ("a step of my own label", "my own label的一步")
    monkeypatch.setenv("COURSE_LABELS", "strict")
    for label in ("my own label", nested, inside, listing, f"{nested} · 3 MB"):
        with pytest.raises(LabelError, match=r"'my own label'.* entry in"):
            show(label)
    for label in ("`my own label`", "slow", text("a step of {arm}", arm="`4 bytes`")):
        assert show(label)


def test_verbatim_words_are_the_same_in_both_languages(more, monkeypatch):
    monkeypatch.setenv("COURSE_LABELS", "strict")
    name = verbatim("my own label")
    assert in_both_languages(name) == ("my own label",) * 2
    both = join_labels([name, text("a step of {arm}", arm=name)])
    assert chinese(both) == "my own label、my own label的一步"
