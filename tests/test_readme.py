"""The front door and the pages of docs/: each is whole in two languages, its links lead somewhere,
and its commands and examples print what it says."""

import contextlib
import io
import re
import shlex
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from course_lib import labels
from course_lib.budget import Recipe
from course_lib.budget import __main__ as command
from course_lib.budget.answer import ForFramework, workload_for
from course_lib.budget.report import Result, fits
from course_lib.budget.scripts import FRAMEWORKS
from course_lib.budget.search.estimate_cache import EstimateCache
from course_lib.budget.search.fit import Estimates
from course_lib.lessons import LESSONS, claims_of

ROOT = Path(__file__).parents[1]
IMAGES = "publish/images"
NAMES = {"en": "README.md", "zh": "README.zh.md"}
README = {language: (ROOT / name).read_text(encoding="utf-8") for language, name in NAMES.items()}
# English -> Chinese, of every page that has a twin
TWINS = {"README.md": "README.zh.md"} | {
    f"docs/{path.name}": f"docs/{path.stem}.zh.md"
    for path in sorted((ROOT / "docs").glob("*.md"))
    if path.suffixes == [".md"]
}
each_page = pytest.mark.parametrize("page", TWINS)
HAN = re.compile(r"[\u3400-\u9fff]+")
# A block that a program has written has words in a language, and figures in none.
FIGURE = re.compile(r"\d[\d,.]*\d|\d")
each_language = pytest.mark.parametrize("language", NAMES)
# a file's or a license's name in one language
_TWIN = re.compile(r"(?<=\.)(?:en|zh)\.(?=svg|png)|(?<=\.)zh\.(?=md$)|deed\.zh-hans$")


def parts_of(readme):
    """What must be the same in both languages, by kind."""
    blocks = re.findall(r"^```(.*?)^```", readme.replace("COURSE_LANG=zh ", ""), re.M | re.S)
    prose = re.sub(r"^```.*?^```|<!--.*?-->", "", readme, flags=re.M | re.S)
    links = re.findall(r"\]\(([^)\s]+)\)", prose)
    # a heading's anchor is in its language
    links = ["#" if link[0] == "#" else _TWIN.sub("", link) for link in links]
    prose = re.sub(r"\]\([^)\s]+\)", "]", prose)
    code = re.findall(r"`([^`\n]+)`", prose)
    # 第 00 课 is lesson 00; words for small numbers are compared by who reads both
    words = re.sub(r"`[^`\n]+`", "", prose)
    numbers = re.findall(r"(?<![\w.])\d[\d.]*\d|(?<![\w.])\d(?![\w.])", words)
    return {
        "headings": re.findall(r"^#+(?= )", prose, re.M),
        "blocks": blocks,
        "links": sorted(links),
        "code": sorted(code),
        "numbers": sorted(numbers),
        "rows": re.findall(r"^\| ?(\[?\d\d|---)", prose, re.M),
        "hosted": re.findall(r"<!-- (.*?) -->", readme),
    }


def differences(english, chinese):
    # each links to the other before anything else
    texts = (re.sub(r"^.*中文.*\n", "", text, count=1, flags=re.M) for text in (english, chinese))
    ours, theirs = map(parts_of, texts)
    for place, (own, other) in enumerate(zip(ours["blocks"], theirs["blocks"], strict=False)):
        if HAN.search(other) and FIGURE.findall(own) == FIGURE.findall(other):
            ours["blocks"][place] = other
    return [kind for kind in ours if ours[kind] != theirs[kind]]


# test_benchmarks compares the tables of the scoreboard
@pytest.mark.parametrize("page", sorted(TWINS.keys() - {"docs/scoreboard.md"}))
def test_both_languages_have_the_same_headings_code_numbers_and_links(page):
    texts = [(ROOT / name).read_text("utf-8") for name in (page, TWINS[page])]
    assert differences(*texts) == []


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("277.7 MB at", "277.8 MB at", "numbers"),
        ("17,859.0", "17,859.1", "blocks"),
        ("(CONTRIBUTING.md)", "(LICENSE)", "links"),
    ],
)
def test_what_was_changed_in_one_language_alone_is_found(old, new, kind):
    assert old in README["en"]
    assert kind in differences(README["en"].replace(old, new, 1), README["zh"])


@each_page
def test_each_page_is_in_one_language_and_links_the_other_before_anything_else(page):
    for name, other in ((page, TWINS[page]), (TWINS[page], page)):
        first, second = (ROOT / name).read_text("utf-8").split("\n\n")[:2]
        assert first.startswith("# ") and f"]({Path(other).name})" in second
    english = (ROOT / page).read_text("utf-8")
    assert HAN.findall(re.sub(r"\[中文\]|English, 中文 or both", "", english)) == []
    chinese = (ROOT / TWINS[page]).read_text("utf-8")
    prose = re.sub(r"```.*?```|`[^`]*`|“[^”]*”", "", chinese, flags=re.S)
    assert re.findall(r"(?:[a-z]{3,} ){3}[a-z]{3,}", prose) == []


@each_language
def test_audience_picture_and_three_doors_stand_on_the_first_screen(language):
    screen = README[language].partition("\n## ")[0]
    assert len(screen) < 2500
    assert "`CUDA out of memory`" in screen and "OOM" in screen
    assert all(word in screen for word in ("显存不足", "爆显存")) == (language == "zh")
    suffix = ".zh" * (language == "zh")
    doors = [
        f"]({IMAGES}/step.{language}.svg)",
        "(notebooks/00_start_here.ipynb)",
        f"(docs/out_of_memory{suffix}.md)",
        f"(docs/teaching{suffix}.md)",
    ]
    places = [screen.index(door) for door in doors]
    assert places == sorted(places)


@each_language
def test_the_counts_of_claims_are_those_of_the_lessons(language):
    outcomes = Counter(claim.outcome for number in LESSONS for claim in claims_of(number))
    counts = [outcomes.total(), *(outcomes[each] for each in ("holds", "partly", "fails"))]
    text = README[language].replace("\n", " ")
    (sentence,) = re.findall(r"[^.。]*(?:common claims|常见说法)[^.。]*", text)
    assert [int(count) for count in re.findall(r"\d+", sentence)] == counts


@pytest.mark.parametrize("page", [*TWINS, *TWINS.values()])
def test_every_link_of_a_page_leads_to_a_file_or_a_heading(page):
    text = (ROOT / page).read_text("utf-8")
    targets = {target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target}
    headings = re.findall(r"^#+ (.+)$", text, re.M)  # a code host gives them these names
    anchors = {"#" + re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}
    assert [
        name for name in targets - anchors if not (ROOT / page).parent.joinpath(name).is_file()
    ] == []


@each_language
def test_the_readme_links_every_lesson_and_every_page_of_docs(language):
    targets = re.findall(r"\]\(([^)\s#]+)\)", README[language])
    lessons = {path.relative_to(ROOT).as_posix() for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert lessons == {target for target in targets if target.endswith(".ipynb")}
    pages = {pair[language == "zh"] for pair in TWINS.items() if pair[0] != "README.md"}
    assert pages == {target for target in targets if target.startswith("docs/")}


def test_the_map_has_the_words_of_the_figure_in_both_languages():
    pytest.importorskip("matplotlib")
    from course_lib.lessons.lesson_00 import course_map
    from course_lib.teaching import pictures

    for language, words in zip(pictures.LANGUAGES, pictures.description(course_map()), strict=True):
        assert f"![{words}]({IMAGES}/map.{language}.svg)" in README[language]


@each_language
def test_every_target_of_the_makefile_that_the_pages_name_is_one(language):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    texts = [(ROOT / pair[language == "zh"]).read_text("utf-8") for pair in TWINS.items()]
    named = {name for text in texts for name in re.findall(r"(?:`|^)make ([\w-]+)", text, re.M)}
    assert {"lab", "test", "slides", "student", "grade", "pages", "site", "gpu"} <= named <= targets


@pytest.mark.parametrize("example", re.findall(r"^```python\n(.*?)^```", README["en"], re.M | re.S))
def test_an_example_of_the_readme_prints_what_it_says(example):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(example, {})
    promised = re.findall(r"^print\(.*\)  # (.+)$", example, re.M)
    assert promised and promised == printed.getvalue().splitlines()


@pytest.fixture(scope="module")
def result():
    """The result of the README's command: its recipe, and the steps on the way to it. They are
    estimated one by one, because the search takes several times as long."""
    line = re.search(r"course_lib\.budget (.*?)\n```", README["en"], re.S)[1].replace("\\", "")
    given = command.arguments().parse_args(shlex.split(line))
    torch_ = FRAMEWORKS["torch"]
    model, machine = workload_for(given, torch_), command._machine(given)
    base = Recipe(precision="bf16", attention=None)
    options = {"loss_sum": model.loss_sum, "tier": "host", "kind": "cuda", "max_norm": None}
    options["gpu"] = machine.rates.gpu
    estimate = EstimateCache(model.make_model, model.make_batch, base, **options).estimate
    best = estimate(replace(base, micro_batches=4, offload_optimizer=1.0))
    found = Estimates([best], machine.rates, estimate=estimate)
    return Result(model, machine, found, [ForFramework(torch_, model, found)], [])


@each_language
def test_the_readme_shows_what_its_command_prints(result, language, monkeypatch):
    monkeypatch.setattr(labels, "_chosen", None)  # another test may have chosen a language
    monkeypatch.setenv("COURSE_LANG", language)
    answer = "\n".join(map(labels.say, fits(result.found[0], result.machine)))
    for printed in (answer, result.answers[0].script, str(result.way)):
        assert f"```\n{printed}\n```\n" in README[language]


@each_language
def test_lesson_00_shows_the_command_and_the_table_of_the_readme(language):
    lesson = (ROOT / "notebooks/scripts/00_start_here.py").read_text("utf-8")
    row = r"^(\S.*?) {2,}([\d,]+\.\d) +([\d.]+) +([\d.]+)$"
    rows = re.findall(row, README[language], re.M)
    assert len(rows) == 3
    assert [row for row in rows if f"# | {' | '.join(row)} |" not in lesson] == []
    command = re.search(r"-m (course_lib\.budget .*?)\n```", README[language], re.DOTALL)[1]
    assert lesson.count(command.replace("\n", "\n# ")) == 2


# --- where the project is hosted ---

HOSTED = {
    "Repository": "https://example.org/group/course",
    "Documentation": "https://example.org/pages",
}


@pytest.fixture
def address():
    pytest.importorskip("nbformat", reason="the editions come with the extra `course`")
    from publish import address

    return address


@each_language
def test_the_readme_says_what_follows_from_the_projects_address_and_nothing_else(address, language):
    now = address.addresses(ROOT)
    assert README[language] == address.with_addresses(README[language], language, now), (
        "`make address` writes what follows from [project.urls]"
    )
    without = address.with_addresses(README[language], language, {})
    hosted = address.with_addresses(README[language], language, HOSTED)
    for there in (
        "git clone https://example.org/group/course\n",
        f"(https://example.org/pages/{language}/index.html)",
        "course/issues)",
        "badge.svg)",
    ):
        assert there in hosted and there not in without
    assert "mybinder" not in hosted  # which takes repositories of GitHub
    assert address.with_addresses(hosted, language, {}) == without
    with pytest.raises(ValueError, match=r"^a block must be one of .*, got 'gone'"):
        address.with_addresses("<!-- hosted: gone -->\n<!-- /hosted -->", language, {})
    half = address.with_addresses(without, language, {"Repository": HOSTED["Repository"]})
    assert "git clone" in half and "example.org/pages" not in half


@each_language
def test_a_repository_on_github_gets_badges_of_the_services_that_run_it(address, language):
    urls = {"Repository": "https://github.com/group/course.git"}
    hosted = address.with_addresses(README[language], language, urls)
    start, branch = "00_start_here.ipynb", address.PAGES_BRANCH
    for link in (
        f"//colab.research.google.com/github/group/course/blob/{branch}/{language}/{start})",
        f"//mybinder.org/v2/gh/group/course/HEAD?urlpath=lab/tree/work/{start})",
        "//codespaces.new/group/course)",
    ):
        assert hosted.count(f".svg)](https:{link}") == 1
    assert (ROOT / "notebooks" / start).exists()
    published = (ROOT / ".github/workflows/site.yml").read_text("utf-8")
    assert f"--initial-branch {branch}\n" in published


@pytest.mark.parametrize("wrong", ['Homepage = "https://a.org"', 'Repository = "a b"'])
def test_an_address_that_is_none_is_one_sentence(address, tmp_path, wrong):
    (tmp_path / "pyproject.toml").write_text(f"[project]\n[project.urls]\n{wrong}\n", "utf-8")
    with pytest.raises(ValueError, match=r"^\[project.urls\] must have only .*, got .+$"):
        address.addresses(tmp_path)


def test_the_citation_has_an_entity_as_author_and_the_version_and_addresses_of_the_project(address):
    yaml = pytest.importorskip("yaml")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    text = (ROOT / "CITATION.cff").read_text("utf-8")
    citation = yaml.safe_load(text)
    assert citation["authors"] == project["authors"] == [{"name": project["authors"][0]["name"]}]
    assert citation["version"] == project["version"] and citation["license"] == project["license"]
    assert text == address.citation_with(text, address.addresses(ROOT))
    hosted = address.citation_with(text, HOSTED)
    assert yaml.safe_load(hosted)["repository-code"] == HOSTED["Repository"]
    assert address.citation_with(hosted, {}) == text
