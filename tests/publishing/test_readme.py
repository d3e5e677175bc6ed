"""Test the READMEs and the pages of docs/.

Both languages must agree, links must have targets, and examples must print what the page shows.
"""

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
from course_lib.budget.answer import FrameworkAnswer, workload_for
from course_lib.budget.report import Result, answer_lines
from course_lib.budget.scripts import FRAMEWORKS
from course_lib.budget.search.estimate_cache import EstimateCache
from course_lib.budget.search.fit import Estimates
from course_lib.lessons import LESSONS, claims_of

ROOT = Path(__file__).parents[2]
IMAGES = "publish/images"
NAMES = {"en": "README.md", "zh": "README.zh.md"}
README = {language: (ROOT / name).read_text(encoding="utf-8") for language, name in NAMES.items()}
# English page -> Chinese page
TRANSLATIONS = {"README.md": "README.zh.md"} | {
    f"docs/{path.name}": f"docs/{path.stem}.zh.md"
    for path in sorted((ROOT / "docs").glob("*.md"))
    if path.suffixes == [".md"]
}
each_page = pytest.mark.parametrize("page", TRANSLATIONS)
HAN = re.compile(r"[\u3400-\u9fff]+")
NUMBER = re.compile(r"\d[\d,.]*\d|\d")
each_language = pytest.mark.parametrize("language", NAMES)
# part of a file's or license's name that depends on the language
_LANGUAGE_SUFFIX = re.compile(r"(?<=\.)(?:en|zh)\.(?=svg|png)|(?<=\.)zh\.(?=md$)|deed\.zh-hans$")


def parts_of(readme):
    """Return the parts that must be the same in both languages, by kind."""
    same = readme.replace("COURSE_LANG=zh ", "").replace(" LANGUAGE=zh\n", "\n")
    blocks = re.findall(r"^```(.*?)^```", same, re.M | re.S)
    prose = re.sub(r"^```.*?^```|<!--.*?-->", "", readme, flags=re.M | re.S)
    links = re.findall(r"\]\(([^)\s]+)\)", prose)
    # a heading's anchor is in its language
    links = ["#" if link[0] == "#" else _LANGUAGE_SUFFIX.sub("", link) for link in links]
    prose = re.sub(r"\]\([^)\s]+\)", "]", prose)
    code = re.findall(r"`([^`\n]+)`", prose)
    # 第 00 课 is lesson 00
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
    """Return the kinds of parts in which two translations differ."""
    # the links to each other's language differ
    texts = (re.sub(r"^.*中文.*\n", "", text, count=1, flags=re.M) for text in (english, chinese))
    ours, theirs = map(parts_of, texts)
    for place, (own, other) in enumerate(zip(ours["blocks"], theirs["blocks"], strict=False)):
        # the output of a program has other words and the same numbers
        if HAN.search(other) and NUMBER.findall(own) == NUMBER.findall(other):
            ours["blocks"][place] = other
    return [kind for kind in ours if ours[kind] != theirs[kind]]


# `make bench` writes the scoreboard in both languages
@pytest.mark.parametrize("page", sorted(TRANSLATIONS.keys() - {"docs/scoreboard.md"}))
def test_translated_pages_have_equal_headings_code_numbers_and_links(page):
    texts = [(ROOT / name).read_text("utf-8") for name in (page, TRANSLATIONS[page])]
    assert differences(*texts) == []


@each_page
def test_documentation_page_is_monolingual_and_links_its_translation(page):
    for name, other in ((page, TRANSLATIONS[page]), (TRANSLATIONS[page], page)):
        first, second = (ROOT / name).read_text("utf-8").split("\n\n")[:2]
        assert first.startswith("# ") and f"]({Path(other).name})" in second
    english = (ROOT / page).read_text("utf-8")
    assert HAN.findall(re.sub(r"\[中文\]|English, 中文 or both", "", english)) == []
    chinese = (ROOT / TRANSLATIONS[page]).read_text("utf-8")
    prose = re.sub(r"```.*?```|`[^`]*`|“[^”]*”", "", chinese, flags=re.S)
    assert re.findall(r"(?:[a-z]{3,} ){3}[a-z]{3,}", prose) == []


@each_language
def test_readme_states_correct_counts_of_claims_in_lessons(language):
    outcomes = Counter(claim.outcome for number in LESSONS for claim in claims_of(number))
    counts = [outcomes.total(), *(outcomes[each] for each in ("holds", "partly", "fails"))]
    text = README[language].replace("\n", " ")
    (sentence,) = re.findall(r"[^.。]*(?:common claims|常见说法)[^.。]*", text)
    assert [int(count) for count in re.findall(r"\d+", sentence)] == counts


@pytest.mark.parametrize("page", [*TRANSLATIONS, *TRANSLATIONS.values()])
def test_page_links_lead_to_existing_files_or_headings(page):
    text = (ROOT / page).read_text("utf-8")
    targets = {target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target}
    headings = re.findall(r"^#+ (.+)$", text, re.M)  # a code host gives them these names
    anchors = {"#" + re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}
    assert [
        name for name in targets - anchors if not (ROOT / page).parent.joinpath(name).is_file()
    ] == []


@each_language
def test_make_targets_named_on_documentation_pages_exist(language):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    texts = [(ROOT / pair[language == "zh"]).read_text("utf-8") for pair in TRANSLATIONS.items()]
    named = {name for text in texts for name in re.findall(r"(?:`|^)make ([\w-]+)", text, re.M)}
    assert {"lab", "test", "slides", "student", "grade", "pages", "site", "gpu"} <= named <= targets


def blocks_of(page):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.M | re.S)


# the blocks of "FSDP2 in practice" are parts of one program
@pytest.mark.parametrize("code", [*blocks_of("README.md"), "\n".join(blocks_of("docs/fsdp2.md"))])
def test_output_of_code_on_page_equals_its_comments(code):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {})
    promised = re.findall(r"^print\(.*\)  # (.+)$", code, re.M)
    assert promised and promised == printed.getvalue().splitlines()


@pytest.fixture(scope="module")
def result():
    """Estimate the recipe of the README's command; a search would take several times as long."""
    line = re.search(r"course_lib\.budget (.*?)\n```", README["en"], re.S)[1].replace("\\", "")
    options = command.arguments().parse_args(shlex.split(line))
    torch_ = FRAMEWORKS["torch"]
    model, machine = workload_for(options, torch_), command._machine(options)
    base = Recipe(precision="bf16", attention=None)
    options = {"loss_sum": model.loss_sum, "tier": "host", "kind": "cuda", "max_norm": None}
    options["gpu"] = machine.rates.gpu
    estimate = EstimateCache(model.make_model, model.make_batch, base, **options).estimate
    best = estimate(replace(base, micro_batches=4, offload_optimizer=1.0))
    estimates = Estimates([best], machine.rates, estimate=estimate)
    return Result(model, machine, estimates, [FrameworkAnswer(torch_, model, estimates)], [])


@each_language
def test_readme_shows_output_of_its_command(result, language, monkeypatch):
    monkeypatch.setattr(labels, "_chosen", None)  # another test may have chosen a language
    monkeypatch.setenv("COURSE_LANG", language)
    answer = "\n".join(map(labels.say, answer_lines(result.found[0], result.machine)))
    for printed in (answer, result.answers[0].script, str(result.steps)):
        assert f"```\n{printed}\n```\n" in README[language]


@each_language
def test_lesson_00_repeats_command_and_table_of_readme(language):
    lesson = (ROOT / "notebooks/scripts/00_start_here.py").read_text("utf-8")
    row = r"^(\S.*?) {2,}([\d,]+\.\d) +([\d.]+) +([\d.]+)$"
    rows = re.findall(row, README[language], re.M)
    assert len(rows) == 3
    assert [row for row in rows if f"# | {' | '.join(row)} |" not in lesson] == []
    command = re.search(r"-m (course_lib\.budget .*?)\n```", README[language], re.DOTALL)[1]
    assert lesson.count(command.replace("\n", "\n# ")) == 2


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
def test_readme_addresses_match_project_urls(address, language):
    current = address.addresses(ROOT)
    assert README[language] == address.with_addresses(README[language], language, current), (
        "run `make address` after a change of [project.urls]"
    )
    with pytest.raises(ValueError, match="got 'gone'"):
        address.with_addresses("<!-- hosted: gone -->\n<!-- /hosted -->", language, {})


@each_language
@pytest.mark.parametrize(
    ("urls", "shown", "hidden"),
    [
        ({}, (), ("git clone", "example.org", "/issues)", "badge.svg)")),
        (
            HOSTED,
            (
                "git clone --depth 1 https://example.org/group/course\n",
                "(https://example.org/pages/{language}/index.html)",
                "course/issues)",
                "badge.svg)",
            ),
            ("mybinder",),  # it requires a repository on GitHub
        ),
        ({"Repository": HOSTED["Repository"]}, ("git clone",), ("example.org/pages",)),
        (
            {"Repository": "https://github.com/group/course.git"},
            (
                "//colab.research.google.com/github/group/course/blob/BRANCH/{language}/00_start_here",
                "//mybinder.org/v2/gh/group/course/HEAD?urlpath=lab/tree/work/00_start_here",
                "//codespaces.new/group/course)",
            ),
            (),
        ),
    ],
)
def test_readme_links_hosting_services_of_project_urls(address, language, urls, shown, hidden):
    text = address.with_addresses(README[language], language, urls)
    for link in shown:
        link = link.replace("BRANCH", address.PAGES_BRANCH)
        assert text.count(link.format(language=language)) == 1
    assert [link for link in hidden if link in text] == []
    without = address.with_addresses(README[language], language, {})
    assert address.with_addresses(text, language, {}) == without


@pytest.mark.parametrize("wrong", ['Homepage = "https://a.org"', 'Repository = "a b"'])
def test_invalid_project_url_raises(address, tmp_path, wrong):
    (tmp_path / "pyproject.toml").write_text(f"[project]\n[project.urls]\n{wrong}\n", "utf-8")
    with pytest.raises(ValueError, match=r"^\[project.urls\] must have only .*, got .+$"):
        address.addresses(tmp_path)


def test_citation_agrees_with_project_metadata(address):
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
