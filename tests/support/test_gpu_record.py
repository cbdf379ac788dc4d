"""The record of GPU runs: its form, what it says, and which kernels it is about."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gpu_record
import pytest

RUN = {
    "device": "NVIDIA H100 80GB HBM3",
    "driver": "580.1 (CUDA 13.0)",
    "versions": {"cupy": "14.2.0", "nvrtc": "12.9"},
    "passed": 5,
    "failed": 0,
    "skipped": 1,
}
TREE = "0" * 64


def test_the_record_is_well_formed_and_without_failures():
    if not gpu_record.RECORD.exists():
        pytest.skip("no GPU has run these kernels yet")
    assert gpu_record.problems(gpu_record.read()) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"failed": 2}, "2 tests failed"),
        ({"passed": 0}, "nothing passed"),
        ({"passed": "5"}, "passed is '5'"),
        ({"device": None}, "device is None"),
        ({"more": 1}, "unknown fields"),
        ({"sanitizer": {"memcheck": "3 errors"}}, "memcheck found 3 errors"),
    ],
)
def test_problems_of_a_run_are_said(change, said):
    (found,) = gpu_record.problems({"tree": TREE, "runs": [{**RUN, **change}]})
    assert said in found


@pytest.mark.parametrize("record", [[], {}, {"tree": TREE, "runs": []}, {"tree": 1, "runs": [RUN]}])
def test_a_malformed_record_is_seen(record):
    assert gpu_record.problems(record)


def test_a_right_record_has_no_problems():
    clean = {**RUN, "sanitizer": dict.fromkeys(gpu_record.TOOLS, gpu_record.CLEAN)}
    assert gpu_record.problems({"tree": TREE, "runs": [RUN, clean]}) == []


def test_runs_add_up_until_the_kernels_change(tmp_path):
    path = tmp_path / "record.json"
    cubins = {**RUN, "versions": {"cupy": "14.2.0", "nvrtc": "13.0 (cubins)"}}
    for run in (RUN, cubins, {**RUN, "passed": 6}):
        gpu_record.add(run, TREE, path)
    assert [run["passed"] for run in gpu_record.read(path)["runs"]] == [5, 6]
    gpu_record.add(RUN, "1" * 64, path)
    assert gpu_record.read(path) == {"tree": "1" * 64, "runs": [RUN]}
    assert json.loads(path.read_text())["runs"][0]["device"] == RUN["device"]


def test_what_the_sanitizer_said_goes_under_the_run_that_compiled(tmp_path):
    path = tmp_path / "record.json"
    cubins = {**RUN, "versions": {"nvrtc": "13.0 (cubins)"}}
    gpu_record.add(RUN, TREE, path)
    gpu_record.add(cubins, TREE, path)
    (tmp_path / "memcheck.log").write_text("========= ERROR SUMMARY: 0 errors\n")
    text = "========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)\n"
    (tmp_path / "racecheck.log").write_text(text)
    (tmp_path / "initcheck.log").write_text("killed")
    said = {"memcheck": "0 errors", "racecheck": "2 errors", "initcheck": "no summary"}
    assert gpu_record.add_sanitizer(tmp_path, path) == said
    first, second = gpu_record.read(path)["runs"]
    assert first["sanitizer"] == said and "sanitizer" not in second
    gpu_record.add({**RUN, "passed": 9}, TREE, path)
    assert gpu_record.read(path)["runs"][-1] == {**RUN, "passed": 9, "sanitizer": said}


def tracked(root: Path) -> str | None:
    """git's own list of what a record's tree is of; None where there is no checkout."""
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "ls-files", "-s", *gpu_record.WATCHED]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def test_the_tree_without_git_is_the_one_with_git(tmp_path):
    root = gpu_record.ROOT
    if tracked(root) is None:
        pytest.skip("no git checkout")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "cuquant/ops/kernels/__pycache__").mkdir(parents=True)
    for name in ("kernels/a.cu", "kernels/B.cuh", "cuquant/ops/z.py", "cuquant/ops/kernels/a.py"):
        (tmp_path / name).write_text(name)
    (tmp_path / "cuquant/ops/kernels/__pycache__/a.pyc").write_text("none of it")
    (tmp_path / "cuquant/gpu").mkdir()
    (tmp_path / "cuquant/gpu/jit.py").write_text("")
    (tmp_path / ".gitignore").write_text("__pycache__/\n")
    alone = gpu_record.listing(tmp_path)
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True, capture_output=True)
    assert tracked(tmp_path) == alone
    assert len(alone.splitlines()) == 5
    tree = gpu_record.tree(tmp_path)
    (tmp_path / "kernels/a.cu").write_text("another kernel, which git has not been told of")
    assert tracked(tmp_path) == alone
    assert gpu_record.tree(tmp_path) != tree


def test_no_watched_file_is_executable():
    """`listing` takes that for granted."""
    text = tracked(gpu_record.ROOT)
    if text is None:
        pytest.skip("no git checkout")
    assert {line.split()[0] for line in text.splitlines()} == {"100644"}


def test_recording_is_for_whole_runs(pytestconfig):
    """pytest refuses --gpu-record without -m gpu: a part of the suite proves little."""
    command = [sys.executable, "-m", "pytest", "--gpu-record", "--collect-only", "-q", __file__]
    done = subprocess.run(command, capture_output=True, text=True, cwd=pytestconfig.rootpath)
    assert done.returncode and "goes with -m gpu" in done.stdout + done.stderr


@pytest.mark.parametrize("worker", [False, True])
def test_workers_of_xdist_record_nothing(pytestconfig, monkeypatch, tmp_path, worker):
    """They end like a whole run, but each has run a part: the process that began them records."""
    (ours,) = [
        plugin
        for plugin in pytestconfig.pluginmanager.get_plugins()
        if str(getattr(plugin, "__file__", "")) == str(gpu_record.ROOT / "tests/conftest.py")
    ]
    path = tmp_path / "record.json"
    options = {"--gpu-record": str(path), "--gpu-tree": TREE}
    config = SimpleNamespace(getoption=options.get, **({"workerinput": {}} if worker else {}))
    reporter = SimpleNamespace(stats={"passed": [1, 2]}, write_line=lambda text: None)
    monkeypatch.setattr(gpu_record, "here", lambda: {"device": "a", "driver": "b", "versions": {}})
    ours.pytest_terminal_summary(reporter, config)
    assert path.exists() != worker
    if not worker:
        assert [run["passed"] for run in gpu_record.read(path)["runs"]] == [2]
