"""Right and wrong answers to the exercises of lesson 05, with the expected messages."""

from contextlib import nullcontext
from functools import partial

import torch
from torch import nn

from course_lib.accumulation import AccumulatedStep
from course_lib.lessons.lesson_05.bugs import PLANTED, correct_loop
from course_lib.lessons.lesson_05.exercises import WEIGHTS, check_peaks

peak = check_peaks.right_answer()


def loop_with_all_bugs(
    model, loss_sum, micro_batches, optimizer, scheduler, scaler, every, max_norm
):
    for number, micro_batch in enumerate(micro_batches, start=1):
        loss, count = loss_sum(model, micro_batch)
        scaler.scale(loss / count / every).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scheduler.step()
        if number % every == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def divided(by=lambda tokens, group: tokens, counting=nullcontext, scales=lambda is_last: True):
    """A function that adds the gradients of a group, whose sum of losses is divided by
    `by(tokens of the group, group)`; the tokens are counted in a context, and a micro-batch's loss
    goes through the scaler if `scales(whether it is the last of the group)`."""

    def add_gradients(model, loss_sum, group, scaler):
        with counting():
            divisor = by(sum(loss_sum(model, micro_batch)[1] for micro_batch in group), group)
        for micro_batch in group:
            loss = loss_sum(model, micro_batch)[0] / divisor
            (scaler.scale(loss) if scales(micro_batch is group[-1]) else loss).backward()

    return add_gradients


STEPS = ("unscale", "clip", "step", "update", "schedule", "clear")


def without(*steps):
    return tuple(step for step in STEPS if step not in steps)


mean_of_tokens = divided()


def loop(add_gradients=mean_of_tokens, steps=STEPS, clip=nn.utils.clip_grad_norm_, more=0):
    """Return a loop that is right, unless an argument makes it wrong: what adds the gradients of a
    group, the steps after it, what clips, or `more` micro-batches of a group than `every`."""

    def train_epoch(model, loss_sum, micro_batches, optimizer, scheduler, scaler, every, max_norm):
        every += more
        actions = {
            "unscale": lambda: scaler.unscale_(optimizer),
            "clip": lambda: clip(model.parameters(), max_norm),
            "step": lambda: scaler.step(optimizer),
            "unguarded step": optimizer.step,
            "update": scaler.update,
            "schedule": scheduler.step,
            "clear": optimizer.zero_grad,
        }
        for start in range(0, len(micro_batches), every):
            add_gradients(model, loss_sum, micro_batches[start : start + every], scaler)
            for step in steps:
                actions[step]()

    return train_epoch


def sums_then_divided(model, loss_sum, group, scaler):
    total = 0
    for micro_batch in group:
        loss, count = loss_sum(model, micro_batch)
        scaler.scale(loss).backward()
        total += count
    for parameter in model.parameters():
        parameter.grad /= total


def library(model, loss_sum, micro_batches, optimizer, scheduler, scaler, every, max_norm):
    """The library's step, which accepts only a finite loss."""
    step = AccumulatedStep(model, optimizer, loss_sum, scaler=scaler, max_norm=max_norm)
    for start in range(0, len(micro_batches), every):
        if step(micro_batches[start : start + every]).stepped:
            scheduler.step()


def one_backward(model, loss_sum, group, scaler):
    """All micro-batches of a step are in one graph."""
    losses, counts = zip(*(loss_sum(model, micro_batch) for micro_batch in group), strict=True)
    scaler.scale(sum(losses) / sum(counts)).backward()


def gradients_kept(model, loss_sum, group, scaler):
    """A set of gradients for each micro-batch, added up after the last one."""
    parameters, sets, total = list(model.parameters()), [], 0
    for micro_batch in group:
        loss, count = loss_sum(model, micro_batch)
        sets.append(torch.autograd.grad(scaler.scale(loss), parameters))
        total += count
    for parameter, *each in zip(parameters, *sets, strict=True):
        parameter.grad = sum(each) / total


def tokens_never_reset(*epoch):
    """Sums the tokens over all steps instead of over one step."""
    counted = []

    def by(tokens, group):
        counted.append(tokens)
        return sum(counted)

    loop(divided(by))(*epoch)


def summed(gradient_of, key=lambda parameter: parameter, add=True):
    """A function that keeps for each parameter the sum of what `gradient_of(parameter)` returns in
    its hook, or the last one."""

    def accumulate(parameters):
        sums = {}

        def keep(parameter):
            gradient = gradient_of(parameter)
            sums[key(parameter)] = sums.get(key(parameter), 0) + gradient if add else gradient

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(keep)
        return sums

    return accumulate


def detach_gradient(parameter):
    gradient, parameter.grad = parameter.grad, None
    return gradient.float()


def set_to_zero(parameter):
    gradient = parameter.grad.float()
    parameter.grad.zero_()
    return gradient


def zeros(parameters):
    return {parameter: torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters}


fp32_sums = summed(detach_gradient)


#: check -> right answers
RIGHT = {
    "peaks": [
        lambda m: torch.tensor(float(peak(m))),  # has fp32's 24 bits
        lambda m: peak(m) + (m == 1) * 393_216 - (m == 8) * WEIGHTS,  # as measured
    ],
    "loop": [
        correct_loop,
        loop(sums_then_divided, clip=partial(nn.utils.clip_grad_norm_, error_if_nonfinite=True)),
        loop(divided(counting=torch.inference_mode)),
        library,
    ],
    "fp32_sums": [fp32_sums],
}

#: check -> wrong answers, each alone or with a part of the expected message
WRONG = {
    "peaks": [(lambda m: peak(m) + 4, "m = 4")],
    "loop": [
        (loop_with_all_bugs, "0 of 5"),
        *((each, "4 of 5") for each in PLANTED.values()),
        (loop(divided(lambda tokens, group: sum(map(len, group)))), "by samples"),
        (loop(divided(lambda tokens, group: tokens * 2 / len(group))), "last group"),
        (loop(divided(lambda tokens, group: 1)), "not divided"),
        (tokens_never_reset, "counted again in the second step"),
        (loop(steps=without("clear")), "which were not cleared"),
        (loop(steps=("unscale", *STEPS)), "more than once"),
        (loop(steps=without("update")), "without `scaler.update()` in between"),
        (loop(steps=without("unscale", "update")), "once after each step"),
        (loop(divided(scales=lambda is_last: is_last)), "not always go through the scaler"),
        (loop(divided(scales=lambda is_last: False)), "Pass the loss"),
        (loop(steps=("clear", *without("clear"))), "no parameter had a gradient"),
        (loop(steps=("unscale", "clip", "unguarded step", *STEPS[3:])), "gradient is infinite"),
        (loop(steps=without("clip")), "4 of 5 bugs fixed. Remaining: clipping: the update is"),
        (loop(steps=without("step")), "never lets"),
        (loop(steps=("schedule", *without("schedule"))), "before the optimizer"),
        (loop(one_backward), "of all micro-batches are live at once"),
        (loop(gradients_kept), "Keep nothing of a micro-batch"),
        (loop(more=1), "steps"),
    ],
    "fp32_sums": [
        (summed(lambda parameter: parameter.grad.float(), add=False), "too late"),
        (summed(lambda parameter: parameter.grad, add=False), "but yours are bfloat16"),
        (summed(lambda parameter: detach_gradient(parameter).double()), "but yours are float64"),
        (summed(lambda parameter: parameter.grad.float()), "added again"),
        (summed(detach_gradient, add=False), "the last micro-batch"),
        (summed(set_to_zero), "6 bytes"),
        (lambda parameters: fp32_sums(list(parameters)[:1]), "1 of 3"),
        (lambda parameters: fp32_sums([]), "stays empty"),
        (zeros, "Register your function for each parameter"),
        (lambda parameters: None, "Return a dict"),
        (summed(detach_gradient, key=id), "parameters themselves"),
        (summed(lambda parameter: [detach_gradient(parameter)], add=False), "one tensor per"),
    ],
}

#: check -> reason -> mutants of its solution that are right as well
EQUIVALENT = {
    "micro_batch": {
        "no budget is equal to a peak": ["peak[m] <= budget → peak[m] < budget"],
    },
}
