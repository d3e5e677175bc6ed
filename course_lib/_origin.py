"""Explain errors to users: find the line of their code that caused an error, and describe it.

`origin` and `place` find the line. `message` describes an error for the user of a command.
`explain_symbolic_errors` replaces errors of symbolic tensors by explanations with advice.
"""

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

from ._torch.symbolic import (
    LOG,
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

# Folders of this library and of Python's standard library, with a separator at the end.
LIBRARY = f"{Path(__file__).parent}{os.sep}"
PYTHON = f"{sysconfig.get_path('stdlib')}{os.sep}"
# Matches the folder of installed packages at the beginning of a path.
INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
# Matches the file names under which Jupyter compiles cells.
CELL = re.compile(r"ipykernel_|<ipython-input")
# Types of errors with which this library rejects its input.
REJECTIONS = (TypeError, ValueError, RuntimeError, MemoryError)
TORCH = f"{Path(torch.__file__).parent}{os.sep}"
# Errors of operators that need the values of a symbolic tensor.
NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)
# Matches messages of errors that Python code raises if it reads the values of a symbolic tensor.
_NEEDS_NUMBERS = re.compile(
    r"\.numpy\(\) is not supported|FakeTensor\.__format__|data is not allocated yet"
    r"|Not available for 'meta' device"
)
# Matches PyTorch's error for a user-defined operator that has no symbolic kernel.
_NO_SYMBOLIC_KERNEL = re.compile(r"no fake impl registered for (?:<CustomOpDef\()?([\w.:]+)")
_TOO_LARGE = re.compile(r"Storage size calculation overflowed with sizes=(\[[\d, ]*\])")
# Matches PyTorch's error for code that turns a symbolic tensor into a tensor subclass without an
# operator. `symbolic.quantization.parameter_subclasses` allows this for parameters, except those of
# lazy modules.
_NEW_SUBCLASS = re.compile(r"Creating a new Tensor subclass (\w+) but the raw Tensor object is")
#: Advice for a step that runs on real tensors but not on symbolic ones.
MEASURE = "measure the step on real tensors with course_lib.budget.run()"
_ROUTER_ADVICE = (
    ". If a router chooses the tokens of each expert, give each expert a fixed number of them, as"
    " tokens.chunk(experts) does (in a Hugging Face model, pass"
    ' experts_implementation="grouped_mm")'
)
_CTC_LOSSES = {torch.ops.aten._ctc_loss.Tensor, torch.ops.aten._ctc_loss.default}
UNINITIALIZED = (
    "make_model must return a model whose parameters are initialized, got a lazy module without"
    " initialized parameters"
)
INITIALIZE = (
    "Use layers whose sizes are all given, such as nn.Linear(8, 4) instead of nn.LazyLinear(4). To"
    " keep a lazy module, call the model once inside make_model, and run the step with"
    " course_lib.budget.run(), because an estimate does not support lazy modules"
)
_SYMBOLIC_LOG = logging.getLogger(LOG)


def origin(error: BaseException) -> traceback.FrameSummary | None:
    """Return the line of the user's own code that caused an error.

    It is the last such line in the tracebacks of the error and its causes. If there is none, the
    result is the last line of an installed package other than this library and PyTorch, or None.
    """
    lines: list[traceback.FrameSummary] = []
    cause: BaseException | None = error
    while cause is not None:  # the user's code may appear only in the traceback of a cause
        lines += _outside_frames(cause)
        cause = cause.__cause__
    own = [line for line in lines if not INSTALLED.match(line.filename)]
    return (own or lines or [None])[-1]


def _outside_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return an error's frames outside this library, PyTorch and Python's standard library."""
    frames = [
        traceback.FrameSummary(frame.f_code.co_filename, number, frame.f_code.co_name)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if _is_outside(frame.f_code.co_filename, frame.f_globals.get("__name__", ""))
    ]
    # A file with a syntax error has no frame in the traceback, because none of it has run.
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        frames.append(traceback.FrameSummary(error.filename, error.lineno, "<module>"))
    return frames


def _is_outside(file: str, module: str) -> bool:
    """Return whether code is outside this library, PyTorch and Python's standard library.

    Args:
        file: Path of the code's file.
        module: Name of the code's module, or "".
    """
    if module.partition(".")[0] in ("course_lib", "torch") or file.startswith((LIBRARY, "<frozen")):
        return False
    return not file.startswith(PYTHON) or INSTALLED.match(file) is not None


def own_line(frame: FrameType | None) -> tuple[str, int, str] | None:
    """Return (file, line, function) of the user's own code in a call stack, or None.

    The search goes from `frame` to its callers. It stops at the first frame whose code is outside
    this library, all installed packages and Python's standard library.
    """
    while frame is not None and not _is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    code = frame and frame.f_code
    return code and (code.co_filename, frame.f_lineno, code.co_qualname)


@cache  # cached, because a meter calls this for each frame of each operator
def _is_user_file(file: str) -> bool:
    """Return whether a file contains the user's own code, not that of a package."""
    is_torch = file.startswith(TORCH)
    return _is_outside(file, "") and not is_torch and not INSTALLED.match(file)


def file_shown(file: str) -> str:
    """Return the name of a file as messages show it.

    A cell of a notebook is shown as "a cell". A file of an installed package is shown with its path
    inside the folder of packages, and a file inside the current directory with its relative path.
    Any other file is shown with its whole path.
    """
    if CELL.search(file):
        return "a cell"
    if installed := INSTALLED.match(file):
        return file[installed.end() :]
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def place(error: BaseException) -> str:
    """Return the line that caused an error as text, such as "mine.py, line 5, in loss".

    The result is "" if only code of this library and PyTorch is involved.
    """
    if (line := origin(error)) is None:
        return ""
    within = f", in {line.name}" if line.name != "<module>" else ""
    return f"{file_shown(line.filename)}, line {line.lineno}{within}"


def goes_through(error: BaseException, package: ModuleType) -> bool:
    """Return whether a frame in an error's traceback runs code of a package."""
    names = (
        frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)
    )
    return any(f"{name}.".startswith(f"{package.__name__}.") for name in names)


def is_rejection(error: BaseException) -> bool:
    """Return whether an error means that this library rejected its input.

    The error must be a TypeError, ValueError, RuntimeError or MemoryError. In addition, this
    library must have raised it, or its traceback must contain only code of this library, PyTorch
    and Python's standard library.
    """
    lines = list(traceback.walk_tb(error.__traceback__))
    raised_here = bool(lines) and lines[-1][0].f_code.co_filename.startswith(LIBRARY)
    return isinstance(error, REJECTIONS) and (raised_here or origin(error) is None)


def message(error: Exception) -> str:
    """Return a description of an error for the user of a command, in one or two lines.

    If this library rejected its input, the text is the first line of the error's message, with the
    place in the user's code. For an error in the user's code, the first line names the place and
    the error, and the second line shows the code.

    Raises:
        Exception: The error itself, if it is a fault of this library. The user then sees the
            traceback.
    """
    first, where = next(iter(str(error).strip().splitlines()), ""), place(error)
    if is_rejection(error):
        line = first + (f" ({where})" if where and where not in first else "")
    elif where:
        text = origin(error).line
        line = (
            f"{where}: {type(error).__name__}"
            + (first and f": {first}")
            + (text and f"\n    {text}")
        )
    else:
        raise error
    return line.replace("FakeTensor", "Tensor")  # the user passed a Tensor, not a FakeTensor


@contextmanager
def add_user_line() -> Iterator[None]:
    """Add a note with the line of the user's code to an error that is raised in a `with` block.

    Nothing is added if the traceback ends with that line, or if this library rejected its input.
    """
    try:
        yield
    except Exception as error:
        if not is_rejection(error):
            line, last = origin(error), traceback.extract_tb(error.__traceback__)[-1]
            note = place(error) + (f": {line.line}" if line and line.line else "")
            ends_there = line is None or (last.filename, last.lineno) == (
                line.filename,
                line.lineno,
            )
            if not ends_there and note not in getattr(error, "__notes__", ()):
                error.add_note(note)
        raise


@contextmanager
def silence_operator_log() -> Iterator[None]:
    """Drop the errors that PyTorch logs for operators on symbolic tensors in a `with` block.

    PyTorch logs these errors in addition to raising exceptions.
    """

    def drop(record: logging.LogRecord) -> bool:
        return record.levelno != logging.ERROR

    _SYMBOLIC_LOG.addFilter(drop)
    try:
        yield
    finally:
        _SYMBOLIC_LOG.removeFilter(drop)


def needs_values(error: Exception) -> bool:
    """Return whether an error was raised because code reads the values of a symbolic tensor."""
    return isinstance(error, NEEDS_DATA) or _NEEDS_NUMBERS.search(str(error)) is not None


@contextmanager
def explain_symbolic_errors() -> Iterator[None]:
    """Replace errors of symbolic tensors in a `with` block by a ValueError that explains the cause.

    The new error names the line of the user's code and gives advice.
    """
    try:
        with silence_operator_log(), add_user_line(), _explain_unsupported_tensors_and_operators():
            yield
    except (*NEEDS_DATA, RuntimeError, TypeError) as error:
        if not needs_values(error):
            raise
        advice = f"Change the model or the batch so that no values are read, or {MEASURE}"
        if goes_through(error, torch.distributions):
            advice += (
                ". The argument checks of torch.distributions read values: switch them off with"
                " torch.distributions.Distribution.set_default_validate_args(False)"
            )
        # nn.Transformer reads a mask to find out whether it is causal.
        elif goes_through(error, torch.nn.modules.transformer):
            advice += (
                ". The modules of nn.Transformer read a mask to find out whether it is causal: pass"
                " is_causal=True or False to them (to nn.Transformer, tgt_is_causal or"
                " src_is_causal)"
            )
        elif isinstance(error, NEEDS_DATA) and error.func.namespace == "bitsandbytes":
            advice += (
                ". Pass threshold=0.0 to Linear8bitLt (in transformers, pass"
                " llm_int8_threshold=0.0)"
            )
        # A router of experts selects tokens by a mask. The number of selected tokens depends on the
        # mask's values.
        elif isinstance(error, NEEDS_DATA) and error.func not in _CTC_LOSSES:
            advice += _ROUTER_ADVICE
        raise ValueError(
            "the step reads the values of a tensor, for example with .item()"
            f"{error_location(error)}, but an estimate runs on symbolic tensors, which have shapes"
            f" but no values. {advice}. PyTorch's error: {str(error).splitlines()[0][:80]}"
        ) from error
    except AssertionError as error:
        if "FakeTensor" not in str(error):
            raise
        raise ValueError(
            "an estimate cannot use a tensor that was created before the estimate, or without a"
            f" PyTorch operator (as by torch.frombuffer), got one used{error_location(error)}."
            " Create this tensor with an operator such as torch.zeros, inside make_model,"
            f" make_batch or the step, or {MEASURE}. If you passed a model or a batch, pass a"
            " function that creates it instead"
        ) from error


@contextmanager
def _explain_unsupported_tensors_and_operators() -> Iterator[None]:
    """Replace errors of tensors and operators that cannot be symbolic by a ValueError with advice.

    The errors are raised in a `with` block. Their causes are tensor subclasses that cannot be made
    from symbolic tensors, parameters of lazy modules, operators without a symbolic kernel, and
    tensors with 2**63 bytes or more.
    """
    try:
        yield
    except RuntimeError as error:
        words = str(error)
        if subclass := _NEW_SUBCLASS.search(words):
            if subclass[1].startswith("Uninitialized"):
                raise ValueError(f"{UNINITIALIZED}{error_location(error)}. {INITIALIZE}") from error
            sentence = (
                "make_model must create plain PyTorch tensors for an estimate, got the tensor"
                f" subclass {subclass[1]}{error_location(error)}, which cannot hold symbolic"
                f" tensors; {MEASURE}"
            )
        elif operator := _NO_SYMBOLIC_KERNEL.search(words):
            sentence = (
                f"the step runs {operator[1]}{error_location(error)}, but this operator has no"
                " fake kernel, which an estimate needs; register one with"
                f" torch.library.register_fake, or {MEASURE}"
            )
        elif isinstance(error, UnsupportedOperatorException):
            sentence = (
                f"the step runs {error.func}{error_location(error)}, but this operator has no"
                f" fake kernel, which an estimate needs; {MEASURE}"
            )
        elif sizes := _TOO_LARGE.search(words):
            sentence = (
                f"a tensor must have fewer than 2**63 bytes, got one of shape {sizes[1]}"
                f"{error_location(error)}; make the model, the batch or its samples smaller"
            )
        else:
            raise
        raise ValueError(sentence) from error


def error_location(error: Exception) -> str:
    """Return the line that caused an error as the end of a clause: " at mine.py, line 5, in loss".

    The result is "" if the line is not known.
    """
    return f" at {where}" if (where := place(error)) else ""
