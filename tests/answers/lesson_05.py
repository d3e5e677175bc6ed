"""Answers to the exercises of lesson 05: right ones, and wrong ones with what they are told."""

import torch


def accumulate(model, loss_sum, pieces):
    total = 0
    for piece in pieces:
        loss, weight = loss_sum(model, piece)
        loss.backward()
        total += weight
    for parameter in model.parameters():
        parameter.grad /= total


def counts_first(model, loss_sum, pieces):
    total = sum(loss_sum(model, piece)[1] for piece in pieces)
    for piece in filter(len, pieces):
        (loss_sum(model, piece)[0] / total).backward()


def means(model, loss_sum, pieces):
    for piece in pieces:
        loss, weight = loss_sum(model, piece)
        (loss / max(weight, 1) / len(pieces)).backward()


def all_graphs_at_once(model, loss_sum, pieces):
    losses, weights = zip(*(loss_sum(model, piece) for piece in pieces), strict=True)
    (sum(losses) / sum(weights)).backward()


#: check -> right answers, and wrong ones, each alone or with a part of what it is told.
ANSWERS = {
    "accumulation": (
        [accumulate, counts_first],
        [
            *((means, "off by"), lambda model, loss_sum, pieces: accumulate(model, loss_sum, pieces[-1:])),
            (lambda *_: None, "no gradient"),
            (lambda model, loss_sum, pieces: accumulate(model, loss_sum, [torch.cat(pieces)]), "saves no memory"),
            (all_graphs_at_once, "saves no memory"),
        ],
    ),
    "largest_micro_batch": ([14], [8, (14.5, "Whole"), 15, (25, "floor")]),
    "fast_micro_batch": ([16], [8, 32, 64, "16"]),
}
