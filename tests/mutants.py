"""Mutants: the lessons' solutions with one slip of the hand each, and what their checks say of
them."""

import ast
import builtins
import math
import random
import symtable
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType, SimpleNamespace

import jupytext
import torch
from answers import CHECKS

from course_lib import lessons
from publish.cells import remove_guard

SCRIPTS = Path(__file__).parents[1] / "notebooks" / "scripts"
BOTH_WAYS = {ast.Add: ast.Sub, ast.Mult: ast.Div, ast.Lt: ast.LtE, ast.Gt: ast.GtE}
BOTH_WAYS |= {ast.Eq: ast.NotEq, ast.In: ast.NotIn, ast.Is: ast.IsNot}
BOTH_WAYS |= {"min": "max", "amax": "amin", "maximum": "minimum"}
BOTH_WAYS |= {"no_grad": "enable_grad", "any": "all"}
OTHERS = BOTH_WAYS | {other: one for one, other in BOTH_WAYS.items()}
OTHERS |= {ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult, ast.MatMult: ast.Mult, ast.BitOr: ast.BitAnd}
EITHER_WAY = {"min", "max", "torch.maximum", "torch.minimum"}  # whose arguments may be exchanged
# Kernels need Triton's interpreter, which the lesson turns on in a process of its own, before it
# imports Triton.
ELSEWHERE = {"06.kernel"}


@dataclass(frozen=True)
class Solution:
    """A solution of a lesson's script: its check's name, such as "02.checkpoint", its code, and
    what it needs above."""

    name: str
    source: str  # as it stands in the script, with its guard
    taken: frozenset[str]  # names that the attempt made, and the solution makes again
    above: tuple[str, ...]  # the cells before it that it needs, in their order

    @property
    def plain(self) -> str:
        """Its code without the guard."""
        return remove_guard(self.source)


# Solutions
# --------------------------------------------------------------------------------------------------


@cache
def solutions(number: str) -> tuple[Solution, ...]:
    """The solutions of a lesson, in the order of its script."""
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
            taken = bound_by(remove_guard(source)) & bound_by(code[place - 1])
            found.append(
                Solution(check, source, taken, _needed(remove_guard(source), code[:place]))
            )
    return tuple(found)


def bound_by(source: str) -> frozenset[str]:
    """Names that a cell makes for those below it."""
    top = symtable.symtable(source, "cell", "exec")
    return frozenset(
        each.get_name() for each in top.get_symbols() if each.is_assigned() or each.is_imported()
    )


def _read_by(source: str) -> set[str]:
    """Names that a cell takes from those above it."""

    def names(table: symtable.SymbolTable) -> Iterator[str]:
        for each in table.get_symbols():
            if each.is_global() or (table.get_type() == "module" and each.is_referenced()):
                yield each.get_name()
        for inner in table.get_children():
            yield from names(inner)

    return (
        set(names(symtable.symtable(source, "cell", "exec")))
        - bound_by(source)
        - set(vars(builtins))
    )


def _needed(source: str, before: list[str]) -> tuple[str, ...]:
    wanted, kept = _read_by(source), []
    for cell in reversed(before):
        cell = remove_guard(cell)
        if made := bound_by(cell) & wanted:
            kept.append(cell)
            wanted = (wanted - made) | _read_by(cell)
    return tuple(reversed(kept))


# Mutants
# --------------------------------------------------------------------------------------------------


def mutants(source: str) -> dict[str, str]:
    """What was changed -> the code with that change, for each slip that can be made in it."""
    made: dict[str, str] = {}
    known = {ast.unparse(ast.parse(source))}
    for place, (node, statement) in enumerate(_with_statements(ast.parse(source))):
        for said, change in _changes(node, source):
            tree = ast.parse(source)
            twin = [other for other, _ in _with_statements(tree)][place]
            change(tree, twin)
            changed = ast.unparse(ast.fix_missing_locations(tree))
            if changed in known:
                continue
            known.add(changed)
            if isinstance(node, ast.Constant) or said in made:
                said = f"{said} in `{statement}`"
            alike = sum(name == said or name.startswith(f"{said} (") for name in made)
            made[f"{said} ({alike + 1})" if alike else said] = changed
    return made


def _with_statements(node: ast.AST, statement: str = "") -> Iterator[tuple[ast.AST, str]]:
    """Every node, with the first line of the statement that it is in."""
    if isinstance(node, ast.stmt):
        statement = ast.unparse(node).splitlines()[0]
    yield node, statement
    for child in ast.iter_child_nodes(node):
        yield from _with_statements(child, statement)


Change = Callable[[ast.AST, ast.AST], None]


def _changes(node: ast.AST, source: str) -> Iterator[tuple[str, Change]]:
    """The slips that can be made at a node: what they are called, and what makes them in a copy of
    the tree."""
    shown = ast.unparse(node) if hasattr(node, "lineno") else ""
    with_graphs = any(word in source for word in ("gradient", "checkpoint", "hooks"))

    def said(change: Callable[[ast.AST], None]) -> tuple[str, Change]:
        copy = deepcopy(node)
        change(copy)
        return f"{shown} → {ast.unparse(copy)}", lambda tree, twin: change(twin)

    match node:
        case ast.Expr() if _is_check(node):
            return
        case ast.With():
            yield (
                f"without `{shown.splitlines()[0]}`",
                lambda tree, twin: _replace(tree, twin, twin.body),
            )
        case ast.FunctionDef() | ast.ClassDef() | ast.Import() | ast.ImportFrom() | ast.Pass():
            return
        case ast.stmt():
            yield (
                f"without `{shown.splitlines()[0]}`",
                lambda tree, twin: _replace(tree, twin, [ast.Pass()]),
            )
    match node:
        case ast.BinOp() | ast.AugAssign() if type(node.op) in OTHERS:
            yield said(lambda twin: setattr(twin, "op", OTHERS[type(twin.op)]()))
        case ast.Compare() if type(node.ops[0]) in OTHERS:
            yield said(lambda twin: twin.ops.__setitem__(0, OTHERS[type(twin.ops[0])]()))
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            yield (
                f"{shown} → {ast.unparse(node.operand)}",
                lambda tree, twin: _replace(tree, twin, twin.operand),
            )
        case ast.Constant(value=bool()):
            yield said(lambda twin: setattr(twin, "value", not twin.value))
        case ast.Constant(value=float()):
            yield said(lambda twin: setattr(twin, "value", 2 * twin.value))
        case ast.Constant(value=int()):
            for change in (1, -1):
                yield said(lambda twin, change=change: setattr(twin, "value", twin.value + change))
        case ast.Name() if node.id in OTHERS:
            yield said(lambda twin: setattr(twin, "id", OTHERS[twin.id]))
        case ast.Attribute() if node.attr in OTHERS:
            yield said(lambda twin: setattr(twin, "attr", OTHERS[twin.attr]))
        case ast.Return() if with_graphs and isinstance(node.value, ast.Name | ast.Call):
            yield said(lambda twin: setattr(twin, "value", _detached(twin.value)))
        case ast.Slice():
            for end in ("lower", "upper"):
                if getattr(node, end) is not None:
                    yield (
                        f"[{shown}] without its {end} end",
                        lambda tree, twin, end=end: setattr(twin, end, None),
                    )
        case ast.Call() if not _is_check(node):
            for i in range(len(node.args) - 1) if ast.unparse(node.func) not in EITHER_WAY else ():
                yield said(
                    lambda twin, i=i: twin.args.__setitem__(
                        slice(i, i + 2), twin.args[i : i + 2][::-1]
                    )
                )
            for i in (
                i for i, each in enumerate(node.args) if with_graphs and isinstance(each, ast.Name)
            ):
                yield said(lambda twin, i=i: twin.args.__setitem__(i, _detached(twin.args[i])))
            if isinstance(node.func, ast.Attribute) and not node.args and not node.keywords:
                target = ast.unparse(node.func.value)
                yield (
                    f"{shown} → {target}",
                    lambda tree, twin: _replace(tree, twin, twin.func.value),
                )


def _detached(node: ast.expr) -> ast.expr:
    return ast.Call(ast.Attribute(node, "detach", ast.Load()), [], [])


def _is_check(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else node
    return isinstance(call, ast.Call) and "check_" in ast.unparse(call.func)


def _replace(tree: ast.AST, old: ast.AST, new: ast.AST | list[ast.AST]) -> None:
    """Put what is new in the place of what is old: an expression, or statements."""
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, field, new)
            elif isinstance(value, list) and any(each is old for each in value):
                place = next(i for i, each in enumerate(value) if each is old)
                value[place : place + 1] = new if isinstance(new, list) else [new]


# Running them
# --------------------------------------------------------------------------------------------------


class Endless(BaseException):
    """Raised when the steps are spent; no check mistakes it for the exception of a wrong answer."""


MUTANT = "mutant"  # the name of the file that the code of a mutant is compiled as
# The most calls of functions of a mutant that may be running at once. A solution has fewer than 40.
DEEPEST = 150
# The checks loop over the results of a mutant.
CHECKING_FILES = frozenset(map(str, Path(lessons.__file__).resolve().parent.rglob("*.py")))


class Steps:
    """Count what the code in the block does, and end it with `Endless` after so many steps.

    A step is a call of any Python function, an instruction of the mutant, or a line of a lesson's
    file. The count does not depend on how fast the machine is.

    A recursion of the mutant that is deeper than `DEEPEST` is ended as well. If it reached Python's
    limit in `called`, Python would no longer call `called`, and would not end a loop after that.

    Attributes:
        limit: The most steps that the block may take.
        own_limit: The most instructions of the mutant that the block may take.
        taken: The steps that it has taken.
        own_taken: The instructions of the mutant among them.
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
    """The answer that this code gives to its check, if it is accepted and not the known one; None
    of code that fails, or does not end.

    Args:
        names: what the cells above have made; it stays as it is.
        steps: Count of what this code and its check do, with the limits at which they are taken for
            endless. None for code that ends and need not be counted.
        known: an accepted answer.

    Raises:
        AssertionError: Python stopped counting the steps.
    """
    check, lesson, asked = CHECKS[name], name[:2], []

    def watched(answer: object) -> object:
        asked.append(answer)
        return None if known is not None and _same(answer, known) else check(answer)

    exercises = vars(lessons.lesson(lesson, "exercises"))
    ours = SimpleNamespace(**{**exercises, f"check_{name[3:]}": watched})
    watched.accepted = check.accepted = ended = False
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(0)
        warnings.simplefilter("ignore")
        try:
            with steps or nullcontext():
                exec(compile(source, MUTANT, "exec"), {**names, "exercises": ours})
            ended = True
        except (Exception, Endless):
            pass
    assert steps is None or steps.complete, f"the count of steps stopped in:\n{source}"
    return asked[-1] if ended and check.accepted else None


def _same(one: object, other: object) -> bool:
    """Whether both are the same number, list or recipe; functions are not."""
    try:
        return bool(one == other)
    except Exception:
        return False


@dataclass(frozen=True)
class Findings:
    """Names of an exercise's mutants: all, those that were tried, and those that passed with an
    answer that differs from the solution's."""

    made: frozenset[str]
    tried: frozenset[str]
    passed: frozenset[str]


def findings(number: str, sampled: Mapping[str, int]) -> dict[str, Findings]:
    """For each exercise of a lesson, its mutants against its check.

    Args:
        sampled: exercise -> how many of its mutants are tried; they are drawn with the same seed
            every time.

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
        # Python runs half as fast while steps are counted. So what the check imports and caches
        # is made before.
        right = accepted(each.name, each.plain, names, None)
        assert right is not None, f"the solution of {each.name} is not accepted"
        ours = Steps()
        accepted(each.name, each.plain, names, ours)
        made = mutants(each.plain)
        tried = random.Random(0).sample(
            sorted(made), min(len(made), sampled.get(each.name, len(made)))
        )
        # A mutant that ends takes fewer steps. The constant is for estimates that the solution
        # found in caches, and that a mutant with other sizes has to make: up to a million steps
        # each. Its own instructions are no more for that.
        limits = 4 * ours.taken + 5_000_000, 4 * ours.own_taken + 200_000
        passed = [
            said
            for said in tried
            if accepted(each.name, made[said], names, Steps(*limits), known=right) is not None
        ]
        found[each.name] = Findings(*map(frozenset, (made, tried, passed)))
    return found
