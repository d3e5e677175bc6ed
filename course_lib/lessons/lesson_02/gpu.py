"""The GPU experiments of lesson 02."""

import functools
from collections.abc import Callable, Iterator

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from course_lib._torch.compiler import activation_memory_budget
from course_lib.models import random_tokens
from course_lib.teaching.experiments import (
    TINY,
    Part,
    compare_variants,
    decoder_and_tokens,
    experiment,
    peaks,
    seconds,
)


@experiment(
    title="A decoder's forward and backward pass, plain and with a checkpoint around each layer",
    sizes={
        "vocabulary": 32000,
        "hidden": 1024,
        "heads": 16,
        "layers": 12,
        "sequence": 1024,
        "batch": 4,
    },
    small=TINY,
    variants={"plain": "plain", "checkpointed": "checkpointed"},
)
def checkpointed_decoder(device: torch.device, **sizes: int) -> Iterator[Part]:
    model, tokens = decoder_and_tokens(device, **sizes)
    plain = [layer.forward for layer in model.layers]
    checkpointed = [
        functools.partial(checkpoint, forward, use_reentrant=False) for forward in plain
    ]

    def step(forwards: list[Callable]) -> None:
        for layer, forward in zip(model.layers, forwards, strict=True):
            layer.forward = forward
        model.loss(tokens).backward()

    variants = {"plain": lambda: step(plain), "checkpointed": lambda: step(checkpointed)}
    yield from compare_variants(device, variants, model=model)


#: Operators whose results the selective checkpoint keeps: matrix products, and attention on each
#: device.
_KEPT = (
    "mm",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)


@experiment(
    title="The lines of 2.9 on a Llama in bf16: forward and backward",
    sizes={
        "vocabulary": 32000,
        "hidden": 2048,
        "heads": 16,
        "layers": 12,
        "sequence": 2048,
        "batch": 4,
    },
    small=TINY,
    variants={
        "plain": "no checkpoint",
        "enabled": "`activation_checkpointing_enable()`",
        "older": "`activation_checkpointing_enable(older)`",
        "selective": "`activation_checkpointing_enable(keep_mm)`",
        "compiled": "`compile()`",
        "compiled_half": "`compile()`, `activation_memory_budget = 0.5`",
        "compiled_enabled": "`activation_checkpointing_enable()`, `compile()`",
    },
)
def lines_of_a_script(
    device: torch.device, *, batch: int, sequence: int, vocabulary: int, **sizes: int
) -> Iterator[Part]:
    """Measure a forward and backward pass of a Llama for each checkpointing option of lesson 02.

    Options with `torch.compile` run on a GPU only. The library's memory meter counts the tensors of
    PyTorch's operators, so it misses tensors that compiled code creates. The counters of the CUDA
    allocator include these tensors.
    """
    tokens = random_tokens(batch, sequence - 1, vocabulary).to(device)
    kept = [getattr(torch.ops.aten, name).default for name in _KEPT]
    selective = {
        "use_reentrant": False,
        "context_fn": functools.partial(create_selective_checkpoint_contexts, kept),
    }
    checkpoints = {
        "plain": None,
        "enabled": {"use_reentrant": False},
        "older": {"use_reentrant": True},
    }
    for variant, options in (checkpoints | {"selective": selective}).items():
        step, model = _llama_step(device, tokens, options, vocabulary=vocabulary, **sizes)
        yield {**peaks(variant, step, model=model), **seconds(device, {variant: step})}
    if device.type != "cuda":
        return
    budgets = {
        "compiled": (None, 1),
        "compiled_half": (None, 0.5),
        "compiled_enabled": ({"use_reentrant": False}, 1),
    }
    for variant, (options, budget) in budgets.items():
        torch.compiler.reset()  # otherwise one model's compiled code could serve the next
        with activation_memory_budget(budget):
            step, model = _llama_step(device, tokens, options, vocabulary=vocabulary, **sizes)
            model.compile()
            found = peaks(variant, step, model=model) | seconds(device, {variant: step})
        yield {name: value for name, value in found.items() if name != f"{variant}_peak_bytes"}


def _llama_step(
    device: torch.device, tokens: torch.Tensor, options: dict | None, **sizes: int
) -> tuple[Callable[[], None], torch.nn.Module]:
    """Make a Llama, and return (step, model). `step()` runs the model's forward and backward.

    Args:
        options: Arguments of PyTorch's checkpoint around each layer; None for no checkpoints.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=sizes["vocabulary"],
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["hidden"] * 11 // 4,
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["heads"] // 2,
        num_hidden_layers=sizes["layers"],
        use_cache=False,
    )
    with device:
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    if options:
        name = "activation_checkpointing_enable"  # older versions only have this name
        getattr(model, name, model.gradient_checkpointing_enable)(options)
    return lambda: model(input_ids=tokens, labels=tokens).loss.backward(), model
