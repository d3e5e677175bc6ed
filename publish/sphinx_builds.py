"""Sphinx's builds of several languages, one after the other in one process.

    python -m publish.sphinx_builds '[["en", "site/en"], ["zh", "site/zh"]]'

Sphinx, its extensions and the library are imported once, and the source code of the library is
parsed once. Two processes of Sphinx take a third more CPU time.
"""

import gc
import json
import sys
from collections.abc import Sequence

import sphinx.locale
from sphinx.cmd.build import main


def build_all(builds: Sequence[Sequence[str]]) -> int:
    """Run Sphinx with each list of arguments, until a build fails. Return the last exit status."""
    status = 0
    # The collector would visit every imported object again and again, which takes a fourth of the
    # time. The pages of one language have less than 200 MB to collect.
    gc.disable()
    for arguments in builds:
        # Sphinx keeps the messages of the earlier language, and would prefer them.
        sphinx.locale.translators.clear()
        if status := main(arguments):
            break
        gc.collect()
    return status


if __name__ == "__main__":
    sys.exit(build_all(json.loads(sys.argv[1])))
