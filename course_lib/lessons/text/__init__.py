"""Text for lessons that train on characters: prose and code of the course itself.

`prose.txt` has one paragraph per line, from the lessons' English (CC BY 4.0, `LICENSE.prose.txt`).
`code.txt` has the lessons' code (Apache-2.0, `LICENSE.code.txt`). Both are ASCII and do not change
when the lessons change, so that values measured on them stay valid.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

_FOLDER = Path(__file__).parent
#: A character is represented by its ASCII number; 0 is padding.
VOCABULARY = 128


def prose() -> list[str]:
    """Return paragraphs of English text from the course, each with at least 20 characters."""
    return _lines("prose.txt")


def code() -> list[str]:
    """Return lines of Python code from the course, with their indentation."""
    return _lines("code.txt")


def _lines(name: str) -> list[str]:
    return (_FOLDER / name).read_text(encoding="ascii").splitlines()


def pad_texts(texts: Sequence[str], most: int) -> Tensor:
    """Return texts as a tensor of ASCII codes, which are 1 to 127. Shorter texts are padded with 0.

    Args:
        texts: The texts.
        most: Number of characters after which a text is cut.

    Returns:
        Tensor of shape (texts, length of the longest text).
    """
    rows = [torch.tensor([ord(character) for character in each[:most]]) for each in texts]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
