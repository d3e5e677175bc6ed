"""Verdicts that several checks of lesson 01 share."""

from dataclasses import replace

from course_lib.teaching import Verdict, text


def of_row(name: str, verdict: Verdict) -> Verdict:
    """Put the name of a row before the message of its verdict."""
    return replace(
        verdict, message=text("{name}: {message}", name=f"`{name}`", message=verdict.message)
    )
