"""The front door: its links lead somewhere, and its example prints what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def missing_files(text: str, folder: Path) -> list[str]:
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    return [target for target in targets if not (folder / target.partition("#")[0]).exists()]


def promised_outputs(example: str) -> list[str]:
    """What the comments behind the print calls say."""
    return re.findall(r"^print\(.*\)  # (.+)$", example, re.M)


def test_every_link_of_the_readme_leads_to_a_file():
    assert missing_files(README, ROOT) == []
    assert missing_files("[gone](no/such/file.md)", ROOT) == ["no/such/file.md"]


def test_every_lesson_that_exists_is_linked_and_no_other():
    linked = set(re.findall(r"\]\(notebooks/(\w+)\.ipynb\)", README))
    assert linked == {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}


def test_the_map_has_the_words_of_the_figure_in_both_languages():
    pytest.importorskip("matplotlib")
    from course_lib.lessons.lesson_00 import course_map
    from course_lib.teaching import alt

    assert f"![{alt.alt_text(course_map())}](notebooks/images/map.svg)" in README


def test_every_target_of_the_makefile_that_the_readme_names_is_one():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    assert {"slides", "student", "site", "browser"} <= set(re.findall(r"(?:`|^)make (\w+)", README, re.M)) <= targets


def test_the_example_of_the_readme_prints_what_it_says():
    (example,) = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    printed = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, check=True)
    assert promised_outputs(example) == printed.stdout.split("\n")[:-1]
    assert promised_outputs("print(1)  # 2") == ["2"]
