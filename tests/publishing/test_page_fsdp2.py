"""Test the page "FSDP2 in practice" against its own comments: run its code in both languages."""

import contextlib
import io
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCKS = {
    name: re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / name).read_text("utf-8"), re.M | re.S
    )
    for name in ("fsdp2.md", "fsdp2.zh.md")
}


def test_fsdp2_page_code_prints_output_stated_in_its_comments():
    blocks = BLOCKS["fsdp2.md"]
    assert len(blocks) == 3 and BLOCKS["fsdp2.zh.md"] == blocks
    code = "\n".join(blocks)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {})
    assert printed.getvalue().splitlines() == re.findall(r"^print\(.*\)  # (.+)$", code, re.M)
