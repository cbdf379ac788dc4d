"""The benchmark of `quantize` and `dequantize`: cases, bytes, times, and whether they are right."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cuquant.array.quant_array import QuantArray
from cuquant.bench.gpu import Gpu
from cuquant.bench.peers import Peer, time_peer
from cuquant.bench.quantize_report import Measurement
from cuquant.bench.timing import MIN_REPEATS, copies, measure
from cuquant.errors import clipped, did_you_mean
from cuquant.formats import Format, get_format, list_formats
from cuquant.interop import INPUT_DTYPES, float_dtype
from cuquant.ops.dequantize.door import dequantize
from cuquant.ops.quantize.door import quantize

FORMULA = (
    "TB/s = bytes / time; bytes = values + all components, each read or written once; the values "
    "twice where quantize takes a statistic over the whole tensor (nvfp4's scale is given)"
)
FORMATS = (
    "nf4", "fp4", "bof4s", "k2", "k3", "k4", "k5", "int8", "int4", "uint4", "fp8_e4m3", "mxfp4",
    "nvfp4", "q4_0", "q8_0", "dynamic8", "linear8", "q4_k", "q6_k", "nf4+dq",
)  # fmt: skip
DTYPES = ("float16", "bfloat16", "float32")
SHAPES = ((4096, 14336), (16384, 16384))
SIZE_COLUMNS = 4096  # of a matrix whose size is given in bytes
CHECKED_ROWS = 32  # of the first, middle and last rows, compared with the reference

_BLOCK_BEHIND_PLUS = re.compile(r"\+(row|tensor|\d+(?:x\d+)?)$")


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes
    ----------
    formats
        By the name that was asked for.
    dtypes
        Of the values.
    shapes
        Matrices, [rows, K]; or one number, the bytes of the values.
    repeats
        Rounds of each timing.
    """

    formats: dict[str, Format]
    dtypes: tuple[str, ...] = DTYPES
    shapes: tuple[tuple[int, int], ...] | int = SHAPES
    repeats: int = 2 * MIN_REPEATS

    def shapes_of(self, dtype: str) -> tuple[tuple[int, int], ...]:
        """The shapes for a dtype, which bytes are turned into."""
        if not isinstance(self.shapes, int):
            return self.shapes
        row = SIZE_COLUMNS * float_dtype(dtype).itemsize
        return ((max(1, round(self.shapes / row)), SIZE_COLUMNS),)


def parse_formats(names: Iterable[str]) -> dict[str, Format]:
    """Formats by the strings they were asked for, "nf4", "nf4:32+dq", "int8:tensor"; or "all".

    >>> [str(fmt) for fmt in parse_formats(["int4:64", "fp8_e4m3:128x128"]).values()]
    ['int4:64', 'fp8_e4m3:128x128']
    """
    found = {}
    for text in names:
        if text == "all":
            found |= {name: get_format(name) for name in list_formats()}
        else:  # a block stood behind "+" in the commands of earlier results
            found[text] = get_format(_BLOCK_BEHIND_PLUS.sub(r":\1", text))
    return found


def check_dtypes(names: Sequence[str]) -> tuple[str, ...]:
    """Dtypes by name; ValueError for one that cuquant does not compute with."""
    for name in names:
        if name not in INPUT_DTYPES:
            near = did_you_mean(name, INPUT_DTYPES)
            raise ValueError(
                f"dtype {clipped(name)} is unknown{near}; known are {', '.join(INPUT_DTYPES)}"
            )
    return tuple(dict.fromkeys(names))


# ---- bytes --------------------------------------------------------------------------------------


def quantize_bytes(
    fmt: Format, shape: tuple[int, ...], itemsize: int, global_scale_given: bool = True
) -> int:
    """Bytes that quantizing must move: the values, twice where a statistic spans them, and all
    components.

    >>> from cuquant.formats import get_format
    >>> quantize_bytes(get_format("nf4"), (4096, 4096), 2) / 4096**2
    2.5625
    """
    reads = 2 if reads_twice(fmt, global_scale_given) else 1
    return reads * itemsize * math.prod(shape) + fmt.nbytes(shape)


def dequantize_bytes(fmt: Format, shape: tuple[int, ...], itemsize: int) -> int:
    """Bytes that dequantizing must move: all components and the values."""
    return fmt.nbytes(shape) + itemsize * math.prod(shape)


def reads_twice(fmt: Format, global_scale_given: bool = True) -> bool:
    """Whether the scale of the first element depends on the last one."""
    if fmt.scale is None:
        return False
    return fmt.scale.block == "tensor" or (fmt.scale.nested == "global" and not global_scale_given)


# ---- running ------------------------------------------------------------------------------------


def run(
    gpu: Gpu,
    settings: Settings,
    peers: Sequence[Peer] = (),
    begin: Callable[[str], None] = lambda text: None,
) -> Iterator[Measurement]:
    """Measure everything, quantize before dequantize.

    Parameters
    ----------
    gpu
        Where.
    settings
        What.
    peers
        The first one that has an operation is timed beside ours.
    begin
        Called with a text before each format.
    """
    for dtype in settings.dtypes:
        for shape in settings.shapes_of(dtype):
            yield from _run_matrix(gpu, settings, shape, dtype, peers, begin)
            gpu.release()


def _run_matrix(
    gpu: Gpu,
    settings: Settings,
    shape: tuple[int, int],
    dtype: str,
    peers: Sequence[Peer],
    begin: Callable[[str], None],
) -> Iterator[Measurement]:
    host = random_values(shape, dtype)
    first = gpu.upload(host)
    count = copies(gpu.machine.l2_bytes, host.nbytes)
    xs = [first, *(gpu.copy(first) for _ in range(count - 1))]
    for name, fmt in settings.formats.items():
        begin(f"{name} {dtype} {shape[0]}x{shape[1]}")
        bench = Bench(gpu, name, fmt, host, xs, settings.repeats, peers)
        yield bench.quantize()
        yield bench.dequantize()


def random_values(shape: tuple[int, int], dtype: str, seed: int = 0) -> np.ndarray:
    """N(0, 1); from 2^24 elements on, rows repeat."""
    rows, columns = shape
    distinct = min(rows, max(1, 2**24 // columns))
    values = np.random.default_rng(seed).standard_normal((distinct, columns), dtype=np.float32)
    return np.resize(values.astype(float_dtype(dtype)), shape)


class Bench:
    """One format on one matrix.

    Parameters
    ----------
    gpu, name, fmt, repeats, peers
        See `run`.
    host
        The values.
    xs
        The same values on the device, several times.
    """

    def __init__(
        self,
        gpu: Gpu,
        name: str,
        fmt: Format,
        host: np.ndarray,
        xs: Sequence[Any],
        repeats: int,
        peers: Sequence[Peer],
    ) -> None:
        self.gpu, self.name, self.fmt, self.host, self.xs = gpu, name, fmt, host, xs
        self.repeats, self.peers = repeats, peers
        self.given: dict[str, Any] = {}
        if fmt.scale is not None and fmt.scale.nested == "global":
            largest = np.abs(host).max().astype(np.float32)
            self.given["global_scale"] = float(largest / np.float32(6 * 448))
        self.qs = [quantize(x, fmt, **self.given) for x in xs]

    def quantize(self) -> Measurement:
        for q in self.qs:
            for part in q.components.values():
                self.gpu.poison(part)
        calls = [
            lambda x=x, q=q: quantize(x, self.fmt, out=q, **self.given)
            for x, q in zip(self.xs, self.qs, strict=True)
        ]
        timing = measure(self.gpu.engine, calls, self.repeats)
        nbytes = quantize_bytes(self.fmt, self.host.shape, self.host.itemsize)
        exact = all(self._codes_are_right(q) for q in (self.qs[0], self.qs[-1]))
        return self._measurement("quantize", nbytes, timing, exact)

    def dequantize(self) -> Measurement:
        nbytes = dequantize_bytes(self.fmt, self.host.shape, self.host.itemsize)
        count = min(len(self.qs), copies(self.gpu.machine.l2_bytes, nbytes))
        outs = [self.gpu.copy(self.xs[0]) for _ in range(count)]
        for out in outs:
            self.gpu.poison(out)
        qs = self.qs[:count]
        calls = [
            lambda q=q, out=out: dequantize(q, out=out) for q, out in zip(qs, outs, strict=True)
        ]
        timing = measure(self.gpu.engine, calls, self.repeats)
        pairs = ((qs[0], outs[0]), (qs[-1], outs[-1]))
        exact = all(self._values_are_right(q, out) for q, out in pairs)
        return self._measurement("dequantize", nbytes, timing, exact)

    def _measurement(self, operation: str, nbytes: int, timing: Any, exact: bool) -> Measurement:
        found = (time_peer(p, operation, self.fmt, self.xs, self.repeats) for p in self.peers)
        peer = next((timed for timed in found if timed is not None), None)
        return Measurement(
            self.name, str(self.host.dtype), self.host.shape, nbytes, timing, operation, exact, peer
        )

    # ---- checking -----------------------------------------------------------------------------

    def _codes_are_right(self, q: QuantArray) -> bool:
        """Against the NumPy reference: all rows where scales depend on all."""
        found = on_host(self.gpu, q)
        return all(
            same_bytes(
                quantize(self.host[rows], self.fmt, **self.given).arrays(),
                (found if whole else found[rows]).arrays(),
            )
            for rows, whole in self._checked_rows()
        )

    def _values_are_right(self, q: QuantArray, out: Any) -> bool:
        host = on_host(self.gpu, q)
        return all(
            same_bytes(
                {"": host[rows].dequantize(dtype=self.host.dtype)},
                {"": self.gpu.download(out[rows])},
            )
            for rows, _ in self._checked_rows()
        )

    def _checked_rows(self) -> list[tuple[slice, bool]]:
        """Slices of rows, and whether they are all rows."""
        count, rule = len(self.host), self.fmt.scale
        if rule is not None and (rule.block == "tensor" or rule.nested == "double"):
            return [(slice(0, count), True)]
        tile = rule.block[0] if rule is not None and isinstance(rule.block, tuple) else 1
        step = -(-CHECKED_ROWS // tile) * tile  # tiles are not cut
        if step >= count:
            return [(slice(0, count), True)]
        last, middle = ((start // tile) * tile for start in (count - step, count // 2))
        return [(slice(0, step), False), (slice(middle, middle + step), False),
                (slice(last, count), False)]  # fmt: skip


def on_host(gpu: Gpu, q: QuantArray) -> QuantArray:
    """The same QuantArray of NumPy arrays."""
    return replace(q, components={n: gpu.download(part) for n, part in q.arrays().items()})


def same_bytes(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    """Whether two sets of arrays are equal, NaN and the sign of zero included."""
    return a.keys() == b.keys() and all(
        (x.dtype, x.shape) == (b[name].dtype, b[name].shape) and x.tobytes() == b[name].tobytes()
        for name, x in a.items()
    )
