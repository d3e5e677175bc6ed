"""Mutants of the lessons' solutions: each has one small mistake, and its check should reject it."""

import builtins
import random
import re
import symtable
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType, SimpleNamespace

import jupytext
import torch
from answers import CHECKS
from mutation_operators import mutants

from course_lib import lessons
from publish.cells import names_in, remove_guard

SCRIPTS = Path(__file__).parents[2] / "notebooks" / "scripts"
# Kernels need Triton's interpreter, which the lesson turns on in a process of its own, before it
# imports Triton.
ELSEWHERE = {"06.kernel"}


@dataclass(frozen=True)
class Solution:
    """Solution of an exercise in a lesson's script.

    Attributes:
        name: Name of its check, such as "02.checkpoint".
        source: Code in the script, with its guard.
        answer_names: Names that both the stub and the solution define.
        above: Earlier cells that the solution needs, in their order.
    """

    name: str
    source: str
    answer_names: frozenset[str]
    above: tuple[str, ...]

    @property
    def plain(self) -> str:
        """Code without the guard."""
        return remove_guard(self.source)


# Solutions
# --------------------------------------------------------------------------------------------------


@cache
def solutions(number: str) -> tuple[Solution, ...]:
    """Return the solutions of a lesson, in the order of its script."""
    (script,) = SCRIPTS.glob(f"{number}_*.py")
    code = [
        cell.source
        for cell in jupytext.read(script, fmt="py:percent").cells
        if cell.cell_type == "code"
    ]
    found = []
    for place, source in enumerate(code):
        if "### BEGIN SOLUTION" in source:
            check = next(
                (
                    name
                    for name in CHECKS
                    if name[:2] == number and f"exercises.check_{name[3:]}(" in source
                ),
                None,
            )
            assert check, f"lesson {number} has no check that this solution calls:\n{source}"
            plain = remove_guard(source)
            names = bound_by(plain) & bound_by(code[place - 1])
            found.append(Solution(check, source, names, _needed(plain, code[:place])))
    return tuple(found)


def bound_by(source: str) -> frozenset[str]:
    """Return the names that a cell defines or imports."""
    top = symtable.symtable(source, "cell", "exec")
    return frozenset(
        each.get_name() for each in top.get_symbols() if each.is_assigned() or each.is_imported()
    )


def _read_by(source: str) -> set[str]:
    """Return the names that a cell needs from earlier cells."""
    bound, read = names_in(source)
    return read - bound - set(vars(builtins))


def _needed(source: str, before: list[str]) -> tuple[str, ...]:
    wanted, kept = _read_by(source), []
    for cell in reversed(before):
        cell = remove_guard(cell)
        if names := bound_by(cell) & wanted:
            kept.append(cell)
            wanted = (wanted - names) | _read_by(cell)
    return tuple(reversed(kept))


# Running them
# --------------------------------------------------------------------------------------------------


class Endless(BaseException):
    """Error beyond the limit of lines. No check handles it as the exception of a wrong answer."""


MUTANT = "mutant"  # the name of the file that the code of a mutant is compiled as
MAY_BE_ENDLESS = re.compile(r"\b(while|yield)\b|\b(count|cycle|repeat)\(")


@contextmanager
def line_limit(most: int = 1_000_000) -> Iterator[None]:
    """Raise `Endless` if the block runs more lines of a mutant.

    The count does not depend on how fast the machine is. A recursion without an end needs no limit,
    because Python has one.
    """
    taken, before = 0, sys.gettrace()

    def count(frame: FrameType, event: str, arg: object) -> Callable | None:
        nonlocal taken
        if frame.f_code.co_filename != MUTANT:
            return None
        taken += 1
        if taken > most:
            raise Endless
        return count

    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)


def accepted(name: str, source: str, names: dict[str, object], known: object = None) -> object:
    """Return the answer that this code gives to its check, if the check accepts it.

    Return None if the code fails or does not end, or if its answer equals the known one.

    Args:
        names: Names that earlier cells define. They are not changed.
        known: Accepted answer.
    """
    check, lesson, answers = CHECKS[name], name[:2], []

    def recorded(answer: object) -> object:
        answers.append(answer)
        return None if known is not None and _same(answer, known) else check(answer)

    exercises = vars(lessons.lesson(lesson, "exercises"))
    exercises = SimpleNamespace(**{**exercises, f"check_{name[3:]}": recorded})
    recorded.accepted = check.accepted = ended = False
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(0)
        warnings.simplefilter("ignore")
        try:
            with line_limit() if MAY_BE_ENDLESS.search(source) else nullcontext():
                exec(compile(source, MUTANT, "exec"), {**names, "exercises": exercises})
            ended = True
        except (Exception, Endless):
            pass
    return answers[-1] if ended and check.accepted else None


def _same(one: object, other: object) -> bool:
    """Return whether both are the same number, list or recipe; functions are not."""
    try:
        return bool(one == other)
    except Exception:
        return False


def findings(number: str, sampled: Mapping[str, int]) -> dict[str, tuple[set[str], ...]]:
    """Run the mutants of each exercise of a lesson against its check.

    Return for each exercise the descriptions of all mutants, of those that were run, and of those
    that were accepted although their answer differs from the solution's.

    Args:
        sampled: Number of mutants to run per exercise, if not all. The seed is fixed.

    Raises:
        AssertionError: the solution itself is not accepted.
    """
    found, names, run = {}, {}, []
    for each in solutions(number):
        if each.name in ELSEWHERE:
            continue
        for cell in each.above:
            if cell not in run:
                exec(compile(cell, "cell", "exec"), names)
                run.append(cell)
        right = accepted(each.name, each.plain, names)
        assert right is not None, f"the solution of {each.name} is not accepted"
        codes = mutants(each.plain)
        count = min(len(codes), sampled.get(each.name, len(codes)))
        tried = random.Random(0).sample(sorted(codes), count)
        passed = [
            description
            for description in tried
            if accepted(each.name, codes[description], names, right) is not None
        ]
        found[each.name] = set(codes), set(tried), set(passed)
    return found
