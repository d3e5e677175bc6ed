"""The website: every lesson, claim and public name is there, in both languages, and no page asks another machine."""

import html
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import re
import shutil
from pathlib import Path

import pytest
from editions import failure, take_network

from course_lib.checkpoint import checkpoint
from course_lib.lessons import LESSONS as LESSON_NUMBERS
from course_lib.lessons import claims_of
from course_lib.teaching import alt, said
from course_lib.teaching.editions import site
from course_lib.teaching.editions.cells import STAMP, run_edition

nodes = pytest.importorskip("docutils.nodes", reason="the site's packages come with the extra `test`")
BeautifulSoup = pytest.importorskip("bs4").BeautifulSoup
for package in ("sphinx", "myst_nb", "furo", "jupytext"):
    pytest.importorskip(package, reason="the site's packages come with the extra `test`")

pytestmark = [  # the packages' own, of which they know
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
]
ROOT = Path(__file__).parents[1]
LESSONS = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"))
CLAIMS = {number: claims_of(number) for number in LESSON_NUMBERS if claims_of(number)}


@pytest.fixture(scope="module")
def pages(built_site):
    """Path relative to the site -> the page's HTML."""
    return {path.relative_to(built_site).as_posix(): path.read_text("utf-8") for path in built_site.rglob("*.html")}


def text_of(page):
    """What stands in a page, without tags, with single spaces."""
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", page)))


# --- the whole site ---


def test_sphinx_has_nothing_to_complain_about(built_site):
    assert (built_site.parent / "warnings").read_text("utf-8") == ""


def outside_requests(page):
    """Addresses of other machines that a browser would load with the page; links to follow are none."""
    loaded = re.findall(r"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*?\s(?:src|srcset)=\"([^\"]*)\"", page)
    tags = re.findall(r"<link\b[^>]*>", page)
    loaded += [
        re.search(r'href="([^"]*)"', tag)[1] for tag in tags if not re.search(r'rel="(next|prev|canonical)"', tag)
    ]
    loaded += outside_styles(page)
    return [address for address in loaded if re.match(r"(https?:)?//", address)]


def outside_styles(css):
    return re.findall(r"(?:url\(|@import\s+)[\"']?((?:https?:)?//[^\"')\s]+)", css)


def test_no_page_and_no_style_loads_anything_from_another_machine(built_site, pages):
    assert {name: outside_requests(page) for name, page in pages.items() if outside_requests(page)} == {}
    styles = {path.name: outside_styles(path.read_text("utf-8")) for path in built_site.rglob("*.css")}
    assert styles and not any(styles.values())


@pytest.mark.parametrize(
    "bad",
    [
        '<script async src="https://example.org/a.js">',
        '<link rel="stylesheet" href="//example.org/a.css">',
        "<style>@import 'https://example.org/a.css'</style>",
        '<div style="background: url(https://example.org/a.png)">',
    ],
)
def test_a_request_to_another_machine_is_found(bad):
    assert outside_requests(bad)
    assert not outside_requests('<a href="https://example.org"> <script src="_static/a.js"> <link href="a.css">')


def test_every_link_within_the_site_leads_somewhere(built_site, pages):
    names = {name: set(re.findall(r'\bid="([^"]+)"', page)) for name, page in pages.items()}
    dead = []
    for name, page in pages.items():
        for address in set(re.findall(r'\b(?:href|src)="([^"]+)"', page)):
            address = html.unescape(address)
            if re.match(r"[a-z]+:|//", address):
                continue
            path, _, anchor = address.partition("#")
            target = (built_site / name).parent / path.partition("?")[0] if path else built_site / name
            other = target.resolve().relative_to(built_site.resolve()).as_posix()
            if not target.exists() or (anchor and other in names and anchor not in names[other]):
                dead.append(f"{name}: {address}")
    assert dead == []


def test_every_picture_has_words(pages):
    pictures = [(name, tag) for name, page in pages.items() for tag in re.findall(r"<img\b[^>]*>", page)]
    assert len(pictures) > 20
    assert [each for each in pictures if not re.search(r'alt="[^"]{9,}"', each[1])] == []


def test_math_is_drawn_by_the_site_itself(built_site, pages):
    assert 'src="../_static/mathjax/tex-chtml.js' in pages["notebooks/03_sqrt_schedule.html"]
    assert (built_site / "_static/mathjax/tex-chtml.js").stat().st_size > 10**6
    assert len(list((built_site / "_static/mathjax/output/chtml/fonts/woff-v2").glob("*.woff"))) > 20


# --- the lessons ---


@pytest.mark.parametrize("lesson", LESSONS)
def test_every_notebook_is_a_page_with_its_prose_outputs_and_figures(lesson, pages):
    page = pages[f"notebooks/{lesson}.html"]
    cells = json.loads((ROOT / "notebooks" / f"{lesson}.ipynb").read_text("utf-8"))["cells"]
    prose = "".join(line for cell in cells if cell["cell_type"] == "markdown" for line in cell["source"])
    for language in ("en", "zh"):
        assert page.count(f'<div lang="{language}">') >= prose.count(f'<div lang="{language}">') > 0
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    shown = [alt.picture_in("".join(data.get("text/html", ""))) for data in outputs]
    pictures = BeautifulSoup(page, "html.parser").article.select("img.figure")
    assert [(tag["data-en"], tag["data-zh"]) for tag in pictures] == [(each.en, each.zh) for each in shown if each]
    assert page.count("<table") >= sum("<table" in "".join(data.get("text/html", "")) for data in outputs)


@pytest.mark.parametrize("lesson", LESSONS)
def test_headings_and_contents_are_in_two_elements_a_language_each(lesson, pages):
    page = pages[f"notebooks/{lesson}.html"]
    headings = re.findall(r"<h[1-3]>(.*?)<a class=\"headerlink\"", page, re.S)
    assert len(headings) > 5
    two = r'[\d.]+ <span lang="en">(.+?)</span><span class="both-languages"> / </span><span lang="zh">(.+?)</span>'
    for heading in headings:
        found = re.fullmatch(two, heading, re.S)
        assert found, heading
        assert not re.search(r"[\u4e00-\u9fff]", found[1]) and re.search(r"[\u4e00-\u9fff]", found[2])
        assert page.count(f'<span lang="zh">{found[2]}</span>') >= 2, "the sidebar has it as well"


def test_the_switch_of_the_notebook_is_gone_and_the_page_has_its_own(pages):
    for lesson in LESSONS:
        page = pages[f"notebooks/{lesson}.html"]
        assert "course-language" not in page
        assert re.findall(r'<button type="button" value="(\w+)"', page) == ["en", "zh", "both"]


def test_solutions_are_folded(pages):
    for lesson in LESSONS[1:]:
        page = pages[f"notebooks/{lesson}.html"]
        folded = "".join(re.findall(r"<details.*?</details>", page, re.S))
        assert page.count("BEGIN SOLUTION") == folded.count("BEGIN SOLUTION") > 0


def test_sliders_that_need_a_kernel_are_explained(pages):
    page = pages["notebooks/01_memory_bottleneck.html"]
    assert "interactive(children" not in page and '<p class="slider" lang="zh">' in page


# --- the claims ---


def test_the_page_of_claims_has_every_claim_with_its_experiment_and_verdict(pages):
    words = text_of(pages["notebooks/claims.html"])
    for claims in CLAIMS.values():
        for claim in claims:
            for part in (part.replace("`", "") for part in (*claim.claim, *claim.experiment, *claim.verdict)):
                assert part in words, part


def test_the_page_of_claims_sums_up_how_many_hold(pages):
    each = [claim.outcome for claims in CLAIMS.values() for claim in claims]
    page = pages["notebooks/claims.html"]
    assert re.findall(r'<div class="claim (\w+)"', page) == each and set(each) <= set(said.OUTCOMES)
    sums = [each.count(outcome) for outcome in said.OUTCOMES]
    for words in site._sums(*sums).values():
        assert f"<strong>{words}</strong>" in page
    assert site._sums(5, 4, 1) == {
        "en": "5 fail, 4 hold in part, 1 holds as it stands.",
        "zh": "5 条不成立，4 条部分成立，1 条完全成立。",
    }
    assert [site._sums(5, 4, n)["en"].split(", ")[2] for n in (0, 3)] == [
        "none holds as it stands.",
        "3 hold as they stand.",
    ]


def test_a_lesson_whose_claims_are_not_known_gives_one_sentence():
    lesson = site.Lesson("01_memory", "1 A / 甲", None, "1.2", [None] * 3)
    with pytest.raises(site.EditionError, match=r"lessons has not the claims of 01_memory: 3 in the notebook, 4 there"):
        site.claims_page([lesson])
    unknown = site.Lesson("99_nothing", "99 A / 甲", None, "99.2", [None])
    with pytest.raises(site.EditionError, match="not the claims of 99_nothing: 1 in the notebook, 0 there"):
        site.claims_page([unknown])


def test_every_claim_has_an_address_and_its_lesson_a_link(pages):
    page = pages["notebooks/claims.html"]
    expected = [f"claim-{int(key)}-{n}" for key, claims in CLAIMS.items() for n in range(1, len(claims) + 1)]
    assert re.findall(r'<div class="claim \w+" id="([^"]+)"', page) == expected
    assert f"{len(expected)} sentences" in page
    for lesson in (lesson for lesson in LESSONS if lesson[:2] in CLAIMS):
        assert f'href="{lesson}.html#claims-{lesson[:2]}"' in page
        assert f'id="claims-{lesson[:2]}"' in pages[f"notebooks/{lesson}.html"]


def test_the_figures_of_the_claims_are_those_of_the_notebook(pages):
    measured = re.findall(r'<div class="measured">.*?<dd>(.*?)</dd>', pages["notebooks/claims.html"], re.S)
    assert len(measured) == sum(map(len, CLAIMS.values())) and all(map(text_of, measured))
    notebook = (ROOT / "notebooks/03_sqrt_schedule.ipynb").read_text("utf-8")
    first_of_lesson_03 = measured[len(CLAIMS["01"]) + len(CLAIMS["02"])]
    assert text_of(first_of_lesson_03) in notebook


# --- the reference, the search, the front page ---


@pytest.mark.parametrize("name", [name for name in site.MODULES if importlib.util.find_spec(f"course_lib.{name}")])
def test_the_reference_lists_every_public_name(name, pages):
    module = importlib.import_module(f"course_lib.{name}")
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    public = getattr(module, "__all__", None) or [key for key in own if not key.startswith("_")]
    page = pages[f"api/{name}.html"]
    assert public and [each for each in public if f'id="course_lib.{name}.{each}"' not in page] == []
    assert re.search(r'<section [^>]*lang="en-US"', page), "English, and never hidden"


def test_the_search_finds_english_stems_and_pairs_of_chinese_characters(built_site):
    index = (built_site / "searchindex.js").read_text("utf-8")
    index = json.loads(index.removeprefix("Search.setIndex(").rstrip(";)\n"))
    lesson = index["docnames"].index("notebooks/02_checkpointing")
    for word in ("checkpoint", "recomput", "检查", "查点"):
        found = [index[part].get(word, []) for part in ("terms", "titleterms")]
        assert any(lesson in (numbers if isinstance(numbers, list) else [numbers]) for numbers in found), word
    assert "function splitQuery" in (built_site / "_static/language_data.js").read_text("utf-8")


def test_the_front_page_is_the_readme_and_each_part_of_it_has_its_language(pages):
    page = pages["index.html"]
    article = BeautifulSoup(page, "html.parser").article
    assert article.h1 and article.find("a", href="notebooks/01_memory_bottleneck.html")
    for element in [*article.find_all("pre"), *article.find_all(lang="zh")]:
        element.decompose()
    chinese = [text for text in article.strings if re.search(r"[\u4e00-\u9fff]{3,}", text)]
    assert chinese == [], "Chinese outside of an element that says so"


@pytest.fixture(scope="module")
def conf():
    """The settings of Sphinx, with the functions that make a page bilingual."""
    spec = importlib.util.spec_from_file_location("site_conf", site.ASSETS / "conf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("words", "chinese"),
    [
        ("Three buttons choose English, 中文 or both.", False),
        ("Bytes, exactly", False),
        ("从 make lab 开始。", True),
        ("CUDA 流", True),
        ("3.1", False),
    ],
)
def test_a_text_is_chinese_if_more_than_a_word_of_it_is(conf, words, chinese):
    assert conf.is_chinese(words) == chinese


def test_a_heading_is_split_where_its_chinese_half_begins(conf):
    title = nodes.title("", "2.1 Bytes / second, in ", nodes.literal("", "x"), nodes.Text(" / 每秒字节"))
    assert conf.split(title)
    assert [(child.astext(), child.get("classes") if isinstance(child, nodes.inline) else None) for child in title] == [
        ("2.1 ", None),
        ("Bytes / second, in x", ["language-en"]),
        (" / ", ["both-languages"]),
        ("每秒字节", ["language-zh"]),
    ]
    assert not conf.split(nodes.title("", "course_lib.memory / measure"))


# --- bad input, and what is there already ---


@pytest.fixture
def small(tmp_path):
    """A small course of one lesson, and a place for its site."""
    root = tmp_path / "course"
    (root / "notebooks" / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "notebooks/00_start_here.ipynb", root / "notebooks")
    shutil.copy(ROOT / "notebooks/scripts/00_start_here.py", root / "notebooks/scripts")
    (root / "README.md").write_text("# Small / 小\n\n[lesson](notebooks/00_start_here.ipynb)\n", "utf-8")
    return root


def fails(root, output, capsys):
    """The one sentence with which the command line gives up; what stood in the output's folder still stands there."""
    return failure(site, root / "notebooks", output, capsys)


@pytest.fixture
def old_site(tmp_path):
    output = tmp_path / "build" / "site"
    output.mkdir(parents=True)
    (output / STAMP).touch()
    (output / "index.html").write_text("old", "utf-8")
    return output


def edit(root, change):
    path = root / "notebooks/00_start_here.ipynb"
    notebook = json.loads(path.read_text("utf-8"))
    change(notebook)
    path.write_text(json.dumps(notebook), "utf-8")


def forget_outputs(notebook):
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None


def drop_outputs(notebook):
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (forget_outputs, "cell 2 has never been run"),
        (drop_outputs, "has no outputs"),
        (lambda notebook: notebook["cells"][0]["source"].append("\nmore"), "differ from cell 1 on"),
        (lambda notebook: notebook["cells"].pop(), "differ from cell"),
        (lambda notebook: notebook.pop("cells"), "is no notebook"),
        (lambda notebook: notebook["cells"][0].pop("source"), "is no notebook"),
        (lambda notebook: notebook.update(nbformat=3), "is no notebook"),
    ],
)
def test_a_broken_notebook_gives_one_sentence_and_leaves_the_old_site(small, old_site, capsys, change, says):
    edit(small, change)
    sentence = fails(small, old_site, capsys)
    assert says in sentence and "00_start_here.ipynb" in sentence and "make notebooks ARGS=00" in sentence


@pytest.mark.parametrize("content", ["{", "", "[]", "\udcff"])
def test_a_file_that_is_no_json_gives_one_sentence(small, old_site, capsys, content):
    path = small / "notebooks/00_start_here.ipynb"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    assert "is no notebook" in fails(small, old_site, capsys)


def test_a_lesson_without_its_script_gives_one_sentence(small, old_site, capsys):
    (small / "notebooks/scripts/00_start_here.py").unlink()
    assert "has no script" in fails(small, old_site, capsys)


def test_a_course_without_notebooks_or_front_page_gives_one_sentence(small, old_site, capsys):
    (small / "README.md").unlink()
    assert "README.md" in fails(small, old_site, capsys)
    (small / "notebooks/00_start_here.ipynb").unlink()
    assert "there are no lessons" in fails(small, old_site, capsys)


def test_a_link_of_the_front_page_that_leads_nowhere_gives_one_sentence(small, old_site, capsys):
    (small / "README.md").write_text("# Small / 小\n\n![map](notebooks/images/gone.svg)\n", "utf-8")
    assert "links to notebooks/images/gone.svg, which is no file" in fails(small, old_site, capsys)


def test_a_claims_table_of_another_shape_gives_one_sentence(small, old_site, capsys):
    for path in (small / "notebooks").rglob("00_start_here.*"):
        path.unlink()
    for path in (
        ROOT / "notebooks/05_gradient_accumulation.ipynb",
        ROOT / "notebooks/scripts/05_gradient_accumulation.py",
    ):
        shutil.copy(path, small / path.parent.relative_to(ROOT))
    path = small / "notebooks/05_gradient_accumulation.ipynb"
    path.write_text(
        path.read_text("utf-8").replace("verdict</span>", "").replace("<td>", "<td></td><td>", 999), "utf-8"
    )
    assert "no table of claims with four columns" in fails(small, old_site, capsys)


def test_a_missing_package_is_named(small, old_site, capsys, monkeypatch):
    monkeypatch.setitem(site.PACKAGES, "no_such_module", "no-such-package")
    assert "the site needs no-such-package" in fails(small, old_site, capsys)
    monkeypatch.delitem(site.PACKAGES, "no_such_module")
    monkeypatch.setattr(site, "MATHJAX_PACKAGE", "no-such-mathjax")
    assert "the site needs no-such-mathjax" in fails(small, old_site, capsys)


def test_a_module_that_cannot_be_imported_gives_one_sentence(small, old_site, capsys, monkeypatch):
    def broken(name):
        raise RuntimeError("broken")

    monkeypatch.setattr(importlib, "import_module", broken)
    assert "course_lib.memory cannot be imported (broken)" in fails(small, old_site, capsys)


def test_an_error_within_sphinx_gives_one_sentence(small, old_site, capsys, monkeypatch):
    assets = small / "assets"
    shutil.copytree(site.ASSETS, assets)
    (assets / "conf.py").write_text("raise RuntimeError('broken')", "utf-8")
    monkeypatch.setattr(site, "ASSETS", assets)
    monkeypatch.setattr(site, "MODULES", ())
    assert "Sphinx gave up: RuntimeError: broken" in fails(small, old_site, capsys)


def test_a_folder_that_is_no_site_is_not_replaced(small, tmp_path, capsys):
    precious = tmp_path / "thesis"
    precious.mkdir()
    (precious / "chapter.tex").touch()
    assert "was not made by an edition" in fails(small, precious, capsys)
    assert "was not made by an edition" in fails(small, precious / "chapter.tex", capsys)


def test_a_new_site_replaces_the_old_one_and_leaves_nothing_beside_it(small, old_site, capsys, monkeypatch):
    monkeypatch.setattr(site, "MODULES", ("checkpoint",))
    run_edition(site.build, "site", "", ["--notebooks", str(small / "notebooks"), "--output", str(old_site)])
    assert re.fullmatch(r"\S+/site: \d+ files, [\d.]+ MB, in \d+ s\n", capsys.readouterr().out)
    assert (old_site / "index.html").read_text("utf-8") != "old"
    assert [path.name for path in old_site.parent.iterdir()] == ["site"]
    assert (old_site / "api" / "checkpoint.html").is_file()
    assert inspect.signature(checkpoint).parameters["use_reentrant"].default is None  # autodoc would replace it


def test_every_attribute_of_the_reference_stands_by_its_own_name(pages):
    for path, page in pages.items():
        if path.startswith("api/"):
            assert not re.search(r"\(\w+,\) –", text_of(page)), path


def test_the_process_that_builds_has_no_network(small, old_site, capsys, monkeypatch):
    assets = small / "assets"
    shutil.copytree(site.ASSETS, assets)
    with open(assets / "conf.py", "a", encoding="utf-8") as settings:
        settings.write("import socket\nsocket.socket().connect(('127.0.0.1', 9))")
    monkeypatch.setattr(site, "ASSETS", assets)
    monkeypatch.setattr(site, "MODULES", ())
    take_network(monkeypatch, small)
    assert "the build connects to" in fails(small, old_site, capsys)
