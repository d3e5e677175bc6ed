"""Predicted and measured peaks of steps of ten models, with AdamW in fp32.

The predictions are those of the course, `MemTracker`, torch-kitsune, accelerate, and the formula of
DeepSpeed's estimator for ZeRO stage 0 (16 bytes per parameter for weights, gradients and state)."""

from collections.abc import Callable, Iterator
from functools import partial

from peers import PREDICTORS
from scoreboard import COURSE, Row, compare
from ten_models import CASES

from course_lib.budget import Recipe, run


def rows(rounds: int) -> Iterator[Row]:
    for name, case in CASES.items():
        measured, found = run(*case, Recipe()).meter.peak_bytes, {}
        calls = {
            peer: partial(lambda p, f, c, found: found.update({p: f(*c)}), peer, f, case, found)
            for peer, f in PREDICTORS.items()
        }
        working = {peer: call for peer, call in calls.items() if runs(call)}
        errors = {peer: f"{found[peer] / measured - 1:+.1%}" for peer in working}
        notes = {
            peer: f"peer {error}, course {errors[COURSE]} of the measured {measured:,} bytes"
            for peer, error in errors.items()
        }
        work = f"predict {name}"
        yield from compare(work, working, 1, bytes_of=found, notes=notes)
        for peer in calls.keys() - working.keys():
            yield Row(work, peer, note="cannot predict this model")


def runs(call: Callable[[], object]) -> bool:
    try:
        call()
    except Exception:  # this peer failed; the other peers are still compared
        return False
    return True
