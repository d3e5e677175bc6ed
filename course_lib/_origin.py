"""Origin of an error: what this library refuses, or what the user's own code raises, and at which
line of it."""

from __future__ import annotations

import logging
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType

import torch

LIBRARY = f"{Path(__file__).parent}{os.sep}"
PYTHON = f"{sysconfig.get_path('stdlib')}{os.sep}"
INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
# how Jupyter names the files that its cells are compiled as
CELL = re.compile(r"ipykernel_|<ipython-input")
REFUSALS = (TypeError, ValueError, RuntimeError, MemoryError)
TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_fake = torch._subclasses.fake_tensor
NEEDS_DATA = (_fake.DataDependentOutputException, _fake.DynamicOutputShapeException)
# asked for in Python
_NEEDS_NUMBERS = re.compile(r"\.numpy\(\) is not supported|FakeTensor\.__format__")
# PyTorch's error for a class whose tensors are made of others without an operator, such as the
# weights of bitsandbytes
_NEW_SUBCLASS = re.compile(r"Creating a new Tensor subclass (\w+) but the raw Tensor object is")
_SYMBOLIC_LOG = logging.getLogger("torch._subclasses.fake_tensor")


def origin(error: BaseException) -> traceback.FrameSummary | None:
    """The last line on the way to the error that is the user's own; else that of a package which is
    neither this library nor PyTorch; None if the way leads through neither.
    """
    lines: list[traceback.FrameSummary] = []
    cause: BaseException | None = error
    while cause is not None:  # what was refused may be explained by what was raised first
        lines += _lines(cause)
        cause = cause.__cause__
    own = [line for line in lines if not INSTALLED.match(line.filename)]
    return (own or lines or [None])[-1]


def _lines(error: BaseException) -> list[traceback.FrameSummary]:
    frames = [
        traceback.FrameSummary(frame.f_code.co_filename, number, frame.f_code.co_name)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if _is_theirs(frame.f_code.co_filename, frame.f_globals.get("__name__", ""))
    ]
    # nothing of that file has run
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        frames.append(traceback.FrameSummary(error.filename, error.lineno, "<module>"))
    return frames


def _is_theirs(file: str, module: str) -> bool:
    if module.partition(".")[0] in ("course_lib", "torch") or file.startswith((LIBRARY, "<frozen")):
        return False
    return not file.startswith(PYTHON) or INSTALLED.match(file) is not None


def own_line(frame: FrameType | None) -> tuple[str, int, str] | None:
    """(file, line, function) of the innermost frame, from this one outwards, that is the user's
    own: neither this library's nor PyTorch's nor another package's."""
    while frame is not None and not _is_own_file(frame.f_code.co_filename):
        frame = frame.f_back
    code = frame and frame.f_code
    return code and (code.co_filename, frame.f_lineno, code.co_qualname)


@cache  # it is asked for each frame of each operator
def _is_own_file(file: str) -> bool:
    return _is_theirs(file, "") and not file.startswith(TORCH) and not INSTALLED.match(file)


def file_shown(file: str) -> str:
    """A file's name as a reader knows it."""
    if CELL.search(file):
        return "a cell"
    if installed := INSTALLED.match(file):
        return file[installed.end() :]
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def place(error: BaseException) -> str:
    """Place an error comes from, "mine.py, line 5, in loss"; "" if from no other code than this
    library's and PyTorch's."""
    if (line := origin(error)) is None:
        return ""
    within = f", in {line.name}" if line.name != "<module>" else ""
    return f"{file_shown(line.filename)}, line {line.lineno}{within}"


def goes_through(error: BaseException, package: ModuleType) -> bool:
    """Whether code of the package is on the way to the error."""
    names = (
        frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)
    )
    return any(f"{name}.".startswith(f"{package.__name__}.") for name in names)


def is_refusal(error: BaseException) -> bool:
    """Whether it is this library that says no: it raises the error itself, or nobody else's code is
    on the way."""
    lines = list(traceback.walk_tb(error.__traceback__))
    raised_here = bool(lines) and lines[-1][0].f_code.co_filename.startswith(LIBRARY)
    return isinstance(error, REFUSALS) and (raised_here or origin(error) is None)


def message(error: Exception) -> str:
    """A line or two for a command's reader.

    A refusal is its sentence; anything else the user's line, what was raised, and that line's text.

    Raises:
        Exception: the error itself, if it is neither: a fault of this library, which its traceback
            shows.
    """
    said, where = next(iter(str(error).strip().splitlines()), ""), place(error)
    if is_refusal(error):
        line = said + (f" ({where})" if where and where not in said else "")
    elif where:
        text = origin(error).line
        line = (
            f"{where}: {type(error).__name__}" + (said and f": {said}") + (text and f"\n    {text}")
        )
    else:
        raise error
    return line.replace("FakeTensor", "Tensor")  # what the reader's code was given in place of one


@contextmanager
def noted() -> Iterator[None]:
    """Give an error of the user's code a note of its line, where the traceback does not end with
    that."""
    try:
        yield
    except Exception as error:
        if not is_refusal(error):
            line, last = origin(error), traceback.extract_tb(error.__traceback__)[-1]
            note = place(error) + (f": {line.line}" if line and line.line else "")
            there = line is None or (last.filename, last.lineno) == (line.filename, line.lineno)
            if not there and note not in getattr(error, "__notes__", ()):
                error.add_note(note)
        raise


@contextmanager
def unlogged() -> Iterator[None]:
    """Keep PyTorch, inside the block, from logging the traceback of each operator that fails on
    symbolic tensors, beside raising it."""

    def drop(record: logging.LogRecord) -> bool:
        return record.levelno != logging.ERROR

    _SYMBOLIC_LOG.addFilter(drop)
    try:
        yield
    finally:
        _SYMBOLIC_LOG.removeFilter(drop)


def needs_values(error: Exception) -> bool:
    """Whether an error says that a symbolic tensor has no values."""
    return isinstance(error, NEEDS_DATA) or _NEEDS_NUMBERS.search(str(error)) is not None


@contextmanager
def explained() -> Iterator[None]:
    """Says of symbolic tensors why a step cannot run on them, and where in the user's code."""
    try:
        with unlogged(), noted(), _subclasses_refused():
            yield
    except (*NEEDS_DATA, RuntimeError, TypeError) as error:
        if not needs_values(error):
            raise
        advice = "change the model and the batch so that they do not"
        if goes_through(error, torch.distributions):
            advice += "; call torch.distributions.Distribution.set_default_validate_args(False)"
        # which asks a mask whether it is causal
        if goes_through(error, torch.nn.modules.transformer):
            advice += "; pass is_causal (to nn.Transformer, tgt_is_causal or src_is_causal)"
        # as x[expert == i] of a router
        if isinstance(error, _fake.DynamicOutputShapeException):
            advice += (
                ". If these are the tokens that a router sends to an expert, give each expert a"
                " fixed number of them, as tokens.chunk(experts) does (in a Hugging Face model,"
                ' pass experts_implementation="grouped_mm"), or measure the step with run()'
            )
        raise ValueError(
            "the step reads values of its data"
            f" ({str(error).splitlines()[0][:80]}){place_of(error)}, but an estimate runs on"
            f" symbolic tensors, which have shapes only; {advice}"
        ) from error
    except AssertionError as error:
        if "FakeTensor" not in str(error):
            raise
        raise ValueError(
            f"make_model or make_batch uses a tensor that existed before{place_of(error)}, or"
            " that no operator made, such as one of torch.frombuffer, but an estimate"
            " runs on symbolic tensors; both functions must make new tensors"
        ) from error


@contextmanager
def _subclasses_refused() -> Iterator[None]:
    """Refuse parameters of classes that can hold values only, such as quantized ones."""
    try:
        yield
    except RuntimeError as error:
        if (subclass := _NEW_SUBCLASS.search(str(error))) is None:
            raise
        raise ValueError(
            "make_model must make parameters of PyTorch's own classes for an estimate, got"
            f" {subclass[1]}{place_of(error)}, which cannot be made of symbolic tensors. Measure"
            " the step with run() instead"
        ) from error


def place_of(error: Exception) -> str:
    """The place of an error in the user's code, " at mine.py, line 5"; "" where there is none."""
    return f" at {where}" if (where := place(error)) else ""
