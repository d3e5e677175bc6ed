"""Test the website: pages, languages, reference and search, as Sphinx builds them offline."""

import doctest
import html
import importlib
import importlib.util
import json
import re
import shutil

import pytest

BeautifulSoup = pytest.importorskip("bs4").BeautifulSoup
for package in ("sphinx", "myst_nb", "furo", "jupytext", "nbformat"):
    pytest.importorskip(package, reason="the site's packages come with the extra `test`")

import torch
from edition_fixtures import NAMES, failure, small_course, stored_lessons

from course_lib.lessons import LESSONS, claims_of
from course_lib.teaching import pictures
from publish import site
from publish.languages import LANGUAGES, PER_LANGUAGE, is_chinese, words_in

# warnings raised inside these packages
ignored = ("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
pytestmark = pytest.mark.filterwarnings(*ignored)
CODES = {"en": "en", "zh": "zh-CN"}
each_language = pytest.mark.parametrize("language", LANGUAGES)


@pytest.fixture(scope="module")
def pages(built_site):
    """Return the HTML of each page by its path, such as "en/index.html"."""
    return {
        path.relative_to(built_site).as_posix(): path.read_text("utf-8")
        for path in built_site.rglob("*.html")
    }


@pytest.fixture(scope="module")
def soups(pages):
    """Return the pages by language and path, parsed without code; no test may change them."""
    code = re.compile("(<pre>).*?(?=</pre>)", re.S)
    return {
        language: {
            name.removeprefix(f"{language}/"): BeautifulSoup(code.sub(r"\1", page), "html.parser")
            for name, page in pages.items()
            if name.startswith(f"{language}/")
        }
        for language in LANGUAGES
    }


def test_sphinx_build_has_no_warnings(built_site):
    assert (built_site.parent / "warnings").read_text("utf-8") == ""


def test_links_within_site_have_targets_and_sources_are_local(built_site, pages):
    names = {name: set(re.findall(r'\bid="([^"]+)"', page)) for name, page in pages.items()}
    wrong = []
    for name, page in pages.items():
        for kind, address in set(re.findall(r'\b(href|src)="([^"]+)"', page)):
            if re.match(r"[a-z]+:|//", address):
                wrong += [address] if kind == "src" and not address.startswith("data:") else []
                continue
            path, _, anchor = html.unescape(address).partition("#")
            here = built_site / name
            target = here.parent / path.partition("?")[0] if path else here
            other = target.resolve().relative_to(built_site.resolve()).as_posix()
            if not target.exists() or (anchor and other in names and anchor not in names[other]):
                wrong.append(f"{name}: {address}")
    assert wrong == []


@each_language
def test_site_page_is_accessible_and_links_its_translation(built_site, pages, soups, language):
    (other,) = CODES.keys() - {language}
    names = {"en": ["Site", "On this page"], "zh": ["全站", "本页内容"]}[language]
    assert soups[language].keys() == soups[other].keys()
    for name, soup in soups[language].items():
        assert soup.html["lang"] == CODES[language] and "<" not in soup.title.text, name
        assert soup.find_all(PER_LANGUAGE, lang=other) == [], name
        assert [aside["aria-label"] for aside in soup.find_all("aside")] == names, name
        assert len(soup.find_all("h1")) == 1, name
        assert all(header.get_text(strip=True) for header in soup.find_all("th")), name
        assert all(len(image.get("alt", "")) >= 9 for image in soup.find_all("img")), name
        assert "Toggle hidden content" not in pages[f"{language}/{name}"], name
        switches = soup.select("nav.language-switch")
        assert len(switches) == 2, name  # in the sidebar, and in the header of a narrow screen
        for switch in switches:
            targets = {
                link["lang"]: (built_site / language / name).parent / link["href"]
                for link in switch.find_all("a")
            }
            assert {code: path.resolve() for code, path in targets.items()} == {
                code: (built_site / folder / name).resolve() for folder, code in CODES.items()
            }, name
            assert switch.find("a", attrs={"aria-current": "true"})["lang"] == CODES[language]


@each_language
@pytest.mark.parametrize("lesson", NAMES)
def test_notebook_page_has_outputs_folded_solutions_and_download(
    lesson, language, built_site, pages, soups
):
    page = pages[f"{language}/notebooks/{lesson}.html"]
    soup = soups[language][f"notebooks/{lesson}.html"]
    cells = stored_lessons()[lesson].cells
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    stored = [pictures.pictures_in(data.get("text/html", "")) for data in outputs]
    shown = soup.article.select("figure[lang] > img")
    assert [(tag.parent["lang"], tag["alt"]) for tag in shown] == [
        (language, found[language].alt) for found in stored if found
    ]
    assert "course-language" not in page, "the notebook's own switch"
    folded = "".join(re.findall(r"<details.*?</details>", page, re.S))
    assert page.count("BEGIN SOLUTION") == folded.count("BEGIN SOLUTION")
    code = [cell for cell in cells if cell.cell_type == "code"]
    hidden = [cell for cell in code if "source_hidden" in cell.metadata.get("jupyter", {})]
    prompts = [site._FOLDS[kind, language][0] for kind in ("code", "solution")]
    assert sum(map(folded.count, prompts)) == len(hidden)
    assert "interactive(children" not in page, "a slider without a kernel"
    (link,) = soup.select("p.download > a[download]")
    path = built_site / language / "notebooks" / link["href"]
    first = "".join(json.loads(path.read_text("utf-8"))["cells"][0]["source"])
    assert is_chinese(link.text) == is_chinese(first) == (language == "zh")


@each_language
def test_claims_page_lists_claims_and_outcomes_of_all_lessons(soups, language):
    page = soups[language]["notebooks/claims.html"]
    words, ids = " ".join(page.get_text().split()), []
    for number in LESSONS:
        claims = [words_in(each.claim, language).replace("`", "") for each in claims_of(number)]
        ids += [f"claim-{int(number)}-{place}" for place in range(1, len(claims) + 1)]
        assert [claim for claim in claims if claim not in words] == []
        assert not claims or page.find("a", href=re.compile(rf"{number}_\w+\.html#section-"))
    found = page.select("div.claim")
    assert len(ids) > 10 and [claim["id"] for claim in found] == ids


MODULES = [name for name in site.MODULES if importlib.util.find_spec(f"course_lib.{name}")]


def public_names(module):
    own = [
        key
        for key, value in vars(module).items()
        if key[0] != "_" and getattr(value, "__module__", None) == module.__name__
    ]
    return list(getattr(module, "__all__", own))


@pytest.mark.parametrize("name", MODULES)
def test_api_reference_lists_every_public_name(name, pages):
    public = public_names(importlib.import_module(f"course_lib.{name}"))
    page = pages[f"en/api/{name}.html"]
    for each in public:
        assert f'id="course_lib.{name}.{each}"' in page or f'pre">{each}</span>' in page, each
    assert re.search(r'<section [^>]*lang="en-US"', page), "English is marked"


def test_api_reference_documents_names_only_in_defining_module(pages):
    memory = pages["en/api/memory.html"]
    # members of a base that is not public
    assert 'id="course_lib.memory.MemoryMeter.peak_bytes"' in memory
    assert "ObserverMode" not in memory
    assert 'id="course_lib.symbolic.cast"' in pages["en/api/symbolic.html"]
    assert 'id="course_lib.memory.cast"' not in memory


@pytest.mark.parametrize("name", MODULES)
def test_api_reference_examples_print_documented_results(name):
    module = importlib.import_module(f"course_lib.{name}")
    names = {each: getattr(module, each) for each in public_names(module)}
    start = {"torch": torch, "nn": torch.nn, **names}
    finder, runner, report = doctest.DocTestFinder(), doctest.DocTestRunner(verbose=False), []
    examples = finder.find(module, globs=start)
    for key, value in names.items():
        if callable(value) and value.__module__.startswith("course_lib."):
            examples += finder.find(value, key, module=False, globs=start)
    for each in examples:
        runner.run(each, out=report.append)
    assert runner.tries > 0 and runner.failures == 0, "".join(report)


@each_language
def test_front_page_is_readme_with_links_to_site_pages(soups, language):
    page = soups[language]["index.html"]
    assert page.article.h1 and page.article.find("a", href="notebooks/01_memory_bottleneck.html")
    assert page.article.find("a", href="docs/out_of_memory.html")
    assert "VS Code show" not in page.article.text and "hosted:" not in str(page)
    badge = "# S\n\n[![Open in X](https://x.org/badge.svg)](https://x.org/run)\n"
    assert "\n[Open in X](https://x.org/run)" in site._for_the_site(badge)


def test_site_build_reports_sphinx_error_in_one_sentence(tmp_path, capsys, monkeypatch):
    assets = shutil.copytree(site.ASSETS, tmp_path / "assets")
    (assets / "conf.py").write_text("raise RuntimeError('broken')", "utf-8")
    monkeypatch.setattr(site, "ASSETS", assets)
    monkeypatch.setattr(site, "MODULES", ())
    assert "RuntimeError: broken" in failure(site, small_course(tmp_path), capsys)
