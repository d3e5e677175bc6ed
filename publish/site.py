"""Build the website: lessons, claims with their verdicts, guides, and the library's reference.

    python -m publish.site                     # to build/site
    python -m publish.site --output ~/pages    # somewhere else

Sphinx builds the pages of each language separately, in en/ and zh/. Both have the same pages. A
build reads a folder with the layout of the repository (the README as the front page, docs/,
notebooks/ and api/), so that links between files also work between pages. No notebook runs and no
network is used. The new site replaces the old site only when it is complete.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from course_lib.labels import markup, text, verbatim
from course_lib.lessons import claims_of
from course_lib.teaching.claims import OUTCOMES

from .address import FRONT_DOORS, addresses
from .cells import (
    NOTES,
    EditionError,
    check_outputs,
    check_twins,
    output_folder,
    read_lessons,
    remove_guard,
    run_edition,
    stored_again,
)
from .languages import LANGUAGES, guide_in, html_in, markdown_in, notebook_in, words_in
from .pages import one_language

LICENCE = Path(__file__).resolve().parents[1] / "LICENSE"
ASSETS = Path(__file__).resolve().parent / "site_assets"
TITLES = {"en": "Memory-saving training in PyTorch", "zh": "PyTorch 省显存训练"}
LOCALES = {"en": "en", "zh": "zh_CN"}  # names of Sphinx's catalogs
#: Pages that the sidebar lists before the lessons.
FIRST_PAGES = ("docs/out_of_memory",)
#: Pages that the sidebar lists last, below a caption, because they contain the answers.
FOR_TEACHERS = ("notebooks/INSTRUCTORS", "notebooks/NOTES", "docs/teaching")
CAPTION = {"en": "For teachers", "zh": "教师用"}
#: Page -> Chinese words with which the search finds this page, even if the page is in English.
SEARCH_WORDS = {
    "docs/out_of_memory": (
        "显存不足",
        "爆显存",
        "显存优化",
        "显存碎片",
        "显存泄漏",
        "显存占用",
        "峰值显存",
    )
}
# In the order of the lessons.
MODULES = (
    *(
        "memory",
        "symbolic",
        "models",
        "checkpoint",
        "schedule",
        "offload",
        "simulated",
        "accumulation",
        "attention",
        "budget",
        "distributed",
    ),
    "teaching",
)


@dataclass(frozen=True)
class Claim:
    """One row of a lesson's section "Claims and measurements", as HTML."""

    claim: str
    source: str
    experiment: str
    measured: str
    verdict: str


@dataclass(frozen=True, eq=False)
class Lesson:
    """A stored notebook in one language, prepared for the site.

    Attributes:
        name: Name of its file, "03_sqrt_schedule".
        title: Heading of its page, "3 Which ones should we forget?".
        claims: Dict from the number of a section with a table of claims, such as "3.10", to these
            claims. A lesson has at most two such sections.
    """

    name: str
    title: str
    notebook: Any
    claims: dict[str, list[Claim]]

    @property
    def number(self) -> str:
        return self.name[:2]


def build(notebooks: Path, output: Path) -> list[str]:
    """Build the site into `output`, which is replaced only if no error occurs.

    Args:
        notebooks: Folder of the notebooks and their scripts. Its parent has the READMEs, which are
            the front pages, and the files that they link to. The reference describes the
            `course_lib` that this process imports.
        output: Folder that does not exist, is empty, or contains an earlier site.

    Returns:
        Sphinx's warnings, one per line.

    Raises:
        EditionError: A notebook is broken or not executed, or `output` has
            something else.
    """
    stored = read_lessons(notebooks)
    check_twins(notebooks, stored)
    check_outputs(notebooks, stored)
    project = notebooks.resolve().parent
    urls = addresses(project) if (project / "pyproject.toml").exists() else {}
    with output_folder(output) as finished, tempfile.TemporaryDirectory() as scratch:
        for language in LANGUAGES:
            lessons = [
                _ready(notebooks / f"{name}.ipynb", notebook_in(notebook, language), language)
                for name, notebook in stored.items()
            ]
            _write_sources(Path(scratch, language), notebooks, lessons, language)
        warnings = _run_sphinx(Path(scratch), finished, urls.get("Documentation", ""))
        for place, content in _downloads(stored, urls.get("Repository", "")):
            (finished / place).parent.mkdir(exist_ok=True)
            (finished / place).write_text(content, encoding="utf-8")
        shutil.copy(ASSETS / "root.html", finished / "index.html")
        return warnings


def _mathjax() -> Path:
    """Return the folder of the installed MathJax 3.

    The site copies one script and the fonts of this folder of 24 MB.
    """
    package = importlib.metadata.distribution("sphinx-mathjax-offline")
    return Path(str(package.locate_file("sphinx-mathjax-offline/static/mathjax")))


# --- the lessons ---


_DOWNLOAD = "Download this lesson as a notebook"


def _downloads(stored: dict[str, Any], repository: str) -> Iterator[tuple[str, str]]:
    """Yield (path in the site, text) of each lesson's notebook in each language."""
    import nbformat

    for name, notebook in stored.items():
        for language in LANGUAGES:
            page = one_language(notebook, language, name, repository)
            yield f"{language}/downloads/{name}.ipynb", nbformat.writes(page)


#: Matches a cell that shows a table of claims.
CLAIMS = re.compile(r"^\w+\.(claims_table|(main|older|allocator)_claims)\(", re.M)


def _ready(path: Path, notebook: Any, language: str) -> Lesson:
    """Prepare the cells of a notebook for the site, in place, and return the lesson.

    The lesson has the claims that the notebook shows in its tables of claims.
    """
    title, claims, section = path.stem, {}, path.stem
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "markdown":
            cell.source = _same_page(cell.source)
            if found := re.match(r"(##?) ([\d.]+) .+", cell.source):
                section = found[2]
                # This target gives the section the same address in both languages.
                cell.source = f"({_anchor(section)})=\n{cell.source}"
                if found[1] == "#":
                    title = found[0].removeprefix("# ")
                    link = (
                        f'<p class="download"><a href="../downloads/{path.stem}.ipynb" download>'
                        f"{words_in(text(_DOWNLOAD), language)}</a></p>"
                    )
                    cell.source = cell.source.replace(found[0], f"{found[0]}\n\n{link}\n", 1)
        elif cell.cell_type == "code":
            _dress(cell, language)
            if CLAIMS.search(cell.source):
                claims[section] = _claims(cell, f"{path}, cell {number}", stored_again(path))
    return Lesson(path.stem, title, notebook, claims)


def _anchor(section: str) -> str:
    return f"section-{section.replace('.', '-')}"


_FOLDS = {
    ("code", "en"): ("Show the code", "Hide the code"),
    ("code", "zh"): ("显示代码", "收起代码"),
    ("solution", "en"): ("Show the solution", "Hide the solution"),
    ("solution", "zh"): ("显示答案", "收起答案"),
}


def _dress(cell: Any, language: str) -> None:
    """Change a code cell for the site, in place.

    The language switch is removed, solutions are folded, and a sentence replaces each slider.
    """
    tags = cell.metadata.setdefault("tags", [])
    outputs = [output.get("data", {}) for output in cell.outputs]
    if any("course-language" in data.get("text/html", "") for data in outputs):
        tags.append("remove-cell")
    solved = "### BEGIN SOLUTION" in cell.source
    cell.source = remove_guard(cell.source)
    if cell.metadata.get("jupyter", {}).get("source_hidden"):
        # the outputs of a solution are hidden, too
        tags.append("hide-cell" if solved else "hide-input")
    show, hide = _FOLDS["solution" if solved else "code", language]
    cell.metadata["mystnb"] = {"code_prompt_show": show, "code_prompt_hide": hide}
    for data in outputs:
        if data.get("text/plain", "").startswith("interactive("):
            words = html_in(markup(text(_SLIDER)), language)
            data["text/html"] = f'<p class="slider">{words}</p>'


_SLIDER = "In JupyterLab (`make lab`) there is a slider here."


def _claims(cell: Any, where: str, again: str) -> list[Claim]:
    from bs4 import BeautifulSoup

    tables = [
        BeautifulSoup(output.get("data", {}).get("text/html", ""), "html.parser")
        for output in cell.outputs
    ]
    rows = [row.find_all("td") for table in tables for row in table.select("tbody tr")]
    if not rows or any(len(row) != 5 for row in rows):
        raise EditionError(
            f"{where}: the output holds no table of claims with five columns: {again}"
        )
    return [
        Claim(*("".join(map(_plain_html, (cell.div or cell).contents)) for cell in row))
        for row in rows
    ]


def _plain_html(node: Any) -> str:
    """Return a node of a table's HTML as HTML text without its style."""
    if getattr(node, "attrs", None) is not None:
        node.attrs.pop("style", None)
    return str(node)


# --- what Sphinx reads ---


def _write_sources(source: Path, folder: Path, lessons: Sequence[Lesson], language: str) -> None:
    """Write the folder that Sphinx reads, with the layout of the repository."""
    import nbformat

    shutil.copytree(ASSETS, source, ignore=shutil.ignore_patterns("__pycache__"))
    notebooks, api, static = source / "notebooks", source / "api", source / "static"
    notebooks.mkdir()
    for lesson in lessons:
        nbformat.write(lesson.notebook, notebooks / f"{lesson.name}.ipynb")
    (notebooks / "claims.md").write_text(claims_page(lessons, language), encoding="utf-8")

    api.mkdir()
    for name in MODULES:
        (api / f"{name}.md").write_text(_api_page(name), encoding="utf-8")
    index = _page("api", language, pages="\n".join(MODULES))
    (api / "index.md").write_text(index, encoding="utf-8")

    root = folder.parent
    pages = [f"notebooks/{lesson.name}" for lesson in lessons] + ["notebooks/claims"]
    for page in [*sorted(folder.glob("[A-Z]*.md")), *root.glob(NOTES)]:
        guide = guide_in(page.read_text(encoding="utf-8"), language)
        (notebooks / page.name).write_text(guide, encoding="utf-8")
        pages.append(f"notebooks/{page.stem}")
    for page in sorted(root.glob("docs/*.md")):
        if page.suffixes == [".md"]:
            translated = page if language == "en" else page.with_suffix(".zh.md")
            name = f"docs/{page.stem}"
            _write_page(translated, source / "docs" / page.name, root, source, head=_keywords(name))
            pages.append(name)
    pages.append("api/index")
    pages.sort(key=FIRST_PAGES.__contains__, reverse=True)
    teachers = [page for page in pages if page in FOR_TEACHERS]
    learners = [page for page in pages if page not in FOR_TEACHERS]
    contents = _contents(learners) + _contents(teachers, f":caption: {CAPTION[language]}\n")
    _write_page(root / FRONT_DOORS[language], source / "index.md", root, source, contents)

    mathjax, fonts = _mathjax(), Path("output/chtml/fonts/woff-v2")
    (static / "mathjax" / fonts).mkdir(parents=True)
    shutil.copy(mathjax / "tex-chtml.js", static / "mathjax")
    for font in (mathjax / fonts).iterdir():
        shutil.copy(font, static / "mathjax" / fonts)
    shutil.copy(LICENCE, static / "mathjax")  # Apache-2.0, as the course's code is


def _contents(pages: list[str], caption: str = "") -> str:
    """Return the directive that lists pages in the navigation, with an optional caption."""
    return f"\n\n```{{toctree}}\n:hidden:\n{caption}\n" + "\n".join(pages) + "\n```\n"


def _keywords(name: str) -> str:
    """Return the front matter with a page's search words, or "".

    The search splits a query into pairs of characters, but Sphinx does not split keywords.
    Therefore each pair of characters of the words is also added as a keyword.
    """
    if name not in SEARCH_WORDS:
        return ""
    words = SEARCH_WORDS[name]
    pairs = ("".join(pair) for word in words for pair in pairwise(word))
    keywords = ", ".join(dict.fromkeys([*words, *pairs]))
    return f"---\nmyst:\n  html_meta:\n    keywords: {keywords}\n---\n\n"


def _write_page(
    page: Path, copy: Path, root: Path, source: Path, more: str = "", head: str = ""
) -> None:
    """Write a README or a page of docs/ for the site, with the files that it links to."""
    written = _for_the_site(page.read_text(encoding="utf-8"))
    copy.parent.mkdir(exist_ok=True)
    copy.write_text(head + written + more, encoding="utf-8")
    _copy_linked_files(written, root, source, page.parent.relative_to(root))


def _for_the_site(page: str) -> str:
    """Return a README or a page of docs/ without the parts that concern only the repository.

    Left out are comments, the link to the other language, text on how a code host shows the
    lessons, and links to guides for people who work in the repository. A badge becomes a link with
    its words, because its picture would come from another machine.
    """
    page = re.sub(r"<!-- hosted: read -->\n.*?<!-- /hosted -->\n", "", page, flags=re.S)
    page = re.sub(r"<!--.*?-->\n", "", page, flags=re.S)
    page = re.sub(r"^(?:\*\*English\*\* · |\[English\]\().*\n", "", page, flags=re.M)
    page = re.sub(r"\[!\[([^\]]*)\]\([^)]*\)\]", r"[\1]", page)
    page = re.sub(r"\[[^\]]+\]\(([A-Z]\w*(?:\.zh)?\.md)\)", r"`\1`", page)
    return _same_page(page)


def _same_page(text: str) -> str:
    """Return Markdown in which links to x.zh.md are replaced by links to x.md.

    A page has the name x.md in the builds of both languages.
    """
    return re.sub(r"(\]\((?:[\w./]*/)?[a-z_\d]+)\.zh\.md", r"\1.md", text)


def _copy_linked_files(page: str, root: Path, source: Path, place: Path) -> None:
    """Copy the files that a page in the folder `place` shows or links to, except other pages."""
    for link in re.findall(r"\]\(([^)\s#]+)", page):
        file, copy = root / place / link, source / place / link
        if "://" in link or copy.exists():
            continue
        if not file.is_file():
            raise EditionError(f"a page in {root / place} links to {link}, which is not a file")
        if link.endswith(".md"):  # is a separate page
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)


def _page(name: str, language: str, **values: object) -> str:
    """Return a page of the folder pages/ in one language, with its <VALUES> filled in."""
    page = markdown_in((ASSETS / "pages" / f"{name}.md").read_text(encoding="utf-8"), language)
    for key, value in values.items():
        page = page.replace(f"<{key.upper()}>", str(value))
    return page


def claims_page(lessons: Sequence[Lesson], language: str) -> str:
    """Return the claims of all lessons as MyST Markdown, each with its test and its verdict."""
    with_claims = {lesson: _outcomes(lesson) for lesson in lessons if lesson.claims}
    found = Counter(outcome for each in with_claims.values() for outcome in each)
    sums = _sums(*(found[outcome] for outcome in OUTCOMES))
    parts = [_page("claims", language, count=found.total(), sums=words_in(sums, language))]
    for lesson, became in with_claims.items():
        parts.append(f"## {lesson.title}")
        outcomes = iter(enumerate(became, 1))
        for section, claims in lesson.claims.items():
            link = f"{lesson.name}.ipynb#{_anchor(section)}"
            source = text(_CLAIMS_FROM, number=lesson.number, section=section, link=verbatim(link))
            parts.append(words_in(source, language))
            for claim in claims:
                place, outcome = next(outcomes)
                parts.append(_claim_html(f"{int(lesson.number)}.{place}", outcome, claim, language))
    return "\n\n".join(parts) + "\n"


def _outcomes(lesson: Lesson) -> list[str]:
    """Return the outcome of each claim of a lesson, in the order of its tables."""
    try:
        found = [each.outcome for each in claims_of(lesson.number)]
    except ValueError:  # there is no such lesson
        found = []
    if len(found) != (stored := sum(map(len, lesson.claims.values()))):
        raise EditionError(
            f"course_lib.lessons must have the claims of {lesson.name}: the notebook has {stored},"
            f" course_lib.lessons {len(found)}"
        )
    return found


def _sums(fail: int, partly: int, hold: int) -> str:
    """Return a label with the numbers of claims that fail, hold in part, and hold."""
    rest = {0: "none holds as it stands", 1: "1 holds as it stands"}.get(hold)
    rest = rest or text("{hold} hold as they stand", hold=hold)
    return text("{fail} fail, {partly} hold in part, {rest}.", fail=fail, partly=partly, rest=rest)


_PARTS = ("verdict", "measured", "experiment", "source")  # labels, as those of the outcomes
_OUTCOME_WORDS = {"fails": "fails", "partly": "holds in part", "holds": "holds"}


def _claim_html(number: str, outcome: str, claim: Claim, language: str) -> str:
    name = f"claim-{number.replace('.', '-')}"
    items = "".join(
        f'<div class="{part}"><dt>{words_in(part, language)}</dt>'
        f"<dd>{getattr(claim, part)}</dd></div>"
        for part in _PARTS
    )
    return (
        f'<div class="claim {outcome}" id="{name}"><p class="said">'
        f'<a class="claim-number" href="#{name}">{number}</a><q>{claim.claim}</q>'
        f'<strong class="outcome">{words_in(_OUTCOME_WORDS[outcome], language)}</strong></p>'
        f"<dl>{items}</dl></div>"
    )


_CLAIMS_FROM = "Measured in [lesson {number}, section {section}]({link})."


def _api_page(name: str) -> str:
    """Return the reference page of a module, with the most important names first.

    Raises:
        EditionError: The module cannot be imported.
    """
    try:
        module = importlib.import_module(f"course_lib.{name}")
    except Exception as error:  # after any error, Sphinx would write an empty page
        raise EditionError(
            f"course_lib.{name} cannot be imported ({error}), so it has no reference"
        ) from None
    public = {each: getattr(module, each) for each in _by_importance(module)}
    borrowed = {
        each: home for each, value in public.items() if (home := _described_elsewhere(value, name))
    }
    lines = [f".. automodule:: course_lib.{name}", "   :no-members:"]
    for each, value in public.items():
        if isinstance(value, dict | tuple):  # autodoc leaves out constants without a docstring
            lines.append(f"\n.. py:data:: {each}\n   :value: {value!r}")
        elif each not in borrowed:
            kind = _KINDS[_kind_of(value)]
            lines.append(f"\n.. auto{kind}:: course_lib.{name}.{each}")
            if isinstance(value, type):
                lines += ["   :members:", "   :member-order: bysource", _inheritance(value)]
    for home in dict.fromkeys(borrowed.values()):
        names = ", ".join(f"``{each}``" for each, place in borrowed.items() if place == home)
        lines.append(f"\nThe same as in ``{home}``: {names}.")
    return f"# course_lib.{name}\n\n```{{eval-rst}}\n" + "\n".join(lines) + "\n```\n"


def _inheritance(value: type) -> str:
    """Return autodoc's option for the bases of a class.

    The bases are shown. If a base belongs to the library and is not public, such as the base of
    `MemoryMeter` that has the results, its members are shown as members of the class instead.
    """
    own = [base for base in value.__mro__[1:] if base.__module__.startswith("course_lib.")]
    if all(base.__name__ in _public_names() for base in own):
        return "   :show-inheritance:"
    others = (base.__name__ for base in value.__mro__[1:] if base not in own)
    return f"   :inherited-members: {', '.join(others)}"


@cache
def _public_names() -> frozenset[str]:
    modules = [importlib.import_module(f"course_lib.{name}") for name in MODULES]
    return frozenset(each for module in modules for each in _by_importance(module))


# autodoc's directives, in the order of the reference
_KINDS = ("class", "function", "exception", "data")


def _kind_of(value: object) -> int:
    """Return the position of an object's kind, such as "class", in `_KINDS`."""
    if isinstance(value, type):
        return 2 if issubclass(value, BaseException) else 0
    return 1 if callable(value) else 3


def _by_importance(module: ModuleType) -> list[str]:
    """Return the public names of a module, ordered by importance.

    First is the name that equals the module's name, then the names in its docstring, then all other
    classes and functions, then exceptions, then constants.
    """
    own = [key for key, value in vars(module).items() if _is_public_in(module, key, value)]
    names = list(getattr(module, "__all__", own))
    mentioned = [module.__name__.rpartition(".")[2], *re.findall(r"`(\w+)", module.__doc__ or "")]
    first = [each for each in dict.fromkeys(mentioned) if each in names]
    rest = [each for each in names if each not in first]
    return first + sorted(rest, key=lambda each: max(1, _kind_of(getattr(module, each))))


def _is_public_in(module: ModuleType, name: str, value: object) -> bool:
    return name[0] != "_" and getattr(value, "__module__", None) == module.__name__


def _described_elsewhere(value: object, name: str) -> str:
    """Return the module whose page describes an object instead, or "" if there is none.

    This is a module of PyTorch, the module of `course_lib` that defines the object, or an earlier
    module in `MODULES`.
    """
    home = getattr(value, "__module__", None) or (
        "torch.utils.checkpoint" if isinstance(value, set) else ""
    )
    if home.startswith("torch"):
        return home
    if home.startswith(f"course_lib.{name}."):
        return ""
    lives_in = [each for each in MODULES if home.startswith(f"course_lib.{each}.") and each != name]
    for other in (*lives_in, *MODULES[: MODULES.index(name)]):
        if importlib.util.find_spec(f"course_lib.{other}"):
            if any(
                value is each
                for each in vars(importlib.import_module(f"course_lib.{other}")).values()
            ):
                return f"course_lib.{other}"
    return ""


# --- Sphinx ---


def _run_sphinx(source: Path, finished: Path, address: str) -> list[str]:
    """Build the pages of each language from its folder in `source`, and return the warnings.

    Sphinx runs in a process of its own, because autodoc changes the signatures of the functions
    that it describes.
    """
    scratch = {language: source / f"{language}-scratch" for language in LANGUAGES}
    for folder in scratch.values():
        folder.mkdir()
    builds = []
    for language, folder in scratch.items():
        title = TITLES[language]
        settings = [f"project={title}", f"html_title={title}", f"language={LOCALES[language]}"]
        arguments = ["-q", "--no-color", "-b", "html"]
        arguments += [option for setting in settings for option in ("-D", setting)]
        arguments += ["-A", f"address={address}", "-d", str(folder / "doctrees")]
        arguments += ["-w", str(folder / "warnings")]
        builds.append([*arguments, str(source / language), str(finished / language)])
    command = [sys.executable, "-W", "ignore", "-m", "publish.sphinx_builds", json.dumps(builds)]
    # Sphinx must import the `course_lib` of this repository, not an installed one.
    paths = [str(LICENCE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(source)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, encoding="utf-8"
    )
    if done.returncode:
        errors = re.findall(r"^ *([\w.]+: .+)", done.stderr.partition("Traceback\n")[2], re.M)
        raise EditionError(
            f"Sphinx failed: {errors[-1] if errors else f'exit status {done.returncode}'}"
        )
    warnings = []
    for language, folder in scratch.items():
        (finished / language / ".buildinfo").unlink(missing_ok=True)
        warnings += (folder / "warnings").read_text(encoding="utf-8").splitlines()
    return [line for line in warnings if line.strip()]


if __name__ == "__main__":
    run_edition(build, "site", __doc__.partition("\n\n")[0])
