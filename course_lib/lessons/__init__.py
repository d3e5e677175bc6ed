"""Code that belongs to a single lesson: its checks, claims, GPU experiments and figures.

    from course_lib.lessons.lesson_05 import check_loop   # in lesson 05
    python -m course_lib.lessons                          # all GPU experiments, as `make gpu`

A lesson's module may have `CLAIMS`, which its learners may have read, and `Experiment`s. This
module finds them by the lesson's number.
"""

import gc
import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

from course_lib.teaching import claims
from course_lib.teaching.experiments import Experiment
from course_lib.teaching.gpu import GpuFigures
from course_lib.teaching.recordings import FOLDER, figures_of_gpus
from course_lib.teaching.tables import Table

__all__ = ["LESSONS", "claims_of", "experiments", "lesson", "on_gpu", "what_you_may_have_read"]

# `measure` collects garbage. It takes a tenth of a second more if all of PyTorch is searched, too.
gc.freeze()

#: The numbers of the lessons, as two digits.
LESSONS = sorted(
    found.name[-2:] for found in pkgutil.iter_modules(__path__) if found.name.startswith("lesson_")
)


def lesson(number: str) -> ModuleType:
    """Return the module of a lesson.

    Raises:
        ValueError: There is no such lesson.
    """
    if number not in LESSONS:
        raise ValueError(f"lesson must be one of {', '.join(LESSONS)}, got {number!r}")
    return importlib.import_module(f"{__name__}.lesson_{number}")


def claims_of(number: str) -> tuple[claims.Claim, ...]:
    """Return the claims that a lesson tests, those of its optional sections last."""
    names = ("CLAIMS", "ALLOCATOR_CLAIMS", "OLDER_CLAIMS")  # in the order of the notebooks
    return tuple(claim for name in names for claim in getattr(lesson(number), name, ()))


def what_you_may_have_read(number: str, *measured: str) -> Table:
    """Return the table of a lesson's claims, with the figure that the lesson has measured for each.

    Raises:
        ValueError: There is no such lesson, or the numbers of figures and of claims differ.
    """
    return claims.what_you_may_have_read(lesson(number).CLAIMS, *measured)


def experiments(number: str | None = None) -> list[Experiment]:
    """Return the GPU experiments of one lesson, or of all, in the order of their definition."""
    modules = [lesson(each) for each in (LESSONS if number is None else [number])]
    # a lesson that is a package has them in its module `gpu`
    own = [getattr(module, "gpu", module) for module in modules]
    return [
        found for module in own for found in vars(module).values() if isinstance(found, Experiment)
    ]


def on_gpu(number: str, *names: str, folder: Path = FOLDER) -> GpuFigures:
    """Return a lesson's GPU experiments as an object that displays itself.

    On a GPU they are run now. Tag the cell `shows-device`, because its output depends on the
    machine.

    Args:
        number: Two digits.
        names: Names of experiments; by default all experiments of the lesson.
        folder: Folder of the recordings.

    Raises:
        ValueError: There is no such lesson or experiment.
    """
    known = {item.name: item for item in experiments(number)}
    for name in names:
        if name not in known:
            raise ValueError(
                f"name must be one of the GPU experiments of lesson {number}, which are"
                f" {', '.join(known)}, got {name!r}"
            )
    return GpuFigures(
        [(known[name], figures_of_gpus(known[name], folder)) for name in names or known]
    )
