"""Run every lesson's GPU experiments and write their figures: `python -m course_lib.recordings [--folder FOLDER]`."""

import argparse
import sys
import time
from pathlib import Path

import torch

from . import FOLDER, experiments, record, run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m course_lib.recordings", description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where <gpu>.json goes; default: beside this file")
    folder = parser.parse_args().folder
    if not torch.cuda.is_available():
        sys.exit("There is no CUDA GPU that torch can use here, so there is nothing to record: nothing was written.")
    if not folder.is_dir():
        sys.exit(f"{folder} is not a folder: nothing was written.")

    values: dict[str, dict[str, dict]] = {}
    for item in experiments():
        start = time.perf_counter()
        values.setdefault(item.lesson, {})[item.name] = run(item.lesson, item.name)
        print(f"{item.lesson} {item.name}: {time.perf_counter() - start:.1f} s", flush=True)
    print(f"written: {record(values, command='python -m course_lib.recordings', folder=folder)}")


if __name__ == "__main__":
    main()
