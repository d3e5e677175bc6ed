"""Code that belongs to a single lesson: exercises, claims, GPU experiments and plots.

    from course_lib.lessons.lesson_05 import exercises, figures  # in lesson 05
    python -m course_lib.lessons                                 # all GPU experiments: `make gpu`

A lesson's package may have three files. `exercises` has the checks of the lesson's exercises,
`claims` has claims that learners may have read elsewhere, and `gpu` has GPU experiments. This
module finds these files by the lesson's number.
"""

import gc
import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

from course_lib.teaching.claims import Claim
from course_lib.teaching.exercises import Exercise
from course_lib.teaching.experiments import Experiment
from course_lib.teaching.gpu import GpuResults
from course_lib.teaching.recordings import FOLDER, results_of_gpus

__all__ = ["LESSONS", "checks_of", "claims_of", "experiments", "lesson", "on_gpu"]

# `measure` runs Python's garbage collector. The collector skips frozen objects, which saves 0.1 s
# per call.
gc.freeze()

#: The numbers of the lessons, as two digits.
LESSONS = sorted(
    found.name[-2:] for found in pkgutil.iter_modules(__path__) if found.name.startswith("lesson_")
)


def lesson(number: str, file: str) -> ModuleType | None:
    """Import and return a module of a lesson's package, or None if the package has no such file.

    Args:
        number: Two digits of the lesson, such as "05".
        file: Name of the module, such as "exercises".

    Raises:
        ValueError: There is no such lesson.
    """
    if number not in LESSONS:
        raise ValueError(f"lesson must be one of {', '.join(LESSONS)}, got {number!r}")
    if not Path(__file__).with_name(f"lesson_{number}").joinpath(f"{file}.py").exists():
        return None
    return importlib.import_module(f"{__name__}.lesson_{number}.{file}")


def checks_of(number: str) -> dict[str, Exercise]:
    """Return the checks of a lesson's exercises, as a dict from name to check.

    The keys of the dict are names of functions, such as "check_loop".

    Args:
        number: Two digits of the lesson, such as "05".

    Raises:
        ValueError: There is no such lesson.
    """
    found = vars(lesson(number, "exercises") or object)
    return {
        name: each
        for name, each in found.items()
        if name.startswith("check_") and isinstance(each, Exercise)
    }


def claims_of(number: str) -> tuple[Claim, ...]:
    """Return the claims that a lesson tests by measurements.

    Learners may have read these claims in other sources. Claims of the lesson's optional sections
    come last.

    Args:
        number: Two digits of the lesson, such as "05".

    Raises:
        ValueError: There is no such lesson.
    """
    module = lesson(number, "claims")
    names = ("CLAIMS", "ALLOCATOR_CLAIMS", "OLDER_CLAIMS")  # in the order of the notebooks
    return tuple(claim for name in names for claim in getattr(module, name, ()))


def experiments(number: str | None = None) -> list[Experiment]:
    """Return the GPU experiments of one lesson or of all lessons, in the order of their definition.

    Args:
        number: Two digits of the lesson, such as "05". None selects all lessons.

    Raises:
        ValueError: There is no such lesson.
    """
    modules = [lesson(each, "gpu") for each in (LESSONS if number is None else [number])]
    return [
        found
        for module in modules
        if module
        for found in vars(module).values()
        if isinstance(found, Experiment)
    ]


def on_gpu(number: str, *names: str, folder: Path = FOLDER) -> GpuResults:
    """Return the results of a lesson's GPU experiments, as an object that a notebook displays.

    On a machine with a GPU, the experiments run now. The object also shows recorded results from
    other GPUs. Tag the notebook cell that calls this function `shows-device`, because the output
    depends on the machine.

    Args:
        number: Two digits of the lesson, such as "05".
        names: Names of experiments. Without names, all experiments of the lesson are included.
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
    return GpuResults(
        [(known[name], results_of_gpus(known[name], folder)) for name in names or known]
    )
