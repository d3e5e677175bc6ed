"""The project of notebook 10 runs with models that the course does not use.

Each model replaces the fill-ins, and all other cells run unchanged.
"""

from copy import copy
from dataclasses import replace

import pytest
import torch
from test_notebooks import FOLDER, jupytext
from torch import nn
from torch.nn import functional as F

from course_lib.budget import estimate, run
from course_lib.lessons.lesson_10 import project
from course_lib.lessons.lesson_10.project import AS_IT_IS, Difference, Sheet

SCRIPT = FOLDER / "scripts" / "10_your_model.py"


def cells_of_the_project():
    """Return the code of all cells but the switch of languages and the fill-ins."""
    cells = jupytext.read(SCRIPT, fmt="py:percent").cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert sum("fill-in" in cell.metadata.get("tags", ()) for cell in code) == 4
    return [
        cell.source
        for cell in code
        if "fill-in" not in cell.metadata.get("tags", ()) and "language()" not in cell.source
    ]


def seeded(step):
    return torch.Generator().manual_seed(step)


def tokens(step, samples=4, length=32, words=300):
    x = torch.randint(words, (samples, length), generator=seeded(step))
    return {"input_ids": x, "labels": x}


class UNet(nn.Module):
    """Convolutions with BatchNorm, and no list of blocks."""

    def __init__(self):
        super().__init__()
        self.down, self.middle, self.up = self.conv(3, 16), self.conv(16, 16), self.conv(32, 16)
        self.wider, self.out = nn.ConvTranspose2d(16, 16, 2, 2), nn.Conv2d(16, 2, 1)

    @staticmethod
    def conv(channels, out):
        layers = nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True)
        return nn.Sequential(*layers)

    def forward(self, x):
        kept = self.down(x)
        low = self.wider(self.middle(F.max_pool2d(kept, 2)))
        return self.out(self.up(torch.cat([kept, low], 1)))


def pixels(step=0):
    pictures = torch.rand(4, 3, 32, 32, generator=seeded(step))
    return pictures, torch.randint(2, (4, 32, 32), generator=seeded(step))


def pixel_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), batch[1].numel()


class Graph(nn.Module):
    """Sums over neighbors. The batch is one graph, which has no samples to split."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x, edges):
        for layer in self.layers:
            x = F.relu(layer(torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])))
        return x


def graph(step=0):
    edges = torch.randint(200, (2, 900), generator=seeded(step))
    return {"x": torch.rand(200, 64, generator=seeded(step)), "edges": edges}


def graph_loss(model, batch):
    return model(batch["x"], batch["edges"]).square().sum(), 200


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=64, **sizes))


def adapters():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(gpt2(), peft.LoraConfig(r=4, target_modules=["c_attn"]))


class Recurrent(nn.Module):
    """An LSTM, whose CPU kernel keeps memory that symbolic tensors do not show."""

    def __init__(self):
        super().__init__()
        self.cells, self.out = nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.out(self.cells(x)[0])


def waves(step=0):
    return torch.rand(4, 8, 16, generator=seeded(step))


def wave_loss(model, batch):
    return model(batch).square().sum(), len(batch)


MODELS = {
    "U-Net": (UNet, pixels, pixel_loss, 4_000_000),
    "GPT-2 with dropout": (gpt2, lambda step=0: tokens(step), None, 3_500_000),
    "graph": (Graph, graph, graph_loss, 1_050_000),
    "adapters": (adapters, lambda step=0: tokens(step), None, 2_500_000),
}


@pytest.fixture
def run_project(monkeypatch):
    """Return a function that runs all cells with the given fill-ins and returns what they show."""

    def run(make_model, make_batch, loss_sum, budget):
        shown = []
        monkeypatch.setattr(project, "_show", lambda each: shown.append(str(each)))
        names = {
            "make_model": make_model,
            "make_batch": make_batch,
            "loss_sum": loss_sum,
            "BUDGET": budget,
            "why": "It fits.",
            "wrong_guess": "The peak.",
            "print": lambda text: shown.append(text),
        }
        for source in cells_of_the_project():
            if source.startswith("slots."):
                shown.append(str(eval(source, names)))
            else:
                exec(source, names)
        return names["sheet"], shown

    return run


@pytest.mark.parametrize("name", MODELS)
def test_predicted_peak_equals_measured_peak_and_project_sheet_is_complete(name, run_project):
    sheet, shown = run_project(*MODELS[name])
    assert sheet.plain.peak_bytes == sheet.measured.peak_bytes
    assert sheet.reduced.peak_bytes == sheet.taken.peak_bytes <= MODELS[name][3]
    assert len(sheet.alone) + len(sheet.excluded) == 5 and len(sheet.alone) >= 2
    assert all(each.relative < 1e-3 for each in (*sheet.errors.values(), sheet.error))
    assert sheet.hand_in("It fits.", "The peak.").correct
    assert sheet.hand_in("", "The peak.").correct is None
    assert shown[0].startswith("✓ Right: the model has")
    text = "\n".join(shown)
    assert "Mixer" not in text and "30.0 MB" not in text and "1,989,706" not in text


def test_unsuitable_project_model_is_rejected_with_reason(run_project):
    sheet, shown = run_project(Recurrent, waves, wave_loss, 1_000_000)
    assert all("mkldnn_rnn_layer" in each and each.startswith("✗") for each in shown[:2])
    assert any("needs a result of section 10.2" in each for each in shown)
    assert sheet.hand_in("It fits.", "The peak.").correct is None


def test_project_reports_no_fitting_recipe_if_budget_too_small(run_project):
    _, shown = run_project(Graph, graph, graph_loss, 1000)
    assert any("No recipe that was tried fits the budget" in each for each in shown)


def test_project_sheet_is_not_accepted_with_wrong_or_missing_result(run_project):
    sheet, _ = run_project(*MODELS["graph"])
    for attribute, value in (
        ("error", Difference(0.2, True)),
        ("budget_bytes", sheet.taken.peak_bytes - 1),
        ("reduced", sheet.plain),
    ):
        wrong = copy(sheet)
        setattr(wrong, attribute, value)
        assert wrong.hand_in("It fits.", "The peak.").correct is None
    with sheet.part("10.5"):
        raise ValueError("nothing fits")
    with pytest.raises(project.MissingResult):
        _ = sheet.taken
    assert sheet.plain and sheet.hand_in("It fits.", "The peak.").correct is None


def test_estimated_peak_equals_measured_peak_for_summed_mse_loss():
    """The sum of `F.mse_loss` holds a storage as large as the input (lesson 01)."""

    def mse(model, batch):
        return F.mse_loss(model(batch[0]), batch[1], reduction="sum"), len(batch[0])

    for micro_batches in (2, 4, 7):
        recipe = replace(AS_IT_IS, micro_batches=micro_batches)
        step = (
            lambda: nn.Linear(64, 64),
            lambda: (torch.rand(64, 64), torch.rand(64, 64)),
            recipe,
        )
        peak = run(*step, loss_sum=mse).meter.peak_bytes
        assert estimate(*step, loss_sum=mse).peak_bytes == peak


def test_gradient_error_detects_gradients_scaled_by_one_percent(monkeypatch):
    sheet = Sheet(Graph, graph, graph_loss, 1)
    assert sheet.gradient_error(AS_IT_IS) == Difference(0.0, True)
    gradients = Sheet.gradients

    def scaled(self, recipe, *args, **options):
        found = gradients(self, recipe, *args, **options)
        return found if recipe == AS_IT_IS else {name: g * 1.01 for name, g in found.items()}

    monkeypatch.setattr(Sheet, "gradients", scaled)
    error = sheet.gradient_error(sheet.techniques()[0])
    assert error.relative == pytest.approx(0.01) and str(error) == "0.01"


def test_gradient_error_of_micro_batches_disables_dropout():
    sheet = Sheet(gpt2, lambda step=0: tokens(step), None, 1)
    assert sheet.is_random and not Sheet(Graph, graph, graph_loss, 1).is_random
    assert not sheet.gradient_error(sheet.techniques()[2]).training


@pytest.mark.parametrize(
    ("framework", "line"),
    [
        ("torch", "train_step(model, optimizer, make_batch(step), recipe, loss_sum=loss_sum)"),
        ("trainer", "gradient_accumulation_steps=2"),
        ("fsdp2", "fully_shard"),
        ("fsdp2", "# left out: offload_optimizer"),
    ],
)
def test_generated_framework_code_reflects_recipe(framework, line):
    sheet = Sheet(Graph, graph, graph_loss, 1)
    sheet.recipe = sheet.techniques()[3 if "left out" in line else 2]
    assert line in sheet.lines(framework)
    with pytest.raises(ValueError, match="framework must be"):
        sheet.lines("jax")
