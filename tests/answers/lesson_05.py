"""Answers to the exercises of lesson 05: right ones, and wrong ones with what they are told."""

from functools import partial

import torch
from torch import nn

from course_lib.lessons.ledger import BASELINE
from course_lib.lessons.lesson_05.bugs import PLANTED, correct_loop
from course_lib.lessons.lesson_05.checks import FLOOR, SLOPE, WEIGHTS


def peak(m):
    return FLOOR + m * SLOPE - (m == 8) * WEIGHTS


def as_it_came(model, loss_sum, micro_batches, optimizer, scheduler, scaler, every, max_norm):
    for number, micro_batch in enumerate(micro_batches, start=1):
        loss, count = loss_sum(model, micro_batch)
        scaler.scale(loss / count / every).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scheduler.step()
        if number % every == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def loop(
    *,
    divide=lambda loss, total, samples, micro_batches: loss / total,
    per_micro_batch=(),
    left_out=(),
    first=(),
    every=0,
):
    """Return a loop that is right except for the faults that its arguments name."""

    def train_epoch(
        model, loss_sum, micro_batches, optimizer, scheduler, scaler, group_of, max_norm
    ):
        group_of += every
        for start in range(0, len(micro_batches), group_of):
            group = micro_batches[start : start + group_of]
            total, samples = (
                sum(loss_sum(model, micro_batch)[1] for micro_batch in group),
                sum(map(len, group)),
            )
            if "schedule" in first:
                scheduler.step()
            for micro_batch in group:
                loss = divide(loss_sum(model, micro_batch)[0], total, samples, len(group))
                (loss if "scale" in left_out else scaler.scale(loss)).backward()
                if "unscale" in per_micro_batch:
                    scaler.unscale_(optimizer)
            if not {"unscale", "scale"} & {*per_micro_batch, *left_out}:
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


def sums_then_divided(
    model, loss_sum, micro_batches, optimizer, scheduler, scaler, every, max_norm
):
    total = 0
    for number, micro_batch in enumerate(micro_batches, start=1):
        loss, count = loss_sum(model, micro_batch)
        scaler.scale(loss).backward()
        total += count
        if number % every == 0 or number == len(micro_batches):
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


def counted_first(without_graphs):
    """Tokens are counted before the first backward pass, without graphs."""

    def train_epoch(model, loss_sum, micro_batches, optimizer, scheduler, scaler, every, max_norm):
        for start in range(0, len(micro_batches), every):
            group = micro_batches[start : start + every]
            with without_graphs():
                total = sum(loss_sum(model, micro_batch)[1] for micro_batch in group)
            for micro_batch in group:
                scaler.scale(loss_sum(model, micro_batch)[0] / total).backward()
            finish(model, optimizer, scheduler, scaler, max_norm)

    return train_epoch


def finish(model, optimizer, scheduler, scaler, max_norm, clip=nn.utils.clip_grad_norm_):
    """The end of a step, after the gradients of all micro-batches have been added."""
    scaler.unscale_(optimizer)
    clip(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad()


def clips_each_parameter(
    model, loss_sum, micro_batches, optimizer, scheduler, scaler, every, max_norm
):
    """The bound holds for each parameter's gradient, so that the direction changes."""
    for start in range(0, len(micro_batches), every):
        group = micro_batches[start : start + every]
        total = sum(loss_sum(model, micro_batch)[1] for micro_batch in group)
        for micro_batch in group:
            scaler.scale(loss_sum(model, micro_batch)[0] / total).backward()
        finish(model, optimizer, scheduler, scaler, max_norm, clip=clip_alone)


def clip_alone(parameters, max_norm):
    for parameter in parameters:
        nn.utils.clip_grad_norm_(parameter, max_norm)


def scales_the_last(model, loss_sum, micro_batches, optimizer, scheduler, scaler, every, max_norm):
    """Only the last micro-batch's loss goes through the scaler."""
    for start in range(0, len(micro_batches), every):
        group = micro_batches[start : start + every]
        total = sum(loss_sum(model, micro_batch)[1] for micro_batch in group)
        for micro_batch in group:
            loss = loss_sum(model, micro_batch)[0] / total
            (scaler.scale(loss) if micro_batch is group[-1] else loss).backward()
        finish(model, optimizer, scheduler, scaler, max_norm)


def one_backward(model, loss_sum, micro_batches, optimizer, scheduler, scaler, every, max_norm):
    """All micro-batches of a step are in one graph."""
    for start in range(0, len(micro_batches), every):
        losses, counts = zip(
            *(loss_sum(model, micro_batch) for micro_batch in micro_batches[start : start + every]),
            strict=True,
        )
        scaler.scale(sum(losses) / sum(counts)).backward()
        finish(model, optimizer, scheduler, scaler, max_norm)


def forward_of_all_first(
    model, loss_sum, micro_batches, optimizer, scheduler, scaler, every, max_norm
):
    """A backward pass for each micro-batch, after the last one's forward."""
    for start in range(0, len(micro_batches), every):
        found = [
            loss_sum(model, micro_batch) for micro_batch in micro_batches[start : start + every]
        ]
        total = sum(count for _, count in found)
        for loss, _ in found:
            scaler.scale(loss / total).backward()
        finish(model, optimizer, scheduler, scaler, max_norm)


def gradients_kept(model, loss_sum, micro_batches, optimizer, scheduler, scaler, every, max_norm):
    """A set of gradients for each micro-batch, added up after the last one."""
    parameters = list(model.parameters())
    for start in range(0, len(micro_batches), every):
        sets, total = [], 0
        for micro_batch in micro_batches[start : start + every]:
            loss, count = loss_sum(model, micro_batch)
            sets.append(torch.autograd.grad(scaler.scale(loss), parameters))
            total += count
        for parameter, *each in zip(parameters, *sets, strict=True):
            parameter.grad = sum(each) / total
        finish(model, optimizer, scheduler, scaler, max_norm)


def never_set_back(model, loss_sum, micro_batches, optimizer, scheduler, scaler, every, max_norm):
    """The count of tokens goes on from step to step."""
    total = 0
    for number, micro_batch in enumerate(micro_batches, start=1):
        loss, count = loss_sum(model, micro_batch)
        scaler.scale(loss).backward()
        total += count
        if number % every == 0 or number == len(micro_batches):
            for parameter in model.parameters():
                parameter.grad /= total
            finish(model, optimizer, scheduler, scaler, max_norm)


def sums_of_a_group(model, loss_sum, group, scaler):
    total = 0
    for micro_batch in group:
        loss, count = loss_sum(model, micro_batch)
        scaler.scale(loss).backward()
        total += count
    return total


def raises_for_infinity(
    model, loss_sum, micro_batches, optimizer, scheduler, scaler, every, max_norm
):
    for start in range(0, len(micro_batches), every):
        group = micro_batches[start : start + every]
        total = sums_of_a_group(model, loss_sum, group, scaler)
        for parameter in model.parameters():
            parameter.grad /= total
        clip = partial(nn.utils.clip_grad_norm_, error_if_nonfinite=True)
        finish(model, optimizer, scheduler, scaler, max_norm, clip=clip)


def updates_the_scaler_last(
    model, loss_sum, micro_batches, optimizer, scheduler, scaler, every, max_norm
):
    """`scaler.update` runs once per epoch."""
    for start in range(0, len(micro_batches), every):
        sums_of_a_group(model, loss_sum, micro_batches[start : start + every], scaler)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()


def steps_past_the_scaler(
    model, loss_sum, micro_batches, optimizer, scheduler, scaler, every, max_norm
):
    """The optimizer steps although the scaler found an infinite gradient."""
    for start in range(0, len(micro_batches), every):
        group = micro_batches[start : start + every]
        total = sums_of_a_group(model, loss_sum, group, scaler)
        scaler.unscale_(optimizer)
        for parameter in model.parameters():
            parameter.grad /= total
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()


def of_every_micro_batch(loss, total, samples, micro_batches):
    return loss / total if micro_batches == 2 else loss / total / 2


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


def iterated_twice(parameters):
    sums = {parameter: torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters}
    for parameter in parameters:  # an iterator that has come to its end
        parameter.register_post_accumulate_grad_hook(lambda parameter: sums[parameter].add_(1))
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


def never_registered(parameters):
    sums = {}

    def add(parameter):
        sums[parameter] = sums.get(parameter, 0) + taken(parameter).float()

    return sums


def by_key(key):
    """A function whose dict has `key(parameter)` as its keys."""

    def accumulate(parameters):
        sums = {}

        def add(parameter):
            sums[key(parameter)] = sums.get(key(parameter), 0) + taken(parameter).float()

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(add)
        return sums

    return accumulate


def taken(parameter):
    gradient, parameter.grad = parameter.grad, None
    return gradient


def in_float64(so_far, parameter):
    gradient = taken(parameter).double()
    return gradient if so_far is None else so_far + gradient


def left_there(so_far, parameter):
    gradient = parameter.grad.float()
    return gradient if so_far is None else so_far + gradient


def kept_as_zeros(so_far, parameter):
    gradient = parameter.grad.float()
    parameter.grad.zero_()
    return gradient if so_far is None else so_far.add_(gradient)


def first_parameter_alone(parameters):
    return fp32_sums(list(parameters)[:1])


#: check -> right answers, and wrong ones, each alone or with a part of what it is told.
ANSWERS = {
    "peaks": (
        [peak, lambda m: torch.tensor(float(peak(m)))],  # the second one has fp32's 24 bits
        [
            (lambda m: 158_804_376 + (m - 2) * 2 * SLOPE, "did not halve"),
            (lambda m: 207_597_976 * m / 4, "in proportion"),
            (lambda m: 158_804_376 * m / 2, "in proportion"),
            (lambda m: None if m == 8 else peak(m), "returns None for `m = 8`"),
            (lambda m: FLOOR + m * SLOPE, "no gradient exists yet"),
            (lambda m: FLOOR - WEIGHTS + m * SLOPE, "earlier micro-batches"),
            (lambda m: WEIGHTS + m * SLOPE, "and the optimizer state"),
            (lambda m: m * SLOPE, "however the batch is split"),
            (lambda m: BASELINE.peak_bytes * m / 8, "in proportion"),
            (lambda m: 207_597_976 + (m - 4) * 17_521_152, "not on the line"),
            (lambda m: 158_804_376 + 2 * m * SLOPE, "starts at m = 0"),
            (lambda m: peak(m) - (m == 8) * WEIGHTS, "lacks two sets"),
            (lambda m: peak(m) + (m == 1) * 393_216, "the measured peak"),
            (lambda m: peak(m) / 1e6, "in MB"),
            (lambda m: peak(m) / 2**20, "in MiB"),
            (lambda m: peak(m) + 4, "m = 4"),
        ],
    ),
    "loop": (
        [
            *(correct_loop, loop(), sums_then_divided),
            raises_for_infinity,
            *(counted_first(torch.no_grad), counted_first(torch.inference_mode)),
        ],
        [
            (as_it_came, "0 of 5"),
            *((each, "4 of 5") for each in PLANTED.values()),
            (loop(divide=lambda loss, total, samples, micro_batches: loss / samples), "by samples"),
            (loop(divide=of_every_micro_batch), "last group"),
            (loop(per_micro_batch=["unscale"]), "more than once"),
            (loop(left_out=["update"]), "scaler.update()"),
            (updates_the_scaler_last, "without `scaler.update()` in between"),
            (steps_past_the_scaler, "although a gradient is infinite"),
            (loop(left_out=["clip"]), "as long as the bound"),
            (loop(left_out=["scale"]), "not always go through the scaler"),
            (clips_each_parameter, "another direction"),
            (scales_the_last, "not always go through the scaler"),
            (loop(left_out=["step"]), "never lets"),
            (loop(left_out=["schedule"]), "0 steps, but"),
            (loop(left_out=["clear"]), "which were not cleared"),
            (one_backward, "of all micro-batches are live at once"),
            (forward_of_all_first, "of all micro-batches are live at once"),
            (gradients_kept, "Keep nothing of a micro-batch"),
            (never_set_back, "counted again in the second step"),
            (loop(divide=lambda loss, total, samples, micro_batches: loss), "not divided"),
            (loop(first=["schedule"]), "before the optimizer"),
            (loop(every=1), "steps"),
        ],
    ),
    "fp32_sums": (
        [fp32_sums, zeros_first],
        [
            (summed(lambda so_far, parameter: parameter.grad.float()), "too late"),
            (summed(lambda so_far, parameter: parameter.grad), "but yours are bfloat16"),
            (summed(in_float64), "but yours are float64"),
            (summed(left_there), "added again"),
            (summed(lambda so_far, parameter: taken(parameter).float()), "the last micro-batch"),
            (summed(kept_as_zeros), "6 bytes"),
            (first_parameter_alone, "1 of 3"),
            (iterated_twice, "no hook was called"),
            (lambda parameters: [0 for _ in parameters], "dict"),
            (lambda parameters: None, "Return a dict"),
            (never_registered, "stays empty"),
            (by_key(id), "parameters themselves"),
            (by_key(lambda parameter: parameter.shape), "parameters themselves"),
            (summed(lambda so_far, parameter: [taken(parameter).float()]), "one tensor per"),
        ],
    ),
    "largest_micro_batch": (
        [32],
        [(64, "1.64 GB"), (36, "divide"), (40, "floor"), (16, "twice as many")],
    ),
    "fast_micro_batch": (
        [16],
        [(8, "66%"), (32, "16 is enough"), (64, "reaches 100%"), ("16", "one number")],
    ),
}
