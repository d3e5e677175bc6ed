"""Variables of `make` that the tests must not inherit.

`make` passes the variables of its command line to the commands that it starts, by name and in
MAKEFLAGS. Another `make`, which a test starts, would use them.
"""

import re
from collections.abc import MutableMapping
from pathlib import Path

MAKEFILE = Path(__file__).parents[2] / "Makefile"
MAKE_INTERNALS = ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS")


def forget_make(environment: MutableMapping[str, str]) -> None:
    """Remove from an environment, in place, the variables that the Makefile reads from it."""
    read = re.findall(r"^(\w+) *\?=", MAKEFILE.read_text("utf-8"), re.M)
    for name in (*MAKE_INTERNALS, *read):
        environment.pop(name, None)
