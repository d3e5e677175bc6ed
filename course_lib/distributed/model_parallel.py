r"""Run tensor, context and pipeline parallelism on the ranks that torchrun has started.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \
        -m course_lib.distributed.model_parallel

The script prints one line of JSON per run. It trains the course's decoder once in each of the modes
tp (tensor parallelism), tp-sp (tensor and sequence parallelism) and cp (context parallelism). The
pipeline has a smaller decoder, because it runs seven times with different settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

# Imports are absolute, because torchrun may run this file by its path.
from course_lib.distributed.context_parallel import ContextParallel
from course_lib.distributed.measurement import RankUsage, Watch
from course_lib.distributed.pipeline import RUNS, measured_pipeline
from course_lib.distributed.tensor_parallel import (
    STEPS,
    TENSOR_MODES,
    TensorParallel,
    gradient_difference,
    whole_gradients,
)
from course_lib.distributed.training.tasks import Task, task_of
from course_lib.distributed.training.torchrun import end_on_signals, process_group


def measure(
    task: Task,
    make_trainer: Callable[[nn.Module], TensorParallel | ContextParallel],
    whole: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Train a model for `STEPS` steps on the ranks of the process group, and measure each step.

    Args:
        task: The model and its batches.
        make_trainer: Function that cuts a model among the ranks, and returns the object that trains
            it.
        whole: Gradients of the first step without parallelism, as `whole_gradients` returns them.

    Returns:
        A dict with the "mode", the number of "ranks", and the "losses" of all steps.
        "gradient_difference" is the largest relative difference between the gradients of the first
        step and `whole`. "taken" is a list with one dict per rank: the memory, the communicated
        bytes and the FLOPs of the last step, with the fields of `RankUsage` as keys.
    """
    model, difference = task.make_model(), 0.0
    with Watch(model) as watch:
        trainer, losses = make_trainer(model), []
        for step in range(STEPS):
            batch = task.make_batch(step)
            with watch.step(trainer):
                loss = trainer.backward(batch)
                if step == 0:
                    cut = trainer.mode in TENSOR_MODES
                    difference = gradient_difference(model, whole, cut=cut)
                trainer.update()
            losses.append(loss.item())
            del loss  # otherwise, the loss would be live in the next step
    usages = _gather_from_all_ranks(watch.taken)
    return {
        "mode": trainer.mode,
        "ranks": len(usages),
        "losses": losses,
        "gradient_difference": difference,
        "taken": [asdict(usage) for usage in usages],
    }


def _gather_from_all_ranks(own: RankUsage | dict[str, Any] | None) -> list[Any]:
    """Return the values that all ranks pass to this function, in the order of the ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, own)
    return values


def results_of_all_modes() -> Iterator[dict[str, Any]]:
    """Run all modes on the ranks of the process group, and yield one dict of results per run.

    Each of the modes "tp" and "tp-sp" (tensor parallelism) and "cp" (context parallelism) runs
    once. The pipeline runs seven times, with the settings in `RUNS`.

    Yields:
        First the results of "tp", "tp-sp" and "cp", as `measure` returns them. Then one dict per
        run of the pipeline. Its "mode" is the schedule, "gpipe" or "1f1b". "micro_batches" is the
        number of micro-batches, and "return_outputs" states whether the last rank returns the
        outputs. "taken" is a list with the result of `measured_pipeline` for each rank.
    """
    task = task_of()
    whole = whole_gradients(task)
    for mode in TENSOR_MODES:
        yield measure(
            task, lambda model, mode=mode: TensorParallel(mode, model, task.loss_sum), whole
        )
    yield measure(task, ContextParallel, whole)
    for run in RUNS:
        taken = _gather_from_all_ranks(measured_pipeline(*run))
        yield {"mode": run[0], "micro_batches": run[1], "return_outputs": run[2], "taken": taken}


def main() -> None:
    """Run tensor, context and pipeline parallelism on this rank; rank 0 prints the results.

    Each line of the output is the JSON of one run.
    """
    end_on_signals()
    with process_group("gloo"):
        for line in results_of_all_modes():
            if dist.get_rank() == 0:
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
