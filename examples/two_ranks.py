"""Predict the peak memory of one of two ranks in one process, then measure it in two processes.

python examples/two_ranks.py ddp fsdp
"""

import sys

from course_lib.distributed import launch, predict, task_of

# This is the course's decoder. Pass `config=` or `model=` for a model of yours.
task = task_of(batch=4, sequence=64)
modes = sys.argv[1:] or ["ddp", "zero1", "fsdp", "fsdp-checkpoint"]
predicted = {
    mode: predict(task.make_model, lambda: task.part(0, 2, 0), task.loss_sum, mode, 2)
    for mode in modes
}
sizes = ["--batch", "4", "--sequence", "64"]
for run in launch(2, "--mode", ",".join(modes), "--steps", "3", "--details", *sizes):
    peak = predicted[run["mode"]].peak_bytes
    measured = run["taken"][0]["peak_bytes"]  # index 0 is the first rank
    print(f"{run['mode']:>16} {peak:>12,} bytes predicted, {measured:>12,} measured")
