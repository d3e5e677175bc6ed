"""Other editions of the notebooks, each a program that writes one folder.

    python -m course_lib.teaching.editions.student   # no solutions, no outputs
    python -m course_lib.teaching.editions.slides    # a deck per lesson and language
    python -m course_lib.teaching.editions.site      # the website, which Sphinx makes

They read the executed notebooks, write a folder next to the one asked for, and swap it in when all
of it is there: an error leaves what was there before. `make student`, `make slides` and `make site`
call them.
"""

import sys


def not_installed(edition: str, error: ImportError) -> str:
    """One sentence for an edition whose packages are not there."""
    return (
        f"{edition}: {error}; use a Python with everything that the course needs,"
        f" which `make {edition}` installs (for {sys.executable}, pip install -e"
        " '.[course,test]' -c constraints.txt does)"
    )
