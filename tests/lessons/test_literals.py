"""Numbers and names in prose that no cell computes, compared with their sources.

A number's source is a recording, a table in `tests`, `RATES`, or a version pin. A name's source is
the installed package."""

import ast
import importlib
import inspect
import json
import re
from contextlib import suppress
from pathlib import Path

import pytest
from gpu_training_steps import STEPS

from course_lib.budget import RATES

ROOT = Path(__file__).parents[2]
PAGES = ["README*.md", "docs/*.md", "notebooks/scripts/*.py", "notebooks/INSTRUCTORS.md"]
# In a script, a comment's mark and a line break are not parts of the prose.
TEXTS = {
    path: re.sub(r"\s+", " ", re.sub(r"^# ?", "", path.read_text("utf-8"), flags=re.M))
    for pattern in PAGES
    for path in sorted(ROOT.glob(pattern))
}
NUMBER = r"(\d[\d,.]*\d|\d)"


# Numbers
# ----------------------------------------------------------------------------------------------


def experiments_of(gpu):
    name = {"H100": "nvidia-h100-80gb-hbm3", "H200": "nvidia-h200"}[gpu]
    path = ROOT / f"course_lib/recordings/{name}.json"
    return json.loads(path.read_text("utf-8"))["experiments"]


def recorded(gpu, lesson, experiment):
    return experiments_of(gpu)[lesson][experiment]["figures"]


def versions():
    """The versions of torch, CUDA and Triton of the recordings."""
    (version,) = {
        (run["torch"].rpartition(".")[0], run["cuda"], run["triton"].rpartition(".")[0])
        for gpu in ("H100", "H200")
        for lesson in experiments_of(gpu).values()
        for run in lesson.values()
    }
    return version


def times(figures, name):
    """Return a step's time divided by the baseline's."""
    return figures[f"{name}_seconds"] / figures["plain_seconds"]


def percent_above_one(ratio):
    return f"{ratio - 1:.0%}"[:-1]


def gb(count):
    return f"{count / 1e9:.1f}"


def milliseconds(seconds, digits=2):
    return f"{1000 * seconds:.{digits}f}"


def pin(package):
    """The pinned version, without its last part."""
    pins = (ROOT / "constraints.txt").read_text("utf-8")
    return re.search(rf"^{package}==(\d+\.\d+)", pins, re.M).group(1)


CSV_ROWS = len((ROOT / "tests/tools/h200_steps.csv").read_text("utf-8").splitlines()) - 1
TOO_HIGH = 11  # of the steps on a GPU; which ones are is tested on a GPU, by `test_budget_on_gpu`
ALL, EXACT = str(len(STEPS)), str(len(STEPS) - TOO_HIGH)
DISK, SPEED = RATES["laptop"].link_bytes, RATES["laptop"].fp32_flops
OFFLOAD = recorded("H200", "04", "offloaded_activations")
COPIES = recorded("H200", "04", "pinned_copies")
KERNELS = recorded("H200", "06", "attention_forward_and_backward")
PARTS = {gpu: recorded(gpu, "05", "pieces_of_a_batch") for gpu in ("H100", "H200")}
SCHEDULES = {gpu: recorded(gpu, "03", "scheduled_decoder") for gpu in ("H100", "H200")}
STEP = recorded("H200", "01", "decoder_step")
RECIPES = [
    recorded("H200", "07", "three_recipes")[f"{name}_predicted_bytes"]
    for name in ("plain", "forgetful", "least")
]

#: (English phrase, Chinese phrase, numbers in the places of #)
CLAIMS = [
    ("In # of # training steps", None, EXACT, ALL),
    (None, "# 个训练步里，有 # 个", ALL, EXACT),
    ("Of # smaller steps on an H200, # took", "运行过 # 个较小的训练步，其中 # 个", ALL, EXACT),
    ("with # training steps on H200s. For # of", "上的 # 个训练步核对过。有 # 个", ALL, EXACT),
    ("# estimates are up to 12 kB too high", "其余 # 个训练步的估计偏高", TOO_HIGH),
    ("stores # of the steps", "存有其中 # 个训练步", CSV_ROWS),
    ("repeats all #", "重新运行全部 # 个", ALL),
    ("RTX 4090 of # GB", "换成 # GB 的 RTX 4090", gb(RATES["RTX 4090"].memory_bytes)),
    ("in fact # GB", "实际内存 # GB", gb(RATES["H200"].memory_bytes)),
    (
        "has # GFLOP/s and a disk of # GB/s",
        "算力是 # GFLOP/s，磁盘速率是 # GB/s",
        f"{SPEED / 1e9:.0f}",
        f"{DISK / 1e9:.0f}",
    ),
    (
        "thresholds of an H100 with # TFLOP/s",
        "一块 H100（稠密 bf16，# TFLOP/s）",
        f"{RATES['H100'].bf16_flops / 1e12:.0f}",
    ),
    (
        "meter's peak of the training step is # MB",
        "按计量器是 # MB",
        f"{STEP['meter_peak_bytes'] / 1e6:,.1f}",
    ),
    (
        "lowers the peak from # GB to # GB",
        "卸载把峰值从 # GB 降到 # GB",
        f"{OFFLOAD['plain_peak_bytes'] / 1e9:.1f}",
        f"{OFFLOAD['offloaded_peak_bytes'] / 1e9:.1f}",
    ),
    (
        "why does the step with offload still take #% longer",
        "这一步还是多花 #% 的时间？写下",
        percent_above_one(times(OFFLOAD, "offloaded")),
    ),
    (
        "returns after # ms, and from pageable memory only after # ms",
        "调用 # ms 就返回；从可分页内存拷贝，要 # ms",
        milliseconds(COPIES["pinned_call_seconds"]),
        milliseconds(COPIES["pageable_call_seconds"], 1),
    ),
    *(
        (
            "#% longer on the H200 and #% longer on the H100. With a quarter, it takes #% longer",
            "在 H200 上多花 #% 的时间，在 H100 上多花 #%；限制在四分之一时，在两块卡上都多花 #%",
            percent_above_one(times(SCHEDULES["H200"], "half")),
            percent_above_one(times(SCHEDULES["H100"], "half")),
            percent_above_one(times(figures, "quarter")),
        )
        for figures in SCHEDULES.values()
    ),
    *(
        (
            "step in fp16 takes # times",
            "都是一次算完整个批次所需时间的 # 倍",
            f"{figures['one_seconds'] / figures['all_seconds']:.1f}",
        )
        for figures in PARTS.values()
    ),
    (
        "micro-batch of 1, 4 or 16 samples takes #, # or # ms.",
        "1、4、16 个样本时，分别用时 #、#、# ms。",
        *(
            f"{1000 * PARTS['H200'][f'{size}_seconds'] / count:.1f}"
            for size, count in (("one", 16), ("quarter", 4), ("all", 1))
        ),
    ),
    (
        "kernels take # ms, PyTorch's FlashAttention takes # ms",
        "核函数用时 # ms，PyTorch 的 FlashAttention 用时 # ms",
        milliseconds(KERNELS["course_seconds"]),
        milliseconds(KERNELS["flash_seconds"]),
    ),
    ("on this GPU, takes # ms", "默认选择）用时 # ms", milliseconds(KERNELS["cudnn_seconds"])),
    ("three estimates, #, # and # GB", "三个估计值是 #、# 和 # GB", *map(gb, RECIPES)),
    ("`transformers` 5.# ", None, pin("transformers")[2:]),
    ("Hugging Face 5.# ", None, pin("transformers")[2:]),
    ("with torch #, CUDA # and Triton #.", "版本都是 torch #、CUDA # 和 Triton #。", *versions()),
    ("according to PyTorch #'s code", "根据 PyTorch # 的代码", pin("torch")),
]


PHRASES = [
    (phrase, tuple(map(str, numbers)))
    for *both, numbers in ((one, other, rest) for one, other, *rest in CLAIMS)
    for phrase in both
    if phrase
]


@pytest.mark.parametrize(("phrase", "numbers"), PHRASES)
def test_numbers_in_prose_equal_computed_values(phrase, numbers):
    pattern = NUMBER.join(re.escape(part) for part in phrase.split("#"))
    found = [
        (path, match.groups())
        for path, text in TEXTS.items()
        for match in re.finditer(pattern, text)
    ]
    assert found, "no text has this phrase: edit its row, or remove it"
    assert [place for place in found if place[1] != numbers] == [], f"the source says {numbers}"


# Names of arguments
# ----------------------------------------------------------------------------------------------

#: a class or function whose calls occur in prose -> its module
CALLED = {
    "TrainingArguments": "transformers",
    "BitsAndBytesConfig": "transformers",
    "LoraConfig": "peft",
    "AdamW8bit": "bitsandbytes.optim",
    "PagedAdamW8bit": "bitsandbytes.optim",
    "SFTConfig": "trl",
    "DistributedDataParallel": "torch.nn.parallel",
    "fully_shard": "torch.distributed.fsdp",
    "MixedPrecisionPolicy": "torch.distributed.fsdp",
    "CPUOffloadPolicy": "torch.distributed.fsdp",
    "save_on_cpu": "torch.autograd.graph",
}


def arguments_in(text, name):
    """The names of the arguments with which a text calls a function or class."""
    for match in re.finditer(rf"\b{name}\(", text):
        call = text[match.start() : match.start() + 400].replace("…", "...")
        yield from (keyword.arg for keyword in parsed(call).keywords if keyword.arg)


def parsed(text):
    """The call with which a text begins: up to the first parenthesis that completes it."""
    for end in re.finditer(r"\)", text):
        with suppress(SyntaxError):
            return ast.parse(text[: end.end()], mode="eval").body
    raise AssertionError(f"not a call: {text}")


def is_deprecated(called, argument):
    """Whether the documentation of an argument begins with the word, or its field says so."""
    field = getattr(called, "__dataclass_fields__", {}).get(argument)
    if field and "deprecated" in str(field.metadata.get("help", "")).lower():
        return True
    entry = rf"^ *{argument}\b[^\n]*\n?[^\n]*\bdeprecated\b"
    return bool(re.search(entry, inspect.getdoc(called) or "", re.M | re.I))


@pytest.mark.parametrize("name", CALLED)
def test_function_arguments_named_in_prose_exist_and_are_not_deprecated(name):
    places = [path for path, text in TEXTS.items() if f"{name}(" in text]
    assert places, "no text calls it: remove its row"
    pytest.importorskip(CALLED[name].partition(".")[0])
    called = getattr(importlib.import_module(CALLED[name]), name)
    parameters = inspect.signature(called).parameters
    for path in places:
        for argument in arguments_in(TEXTS[path], name):
            assert argument in parameters and not is_deprecated(called, argument), (path, argument)
