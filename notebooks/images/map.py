"""Draw map.svg, the README's map of the course.

    python notebooks/images/map.py

The text is drawn as outlines, so the Chinese shows where there is no Chinese font. The words that the README gives the
picture are printed.
"""

from pathlib import Path

import matplotlib
from step import save_small

from course_lib.lessons.lesson_00 import course_map
from course_lib.teaching.alt import alt_text

matplotlib.use("Agg")


def main() -> None:
    matplotlib.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "map"})
    drawn = course_map()
    path = Path(__file__).with_suffix(".svg")
    save_small(drawn, path)
    print(f"{alt_text(drawn)}\n{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
