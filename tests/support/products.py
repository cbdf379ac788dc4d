"""What tests of products share: bounds, and the GPU's half of the operations on NumPy arrays."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
from emulator import Emulator, Recorder
from kernel_arrays import LAYOUTS, LEVELS, VIEWS, placed
from kernel_cases import NAMES, OWN
from on_emulator import OnEmulator
from oracle import DTYPES

import cuquant as cq
from cuquant.ops.matmul import check as product
from cuquant.ops.matmul import on_gpu as multiply
from cuquant.reference import ACTIVATIONS

F32, F64 = np.float32, np.float64
UNIT = 2.0**-24  # of float32's roundings
ULP = {"float32": UNIT, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# Half of the smallest number of each dtype: how far off a rounding to it may be near zero.
TINY = {"float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134}


class Products(OnEmulator):
    """cuquant's products as on a GPU, with the emulator (or a Recorder) in the GPU's place."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        with (
            self._in_place(),
            mock.patch.object(multiply, "backend_of", lambda *_: _Entered(self.backend)),
            mock.patch.object(product.Place, "is_gpu", True),
        ):
            yield

    def __call__(self, operation: Any, *arguments: Any, **options: Any) -> Any:
        """An operation on copies of all arrays in guarded memory, but for `out`."""
        given = [self.guarded(value) for value in arguments]
        kept = {k: v if k == "out" else self.guarded(v) for k, v in options.items()}
        with self.in_place():
            return operation(*given, **kept)

    def guarded(self, value: Any) -> Any:
        if isinstance(value, cq.QuantArray):
            return self.copy(value)
        if isinstance(value, cq.PackedWeight):
            parts = {name: self.backend.array(part) for name, part in value.arrays().items()}
            return replace(value, components=parts)
        if not isinstance(value, np.ndarray):
            return value
        if value.flags.c_contiguous:
            return self.backend.array(value)
        return value  # a view, whose memory is what the test says


class _Entered:
    """`with` around a backend."""

    def __init__(self, backend: Emulator | Recorder) -> None:
        self.backend = backend

    def __enter__(self) -> Emulator | Recorder:
        return self.backend

    def __exit__(self, *_: Any) -> None:
        pass


def values(a: Any) -> np.ndarray:
    """float64 of an array, or of what a QuantArray decodes to in float32."""
    if isinstance(a, cq.QuantArray):
        a = a.dequantize(dtype="float32")
    return np.asarray(a).astype(F64)


def exact(x: Any, w: Any) -> tuple[np.ndarray, np.ndarray]:
    """x @ w.T in float64, and the sum of absolute products, which bounds float32's error."""
    a, b = values(x), values(w)
    return a @ b.T, np.abs(a) @ np.abs(b).T


def gamma(depth: int) -> float:
    """What K roundings, one after the other, do to a sum of absolute products at most."""
    return depth * UNIT / (1 - depth * UNIT)


def is_close(y: np.ndarray, wanted: np.ndarray, size: np.ndarray, depth: int) -> bool:
    """K fused additions in float32 in any order, then one rounding to y's dtype."""
    name = np.dtype(y.dtype).name
    off = gamma(depth) * size + depth * TINY["float32"]
    bound = off + ULP[name] * (np.abs(wanted) + off) + TINY[name]
    return bool((np.abs(y.astype(F64) - wanted) <= bound).all())


def finished(
    sums: np.ndarray, bias: Any = None, activation: str | None = None, residual: Any = None
) -> np.ndarray:
    """The epilogue of float32 sums, in float32."""
    if bias is not None:
        sums = sums + bias.astype(F32)
    if activation is not None:
        sums = ACTIVATIONS[activation](sums)
    return sums if residual is None else sums + residual.astype(F32)


def normal(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, *shape])
    return rng.standard_normal(shape, F32).astype(DTYPES[dtype])


def weight(name: str, shape: tuple[int, ...] = (19, 256), **options: Any) -> cq.QuantArray:
    """Of random numbers; `options` are those of `get_format`."""
    return cq.quantize(normal(shape, seed=3), cq.get_format(name, **options))


# ---- the matrix of `linear` ----------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """linear(x, w) of [*lead, K] and [N, K]."""

    format: str
    lead: tuple[int, ...] = (3,)
    shape: tuple[int, int] = (19, 256)
    dtype: str = "float16"
    layout: str = "whole"
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        size = "x".join(map(str, (*self.lead, *self.shape)))
        options = [f"{k}={v}" for k, v in self.options]
        layout = () if self.layout == "whole" else (self.layout,)
        return "-".join([self.format, size, self.dtype, *layout, *options]).replace(" ", "_")

    @property
    def weight(self) -> cq.QuantArray:
        return _weight(self.format, self.shape, self.options)

    @property
    def base(self) -> np.ndarray:
        """What x is a view of."""
        return placed(normal((*self.lead, self.shape[1]), self.dtype), self.layout)

    @property
    def x(self) -> np.ndarray:
        return LAYOUTS[self.layout].view(self.base, (*self.lead, self.shape[1]))


@cache
def _weight(name: str, shape: tuple[int, int], options: tuple) -> cq.QuantArray:
    given = {k: LEVELS[v] if k == "levels" else v for k, v in options}
    return weight(name, shape, **given)


def _dtype(name: str) -> str:
    return list(DTYPES)[NAMES.index(name) % 3]


def _with(name: str, shape: tuple[int, int] = (35, 200), lead: int = 3, **options: Any) -> Case:
    return Case(name, (lead,), shape, "float32", options=tuple(options.items()))


ROWS, TILES = 3, 20  # rows of x for the two kernels
CASES = [
    *(Case(name, (m,), dtype=_dtype(name)) for name in NAMES for m in (ROWS, TILES)),
    *(Case(name, (m,), (7, 131), _dtype(name)) for name in OWN for m in (2, 17)),
    *(Case("int4", (ROWS,), dtype=dtype) for dtype in DTYPES),
    *(
        _with(name, lead=lead, block_size=size)
        for name in ("nf4", "uint4")
        for lead in (ROWS, TILES)
        for size in (8, 24, 96, "row", "tensor", (1, 128), (16, 8), (128, 128), (128, 1))
    ),
    _with("int4", (300, 40), block_size=(128, 128)),
    *(
        _with("uint4", lead=lead, block_size=size, offset="min", scale_dtype=dtype)
        for lead in (ROWS, TILES)
        for size, dtype in ((64, "float16"), (24, "bfloat16"), ((16, 8), "float32"))
    ),
    _with("int4", scale_dtype="bfloat16"),
    _with("fp8_e4m3", block_size=(16, 8), scale_dtype="e8m0"),
    *(_with(name, double_quant=True) for name in ("nf4", "int8", "dynamic8")),
    _with("nf4", (40, 8192), block_size=8, double_quant=True),
    *(
        _with(f"k{max(2, (len(values) - 1).bit_length())}", (5, 96), levels=name)
        for name, values in LEVELS.items()
        if name not in ("huge", "tiny", "all sizes")
    ),
    *(
        _with(f"k{bits}", (5, 131), packing=packing)
        for bits in range(2, 9)
        for packing in ("word", "planes")
    ),
    *(
        Case("nf4", (m,), (n, k), "bfloat16")
        for m, n, k in [
            (1, 1, 1), (1, 300, 64), (8, 2, 7), (9, 130, 40), (16, 17, 33), (17, 129, 33),
            (65, 67, 96), (70, 260, 32), (1, 33, 4096), (2, 5, 2056),
        ]
    ),
    *(
        Case(name, (m,), (19, 64), dtype, layout)
        for layout in VIEWS
        for name, m, dtype in (("nf4", ROWS, "float32"), ("int4", TILES, "float16"))
    ),
    *(Case("int4", lead, (19, 64)) for lead in ((), (1,), (2, 3), (2, 1, 3), (3, 7, 2))),
]  # fmt: skip
