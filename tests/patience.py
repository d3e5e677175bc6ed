"""The one time limit of the tests: it ends what hangs, and nothing else.

Whatever works takes far less than an hour, on a machine that is ten times slower, or while others
use it. `test_patience.py` looks for other limits.
"""

from typing import Any

HANGS_SECONDS = 3600


def patient(item: Any) -> None:
    """Let a notebook's cell wait for its output as long; nbval has five seconds and no option."""
    if hasattr(item, "output_timeout"):
        item.output_timeout = HANGS_SECONDS
