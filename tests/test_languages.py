"""One language of two: headings, prose cells, outputs, and guides."""

import pytest

pytest.importorskip("nbformat")
pytest.importorskip("bs4")

from publish.cells import EditionError
from publish.languages import guide_in, half, html_in, markdown_in, without_lab_texts

CELL = """## 1.1 Bytes / 字节

<div lang="en">

A / B.

</div>
<div lang="zh">

甲 / 乙。

</div>"""


def test_cell_has_half_of_the_heading_and_one_div():
    assert markdown_in(CELL, "en") == "## 1.1 Bytes\n\nA / B."
    assert markdown_in(CELL, "zh") == "## 1.1 字节\n\n甲 / 乙。"
    assert markdown_in(CELL, "both") == CELL
    with pytest.raises(EditionError, match='no <div lang="zh">'):
        markdown_in('<div lang="en">\n\nA.\n\n</div>', "zh")


LAB = '<span class="lab-only">The *buttons*.</span>'


@pytest.mark.parametrize(
    ("source", "rest"),
    [
        (f"{LAB}\n\nA.", "A."),
        (f"A.\n\n{LAB}\n\nB.", "A.\n\nB."),
        (f"A. {LAB} B.\n\nC.", "A. B.\n\nC."),
        (f"甲。{LAB}乙{LAB}。", "甲。乙。"),
        (f"- A.\n- {LAB}\n- B{LAB}.", "- A.\n- B."),
        (f"- A.\n- {LAB}", "- A."),
        ("- A <b>b</b>.", "- A <b>b</b>."),
    ],
)
def test_texts_for_jupyterlab_only_are_left_out(source, rest):
    assert without_lab_texts(source) == rest


@pytest.mark.parametrize(
    ("text", "english", "chinese"),
    [
        ("2.1 Bytes / second, in `x` / 每秒字节", "2.1 Bytes / second, in `x`", "每秒字节"),
        ("Rate / `2 / x` 的速率", "Rate", "`2 / x` 的速率"),
        ("### 2.1 Bytes / 字节", "### 2.1 Bytes", "### 2.1 字节"),
        ("- **A.** Early.<br>\n  **甲。** 尽早。", "- **A.** Early.", "- **甲。** 尽早。"),
        ("autocast and bf16<br>bf16 的 autocast", "autocast and bf16", "bf16 的 autocast"),
        *(
            (text, text, text)
            for text in ("memory / measure", "Buttons / English, 中文 or both", "3.1", "")
        ),
    ],
)
def test_text_with_two_halves_has_one_in_each_language(text, english, chinese):
    assert (half(text, "en"), half(text, "zh"), half(text, "both")) == (english, chinese, text)


GUIDE = """# Words / 术语

What each word means.

每个词是什么意思。

| English | 中文 | lesson<br>课 | question | 问题 |
|---|---|---|---|---|
| peak | 峰值 | 00 | Why? | 为什么？ |

1. One.<br>
   一。
2. Two.<br>
   二。
"""


def test_guide_has_one_language_and_a_glossary_keeps_both_terms():
    assert guide_in(GUIDE, "en") == (
        "# Words\n\nWhat each word means.\n\n| English | 中文 | lesson | question |\n"
        "| --- | --- | --- | --- |\n| peak | 峰值 | 00 | Why? |\n\n1. One.\n2. Two.\n"
    )
    assert guide_in(GUIDE, "zh") == (
        "# 术语\n\n每个词是什么意思。\n\n| English | 中文 | 课 | 问题 |\n"
        "| --- | --- | --- | --- |\n| peak | 峰值 | 00 | 为什么？ |\n\n1. 一。\n2. 二。\n"
    )


def test_html_loses_the_elements_of_the_other_language():
    html = '<td lang="en">peak</td><td lang="zh">峰值</td><img lang="zh"><p lang="en-US">x</p>'
    assert html_in(html, "en") == '<td lang="en">peak</td><img lang="zh"/><p lang="en-US">x</p>'
    assert html_in(html, "both") == html.replace('"zh"><p', '"zh"/><p')
