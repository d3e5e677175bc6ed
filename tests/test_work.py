"""The learner's copy of the lessons: what it shows, and that an update loses nothing."""

import json
import os
import random
import re
import shutil
import subprocess
from copy import deepcopy

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbconvert")
pytest.importorskip("IPython")

from editions import NAMES, NOTEBOOKS, stored_lessons
from IPython.core.interactiveshell import InteractiveShell
from patience import HANGS_SECONDS

from course_lib import missing_names
from course_lib.labels import in_both_languages
from publish import work
from publish.cells import check_links, is_solution
from publish.student import check_of

ROOT = NOTEBOOKS.parent


@pytest.fixture(autouse=True)
def own_signatures(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path_factory.mktemp("jupyter")))


def cell(key, source, output=""):
    if not output:
        return nbformat.v4.new_markdown_cell(source, id=key)
    outputs = [nbformat.v4.new_output("stream", text=output)]
    return nbformat.v4.new_code_cell(source, id=key, outputs=outputs)


# A capital letter stands for a cell of the course, a small one for a cell that the learner typed.
CELLS = {
    "T": cell("title", "# 1 Bytes / 字节"),
    "t": cell("title", "# 1 Bytes / 字节\n\nI do not understand this."),
    "U": cell("title2", "# 1 Bytes of a step / 一步的字节"),  # T in a new edition
    "S": cell("switch", "language()", "buttons"),
    "R": cell("switch", "language()", "new buttons"),  # S in a new edition
    "I": cell("imports", "import torch", "-"),
    "J": cell("imports2", "import torch, math", "-"),  # I in a new edition
    "A": cell("stub", "answer = None\nlesson.check_sum(answer)", "-"),
    "a": cell("stub", "answer = 42\nlesson.check_sum(answer)", "right"),
    "B": cell("stub2", "answer = ...  # in bytes\nlesson.check_sum(answer)", "-"),  # A in a new one
    "P": cell("plot", "draw(answer)", "-"),
    "p": cell("plot", "draw(answer)", "figure"),  # P, which the learner ran
    "Q": cell("plot2", "draw(answer, 2)", "-"),  # P in a new edition
    # Before an edition in which lessons import their files, and in it:
    "K": cell("old", "from course_lib.lessons import lesson_01", "-"),
    "L": cell("new", "from course_lib.lessons.lesson_01 import exercises, figures", "-"),
    "O": cell("old-stub", "answer = None\nlesson_01.check_sum(answer)", "-"),
    "o": cell("old-stub", "answer = 42\nlesson_01.check_sum(answer)", "right"),
    "N": cell("new-stub", "answer = None\nexercises.check_sum(answer)", "-"),
    "w": cell("new-stub", "answer = 42\nexercises.check_sum(answer)", "right"),
    "V": cell("new-stub2", "answer = ...  # in bytes\nexercises.check_sum(answer)", "-"),
    "v": cell("old-stub", "answer = 42\nexercises.check_sum(answer)", "right"),
    "D": cell("old-plot", "lesson_01.draw(answer)", "-"),
    "d": cell("old-plot", "lesson_01.draw(answer)", "figure"),  # D, which the learner ran
    "E": cell("new-plot", "figures.draw(answer)", "-"),
    "f": cell("new-plot", "figures.draw(answer)", "figure"),
    "g": cell("mine2", "lesson_01.draw(42)\nmy.lesson_01.draw(1)", "-"),
    "h": cell("mine2", "figures.draw(42)\nmy.lesson_01.draw(1)", "-"),
    "M": cell("more", "more()", "-"),
    "m": cell("mine", "my_own = 1", "-"),
    "n": cell("notes", "My notes"),
    "e": cell("earlier", work.EARLIER),
}


def book(letters):
    return nbformat.v4.new_notebook(cells=[deepcopy(CELLS[letter]) for letter in letters])


LESSON = book("TSIAP")


def shown(notebook):
    """What each cell says and shows."""
    return [(c.source, [out.text for out in c.get("outputs", [])]) for c in notebook.cells]


def sources(notebook):
    return [cell.source for cell in notebook.cells]


# --- the copy ---


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learner") / "work"
    [said] = work.make(NOTEBOOKS, folder)
    assert "files written" in said
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_learners_lesson_is_the_stored_one_with_folded_cells_and_no_result_but_the_switch(
    copy, name
):
    mine = nbformat.read(copy / f"{name}.ipynb", as_version=4)
    nbformat.validate(mine)
    check_links(name, mine, copy)
    first, *others = [cell for cell in mine.cells if cell.cell_type == "code"]
    assert "course-language" in first.outputs[0].data["text/html"]
    assert not any(cell.outputs or cell.execution_count for cell in others)
    for given, cell in zip(stored_lessons()[name].cells, mine.cells, strict=True):
        assert given.id == cell.id and "SOLUTION" not in cell.source
        if is_solution(given):
            first, _, rest = cell.source.partition("\n")
            assert first == work.SOLUTION and cell.metadata.jupyter.source_hidden
            assert given.source == f"### BEGIN SOLUTION\n{rest}\n### END SOLUTION"
            assert not check_of(given)  # an update finds an exercise by its check
        else:
            folded = given.metadata.get("jupyter", {}).get("source_hidden")
            text = given.source if folded else given.source.replace("](../docs/", "](docs/")
            assert cell.source == (f"{work.FOLDED}\n{text}" if folded else text)


def test_links_from_pages_of_the_copy_lead_somewhere(copy):
    for page in (copy / "docs").glob("*.md"):
        links = re.findall(r"\]\((\.\./[^)#]+)", page.read_text("utf-8"))
        assert links and [link for link in links if not (page.parent / link).exists()] == []


# --- an update ---


# the lesson as it was given, the learner's, the new edition, both merged; how many cells of it the
# learner typed
MERGED = {
    "a cell that the course leaves alone": ("TSIAP", "TSIap", "TSJAP", "TSJap", 1),
    "untouched cells that the course changed or removed": ("TSIAP", "TSIAP", "TSJP", "TSJP", 0),
    "an answer to a changed exercise": ("TSIAP", "TSIaP", "TSIBP", "TSIBeaP", 1),
    "the update after that": ("TSIBP", "TSIBeaP", "TSIBQ", "TSIBeaQ", 2),
    "an answer to a removed exercise": ("TSIAP", "TSIaP", "TSIP", "TSIaP", 1),
    "new cells of both": ("TSIAP", "nTSIamP", "TSIAMP", "nTSIamMP", 3),
    "an edition that imports files": ("TSKOD", "TSKodg", "TSLNE", "TSLwfh", 2),
    "such an edition with another exercise": ("TSKOD", "TSKoD", "TSLVE", "TSLVevE", 1),
    "such an edition, of which nothing was typed": ("TSKOD", "TSKOD", "TSLNE", "TSLNE", 0),
    "edited prose and the new switch": ("TSIAP", "tSIAP", "URIAP", "UetRIAP", 1),
}


@pytest.mark.parametrize("name", MERGED)
def test_an_update_brings_the_new_cells_and_keeps_what_the_learner_typed(name):
    *books, typed = MERGED[name]
    given, mine, new, expected = map(book, books)
    merged, number = work.merge(given, mine, new)
    assert shown(merged) == shown(expected) and number == typed


def shuffled(generator, words):
    """The lesson after some edits: cells are changed, added, removed, doubled and moved."""
    cells = deepcopy(LESSON.cells)
    for number in range(generator.randrange(1, 6)):
        place, kind = generator.randrange(len(cells)), generator.randrange(6)
        text = f"{words} {generator.random()}\n{cells[place].source}"
        if kind < 3:
            cells[place].source = text
        elif kind == 3:
            cells.insert(place, cell(f"{words}-{number}-{generator.randrange(10**6)}", text, "-"))
        elif kind == 4 and len(cells) > 2:
            del cells[place]
        else:
            cells.append(deepcopy(cells[place]))
    return nbformat.v4.new_notebook(cells=cells)


@pytest.mark.filterwarnings("ignore::nbformat.warnings.DuplicateCellId")
@pytest.mark.parametrize("seed", range(30))
def test_nothing_that_the_learner_typed_is_lost(seed):
    generator = random.Random(seed)
    mine, new = shuffled(generator, "mine"), shuffled(generator, "course")
    ids = set()
    for number, each in enumerate(new.cells):  # a changed cell has another id, and ids are unique
        if each.source not in sources(LESSON) or each.id in ids:
            each.id = f"new-{number}"
        ids.add(each.id)
    merged, _ = work.merge(LESSON, mine, new)
    kept = {each.id for each in mine.cells}
    from_course = {each.source for each in new.cells if each.id not in kept}
    typed = {*sources(mine)} - {*sources(LESSON)}
    assert typed | from_course <= {*sources(merged)}
    assert len({each.id for each in merged.cells}) == len(merged.cells)
    nbformat.validate(nbformat.from_dict(json.loads(nbformat.writes(merged))))


@pytest.fixture
def course(tmp_path):
    """A function that writes a course of one lesson, and the learner's folder of the first one."""

    def write(letters):
        nbformat.write(book(letters), notebooks / "01_bytes.ipynb")
        return notebooks

    notebooks, folder = tmp_path / "notebooks", tmp_path / "work"
    notebooks.mkdir()
    (notebooks / "GLOSSARY.md").write_text("peak", "utf-8")
    list(work.make(write("TSIAP"), folder))
    return write, folder


def test_the_copy_is_made_once_and_a_deleted_file_comes_back(course):
    write, folder = course
    notebooks, lesson, glossary = write("TSIAP"), folder / "01_bytes.ipynb", folder / "GLOSSARY.md"
    lesson.write_text(lesson.read_text("utf-8").replace("None", "134"), "utf-8")
    mine = lesson.read_bytes()
    glossary.unlink()
    [said] = work.make(notebooks, folder)
    assert "1 files written" in said and lesson.read_bytes() == mine and glossary.exists()
    assert list(work.make(notebooks, folder)) == []
    assert "work/" in (ROOT / ".gitignore").read_text("utf-8").splitlines()


def test_update_keeps_the_answer_and_names_a_backup_of_the_file(course):
    write, folder = course
    [said] = work.update(write("TSIAP"), folder)
    assert "newest edition" in said
    lesson = folder / "01_bytes.ipynb"
    nbformat.write(book("TSIaP"), lesson)
    before, notebooks = lesson.read_bytes(), write("TSIAPM")
    [said] = work.make(notebooks, folder)
    assert "01_bytes.ipynb" in said and "make update" in said and lesson.read_bytes() == before
    [said] = work.update(notebooks, folder)
    [backup] = (folder / work.BACKUPS).rglob("*.ipynb")
    assert str(backup) in said and backup.read_bytes() == before
    assert sources(nbformat.read(lesson, as_version=4)) == sources(book("TSIaPM"))
    assert "newest edition" in next(work.update(notebooks, folder))


def test_update_replaces_an_untouched_lesson_without_a_backup(course):
    write, folder = course
    [said] = work.update(write("TS"), folder)
    assert said.endswith("01_bytes.ipynb: new edition.") and not (folder / work.BACKUPS).exists()


def test_a_lesson_that_cannot_be_read_or_is_gone_stays(course):
    write, folder = course
    lesson, notebooks = folder / "01_bytes.ipynb", write("TS")
    lesson.write_text("{ half", "utf-8")
    said = next(work.update(notebooks, folder))
    assert "cannot be read" in said and lesson.read_text("utf-8") == "{ half"
    (notebooks / "01_bytes.ipynb").rename(notebooks / "02_bytes.ipynb")
    assert f"{lesson}: the course no longer" in "".join(work.update(notebooks, folder))
    assert lesson.exists() and (folder / "02_bytes.ipynb").exists()


def test_a_folder_without_lessons_is_one_sentence(tmp_path):
    with pytest.raises(SystemExit, match=r"^work: [^\n]+$"):
        work.main(["--notebooks", str(tmp_path), "--work", str(tmp_path / "work")])
    assert not (tmp_path / "work").exists()


# --- a cell that lacks a name ---


LESSON_01 = NOTEBOOKS / "01_memory_bottleneck.ipynb"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("exercises", ("is imported further up", "import weakref", "由上面的一个单元格导入")),
        ("make_decoder", ("is defined further up", "def make_decoder(**changes):", "定义")),
    ],
)
def test_a_missing_name_names_the_cell_to_run(name, said):
    words = " ".join(in_both_languages(missing_names.cell_to_run(name, LESSON_01)))
    for part in (*said, "Run All Above Selected Cell", f"`{name}`"):
        assert part in words


def test_an_error_without_a_cell_or_a_notebook_is_shown_as_it_is(tmp_path):
    (tmp_path / "list.ipynb").write_text("[]", "utf-8")
    assert missing_names.cell_to_run("torch", tmp_path / "none.ipynb") == ""
    assert missing_names.cell_to_run("torch", tmp_path / "list.ipynb") == ""
    assert missing_names.cell_to_run("torhc", LESSON_01) == ""


def test_the_kernel_shows_the_sentence_below_the_error(monkeypatch, capsys):
    monkeypatch.setenv("JPY_SESSION_NAME", str(LESSON_01))
    shell = InteractiveShell()
    missing_names.load_ipython_extension(shell)
    shell.run_cell("exercises.check_training_state(None)")
    printed = capsys.readouterr().out
    assert printed.index("NameError") < printed.index("is imported further up")
    shell.run_cell("1 / 0")
    assert "ZeroDivisionError" in capsys.readouterr().out
    settings = json.loads((ROOT / "publish/jupyterlab/ipython_kernel_config.json").read_text())
    assert settings["IPKernelApp"]["extensions"] == [missing_names.__name__]


def test_a_kernel_of_make_lab_imports_neither_torch_nor_triton_nor_matplotlib(tmp_path):
    """Triton reads its settings when it is imported, so lesson 06 has to be the first to do so."""
    manager = pytest.importorskip("jupyter_client.manager")
    (tmp_path / "profile_default").mkdir()
    shutil.copy(
        ROOT / "publish/jupyterlab/ipython_kernel_config.json", tmp_path / "profile_default"
    )
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path), "PYTHONPATH": paths}
    kernel, client = manager.start_new_kernel(
        startup_timeout=HANGS_SECONDS, kernel_name="python3", env=environment
    )
    try:
        wanted = {"names": "' '.join(__import__('sys').modules)"}
        reply = client.execute_interactive("", user_expressions=wanted, timeout=HANGS_SECONDS)
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    names = reply["content"]["user_expressions"]["names"]["data"]["text/plain"].strip("'").split()
    assert missing_names.__name__ in names and "ipykernel" in names
    assert {"torch", "triton", "matplotlib"} & set(names) == set()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_lab_makes_the_copy_before_it_opens_it(tmp_path):
    (tmp_path / "bin").mkdir()
    for stamp in ("bin/pip", ".course-installed"):
        (tmp_path / stamp).touch()

    def commands(target):
        command = ["make", "-n", target, f"VENV={tmp_path}", "ARGS=--no-browser"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    said = commands("lab")
    assert said.index("-m publish.work\n") < said.index("root_dir=work --no-browser work/00_start")
    assert commands("update").endswith("-m publish.work --update\n")
    assert "root_dir=. --no-browser notebooks/00_start" in commands("results")
