"""matmul_stream.cu on sm_90 against float64, on the CPU under the emulator.

What it does there alone: codes by rows and groups go through shared memory, and the copy engine
brings x.
"""

from typing import Any
from unittest import mock

import numpy as np
import pytest
from emulator import Emulator, Recorder, compiler
from fragment_products import TYPES, Case, Expected, run_case, with_scale
from oracle import bits_equal
from products import ULP, Products, normal, values
from programs import number
from samples import sampled, selected
from stream_products import (
    LARGE,
    ROW_GROUPS,
    check_columns,
    check_large_scales,
    divided,
    gated,
    swiglu_bound,
)

import cuquant as cq
from cuquant.ops.matmul import hopper

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to compile kernels with")

# Codes that go through shared memory: fewer units than a chunk has, chunks and
# strips that end early; divided also warps without units, and more strips than a block's warps.
HOPPER = 90
RING = [
    Case(name, TYPES[i % 2], rows, shape, options=options)
    for i, (name, options) in enumerate(
        [
            ("mxfp4", ()),
            ("nvfp4", ()),
            *((name, (("block_size", n),)) for name in ("int4", "nf4", "uint4") for n in (16, 32)),
        ]
    )
    for rows, shape in ((1, (35, 64)), (3, (17, 320)), (9, (70, 1088)))
]
RING += [
    Case(name, TYPES[i % 2], rows, shape, options=options)
    for i, (name, options) in enumerate(
        [
            ("fp4", ()),
            ("nf4", (("double_quant", True),)),
            *(
                (name, (("block_size", block),))
                for name, block in (
                    ("int4", 64),
                    ("uint4", 64),
                    ("int3", 128),
                    ("uint3", 64),
                    ("uint3", 128),
                    ("k3", 64),
                    ("int5", 128),
                    ("uint5", "row"),
                    ("k6", 64),
                    ("int7", 128),
                    ("int1", 128),
                    ("int2", 128),
                    ("uint2", 256),
                    ("int3", 32),
                    ("uint5", 16),
                    ("k6", 32),
                    ("uint5", 128),
                    ("int5", 256),
                )
            ),
        ]
    )
    for rows, shape in ((1, (35, 128)), (3, (17, 384)), (9, (70, 1152)))
]
RING_DIVIDED = [(RING[i], (RING[i].rows, 2, 2, 3, 2, 2)) for i in (5, 20, 23, -7, -2)]
# Strips of a block are not alike, and a row may begin with any column of the result.
UNEVEN = [
    Case(name, TYPES[i % 2], (1, 8)[i % 2], (70, 512), options=(("block_size", 128),))
    for i, name in enumerate(("int3", "uint3", "int5", "uint5"))
]
UNEVEN.append(Case("uint2", "float16", 2, (70, 512), options=(("block_size", 128),)))
FEW_PROCESSORS = (3, 4, 5)  # multiprocessors
RING_GATED = [(9, "nvfp4", {}), (5, "int5", {"block_size": 16})]
# Several groups in a unit: warps that share K, several strips a warp on few multiprocessors, and
# rows of codes that begin anywhere.
GROUPS = [
    (Case(name, TYPES[(i + rows) % 2], rows, shape, options=(("block_size", block),)), processors)
    for i, (name, block) in enumerate(ROW_GROUPS)
    for rows, shape, processors in ((1, (35, 768), 132), (8, (70, 1280), 3), (13, (35, 704), 132))
]
# The copy engine brings x, in parts: fewer units than parts, a last part that is cut short,
# units that K ends within, and warps that need one part, several, or none.
PARTS = [
    (Case(name, dtype, rows, (35, depth)), numbers)
    for name, dtype, depth in (
        ("int4", "float16", 72),
        ("nf4", "bfloat16", 1104),
        ("int3", "float16", 640),
        ("q4_k", "float16", 1280),
        ("nvfp4", "bfloat16", 1104),
        ("int8", "float16", 2240),
        ("int5", "bfloat16", 1280),
    )
    for rows, numbers in (
        (1, (1, 1, 1, 1, 1, 3)),
        (2, (2, 1, 2, 5, 1, 4)),
        (8, (8, 1, 1, 4, 2, 3)),
        (8, (5, 1, 3, 2, 1, 3)),
    )
]


def streamed() -> Any:
    """The tensor cores' kernel takes no few rows of x."""
    return mock.patch.object(hopper.Hopper, "takes", lambda *_: False)


@pytest.fixture(scope="module")
def built(request) -> None:
    """The programs of the tests that run, compiled together."""
    recorder = Recorder(arch=HOPPER)
    run = Products(recorder)
    for given in selected(request, "test_codes_that_go_through_shared_memory"):
        run(cq.linear, given["case"].x, given["case"].weight)
    for case, numbers in RING_DIVIDED:
        with divided(numbers):
            run(cq.linear, case.x, case.weight)
    for processors in FEW_PROCESSORS:
        recorder.multiprocessors = processors
        for case in UNEVEN:
            run(cq.linear, case.x, case.weight)
    for rows, name, options in RING_GATED:
        run(cq.swiglu, normal((rows, 256), "float16"), *gated(name, name, options))
    assert all(number(program, "ring") for program in recorder.programs)
    for given in selected(request, "test_several_groups_in_a_unit"):
        recorder.multiprocessors = given["processors"]
        run(cq.linear, given["case"].x, given["case"].weight)
    recorder.multiprocessors = 132
    for case in LARGE:
        run(cq.linear, case.x, case.weight)
    for given in selected(request, "test_x_that_the_copy_engine_brings_in_parts"):
        with streamed(), divided(given["numbers"]):
            run_case(run, given["case"])
    Emulator().build(recorder.programs)


@pytest.mark.parametrize(
    "case",
    sampled(RING, lambda case: case.weight.format.bits, "dtype", "options", "shape"),
    ids=str,
)
def test_codes_that_go_through_shared_memory(case, built):
    expected = Expected.of(case.x, case.weight)
    runs = []
    for order in ("ascending", "shuffled"):
        run = Products(Emulator(order=order, arch=HOPPER))
        runs.append(run(cq.linear, case.x, case.weight, out_dtype="float32"))
    assert expected.admits(runs[0], case.shape[1])
    assert bits_equal(*runs)


@pytest.mark.parametrize(("case", "numbers"), RING_DIVIDED, ids=str)
def test_codes_that_go_through_shared_memory_divided(case, numbers, built):
    run = Products(Emulator(arch=HOPPER))
    with divided(numbers):
        y = run(cq.linear, case.x, case.weight, out_dtype="float32")
    assert Expected.of(case.x, case.weight).admits(y, case.shape[1])


@pytest.mark.parametrize("case", UNEVEN, ids=str)
def test_blocks_have_one_strip_more_than_others(case, built):
    """5 strips on 3, 4 and 5 multiprocessors."""
    expected = Expected.of(case.x, case.weight)
    for processors in FEW_PROCESSORS:
        run = Products(Emulator(arch=HOPPER, multiprocessors=processors))
        y = run(cq.linear, case.x, case.weight, out_dtype="float32")
        assert expected.admits(y, case.shape[1])


@pytest.mark.parametrize(
    ("case", "numbers"), sampled(PARTS, "format", lambda _, numbers: numbers), ids=str
)
def test_x_that_the_copy_engine_brings_in_parts(case, numbers, built):
    expected = Expected.of(case.x, case.weight)
    runs = []
    for order in ("ascending", "shuffled"):
        run = Products(Emulator(order=order, arch=HOPPER))
        with streamed(), divided(numbers):
            runs.append(run_case(run, case, out_dtype="float32"))
    assert expected.admits(runs[0], case.shape[1])
    assert bits_equal(*runs)


@pytest.mark.parametrize(("rows", "name", "options"), RING_GATED, ids=str)
def test_swiglu_of_codes_that_go_through_shared_memory(rows, name, options, built):
    gate, up = gated(name, name, options)
    x = normal((rows, 256), "float16")
    true, bound = swiglu_bound(x, gate, up)
    y = Products(Emulator(arch=HOPPER))(cq.swiglu, x, gate, up)
    assert (np.abs(values(y) - true) <= bound + ULP["float16"] * np.abs(true) + 2.0**-25).all()


# ---- several groups in a unit -------------------------------------------------------------------


def linear(x: np.ndarray, q: cq.QuantArray) -> np.ndarray:
    return Products(Emulator(arch=HOPPER))(cq.linear, x, q, out_dtype="float32")


@pytest.mark.parametrize(
    ("case", "processors"),
    sampled(
        GROUPS,
        lambda case, _: case.weight.format.bits,
        lambda case, _: (case.format[0], case.options),
        lambda case, _: (case.dtype, case.shape),
    ),
    ids=str,
)
def test_several_groups_in_a_unit(case, processors, built):
    runs = []
    for order in ("ascending", "shuffled"):
        run = Products(Emulator(order=order, arch=HOPPER, multiprocessors=processors))
        runs.append(run(cq.linear, case.x, case.weight, out_dtype="float32"))
    assert Expected.of(case.x, case.weight).admits(runs[0], case.shape[1])
    assert bits_equal(*runs)


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_products_beyond_float16_are_not_lost(case, built):
    check_large_scales(linear, case)


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_one_column_of_x_gives_weights_as_they_are(case, built):
    check_columns(linear, case)


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_scales_that_are_not_finite_hurt_their_row_alone(case, built):
    q = case.weight
    scale = q.arrays()["scale"].copy()
    scale[4, 0], scale[11, -1], scale[19, 3] = np.nan, np.nan, np.inf
    y, clean = (linear(case.x, w) for w in (with_scale(q, scale), q))
    assert np.isnan(y[:, [4, 11]]).all() and not np.isfinite(y[:, 19]).any()
    others = np.delete(np.arange(len(scale)), (4, 11, 19))
    assert np.isfinite(y[:, others]).all() and bits_equal(y[:, others], clean[:, others])
