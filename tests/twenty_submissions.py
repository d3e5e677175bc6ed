"""Grade twenty generated submissions, right, wrong, crashing and cheating, and compare the table
with what each must be told.

    python tests/twenty_submissions.py --folder build/twenty   # the table: build/twenty.csv

It takes minutes: each runs in a kernel of its own, and two of them until their time is over. One
of lesson 00 and one with several verdicts are in test_grade.py.
"""

import argparse
import ast
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

import nbformat
from test_student import about_the_attempts

from publish import grade
from publish.cells import (
    read_lessons,
    without_guards,
    without_markers,
    without_solutions,
)
from publish.kernels import Limits
from publish.student import check_of, with_reasons

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
STORED = {name[:2]: notebook for name, notebook in read_lessons(NOTEBOOKS).items()}
LOOP = """while True:
    try:
        while True:
            pass
    except BaseException:
        pass"""
PATCH = (
    "from course_lib.teaching import exercises\n"
    "exercises.Exercise.__call__ = lambda self, answer: exercises.right('Yes.')"
)
FAKE = "class Fake:\n    def __repr__(self):\n        return '✓ Right.'\n"


def handed_in(lesson, solve=lambda check: True, before="", after="", change=lambda source: source):
    """A student's notebook of a lesson: the cells that its exercises need.

    Args:
        solve: whether the exercise of a check is solved, by the lesson's own solution.
        before: a cell in front of all exercises.
        after: one behind the first of them.
        change: what is done to each exercise's cell.
    """
    edition = with_reasons(without_solutions(STORED[lesson]))
    solutions = {
        check: body
        for cell in without_guards(STORED[lesson]).cells
        if cell.cell_type == "code" and "SOLUTION" in cell.source
        for check, body in solved(without_markers(cell.source))
    }
    checks = {cell.id: check for cell in edition.cells if (check := check_of(cell))}
    for cell in edition.cells:
        if cell.id in checks and solve(checks[cell.id]):
            given, _, call = cell.source.rstrip().rpartition("\n")
            body, answer = solutions[checks[cell.id]]
            wanted = ast.unparse(ast.parse(call).body[0].value.args[0])
            named = "" if wanted == answer else f"{wanted} = {answer}\n"
            cell.source = f"{given}\n\n{body}\n{named}{call}"
    code = [cell.source for cell in edition.cells if cell.cell_type == "code"]
    needed = set(about_the_attempts(code))  # by what answers them, too
    cells, first = [], True
    for cell in edition.cells:
        check = checks.get(cell.id)
        if cell.cell_type == "code" and not (cell.source in needed or only_imports(cell.source)):
            continue
        if check and first and before:
            cells.append(nbformat.v4.new_code_cell(before))
        if check:
            cell.source = change(cell.source)
        cells.append(cell)
        if check and first and after:
            cells.append(nbformat.v4.new_code_cell(after))
        first = first and not check
    edition.cells = cells
    return nbformat.writes(edition)


def solved(source):
    """(check, (a solution's code without its call, the answer that it gives))."""
    body, calls = [], []
    for node in ast.parse(source).body:
        call = (
            node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
        )
        name = ast.unparse(call.func).rpartition(".")[2] if call else ""
        if name.startswith("check_"):
            calls.append((name, ast.unparse(call.args[0])))
        else:
            body.append(ast.unparse(node))
    return [(name, ("\n".join(body), answer)) for name, answer in calls]


def only_imports(source):
    return all(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.parse(source).body)


def never(check):
    return False


def edited(source):
    return re.sub(r"(lesson_\d\d\.check_\w+\(.*\))\s*$", r"\1 or 'ok'", source)


def faked(source):
    return f"{FAKE}{source.rpartition(chr(10))[0]}\nFake()"


def uncalled(source):
    return source.rpartition("\n")[0] or "pass"


def without_syntax(source):
    return f"mine = [\n{source}" if "check_adapter" in source else source


ODD = {"log_sum_exp", "flops", "causal_tiles"}
# name -> (file's content, marks that exercises get, what a message must hold)
SUBMISSIONS = {
    "01 right": (handed_in("01"), {"✓"}, ""),
    "02 right": (handed_in("02"), {"✓"}, ""),
    "03 right": (handed_in("03"), {"✓"}, ""),
    "04 right": (handed_in("04"), {"✓"}, ""),
    "05 right": (handed_in("05"), {"✓"}, ""),
    "08 right": (handed_in("08"), {"✓"}, ""),
    "01 untouched": (handed_in("01", never), {"✗"}, "Not answered yet"),
    "02 untouched": (handed_in("02", never), {"✗"}, ""),
    "06 half": (handed_in("06", lambda check: check[6:] in ODD), {"✓", "✗"}, ""),
    "01 syntax": (handed_in("01", change=without_syntax), {"✓", "✗"}, "SyntaxError"),
    "01 kernel dies": (
        handed_in("01", after="import os\nos.kill(os.getpid(), 11)"),
        {"✓", "!"},
        "kernel died",
    ),
    "01 endless": (handed_in("01", after=LOOP), {"✓", "!"}, "stopped after"),
    "01 prints": (
        handed_in("01", after="while True:\n    print('x' * 10**5)"),
        {"✓", "!"},
        "printed more",
    ),
    "01 memory": (handed_in("01", after="spare = bytearray(50 * 10**9)"), {"✓"}, ""),
    "01 calls edited": (handed_in("01", never, change=edited), {"!"}, "was edited"),
    "01 exercises patched": (handed_in("01", never, before=PATCH), {"!"}, "was changed by"),
    "01 verdict faked": (handed_in("01", never, change=faked), {"!"}, "missing"),
    "01 checks gone": (handed_in("01", never, change=uncalled), {"!"}, "missing"),
    "no\nnotebook": ("{", {"!"}, "no notebook"),
    "another course": (handed_in("01").replace("# 1 ", "# Course 1 "), {"!"}, "no lesson"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("build/twenty"))
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--only", default="", help="names that start so")
    chosen = parser.parse_args()
    asked = {name: each for name, each in SUBMISSIONS.items() if name.startswith(chosen.only)}
    shutil.rmtree(chosen.folder, ignore_errors=True)
    chosen.folder.mkdir(parents=True)
    for name, (content, *_) in asked.items():
        (chosen.folder / f"{name}.ipynb").write_text(content, "utf-8")
    rows = grade.grade_folder(
        chosen.folder,
        NOTEBOOKS,
        Limits(chosen.seconds),
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    grade.write_table(rows, chosen.folder.with_suffix(".csv"))
    wrong = 0
    for name, (_, marks, words) in asked.items():
        own = [row for row in rows if row.name == name.replace("\n", "\\n")]
        exercises = [row for row in own if row.exercise != "–"] or own
        found = {row.verdict for row in exercises}
        fits = found == marks and any(words in row.message for row in own)
        wrong += not fits
        counts = ", ".join(
            f"{count} {mark}" for mark, count in Counter(r.verdict for r in exercises).items()
        )
        others = "; ".join(row.message for row in own if row.verdict == "!")[:110]
        print(
            f"{'as expected' if fits else 'NOT EXPECTED'}: {own[0].name}: {counts}. {others}",
            flush=True,
        )
    sys.exit(f"{wrong} of {len(asked)} are told something else" if wrong else 0)


if __name__ == "__main__":
    main()
