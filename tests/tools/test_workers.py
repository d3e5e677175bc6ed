"""Workers of the tests: their number follows cores and memory, and long files start first."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import seconds
import workers
from workers import available_cores, available_memory, worker_count

GB = 10**9
TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("cores", "memory", "gpu", "expected"),
    [
        (2, 100 * GB, None, 2),
        (64, 16 * GB, None, 5),
        (4, GB, None, 1),
        (16, 128 * GB, 150 * GB, 8),
        (16, 128 * GB, 24 * GB, 4),
    ],
    ids=["cores", "memory", "at least one", "gpu limit", "gpu memory"],
)
def test_worker_count_is_minimum_of_core_and_memory_limits(cores, memory, gpu, expected):
    assert worker_count(cores, memory, gpu) == expected


@pytest.mark.parametrize(
    ("files", "cores", "memory"),
    [
        ({}, 8, 32 * 2**30),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "250000 100000",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000",
                "sys/fs/cgroup/a/b/memory.max": "7000000000",
                "sys/fs/cgroup/memory.max": "max",
            },
            2,
            7 * GB,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/gone\n3:cpu,cpuacct:/a\n1:name=systemd:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "5000000000",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            3,
            5 * GB,
        ),
    ],
    ids=["no cgroup", "version 2", "version 1"],
)
def test_available_cores_and_memory_respect_cgroup_limits(
    files, cores, memory, tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    meminfo = f"MemTotal: {64 * 2**20} kB\nMemAvailable: {32 * 2**20} kB\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert (available_cores(tmp_path), available_memory(tmp_path)) == (cores, memory)


def test_available_cores_and_memory_have_fallback_without_proc_and_affinity(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert available_cores(tmp_path) == 6
    assert available_memory(tmp_path) > 10**8


def test_heavy_test_files_exist():
    assert all(list(TESTS.parent.glob(f"{file}*")) for file in workers.HEAVY)


REPORT = """\
<testsuites><testsuite>
<testcase file="tests/a.py" name="test_long[one]" time="1.5" />
<testcase file="tests/a.py" name="test_long[two]" time="1.25" />
<testcase file="tests/a.py" name="test_short" time="0.5" />
<testcase file="notebooks/02.ipynb" name="Cell 0" time="40" />
<testcase name="notebooks/03.ipynb" time="0" />
</testsuite></testsuites>
"""


def test_seconds_command_with_write_option_stores_report_durations(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(seconds, "TABLE", tmp_path / "seconds.csv")
    report = tmp_path / "tests.xml"
    report.write_text(REPORT)
    this = "tests/tools/test_workers.py"
    stored = {"tests/a.py": 9, "tests/a.py::test_gone": 5, this: 3, "tests/gone.py": 4}
    seconds.write(stored)
    assert seconds.main([str(report)]) == 0
    assert seconds.read() == stored, "printed, not written"
    assert capsys.readouterr().out.split() == [
        *("40.0", "notebooks/02.ipynb", "3.2", "tests/a.py", "2.8", "tests/a.py::test_long")
    ]
    assert seconds.main([str(report), "--write"]) == 0
    found = {"notebooks/02.ipynb": 40, "tests/a.py": 3.2, "tests/a.py::test_long": 2.8}
    assert seconds.read() == {**found, this: 3}


EXAMPLE = """\
import os, pytest

@pytest.mark.parametrize("n", range(3))
def test_writes(n):
    with open({log!r}, "a") as file:
        print({name!r}, os.environ["PYTEST_XDIST_WORKER"], file=file)
"""


def test_xdist_runs_heavy_test_files_in_one_worker(tmp_path):
    """Run four small files in two workers with the hooks of tests/conftest.py."""
    pytest.importorskip("xdist")
    table = {"test_long.py": 50, "test_short.py": 1, "test_heavy_1.py": 20, "test_heavy_2.py": 40}
    (tmp_path / "conftest.py").write_text(
        "import seconds, workers\nfrom workers import *\n"
        f"workers.HEAVY = ('test_heavy',)\nseconds.read = lambda: {table}\n"
    )
    for file in table:
        (tmp_path / file).write_text(EXAMPLE.format(log=str(tmp_path / "log"), name=file))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist=loadscope"]
    command += ["--no-loadscope-reorder", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS / "tools")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "12 passed" in done.stdout, done.stdout + done.stderr
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    workers_of = {file: {worker for name, worker in lines if name == file} for file in table}
    assert workers_of["test_heavy_1.py"] == workers_of["test_heavy_2.py"]  # so never at once
    assert all(len(found) == 1 for found in workers_of.values())
    names = [name for name, _ in lines]
    assert names.index("test_heavy_2.py") < names.index("test_heavy_1.py")
    assert names.index("test_long.py") < names.index("test_short.py")
