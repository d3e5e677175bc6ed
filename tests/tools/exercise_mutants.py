"""Mutants of the lessons' solutions: each has one small mistake, and its check should reject it."""

import ast
import builtins
import math
import random
import symtable
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
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
    """Error beyond the limit of steps. No check handles it as the exception of a wrong answer."""


ENDLESS = {"count", "cycle", "repeat", "iter"}  # functions that return iterators without an end
MUTANT = "mutant"  # the name of the file that the code of a mutant is compiled as
# Largest depth of nested calls of a mutant's functions. A solution has fewer than 40.
DEEPEST = 150
# Steps of these files are counted as well, because checks loop over the results of a mutant.
CHECKING_FILES = frozenset(map(str, Path(lessons.__file__).resolve().parent.rglob("*.py")))


class Steps:
    """Count the steps of the code in the block, and raise `Endless` at a limit.

    A step is a call of any Python function, an instruction of the mutant, or a line of a lesson's
    file. The count does not depend on how fast the machine is.

    A recursion of the mutant that is deeper than `DEEPEST` is ended as well. If it reached Python's
    limit in `called`, Python would no longer call `called`, and would not end a loop after that.

    Attributes:
        limit: Largest number of steps of the block.
        own_limit: Largest number of instructions of the mutant.
        taken: Steps of the block.
        own_taken: Instructions of the mutant among them.
        complete: Whether the steps were counted up to the end of the block.
    """

    def __init__(self, limit: float = math.inf, own_limit: float = math.inf) -> None:
        self.limit, self.own_limit = limit, own_limit
        self.taken = self.own_taken = 0
        self.complete = True

    def __enter__(self) -> None:
        taken, limit, own_taken, own_limit, depth = 0, self.limit, 0, self.own_limit, 0

        # called for each function that runs, so it is kept short
        def called(frame: FrameType, event: str, arg: object) -> Callable | None:
            nonlocal taken, depth
            taken += 1
            if taken > limit:
                raise Endless
            file = frame.f_code.co_filename
            if file == MUTANT:
                depth += 1
                if depth > DEEPEST:
                    raise Endless
                # In Python 3.13, `f_trace_opcodes` has no effect on the call that has just started,
                # unless the frame already has its trace function.
                frame.f_trace = own
                # an empty loop on one line has no events of lines in Python 3.11
                frame.f_trace_lines, frame.f_trace_opcodes = False, True
                return own
            return checking if file in CHECKING_FILES else None

        def own(frame: FrameType, event: str, arg: object) -> Callable:
            nonlocal taken, own_taken, depth
            if event == "opcode":
                taken += 1
                own_taken += 1
                if own_taken > own_limit or taken > limit:
                    raise Endless
            elif event == "return":  # also when a generator yields or an exception ends the call
                depth -= 1
            return own

        def checking(frame: FrameType, event: str, arg: object) -> Callable:
            nonlocal taken
            if event == "line":
                taken += 1
                if taken > limit:
                    raise Endless
            return checking

        self._called, self._before = called, sys.gettrace()
        self._count = lambda: (taken, own_taken)
        # Python 3.12 has events of instructions only if a frame has asked for them before
        sys._getframe().f_trace_opcodes = True
        sys.settrace(called)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.complete = sys.gettrace() is self._called or kind is Endless
        sys.settrace(self._before)
        self.taken, self.own_taken = self._count()


def accepted(
    name: str, source: str, names: dict[str, object], steps: Steps | None, known: object = None
) -> object:
    """Return the answer that this code gives to its check, if the check accepts it.

    Return None if the code fails or does not end, or if its answer equals the known one.

    Args:
        names: Names that earlier cells define. They are not changed.
        steps: Counter with the limits for endless code; None for code that ends.
        known: Accepted answer.

    Raises:
        AssertionError: Python stopped counting the steps.
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
            with steps or nullcontext():
                exec(compile(source, MUTANT, "exec"), {**names, "exercises": exercises})
            ended = True
        except (Exception, Endless):
            pass
    assert steps is None or steps.complete, f"the count of steps stopped in:\n{source}"
    return answers[-1] if ended and check.accepted else None


def _same(one: object, other: object) -> bool:
    """Return whether both are the same number, list or recipe; functions are not."""
    try:
        return bool(one == other)
    except Exception:
        return False


def can_be_endless(source: str) -> bool:
    """Return whether a mistake in the code may make it endless.

    It may in a `while` loop, a recursion, a generator, and a loop over an iterator without an end.
    Python runs half as fast while steps are counted, so they are counted for such code only.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.While() | ast.Yield() | ast.YieldFrom():
                return True
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in ENDLESS:
                return True
            case ast.FunctionDef():
                names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
                if node.name in names:
                    return True
    return False


def _limits(solution: Solution, names: dict[str, object]) -> tuple[int, int]:
    """Return the limits of steps of the mutants of a solution; one that ends takes fewer.

    The constant is for estimates that are cached for the solution but not for a mutant with other
    sizes: up to a million steps each.
    """
    steps = Steps()
    accepted(solution.name, solution.plain, names, steps)
    return 4 * steps.taken + 5_000_000, 4 * steps.own_taken + 200_000


@dataclass(frozen=True)
class Findings:
    """Descriptions of an exercise's mutants.

    Attributes:
        generated: All mutants.
        tried: Mutants that were run.
        accepted: Mutants that the check accepted although their answer differs from the solution's.
    """

    generated: frozenset[str]
    tried: frozenset[str]
    accepted: frozenset[str]


def findings(number: str, sampled: Mapping[str, int]) -> dict[str, Findings]:
    """Run the mutants of each exercise of a lesson against its check.

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
        right = accepted(each.name, each.plain, names, None)
        assert right is not None, f"the solution of {each.name} is not accepted"
        codes = mutants(each.plain)
        count = min(len(codes), sampled.get(each.name, len(codes)))
        tried = random.Random(0).sample(sorted(codes), count)
        counter = partial(Steps, *_limits(each, names)) if can_be_endless(each.plain) else None
        passed = [
            description
            for description in tried
            if accepted(each.name, codes[description], names, counter and counter(), right)
            is not None
        ]
        found[each.name] = Findings(*map(frozenset, (codes, tried, passed)))
    return found
