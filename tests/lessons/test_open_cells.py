"""Open code cells of the lessons: their lengths, their language, and the names that they use."""

import ast
import builtins
import re
from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext")
TransformerManager = pytest.importorskip("IPython.core.inputtransformer2").TransformerManager

from publish.cells import names_in

SCRIPTS = sorted((Path(__file__).parents[2] / "notebooks" / "scripts").glob("*.py"))
MOST_LINES, MOST_COLUMNS = 15, 100
HAN = re.compile("[\u3400-\u9fff]")


def open_cells(script):
    """Return the code that is shown without unfolding a cell."""
    return [
        TransformerManager().transform_cell(cell.source)
        for cell in jupytext.read(script, fmt="py:percent").cells
        if cell.cell_type == "code" and not cell.metadata.get("jupyter", {}).get("source_hidden")
    ]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem[:2])
def test_unfolded_code_cells_are_short_and_contain_no_chinese(script):
    for source in open_cells(script):
        lines = [line for line in source.splitlines() if line.strip()]
        assert len(lines) <= MOST_LINES, source
        assert [line for line in lines if len(line) > MOST_COLUMNS or HAN.search(line)] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem[:2])
def test_unfolded_code_cells_use_only_names_defined_in_unfolded_cells(script):
    """Running the lesson checks the order of the cells."""
    source = "\n".join(open_cells(script))
    bound, read = names_in(source)
    nodes = ast.walk(ast.parse(source))
    errors = {node.name for node in nodes if isinstance(node, ast.ExceptHandler)}
    assert read - bound - errors - set(dir(builtins)) == set()
