"""Hypothesis without deadlines and without luck; one seed for all random arrays; small kernels;
GPUs and the record of what ran on them; all processors for all tests."""

import functools
import re
import warnings
from dataclasses import replace
from pathlib import Path

import gpu_record
import numpy as np
import optional
import planted
import pytest
import samples
from hypothesis import settings

import cuquant as cq
from cuquant.gpu import cubins, jit
from cuquant.gpu.device import gpu_available
from cuquant.ops import programs as all_programs

settings.register_profile("cuquant", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("cuquant")

NEEDS_GPU = re.compile(r"^pytestmark = \[?pytest\.mark\.gpu\b", re.MULTILINE)  # a whole file


# ---- GPUs ---------------------------------------------------------------------------------------


def pytest_addoption(parser):
    group = parser.getgroup("cuquant")
    group.addoption(
        "--gpu-record",
        nargs="?",
        const=str(gpu_record.RECORD),
        metavar="FILE",
        help="with -m gpu: add this run to tests/gpu_record.json, or to FILE",
    )
    group.addoption(
        "--gpu-tree",
        metavar="SHA256",
        help="of the kernels that run (tests/support/gpu_record.py), where the files do not tell",
    )


def pytest_configure(config):
    samples.rest_runs = config.option.markexpr != "not full"
    config.addinivalue_line("markers", "sanitize: a sample of all kernels for compute-sanitizer")
    config.addinivalue_line(
        "markers",
        "named_barriers: warps meet by bar.arrive and bar.sync, which racecheck does not follow: "
        "it calls one producer and one consumer of a place in shared memory a race",
    )
    if config.getoption("--gpu-record") and config.getoption("-m") != "gpu":
        raise pytest.UsageError("--gpu-record goes with -m gpu, all of it")
    ignored = map(str, optional.left_out())  # doctests would import them
    config.option.ignore = [*(config.option.ignore or ()), *ignored]


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Where everything runs, and nobody says how, all processors do it: before xdist looks.

    Each starts with a share of its own, so that a file's kernels are looked for by one or two.
    """
    option = config.option
    everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    unsaid = getattr(option, "numprocesses", 0) is None and option.dist == "no" and not option.tx
    alone = option.usepdb or option.collectonly or option.gpu_record or "gpu" in option.markexpr
    if everything and unsaid and not alone and not hasattr(config, "workerinput"):
        option.numprocesses, option.dist = "auto", "worksteal"


def pytest_ignore_collect(collection_path, config):
    """Without a GPU, files that need one all through are not even read, unless they are named.

    That takes 3 s of each process's 17. test_package.py has them collected under `-m full`.
    """
    if not collection_path.name.startswith("test_") or not _leaves_gpu_out(config):
        return None
    if any(collection_path.name in argument for argument in config.args):
        return None
    return True if NEEDS_GPU.search(collection_path.read_text(encoding="utf-8")) else None


def pytest_collection_modifyitems(config, items):
    """Without a GPU, the tests that need one are left out, unless -m asks: a quarter of all."""
    if not _leaves_gpu_out(config):
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=left_out)


def _leaves_gpu_out(config) -> bool:
    return "gpu" not in config.option.markexpr and not _has_gpu()


@functools.cache
def _has_gpu() -> bool:
    return gpu_available()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    if hasattr(config, "workerinput"):  # one of xdist's workers, which ran a part
        return
    if path := config.getoption("--gpu-record"):
        counts = {name: len(terminalreporter.stats.get(name, [])) for name in gpu_record.COUNTS}
        counts["failed"] += len(terminalreporter.stats.get("error", []))
        tree = config.getoption("--gpu-tree") or gpu_record.tree()
        gpu_record.add({**gpu_record.here(), **counts}, tree, Path(path))
        terminalreporter.write_line(f"{counts} written to {path}")
        return
    if _leaves_gpu_out(config):
        terminalreporter.write_line("tests on a GPU are left out: there is none")
    if complaint := _unproven():
        terminalreporter.write_line(complaint, yellow=True)


def _unproven() -> str:
    """What is to be said where no GPU has run the kernels that are here."""
    remedy = "run pytest -m gpu --gpu-record on one"
    if not gpu_record.RECORD.exists():
        return f"WARNING: no GPU is recorded to have run these kernels; {remedy}"
    if gpu_record.read()["tree"] != gpu_record.tree():
        return f"WARNING: tests/gpu_record.json is of other kernels than these; {remedy}"
    return ""


@pytest.fixture(scope="session")
def gpu():
    """CuPy, on a machine where it finds a GPU; skips elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
        try:
            cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            pytest.skip(f"no GPU: {error}")
    return cupy


@pytest.fixture
def two(gpu):
    """CuPy, where there are two GPUs."""
    if gpu.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")
    return gpu


@pytest.fixture(scope="session")
def torch(gpu):
    """torch, on a machine where it finds a GPU; skips elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pytest.importorskip("torch", reason="torch is optional")
        if not found.cuda.is_available():
            pytest.skip("torch finds no GPU")
    return found


# ---- kernels of a test's own --------------------------------------------------------------------


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261121)


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A kernel folder of its own, and an empty cache; nothing is left in memory."""
    made = tmp_path / "kernels"
    (made / "deep").mkdir(parents=True)
    (made / "format.cuh").write_text(planted.FORMAT)
    (made / "deep" / "scale.cuh").write_text(planted.SCALE)
    (made / "affine.cu").write_text(planted.KERNEL)
    (made / "adding.cu").write_text(planted.ADDING)
    (made / "spilling.cu").write_text(planted.SPILLING)
    monkeypatch.setattr(jit, "kernel_folder", lambda: made)
    monkeypatch.setenv("CUQUANT_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("CUQUANT_CUBINS", "CUQUANT_DUMP", "CUQUANT_PRINT_SOURCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(jit, "_memory", {})
    monkeypatch.setattr(jit, "_kernels", {})
    monkeypatch.setattr(cubins, "_warned", False)
    return made


@pytest.fixture
def nvrtc(kernels):
    """CuPy's NVRTC, with `kernels`; skips where there is none."""
    try:
        return jit.nvrtc()
    except cq.BackendUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def operation(monkeypatch):
    """The only operation, and the dtypes it was asked for."""
    asked = []

    def programs(fmt, dtypes=("float32", "float16"), arch=90):
        asked.append((fmt.name, dtypes))
        numbers = [len(fmt.name), *range(10, 10 + len(dtypes))]
        return [replace(planted.AFFINE, arguments=("formats::twice", n)) for n in numbers]

    monkeypatch.setattr(all_programs, "PROGRAMS", {"quantize": programs})
    return asked
