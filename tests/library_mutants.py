"""Slips of the hand in the library, each of which the tests of its room should see.

    PYTHONPATH=. python tests/library_mutants.py               # all; ten minutes or so of a core
    PYTHONPATH=. python tests/library_mutants.py memory        # those of a room
    PYTHONPATH=. python tests/library_mutants.py --output told.csv

Each is put into a copy of the repository, and the tests of its room run there until the first that
fails, within a limit of CPU time. A survivor is a sentence that no test says: name it, or say in
`EQUIVALENT` why it changes nothing. Before and after a change of the tests the same should be
killed.
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import shutil
import signal
import sys
import tempfile
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIMIT_S = 60  # of CPU, for a mutant
# The tests of a room, and of some files in it where all of its would take minutes.
ROOMS = {
    "memory": ("meter", "transparency", "categories", "refusals"),
    "memory/caching_allocator.py": ("caching_allocator",),
    "memory/categories.py": ("gradient_sums", "categories"),
    "memory/formulas.py": ("formulas",),
    "memory/meter.py": ("memory_budget", "gradient_sums", "transparency", "categories"),
    "memory/saved_tensors.py": ("saved_tensors",),
    "checkpoint": ("checkpoint", "refusals"),
    "schedule": ("schedule", "refusals"),
    "offload": ("offload", "refusals"),
    "accumulation": ("accumulation", "refusals"),
    "attention": ("attention", "refusals"),
    "budget": ("estimate_equals_run", "matrix", "budget", "budget_models", "refusals"),
    "budget/rates.py": ("budget_command", "budget_ranks"),
    "workload.py": ("budget_command",),
    "budget/recipe.py": ("budget",),
    "budget/alike.py": ("hugging_face",),
    "budget/updates.py": ("budget_search",),
    "budget/growth.py": ("budget_growth",),
    "budget/extrapolate.py": ("budget_search",),
    "budget/optimizers.py": ("budget_optimizers", "budget_models"),
    "budget/stages.py": ("budget_models",),
    "budget/techniques/offload_activations.py": ("budget",),
    "budget/techniques/attention.py": ("hugging_face",),
    "budget/repeats.py": ("budget_search",),
    "distributed": ("distributed",),
    "models": ("models", "configs", "refusals"),
    "labels": ("labels",),
    "symbolic": ("cuda_estimates",),
    "budget/process.py": ("cuda_estimates",),
}


class Mutant(NamedTuple):
    """`old` stands in the file once, and is `new` for a while."""

    room: str
    file: str  # in course_lib
    old: str
    new: str


MUTANTS = [
    Mutant(*each)
    for each in (
        ("memory", "memory/formulas.py", "(2, 2, 12)", "(2, 2, 8)"),
        ("memory", "memory/formulas.py", "attention = 5 * e + m", "attention = 4 * e + m"),
        ("memory", "memory/formulas.py", "((2 * e + m) if m else e)", "(2 * e + m)"),
        ("memory", "memory/formulas.py", "heads * n * 4}", "heads * n * e}"),
        ("memory", "memory/meter.py", "live <= max(before, self.budget_bytes)", "live <= before"),
        ("memory", "memory/meter.py", "self._undo.close()", "pass"),
        (
            "memory",
            "memory/meter.py",
            "self._ledger.close(self._belongings())",
            "self._ledger.close(())",
        ),
        (
            "symbolic",
            "symbolic/cuda_kernels.py",
            "if inplace or not training or not 0 < p < 1",
            "if not inplace or not training or not 0 < p < 1",
        ),
        (
            "symbolic",
            "symbolic/cuda_kernels.py",
            "if d % 8 == 0 and d <= 128:",
            "if d % 8 == 0 and d <= 16:",
        ),
        (
            "symbolic",
            "symbolic/cuda_kernels.py",
            "grouped or not aligned or",
            "not aligned or",
        ),
        (
            "symbolic",
            "symbolic/cuda_kernels.py",
            "_aten.native_layer_norm.default: _fp32_statistics,",
            "",
        ),
        (
            "budget",
            "budget/process.py",
            'steps_on_host = counted_kind() == "cuda" and',
            'steps_on_host = counted_kind() == "cpu" and',
        ),
        (
            "memory",
            "memory/saved_tensors.py",
            "for storage in storages if storage._cdata not in first)",
            "for storage in storages)",
        ),
        (
            "memory",
            "memory/saved_tensors.py",
            "(belongings | leaves) - given",
            "belongings - given",
        ),
        (
            "budget",
            "budget/growth.py",
            "(blocks - 1 - i) * before[at.cut - at.block :] + i * after[: at.block]",
            "i * before[at.cut - at.block :] + (blocks - 1 - i) * after[: at.block]",
        ),
        (
            "budget",
            "budget/growth.py",
            "if before == span.stop - block:",
            "if before == span.stop + block:",
        ),
        (
            "memory",
            "memory/categories.py",
            "holders_of(storage) != _ONE_HOLDER",
            "holders_of(storage) == 0",
        ),
        ("memory", "memory/categories.py", "record.saved = record.born", "record.saved = 0"),
        ("memory", "memory/caching_allocator.py", 'counts["num_ooms"] += 1', 'counts["num_ooms"]'),
        (
            "checkpoint",
            "checkpoint/nonreentrant.py",
            "slot.tensors[key], None",
            "slot.tensors[key], slot.tensors[key]",
        ),
        (
            "checkpoint",
            "checkpoint/nonreentrant.py",
            "if self.stops and self.count ==",
            "if self.count ==",
        ),
        (
            "checkpoint",
            "checkpoint/nonreentrant.py",
            "tensor = tensor.detach() if tensor.requires_grad else tensor",
            "tensor = tensor.alias() if False else tensor",
        ),
        ("checkpoint", "checkpoint/nonreentrant.py", "if key == -1:", "if False:"),
        (
            "checkpoint",
            "checkpoint/reentrant.py",
            "                current_random.restore()",
            "                pass",
        ),
        (
            "checkpoint",
            "checkpoint/reentrant.py",
            "version(tensor) != version_before",
            "version(tensor) is None",
        ),
        ("checkpoint", "checkpoint/selective.py", "entries[position] = _USED", "pass"),
        (
            "checkpoint",
            "checkpoint/selective.py",
            "self.storage.pop((func, position)).restore()",
            "self.storage.pop((func, position))",
        ),
        ("checkpoint", "checkpoint/blocks.py", "[:first][every - 1 :: every]", "[:first][::every]"),
        (
            "checkpoint",
            "checkpoint/blocks.py",
            'if block is not None and vars(block).get("forward") is self:',
            "if block is not None:",
        ),
        (
            "checkpoint",
            "checkpoint/loss_head.py",
            "losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))",
            "losses.sum()",
        ),
        (
            "schedule",
            "schedule/actions.py",
            "self.count(stage.saved_bytes + stage.forward_overhead_bytes)",
            "self.count(stage.saved_bytes)",
        ),
        (
            "schedule",
            "schedule/actions.py",
            "+= 0 if i in self.saved else stage.saved_bytes",
            "+= stage.saved_bytes",
        ),
        ("schedule", "schedule/actions.py", "if i > self.next_backward:", "if False:"),
        ("schedule", "schedule/rules.py", "math.sqrt(length * s / b)", "math.sqrt(length)"),
        (
            "schedule",
            "schedule/rules.py",
            "[size + (j < larger) for",
            "[size + (j >= count - larger) for",
        ),
        (
            "schedule",
            "schedule/rules.py",
            "min(math.comb(slots + r - 1, slots), length - math.comb(slots + r - 2, slots - 1))",
            "math.comb(slots + r - 1, slots)",
        ),
        (
            "offload",
            "offload/master_weights.py",
            "in (torch.bfloat16, torch.float16) else",
            "in (torch.bfloat16,) else",
        ),
        (
            "offload",
            "offload/master_weights.py",
            "torch.where(rounded == values, self.weights, values.to(self.dtype))",
            "values.to(self.dtype)",
        ),
        (
            "offload",
            "offload/master_weights.py",
            "filled + master.nbytes() > page_bytes:",
            "filled > page_bytes:",
        ),
        (
            "offload",
            "offload/optimizer.py",
            "        base.param_groups = all_groups\n",
            "        pass\n",
        ),
        (
            "offload",
            "offload/activations.py",
            "saved.version != tensor._version:",
            "False:",
        ),
        ("offload", "offload/state_file.py", "raise errors[0]", "pass"),
        (
            "accumulation",
            "accumulation/step.py",
            "if not grad_norm <= max_norm:",
            "if not grad_norm < 2 * max_norm:",
        ),
        ("accumulation", "accumulation/step.py", "self.scaler.update(scale)", "pass"),
        ("accumulation", "accumulation/step.py", "gradient.div_(scale)", "pass"),
        (
            "accumulation",
            "accumulation/step.py",
            "previous[: len(optimized)] = [None] * len(optimized)",
            "pass",
        ),
        (
            "accumulation",
            "accumulation/step.py",
            "2.0 ** round(math.log2(weight)) if 0 < weight < math.inf else 1.0",
            "1.0",
        ),
        (
            "accumulation",
            "accumulation/step.py",
            "math.isfinite(loss) and 0 <= weight",
            "math.isfinite(loss) and 0 < weight",
        ),
        (
            "accumulation",
            "accumulation/step.py",
            "self._unit * self.ranks.count / weight",
            "self._unit / weight",
        ),
        ("attention", "attention/costs.py", "3 + 2 * tile_passes}", "4 + tile_passes}"),
        ("attention", "attention/costs.py", "blocks = -(-n // (", "blocks = abs(n // ("),
        ("attention", "attention/tiled.py", "total.mul_(rescale).add_", "total.add_"),
        ("attention", "attention/tiled.py", ".tril(j - i - shift - 1)", ".tril(j - i - shift)"),
        ("attention", "attention/tiled.py", "acc.div_(total.clamp_(min=1))", "acc.div_(total)"),
        (
            "attention",
            "attention/flash.py",
            "rows_without_keys = min(n_q, max(0, -(shift or 0)))",
            "rows_without_keys = 0",
        ),
        (
            "attention",
            "attention/flash.py",
            "x if x.dtype == torch.float64 or not x.is_floating_point() else x.to(dtype)",
            "x.to(dtype)",
        ),
        ("budget", "budget/rates.py", " * (1 - 1 / recipe.ranks) / wire", " / wire"),
        ("budget", "budget/rates.py", "1 - in_flight / together", "1 - prefetch / together"),
        (
            "budget",
            "budget/rates.py",
            "sum(rest) if estimate.recipe.in_backward else max(rest)",
            "max(rest)",
        ),
        (
            "budget",
            "budget/optimizers.py",
            "-(-p.numel() // self.BLOCK)",
            "p.numel() // self.BLOCK",
        ),
        (
            "budget",
            "budget/optimizers.py",
            'p.mul_(1 - lr * group["weight_decay"])',
            'p.mul_(1 - group["weight_decay"])',
        ),
        (
            "budget",
            "workload.py",
            "return min(shapes, key=lambda shape: abs(count(*shape) - parameters))",
            "return shapes[0]",
        ),
        (
            "budget",
            "budget/recipe.py",
            'own = Cuda.ahead if tier == "host" else Device.ahead',
            "own = Device.ahead",
        ),
        (
            "budget",
            "budget/updates.py",
            'if on_kind(recipe, self.kind).update != "loop" or shares_state:',
            'if on_kind(recipe, self.kind).update != "loop":',
        ),
        ("budget", "budget/extrapolate.py", "1 + 2 * in_flight + prefetch", "1 + in_flight"),
        (
            "budget",
            "budget/repeats.py",
            "        ledger.bury()\n        start = len",
            "        start = len",
        ),
        ("budget", "budget/repeats.py", "drawing.seen |= found.drew", "pass"),
        ("budget", "budget/repeats.py", "usage.inputs(None", "(lambda *_: None)(None"),
        ("budget", "budget/repeats.py", "kind, context, in_backward", "kind, context"),
        ("budget", "budget/alike.py", "looked = mode.looks > looks", "looked = False"),
        ("budget", "budget/step.py", "        gradients = [None] * len(parameters)\n", ""),
        ("budget", "budget/techniques/attention.py", "config._attn_implementation = value", "pass"),
        (
            "budget",
            "budget/stages.py",
            'getattr(model, "draws_random_numbers", True)',
            'getattr(model, "draws_random_numbers", False)',
        ),
        ("budget", "budget/techniques/offload_activations.py", "keep=[model],", ""),
        (
            "distributed",
            "distributed/formulas.py",
            "most = -(-self.rows // ranks)",
            "most = self.rows // ranks",
        ),
        (
            "distributed",
            "distributed/formulas.py",
            'times = 1 if mode == "fsdp-keep" else 2',
            "times = 2",
        ),
        (
            "distributed",
            "distributed/formulas.py",
            "reductions * each + updated if",
            "reductions * (each + updated) if",
        ),
        (
            "distributed",
            "distributed/formulas.py",
            "sorted(weights, key=lambda w: -w.numbers)",
            "list(weights)",
        ),
        (
            "distributed",
            "distributed/prediction.py",
            "range(2 if mode in REPLICATED else steps)",
            "range(steps)",
        ),
        (
            "distributed",
            "distributed/sharded_checkpoint.py",
            "not path.suffix)",
            "path.suffix)",
        ),
        ("distributed", "distributed/sharded_checkpoint.py", "    random.restore()\n", ""),
        ("models", "configs.py", 'bias or name == "qwen2"', "bias"),
        (
            "models",
            "configs.py",
            "-(-len(tokens) * self.used // len(self.gate_up))",
            "-(-len(tokens) // len(self.gate_up))",
        ),
        (
            "models",
            "configs.py",
            "torch.cat([-second, first], dim=-1)",
            "torch.cat([second, first], dim=-1)",
        ),
        ("models", "configs.py", 'is not None or name == "qwen3"', "is not None"),
        ("models", "models.py", "if self.training and self.p > 0 else x", "if self.p > 0 else x"),
        ("models", "models.py", "scores = q @ k.mT * scale  # (b, a, s, s)", "scores = q @ k.mT"),
        (
            "labels",
            "labels/__init__.py",
            'return _chosen or _from_environment() or "en"',
            'return _from_environment() or _chosen or "en"',
        ),
        ("labels", "labels/__init__.py", "if placeholders(en) != placeholders(zh):", "if False:"),
        ("labels", "labels/__init__.py", "if len(_made) > _MOST_MADE:", "if False:"),
        (
            "labels",
            "labels/__init__.py",
            "sorted(inside, key=len, reverse=True)",
            "sorted(inside, key=len)",
        ),
        ("labels", "labels/__init__.py", "html.escape(each)", "each"),
    )
]


@contextmanager
def copied():
    """A copy of the library and its tests, with links to all else."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        folder = Path(folder)
        for path in ROOT.iterdir():
            if path.name in ("course_lib", "tests"):
                skipped = shutil.ignore_patterns("__pycache__")
                shutil.copytree(path, folder / path.name, ignore=skipped)
            elif path.name != ".git":
                (folder / path.name).symlink_to(path)
        yield folder


def survives(mutant: Mutant, folder: Path, limit_s: int = LIMIT_S) -> tuple[str, float]:
    """ "killed", "survived" or "slow"; CPU seconds."""
    file = folder / "course_lib" / mutant.file
    text = file.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        return f"stands {text.count(mutant.old)} times", 0.0
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    tests = ROOMS.get(mutant.file, ROOMS[mutant.room])
    started = _cpu_s()
    try:
        names = [folder / "tests" / f"test_{name}.py" for name in tests]
        code = _forked([str(name) for name in names if name.exists()], folder, limit_s)
    finally:
        file.write_text(text, encoding="utf-8")
    return {
        0: "survived",
        1: "killed",
        2: "killed",
        -signal.SIGXCPU: "slow",
        -signal.SIGALRM: "slow",
    }.get(code, f"exit {code}"), _cpu_s() - started


def _forked(names: list[str], folder: Path, limit_s: int) -> int:
    """pytest's exit status, from a child that need not import torch again."""
    child = os.fork()
    if child == 0:
        code = 3
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 5))
            signal.alarm(10 * limit_s)  # where it waits for ever
            signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup has it ignored
            os.environ["PYTHONPATH"] = str(folder)
            here = (ROOT, ROOT / "tests")  # of which nothing has been imported yet
            others = [path for path in sys.path if Path(path or ".").resolve() not in here]
            sys.path[:] = [str(folder), *others]
            os.chdir(folder)
            import pytest

            options = ["-p", "no:cacheprovider", "-qx", "--no-header"]
            with (folder / "told").open("w") as told, redirect_stdout(told), redirect_stderr(told):
                code = int(pytest.main([*options, f"--rootdir={folder}", *names]))
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("rooms", nargs="*", choices=[[], *ROOMS], help="all, if left out")
    parser.add_argument("--output", type=Path, help="a table as CSV")
    given = parser.parse_args()
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    import numpy  # noqa: F401 - what each child has then
    import pytest  # noqa: F401
    import torch  # noqa: F401

    rows = []
    with copied() as folder:
        for mutant in MUTANTS:
            if given.rooms and mutant.room not in given.rooms:
                continue
            result, cpu_s = survives(mutant, folder)
            by = ""
            if result == "killed":
                lines = (folder / "told").read_text().splitlines()
                by = next(
                    (line.split(" - ")[0] for line in lines if line[:6] in ("FAILED", "ERROR ")), ""
                )
            rows.append((*mutant, result, f"{cpu_s:.0f}", by))
            print(
                f"{mutant.room:12} {result:9} {cpu_s:5.0f} s  {mutant.old[:60]!r}  {by}", flush=True
            )
            if given.output:
                with given.output.open("w", newline="") as file:
                    csv.writer(file).writerows(rows)
    return int(any(row[4] != "killed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
