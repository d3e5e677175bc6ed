"""Docstrings keep the layout of their tables, and their shell commands can be copied and run."""

import ast
import contextlib
import re
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest

from course_lib.budget import __main__ as budget_command
from course_lib.distributed import __main__ as distributed_command
from course_lib.lessons import __main__ as lessons_command

ROOT = Path(__file__).parents[1]
FOLDERS = ("course_lib", "publish", "notebooks", "tests", "examples")
KINDS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SECTION = re.compile(r"(?:Args|Attributes|Raises|Returns|Warns|Yields):$")
# A command may set variables of the environment first.
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:python|make|pip|pytest|torchrun|git)(?= |$)")


@cache
def docstrings() -> dict[str, str]:
    """Map "file: name" to the docstring of each module, class and function."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, KINDS) and (docstring := ast.get_docstring(node)):
                    name = getattr(node, "name", "")
                    found[f"{path.relative_to(ROOT).as_posix()}: {name}"] = docstring
    return found


def blocks(docstring: str) -> list[list[str]]:
    """The preformatted blocks: runs of indented lines outside sections such as Args."""
    found, in_section = [[]], False
    for line in docstring.splitlines():
        if line.startswith("  "):
            found[-1] += [] if in_section else [line]
        else:
            found.append([])
            in_section = bool(SECTION.match(line)) or (in_section and not line)
    return [block for block in found if block]


def lines_of(block: list[str]) -> list[str]:
    """Lines as a shell reads them: a backslash at the end continues a line, `  #` begins a
    comment."""
    joined = re.sub(r"\\\n\s*", "", "\n".join(block))
    lines = (re.sub(r"(?:^|\s+)#\s.*", "", line).strip() for line in joined.splitlines())
    return [line for line in lines if line]


def commands(docstring: str) -> list[str]:
    lines = (line for block in blocks(docstring) for line in lines_of(block))
    return [line for line in lines if COMMAND.match(line)]


def broken_lines(docstring: str) -> list[str]:
    """Lines that hold a command after other words, and lines of tables whose second column begins
    where that of no other line does."""
    found = []
    for block in blocks(docstring):
        others = [line for line in lines_of(block) if not COMMAND.match(line)]
        found += [line for line in others if re.search(r" python (?:-m|\w+/)", line)]
        lines = [line for line in block if not re.match(r"\s*(?:>>>|\.\.\.)", line)]
        starts = [(re.search(r"(?<=\S)\s{3,}(?=\S)", line), line) for line in lines]
        ends = [start.end() for start, _ in starts if start]
        if len(ends) > 1:
            found += [line for start, line in starts if start and ends.count(start.end()) == 1]
    return found


def test_no_table_or_shell_command_in_a_docstring_is_broken():
    broken = {place: broken_lines(docstring) for place, docstring in docstrings().items()}
    assert {place: lines for place, lines in broken.items() if lines} == {}


JOINED = """Two kernels, and how to run them.

    first_kernel    a block of queries   writes O
    second_kernel   a block of keys      writes dK

    first_kernel    a block of queries   writes O second_kernel
    a block of keys      writes dK

    python -m course_lib.lessons --only 04   # by the beginning
    of a name python -m course_lib.lessons --check
    python -m torch.distributed.run \\
        -m course_lib.distributed --mode ddp,fsdp
"""


def test_joined_tables_and_commands_are_found():
    assert [line.split()[0] for line in broken_lines(JOINED)] == ["first_kernel", "a", "of"]
    assert commands(JOINED)[-1].endswith("run -m course_lib.distributed --mode ddp,fsdp")


# ---- commands


def refuses(command: str) -> str | None:
    """Why a command cannot run; None if its module and its options exist."""
    words = shlex.split(command)
    at = max(n for n, word in enumerate(words) if word in ("-m", "python"))
    place = ROOT / words[at + 1].replace(".", "/")
    paths = [ROOT / words[at + 1], place.with_suffix(".py"), place / "__main__.py"]
    found = [path for path in paths if path.is_file()]
    if not found:
        return "it does not exist"
    sources = [*found[0].parent.glob("*.py"), ROOT / "course_lib" / "options.py"]
    text = "".join(path.read_text("utf-8") for path in sources)
    for option in words[at + 2 :]:
        # `run_edition` adds the dashes to its switches
        if option.startswith("--") and not re.search(f'"(?:--)?{option[2:]}"', text):
            return f"it has no option {option}"
    return None


def test_shell_commands_in_docstrings_name_modules_and_options_that_exist():
    found = {command for each in docstrings().values() for command in commands(each)}
    ours = sorted(command for command in found if re.search(r"\bpython ", command))
    assert len(ours) > 20
    problems = {command: refuses(command) for command in ours}
    assert {command: problem for command, problem in problems.items() if problem} == {}
    assert refuses("python -m course_lib.lesson --check") == "it does not exist"
    assert refuses("python -m course_lib.budget --mode ddp") == "it has no option --mode"


@pytest.mark.parametrize(
    ("command", "table"),
    [
        (budget_command, budget_command.EXAMPLE),
        (distributed_command, distributed_command.MODES_HELP),
        (lessons_command, "\n".join(blocks(lessons_command.__doc__)[0])),
    ],
)
def test_help_keeps_the_lines_of_its_table(command, table, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["command", "--help"])
    monkeypatch.setenv("COLUMNS", "60")  # narrower than the table
    with contextlib.suppress(SystemExit):  # which torch's `record` catches
        command.main()
    rows = [line for line in table.splitlines() if line.startswith("  ")]
    assert len(rows) >= 3 and table in capsys.readouterr().out
