"""What the matrices of a file cost as they lie: bytes, time of a product, and its error."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np

from cuquant.array.metrics import sqnr_db
from cuquant.array.packed_weight import PackedWeight, unpack
from cuquant.formats import Format
from cuquant.gpu.device import synchronize, use
from cuquant.interop import load_cupy
from cuquant.io.entries import Entry
from cuquant.io.files import open
from cuquant.ops.matmul.door import linear

SECONDS = 0.2  # that each product is repeated for
LEAST = 3  # times


@dataclass(frozen=True)
class Row:
    """The matrices of one format and shape.

    Attributes
    ----------
    format
        Of the matrices.
    shape
        (N, K).
    count
        Of such matrices in the file.
    bits_per_weight
        Scales and all.
    nbytes
        Of all of them in the file.
    sqnr_db
        Of `linear(x, w)` with the first of them against its float32 product of decoded weights.
    seconds, decoded_seconds
        Of `linear(x, w)`, and of a product with the decoded weights in x's dtype.
    """

    format: Format
    shape: tuple[int, int]
    count: int
    bits_per_weight: float
    nbytes: int
    sqnr_db: float
    seconds: float
    decoded_seconds: float


def products(
    path: str | PathLike[str],
    *,
    rows: int = 1,
    device: str = "cpu",
    begin: Callable[[str], None] = lambda name: None,
) -> Iterator[Row]:
    """Multiply with one matrix of each format and shape of a file, as it lies.

    Parameters
    ----------
    path
        What `cuquant.open` reads.
    rows
        Of x, random numbers of the dtype "float32" on the CPU and "float16" on a GPU.
    device
        "cpu" or "cuda:N".
    begin
        Called with the name of what is measured next.

    Raises
    ------
    FormatError
        For a damaged file.
    ValueError
        For a file without quantized matrices.
    """
    with open(path) as file:
        groups: dict[tuple[str, tuple[int, ...]], list[Entry]] = {}
        for entry in file.values():
            if isinstance(entry.format, Format) and len(entry.shape) == 2 and not entry.axes:
                groups.setdefault((str(entry.format), entry.shape), []).append(entry)
        if not groups:
            raise ValueError(
                f"{path} has no quantized matrices; cuquant quantize makes them, and the demo "
                "without --from shows what formats cost"
            )
        for entries in sorted(groups.values(), key=lambda es: -sum(e.nbytes for e in es)):
            n, k = entries[0].shape
            begin(f"{entries[0].format} {n} x {k}")
            yield _measured(entries, rows, device)


def _measured(entries: list[Entry], rows: int, device: str) -> Row:
    fmt, (n, k) = entries[0].format, entries[0].shape
    assert isinstance(fmt, Format)  # `products` has looked
    stored = entries[0].read()
    weight = unpack(stored) if isinstance(stored, PackedWeight) else stored
    x = np.random.default_rng(0).standard_normal((rows, k)).astype(np.float32)
    with use(device):
        xp = np if device == "cpu" else load_cupy()
        x = xp.asarray(x if device == "cpu" else x.astype(np.float16))
        weight = weight.to(device)
        exact = weight.dequantize(np.float32)
        wanted = x.astype(np.float32) @ exact.T
        gap = linear(x, weight).astype(np.float32) - wanted
        decoded = exact.astype(x.dtype).T
        nbytes = sum(entry.nbytes for entry in entries)
        return Row(
            fmt,
            (n, k),
            len(entries),
            nbytes * 8 / (len(entries) * n * k),
            nbytes,
            sqnr_db(float(xp.vdot(wanted, wanted)), float(xp.vdot(gap, gap))),
            seconds(lambda: linear(x, weight), device),
            seconds(lambda: x @ decoded, device),
        )


def seconds(call: Callable[[], Any], device: str) -> float:
    """Of one call, among some in a row."""
    call()
    synchronize(device)
    started, count = time.perf_counter(), 0
    while count < LEAST or time.perf_counter() - started < SECONDS:
        call()
        count += 1
    synchronize(device)
    return (time.perf_counter() - started) / count
