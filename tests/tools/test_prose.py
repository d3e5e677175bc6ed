"""Hard constructions in the prose: their number may only fall (`tests/tools/prose_check.py`)."""

import prose_check
import pytest
from prose_check import MARKS, Prose, Text

COLONS, _ = MARKS


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


def test_prose_problems_are_reported_only_if_their_count_rises():
    def counted(*words):
        texts = (Text("tests", "tests/a.py", n, each) for n, each in enumerate(words, 1))
        return Prose(texts)

    allowed = counted("Plain.", "One lever.", "Two levers.").counts
    assert counted("Plain.", "One lever.", "A piece.").problems(allowed) == []
    head, *found = counted("One lever.", "Two levers.", "A piece.").problems(allowed)
    assert head == "tests: nickname: 3, and the table allows 2"
    assert found[2] == "  tests/a.py:3 nickname: 'piece'"
