"""Test when `make notebooks` keeps the stored outputs of a lesson, and when it runs the lesson.

The project here has one small lesson, and a fake kernel that counts its runs.
"""

import json

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
from course_lib import memory

print("seconds", "a label")

# %% slide="output"
a = 1
a

# %% [markdown]
# Another sentence.

# %%
a + 1
"""
FILES = {
    "course_lib/memory.py": "from .teaching import show\n",
    "course_lib/teaching/__init__.py": "def show(): from . import figures\n",
    "course_lib/teaching/figures.py": 'RUN = ["python", "-m", "course_lib.teaching.rank:main"]\n',
    "course_lib/teaching/rank.py": "main = print\n",
    "course_lib/teaching/fonts/Sans.otf": "glyphs\n",
    "course_lib/recordings/a_gpu.json": "{}\n",
    "publish/notebooks.py": "# stores notebooks\n",
    "course_lib/budget.py": "from . import memory\n",
    "course_lib/lessons/lesson_02/__init__.py": "text = 'of lesson 02'\n",
    "course_lib/lessons/lesson_02/prose.txt": "Once upon a time.\n",
    "publish/site.py": "# makes the website\n",
    "publish/jupyterlab/overrides.json": "{}\n",
    "publish/NOTES.md": "notes\n",
    "publish/translations.toml": "\n",
    "course_lib/__pycache__/memory.pyc": "\n",
    "course_lib/labels/zh.toml": "[library]\n",
    "constraints.txt": "torch==2.13.0\n",
    "notebooks/scripts/01_lesson.py": SCRIPT,
}
# file -> the reported reason for a run after an edit of the file, None for no run
REASONS = {name: "library" if n < 7 else None for n, name in enumerate(FILES) if n < 15}
REASONS["constraints.txt"] = "pinned versions"


class Course:
    """A project with one lesson whose outputs are stored."""

    def __init__(self, folder):
        self.folder = folder
        for name, text in FILES.items():
            self.write(name, text)
        self.script = folder / "notebooks" / "scripts" / "01_lesson.py"
        self.target = folder / "notebooks" / "01_lesson.ipynb"
        self.runs = 0
        self.outputs_vary = True  # otherwise only the seconds differ from run to run
        self.build()

    def run(self, notebook):
        """Fake a kernel: a cell's output is its source and the number of the run."""
        self.runs += 1
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        for count, cell in enumerate(code, 1):
            varies = self.outputs_vary or "seconds" in cell.source
            text = f"{cell.source} in run {self.runs if varies else 0}"
            cell.outputs = [nbformat.v4.new_output("stream", text=text)]
            cell.execution_count = count
        return notebook

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
        return notebooks.build(self.script, run=self.run, **options)

    def assert_ran(self, reason="library"):
        assert self.build() == f"ran (changed: {reason}); stored"

    def assert_kept(self, then="unchanged"):
        assert self.build() == f"did not run, its outputs are kept; {then}"


@pytest.fixture
def course(tmp_path):
    return Course(tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("A sentence.", "A better sentence."),
        ("# A sentence.\n", '# A sentence.\n\n# %% [markdown] minutes=3\n# A paragraph "more".\n'),
        ("# %% [markdown]\n# Another sentence.\n\n", ""),
        ('slide="output"', 'slide="code"'),
        ("# %%\na + 1", '# %% jupyter={"source_hidden": true}\na + 1'),
        ("# %%\na + 1", '# %% tags=["guess"]\na + 1'),
    ],
)
def test_editing_prose_updates_notebook_without_rerunning_lesson(course, old, new):
    before = course.outputs()
    course.edit(old, new)
    course.assert_kept("stored")
    stored, script = course.stored(), notebooks.read_script(course.script)
    assert course.outputs() == before
    assert twin_problems(stored, course.script.read_text("utf-8")) == []
    assert [cell.id for cell in stored.cells] == [cell.id for cell in script.cells]
    assert [c.execution_count for c in stored.cells if c.cell_type == "code"] == [1, 2, 3]
    nbformat.validate(stored)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a + 1", "a + 2"),
        ("# %%\na + 1", "# %%\na - 1\n\n# %%\na + 1"),
        ('# %% slide="output"\na = 1\na\n', '# %% slide="output"\na = 1\n\n# %%\na\n'),
        ('tags=["shows-seconds"]', 'tags=["shows-device"]'),
        ("# %%\na + 1", '# %% slide="output"\na + 1'),  # now its picture for slides is stored
    ],
)
def test_editing_code_cell_reruns_whole_lesson(course, old, new):
    course.edit(old, new)
    course.assert_ran("code cells")
    course.assert_kept()


def test_editing_library_file_reruns_only_lessons_depending_on_it(course):
    for name, reason in REASONS.items():
        course.write(name, f"{FILES[name]}# more\n")
        if reason:
            course.assert_ran(reason)
        else:
            course.assert_kept()


def test_new_or_renamed_library_file_reruns_lesson(course):
    memory = course.folder / "course_lib" / "memory.py"
    course.write("course_lib/schedule/chain.py", "")
    course.assert_kept()
    course.write("course_lib/teaching/voice.txt", "")
    course.assert_ran()
    memory.rename(memory.with_name("meter.py"))
    course.assert_ran()


def test_editing_label_translation_reruns_only_lessons_using_label(course):
    zh, label = "course_lib/labels/zh.toml", '"{}" = "{}"\n'
    labels = "[library]\n" + label.format("a label", "一")
    course.write(zh, labels)
    course.assert_ran()
    labels += label.format("of lesson 02", "二")
    course.write(zh, labels)
    course.assert_kept()
    # it may be put together from parts, since no module has it as a string
    course.write(zh, labels + label.format("in no module", "三"))
    course.assert_ran()


def test_lesson_is_rerun_if_stored_notebook_or_hashes_missing(course, capsys):
    course.target.unlink()
    assert course.build() == "ran (there is no stored notebook); stored"
    assert "the lesson runs now (there is no stored notebook)" in capsys.readouterr().out
    stored = course.stored()
    del stored.metadata[notebooks.MADE_FROM]
    nbformat.write(stored, course.target)
    assert course.build().startswith("ran (the stored notebook has no hashes")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda notebook: notebook.cells.pop(), "code cells"),
        (lambda notebook: notebook.metadata[notebooks.MADE_FROM].pop("library"), "library"),
    ],
)
def test_editing_stored_notebook_by_hand_reruns_lesson(course, change, reason):
    stored = course.stored()
    change(stored)
    nbformat.write(stored, course.target)
    course.assert_ran(reason)


def test_rerun_with_equal_outputs_keeps_stored_timings_unless_forced(course):
    course.outputs_vary = False
    course.build(force=True)
    before, hashes = course.outputs(), course.stored().metadata[notebooks.MADE_FROM]
    course.write("course_lib/memory.py", "PEAK = 2 - 1\n")
    course.assert_ran()
    assert course.outputs() == before
    assert course.stored().metadata[notebooks.MADE_FROM] != hashes
    course.assert_kept()
    assert course.build(force=True) == "ran (--force); stored"
    assert course.outputs() != before, "the seconds are those of the last run"


def test_failed_run_leaves_stored_notebook_unchanged(course):
    before = course.target.read_bytes()
    course.edit("a + 1", "a + b")

    def fail(notebook):
        raise NameError("b")

    with pytest.raises(NameError):
        notebooks.build(course.script, run=fail)
    assert course.target.read_bytes() == before


def test_read_lessons_omits_build_hashes_from_notebook_metadata(course):
    assert notebooks.MADE_FROM in json.loads(course.target.read_text("utf-8"))["metadata"]
    read = cells.read_lessons(course.target.parent)["01_lesson"]
    assert set(read.metadata) == {"kernelspec", "language_info"}
    assert read.cells == course.stored().cells


def test_notebook_build_hashes_do_not_depend_on_folder(course, tmp_path):
    elsewhere = Course(tmp_path / "elsewhere")
    assert elsewhere.stored().metadata == course.stored().metadata
