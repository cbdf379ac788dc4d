"""Hypothesis without deadlines and without luck; one seed for all random arrays; small kernels."""

from dataclasses import replace

import numpy as np
import planted
import pytest
from hypothesis import settings

import cuquant as cq
from cuquant import cubins, jit

settings.register_profile("cuquant", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("cuquant")


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

    def programs(fmt, dtypes=("float32", "float16")):
        asked.append((fmt.name, dtypes))
        numbers = [len(fmt.name), *range(10, 10 + len(dtypes))]
        return [replace(planted.AFFINE, arguments=("formats::twice", n)) for n in numbers]

    monkeypatch.setattr(jit, "PROGRAMS", {"quantize": programs})
    return asked
