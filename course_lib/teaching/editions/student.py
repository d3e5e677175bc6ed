"""The student edition: the notebooks with stubs instead of solutions, and without outputs.

python -m course_lib.teaching.editions.student [--output build/student]
"""

import re
import shutil
import sys
from pathlib import Path

from . import not_installed

try:
    import nbformat

    from .cells import (
        EditionError,
        check_twins,
        copy_files,
        output_folder,
        read_lessons,
        run_edition,
        without_solutions,
    )
except ImportError as error:
    if __name__ != "__main__":
        raise
    sys.exit(not_installed("student", error))

_LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)|(?:src|href)=\"([^\"#]+)")


def build(notebooks: Path, output: Path) -> None:
    """Write the student edition of all lessons, with the files they link to.

    Raises:
        EditionError: a solution that cannot be taken out, or a link to a file that is not there.
    """
    lessons = read_lessons(notebooks)
    check_twins(notebooks, lessons)
    with output_folder(output) as folder:
        for name, notebook in lessons.items():
            try:
                nbformat.write(without_solutions(notebook), folder / f"{name}.ipynb")
            except EditionError as error:
                raise EditionError(f"{name}, {error}") from None
        copy_files(notebooks, folder, "GLOSSARY.md", "images/*.svg", "images/*.png")
        _copy_readme(notebooks.parent / "README.md", folder)
        for name, notebook in lessons.items():
            prose = "\n".join(
                cell.source for cell in notebook.cells if cell.cell_type == "markdown"
            )
            for target in _relative_links(prose):
                if not (folder / target).exists():
                    raise EditionError(
                        f"{name} links to {target}, which is not in the student edition"
                    )


def _relative_links(prose: str) -> list[str]:
    """Files that a markdown text links to."""
    targets = [link or source for link, source in _LINK.findall(re.sub(r"`[^`\n]*`", "", prose))]
    return [target for target in targets if not re.match(r"[a-z][a-z0-9+.-]*:", target)]


def _copy_readme(readme: Path, folder: Path) -> None:
    """The README; its links lead to the notebooks beside it, and to copies of other files, one of
    which a lesson reads.

    What the edition leaves out of the notebooks' folder, such as the instructor's guide, is named
    without a link.
    """
    if not readme.exists():
        return
    text = readme.read_text("utf-8")
    for target in set(_relative_links(text)):
        beside = target.removeprefix("notebooks/")
        if beside == target:
            beside = Path(target).name
            shutil.copyfile(readme.parent / target, folder / beside)
        elif not (folder / beside).exists():
            text = re.sub(rf"\[([^\]]*)\]\({re.escape(target)}[^)]*\)", r"\1", text)
        text = text.replace(f"]({target}", f"]({beside}").replace(f'"{target}"', f'"{beside}"')
    (folder / "README.md").write_text(text, "utf-8")


if __name__ == "__main__":
    run_edition(build, "student", __doc__.splitlines()[0])
