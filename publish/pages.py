"""Each lesson as a notebook in one language, for VS Code, Colab and a code host's preview.

    python -m publish.pages --output build/pages

A viewer that ignores styles and folding shows both languages and every solution of a stored lesson.
The notebooks of this edition have prose and outputs in one language and pictures as plain PNG. Each
solution is prose below the attempt and opens on a click. The results are those of the stored
notebooks, because no cell runs.
"""

import html
from copy import deepcopy
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from course_lib.teaching.pictures import pictures_in

from .address import addresses
from .cells import (
    EditionError,
    check_links,
    check_outputs,
    check_twins,
    copy_files,
    copy_pages,
    is_solution,
    output_folder,
    read_lessons,
    remove_guard,
    run_edition,
    without_markers,
)
from .languages import markdown_in, output_in, without_lab_texts

LANGUAGES = {"en": "zh", "zh": "en"}  # language -> the other language
_KEPT = ("tags", "jupyter")  # keys of a cell's metadata; other keys are for slides and guides

_INSTALL = {
    "en": "# Where the course's library is missing, as in Colab, this installs it.",
    "zh": "# 缺少课程的库时（例如在 Colab 里），在这里安装。",
}
_FIRST = {
    "en": (
        "*This notebook is in English alone, without the language buttons; [中文]({other})."
        " Solutions are closed: click on “Show the solution”.*"
    ),
    "zh": (
        "*这份 notebook 只有中文，没有语言按钮；[English]({other})。"
        "答案都已收起：点“显示答案”展开。*"
    ),
}
_SHOW = {"en": "Show the solution", "zh": "显示答案"}


def build(notebooks: Path, output: Path) -> None:
    """Write all lessons into a folder for each language, with the glossary and the linked pages.

    Raises:
        EditionError: A notebook is broken or not executed, lacks a language, or links to a file
            that is missing.
    """
    lessons = read_lessons(notebooks)
    check_twins(notebooks, lessons)
    check_outputs(notebooks, lessons)
    project = notebooks.resolve().parent
    urls = addresses(project) if (project / "pyproject.toml").exists() else {}
    with output_folder(output) as folder:
        for language in LANGUAGES:
            (folder / language).mkdir()
            copy_files(notebooks, folder / language, "GLOSSARY.md")
            for name, notebook in lessons.items():
                try:
                    page = one_language(notebook, language, name, urls.get("Repository", ""))
                except EditionError as error:
                    raise EditionError(f"{name}, {error}") from None
                nbformat.write(page, folder / language / f"{name}.ipynb")
        copy_pages(notebooks, folder / "docs", "../{language}/")
        for language in LANGUAGES:
            for name, notebook in read_lessons(folder / language).items():
                check_links(name, notebook, folder / language)


def one_language(notebook: NotebookNode, language: str, name: str, repository: str) -> NotebookNode:
    """Return a stored lesson in one language.

    Args:
        name: Name of the lesson's file, used to link to the other language.
        repository: Address of the repository, from which the first cell installs the library. With
            "" there is no such cell.
    """
    page = deepcopy(notebook)
    other = f"../{LANGUAGES[language]}/{name}.ipynb"
    page.cells = [nbformat.v4.new_markdown_cell(_FIRST[language].format(other=other), id="edition")]
    if repository:
        page.cells.append(nbformat.v4.new_code_cell(_install(language, repository), id="install"))
    for cell in notebook.cells:
        page.cells.append(_cell(cell, language))
    return page


def _install(language: str, repository: str) -> str:
    return (
        f"{_INSTALL[language]}\nimport importlib.util\n\n"
        'if importlib.util.find_spec("course_lib") is None:\n'
        f'    %pip install -q "course_lib @ git+{repository}" matplotlib pandas ipywidgets'
    )


def _cell(cell: NotebookNode, language: str) -> NotebookNode:
    cell = deepcopy(cell)
    cell.metadata = {key: cell.metadata[key] for key in _KEPT if key in cell.metadata}
    if cell.cell_type == "markdown":
        cell.source = without_lab_texts(markdown_in(cell.source, language))
        return cell
    if _is_switch(cell):
        cell.source = (
            f'from course_lib.teaching import language\n\nlanguage("{language}", only=True)'
        )
        cell.outputs = []
        return cell
    outputs = [_output(output, language) for output in cell.outputs]
    if is_solution(cell):
        return nbformat.v4.new_markdown_cell(
            _fold_solution(cell.source, outputs, language), id=cell.id
        )
    cell.outputs = outputs
    return cell


def _is_switch(cell: NotebookNode) -> bool:
    return any(
        "course-language" in output.get("data", {}).get("text/html", "") for output in cell.outputs
    )


def _output(output: NotebookNode, language: str) -> NotebookNode:
    """Return an output of a cell in one language.

    A figure becomes a single PNG, whose alt text is in the metadata.
    """
    pictures = pictures_in(output.get("data", {}).get("text/html", ""))
    if not pictures:
        return output_in(output, language)
    picture = pictures[language]
    return nbformat.v4.new_output(
        "display_data",
        {"image/png": picture.png, "text/plain": picture.alt},
        metadata={"image/png": {"alt": picture.alt}},
    )


def _fold_solution(source: str, outputs: list[NotebookNode], language: str) -> str:
    """Return a solution and its verdicts as a prose cell's text, which opens on a click."""
    code = without_markers(remove_guard(source))
    parts = [f"<details>\n<summary>{_SHOW[language]}</summary>\n\n```python\n{code}\n```"]
    for output in outputs:
        data = output.get("data", {})
        if "text/html" in data:
            parts.append("\n".join(filter(str.strip, data["text/html"].splitlines())))
        elif "image/png" in data:
            words = html.escape(data["text/plain"])
            parts.append(f'<img alt="{words}" src="data:image/png;base64,{data["image/png"]}">')
        elif text := output.get("text", "") or data.get("text/plain", ""):
            parts.append(f"```\n{text.strip()}\n```")
    return "\n\n".join([*parts, "</details>"])


if __name__ == "__main__":
    run_edition(build, "pages", __doc__.partition("\n\n")[0])
