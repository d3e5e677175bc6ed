"""Run scripts for FSDP2 on the ranks that torchrun has started, and write the peak of each rank.

torchrun --standalone --nproc-per-node 2 tests/tools/run_fsdp2_scripts.py scripts.json results.json
"""

import ast
import json
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist

from course_lib.distributed.measurement import _Meter

torch.set_num_threads(1)


def compiled(*statements: ast.stmt) -> CodeType:
    return compile(ast.Module([*statements], []), "<script>", "exec")


def peak_of(script: str) -> int:
    """Return the peak of the script's last statement.

    The meter starts when the model exists, so that it counts what FSDP2 allocates.
    """
    *first, last = ast.parse(script).body
    start = 1 + next(
        i for i, each in enumerate(first) if ast.unparse(each).startswith("model = make_model(")
    )
    names: dict[str, Any] = {}
    exec(compiled(*first[:start]), names)
    with _Meter(names["model"], source_lines=False) as meter:
        exec(compiled(*first[start:]), names)
        begin = meter.points
        exec(compiled(last), names)
        end = meter.points
    return meter.trace(events=False)[begin:end].peak_bytes


def main(scripts: str, results: str) -> None:
    # A group that the script creates has no backend of this name, but the meter requests it.
    dist.get_backend = lambda *_: "gloo"
    found = []
    for script in json.loads(Path(scripts).read_text()):
        with redirect_stdout(StringIO()) as printed:
            peak = peak_of(script)
        dist.init_process_group = lambda: None  # the first script has created the group
        peaks = [None] * dist.get_world_size()
        dist.all_gather_object(peaks, peak)
        found.append((peaks, printed.getvalue()))
    if dist.get_rank() == 0:
        Path(results).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
