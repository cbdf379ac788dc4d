"""What is installed on this machine, gathered without a judgement and without an exception."""

import ctypes
import importlib
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from cuquant import interop
from cuquant.errors import CupyBroken
from cuquant.gpu import jit
from cuquant.gpu.cubins import CacheSize, Folder, cache_folder, cache_size, examine_folder
from cuquant.gpu.cublas import library
from cuquant.gpu.source import Headers, cuda_headers, cuda_version, kernel_folder

Version = tuple[int, int]  # major, minor
T = TypeVar("T")

_CUPY_WHEEL = re.compile(r"cupy(-cuda\d+x?|-rocm[\d-]+)?")
_WHEEL_CUDA = re.compile(r"cuda(\d\d)")
_TORCH_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*'(\d+)\.(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    name: str
    compute: Version
    nbytes: int  # of its memory


@dataclass(frozen=True)
class Facts:
    """What was found; None and empty where a thing is not there.

    Attributes
    ----------
    cupy_wheels
        Version by distribution name ("cupy-cuda12x").
    cupy_error, cupy_advice
        Why the installed CuPy cannot be imported, and what helps, where another wheel would not.
    nvrtc, nvrtc_error, nvrtc_archs
        Of the NVRTC that CuPy loads: version, why there is none, the compute capabilities it
        compiles for (75, 80, ...).
    driver, driver_cuda
        The driver's release, and the newest CUDA it runs.
    cublas
        CUDA major version of the cuBLAS that fits CuPy.
    trial_error
        Why a kernel of one line does not compile.
    cached
        What the cache directory holds.
    kernels
        Folder of the CUDA sources.
    """

    python: str = ""
    platform: str = ""
    cuquant: str = ""
    numpy: str = ""
    ml_dtypes: str = ""
    cupy_wheels: dict[str, str] = field(default_factory=dict)
    cupy_error: str | None = None
    cupy_advice: str | None = None
    nvrtc: Version | None = None
    nvrtc_error: str | None = None
    nvrtc_archs: tuple[int, ...] = ()
    headers: tuple[Headers, ...] = ()
    driver: str | None = None
    driver_cuda: Version | None = None
    gpus: tuple[Gpu, ...] = ()
    cublas: int | None = None
    torch: str | None = None
    torch_cuda: Version | None = None
    trial_error: str | None = None
    cache: Folder | None = None
    cached: CacheSize | None = None
    kernels: Path | None = None

    @property
    def wheel(self) -> str | None:
        """The installed CuPy wheel, where there is exactly one."""
        return next(iter(self.cupy_wheels)) if len(self.cupy_wheels) == 1 else None

    @property
    def wheel_major(self) -> int | None:
        """CUDA major version of that wheel; None where its name says nothing (built at home)."""
        found = _WHEEL_CUDA.search(self.wheel or "")
        return int(found.group(1)) if found else None


def gather(package: Path) -> Facts:
    """Look at this machine; `package` is the folder of cuquant."""
    wheels = attempt(_cupy_wheels, {})
    cupy, cupy_error, cupy_advice = _import_cupy() if wheels else (None, None, None)
    nvrtc, nvrtc_error, archs = _nvrtc() if cupy else (None, None, ())
    driver, driver_cuda, gpus = attempt(_nvml, (None, None, ()))
    if driver_cuda is None and cupy is not None:  # Jetson has a driver, but no NVML
        driver_cuda, gpus = attempt(lambda: _cupy_devices(cupy), (None, ()))
    torch, torch_cuda = attempt(_torch, (None, None))
    major = nvrtc[0] if nvrtc else 0
    return Facts(
        python=platform.python_version(),
        platform=attempt(platform.platform, sys.platform),
        cuquant=attempt(lambda: _version(package), "unknown"),
        numpy=np.__version__,
        ml_dtypes=ml_dtypes.__version__,
        cupy_wheels=wheels,
        cupy_error=cupy_error,
        cupy_advice=cupy_advice,
        nvrtc=nvrtc,
        nvrtc_error=nvrtc_error,
        nvrtc_archs=archs,
        headers=attempt(lambda: tuple(cuda_headers()), ()),
        driver=driver,
        driver_cuda=driver_cuda,
        gpus=gpus,
        cublas=major if major and attempt(lambda: library(major), None) else None,
        torch=torch,
        torch_cuda=torch_cuda,
        trial_error=attempt(_trial, "it fails") if nvrtc else None,
        cache=attempt(_cache, None),
        cached=attempt(cache_size, None),
        kernels=attempt(kernel_folder, None),
    )


def _cache() -> Folder:
    """The cache directory, where a file is tried: /proc lets root write, and does not take one."""
    folder = examine_folder(cache_folder())
    nearest = next(at for at in (folder.path, *folder.path.parents) if at.exists())
    try:
        with TemporaryFile(dir=nearest):
            return folder
    except OSError:
        return replace(folder, writable=False)


def attempt(find: Callable[[], T], otherwise: Any) -> T:
    """What `find` returns, or `otherwise`: a broken installation is what is being examined."""
    try:
        return find()
    except Exception:
        return otherwise


def _version(package: Path) -> str:
    """cuquant's own, read as text: the package imports this module."""
    text = (package / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    return found.group(1) if found else "unknown"


def _cupy_wheels() -> dict[str, str]:
    import importlib.metadata

    found = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if _CUPY_WHEEL.fullmatch(name):
            found[name] = distribution.version
    return dict(sorted(found.items()))


def _import_cupy() -> tuple[ModuleType | None, str | None, str | None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # two wheels: a check of its own says it better
            return interop.import_cupy(), None, None
    except CupyBroken as error:
        advice = error.advice if isinstance(error.__cause__, OSError) else None
        return None, error.reason, advice
    except Exception as error:
        return None, _first_line(error), None


def _nvrtc() -> tuple[Version | None, str | None, tuple[int, ...]]:
    try:
        nvrtc: Any = importlib.import_module("cupy").cuda.nvrtc
        major, minor = nvrtc.getVersion()
    except Exception as error:
        return None, _first_line(error), ()
    archs = attempt(lambda: tuple(int(arch) for arch in nvrtc.getSupportedArchs()), ())
    return (major, minor), None, archs


def _trial() -> str | None:
    """Why NVRTC does not compile a kernel of one line; None where it does."""
    try:
        text = "namespace cuquant { __global__ void trial(int* x) { *x = 1; } }\n"
        jit.build(jit.Program("trial.cu", "trial"), text, 90)
    except Exception as error:
        return _first_line(error)
    return None


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."


def _torch() -> tuple[str | None, Version | None]:
    """torch's version and that of its CUDA, from its files: importing it takes seconds."""
    import importlib.metadata

    distribution = importlib.metadata.distribution("torch")
    file = Path(str(distribution.locate_file("torch/version.py")))
    found = _TORCH_CUDA.search(attempt(lambda: file.read_text(encoding="utf-8"), ""))
    return distribution.version, (int(found[1]), int(found[2])) if found else None


def _nvml() -> tuple[str | None, Version | None, tuple[Gpu, ...]]:
    """Driver and GPUs by NVIDIA's management library: no CUDA context is made for it."""
    library = ctypes.CDLL("nvml.dll" if os.name == "nt" else "libnvidia-ml.so.1")
    if library.nvmlInit_v2():
        return None, None, ()
    try:
        release = ctypes.create_string_buffer(96)
        cuda, count = ctypes.c_int(), ctypes.c_uint()
        library.nvmlSystemGetDriverVersion(release, len(release))
        library.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda))
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        gpus = tuple(_nvml_gpu(library, index) for index in range(count.value))
        return release.value.decode(), cuda_version(cuda.value), gpus
    finally:
        library.nvmlShutdown()


def _nvml_gpu(library: ctypes.CDLL, index: int) -> Gpu:
    handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
    major, minor = ctypes.c_int(), ctypes.c_int()
    memory = (ctypes.c_uint64 * 3)()  # total, free, used, in bytes
    library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
    library.nvmlDeviceGetName(handle, name, len(name))
    library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    return Gpu(name.value.decode(errors="replace"), (major.value, minor.value), memory[0])


def _cupy_devices(cupy: Any) -> tuple[Version, tuple[Gpu, ...]]:
    runtime = cupy.cuda.runtime
    gpus = []
    for index in range(runtime.getDeviceCount()):
        found = runtime.getDeviceProperties(index)
        compute = (found["major"], found["minor"])
        gpus.append(Gpu(found["name"].decode(errors="replace"), compute, found["totalGlobalMem"]))
    return cuda_version(runtime.driverGetVersion()), tuple(gpus)
