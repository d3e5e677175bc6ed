"""Build the course's font: a subset of Noto Sans CJK SC under another name.

Figures need Chinese on machines that have no Chinese font, so the library includes one. This script
made it, and you need not run it to take the course. Its input is `NotoSansCJK-Regular.ttc` (Debian:
`fonts-noto-cjk`). Its only dependency is `fonttools`, which matplotlib installs. The same input
gives the same bytes.

    python course_lib/teaching/fonts/build.py path/to/NotoSansCJK-Regular.ttc

The font is called "Course Sans SC", because its license (OFL.txt) requires another name for a
changed font. It is an OTF file because matplotlib does not read woff.
"""

import argparse
from pathlib import Path

from fontTools import subset
from fontTools.ttLib import TTCollection

FAMILY = "Course Sans SC"
POSTSCRIPT_NAME = "CourseSansSC-Regular"
FOLDER = Path(__file__).parent

# Ranges of code points; those that the source font lacks are left out.
RANGES = (
    (0x0020, 0x007E),  # ASCII
    (0x00A0, 0x00FF),  # Latin-1: × ÷ ± · ² ½
    (0x0391, 0x03C9),  # Greek
    (0x2010, 0x205E),  # dashes, quotation marks, ellipsis
    (0x2070, 0x209C),  # superscripts and subscripts
    (0x2150, 0x215E),  # fractions
    (0x2190, 0x21FF),  # arrows
    (0x2200, 0x22FF),  # mathematical operators
    (0x2308, 0x230B),  # ⌈ ⌉ ⌊ ⌋
    (0x2460, 0x2473),  # ① to ⑳
    (0x25A0, 0x25FF),  # ■ ● ▲
    (0x2713, 0x2717),  # ✓ ✗
    (0x3000, 0x303F),  # CJK punctuation
    (0xFF00, 0xFFEF),  # full-width forms
)


def hanzi() -> str:
    """Return the 6763 Chinese characters of the standard GB2312, levels 1 and 2 (rows 16 to 87)."""
    cells = (bytes((row + 0xA0, cell + 0xA0)) for row in range(16, 88) for cell in range(1, 95))
    return b"".join(cells).decode("gb2312", errors="ignore")  # row 55 ends with five empty cells


def build(collection: Path, output: Path) -> None:
    """Write the course's font: a subset of the Simplified Chinese font in a font collection.

    Args:
        collection: Path of the font collection.
        output: Path of the file to write.
    """
    fonts = TTCollection(collection).fonts
    font = next(font for font in fonts if font["name"].getDebugName(4) == "Noto Sans CJK SC")

    options = subset.Options()
    options.hinting = False
    options.desubroutinize = False
    options.layout_features = ["kern"]
    # vertical writing and alternative forms
    options.drop_tables += ["BASE", "GSUB", "VORG", "vhea", "vmtx"]
    # copyright, trademark and license; the names are set below
    options.name_IDs = [0, 7, 13, 14]
    options.notdef_outline = True
    options.recalc_timestamp = False  # otherwise two builds would differ
    subsetter = subset.Subsetter(options)
    points = {point for first, last in RANGES for point in range(first, last + 1)} | {
        ord(char) for char in hanzi()
    }
    subsetter.populate(unicodes=points)
    subsetter.subset(font)

    names = font["name"]
    for identifier, value in {
        1: FAMILY,
        2: "Regular",
        3: f"{POSTSCRIPT_NAME};subset of NotoSansCJKsc-Regular 2.004",
        4: FAMILY,
        5: "Version 2.004",
        6: POSTSCRIPT_NAME,
    }.items():
        names.setName(value, identifier, 3, 1, 0x409)
    table = font["CFF "].cff
    table.fontNames = [POSTSCRIPT_NAME]
    top = table.topDictIndex[0]
    top.FamilyName, top.FullName = FAMILY, FAMILY
    for index, part in enumerate(top.FDArray):
        part.FontName = f"{POSTSCRIPT_NAME}-{index}"

    font.recalcTimestamp = False
    font.save(output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("collection", type=Path, help="NotoSansCJK-Regular.ttc")
    parser.add_argument("--output", type=Path, default=FOLDER / f"{POSTSCRIPT_NAME}.otf")
    arguments = parser.parse_args()
    build(arguments.collection, arguments.output)
    print(f"{arguments.output.name}: {arguments.output.stat().st_size:,} bytes")
