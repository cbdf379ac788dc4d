"""Machines whose CuPy cannot be imported: no GPU, for this reason, said once."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from installations import check
from samples import sampled

import cuquant as cq
from cuquant.errors import SOURCE, pip_install

PACKAGE = Path(cq.__file__).parent

# What importing CuPy raises: 14's where HOME is not writable or not there, and damaged ones.
RAISES = {
    "a home that is read-only": "PermissionError(13, 'Permission denied', '/home/x/.cupy')",
    "a home that is not there": "FileNotFoundError(2, 'No such file or directory', '/none/.cupy')",
    "a home that is full": "OSError(28, 'No space left on device', '/home/x/.cupy')",
    "CUDA that is broken": "ImportError('libcuda.so.1: cannot open shared object file')",
    "a library": "OSError('libcudart.so.12: cannot open shared object file')",
    "anything": "RuntimeError('two\\nlines')",
    "a package of CuPy's": "ModuleNotFoundError(\"No module named 'fastrlock'\", name='fastrlock')",
}


def has_lines(cause: str) -> bool:
    return "\\n" in RAISES[cause]


def run(tmp_path: Path, cupy: str, *command: str, **variables: str) -> subprocess.CompletedProcess:
    """Run Python where the package cupy is a file with this text."""
    (tmp_path / "fake" / "cupy").mkdir(parents=True, exist_ok=True)
    (tmp_path / "fake" / "cupy" / "__init__.py").write_text(cupy)
    path = f"{tmp_path / 'fake'}{os.pathsep}{PACKAGE.parent}"
    kept = {k: v for k, v in os.environ.items() if k not in ("CUPY_CACHE_DIR", "CUQUANT_CACHE_DIR")}
    env = {**kept, "PYTHONPATH": path, **variables}
    return subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, cwd=tmp_path
    )


@pytest.mark.parametrize("cause", sampled(RAISES, has_lines))
def test_the_command_line_computes_on_the_cpu_and_says_why(cause, tmp_path):
    cq.save(tmp_path / "w", {"w": np.ones((8, 64), np.float32)})
    command = ("-m", "cuquant", "quantize", "w", "-o", "q.safetensors")
    done = run(tmp_path, f"raise {RAISES[cause]}", *command)
    assert done.returncode == 0, done.stderr
    assert isinstance(cq.load(tmp_path / "q.safetensors")["w"], cq.QuantArray)
    assert done.stderr.count("CuPy cannot be imported") == 1 and "pip install" not in done.stderr


@pytest.mark.parametrize("cause", sampled(RAISES, has_lines))
def test_a_gpu_that_is_asked_for_is_refused_with_the_reason(cause, tmp_path):
    code = """
import numpy as np, cuquant as cq, warnings
from cuquant.gpu.device import gpu_available, resolve
warnings.simplefilter("error")
q = cq.quantize(np.ones((2, 64), np.float32))
said = set()
for call in (lambda: q.to("cuda"), lambda: q.to("cuda"), lambda: resolve("cuda"), cq.precompile):
    try:
        call()
    except cq.BackendUnavailable as error:
        said.add(str(error))
try:
    gpu_available()
except RuntimeWarning as warning:
    said.add(str(warning).removeprefix("everything is computed on the CPU: "))
assert not gpu_available(), "said once"
assert len(said) == 1, said
print(said.pop())
"""
    done = run(tmp_path, f"raise {RAISES[cause]}", "-c", code)
    assert done.returncode == 0, done.stderr
    error = eval(RAISES[cause])
    assert f"CuPy cannot be imported ({' '.join(str(error).split())})" in done.stdout
    home = isinstance(error, OSError) and error.filename
    assert ("CUPY_CACHE_DIR" in done.stdout) == bool(home)
    assert ("cuquant doctor" in done.stdout) != bool(home)


# As CuPy 14: a folder is made when the package is imported.
MAKES_A_FOLDER = """
import os
folder = os.environ.get("CUPY_CACHE_DIR", os.path.expanduser("~/.cupy/kernel_cache"))
os.makedirs(folder, exist_ok=True)
"""
IMPORT = "from cuquant.interop import import_cupy; print(import_cupy().folder)"


def test_cuquants_cache_directory_serves_cupy_where_home_does_not(tmp_path):
    (tmp_path / "file").write_text("")
    home, cache = str(tmp_path / "file" / "home"), str(tmp_path / "cache")
    without = run(tmp_path, MAKES_A_FOLDER, "-c", IMPORT, HOME=home)
    assert "set CUPY_CACHE_DIR or CUQUANT_CACHE_DIR to a folder" in without.stderr
    found = run(tmp_path, MAKES_A_FOLDER, "-c", IMPORT, HOME=home, CUQUANT_CACHE_DIR=cache)
    assert found.stdout.strip() == os.path.join(cache, "cupy"), found.stderr
    own = {"CUPY_CACHE_DIR": str(tmp_path / "own"), "CUQUANT_CACHE_DIR": cache}
    kept = run(tmp_path, MAKES_A_FOLDER, "-c", IMPORT, HOME=home, **own)
    assert kept.stdout.strip() == str(tmp_path / "own"), kept.stderr


def test_a_home_that_works_stays_cupys(tmp_path):
    cache = str(tmp_path / "cache")
    done = run(
        tmp_path, MAKES_A_FOLDER, "-c", IMPORT, HOME=str(tmp_path / "home"), CUQUANT_CACHE_DIR=cache
    )
    assert done.stdout.strip() == str(tmp_path / "home/.cupy/kernel_cache"), done.stderr


def test_doctor_does_not_ask_for_another_wheel_where_the_home_is_the_reason():
    found = check("cupy", cupy_error="Permission denied", cupy_advice="set CUPY_CACHE_DIR")
    assert (found.status, found.advice) == ("problem", "set CUPY_CACHE_DIR")


# ---- what pip can install -----------------------------------------------------------------------


def test_hints_name_what_pip_can_install():
    """The package is on no index: `pip install cuquant` fails, or finds somebody else's."""
    assert pip_install("cuda12") == f"pip install '{SOURCE}[cuda12]'"
    root = PACKAGE.parent
    documents = [root / "README.md", root / "CHANGELOG.md", *(root / "examples").glob("*.md")]
    texts = [*PACKAGE.rglob("*.py"), *documents]
    for path in texts:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"pip install (-\S+ )*'?cuquant\b", text), path
        assert "cuquant[" not in text, path


def test_without_cupy_it_is_said_that_the_cpu_needs_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    wanted = r"CuPy is not installed; .*; arrays on the CPU need none"
    with pytest.raises(cq.BackendUnavailable, match=wanted):
        cq.quantize(np.ones((2, 64), np.float32)).to("cuda")
