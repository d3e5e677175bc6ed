"""Text that ships with the course, for lessons that train on real characters: its own prose and its
own code.

`prose.txt` has a paragraph a line, from the lessons' English (CC BY 4.0, `LICENSE.prose.txt`);
`code.txt` has the lessons' code (Apache-2.0, `LICENSE.code.txt`). Both are ASCII, and stay as they
are when the lessons change, so that figures measured on them hold.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

_FOLDER = Path(__file__).parent
#: Characters are their ASCII numbers; 0 is padding.
VOCABULARY = 128


def prose() -> list[str]:
    """Paragraphs of 20 characters and more."""
    return _lines("prose.txt")


def code() -> list[str]:
    """Lines of Python, indented as they stand in their cells."""
    return _lines("code.txt")


def _lines(name: str) -> list[str]:
    return (_FOLDER / name).read_text(encoding="ascii").splitlines()


def padded(texts: Sequence[str], most: int) -> Tensor:
    """Characters as numbers from 1 to 127, (texts, length of the longest); shorter texts end in
    zeros.

    Args:
        most: characters that are kept of a text.
    """
    rows = [torch.tensor([ord(character) for character in each[:most]]) for each in texts]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
