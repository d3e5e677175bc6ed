"""Run checkpoints planned for a budget by the course's `fit`, PyTorch's ILP and ckptplan."""

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial

from planners import by_ckptplan, by_course, by_ilp
from scoreboard import COURSE, Row
from torch.utils.flop_counter import FlopCounterMode

from course_lib.budget import Recipe, estimate
from course_lib.memory import MemoryMeter
from course_lib.models import Decoder, random_tokens

SIZES = {"vocabulary": 512, "hidden": 256, "heads": 8, "layers": 8, "sequence": 256}
make_decoder, make_tokens = partial(Decoder, **SIZES), partial(random_tokens, 4, 256, 512)


PLANNERS = {
    COURSE: partial(by_course, make_decoder, make_tokens),
    "PyTorch's ILP": partial(by_ilp, make_decoder, make_tokens),
    "ckptplan": partial(by_ckptplan, make_decoder, make_tokens, SIZES["hidden"]),
}


def tried(planner: Callable, budget: int, plain_flops: int) -> tuple[int | None, str]:
    """Return the peak of the planned step, and a note on it."""
    start = time.perf_counter()
    try:
        model, step = planner(budget)
    except Exception as error:  # this peer failed; the other peers are still compared
        return None, f"no plan ({type(error).__name__})"
    seconds = time.perf_counter() - start
    with MemoryMeter(model) as meter:
        step()
    model.zero_grad()
    with FlopCounterMode(display=False) as counter:
        step()
    fits = "fits" if meter.peak_bytes <= budget else f"over by {meter.peak_bytes / budget - 1:.1%}"
    price = counter.get_total_flops() / plain_flops
    return meter.peak_bytes, f"{fits}, {price:.3f} of the plain FLOPs, planned in {seconds:.1f} s"


def rows(rounds: int) -> Iterator[Row]:
    logging.disable(logging.ERROR)
    plain = estimate(make_decoder, make_tokens, Recipe(optimizer="sgd"))
    for share in (0.8, 0.6, 0.4):
        budget = int(share * plain.peak_bytes)
        found = {name: tried(plan, budget, plain.flops) for name, plan in PLANNERS.items()}
        ours, said = found.pop(COURSE)
        for peer, (peak, note) in found.items():
            work = f"checkpoints for {budget:,} bytes ({share:.0%})"
            yield Row(work, peer, None, None, None, ours, peak, f"course {said}; peer {note}")
    logging.disable(logging.NOTSET)
