"""Tools that publish the course: each is a program that reads the notebooks and writes one folder.

    python -m publish.student   # no solutions, no outputs
    python -m publish.slides    # a deck per lesson and language
    python -m publish.site      # the website, which Sphinx makes

They read the executed notebooks. Each writes a temporary folder next to the requested one, and
replaces that one when the new one is complete, so an error leaves the earlier files untouched.
`make student`, `make slides` and `make site` call them.
"""

import sys


def not_installed(edition: str, error: ImportError) -> str:
    """Say in one sentence which package an edition needs, and how to install it."""
    return (
        f"{edition}: {error}; use a Python with everything that the course needs,"
        f" which `make {edition}` installs (for {sys.executable}, pip install -e"
        " '.[course,docs]' -c constraints.txt does)"
    )
