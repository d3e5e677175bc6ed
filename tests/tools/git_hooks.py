"""Hook of git, which `make hooks` installs: a check of the first line of a commit message.

python tests/tools/git_hooks.py FILE  # check the message in this file
"""

from __future__ import annotations

import re
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


def main(path: str) -> int:
    problems = check_message(Path(path))
    for problem in problems:
        print(f"commit-msg: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
