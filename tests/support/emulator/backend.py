"""Backends of the tests: one runs kernels on the CPU, one only notes which are wanted."""

import ctypes
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cuquant.gpu.backend import Gemm
from cuquant.gpu.cublas import Cublas
from cuquant.gpu.jit import Launch, Program
from cuquant.gpu.rates import H100
from cuquant.gpu.tensor_map import COLUMNS, DATA_TYPES, MAP_BYTES
from cuquant.gpu.view import View
from emulator import compile as compilation
from emulator.cublas import Library
from emulator.memory import Memory

ORDERS = ("ascending", "descending", "shuffled", "mixed")
SHARED_MOST = 232448  # bytes of dynamic shared memory: Hopper's
MAP_MARK = 0x70616D20726F736E


class KernelError(RuntimeError):
    """A kernel did what a GPU would not forgive."""


class _Dim3(ctypes.Structure):
    _fields_ = [(axis, ctypes.c_uint) for axis in "xyz"]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", _Dim3),
        ("threads", ctypes.c_int),
        ("shared", ctypes.c_int),
        ("order", ctypes.c_int),
    ]


class _Argument(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_longlong),
        ("count", ctypes.c_longlong),
        ("data", ctypes.c_char_p),
    ]


class _OnHost:
    """What both backends do with NumPy arrays, as cuquant.gpu.arrays does with a GPU's."""

    kind = "numpy"
    arch: int
    has_vendor = False
    _in_workspace = False

    rates = H100

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        raise NotImplementedError

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        array = self.empty(shape, dtype)
        array.fill(0)
        return array

    def array(self, host: np.ndarray) -> np.ndarray:
        copy = self.empty(host.shape, host.dtype)
        copy[...] = host
        return copy

    def contiguous(self, x: np.ndarray, axis: int) -> np.ndarray:
        moved = np.moveaxis(x, axis, -1)
        aligned = moved.flags.c_contiguous and moved.ctypes.data % 16 == 0
        return moved if aligned else self.array(moved)

    def broadcast(self, array: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return self.array(np.broadcast_to(array, shape).astype(dtype))

    def copy_into(self, target: np.ndarray, source: Any) -> None:
        target[...] = source

    def permuted(self, array: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        return array.transpose(axes)

    def count_above(self, x: np.ndarray, bound: float) -> int:
        return int((np.abs(x.astype(np.float32)) > np.float32(bound)).sum())

    def read(self, array: np.ndarray) -> np.ndarray:
        return array

    def pointer(self, array: np.ndarray) -> int:
        return array.ctypes.data

    @contextmanager
    def workspace(self, nbytes: int) -> Iterator[int]:
        """A call's one: a second one would be the same memory on a GPU."""
        if self._in_workspace:
            raise KernelError("a workspace within another one")
        self._in_workspace = True
        try:
            array = self.empty((nbytes,), np.dtype(np.uint8))
            yield array.ctypes.data
        finally:
            self._in_workspace = False

    def tensor_map(
        self,
        pointer: int,
        rows: int,
        columns: int,
        stride: int,
        height: int,
        dtype: str,
        width: int = COLUMNS,
    ) -> bytes:
        """hopper.h's EmulatorMap, in the room of a CUtensorMap."""
        size = 1 if dtype == "uint8" else 2
        box = 0 < height <= 256 and 0 < width <= 256 and width * size % 16 == 0
        taken = pointer % 16 == stride % 16 == 0 and 0 < stride < 1 << 40 and box
        if not taken or dtype not in DATA_TYPES or not (0 < rows < 1 << 32 and columns > 0):
            asked = (pointer, rows, columns, stride, height, dtype, width)
            raise KernelError(f"no tensor map of {asked}")
        map = struct.pack("<Q7q", pointer, rows, columns, stride, height, width, size, MAP_MARK)
        return map.ljust(MAP_BYTES, b"\0")

    def view(self, array: np.ndarray) -> View:
        steps = tuple(step // array.dtype.itemsize for step in array.strides)
        return View(array.ctypes.data, array.shape, steps, array.dtype)


class Emulator(_OnHost):
    """A Backend that runs kernels on the CPU, on NumPy arrays.

    Parameters
    ----------
    order
        In which the threads of a block take turns between barriers: one of ORDERS; "mixed" takes
        another one for each block.
    folders
        Where to look for kernel files before cuquant's own folder.
    multiprocessors, arch, vendor
        What launch rules see. Of sm_90 clusters of several blocks are not there; `vendor` says
        whether cuBLAS is.
    """

    def __init__(
        self,
        order: str = "mixed",
        folders: Sequence[Path] = (),
        multiprocessors: int = 2,
        arch: int = 75,
        vendor: bool = False,
    ) -> None:
        self.order = ORDERS.index(order)
        self.folders = tuple(folders)
        self.multiprocessors, self.arch, self.has_vendor = multiprocessors, arch, vendor
        self._cublas = Cublas(Library())
        self.memory = Memory()
        self._uploaded: dict[tuple, np.ndarray] = {}

    def build(self, programs: Iterable[Program]) -> None:
        """Compile programs together, which is much faster than one by one."""
        compilation.functions(programs, self.folders)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return self.memory.empty(shape, dtype)

    def upload(self, array: np.ndarray) -> np.ndarray:
        """A guarded copy that kernels cannot write to."""
        key = (array.dtype.str, str(array.dtype), array.shape, array.tobytes())
        if key not in self._uploaded:
            copy = self.memory.empty(array.shape, array.dtype)
            copy[...] = array
            copy.flags.writeable = False
            self.memory.protect(copy)
            self._uploaded[key] = copy
        return self._uploaded[key]

    def gemm(self, gemm: Gemm) -> None:
        self._cublas.gemm(0, gemm)
        if problem := self.memory.changed():
            raise KernelError(f"the vendor's GEMM: {problem}")

    def launch(self, launch: Launch, *arguments: int | float | bytes) -> None:
        """Run a kernel to its end; KernelError says what went wrong and where."""
        _check(launch)
        (function,) = compilation.functions([launch.program], self.folders)
        given = (_Argument * max(len(arguments), 1))(*map(_argument, arguments))
        order = _Launch(_Dim3(*launch.grid), launch.threads, launch.shared, self.order)
        address = ctypes.c_void_p(0)
        failure = function(
            ctypes.byref(order), given, ctypes.c_int(len(arguments)), ctypes.byref(address)
        )
        if failure is not None:
            where = self.memory.describe(address.value) if address.value else ""
            raise KernelError(f"{launch.program.name}: {failure.decode()}{where}")
        if problem := self.memory.changed():
            raise KernelError(f"{launch.program.name}: {problem}")


class Recorder(_OnHost):
    """A Backend that launches nothing and notes the programs; its arrays hold zeros.

    What `read` gives is zeros too: programs that depend on results are found with those only.
    """

    def __init__(self, multiprocessors: int = 2, arch: int = 75, vendor: bool = False) -> None:
        self.multiprocessors, self.arch, self.has_vendor = multiprocessors, arch, vendor
        self.launches: list[Launch] = []

    @property
    def programs(self) -> list[Program]:
        """Each once, in the order of their first launch."""
        return list(dict.fromkeys(launch.program for launch in self.launches))

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return np.zeros(shape, dtype)

    def upload(self, array: np.ndarray) -> np.ndarray:
        return array

    def gemm(self, gemm: Gemm) -> None:
        pass

    def launch(self, launch: Launch, *arguments: int | float | bytes) -> None:
        _check(launch)
        for argument in arguments:
            _argument(argument)
        self.launches.append(launch)


def _check(launch: Launch) -> None:
    """The limits of every GPU since sm_75, but for shared memory."""
    x, y, z = launch.grid
    if not (0 < x < 1 << 31 and 0 < y < 1 << 16 and 0 < z < 1 << 16):
        raise KernelError(f"{launch.program.name}: a grid of {launch.grid} blocks")
    if not 0 < launch.threads <= 1024:
        raise KernelError(f"{launch.program.name}: {launch.threads} threads in a block")
    if not 0 <= launch.shared <= SHARED_MOST:
        raise KernelError(f"{launch.program.name}: {launch.shared} bytes of dynamic shared memory")


def _argument(value: int | float | bytes) -> _Argument:
    if isinstance(value, bytes):
        data = value + b"\0" * (-len(value) % 8)
        return _Argument(ord("b"), len(data), data)
    if isinstance(value, float):
        return _Argument(ord("f"), 8, struct.pack("<fI", value, 0))
    if isinstance(value, int):
        return _Argument(ord("i"), 8, (value & (1 << 64) - 1).to_bytes(8, "little"))
    raise TypeError(f"a kernel takes int, float and bytes, got {type(value).__name__}")
