"""Products with weights of layout "fragments/1": cases, and how far off float32 sums may be.

The kernels decode weights to the dtype of x. Integers and small floats have a place there; levels
of a codebook are rounded once, and what is expected is a product with the rounded levels. Where
weights meet their scales before they are multiplied, in matmul/hopper.cu, they are rounded once
more.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from kernel_arrays import LAYOUTS, LEVELS, placed
from oracle import DTYPES, bits_equal
from prepack_cases import LAID
from products import F64, ULP, UNIT, Products, finished, is_close, normal, values

import cuquant as cq
from cuquant.formats import Codebook

TYPES = ("float16", "bfloat16")  # of x
# Half of the smallest number of each: how far off a weight near zero may be.
SMALLEST = {"float16": 2.0**-25, "bfloat16": 2.0**-134}


@dataclass(frozen=True)
class Case:
    """linear(x, prepack(w)) of [rows, K] and [N, K]."""

    format: str
    dtype: str = "float16"
    rows: int = 3
    shape: tuple[int, int] = (35, 256)
    layout: str = "whole"
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        size = "x".join(map(str, (self.rows, *self.shape)))
        options = [f"{k}={v}" for k, v in self.options]
        layout = () if self.layout == "whole" else (self.layout,)
        return "-".join([self.format, size, self.dtype, *layout, *options]).replace(" ", "_")

    @property
    def weight(self) -> cq.QuantArray:
        return _weight(self.format, self.shape, self.options)

    @property
    def base(self) -> np.ndarray:
        """What x is a view of."""
        return placed(normal((self.rows, self.shape[1]), self.dtype), self.layout)

    @property
    def x(self) -> np.ndarray:
        return LAYOUTS[self.layout].view(self.base, (self.rows, self.shape[1]))


@cache
def _weight(name: str, shape: tuple[int, int], options: tuple) -> cq.QuantArray:
    given = {k: LEVELS[v] if k == "levels" else v for k, v in options}
    return cq.quantize(normal(shape, seed=3), cq.get_format(name, **given))


# ---- what is expected ---------------------------------------------------------------------------


def by_element(q: cq.QuantArray) -> np.ndarray:
    """float64: the scale of each element of [N, K]."""
    rows, columns = q.shape
    scale = np.asarray(q.scale).astype(F64)
    block = q.format.layout.sub_block if q.format.is_blocks else q.format.rule.block
    if isinstance(block, tuple):
        scale, block = np.repeat(scale, block[0], axis=0)[:rows], block[1]
    if scale.ndim == 0 or not isinstance(block, int):
        return np.broadcast_to(scale, q.shape)
    return np.repeat(scale, block, axis=1)[:, :columns]


def operand(q: cq.QuantArray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """float64 weights as kernels decode them for x of `dtype`, and what their errors go with.

    That is their size, or those of the two numbers that a weight with a minimum is the sum of.
    """
    w = values(q)
    if isinstance(q.format.codec, Codebook):
        with np.errstate(over="ignore"):
            levels = q.format.codec.values.astype(DTYPES[dtype]).astype(F64)
            w = by_element(q) * levels[q.codes()]
    if q.format.offset != "min":
        return w, np.abs(w)
    product = by_element(q) * q.codes()
    return w, np.abs(product) + np.abs(w - product)


@dataclass(frozen=True)
class Expected:
    """x @ w.T in float64.

    Attributes
    ----------
    sums, size
        The result, and the sum of absolute products.
    off
        What rounding scaled weights to x's dtype may change; 0 where kernels do not do it.
    """

    sums: np.ndarray
    size: np.ndarray
    off: np.ndarray | float = 0.0

    @classmethod
    def of(cls, x: np.ndarray, q: cq.QuantArray, unit: float | None = None) -> "Expected":
        """With a `unit`, weights times it are rounded after they have been scaled."""
        name = np.dtype(x.dtype).name
        w, size = operand(q, name)
        a, off = values(x), 0.0
        if unit is not None:
            each = ULP[name] * np.abs(w) + SMALLEST[name] / unit
            off = np.abs(a) @ each.T
        return cls(a @ w.T, np.abs(a) @ size.T, off)

    @classmethod
    def routed(cls, x: np.ndarray, q: cq.QuantArray, experts: np.ndarray) -> "Expected":
        """Row i of x times w[experts[i]] of [E, N, K], as matmul/hopper.cu does it."""
        unit, shape = unit_of(x, q), (len(x), q.shape[1])
        sums, size, off = (np.zeros(shape) for _ in range(3))
        for expert in np.unique(experts).tolist():
            own = experts == expert
            found = cls.of(x[own], q[expert], unit)
            sums[own], size[own], off[own] = found.sums, found.size, found.off
        return cls(sums, size, off)

    def admits(self, y: np.ndarray, depth: int, *, on_gpu: bool = False) -> bool:
        """Float32 sums of K products in any order, then one rounding to y's dtype.

        A product meets K additions at most, of its group and then of all groups; before and after
        that no more than 24 roundings: those of its scale here and in the reference, and the sums
        of warps and blocks that share K.

        A GPU's tensor cores add 16 products to a sum at once: all 17 are cut off, to at least 24
        bits of the largest, and the result to 24 bits (Fasi et al., Numerical behavior of NVIDIA
        tensor cores, 2021). That is 18 times 2^-23 of the sum of absolute products, or 36
        roundings, for each 16 of K.
        """
        roundings = (36 * -(-depth // 16) if on_gpu else depth) + 24
        if not np.any(self.off):
            return is_close(y, self.sums, self.size, roundings)
        off = self.off * (1 + 2 * roundings * UNIT)
        near = np.clip(y.astype(F64), self.sums - off, self.sums + off)
        return is_close(y, near, self.size + off, roundings)


def unit_of(x: np.ndarray, q: cq.QuantArray) -> float:
    """What matmul/hopper.cu multiplies weights by, at least, before it rounds them to x's dtype;
    less by how many times half of float16's smallest number they may be off near zero.

    A product with a scale that float16 has is rounded once, as it is from 2^-4 to 2^14 and else
    near 1. What is left of another scale in a second float16 is off as much, times a code, for
    which the weights are larger: 8 times at most, and 2 times where blocks of ggml's are bounded.
    """
    fmt = q.format
    if x.dtype != np.float16 or fmt.scale is None:
        return 1.0
    if fmt.scale.dtype == "e4m3":  # their products are exact, and sums meet the other scale
        return 1 / float(q.arrays()["global_scale"])
    sizes = np.abs(values(q))
    largest = float(sizes[np.isfinite(sizes)].max(initial=0.0))
    if fmt.offset == "min" and not fmt.is_blocks:  # the bound is of a product and what is added
        return 1.0 if 2.0**-4 <= largest <= 2.0**12 else 1 / (4 * largest)
    own = fmt.scale.dtype == "float16" and not fmt.is_blocks
    if not largest or (own and 2.0**-4 <= largest <= 2.0**14):
        return 1.0
    if own or fmt.scale.dtype == "e8m0":
        return 1 / (2 * largest if fmt.offset else largest)
    codes = 1 + min(float(np.nanmax(np.abs(fmt.codec.numbers))), 8)
    return 1 / (min(codes * (1 + fmt.is_blocks), 16) * largest)


# ---- what kernels are asked, and how they answer ------------------------------------------------


def run_case(run: Products, case: Case, **options: Any) -> np.ndarray:
    return run(cq.linear, case.x, cq.prepack(case.weight), **options)


def with_scale(q: cq.QuantArray, scale: np.ndarray) -> cq.QuantArray:
    return cq.QuantArray(q.format, q.shape, q.dtype, {**q.arrays(), "scale": scale}, q.axes)


def check_nan_scales(run: Products, q: cq.QuantArray, x: np.ndarray, second: int) -> None:
    """A scale, or a minimum, that is NaN hurts its row alone: one of row 4, and the last one of row
    `second`."""
    scale = q.arrays()["scale"].copy()
    scale[4, 0], scale[second, -1] = (255, 255) if scale.dtype == np.uint8 else (np.nan, np.nan)
    hurt = with_scale(q, scale)
    if q.format.offset == "min" and not q.format.is_blocks:  # of row 4 the minimum instead
        parts = {**q.arrays(), "scale": q.arrays()["scale"].copy(), "minimum": q.minimum.copy()}
        parts["scale"][second, -1], parts["minimum"][4, 0] = np.nan, np.nan
        hurt = cq.QuantArray(q.format, q.shape, q.dtype, parts, q.axes)
    y, clean = (run(cq.linear, x, cq.prepack(w), out_dtype="float32") for w in (hurt, q))
    rows = [4, second]
    assert np.isnan(y[:, rows]).all()
    others = np.delete(np.arange(len(scale)), rows)
    assert np.isfinite(y[:, others]).all() and bits_equal(y[:, others], clean[:, others])


def check_nonfinite_x(run: Products, q: cq.QuantArray, x: np.ndarray) -> None:
    """Where the CPU's result is not finite this is the same, and nowhere else."""
    x[0, 3], x[1, 130] = np.nan, np.inf
    y = run(cq.linear, x, cq.prepack(q), out_dtype="float32")
    wanted = cq.linear(x, q, out_dtype="float32")
    finite = np.isfinite(wanted)
    assert (np.isfinite(y) == finite).all() and not finite.all()
    assert bits_equal(np.isnan(y), np.isnan(wanted))
    assert (y[np.isinf(wanted)] == wanted[np.isinf(wanted)]).all()


def check_epilogues(run: Products, q: cq.QuantArray, x: np.ndarray, activation: str | None) -> None:
    """Each function is within a few ulp of NumPy's, on the same sums; then one rounding."""
    x[0] *= 30  # where silu and gelu are 0 or x
    p, (columns, _) = cq.prepack(q), q.shape
    sums = run(cq.linear, x, p, out_dtype="float32")
    names = list(DTYPES)
    for i, (with_bias, with_residual) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        bias = normal((columns,), names[i % 3]) if with_bias else None
        kind = names[(i + 1) % 3]
        residual = normal((len(x), 2 * columns), kind)[:, ::2] if with_residual else None
        wanted = finished(sums, bias, activation, residual)
        off = 8 * UNIT * np.maximum(np.abs(finished(sums, bias)), 1)
        for dtype in names:
            y = run(
                cq.linear, x, p, bias, activation=activation, residual=residual, out_dtype=dtype
            )
            assert y.dtype == DTYPES[dtype]
            bound = off + ULP[dtype] * (np.abs(wanted) + off) + UNIT
            assert (np.abs(values(y) - wanted) <= bound).all()


def check_out(run: Products, case: Case, layout: str, expected: Expected) -> None:
    """`out` lies anywhere, and what lies between and beside its elements is left alone."""
    where, shape = LAYOUTS[layout], (case.rows, case.shape[0])
    for dtype in DTYPES.values():
        base = run.backend.empty(where.base(shape), dtype)
        base[...] = 7
        out = where.view(base, shape)
        assert run_case(run, case, out=out) is out
        assert expected.admits(np.array(out), case.shape[1])
        out[...] = 7
        assert (base == 7).all()


# ---- the matrix ---------------------------------------------------------------------------------


def _with(name: str, dtype: str, shape: tuple[int, int] = (35, 200), **options: Any) -> Case:
    return Case(name, dtype, shape=shape, options=tuple(options.items()))


OWN = [name for name in LAID if not cq.get_format(name).is_blocks]
BASICS = [Case(name, dtype) for name in LAID for dtype in TYPES]
# N and K end anywhere; one program with the basics where scales lie alike.
TAILS = [
    *(Case(name, TYPES[i % 2], 7, (35 + i % 25, 131)) for i, name in enumerate(OWN)),
    *(
        Case("nf4", dtype, 2, (n, k))
        for dtype in TYPES
        for n, k in ((33, 65), (34, 128), (48, 129), (50, 191), (63, 255), (64, 257))
    ),
    *(Case("int4", "float16", 1, shape) for shape in ((1, 1), (5, 7), (16, 64), (17, 300))),
    *(Case(name, "float16", 4, (35, k)) for k in (32, 544) for name in ("q4_0", "q5_1", "iq4_nl")),
]
BLOCKS = [
    *(
        _with("uint4", TYPES[i % 2], block_size=size)
        for i, size in enumerate((16, 32, 64, 192, "row", "tensor"))
    ),
    *(
        _with("nf4", TYPES[i % 2], block_size=size)
        for i, size in enumerate((16, 32, 192, "row", "tensor", (1, 128), (16, 64), (8, 32)))
    ),
    _with("int4", "float16", (35, 300), block_size=(128, 128)),
    _with("int8", "bfloat16", (40, 300), block_size=(5, 16)),
    _with("fp8_e4m3", "float16", (40, 300), block_size=(128, 128)),
    *(_with("int4", "float16", (35, 700), block_size=size) for size in (320, 384, 448)),
    _with("nf4", "bfloat16", (5, 4160), block_size=4096),
]
OPTIONS = [
    *(_with(name, "float16", double_quant=True) for name in ("nf4", "int8")),
    _with("nf4", "bfloat16", (40, 2100), double_quant=True, block_size=16),
    *(
        _with(f"k{max(2, (len(LEVELS[name]) - 1).bit_length())}", "float16", levels=name)
        for name in ("2", "3", "5", "16 close", "17", "33 close", "200")
    ),
    *(_with("k5", "bfloat16", packing=packing) for packing in ("word", "planes")),
]
# Minimums beside scales, and scales of other dtypes, wherever they lie.
STORED = [
    *(
        _with(name, TYPES[i % 2], block_size=size, offset="min", scale_dtype=dtype)
        for i, (name, size, dtype) in enumerate(
            (
                ("uint4", 64, "float16"),
                ("uint4", 16, "bfloat16"),
                ("uint3", 32, "float32"),
                ("uint8", 192, "bfloat16"),
                ("uint2", "row", "float32"),
                ("uint5", (8, 64), "float16"),
                ("uint4", "tensor", "bfloat16"),
                ("uint4", 32, "float16"),
                ("uint6", 128, "float16"),
            )
        )
    ),
    *(_with(name, dtype, scale_dtype="bfloat16") for name in ("int4", "nf4") for dtype in TYPES),
    _with("uint4", "float16", block_size=16, scale_dtype="bfloat16"),
    *(_with("fp8_e4m3", dtype, block_size=(16, 64), scale_dtype="e8m0") for dtype in TYPES),
    _with("int8", "float16", block_size="row", scale_dtype="e8m0"),
    _with("int4", "bfloat16", block_size=64, scale_dtype="e8m0"),
]
VIEWS = [
    Case("nf4", "float16", 5, (35, 200), layout)
    for layout in ("rows", "crooked rows", "misaligned", "upside down", "repeated rows")
]
CASES = [*BASICS, *TAILS, *BLOCKS, *OPTIONS, *STORED, *VIEWS]


def ends(case: Case) -> tuple[bool, ...]:
    """Whether N and K end within a tile, whether K does within a vector, and whether it is one."""
    columns, depth = case.shape
    return columns % 64 == 0, depth % 64 == 0, depth % 8 == 0, depth > 64


def options(case: Case) -> tuple[str, ...]:
    """What is other than usual, and the kind of value it has."""
    named = ("offset", "scale_dtype")
    return tuple(f"{k} {v if k in named else type(v).__name__}" for k, v in case.options)


# What a sample of cases meets all of.
AXES = ("format", "dtype", "layout", ends, options)
