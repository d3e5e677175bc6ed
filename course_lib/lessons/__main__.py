"""Run the lessons' GPU experiments and write their figures to course_lib/recordings/<gpu>.json.

    python -m course_lib.lessons                                    # all of them
    python -m course_lib.lessons --only 04 06.attention --skip 07   # by lesson, or by the beginning of a name

The file is written after every experiment. One that fails is named, and the others go on.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from course_lib.teaching.recorded import FOLDER, record

from . import experiments


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m course_lib.lessons", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where <gpu>.json goes")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="the beginnings of their names")
    parser.add_argument("--skip", nargs="+", default=[], metavar="NAME")
    given = parser.parse_args()
    named = {f"{item.lesson}.{item.name}": item for item in experiments()}
    chosen = [name for name in named if name.startswith(tuple(given.only)) and not name.startswith(tuple(given.skip))]
    if not chosen:
        sys.exit("No experiment has such a name: nothing was run.")
    if not torch.cuda.is_available():
        sys.exit("There is no CUDA GPU that torch can use here, so there is nothing to record: nothing was written.")

    failed, path = [], None
    for name in chosen:
        start = time.perf_counter()
        try:
            values = named[name].run()
        except Exception as error:  # too little memory for one is no reason to lose the others
            failed.append(name)
            print(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            path = record(named[name], values, command="python -m course_lib.lessons", folder=given.folder)
            print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
        torch.cuda.empty_cache()
    print(f"written: {path}" if path else "nothing was written")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
