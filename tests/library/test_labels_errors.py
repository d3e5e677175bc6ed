"""Errors of `Recipe` and of `fit` in Chinese; `test_budget_command.py` has more of commands."""

import ast
import re
from pathlib import Path

import pytest

from course_lib import labels
from course_lib.budget import Recipe, fit
from course_lib.budget.__main__ import main
from course_lib.budget.optimizers import OPTIMIZERS
from course_lib.labels.command import translated_error

CODE = re.compile(
    r"'[^']*'|`[^`]*`|--?[\w-]+|\b\w*[_.]\w+|\b(?:Recipe|config|heads|hidden|ranks|shard)\b"
)


def english_words(message):
    """Return the English words of a message that are neither options nor names of arguments."""
    words = re.findall(r"\b[a-z]{4,}\b", CODE.sub("", message))
    return [word for word in words if word not in OPTIMIZERS]


@pytest.fixture(autouse=True)
def chinese(monkeypatch):
    monkeypatch.setenv("COURSE_LANG", "zh")
    monkeypatch.setattr(labels, "_chosen", None)


@pytest.mark.parametrize(
    "arguments",
    [
        "--parameters 1B --batch 4",
        "--parameters 1B --batch 4 --sequence 128 --device H100 --optimizer adamax",
        "--hidden 100 --heads 3 --layers 2 --sequence 8 --batch 1",
    ],
)
def test_command_reports_invalid_arguments_in_chinese(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments.split())
    message = capsys.readouterr().err
    assert message.startswith("错误：") and english_words(message) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda: Recipe(checkpoint="all"),
        lambda: Recipe(micro_batches=0),
        lambda: Recipe(offload_optimizer=2),
        lambda: Recipe(in_backward=1),
        lambda: fit(dict, dict, 0),
        lambda: fit(dict, dict, 10**9, recipes=[]),
    ],
)
def test_errors_of_recipe_and_fit_have_chinese_translation(call):
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    message = translated_error(str(error.value))
    assert re.search("[\u3400-\u9fff]", message), message


def test_list_of_allowed_options_in_error_is_translated():
    message = "tier must be 'file', 'host' or 'tape', got 3"
    assert translated_error(message) == "tier 必须是 'file'、'host' 或 'tape'，实际是 3"
    message = "head_chunk must be None, 1 or 2.5, got 3"
    assert translated_error(message) == "head_chunk 必须是 None、1 或 2.5，实际是 3"


@pytest.mark.parametrize("options", ["finite", "None or finite", "'file' or below"])
def test_error_listing_unknown_english_words_is_not_translated(options):
    """A message without a Chinese sentence stays in English as a whole."""
    message = f"fraction must be {options}, got 3"
    assert translated_error(message) == message


# Where an error may be put together from several strings of the library.
SEAM = re.compile(
    r"\{\w+\}|'[^']*'|--\w[\w-]*|; |, or |, got |, at least | must be | when | between | and "
    r"| of bytes|, in |, so "
)


def test_every_translated_error_message_occurs_in_library_source():
    library = Path(labels.__file__).parents[1]
    nodes = [
        node
        for path in library.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
    ]
    found = [node.value for node in nodes if isinstance(node, ast.Constant)]
    strings = "\n".join(value for value in found if isinstance(value, str))
    parts = {english: SEAM.split(english) for english in labels.sentences()}
    assert [english for english, each in parts.items() if any(p not in strings for p in each)] == []


def test_translated_error_names_type_without_english_article():
    message = (
        "model must be a model of transformers when framework is 'trainer', got a Decoder;"
        " framework='torch' (--for torch in the command) can train it"
    )
    assert "实际是 Decoder。" in translated_error(message)


# Modules whose errors the commands, `Recipe`, `estimate`, `run` and `fit` do not raise.
OTHER_MODULES = re.compile(
    r"\b(__init__|actions|launch|optimizers|policies|readable)\.py|caching_|lessons/|simul|teaching/"
)


def messages(node, raised=False):
    """Yield the errors in a syntax tree, strings that are raised or say "must", with values 1."""
    if isinstance(node, (ast.JoinedStr, ast.Constant)):
        parts = [part.value for part in getattr(node, "values", [node])]
        code = [part for part in parts if isinstance(part, ast.expr)]
        values = {part: "" if "error_location" in ast.dump(part) else "1" for part in code}
        words = "".join(values.get(part, str(part)) for part in parts)
        if raised or re.search(" must |cannot be combined", words):
            yield words
    elif not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        raised = isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        for child in node.exc.args if raised else ast.iter_child_nodes(node):
            yield from messages(child, raised)


def test_every_error_of_commands_and_recipes_has_chinese_translation():
    library = Path(labels.__file__).parents[1]
    modules = {path.relative_to(library).as_posix(): path for path in library.rglob("*.py")}
    paths = [path for name, path in modules.items() if not OTHER_MODULES.search(name)]
    trees = [ast.parse(path.read_text("utf-8")) for path in paths]
    found = {each for tree in trees for each in messages(tree)} - {*labels.catalog()}
    translated = {each: translated_error(each) for each in found if english_words(each)}
    missing = re.compile("[^\u3400-\u9fff]*|.*([a-z']+ ){4}.*", re.DOTALL)  # or four words remain
    assert len(translated) > 200
    assert [each for each, chinese in translated.items() if missing.fullmatch(chinese)] == []
