"""The learner's copy of the lessons: what it shows, and that an update loses nothing."""

import json
import random
import re
import shutil
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbconvert")
pytest.importorskip("IPython")

from IPython.core.interactiveshell import InteractiveShell

from course_lib.labels import in_both_languages
from course_lib.teaching import missing_names
from publish import work
from publish.cells import check_links, is_solution, read_lessons
from publish.student import check_of

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "notebooks"
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


@pytest.fixture(autouse=True)
def own_signatures(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path_factory.mktemp("jupyter")))


def code(source, key, output=""):
    outputs = [nbformat.v4.new_output("stream", text=output)] if output else []
    return nbformat.v4.new_code_cell(source, id=key, outputs=outputs)


def prose(source, key):
    return nbformat.v4.new_markdown_cell(source, id=key)


def book(*cells):
    return nbformat.v4.new_notebook(cells=deepcopy(list(cells)))


TITLE = prose("# 1 Bytes / 字节", "title")
SWITCH = code("language()", "switch", "buttons")
IMPORTS = code("import torch", "imports")
STUB = code("answer = None\nlesson.check_sum(answer)", "stub")
PLOT = code("draw(answer)", "plot")
LESSON = book(TITLE, SWITCH, IMPORTS, STUB, PLOT)


def sources(notebook):
    return [cell.source for cell in notebook.cells]


def answered(text="answer = 42\nlesson.check_sum(answer)"):
    mine = deepcopy(LESSON)
    mine.cells[3].source = text
    mine.cells[3].outputs = [nbformat.v4.new_output("stream", text="right")]
    return mine


# --- the copy ---


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learner") / "work"
    said = list(work.make(NOTEBOOKS, folder))
    assert len(said) == 1 and "files written" in said[0]
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_learners_lesson_shows_no_result_but_the_language_switch(copy, name):
    notebook = nbformat.read(copy / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    first, *others = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "course-language" in first.outputs[0].data["text/html"]
    assert not any(cell.outputs or cell.execution_count for cell in others)
    check_links(name, notebook, copy)


def test_a_folded_cell_says_what_it_is_in_both_languages_and_runs_as_before(copy):
    for name, stored in read_lessons(NOTEBOOKS).items():
        mine = nbformat.read(copy / f"{name}.ipynb", as_version=4)
        assert "SOLUTION" not in "\n".join(sources(mine))
        for given, cell in zip(stored.cells, mine.cells, strict=True):
            assert given.id == cell.id
            if is_solution(given):
                first, _, rest = cell.source.partition("\n")
                assert first == work.SOLUTION and cell.metadata.jupyter.source_hidden
                assert given.source == f"### BEGIN SOLUTION\n{rest}\n### END SOLUTION"
            elif given.metadata.get("jupyter", {}).get("source_hidden"):
                assert cell.source == f"{work.FOLDED}\n{given.source}"
            else:
                assert cell.source == given.source.replace("](../docs/", "](docs/")


def test_the_copy_has_what_a_learner_needs_and_no_file_for_instructors(copy):
    shown = {path.name for path in copy.iterdir() if path.name[0] != "."}
    assert shown == {*(f"{name}.ipynb" for name in NAMES), "GLOSSARY.md", "docs", "examples"}
    for page in (copy / "docs").glob("*.md"):
        links = re.findall(r"\]\((\.\./[^)#]+)", page.read_text("utf-8"))
        assert links and [link for link in links if not (page.parent / link).exists()] == []


def test_the_copy_is_made_once_and_a_deleted_lesson_comes_back(tmp_path):
    folder = tmp_path / "work"
    list(work.make(NOTEBOOKS, folder))
    lesson, glossary = folder / f"{NAMES[0]}.ipynb", folder / "GLOSSARY.md"
    lesson.write_text(lesson.read_text("utf-8").replace("None", "134"), "utf-8")
    mine = lesson.read_bytes()
    glossary.unlink()
    assert list(work.make(NOTEBOOKS, folder)) == [
        f"{folder}: 1 files written. Your answers are kept there."
    ]
    assert lesson.read_bytes() == mine and glossary.exists()
    assert list(work.make(NOTEBOOKS, folder)) == []


def test_git_ignores_the_copy():
    assert "work/" in (ROOT / ".gitignore").read_text("utf-8").splitlines()


# --- an update ---


def test_a_cell_that_the_course_leaves_alone_stays_as_the_learner_left_it():
    mine = answered()
    mine.cells[4].outputs = [nbformat.v4.new_output("stream", text="figure")]
    new = deepcopy(LESSON)
    new.cells[2] = code("import torch, math", "imports2")
    merged, number = work.merge(LESSON, mine, new)
    assert sources(merged) == [TITLE.source, "language()", "import torch, math", *sources(mine)[3:]]
    assert [cell.outputs[0].text for cell in merged.cells[3:]] == ["right", "figure"]
    assert number == 1


def test_an_answer_to_a_changed_exercise_stands_below_the_new_one():
    new = deepcopy(LESSON)
    new.cells[3] = code("answer = ...  # in bytes\nlesson.check_sum(answer)", "stub2")
    merged, number = work.merge(LESSON, answered(), new)
    assert sources(merged)[3:] == [
        "answer = ...  # in bytes\nlesson.check_sum(answer)",
        work.EARLIER,
        "answer = 42\nlesson.check_sum(answer)",
        "draw(answer)",
    ]
    assert number == 1
    # and the next update leaves it alone
    newer = deepcopy(new)
    newer.cells[4] = code("draw(answer, 2)", "plot2")
    again, number = work.merge(new, merged, newer)
    assert sources(again)[3:6] == sources(merged)[3:6] and number == 2


def test_an_untouched_cell_that_the_course_changed_or_removed_is_replaced():
    new = book(TITLE, SWITCH, code("import torch, math", "imports2"), PLOT)
    merged, number = work.merge(LESSON, LESSON, new)
    assert merged == new and number == 0


def test_an_answer_to_a_removed_exercise_stays_at_its_place():
    new = book(TITLE, SWITCH, IMPORTS, PLOT)
    merged, _ = work.merge(LESSON, answered(), new)
    assert sources(merged)[2:] == [IMPORTS.source, answered().cells[3].source, PLOT.source]


def test_new_cells_of_the_course_and_of_the_learner_are_both_there():
    mine = answered()
    mine.cells.insert(4, code("my_own = 1", "mine"))
    mine.cells.insert(0, prose("My notes", "notes"))
    new = deepcopy(LESSON)
    new.cells.insert(4, code("more()", "more"))
    merged, number = work.merge(LESSON, mine, new)
    assert sources(merged)[0] == "My notes" and number == 3
    assert sources(merged)[4:] == [sources(answered())[3], "my_own = 1", "more()", PLOT.source]


def test_edited_prose_stays_below_the_new_prose():
    mine = deepcopy(LESSON)
    mine.cells[0].source += "\n\nI do not understand this."
    new = deepcopy(LESSON)
    new.cells[0] = prose("# 1 Bytes of a step / 一步的字节", "title2")
    merged, _ = work.merge(LESSON, mine, new)
    assert sources(merged)[:3] == [new.cells[0].source, work.EARLIER, mine.cells[0].source]


def test_the_new_switch_replaces_the_old_one():
    new = deepcopy(LESSON)
    new.cells[1].outputs[0].text = "new buttons"
    merged, _ = work.merge(LESSON, answered(), new)
    assert merged.cells[1].outputs[0].text == "new buttons"


def shuffled(generator, notebook, words):
    """A notebook after some edits: cells are changed, added, removed, doubled and moved."""
    cells = deepcopy(notebook.cells)
    for number in range(generator.randrange(1, 6)):
        place, kind = generator.randrange(len(cells)), generator.randrange(6)
        text = f"{words} {generator.random()}\n{cells[place].source}"
        if kind < 3:
            cells[place].source = text
        elif kind == 3:
            cells.insert(place, code(text, f"{words}-{number}-{generator.randrange(10**6)}"))
        elif kind == 4 and len(cells) > 2:
            del cells[place]
        else:
            cells.append(deepcopy(cells[place]))
    return nbformat.v4.new_notebook(cells=cells)


@pytest.mark.filterwarnings("ignore::nbformat.warnings.DuplicateCellId")
@pytest.mark.parametrize("seed", range(60))
def test_nothing_that_the_learner_typed_is_lost(seed):
    generator = random.Random(seed)
    mine = shuffled(generator, LESSON, "mine")
    new = shuffled(generator, LESSON, "course")
    ids = set()
    for number, cell in enumerate(new.cells):  # a changed cell has another id, and ids are unique
        if cell.source not in sources(LESSON) or cell.id in ids:
            cell.id = f"new-{number}"
        ids.add(cell.id)
    merged, _ = work.merge(LESSON, mine, new)
    typed = [source for source in sources(mine) if source not in sources(LESSON)]
    assert [source for source in typed if source not in sources(merged)] == []
    kept = {cell.id for cell in mine.cells}
    from_course = [cell.source for cell in new.cells if cell.id not in kept]
    assert [source for source in from_course if source not in sources(merged)] == []
    assert len({cell.id for cell in merged.cells}) == len(merged.cells)
    nbformat.validate(nbformat.from_dict(json.loads(nbformat.writes(merged))))


def course(folder, notebook=LESSON):
    """A course of one lesson, with the file that its edition copies."""
    notebooks = folder / "notebooks"
    notebooks.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, notebooks / "01_bytes.ipynb")
    (notebooks / "GLOSSARY.md").write_text("peak", "utf-8")
    return notebooks


def test_update_keeps_the_answer_and_names_a_backup_of_the_file(tmp_path):
    notebooks, folder = course(tmp_path), tmp_path / "work"
    list(work.make(notebooks, folder))
    assert list(work.update(notebooks, folder)) == [
        f"{folder} has the newest edition of every lesson."
    ]
    lesson = folder / "01_bytes.ipynb"
    mine = nbformat.read(lesson, as_version=4)
    mine.cells[3].source = "answer = 42\nlesson.check_sum(answer)"
    nbformat.write(mine, lesson)
    before = lesson.read_bytes()
    new = deepcopy(LESSON)
    new.cells.append(code("print('new')", "new"))
    course(tmp_path, new)
    (said,) = work.make(notebooks, folder)
    assert "01_bytes.ipynb" in said and "make update" in said and lesson.read_bytes() == before
    (said,) = work.update(notebooks, folder)
    (backup,) = (folder / work.BACKUPS).rglob("*.ipynb")
    assert str(backup) in said and backup.read_bytes() == before
    assert sources(nbformat.read(lesson, as_version=4))[3:] == [
        "answer = 42\nlesson.check_sum(answer)",
        "draw(answer)",
        "print('new')",
    ]
    assert "newest edition" in next(work.update(notebooks, folder))


def test_update_replaces_an_untouched_lesson_without_a_backup(tmp_path):
    notebooks, folder = course(tmp_path), tmp_path / "work"
    list(work.make(notebooks, folder))
    course(tmp_path, book(TITLE, SWITCH))
    (said,) = work.update(notebooks, folder)
    assert said.endswith("01_bytes.ipynb: new edition.") and not (folder / work.BACKUPS).exists()


def test_a_lesson_that_cannot_be_read_or_is_gone_stays(tmp_path, capsys):
    notebooks, folder = course(tmp_path), tmp_path / "work"
    list(work.make(notebooks, folder))
    lesson = folder / "01_bytes.ipynb"
    lesson.write_text("{ half", "utf-8")
    course(tmp_path, book(TITLE, SWITCH))
    said = list(work.update(notebooks, folder))
    assert "cannot be read and stays unchanged" in said[0] and lesson.read_text("utf-8") == "{ half"
    (notebooks / "01_bytes.ipynb").rename(notebooks / "02_bytes.ipynb")
    said = list(work.update(notebooks, folder))
    assert f"{lesson}: the course no longer has this file; yours stays." in said
    assert lesson.exists() and (folder / "02_bytes.ipynb").exists()


def test_a_folder_without_lessons_is_one_sentence(tmp_path):
    command = [sys.executable, "-m", "publish.work", "--notebooks", str(tmp_path)]
    command += ["--work", str(tmp_path / "work")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("work: ")
    assert done.stderr.count("\n") == 1 and not (tmp_path / "work").exists()


# --- a cell that lacks a name ---


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lesson_01", ("is imported further up", "import weakref", "由上面的一个单元格导入")),
        ("make_decoder", ("is defined further up", "def make_decoder(**changes):", "定义")),
        ("torhc", ()),
    ],
)
def test_a_missing_name_names_the_cell_to_run(name, said):
    hint = missing_names.cell_to_run(name, NOTEBOOKS / "01_memory_bottleneck.ipynb")
    words = " ".join(in_both_languages(hint)) if hint else ""
    assert bool(words) == bool(said) and all(part in words for part in said)
    assert not said or ("Run All Above Selected Cell" in words and f"`{name}`" in words)


def test_an_error_without_a_notebook_is_shown_as_it_is(tmp_path):
    assert missing_names.cell_to_run("torch", tmp_path / "none.ipynb") == ""
    (tmp_path / "list.ipynb").write_text("[]", "utf-8")
    assert missing_names.cell_to_run("torch", tmp_path / "list.ipynb") == ""


def test_the_kernel_shows_the_sentence_below_the_error(monkeypatch, capsys):
    monkeypatch.setenv("JPY_SESSION_NAME", str(NOTEBOOKS / "01_memory_bottleneck.ipynb"))
    shell = InteractiveShell()
    missing_names.load_ipython_extension(shell)
    shell.run_cell("lesson_01.check_training_state(None)")
    printed = capsys.readouterr().out
    assert printed.index("NameError") < printed.index("is imported further up")
    shell.run_cell("1 / 0")
    assert "ZeroDivisionError" in capsys.readouterr().out
    settings = json.loads((ROOT / "publish/jupyterlab/ipython_kernel_config.json").read_text())
    assert settings["IPKernelApp"]["extensions"] == [missing_names.__name__]


def test_every_exercise_has_its_check_in_the_copy(copy):
    """An update finds the new edition of an exercise by its check."""
    for name, stored in read_lessons(NOTEBOOKS).items():
        mine = nbformat.read(copy / f"{name}.ipynb", as_version=4)
        checks = [check_of(cell) for cell in stored.cells if check_of(cell)]
        stubs = [cell for cell in mine.cells if not cell.source.startswith(work.SOLUTION)]
        assert [check_of(cell) for cell in stubs if check_of(cell)] == checks


def test_make_lab_makes_the_copy_before_it_opens_it(tmp_path):
    if shutil.which("make") is None:
        pytest.skip("needs make")
    stamps = [tmp_path / name for name in ("bin/pip", ".course-installed")]
    stamps[0].parent.mkdir()
    for stamp in stamps:
        stamp.touch()

    def commands(target):
        command = ["make", "-n", target, f"VENV={tmp_path}", "ARGS=--no-browser"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    said = commands("lab")
    assert said.index("-m publish.work\n") < said.index("root_dir=work --no-browser work/00_start")
    assert commands("update").endswith("-m publish.work --update\n")
    assert "root_dir=. --no-browser notebooks/00_start" in commands("results")
