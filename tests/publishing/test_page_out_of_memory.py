"""Test the page "Out of memory: what now?": run its code and measure its numbers again."""

import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from course_lib.memory import CachingAllocator, MemoryMeter, symbolic
from course_lib.symbolic import Symbolic

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
transformers = pytest.importorskip("transformers")
if find_spec("bitsandbytes") is None:  # its import, in the tests, loads the compiler of torch
    pytest.skip("the page needs bitsandbytes", allow_module_level=True)
pytest.importorskip("peft", reason="the page needs peft")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/out_of_memory.md").read_text("utf-8")
# heading in small letters -> the blocks of Python below it
BLOCKS = {
    part.partition("\n")[0].lower(): re.findall(r"^```python\n(.*?)^```", part, re.M | re.S)
    for part in re.split(r"^#+ ", PAGE, flags=re.M)[1:]
}


def llama(**options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 4096, "hidden_size": 128, "intermediate_size": 352}
    sizes |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"max_position_embeddings": 1024, "use_cache": False}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | options)))


def example(**options):
    """Return the names that the page's code uses."""
    model = llama(**options)
    tokens = torch.randint(4096, (4, 128), generator=torch.Generator().manual_seed(0))
    return {
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "batch": {"input_ids": tokens, "labels": tokens},
    }


def steps_of(names, *blocks):
    """Return the source of the backward pass, and of the whole step with these blocks.

    A block with a backward pass is part of each step; any other block runs once, here.
    """
    step = "model(**batch).loss.backward()"
    for block in blocks:
        if ".backward()" in block:
            step = block
        else:
            exec(block, names)
    backward, updates, _ = step.partition("optimizer.step()")
    return backward, step if updates else step + "\noptimizer.step()\noptimizer.zero_grad()"


def measured(names, *blocks):
    """Return the meter and FLOPs of the second step; the first creates the optimizer's state."""
    step = partial(exec, steps_of(names, *blocks)[1], names)
    step()
    with MemoryMeter(names["model"], names["optimizer"]) as meter:
        step()
    return meter, meter.flops


@pytest.fixture(scope="module")
def baseline():
    return measured(example())


# remedy, peak in MB and FLOPs of each row; no remedy is linked in the first
ROWS = r"^\| [^|]+ \| (?:\[(.+)\]\(#.+\)|[^|]+) \| ([\d.]+) \| ([\d.]+) \|"


@pytest.mark.parametrize(("remedy", "peak", "flops"), re.findall(ROWS, PAGE, re.M))
def test_peak_and_flops_of_remedy_equal_table_row(baseline, remedy, peak, flops):
    # the page shows two equal forms of checkpoints
    forms = BLOCKS[remedy][: 1 + (remedy == "checkpoints")] if remedy else []
    for meter, counted in [measured(example(), block) for block in forms] or [baseline]:
        assert f"{meter.peak_bytes / 1e6:.1f}" == peak
        assert f"{counted / baseline[1]:.2f}" == flops


@pytest.mark.parametrize(
    ("remedies", "sentence"),
    [
        (["quantized base", "checkpoints"], r"in addition, the example peaks at ([\d.]+) MB()"),
        (["checkpoints", "chunked loss"], r"peaks at ([\d.]+) MB for ([\d.]+) times the FLOPs"),
    ],
)
def test_peak_and_flops_of_combined_remedies_equal_numbers_on_page(baseline, remedies, sentence):
    meter, flops = measured(example(), *(BLOCKS[each][0] for each in remedies))
    [(peak, ratio)] = re.findall(sentence, PAGE)
    assert f"{meter.peak_bytes / 1e6:.1f}" == peak
    assert ratio in ("", f"{flops / baseline[1]:.2f}")


def gradients_after(*blocks):
    names = example()
    exec(steps_of(names, *blocks)[0], names)
    return [parameter.grad for parameter in names["model"].parameters()]


def test_out_of_memory_remedies_do_not_change_gradients():
    plain = gradients_after()
    for block in BLOCKS["checkpoints"]:
        assert all(map(torch.equal, plain, gradients_after(block)))
    for remedy in ("micro-batches", "chunked loss"):
        for ours, theirs in zip(plain, gradients_after(*BLOCKS[remedy]), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


def test_pytorch_chunked_loss_named_on_page_gives_same_loss():
    (name, options) = re.findall(r"`((?:options=)?torch\.nn\.\w[\w.]+(?:\(\))?)`", PAGE)
    names = example()
    block = BLOCKS["chunked loss"][0].replace(".backward()", "")
    exec(block.replace("checkpointed_loss(h", "ours = checkpointed_loss(h"), names)
    exec(f"theirs = {name}(hidden, model.lm_head.weight, targets, {options})", names)
    torch.testing.assert_close(names["ours"], names["theirs"])


def test_adam_state_bytes_per_parameter_equal_number_on_page(baseline):
    names = example()
    small, _ = measured(names, BLOCKS["8-bit state"][0])
    count = sum(each.numel() for each in names["model"].parameters())
    states = [meter.at_peak()["optimizer"] for meter in (baseline[0], small)]
    numbers = re.search(r"keeps (\d) bytes .* about (\d)", PAGE).groups()
    assert [f"{state / count:.0f}" for state in states] == [*numbers]


def test_8_bit_optimizer_state_starts_at_tensor_size_on_page():
    (limit,) = map(int, re.findall(r"in tensors of at least (\d+) elements", PAGE))
    import bitsandbytes

    def dtype_of_state(count):
        weight = torch.nn.Parameter(torch.ones(count))
        weight.grad = torch.ones(count)
        optimizer = bitsandbytes.optim.AdamW8bit([weight])
        optimizer.step()
        return optimizer.state[weight]["state1"].dtype

    assert [dtype_of_state(limit - 1), dtype_of_state(limit)] == [torch.float32, torch.uint8]


def test_transformers_deprecation_warning_names_replacement_given_on_page():
    (name,) = re.findall(r"now called `(\w+)`", PAGE)
    with pytest.warns(FutureWarning, match=name):
        exec(BLOCKS["checkpoints"][0], example())


def test_meter_output_equals_output_on_page(baseline, capsys):
    names = example()
    exec(BLOCKS["2. find what fills the peak"][0], names)
    assert f"```\n{capsys.readouterr().out}```\n" in PAGE
    assert names["meter"].peak_bytes == baseline[0].peak_bytes


def test_code_line_on_page_switches_eager_attention_to_sdpa():
    names = example(attn_implementation="eager")
    [peak] = re.findall(r"the example peaks at ([\d.]+) MB\. After this line", PAGE)
    assert f"{measured(names)[0].peak_bytes / 1e6:.1f}" == peak
    exec(BLOCKS["attention scores"][0], names)
    assert names["model"].config._attn_implementation == "sdpa"


def test_sdpa_saves_attention_scores_in_cases_named_on_page():
    def peak(kind="cpu", **options):
        with symbolic(Symbolic(kind=kind)):
            return measured(example(**options))[0].peak_bytes

    keeps_scores = peak(attn_implementation="eager")
    assert peak() < keeps_scores == peak("cuda") > peak("cuda", num_key_value_heads=4)
    assert peak(attention_dropout=0.1) > keeps_scores


def test_evaluation_peaks_with_and_without_gradients_equal_page():
    found = []
    for code in ("loss = model(**batch).loss", BLOCKS["evaluation"][0]):
        names = example()
        with MemoryMeter(names["model"]) as meter:
            exec(code, names)
        found.append(f"{meter.peak_bytes / 1e6:.1f}")
    assert re.findall(r"peak at ([\d.]+) MB, and at ([\d.]+) MB", PAGE) == [tuple(found)]


def test_fragmentation_by_growing_batches_equals_numbers_on_page():
    sizes = {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8}
    with symbolic(), MemoryMeter() as meter:
        model = llama(**sizes)
        optimizer = torch.optim.AdamW(model.parameters())
        for length in (512, 640, 768, 896, 1024):
            tokens = torch.randint(32000, (4, length))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    (setting,) = re.findall(r"PYTORCH_CUDA_ALLOC_CONF=(\w+):True", PAGE)
    stats = []
    for allocator in (CachingAllocator(), CachingAllocator(**{setting: True})):
        allocator.replay(meter.trace())
        stats.append(allocator.memory_stats())
    found = [stats[0]["allocated_bytes.all.peak"]]
    found += [each["reserved_bytes.all.peak"] for each in stats]
    numbers = re.findall(r"([\d,]+) MB", PAGE[PAGE.index("### Fragmentation") :])[:3]
    assert numbers == [f"{count / 1e6:,.0f}" for count in found]
