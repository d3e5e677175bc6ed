"""Run the lessons' GPU experiments and write their results to course_lib/recordings/<gpu>.json.

    python -m course_lib.lessons                                    # run all experiments
    python -m course_lib.lessons --only 04 06.attention --skip 07   # select by lesson, or prefix
    python -m course_lib.lessons --check                            # report why none can run

The results of each experiment are written as soon as it has finished. If an experiment fails, its
name is printed, and the other experiments continue.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from course_lib.teaching.experiments import Experiment, error_summary
from course_lib.teaching.recordings import FOLDER, provenance, record

from . import experiments


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m course_lib.lessons",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where <gpu>.json goes")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="NAME",
        help="run only experiments with names that begin so",
    )
    parser.add_argument("--skip", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--check", action="store_true")
    # Only tests use this option. On a CPU, experiments run at small sizes.
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help=argparse.SUPPRESS)
    given = parser.parse_args()
    named = {f"{item.lesson}.{item.name}": item for item in experiments()}
    chosen = [
        name
        for name in named
        if name.startswith(tuple(given.only)) and not name.startswith(tuple(given.skip))
    ]
    if not chosen:
        sys.exit("No experiment has such a name: nothing was run.")
    if problem := what_is_missing(given.device, given.folder):
        sys.exit(f"{problem}: nothing was run.")
    if given.check:
        return
    if given.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        # This limit keeps the experiments out of memory that other processes may need.
        torch.cuda.set_per_process_memory_fraction(0.95 * free / total)
    provenance(given.device)  # measures the host link before an experiment uses the GPU
    failed = [
        name for name in chosen if not run_and_record(name, named[name], given.device, given.folder)
    ]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def what_is_missing(device: str, folder: Path) -> str | None:
    """Return the reason why GPU experiments cannot run on this machine, or None if they can.

    Args:
        device: "cuda", or "cpu" in tests.
        folder: Folder for the results. If `device` is "cpu", it must not be the default folder,
            because that folder is for results of GPUs.
    """
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 9):
        return f"torch is {torch.__version__}, and the course takes 2.9 or newer"
    if device == "cpu":
        return (
            "A CPU's results are not recordings; pass a --folder of their own"
            if folder == FOLDER
            else None
        )
    if not torch.cuda.is_available():
        return "There is no CUDA GPU that torch can use here"
    return None


def run_and_record(name: str, item: Experiment, device: str, folder: Path) -> bool:
    """Run a GPU experiment, and write its results to a file.

    If the experiment fails, its name and the error are printed, and no error is raised.

    Args:
        name: Name to print, such as "01.decoder_step".
        item: The experiment.
        device: "cuda", or "cpu" in tests, which use small sizes.
        folder: Folder for the file, which is named after the GPU.

    Returns:
        Whether the experiment succeeded.
    """
    start = time.perf_counter()
    try:
        run = item.run(device, small=device == "cpu")
    except Exception as error:  # too little memory for one experiment must not stop the others
        print(f"{name} failed: {error_summary(error)}", file=sys.stderr, flush=True)
        return False
    command = "python -m course_lib.lessons"
    path = record(item, run, command=command, folder=folder, device=device)
    sizes = "" if run.sizes in (item.sizes, item.small) else f", with {run.sizes}"
    print(
        f"{name}: {time.perf_counter() - start:.1f} s, {len(run.figures)} figures in"
        f" {path.name}{sizes}",
        flush=True,
    )
    return True


if __name__ == "__main__":
    main()
