"""Hooks of git, which `make hooks` installs: a check of the subject, and lint before a commit.

    python tests/tools/git_hooks.py commit-msg FILE  # check the message in this file
    python tests/tools/git_hooks.py pre-commit  # fix and check the files that are to be committed

`pre-commit` fixes lint and format, and adds the fixed files to the commit. If a file also has
changes that are not staged, its staged text is only checked. The checks of types and of notebooks
run only if a file that they read is staged. Other programs than git come from the .venv.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

VERBS = (
    *("add", "allow", "cache", "check", "document", "drop", "fix", "measure", "merge", "move"),
    *("pin", "record", "reject", "remove", "rename", "replace", "revert", "rewrite", "run"),
    *("shorten", "speed up", "split", "store", "test", "update"),
)
MOST_CHARACTERS = 72
SUBJECT = re.compile(r"[\w./-]+(?: [\w./-]+)*(?:, [\w./-]+(?: [\w./-]+)*)*: (?P<text>\S.*)")
# git writes these itself
AUTOMATIC = re.compile(r"(?:Merge |Revert \"|fixup! |squash! |amend! )")


def subject_problems(subject: str) -> list[str]:
    """Return what is wrong with the first line of a commit message."""
    if AUTOMATIC.match(subject):
        return []
    found = []
    if len(subject) > MOST_CHARACTERS:
        found.append(
            f"the subject must have at most {MOST_CHARACTERS} characters, got {len(subject)}"
        )
    match = SUBJECT.fullmatch(subject)
    if not match:
        return [
            *found,
            f'the subject must be "area: verb ..." or "area, area: verb ...", got {subject!r}',
        ]
    if not re.match(rf"(?:{'|'.join(VERBS)}) \S", match["text"]):
        verb = match["text"].split()[0]
        found.append(f"the verb after the area must be one of {', '.join(VERBS)}, got {verb!r}")
    return found


def check_message(path: Path) -> list[str]:
    """Return what is wrong with the message in a file that git has written."""
    lines = path.read_text("utf-8").splitlines()
    text = [line for line in lines if line.strip() and not line.startswith("#")]
    return subject_problems(text[0]) if text else []  # git itself rejects an empty message


def fix_and_check() -> list[str]:
    """Fix the staged files where possible, and return what is wrong with them."""
    staged = _git("diff", "--cached", "--name-only", "--diff-filter=d").splitlines()
    python = [file for file in staged if file.endswith(".py")]
    partly = set(_git("diff", "--name-only").splitlines()) & set(python)
    whole = [file for file in python if file not in partly]
    tools = Path(sys.executable).parent
    ruff = str(tools / "ruff")
    if not Path(ruff).exists():
        return ["ruff is missing in .venv; install the test tools as CONTRIBUTING.md describes"]
    failed = []
    if whole:
        failed += _failed(ruff, "check", "--fix", "--quiet", *whole)
        failed += _failed(ruff, "format", "--quiet", *whole)
        _git("add", "--", *whole)
    for file in sorted(partly):  # the staged text differs from the file
        text = _git("show", f":{file}")
        failed += _failed(ruff, "check", "--quiet", "--stdin-filename", file, text=text)
        failed += _failed(ruff, "format", "--check", "--stdin-filename", file, text=text)
    if any(file.startswith(("course_lib/", "publish/")) for file in python):
        failed += _failed(str(tools / "pyrefly"), "check", "--summary=none")
    if any(file.startswith("notebooks/") for file in staged):
        test = ("tests/lessons/test_notebooks.py", "-k", "script")
        failed += _failed(sys.executable, "-m", "pytest", "-q", *test)
    return failed


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], stdout=subprocess.PIPE, text=True, check=True).stdout


def _failed(*command: str, text: str | None = None) -> list[str]:
    """Run a command with a text as its input, and return a message if it fails."""
    failed = subprocess.run(command, input=text, text=True).returncode != 0
    return [f"`{Path(command[0]).name} {command[1]}` failed"] if failed else []


def main(hook: str, *arguments: str) -> int:
    problems = check_message(Path(arguments[0])) if hook == "commit-msg" else fix_and_check()
    for problem in problems:
        print(f"{hook}: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
