"""The pages: each lesson as a notebook in one language, whose solutions are closed anywhere."""

import ast
import re
from pathlib import Path

import pytest
from editions import failure, write_lesson

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("bs4")

from course_lib import labels
from course_lib.teaching import figure, language
from course_lib.teaching.pictures import pictures_in, show
from publish import pages
from publish.cells import is_solution, read_lessons, without_guards

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "notebooks"
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
HAN = re.compile(r"[\u3400-\u9fff]{2,}")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Language -> lessons of the edition."""
    folder = tmp_path_factory.mktemp("editions") / "pages"
    pages.build(NOTEBOOKS, folder)
    return {each: read_lessons(folder / each) for each in pages.LANGUAGES}


@pytest.fixture(scope="module")
def stored():
    return read_lessons(NOTEBOOKS)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_one_language_and_each_picture_once(built, stored, name):
    pictures = sum(
        bool(pictures_in(output.get("data", {}).get("text/html", "")))
        for cell in stored[name].cells
        if cell.cell_type == "code" and not is_solution(cell)
        for output in cell.outputs
    )
    for spoken, lessons in built.items():
        page = lessons[name]
        prose = "\n".join(cell.source for cell in page.cells if cell.cell_type == "markdown")
        outputs = [out for cell in page.cells if cell.cell_type == "code" for out in cell.outputs]
        shown = "\n".join([prose, *(out.get("data", {}).get("text/html", "") for out in outputs)])
        assert f'lang="{pages.LANGUAGES[spoken]}"' not in shown
        assert "course-language" not in shown and "<figure" not in shown
        if spoken == "en":
            known = r"\[中文\]|English, 中文 or both|`[^`]*`"
            assert HAN.findall(re.sub(known, "", shown)) == []
        else:
            bare = re.sub(r"<details>.*?</details>|```.*?```", "", prose, flags=re.S)
            words = re.compile(r"\b[Tt]he [a-z]+ [a-z]+")
            english = [each for each in bare.split("\n\n")[1:] if words.search(each)]
            assert [each for each in english if not HAN.search(each)] == []  # titles of papers
        assert sum("image/png" in out.get("data", {}) for out in outputs) == pictures
        assert all(
            out.metadata["image/png"]["alt"]
            for out in outputs
            if "image/png" in out.get("data", {})
        )
        assert [cell.id for cell in page.cells[1:]] == [cell.id for cell in stored[name].cells]


@pytest.mark.parametrize("name", NAMES)
def test_a_solution_is_closed_and_its_code_can_be_copied_from_there(built, stored, name):
    solutions = {
        cell.id: cell.source
        for cell in without_guards(stored[name]).cells
        if cell.cell_type == "code" and "SOLUTION" in cell.source
    }
    for lessons in built.values():
        page = lessons[name]
        code = "\n".join(cell.source for cell in page.cells if cell.cell_type == "code")
        assert "SOLUTION" not in code
        for cell in page.cells:
            if cell.id in solutions:
                assert cell.cell_type == "markdown" and cell.source.startswith(
                    "<details>\n<summary>"
                )
                assert cell.source.endswith("\n\n</details>")
                (answer,) = re.findall(r"^```python\n(.*?)^```", cell.source, re.M | re.S)
                assert ast.dump(ast.parse(answer)) == ast.dump(ast.parse(solutions[cell.id]))
        closed = [cell for cell in page.cells if cell.source.startswith("<details>")]
        assert len(closed) == len(solutions)


def test_pages_name_nothing_that_only_jupyterlab_has(built, stored):
    prose = "".join(cell.source for cell in stored["00_start_here"].cells)
    named = re.compile("three (?:buttons|dots)|三个按钮|三个点|and no buttons|也没有按钮|lab-only")
    assert len(set(named.findall(prose))) == 7, "JupyterLab itself has them"
    for lessons in built.values():
        for page in lessons.values():
            assert named.findall("".join(cell.source for cell in page.cells)) == []


def test_sections_keep_the_numbers_that_the_text_refers_to(built, stored):
    for name, notebook in stored.items():
        numbers = [
            found[1]
            for cell in notebook.cells
            if (found := re.match(r"#+ ([\d.]+) ", cell.source)) and cell.cell_type == "markdown"
        ]
        for lessons in built.values():
            headings = [cell.source for cell in lessons[name].cells if cell.cell_type == "markdown"]
            found = [re.match(r"#+ ([\d.]+) ", each) for each in headings]
            assert numbers == [each[1] for each in found if each]


def test_the_library_is_installed_where_it_is_missing_and_only_from_an_address(stored):
    transform = pytest.importorskip("IPython.core.inputtransformer2").TransformerManager()
    notebook = stored["00_start_here"]
    without = pages.one_language(notebook, "en", "00_start_here", "")
    hosted = pages.one_language(notebook, "zh", "00_start_here", "https://example.org/course")
    assert "install" not in {cell.id for cell in without.cells}
    cell = hosted.cells[1]
    assert cell.id == "install" and '"course_lib @ git+https://example.org/course"' in cell.source
    asked = []
    shell = type("Shell", (), {"run_line_magic": lambda _, *line: asked.append(line)})()
    code = transform.transform_cell(cell.source)
    exec(code, {"get_ipython": lambda: shell})
    assert asked == []  # it is there
    exec(code.replace('"course_lib"', '"course_lib_absent"'), {"get_ipython": lambda: shell})
    assert [magic for magic, _ in asked] == ["pip"]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("spoken", "words"), [("en", "peak (MB)"), ("zh", "峰值（MB）")])
def test_a_page_that_runs_shows_tables_and_figures_in_its_language_alone(
    monkeypatch, spoken, words
):
    monkeypatch.setattr(labels, "_shown", ("en", "zh"))
    monkeypatch.setenv("COURSE_LANG", "both")
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
    with pytest.raises(ValueError, match=r"language must be .*, got 'klingon'"):
        language("klingon", only=True)


def test_a_lesson_that_lacks_a_language_is_one_sentence_and_nothing_is_written(tmp_path, capsys):
    cells = [
        nbformat.v4.new_markdown_cell('# 0 A / 甲\n\n<div lang="en">\n\nOnly English.\n\n</div>'),
        nbformat.v4.new_code_cell(
            "1",
            execution_count=1,
            outputs=[
                nbformat.v4.new_output("execute_result", {"text/plain": "1"}, execution_count=1)
            ],
        ),
    ]
    notebook = nbformat.writes(nbformat.v4.new_notebook(cells=cells))
    write_lesson(tmp_path / "notebooks", "00_a", notebook)
    said = failure(pages, tmp_path / "notebooks", tmp_path / "out", capsys)
    assert '00_a, a markdown cell has no <div lang="zh">' in said
