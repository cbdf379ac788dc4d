"""What the facts about an installation mean, and the command that mends what is wrong."""

from collections.abc import Iterable
from dataclasses import dataclass

from cuquant.diagnosis.facts import Facts, Version
from cuquant.errors import pip_install
from cuquant.gpu.cubins import VARIABLE
from cuquant.gpu.jit import NEEDED_NVRTC

OLDEST_ARCH_OF_13 = (7, 5)  # NVRTC 13 dropped everything before Turing
TORCH_CUDA12 = "https://download.pytorch.org/whl/cu126"
NEEDED_BY_GPU = ("driver", "gpu", "cupy", "nvrtc", "cuda headers", "compiler", "kernels")
DRIVERS = {12: "525", 13: "580"}  # the first release that runs a CUDA major version


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes
    ----------
    name
        Of the thing.
    status
        "ok", "missing" (nothing is wrong, but what needs it cannot run) or "problem".
    found
        What is there.
    advice
        What to type; None where nothing is to be done.
    """

    name: str
    status: str
    found: str
    advice: str | None = None


def examine(facts: Facts) -> tuple[Check, ...]:
    """A check for each thing, in the order in which they build on each other."""
    checks = (
        Check("python", "ok", f"{facts.python} on {facts.platform}"),
        Check("cuquant", "ok", facts.cuquant),
        Check("numpy", "ok", facts.numpy),
        Check("ml_dtypes", "ok", facts.ml_dtypes),
        check_driver(facts),
        check_gpus(facts),
        check_cupy(facts),
        check_nvrtc(facts),
        check_headers(facts),
        check_compiler(facts),
        check_cublas(facts),
        check_torch(facts),
        check_cache(facts),
        check_kernels(facts),
    )
    return (*checks, check_backend(checks))


def fitting_major(facts: Facts) -> int:
    """The CUDA major version whose CuPy suits this machine: 12 or 13.

    12 where the driver or an old GPU demands it; else as torch has it; else as CuPy has it; else
    12, which runs on every driver of the last years.
    """
    if facts.driver_cuda is not None and facts.driver_cuda[0] < 13:
        return 12
    if any(gpu.compute < OLDEST_ARCH_OF_13 for gpu in facts.gpus):
        return 12
    if facts.torch_cuda is not None:
        return 13 if facts.torch_cuda[0] >= 13 else 12
    return 13 if (facts.wheel_major or 12) >= 13 else 12


def install(facts: Facts) -> str:
    """The command that makes CuPy, NVRTC and the headers one set, whatever is installed now."""
    major = fitting_major(facts)
    command = pip_install(f"cuda{major}")
    wrong = [name for name in facts.cupy_wheels if name != f"cupy-cuda{major}x"]
    if len(facts.cupy_wheels) > 1:  # both own the folder "cupy": removing one breaks the other
        wrong = list(facts.cupy_wheels)
    if facts.nvrtc is not None and facts.nvrtc[0] != major:
        wrong.append(_nvrtc_wheel(facts.nvrtc[0]))
    return f"pip uninstall -y {' '.join(wrong)} && {command}" if wrong else command


def check_driver(facts: Facts) -> Check:
    if facts.driver_cuda is None:
        return Check("driver", "missing", "no NVIDIA driver")
    release = f"NVIDIA {facts.driver or '(release unknown)'}"
    found = f"{release}, runs CUDA up to {_text(facts.driver_cuda)}"
    if facts.driver_cuda[0] < 12:
        advice = f"install NVIDIA driver {DRIVERS[12]} or newer: https://www.nvidia.com/drivers"
        return Check("driver", "problem", f"{found}; 12 is needed", advice)
    return Check("driver", "ok", found)


def check_gpus(facts: Facts) -> Check:
    if not facts.gpus:
        return Check("gpu", "missing", "no NVIDIA GPU; everything runs on the CPU")
    found = "; ".join(
        f"{gpu.name}, sm_{gpu.compute[0]}{gpu.compute[1]}, {gpu.nbytes / 2**30:.0f} GiB"
        for gpu in facts.gpus
    )
    if not facts.nvrtc_archs or facts.nvrtc is None:
        return Check("gpu", "ok", found)
    archs = [10 * major + minor for major, minor in (gpu.compute for gpu in facts.gpus)]
    oldest, newest = min(facts.nvrtc_archs), max(facts.nvrtc_archs)
    if max(archs) > newest:
        limit = f"NVRTC {_text(facts.nvrtc)} knows GPUs up to sm_{newest}"
        advice = f"pip install --upgrade {_nvrtc_wheel(facts.nvrtc[0])}"
        return Check("gpu", "problem", f"{found}; {limit}", advice)
    if min(archs) < oldest:
        limit = f"NVRTC {_text(facts.nvrtc)} knows GPUs from sm_{oldest} on"
        return Check("gpu", "problem", f"{found}; {limit}", install(facts))
    return Check("gpu", "ok", found)


def check_cupy(facts: Facts) -> Check:
    if not facts.cupy_wheels:
        found = "not installed; only arrays on an NVIDIA GPU need it"
        has_gpu = facts.driver_cuda is not None or bool(facts.gpus)
        return Check("cupy", "missing", found, install(facts) if has_gpu else None)
    found = " and ".join(f"{name} {version}" for name, version in facts.cupy_wheels.items())
    problem = _cupy_problem(facts)
    if problem is None:
        return Check("cupy", "ok", found)
    advice = install(facts)
    if problem == facts.cupy_error:  # the right wheel, but broken: pip would leave it as it is
        advice = facts.cupy_advice or f"pip install --force-reinstall {facts.wheel}"
        problem = f"no import: {problem}"
    return Check("cupy", "problem", f"{found}; {problem}", advice)


def _cupy_problem(facts: Facts) -> str | None:
    if len(facts.cupy_wheels) > 1:
        return "they overwrite each other's files"
    wheel = facts.wheel or ""
    if facts.wheel_major is not None and facts.wheel_major < 12:
        return "CUDA 12 or 13 is needed"
    if "rocm" in wheel:
        return "it is made for AMD GPUs, and the kernels are CUDA's"
    if facts.cupy_error is not None:
        return facts.cupy_error
    driver = facts.driver_cuda
    if driver is not None and facts.wheel_major is not None and facts.wheel_major > driver[0]:
        return f"the driver runs CUDA up to {_text(driver)}"
    return None


def check_nvrtc(facts: Facts) -> Check:
    if not facts.cupy_wheels or facts.cupy_error is not None:
        return Check("nvrtc", "missing", "not looked for: CuPy, which loads it, is not there")
    if facts.nvrtc is None:
        found = f"not found: {facts.nvrtc_error or 'CuPy loads none'}"
        return Check("nvrtc", "problem", found, install(facts))
    found = _text(facts.nvrtc)
    major, wheel = facts.nvrtc[0], facts.wheel_major
    if wheel is not None and major != wheel:
        return Check("nvrtc", "problem", f"{found} beside {facts.wheel}", install(facts))
    if facts.driver_cuda is not None and major > facts.driver_cuda[0]:
        limit = f"the driver runs CUDA up to {_text(facts.driver_cuda)}"
        return Check("nvrtc", "problem", f"{found}; {limit}", install(facts))
    if facts.nvrtc < NEEDED_NVRTC:
        advice = f"pip install --upgrade {_nvrtc_wheel(major)}"
        return Check("nvrtc", "problem", f"{found}; {_text(NEEDED_NVRTC)} is needed", advice)
    return Check("nvrtc", "ok", found)


def check_headers(facts: Facts) -> Check:
    found = "; ".join(f"{_text(h.cuda)} in {h.folder}" for h in facts.headers) or "no cuda_fp16.h"
    if not facts.cupy_wheels:
        return Check("cuda headers", "ok" if facts.headers else "missing", found)
    if not facts.headers:
        return Check("cuda headers", "problem", found, install(facts))
    major = facts.nvrtc[0] if facts.nvrtc else facts.wheel_major
    if major is not None and all(h.cuda[0] != major for h in facts.headers):
        user = f"NVRTC {_text(facts.nvrtc)}" if facts.nvrtc else facts.wheel
        return Check("cuda headers", "problem", f"{found}; none for {user}", install(facts))
    return Check("cuda headers", "ok", found)


def check_compiler(facts: Facts) -> Check:
    """Whether a kernel really compiles, where nothing above says already why not."""
    if facts.nvrtc is None or facts.nvrtc < NEEDED_NVRTC:
        return Check("compiler", "missing", "not tried: see nvrtc")
    if facts.trial_error is None:
        return Check("compiler", "ok", "a trial kernel compiles")
    found = f"a trial kernel does not compile: {facts.trial_error}"
    return Check("compiler", "problem", found, install(facts))


def check_cublas(facts: Facts) -> Check:
    """Nothing needs it; products of many rows of x are faster with it."""
    if facts.cublas is not None:
        return Check("cublas", "ok", f"of CUDA {facts.cublas}, for products of many rows")
    found = "not installed; products of many rows whose weights are not prepacked take longer"
    advice = pip_install(f"cublas{fitting_major(facts)}") if facts.nvrtc else None
    return Check("cublas", "missing", found, advice)


def check_torch(facts: Facts) -> Check:
    if facts.torch is None:
        return Check("torch", "missing", "not installed; nothing here needs it")
    if facts.torch_cuda is None:
        return Check("torch", "ok", f"{facts.torch}, without CUDA")
    found = f"{facts.torch} with CUDA {_text(facts.torch_cuda)}"
    wheel = facts.wheel_major
    if wheel is None or wheel == facts.torch_cuda[0]:
        return Check("torch", "ok", found)
    found = f"{found} beside {facts.wheel}: one process loads the libraries of one of them only"
    if fitting_major(facts) == facts.torch_cuda[0]:
        return Check("torch", "problem", found, install(facts))
    advice = f"pip install --force-reinstall torch --index-url {TORCH_CUDA12}"
    return Check("torch", "problem", found, advice)


def check_cache(facts: Facts) -> Check:
    folder = facts.cache
    elsewhere = f"export {VARIABLE}=FOLDER, with a folder of yours"
    if folder is None:
        return Check("cache", "problem", "the cache directory cannot be examined", elsewhere)
    path = str(folder.path)
    if not folder.owned:
        return Check("cache", "problem", f"{path} belongs to another user", elsewhere)
    if not folder.writable:
        return Check("cache", "problem", f"{path} is not writable", elsewhere)
    if folder.shared:
        found = f"{path} can be written by others, who could plant kernels in it"
        return Check("cache", "problem", found, f"chmod go-w '{path}'")
    if folder.exposed is not None:
        found = f"{path} can be exchanged by others, who can write {folder.exposed}"
        return Check("cache", "problem", found, f"chmod o-w '{folder.exposed}'")
    if not folder.exists:
        return Check("cache", "ok", f"{path}, made when it is needed")
    held = facts.cached
    size = f"; {held.files} files, {held.nbytes / 2**20:.1f} MiB" if held is not None else ""
    return Check("cache", "ok", path + size)


def check_kernels(facts: Facts) -> Check:
    if facts.kernels is None:
        return Check("kernels", "missing", "no CUDA sources; everything runs on the CPU")
    return Check("kernels", "ok", str(facts.kernels))


def check_backend(checks: Iterable[Check]) -> Check:
    """What computes, from the checks of all that a GPU needs."""
    status = {check.name: check.status for check in checks}
    lacking = [name for name in NEEDED_BY_GPU if status[name] != "ok"]
    if not lacking:
        found = "cuda: arrays on the GPU are quantized, decoded and multiplied there"
        return Check("backend", "ok", found)
    if status["gpu"] == "missing":
        return Check("backend", "ok", "cpu: NumPy computes")
    found = f"cpu: NumPy computes; arrays on the GPU need what is said of {', '.join(lacking)}"
    return Check("backend", "missing", found)


def _nvrtc_wheel(major: int) -> str:
    return "nvidia-cuda-nvrtc" if major >= 13 else f"nvidia-cuda-nvrtc-cu{major}"


def _text(version: Version) -> str:
    return ".".join(str(part) for part in version)
