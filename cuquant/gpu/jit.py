"""Kernels compiled at run time: a program -> its text -> NVRTC -> a cubin -> a launch.

`python -m cuquant.ops.print_source quantize nf4` prints what NVRTC is given for an operation and a
format.

Environment variables
---------------------
CUQUANT_CACHE_DIR
    Where compiled kernels are kept; else the user's cache directory.
CUQUANT_CUBINS
    A folder of kernels that `precompile(export=...)` made, on this machine or on another; it is
    looked into first.
CUQUANT_DUMP
    A folder into which each kernel's text, PTX, cubin and, where nvdisasm or cuobjdump is on the
    path, its SASS are written. Everything is compiled anew then.
CUQUANT_PRINT_SOURCE
    1 prints each kernel's text to stderr. Everything is compiled anew then.
"""

import hashlib
import importlib
import os
import re
import sys
import threading
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuquant.errors import BackendUnavailable, CompileError
from cuquant.gpu import cubins, driver, elf
from cuquant.gpu.cubins import Compiled
from cuquant.gpu.kernel import Kernel
from cuquant.gpu.source import (
    fitting_headers,
    flatten,
    kernel_folder,
    needs_system_headers,
    system_folders,
)
from cuquant.interop import INSTALL_GPU
from cuquant.interop import import_cupy as _cupy
from cuquant.lazy import lazy

NEEDED_NVRTC = (12, 9)
OVERLAP_ARCH = 90  # and newer: kernels can wait for those before them

_ERROR = re.compile(r"^[^\s(][^(\n]*\(\d+\): (?:catastrophic )?error: .*$", re.MULTILINE)
_PTX_ENTRY = re.compile(rb"\.entry\s+([\w$]+)")


@dataclass(frozen=True)
class Program:
    """One kernel to compile: a template of a file, instantiated for the facts of a format.

    Attributes
    ----------
    file
        Of the kernel folder, "quantize/quantize.cu".
    entry
        The `__global__` template in namespace cuquant, "quantize".
    arguments
        Its template arguments as C++ text or ints: ("formats::nf4", "Half", 8, 256).
    facts
        C++ that goes into namespace cuquant::formats before the file: the structs of the formats.
    features
        Whether it needs the instructions of one architecture alone (sm_90a).
    contract
        Whether a * b + c may become one operation; never where bytes are a promise.
    overlaps
        Whether it may start while the kernels before it end, since it waits for them itself: see
        device/overlap.cuh.
    """

    file: str
    entry: str
    arguments: tuple[str | int, ...] = ()
    facts: str = ""
    features: bool = False
    contract: bool = False
    overlaps: bool = False

    def __hash__(self) -> int:
        return self._hash

    @lazy
    def _hash(self) -> int:  # asked for at every launch
        return hash((self.file, self.entry, self.arguments, self.facts))

    @property
    def name(self) -> str:
        """The instantiation: "cuquant::quantize<cuquant::formats::nf4, ...>"."""
        if not self.arguments:
            return f"cuquant::{self.entry}"
        return f"cuquant::{self.entry}<{', '.join(map(str, self.arguments))}>"


@dataclass(frozen=True)
class Launch:
    """How a program is started: blocks, threads in each and bytes of dynamic shared memory."""

    program: Program
    grid: tuple[int, int, int]
    threads: int
    shared: int = 0


# ---- text and key -------------------------------------------------------------------------------


def source(program: Program) -> str:
    """The text that NVRTC compiles for a program."""
    return flatten(kernel_folder(), program.file, program.facts)


def cubin_name(program: Program, text: str, arch: int) -> str:
    """Entry and hash of all that decides a kernel but the compiler's version: a file's name."""
    parts = (text, program.name, *_options(program), f"features {program.features}", f"cc {arch}")
    return f"{program.entry}-{_hash(parts)}"


def _options(program: Program) -> tuple[str, ...]:
    """Options without an architecture and paths."""
    contract = "true" if program.contract else "false"
    floats = ("-ftz=false", "-prec-div=true", "-prec-sqrt=true", f"-fmad={contract}")
    return ("--std=c++17", *floats)


def _hash(parts: tuple[str, ...]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]


# ---- compiling ----------------------------------------------------------------------------------


def nvrtc() -> Any:
    """CuPy's binding of NVRTC.

    Raises
    ------
    BackendUnavailable
        Where CuPy or NVRTC is not there, or is too old.
    """
    try:
        found = _cupy().cuda.nvrtc
        with _locks_guard:  # CuPy loads the library with the first call, and two at once break it
            version = found.getVersion()
    except BackendUnavailable:
        raise
    except Exception as error:  # a library that is missing has several names in CuPy
        cause = " ".join(str(error).split())[:200]
        raise BackendUnavailable(f"NVRTC cannot be loaded ({cause}); {INSTALL_GPU}") from error
    if version < NEEDED_NVRTC:
        raise BackendUnavailable(
            f"NVRTC {_text(version)} is too old, {_text(NEEDED_NVRTC)} is needed; "
            f"pip install --upgrade nvidia-cuda-nvrtc-cu{version[0]}"
        )
    return found


def _target(program: Program, arch: int) -> str:
    """What NVRTC compiles for: the GPU itself, or PTX where it is newer than NVRTC."""
    known = nvrtc().getSupportedArchs()
    if arch in known:
        return f"sm_{arch}a" if program.features and arch == 90 else f"sm_{arch}"
    older = [candidate for candidate in known if candidate < arch]
    if not older:
        version = _text(nvrtc().getVersion())
        raise BackendUnavailable(
            f"NVRTC {version} compiles for sm_{min(known)} and newer, this GPU is sm_{arch}; "
            f"{INSTALL_GPU}"
        )
    return f"compute_{max(older)}"


def compiled(program: Program, arch: int) -> Compiled:
    """A program for GPUs of compute capability `arch` (90 is 9.0): found, or compiled and kept.

    Looked for in CUQUANT_CUBINS, among what could not be kept on disk, and in the cache. Threads
    that ask for the same one compile it once.

    Raises
    ------
    CompileError
        Where NVRTC rejects the program.
    BackendUnavailable
        Where there is no NVRTC.
    FormatError
        Where the file in CUQUANT_CUBINS is damaged.
    """
    text = source(program)
    portable = cubin_name(program, text, arch)
    with _locks_guard:
        lock = _locks[portable]
    with lock:
        if found := cubins.exported(portable):
            return found
        fresh = bool(os.environ.get("CUQUANT_DUMP") or os.environ.get("CUQUANT_PRINT_SOURCE"))
        name = cache_name(program, text, arch)
        found = None if fresh else _memory.get(name) or cubins.find(name)
        if found:
            return found
        made = build(program, text, arch)
        if not cubins.keep(name, made):
            _memory[name] = made._replace(fresh=False)
        return made


def cache_name(program: Program, text: str, arch: int) -> str:
    """`cubin_name` for the NVRTC of this process, and for its headers where they are used."""
    versions = ["nvrtc", _text(nvrtc().getVersion()), _target(program, arch)]
    if needs_system_headers(text):
        versions.append(_cupy().__version__)
        versions.append(_text(fitting_headers(nvrtc().getVersion()).cuda))
    return f"{program.entry}-{_hash((cubin_name(program, text, arch), *versions))}"


def build(program: Program, text: str, arch: int) -> Compiled:
    """Compile with NVRTC, whatever is in the cache."""
    compiler, target = nvrtc(), _target(program, arch)
    options = [f"-arch={target}", *_options(program)]
    if needs_system_headers(text):
        folders = system_folders(Path(_cupy().__file__).parent, compiler.getVersion())
        options += [f"-I{folder}" for folder in folders]
    if os.environ.get("CUQUANT_PRINT_SOURCE"):
        sys.stderr.write(f"// {program.name} for {target}\n{text}")
    handle = compiler.createProgram(text, f"{program.entry}.cu", (), ())
    try:
        try:
            compiler.addNameExpression(handle, program.name)
            compiler.compileProgram(handle, tuple(options))
        except Exception as error:
            log = compiler.getProgramLog(handle) or str(error)
            raise CompileError(_complaint(program, target, log)) from error
        log, ptx = compiler.getProgramLog(handle), compiler.getPTX(handle) + b"\0"
        code = ptx if target.startswith("compute") else elf.completed(compiler.getCUBIN(handle))
    finally:
        compiler.destroyProgram(handle)
    if chosen := os.environ.get("CUQUANT_DUMP"):
        stem = f"{cubin_name(program, text, arch)}.sm_{arch}"
        cubins.dump(Path(chosen), stem, f"// {program.name}\n{text}", ptx, code)
    return Compiled(code, log, fresh=True)


def _complaint(program: Program, target: str, log: str) -> str:
    """What is said about a program that NVRTC rejects: the first error's file and line first."""
    found = _ERROR.search(log)
    first = found[0] if found else "NVRTC rejects it"
    return (
        f"{first}\n{program.name} of kernels/{program.file} does not compile for {target}. "
        f"CUQUANT_PRINT_SOURCE=1 prints what NVRTC is given, CUQUANT_DUMP=FOLDER writes it, "
        "python -m cuquant.ops.print_source OPERATION FORMAT shows that of a format. "
        f"NVRTC says:\n{log.strip()}"
    )


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


_memory: dict[str, Compiled] = {}  # what could not be kept on disk
_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
_locks_guard = threading.Lock()


# ---- loading ------------------------------------------------------------------------------------

_kernels: dict[tuple[Program, int], Kernel] = {}
_loading = threading.Lock()
_process = os.getpid()
_parent_used_cuda = False


def load(program: Program, device: int, stream: int = 0) -> Kernel:
    """The kernel of a program on a device, ready to launch.

    Parameters
    ----------
    device
        CUDA's index of it.
    stream
        Handle of the stream on which the kernel is about to be launched.

    Raises
    ------
    RuntimeError
        Where the stream is being captured into a CUDA graph, and the kernel is not loaded yet; or
        in a process that was forked from one which had used CUDA.
    BackendUnavailable
        Without CuPy, a GPU or NVRTC.
    """
    kernel = _kernels.get((program, device))
    return kernel if kernel is not None else _load(program, device, stream)


def _load(program: Program, device: int, stream: int) -> Kernel:
    if _parent_used_cuda:
        raise RuntimeError(_FORK_ADVICE)
    cupy = _cupy()
    arch = device_arch(device)  # first: without a GPU nothing can be captured
    refuse_capture(stream, program.name)
    found = compiled(program, arch)
    with _loading:
        if (program, device) not in _kernels:
            with cupy.cuda.Device(device):
                cupy.cuda.runtime.free(0)  # makes the device's context where there is none yet
                start = driver.starter() if program.overlaps and arch >= OVERLAP_ARCH else None
                _kernels[program, device] = _loaded(program, found.code, start)
        return _kernels[program, device]


def current_device() -> int:
    """CUDA's index of the current device."""
    return _cupy().cuda.runtime.getDevice()


def device_arch(device: int | None = None) -> int:
    """A device's compute capability, as 90 for 9.0; of the current device for None.

    Raises
    ------
    BackendUnavailable
        Without CuPy or such a GPU.
    RuntimeError
        In a process that was forked from one that had used CUDA.
    """
    runtime = _cupy().cuda.runtime
    try:
        index = current_device() if device is None else device
        major, minor = (runtime.deviceGetAttribute(number, index) for number in (75, 76))
    except runtime.CUDARuntimeError as error:
        if os.getpid() != _process and "InitializationError" in str(error):
            raise RuntimeError(f"{_FORK_ADVICE} ({error})") from error
        raise BackendUnavailable(
            f"no usable GPU ({error}); `cuquant doctor` tells more, and what to pip install"
        ) from error
    return 10 * major + minor


def _loaded(program: Program, code: bytes, start: driver.Start | None) -> Kernel:
    api: Any = importlib.import_module("cupy_backends.cuda.api.driver")
    module = _cupy().cuda.function.Module()
    module.load(code)
    if code.startswith(b"\x7fELF"):
        resources = elf.resources(code, program.entry)
        return Kernel(api, module.get_function(resources.name), resources, start)
    names = _PTX_ENTRY.findall(code)
    function = module.get_function(names[0].decode())
    attributes = (api.funcGetAttribute(number, function.ptr) for number in (4, 3, 1, 0))
    return Kernel(api, function, elf.Resources(names[0].decode(), *attributes), start)


def is_capturing(stream: int) -> bool:
    """Whether a stream is being captured into a CUDA graph."""
    runtime = _cupy().cuda.runtime
    try:
        return bool(runtime.streamIsCapturing(stream))
    except runtime.CUDARuntimeError as error:
        if _IMPLICIT not in str(error):
            raise
        return True  # asked of the default stream while another one is captured


def refuse_capture(stream: int, what: str) -> None:
    """RuntimeError where a stream is being captured into a CUDA graph, which `what` would break."""
    if is_capturing(stream):
        raise RuntimeError(
            f"{what} is used for the first time while a CUDA graph is being captured, and loading "
            "it would break the capture; call cuquant.precompile() and the operation once before"
        )


_IMPLICIT = "cudaErrorStreamCaptureImplicit"
_FORK_ADVICE = (
    "this process was forked from one that had used CUDA, and CUDA does not work in it; start "
    'workers by multiprocessing.get_context("spawn")'
)


def _after_fork() -> None:
    """In the child: the parent's kernels are not there, and its locks may be held for ever."""
    global _parent_used_cuda, _loading, _locks_guard
    _parent_used_cuda = _parent_used_cuda or bool(_kernels)
    _kernels.clear()
    _locks.clear()
    _loading, _locks_guard = threading.Lock(), threading.Lock()


with suppress(AttributeError):  # Windows does not fork
    os.register_at_fork(after_in_child=_after_fork)
