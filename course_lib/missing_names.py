"""IPython extension that explains a `NameError`: it names the cell that must run first.

    %load_ext course_lib.missing_names

`make lab` loads the extension into every Jupyter kernel. It finds the notebook through the variable
JPY_SESSION_NAME, in which JupyterLab gives a kernel the notebook's path. The explanation is a note
of the `NameError`, which IPython shows below the error.

This module is not in `course_lib.teaching`, because it is imported before the first cell of every
lesson and must not import torch or Triton. Triton reads its settings when it is imported, and
lesson 06 changes one of the settings before it imports Triton.
"""

import ast
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from course_lib.labels import in_both_languages, text, verbatim


def load_ipython_extension(shell: Any) -> None:
    """Make IPython explain each `NameError` by naming the cell that must run first.

    `%load_ext course_lib.missing_names` calls this function.
    """
    shell.set_custom_exc((NameError,), _show_name_error)


def _show_name_error(
    shell: Any,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType,
    tb_offset: int | None = None,
) -> None:
    """Show a `NameError` with a note that names the cell to run, if a cell defines the name."""
    name = getattr(error, "name", None)
    if name and (hint := cell_to_run(name, Path(os.environ.get("JPY_SESSION_NAME", "")))):
        # The note is in both languages, because the page's language switch does not affect errors.
        error.add_note("\n" + "\n".join(in_both_languages(hint)))
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset)


def cell_to_run(name: str, notebook: Path) -> str:
    """Return a text that says which cell of a notebook defines or imports a name.

    The text is "" if no cell defines or imports the name, or if the notebook cannot be read.

    Args:
        name: Name of the missing variable, function, class or module.
        notebook: Path of the notebook file.
    """
    for line, imported, defined in _names_by_cell(notebook):
        words = {"name": verbatim(name), "line": verbatim(line)}
        if name in imported:
            cell = text(
                "`{name}` is imported further up, by the cell that starts with `{line}`.", **words
            )
        elif name in defined:
            cell = text(
                "`{name}` is defined further up, by the cell that starts with `{line}`.", **words
            )
        else:
            continue
        return text(
            "{cell} Run the cells above this one first: in the menu, Run → Run All Above Selected"
            " Cell.",
            cell=cell,
        )
    return ""


def _names_by_cell(notebook: Path) -> Iterator[tuple[str, set[str], set[str]]]:
    """Yield (first line, imported names, other names that are assigned) for each code cell.

    Nothing is yielded if the notebook does not exist or cannot be read.
    """
    try:
        cells = json.loads(notebook.read_text("utf-8"))["cells"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    for cell in cells:
        source = "".join(cell.get("source", ""))
        try:
            body = ast.parse(source).body if cell.get("cell_type") == "code" else []
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        imported, defined = set(), set()
        for node in body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                imported |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.add(node.name)
            else:
                names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
                defined |= {each.id for each in names if isinstance(each.ctx, ast.Store)}
        yield source.strip().partition("\n")[0], imported, defined
