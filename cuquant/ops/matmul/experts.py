"""Which rows of x are whose expert's: as they are given, checked, and as kernels ask."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuquant import interop
from cuquant.gpu.arrays import GpuBackend
from cuquant.gpu.backend import Backend
from cuquant.gpu.jit import Launch, Program
from cuquant.gpu.view import View
from cuquant.ops.cpp import WORDS
from cuquant.ops.matmul.check import Operand, place_of
from cuquant.ops.matmul.coded import Groups

INT64 = np.dtype(np.int64)
THREADS = 256
MOST_BLOCKS = 1024  # of clear_rows, which mostly find that there is nothing to do


@dataclass(frozen=True)
class Rows:
    """Which rows of x are whose.

    Attributes
    ----------
    name
        "experts", "offsets" or "counts".
    integers
        What was given under this name: NumPy int64, or as it is on the GPU.
    lead
        The shape of x but for its columns.
    known
        How many experts there are.
    """

    name: str
    integers: Any
    lead: tuple[int, ...]
    known: int

    @property
    def count(self) -> int:
        return math.prod(self.lead)

    @property
    def on_host(self) -> bool:
        return isinstance(self.integers, np.ndarray)

    def experts(self) -> np.ndarray:
        """The expert of each row [count], -1 where it has none: of integers on the host."""
        if self.name == "experts":
            return self.integers
        if self.name == "counts":
            place, ids = np.arange(self.lead[1])[None, :], np.arange(self.known)[:, None]
            return np.where(place < self.integers[:, None], ids, -1).reshape(-1)
        ids = np.searchsorted(self.integers, np.arange(self.count), side="right") - 1
        return np.where(ids < self.known, ids, -1)

    def groups(self, backend: Backend, integers: Any) -> Groups:
        """The same as kernels are told it, of contiguous int64 on the device: no `experts`."""
        own = {self.name: backend.pointer(integers)}
        return Groups(self.known, self.lead[-1], **own)

    def ids(self, backend: Backend, groups: Groups) -> Any:
        """The expert of each row as int64 on the device."""
        ids = backend.empty((self.count,), INT64)
        program = Program("matmul/experts.cu", "expert_ids", (THREADS,))
        launch = Launch(program, (-(-self.count // THREADS), 1, 1), THREADS)
        backend.launch(launch, groups.pack(), self.count, backend.pointer(ids))
        return ids


def as_int64(backend: GpuBackend, integers: Any) -> Any:
    """Integers on the device as contiguous int64."""
    return backend.contiguous(interop.astype(integers, INT64), -1)


def clear_lost(backend: Backend, groups: Groups, out: View) -> None:
    """Write 0 to the rows of out [T, N] or [E, M, N] that have no expert."""
    *lead, columns = out.shape
    *matrix, down, across = out.strides
    rows = math.prod(lead)
    program = Program("matmul/experts.cu", "clear_rows", (WORDS[out.dtype.itemsize], THREADS))
    launch = Launch(program, (min(rows, MOST_BLOCKS), 1, 1), THREADS)
    steps = matrix[0] if matrix else 0, down, across
    backend.launch(launch, groups.pack(), rows, out.pointer, columns, *steps)


def integers_of(value: Any, name: str, x: Operand, known: int) -> Any:
    """NumPy int64, or as they are on the GPU where x is; after all checks that need no waiting."""
    length = {"experts": x.shape[0], "offsets": known + 1, "counts": known}[name]
    if interop.is_on_gpu(value):
        x.place.check(place_of(value, name), name, x.name)
        _check(interop.dtype_of(value), tuple(value.shape), name, length)
        return value
    found = interop.to_numpy(value, name) if interop.kind(value) else np.asarray(value)
    if not found.size:
        found = found.astype(INT64)
    _check(found.dtype, found.shape, name, length)
    # Of what was given: an int64 does not hold all of a uint64.
    low, high = (int(found.min()), int(found.max())) if found.size else (0, -1)
    if name == "experts" and not (low >= 0 and high < known):
        which = f"in 0..{known - 1}" if known else "none, as w has none"
        raise ValueError(f"experts must be {which}, got {low}..{high}")
    if name == "counts" and not (low >= 0 and high <= x.shape[1]):
        raise ValueError(f"counts must be in 0..{x.shape[1]}, got {low}..{high}")
    made = found.astype(INT64)
    if name == "offsets":
        rows = x.shape[0]
        if (np.diff(made) < 0).any() or low < 0 or high > rows:
            raise ValueError(f"offsets must ascend within 0..{rows}, got {found.tolist()[:8]}")
    return made


def _check(dtype: np.dtype, shape: tuple[int, ...], name: str, length: int) -> None:
    if dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {dtype}")
    if shape != (length,):
        what = f"x has {length} rows" if name == "experts" else f"it must be ({length},)"
        raise ValueError(f"{name} has shape {shape}; {what}")
