"""The front door: whole in each of two languages, its links lead somewhere, and its example prints
what it says."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from course_lib.labels import both
from course_lib.lessons import ledger

ROOT = Path(__file__).parents[1]
IMAGES = "course_lib/teaching/editions/images"
NAMES = {"en": "README.md", "zh": "README.zh.md"}
README = {language: (ROOT / name).read_text(encoding="utf-8") for language, name in NAMES.items()}
HAN = re.compile(r"[\u3400-\u9fff]+")
each_language = pytest.mark.parametrize("language", NAMES)


# a file's or a licence's name in one language
_TWIN = re.compile(r"(?<=\.)(?:en|zh)\.(?=svg|png)|deed\.zh-hans$")


def parts_of(readme):
    """What must be the same in both languages, by kind."""
    blocks = re.findall(r"^```(.*?)^```", readme, re.M | re.S)
    prose = re.sub(r"^```.*?^```|<!--.*?-->", "", readme, flags=re.M | re.S)
    links = re.findall(r"\]\(([^)\s]+)\)", prose)
    # a heading's anchor is in its language
    links = ["#" if link[0] == "#" else _TWIN.sub("", link) for link in links]
    prose = re.sub(r"\]\([^)\s]+\)", "]", prose)
    code = re.findall(r"`([^`\n]+)`", prose)
    # 第 00 课 is lesson 00; words for small numbers are compared by who reads both
    numbers = re.findall(
        r"(?<![\w.])\d[\d.]*\d|(?<![\w.])\d(?![\w.])", re.sub(r"`[^`\n]+`", "", prose)
    )
    return {
        "headings": re.findall(r"^#+(?= )", prose, re.M),
        "blocks": blocks,
        "links": sorted(link for link in links if not link.startswith("README.")),
        "code": sorted(code),
        "numbers": sorted(numbers),
        "rows": re.findall(r"^\| ?(\[?\d\d|---)", prose, re.M),
        "hosted": re.findall(r"<!-- (.*?) -->", readme),
    }


def differences(english, chinese):
    ours, theirs = parts_of(english), parts_of(chinese)
    return [kind for kind in ours if ours[kind] != theirs[kind]]


def test_both_languages_have_the_same_headings_code_numbers_and_links():
    assert differences(README["en"], README["zh"]) == []


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("277.7 MB at", "277.8 MB at", "numbers"),
        ("\n## One step", "\nOne step", "headings"),
        ("make slides\n", "", "blocks"),
        ("(CONTRIBUTING.md)", "(LICENSE)", "links"),
        ("`make pages`", "`make page`", "code"),
        ("| 06 | flash attention | 252.8 | 0.91 | 1.01 |\n", "", "rows"),
    ],
)
def test_what_was_changed_in_one_language_alone_is_found(old, new, kind):
    assert old in README["en"]
    assert kind in differences(README["en"].replace(old, new, 1), README["zh"])


def test_each_readme_is_in_one_language_and_links_the_other_before_anything_else():
    for language, other in (("en", "zh"), ("zh", "en")):
        first, second = README[language].split("\n\n")[:2]
        assert first.startswith("# ") and f"]({NAMES[other]})" in second
    english = re.sub(r"\[中文\]|English, 中文 or both", "", README["en"])
    assert HAN.findall(english) == []
    sentences = re.split(
        r"\n\n|\n(?=[|-])", re.sub(r"```.*?```|`[^`]*`", "", README["zh"], flags=re.S)
    )
    assert [
        each for each in sentences if re.search(r"[a-z]{3,} [a-z]{3,} [a-z]{3,} [a-z]{3,}", each)
    ] == []


@each_language
def test_the_first_command_the_audience_and_lesson_00_stand_on_the_first_screen(language):
    screen = README[language].partition("\n## ")[0]
    assert len(screen) < 3000
    assert "`CUDA out of memory`" in screen and "OOM" in screen
    assert ("显存不足" in screen) == (language == "zh")
    assert screen.index("out of memory") < screen.index("(notebooks/00_start_here.ipynb)")
    command = screen.index("\nmake lab TORCH=cpu\n")
    assert screen.index("loss.backward()") < command and re.search(r"[\d.]+ GB", screen[:command])
    assert "WSL" in screen and "macOS" in screen
    assert f"]({IMAGES}/lesson.{language}.png)" in screen


@each_language
def test_every_link_of_the_readme_leads_to_a_file_and_every_lesson_is_linked(language):
    readme = README[language]
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", readme) if "://" not in target]
    headings = {each.lower().replace(" ", "-") for each in re.findall(r"^## (.+)$", readme, re.M)}
    anchors = {target[1:] for target in targets if target[0] == "#"}
    assert anchors and anchors <= headings
    files = [target for target in targets if target[0] != "#"]
    assert [target for target in files if not (ROOT / target.partition("#")[0]).exists()] == []
    lessons = {path.relative_to(ROOT).as_posix() for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert lessons == {target for target in files if target.endswith(".ipynb")}


def test_the_map_has_the_words_of_the_figure_in_both_languages():
    pytest.importorskip("matplotlib")
    from course_lib.lessons.lesson_00 import course_map
    from course_lib.teaching import pictures

    for language, words in zip(pictures.LANGUAGES, pictures.description(course_map()), strict=True):
        assert f"![{words}]({IMAGES}/map.{language}.svg)" in README[language]


@each_language
def test_the_first_picture_and_the_table_below_it_are_the_first_rows_of_the_ledger(language):
    readme = README[language]
    rows = re.findall(r"^\| (\d\d) \| (.+?) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", readme, re.M)
    plain = ledger.ROWS[0]
    expected = []
    for row in ledger.ROWS:
        ratios = (row.peak_bytes / plain.peak_bytes, row.flops / plain.flops)
        expected.append(
            (
                row.lesson,
                both(row.technique)[language == "zh"],
                f"{row.peak_bytes / 1e6:.1f}",
                *(f"{ratio:.2f}" for ratio in ratios),
            )
        )
    assert len(rows) > 2 and rows == expected[: len(rows)]
    peaks = {row[0]: f"{row[2]} MB" for row in rows}
    (words,) = re.findall(r"!\[([^]]*)\]\(course_lib/teaching/editions/images/step\.", readme)
    assert re.findall(r"[\d.]+ MB", words) == [peaks["00"], peaks["02"]]


@each_language
def test_every_target_of_the_makefile_that_the_readme_names_is_one(language):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    named = set(re.findall(r"(?:`|^)make ([\w-]+)", README[language], re.M))
    assert {"lab", "test", "slides", "student", "grade", "pages", "site"} <= named <= targets


def test_the_example_of_the_readme_prints_what_it_says():
    (example,) = re.findall(r"^```python\n(.*?)^```", README["en"], re.M | re.S)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(example, {})
    promised = re.findall(r"^print\(.*\)  # (.+)$", example, re.M)
    assert promised and promised == printed.getvalue().splitlines()


def test_the_lines_of_code_on_the_picture_of_a_lesson_are_counted():
    """Its description says eleven: the two cells below the heading that it is taken at."""
    notebook = json.loads((ROOT / "notebooks/02_checkpointing.ipynb").read_text("utf-8"))
    cells = notebook["cells"]
    start = next(place for place, cell in enumerate(cells) if "## 2.1 " in "".join(cell["source"]))
    code = [line for cell in cells[start + 1 : start + 3] for line in cell["source"]]
    assert sum(bool(line.strip()) for line in code) == 11
    assert "eleven lines of code" in README["en"] and "十一行代码" in README["zh"]


# --- where the project is hosted ---

HOSTED = {
    "Repository": "https://example.org/group/course",
    "Documentation": "https://example.org/pages",
}


@pytest.fixture
def address():
    pytest.importorskip("nbformat", reason="the editions come with the extra `course`")
    from course_lib.teaching.editions import address

    return address


@each_language
def test_the_readme_says_what_follows_from_the_projects_address_and_nothing_else(address, language):
    now = address.addresses(ROOT)
    assert README[language] == address.with_addresses(README[language], language, now), (
        "`make address` writes what follows from [project.urls]"
    )
    without = address.with_addresses(README[language], language, {})
    hosted = address.with_addresses(README[language], language, HOSTED)
    assert "git clone" not in without and "/issues" not in without and "badge.svg" not in without
    assert (
        "```\ngit clone https://example.org/group/course\ncd course\nmake lab TORCH=cpu\n```\n"
        in hosted
    )
    site = f"(https://example.org/pages/{language}/index.html)"
    for there in (site, "course/issues)", "badge.svg)"):
        assert there in hosted
    assert address.with_addresses(hosted, language, {}) == without
    half = address.with_addresses(without, language, {"Repository": HOSTED["Repository"]})
    assert "git clone" in half and "JupyterLab" in half and "example.org/pages" not in half


def test_an_address_that_is_none_is_one_sentence(address, tmp_path):
    for wrong in ('Repository = ""', 'Homepage = "https://a.org"', 'Repository = "a b"'):
        (tmp_path / "pyproject.toml").write_text(f"[project]\n[project.urls]\n{wrong}\n", "utf-8")
        with pytest.raises(
            ValueError,
            match=r"^\[project.urls\] must have only Repository and Docu[^\n]+, got [^\n]+$",
        ):
            address.addresses(tmp_path)
    with pytest.raises(ValueError, match="no block 'gone'"):
        address.with_addresses("<!-- hosted: gone -->\n<!-- /hosted -->", "en", {})


def test_the_citation_has_an_entity_as_author_and_the_version_and_addresses_of_the_project(address):
    import tomllib

    import yaml

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    text = (ROOT / "CITATION.cff").read_text("utf-8")
    citation = yaml.safe_load(text)
    assert {
        "cff-version",
        "message",
        "title",
        "authors",
    } <= citation.keys()  # what CFF 1.2 requires
    assert citation["authors"] == project["authors"] == [{"name": project["authors"][0]["name"]}]
    assert citation["version"] == project["version"] and citation["license"] == project["license"]
    assert text == address.citation_with(text, address.addresses(ROOT))
    hosted = address.citation_with(text, HOSTED)
    assert yaml.safe_load(hosted)["repository-code"] == HOSTED["Repository"]
    assert address.citation_with(hosted, {}) == text
