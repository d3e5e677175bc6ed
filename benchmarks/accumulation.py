"""Time of a step of 8 micro-batches with `AccumulatedStep`, a hand-written loop and accelerate, and
bytes that DDP sends with and without `no_sync`."""

from collections.abc import Iterator
from contextlib import nullcontext

import torch
from loops import by_hand, with_accelerate
from scoreboard import COURSE, Row, compare, installed, missing

from course_lib.accumulation import AccumulatedStep, split
from course_lib.lessons.lesson_05.results import on_ranks
from course_lib.models import Decoder, random_tokens

WORK = "AdamW step of a decoder, 8 micro-batches"
SENT = "bytes reduced per rank, 8 micro-batches"
BATCH = random_tokens(16, 64, 500)


def parts():
    torch.manual_seed(0)
    model = Decoder(vocabulary=500, hidden=128, heads=4, layers=6, sequence=64)
    return model, torch.optim.AdamW(model.parameters())


def on_a_rank(model, loss_sum, micro_batches, each) -> None:
    for number, micro_batch in enumerate(micro_batches, start=1):
        with nullcontext() if each or number == len(micro_batches) else model.no_sync():
            loss_sum(model, micro_batch)[0].backward()


def rows(rounds: int) -> Iterator[Row]:
    step, pair = AccumulatedStep(*parts(), Decoder.loss_sum, max_norm=1.0), parts()
    arms = {COURSE: lambda: step(split(BATCH, 2)), "loop by hand": lambda: by_hand(*pair, BATCH)}
    if installed("accelerate"):
        arms["accelerate"] = with_accelerate(*parts(), BATCH)
    else:
        yield missing(WORK, "accelerate")
    yield from compare(WORK, arms, rounds)
    sent = on_ranks(on_a_rank, 8)
    yield Row(SENT, "DDP without no_sync", None, None, None, sent["library"], sent["each"])
