"""Codes by rows with several groups in a unit, on sm_90: matmul/stream.cu with stream_meet.cuh,
on the CPU under the emulator."""

import numpy as np
import pytest
from emulator import Emulator, Recorder, compiler
from fragment_products import Case, with_scale
from oracle import bits_equal
from products import ULP, Products, normal, values
from programs import number
from row_group_products import (
    CASES,
    FORMATS,
    HOPPER,
    LARGE,
    LARGE_SHAPE,
    PROCESSORS,
    check_large_scales,
    check_rounded_once,
    division,
    expected,
    large_case,
)
from samples import sampled, selected
from stream_products import gated, swiglu_bound

import cuquant as cq
from cuquant.ops.matmul.stream_rows import AT_OPERANDS, AT_SUMS

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to compile kernels with")

# What scales meet, by rows of x.
MEETS = [
    ("int2", 16, "float16", {1: 1, 2: AT_OPERANDS, 16: AT_OPERANDS, 17: AT_SUMS}),
    ("uint3", 16, "bfloat16", {1: 1, 2: 2, 3: AT_OPERANDS, 16: AT_OPERANDS, 17: AT_SUMS}),
    ("uint4", 16, "bfloat16", {1: 1, 2: 2, 3: AT_OPERANDS}),
    ("int4", 16, "float16", {1: 1, 2: AT_OPERANDS, 16: AT_OPERANDS}),
    ("int4", 32, "float16", {1: AT_SUMS, 8: AT_SUMS}),
    ("uint4", 32, "float16", {1: 1, 2: 1, 3: 2, 4: 2, 5: AT_SUMS}),
    ("int5", 32, "float16", {2: 1, 3: AT_OPERANDS, 8: AT_OPERANDS, 9: AT_SUMS}),
    ("uint5", 32, "bfloat16", {2: 1, 4: 2, 5: AT_SUMS}),
    ("int6", 16, "float16", {2: 1, 3: AT_OPERANDS, 16: AT_OPERANDS}),
    ("int6", 16, "bfloat16", {2: 1, 4: 2, 5: AT_OPERANDS}),
    ("int6", 32, "bfloat16", {1: AT_SUMS}),
    ("uint6", 32, "float16", {4: 1, 5: AT_OPERANDS, 9: AT_SUMS}),
    ("uint7", 32, "bfloat16", {4: 1, 8: 2, 9: AT_SUMS}),
    ("int8", 16, "float16", {1: AT_SUMS}),
    ("k2", 16, "float16", {1: 1, 2: 2, 3: AT_SUMS}),
    ("k2", 32, "float16", {2: 1, 4: 2, 5: AT_SUMS}),
    ("k3", 32, "float16", {1: AT_SUMS}),
    ("bof4s", 16, "float16", {1: AT_SUMS}),
    ("k5", 16, "bfloat16", {2: 1, 4: 2, 5: AT_SUMS}),
    ("k6", 16, "float16", {2: 1, 4: 2, 8: 4, 9: AT_SUMS}),
    ("fp6_e2m3", 16, "float16", {2: 1, 3: AT_OPERANDS, 16: AT_OPERANDS}),
    ("fp6_e2m3", 16, "bfloat16", {2: 1, 4: 2, 8: AT_OPERANDS}),
    ("fp6_e2m3", 32, "float16", {1: AT_SUMS}),
]
GATED, GATED_ROWS = ("int5", "int5", {"block_size": 16}), (1, 5)


def product(case, processors=PROCESSORS, order="ascending", weight=None, arch=HOPPER):
    run = Products(Emulator(order=order, arch=arch, multiprocessors=processors))
    q = case.weight if weight is None else weight
    return run(cq.linear, case.x, q, out_dtype="float32")


def recorded(cases) -> Recorder:
    recorder = Recorder(arch=HOPPER)
    for case, processors in cases:
        recorder.multiprocessors = processors
        Products(recorder)(cq.linear, case.x, case.weight)
    recorder.multiprocessors = PROCESSORS
    return recorder


@pytest.fixture(scope="module")
def built(request) -> None:
    """The programs of the tests that run, compiled together."""
    of_cases = selected(request, "test_against_float64")
    recorder = recorded((given["case"], given["processors"]) for given in of_cases)
    run = Products(recorder)
    for large in LARGE:
        case = large_case(*large)
        run(cq.linear, case.x, case.weight)
    for rows in GATED_ROWS:
        run(cq.swiglu, normal((rows, 256), "float16"), *gated(*GATED))
    Emulator().build(recorder.programs)


def test_scales_meet_all_that_there_is():
    found = {number(program, "meet") for program in recorded(CASES).programs}
    assert found == {AT_SUMS, AT_OPERANDS, 1, 2, 4}


SAMPLED = sampled(
    CASES,
    lambda case, _: (case.format[0], case.options),
    lambda case, _: (case.dtype, case.rows),
    lambda case, _: division(case.weight.format, case.rows, case.shape, case.dtype).meet,
    lambda case, processors: (case.shape, processors),
)


@pytest.mark.parametrize(("case", "processors"), SAMPLED, ids=str)
def test_against_float64(case, processors, built):
    y = product(case, processors)
    assert expected(case).admits(y, case.shape[1])
    assert bits_equal(y, product(case, processors, "shuffled"))


@pytest.mark.parametrize("large", LARGE, ids=str)
def test_products_beyond_float16_are_not_lost(large, built):
    run = Products(Emulator(arch=HOPPER))
    check_large_scales(lambda x, q: run(cq.linear, x, q, out_dtype="float32"), large_case(*large))


@pytest.mark.parametrize("large", LARGE, ids=str)
def test_a_weight_that_meets_its_scale_is_rounded_once(large, built):
    run = Products(Emulator(arch=HOPPER))
    check_rounded_once(lambda x, q: run(cq.linear, x, q, out_dtype="float32"), large_case(*large))


@pytest.mark.parametrize("large", LARGE, ids=str)
def test_scales_that_are_not_finite_hurt_their_row_alone(large, built):
    case = large_case(*large)
    assert division(case.weight.format, case.rows, case.shape, case.dtype).meet in (AT_OPERANDS, 1)
    q = case.weight
    scale = q.arrays()["scale"].copy()
    scale[4, 0], scale[11, -1], scale[19, 3] = np.nan, np.nan, np.inf
    run = Products(Emulator(arch=HOPPER))
    y, clean = (run(cq.linear, case.x, w, out_dtype="float32") for w in (with_scale(q, scale), q))
    assert np.isnan(y[:, [4, 11]]).all() and not np.isfinite(y[:, 19]).any()
    others = np.delete(np.arange(len(scale)), (4, 11, 19))
    assert np.isfinite(y[:, others]).all() and bits_equal(y[:, others], clean[:, others])


@pytest.mark.parametrize("rows", GATED_ROWS)
def test_both_weights_of_swiglu_have_their_scales(rows, built):
    gate, up = gated(*GATED)
    x = normal((rows, 256), "float16")
    meet = division(gate.format, rows, gate.shape).meet
    true, bound = swiglu_bound(x, gate, up, unit=1.0 if meet == AT_OPERANDS else None)
    y = Products(Emulator(arch=HOPPER))(cq.swiglu, x, gate, up)
    assert (np.abs(values(y) - true) <= bound + ULP["float16"] * np.abs(true) + 2.0**-25).all()


def test_x_that_is_not_finite_hurts_its_row_alone(built):
    """Groups are columns beside each other, of one token and of the next."""
    case = Case("uint4", "float16", 2, LARGE_SHAPE, options=(("block_size", 32),))
    x = case.x.copy()
    x[0, [3, 100, 511]] = np.nan, np.inf, -np.inf
    run = Products(Emulator(arch=HOPPER))
    y, clean = (run(cq.linear, a, case.weight, out_dtype="float32") for a in (x, case.x))
    assert np.isnan(y[0]).all() and bits_equal(y[1], clean[1])


def test_two_blocks_share_k_of_large_x():
    case, _ = CASES[-1]
    found = division(case.weight.format, case.rows, case.shape, case.dtype)
    assert found.shape.split == 2 and found.meet == 2


@pytest.mark.parametrize(("name", "block", "dtype", "meets"), MEETS)
def test_what_scales_meet(name, block, dtype, meets):
    fmt = cq.get_format(name, block_size=block)
    for rows, meet in meets.items():
        found = division(fmt, rows, dtype=dtype)
        assert found.meet == meet, rows
        if meet != AT_SUMS:
            bits, chunk, zero = fmt.bits, found.memory.chunk, bool(fmt.offset)
            span = 2 if bits <= 3 or (bits <= 5 and name[0] != "k") else 1
            assert found.span == span and found.groups.fine == 64 // block
            pad = 16 if bits <= 3 or (span == 2 and bits == 5) else 0
            row = 8 * bits * chunk + pad + chunk * 64 // block * (2 + zero)
            assert found.memory.ring == 2 * 16 * row
            assert found.memory.zeros == ((chunk + 1) * 128 if meet > 0 else 0)


@pytest.mark.parametrize(("name", "block"), FORMATS)
def test_others_meet_sums(name, block):
    """Rows of codes and scales are no whole pieces, scales have 32 bits, and older GPUs."""
    fmt = cq.get_format(name, block_size=block)
    wide = cq.get_format(name, block_size=block, scale_dtype="float32")
    others = [division(fmt, shape=(4096, 4096 + 128)), division(wide), division(fmt, arch=80)]
    assert all(found.meet == AT_SUMS and found.memory.zeros == 0 for found in others)
    assert all(found.span == 1 and not found.shape.spread for found in others)


def test_scales_beside_codes_must_leave_room_for_x():
    """Else the weight would be read twice, and they meet sums."""
    fmt = cq.get_format("int5", block_size=16)
    for shape, meet in (((4096, 14336), AT_SUMS), ((4096, 4096), AT_OPERANDS)):
        found = division(fmt, 12, shape)
        assert found.meet == meet and found.shape.tokens == 12
