"""The GPU experiments of lesson 01."""

from collections.abc import Iterator

import torch

from course_lib.labels import text
from course_lib.memory import MemoryMeter, measure, saved_tensors, transformer_activation_bytes
from course_lib.models import Attention, DecoderLayer, seed_generators
from course_lib.teaching.allocator import Allocator, PeakBetweenOperators
from course_lib.teaching.experiments import (
    TINY,
    AttentionKernels,
    Part,
    decoder_and_tokens,
    experiment,
)

_GPT = {"vocabulary": 32_000, "hidden": 768, "heads": 12, "layers": 12, "sequence": 512, "batch": 4}


@experiment(
    title="A decoder's training step with Adam: the meter and the CUDA allocator",
    sizes=_GPT,
    small=TINY,
    labels={
        "parameter_count": "parameters",
        "meter_peak_bytes": "meter: peak of live tensors",
        "meter_blocks_peak_bytes": "meter: the same in blocks of 512 bytes",
        "allocator_peak_bytes": "allocator: peak, workspace included",
        "workspace_bytes": "what workspace adds to the peak",
        "workspace_of_{name}_bytes": "workspace of `{name}`",
        "allocated_between_operators_bytes": "allocator: most between two operators, no workspace",
        "kept_by_libraries_bytes": "kept by cuBLAS from step to step",
        "max_memory_requested_bytes": "allocator: peak as asked for",
        "max_memory_allocated_bytes": "`torch.cuda.max_memory_allocated`",
        "max_memory_reserved_bytes": "`torch.cuda.max_memory_reserved`",
        "step_flops": "FLOPs of a step",
        "step_seconds": "time of a step",
    },
)
def decoder_step(device: torch.device, **sizes: int) -> Iterator[Part]:
    """Measure a decoder's second training step: its live bytes, allocated bytes, FLOPs and time.

    The decoder is pre-norm and in fp32, and is trained with Adam. Live bytes are counted by a
    `MemoryMeter`, and allocated bytes by the CUDA allocator. The results include:

    - `max_memory_*`: the allocator's own peaks, minus the bytes that were allocated before the
      model was made.
    - `meter_blocks_peak_bytes`: the peak of live bytes if each tensor's size is rounded up to a
      multiple of 512 bytes, as in the allocator.
    - `allocated_between_operators_bytes`: the peak of allocated bytes, read at the end of each
      operator, when its workspace has been freed. The tokens and the memory that libraries keep are
      subtracted. The result can then be compared with `meter_blocks_peak_bytes`. It may be larger,
      because the allocator may make a large block up to 1 MB larger than requested.
    """
    allocator = Allocator(device)
    model, tokens = decoder_and_tokens(device, **sizes)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model.loss(tokens).backward()
        optimizer.step()

    step()  # creates the optimizer's state
    yield {"parameter_count": sum(p.numel() for p in model.parameters())}
    for name, block in (("meter_peak_bytes", 1), ("meter_blocks_peak_bytes", 512)):
        optimizer.zero_grad()
        with MemoryMeter(model, optimizer, block_bytes=block) as meter:
            step()
        yield {name: meter.peak_bytes}
    if device.type == "cuda":
        optimizer.zero_grad()
        own = [
            *model.parameters(),
            *(t for state in optimizer.state.values() for t in state.values()),
            tokens,
        ]
        kept = allocator.requested_bytes() - sum(tensor.nbytes for tensor in own if tensor.is_cuda)
        with PeakBetweenOperators(allocator) as between:
            step()
        yield {"kept_by_libraries_bytes": kept}
        yield {"allocated_between_operators_bytes": between.peak_bytes - kept - tokens.nbytes}
        optimizer.zero_grad()
        allocator.reset()
        step()
        yield allocator.peaks()
    optimizer.zero_grad()
    found = measure(step, model=model, optimizer=optimizer)
    yield {
        f"workspace_of_{name}_bytes": count
        for name, count in list(found.workspace_by_operator.items())[:5]
    }
    yield {
        "allocator_peak_bytes": found.allocator_peak_bytes,
        "workspace_bytes": found.workspace_bytes,
    }
    yield {"step_flops": found.flops, "step_seconds": found.seconds}


@experiment(
    title="The bytes that a decoder layer saves in bf16, by formula and as measured",
    sizes={"sequence": 1024, "batch": 4, "hidden": 1024, "heads": 16},
    small={"sequence": 32, "batch": 2, "hidden": 64, "heads": 4},
    labels={
        "saved_bytes": "saved for backward, measured",
        "predicted_bytes": "formula with LayerNorm statistics",
        "paper_bytes": "formula of the paper, without them",
        "difference_bytes": "measured minus predicted",
        "statistic_bytes": "one LayerNorm statistic",
    },
)
def korthikanti(device: torch.device, **size: int) -> Iterator[Part]:
    """Compare the bytes that a decoder layer with dropout saves for backward with a formula.

    The formula of Korthikanti et al. is s*b*h*(34 + 5*a*s/h) bytes, with sequence length s, batch
    size b, hidden size h and a heads. The bytes of the LayerNorm statistics are added to it. CUDA
    keeps these statistics in fp32 for every dtype of the activations. A CPU keeps them in bf16.
    """
    layer = DecoderLayer(size["hidden"], size["heads"], dropout=0.1).to(device, torch.bfloat16)
    x = torch.zeros(
        size["batch"], size["sequence"], size["hidden"], device=device, dtype=torch.bfloat16
    )
    saved = saved_tensors(layer, x)
    (statistic_bytes,) = {
        row.dtype.itemsize
        for row in saved
        if row.operator.startswith("NativeLayerNorm") and row.shape[-1] == 1
    }
    predicted = transformer_activation_bytes(**size, statistic_bytes=statistic_bytes)
    yield {
        "saved_bytes": saved.total_bytes,
        "predicted_bytes": predicted,
        "difference_bytes": saved.total_bytes - predicted,
        "paper_bytes": transformer_activation_bytes(**size),
        "statistic_bytes": statistic_bytes,
    }


@experiment(
    title="Attention over sequence lengths, bf16: peak of forward and backward",
    sizes={"lengths": (512, 1024, 2048, 4096), "hidden": 768, "heads": 12},
    small={"lengths": (16, 32), "hidden": 32, "heads": 4},
    labels={
        "standard_{n}_tensors_bytes": "standard, s = {n}: live tensors",
        "standard_{n}_allocator_bytes": "standard, s = {n}: allocator",
        "fused_{n}_tensors_bytes": "fused, s = {n}: live tensors",
        "fused_{n}_allocator_bytes": "fused, s = {n}: allocator",
    },
)
def attention_sequence(
    device: torch.device, *, lengths: tuple[int, ...], hidden: int, heads: int
) -> Iterator[Part]:
    """Measure the peak of standard and of fused attention for several sequence lengths.

    Each peak is measured twice: as bytes of live tensors, and as bytes of the CUDA allocator.

    Args:
        device: Device on which attention runs.
        lengths: Sequence lengths.
        hidden, heads: Hidden size and number of heads.
    """
    kernels = AttentionKernels()
    for kind in ("standard", "fused"):
        layer = Attention(hidden, heads, fused=kind == "fused").to(device, torch.bfloat16)
        for length in lengths:
            with seed_generators(0):
                x = torch.randn(1, length, hidden).to(device, torch.bfloat16)
            found = measure(
                lambda layer=layer, x=x: layer(x).sum().backward(), model=layer, repeats=1
            )
            yield {f"{kind}_{length}_tensors_bytes": found.peak_bytes}
            yield {f"{kind}_{length}_allocator_bytes": found.allocator_peak_bytes}
            with kernels:  # standard attention calls no fused kernel, so none is recorded
                layer(x)
    yield {"attention": str(kernels)}


@experiment(
    title="The memory monitor: live, allocated and reserved through a step",
    sizes=_GPT,
    small=TINY,
    labels={
        f"{after}_{kind}_bytes": text("after {phase}: {kind}", phase=phase, kind=kind)
        for after, phase in {
            "model": text("making the model"),
            "forward": text("forward"),
            "backward": text("backward"),
            "step": text("the optimizer's step"),
            "zero_grad": "`zero_grad`",
            "empty_cache": "`empty_cache`",
        }.items()
        for kind in map(text, ("live", "allocated", "reserved"))
    },
)
def monitor(device: torch.device, **sizes: int) -> Iterator[Part]:
    """Measure memory after each phase of a decoder's first training step.

    The results are bytes of live tensors, and the allocated and reserved bytes of the CUDA
    allocator. On a CPU only the bytes of live tensors are measured. Bytes that were already
    allocated at the start of the experiment are subtracted.
    """
    allocator = Allocator(device)
    values: Part = {}

    with MemoryMeter() as meter:

        def note(after: str) -> None:
            values[f"{after}_live_bytes"] = meter.live_bytes
            if device.type == "cuda":
                values[f"{after}_allocated_bytes"] = allocator.allocated_bytes()
                values[f"{after}_reserved_bytes"] = allocator.reserved_bytes()

        model, tokens = decoder_and_tokens(device, **sizes)
        optimizer = torch.optim.Adam(model.parameters())
        note("model")
        loss = model.loss(tokens)
        note("forward")
        loss.backward()
        note("backward")
        optimizer.step()
        note("step")
        optimizer.zero_grad()
        note("zero_grad")
        if device.type == "cuda":
            torch.cuda.empty_cache()
            note("empty_cache")
    yield values
