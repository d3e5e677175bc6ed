"""No lesson shows the measured answer to a guess before it asks for the guess."""

import re

import pytest
from test_notebooks import FOLDER, load, output_texts

# (lesson, words of the question's cell, numbers of the answer)
GUESSES = [
    ("00", "By what factor will the step's floating-point operations", ("134.0", "1.21")),
    ("01", "what will the peak be", ("114.2", "114,205,080", "25.4", "25,405,440")),
    ("04", "why does the step with offload still take", ("1.37", "1.13")),
    ("04", "how long does the step take with the copies", ("1.34", "1.340", "16.51", "16.52")),
    (
        "04",
        "how high is the peak of a step with offload",
        ("124.8", "134.0", "124,824,984", "134,006,104"),
    ),
    ("05", "predict the peak in bytes for", ("134.8", "134,800,792")),
    ("07", "without checkpoints, what is the peak", ("53.9",)),
    ("08", "What is the peak of a DDP rank", ("207.6",)),
    ("09", "By how many MB is the peak of the step higher", ("609", "609.1", "110.9")),
]


def visible_text(cells):
    """Return the text of cells and of their slides that a learner can see."""
    texts = []
    for cell in cells:
        if not cell.metadata.get("jupyter", {}).get("source_hidden"):
            texts.append(cell.source)
        slide = cell.metadata.get("slide")
        texts += slide.values() if isinstance(slide, dict) else ()
        texts += output_texts(cell)
    return "\n".join(texts)


def numbers_in(text, numbers):
    return [n for n in numbers if re.search(rf"(?<![\d.,]){re.escape(n)}(?![\d])", text)]


def cells_of(number):
    (path,) = FOLDER.glob(f"{number}_*.ipynb")
    return load(path).cells


@pytest.mark.parametrize(("number", "question", "numbers"), GUESSES)
def test_lesson_asks_each_guess_before_showing_its_answer(number, question, numbers):
    cells = cells_of(number)
    (asks,) = [n for n, cell in enumerate(cells, 1) if question in cell.source]
    assert numbers_in(visible_text(cells[:asks]), numbers) == []
    assert numbers_in(visible_text(cells[asks:]), numbers) != []


@pytest.mark.parametrize(("number", "question", "numbers"), GUESSES[:2])
def test_readme_and_lesson_00_contain_no_answers_to_first_guesses(number, question, numbers):
    texts = [(FOLDER.parent / name).read_text("utf-8") for name in ("README.md", "README.zh.md")]
    if number != "00":
        texts.append(visible_text(cells_of("00")))
    assert numbers_in("\n".join(texts), numbers) == []
