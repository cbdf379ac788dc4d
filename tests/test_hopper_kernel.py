"""matmul_hopper.cu against float64, on the CPU under the emulator."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
from emulator import Emulator, Recorder, compiler
from fragment_products import BLOCKS, OPTIONS, TYPES, Case, Expected, unit_of
from kernel_arrays import LAYOUTS, WRITABLE
from oracle import DTYPES, bits_equal
from prepack_cases import LAID
from products import ULP, UNIT, Products, finished, normal, values, weight

import cuquant as cq
from cuquant.ops.kernels import hopper, stream
from cuquant.ops.kernels.hopper import Shape
from cuquant.reference import ACTIVATIONS

F32 = np.float32
ARCH = 90
pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to compile kernels with")


def _many(case: Case, rows: int) -> Case:
    """With rows of x that the copy engine takes: of whole vectors."""
    shape = (case.shape[0], case.shape[1] // 8 * 8)
    return Case(case.format, case.dtype, rows, shape, "whole", case.options)


# One program for each format; the other shapes of tiles meet few of them.
CASES = [
    *(Case(name, TYPES[i % 2], 19, (70, 256)) for i, name in enumerate(LAID)),
    *(_many(case, 17) for case in (*BLOCKS, *OPTIONS)),
    *(Case("nf4", "float16", 20, shape) for shape in ((1, 8), (64, 64), (65, 136), (130, 328))),
    *(Case("int4", "bfloat16", rows, (70, 264)) for rows in (17, 32, 33, 65, 128, 129, 260)),
    Case("q4_k", "float16", 130, (70, 256)),
    Case("nf4", "float16", 18, (70, 256), "rows"),
]

# Of x [rows, K] and a weight [150, K]: tokens, row_groups, depth_groups, split, ahead, stages.
SHAPES = [
    (32, 1, 3, 1, 2, 3),
    (32, 1, 2, 2, 2, 3),
    (64, 2, 1, 1, 4, 2),
    (64, 1, 1, 2, 2, 4),
    (128, 2, 1, 1, 2, 3),
    (128, 1, 3, 2, 2, 3),
    (256, 2, 1, 1, 2, 2),
    (32, 3, 1, 1, 4, 5),
]
DIVIDED = [
    *((Case("nf4", "float16", 70, (150, 1160)), shape) for shape in SHAPES),
    *(
        (Case(name, "bfloat16", 40, (150, 1280), options=options), shape)
        for name, options in (("q4_k", ()), ("uint3", (("block_size", 16),)), ("int8", ()))
        for shape in (SHAPES[1], SHAPES[2])
    ),
]
GATED = ["nf4", "q4_k"]


def run_case(run: Products, case: Case, **options: Any) -> np.ndarray:
    return run(cq.linear, case.x, cq.prepack(case.weight), **options)


def expected(case: Case) -> Expected:
    return expect(case.x, case.weight)


def expect(x: np.ndarray, q: cq.QuantArray) -> Expected:
    return Expected.of(x, q, unit_of(x, q))


def divided(numbers: tuple[int, ...]) -> Any:
    """The rule names this shape."""
    return mock.patch.object(hopper, "divide", lambda *_: Shape(*numbers))


@pytest.fixture(scope="module")
def built() -> None:
    """The programs of all cases, compiled together."""
    recorder = Recorder(arch=ARCH)
    run = Products(recorder)
    for case in CASES:
        run_case(run, case)
    for case, numbers in DIVIDED:
        with divided(numbers):
            run_case(run, case)
    for name in GATED:
        p = cq.prepack(weight(name, (70, 256)))
        run(cq.swiglu, normal((20, 256), "float16"), p, p)
    assert {program.file for program in recorder.programs} == {"matmul_hopper.cu"}
    Emulator().build(recorder.programs)


@pytest.fixture
def run(built) -> Products:
    return Products(Emulator(arch=ARCH))


# ---- linear -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_matrix(case, run):
    x, wanted = case.x, expected(case)
    y = run_case(run, case)
    assert y.dtype == x.dtype and y.shape == wanted.sums.shape
    assert wanted.admits(y, case.shape[1])
    wide = run_case(run, case, out_dtype="float32")
    assert wide.dtype == F32 and wanted.admits(wide, case.shape[1])


@pytest.mark.parametrize(
    ("case", "numbers"), DIVIDED, ids=lambda v: v if isinstance(v, tuple) else str(v)
)
def test_every_way_to_divide(case, numbers, run):
    """Fewer stages than steps, so that they are used again; blocks that have several tiles."""
    with divided(numbers):
        y = run_case(run, case, out_dtype="float32")
    assert expected(case).admits(y, case.shape[1])


def test_the_same_bits_in_every_order_of_threads(built):
    for case, numbers in DIVIDED[2:4]:
        runs = []
        for order in ("ascending", "descending", "shuffled"):
            with divided(numbers):
                emulator = Emulator(order=order, arch=ARCH)
                runs.append(run_case(Products(emulator), case, out_dtype="float32"))
        assert all(bits_equal(run, runs[0]) for run in runs)


def with_parts(q: cq.QuantArray, **parts: np.ndarray) -> cq.QuantArray:
    return cq.QuantArray(q.format, q.shape, q.dtype, {**q.arrays(), **parts}, q.axes)


@pytest.mark.parametrize("name", ["nf4", "uint4", "int8", "mxfp4", "fp8_e4m3", "k3"])
def test_a_scale_that_is_nan_hurts_its_row_alone(name, run):
    """Also that of the last group, which the columns behind K share."""
    dtype = TYPES[LAID.index(name) % 2]
    q, x = weight(name, (70, 136)), normal((19, 136), dtype)
    scale = q.arrays()["scale"].copy()
    scale[4, 0], scale[61, -1] = (255, 255) if scale.dtype == np.uint8 else (np.nan, np.nan)
    y = run(cq.linear, x, cq.prepack(with_parts(q, scale=scale)), out_dtype="float32")
    clean = run(cq.linear, x, cq.prepack(q), out_dtype="float32")
    assert np.isnan(y[:, [4, 61]]).all()
    others = np.delete(np.arange(70), [4, 61])
    assert np.isfinite(y[:, others]).all() and bits_equal(y[:, others], clean[:, others])


def test_nan_and_infinity_of_x_go_through(run):
    """Where the CPU's result is not finite this is the same, and nowhere else."""
    q, x = weight("nf4", (70, 136)), normal((19, 136), "float16")
    x[0, 3], x[1, 130] = np.nan, np.inf
    y, wanted = run(cq.linear, x, cq.prepack(q), out_dtype="float32"), cq.linear(x, q)
    finite = np.isfinite(wanted)
    assert (np.isfinite(y) == finite).all() and not finite.all()
    assert bits_equal(np.isnan(y), np.isnan(wanted))
    assert (y[np.isinf(wanted)] == wanted[np.isinf(wanted)]).all()


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e5, 1e30])
def test_weights_of_any_size(size, run):
    """float16 does not hold them, but with a power of two."""
    q = cq.quantize(normal((70, 136)) * F32(size), "nf4")
    x = normal((19, 136), "float16")
    y = run(cq.linear, x, cq.prepack(q), out_dtype="float32")
    assert np.isfinite(y).all() and expect(x, q).admits(y, 136)


def test_one_row_that_shared_memory_does_not_hold(run):
    """Whatever its stride is."""
    q = weight("int4", (70, 264))
    x = run.backend.array(normal((1, 264), "bfloat16"))
    x = np.lib.stride_tricks.as_strided(x, x.shape, (0, 2))
    with mock.patch.object(stream, "divide", lambda *_: None):
        y = run(cq.linear, x, cq.prepack(q), out_dtype="float32")
    assert expect(x, q).admits(y, 264)


# ---- what happens to the sums -------------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("columns", [70, 72])
def test_epilogues(run, activation, columns):
    """Each function is within a few ulp of NumPy's, on the same sums; then one rounding.

    Results of 16 bits without activation and residual go a way of their own where N goes with it.
    """
    p, x = cq.prepack(weight("int4", (columns, 264))), normal((129, 264), "bfloat16")
    x[0] *= 30  # where silu and gelu are 0 or x
    sums = run(cq.linear, x, p, out_dtype="float32")
    names = list(DTYPES)
    for i, (with_bias, with_residual) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        bias = normal((columns,), names[i % 3]) if with_bias else None
        residual = normal((129, 2 * columns), names[i % 2])[:, ::2] if with_residual else None
        wanted = finished(sums, bias, activation, residual)
        off = 8 * UNIT * np.maximum(np.abs(finished(sums, bias)), 1)
        for dtype in names:
            y = run(
                cq.linear, x, p, bias, activation=activation, residual=residual, out_dtype=dtype
            )
            assert y.dtype == DTYPES[dtype]
            bound = off + ULP[dtype] * (np.abs(wanted) + off) + UNIT
            assert (np.abs(values(y) - wanted) <= bound).all()


@pytest.mark.parametrize("layout", ["whole", *WRITABLE])
@pytest.mark.parametrize("case", [CASES[0], Case("int4", "bfloat16", 129, (72, 264))], ids=str)
def test_out_lies_anywhere(run, layout, case):
    """What lies between and beside its elements is left alone."""
    where, shape = LAYOUTS[layout], (case.rows, case.shape[0])
    for dtype in DTYPES.values():
        base = run.backend.empty(where.base(shape), dtype)
        base[...] = 7
        out = where.view(base, shape)
        assert run_case(run, case, out=out) is out
        assert expected(case).admits(np.array(out), case.shape[1])
        out[...] = 7
        assert (base == 7).all()


@pytest.mark.parametrize("name", GATED)
def test_swiglu(name, run):
    """|silu'| < 1.1 and |silu(a)| <= |a|."""
    gate = weight(name, (70, 256))
    up = cq.quantize(normal((70, 256), seed=5), name)
    x = normal((20, 256), "float16")
    y = run(cq.swiglu, x, cq.prepack(gate), cq.prepack(up))
    a, b = expect(x, gate), expect(x, up)
    true = a.sums / (1 + np.exp(-a.sums)) * b.sums
    first, second = (side.off + UNIT * 280 * (side.size + side.off) for side in (a, b))
    bound = 1.1 * first * (np.abs(b.sums) + second) + np.abs(a.sums) * second
    bound += (8 * UNIT + ULP["float16"]) * (np.abs(true) + bound) + 2.0**-25
    assert (np.abs(values(y) - true) <= bound).all()
