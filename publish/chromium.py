"""Find the Chromium that prints handouts and runs the tests in a browser."""

import os
import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
NO_CHROMIUM = (
    "needs Chromium: install it (Debian and Ubuntu: apt install chromium), or name one:"
    " CHROMIUM=path"
)


def find_chromium() -> str | None:
    """Return the path of a Chromium, given by CHROMIUM or found on the PATH, or None.

    Raises:
        FileNotFoundError: The environment variable CHROMIUM is not the path of a program.
    """
    named = os.environ.get("CHROMIUM")
    if named and shutil.which(named) is None:
        raise FileNotFoundError(f"CHROMIUM is {named!r}, but there is no such program")
    return named or next(filter(None, map(shutil.which, NAMES)), None)
