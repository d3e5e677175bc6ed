"""Test the pages edition, and the functions that reduce texts to one language."""

import ast
import re

import pytest
from edition_fixtures import NAMES, NOTEBOOKS, stored_lessons

pytest.importorskip("nbformat")
pytest.importorskip("bs4")

from course_lib import labels
from course_lib.teaching import figure, language
from course_lib.teaching.pictures import pictures_in, show
from publish import pages
from publish.cells import is_solution, read_lessons, remove_guard
from publish.languages import guide_in, half, html_in, markdown_in, without_lab_texts

HAN = re.compile(r"[\u3400-\u9fff]{2,}")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return the lessons of the edition by language."""
    folder = tmp_path_factory.mktemp("editions") / "pages"
    pages.build(NOTEBOOKS, folder)
    return {each: read_lessons(folder / each) for each in pages.LANGUAGES}


def outputs_of(notebook):
    """Return (metadata, data) of the outputs of all code cells except solutions."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and not is_solution(cell)]
    outputs = [output for cell in cells for output in cell.outputs]
    return [(output.get("metadata"), output.get("data", {})) for output in outputs]


@pytest.mark.parametrize("spoken", pages.LANGUAGES)
@pytest.mark.parametrize("name", NAMES)
def test_lesson_page_is_monolingual_with_collapsed_solutions(built, spoken, name):
    stored, page = stored_lessons()[name], built[spoken][name]
    assert [cell.id for cell in page.cells[1:]] == [cell.id for cell in stored.cells]
    prose = "\n".join(cell.source for cell in page.cells if cell.cell_type == "markdown")
    shown = "\n".join([prose, *(data.get("text/html", "") for _, data in outputs_of(page))])
    assert f'lang="{pages.LANGUAGES[spoken]}"' not in shown
    assert "course-language" not in shown and "<figure" not in shown
    assert "lab-only" not in shown
    if spoken == "en":
        names = r"\[中文\]|English, 中文 or both|`[^`]*`"
        assert HAN.findall(re.sub(names, "", shown)) == []
    drawn = [pictures_in(data.get("text/html", "")) for _, data in outputs_of(stored)]
    words = [each[spoken].alt for each in drawn if each]
    found = [about["image/png"]["alt"] for about, data in outputs_of(page) if "image/png" in data]
    assert found == words and all(words)

    for cell, original in zip(page.cells[1:], stored.cells, strict=True):
        if original.cell_type == "code" and "SOLUTION" in original.source:
            assert cell.source.startswith("<details>\n<summary>")
            assert cell.cell_type == "markdown" and cell.source.endswith("\n\n</details>")
            (answer,) = re.findall(r"^```python\n(.*?)^```", cell.source, re.M | re.S)
            assert ast.dump(ast.parse(answer)) == ast.dump(ast.parse(remove_guard(original.source)))
        else:
            assert "SOLUTION" not in cell.source and "<details>" not in cell.source


def test_install_cell_runs_pip_only_if_library_is_missing():
    transform = pytest.importorskip("IPython.core.inputtransformer2").TransformerManager()
    name, notebook = next(iter(stored_lessons().items()))
    without = pages.one_language(notebook, "en", name, "")
    hosted = pages.one_language(notebook, "zh", name, "https://example.org/course")
    assert "install" not in {cell.id for cell in without.cells}
    cell = hosted.cells[1]
    assert cell.id == "install" and '"course_lib @ git+https://example.org/course"' in cell.source
    magics = []
    shell = type("Shell", (), {"run_line_magic": lambda _, *line: magics.append(line[0])})()
    code = transform.transform_cell(cell.source)
    exec(code, {"get_ipython": lambda: shell})
    assert magics == []  # the library is installed
    exec(code.replace('"course_lib"', '"course_lib_absent"'), {"get_ipython": lambda: shell})
    assert magics == ["pip"]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("spoken", "words"), [("en", "peak (MB)"), ("zh", "峰值（MB）")])
def test_executed_page_shows_labels_and_plots_in_one_language(monkeypatch, spoken, words):
    language(spoken, only=True)
    assert labels.markup("peak (MB)") == labels.say("peak (MB)") == words
    drawn, axes = figure()
    axes.set_xlabel("peak (MB)")
    found = []
    monkeypatch.setattr(
        "IPython.display.display", lambda data, **_: found.append(data["text/html"])
    )
    show(drawn)
    assert list(pictures_in(found[0])) == [spoken]


CELL = (
    '## 1.1 Bytes / 字节\n\n<div lang="en">\n\nA / B.\n\n</div>\n<div lang="zh">\n\n甲。\n\n</div>'
)


def test_markdown_of_one_language_contains_its_heading_and_div():
    assert markdown_in(CELL, "en") == "## 1.1 Bytes\n\nA / B."
    assert markdown_in(CELL, "zh") == "## 1.1 字节\n\n甲。"
    assert markdown_in(CELL, "both") == CELL


LAB = '<span class="lab-only">The *buttons*.</span>'


@pytest.mark.parametrize(
    ("source", "rest"),
    [
        (f"A.\n\n{LAB}\n\nB.", "A.\n\nB."),
        (f"A. {LAB} B.\n\nC.", "A. B.\n\nC."),
        (f"甲。{LAB}乙{LAB}。", "甲。乙。"),
        (f"- A <b>b</b>.\n- {LAB}\n- B{LAB}.\n- {LAB}", "- A <b>b</b>.\n- B."),
    ],
)
def test_web_page_omits_texts_marked_for_jupyterlab_only(source, rest):
    assert without_lab_texts(source) == rest


@pytest.mark.parametrize(
    ("text", "english", "chinese"),
    [
        ("2.1 Bytes / second, in `x` / 每秒字节", "2.1 Bytes / second, in `x`", "每秒字节"),
        ("Rate / `2 / x` 的速率", "Rate", "`2 / x` 的速率"),
        ("### 2.1 Bytes / 字节", "### 2.1 Bytes", "### 2.1 字节"),
        ("- **A.** Early.<br>\n  **甲。** 尽早。", "- **A.** Early.", "- **甲。** 尽早。"),
        ("memory / measure", "memory / measure", "memory / measure"),
        ("Buttons / English, 中文 or both",) * 3,
    ],
)
def test_bilingual_text_is_divided_into_its_two_languages(text, english, chinese):
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


def test_guide_in_one_language_has_bilingual_glossary_terms():
    assert guide_in(GUIDE, "en") == (
        "# Words\n\nWhat each word means.\n\n| English | 中文 | lesson | question |\n"
        "| --- | --- | --- | --- |\n| peak | 峰值 | 00 | Why? |\n\n1. One.\n2. Two.\n"
    )
    chinese = guide_in(GUIDE, "zh")
    assert "| English | 中文 | 课 | 问题 |\n" in chinese and "1. 一。\n2. 二。\n" in chinese
    assert "What each" not in chinese and "| peak | 峰值 | 00 | 为什么？ |" in chinese


def test_html_of_one_language_omits_elements_of_other_language():
    html = '<td lang="en">peak</td><td lang="zh">峰值</td><img lang="zh"><p lang="en-US">x</p>'
    assert html_in(html, "en") == '<td lang="en">peak</td><img lang="zh"/><p lang="en-US">x</p>'
    assert html_in(html, "both") == html.replace('"zh"><p', '"zh"/><p')
