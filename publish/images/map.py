"""Draw map.en.svg and map.zh.svg, the README's map of the course.

    python -m publish.images.map

The text is drawn as outlines, so the Chinese shows without a Chinese font. The script prints the
alt texts for the README.
"""

from pathlib import Path

import matplotlib

from course_lib.lessons.lesson_00.figures import course_map
from course_lib.teaching.pictures import description

from .step import save_in_each_language

matplotlib.use("Agg")


def main() -> None:
    matplotlib.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "map"})
    drawn = course_map()
    print("\n".join(description(drawn)))
    save_in_each_language(drawn, Path(__file__))


if __name__ == "__main__":
    main()
