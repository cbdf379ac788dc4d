"""The benchmark of the fused row quantizers: cases, bytes, times, and whether they are right."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuquant import functional
from cuquant.array.quant_array import QuantArray
from cuquant.bench.gpu import Gpu
from cuquant.bench.quantize import CHECKED_ROWS, on_host, random_values, same_bytes
from cuquant.bench.quantize_report import Measurement, Results
from cuquant.bench.timing import MIN_REPEATS, copies, measure
from cuquant.errors import clipped, did_you_mean
from cuquant.formats import Format

FORMULA = (
    "TB/s = bytes / time; bytes = the rows that are read, the sum that is written, vectors and all "
    "components, each once; nvfp4's global scale is given"
)
FORMATS = ("int8:row", "fp8_e4m3:row", "fp8_e4m3:128", "mxfp8", "mxfp4", "nvfp4")
DTYPES = ("bfloat16",)
SHAPES = ((16384, 4096), (4096, 14336), (16384, 5120))
GROUP = 128  # of a Walsh-Hadamard transform
GLOBAL_SCALE = 0.002  # nvfp4's: of values up to 5.4
EPS = 1e-6

Vectors = tuple[Any, Any, Any]


@dataclass(frozen=True)
class Operation:
    """A fused quantizer.

    Attributes
    ----------
    call
        From x, another array like it, where x + residual goes, the vectors (weight, bias, signs)
        and the options of `quantize`.
    reads, writes
        Arrays like x that are read, and written beside the components.
    vectors
        That are read.
    """

    call: Callable[..., QuantArray]
    reads: int = 1
    writes: int = 0
    vectors: int = 0


OPERATIONS = {
    "rmsnorm": Operation(
        lambda x, y, s, v, **how: functional.rmsnorm_quantize(x, v[0], eps=EPS, **how), vectors=1
    ),
    "add_rmsnorm": Operation(
        lambda x, y, s, v, **how: functional.add_rmsnorm_quantize(
            x, y, v[0], eps=EPS, residual_out=s, **how
        ),
        reads=2,
        writes=1,
        vectors=1,
    ),
    "layernorm": Operation(
        lambda x, y, s, v, **how: functional.layernorm_quantize(x, v[0], v[1], eps=EPS, **how),
        vectors=2,
    ),
    "silu_mul": Operation(
        lambda x, y, s, v, **how: functional.silu_mul_quantize(x, y, **how), reads=2
    ),
    "gelu_mul": Operation(
        lambda x, y, s, v, **how: functional.gelu_mul_quantize(x, y, **how), reads=2
    ),
    "hadamard": Operation(
        lambda x, y, s, v, **how: functional.hadamard_quantize(x, group=GROUP, signs=v[2], **how),
        vectors=1,
    ),
}


@dataclass(frozen=True)
class RowResults(Results):
    """All of one run; a measurement's operation is one of OPERATIONS."""

    SCHEMA = "cuquant.bench.rows/1"


@dataclass(frozen=True)
class Settings:
    """What to measure: formats by the name that was asked for, operations, dtypes, matrices."""

    formats: dict[str, Format]
    operations: tuple[str, ...] = tuple(OPERATIONS)
    dtypes: tuple[str, ...] = DTYPES
    shapes: tuple[tuple[int, int], ...] = SHAPES
    repeats: int = 2 * MIN_REPEATS


def check_operations(names: Iterable[str]) -> tuple[str, ...]:
    """Operations by name; ValueError for an unknown one."""
    for name in names:
        if name not in OPERATIONS:
            near = did_you_mean(name, tuple(OPERATIONS))
            known = ", ".join(OPERATIONS)
            raise ValueError(f"operation {clipped(name)} is unknown{near}; known are {known}")
    return tuple(dict.fromkeys(names))


def moved_bytes(operation: str, fmt: Format, shape: tuple[int, int], itemsize: int) -> int:
    """Bytes that an operation must move.

    >>> from cuquant.formats import get_format
    >>> moved_bytes("silu_mul", get_format("int8", block_size="row"), (4096, 4096), 2) / 4096**2
    5.0009765625
    """
    which = OPERATIONS[operation]
    arrays = (which.reads + which.writes) * math.prod(shape) + which.vectors * shape[1]
    return arrays * itemsize + fmt.nbytes(shape)


def run(
    gpu: Gpu, settings: Settings, begin: Callable[[str], None] = lambda text: None
) -> Iterator[Measurement]:
    """Measure everything; `begin` is called with a text before each measurement."""
    for dtype in settings.dtypes:
        for shape in settings.shapes:
            bench = Bench(gpu, random_values(shape, dtype), settings.repeats)
            for operation in settings.operations:
                for name, fmt in settings.formats.items():
                    begin(f"{operation} {name} {dtype} {shape[0]}x{shape[1]}")
                    yield bench.measure(operation, name, fmt)
            del bench
            gpu.release()


class Bench:
    """One matrix, as x; the other operand is the same, its rows the other way round."""

    def __init__(self, gpu: Gpu, host: np.ndarray, repeats: int) -> None:
        self.gpu, self.host, self.repeats = gpu, host, repeats
        count = copies(gpu.machine.l2_bytes, host.nbytes)
        self.other = host[::-1].copy()
        self.xs, self.ys = (self._copies(x, count) for x in (host, self.other))
        self.sum = gpu.copy(self.xs[0])
        weight, bias, signs = random_values((3, host.shape[1]), "float32")
        signs = np.where(signs > 0, np.float32(1), np.float32(-1))
        self.vectors = tuple(v.astype(host.dtype) for v in (weight, bias, signs))
        self.on_gpu = tuple(gpu.upload(v) for v in self.vectors)

    def _copies(self, x: np.ndarray, count: int) -> list[Any]:
        first = self.gpu.upload(x)
        return [first, *(self.gpu.copy(first) for _ in range(count - 1))]

    def measure(self, operation: str, name: str, fmt: Format) -> Measurement:
        """One operation to one format."""
        how: dict[str, Any] = {"format": fmt}
        if fmt.scale is not None and fmt.scale.nested == "global":
            how["global_scale"] = GLOBAL_SCALE
        call = OPERATIONS[operation].call
        pairs = list(zip(self.xs, self.ys, strict=True))
        qs = [call(x, y, self.sum, self.on_gpu, **how) for x, y in pairs]
        for q in qs:
            for part in q.components.values():
                self.gpu.poison(part)
        self.gpu.poison(self.sum)
        calls = [
            lambda x=x, y=y, q=q: call(x, y, self.sum, self.on_gpu, out=q, **how)
            for (x, y), q in zip(pairs, qs, strict=True)
        ]
        timing = measure(self.gpu.engine, calls, self.repeats)
        exact = all(self._is_right(operation, q, how) for q in (qs[0], qs[-1]))
        nbytes = moved_bytes(operation, fmt, self.host.shape, self.host.itemsize)
        return Measurement(
            name, str(self.host.dtype), self.host.shape, nbytes, timing, operation, exact
        )

    def _is_right(self, operation: str, q: QuantArray, how: dict[str, Any]) -> bool:
        """The first, middle and last rows, against NumPy."""
        found = on_host(self.gpu, q)
        total = self.gpu.download(self.sum) if OPERATIONS[operation].writes else None
        for rows in self._checked_rows():
            x, y = self.host[rows], self.other[rows]
            own = None if total is None else np.empty_like(x)
            wanted = OPERATIONS[operation].call(x, y, own, self.vectors, **how)
            if not same_bytes(wanted.arrays(), found[rows].arrays()):
                return False
            if total is not None and own is not None and total[rows].tobytes() != own.tobytes():
                return False
        return True

    def _checked_rows(self) -> Sequence[slice]:
        count = len(self.host)
        if count <= CHECKED_ROWS:
            return [slice(0, count)]
        starts = (0, (count - CHECKED_ROWS) // 2, count - CHECKED_ROWS)
        return [slice(start, start + CHECKED_ROWS) for start in starts]
