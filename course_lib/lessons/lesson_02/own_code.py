"""Lines of a training script, run and measured on a small Llama of `transformers`."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.memory import MemoryMeter
from course_lib.models import random_tokens
from course_lib.teaching import Table, table

LINES = (
    "",
    "model.activation_checkpointing_enable()",
    'model.activation_checkpointing_enable({"use_reentrant": True})',
    "model.gradient_checkpointing_enable()",
    'model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": keep_addmm})',
    'model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": keep_mm})',
    'model.compile(backend="aot_eager_decomp_partition")',
)
_FOR_USERS = (FutureWarning, UserWarning)  # others are for the authors of a library


def llama() -> nn.Module:
    """Make a Llama with 4 layers from a configuration; nothing is downloaded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    sizes = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 688}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, **heads, num_hidden_layers=4, use_cache=False)
    return LlamaForCausalLM(config).train()


def llama_batch() -> dict[str, Tensor]:
    """Return 8 sequences of 128 tokens; the first 32 labels of each are -100, as for a prompt."""
    tokens = random_tokens(8, 127, 2048)
    return {"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(128) < 32, -100)}


def measured_lines(**names: Any) -> Table:
    """Run each line on a new Llama, then forward and backward, and compare peaks and FLOPs.

    Args:
        **names: Values of the names in the lines, apart from `model`.

    Returns:
        A row per line: the line, the peak in MB, the FLOPs relative to the first row, and the
        kinds of warnings that the line printed. The empty line is the model without a checkpoint.

    Raises:
        ValueError: A line changed a gradient by more than rounding.
    """
    rows, first = [], None
    for line in LINES:
        model, batch = llama(), llama_batch()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            exec(line, {"model": model, **names})
            with MemoryMeter(model) as meter:
                model(**batch).loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        first = first or (meter.flops, gradients)
        _refuse_other_gradients(line, gradients, first[1])
        kinds = [each.category.__name__ for each in caught if each.category in _FOR_USERS]
        said = " ".join(f"`{kind}`" for kind in dict.fromkeys(kinds))
        peak, flops = round(meter.peak_bytes / 1e6, 1), round(meter.flops / first[0], 2)
        rows.append((f"`{line}`" if line else "no checkpoint", peak, flops, said))
    return table(["line", "peak (MB)", "FLOPs (ratio)", "warning"], rows)


def _refuse_other_gradients(line: str, found: list, expected: list) -> None:
    """Raise an error if a line changes the gradients by more than rounding."""
    for one, other in zip(found, expected, strict=True):
        if (one - other).norm() > 1e-5 * other.norm():
            raise ValueError(f"lines must leave the gradients equal up to rounding, got {line!r}")
