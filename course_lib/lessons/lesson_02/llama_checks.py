"""The exercise of lesson 02 on a Llama of `transformers`."""

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.models import random_tokens
from course_lib.teaching import Verdict, text
from course_lib.teaching.exercises import WrongAnswer, exercise, right, seed_of

from .own_code import VOCABULARY, Cost, cost_of, equal_gradients, llama

_LIMIT = 80_000_000


@cache
def _batch(seed: int) -> dict[str, Tensor]:
    """Return 8 sequences whose prompts and paddings have different lengths.

    The last sequence has no prompt, so its first label is not -100.
    """
    tokens = random_tokens(8, 127, VOCABULARY, seed=seed)
    places, sequences = torch.arange(128), torch.arange(8)[:, None]
    ignored = (places < 9 * (7 - sequences)) | (places >= 128 - 5 * sequences)
    return {"input_ids": tokens, "labels": tokens.masked_fill(ignored, -100)}


@cache
def _expected_cost(seed: int) -> Cost:
    return cost_of(llama(VOCABULARY), _batch(seed))  # pyrefly: ignore[bad-return]


@exercise(
    hint=(
        (
            "Call `model.activation_checkpointing_enable()`. Take the hidden states from"
            " `model.model(tokens)`, and give them to your loss of section 2.8."
        ),
        (
            "Position t predicts the label of position t + 1. Which position of a sequence has no"
            " label, and which label has no position? Leave both out before you flatten."
        ),
    )
)
def check_in_chunks(function: Any) -> Verdict:
    """Check `function(model, tokens, labels)`, which returns the loss of a Llama.

    The layers must be checkpointed and the loss must be computed in chunks. Loss and gradients must
    be the model's own, and the peak of forward and backward at most 80 MB.
    """
    model, runs = llama(VOCABULARY), []
    layers = model.model.layers
    for layer in layers:
        layer.mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    seed = seed_of(0)
    _expected_cost(seed), _mistaken_losses(seed)  # computed before the meter starts

    def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        loss = function(model, tokens, labels)
        if loss is None or loss is ...:
            raise NotImplementedError
        if not isinstance(loss, Tensor) or not loss.requires_grad or loss.numel() != 1:
            raise WrongAnswer(
                "Return the loss, a tensor with a graph. The check calls its backward."
            )
        _refuse_another_loss(float(loss.detach()), seed)
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cost = cost_of(model, _batch(seed), loss_of)
    if not equal_gradients(cost.gradients, _expected_cost(seed).gradients):
        raise WrongAnswer(
            "Your loss is right, but the gradients are not those of the model. Do not cut the"
            " graph between the loss and the layers.",
            exact=True,
        )
    sizes = {"peak": f"{cost.peak_bytes / 1e6:.1f}"}
    if cost.peak_bytes > _LIMIT and not model.training:
        message = (
            "The layers are not recomputed, because `transformers` uses checkpoints only in"
            " training mode. Do not call `model.eval()`."
        )
        raise WrongAnswer(message, exact=True)
    if cost.peak_bytes > _LIMIT and len(runs) < 2 * len(layers):
        message = (
            "The peak is {peak} MB, because layers are not recomputed. Checkpoint all of them."
        )
        raise WrongAnswer(text(message, **sizes), exact=True)
    if cost.peak_bytes > _LIMIT:
        message = (
            "The peak is {peak} MB, because too many logits are in memory at once. Compute the loss"
            " in chunks of 128 tokens."
        )
        raise WrongAnswer(text(message, **sizes), exact=True)
    message = "Right: loss and gradients are those of the model, and the peak is {peak} MB."
    return right(text(message, **sizes))


def _refuse_another_loss(found: float, seed: int) -> None:
    """Refuse a loss that is not the model's, with the mistake if it is known."""
    wanted = _expected_cost(seed).loss
    if abs(found - wanted) <= 1e-5 * wanted:
        return
    for mistaken, reason in _mistaken_losses(seed).items():
        if abs(found - mistaken) <= 1e-5 * mistaken:
            raise WrongAnswer(text("Your loss is wrong. {reason}", reason=text(reason)), exact=True)
    message = "Your loss is {found}, but it must be {wanted}."
    raise WrongAnswer(text(message, found=f"{found:.4f}", wanted=f"{wanted:.4f}"))


@cache
def _mistaken_losses(seed: int) -> dict[float, str]:
    """Return the losses of common mistakes, with the sentence about each."""
    labels, model = _batch(seed)["labels"], llama(VOCABULARY)
    with torch.no_grad():
        logits = model(_batch(seed)["input_ids"]).logits
    counted = int((labels[:, 1:] != -100).sum())

    def mean(logits: Tensor, targets: Tensor) -> float:
        return float(nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten()))

    shifted = mean(logits[:, :-1], labels[:, 1:])
    of_rows = [mean(one[:-1], targets[1:]) for one, targets in zip(logits, labels, strict=True)]
    return {
        mean(logits, labels): (
            "A position predicts the next token. Pair the hidden states `[:, :-1]` with the labels"
            " `[:, 1:]`."
        ),
        mean(logits[:, 1:], labels[:, :-1]): (
            "You moved the labels in the wrong direction. The hidden states `[:, :-1]` predict the"
            " labels `[:, 1:]`."
        ),
        mean(logits.flatten(0, 1)[:-1], labels.flatten()[1:]): (
            "The last position of a sequence predicts nothing. Leave it out in each sequence,"
            " before you flatten."
        ),
        shifted * counted: "You returned the sum of the losses. Return the mean.",
        shifted * counted / labels.numel(): _ALL,
        shifted * counted / labels[:, 1:].numel(): _ALL,
        shifted * counted / int((labels != -100).sum()): (
            "You counted the targets before the shift. The first label of a sequence is not"
            " predicted, so it does not count."
        ),
        sum(of_rows) / len(of_rows): (
            "You took the mean of the sequences' means. Sequences with fewer targets must count"
            " for less."
        ),
    }


_ALL = (
    "You divide by the number of all targets, but targets of −100 do not count. Divide by"
    " `(targets != -100).sum()`."
)
