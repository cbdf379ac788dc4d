"""Integers by rows whose scales meet the operands, on sm_90: matmul_stream.cu with row_groups.cuh,
on the CPU under the emulator."""

import numpy as np
import pytest
from emulator import Emulator, Recorder, compiler
from fragment_products import Case, Expected, with_scale
from oracle import bits_equal
from products import ULP, Products, normal, values
from test_stream_kernel import gated, swiglu_bound

import cuquant as cq
from cuquant.ops.kernels import stream
from cuquant.ops.kernels.operands import Problem, Weight

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to compile kernels with")

HOPPER, PROCESSORS = 90, 132
FORMATS = [
    (name, block)
    for name in ("int2", "uint2", "int3", "uint3", "int4", "uint4", "int5", "uint5")
    for block in (16, 32)
    if not name.endswith("4") or block == 16
]
# A chunk that ends early, warps that share K, and more strips than rows of them; few
# multiprocessors have several strips a warp, and are spread over.
CASES = [
    (Case(name, "float16", rows, shape, options=(("block_size", block),)), processors)
    for name, block in FORMATS
    for rows, shape, processors in (
        (1, (35, 256), PROCESSORS),
        (3, (17, 768), PROCESSORS),
        (8, (70, 1280), 3),
        (2, (70, 512), 4),
    )
]
LARGE = [("int2", 16), ("uint3", 32), ("int4", 16), ("uint5", 16)]
LARGE_SHAPE = (20, 512)
GATED = ("int5", "int5", {"block_size": 16})


def division(fmt, rows=1, shape=(4096, 4096), dtype="float16", arch=HOPPER):
    found = stream.division_of(
        Problem(rows, *shape, fmt, Weight.layout, dtype, True, arch, PROCESSORS, direct=True)
    )
    assert found is not None
    return found


def product(case, processors=PROCESSORS, order="ascending", weight=None, arch=HOPPER):
    run = Products(Emulator(order=order, arch=arch, multiprocessors=processors))
    q = case.weight if weight is None else weight
    return run(cq.linear, case.x, q, out_dtype="float32")


@pytest.fixture(scope="module")
def built() -> None:
    """The programs of all cases, compiled together."""
    recorder = Recorder(arch=HOPPER)
    run = Products(recorder)
    for case, processors in CASES:
        recorder.multiprocessors = processors
        run(cq.linear, case.x, case.weight)
    recorder.multiprocessors = PROCESSORS
    for name, block in LARGE:
        case = large_case(name, block)
        run(cq.linear, case.x, case.weight)
    run(cq.swiglu, normal((5, 256), "float16"), *gated(*GATED))
    assert all(program.arguments[-1] == 2 for program in recorder.programs)  # units at a time
    Emulator().build(recorder.programs)


@pytest.mark.parametrize(("case", "processors"), CASES, ids=str)
def test_weights_are_rounded_once(case, processors, built):
    y = product(case, processors)
    assert Expected.of(case.x, case.weight, unit=1.0).admits(y, case.shape[1])
    assert bits_equal(y, product(case, processors, "shuffled"))


def large_case(name, block):
    return Case(name, "float16", 2, LARGE_SHAPE, options=(("block_size", block),))


def check_large_scales(linear, case, on_gpu=False):
    """Scales of 2 and more in some rows; those of other rows, and up to 256, change nothing."""
    x, q = case.x * np.float16(2.0**-10), case.weight
    scale, usual = q.arrays()["scale"].copy(), q.arrays()["scale"]
    for row, at, value in ((3, 5, 65504), (3, 15, -40000), (9, 0, 300), (12, 9, 255), (17, -1, 2)):
        scale[row, at] = value
    large = with_scale(q, scale)
    y, before = (linear(x, w) for w in (large, q))
    assert np.abs(values(large)).max() > 65504 and np.isfinite(y).all()
    assert Expected.of(x, large, unit=2.0**-8).admits(y, LARGE_SHAPE[1], on_gpu=on_gpu)
    exact, usual_rows = Expected.of(x, large, unit=1.0), np.delete(np.arange(len(scale)), (3, 9))
    exact = Expected(*(part[:, usual_rows] for part in (exact.sums, exact.size, exact.off)))
    assert exact.admits(y[:, usual_rows], LARGE_SHAPE[1], on_gpu=on_gpu)
    same = (scale == usual).all(axis=1)
    assert same.sum() == len(scale) - 4 and bits_equal(y[:, same], before[:, same])


@pytest.mark.parametrize(("name", "block"), LARGE)
def test_products_beyond_float16_are_not_lost(name, block, built):
    run = Products(Emulator(arch=HOPPER))
    check_large_scales(
        lambda x, q: run(cq.linear, x, q, out_dtype="float32"), large_case(name, block)
    )


@pytest.mark.parametrize(("name", "block"), LARGE)
def test_scales_that_are_not_finite_hurt_their_row_alone(name, block, built):
    case = large_case(name, block)
    q = case.weight
    scale = q.arrays()["scale"].copy()
    scale[4, 0], scale[11, -1], scale[19, 3] = np.nan, np.nan, np.inf
    run = Products(Emulator(arch=HOPPER))
    y, clean = (run(cq.linear, case.x, w, out_dtype="float32") for w in (with_scale(q, scale), q))
    assert np.isnan(y[:, [4, 11]]).all() and not np.isfinite(y[:, 19]).any()
    others = np.delete(np.arange(len(scale)), (4, 11, 19))
    assert np.isfinite(y[:, others]).all() and bits_equal(y[:, others], clean[:, others])


def test_both_weights_of_swiglu_have_their_scales(built):
    gate, up = gated(*GATED)
    x = normal((5, 256), "float16")
    true, bound = swiglu_bound(x, gate, up, unit=1.0)
    y = Products(Emulator(arch=HOPPER))(cq.swiglu, x, gate, up)
    assert (np.abs(values(y) - true) <= bound + ULP["float16"] * np.abs(true) + 2.0**-25).all()


@pytest.mark.parametrize(("name", "block"), FORMATS)
def test_which_scales_meet_operands(name, block):
    """Of float16, in products of few rows; rows of codes and scales are whole pieces."""
    fmt = cq.get_format(name, block_size=block)
    for rows in (1, 8):
        found = division(fmt, rows)
        assert found.span == 2 and found.groups.fine == 64 // block
        bits, chunk, zero = fmt.bits, found.memory.chunk, bool(fmt.offset)
        row = 8 * bits * chunk + (0 if bits == 4 else 16) + chunk * 64 // block * (2 + zero)
        assert found.memory.ring == 2 * 16 * row
    wide = cq.get_format(name, block_size=block, scale_dtype="float32")
    others = [
        division(fmt, 9),
        division(fmt, dtype="bfloat16"),
        division(fmt, shape=(4096, 4096 + 128)),
        division(wide),
        division(fmt, arch=80),
    ]
    assert all(found.span == 1 and not found.shape.spread for found in others)
