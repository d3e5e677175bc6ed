"""The website: each language has every lesson, claim and public name, and no page asks another
machine."""

import doctest
import html
import importlib
import importlib.util
import inspect
import json
import re
import shutil
import types
from pathlib import Path

import pytest

BeautifulSoup = pytest.importorskip("bs4").BeautifulSoup
for package in ("sphinx", "myst_nb", "furo", "jupytext", "nbformat"):
    pytest.importorskip(package, reason="the site's packages come with the extra `test`")

import nbformat
import torch
from editions import (
    failure,
    write_lesson,
)

from course_lib.checkpoint import checkpoint
from course_lib.teaching import pictures
from publish import site
from publish.cells import STAMP
from publish.languages import HAN, LANGUAGES, PER_LANGUAGE, is_chinese, words_in

pytestmark = [  # the packages' own, of which they know
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
]
ROOT = Path(__file__).parents[1]
LESSONS = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"))


@pytest.fixture(scope="module")
def pages(built_site):
    """Path relative to the site, "en/index.html" -> the HTML of a page."""
    return {
        path.relative_to(built_site).as_posix(): path.read_text("utf-8")
        for language in LANGUAGES
        for path in (built_site / language).rglob("*.html")
    }


def pages_in(pages, language):
    """Path relative to the folder of the language -> HTML."""
    names = [name for name in pages if name.startswith(f"{language}/")]
    return {name.partition("/")[2]: pages[name] for name in names}


def text_of(page):
    """What stands in a page, without tags, with single spaces."""
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", page)))


# --- the whole site ---


def test_sphinx_has_nothing_to_complain_about(built_site):
    assert (built_site.parent / "warnings").read_text("utf-8") == ""


def outside_requests(page):
    """Addresses of other machines that a browser would load with the page; links to follow are
    none."""
    loaded = re.findall(
        r"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*?\s(?:src|srcset)=\"([^\"]*)\"",
        page,
    )
    tags = re.findall(r"<link\b[^>]*>", page)
    loaded += [
        re.search(r'href="([^"]*)"', tag)[1]
        for tag in tags
        if not re.search(r'rel="(next|prev|canonical|alternate)"', tag)
    ]
    loaded += outside_styles(page)
    return [address for address in loaded if re.match(r"(https?:)?//", address)]


def outside_styles(css):
    return re.findall(r"(?:url\(|@import\s+)[\"']?((?:https?:)?//[^\"')\s]+)", css)


def test_no_page_and_no_style_loads_anything_from_another_machine(built_site, pages):
    root = (built_site / "index.html").read_text("utf-8")
    found = {name: outside_requests(page) for name, page in {**pages, "index.html": root}.items()}
    assert {name: requests for name, requests in found.items() if requests} == {}
    styles = {
        path.name: outside_styles(path.read_text("utf-8")) for path in built_site.rglob("*.css")
    }
    assert styles and not any(styles.values())


def test_a_request_to_another_machine_is_found():
    bad = [
        '<script async src="https://a/b">',
        '<link href="//a/b">',
        "<style>@import 'https://a'</style>",
    ]
    bad += ['<div style="background: url(https://a/b.png)">']
    assert all(map(outside_requests, bad))
    assert not outside_requests(
        '<a href="https://example.org"> <script src="_static/a.js"> <link href="a.css">'
    )


def test_every_link_within_the_site_leads_somewhere(built_site, pages):
    pages = {**pages, "index.html": (built_site / "index.html").read_text("utf-8")}
    names = {name: set(re.findall(r'\bid="([^"]+)"', page)) for name, page in pages.items()}
    dead = []
    for name, page in pages.items():
        for address in set(re.findall(r'\b(?:href|src)="([^"]+)"', page)):
            address = html.unescape(address)
            if re.match(r"[a-z]+:|//", address):
                continue
            path, _, anchor = address.partition("#")
            target = (
                (built_site / name).parent / path.partition("?")[0] if path else built_site / name
            )
            other = target.resolve().relative_to(built_site.resolve()).as_posix()
            if not target.exists() or (anchor and other in names and anchor not in names[other]):
                dead.append(f"{name}: {address}")
    assert dead == []


def test_every_picture_has_words(pages):
    pictures = [
        (name, tag) for name, page in pages.items() for tag in re.findall(r"<img\b[^>]*>", page)
    ]
    assert len(pictures) > 20
    assert [each for each in pictures if not re.search(r'alt="[^"]{9,}"', each[1])] == []


@pytest.mark.parametrize("language", LANGUAGES)
def test_math_is_drawn_by_the_site_itself(built_site, pages, language):
    page = pages[f"{language}/notebooks/03_sqrt_schedule.html"]
    assert 'src="../_static/mathjax/tex-chtml.js' in page
    assert (built_site / language / "_static/mathjax/tex-chtml.js").stat().st_size > 10**6


NOT_PROSE = [
    "script",
    "style",
    "pre",
    "code",
    "svg",
    ".math",
    "[hidden]",
    "noscript",
]
BLOCKS = [
    "p",
    "td",
    "th",
    "li",
    "h1",
    "h2",
    "h3",
    "summary",
    "figcaption",
    "div",
    "dd",
    "dt",
    "a",
    "span",
]
ENGLISH = re.compile(r"[A-Za-z][a-z'’]+(?:[ ,]+[A-Za-z][a-z'’]*){2}")
HAN_CHARACTER = re.compile(HAN)
# A paper, and a warning that a library prints, are the same in both languages.
CITED = re.compile(r"\w+ et al\. \d{4}，arXiv:[\d.]+|\w+Warning: .*")


def english_in(page, names=()):
    """What a reader of a page in 中文 is shown in English: lines without Chinese, pictures' words,
    the title's tags."""
    # what stands around it stands on every page
    article = re.search("<article.*</article>", page, re.S)
    soup = BeautifulSoup(
        re.sub(r'src="data:[^"]*"', "", article[0] if article else page), "html.parser"
    )
    for hidden in soup.select(", ".join(NOT_PROSE)):
        hidden.decompose()
    for br in soup.find_all("br"):
        br.replace_with("\n")
    innermost = [
        block
        for block in soup.find_all(BLOCKS)
        if not block.find([tag for tag in BLOCKS if tag != "a"])
    ]
    lines = {
        " ".join(line.split()) for block in innermost for line in block.get_text().splitlines()
    }
    found = [
        line
        for line in lines
        if ENGLISH.search(line) and not HAN_CHARACTER.search(line) and not CITED.fullmatch(line)
    ]
    found += [
        image["alt"]
        for image in soup.find_all("img")
        if image.get("alt") and not HAN_CHARACTER.search(image["alt"])
    ]
    title = re.search("<title>(.*?)</title>", page, re.S)[1]
    return sorted({*found, *([title] if "<" in title else [])} - set(names))


def test_in_chinese_no_page_shows_english_prose(pages):
    """The reference is in English, as it says itself; so are the names in the glossary's first
    column."""
    read = {
        name: page
        for name, page in pages_in(pages, "zh").items()
        if not re.match(r"api/(?!index)|genindex|py-modindex", name)
    }
    glossary = BeautifulSoup(read["notebooks/GLOSSARY.html"], "html.parser")
    terms = {" ".join(row.td.get_text().split()) for row in glossary.select("tbody tr")}
    assert {name: found for name, page in read.items() if (found := english_in(page, terms))} == {}


def test_in_english_no_page_shows_chinese_prose(pages):
    """The glossary has the Chinese words next to the English ones."""
    found = {}
    for name, page in pages_in(pages, "en").items():
        article = BeautifulSoup(page, "html.parser").article
        for element in article.select("pre, code, .highlight"):
            element.decompose()
        lines = [text for text in article.strings if is_chinese(text)]
        if lines and not name.endswith("GLOSSARY.html"):
            found[name] = lines
    assert found == {}


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("<p>Some words of English.</p><p>一些中文。</p>", ["Some words of English."]),
        ("<td>autocast and some bf16<br>bf16 的 autocast</td>", ["autocast and some bf16"]),
        ("<p><code>some words of code</code> 是代码。</p>", []),
        ('<img alt="A picture."><img alt="一张图。">', ["A picture."]),
    ],
)
def test_english_on_a_page_in_chinese_is_found(body, found):
    assert english_in(f"<title>页</title><div>{body}</div>") == found


# --- two languages ---

CODES = {"en": "en", "zh": "zh-CN"}


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_page_has_one_language_and_leads_to_the_other(built_site, pages, language):
    other = {"en": "zh", "zh": "en"}[language]
    tree = pages_in(pages, language)
    assert tree.keys() == pages_in(pages, other).keys()
    for name, page in tree.items():
        assert re.search(rf'<html\b[^>]* lang="{CODES[language]}"', page), name
        assert not re.search(rf'<(?:{"|".join(PER_LANGUAGE)})\b[^>]* lang="{other}"', page), name
        soup = BeautifulSoup(page, "html.parser")
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


def test_theme_and_search_speak_the_language_of_the_page(built_site, pages):
    page = pages["zh/notebooks/03_sqrt_schedule.html"]
    assert "<title>3 该忘掉哪些？（检查点的调度） - PyTorch 省显存训练</title>" in page
    soup = BeautifulSoup(page, "html.parser")
    # furo has no translation of "Toggle navigation of", the label of a hidden checkbox
    for element in soup.select(
        "article, .bottom-of-page, .sidebar-tree, .toc-tree, script, style, svg, title"
    ):
        element.decompose()
    labels = [tag.get("aria-label", "") + tag.get("title", "") for tag in soup.find_all(True)]
    found = [line for line in [*soup.strings, *labels] if re.search("[A-Za-z]{3}", line)]
    assert {" ".join(line.split()) for line in found} <= NAMES
    translations = (built_site / "zh/_static/translations.js").read_text("utf-8")
    assert json.dumps("正在搜索中") in translations


NAMES = {"English", "Language 语言", "PyTorch 省显存训练"}


@pytest.mark.parametrize("language", LANGUAGES)
def test_landmarks_have_names_pages_headings_and_empty_cells_are_no_headings(pages, language):
    names = {"en": ["Site", "On this page"], "zh": ["全站", "本页内容"]}[language]
    for name, page in pages_in(pages, language).items():
        assert re.findall(r'<aside\b[^>]* aria-label="([^"]*)"', page) == names, name
        assert page.count("<aside") == 2 and page.count("<h1") == 1, name
        headers = re.findall(r"<th\b[^>]*>(.*?)</th>", page, re.S)
        assert all(text_of(header).strip() for header in headers), name
        assert "Toggle hidden content" not in page, name


def test_search_engines_learn_both_addresses_once_the_site_has_one(pages, small, monkeypatch):
    monkeypatch.setattr(site, "MODULES", ())
    assert not any('rel="alternate"' in page for page in pages.values())
    urls = '[project.urls]\nDocumentation = "https://example.org/course"\n'
    (small / "pyproject.toml").write_text(f"[project]\n{urls}", "utf-8")
    site.build(small / "notebooks", small / "site")
    for language in LANGUAGES:
        page = (small / "site" / language / "notebooks/00_a.html").read_text("utf-8")
        links = BeautifulSoup(page, "html.parser").find_all("link", rel="alternate")
        assert {link["hreflang"]: link["href"] for link in links} == {
            code: f"https://example.org/course/{folder}/notebooks/00_a.html"
            for folder, code in CODES.items()
        }


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_lesson_is_downloaded_as_a_notebook_in_the_language_of_its_page(
    built_site, pages, language
):
    for lesson in LESSONS:
        soup = BeautifulSoup(
            pages[f"{language}/notebooks/{lesson}.html"].partition("<h2")[0], "html.parser"
        )
        (link,) = soup.select("p.download > a[download]")
        assert bool(re.search("[\u3400-\u9fff]", link.text)) == (language == "zh")
        path = built_site / language / "notebooks" / link["href"]
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        prose = "".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
        assert prose and f'<div lang="{language}">' not in prose
        chinese = len(re.findall("[\u3400-\u9fff]", prose))
        assert (chinese > 1000) == (language == "zh"), lesson


# --- the lessons ---


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("lesson", LESSONS)
def test_every_notebook_is_a_page_with_its_outputs_and_folded_solutions(lesson, language, pages):
    page = pages[f"{language}/notebooks/{lesson}.html"]
    cells = nbformat.read(ROOT / "notebooks" / f"{lesson}.ipynb", as_version=4).cells
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    stored = [pictures.pictures_in(data.get("text/html", "")) for data in outputs]
    soup = BeautifulSoup(page, "html.parser")
    shown = soup.article.select("figure[lang] > img")
    assert [(tag.parent["lang"], tag["alt"]) for tag in shown] == [
        (language, found[language].alt) for found in stored if found
    ]
    tables = sum("<table" in data.get("text/html", "") for data in outputs)
    assert page.count("<table") >= tables
    headings = soup.article.select("h1, h2, h3")
    assert len(headings) > 5
    for heading in headings:
        words = heading.get_text().removesuffix("¶")
        assert bool(HAN_CHARACTER.search(words)) == (language == "zh") or "√L" in words, words
    assert "course-language" not in page, "the notebook's own switch"
    folded = "".join(re.findall(r"<details.*?</details>", page, re.S))
    assert page.count("BEGIN SOLUTION") == folded.count("BEGIN SOLUTION")
    assert "interactive(children" not in page, "a slider without a kernel"
    words = text_of(page)
    assert not re.search("three (?:buttons|dots)|三个按钮|三个点|也没有按钮|and no buttons", words)


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


# --- the claims ---


def test_the_page_of_claims_has_every_claim_of_the_lessons_with_a_link_to_its_section(pages):
    page = pages["en/notebooks/claims.html"]
    words, there = text_of(page), []
    for lesson in LESSONS:
        cells = json.loads((ROOT / "notebooks" / f"{lesson}.ipynb").read_text("utf-8"))["cells"]
        shown = [
            "".join(o.get("data", {}).get("text/html", ""))
            for cell in cells
            for o in cell.get("outputs", [])
        ]
        rows = [row for table in shown if ">claim<" in table for row in table.split("<tr>")[1:]]
        claims = [text_of(re.search(r'<span lang="en"[^>]*>(.+?)</span>', row)[1]) for row in rows]
        there += [f"claim-{int(lesson[:2])}-{place}" for place in range(1, len(claims) + 1)]
        assert [claim for claim in claims if claim.replace("`", "") not in words] == []
        if claims:
            (section, *_) = re.findall(rf'href="{lesson}.html#(section-[\d-]+)"', page)
            assert f'id="{section}"' in pages[f"en/notebooks/{lesson}.html"]
    assert len(there) > 10 and re.findall(r'<div class="claim \w+" id="([^"]+)"', page) == there


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_page_of_claims_sums_up_how_many_hold(pages, language):
    page = pages[f"{language}/notebooks/claims.html"]
    each = re.findall(r'<div class="claim (\w+)"', page)
    sums = site._sums(*(each.count(outcome) for outcome in ("fails", "partly", "holds")))
    assert f"<strong>{words_in(sums, language)}</strong>" in page


# --- the reference, the search, the front page ---


MODULES = [name for name in site.MODULES if importlib.util.find_spec(f"course_lib.{name}")]


def public_names(module):
    own = [
        key
        for key, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
    ]
    return getattr(module, "__all__", None) or [key for key in own if not key.startswith("_")]


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("memory", ["MemoryMeter", "measure", "saved_tensors"]),
        ("checkpoint", ["checkpoint", "checkpoint_blocks", "checkpointed_loss"]),
        ("offload", ["offload_activations", "OffloadedOptimizer"]),
        ("budget", ["Recipe", "estimate", "fit"]),
    ],
)
def test_the_reference_begins_with_what_a_reader_wants_first(name, first, pages):
    shown = re.findall(rf'<dt [^>]*id="course_lib\.{name}\.(\w+)"', pages[f"en/api/{name}.html"])
    assert shown[: len(first)] == first
    kinds = [
        site._kind_of(getattr(importlib.import_module(f"course_lib.{name}"), each))
        for each in shown
    ]
    assert (
        kinds.index(2) > max(place for place, kind in enumerate(kinds) if kind < 2)
        if 2 in kinds
        else kinds
    )


def test_the_reference_describes_what_a_meter_says_and_does(pages):
    names = ("peak_bytes", "live_bytes", "timeline", "at_peak", "trace", "plot", "save_snapshot")
    page = pages["en/api/memory.html"]
    missing = [each for each in names if f'id="course_lib.memory.MemoryMeter.{each}"' not in page]
    assert missing == [] and "ObserverMode" not in page


@pytest.mark.parametrize("name", MODULES)
def test_the_reference_lists_every_public_name(name, pages):
    module = importlib.import_module(f"course_lib.{name}")
    public = public_names(module)
    page = pages[f"en/api/{name}.html"]
    shown = [
        each
        for each in public
        if f'id="course_lib.{name}.{each}"' in page or f'pre">{each}</span>' in page
    ]
    assert public and shown == list(public)
    assert re.search(r'<section [^>]*lang="en-US"', page), "English, and never hidden"
    assert not re.search(r"\(\w+,\) –", text_of(page)), "every attribute stands by its own name"


def test_reference_describes_a_name_where_it_is_defined(pages):
    assert 'id="course_lib.symbolic.cast"' in pages["en/api/symbolic.html"]
    assert 'id="course_lib.memory.cast"' not in pages["en/api/memory.html"]


def examples_of(module):
    """The examples in what the reference shows of a module, which begin with its public names."""
    names = {name: getattr(module, name) for name in public_names(module)}
    begun = {"torch": torch, "nn": torch.nn, **names}
    parse, finder = doctest.DocTestParser(), doctest.DocTestFinder()
    yield parse.get_doctest(module.__doc__, dict(begun), module.__name__, module.__file__, 0)
    for name, value in names.items():
        elsewhere = site._described_elsewhere(value, module.__name__.removeprefix("course_lib."))
        if callable(value) and not elsewhere:
            yield from finder.find(value, name, module=False, globs=begun)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_the_reference_run_and_give_what_they_say(name):
    module = importlib.import_module(f"course_lib.{name}")
    examples = [each for each in examples_of(module) if each.examples]
    assert examples, f"course_lib.{name} has no example"
    runner, said = doctest.DocTestRunner(verbose=False), []
    for each in examples:
        runner.run(each, out=said.append)
    assert runner.failures == 0, "".join(said)


def test_a_wrong_example_is_found():
    class_of = type("Wrong", (), {"__doc__": "Sums.\n\n>>> 1 + 1\n3\n"})
    module = types.ModuleType("course_lib.teaching", ">>> x = Wrong()\n")
    module.__file__, module.__all__, module.Wrong = "wrong.py", ["Wrong"], class_of
    runner = doctest.DocTestRunner(verbose=False)
    for each in examples_of(module):
        runner.run(each, out=lambda text: None)
    assert (runner.tries, runner.failures) == (2, 1)


def test_a_name_that_a_module_gives_on_request_is_described_where_it_lives():
    assert "The same as in ``course_lib.simulated``: ``SimulatedDevice``, ``Race``." in (
        site._api_page("offload")
    )
    assert "The same as" not in site._api_page("simulated")


def test_the_reference_leaves_the_library_as_it_is(built_site):
    # autodoc would replace it
    assert inspect.signature(checkpoint).parameters["use_reentrant"].default is None


def search_terms(built_site, language, page):
    """Words by which the search finds a page."""
    index = (built_site / language / "searchindex.js").read_text("utf-8")
    index = json.loads(index.removeprefix("Search.setIndex(").rstrip(";)\n"))
    number = index["docnames"].index(page)
    entries = [*index["terms"].items(), *index["titleterms"].items()]
    return {
        word for word, found in entries if number in (found if isinstance(found, list) else [found])
    }


@pytest.mark.parametrize(
    ("language", "words"),
    [("en", {"checkpoint", "recomput"}), ("zh", {"checkpoint", "检查", "查点", "峰"})],
)
def test_the_search_finds_english_stems_and_chinese_by_one_character_or_two(
    built_site, language, words
):
    assert words <= search_terms(built_site, language, "notebooks/02_checkpointing")


CHINESE_WORDS = ("显存不足", "爆显存", "显存优化", "显存碎片")


@pytest.mark.parametrize(
    ("languages", "words"),
    [
        *((("en",), words) for words in ("CUDA out of memory", "OOM", "fragmentation")),
        *((("en", "zh"), words) for words in CHINESE_WORDS),
        (("zh",), "CUDA out of memory 怎么办"),
    ],
)
def test_the_search_finds_what_to_do_when_memory_runs_out(built_site, languages, words):
    split = site_settings().EnglishAndChinese({})
    stems = {split.stem(word.lower()) for word in split.split(words) if len(word) > 1}
    for language in languages:
        known = search_terms(built_site, language, "docs/out_of_memory")
        assert stems - {"out", "of"} <= known


GUIDES = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.suffixes == [".md"]]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("page", GUIDES, ids=lambda path: path.stem)
def test_a_page_of_docs_leads_to_the_lessons(pages, page, language):
    html_of = pages[f"{language}/docs/{page.stem}.html"]
    assert ".md" not in "".join(re.findall(r'href="([^"]+)"', html_of))
    source = page if language == "en" else page.with_suffix(".zh.md")
    for lesson in re.findall(r"notebooks/(\d\w+)\.ipynb", source.read_text("utf-8")):
        assert f"notebooks/{lesson}.html" in html_of


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_front_page_is_the_readme_as_the_site_shows_it(pages, language):
    page = pages[f"{language}/index.html"]
    article = BeautifulSoup(page, "html.parser").article
    assert article.h1 and article.find("a", href="notebooks/01_memory_bottleneck.html")
    assert article.find("a", href="docs/out_of_memory.html")
    assert "VS Code show" not in article.text and "hosted:" not in page
    badge = "# S\n\n[![Open in X](https://x.org/badge.svg)](https://x.org/run)\n"
    assert "\n[Open in X](https://x.org/run)" in site._for_the_site(badge)


def site_settings():
    """The module of Sphinx's settings."""
    spec = importlib.util.spec_from_file_location("site_conf", site.ASSETS / "conf.py")
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    return conf


# --- bad input: one sentence, and the old site stays ---

NOTEBOOK, SCRIPT = "notebooks/00_a.ipynb", "notebooks/scripts/00_a.py"


@pytest.fixture
def small(tmp_path):
    """A small course of one lesson, with an old site next to it."""
    root = tmp_path / "course"
    nbformat = pytest.importorskip("nbformat").v4
    output = nbformat.new_output("execute_result", {"text/plain": "2"})
    cells = [
        nbformat.new_markdown_cell("# 0 A / 甲"),
        nbformat.new_code_cell("1", outputs=[output], execution_count=1),
    ]
    write_lesson(root / "notebooks", "00_a", nbformat.writes(nbformat.new_notebook(cells=cells)))
    (root / "README.md").write_text("# Small\n\n[lesson](notebooks/00_a.ipynb)\n", "utf-8")
    (root / "README.zh.md").write_text("# 小\n\n[课](notebooks/00_a.ipynb)\n", "utf-8")
    (root / "site").mkdir()
    (root / "site" / STAMP).touch()
    (root / "site/index.html").write_text("old", "utf-8")
    return root


def edited(change):
    """A way to break the notebook."""

    def edit(root):
        notebook = json.loads((root / NOTEBOOK).read_text("utf-8"))
        change(notebook, notebook["cells"])
        (root / NOTEBOOK).write_text(json.dumps(notebook), "utf-8")

    return edit


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (
            edited(lambda _, cells: cells[1].update(outputs=[], execution_count=None)),
            "00_a.ipynb: cell 2",
        ),
        (edited(lambda _, cells: cells[1].update(outputs=[])), "00_a.ipynb"),
        (edited(lambda _, cells: cells[0]["source"].append("\nmore")), "cell 1"),
        (edited(lambda _, cells: cells.pop()), "cell 2"),
        (edited(lambda notebook, _: notebook.pop("cells")), "00_a.ipynb"),
        (edited(lambda notebook, _: notebook.update(nbformat=3)), "00_a.ipynb"),
        (lambda root: (root / NOTEBOOK).write_bytes(b"\xff"), "00_a.ipynb"),
        (lambda root: (root / SCRIPT).unlink(), "00_a.py"),
        (lambda root: (root / NOTEBOOK).unlink(), "notebooks"),
        (lambda root: (root / "README.md").unlink(), "README.md"),
        (lambda root: (root / "README.zh.md").unlink(), "README.zh.md"),
        (
            lambda root: (root / "README.md").write_text("# S\n\n![map](gone.svg)\n", "utf-8"),
            "gone.svg",
        ),
        (lambda root: (root / "site" / STAMP).unlink(), "site"),  # a folder that is no site
    ],
)
def test_what_is_wrong_is_named_in_one_sentence_and_the_old_site_stays(small, capsys, harm, named):
    harm(small)
    assert named in failure(site, small / "notebooks", small / "site", capsys)


def test_a_package_that_is_missing_is_named(small, capsys, monkeypatch):
    monkeypatch.setitem(site.PACKAGES, "no_such_module", "no-such-package")
    assert "no-such-package" in failure(site, small / "notebooks", small / "site", capsys)


def test_an_error_within_sphinx_gives_one_sentence(small, capsys, monkeypatch):
    (small / "assets").mkdir()
    (small / "assets/conf.py").write_text("raise RuntimeError('broken')", "utf-8")
    shutil.copytree(site.ASSETS / "pages", small / "assets/pages")
    shutil.copy(site.ASSETS / "root.html", small / "assets")
    monkeypatch.setattr(site, "ASSETS", small / "assets")
    monkeypatch.setattr(site, "MODULES", ())
    assert "RuntimeError: broken" in failure(site, small / "notebooks", small / "site", capsys)
