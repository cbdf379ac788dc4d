"""Weights to lay out: every format, packing and kind of scale, shapes that end anywhere.

Their components are random bits: codes that stand for nothing, NaN with a payload, the unused ends
of rows. All of it has to come back.
"""

from typing import Any, NamedTuple

import numpy as np
from oracle import bits_equal

import cuquant as cq
from cuquant.array.fragments import takes
from cuquant.formats import Format

NAMES = cq.list_formats()
LAID = [name for name in NAMES if name not in ("fp16", "bf16", "ggml_mxfp4", "ggml_nvfp4")]
F32 = np.dtype(np.float32)


class Case(NamedTuple):
    """A weight of random bits; `options` are those of `get_format`."""

    format: str
    shape: tuple[int, ...]
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        options = [f"{key}={value}" for key, value in self.options]
        return "-".join([self.format, "x".join(map(str, self.shape)), *options]).replace(" ", "")

    @property
    def fmt(self) -> Format:
        return cq.get_format(self.format, **dict(self.options))

    def weight(self) -> cq.QuantArray:
        return random_weight(self.fmt, self.shape, seed=sum(self.shape))


def random_weight(fmt: Format, shape: tuple[int, ...], seed: int) -> cq.QuantArray:
    """A QuantArray of random bits, quantized along its last axis."""
    rng, parts = np.random.default_rng(seed), {}
    for part in fmt.components(shape):
        size = int(np.prod(part.shape))
        raw = rng.integers(0, 256, size * part.dtype.itemsize, np.uint8)
        parts[part.name] = raw.view(part.dtype).reshape(part.shape)
    return cq.QuantArray(fmt, shape, F32, parts, tuple(range(len(shape))))


def _of(name: str, shape: tuple[int, ...], **options: Any) -> Case:
    return Case(name, shape, tuple(options.items()))


def _shapes(name: str) -> tuple[tuple[int, ...], ...]:
    fmt = cq.get_format(name)
    if not fmt.is_blocks:
        return ((32, 128), (37, 131), (3, 17, 72))
    k = fmt.layout.elements
    return ((32, 512), (37, 3 * k), (3, 17, k))


BASICS = [_of(name, shape) for name in LAID for shape in _shapes(name)]
SHAPES = [
    _of(name, shape)
    for name in ("nf4", "int8", "k3", "uint5", "int1", "mxfp4")
    for shape in ((1, 1), (16, 64), (1, 63), (15, 65), (17, 1), (1, 1000), (300, 3))
]
EMPTY = [
    _of(name, shape)
    for name in ("nf4", "int8", "k3", "q4_0")
    for shape in ((0, 64), (5, 0), (0, 5, 64), (2, 0, 64), (2, 5, 0), (0, 0))
]
BLOCKS = [
    *(_of("nf4", (37, 300), block_size=b) for b in (16, 32, 64, 192, 256, 4096, "row", "tensor")),
    *(_of("uint4", (37, 300), block_size=b) for b in (16, 128, "row", "tensor")),
    *(_of("int4", (2, 37, 300), block_size=b) for b in (32, "row", "tensor", (16, 64))),
    *(_of("fp8_e4m3", (37, 300), block_size=b) for b in ("tensor", (1, 128), (128, 128), (8, 16))),
    *(_of("int3", (37, 40), block_size=b) for b in (40, 48, (4, 48))),
    *(_of("uint4", (37, 300), block_size=b, offset="min") for b in (32, "row", (8, 64))),
    _of("uint3", (3, 17, 72), offset="min", scale_dtype="bfloat16"),
    _of("uint8", (37, 300), block_size=64, offset="min", scale_dtype="float32"),
    _of("int4", (37, 300), scale_dtype="bfloat16"),
    _of("fp8_e4m3", (37, 300), block_size=64, scale_dtype="e8m0"),
]
DOUBLE = [
    _of("nf4", (37, 300), double_quant=True),
    _of("nf4", (3, 17, 72), double_quant=True, block_size="tensor"),
    _of("int8", (37, 131), double_quant=True),
    _of("k3", (37, 131), scale_dtype="float32", double_quant=True, packing="word"),
]
PACKINGS = [
    _of(f"k{bits}", shape, packing=packing)
    for bits in range(2, 9)
    for packing in ("word", "planes")
    for shape in ((32, 128), (19, 131))
]
LEVELS = [_of("k3", (19, 131), levels=(-1.0, -0.3, 0.0, 0.1, 1.0))]
ALL = [*BASICS, *SHAPES, *BLOCKS, *DOUBLE, *PACKINGS, *LEVELS]

# Blocks that do not go with units of 64 columns, formats without blocks, and scales of a byte in
# ggml's blocks.
AS_THEY_ARE = [
    _of("fp16", (37, 131)),
    _of("bf16", (3, 5, 64)),
    _of("ggml_mxfp4", (5, 96)),
    _of("ggml_nvfp4", (2, 5, 128)),
    *(_of("int4", (37, 300), block_size=b) for b in (8, 24, 48, 96, (16, 8), (16, 48))),
]


def _decoded() -> list[Case]:
    """Every format and kind of scale: a weight, and experts, whose rows start on 16 bytes."""
    found = []
    for name, options in dict.fromkeys((case.format, case.options) for case in ALL):
        fmt = Case(name, (), options).fmt
        step = fmt.layout.elements if fmt.is_blocks else 8
        for shape in ((37, 3 * step if fmt.is_blocks else 136), (3, 48, 9 * step)):
            if takes(fmt, shape):
                found.append(Case(name, shape, options))
    return found


DECODED = _decoded()

assert all(takes(case.fmt, case.shape) for case in (*ALL, *EMPTY))


def same_parts(found: dict, wanted: dict) -> bool:
    alike = all(bits_equal(found[name], part) for name, part in wanted.items())
    return list(found) == list(wanted) and alike


def same(a: cq.QuantArray, b: cq.QuantArray) -> bool:
    fields = ("format", "shape", "dtype", "axes", "kind")
    return all(getattr(a, f) == getattr(b, f) for f in fields) and same_parts(
        a.numpy().arrays(), b.numpy().arrays()
    )
