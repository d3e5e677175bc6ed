"""Run Sphinx's builds of several languages, one after the other in one process.

    python -m publish.sphinx_builds '[["en", "site/en"], ["zh", "site/zh"]]'

Sphinx, its extensions and the library are then imported only once, and the library's source code is
parsed only once. One process per language would take a third more CPU time.
"""

import gc
import json
import sys
from collections.abc import Sequence

import sphinx.locale
from sphinx.cmd.build import main


def build_all(builds: Sequence[Sequence[str]]) -> int:
    """Run Sphinx with each list of arguments until a build fails; return the last exit status."""
    status = 0
    # Garbage collection would visit all imported objects many times, which takes a fourth of the
    # time. The garbage of one language is less than 200 MB.
    gc.disable()
    for position, arguments in enumerate(builds):
        if position:
            gc.collect()
        # Otherwise Sphinx would use the messages of the previous language.
        sphinx.locale.translators.clear()
        if status := main(arguments):
            break
    return status


if __name__ == "__main__":
    sys.exit(build_all(json.loads(sys.argv[1])))
