"""Variants of lesson 03 that keep fewer activations: chunked loss, compiled stages, Llama layer."""

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from course_lib._torch.compiler import activation_memory_budget
from course_lib.checkpoint import checkpointed_loss
from course_lib.labels import join_labels
from course_lib.memory import MemoryMeter, saved_tensors, symbolic
from course_lib.models import Decoder, loss_stages, random_tokens
from course_lib.teaching import COLORS, Table, figure, table, text
from course_lib.teaching.figures import shown_once
from course_lib.teaching.marks import label_axes, note

from .exercises import B
from .figures import peak_and_flops

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cost = tuple[int, int]  # peak in bytes, FLOPs

#: Variant -> place of its name in `draw_ways`: distance above its point in units of 1/72 inch, and
#: the side of the name that is aligned with the point.
_PLACES = {"products kept": (13, "left"), "loss in chunks": (42, "right")}
_PLACES |= {"no checkpoint": (-27, "right"), "compiler's budget, 0.5": (-13, "left")}


class _ChunkedLoss(nn.Module):
    """Norm, head and loss of a decoder; the loss is computed in chunks of tokens."""

    def __init__(self, last: nn.Module, chunk: int):
        super().__init__()
        self.last, self.chunk = last, chunk

    def forward(self, x: Tensor) -> Tensor:
        hidden, targets = self.last.norm(x).flatten(0, 1), self.last.targets.flatten()
        return checkpointed_loss(hidden, self.last.head.weight, targets, chunk=self.chunk)


def with_chunked_loss(stages: nn.Sequential, chunk: int, x: Tensor) -> Tensor:
    """Run a decoder whose loss is computed in chunks of tokens, and return the loss.

    Args:
        stages: Stages of a decoder. The last one consists of norm, output head and loss.
        chunk: Number of tokens per chunk.
        x: Input of the first stage.
    """
    return nn.Sequential(*stages[:-1], _ChunkedLoss(stages[-1], chunk))(x)


def llama_layer_bytes(hidden: int, inner: int, heads: int, tokens: int) -> tuple[int, int, int]:
    """Return three numbers of bytes for a Llama layer: saved tensors, input, and gradients.

    The saved tensors are those that the layer keeps for backward. The gradients are those of its
    parameters. The layer is in bf16 with 8 key-value heads, and runs on symbolic tensors.

    Args:
        hidden: Hidden size.
        inner: Inner width of the feed-forward network.
        heads: Number of query heads.
        tokens: Length of the sequence. The batch has one sequence.
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
    """Return the bytes that a compiled module saves for backward, not counting its parameters."""
    with warnings.catch_warnings():
        # `saved_tensors` uses global hooks on modules, about which the compiler warns.
        warnings.filterwarnings("ignore", message="Using `torch.compile")
        return saved_tensors(run, x).total_bytes


def decoder_stages(**changes: int) -> tuple[nn.Sequential, Tensor]:
    """Return the stages of the course's decoder, and its input tokens.

    The stages are the embedding, the attention and the feed-forward network of each layer, and the
    output head. The last stage returns the loss.

    Args:
        changes: Sizes that differ from those of the course's decoder, such as `layers=48`.
    """
    sizes = {"vocabulary": 2048, "hidden": 256, "heads": 8, "layers": 8, "sequence": 128}
    decoder, tokens = Decoder(**sizes | changes), random_tokens(8, 128, 2048)
    return loss_stages(decoder, tokens[:, 1:]), tokens[:, :-1].contiguous()


def compile_privately(module: nn.Module, x: Tensor, budget: float) -> Callable[[Tensor], Tensor]:
    """Compile a module with PyTorch's private setting `activation_memory_budget`.

    All earlier compiled code is discarded. The compiled module runs forward and backward once, so
    its parameters have gradients afterwards.

    Args:
        module, x: Module to compile, and its input.
        budget: Fraction of the activation memory that may be kept, from 0 to 1.
    """
    torch.compiler.reset()
    with activation_memory_budget(budget):
        run = torch.compile(module, backend="aot_eager")
        run(x).sum().backward()
    return run


def compiled_cost(budget: float) -> Cost:
    """Return the peak in bytes and the FLOPs of the compiled decoder's forward and backward pass.

    The decoder has 8 layers. Gradients are allocated before the forward pass. The bytes of the
    input are part of the peak.

    Args:
        budget: Value of PyTorch's setting `activation_memory_budget`, from 0 to 1.
    """
    stages, inputs = decoder_stages()
    run = compile_privately(stages, inputs, budget)
    with MemoryMeter() as meter:
        run(inputs).backward()
    return meter.peak_bytes + inputs.nbytes, meter.flops


def draw_ways(measured: Mapping[int, Mapping[str, Cost]]) -> "Figure":
    """Draw the peak and the FLOPs of several ways to run the decoder, with one panel per depth.

    Args:
        measured: Dict from the number of layers to an inner dict, whose keys are labels such as
            "each layer", and whose values are (peak in bytes, FLOPs). The first item of an inner
            dict is the baseline. FLOPs are drawn relative to it.
    """
    title = "A checkpoint around each layer has the lowest peak with 8 layers, but not with 48"
    drawn, axes = figure(title, columns=len(measured), width=8.6, height=3.6, sharey=True)
    alt = []
    for ax, (layers, costs) in zip(axes, measured.items(), strict=True):
        largest, baseline = next(iter(costs.values()))
        for name, (peak, flops) in costs.items():
            x, y = peak / 1e6, flops / baseline
            ax.plot(x, y, "o", color=COLORS["measured"])
            values = {"name": name, "peak": f"{x:.1f}"}
            up, side = _PLACES.get(name, (0, "left"))
            line = {"arrowstyle": "-", "color": "#AAAAAA", "relpos": (1, 0.5)}
            look = {"ha": side, "fontsize": 8, "arrowprops": line if abs(up) > 20 else None}
            note(ax, text("{name}, {peak} MB", **values), (x, y), (0 if up else 8, up), **look)
            words = "{n} layers, {name}: {peak} MB, {times} times the FLOPs"
            alt.append(text(words, n=layers, times=f"{y:.2f}", **values))
        limits = {"xlim": (0, 1.08 * largest / 1e6), "ylim": (0.92, 1.32)}
        label_axes(ax, "peak (MB)", title=text("{n} layers", n=layers), **limits)
    axes[0].set_ylabel(text("FLOPs (× baseline)"))
    drawn.course_alt = text("{points}.", points=join_labels(alt, "; "))
    return shown_once(drawn)


def budget_table(
    layers: nn.Module,
    x: Tensor,
    variants: Mapping[str, tuple[Callable[[nn.Module, Tensor, float], Callable], float]],
) -> Table:
    """Return a table of the saved bytes, the peak and the FLOPs of compiled layers.

    Each row has a different value of PyTorch's setting `activation_memory_budget`.

    Args:
        layers, x: Module to compile, and its input.
        variants: Dict from a label to (function, budget). The function takes the module, its input
            and the budget, and returns the compiled module. It may call `torch.compiler.reset()`,
            because each variant is measured before the next one is compiled.
    """
    _, baseline = peak_and_flops(lambda layers, _, x: layers(x), layers, None)
    rows = []
    for name, (compile_with, budget) in variants.items():
        run = compile_with(layers, x, budget)
        saved = saved_when_compiled(run, x)
        peak, flops = peak_and_flops(lambda _, run, x: run(x), layers, run)
        rows.append((name, round(saved / B, 1), round(peak / B, 1), round(flops / baseline, 2)))
    columns = ["budget", "saved (units of B)", "peak (units of B)", "FLOPs (× baseline)"]
    return table(columns, rows)


def outcomes(runs: Mapping[str, Callable[[Tensor], Tensor]], x: Tensor) -> Table:
    """Run functions forward and backward, and return a table of their outcomes.

    The outcome is "runs", or the type of the error that was raised.

    Args:
        runs: Dict from the label of a row to a function of x. The functions may be compiled.
        x: Input of all functions.
    """
    rows = []
    for name, run in runs.items():
        torch.compiler.reset()
        try:
            run(x).sum().backward()
            rows.append((name, "runs"))
        except RuntimeError as error:
            rows.append((name, f"`{type(error).__name__}`"))
    return table(["region", "found"], rows)
