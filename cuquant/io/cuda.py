"""The pipeline's slots on a GPU: pinned memory, device memory and a stream of their own."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np

from cuquant.array.metrics import sqnr_db
from cuquant.array.quant_array import QuantArray
from cuquant.formats import Format
from cuquant.formats.format import Component
from cuquant.formats.names import Nonfinite
from cuquant.gpu.device import use
from cuquant.interop import load_cupy
from cuquant.io.pipeline import Job, Made
from cuquant.ops.quantize.door import quantize

ALIGNMENT = 256  # bytes: where components start in the staging memory
SUMS = Component("", np.dtype(np.float64), (2,))  # signal and noise


def staging_bytes(fmt: Format, shape: tuple[int, ...], nbytes: int) -> int:
    """What a tensor needs of the staging memory: its bytes, later its components and two sums."""
    *_, (last, start) = _placed(fmt, shape)
    return max(nbytes, start + _nbytes(last))


def _placed(fmt: Format, shape: tuple[int, ...]) -> Iterator[tuple[Component, int]]:
    """Components and where they start, the sums last."""
    start = 0
    for part in (*fmt.components(shape), SUMS):
        yield part, start
        start += -(-_nbytes(part) // ALIGNMENT) * ALIGNMENT


def _nbytes(part: Component) -> int:
    return part.dtype.itemsize * int(np.prod(part.shape, dtype=np.int64))


class CudaSlot:
    """Memory for one tensor at a time on the host and on a GPU; see `pipeline.Slot`.

    Everything runs on the slot's own stream, so that copies of one slot overlap with the kernels
    of another. The components come back into the memory that the tensor came from: the stream
    has read it by then.

    Parameters
    ----------
    device
        "cuda:N".
    nonfinite
        As `quantize` takes it.
    capacity
        Bytes of the staging memory: the largest `staging_bytes`.
    largest
        Bytes of the largest tensor.
    """

    def __init__(self, device: str, nonfinite: Nonfinite, capacity: int, largest: int) -> None:
        self._cupy = load_cupy()
        self._device = device
        self._nonfinite: Nonfinite = nonfinite
        self._started: tuple[Job, tuple[Any, ...]] | None = None
        with use(device):
            self._stream = self._cupy.cuda.Stream(non_blocking=True)
            # Not from CuPy's pool, which would keep it for the life of the process.
            pinned = self._cupy.cuda.PinnedMemory(capacity)
            memory = self._cupy.cuda.PinnedMemoryPointer(pinned, 0)
            self.staging = np.ndarray((capacity,), np.uint8, memory)
            with self._stream:
                self._buffer = self._cupy.empty(max(largest, 1), np.uint8)

    def start(self, job: Job) -> None:
        runtime = self._cupy.cuda.runtime
        host, stream = self.staging.ctypes.data, self._stream.ptr
        with use(self._device), self._stream:
            runtime.memcpyAsync(
                self._buffer.data.ptr, host, job.nbytes, runtime.memcpyHostToDevice, stream
            )
            x = self._cupy.ndarray(job.shape, job.dtype, self._buffer.data)
            q = quantize(x, job.format, nonfinite=self._nonfinite)
            sums = _sums(self._cupy, x, q, finite_only=self._nonfinite == "clamp")
            made = {**q.arrays(), SUMS.name: sums}
            for part, start in _placed(job.format, job.shape):
                source = made[part.name].data.ptr
                runtime.memcpyAsync(
                    host + start, source, _nbytes(part), runtime.memcpyDeviceToHost, stream
                )
        self._started = job, tuple(made.values())  # alive until the copies are done

    def finish(self) -> Made:
        assert self._started is not None  # the pipeline finishes what it has started
        job, _ = self._started
        self._stream.synchronize()
        self._started = None
        parts = {
            part.name: self.staging[start : start + _nbytes(part)]
            .view(part.dtype)
            .reshape(part.shape)
            for part, start in _placed(job.format, job.shape)
        }
        signal, noise = parts.pop(SUMS.name).tolist()
        return Made(parts, sqnr_db(signal, noise))

    def close(self) -> None:
        with suppress(self._cupy.cuda.runtime.CUDARuntimeError):
            self._stream.synchronize()
        self._started = None


def make_slots(
    device: str, nonfinite: Nonfinite, jobs: Sequence[Job], count: int
) -> list[CudaSlot]:
    """`count` slots (fewer for fewer jobs) that any of the jobs fits in."""
    capacity = max(staging_bytes(job.format, job.shape, job.nbytes) for job in jobs)
    largest = max(job.nbytes for job in jobs)
    return [CudaSlot(device, nonfinite, capacity, largest) for _ in range(min(count, len(jobs)))]


def _sums(cupy: Any, x: Any, q: QuantArray, *, finite_only: bool) -> Any:
    """[sum x^2, sum (x - x')^2] as float64 on the device, over the finite x where asked for."""
    rows = (int(np.prod(x.shape[:-1])), x.shape[-1])
    x, decoded = x.reshape(rows), q.dequantize(dtype=np.float32).reshape(rows)
    signal, noise = _kernels(finite_only)
    return cupy.stack([signal(x, axis=1).sum(), noise(x, decoded, axis=1).sum()])


@cache
def _kernels(finite_only: bool) -> tuple[Any, Any]:
    """Sums over rows: of x^2, and of (x - y)^2."""
    reduction = load_cupy().ReductionKernel
    value = "static_cast<float>(x)"

    def squares(inputs: str, gap: str, name: str) -> Any:
        term = f"({gap}) * ({gap})"
        if finite_only:
            term = f"isfinite({value}) ? {term} : 0.0"
            name += "_finite"
        return reduction(inputs, "float64 z", term, "a + b", "z = a", "0", name)

    exact = f"static_cast<double>({value})"
    return (
        squares("T x", exact, "cuquant_signal"),
        squares("T x, float32 y", f"{exact} - y", "cuquant_noise"),
    )
