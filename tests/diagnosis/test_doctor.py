"""`doctor`: what follows from facts about an installation, and that gathering them never fails."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from installations import H100, HEALTHY, check

import cuquant as cq
from cuquant.diagnosis import Diagnosis, facts
from cuquant.diagnosis.checks import examine, fitting_major
from cuquant.diagnosis.facts import Gpu
from cuquant.disk import Replacement
from cuquant.gpu import cubins as cache
from cuquant.gpu import source as sources
from cuquant.gpu.cubins import CacheSize, Folder, examine_folder
from cuquant.gpu.source import Headers
from cuquant.interop import find_cupy

NEW_DRIVER = {"driver": "580.65", "driver_cuda": (13, 0)}
NO_GPU = {"driver": None, "driver_cuda": None, "gpus": ()}
CUDA12, CUDA13 = "pip install '.[cuda12]'", "pip install '.[cuda13]'"


def problems(**changes):
    return {c.name for c in examine(replace(HEALTHY, **changes)) if c.status == "problem"}


def test_a_healthy_installation_has_no_advice():
    checks = examine(HEALTHY)
    assert {c.status for c in checks if c.name != "torch"} == {"ok"}
    assert [c.advice for c in checks if c.advice] == []


# changes, the check that speaks, its status, what it names, what to type
CASES = {
    "no cupy": (
        {"cupy_wheels": {}, "nvrtc": None}, "cupy", "missing", ["not installed"], CUDA12
    ),
    "no cupy, torch for CUDA 13": (
        {"cupy_wheels": {}, "nvrtc": None, "torch": "2.15.0", "torch_cuda": (13, 0), **NEW_DRIVER},
        "cupy", "missing", ["not installed"], CUDA13,
    ),
    "no cupy, torch for CUDA 13, old driver": (
        {"cupy_wheels": {}, "nvrtc": None, "torch": "2.15.0", "torch_cuda": (13, 0)},
        "cupy", "missing", ["not installed"], CUDA12,
    ),
    "two wheels": (
        {"cupy_wheels": {"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.2.0"}},
        "cupy", "problem", ["cupy-cuda12x 14.2.0", "cupy-cuda13x 14.2.0", "overwrite"],
        f"pip uninstall -y cupy-cuda12x cupy-cuda13x && {CUDA12}",
    ),
    "cupy for CUDA 11": (
        {"cupy_wheels": {"cupy-cuda11x": "13.4.0"}, "nvrtc": (11, 8)},
        "cupy", "problem", ["cupy-cuda11x", "12 or 13"],
        f"pip uninstall -y cupy-cuda11x nvidia-cuda-nvrtc-cu11 && {CUDA12}",
    ),
    "cupy for AMD": (
        {"cupy_wheels": {"cupy-rocm-7-0": "14.2.0"}, "nvrtc": None, "nvrtc_error": "none"},
        "cupy", "problem", ["AMD"], f"pip uninstall -y cupy-rocm-7-0 && {CUDA12}",
    ),
    "cupy does not import": (
        {"cupy_error": "libcuda.so.1: cannot open", "nvrtc": None},
        "cupy", "problem", ["libcuda.so.1"], "pip install --force-reinstall cupy-cuda12x",
    ),
    "cupy for CUDA 13, driver for 12": (
        {"cupy_wheels": {"cupy-cuda13x": "14.2.0"}, "nvrtc": (13, 0)},
        "cupy", "problem", ["cupy-cuda13x", "CUDA up to 12.9"],
        f"pip uninstall -y cupy-cuda13x nvidia-cuda-nvrtc && {CUDA12}",
    ),
    "NVRTC missing": (
        {"nvrtc": None, "nvrtc_error": "libnvrtc.so.12 not found", "nvrtc_archs": ()},
        "nvrtc", "problem", ["libnvrtc.so.12"], CUDA12,
    ),
    "NVRTC 13 beside cupy-cuda12x": (
        {"nvrtc": (13, 2)}, "nvrtc", "problem", ["13.2", "cupy-cuda12x"],
        f"pip uninstall -y nvidia-cuda-nvrtc && {CUDA12}",
    ),
    "NVRTC 13 of torch beside cupy-cuda12x, driver for 13": (
        {"nvrtc": (13, 2), "torch": "2.15.0", "torch_cuda": (13, 0), **NEW_DRIVER},
        "nvrtc", "problem", ["13.2", "cupy-cuda12x"],
        f"pip uninstall -y cupy-cuda12x && {CUDA13}",
    ),
    "NVRTC 13 with a driver for 12": (
        {"cupy_wheels": {"cupy": "14.2.0"}, "nvrtc": (13, 2)},
        "nvrtc", "problem", ["13.2", "CUDA up to 12.9"],
        f"pip uninstall -y cupy nvidia-cuda-nvrtc && {CUDA12}",
    ),
    "NVRTC too old": (
        {"nvrtc": (12, 4)}, "nvrtc", "problem", ["12.4", "12.9"],
        "pip install --upgrade nvidia-cuda-nvrtc-cu12",
    ),
    "NVRTC that does not compile": (
        {"trial_error": "libnvrtc-builtins.so.12.9 cannot be opened"},
        "compiler", "problem", ["libnvrtc-builtins"], CUDA12,
    ),
    "headers missing": (
        {"headers": ()}, "cuda headers", "problem", ["cuda_fp16.h"], CUDA12
    ),
    "headers of a system's CUDA 13": (
        {"headers": (Headers(Path("/usr/local/cuda/include"), (13, 0)),)},
        "cuda headers", "problem", ["13.0 in /usr/local/cuda/include", "NVRTC 12.9"], CUDA12,
    ),
    "torch for CUDA 13, old driver": (
        {"torch": "2.15.0", "torch_cuda": (13, 0)},
        "torch", "problem", ["2.15.0", "CUDA 13.0", "cupy-cuda12x"],
        "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126",
    ),
    "torch for CUDA 13, new driver": (
        {"torch": "2.15.0", "torch_cuda": (13, 0), **NEW_DRIVER},
        "torch", "problem", ["CUDA 13.0", "cupy-cuda12x"],
        f"pip uninstall -y cupy-cuda12x nvidia-cuda-nvrtc-cu12 && {CUDA13}",
    ),
    "driver too old": (
        {"driver": "470.42", "driver_cuda": (11, 4)}, "driver", "problem", ["470.42", "11.4"],
        "install NVIDIA driver 525 or newer: https://www.nvidia.com/drivers",
    ),
    "newer GPU than NVRTC": (
        {"gpus": (H100, Gpu("NVIDIA X", (13, 0), 2**37))},
        "gpu", "problem", ["NVIDIA X, sm_130, 128 GiB", "up to sm_120"],
        "pip install --upgrade nvidia-cuda-nvrtc-cu12",
    ),
    "older GPU than NVRTC 13": (
        {
            "gpus": (Gpu("Tesla V100", (7, 0), 2**34),), "nvrtc": (13, 2),
            "cupy_wheels": {"cupy-cuda13x": "14.2.0"}, **NEW_DRIVER,
        },
        "gpu", "problem", ["sm_70", "from sm_75"],
        f"pip uninstall -y cupy-cuda13x nvidia-cuda-nvrtc && {CUDA12}",
    ),
    "cache of another user": (
        {"cache": Folder(Path("/shared/c"), owned=False)}, "cache", "problem",
        ["/shared/c", "another user"], "export CUQUANT_CACHE_DIR=FOLDER, with a folder of yours",
    ),
    "cache open to the world": (
        {"cache": Folder(Path("/shared/c"), shared=True)}, "cache", "problem", ["by others"],
        "chmod go-w '/shared/c'",
    ),
    "cache in a folder open to the world": (
        {"cache": Folder(Path("/shared/c"), exposed=Path("/shared"))}, "cache", "problem",
        ["/shared/c", "exchanged by others"], "chmod o-w '/shared'",
    ),
    "cache read-only": (
        {"cache": Folder(Path("/ro/c"), exists=False, writable=False)}, "cache", "problem",
        ["/ro/c", "not writable"], "export CUQUANT_CACHE_DIR=FOLDER, with a folder of yours",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_faults_are_named_with_the_command_that_mends_them(case):
    changes, name, status, texts, advice = CASES[case]
    found = check(name, **changes)
    assert found.status == status
    assert [text for text in texts if text not in found.found] == []
    assert found.advice == advice


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="a folder that nobody can write")
def test_a_cache_that_cannot_be_made_is_a_problem(monkeypatch):
    """Its permissions let root write in /proc, and the system does not."""
    monkeypatch.setenv("CUQUANT_CACHE_DIR", "/proc/.cache/cuquant")
    found = check("cache", cache=facts.gather(Path(cq.__file__).parent).cache)
    assert (found.status, found.found) == ("problem", "/proc/.cache/cuquant is not writable")
    assert "CUQUANT_CACHE_DIR" in found.advice


@pytest.mark.parametrize("home", ["/proc", None])  # nobody can write in /proc, not even root
def test_the_command_works_in_any_home(home):
    env = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME")}
    env |= {"PYTHONPATH": str(Path(cq.__file__).parent.parent)} | ({"HOME": home} if home else {})
    command = [sys.executable, "-m", "cuquant", "doctor"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.stderr == "" and "Traceback" not in done.stdout
    assert done.returncode in (0, 1) and "backend" in done.stdout


def test_a_fault_is_told_once():
    assert problems(headers=()) == {"cuda headers"}
    assert problems(nvrtc=None, nvrtc_archs=()) == {"nvrtc"}
    assert problems(cache=Folder(Path("/c"), owned=False)) == {"cache"}
    assert problems(torch="2.15.0", torch_cuda=(13, 0), **NEW_DRIVER) == {"torch"}


@pytest.mark.parametrize("wheels", [{}, HEALTHY.cupy_wheels], ids=["no cupy", "cupy"])
def test_without_a_gpu_nothing_is_a_problem(wheels):
    nvrtc = HEALTHY.nvrtc if wheels else None
    assert problems(cupy_wheels=wheels, nvrtc=nvrtc, **NO_GPU) == set()
    checks = examine(replace(HEALTHY, cupy_wheels=wheels, nvrtc=nvrtc, **NO_GPU))
    assert [c.advice for c in checks if c.advice] == [], "nothing to install that nothing can use"
    assert check("gpu", **NO_GPU).status == check("driver", **NO_GPU).status == "missing"


def test_what_computes():
    healthy = check("backend")
    assert healthy.status == "ok" and healthy.found.startswith("cuda: arrays on the GPU")
    alone = check("backend", cupy_wheels={}, nvrtc=None, **NO_GPU)
    assert (alone.status, alone.found) == ("ok", "cpu: NumPy computes")
    for case, (changes, name, status, _, _) in CASES.items():
        found, needed = check("backend", **changes), name not in ("torch", "cache")
        assert found.found.startswith("cpu: " if needed else "cuda: "), case
        assert found.status == ("missing" if needed else "ok"), case
        assert not needed or name in found.found, case
        assert status != "problem" or "backend" not in problems(**changes)


def test_a_compiler_that_is_not_there_is_not_tried():
    for nvrtc in (None, (12, 4)):
        assert check("compiler", nvrtc=nvrtc).status == "missing"


def test_the_cache_says_what_it_holds():
    assert check("cache", cached=CacheSize(3, 2**20)).found.endswith("; 3 files, 1.0 MiB")
    folder = Folder(Path("/c"), exists=False)
    assert check("cache", cache=folder, cached=CacheSize(0, 0)).found == (
        f"{folder.path}, made when it is needed"
    )


def test_newer_drivers_run_older_cuda():
    assert problems(**NEW_DRIVER) == set()
    assert fitting_major(replace(HEALTHY, **NEW_DRIVER)) == 12
    assert fitting_major(replace(HEALTHY, cupy_wheels={"cupy-cuda13x": "1"}, **NEW_DRIVER)) == 13


def test_torch_without_cuda_fits_everything():
    assert check("torch", torch="2.13.0+cpu").status == "ok"
    assert check("torch").status == "missing"


def test_cublas_is_a_help_and_no_need():
    assert check("cublas").status == "ok"
    lacking = check("cublas", cublas=None)
    assert (lacking.status, lacking.advice) == ("missing", "pip install '.[cublas12]'")
    assert Diagnosis(examine(replace(HEALTHY, cublas=None))).ok
    assert check("cublas", cublas=None, cupy_wheels={}, nvrtc=None).advice is None


def test_ok_and_the_text():
    good, bad = Diagnosis(examine(HEALTHY)), Diagnosis(examine(replace(HEALTHY, headers=())))
    assert (good.ok, bad.ok, good.backend, bad.backend) == (True, False, "cuda", "cpu")
    lines = str(bad).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("cuda headers"))
    assert lines[at].split("  ") == ["cuda headers", "problem", "no cuda_fp16.h"]
    assert lines[at + 1].strip() == f"-> {CUDA12}"
    starts = {line.index("problem") for line in lines if "problem" in line}
    assert starts == {line.index(" ok ") + 1 for line in lines if " ok " in line}


def test_doctor_examines_this_machine():
    found = {check.name: check for check in cq.doctor().checks}
    assert found["cuquant"].found == cq.__version__
    assert found["python"].found.startswith(sys.version.split()[0])
    assert found["backend"].found.startswith(f"{cq.doctor().backend}: ")


def test_doctor_imports_no_torch():
    code = "import cuquant, sys; cuquant.doctor(); print('torch' in sys.modules)"
    path = str(Path(cq.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert (done.stdout.strip(), done.returncode) == ("False", 0), done.stderr


def test_doctor_survives_whatever_fails(monkeypatch):
    def fail(*_):
        raise RuntimeError("broken")

    for name in (
        "_cupy_wheels", "_nvml", "_torch", "cuda_headers", "_version", "cache_folder",
        "kernel_folder", "cache_size", "_trial",
    ):  # fmt: skip
        monkeypatch.setattr(facts, name, fail)
    found = {check.name: check for check in cq.doctor().checks}
    assert found["cuquant"].found == "unknown"
    assert found["cache"].status == "problem"
    assert found["kernels"].status == "missing"
    if found["nvrtc"].status == "ok":
        assert "does not compile: it fails" in found["compiler"].found


def fake_distribution(folder, name, version):
    made = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    made.mkdir(parents=True)
    made.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}")


def test_wheels_and_torch_are_read_from_files(tmp_path, monkeypatch):
    for name in ("cupy-cuda12x", "cupy-cuda13x", "cupyx-something", "torch"):
        fake_distribution(tmp_path, name, "9.9")
    tmp_path.joinpath("torch").mkdir()
    text = "from typing import Optional\ncuda: Optional[str] = '13.0'\nhip = '6.4'\n"
    tmp_path.joinpath("torch", "version.py").write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert facts._cupy_wheels() == {"cupy-cuda12x": "9.9", "cupy-cuda13x": "9.9"}
    assert facts._torch() == ("9.9", (13, 0))
    tmp_path.joinpath("torch", "version.py").write_text("cuda: Optional[str] = None\n")
    assert facts._torch() == ("9.9", None)


def test_a_broken_cupy_is_quoted(tmp_path, monkeypatch):
    fake_distribution(tmp_path, "cupy-cuda12x", "14.2.0")
    tmp_path.joinpath("cupy.py").write_text("raise OSError('no cache\\n directory')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(find_cupy, "_broken", None)  # which would be remembered
    found = {check.name: check for check in cq.doctor().checks}
    assert found["cupy"].status == "problem"
    assert "no cache directory" in found["cupy"].found
    assert found["nvrtc"].status == "missing"


def test_headers_tell_their_version(tmp_path, monkeypatch):
    include = tmp_path / "cuda" / "include"
    include.mkdir(parents=True)
    monkeypatch.setenv("CUDA_PATH", str(include.parent))
    assert include not in [headers.folder for headers in sources.cuda_headers()]
    include.joinpath("cuda_fp16.h").touch()
    text = "/* */\n#define CUDART_VERSION  12090\n"
    include.joinpath("cuda_runtime_api.h").write_text(text)
    assert Headers(include, (12, 9)) in list(sources.cuda_headers())


def test_the_cache_folder_and_its_variable(tmp_path, monkeypatch):
    monkeypatch.delenv("CUQUANT_CACHE_DIR", raising=False)
    assert cache.cache_folder().name == "cuquant"
    monkeypatch.setenv("CUQUANT_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert cache.cache_folder() == tmp_path / "elsewhere"
    monkeypatch.setenv("CUQUANT_CACHE_DIR", "~/kernels")
    assert cache.cache_folder() == Path.home() / "kernels"


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_permissions_of_the_cache_are_seen(tmp_path, monkeypatch):
    folder = tmp_path / "c"
    assert examine_folder(folder) == Folder(folder, exists=False)
    folder.mkdir(mode=0o755)
    assert examine_folder(folder) == Folder(folder)
    for mode in (0o775, 0o757):
        folder.chmod(mode)
        assert examine_folder(folder).shared
    folder.chmod(0o755)
    tmp_path.chmod(0o777)
    assert examine_folder(folder) == Folder(folder, exposed=tmp_path)
    assert examine_folder(tmp_path / "new").exposed == tmp_path
    tmp_path.chmod(0o1777)  # as /tmp: who owns a folder in it keeps it
    assert examine_folder(folder) == Folder(folder)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    assert not examine_folder(folder).owned
    folder.joinpath("file").touch()
    assert not examine_folder(folder / "file" / "below").writable


@pytest.fixture
def full_cache(tmp_path, monkeypatch):
    """A cache with two kernels, two half-written ones, and things that are not ours."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("CUQUANT_CACHE_DIR", str(folder))
    sealed = cache.sealed("a", cache.Compiled(b"\x7fELF" + bytes(10), "a log"))
    contents = {
        "a.cubin": sealed,
        "b.cubin": sealed,
        f".c.{'0123' * 4}.tmp": b"\x7fELF half",
        ".d.cubin.ab12_cd9.tmp": b"",
        "notes.txt": bytes(10),
        ".hidden.tmp": bytes(10),
        "other.cubin": b"\x7fELF of another program" + bytes(100),
        "zeros.cubin": bytes(1500),
        "short.cubin": sealed[-20:],
        "cut.cubin": sealed[:-1],
        f".e.{'0123' * 4}.tmp": b"somebody's text",
        "sealed.bin": sealed,
    }
    for name, data in contents.items():
        folder.joinpath(name).write_bytes(data)
    folder.joinpath("d.cubin").mkdir()
    folder.joinpath("d.cubin", "e.cubin").touch()
    with folder.joinpath("sparse.cubin").open("wb") as file:
        file.truncate(20 << 30)
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / "fifo.cubin")
    outside = tmp_path / "outside.cubin"
    outside.write_bytes(sealed)
    try:
        folder.joinpath("link.cubin").symlink_to(outside)
        folder.joinpath("device.cubin").symlink_to("/dev/zero")
    except OSError:
        pytest.skip("this system makes no symbolic links")
    return folder


def test_only_our_files_are_counted_and_removed(full_cache):
    before = {path.name for path in full_cache.iterdir()}
    nbytes = 2 * full_cache.joinpath("a.cubin").stat().st_size + len(b"\x7fELF half")
    assert cache.cache_size() == (4, nbytes)
    assert cache.clear_cache() == (4, nbytes)
    ours = {"a.cubin", "b.cubin", f".c.{'0123' * 4}.tmp", ".d.cubin.ab12_cd9.tmp"}
    assert {path.name for path in full_cache.iterdir()} == before - ours
    assert full_cache.parent.joinpath("outside.cubin").exists()
    assert full_cache.joinpath("d.cubin", "e.cubin").exists()
    assert cache.clear_cache() == (0, 0)


@pytest.mark.skipif(os.name != "posix", reason="locks of POSIX")
def test_a_kernel_that_is_being_written_is_not_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("CUQUANT_CACHE_DIR", str(tmp_path))
    with Replacement(tmp_path / "a.cubin") as new:
        new.write(b"\x7fELF half")
        assert cache.clear_cache() == (0, 0)
        new.write(cache.sealed("a", cache.Compiled(b"", "")))
    assert cache.clear_cache().files == 1


def test_a_foreign_cache_is_not_cleared(full_cache, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: full_cache.stat().st_uid + 1, raising=False)
    with pytest.raises(PermissionError, match="another user"):
        cache.clear_cache()
    assert full_cache.joinpath("a.cubin").exists()


def test_a_linked_cache_is_not_cleared(full_cache, monkeypatch):
    link = full_cache.with_name("link")
    link.symlink_to(full_cache)
    monkeypatch.setenv("CUQUANT_CACHE_DIR", str(link))
    with pytest.raises(ValueError, match="symbolic link"):
        cache.clear_cache()
    assert full_cache.joinpath("a.cubin").exists()


def test_a_cache_that_does_not_exist_is_empty(tmp_path, monkeypatch):
    monkeypatch.setenv("CUQUANT_CACHE_DIR", str(tmp_path / "none"))
    assert cache.cache_size() == cache.clear_cache() == (0, 0)
    assert not tmp_path.joinpath("none").exists()
