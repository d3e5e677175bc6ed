"""Lines of a training script, run and measured on a small Llama of `transformers`."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from course_lib.memory import MemoryMeter
from course_lib.models import random_tokens
from course_lib.teaching import Table, table, text

VOCABULARY = 8192  # 32 times the hidden size; in Llama 3 8B it is 31 times
FOR_USERS = (FutureWarning, UserWarning)  # other categories are for authors of libraries


class Cost(NamedTuple):
    """Costs and results of a forward and backward pass.

    Attributes:
        peak_bytes: Most bytes that are live at once.
        flops: FLOPs of both passes.
        loss: Value of the loss.
        gradients: Gradient of each parameter, or None for a parameter without a gradient.
    """

    peak_bytes: int
    flops: int
    loss: float
    gradients: list[Tensor | None]


def llama(vocabulary: int = 2048) -> nn.Module:
    """Build a small Llama with 4 layers from a configuration, without a download.

    Each call returns a new model with the same parameters, and sets PyTorch's random number
    generator to the same state.
    """
    model, generator_state = _initialized_llama(vocabulary)
    torch.set_rng_state(generator_state)
    return deepcopy(model)


@cache
def _initialized_llama(vocabulary: int) -> tuple[nn.Module, Tensor]:
    """Return a Llama to copy, and the state of PyTorch's generator after its initialization.

    Copying the Llama takes less time than drawing its parameters again.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    sizes = {"vocab_size": vocabulary, "hidden_size": 256, "intermediate_size": 688}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, **heads, num_hidden_layers=4, use_cache=False)
    return LlamaForCausalLM(config).train(), torch.get_rng_state()


def llama_batch() -> dict[str, Tensor]:
    """Return a batch of 8 sequences of 128 tokens for a Llama, as a dict of inputs and labels.

    The first 32 labels of each sequence are -100, as for a prompt. The loss ignores these tokens.
    """
    tokens = random_tokens(8, 127, VOCABULARY)
    return {"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(128) < 32, -100)}


def loss_of_model(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the loss that a `transformers` model computes itself."""
    return model(input_ids=tokens, labels=labels).loss


def cost_of(
    model: nn.Module, batch: dict[str, Tensor], loss: Callable[..., Tensor] = loss_of_model
) -> Cost | None:
    """Measure a forward and backward pass of a model.

    If the loss is None, because the learner has not written it yet, the result is None.

    Args:
        model: The model.
        batch: Dict with "input_ids" and "labels".
        loss: Function that is called as `loss(model, input_ids, labels)`, and returns the loss. By
            default, the model's own loss.
    """
    with MemoryMeter(model) as meter:
        value = loss(model, batch["input_ids"], batch["labels"])
        if value is None:
            return None
        value.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return Cost(meter.peak_bytes, meter.flops, float(value.detach()), gradients)


@contextmanager
def recorded_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Record all warnings of a `with` block in a list instead of printing them."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        yield heard


def measured_lines(lines: Sequence[str]) -> Table:
    """Return a table of the costs of a Llama's training step, with one row per line of code.

    Each line of code is run before the step of its row, and may change the model. The columns are
    those of `compare_costs`.

    Args:
        lines: Lines of code that may change the variable `model`, which is a new Llama for each
            line. The first line is empty, so its Llama has no checkpoint.
    """
    costs = {}
    for line in lines:
        with recorded_warnings() as heard:
            model = llama(VOCABULARY)
            exec(line, {"model": model})
            costs[line] = cost_of(model, llama_batch()), heard
    return compare_costs(costs)


def compare_costs(
    costs: Mapping[str, tuple[Cost | None, Sequence[warnings.WarningMessage]]],
) -> Table:
    """Return a table that compares the costs of a training step for several lines of code.

    The columns are the peak in MB, the FLOPs relative to the first row, and the warnings.

    Args:
        costs: Dict from a line of code to a pair (cost, warnings that the line printed). The first
            key is an empty line, which is shown as "no checkpoint". If a cost is None, because the
            learner has not solved the exercise yet, the row of its line is empty.

    Raises:
        ValueError: The gradients of a line differ from those of the first line by more than
            rounding.
    """
    first = next(iter(costs.values()))[0]
    rows = []
    for name, (cost, heard) in costs.items():
        label = f"`{name}`" if rows else text("no checkpoint")
        if cost is None:
            rows.append((label, "", "", ""))
            continue
        if not equal_gradients(cost.gradients, first.gradients):
            raise ValueError(
                "each entry of lines must leave the gradients unchanged up to rounding, but"
                f" {name!r} changes them"
            )
        kinds = {each.category.__name__ for each in heard if each.category in FOR_USERS}
        ratio, printed = cost.flops / first.flops, ", ".join(f"`{kind}`" for kind in sorted(kinds))
        rows.append((label, round(cost.peak_bytes / 1e6, 1), round(ratio, 2), printed))
    columns = ["line", "peak (MB)", "FLOPs (ratio)", "warning"]
    if not any(row[3] for row in rows):
        columns, rows = columns[:3], [row[:3] for row in rows]
    return table(columns, rows)


def equal_gradients(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    """Return whether two lists of gradients are equal up to a relative error of 1e-5.

    A gradient in `found` that is None is not equal to any gradient.
    """
    return all(
        one is not None and (one - other).norm() <= 1e-5 * other.norm()
        for one, other in zip(found, expected, strict=True)
    )
