"""Products of codes with codes: operands of any kinds, scales and groups, and what they give."""

import struct
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cuquant.ops.matmul.coded import Coded, Groups, Scaling, bytes_of
from cuquant.ops.matmul.dense import RUN, Tile, dense
from cuquant.ops.matmul.epilogue import ACTIVATIONS, TYPES

F32, F64 = np.float32, np.float64
CODES = {
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
OUT_TYPES = {**TYPES, "int8": 3, "int32": 4}
OUTS = {
    "float32": np.dtype(F32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype(np.int8),
    "int32": np.dtype(np.int32),
}
# The tensor cores keep about 14 bits of the largest one of a step of 32 columns, and of their sum.
FLOAT_ERROR = RUN / 32 * 2.0**-14
ROUNDED = {"float32": 2.0**-23, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(frozen=True)
class Side:
    """Codes [matrices, rows, K] of a kind, whose blocks of tall x wide have a scale.

    Attributes
    ----------
    block
        Rows and columns of a block; 0 for all there are; None: no scales.
    size, code_size
        About how large scales are, and codes that are floats.
    """

    kind: str
    block: tuple[int, int] | None = (1, 0)
    dtype: str = "float32"
    zeros: bool = False
    size: float = 1.0
    code_size: float = 1.0


@dataclass(frozen=True)
class Case:
    """x [rows, K] times weights [groups, N, K].

    Attributes
    ----------
    counts
        Rows of x of each group; None: `shape[0]` rows in one group.
    by
        How the kernel is told: "offsets", "counts" with room for `shape[0]` each, or "batch".
    """

    x: Side
    w: Side
    shape: tuple[int, int, int]
    out: str = "float32"
    bias: bool = False
    activation: str | None = None
    residual: bool = False
    factor: float | None = None
    counts: tuple[int, ...] | None = None
    by: str = "batch"
    padding: int = 0  # columns of the output that are not written
    tile: Tile | None = None


def _codes(rng, kind: str, rows: int, depth: int, size: float) -> np.ndarray:
    """As bytes [rows, stride], with rubbish behind a row's end."""
    stride = -(-bytes_of(kind, depth) // 16) * 16
    codes = rng.integers(0, 256, (rows, stride), dtype=np.uint8)
    if kind == "bits":
        bits = rng.integers(0, 2, (rows, stride * 8), dtype=np.uint8)
        bits[:, depth:] = 0
        return np.packbits(bits, axis=1, bitorder="little")
    if kind.startswith("fp8"):
        small = (rng.standard_normal((rows, stride)) * size).astype(F32)
        return small.astype(CODES[kind]).view(np.uint8)
    return codes


def _numbers(codes: np.ndarray, kind: str, depth: int) -> np.ndarray:
    if kind == "bits":
        return 2 * np.unpackbits(codes, axis=1, bitorder="little")[:, :depth].astype(F64) - 1
    return codes.view(CODES[kind])[:, :depth].astype(F64)


class Operand:
    """A side's arrays on the host, and what they mean."""

    def __init__(self, rng, side: Side, matrices: int, rows: int, depth: int) -> None:
        self.side, self.matrices, self.rows, self.depth = side, matrices, rows, depth
        self.codes = _codes(rng, side.kind, matrices * rows, depth, side.code_size)
        self.plain = _numbers(self.codes, side.kind, depth)
        self.scale = self.zero = None
        self.tall = self.wide = 1
        numbers = self.plain.reshape(matrices, rows, depth)
        if side.block is not None:
            self.tall, self.wide = side.block[0] or max(rows, 1), side.block[1] or depth
            grid = -(-rows // self.tall), -(-depth // self.wide)
            if side.dtype == "e8m0":
                self.scale = rng.integers(120, 132, (matrices, *grid)).astype(np.uint8)
                values = np.exp2(self.scale.astype(F64) - 127)
            else:
                made = rng.uniform(0.5, 1.5, (matrices, *grid)) * side.size
                self.scale = made.astype(OUTS[side.dtype])
                values = self.scale.astype(F64)
            if side.zeros:
                self.zero = rng.integers(0, 256, (matrices, *grid)).astype(np.uint8)
                numbers = numbers - self._spread(self.zero.astype(F64))
            numbers = numbers * self._spread(values)
        self.numbers = numbers
        sums = numbers if side.kind == "bits" else None
        if side.kind == "bits":
            self.sums = ((sums / (1 if self.scale is None else self._spread(values)) + 1) / 2).sum(
                -1
            )
        else:
            self.sums = self.plain.reshape(matrices, rows, depth).sum(-1)
        self.sums = self.sums.astype(np.int32).reshape(-1, 1)

    def _spread(self, scales: np.ndarray) -> np.ndarray:
        down = np.repeat(scales, self.tall, axis=1)[:, : self.rows]
        return np.repeat(down, self.wide, axis=2)[:, :, : self.depth]

    def coded(self, to, *, sums: bool) -> Coded:
        """As the kernel is told it; `to` moves an array to the device and gives its address."""
        scaling = Scaling(tall=max(self.rows, 1), wide=self.depth)
        if self.scale is not None:
            matrix = self.scale.shape[1] * self.scale.shape[2]
            scaling = Scaling(
                to(self.scale),
                0,
                self.tall,
                self.wide,
                self.scale.shape[2],
                matrix,
                self.side.dtype,
            )
        zero = to(self.zero) if self.zero is not None else 0
        return Coded(
            self.side.kind, to(self.codes), self.codes.shape[1], self.rows, scaling, zero,
            to(self.sums) if sums else 0,
        )  # fmt: skip


@dataclass
class Outcome:
    """What came, what is wanted, and by how much it may be off; `untouched`: all else was left."""

    got: np.ndarray
    wanted: np.ndarray
    allowed: Any
    untouched: bool

    @property
    def worst(self) -> float:
        """The error, in what is allowed."""
        off = np.abs(self.got.astype(F64) - self.wanted)
        worst = np.max(off / np.maximum(self.allowed, 1e-300), initial=0.0)
        return float(worst if np.isfinite(worst) else np.inf)

    @property
    def ok(self) -> bool:
        return self.untouched and self.worst <= 1


def multiply(case: Case, cupy, backend, seed: int = 0) -> Outcome:
    """Run a case on a GPU."""
    rng = np.random.default_rng(seed)
    m, n, k = case.shape
    counts = case.counts or (m,)
    groups = len(counts)
    by_offsets = case.counts is not None and case.by == "offsets"
    rows = m * groups if not by_offsets else max(m, sum(counts))
    x = Operand(rng, case.x, 1 if by_offsets else groups, rows if by_offsets else m, k)
    w = Operand(rng, case.w, groups, n, k)
    kept = []

    def to(array: np.ndarray) -> int:
        raw = np.ascontiguousarray(array)
        moved = cupy.asarray(raw.view(np.uint8) if raw.dtype.kind == "V" else raw)
        kept.append(moved)
        return moved.data.ptr

    starts = np.concatenate([[0], np.cumsum(counts)]) if by_offsets else np.arange(groups + 1) * m
    told = Groups(groups, rows if by_offsets else m)
    if by_offsets:
        told = Groups(groups, rows, offsets=to(starts.astype(np.int64)))
    elif case.by == "counts" and case.counts:
        told = Groups(groups, m, counts=to(np.array(counts, np.int64)))
    elif case.counts:
        counts = (m,) * groups
    is_bits = case.x.kind == "bits"
    a = x.coded(to, sums=is_bits or case.w.zeros)
    b = w.coded(to, sums=is_bits or case.x.zeros)

    dtype, pitch = OUTS[case.out], n + case.padding
    poison = np.full((rows, pitch), 77, dtype)
    out = to(poison)
    bias = rng.standard_normal(n).astype(F32) if case.bias else None
    residual = rng.standard_normal((rows, n)).astype(np.float16) if case.residual else None
    factor = None if case.factor is None else np.array([case.factor], F32)
    out_scale = np.array([0.37 * k**0.5], F32)
    results = struct.pack(
        "<3Q3q4i2Q", out, 0 if bias is None else to(bias), 0 if residual is None else to(residual),
        pitch, 1, n, OUT_TYPES[case.out], TYPES["float32"], TYPES["float16"],
        ACTIVATIONS[case.activation], 0 if factor is None else to(factor), to(out_scale),
    )  # fmt: skip
    moved_out = kept[[array.data.ptr for array in kept].index(out)]
    dense(backend, a, b, n, k, told, results, tile=case.tile)
    got = moved_out.get().view(dtype).reshape(rows, pitch)

    wanted, size, written = np.zeros((rows, n)), np.zeros((rows, n)), np.zeros(rows, bool)
    flat = x.numbers.reshape(-1, k)
    for g, count in enumerate(counts):
        where = slice(int(starts[g]), int(starts[g]) + count)
        wanted[where] = flat[where] @ w.numbers[g].T
        size[where] = np.abs(flat[where]) @ np.abs(w.numbers[g]).T
        written[where] = True
    untouched = bool(
        np.all(got[~written] == dtype.type(77)) and np.all(got[:, n:] == dtype.type(77))
    )
    is_float = case.x.kind.startswith("fp8")
    if case.out == "int32":
        return Outcome(got[written][:, :n], wanted[written], 0.5, untouched)
    allowed = size * (FLOAT_ERROR if is_float else 2.0**-23 * (4 + k // 32))
    if factor is not None:
        wanted, allowed = wanted * float(factor[0]), allowed * abs(float(factor[0]))
    if bias is not None:
        wanted = wanted + bias
    if case.activation:
        wanted = _activated(case.activation, wanted)
        allowed = allowed * 1.2
    if residual is not None:
        wanted = wanted + residual.astype(F64)
    if case.out == "int8":
        wanted = np.clip(wanted / float(out_scale[0]), -127, 127)
        allowed = allowed / float(out_scale[0]) + 0.501
    else:
        # What is added, or worked out of sums, is rounded at its own size.
        more = case.bias or case.activation or case.residual or case.factor
        least = 1e-6 if more else (2 + k // 32) * 2.0**-149
        allowed = allowed + np.abs(wanted) * ROUNDED[case.out] + least
    return Outcome(got[written][:, :n], wanted[written], allowed[written], untouched)


def _activated(name: str, x: np.ndarray) -> np.ndarray:
    if name == "relu":
        return np.maximum(x, 0)
    if name == "silu":
        return x / (1 + np.exp(-np.clip(x, -700, 700)))
    from math import erf

    return 0.5 * x * (1 + np.vectorize(erf)(x / 2**0.5))
