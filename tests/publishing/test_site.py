"""Test the website: pages, languages, reference and search, as Sphinx builds them offline."""

import doctest
import html
import importlib
import importlib.util
import inspect
import json
import re
import shutil

import pytest

BeautifulSoup = pytest.importorskip("bs4").BeautifulSoup
for package in ("sphinx", "myst_nb", "furo", "jupytext", "nbformat"):
    pytest.importorskip(package, reason="the site's packages come with the extra `test`")

import torch
from edition_fixtures import (
    NAMES,
    addresses_in,
    failure,
    loaded_addresses,
    small_course,
    stored_lessons,
)

from course_lib.checkpoint import checkpoint_blocks
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
    """Return the same pages, parsed; no test may change them."""
    return {name: BeautifulSoup(page, "html.parser") for name, page in pages.items()}


def pages_in(pages, language):
    """Return the pages of a language by their paths in its folder."""
    names = [name for name in pages if name.startswith(f"{language}/")]
    return {name.partition("/")[2]: pages[name] for name in names}


def text_of(soup):
    """Return the text of a page, with single spaces."""
    return " ".join(soup.get_text().split())


# --- the whole site ---


def test_sphinx_build_has_no_warnings(built_site):
    assert (built_site.parent / "warnings").read_text("utf-8") == ""


def test_site_loads_no_resources_from_other_hosts(built_site, soups):
    loaded = {name: loaded_addresses(soup) for name, soup in soups.items()}
    for style in built_site.rglob("*.css"):
        loaded[style.name] = addresses_in(style.read_text("utf-8"))
    assert len(loaded["en/index.html"]) > 3 and loaded["furo.css"]
    found = [(name, address) for name, each in loaded.items() for address in each]
    assert [pair for pair in found if re.match(r"(https?:)?//", pair[1])] == []


def test_links_within_site_have_targets(built_site, pages):
    names = {name: set(re.findall(r'\bid="([^"]+)"', page)) for name, page in pages.items()}
    dead = []
    for name, page in pages.items():
        for address in map(html.unescape, set(re.findall(r'\b(?:href|src)="([^"]+)"', page))):
            if re.match(r"[a-z]+:|//", address):
                continue
            path, _, anchor = address.partition("#")
            here = built_site / name
            target = here.parent / path.partition("?")[0] if path else here
            other = target.resolve().relative_to(built_site.resolve()).as_posix()
            if not target.exists() or (anchor and other in names and anchor not in names[other]):
                dead.append(f"{name}: {address}")
    assert dead == []


def test_site_includes_mathjax(built_site, pages):
    assert 'src="../_static/mathjax/tex-chtml.js' in pages["zh/notebooks/03_sqrt_schedule.html"]
    assert (built_site / "zh/_static/mathjax/tex-chtml.js").stat().st_size > 10**6


# --- two languages ---


@each_language
def test_site_page_is_accessible_and_links_its_translation(built_site, pages, soups, language):
    (other,) = {"en", "zh"} - {language}
    names = {"en": ["Site", "On this page"], "zh": ["全站", "本页内容"]}[language]
    tree = pages_in(soups, language)
    assert tree.keys() == pages_in(soups, other).keys()
    for name, soup in tree.items():
        assert soup.html["lang"] == CODES[language] and "<" not in soup.title.text, name
        assert soup.find_all(PER_LANGUAGE, lang=other) == [], name
        assert [aside["aria-label"] for aside in soup.find_all("aside")] == names, name
        assert len(soup.find_all("h1")) == 1, name
        assert all(text_of(header) for header in soup.find_all("th")), name
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


def test_english_pages_show_no_chinese_prose(soups):
    """Expect Chinese in the glossary only, which lists the terms of both languages."""
    found = {
        name: text
        for name, soup in pages_in(soups, "en").items()
        for text in soup.article.strings
        if is_chinese(text) and not text.find_parent(["pre", "code"])
    }
    assert found.keys() == {"notebooks/GLOSSARY.html"}


def test_chinese_pages_have_chinese_title_and_search(built_site, soups):
    page = soups["zh/notebooks/03_sqrt_schedule.html"]
    assert page.title.text == "3 该忘掉哪些？（检查点的调度） - PyTorch 省显存训练"
    translations = (built_site / "zh/_static/translations.js").read_text("utf-8")
    assert json.dumps("正在搜索中") in translations


def test_pages_have_hreflang_links_if_documentation_address_is_set(pages, tmp_path, monkeypatch):
    monkeypatch.setattr(site, "MODULES", ())
    monkeypatch.setattr(site, "LANGUAGES", ("zh",))  # one is enough, and takes half of the time
    assert not any('rel="alternate"' in page for page in pages.values())
    small = small_course(tmp_path)
    urls = '[project.urls]\nDocumentation = "https://example.org/course"\n'
    (small / "pyproject.toml").write_text(f"[project]\n{urls}", "utf-8")
    site.build(small / "notebooks", small / "old")
    page = (small / "old/zh/notebooks/00_a.html").read_text("utf-8")
    links = BeautifulSoup(page, "html.parser").find_all("link", rel="alternate")
    assert {link["hreflang"]: link["href"] for link in links} == {
        code: f"https://example.org/course/{folder}/notebooks/00_a.html"
        for folder, code in CODES.items()
    }


# --- the lessons ---


@each_language
@pytest.mark.parametrize("lesson", NAMES)
def test_notebook_page_has_outputs_folded_solutions_and_download(
    lesson, language, built_site, pages, soups
):
    page = pages[f"{language}/notebooks/{lesson}.html"]
    soup = soups[f"{language}/notebooks/{lesson}.html"]
    cells = stored_lessons()[lesson].cells
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    stored = [pictures.pictures_in(data.get("text/html", "")) for data in outputs]
    shown = soup.article.select("figure[lang] > img")
    assert [(tag.parent["lang"], tag["alt"]) for tag in shown] == [
        (language, found[language].alt) for found in stored if found
    ]
    tables = sum("<table" in data.get("text/html", "") for data in outputs)
    assert page.count("<table") >= tables
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
    cells = json.loads(path.read_text("utf-8"))["cells"]
    prose = "".join(
        line for cell in cells if cell["cell_type"] == "markdown" for line in cell["source"]
    )
    for words in (link.text, prose):
        assert words and is_chinese(words) == (language == "zh")


@each_language
def test_claims_page_lists_claims_and_outcomes_of_all_lessons(soups, language):
    page = soups[f"{language}/notebooks/claims.html"]
    words, ids = text_of(page), []
    for number in LESSONS:
        claims = [words_in(each.claim, language).replace("`", "") for each in claims_of(number)]
        ids += [f"claim-{int(number)}-{place}" for place in range(1, len(claims) + 1)]
        assert [claim for claim in claims if claim not in words] == []
        assert not claims or page.find("a", href=re.compile(rf"{number}_\w+\.html#section-"))
    found = page.select("div.claim")
    assert len(ids) > 10 and [claim["id"] for claim in found] == ids
    outcomes = [outcome for claim in found for outcome in claim["class"]]
    sums = site._sums(*map(outcomes.count, ("fails", "partly", "holds")))
    assert words_in(sums, language) in [text_of(each) for each in page.find_all("strong")]


# --- the reference ---


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


def test_site_build_leaves_library_unchanged(built_site):
    # autodoc would replace it
    assert inspect.signature(checkpoint_blocks).parameters["first"].default is None


# --- the search, the front page ---


OUT_OF_MEMORY = ("显存不足", "爆显存", "显存优化", "显存碎片")


@pytest.mark.parametrize(
    ("language", "page", "words"),
    [
        ("en", "docs/out_of_memory", ["CUDA memory", "OOM", "fragmentation", *OUT_OF_MEMORY]),
        ("zh", "docs/out_of_memory", ["CUDA memory 怎么办", "峰", *OUT_OF_MEMORY]),
    ],
)
def test_site_search_index_contains_english_stems_and_chinese_words(
    built_site, language, page, words
):
    spec = importlib.util.spec_from_file_location("site_conf", site.ASSETS / "conf.py")
    settings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(settings)
    search = settings.EnglishAndChinese({})
    parts = [part for text in words for part in search.split(text) if len(part) > 1 or part == text]
    index = (built_site / language / "searchindex.js").read_text("utf-8")
    index = json.loads(index.removeprefix("Search.setIndex(").rstrip(";)\n"))
    number = index["docnames"].index(page)
    for stem in {search.stem(part.lower()) for part in parts}:
        found = [index[terms].get(stem, []) for terms in ("terms", "titleterms")]
        # a number stands alone where a word is on one page
        assert any(number in (each if isinstance(each, list) else [each]) for each in found), stem


@each_language
def test_front_page_is_readme_with_links_to_site_pages(soups, language):
    page = soups[f"{language}/index.html"]
    assert page.article.h1 and page.article.find("a", href="notebooks/01_memory_bottleneck.html")
    assert page.article.find("a", href="docs/out_of_memory.html")
    assert "VS Code show" not in page.article.text and "hosted:" not in str(page)
    badge = "# S\n\n[![Open in X](https://x.org/badge.svg)](https://x.org/run)\n"
    assert "\n[Open in X](https://x.org/run)" in site._for_the_site(badge)


# --- errors of the site alone ---


def test_site_build_without_required_package_names_package(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(site.PACKAGES, "no_such_module", "no-such-package")
    assert "no-such-package" in failure(site, small_course(tmp_path), capsys)


def test_site_build_reports_sphinx_error_in_one_sentence(tmp_path, capsys, monkeypatch):
    assets = shutil.copytree(site.ASSETS, tmp_path / "assets")
    (assets / "conf.py").write_text("raise RuntimeError('broken')", "utf-8")
    monkeypatch.setattr(site, "ASSETS", assets)
    monkeypatch.setattr(site, "MODULES", ())
    assert "RuntimeError: broken" in failure(site, small_course(tmp_path), capsys)
