"""Test the page "Other models": run its code and measure its numbers again."""

import re
import tempfile
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from course_lib.budget import Recipe, estimate
from course_lib.configs import model_from
from course_lib.lessons.lesson_09 import exercises
from course_lib.memory import MemoryMeter
from course_lib.models import random_tokens

PAGE = (Path(__file__).parents[2] / "docs/models.md").read_text("utf-8")
ROWS = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE, re.M))


@pytest.fixture(scope="module")
def names():
    """Return the names that the page's code defines."""
    defined = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S):
        exec(block, defined)
    return defined


@pytest.mark.parametrize("kind", ["roformer", "pegasus", "fnet"])
def test_peak_of_each_model_equals_number_on_page(names, kind):
    predicted, measured = names["peaks"](kind)
    assert predicted == measured
    assert ROWS[kind] == f"{predicted:,} | {measured:,}"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_peak_with_optimizer_step_in_backward_equals_number_on_page(kind):
    config = {**exercises.CONFIG_8B, "num_hidden_layers": 8}
    step = (
        partial(model_from, config, sequence=4096),
        partial(random_tokens, 1, 4096, config["vocab_size"]),
    )
    recipes = [Recipe("bf16", attention="flash", in_backward=each) for each in (False, True)]
    found = [estimate(*step, recipe, kind=kind).peak_bytes / 1e9 for recipe in recipes]
    assert ROWS[kind] == " | ".join(f"{peak:.1f}" for peak in found)


def peak_in_trainer(model, arguments):
    """Return the peak of two steps in Hugging Face's Trainer; the first creates Adam's state."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    batch = exercises.passages(0)
    rows = [{name: each[i] for name, each in batch.items()} for i in range(4)] * 2
    quiet = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no"}
    with tempfile.TemporaryDirectory() as folder:
        settings = {"max_steps": 2, "use_cpu": True, "disable_tqdm": True, **quiet, **arguments}
        trainer = Trainer(model, TrainingArguments(folder, **settings), train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        with MemoryMeter(model) as meter:
            trainer.train()
    return meter.peak_bytes


def test_trainer_peak_equals_number_on_page(names):
    pytest.importorskip("accelerate")
    make = partial(exercises.model_of, exercises.LLAMA)
    lines = names["lines"]
    with_page_recipe, with_trainer_recipe = (
        estimate(make, lambda: exercises.passages(0), each).peak_bytes
        for each in (names["recipe"], lines.recipe)
    )
    peak = peak_in_trainer(make(), lines.arguments)
    sentences = r"this recipe is ([\d.]+) MB.*? peak at ([\d.]+) MB.*? ([\d,]+) bytes more"
    numbers = (
        f"{with_page_recipe / 1e6:.1f}",
        f"{peak / 1e6:.1f}",
        f"{peak - with_trainer_recipe:,}",
    )
    assert re.findall(sentences, PAGE, re.S) == [numbers]


def test_kv_cache_bytes_equal_formula_and_number_on_page(names):
    model, tokens = exercises.model_of(exercises.LLAMA), exercises.passages(0)["input_ids"]
    found = names["cache_bytes"](exercises.LLAMA, *tokens.shape, 4)
    assert found == names["held_bytes"](model, tokens)
    weights = sum(each.nbytes for each in model.parameters())
    large = exercises.CONFIG_8B
    per_token = names["cache_bytes"](large, 1, 1, 2)
    full = names["cache_bytes"]({**large, "num_key_value_heads": 32}, 1, 8192, 2)
    for number in (
        f"{found:,} bytes. The weights of this model take {weights / 1e6:.1f} MB",
        f"gives {per_token:,} bytes per token",
        f"takes {8192 * per_token / 1e9:.2f} GB",
        f"would take {full / 1e9:.2f} GB",
    ):
        assert number in " ".join(PAGE.split())
