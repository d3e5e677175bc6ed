"""Lesson 04: its exercises, its claims, and offloading on a GPU."""

import gc
import time
import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu

from course_lib._torch import wait_for
from course_lib.offload import OffloadedOptimizer, offload_activations
from course_lib.teaching import Claim, Verdict, expect_number
from course_lib.teaching.exercises import exercise, right, wrong
from course_lib.teaching.experiments import TINY, Number, decoder_and_tokens, experiment, measured

#: What learners may have read.
CLAIMS = (
    Claim(
        (
            "An autograd function that copies its input to the CPU offloads the activation.",
            "用 autograd 函数把输入拷贝到 CPU，就卸载了激活值。",
        ),
        (
            "gradient against plain; bytes in the graph without it and with it",
            "梯度与普通做法之比；不用它和用它时计算图里的字节",
        ),
        (
            "No: the next operator keeps the same storage, and this one doubles the gradient.",
            "不对：下一个算子仍持有同一份存储，这个函数还使梯度翻倍。",
        ),
        outcome="fails",
    ),
    Claim(
        (
            '`value.to("cpu")` over `optimizer.state` offloads the optimizer.',
            '对 `optimizer.state` 里的值逐个调用 `value.to("cpu")`，就卸载了优化器。',
        ),
        ("state tensors still at their old addresses", "状态张量是否都还在原来的地址"),
        (
            "No: on a GPU `.to` returns a copy (here: `copy=True`), and nobody keeps it.",
            "不对：在 GPU 上 `.to` 返回一份拷贝（这里用 `copy=True`），却没有谁留住它。",
        ),
        outcome="fails",
    ),
    Claim(
        (
            "This prefetcher works: it loads the first batch in `__init__`.",
            "这个预取器能用：它在 `__init__` 里就加载第一个批次。",
        ),
        ("what it says when it is made", "创建时的报错"),
        (
            "No: it asks an iterator that `__iter__` has yet to make.",
            "不对：它要用的迭代器，`__iter__` 还没有创建。",
        ),
        outcome="fails",
    ),
    Claim(
        (
            "Make the causal mask with `nn.Transformer().generate_square_subsequent_mask(n)`.",
            "用 `nn.Transformer().generate_square_subsequent_mask(n)` 生成因果掩码。",
        ),
        ("peak of that, and of the static method alone, n = 512", "它的峰值，以及只用静态方法的峰值，n = 512"),
        (
            "It makes 44 million parameters and throws them away, at every call.",
            "每次调用都会造出 4400 万个参数再扔掉。",
        ),
        outcome="partly",
    ),
)

# Exercises ------------------------------------------------------------------------------------------------------------


def check_hiding_intensity(answer: Any) -> Verdict:
    """Lesson 04: the least FLOPs a byte at which copies over PCIe 5 (63 GB/s) hide behind 400 TFLOP/s."""
    right = 400e12 / 63e9
    return expect_number(
        answer,
        right,
        tolerance=0.01,
        wrong_answers={
            1 / right: ("That is bytes a FLOP.", "这是每 FLOP 的字节数。"),
            right / 1000: (
                "Mind the units: TFLOP/s and GB/s differ by a thousand.",
                "注意单位：TFLOP/s 与 GB/s 差一千倍。",
            ),
            right / 2: ("63 GB/s is one way already.", "63 GB/s 已经是单向带宽。"),
            2 * right: ("63 GB/s is one way already.", "63 GB/s 已经是单向带宽。"),
            989e12 / 63e9: ("That is for 989 TFLOP/s.", "这是 989 TFLOP/s 时的值。"),
        },
        why=("400e12 / 63e9: the rate over the bandwidth.", "400e12 / 63e9：算力除以带宽。"),
        hint=("The copy takes m / w, the compute f / r.", "拷贝需要 m / w，计算需要 f / r。"),
    )


@exercise(hint=("At least 65 MB must go. Which sum comes nearest?", "至少要搬走 65 MB。哪几份加起来最接近？"))
def check_what_goes_down(answer: Any) -> Verdict:
    """Which of the storages of 40, 10, 30, 20, 10 MB go down, for 45 MB above and the fewest bytes moved."""
    sizes, most, least = (40, 10, 30, 20, 10), 45, 70
    given = answer if isinstance(answer, set | frozenset | list | tuple) else [None]
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < len(sizes) for i in given):
        return wrong("Give a set of numbers from 0 to 4.", "请给出由 0 到 4 的编号组成的集合。")
    down = set(given)
    if 4 in down:
        return wrong("The last one must stay: backward needs it first.", "最后一份必须留下：反向最先用到它。")
    moved = sum(sizes[i] for i in down)
    above = sum(sizes) - moved
    if above > most:
        return wrong(f"{above} MB are still above.", f"上面还有 {above} MB。")
    if moved > least:
        return wrong(f"It fits, but {moved} MB move; fewer are enough.", f"装得下，但搬了 {moved} MB，可以更少。")
    return right(f"Right: {moved} MB move, {above} MB stay.", f"正确：搬走 {moved} MB，留下 {above} MB。")


@exercise(
    hint=(
        "Pack appends a copy and returns its place; unpack looks there.",
        "pack 追加一份拷贝，返回它的位置；unpack 到那里去取。",
    )
)
def check_offloading(function: Any) -> Verdict:
    """`offloading(store)`, hooks that move what is saved into a list and let it go, with right gradients."""
    x = torch.linspace(-1, 1, 4096).view(64, 64).requires_grad_()
    saved = []  # weak references to the storages: what nobody holds any longer is gone

    def run(context: AbstractContextManager) -> torch.Tensor:
        with context:
            y = x * 2
            sine, power = y.sin(), y.t().exp()
            saved[:] = [weakref.ref(tensor.untyped_storage()) for tensor in (y, sine, power)]
            return (sine * power).sum()

    (expected,) = torch.autograd.grad(run(torch.enable_grad()), x)
    store: list = []
    out = run(function(store))
    before = len(store)
    owned = [t.untyped_storage().data_ptr() for t in store if isinstance(t, torch.Tensor)]
    gc.collect()  # the answer's own objects may refer to each other
    held = sum(storage() is not None for storage in saved)
    out.backward()
    if not before:
        return wrong("Nothing is in the store; the graph keeps everything.", "store 里什么也没有，全留在计算图里。")
    if before < 4:
        return wrong(f"Only {before} tensors of 4 went into the store.", f"4 个张量中只有 {before} 个进了 store。")
    if len(owned) < before or len(set(owned)) < before:
        return wrong(
            "The store holds the very tensors, not copies: nothing could be freed.",
            "store 里是原来的张量，不是拷贝：什么也释放不了。",
        )
    if x.grad is None or not torch.equal(x.grad, expected):
        return wrong("The gradient is wrong.", "梯度不对。")
    if held:
        return wrong(
            f"There are copies in the store, but {held} of 3 storages are still held after forward: nothing is freed.",
            f"store 里有拷贝，但前向之后 3 份存储中仍有 {held} 份被持有：什么也没有释放。",
            _RETURN_THE_PLACE,
        )
    return right(f"Right: {before} tensors below, and the same gradient.", f"正确：{before} 个张量在下一级，梯度相同。")


_RETURN_THE_PLACE = (
    "What `pack` returns stays in the graph: return the place in the store, and keep the tensor nowhere else.",
    "`pack` 返回什么，计算图就留下什么：只返回它在 store 里的位置，别处也不要留着这个张量。",
)


# GPU experiments ------------------------------------------------------------------------------------------------------


@experiment(
    title=(
        "A decoder's forward and backward pass: plain, offloaded, and with torch's save_on_cpu",
        "解码器的前向与反向：普通、卸载，以及 torch 的 save_on_cpu",
    ),
    sizes={"vocabulary": 8192, "hidden": 2048, "heads": 16, "layers": 8, "sequence": 2048, "batch": 4},
    small=TINY,
    arms={
        "plain": ("plain", "普通"),
        "offloaded": ("offloaded", "卸载"),
        "save_on_cpu": ("save_on_cpu", "save_on_cpu"),
    },
)
def offloaded_activations(device: torch.device, **sizes: int) -> dict[str, Number]:
    model, tokens = decoder_and_tokens(device, **sizes, fused=True)

    def step(context: AbstractContextManager) -> None:
        with context:
            loss = model.loss(tokens)
        loss.backward()

    pinned = device.type == "cuda"
    return (
        measured("plain", lambda: step(torch.enable_grad()), model=model)
        | measured("offloaded", lambda: step(offload_activations(min_bytes=1 << 10)), model=model)
        | measured("save_on_cpu", lambda: step(save_on_cpu(pin_memory=pinned)), model=model)
    )


@experiment(
    title=(
        "A training step of a decoder with AdamW: its state on the device, and in host memory",
        "解码器用 AdamW 的一个训练步：状态在设备上，以及在主机内存里",
    ),
    sizes={"vocabulary": 8192, "hidden": 1024, "heads": 16, "layers": 8, "sequence": 512, "batch": 4},
    small=TINY,
    arms={"plain": ("on the device", "在设备上"), "offloaded": ("in host memory", "在主机内存")},
    labels={"state_bytes": ("8 bytes a parameter", "每参数 8 字节")},
)
def offloaded_optimizer(device: torch.device, **sizes: int) -> dict[str, Number]:
    values: dict[str, Number] = {}
    for name, kind in (("plain", torch.optim.AdamW), ("offloaded", OffloadedOptimizer)):
        model, tokens = decoder_and_tokens(device, **sizes)
        optimizer = kind(model.parameters(), lr=1e-4)

        def step(model=model, optimizer=optimizer, tokens=tokens) -> None:
            model.loss(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

        values |= measured(name, step, model=model, optimizer=optimizer)
        values["state_bytes"] = 8 * sum(parameter.numel() for parameter in model.parameters())
    return values


@experiment(
    title=(
        "A non-blocking copy up, from pinned and from pageable memory",
        "向上的非阻塞拷贝：分别来自锁页内存和可分页内存",
    ),
    sizes={"megabytes": 256},
    small={"megabytes": 1},
    labels={
        "copied_bytes": ("copied", "拷贝"),
        "pinned_call_seconds": ("pinned: until the call returns", "锁页：到调用返回"),
        "pinned_seconds": ("pinned: until the copy is done", "锁页：到拷贝完成"),
        "pageable_call_seconds": ("pageable: until the call returns", "可分页：到调用返回"),
        "pageable_seconds": ("pageable: until the copy is done", "可分页：到拷贝完成"),
    },
)
def pinned_copies(device: torch.device, *, megabytes: int) -> dict[str, Number]:
    source = torch.ones(megabytes * 10**6, dtype=torch.uint8)
    sources = {"pinned": source.pin_memory() if device.type == "cuda" else source, "pageable": source}
    values: dict[str, Number] = {"copied_bytes": source.nbytes}
    for name, block in sources.items():
        for _ in range(3):  # the last one counts
            wait_for(device)
            start = time.perf_counter()
            block.to(device, non_blocking=True)
            values[f"{name}_call_seconds"] = time.perf_counter() - start
            wait_for(device)
            values[f"{name}_seconds"] = time.perf_counter() - start
    return values
