"""The website: each language has every lesson, claim and name, and no page asks another machine."""

import copy
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

import nbformat
import torch
from editions import NAMES, addresses_in, failure, loaded_addresses, small_course, stored_lessons

from course_lib.checkpoint import checkpoint_blocks
from course_lib.teaching import pictures
from publish import site
from publish.chinese import HAN
from publish.languages import LANGUAGES, PER_LANGUAGE, is_chinese, words_in

# warnings raised inside these packages
ignored = ("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
pytestmark = pytest.mark.filterwarnings(*ignored)
CODES = {"en": "en", "zh": "zh-CN"}
each_language = pytest.mark.parametrize("language", LANGUAGES)


@pytest.fixture(scope="module")
def pages(built_site):
    """Path relative to the site, "en/index.html" -> the HTML of a page."""
    return {
        path.relative_to(built_site).as_posix(): path.read_text("utf-8")
        for path in built_site.rglob("*.html")
    }


@pytest.fixture(scope="module")
def soups(pages):
    """The same pages, parsed; no test may change them."""
    return {name: BeautifulSoup(page, "html.parser") for name, page in pages.items()}


def pages_in(pages, language):
    """The pages of a language, by their paths in its folder."""
    names = [name for name in pages if name.startswith(f"{language}/")]
    return {name.partition("/")[2]: pages[name] for name in names}


def text_of(soup):
    """Return the text of a page, with single spaces."""
    return " ".join(soup.get_text().split())


# --- the whole site ---


def test_sphinx_has_nothing_to_complain_about(built_site):
    assert (built_site.parent / "warnings").read_text("utf-8") == ""


def test_no_page_and_no_style_loads_anything_from_another_machine(built_site, soups):
    loaded = {name: loaded_addresses(soup) for name, soup in soups.items()}
    for style in built_site.rglob("*.css"):
        loaded[style.name] = addresses_in(style.read_text("utf-8"))
    assert len(loaded["en/index.html"]) > 3 and loaded["furo.css"], "what is in the site is found"
    found = [(name, address) for name, each in loaded.items() for address in each]
    assert [pair for pair in found if re.match(r"(https?:)?//", pair[1])] == []


def test_every_link_within_the_site_leads_somewhere(built_site, pages):
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


def test_math_is_drawn_by_the_site_itself(built_site, pages):
    assert 'src="../_static/mathjax/tex-chtml.js' in pages["zh/notebooks/03_sqrt_schedule.html"]
    assert (built_site / "zh/_static/mathjax/tex-chtml.js").stat().st_size > 10**6


# --- two languages ---


@each_language
def test_each_page_has_one_language_leads_to_the_other_and_can_be_read_aloud(
    built_site, pages, soups, language
):
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
            led = {
                link["lang"]: (built_site / language / name).parent / link["href"]
                for link in switch.find_all("a")
            }
            assert {code: path.resolve() for code, path in led.items()} == {
                code: (built_site / folder / name).resolve() for folder, code in CODES.items()
            }, name
            assert switch.find("a", attrs={"aria-current": "true"})["lang"] == CODES[language]


NOT_PROSE = "script, style, pre, code, svg, .math, [hidden], noscript"
BLOCKS = re.compile("(?:p|td|th|li|h[123]|summary|figcaption|div|dd|dt|span)$")
ENGLISH = re.compile(r"[A-Za-z][a-z'’]+(?:[ ,]+[A-Za-z][a-z'’]*){2}")
# A paper, and a warning that a library prints, are the same in both languages.
CITED = re.compile(r"\w+ et al\. \d{4}，arXiv:[\d.]+|\w+Warning: .*")


def english_in(soup):
    """Return the English lines and alt texts of a page in Chinese."""
    # navigation and footer are on every page
    article = copy.copy(soup.article or soup)
    for hidden in article.select(NOT_PROSE):
        hidden.decompose()
    for br in article.find_all("br"):
        br.replace_with("\n")
    blocks = article.find_all(BLOCKS) + article.find_all("a")
    texts = [block.get_text() for block in blocks if not block.find(BLOCKS)]
    texts += [image["alt"] for image in article.find_all("img")]
    lines = {" ".join(line.split()) for text in texts for line in text.splitlines()}
    return {
        line
        for line in lines
        if ENGLISH.search(line) and not re.search(HAN, line) and not CITED.fullmatch(line)
    }


def test_in_chinese_no_page_shows_english_prose(soups):
    """The reference is in English, as it says itself; so are the names in the glossary's first
    column."""
    read = {
        name: soup
        for name, soup in pages_in(soups, "zh").items()
        if not re.match(r"api/(?!index)|genindex|py-modindex", name)
    }
    terms = {text_of(row.td) for row in read["notebooks/GLOSSARY.html"].select("tbody tr")}
    assert [(name, found) for name in read if (found := english_in(read[name]) - terms)] == []
    assert len(english_in(soups["en/docs/out_of_memory.html"])) > 10, "where it is, it is found"


def test_in_english_no_page_shows_chinese_prose(soups):
    """The glossary has the Chinese words next to the English ones."""
    found = {
        name: text
        for name, soup in pages_in(soups, "en").items()
        for text in soup.article.strings
        if is_chinese(text) and not text.find_parent(["pre", "code"])
    }
    assert found.keys() == {"notebooks/GLOSSARY.html"}


def test_theme_and_search_speak_the_language_of_the_page(built_site, soups):
    page = copy.copy(soups["zh/notebooks/03_sqrt_schedule.html"])
    assert page.title.text == "3 该忘掉哪些？（检查点的调度） - PyTorch 省显存训练"
    # furo has no translation of "Toggle navigation of", the label of a hidden checkbox
    for element in page.select(
        "article, .bottom-of-page, .sidebar-tree, .toc-tree, script, style, svg, title"
    ):
        element.decompose()
    labels = [tag.get("aria-label", "") + tag.get("title", "") for tag in page.find_all(True)]
    found = [line for line in [*page.strings, *labels] if re.search("[A-Za-z]{3}", line)]
    names = {"English", "Language 语言", "PyTorch 省显存训练"}
    assert {" ".join(line.split()) for line in found} <= names
    translations = (built_site / "zh/_static/translations.js").read_text("utf-8")
    assert json.dumps("正在搜索中") in translations


def test_search_engines_learn_both_addresses_once_the_site_has_one(pages, tmp_path, monkeypatch):
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


def data_of(notebook):
    """The data of all outputs."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output.get("data", {}) for output in outputs]


@each_language
@pytest.mark.parametrize("lesson", NAMES)
def test_every_notebook_is_a_page_with_its_outputs_folded_solutions_and_a_download(
    lesson, language, built_site, pages, soups
):
    page = pages[f"{language}/notebooks/{lesson}.html"]
    soup = soups[f"{language}/notebooks/{lesson}.html"]
    outputs = data_of(stored_lessons()[lesson])
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
    assert "interactive(children" not in page, "a slider without a kernel"
    assert not re.search(
        "three (?:buttons|dots)|三个按钮|三个点|也没有按钮|and no buttons", text_of(soup)
    )
    (link,) = soup.select("p.download > a[download]")
    path = built_site / language / "notebooks" / link["href"]
    cells = json.loads(path.read_text("utf-8"))["cells"]
    prose = "".join(
        line for cell in cells if cell["cell_type"] == "markdown" for line in cell["source"]
    )
    for words in (link.text, prose):
        assert words and is_chinese(words) == (language == "zh")


@pytest.mark.parametrize(
    ("source", "tag", "prompt"),
    [
        ("draw()", "hide-input", "Show the code"),
        ("### BEGIN SOLUTION\ndraw()\n### END SOLUTION", "hide-cell", "Show the solution"),
    ],
)
def test_a_folded_cell_hides_its_code_and_a_solution_its_output_too(source, tag, prompt):
    cell = nbformat.v4.new_code_cell(source, metadata={"jupyter": {"source_hidden": True}})
    site._dress(cell, "en")
    assert cell.metadata.tags == [tag] and cell.metadata.mystnb["code_prompt_show"] == prompt


@each_language
def test_the_page_of_claims_has_every_claim_of_the_lessons_and_how_many_hold(soups, language):
    page = soups[f"{language}/notebooks/claims.html"]
    words, there = text_of(page), []
    for lesson, notebook in stored_lessons().items():
        shown = [data.get("text/html", "") for data in data_of(notebook)]
        tables = BeautifulSoup("".join(each for each in shown if ">claim<" in each), "html.parser")
        rows = tables.select("tbody tr")
        claims = [text_of(row.find("span", lang=language)).replace("`", "") for row in rows]
        there += [f"claim-{int(lesson[:2])}-{place}" for place in range(1, len(claims) + 1)]
        assert [claim for claim in claims if claim not in words] == []
        assert not claims or page.find("a", href=re.compile(rf"{lesson}\.html#section-"))
    found = page.select("div.claim")
    assert len(there) > 10 and [claim["id"] for claim in found] == there
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


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("memory", "MemoryMeter measure saved_tensors", "PHASES"),
        ("checkpoint", "checkpoint_blocks checkpointed_loss", "CheckpointedBlocks"),
        ("offload", "offload_activations OffloadedOptimizer", "StoreFull"),
        ("budget", "Recipe estimate fit", "RATES"),
    ],
)
def test_the_reference_begins_with_what_a_reader_wants_first(name, first, last, pages):
    shown = re.findall(rf'<dt [^>]*id="course_lib\.{name}\.(\w+)"', pages[f"en/api/{name}.html"])
    assert " ".join(shown).startswith(f"{first} ") and shown[-1] == last


@pytest.mark.parametrize("name", MODULES)
def test_the_reference_lists_every_public_name(name, pages, soups):
    public = public_names(importlib.import_module(f"course_lib.{name}"))
    page = pages[f"en/api/{name}.html"]
    for each in public:
        assert f'id="course_lib.{name}.{each}"' in page or f'pre">{each}</span>' in page, each
    assert re.search(r'<section [^>]*lang="en-US"', page), "English, and never hidden"
    text = text_of(soups[f"en/api/{name}.html"])
    assert not re.search(r"\(\w+,\) –", text), "every attribute stands by its own name"


def test_the_reference_describes_a_name_where_it_is_defined(pages):
    memory = pages["en/api/memory.html"]
    # members of a base that is not public
    for each in ("peak_bytes", "live_bytes", "timeline", "at_peak", "trace", "plot"):
        assert f'id="course_lib.memory.MemoryMeter.{each}"' in memory, each
    assert "ObserverMode" not in memory
    assert 'id="course_lib.symbolic.cast"' in pages["en/api/symbolic.html"]
    assert 'id="course_lib.memory.cast"' not in memory
    assert "The same as in ``course_lib.symbolic``: ``symbolic``, ``cast``." in site._api_page(
        "memory"
    )
    assert "The same as" not in site._api_page("symbolic")
    # `memory` gives this name on request, and describes it
    assert 'id="course_lib.memory.CachingAllocator"' in memory


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_the_reference_run_and_give_what_they_say(name):
    module = importlib.import_module(f"course_lib.{name}")
    names = {each: getattr(module, each) for each in public_names(module)}
    begun = {"torch": torch, "nn": torch.nn, **names}
    finder, runner, said = doctest.DocTestFinder(), doctest.DocTestRunner(verbose=False), []
    examples = finder.find(module, globs=begun)
    for key, value in names.items():
        if callable(value) and value.__module__.startswith("course_lib."):
            examples += finder.find(value, key, module=False, globs=begun)
    for each in examples:
        runner.run(each, out=said.append)
    assert runner.tries > 0 and runner.failures == 0, "".join(said)


def test_the_reference_leaves_the_library_as_it_is(built_site):
    # autodoc would replace it
    assert inspect.signature(checkpoint_blocks).parameters["first"].default is None


# --- the search, the front page ---


OUT_OF_MEMORY = ("显存不足", "爆显存", "显存优化", "显存碎片")


@pytest.mark.parametrize(
    ("language", "page", "words"),
    [
        ("en", "notebooks/02_checkpointing", ["checkpoint", "recomputing"]),
        ("zh", "notebooks/02_checkpointing", ["checkpoint", "检查点", "峰"]),
        ("en", "docs/out_of_memory", ["CUDA memory", "OOM", "fragmentation", *OUT_OF_MEMORY]),
        ("zh", "docs/out_of_memory", ["CUDA memory 怎么办", *OUT_OF_MEMORY]),
    ],
)
def test_the_search_finds_english_stems_and_chinese_by_one_character_or_two(
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
def test_the_front_page_is_the_readme_as_the_site_shows_it(soups, language):
    page = soups[f"{language}/index.html"]
    assert page.article.h1 and page.article.find("a", href="notebooks/01_memory_bottleneck.html")
    assert page.article.find("a", href="docs/out_of_memory.html")
    assert "VS Code show" not in page.article.text and "hosted:" not in str(page)
    badge = "# S\n\n[![Open in X](https://x.org/badge.svg)](https://x.org/run)\n"
    assert "\n[Open in X](https://x.org/run)" in site._for_the_site(badge)


# --- bad input that only the site can have ---


def test_a_package_that_is_missing_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(site.PACKAGES, "no_such_module", "no-such-package")
    assert "no-such-package" in failure(site, small_course(tmp_path), capsys)


def test_an_error_within_sphinx_gives_one_sentence(tmp_path, capsys, monkeypatch):
    assets = shutil.copytree(site.ASSETS, tmp_path / "assets")
    (assets / "conf.py").write_text("raise RuntimeError('broken')", "utf-8")
    monkeypatch.setattr(site, "ASSETS", assets)
    monkeypatch.setattr(site, "MODULES", ())
    assert "RuntimeError: broken" in failure(site, small_course(tmp_path), capsys)
