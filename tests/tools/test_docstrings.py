"""Test that shell commands in docstrings can run, and that `--help` keeps the lines of tables."""

import ast
import contextlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from course_lib.budget import __main__ as budget_command
from course_lib.distributed import __main__ as distributed_command
from course_lib.lessons import __main__ as lessons_command

ROOT = Path(__file__).parents[2]
FOLDERS = ("course_lib", "publish", "notebooks", "tests", "examples")
KINDS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings() -> Iterator[str]:
    """Yield the docstrings of modules, classes and functions in files that name Python."""
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text("utf-8")
            if " python " in source:
                nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, KINDS))
                yield from (ast.get_docstring(node) or "" for node in nodes)


def commands(docstring: str) -> list[str]:
    """Return the lines that run Python, without comments and continuations."""
    lines = re.sub(r"\\\n\s*", "", docstring).splitlines()
    lines = [re.sub(r"\s+#\s.*", "", line).strip() for line in lines if line.startswith("  ")]
    return [line for line in lines if re.match(r"(?:[A-Z_]+=\S+ )*python ", line)]


def error_of(command: str) -> str | None:
    """Return why a command cannot run; None if its module and its options exist."""
    words = shlex.split(command)
    position = max(n for n, word in enumerate(words) if word in ("-m", "python")) + 1
    module = ROOT / words[position].replace(".", "/")
    paths = [ROOT / words[position], module.with_suffix(".py"), module / "__main__.py"]
    found = [path for path in paths if path.is_file()]
    if not found:
        return "it does not exist"
    sources = [*found[0].parent.glob("*.py"), ROOT / "course_lib" / "options.py"]
    text = "".join(path.read_text("utf-8") for path in sources)
    for option in words[position + 1 :]:
        # `run_edition` adds the dashes to its switches
        if option.startswith("--") and not re.search(f'"(?:--)?{option[2:]}"', text):
            return f"it has no option {option}"
    return None


def test_docstring_commands_name_existing_modules_and_options():
    found = {command for each in docstrings() for command in commands(each)}
    assert len(found) > 20
    errors = {command: error_of(command) for command in found}
    assert {command: error for command, error in errors.items() if error} == {}


@pytest.mark.parametrize(
    ("command", "table"),
    [
        (budget_command, budget_command.EXAMPLE),
        (distributed_command, distributed_command.MODES_HELP),
        (lessons_command, re.search(r"(?:^ {2,}.*\n)+", lessons_command.__doc__, re.M)[0]),
    ],
)
def test_command_help_preserves_line_breaks_of_table(command, table, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["command", "--help"])
    monkeypatch.setenv("COLUMNS", "60")  # narrower than the table
    with contextlib.suppress(SystemExit):  # torch's `record` catches it
        command.main()
    rows = [line for line in table.splitlines() if line.startswith("  ")]
    assert len(rows) >= 3 and table in capsys.readouterr().out
