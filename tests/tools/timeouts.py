"""The only time limit of the tests, which ends a process that hangs.

Everything that works takes far less than an hour, also on a machine that is ten times slower.
Tests have no other limits, so that none depends on the speed of the machine.
"""

from typing import Any

TIMEOUT_SECONDS = 3600


def extend_output_timeout(item: Any) -> None:
    """Set the time that nbval waits for the output of a notebook's cell, which has no option."""
    if hasattr(item, "output_timeout"):
        item.output_timeout = TIMEOUT_SECONDS
