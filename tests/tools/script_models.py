"""Models of 6 MB and more for printed scripts, and how a script is run under a meter."""

import ast
import json
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from timeouts import TIMEOUT_SECONDS
from torch import nn
from torch.nn import functional as F

from course_lib.distributed.training.torchrun import IMPORTED_ONCE, IN_LAUNCHER
from course_lib.memory import MemoryMeter
from course_lib.models import Decoder, random_tokens
from course_lib.workload import Source, Workload

SAMPLES, LENGTH = 4, 16
SIZES = {"vocabulary": 1000, "hidden": 256, "layers": 3, "heads": 4, "sequence": LENGTH}
LLAMA = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def make_decoder():
    return Decoder(**SIZES)


def make_fused_decoder():
    return Decoder(**SIZES, fused=True)


def decoder_batch():
    return random_tokens(SAMPLES, LENGTH, SIZES["vocabulary"])


def make_llama():
    import transformers

    config = transformers.AutoConfig.for_model("llama", **LLAMA)
    return transformers.AutoModelForCausalLM.from_config(config)


def llama_batch():
    rows = torch.randint(LLAMA["vocab_size"], (SAMPLES, LENGTH))
    return {"input_ids": rows, "labels": rows.clone()}


def padded_batch():
    """Return samples of different lengths, so that micro-batches have different weights."""
    batch = llama_batch()
    for i, row in enumerate(batch["labels"]):
        row[LENGTH - 4 * i :] = -100
    return batch


class Mixer(nn.Module):
    """A classifier of patches, outside of any library, without a loss of its own."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(48, 256)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                OrderedDict(
                    norm=nn.LayerNorm(256),
                    wide=nn.Linear(256, 1024),
                    gelu=nn.GELU(),
                    narrow=nn.Linear(1024, 256),
                )
            )
            for _ in range(3)
        )
        self.classes = nn.Linear(256, 100)

    def forward(self, patches):
        x = self.embed(patches)
        for block in self.blocks:
            x = x + block(x)
        return self.classes(x.mean(1))


def make_mixer():
    return Mixer()


def mixer_batch():
    return torch.randn(SAMPLES, LENGTH, 48), torch.randint(100, (SAMPLES,))


def mixer_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


make_mixer.loss_sum = mixer_loss


def workload(make_model, make_batch) -> Workload:
    named = {"make_model": make_model, "make_batch": make_batch}
    imports = tuple(
        f"from script_models import {each.__name__} as {name}" for name, each in named.items()
    )
    loss = getattr(make_model, "loss_sum", None)
    source = Source(imports, ())
    return Workload(make_model, make_batch, loss, "", "", samples=SAMPLES, source=source)


WORKLOADS: Mapping[str, Workload] = {
    "decoder": workload(make_decoder, decoder_batch),
    "fused": workload(make_fused_decoder, decoder_batch),
    "llama": workload(make_llama, llama_batch),
    "padded": workload(make_llama, padded_batch),
    "mixer": workload(make_mixer, mixer_batch),
}


def run_script(script: str) -> tuple[MemoryMeter, dict[str, Any]]:
    """Run a script, its last statement under a meter, and return the meter and the names."""
    *first, last = ast.parse(script).body
    names: dict[str, Any] = {}
    exec(compile(ast.Module(first, []), "<script>", "exec"), names)
    with MemoryMeter(names["model"], names.get("optimizer")) as meter:
        exec(compile(ast.Module([last], []), "<script>", "exec"), names)
    return meter, names


def run_on_ranks(scripts: Sequence[str], folder: Path) -> list[tuple[list[int], str]]:
    """Start torchrun once for all scripts.

    Returns:
        For each script, the peaks of the two ranks and the text that the first rank printed.
    """
    given, results = folder / "scripts.json", folder / "results.json"
    given.write_text(json.dumps(scripts))
    runner = Path(__file__).with_name("run_fsdp2_scripts.py")
    # The modules are imported once, in torchrun, which then forks the ranks.
    llama = "transformers.models.llama.modeling_llama"  # `make_llama` imports it
    modules = ("run_fsdp2_scripts", "script_models", llama, *IMPORTED_ONCE)
    launcher = ["-c", IN_LAUNCHER.format(modules=", ".join(modules))]
    ranks = ["--standalone", "--nproc-per-node", "2", "--run-path", "--start-method", "fork"]
    command = [sys.executable, *launcher, *ranks, str(runner), str(given), str(results)]
    path = os.pathsep.join([str(runner.parent), *sys.path])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, timeout=TIMEOUT_SECONDS, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return json.loads(results.read_text())
