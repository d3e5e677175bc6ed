"""Lines of a training script, run and measured on a small Llama of `transformers`."""

import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from course_lib.memory import MemoryMeter
from course_lib.models import random_tokens
from course_lib.teaching import Table, table, text

LINES = (
    "",
    "model.activation_checkpointing_enable()",
    "model.activation_checkpointing_enable(older)",
    "model.gradient_checkpointing_enable()",
    "model.activation_checkpointing_enable(keep_addmm)",
    "model.activation_checkpointing_enable(keep_mm)",
    'model.compile(backend="aot_eager_decomp_partition")',
)
OWN_LOSS = "loss = in_chunks(model, tokens, labels)"
VOCABULARY = 8192  # 32 times the hidden size; in Llama 3 8B it is 31 times
_FOR_USERS = (FutureWarning, UserWarning)  # others are for the authors of a library


class Cost(NamedTuple):
    """Peak and FLOPs of forward and backward, with their loss and gradients."""

    peak_bytes: int
    flops: int
    loss: float
    gradients: list[Tensor | None]


def llama(vocabulary: int = 2048) -> nn.Module:
    """Make a Llama with 4 layers from a configuration; nothing is downloaded.

    Each call returns a new model with the same parameters, and seeds PyTorch's generator.
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
    """Return 8 sequences of 128 tokens; their first 32 labels are -100, as for a prompt."""
    tokens = random_tokens(8, 127, VOCABULARY)
    return {"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(128) < 32, -100)}


def loss_of_model(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the model's own loss."""
    return model(input_ids=tokens, labels=labels).loss


def cost_of(
    model: nn.Module, batch: dict[str, Tensor], loss: Callable[..., Tensor] = loss_of_model
) -> Cost | None:
    """Return the `Cost` of `loss(model, tokens, labels)` and backward; None if the loss is None."""
    with MemoryMeter(model) as meter:
        value = loss(model, batch["input_ids"], batch["labels"])
        if value is None:
            return None
        value.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return Cost(meter.peak_bytes, meter.flops, float(value.detach()), gradients)


@cache
def cost_without_checkpoints() -> Cost:
    """Return the costs of the small Llama on `llama_batch()`, without any technique."""
    return cost_of(llama(VOCABULARY), llama_batch())  # pyrefly: ignore[bad-return]


def measured_lines(
    in_chunks: Callable[..., Tensor] | None = None,
    lines: Sequence[str] = LINES,
    **names: Any,
) -> Table:
    """Return a table of the peak and FLOPs of a new Llama after each line of code.

    Args:
        in_chunks: The learner's function of a model, tokens and labels that returns the loss. If
            given, a last row shows the costs of that function. The row is empty if the function
            returns None.
        lines: Lines of code that change `model`; the empty line is the model without a checkpoint.
        **names: Values of the names in the lines, apart from `model`.

    Returns:
        One row per line: the line, the peak in MB, the FLOPs relative to the model without a
        checkpoint, and the category of a warning that the line printed.

    Raises:
        ValueError: A line changed a gradient by more than rounding.
    """
    rows, first = [], cost_without_checkpoints()
    for line in lines if in_chunks is None else (*lines, OWN_LOSS):
        model = llama(VOCABULARY)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if line == OWN_LOSS:
                cost = cost_of(model, llama_batch(), in_chunks)
            else:
                exec(line, {"model": model, **names})
                cost = cost_of(model, llama_batch())
        if cost is None:
            rows.append((f"`{line}`", "", "", ""))  # the exercise is not solved yet
            continue
        if not equal_gradients(cost.gradients, first.gradients):
            raise ValueError(f"lines must leave the gradients equal up to rounding, got {line!r}")
        kinds = {each.category.__name__ for each in caught if each.category in _FOR_USERS}
        rows.append(
            (
                f"`{line}`" if line else text("no checkpoint"),
                round(cost.peak_bytes / 1e6, 1),
                round(cost.flops / first.flops, 2),
                ", ".join(f"`{kind}`" for kind in sorted(kinds)),
            )
        )
    columns = ["line", "peak (MB)", "FLOPs (ratio)", "warning"]
    if not any(row[3] for row in rows):
        columns, rows = columns[:3], [row[:3] for row in rows]
    return table(columns, rows)


def equal_gradients(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    """Return whether two lists of gradients are equal up to rounding."""
    return all(
        one is not None and (one - other).norm() <= 1e-5 * other.norm()
        for one, other in zip(found, expected, strict=True)
    )
