"""No lesson shows the measured answer to a guess before it asks for the guess."""

import copy
import re

import pytest
from test_notebooks import FOLDER, load, nbformat, output_texts

# (lesson, words of the cell that asks, numbers that answer it)
GUESSES = [
    ("00", "what factor will the FLOPs of the step grow", ("134.0", "1.21")),
    ("01", "what will the peak be", ("114.2", "114,205,080", "25.4", "25,405,440")),
    ("04", "How long does the step take with them", ("1.34", "1.340", "16.51", "16.52")),
    ("04", "how long does the step take with $p = 1$", ("1.17", "1.170", "1.01", "1.011")),
    (
        "04",
        "how high is the peak of a step with offload",
        ("124.8", "134.0", "124,824,984", "134,006,104"),
    ),
    ("05", "Type what the line predicts", ("134.8", "134,800,792")),
    ("07", "without checkpoints, what is the peak", ("53.9",)),
    ("08", "What is the peak of a DDP rank", ("207.6",)),
    ("09", "How much more does the step take", ("609", "609.1", "110.8")),
]


def answers_shown(notebook, question, numbers):
    """List the numbers that a reader sees in the cells up to the one that asks."""
    asks = [n for n, cell in enumerate(notebook.cells) if question in cell.source]
    assert len(asks) == 1, f"{question!r} is in {len(asks)} cells"
    seen = []
    for cell in notebook.cells[: asks[0] + 1]:
        if not cell.metadata.get("jupyter", {}).get("source_hidden"):
            seen.append(cell.source)
        slide = cell.metadata.get("slide")
        seen += slide.values() if isinstance(slide, dict) else ()
        seen += output_texts(cell)
    return numbers_in("\n".join(seen), numbers)


def shown_before(number):
    """The text of what a reader sees on the way to a lesson: both READMEs and lesson 00."""
    text = [(FOLDER.parent / name).read_text("utf-8") for name in ("README.md", "README.zh.md")]
    for cell in lesson("00").cells if number != "00" else ():
        text += [cell.source, *output_texts(cell)]
    return "\n".join(text)


def numbers_in(text, numbers):
    return [n for n in numbers if re.search(rf"(?<![\d.,]){re.escape(n)}(?![\d])", text)]


def lesson(number):
    (path,) = FOLDER.glob(f"{number}_*.ipynb")
    return load(path)


@pytest.mark.parametrize(("number", "question", "numbers"), GUESSES)
def test_guess_is_asked_before_its_answer_is_shown(number, question, numbers):
    assert answers_shown(lesson(number), question, numbers) == []


@pytest.mark.parametrize(("number", "question", "numbers"), GUESSES[:2])
def test_readme_and_lesson_00_show_no_answer_to_the_first_guesses(number, question, numbers):
    assert numbers_in(shown_before(number), numbers) == []


def test_answer_in_an_opening_or_on_a_slide_is_found():
    number, question, numbers = GUESSES[0]
    for place in ({"source": f"{numbers[0]} MB."}, {"metadata": {"slide": {"en": numbers[0]}}}):
        notebook = copy.deepcopy(lesson(number))
        notebook.cells[0].update(nbformat.from_dict(place))
        assert answers_shown(notebook, question, numbers) == [numbers[0]]
