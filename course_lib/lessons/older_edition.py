"""Errors for notebooks of an older edition, which used names such as `lesson_02.check_x`.

Such names are now in the files of a lesson's package, which notebooks import: `exercises.check_x`.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from course_lib.labels import in_both_languages, text, verbatim


class OlderEdition(Exception):
    """Error for a notebook that uses a name as an older edition of the course did.

    It is not an AttributeError, because `from package import name` would replace its message.
    """


def refuse_names_in(package: str) -> Callable[[str], NoReturn]:
    """Return the `__getattr__` of a lesson's package.

    It raises `OlderEdition` for names of the course. Files of the package, and names that start
    with an underscore, as Python and IPython ask for, get the usual AttributeError.
    """
    lesson = package.rpartition(".")[2]
    folder = Path(__file__).with_name(lesson)

    def refuse(name: str) -> NoReturn:
        if name.startswith("_") or (folder / f"{name}.py").exists():
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        words = {"name": verbatim(f"{lesson}.{name}")}
        if file := _file_with(name, folder):
            words["place"] = verbatim(f"{lesson}.{file}.{name}")
            told = text(
                "This notebook belongs to an older edition of the course, in which `{place}` was"
                " `{name}`: run `make update`, which keeps your answers.",
                **words,
            )
        else:
            told = text(
                "This notebook belongs to an older edition of the course, which had `{name}`: run"
                " `make update`, which keeps your answers.",
                **words,
            )
        # The text is in both languages, because the page's switch cannot change an error message.
        raise OlderEdition("\n".join(in_both_languages(told)))

    return refuse


def _file_with(name: str, folder: Path) -> str:
    """Return the file in a folder that defines a name, or "" if no file does."""
    defines = re.compile(rf"^(?:(?:def|class) {name}\b|{name}\b[^=\n(]*=)", re.M)
    paths = sorted(folder.glob("*.py"))
    return next((path.stem for path in paths if defines.search(path.read_text("utf-8"))), "")
