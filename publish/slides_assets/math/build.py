r"""Build the decks' font for formulas: a subset of STIX Two Math.

Browsers stretch brackets and roots only with a font that has a MATH table, and some machines have
no such font. This script made the subset, and you need not run it to build slides. Its input is the
woff file of STIX Two Math in the npm package `@fontsource/stix-two-math` 5.3.0. Its only dependency
is `fonttools`, which matplotlib installs. The license (OFL.txt) reserves no font name.

    python publish/slides_assets/math/build.py \
        path/to/stix-two-math-latin-400-normal.woff
"""

import sys
from pathlib import Path

from fontTools import subset
from fontTools.ttLib import TTFont

# Ranges of code points: what the course's formulas use, and a little more.
RANGES = (
    (0x0020, 0x007E),  # ASCII
    (0x00A0, 0x00A0),
    (0x00B1, 0x00B1),  # ±
    (0x00B7, 0x00B7),  # ·
    (0x00D7, 0x00D7),  # ×
    (0x0391, 0x03C9),  # Greek
    (0x2032, 0x2033),  # primes
    (0x210E, 0x210E),  # ℎ
    (0x2113, 0x2113),  # ℓ
    (0x2190, 0x2193),  # arrows
    (0x2200, 0x2265),  # operators
    (0x2308, 0x230B),  # ⌈ ⌉ ⌊ ⌋
    (0x1D434, 0x1D467),  # italic letters
    (0x1D6E2, 0x1D71B),  # italic Greek
)


def build(source: Path, output: Path) -> None:
    """Write the subset of a font.

    Args:
        source: Path of the complete font.
        output: Path of the file to write.
    """
    options = subset.Options()
    options.flavor = "woff"
    options.hinting = False
    options.layout_features = ["ssty"]  # forms for superscripts
    options.name_IDs = [0, 7, 13, 14]  # copyright, trademark, license
    options.notdef_outline = True
    options.recalc_timestamp = False  # otherwise two builds would differ
    font = TTFont(source)
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes=[code for first, last in RANGES for code in range(first, last + 1)])
    subsetter.subset(font)
    font.flavor = "woff"
    font.save(output)


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(__file__).with_name("CourseMath.woff"))
