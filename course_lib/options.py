"""Command-line options that several commands of the library share, and conversions of their values.

A conversion is a function from the text of an option to its value, for the argument `type` of
`ArgumentParser.add_argument`. It raises `argparse.ArgumentTypeError` for an invalid text, and
argparse prints the message after the option's name.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

# These dicts map a unit, such as "G", to its factor. The units are in upper case. Units of bytes do
# not have the final "B".
BYTE_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
BYTE_UNITS |= {f"{unit}I": 2 ** (10 * power) for power, unit in enumerate("KMGT", 1)}
PARAMETER_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
# A smaller number of bytes must have a unit, because a bare 24 almost certainly means 24 GB.
FEWEST_BYTES_WITHOUT_UNIT = 10**6

#: Maps each shared option to the arguments with which `add_argument` adds it.
SHARED: dict[str, dict[str, Any]] = {
    "--config": {
        "metavar": "FILE",
        "help": (
            "config.json of a Hugging Face model: of gpt2, llama, mistral, mixtral, qwen2 or"
            " qwen3, or of any other type if transformers is installed"
        ),
    },
    "--model": {
        "metavar": "PACKAGE:FUNCTION",
        "help": (
            "function that returns a model in fp32. It can have attributes that are functions:"
            " make_batch() returns a batch; loss_sum(model, batch) returns (sum of losses, weight)"
            " and is needed if the model has no loss; split(batch, parts) returns a list of"
            " `parts` batches and is needed if dimension 0 of a tensor in the batch is not the"
            " samples"
        ),
    },
    "--sequence": {"help": "number of tokens per sample; cannot be combined with --model"},
    "--batch": {
        "help": "number of samples per step, on all ranks together; cannot be combined with --model"
    },
    "--json": {"action": "store_true", "help": "print the result as JSON, for other programs"},
}


def add_shared(parser: ArgumentParser, changes: Mapping[str, Mapping[str, Any]]) -> None:
    """Add options that several commands share, such as --batch, to a command's parser.

    Args:
        parser: The parser.
        changes: Dict whose keys are the options to add, such as "--batch". Each value is a dict of
            keyword arguments with which `add_argument` adds the option. They extend and override
            the default keyword arguments in the table `SHARED`.
    """
    for option, changed in changes.items():
        parser.add_argument(option, **{**SHARED[option], **changed})


# ---- values


def byte_count(text: str) -> int:
    """Convert a text such as "80GiB", "24GB" or "24G" to a number of bytes.

    1 GB, or 1 G, is 10**9 bytes, and 1 GiB is 2**30 bytes.

    Raises:
        argparse.ArgumentTypeError: The text is not a number of bytes between 1 and 1e18, or it is a
            number below 10**6 without a unit.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    try:
        number = float(match[1])  # type: ignore[index]
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"must be a number of bytes such as 80GiB or 24GB, got {text!r}"
        ) from None
    named = match[2]  # type: ignore[index]
    unit = named.upper().removesuffix("B")
    if unit not in BYTE_UNITS:
        raise ArgumentTypeError(
            f"must have one of the units B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, got {named!r} in"
            f" {text!r}"
        )
    if not named and 0 < number < FEWEST_BYTES_WITHOUT_UNIT:
        shown = match[1]  # type: ignore[index]
        raise ArgumentTypeError(
            f"must have a unit, got {text!r}: did you mean {shown}GB (1 GB is 10**9 bytes) or"
            f" {shown}GiB (1 GiB is 2**30 bytes)?"
        )
    count = number * BYTE_UNITS[unit]
    if not 1 <= count < 1e18:
        raise ArgumentTypeError(f"must be between 1 byte and 1e18 bytes, got {text!r}")
    return int(count)


def parameter_count(text: str) -> float:
    """Convert a text such as "7B", "7e9" or "124M" to a number of parameters.

    Raises:
        argparse.ArgumentTypeError: The text is not a number of parameters between 1e4 and 1e15.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([KMBT]?)\s*", text, re.IGNORECASE)
    try:
        number = float(match[1]) * PARAMETER_UNITS[match[2].upper()]  # type: ignore[index]
    except (TypeError, ValueError):
        number = 0
    if not 1e4 <= number < 1e15:
        raise ArgumentTypeError(
            f"must be a number of parameters such as 7B, 124M or 7e9, at least 1e4, got {text!r}"
        )
    return number


def whole_number(text: str) -> int:
    """Convert a text to an int between 1 and 10,000,000.

    Raises:
        argparse.ArgumentTypeError: The text is not an integer in this range.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= 10**7:
        raise ArgumentTypeError(f"must be a whole number between 1 and 10,000,000, got {text!r}")
    return number


def parse_name(
    names: Iterable[str],
    others: Mapping[str, str] | None = None,
    disallowed: Mapping[str, str] | None = None,
) -> Callable[[str], str]:
    """Return a function that converts a text to one of the given names.

    Case, spaces and hyphens in the text do not matter. A maker's name at the beginning of the text,
    such as "NVIDIA", is ignored. The function raises `argparse.ArgumentTypeError` if no name
    matches.

    Args:
        names: Names that the function can return.
        others: Dict from an alternative name to the name that the function returns for it; None for
            no alternatives.
        disallowed: Dict from a name that is not allowed to the reason, for the error message; None
            for no such names.
    """
    names = list(names)
    known = {_normalize_name(name): name for name in names}
    known |= {_normalize_name(other): name for other, name in (others or {}).items()}
    reasons = {_normalize_name(name): reason for name, reason in (disallowed or {}).items()}

    def convert(text: str) -> str:
        plain = _normalize_name(text)
        if plain in known:
            return known[plain]
        message = f"must be one of {', '.join(names)}, got {text!r}"
        if plain in reasons:
            message = f"{message}; {reasons[plain]}"
        elif nearest := get_close_matches(plain, known, 1):
            message = f"{message}; did you mean {known[nearest[0]]!r}?"
        raise ArgumentTypeError(message)

    return convert


def _normalize_name(name: str) -> str:
    """Return a name in lower case, only with letters and digits, without a maker's name."""
    name = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"^(nvidia|amd|geforce|tesla|instinct)+", "", name) or name
