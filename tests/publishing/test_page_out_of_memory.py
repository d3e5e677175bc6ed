"""Test the page "Out of memory: what now?": run its code and measure its numbers again."""

import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from course_lib.memory import MemoryMeter

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


def test_meter_output_equals_output_on_page(baseline, capsys):
    names = example()
    exec(BLOCKS["2. find what fills the peak"][0], names)
    assert f"```\n{capsys.readouterr().out}```\n" in PAGE
    assert names["meter"].peak_bytes == baseline[0].peak_bytes


def test_code_line_on_page_switches_eager_attention_to_sdpa():
    names = example(attn_implementation="eager")
    [peak] = re.findall(r"the example peaks at ([\d.]+) MB\.\sAfter this line", PAGE)
    assert f"{measured(names)[0].peak_bytes / 1e6:.1f}" == peak
    exec(BLOCKS["attention scores"][0], names)
    assert names["model"].config._attn_implementation == "sdpa"


def test_evaluation_peaks_with_and_without_gradients_equal_page():
    found = []
    for code in ("loss = model(**batch).loss", BLOCKS["evaluation"][0]):
        names = example()
        with MemoryMeter(names["model"]) as meter:
            exec(code, names)
        found.append(f"{meter.peak_bytes / 1e6:.1f}")
    assert re.findall(r"peak at\s([\d.]+) MB\. With this code, they peak at ([\d.]+) MB", PAGE) == [
        tuple(found)
    ]
