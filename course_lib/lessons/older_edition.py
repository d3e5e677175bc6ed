"""Errors for notebooks of an older edition, which used names such as `lesson_02.check_x`.

Notebooks now import the files of a lesson's package, and write `exercises.check_x`.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from course_lib.labels import in_both_languages, text, verbatim


class OlderEdition(Exception):
    """Error for a notebook that uses a name from an older edition of the course.

    The class is not a subclass of AttributeError, because `from package import name` would then
    replace the message.
    """


def reject_names_in(package: str) -> Callable[[str], NoReturn]:
    """Return a `__getattr__` for a lesson's package that rejects names of an older edition.

    For most names, `__getattr__` raises `OlderEdition`. It raises AttributeError as usual for names
    of files in the package, and for names that start with an underscore, because Python and IPython
    look up such names themselves.

    Args:
        package: Full name of the package.
    """
    lesson = package.rpartition(".")[2]
    folder = Path(__file__).with_name(lesson)

    def reject(name: str) -> NoReturn:
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

    return reject


def _file_with(name: str, folder: Path) -> str:
    """Return the file in a folder that defines a name, or "" if no file does."""
    defines = re.compile(rf"^(?:(?:def|class) {name}\b|{name}\b[^=\n(]*=)", re.M)
    paths = sorted(folder.glob("*.py"))
    return next((path.stem for path in paths if defines.search(path.read_text("utf-8"))), "")
