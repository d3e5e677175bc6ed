"""Hard constructions in the prose: their number may only fall (`tests/tools/prose_check.py`)."""

import prose_check
import pytest
from prose_check import MARKS, Prose, Text, hits

COLONS, SEMICOLONS = MARKS


@pytest.fixture(scope="module")
def found():
    return Prose()


def test_prose_problems_per_folder_do_not_exceed_stored_counts(found):
    if problems := found.problems(prose_check.read()):
        pytest.fail(
            "A text that was added or changed has a construction that readers have to decode."
            " Rewrite it in plain words (CONTRIBUTING.md, Prose). These are all hits of the rule"
            " in that folder, old ones included:\n" + "\n".join(problems),
            pytrace=False,
        )


def test_prose_check_reads_every_kind_of_text(found):
    folders = {folder for folder, _ in found.counts}
    chinese = {folder for folder, rule in found.counts if rule == COLONS}
    assert {"docs", "notebooks", "notebooks/scripts", "slides", "labels"} <= chinese
    assert {"course_lib", "course_lib/budget", "publish", "tests"} <= folders
    assert {prose_check.TEST_NAMES, prose_check.TEST_DOCSTRINGS} <= folders


# The rules
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "hit", "plain"),
    [
        (
            "subject without a noun (What ..., Who ...)",
            "A step runs. What adds to these is tried.",
            "What adds to these? What is left is small.",
        ),
        ("'a X' for 'per X'", "16 bytes a\n    parameter", "16 bytes per parameter, a row"),
        ("'is no N'", "A copy is no step.", "There is no gradient, and it is no longer used."),
        ("bare 'there'", "The weights are there, too.", "There are weights."),
        ("'but for'", "equal but for rounding", "equal except for rounding"),
        (
            "'so many', 'as much' without as",
            "It takes so many, or fewer.",
            "It has as many rows in each block as the first one.",
        ),
        ("nobody, somebody", "where nobody says otherwise", "by default"),
        ("'it takes', 'comes with'", "k is 2; it takes 1", "k must be 1, got 2; takes time"),
        (
            "'as it is'",
            "a Python that has torch as it is.",
            "Leave the lines as they are. It is used as long as it is in memory.",
        ),
        ("old words", "a table beside the picture", "besides, a table next to the picture"),
        ("'Of ...' in front", "Of equal stages one is run.", "Of course, one of them is run."),
        ("'stands in'", "It stands in the books.", "It stands in for the others."),
        ("told, said, known", "They are told by storage.", "The shape is known."),
        (
            "'of which', 'in whose'",
            "a device of which the order is checked",
            "three blocks, each of which is checked",
        ),
        ("nickname", "pieces of a batch", "micro-batches of a batch"),
    ],
)
def test_prose_rule_reports_its_construction_and_ignores_ordinary_sentence(rule, hit, plain):
    assert [each.rule for each in hits("a.py", 1, hit)] == [rule]
    assert [each for each in hits("a.py", 1, plain) if each.rule == rule] == []


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("a b c d e f g h i j", []),
        ("a b c d e f g h i j k", ["name of more than ten words"]),
        ("planner refuses a short chain", ["private word"]),
        ("weights that stand in for others", ["private word"]),
        ("matrix product has the flops of both factors", []),
        ("product has the flops of both factors", ["private word"]),
    ],
)
def test_prose_check_reports_private_words_and_long_test_names(name, rules):
    found = Prose([Text(prose_check.TEST_NAMES, "tests/test_a.py", 1, name)])
    assert [hit.rule for each in found.hits.values() for hit in each] == rules
    found = Prose([Text(prose_check.TEST_DOCSTRINGS, "tests/test_a.py", 1, name)])
    assert found.counts == {(prose_check.TEST_DOCSTRINGS, "private word"): "private word" in rules}


# The texts
# ----------------------------------------------------------------------------------------------

PYTHON = '''\
"""Module."""
LEVER = "lever in a plain string"


def f(x):
    """Function."""
    if x:  # trailing
        raise ValueError(f"x is {x}; it takes 1")
    # two
    # lines
    parser.add_argument("--x", help="help of x")
'''


LESSON = """\
# %% [markdown] slide={"en": "A \\"slide\\"", "zh": "一页"} minutes=2
# ## 1.1 Title / 标题
#
# <div lang="en">
#
# A sentence
# in two lines.
#
# </div>
# <div lang="zh">
#
# 一句话。
#
# </div>

# %% minutes=6
x = 1  # a comment
"""


TESTS = '''\
class TestA:
    def test_one_thing(self):
        """Docstring."""

def test_two(): pass

def helper(): pass
'''
OF_TESTS = [("names of tests", 2, "one thing"), ("docstrings of tests", 3, "Docstring.")]
OF_TESTS += [("names of tests", 5, "two")]


OF_PYTHON = [(1, "Module."), (6, "Function."), (7, "trailing"), (8, "x is {}; it takes 1")]
OF_PYTHON += [(9, "two\nlines"), (11, "--x"), (11, "help of x")]
OF_LESSON = [("slides", 1, 'A "slide"'), ("slides", 1, "一页")]
OF_LESSON += [("notebooks/scripts", 6, "A sentence\nin two lines.")]
OF_LESSON += [("notebooks/scripts", 12, "一句话。"), ("notebooks/scripts", 17, "a comment")]
MARKDOWN = "# Title\n\n```\ncode\n```\n- item\n  goes on<br>\n  一项\n\n| a<br>甲 | b |\n"
OF_MARKDOWN = [(1, "Title"), (6, "- item\n  goes on"), (8, "  一项")]
OF_MARKDOWN += [(10, " a"), (10, "甲 "), (10, " b ")]
CATALOG = 'same = ["GB"]\n\n[library]\n"a" = "甲"\n"a \\"b\\"" = "乙"\n'
OF_CATALOG = [(4, "a"), (4, "甲"), (5, 'a "b"'), (5, "乙")]


@pytest.mark.parametrize(
    ("read", "source", "texts"),
    [
        (prose_check.in_python, PYTHON, OF_PYTHON),  # docstrings, messages, help, comments
        (prose_check.in_lesson, LESSON, OF_LESSON),  # slides, prose and comments
        (prose_check.in_tests, TESTS, OF_TESTS),  # at any depth, without helpers
        (prose_check.in_markdown, MARKDOWN, OF_MARKDOWN),  # in one language each, without code
        (prose_check.in_catalog, CATALOG, OF_CATALOG),  # keys and values
    ],
)
def test_prose_check_extracts_texts_with_line_numbers(read, source, texts):
    assert sorted(read(source)) == sorted(texts)


# The table
# ----------------------------------------------------------------------------------------------


def counted(*words, folder="course_lib/memory"):
    return Prose(Text(folder, f"{folder}/a.py", n, each) for n, each in enumerate(words, 1))


def test_prose_problems_are_reported_only_if_their_count_rises():
    two, three = ["Plain.", "One lever.", "Two levers."], ["One lever.", "Two levers.", "A piece."]
    allowed = counted(*two).counts
    assert counted(*two).problems(allowed) == counted("One lever.").problems(allowed) == []
    head, *found = counted(*three).problems(allowed)
    assert head == "course_lib/memory: nickname: 3, and the table allows 2"
    assert found[2] == "  course_lib/memory/a.py:3 nickname: 'piece'" and len(found) == 3


def test_rate_of_chinese_colons_may_rise_up_to_goal():
    five, ten, eleven = (counted("字" * 990 + "：" * colons) for colons in (5, 10, 11))
    (problem,) = eleven.problems(ten.counts)
    assert "1.12, and the table allows 1.02" in problem
    assert ten.counts["course_lib/memory", SEMICOLONS] == 0
    assert five.problems({}) == []  # 0.51 of 0.6


def test_write_option_lowers_stored_counts_but_never_raises_them(tmp_path, monkeypatch, capsys):
    one, two = counted("One lever."), counted("One lever.", "Two levers.")
    monkeypatch.setattr(prose_check, "TABLE", tmp_path / "counts.csv")
    prose_check.write(two.counts)
    monkeypatch.setattr(prose_check, "Prose", lambda: one)
    assert prose_check.main([]) == 0
    assert prose_check.read() == two.counts, "compared, not written"
    assert prose_check.main(["--write"]) == 0
    assert prose_check.read() == one.counts
    monkeypatch.setattr(prose_check, "Prose", lambda: two)
    assert prose_check.main([]) == prose_check.main(["--write"]) == 1
    assert prose_check.read() == one.counts
    assert "a.py:2 nickname: 'levers'" in capsys.readouterr().out
