"""Labels: English in code, Chinese in one catalog, which has what is shown and nothing else."""

import ast
import gc
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from course_lib import labels
from course_lib.labels import (
    CATALOG,
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
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def labels_in(tree):
    """(line, first argument) of each call of `text` whose label is written there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("text", "labels.text"):
            first, *_ = node.args or [None]
            if isinstance(first, ast.Constant):
                yield node.lineno, first.value


def without_chinese(tree):
    known = labels.catalog()
    return [
        f"line {n}: {label!r}"
        for n, label in labels_in(tree)
        if labels.is_english(label) and label not in known
    ]


def untold(tree):
    """Sentences of a lesson's module without Chinese, whoever says them: a verdict's reasons and
    hints are no calls of `text`."""
    known, skipped = labels.catalog(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= set(node.values)
        if isinstance(node, ast.Expr):  # a docstring
            skipped.add(node.value)
    return [
        f"line {node.lineno}: {node.value!r}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped
        if re.match(r"\S.*\s.*[.?:!]$", node.value, re.DOTALL)
        if labels.is_english(node.value) and node.value not in known
    ]


def unused(catalog, trees):
    shown = set().union(*map(constants, trees))
    return [english for english in catalog if english not in shown]


def test_every_label_that_is_written_in_code_has_its_chinese():
    assert {
        str(path): found for path, tree in trees().items() if (found := without_chinese(tree))
    } == {}


def test_every_sentence_of_a_lessons_module_has_its_chinese():
    modules = {str(path): tree for path, tree in trees().items() if "lessons/lesson_" in str(path)}
    assert {path: found for path, tree in modules.items() if (found := untold(tree))} == {}
    tree = ast.parse(
        "'A docstring.'\nf({2: 'Right.', 3: 'Only the forward runs twice.'}, f'A {b}.')\n"
        "f('4 bytes a parameter.', '{n} bytes a parameter.', '`x` has 2.')"
    )
    assert sorted(untold(tree)) == [
        "line 2: 'Only the forward runs twice.'",
        "line 3: '4 bytes a parameter.'",
        "line 3: '`x` has 2.'",
        "line 3: '{n} bytes a parameter.'",
    ]


def test_every_entry_of_the_catalog_is_shown_somewhere():
    built = {
        f"{{first}}{mark}{{rest}}" for mark in (", ", "; ", " ", "\n- ")
    }  # made by `join_labels`
    assert [
        english for english in unused(labels.catalog(), trees().values()) if english not in built
    ] == []


def test_the_chinese_of_the_catalog_is_chinese_and_its_punctuation_too():
    catalog = labels.catalog()
    assert [english for english in catalog if HAN.search(english)] == []
    odd = re.compile(r"[\u3400-\u9fff][,;:?!(]|[\u3400-\u9fff]\.(?=\s|$)|[,;:?!)][\u3400-\u9fff]")
    close = re.compile(r"[\u3400-\u9fff](?=[A-Za-z0-9])|[A-Za-z0-9](?=[\u3400-\u9fff])")
    words = {zh: re.sub(r"`[^`]*`|\$[^$]*\$", "", zh) for zh in catalog.values()}
    assert [zh for zh, plain in words.items() if odd.search(plain) or close.search(plain)] == []


def test_the_catalog_has_a_section_for_the_library_and_one_a_lesson():
    sections = tomllib.loads(CATALOG.read_text("utf-8"))
    lessons = {f"lesson {path.name[:2]}" for path in (ROOT / "notebooks/scripts").glob("*.py")}
    assert set(sections) - {"same", "library", "errors"} <= lessons


def test_an_unused_entry_and_a_label_without_chinese_are_found():
    tree = ast.parse("text('Right.')\ntext('Nobody has said this.')\ntext('GB')")
    assert without_chinese(tree) == ["line 2: 'Nobody has said this.'"]
    assert unused({"Right.": "正确。", "Never shown.": "从不出现。"}, [tree]) == ["Never shown."]


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        (
            {"library": {"{n} tokens": "{m} 个 token"}},
            r"placeholders of '\{n\} tokens' in \[library\]",
        ),
        ({"library": {"{n} tokens": "token"}}, "placeholders of"),
        (
            {"library": {"a": "甲"}, "lesson 01": {"a": "乙"}},
            r"'a' is in \[lesson 01\] and in an earlier section",
        ),
    ],
)
def test_an_entry_with_other_placeholders_or_in_two_sections_is_refused(sections, complaint):
    with pytest.raises(LabelError, match=complaint):
        entries(sections)


# What a label is
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def more(monkeypatch):
    """A few entries beside the course's own, and no label made so far."""
    more = {"{n:,} tokens": "{n:,} 个 token", "a step of {arm}": "{arm}的一步", "slow": "慢"}
    more["slow ones"] = "慢的几个"
    found = {**labels.catalog(), **more}
    monkeypatch.setattr(labels, "_made", {})
    monkeypatch.setattr(labels, "_fixed", {})
    monkeypatch.setattr(labels, "catalog", lambda: found)


def test_a_label_is_english_and_is_said_in_chinese_with_its_values(more):
    label = text("{n:,} tokens", n=1024)
    assert label == "1,024 tokens" and chinese(label) == "1,024 个 token"
    assert in_both_languages("slow") == ("slow", "慢") and in_both_languages(3) == ("3", "3")


def test_a_value_may_be_a_label(more):
    assert in_both_languages(text("a step of {arm}", arm="slow")) == ("a step of slow", "慢的一步")
    assert in_both_languages(text("a step of {arm}", arm=text("{n:,} tokens", n=2))) == (
        "a step of 2 tokens",
        "2 个 token的一步",
    )


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
    kept = [each for each in gc.get_objects() if type(each) is dict and "19,999 tokens" in each]
    assert 0 < max(map(len, kept)) < 10_000
    assert chinese(f"{fixed} · {used} · {n:,} tokens") == "慢 · -1 个 token · 19,999 个 token"
    assert chinese("0 tokens") is None, "made long ago"


def test_lists_of_labels_have_the_marks_of_their_language(more):
    assert in_both_languages(join_labels(["slow", "slow"])) == ("slow, slow", "慢、慢")
    assert in_both_languages(join_labels(["slow", "slow", "slow"], "; ")) == (
        "slow; slow; slow",
        "慢；慢；慢",
    )
    assert join_labels([]) == ""


def test_markup_has_an_element_a_language_escaped_with_code(more):
    shown = markup(text("a step of {arm}", arm="`x<y`"))
    assert shown.count("<code>x&lt;y</code>") == 2 and 'lang="en"' in shown and 'lang="zh"' in shown
    assert markup("GFLOPs") == "GFLOPs" and markup("<b>") == "&lt;b&gt;"
    assert text("slow")._repr_html_() == f"<div>{markup('slow')}</div>"


def test_values_that_do_not_fit_the_placeholders_are_refused(more):
    with pytest.raises(
        LabelError, match=r"'\{n\} tokens' has placeholders \['n'\], but got \['m'\]"
    ):
        text("{n} tokens", m=1)


@pytest.mark.parametrize(
    ("words", "english"),
    [
        *(
            (words, True)
            for words in ("peak", "Peak, MB", "vs first", "{n} tokens", "a `code` word")
        ),
        *(
            (words, False)
            for words in (
                "GFLOPs",
                "MB",
                "fp32",
                "`nn.Linear`",
                "torch.mm",
                "$x \\leq y$",
                "Adam",
                "n",
            )
        ),
        *((words, False) for words in ("2.13.0+cpu", "d_model", "{n} MB", "12,345", "–", "")),
    ],
)
def test_english_words_are_told_from_code_units_and_numbers(words, english):
    assert labels.is_english(words) == english


def test_a_label_without_chinese_is_an_error_only_where_the_course_is_built(more, monkeypatch):
    assert (
        in_both_languages("my own label") == ("my own label",) * 2
        and say("my own label") == "my own label"
    )
    monkeypatch.setenv("COURSE_LABELS", "strict")
    for show in (say, markup, in_both_languages):
        with pytest.raises(
            LabelError, match=r"'my own label' has no Chinese: give it an entry in zh\.toml"
        ):
            show("my own label")
    assert say("`my own label`") and say("slow")


def test_a_value_without_chinese_is_an_error_only_where_the_course_is_built(more, monkeypatch):
    nested = text("a step of {arm}", arm="4 bytes a parameter.")
    inside = text("a step of {arm}", arm=nested)
    listing = join_labels(["slow", "4 bytes a parameter."])
    assert in_both_languages(nested) == (
        "a step of 4 bytes a parameter.",
        "4 bytes a parameter.的一步",
    )
    monkeypatch.setenv("COURSE_LABELS", "strict")
    for label in (nested, inside, listing, f"{nested} · 3 MB"):
        for show in (say, markup, in_both_languages):
            with pytest.raises(
                LabelError, match=r"'4 bytes a parameter\.', a value of .* entry in"
            ):
                show(label)
    assert in_both_languages(text("a step of {arm}", arm="`4 bytes`")) and in_both_languages(
        text("a step of {arm}", arm="MB")
    )


def test_verbatim_words_are_the_same_in_both_languages(more, monkeypatch):
    monkeypatch.setenv("COURSE_LABELS", "strict")
    name = verbatim("my own label")
    assert in_both_languages(name) == ("my own label",) * 2
    assert in_both_languages(text("a step of {arm}", arm=name)) == (
        "a step of my own label",
        "my own label的一步",
    )
    assert in_both_languages(join_labels([name, "slow"])) == (
        "my own label, slow",
        "my own label、慢",
    )


def test_a_page_in_one_language_keeps_it_whatever_the_environment_says(monkeypatch):
    for name in ("_chosen", "_shown"):
        monkeypatch.setattr(labels, name, getattr(labels, name))
    monkeypatch.setenv("COURSE_LANG", "en")
    labels.choose_only("zh")
    assert labels.current() == "zh" and labels.shown_languages() == ("zh",)
