"""The front door: its links lead somewhere, and its example prints what it says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from course_lib.labels import both
from course_lib.lessons import ledger

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_link_of_the_readme_leads_to_a_file_and_every_lesson_is_linked():
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", README) if "://" not in target]
    assert [target for target in targets if not (ROOT / target.partition("#")[0]).exists()] == []
    lessons = {path.relative_to(ROOT).as_posix() for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert lessons == {target for target in targets if target.endswith(".ipynb")}


def test_the_map_has_the_words_of_the_figure_in_both_languages():
    pytest.importorskip("matplotlib")
    from course_lib.lessons.lesson_00 import course_map
    from course_lib.teaching import pictures

    for language, words in zip(pictures.LANGUAGES, pictures.description(course_map()), strict=True):
        assert f"![{words}](notebooks/images/map.{language}.svg)" in README


def test_the_first_picture_and_the_table_below_it_are_the_first_rows_of_the_ledger():
    rows = re.findall(r"^\| (\d\d) \| (.+?) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", README, re.M)
    plain = ledger.ROWS[0]
    expected = []
    for row in ledger.ROWS:
        technique = "<br>".join(dict.fromkeys(both(row.technique)))
        ratios = (row.peak_bytes / plain.peak_bytes, row.flops / plain.flops)
        expected.append(
            (
                row.lesson,
                technique,
                f"{row.peak_bytes / 1e6:.1f}",
                *(f"{ratio:.2f}" for ratio in ratios),
            )
        )
    assert len(rows) > 2 and rows == expected[: len(rows)]
    peaks = {row[0]: f"{row[2]} MB" for row in rows}
    words = re.findall(r"!\[([^]]*)\]\(notebooks/images/step\.", README)
    assert [re.findall(r"[\d.]+ MB", picture) for picture in words] == [
        [peaks["00"], peaks["02"]]
    ] * 2


def test_every_target_of_the_makefile_that_the_readme_names_is_one():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    assert (
        {"lab", "test", "slides", "student", "site"}
        <= set(re.findall(r"(?:`|^)make (\w+)", README, re.M))
        <= targets
    )


def test_the_example_of_the_readme_prints_what_it_says():
    (example,) = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(example, {})
    promised = re.findall(r"^print\(.*\)  # (.+)$", example, re.M)
    assert promised and promised == printed.getvalue().splitlines()
