"""Variables of `make` that the tests must not inherit.

`make` passes the variables of its command line on to the commands that it starts, each by its name
and all of them in MAKEFLAGS. A second `make`, which a test starts, would read them as its own.
"""

import re
from collections.abc import MutableMapping
from pathlib import Path

MAKEFILE = Path(__file__).parents[1] / "Makefile"
OF_MAKE_ITSELF = ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS")


def forget_make(environment: MutableMapping[str, str]) -> None:
    """Remove from an environment, in place, the variables that the Makefile reads from it."""
    read = re.findall(r"^(\w+) *\?=", MAKEFILE.read_text("utf-8"), re.M)
    for name in (*OF_MAKE_ITSELF, *read):
        environment.pop(name, None)
