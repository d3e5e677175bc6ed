"""`AccumulatedStep`, a loop by hand and accelerate compared: time of a step of 8 micro-batches;
and the bytes that DDP sends with and without `no_sync`."""

from collections.abc import Iterator
from contextlib import nullcontext

import torch
from scoreboard import COURSE, Row, compare, installed, missing
from torch import nn
from torch.nn import functional as F

from course_lib.accumulation import AccumulatedStep, split
from course_lib.lessons.lesson_05 import on_ranks
from course_lib.models import Decoder, random_tokens

WORK, BATCH = "AdamW step of a decoder, 8 micro-batches", random_tokens(16, 64, 500)


def loss_sum(model, tokens):
    logits, targets = model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
    return F.cross_entropy(logits, targets, reduction="sum"), targets.numel()


def parts():
    torch.manual_seed(0)
    model = Decoder(vocabulary=500, hidden=128, heads=4, layers=6, sequence=64)
    return model, torch.optim.AdamW(model.parameters())


def by_hand(model, optimizer) -> None:
    optimizer.zero_grad()
    for micro_batch in BATCH.split(2):
        loss_sum(model, micro_batch)[0].backward()
    for parameter in model.parameters():
        parameter.grad.div_(BATCH[:, 1:].numel())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def with_accelerate(accelerator, model, optimizer) -> None:
    for micro_batch in BATCH.split(2):
        with accelerator.accumulate(model):
            loss, count = loss_sum(model, micro_batch)
            accelerator.backward(loss / count)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def on_a_rank(model, loss_sum, micro_batches, each) -> None:
    for number, micro_batch in enumerate(micro_batches, start=1):
        with nullcontext() if each or number == len(micro_batches) else model.no_sync():
            loss_sum(model, micro_batch)[0].backward()


def rows(rounds: int) -> Iterator[Row]:
    step, pair = AccumulatedStep(*parts(), loss_sum, max_norm=1.0), parts()
    arms = {COURSE: lambda: step(split(BATCH, 2)), "loop by hand": lambda: by_hand(*pair)}
    if installed("accelerate"):
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=8)
        prepared = accelerator.prepare(*parts())
        arms["accelerate"] = lambda: with_accelerate(accelerator, *prepared)
    else:
        yield missing(WORK, "accelerate")
    yield from compare(WORK, arms, rounds)
    sent = on_ranks(on_a_rank, 8)
    work = "bytes reduced per rank, 8 micro-batches"
    yield Row(work, "DDP without no_sync", None, None, None, sent["library"], sent["each"])
