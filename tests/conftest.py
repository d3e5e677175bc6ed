"""What all tests share: GPU tests are skipped, and say so, where there is no GPU; editions are
built once."""

import gc
import json
import os
import re
import sys
from pathlib import Path

import hypothesis_settings  # noqa: F401  its settings of hypothesis hold for all tests
import pytest
import torch
from edition_fixtures import block_network, built_once
from process_groups import single_process_group
from timeouts import extend_output_timeout
from workers import (  # noqa: F401  pytest finds these hooks here
    pytest_collection_modifyitems,
    pytest_xdist_auto_num_workers,
    pytest_xdist_make_scheduler,
)

pytest.register_assert_rewrite("estimate_checks")

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"

# `make test TORCH=cpu` passes its variables on, by name and in MAKEFLAGS. Another `make`, which a
# test starts, would use them.
MAKEFILE = NOTEBOOKS.with_name("Makefile").read_text("utf-8")
READ_BY_MAKE = re.findall(r"^(\w+) *\?=", MAKEFILE, re.M)
for variable in ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS", *READ_BY_MAKE):
    os.environ.pop(variable, None)
# The notebooks' outputs are stored with the default language; nbval's kernels inherit this
# environment.
os.environ.pop("COURSE_LANG", None)
# a label that is shown without Chinese is an error, as where notebooks are made
os.environ["COURSE_LABELS"] = "strict"

# Workers with a thread for every core each would wait for one another most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_itemcollected(item):
    extend_output_timeout(item)


def pytest_runtest_setup(item):
    # So that a test alone draws the numbers that it draws after others. `torch.manual_seed` formats
    # the stack for each call, if CUDA is not initialized.
    if torch.accelerator.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU; run `make gpu` on a machine that has one")


@pytest.fixture(scope="session")
def built_site(tmp_path_factory):
    """The website's folder, built where there is no network; Sphinx's warnings stand in `warnings`
    beside it."""
    from publish import site

    def build(folder):
        with pytest.MonkeyPatch.context() as patch:
            block_network(patch, folder.parent)
            said = site.build(NOTEBOOKS, folder)
        (folder.parent / "warnings").write_text("\n".join(said), encoding="utf-8")

    return built_once(tmp_path_factory, "site", build)


@pytest.fixture(scope="session")
def built_decks(tmp_path_factory):
    """The folder of all decks."""
    from publish import slides

    return built_once(tmp_path_factory, "slides", lambda folder: slides.build(NOTEBOOKS, folder))


@pytest.fixture
def fresh(monkeypatch):
    """No language chosen yet, no window, and matplotlib as the test found it."""
    import matplotlib
    from matplotlib import pyplot

    from course_lib import labels

    monkeypatch.delenv("COURSE_LANG", raising=False)
    monkeypatch.delenv("COURSE_LABELS", raising=False)
    monkeypatch.setattr(labels, "_chosen", None)
    monkeypatch.setattr(labels, "_shown", ("en", "zh"))
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a lesson in the same process may have set the course's style
        matplotlib.use("Agg")
        yield
        pyplot.close("all")


@pytest.fixture
def one_process():
    """Create a process group of one process."""
    with single_process_group():
        yield


@pytest.fixture
def config_file(tmp_path):
    """Return a function that writes the configuration of a model, and returns the path."""

    def write(config):
        path = tmp_path / f"{config.get('model_type')}.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        return path

    return write


# Automatic collections are less frequent than by default, as tests leave little garbage.
gc.set_threshold(5000)
FROZEN = {"at": None}  # file of the test, and number of modules, when objects were last frozen


@pytest.fixture(autouse=True)
def little_to_collect(request):
    """Freeze all objects at the first test of each file, and again after further modules were
    imported.

    `measure` collects garbage before each run, and would search the objects of all modules.
    """
    at = request.path, len(sys.modules) // 20
    if FROZEN["at"] != at:
        gc.collect()
        gc.freeze()
        FROZEN["at"] = at
