"""Tests of labels, and of the catalog, which must have the Chinese of exactly the shown labels."""

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

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("fresh")


# The labels of the course
# --------------------------------------------------------------------------------------------------


@cache
def trees():
    """Return path -> syntax tree of all modules and scripts of lessons."""
    folders = ("course_lib", "publish", "notebooks")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return {path.relative_to(ROOT): ast.parse(path.read_text("utf-8")) for path in sorted(paths)}


def is_string(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


# Functions of `course_lib.teaching.marks` whose arguments are labels.
MARKS = ("label_axes", "note", "write")


def labels_in(tree):
    """Yield the strings that are arguments of `text` or of a function in MARKS."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            arguments = node.args[:1] if name in ("text", "labels.text") else []
            if name in MARKS:
                axes = [word.value for word in node.keywords if word.arg in ("x", "y")]
                arguments = node.args + axes
            yield from filter(is_string, arguments)


def sentences_in(tree):
    """Yield the strings that are sentences, such as verdicts, which are not arguments of `text`."""
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= set(node.values)
        if isinstance(node, ast.Expr):  # a docstring
            skipped.add(node.value)
    for node in filter(is_string, ast.walk(tree)):
        if node not in skipped and re.match(r"\S.*\s.*[.?:!]$", node.value, re.DOTALL):
            yield node


@pytest.mark.parametrize(
    ("strings_in", "folder"), [(labels_in, ""), (sentences_in, "lessons/lesson_")]
)
def test_catalog_has_chinese_for_every_label_and_lesson_sentence(strings_in, folder):
    found = [
        (path, node.lineno, node.value)
        for path, tree in trees().items()
        if folder in str(path)
        for node in strings_in(tree)
    ]
    assert len(found) > 20
    catalog = labels.catalog()
    assert [row for row in found if labels.is_english(row[2]) and row[2] not in catalog] == []


def test_translation_catalog_has_no_unused_entry():
    nodes = (node for tree in trees().values() for node in ast.walk(tree))
    shown = {node.value for node in filter(is_string, nodes)}
    # templates of `join_labels`
    shown |= {f"{{first}}{mark}{{rest}}" for mark in (", ", "; ", " ", "\n- ")}
    assert [english for english in labels.catalog() if english not in shown] == []


def test_chinese_translations_use_chinese_punctuation_and_spacing():
    catalog = labels.catalog()
    han = "[\u3400-\u9fff]"
    assert [english for english in catalog if re.search(han, english)] == []
    wrong = re.compile(rf"{han}[,;:?!(a-zA-Z0-9]|[,;:?!)a-zA-Z0-9]{han}|{han}\.(?=\s|$)")
    words = {zh: re.sub(r"`[^`]*`|\$[^$]*\$", "", zh) for zh in catalog.values()}
    assert [zh for zh, plain in words.items() if wrong.search(plain)] == []


def test_choosing_one_language_overrides_language_environment_variable(monkeypatch):
    monkeypatch.setenv("COURSE_LANG", "zh")
    labels.choose_only("en")
    assert labels.current() == "en" and say("bytes") == "bytes"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: entries({"library": {"{n} tokens": "{m}"}}), r"'\{n\} tokens' in \[library\]"),
        (
            lambda: entries({"library": {"a": "甲"}, "x": {"a": "乙"}}),
            r"'a' must .* got it in \[x\]",
        ),
        (lambda: text("{n} tokens", m=1), r"\['n'\], but got \['m'\]"),
    ],
)
def test_label_with_wrong_placeholders_or_duplicate_entry_raises(call, message):
    with pytest.raises(LabelError, match=message):
        call()


# One label
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def small_catalog(monkeypatch):
    entries = {"{n:,} tokens": "{n:,} 个 token", "a step of {arm}": "{arm}的一步", "slow": "慢"}
    catalog = {**labels.catalog(), **entries, "slow ones": "慢的几个"}
    monkeypatch.setattr(labels, "_made", {})
    monkeypatch.setattr(labels, "_fixed", {})
    monkeypatch.setattr(labels, "catalog", lambda: catalog)


def test_label_is_translated_to_chinese_with_formatted_values(small_catalog):
    label = text("{n:,} tokens", n=1024)
    assert in_both_languages(label) == ("1,024 tokens", "1,024 个 token")
    assert in_both_languages("slow") == ("slow", "慢") and in_both_languages(3) == ("3", "3")
    nested = text("a step of {arm}", arm=label)
    assert in_both_languages(nested) == ("a step of 1,024 tokens", "1,024 个 token的一步")


def test_labels_inside_longer_strings_are_translated_to_chinese(small_catalog):
    label = text("{n:,} tokens", n=7)
    assert chinese("".join(list(label))) == "7 个 token"
    assert chinese(f"{label} · 3 MB · {text('slow')}") == "7 个 token · 3 MB · 慢"
    assert chinese(f"{text('slow ones')} · {text('slow')}") == "慢的几个 · 慢"
    assert chinese(f"nobody knows {label}") is None
    assert chinese(f"{text('slow')}er") is None  # "slow" is a part of another word


def test_label_cache_is_bounded_and_contains_newest_labels(small_catalog):
    fixed, used = text("slow"), text("{n:,} tokens", n=-1)
    for n in range(6_000):
        text("{n:,} tokens", n=n)
        if n % 1000 == 0:
            used = text("{n:,} tokens", n=-1)
    assert len(labels._made) < 5_000
    assert chinese(f"{fixed} · {used} · {n:,} tokens") == "慢 · -1 个 token · 5,999 个 token"
    assert chinese("0 tokens") is None  # an old label is no longer stored


def test_joined_labels_use_separators_of_each_language(small_catalog):
    shown = in_both_languages(join_labels(["slow", "slow", "slow"], "; "))
    assert shown == ("slow; slow; slow", "慢；慢；慢")
    assert in_both_languages(join_labels(["slow", "slow"])) == ("slow, slow", "慢、慢")
    assert join_labels([]) == ""


def test_label_markup_contains_one_escaped_element_per_language(small_catalog):
    shown = markup(text("a step of {arm}", arm="`x<y`"))
    assert shown.count("<code>x&lt;y</code>") == 2 and 'lang="en"' in shown and 'lang="zh"' in shown
    assert markup("GFLOPs") == "GFLOPs" and markup("<b>") == "&lt;b&gt;"
    assert text("slow")._repr_html_() == f"<div>{markup('slow')}</div>"


@pytest.mark.parametrize("show", [say, markup, in_both_languages])
def test_label_without_chinese_raises_only_in_strict_mode(small_catalog, monkeypatch, show):
    nested = text("a step of {arm}", arm="my own label")
    inside, listing = text("a step of {arm}", arm=nested), join_labels(["slow", "my own label"])
    assert in_both_languages("my own label") == ("my own label",) * 2
    assert in_both_languages(nested) == ("a step of my own label", "my own label的一步")
    monkeypatch.setenv("COURSE_LABELS", "strict")
    for label in ("my own label", nested, inside, listing, f"{nested} · 3 MB"):
        with pytest.raises(
            LabelError, match=r"'my own label'.*must have a Chinese translation: add an"
        ):
            show(label)
    for label in ("`my own label`", "slow", text("a step of {arm}", arm="`4 bytes`")):
        assert show(label)


def test_verbatim_label_is_not_translated_but_equal_text_is(small_catalog, monkeypatch):
    monkeypatch.setenv("COURSE_LABELS", "strict")
    name = verbatim("my own label")
    assert in_both_languages(name) == ("my own label",) * 2
    both = join_labels([name, text("a step of {arm}", arm=name)])
    assert chinese(both) == "my own label、my own label的一步"
    assert chinese(text("{name}", name=verbatim("slow"))) == "slow"
    assert chinese("slow") == "慢"
