"""Test the learner's copy of the lessons: its contents, updates, and advice for missing names."""

import json
import random
import re
import shutil
import subprocess
import sys
from copy import deepcopy

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbconvert")
pytest.importorskip("IPython")

from edition_fixtures import NAMES, NOTEBOOKS, stored_lessons
from IPython.core.interactiveshell import InteractiveShell

from course_lib import labels, missing_names
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


# A capital letter is a cell of the course, a small letter is a cell that the learner typed.
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
    "M": cell("more", "more()", "-"),
    "m": cell("mine", "my_own = 1", "-"),
    "n": cell("notes", "My notes"),
    "e": cell("earlier", work.EARLIER),
}


def book(letters):
    return nbformat.v4.new_notebook(cells=[deepcopy(CELLS[letter]) for letter in letters])


LESSON = book("TSIAP")


def sources_and_outputs(notebook):
    """Return the source and the output texts of each cell."""
    return [(c.source, [out.text for out in c.get("outputs", [])]) for c in notebook.cells]


def sources(notebook):
    return [cell.source for cell in notebook.cells]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learner") / "work"
    [message] = work.make(NOTEBOOKS, folder)
    assert "files written" in message
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_learner_copy_folds_solutions_and_clears_outputs(copy, name):
    mine = nbformat.read(copy / f"{name}.ipynb", as_version=4)
    nbformat.validate(mine)
    check_links(name, mine, copy)
    first, *others = [cell for cell in mine.cells if cell.cell_type == "code"]
    assert "course-language" in first.outputs[0].data["text/html"]
    assert not any(cell.outputs or cell.execution_count for cell in others)
    for stored, cell in zip(stored_lessons()[name].cells, mine.cells, strict=True):
        assert stored.id == cell.id and "SOLUTION" not in cell.source
        if is_solution(stored):
            first, _, rest = cell.source.partition("\n")
            assert first == work.SOLUTION and cell.metadata.jupyter.source_hidden
            assert stored.source == f"### BEGIN SOLUTION\n{rest}\n### END SOLUTION"
            assert not check_of(stored)  # an update finds an exercise by its check
        else:
            folded = stored.metadata.get("jupyter", {}).get("source_hidden")
            text = stored.source if folded else stored.source.replace("](../docs/", "](docs/")
            assert cell.source == (f"{work.FOLDED}\n{text}" if folded else text)


def test_links_of_copied_pages_have_targets(copy):
    pages = {page.name: page.read_text("utf-8") for page in (copy / "docs").glob("*.md")}
    links = {name: re.findall(r"\]\(([^)#:]+)[)#]", text) for name, text in pages.items()}
    assert all(links.values()) and "installing.zh.md" in links
    targets = {each for found in links.values() for each in found}
    assert {each for each in targets if not (copy / "docs" / each).exists()} == set()


# old edition, learner's notebook, new edition, merged notebook, number of the learner's own cells
MERGED = {
    "a cell that the course did not change": ("TSIAP", "TSIap", "TSJAP", "TSJap", 1),
    "untouched cells that the course changed or removed": ("TSIAP", "TSIAP", "TSJP", "TSJP", 0),
    "an answer to a changed exercise": ("TSIAP", "TSIaP", "TSIBP", "TSIBeaP", 1),
    "a second update": ("TSIBP", "TSIBeaP", "TSIBQ", "TSIBeaQ", 2),
    "new cells of both": ("TSIAP", "nTSIamP", "TSIAMP", "nTSIamMP", 3),
    "edited prose and the new switch": ("TSIAP", "tSIAP", "URIAP", "UetRIAP", 1),
}


@pytest.mark.parametrize("name", MERGED)
def test_merge_adds_new_cells_and_preserves_learner_edits(name):
    *notebooks, typed = MERGED[name]
    old, mine, new, expected = map(book, notebooks)
    merged, number = work.merge(old, mine, new)
    assert sources_and_outputs(merged) == sources_and_outputs(expected) and number == typed


def shuffled(generator, words):
    """Return the lesson after random edits: changed, added, removed and copied cells."""
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
def test_merge_after_random_edits_preserves_all_learner_cells(seed):
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
    """Return a function that writes a course of one lesson, and a learner's copy of the first."""

    def write(letters):
        nbformat.write(book(letters), notebooks / "01_bytes.ipynb")
        return notebooks

    notebooks, folder = tmp_path / "notebooks", tmp_path / "work"
    notebooks.mkdir()
    (notebooks / "GLOSSARY.md").write_text("peak", "utf-8")
    list(work.make(write("TSIAP"), folder))
    return write, folder


def test_make_does_not_overwrite_learner_copy_and_restores_deleted_files(course):
    write, folder = course
    notebooks, lesson, glossary = write("TSIAP"), folder / "01_bytes.ipynb", folder / "GLOSSARY.md"
    lesson.write_text(lesson.read_text("utf-8").replace("None", "134"), "utf-8")
    mine = lesson.read_bytes()
    glossary.unlink()
    [message] = work.make(notebooks, folder)
    assert "1 files written" in message and lesson.read_bytes() == mine and glossary.exists()
    assert list(work.make(notebooks, folder)) == []
    assert "work/" in (ROOT / ".gitignore").read_text("utf-8").splitlines()


def test_update_writes_backup_only_of_lesson_edited_by_learner(course):
    write, folder = course
    [message] = work.update(write("TSIAPQ"), folder)
    assert message.endswith("01_bytes.ipynb: new edition.") and not (folder / work.BACKUPS).exists()
    lesson = folder / "01_bytes.ipynb"
    nbformat.write(book("TSIaPQ"), lesson)
    before, notebooks = lesson.read_bytes(), write("TSIAPQM")
    [message] = work.make(notebooks, folder)
    assert "01_bytes.ipynb" in message and "make update" in message
    assert lesson.read_bytes() == before
    [message] = work.update(notebooks, folder)
    [backup] = (folder / work.BACKUPS).rglob("*.ipynb")
    assert str(backup) in message and backup.read_bytes() == before
    assert sources(nbformat.read(lesson, as_version=4)) == sources(book("TSIaPQM"))
    assert "newest edition" in next(work.update(notebooks, folder))


def test_update_preserves_learner_copies_of_unreadable_and_removed_lessons(course):
    write, folder = course
    lesson, notebooks = folder / "01_bytes.ipynb", write("TS")
    lesson.write_text("{ half", "utf-8")
    message = next(work.update(notebooks, folder))
    assert "cannot be read" in message and lesson.read_text("utf-8") == "{ half"
    (notebooks / "01_bytes.ipynb").rename(notebooks / "02_bytes.ipynb")
    assert f"{lesson}: the course no longer" in "".join(work.update(notebooks, folder))
    assert lesson.exists() and (folder / "02_bytes.ipynb").exists()


def test_folder_without_lessons_raises_error_of_one_sentence(tmp_path):
    with pytest.raises(SystemExit, match=r"^work: [^\n]+$"):
        work.main(["--notebooks", str(tmp_path), "--work", str(tmp_path / "work")])
    assert not (tmp_path / "work").exists()


LESSON_01 = NOTEBOOKS / "01_memory_bottleneck.ipynb"


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("exercises", ("is imported further up", "import weakref", "由上面的一个单元格导入")),
        ("make_decoder", ("is defined further up", "make_decoder = partial(Decoder,", "定义")),
    ],
)
def test_advice_for_missing_name_names_cell_that_defines_it(name, parts):
    words = " ".join(in_both_languages(missing_names.cell_to_run(name, LESSON_01)))
    for part in (*parts, "Run All Above Selected Cell", f"`{name}`"):
        assert part in words


def test_advice_for_missing_name_is_empty_if_no_cell_matches(tmp_path):
    (tmp_path / "list.ipynb").write_text("[]", "utf-8")
    assert missing_names.cell_to_run("torch", tmp_path / "none.ipynb") == ""
    assert missing_names.cell_to_run("torch", tmp_path / "list.ipynb") == ""
    assert missing_names.cell_to_run("torhc", LESSON_01) == ""


def test_kernel_prints_defining_cell_below_name_error(monkeypatch, capsys):
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


def test_jupyter_kernel_extension_imports_no_large_packages():
    """Triton reads its settings when it is imported, so lesson 06 must import it first."""
    code = f"import {missing_names.__name__}, sys\n"
    code += "assert not {'torch', 'triton', 'matplotlib'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_lab_creates_learner_copy_before_opening_it(tmp_path):
    (tmp_path / "bin").mkdir()
    for stamp in ("bin/pip", ".course-installed"):
        (tmp_path / stamp).touch()

    options = [f"VENV={tmp_path}", "ARGS=--no-browser"]
    command = ["make", "-n", "lab", "update", "results", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.findall(r"(?:publish\.work|root_dir=).*", done.stdout) == [
        "publish.work",
        "root_dir=work --no-browser work/00_start_here.ipynb",
        "publish.work --update",
        "root_dir=. --no-browser notebooks/00_start_here.ipynb",
    ]


def test_chosen_language_is_stored_and_used_by_every_lesson(tmp_path, monkeypatch):
    list(work.make(NOTEBOOKS, tmp_path))
    list(work.choose_language("zh", tmp_path))
    for name in NAMES:
        notebook = nbformat.read(tmp_path / f"{name}.ipynb", 4)
        switch = next(cell for cell in notebook.cells if cell.cell_type == "code")
        assert 'value="zh" data-lm-suppress-shortcuts="true" checked' in str(switch.outputs), name
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COURSE_LANG", raising=False)
    assert labels.user_language() == "zh"
    monkeypatch.setenv("COURSE_LANG", "en")
    assert labels.user_language() == "en"
    monkeypatch.delenv("COURSE_LANG")
    (tmp_path / labels.SETTING).write_text("fr")
    with pytest.raises(ValueError, match=r"course-language must be .*, got 'fr'"):
        labels.user_language()
