"""What is multiplied, as kernels are told it: operands, products and experts' rows."""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cuquant import interop
from cuquant.formats import Format
from cuquant.gpu.backend import Backend
from cuquant.gpu.rates import H100, Rates
from cuquant.ops import cpp, geometry
from cuquant.ops.cpp import scale_arrays
from cuquant.ops.dequantize.decoder import limit
from cuquant.ops.geometry import CHUNK
from cuquant.ops.layout.packed_weight import fits
from cuquant.ops.matmul.epilogue import TYPES
from cuquant.reference.tiles import Tiles

F32 = np.dtype(np.float32)
VECTORS = (
    "packed",
    "blocks",
    "scale",
    "zero_point",
    "minimum",
)  # components that lanes load several of
MOST_STRIDE = 2**31  # what a GEMM's strides are below, in elements
LARGE_X = 96 << 10  # bytes of x from which on two blocks of a cluster share it


def shared_evenly(strips: int, most: int, clusters: int = 0) -> tuple[int, int, int]:
    """Clusters: so many, or for 0 as few as strips need where each has `most`; strips of one at
    most, and the number of the first one that has one less: what matmul/sums.cuh's Taken is
    told."""
    clusters = clusters or -(-strips // most)
    most = -(-strips // clusters)
    return clusters, most, strips - clusters * (most - 1)


# Multiplies, called with the backend, x's address and the bytes of an Epilogue.
Run = Callable[[Backend, int, bytes], None]
# What multiplies so many rows of x, of weights that were looked at once.
Prepared = Callable[[int], Run]


@dataclass(frozen=True)
class Problem:
    """All that the choice of a kernel looks at.

    Attributes
    ----------
    rows, columns, depth
        M, N and K; M is that of one matrix of a batch. With experts M is the mean per expert.
    format, layout
        Of the weights; None and "dense" where they are plain floats. Where a gated unit's two
        differ, "rows/1".
    dtype
        Name of x's.
    aligned
        Whether x has contiguous rows that start on 16 bytes and do not overlap.
    contiguous
        Whether its rows are contiguous.
    direct
        Whether packed rows of the weights follow each other, and VECTORS of them start on 16 bytes.
    arch, multiprocessors, rates
        Of the GPU: its compute capability, 90 for 9.0, and so on.
    vendor
        Whether a GEMM takes x as it is, and the weights are decoded to what it takes: rows of x do
        not overlap, and the weights are quantized [N, K]. That it is installed is not looked at.
    """

    rows: int
    columns: int
    depth: int
    format: Format | None
    layout: str
    dtype: str
    aligned: bool
    arch: int
    multiprocessors: int
    contiguous: bool = True
    direct: bool = False
    batches: int = 1
    experts: int = 0
    gated: bool = False
    swapped: bool = False
    vendor: bool = False
    rates: Rates = H100

    @property
    def weights(self) -> int:
        """How many numbers the weights have, of both where there are two."""
        return self.columns * self.depth * (1 + self.gated)

    @property
    def is_single(self) -> bool:
        """Whether it is one product of x's rows with one weight, or with a gated unit's two."""
        return (
            self.contiguous
            and self.batches == 1
            and not self.swapped
            and not self.experts
            and self.depth > 0
        )

    @property
    def takes_halves(self) -> bool:
        """Whether x is of 16 bits and what codes stand for has a place there: for tensor cores."""
        small = self.dtype in ("float16", "bfloat16")
        return small and self.format is not None and fits(self.format)


@dataclass(frozen=True)
class Dense:
    """Floats with any strides, in elements; the address of x itself comes with each call.

    `owner` is the array, which must live until the kernel is launched.
    """

    pointer: int
    dtype: np.dtype
    row_stride: int
    column_stride: int
    owner: Any = None

    layout = "dense"
    fmt = None

    @property
    def facts(self) -> str:
        return ""

    @property
    def type(self) -> str:
        return "Dense"

    @property
    def type_name(self) -> str:
        """Of an element."""
        return interop.name_of(self.dtype)

    def is_aligned(self, steps: tuple[int, ...] = ()) -> bool:
        """Whether each 8 elements of a row are a vector of 16 bytes, or two."""
        strides = (self.row_stride, *steps)
        aligned = self.pointer % 16 == 0
        aligned &= all(step * self.dtype.itemsize % 16 == 0 for step in strides)
        return self.column_stride == 1 and aligned

    def pack(self, backend: Backend, steps: tuple[int, ...] = ()) -> bytes:
        """The Dense struct; matrices of a batch are `steps` apart."""
        return struct.pack(
            "<Q2q2i",
            self.pointer,
            self.row_stride,
            self.column_stride,
            TYPES[self.type_name],
            self.is_aligned(steps),
        )


@dataclass(frozen=True)
class Weight:
    """Rows of a quantized array, which run along the contraction.

    Attributes
    ----------
    fmt, parts, stored
        Of the array: its format, its contiguous components and [rows..., K], as they lie.
    row_step
        How many rows of the array lie from one row of the matrix to the next.
    layout
        "rows/1", or another one of a PackedWeight.
    """

    fmt: Format
    parts: Mapping[str, Any]
    stored: tuple[int, ...]
    row_step: int = 1
    layout: str = "rows/1"

    @property
    def facts(self) -> str:
        """The C++ of the format's facts."""
        return _facts(self.fmt).text

    @property
    def type(self) -> str:
        """The operand of matmul/operands.cuh that reads these rows."""
        name = _facts(self.fmt).type
        if self.fmt.is_blocks:
            return f"Blocks<{name}>"
        return f"Rows<{name}, {cpp.WORDS[self.fmt.row_packing.dtype.itemsize]}>"

    @property
    def is_whole(self) -> bool:
        """Whether the matrix is the array, [N, K]."""
        return len(self.stored) == 2 and self.row_step == 1

    def is_direct(self, backend: Backend) -> bool:
        """Whether packed rows [N, K] or blocks follow each other, and VECTORS start on 16 bytes."""
        known = not {"packed", "blocks"}.isdisjoint(self.parts)
        if not known or not self.is_whole:
            return False
        read = (self.parts[name] for name in VECTORS if name in self.parts)
        return all(backend.pointer(part) % 16 == 0 for part in read)

    def pack(self, backend: Backend, steps: tuple[int, ...] = ()) -> bytes:
        """The operand's struct."""
        lookup = cpp.lookup(self.fmt.codec, backend)
        rows = _stored_rows(self.fmt, self.stored)
        if self.fmt.is_blocks:
            blocks = backend.pointer(self.parts["blocks"])
            return struct.pack("<Q56s2q", blocks, lookup, self.row_step, rows.nbytes)
        packed = backend.pointer(self.parts["packed"])
        return struct.pack(
            "<Q56s56s48s2q3if",
            packed,
            scale_arrays(backend, self.fmt, dict(self.parts)),
            lookup,
            rows.tiles,
            self.row_step,
            rows.words,
            rows.shift,
            rows.alignment > 0 and packed % rows.alignment == 0,
            rows.mixed,
            rows.limit,
        )


@lru_cache(maxsize=256)
def _facts(fmt: Format) -> cpp.Facts:
    return cpp.facts(fmt, decoding=not fmt.is_blocks)


class _StoredRows(NamedTuple):
    """What matmul/operands.cuh is told about the rows of an array, wherever it lies."""

    nbytes: int
    words: int
    tiles: bytes = b""
    shift: int = -1  # a block is 2^shift columns wide; below 0: it is not
    alignment: int = 0  # at which each 8 codes are a word that a thread can load; 0: they are not
    mixed: bool = False  # whether 8 codes may lie in several blocks
    limit: float = math.inf


@lru_cache(maxsize=1024)
def _stored_rows(fmt: Format, stored: tuple[int, ...]) -> _StoredRows:
    columns = stored[-1]
    if fmt.is_blocks:
        layout = fmt.layout
        return _StoredRows(columns // layout.elements * layout.nbytes, 0)
    packing, tiles = fmt.row_packing, Tiles.of(fmt, stored)
    row_words = packing.words(columns)
    nbytes = row_words * packing.dtype.itemsize
    if packing.bits in (1, 2, 4, 8, 16):
        whole = packing.order in ("low", "high", "dense") and nbytes % packing.bits == 0
        alignment = packing.bits if whole else 0
    else:  # in a stream of words each row begins with one of its own
        alignment = 4 if packing.order == "dense" else 0
    return _StoredRows(
        nbytes,
        row_words,
        geometry.tiles_struct(tiles),
        tiles.wide.bit_length() - 1 if tiles.wide & (tiles.wide - 1) == 0 else -1,
        alignment,
        fmt.scale is not None and tiles.wide % CHUNK != 0 and tiles.grid[2] > 1,
        math.inf if fmt.scale is None else limit(fmt, F32),
    )


Operand = Dense | Weight


def _bare(operand: Operand) -> Operand:
    dense = isinstance(operand, Dense)
    return replace(operand, owner=None) if dense else replace(operand, parts={})


@dataclass(frozen=True)
class Routing:
    """Rows of x sorted by expert, as matmul/route.cu does it.

    Attributes
    ----------
    order, offsets, segments, count
        Addresses of int64 [T], int64 [E + 1], Segment structs, and int64 [1].
    most, height
        At least as many as there are segments, and how many rows one has at most.
    step
        From the rows of an expert's weights to those of the next.
    end
        Where these arrays end; see gather_bytes in route.py.
    """

    order: int
    offsets: int
    segments: int
    count: int
    most: int
    step: int
    height: int
    end: int


@dataclass(frozen=True)
class Product:
    """x @ w.T, once or for a batch, of [rows, depth] and [columns, depth].

    Attributes
    ----------
    weights
        One, or the gate and the other of a gated unit: silu(x @ w[0].T) * (x @ w[1].T).
    batch
        For each of its axes (size, and the steps of x, of the weights and of the result): in
        elements, or in rows where the weights are a Weight.
    swapped
        Whether rows of x are columns of the result.
    """

    rows: int
    columns: int
    depth: int
    x: Dense
    weights: tuple[Operand, ...]
    batch: tuple[tuple[int, int, int, int], ...] = ()
    swapped: bool = False
    routing: Routing | None = None

    @property
    def batches(self) -> int:
        return math.prod(size for size, *_ in self.batch)

    @property
    def bare(self) -> "Product":
        """The same without the arrays, which may go then."""
        x, weights = replace(self.x, owner=None), tuple(map(_bare, self.weights))
        return replace(self, x=x, weights=weights)

    def problem(self, backend: Backend) -> "Problem":
        """What `choose` is asked."""
        first = self.weights[0]
        alike = all((w.fmt, w.layout) == (first.fmt, first.layout) for w in self.weights)
        return Problem(
            rows=self.rows,
            columns=self.columns,
            depth=self.depth,
            format=first.fmt,
            layout=first.layout if alike else Weight.layout,
            dtype=self.x.type_name,
            aligned=self.x.is_aligned(tuple(step for _, step, _, _ in self.batch))
            and (self.rows == 1 or self.x.row_stride >= self.depth),
            contiguous=self.x.column_stride == 1,
            direct=alike
            and all(isinstance(w, Weight) and w.is_direct(backend) for w in self.weights),
            arch=backend.arch,
            multiprocessors=backend.multiprocessors,
            rates=backend.rates,
            batches=self.batches,
            gated=len(self.weights) > 1,
            swapped=self.swapped,
            vendor=self.x.column_stride == 1
            and (self.rows == 1 or self.depth <= self.x.row_stride < MOST_STRIDE)
            and all(isinstance(w, Weight) and w.is_whole for w in self.weights),
        )
