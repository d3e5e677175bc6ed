"""Answers to the exercises of lesson 09: right ones, and wrong ones with what they are told."""

from functools import partial
from types import SimpleNamespace

import torch
from torch.nn import functional as F

from course_lib.budget import Recipe
from course_lib.lessons.lesson_09.exercises import MISTAKES, model_of, parameters_of, say


def loss_sum(model, batch, shift=1, reduction="sum", count=lambda labels: (labels != -100).sum()):
    """The sum and the number, with one mistake where an option asks for it."""
    logits, labels = model(batch["input_ids"]).logits, batch["labels"]
    if shift == 1:
        logits, labels = logits[:, :-1], labels[:, 1:]
    if shift == -1:
        logits, labels = logits[:, 1:], labels[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)
    return losses, count(labels)


def by_its_own_loss(model, batch):
    """Right as well: the mean that a model of transformers returns, times the number."""
    count = (batch["labels"][:, 1:] != -100).sum()
    return model(**batch).loss * count, count


def predicts_padding(model, batch):
    """Overwrites the labels that are not predicted, and so agrees with a check that uses them."""
    batch["labels"][batch["labels"] == -100] = 0
    return loss_sum(model, batch)


def shifts_the_samples(model, batch):
    logits, labels = model(batch["input_ids"]).logits[:-1], batch["labels"][1:]
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return losses, (labels != -100).sum()


def adds_up_means(model, batch):
    rows = zip(model(batch["input_ids"]).logits, batch["labels"], strict=True)
    means = [F.cross_entropy(logits[:-1], labels[1:]) for logits, labels in rows]
    return sum(means), (batch["labels"][:, 1:] != -100).sum()


def subtracts_the_first(model, batch):
    """Right if the first token of each sample has a label, which a prompt has not."""
    labels = batch["labels"]
    return loss_sum(model, batch)[0], (labels != -100).sum() - len(labels)


def only(tied):
    """Right if the embedding and the head are one matrix, or only if they are two."""
    return lambda config: parameters_of(config) if config["tie_word_embeddings"] == tied else None


def slip(*names):
    return lambda config: parameters_of(config, *names)


def heads_of_128(config):
    """As in Llama 3 8B, but not here."""
    keys = 2 * config["hidden_size"] * (128 * config["num_key_value_heads"] - config["hidden_size"])
    return parameters_of(config, "heads_of_keys") + config["num_hidden_layers"] * keys


def counted_on_meta(config):
    """Right as well, and independent: the parameters of transformers' own model."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in model_of(config).parameters())


def row_by_row(model, batch):
    """Right as well: one sample after the other, weights as Python's numbers."""
    logits, labels = model(batch["input_ids"]).logits, batch["labels"]
    total, count = 0.0, 0
    for row, wanted in zip(logits, labels, strict=True):
        there = wanted[1:] != -100
        total = total + F.cross_entropy(row[:-1][there], wanted[1:][there], reduction="sum")
        count += int(there.sum())
    return total, count


UPDATES = {"in_backward": True, "offload_optimizer": 1.0}

#: check -> right answers
RIGHT = {
    "loss_sum": [
        loss_sum,
        row_by_row,
        by_its_own_loss,
        lambda model, batch: loss_sum(lambda tokens: model(input_ids=tokens), batch),
    ],
    "parameters": [
        parameters_of,
        counted_on_meta,
        lambda config: parameters_of({"hidden_size": config.pop("hidden_size"), **config}),
    ],
    "recipe": [
        Recipe(**UPDATES, offload_activations=True),
        Recipe(**UPDATES, checkpoint="layers", offload_activations=True),
        Recipe(**UPDATES, checkpoint="segments", segments=11),
        Recipe(**UPDATES, checkpoint="optimal", schedule_bytes=74_200_000),
    ],
}

#: check -> wrong answers, each alone or with a part of what it is told
WRONG = {
    "loss_sum": [
        (partial(loss_sum, reduction="mean"), "You returned a mean"),
        (partial(loss_sum, shift=0), "shift the labels"),
        (partial(loss_sum, shift=-1), "in the wrong direction"),
        (lambda m, b: loss_sum(m, {**b, "labels": b["input_ids"]}), "You used `input_ids`"),
        (predicts_padding, "changes the batch"),
        (
            lambda model, batch: loss_sum(
                lambda x: SimpleNamespace(logits=model(x).logits.softmax(-1)), batch
            ),
            "You applied softmax",
        ),
        (shifts_the_samples, "the second dimension"),
        (adds_up_means, "one mean per sample"),
        (partial(loss_sum, count=lambda labels: 10), "The sum is right"),
        (subtracts_the_first, "The sum is right"),
        (partial(loss_sum, reduction="none"), "one number each"),
        (lambda model, batch: loss_sum(model, batch)[::-1], "You swapped the two"),
        (lambda model, batch: (loss_sum(model, batch)[0].detach(), 9), "no gradient"),
        (partial(loss_sum, count=lambda labels: labels.numel()), "-100"),
        (partial(loss_sum, count=lambda labels: 9 + 0 * labels.sum()), None),
        (partial(loss_sum, count=len), "not over samples"),
        (partial(loss_sum, count=lambda labels: 1), "your weight is 1"),
        (lambda model, batch: loss_sum(model, batch)[0], "Return a pair"),
        (lambda model, batch: (float(loss_sum(model, batch)[0]), 9), "no gradient"),
    ],
    "parameters": [
        *((slip(name), say(f"parameters.{name}")) for name in MISTAKES),
        (only(True), "returns None for `tie_word_embeddings = False`"),
        (only(False), "returns None for `tie_word_embeddings = True`"),
        lambda config: config.update(vocab_size=9) or parameters_of(config),
        (slip("gate", "one_norm"), "gate, up and down. You counted one norm"),
        (slip("heads_of_keys", "gate"), "as many heads as queries. They have fewer"),
        (slip("heads_of_keys", "gate"), "You counted two matrices"),
        (heads_of_128, None),
        (slip("heads_of_keys", "output"), None),  # as with "heads_of_keys", "keys_or_values"
        (lambda config: 31_141_376, "for the small Llama"),
        *(
            (lambda config, size=size: size * parameters_of(config), f"bytes {unit}")
            for size, unit in ((2, "in bf16"), (4, "in fp32"), (16, "of Adam's step"))
        ),
    ],
    "recipe": [
        (Recipe(**UPDATES, checkpoint="layers"), "exactly the three techniques"),
        *(
            (Recipe(**UPDATES, checkpoint="layers", **more), "exactly the three techniques")
            for more in ({"first_blocks": 9}, {"attention": None}, {"attention": "sdpa"})
        ),
        (Recipe(**UPDATES, checkpoint="layers", attention="flash"), "saves nothing"),
        (Recipe(**UPDATES, checkpoint="layers", head_chunk=64), "saves nothing"),
        (Recipe(checkpoint="layers", micro_batches=4), "optimizer state"),
        (Recipe(**UPDATES), "activation"),
        (Recipe(**UPDATES, checkpoint="selective"), "activation"),
        (Recipe("bf16"), "Keep fp32 and Adam"),
        (Recipe(optimizer="sgd", in_backward=True), "Keep fp32 and Adam"),
        (Recipe(ranks=2, shard="zero3"), "several devices"),
        (200_000_000, "`Recipe`"),
    ],
}
