"""Tables of lesson 03 on ways to keep fewer activations: chunked loss, Llama, compiled layers."""

import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from course_lib.checkpoint import checkpointed_loss
from course_lib.memory import saved_tensors, symbolic
from course_lib.teaching import Table, table, text

from .exercises import B
from .figures import peak_and_flops

Cost = tuple[int, int]  # peak in bytes, FLOPs


class _ChunkedLoss(nn.Module):
    """Norm, head and loss of a decoder; the loss is computed in chunks of tokens."""

    def __init__(self, last: nn.Module, chunk: int):
        super().__init__()
        self.last, self.chunk = last, chunk

    def forward(self, x: Tensor) -> Tensor:
        hidden, targets = self.last.norm(x).flatten(0, 1), self.last.targets.flatten()
        return checkpointed_loss(hidden, self.last.head.weight, targets, chunk=self.chunk)


def with_chunked_loss(stages: nn.Sequential, chunk: int, x: Tensor) -> Tensor:
    """Return the output of the stages, with lesson 02's chunked loss as the last stage.

    Args:
        stages: Stages of a decoder; the last one is norm, head and loss.
        chunk: Number of tokens per chunk.
        x: Input of the first stage.
    """
    return nn.Sequential(*stages[:-1], _ChunkedLoss(stages[-1], chunk))(x)


def llama_layer_bytes(hidden: int, inner: int, heads: int, tokens: int) -> tuple[int, int, int]:
    """Return the bytes of a Llama layer's saved tensors (A), input (B) and gradients.

    The layer is built in bf16 with 8 key-value heads, and runs on symbolic tensors.

    Args:
        hidden: Hidden size.
        inner: Inner width of the feed-forward network.
        heads: Number of query heads.
        tokens: Length of the sequence; the batch has one sequence.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=8,
        num_hidden_layers=1,
        vocab_size=256,
    )
    with symbolic():
        model = LlamaForCausalLM(config).to(torch.bfloat16).model
        x = torch.randn(1, tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        angles = model.rotary_emb(x, torch.arange(tokens)[None])
        kept = saved_tensors(lambda x: model.layers[0](x, position_embeddings=angles), x)
        gradients = sum(parameter.nbytes for parameter in model.layers[0].parameters())
    return kept.total_bytes, x.nbytes, gradients


def saved_when_compiled(run: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Return the bytes saved for backward by a compiled module, without its parameters."""
    with warnings.catch_warnings():
        # `saved_tensors` uses global hooks on modules, about which the compiler warns.
        warnings.filterwarnings("ignore", message="Using `torch.compile")
        return saved_tensors(run, x).total_bytes


def decision_table(measured: Mapping[int, Mapping[str, Cost]]) -> Table:
    """Show a table of peak and FLOPs of each variant, for each number of layers.

    Args:
        measured: Dict from the number of layers to a dict from the variant's label to (peak in
            bytes, FLOPs). FLOPs are shown relative to the first variant. A variant that was not
            measured at a depth has empty cells.
    """
    columns = ["way"]
    for layers in measured:
        columns += [
            text("peak (MB), {n} layers", n=layers),
            text("FLOPs (× baseline), {n} layers", n=layers),
        ]
    rows: dict[str, list] = {}
    for place, costs in enumerate(measured.values()):
        baseline = next(iter(costs.values()))[1]
        for name, (peak, flops) in costs.items():
            row = rows.setdefault(name, [name] + [""] * 2 * len(measured))
            row[2 * place + 1 : 2 * place + 3] = round(peak / 1e6, 1), round(flops / baseline, 2)
    return table(columns, rows.values())


def budget_table(
    compiled: Callable[[nn.Module, Tensor, float], Callable[[Tensor], Tensor]],
    layers: nn.Module,
    x: Tensor,
    budgets: Mapping[str, float],
) -> Table:
    """Show a table of saved bytes, peak and FLOPs of layers compiled with each budget.

    Args:
        compiled: Function that takes a module, its input and a budget, and returns the compiled
            module. The function may discard earlier compiled code.
        layers, x: Module to compile, and its input.
        budgets: Dict from a label to a budget.
    """
    _, baseline = peak_and_flops(lambda layers, _, x: layers(x), layers, None)
    rows = []
    for name, budget in budgets.items():
        run = compiled(layers, x, budget)
        saved = saved_when_compiled(run, x)
        peak, flops = peak_and_flops(lambda _, run, x: run(x), layers, run)
        rows.append((name, round(saved / B, 1), round(peak / B, 1), round(flops / baseline, 2)))
    columns = ["budget", "saved (units of B)", "peak (units of B)", "FLOPs (× baseline)"]
    return table(columns, rows)
