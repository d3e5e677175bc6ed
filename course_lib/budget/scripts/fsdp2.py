"""Training scripts that shard a model over several devices with PyTorch's FSDP2."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from course_lib.budget.optimizers import LR
from course_lib.budget.recipe import Recipe
from course_lib.labels import text

from .lines import Lines
from .loop import Loop, checked_lines
from .loss import loss_function_code
from .settings import (
    block_list_names,
    checkpoint_lines,
    selected_block_names,
    setting_lines,
    string_code,
)

if TYPE_CHECKING:
    from course_lib.workload import Workload


class Fsdp2(Loop):
    """Framework whose script is a PyTorch training loop with a model that FSDP2 shards.

    `torchrun` starts the script on several ranks (processes), and `fully_shard` shards the model.
    """

    name = "fsdp2"
    title = text("PyTorch's FSDP2")
    precisions = ("bf16",)
    only: Mapping[str, Collection[Any]] = MappingProxyType(
        {
            "precision": ("fp32", "bf16"),
            "ranks": range(2, sys.maxsize),
            "shard": (None, "zero2", "zero3"),  # None leaves the choice to `fit`
        }
    )
    alternatives: Mapping[str, str] = MappingProxyType(
        {
            "precision": "framework='trainer' supports this value on a single rank",
            "attention": "course_lib.distributed.Trainer supports this value",
            "ranks": "framework='torch' and framework='trainer' run a single rank",
            "shard": "course_lib.distributed.Trainer supports this value",
        }
    )

    def script(self, recipe: Recipe, workload: Workload) -> str:
        if recipe.shard is None:
            raise ValueError("shard must be 'zero2' or 'zero3' to write an FSDP2 script, got None")
        lines = checked_lines(self, recipe, workload)
        lines.use("torch.distributed.fsdp", "fully_shard")
        lines.use("course_lib.accumulation", "AccumulatedStep")
        text = lines.script(
            [
                "torch.distributed.init_process_group()",
                "torch.manual_seed(0)  # all ranks make the same weights",
                "model = make_model()",
            ],
            setting_lines(lines),
            [
                'device = "cuda" if torch.cuda.is_available() else "cpu"',
                f"mesh = torch.distributed.init_device_mesh(device, ({recipe.ranks},))",
            ],
            _shard_lines(lines, recipe),
            checkpoint_lines(lines, sharded=True),
            [f"optimizer = torch.optim.AdamW({lines.trained_parameters()}, lr={LR}, fused=True)"],
            _share_lines(lines, recipe),
            _loop_lines(lines, recipe),
        )
        return f"# torchrun --nproc-per-node {recipe.ranks} train.py\n{text}"


def _shard_lines(lines: Lines, recipe: Recipe) -> list[str]:
    """Return script lines that shard each block, and then the rest of the model."""
    options, before = "mesh=mesh", []
    if recipe.precision == "bf16":
        lines.use("torch.distributed.fsdp", "MixedPrecisionPolicy")
        before = ["policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)"]
        options += ", mp_policy=policy"
    found = [f"model.{name}" if name else "model" for name in block_list_names(lines)]
    blocks = found[0] if len(found) == 1 else f"[{', '.join(f'*{name}' for name in found)}]"
    if not found:
        blocks = f"map(model.get_submodule, {string_code(selected_block_names(lines))})"
    return [
        *before,
        f"for block in {blocks}:",
        f"    fully_shard(block, reshard_after_forward={recipe.shard == 'zero3'}, {options})",
        f"fully_shard(model, reshard_after_forward=False, {options})",
    ]


def _share_lines(lines: Lines, recipe: Recipe) -> list[str]:
    """Return script lines that take this rank's share out of the batch."""
    if lines.workload.split is not None:
        share = f"make_model.split(make_batch(), {recipe.ranks})"
    else:
        lines.use("course_lib.accumulation", "split")
        share = f"list(split(make_batch(), {lines.workload.samples // recipe.ranks}))"
    own = lines.to_device(f"{share}[torch.distributed.get_rank()]")
    return [f"share = {own}"]


def _loop_lines(lines: Lines, recipe: Recipe) -> list[str]:
    """Return the lines of the training loop.

    After each micro-batch, the loop reduces the gradients across all ranks (processes).
    """
    count, workload = recipe.micro_batches, lines.workload
    parts = "[share]"
    if count > 1 and workload.split is not None:
        parts = f"make_model.split(share, {count})"
    elif count > 1:
        parts = f"split(share, {workload.samples // (recipe.ranks * count)})"
    defined, name = loss_function_code(lines, parts=recipe.ranks * count)
    return [
        *defined,
        f'train_step = AccumulatedStep(model, optimizer, {name}, sync="each")',
        "for step in range(2):",
        f'    print(f"step {{step}}: loss {{train_step({parts}).loss:.4f}}")',
    ]
