"""Answers to the exercises of lesson 05: right ones, and wrong ones with what they are told."""

import torch
from torch import nn

from course_lib.lessons.lesson_05.bugs import PLANTED, mended

WEIGHTS, SLOPE, FLOOR = 27_502_592, 24_396_800, 110_010_776


def peak(m):
    return FLOOR + m * SLOPE - (m == 8) * WEIGHTS


def as_it_came(model, loss_sum, pieces, optimizer, scheduler, scaler, every, max_norm):
    for number, piece in enumerate(pieces, start=1):
        loss, count = loss_sum(model, piece)
        scaler.scale(loss / count / every).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scheduler.step()
        if number % every == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def loop(
    *,
    divide=lambda loss, total, samples, pieces: loss / total,
    per_piece=(),
    left_out=(),
    first=(),
    every=0,
):
    """A loop that is right but for what its arguments say."""

    def train_epoch(model, loss_sum, pieces, optimizer, scheduler, scaler, group_of, max_norm):
        group_of += every
        for start in range(0, len(pieces), group_of):
            group = pieces[start : start + group_of]
            total, samples = sum(loss_sum(model, piece)[1] for piece in group), sum(map(len, group))
            if "schedule" in first:
                scheduler.step()
            for piece in group:
                loss = divide(loss_sum(model, piece)[0], total, samples, len(group))
                (loss if "scale" in left_out else scaler.scale(loss)).backward()
                if "unscale" in per_piece:
                    scaler.unscale_(optimizer)
            if not {"unscale", "scale"} & {*per_piece, *left_out}:
                scaler.unscale_(optimizer)
            if "clip" not in left_out:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            if "step" not in left_out:
                (optimizer if "scale" in left_out else scaler).step(
                    *(() if "scale" in left_out else (optimizer,))
                )
            if not {"update", "scale"} & {*left_out}:
                scaler.update()
            if "schedule" not in (*first, *left_out):
                scheduler.step()
            if "clear" not in left_out:
                optimizer.zero_grad()

    return train_epoch


def sums_then_divided(model, loss_sum, pieces, optimizer, scheduler, scaler, every, max_norm):
    total = 0
    for number, piece in enumerate(pieces, start=1):
        loss, count = loss_sum(model, piece)
        scaler.scale(loss).backward()
        total += count
        if number % every == 0 or number == len(pieces):
            scaler.unscale_(optimizer)
            for parameter in model.parameters():
                parameter.grad /= total
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            assert norm >= 0
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            total = 0


def of_every_piece(loss, total, samples, pieces):
    return loss / total if pieces == 2 else loss / total / 2


def fp32_sums(parameters):
    sums = {}

    def add(parameter):
        gradient, parameter.grad = parameter.grad, None
        sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient.float()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(add)
    return sums


def zeros_first(parameters):
    sums = {parameter: torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters}

    def add(parameter):
        sums[parameter] += parameter.grad
        parameter.grad = None

    for parameter in sums:
        parameter.register_post_accumulate_grad_hook(add)
    return sums


def summed(into):
    """A function that keeps for each parameter what `into(sum so far or None, parameter)`
    returns."""

    def accumulate(parameters):
        sums = {}

        def add(parameter):
            sums[parameter] = into(sums.get(parameter), parameter)

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(add)
        return sums

    return accumulate


def taken(parameter):
    gradient, parameter.grad = parameter.grad, None
    return gradient


def kept_as_zeros(so_far, parameter):
    gradient = parameter.grad.float()
    parameter.grad.zero_()
    return gradient if so_far is None else so_far.add_(gradient)


def first_parameter_alone(parameters):
    return fp32_sums(list(parameters)[:1])


#: check -> right answers, and wrong ones, each alone or with a part of what it is told.
ANSWERS = {
    "peak_of_pieces": (
        [peak],
        [
            (lambda m: FLOOR + m * SLOPE, "gradients come while activations go"),
            (lambda m: FLOOR - WEIGHTS + m * SLOPE, "the pieces before"),
            (lambda m: WEIGHTS + m * SLOPE, "optimizer state are there"),
            (lambda m: m * SLOPE, "however the batch comes"),
            (lambda m: 277_682_584 * m / 8, "in proportion"),
            (lambda m: 207_597_976 + (m - 4) * 17_521_152, "no point of the line"),
            (lambda m: 158_804_376 + 2 * m * SLOPE, "begins at no sequence"),
            (lambda m: peak(m) - (m == 8) * WEIGHTS, "not two"),
            (lambda m: peak(m) + (m == 1) * 393_216, "what is measured"),
            (lambda m: peak(m) + 4, "m = 4"),
        ],
    ),
    "loop": (
        [mended, loop(), sums_then_divided],
        [
            (as_it_came, "0 of 5"),
            *((each, "4 of 5") for each in PLANTED.values()),
            (loop(divide=lambda loss, total, samples, pieces: loss / samples), "by samples"),
            (loop(divide=of_every_piece), "last group"),
            (loop(per_piece=["unscale"]), "belongs to a step"),
            (loop(left_out=["update"]), "scaler.update()"),
            (loop(left_out=["clip"]), "as long as the bound"),
            (loop(left_out=["scale"]), "no longer goes through the scaler"),
            (loop(left_out=["step"]), "no step at all"),
            (loop(left_out=["schedule"]), "0 steps of it"),
            (loop(left_out=["clear"]), "cleared"),
            (loop(first=["schedule"]), "before the optimizer"),
            (loop(every=1), "steps"),
        ],
    ),
    "fp32_sums": (
        [fp32_sums, zeros_first],
        [
            (summed(lambda so_far, parameter: parameter.grad.float()), "too late"),
            (summed(lambda so_far, parameter: parameter.grad), "bf16 themselves"),
            (summed(lambda so_far, parameter: taken(parameter).float()), "last piece"),
            (summed(kept_as_zeros), "6 bytes"),
            (first_parameter_alone, "1 of 3"),
            (lambda parameters: [0 for _ in parameters], "dict"),
        ],
    ),
    "largest_piece": ([32], [64, (36, "divide"), (40, "floor"), 16]),
    "fast_piece": ([16], [8, 32, 64, "16"]),
}
