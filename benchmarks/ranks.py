"""Predicted and measured bytes of one of two ranks (gloo), for each mode of training."""

from collections.abc import Iterator

from scoreboard import Row

from course_lib.distributed import MODES, launch, predict, task_of

RANKS = 2
ON_CPU = [mode for mode in MODES if mode != "fsdp-cpu"]


def rows(rounds: int) -> Iterator[Row]:
    options = ("--mode", ",".join(ON_CPU), "--steps", "2", "--unequal", "--details")
    for line in launch(RANKS, *options):
        mode, task = line["mode"], task_of(unequal=True)
        found = predict(
            task.make_model, lambda t=task: t.part(0, RANKS, 0), task.loss_sum, mode, RANKS
        )
        pairs = {
            f"{kind} on rank 0": (line["predicted"][kind], max(line["measured"][kind]))
            for kind in ("parameter", "gradient", "optimizer")
        }
        pairs["the peak of rank 0"] = (found.peak_bytes, line["taken"][0]["peak_bytes"])
        sent = line["communicated"]
        pairs["bytes sent in a step"] = (sent["predicted"], sent["measured"])
        for what, (predicted, measured) in pairs.items():
            note = "equal" if predicted == measured else f"{predicted / measured - 1:+.2%}"
            yield Row(f"{mode}: {what}", "measured", None, None, None, predicted, measured, note)
