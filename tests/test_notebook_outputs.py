"""`make notebooks` keeps the stored outputs of a lesson, unless something that they follow from has
changed.

The lesson here is a small one in a project of its own, and what runs it is a stand-in that counts.
"""

import json
from copy import deepcopy
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("jupytext")
pytest.importorskip("nbclient")

from test_notebooks import twin_problems

from publish import cells, notebooks

SCRIPT = """\
# %% [markdown] slide={"en": "One?", "zh": "一？"}
# # 1 A lesson / 一课
#
# A sentence.

# %% tags=["shows-seconds"]
print("seconds")

# %% slide="output"
a = 1
a

# %% [markdown]
# Another sentence.

# %%
a + 1
"""
FILES = {
    "course_lib/memory.py": "PEAK = 1\n",
    "course_lib/labels/zh.toml": "[labels]\n",
    "course_lib/recordings/a_gpu.json": "{}\n",
    "course_lib/lessons/text/prose.txt": "Once upon a time.\n",
    "course_lib/teaching/fonts/Sans.otf": "glyphs\n",
    "publish/notebooks.py": "# stores notebooks\n",
    "publish/site.py": "# makes the website\n",
    "publish/jupyterlab/overrides.json": "{}\n",
    "publish/NOTES.md": "notes\n",
    "publish/translations.toml": "\n",
    "course_lib/__pycache__/memory.pyc": "\n",
    "constraints.txt": "torch==2.13.0\n",
    "notebooks/scripts/01_lesson.py": SCRIPT,
}
AFFECT_OUTPUTS = list(FILES)[:6]
AFFECT_NO_OUTPUT = list(FILES)[6:11]


class Runner:
    """Stand-in for a kernel: the output of a cell is its source and the number of the run."""

    def __init__(self):
        self.runs = 0
        self.lasting = True  # whether the outputs differ from run to run, not only the seconds

    def __call__(self, notebook):
        self.runs += 1
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        for count, cell in enumerate(code, 1):
            varies = self.lasting or "seconds" in cell.source
            text = f"{cell.source} in run {self.runs if varies else 0}"
            cell.outputs = [nbformat.v4.new_output("stream", text=text)]
            cell.execution_count = count
        return notebook


class Course:
    """A project with one lesson that has been stored once."""

    def __init__(self, folder):
        self.folder = folder
        for name, text in FILES.items():
            self.write(name, text)
        self.script = folder / "notebooks" / "scripts" / "01_lesson.py"
        self.target = folder / "notebooks" / "01_lesson.ipynb"
        self.runner = Runner()
        self.build()
        self.runner.runs = 0

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def edit(self, old, new):
        text = self.script.read_text("utf-8")
        assert old in text
        self.script.write_text(text.replace(old, new), "utf-8")

    def stored(self):
        return nbformat.read(self.target, as_version=4)

    def outputs(self):
        return [cell.outputs for cell in self.stored().cells if cell.cell_type == "code"]

    def build(self, **options):
        return notebooks.build(self.script, run=self.runner, **options)


@pytest.fixture
def course(tmp_path):
    return Course(tmp_path)


def test_second_build_runs_nothing_and_changes_no_byte(course):
    before = course.target.read_bytes()
    assert course.build() == "did not run, its outputs are kept; unchanged"
    assert (course.runner.runs, course.target.read_bytes()) == (0, before)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("A sentence.", "A better sentence."),
        ("# A sentence.\n", '# A sentence.\n\n# %% [markdown] minutes=3\n# A paragraph "more".\n'),
        ("# %% [markdown]\n# Another sentence.\n\n", ""),
        ('"One?"', '"Two?"'),
        ('slide="output"', 'slide="code"'),
        ("# %%\na + 1", '# %% jupyter={"source_hidden": true}\na + 1'),
    ],
)
def test_changed_sentence_is_stored_with_the_outputs_kept(course, old, new):
    before = course.outputs()
    course.edit(old, new)
    assert course.build() == "did not run, its outputs are kept; stored"
    stored, script = course.stored(), course.script.read_text("utf-8")
    assert (course.runner.runs, course.outputs()) == (0, before)
    assert twin_problems(stored, script) == []
    assert [cell.id for cell in stored.cells] == [
        cell.id for cell in notebooks.read_script(course.script).cells
    ]
    assert [c.execution_count for c in stored.cells if c.cell_type == "code"] == [1, 2, 3]
    nbformat.validate(stored)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a + 1", "a + 2"),
        ("# %%\na + 1", "# %%\na - 1\n\n# %%\na + 1"),
        ("# %%\na + 1\n", ""),
        ('# %% slide="output"\na = 1\na\n', '# %% slide="output"\na = 1\n\n# %%\na\n'),
        ('tags=["shows-seconds"]', 'tags=["shows-device"]'),
        ("# %%\na + 1", '# %% slide="output"\na + 1'),  # now its picture for slides is stored
        (' slide="output"', ""),
    ],
)
def test_changed_code_cell_runs_the_whole_lesson(course, old, new):
    course.edit(old, new)
    assert course.build() == "ran (changed: code cells); stored"
    assert course.runner.runs == 1
    assert all("in run 1" in output.text for (output,) in course.outputs())
    assert course.build() == "did not run, its outputs are kept; unchanged"


@pytest.mark.parametrize("name", AFFECT_OUTPUTS)
def test_changed_file_of_the_library_runs_the_lesson(course, name):
    course.write(name, FILES[name] + "\n")
    assert course.build() == "ran (changed: library); stored"
    assert course.runner.runs == 1


@pytest.mark.parametrize("name", AFFECT_NO_OUTPUT)
def test_changed_file_that_no_lesson_reads_runs_nothing(course, name):
    course.write(name, FILES[name] + "\n")
    assert course.build().endswith("unchanged")
    assert course.runner.runs == 0


def test_new_missing_or_renamed_file_of_the_library_runs_the_lesson(course):
    memory = course.folder / "course_lib" / "memory.py"
    for change in (
        lambda: course.write("course_lib/schedule/chain.py", ""),
        lambda: memory.rename(memory.with_name("meter.py")),
        lambda: memory.with_name("meter.py").unlink(),
    ):
        change()
        course.runner.runs = 0
        assert course.build().startswith("ran (changed: library)")
        assert course.runner.runs == 1


def test_file_that_moves_into_the_one_before_it_runs_the_lesson(course):
    before, after = "course_lib/memory.py", "course_lib/recordings/a_gpu.json"
    (course.folder / after).unlink()
    course.write(before, FILES[before] + after + FILES[after])
    assert course.build() == "ran (changed: library); stored"


def test_changed_version_of_a_package_runs_the_lesson(course):
    course.write("constraints.txt", "torch==2.14.0\n")
    assert course.build() == "ran (changed: pinned versions); stored"
    assert course.runner.runs == 1


def test_force_runs_the_lesson_and_stores_new_outputs(course):
    course.runner.lasting = False
    course.build(force=True)
    before = course.target.read_bytes()
    assert course.build(force=True) == "ran (--force); stored"
    assert course.runner.runs == 2
    assert course.target.read_bytes() != before, "the seconds are those of the second run"


def test_lesson_without_stored_notebook_or_hashes_runs(course):
    course.target.unlink()
    assert course.build() == "ran (there is no stored notebook); stored"
    stored = course.stored()
    del stored.metadata[notebooks.MADE_FROM]
    nbformat.write(stored, course.target)
    assert course.build().startswith("ran (the stored notebook has no hashes")
    assert course.runner.runs == 2


def test_stored_notebook_edited_by_hand_runs_the_lesson(course):
    stored = course.stored()
    for change in (
        lambda book: book.cells[-1].update(source="a + 2"),
        lambda book: book.cells.pop(),
        lambda book: book.metadata[notebooks.MADE_FROM].update(library="0" * 16),
        lambda book: book.metadata[notebooks.MADE_FROM].pop("code cells"),
    ):
        edited = deepcopy(stored)
        change(edited)
        nbformat.write(edited, course.target)
        course.runner.runs = 0
        assert course.build().startswith("ran (changed: ")
        assert course.runner.runs == 1


def test_run_with_equal_outputs_keeps_the_stored_seconds(course):
    course.runner.lasting = False
    course.build(force=True)
    before, known = course.outputs(), course.stored().metadata[notebooks.MADE_FROM]
    course.write("course_lib/memory.py", "PEAK = 2 - 1\n")
    assert course.build() == "ran (changed: library); stored"
    assert course.outputs() == before
    assert course.stored().metadata[notebooks.MADE_FROM] != known
    assert course.build() == "did not run, its outputs are kept; unchanged"


def test_failed_run_leaves_the_stored_notebook_as_it_was(course):
    before = course.target.read_bytes()
    course.edit("a + 1", "a + b")

    def fail(notebook):
        raise NameError("b")

    with pytest.raises(NameError):
        notebooks.build(course.script, run=fail)
    assert course.target.read_bytes() == before


def test_editions_read_notebooks_without_the_hashes(course):
    assert notebooks.MADE_FROM in json.loads(course.target.read_text("utf-8"))["metadata"]
    read = cells.read_lessons(course.target.parent)["01_lesson"]
    assert set(read.metadata) == {"kernelspec", "language_info"}
    assert read.cells == course.stored().cells


def test_hashes_say_nothing_of_the_machine(course, tmp_path):
    elsewhere = Course(tmp_path / "elsewhere")
    assert elsewhere.stored().metadata == course.stored().metadata
    names = [path.relative_to(notebooks.PROJECT) for path in notebooks.library_files()]
    assert Path("course_lib/labels/zh.toml") in names and len(names) == len(set(names))
