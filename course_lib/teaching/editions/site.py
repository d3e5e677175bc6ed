"""The website: the lessons as they are stored, the claims with their verdicts, the glossary, the library's reference.

    python -m course_lib.teaching.editions.site                     # to build/site
    python -m course_lib.teaching.editions.site --output ~/pages    # somewhere else

No notebook runs and no network is used. Sphinx reads a folder laid out as the repository is (README.md is the front
page, then notebooks/ and api/), so that links between files lead from page to page. The site stands in its place only
once it is whole.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import io
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
ASSETS = Path(__file__).resolve().parent / "site_assets"
PACKAGES = {"sphinx": "sphinx", "myst_nb": "myst-nb", "furo": "furo", "bs4": "beautifulsoup4", "jupytext": "jupytext"}
STAMP = ".course-edition"  # a folder with this file may be replaced
MATHJAX_PACKAGE = "sphinx-mathjax-offline"
# In the order of the lessons; a module that is not there yet has no page.
MODULES = (
    *("memory", "models", "checkpoint", "schedule", "offload", "accumulation", "attention", "budget", "distributed"),
    "teaching",
)


class CannotBuild(Exception):
    """What is wrong, in one sentence for the reader of the terminal."""


@dataclass(frozen=True)
class Claim:
    """One row of a lesson's "What you may have read", as HTML in both languages."""

    claim: str
    experiment: str
    measured: str
    verdict: str


@dataclass(frozen=True)
class Lesson:
    """A stored notebook, made ready for the site."""

    name: str  # "03_sqrt_schedule"
    title: str  # "3 Which ones should we forget? / 该忘掉哪些？"
    notebook: Any
    claims_section: str | None  # "3.10", where the claims are
    claims: list[Claim]

    @property
    def number(self) -> str:
        return self.name[:2]


def build(output: Path, root: Path = ROOT) -> list[str]:
    """Build the site into `output`, which is replaced only when all went well.

    Args:
        output: a folder that does not exist, is empty, or holds an earlier site.
        root: where README.md with the files that it links to, notebooks/ and notebooks/scripts/ are. The reference is
            that of the `course_lib` that is running.

    Returns:
        Sphinx's warnings, one a line.

    Raises:
        CannotBuild: a package is missing, a notebook is broken or not executed, or `output` holds something else.
    """
    _check_packages()
    _check_output(output)
    lessons = read_lessons(root / "notebooks")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".site-", dir=output.parent) as scratch:
        source, finished = Path(scratch, "source"), Path(scratch, "site")
        _write_sources(source, root, lessons)
        warnings = _run_sphinx(source, finished, Path(scratch, "doctrees"))
        (finished / STAMP).write_text("Made by an edition of the course, which replaces all of this folder.\n", "utf-8")
        _swap(finished, output, Path(scratch, "old"))
    return warnings


def _swap(finished: Path, output: Path, old: Path) -> None:
    """Put the finished site in its place; an earlier one stays there if that fails."""
    replaces = output.exists()
    if replaces:
        output.rename(old)
    try:
        finished.rename(output)
    except OSError:
        if replaces:
            old.rename(output)
        raise


# --- what is asked for before anything is written ---


def _check_packages() -> None:
    missing = [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]
    try:
        _mathjax()
    except importlib.metadata.PackageNotFoundError:
        missing.append(MATHJAX_PACKAGE)
    if missing:
        raise CannotBuild(
            f"the site needs {', '.join(missing)}, not installed for {sys.executable}: "
            "pip install -e '.[course,test]' -c constraints.txt, or `make site`, installs all"
        )


def _mathjax() -> Path:
    """The folder of MathJax 3 as it is installed; of its 24 MB the site takes one script and the fonts."""
    package = importlib.metadata.distribution(MATHJAX_PACKAGE)
    return Path(str(package.locate_file("sphinx-mathjax-offline/static/mathjax")))


def _check_output(output: Path) -> None:
    if output.exists() and not output.is_dir():
        raise CannotBuild(f"{output} is a file, but the site needs a folder")
    if output.exists() and any(output.iterdir()) and not (output / STAMP).exists():
        raise CannotBuild(
            f"{output} was not made by an edition of the course and is left as it is: name another --output"
        )


# --- the lessons ---


def read_lessons(folder: Path) -> list[Lesson]:
    """All notebooks, checked against their scripts.

    Raises:
        CannotBuild: there is none; or one is no notebook, has no twin, differs from it, or has never been run.
    """
    paths = sorted(folder.glob("[0-9]*.ipynb"))
    if not paths:
        raise CannotBuild(f"there are no notebooks in {folder}")
    return [_read_lesson(path) for path in paths]


def _read_lesson(path: Path) -> Lesson:
    again = f"`make notebooks ARGS={path.stem[:2]}` stores it again"
    notebook = _read_notebook(path, again)
    _check_twin(path, notebook, again)
    _check_outputs(path, notebook, again)

    title, claims_section, claims = path.stem, None, []
    heading, section = path.stem, None  # the last one, and its cell
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "markdown" and (found := re.match(r"(#+) (.+)", cell.source)):
            heading, section = found[2], cell
            title = heading if found[1] == "#" else title
        if cell.cell_type == "code":
            _dress(cell, heading)
        if cell.cell_type == "code" and section and re.search(r"^what_you_may_have_read\(", cell.source, re.M):
            claims_section, claims = heading.split()[0], _claims(cell, f"{path}, cell {number}", again)
            # A name for the section, so that the page of claims can link to it whatever its heading becomes.
            section.source = f"(claims-{path.stem[:2]})=\n{section.source}"
    return Lesson(path.stem, title, notebook, claims_section, claims)


def _read_notebook(path: Path, again: str) -> Any:
    import nbformat

    try:
        notebook = nbformat.v4.reads(path.read_text(encoding="utf-8"))  # nbformat.read would only log what is wrong
        if notebook.get("nbformat") != 4:
            raise ValueError(f"its format is {notebook.get('nbformat')}, not 4")
        nbformat.validate(notebook)
    except (ValueError, AttributeError, TypeError, nbformat.ValidationError) as error:
        reason = str(error).splitlines()[0].removesuffix(".")[:100]
        raise CannotBuild(f"{path} is no notebook ({reason}): {again}") from None
    return notebook


def _check_outputs(path: Path, notebook: Any, again: str) -> None:
    code = [(number, cell) for number, cell in enumerate(notebook.cells, 1) if cell.cell_type == "code"]
    never_run = [number for number, cell in code if cell.source.strip() and cell.execution_count is None]
    if never_run:
        raise CannotBuild(f"{path}: cell {never_run[0]} has never been run, and the site runs none: {again}")
    if not any(cell.outputs for _, cell in code):
        raise CannotBuild(f"{path} has no outputs, and the site runs no cell: {again}")


def _check_twin(path: Path, notebook: Any, again: str) -> None:
    import jupytext

    script = path.parent / "scripts" / f"{path.stem}.py"
    if not script.exists():
        raise CannotBuild(f"{path} has no script {script}, which its text is kept in")
    try:
        twin = jupytext.read(script, fmt="py:percent")
    except Exception as error:  # whatever its parser stumbles over
        raise CannotBuild(f"{script} is no jupytext script: {error}") from None
    here, there = ([(cell.cell_type, cell.source.strip()) for cell in book.cells] for book in (notebook, twin))
    if here != there:
        pairs = enumerate(zip(here, there, strict=False), 1)
        number = next((number for number, (one, other) in pairs if one != other), min(len(here), len(there)) + 1)
        raise CannotBuild(f"{path} and {script} differ from cell {number} on: {again}")


def _dress(cell: Any, heading: str) -> None:
    """A code cell for the site: no switch of its own, solutions folded, figures with words, sliders explained."""
    tags = cell.metadata.setdefault("tags", [])
    outputs = [output.get("data", {}) for output in cell.outputs]
    if any("course-language" in "".join(data.get("text/html", "")) for data in outputs):
        tags.append("remove-cell")
    if cell.metadata.get("jupyter", {}).get("source_hidden"):
        tags.append("hide-cell")
    cell.metadata["mystnb"] = {
        "code_prompt_show": "Show the solution",
        "code_prompt_hide": "Hide the solution",
    }
    for output, data in zip(cell.outputs, outputs, strict=True):
        if "image/png" in data:
            described = output.metadata.get("image/png", {}).get("alt") or output.metadata.get("alt")
            cell.metadata["mystnb"]["image"] = {"alt": described or f"Figure / 图：{heading}"}
        if data.get("text/plain", "").startswith("interactive("):
            data["text/html"] = _SLIDER


_SLIDER = (
    '<p class="slider" lang="en">In JupyterLab (<code>make lab</code>) there is a slider here.</p>'
    '<p class="slider" lang="zh">在 JupyterLab（<code>make lab</code>）里，这里有一个滑块。</p>'
)


def _claims(cell: Any, where: str, again: str) -> list[Claim]:
    from bs4 import BeautifulSoup

    tables = [BeautifulSoup(output.get("data", {}).get("text/html", ""), "html.parser") for output in cell.outputs]
    rows = [row.find_all("td") for table in tables for row in table.select("tbody tr")]
    if not rows or any(len(row) != 4 for row in rows):
        raise CannotBuild(f"{where}: the output holds no table of claims with four columns: {again}")
    return [Claim(*("".join(map(_plain_html, (cell.div or cell).contents)) for cell in row)) for row in rows]


def _plain_html(node: Any) -> str:
    """A node of a stored table, without the styles that its cell needed."""
    if getattr(node, "attrs", None) is not None:
        node.attrs.pop("style", None)
    return str(node)


# --- what Sphinx reads ---


def _write_sources(source: Path, root: Path, lessons: Sequence[Lesson]) -> None:
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

    front = (root / "README.md").read_text(encoding="utf-8")
    pages = [f"notebooks/{lesson.name}" for lesson in lessons] + ["notebooks/claims"]
    for page in sorted((root / "notebooks").glob("[A-Z]*.md")):
        shutil.copy(page, notebooks)
        pages.append(f"notebooks/{page.stem}")
    pages.append("api/index")
    contents = "\n\n```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"
    (source / "index.md").write_text(front + contents, encoding="utf-8")
    _copy_linked_files(front, root, source)

    mathjax, fonts = _mathjax(), Path("output/chtml/fonts/woff-v2")
    (static / "mathjax" / fonts).mkdir(parents=True)
    shutil.copy(mathjax / "tex-chtml.js", static / "mathjax")
    for font in (mathjax / fonts).iterdir():
        shutil.copy(font, static / "mathjax" / fonts)
    shutil.copy(ROOT / "LICENSE", static / "mathjax")  # Apache-2.0, as the course's code is


def _copy_linked_files(front: str, root: Path, source: Path) -> None:
    """The files that the front page shows or links to, where they are not pages themselves."""
    for link in re.findall(r"\]\(([^)\s#]+)", front):
        file, copy = root / link, source / link
        if "://" in link or copy.exists():
            continue
        if not file.is_file():
            raise CannotBuild(f"{root / 'README.md'} links to {link}, which is no file")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)


def _page(name: str, **values: object) -> str:
    """A page of pages/, with its <VALUES>."""
    page = (ASSETS / "pages" / f"{name}.md").read_text(encoding="utf-8")
    for key, value in values.items():
        page = page.replace(f"<{key.upper()}>", str(value))
    return page


def claims_page(lessons: Sequence[Lesson]) -> str:
    """The claims of all lessons, as MyST markdown: what is said, how it was tested, what came out, and the verdict."""
    parts = [_page("claims", count=sum(len(lesson.claims) for lesson in lessons))]
    for lesson in (lesson for lesson in lessons if lesson.claims):
        link = f"{lesson.name}.ipynb#claims-{lesson.number}"
        parts.append(f"## {lesson.title}")
        parts.append(_CLAIMS_FROM.format(number=lesson.number, section=lesson.claims_section, link=link))
        parts += [_claim_html(int(lesson.number), place, claim) for place, claim in enumerate(lesson.claims, 1)]
    return "\n\n".join(parts) + "\n"


def _claim_html(lesson: int, place: int, claim: Claim) -> str:
    name = f"claim-{lesson}-{place}"
    rows = (
        ("verdict", "Verdict", "结论", claim.verdict),
        ("measured", "Measured", "实测", claim.measured),
        ("experiment", "Experiment", "实验", claim.experiment),
    )
    items = "".join(
        f'<div class="{kind}"><dt><span lang="en">{en}</span> <span lang="zh">{zh}</span></dt><dd>{words}</dd></div>'
        for kind, en, zh, words in rows
    )
    return (
        f'<div class="claim" id="{name}"><p class="said"><a class="claim-number" href="#{name}">{lesson}.{place}</a>'
        f"<q>{claim.claim}</q></p><dl>{items}</dl></div>"
    )


_CLAIMS_FROM = """\
<div lang="en">

Measured in [lesson {number}, section {section}]({link}).

</div>
<div lang="zh">

实测见[第 {number} 课 {section} 节]({link})。

</div>"""


def _api_page(name: str) -> str:
    """A module's page; autodoc leaves out constants without a docstring, so these are named."""
    try:
        module = importlib.import_module(f"course_lib.{name}")
    except Exception as error:  # whatever stops it, there would be an empty page
        raise CannotBuild(f"course_lib.{name} cannot be imported ({error}), so it has no reference") from None
    public = {constant: getattr(module, constant) for constant in getattr(module, "__all__", ())}
    lines = [
        f".. automodule:: course_lib.{name}",
        *("   :members:", "   :show-inheritance:", "   :member-order: bysource"),
    ]
    for constant, value in public.items():
        if isinstance(value, dict | tuple):
            lines.append(f"\n.. py:data:: {constant}\n   :value: {value!r}")
    return f"# course_lib.{name}\n\n```{{eval-rst}}\n" + "\n".join(lines) + "\n```\n"


# --- Sphinx ---


def _run_sphinx(source: Path, finished: Path, doctrees: Path) -> list[str]:
    from sphinx.application import Sphinx
    from sphinx.errors import SphinxError

    warnings = io.StringIO()
    try:
        with redirect_stdout(io.StringIO()):
            app = Sphinx(source, source, finished, doctrees, "html", status=None, warning=warnings)
            app.build()
    except SphinxError as error:
        raise CannotBuild(f"Sphinx gave up: {str(error).splitlines()[0]}") from error
    if app.statuscode:
        raise CannotBuild(f"Sphinx gave up: {warnings.getvalue().strip()}")
    (finished / ".buildinfo").unlink(missing_ok=True)
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in warnings.getvalue().splitlines() if line.strip()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "site", help="the folder (%(default)s)")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository that the site is made from")
    chosen = parser.parse_args(arguments)
    start = time.perf_counter()
    try:
        warnings = build(chosen.output, chosen.root)
    except CannotBuild as problem:
        print(problem, file=sys.stderr)
        return 1
    except OSError as error:  # no README.md, no space, no permission
        print(f"the site cannot be built: {error}", file=sys.stderr)
        return 1
    for warning in warnings:
        print(warning, file=sys.stderr)
    size = sum(file.stat().st_size for file in chosen.output.rglob("*") if file.is_file()) / 10**6
    print(f"{chosen.output / 'index.html'}: {size:.1f} MB in {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
