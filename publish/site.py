"""The website: the lessons as they are stored, the claims with their verdicts, the glossary, the
library's reference.

    python -m publish.site                     # to build/site
    python -m publish.site --output ~/pages    # somewhere else

No notebook runs and no network is used. Sphinx reads a folder laid out as the repository is
(both READMEs are the front page, then docs/, notebooks/ and api/), so that links between files lead
from page to page. The site stands in its place only once it is whole.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from course_lib.labels import both, markup, text, verbatim

from . import not_installed

try:
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
        run_edition,
        stored_again,
        unguarded,
    )
    from .pages import LANGUAGES, one_language
    from .site_languages import write_trees
except ImportError as error:
    if __name__ != "__main__":
        raise
    sys.exit(not_installed("site", error))

LICENCE = Path(__file__).resolve().parents[1] / "LICENSE"
ASSETS = Path(__file__).resolve().parent / "site_assets"
PACKAGES = {
    "sphinx": "sphinx",
    "myst_nb": "myst-nb",
    "furo": "furo",
    "bs4": "beautifulsoup4",
    "jupytext": "jupytext",
}
MATHJAX_PACKAGE = "sphinx-mathjax-offline"
#: Pages that the sidebar lists before the lessons.
FIRST_PAGES = ("docs/out_of_memory",)
# In the order of the lessons; a module that is not there yet has no page.
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
    """One row of a lesson's section "Claims and measurements", as HTML in both languages."""

    claim: str
    source: str
    experiment: str
    measured: str
    verdict: str


@dataclass(frozen=True, eq=False)
class Lesson:
    """A stored notebook, made ready for the site."""

    name: str  # "03_sqrt_schedule"
    title: str  # "3 Which ones should we forget? / 该忘掉哪些？"
    notebook: Any
    # by section, "3.10", of which a lesson may have two: the older ones are in depth
    claims: dict[str, list[Claim]]

    @property
    def number(self) -> str:
        return self.name[:2]


def build(notebooks: Path, output: Path) -> list[str]:
    """Build the site into `output`, which is replaced only when all went well.

    Args:
        notebooks: the folder of the notebooks and their scripts; the READMEs, which are the front
            page, and the files that they link to lie in the folder above it. The reference is that
            of the `course_lib` that is running.
        output: a folder that does not exist, is empty, or holds an earlier site.

    Returns:
        Sphinx's warnings, one a line.

    Raises:
        EditionError: a package is missing, a notebook is broken or not executed, or `output` holds
            something else.
    """
    _check_packages()
    stored = read_lessons(notebooks)
    check_twins(notebooks, stored)
    check_outputs(notebooks, stored)
    project = notebooks.resolve().parent
    urls = addresses(project) if (project / "pyproject.toml").exists() else {}
    downloads = _downloads(stored, urls.get("Repository", ""))
    lessons = [_ready(notebooks / f"{name}.ipynb", notebook) for name, notebook in stored.items()]
    with output_folder(output) as finished, tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "source")
        _write_sources(source, notebooks, lessons)
        warnings = _run_sphinx(source, finished, Path(scratch, "doctrees"))
        write_trees(finished, urls.get("Documentation", ""))
        for place, content in downloads.items():
            (finished / place).parent.mkdir(parents=True, exist_ok=True)
            (finished / place).write_text(content, encoding="utf-8")
        return warnings


# --- what is asked for before anything is written ---


def _check_packages() -> None:
    missing = [
        package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None
    ]
    try:
        _mathjax()
    except importlib.metadata.PackageNotFoundError:
        missing.append(MATHJAX_PACKAGE)
    if missing:
        raise EditionError(
            f"the site needs {', '.join(missing)}, not installed for {sys.executable}: "
            "pip install -e '.[course,docs]' -c constraints.txt, or `make site`, installs all"
        )


def _mathjax() -> Path:
    """The folder of MathJax 3 as it is installed; of its 24 MB the site takes one script and the
    fonts."""
    package = importlib.metadata.distribution(MATHJAX_PACKAGE)
    return Path(str(package.locate_file("sphinx-mathjax-offline/static/mathjax")))


# --- the lessons ---


_DOWNLOAD = "Download this lesson as a notebook"


def _downloads(stored: Mapping[str, Any], repository: str) -> dict[str, str]:
    """Place in the site -> a lesson's notebook in one language."""
    import nbformat

    return {
        f"downloads/{language}/{name}.ipynb": nbformat.writes(
            one_language(notebook, language, name, repository)
        )
        for name, notebook in stored.items()
        for language in LANGUAGES
    }


def _download_links(name: str) -> str:
    return "".join(
        f'<p class="download" lang="{language}">'
        f'<a href="../downloads/{language}/{name}.ipynb" download>{said}</a></p>'
        for language, said in zip(LANGUAGES, both(text(_DOWNLOAD)), strict=True)
    )


#: A cell that shows a table of claims.
CLAIMS = re.compile(r"^(what_you_may_have_read|\w+\.(older|allocator)_claims)\(", re.M)


def _ready(path: Path, notebook: Any) -> Lesson:
    """A notebook with its claims read and its cells dressed, in place."""
    title, claims = path.stem, {}
    heading, section = path.stem, None  # the last one, and its cell
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "markdown":
            cell.source = _one_page_of_two(cell.source)
        if cell.cell_type == "markdown" and (found := re.match(r"(#+) (.+)", cell.source)):
            heading, section = found[2], cell
            if found[1] == "#":
                title = heading
                cell.source = (
                    f"{cell.source[: found.end()]}\n\n{_download_links(path.stem)}\n"
                    + (cell.source[found.end() :])
                )
        if cell.cell_type == "code":
            _dress(cell)
        if cell.cell_type == "code" and section and CLAIMS.search(cell.source):
            found = _claims(cell, f"{path}, cell {number}", stored_again(path))
            claims[heading.split()[0]] = found
            # A name for the section, so that the page of claims can link to it whatever its heading
            # becomes.
            section.source = f"({_anchor(path.stem, len(claims))})=\n{section.source}"
    return Lesson(path.stem, title, notebook, claims)


def _anchor(lesson: str, place: int) -> str:
    return f"claims-{lesson[:2]}" if place == 1 else f"claims-{lesson[:2]}-{place}"


def _dress(cell: Any) -> None:
    """A code cell for the site: no switch of its own, solutions folded, sliders explained."""
    tags = cell.metadata.setdefault("tags", [])
    outputs = [output.get("data", {}) for output in cell.outputs]
    if any("course-language" in "".join(data.get("text/html", "")) for data in outputs):
        tags.append("remove-cell")
    solved = "### BEGIN SOLUTION" in cell.source
    cell.source = unguarded(cell.source)
    if cell.metadata.get("jupyter", {}).get("source_hidden"):
        # a figure is seen, the code that draws it is not
        tags.append("hide-cell" if solved else "hide-input")
    what = "solution" if solved else "code"
    cell.metadata["mystnb"] = {
        "code_prompt_show": f"Show the {what}",
        "code_prompt_hide": f"Hide the {what}",
    }
    for data in outputs:
        if data.get("text/plain", "").startswith("interactive("):
            data["text/html"] = _SLIDER


_SLIDER = (
    f'<p class="slider">{markup(text("In JupyterLab (`make lab`) there is a slider here."))}</p>'
)


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
    """A node of a stored table, without the styles that its cell needed."""
    if getattr(node, "attrs", None) is not None:
        node.attrs.pop("style", None)
    return str(node)


# --- what Sphinx reads ---


def _write_sources(source: Path, folder: Path, lessons: Sequence[Lesson]) -> None:
    """The folder that Sphinx reads, laid out as the repository is."""
    import nbformat

    shutil.copytree(ASSETS, source, ignore=shutil.ignore_patterns("__pycache__"))
    notebooks, api, static = source / "notebooks", source / "api", source / "static"
    notebooks.mkdir()
    for lesson in lessons:
        nbformat.write(lesson.notebook, notebooks / f"{lesson.name}.ipynb")
    (notebooks / "claims.md").write_text(claims_page(lessons), encoding="utf-8")

    api.mkdir()
    modules = [name for name in MODULES if importlib.util.find_spec(f"course_lib.{name}")]
    for name in modules:
        (api / f"{name}.md").write_text(_api_page(name), encoding="utf-8")
    (api / "index.md").write_text(_page("api", pages="\n".join(modules)), encoding="utf-8")

    root = folder.parent
    front = _written_in_both(root, *FRONT_DOORS.values())
    pages = [f"notebooks/{lesson.name}" for lesson in lessons] + ["notebooks/claims"]
    for page in [*sorted(folder.glob("[A-Z]*.md")), *root.glob(NOTES)]:
        shutil.copy(page, notebooks)
        pages.append(f"notebooks/{page.stem}")
    for page in sorted(root.glob("docs/*.md")):
        if page.suffixes == [".md"]:
            _write_guide(page, root, source)
            pages.append(f"docs/{page.stem}")
    pages.append("api/index")
    pages.sort(key=FIRST_PAGES.__contains__, reverse=True)
    contents = "\n\n```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"
    (source / "index.md").write_text(front + contents, encoding="utf-8")
    _copy_linked_files(front, root, source, Path())

    mathjax, fonts = _mathjax(), Path("output/chtml/fonts/woff-v2")
    (static / "mathjax" / fonts).mkdir(parents=True)
    shutil.copy(mathjax / "tex-chtml.js", static / "mathjax")
    for font in (mathjax / fonts).iterdir():
        shutil.copy(font, static / "mathjax" / fonts)
    shutil.copy(LICENCE, static / "mathjax")  # Apache-2.0, as the course's code is


def _write_guide(page: Path, root: Path, source: Path) -> None:
    """Write an English page of docs/ and its translation as one page, with the files it shows."""
    english = page.relative_to(root).as_posix()
    written = _written_in_both(root, english, english.replace(".md", ".zh.md"))
    (source / "docs").mkdir(exist_ok=True)
    (source / english).write_text(written, encoding="utf-8")
    _copy_linked_files(written, root, source, Path("docs"))


def _written_in_both(root: Path, english: str, chinese: str) -> str:
    """One page of a text and its translation: under each heading both, as a lesson's cell has them.

    Raises:
        EditionError: they have different headings.
    """
    texts = [(root / name).read_text(encoding="utf-8") for name in (english, chinese)]
    anchors = {link for text in texts for link in re.findall(r"\]\(#([^)]+)\)", text)}
    sections = [_sections(text) for text in texts]
    levels = [[heading.partition(" ")[0] for heading, _ in each] for each in sections]
    if levels[0] != levels[1]:
        raise EditionError(
            f"{english} and {chinese} differ in their headings, {len(levels[0])}"
            f" and {len(levels[1])}"
        )
    parts = []
    for (heading, en), (other, zh) in zip(*sections, strict=True):
        level, title = heading.split(" ", 1)
        other = other.split(" ", 1)[1]
        # links lead to a heading by its words in one language
        slugs = [re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in (title, other)]
        parts += ["", *(f"({slug})=" for slug in slugs if slug in anchors)]
        if number := re.match(r"[\d.]+ ", title):  # of both, as in the lessons
            other = other.removeprefix(number[0])
        parts.append(f"{level} {title} / {other}\n")
        for language, body in (("en", en), ("zh", zh)):
            parts.append(f'<div lang="{language}">\n\n{body}\n\n</div>')
    return "\n".join(parts) + "\n"


def _sections(text: str) -> list[tuple[str, str]]:
    """(heading, what stands below it) of a README or a page of docs/.

    What is true of the repository alone is left out: comments, the link to the other language, how
    a code host shows the lessons, and links to guides for those who work in the repository. A badge
    becomes a link with its words, because its picture would come from another machine.
    """
    text = re.sub(r"<!-- hosted: read -->\n.*?<!-- /hosted -->\n", "", text, flags=re.S)
    text = re.sub(r"<!--.*?-->\n", "", text, flags=re.S)
    text = re.sub(r"^(?:\*\*English\*\* · |\[English\]\().*\n", "", text, flags=re.M)
    text = re.sub(r"\[!\[([^\]]*)\]\([^)]*\)\]", r"[\1]", text)
    text = re.sub(r"\[[^\]]+\]\(([A-Z]\w*\.md)\)", r"`\1`", text)
    text = _one_page_of_two(text)
    parts = re.split(r"^(#{1,6} .+)\n", text, flags=re.M)
    return [(heading, body.strip()) for heading, body in zip(parts[1::2], parts[2::2], strict=True)]


def _one_page_of_two(text: str) -> str:
    """Markdown with its links to Chinese pages of docs/, which the site shows with the English."""
    return re.sub(r"(\]\((?:[\w./]*/)?[a-z_]+)\.zh\.md", r"\1.md", text)


def _copy_linked_files(page: str, root: Path, source: Path, place: Path) -> None:
    """Copy the files that a page in the folder `place` shows or links to, except other pages."""
    for link in re.findall(r"\]\(([^)\s#]+)", page):
        file, copy = root / place / link, source / place / link
        if "://" in link or copy.exists():
            continue
        if not file.is_file():
            raise EditionError(f"a page in {root / place} links to {link}, which is not a file")
        if link.endswith(".md"):  # a page of its own
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)


def _page(name: str, **values: object) -> str:
    """A page of pages/, with its <VALUES>."""
    page = (ASSETS / "pages" / f"{name}.md").read_text(encoding="utf-8")
    for key, value in values.items():
        page = page.replace(f"<{key.upper()}>", str(value))
    return page


def claims_page(lessons: Sequence[Lesson]) -> str:
    """The claims of all lessons, as MyST markdown: what is said, how it was tested, what came out,
    and the verdict."""
    with_claims = {lesson: _outcomes(lesson) for lesson in lessons if lesson.claims}
    found = Counter(outcome for each in with_claims.values() for outcome in each)
    parts = [
        _page("claims", count=found.total(), **_sums(*(found[outcome] for outcome in OUTCOMES)))
    ]
    for lesson, became in with_claims.items():
        parts.append(f"## {lesson.title}")
        outcomes = iter(enumerate(became, 1))
        for group, (section, claims) in enumerate(lesson.claims.items(), 1):
            link = f"{lesson.name}.ipynb#{_anchor(lesson.name, group)}"
            source = both(
                text(_CLAIMS_FROM, number=lesson.number, section=section, link=verbatim(link))
            )
            parts += [
                f'<div lang="{one}">\n\n{said}\n\n</div>'
                for one, said in zip(("en", "zh"), source, strict=True)
            ]
            parts += [_claim_html(int(lesson.number), *next(outcomes), claim) for claim in claims]
    return "\n\n".join(parts) + "\n"


def _outcomes(lesson: Lesson) -> list[str]:
    try:
        found = [each.outcome for each in claims_of(lesson.number)]
    except ValueError:  # there is no such lesson
        found = []
    if len(found) != (stored := sum(map(len, lesson.claims.values()))):
        raise EditionError(
            f"course_lib.lessons has not the claims of {lesson.name}: {stored} in the notebook,"
            f" {len(found)} there"
        )
    return found


def _sums(fail: int, partly: int, hold: int) -> dict[str, str]:
    """Counts of claims by outcome, in both languages."""
    rest = {0: "none holds as it stands", 1: "1 holds as it stands"}.get(hold)
    rest = rest or text("{hold} hold as they stand", hold=hold)
    said = text("{fail} fail, {partly} hold in part, {rest}.", fail=fail, partly=partly, rest=rest)
    return dict(zip(("en", "zh"), both(said), strict=True))


_SAID = ("verdict", "measured", "experiment", "source")  # labels, as those of the outcomes
_OUTCOME_WORDS = {"fails": "fails", "partly": "holds in part", "holds": "holds"}


def _claim_html(lesson: int, place: int, outcome: str, claim: Claim) -> str:
    name = f"claim-{lesson}-{place}"
    items = "".join(
        f'<div class="{kind}"><dt>{_spans(kind)}</dt><dd>{words}</dd></div>'
        for kind, words in zip(
            _SAID, (claim.verdict, claim.measured, claim.experiment, claim.source), strict=True
        )
    )
    return (
        f'<div class="claim {outcome}" id="{name}"><p class="said">'
        f'<a class="claim-number" href="#{name}">{lesson}.{place}</a><q>{claim.claim}</q>'
        f'<strong class="outcome">{_spans(_OUTCOME_WORDS[outcome])}</strong></p>'
        f"<dl>{items}</dl></div>"
    )


def _spans(label: str) -> str:
    return " ".join(
        f'<span lang="{one}">{said}</span>'
        for one, said in zip(("en", "zh"), both(label), strict=True)
    )


_CLAIMS_FROM = "Measured in [lesson {number}, section {section}]({link})."


def _api_page(name: str) -> str:
    """Write the reference of a module, the most important names first.

    Raises:
        EditionError: the module cannot be imported.
    """
    try:
        module = importlib.import_module(f"course_lib.{name}")
    except Exception as error:  # whatever stops it, there would be an empty page
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
    """Option of autodoc for the bases of a class.

    Bases of a class are shown. If one of them is the library's own and not public, as the one that
    has the figures of `MemoryMeter`, its members are shown as those of the class instead.
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
    """Place in `_KINDS`."""
    if isinstance(value, type):
        return 2 if issubclass(value, BaseException) else 0
    return 1 if callable(value) else 3


def _by_importance(module: ModuleType) -> list[str]:
    """Public names of a module: the one it is named for, those in its docstring, then the rest.

    The docstring says first what a reader wants first. The rest has classes and functions first,
    then exceptions, then constants.
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
    """Return where else the reference describes an object: in PyTorch's, on the page of another
    module of ours in which it is defined, or on that of an earlier module. Return "" if nowhere."""
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


def _run_sphinx(source: Path, finished: Path, doctrees: Path) -> list[str]:
    """Run Sphinx in a process of its own, since autodoc changes the signatures of the functions
    that it describes."""
    warnings = doctrees.parent / "warnings"
    command = [sys.executable, "-W", "ignore", "-m", "sphinx", "-q", "--no-color", "-b", "html"]
    command += ["-d", str(doctrees), "-w", str(warnings), str(source), str(finished)]
    # of the course_lib that is running
    paths = [str(LICENCE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(doctrees.parent)}
    done = subprocess.run(command, env=settings, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        said = re.findall(r"^ *([\w.]+: .+)", done.stderr.partition("Traceback\n")[2], re.M)
        raise EditionError(
            f"Sphinx gave up: {said[-1] if said else f'exit status {done.returncode}'}"
        )
    (finished / ".buildinfo").unlink(missing_ok=True)
    return [line for line in warnings.read_text(encoding="utf-8").splitlines() if line.strip()]


if __name__ == "__main__":
    run_edition(build, "site", __doc__.partition("\n\n")[0])
