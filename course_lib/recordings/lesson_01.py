"""Lesson 01 on a GPU: the meter beside the CUDA allocator. Sizes are for a card with 24 GB; they need about 7 GB."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.memory import MemoryMeter, measure, saved_tensors, transformer_activation_bytes
from course_lib.models import Attention, Decoder, DecoderLayer, random_tokens, seeded

from . import experiment

GPT = {"vocabulary": 32_000, "hidden": 768, "heads": 12, "layers": 12, "sequence": 512, "batch": 4}
SMALL_GPT = {"vocabulary": 100, "hidden": 32, "heads": 4, "layers": 2, "sequence": 16, "batch": 2}


@experiment(
    "01",
    "decoder_step",
    en="A decoder's training step with Adam: the meter beside the CUDA allocator",
    zh="解码器的一个训练步（Adam）：计量器与 CUDA 分配器对照",
    small={"sizes": SMALL_GPT},
    labels={
        "parameter_count": ("parameters", "参数个数"),
        "meter_peak_bytes": ("meter: peak of live tensors", "计量器：存活张量的峰值"),
        "meter_blocks_peak_bytes": ("meter: the same in blocks of 512 bytes", "计量器：按 512 字节的块取整"),
        "allocator_peak_bytes": ("allocator: peak, workspace included", "分配器：峰值，含工作区"),
        "workspace_bytes": ("what workspace adds to the peak", "工作区使峰值增加"),
        "workspace_of_{}_bytes": ("workspace of `{}`", "`{}` 的工作区"),
        "allocated_between_operators_bytes": (
            "allocator: most between two operators, no workspace",
            "分配器：算子之间的最大值，不含工作区",
        ),
        "kept_by_libraries_bytes": ("kept by cuBLAS from step to step", "cuBLAS 跨训练步保留"),
        "max_memory_requested_bytes": ("allocator: peak as asked for", "分配器：峰值，按请求的字节计"),
        "max_memory_allocated_bytes": ("`torch.cuda.max_memory_allocated`", "`torch.cuda.max_memory_allocated`"),
        "max_memory_reserved_bytes": ("`torch.cuda.max_memory_reserved`", "`torch.cuda.max_memory_reserved`"),
        "step_flops": ("FLOPs of a step", "一步的 FLOPs"),
        "step_seconds": ("time of a step", "一步用时"),
    },
)
def decoder_step(device: torch.device, sizes: dict[str, int] = GPT) -> dict[str, int | float]:
    """A pre-norm decoder in fp32 with Adam, second step: what the meter, `measure` and the CUDA allocator say of it.

    `max_memory_*` are the allocator's own, above what it held before the model was made.
    `allocated_between_operators_bytes` is looked up after each operator, when its workspace is free again, without the
    tokens and what libraries keep, so that `meter_blocks_peak_bytes` can be held against it. The allocator may hand out
    up to 1 MB more than a large block needs; the meter also counts the 4 bytes a parameter that Adam keeps on the CPU.
    """
    allocator = Allocator(device)
    model, tokens = decoder(device, sizes)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model.loss(tokens).backward()
        optimizer.step()

    step()  # makes the optimizer's state
    values: dict[str, int | float] = {"parameter_count": sum(p.numel() for p in model.parameters())}
    for name, block in (("meter_peak_bytes", 1), ("meter_blocks_peak_bytes", 512)):
        optimizer.zero_grad()
        with MemoryMeter(model, optimizer, block_bytes=block) as meter:
            step()
        values[name] = meter.peak_bytes
    if device.type == "cuda":
        optimizer.zero_grad()
        own = [*model.parameters(), *(t for state in optimizer.state.values() for t in state.values()), tokens]
        kept = allocator.requested() - sum(tensor.nbytes for tensor in own if tensor.is_cuda)
        with BetweenOperators(allocator) as between:
            step()
        values["kept_by_libraries_bytes"] = kept
        values["allocated_between_operators_bytes"] = between.peak_bytes - kept - tokens.nbytes
        optimizer.zero_grad()
        allocator.reset()
        step()
        values |= allocator.peaks()
    optimizer.zero_grad()
    measured = measure(step, model=model, optimizer=optimizer)
    values["allocator_peak_bytes"] = measured.allocator_peak_bytes
    values["workspace_bytes"] = measured.workspace_bytes
    for operator, count in list(measured.workspace_by_operator.items())[:5]:
        values[f"workspace_of_{operator}_bytes"] = count
    return values | {"step_flops": measured.flops, "step_seconds": measured.seconds}


@experiment(
    "01",
    "korthikanti",
    en="What a decoder layer saves in bf16: formula beside measurement",
    zh="解码器层在 bf16 下为反向保存的字节：公式与实测对照",
    small={"sequence": 32, "batch": 2, "hidden": 64, "heads": 4},
    labels={
        "saved_bytes": ("saved for backward, measured", "为反向保存，实测"),
        "predicted_bytes": ("formula with LayerNorm statistics", "公式，计入 LayerNorm 统计量"),
        "paper_bytes": ("formula of the paper, without them", "论文公式，不计统计量"),
        "difference_bytes": ("measured minus predicted", "实测减预测"),
        "statistic_bytes": ("one LayerNorm statistic", "每个 LayerNorm 统计量"),
    },
)
def korthikanti(
    device: torch.device, *, sequence: int = 1024, batch: int = 4, hidden: int = 1024, heads: int = 16
) -> dict[str, int]:
    """Bytes that one layer with dropout saves, beside s*b*h*(34 + 5*a*s/h) and the LayerNorm statistics.

    CUDA keeps those statistics in fp32 whatever the activations' dtype; a CPU keeps them in bf16.
    """
    layer = DecoderLayer(hidden, heads, dropout=0.1).to(device, torch.bfloat16)
    x = torch.zeros(batch, sequence, hidden, device=device, dtype=torch.bfloat16)
    saved = saved_tensors(layer, x)
    (statistic_bytes,) = {
        row.dtype.itemsize for row in saved if row.operator.startswith("NativeLayerNorm") and row.shape[-1] == 1
    }
    size = {"sequence": sequence, "batch": batch, "hidden": hidden, "heads": heads}
    predicted = transformer_activation_bytes(**size, statistic_bytes=statistic_bytes)
    return {
        "saved_bytes": saved.total_bytes,
        "predicted_bytes": predicted,
        "difference_bytes": saved.total_bytes - predicted,
        "paper_bytes": transformer_activation_bytes(**size),
        "statistic_bytes": statistic_bytes,
    }


@experiment(
    "01",
    "attention_sequence",
    en="Attention over sequence lengths, bf16: peak of forward and backward",
    zh="注意力随序列长度的变化（bf16）：前向加反向的峰值",
    small={"lengths": (16, 32), "hidden": 32, "heads": 4},
    labels={
        "standard_{}_tensors_bytes": ("standard, N = {}: live tensors", "标准，N = {}：存活张量"),
        "standard_{}_allocator_bytes": ("standard, N = {}: allocator", "标准，N = {}：分配器"),
        "fused_{}_tensors_bytes": ("fused, N = {}: live tensors", "融合，N = {}：存活张量"),
        "fused_{}_allocator_bytes": ("fused, N = {}: allocator", "融合，N = {}：分配器"),
    },
)
def attention_sequence(
    device: torch.device,
    *,
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096),
    batch: int = 1,
    hidden: int = 768,
    heads: int = 12,
) -> dict[str, int]:
    """Peaks of an attention layer, standard and fused, for each sequence length N: its tensors', the allocator's."""
    values = {}
    for kind in ("standard", "fused"):
        layer = Attention(hidden, heads, fused=kind == "fused").to(device, torch.bfloat16)
        for length in lengths:
            with seeded(0):
                x = torch.randn(batch, length, hidden).to(device, torch.bfloat16)
            measured = measure(lambda layer=layer, x=x: layer(x).sum().backward(), model=layer)
            values[f"{kind}_{length}_tensors_bytes"] = measured.peak_bytes
            values[f"{kind}_{length}_allocator_bytes"] = measured.allocator_peak_bytes
    return values


@experiment(
    "01",
    "monitor",
    en="The memory monitor: live, allocated and reserved through a step",
    zh="内存监视器：一个训练步中的存活、已分配与已预留",
    small={"sizes": SMALL_GPT},
    labels={
        f"{after}_{kind}_bytes": (f"after {en}: {kind_en}", f"{zh}之后：{kind_zh}")
        for after, en, zh in (
            ("model", "making the model", "建立模型"),
            ("forward", "forward", "前向"),
            ("backward", "backward", "反向"),
            ("step", "the optimizer's step", "优化器更新"),
            ("zero_grad", "zero_grad", "zero_grad "),
            ("empty_cache", "empty_cache", "empty_cache "),
        )
        for kind, kind_en, kind_zh in (
            ("live", "live", "存活"),
            ("allocated", "allocated", "已分配"),
            ("reserved", "reserved", "已预留"),
        )
    },
)
def monitor(device: torch.device, sizes: dict[str, int] = GPT) -> dict[str, int]:
    """The first training step, phase by phase: bytes of live tensors, bytes allocated, bytes reserved.

    Allocated and reserved are above what the process held before; they are the CUDA allocator's, so a CPU has none.
    """
    allocator = Allocator(device)
    values: dict[str, int] = {}

    with MemoryMeter() as meter:

        def note(after: str) -> None:
            values[f"{after}_live_bytes"] = meter.live_bytes
            if device.type == "cuda":
                values[f"{after}_allocated_bytes"] = allocator.allocated()
                values[f"{after}_reserved_bytes"] = allocator.reserved()

        model, tokens = decoder(device, sizes)
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
    return values


def decoder(device: torch.device, sizes: dict[str, int]) -> tuple[nn.Module, Tensor]:
    """A decoder and the tokens of one step, on the device."""
    model = Decoder(**{name: size for name, size in sizes.items() if name != "batch"}).to(device)
    tokens = random_tokens(sizes["batch"], sizes["sequence"], sizes["vocabulary"]).to(device)
    gc.collect()  # the parameters' CPU twins, where modules refer to each other
    return model, tokens


class Allocator:
    """The CUDA allocator's counters, above what they were when this was made; needs no GPU until it is asked."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.allocated_before = self.reserved_before = self.requested_before = 0
        gc.collect()
        if device.type == "cuda":
            torch.cuda.init()
            torch.cuda.empty_cache()
            self.allocated_before, self.reserved_before = self.allocated(), self.reserved()
            self.requested_before = self.requested()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) - self.allocated_before

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self.device) - self.reserved_before

    def requested(self) -> int:
        """The same as allocated, without what the allocator adds to each request."""
        return torch.cuda.memory_stats(self.device)["requested_bytes.all.current"] - self.requested_before

    def reset(self) -> None:
        """Forget the peaks so far, and give back what lies unused, so that it is not counted as reserved."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def peaks(self) -> dict[str, int]:
        requested = torch.cuda.memory_stats(self.device)["requested_bytes.all.peak"]
        return {
            "max_memory_allocated_bytes": torch.cuda.max_memory_allocated(self.device) - self.allocated_before,
            "max_memory_reserved_bytes": torch.cuda.max_memory_reserved(self.device) - self.reserved_before,
            "max_memory_requested_bytes": requested - self.requested_before,
        }


class BetweenOperators(TorchDispatchMode):
    """The most bytes the CUDA allocator has handed out at the end of an operator, when its workspace is free again."""

    def __init__(self, allocator: Allocator) -> None:
        super().__init__()
        self.allocator, self.peak_bytes = allocator, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.peak_bytes = max(self.peak_bytes, self.allocator.allocated())
        return result
