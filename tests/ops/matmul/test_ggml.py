"""matmul_blocks.cu, ggml's blocks as they lie, against float64: on the CPU under the emulator."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import pytest
from emulator import ORDERS, Emulator, Recorder, compiler
from fragment_products import TYPES, Case, Expected
from ggml_products import F32, GATED, LIES, NAMES, of_bytes, swiglu_bound, with_blocks
from kernel_arrays import LAYOUTS, WRITABLE
from oracle import DTYPES, bits_equal
from products import ULP, UNIT, Products, finished, normal, values, weight
from programs import number
from samples import each_number, sampled, selected

import cuquant as cq
from cuquant.formats.blocks import BLOCK_LAYOUTS
from cuquant.ops.matmul import ggml as blocks_product
from cuquant.ops.matmul.ggml import Shape, divide
from cuquant.reference import ACTIVATIONS

ARCH, BOX_ARCH = 80, 90  # the first one, and the first with boxes
pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to compile kernels with")

# One block is the shortest row. Rows of odd numbers of blocks are no whole vectors, or words.
BLOCKS = {32: (1, 5, 8, 9, 71), 64: (1, 4, 5, 9), 256: (1, 3, 8)}
ROWS = (1, 2, 8, 9, 16)
MATRIX = [
    Case(name, dtype, ROWS[(i + j) % 5], (n, blocks * BLOCK_LAYOUTS[name].elements))
    for name in NAMES
    for dtype in TYPES
    for i, blocks in enumerate(BLOCKS[BLOCK_LAYOUTS[name].elements])
    for j, n in enumerate((35, 16))
]
EVERY_ROW = [Case("q5_1", "bfloat16", rows, (19, 544)) for rows in range(1, 17)]
# Of x [13, K] and a weight of 70 rows: blocks that share K, strips, warps, groups of x at a time.
SHAPES = [(1, 5, 8, 6), (1, 5, 12, 6), (1, 2, 5, 6), (1, 1, 12, 6), (1, 3, 4, 2), (1, 5, 7, 1)]
SHAPES += [(2, 3, 4, 3), (2, 5, 12, 2), (2, 1, 4, 1)]
DIVIDED = [
    *((Case("q4_0", "float16", 13, (70, 1312)), shape) for shape in SHAPES),
    *((Case("q2_k", "bfloat16", 5, (70, 1536)), shape) for shape in (SHAPES[4], SHAPES[7])),
    (Case("q6_k", "float16", 13, (70, 1280)), SHAPES[6]),
    # More strips than a warp has lanes, shared by every number of warps that a block may have.
    *((Case("q4_0", "float16", 2, (650, 768)), (1, 41, n, 1 + n % 3)) for n in range(4, 17)),
    *((Case("iq4_nl", "float16", 13, (70, 1280)), (*SHAPES[6], wide)) for wide in (False, True)),
    *((Case("iq4_xs", "bfloat16", 5, (70, 1280)), (*SHAPES[6], wide)) for wide in (False, True)),
]


def even_depth(name: str) -> int:
    """The shortest K whose rows of blocks are whole vectors."""
    layout = BLOCK_LAYOUTS[name]
    return layout.elements * (16 // math.gcd(layout.nbytes, 16))


# Some end within a group of 256 columns, and within 16 rows.
BOXES = [
    Case(name, TYPES[(i + j) % 2], ROWS[(i + j) % 5], (n, times * even_depth(name)))
    for i, name in enumerate(NAMES)
    for j, (n, times) in enumerate([(35, 1), (16, 3), (33, 2)])
]
BOXES_DIVIDED = [
    *((Case("q4_0", "float16", 13, (70, 1280)), shape) for shape in SHAPES),
    *((Case("q6_k", "float16", 13, (70, 6144)), shape) for shape in (SHAPES[4], SHAPES[6])),
    (Case("q4_1", "bfloat16", 5, (70, 1408)), SHAPES[7]),
    (Case("iq4_xs", "bfloat16", 5, (70, 1536)), (*SHAPES[6], True)),
]


@contextmanager
def divided(numbers: tuple[int, ...]) -> Iterator[None]:
    """The rule gives these numbers, and boxes where it would."""

    def given(*arguments: Any) -> Shape:
        return replace(Shape(*numbers), boxes=arguments[-1])

    with mock.patch.object(blocks_product, "divide", given):
        yield


@contextmanager
def everywhere() -> Iterator[None]:
    """Boxes also where they do not pay."""
    with mock.patch.object(blocks_product, "MOST_BOX", 2):
        yield


def run_case(run: Products, case: Case, **options: Any) -> np.ndarray:
    return run(cq.linear, case.x, case.weight, **options)


def gated(name: str) -> tuple[cq.QuantArray, cq.QuantArray]:
    up = cq.quantize(normal((70, 512), seed=5), cq.get_format(name))
    return weight(name, (70, 512)), up


def run_misaligned(run: Products) -> tuple[np.ndarray, cq.QuantArray, np.ndarray]:
    """x, a weight whose rows start 36 bytes after those of its memory, and their product."""
    q, x = of_bytes("q4_0", 7, 64), normal((3, 64), "float16")
    q = with_blocks("q4_0", run.backend.array(q.arrays()["blocks"])[1:], 64)
    with run.in_place():
        return x, q, cq.linear(run.backend.array(x), q, out_dtype="float32")


@pytest.fixture(scope="module")
def built(request) -> None:
    """The programs of the tests that run, compiled together."""
    recorder, boxes = Recorder(arch=ARCH), Recorder(arch=BOX_ARCH)
    run = Products(recorder)
    for given in selected(request, "test_products"):
        run_case(run, given["case"])
    for test in ("test_any_bytes_and_numbers_of_any_size", "test_columns_have_their_places"):
        for given in selected(request, test):
            for rows in (4, 16):
                run_case(run, Case(given["name"], given["dtype"], rows, (17, 256)))
    for given in selected(request, "test_weights_of_0_give_0"):
        run_case(run, Case(given["name"], given["dtype"], 9, (17, 256)))
    for given in selected(request, "test_products_by_boxes"):
        with everywhere():
            run_case(Products(boxes), given["case"])
    for recorded, test in (
        (recorder, "test_every_way_to_divide"),
        (boxes, "test_boxes_give_the_same_bits_as_copies"),
    ):
        run = Products(recorded)
        for given in selected(request, test):
            with divided(given["numbers"]):
                run_case(run, given["case"])
        for name, dtype in GATED:
            for rows in (3, 12):
                run(cq.swiglu, normal((rows, 512), dtype), *gated(name))
            with divided((2, 3, 5, 1)):
                run(cq.swiglu, normal((3, 512), dtype), *gated(name))
    programs = [*recorder.programs, *boxes.programs]
    assert {program.file for program in programs} == {"matmul/ggml.cu"}
    assert not any(number(program, "boxes") for program in recorder.programs)
    assert all(number(program, "boxes") for program in boxes.programs)
    run = Products(recorder)
    for up in (weight("q4_1", (70, 512)), weight("nf4", (70, 512))):
        run(cq.swiglu, normal((3, 512), "float16"), gated("q4_0")[0], up)
    run_misaligned(run)
    Emulator().build([*recorder.programs, *boxes.programs])


@pytest.fixture
def run(built) -> Products:
    return Products(Emulator(arch=ARCH))


@pytest.fixture
def run_boxes(built) -> Products:
    return Products(Emulator(arch=BOX_ARCH))


# ---- linear -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    sampled(
        [*MATRIX, *EVERY_ROW, *LIES],
        lambda case: (case.format, case.dtype),
        "rows",
        "layout",
        lambda case: (BLOCK_LAYOUTS[case.format].elements, case.shape[1]),
        lambda case: case.shape[0],
    ),
    ids=str,
)
def test_products(case, run):
    expected, depth = Expected.of(case.x, case.weight), case.shape[1]
    y = run_case(run, case)
    assert y.dtype == case.x.dtype and expected.admits(y, depth)
    wide = run_case(run, case, out_dtype="float32")
    assert wide.dtype == F32 and expected.admits(wide, depth)
    assert bits_equal(wide, run_case(run, case, out_dtype="float32"))


@pytest.mark.parametrize(
    ("case", "numbers"),
    sampled(DIVIDED, "format", *each_number(5)),
    ids=lambda v: v if isinstance(v, tuple) else str(v),
)
def test_every_way_to_divide(case, numbers, run):
    with divided(numbers):
        y = run_case(run, case, out_dtype="float32")
    assert Expected.of(case.x, case.weight).admits(y, case.shape[1])


@pytest.mark.parametrize("case", sampled(BOXES, "format", "dtype", "rows"), ids=str)
def test_products_by_boxes(case, run_boxes):
    with everywhere():
        y = run_case(run_boxes, case, out_dtype="float32")
    assert Expected.of(case.x, case.weight).admits(y, case.shape[1])


@pytest.mark.parametrize(
    ("case", "numbers"), BOXES_DIVIDED, ids=lambda v: v if isinstance(v, tuple) else str(v)
)
def test_boxes_give_the_same_bits_as_copies(case, numbers, run_boxes):
    """For the same division: blocks of a cluster, chunks of K, more strips than rows."""
    with divided(numbers):
        y = run_case(run_boxes, case, out_dtype="float32")
        with mock.patch.object(blocks_product, "in_boxes", lambda *_: False):
            assert bits_equal(y, run_case(run_boxes, case, out_dtype="float32"))
    assert Expected.of(case.x, case.weight).admits(y, case.shape[1])


@pytest.mark.parametrize(
    ("name", "rows"), [("q4_0", 3), ("q3_k", 3), ("q6_k", 3), ("iq4_nl", 2), ("iq4_nl", 3)]
)
def test_a_short_product_is_spread(name, rows, built):
    """5 strips on 4 multiprocessors, of which one takes two; and on 3 and 5."""
    case = Case(name, "float16", rows, (70, 1280))
    for processors in (3, 4, 5):
        assert divide(name, rows, *case.shape, BOX_ARCH, processors).spread
        run = Products(Emulator(arch=BOX_ARCH, multiprocessors=processors))
        y = run_case(run, case, out_dtype="float32")
        assert Expected.of(case.x, case.weight).admits(y, case.shape[1])


def test_boxes_of_every_order_of_threads(built):
    case, numbers = BOXES_DIVIDED[6]
    runs = []
    for order in ORDERS:
        with divided(numbers):
            run = Products(Emulator(order=order, arch=BOX_ARCH))
            runs.append(run_case(run, case, out_dtype="float32"))
    assert all(bits_equal(run, runs[0]) for run in runs)


@pytest.mark.parametrize(
    ("name", "dtype"), sampled(product(NAMES, TYPES), lambda name, _: name, lambda _, dtype: dtype)
)
def test_any_bytes_and_numbers_of_any_size(name, dtype, run):
    """x from its smallest to its largest numbers, by column: none is lost, and none overflows."""
    q = of_bytes(name, 18, 512)
    x = normal((4, 512), "float32")
    x[1] *= 2.0**-20  # subnormal float16
    x[2] *= 2.0**13 / np.abs(x[2]).max()
    x[3, ::2] *= 2.0**-16
    x = x.astype(DTYPES[dtype])
    y = run(cq.linear, x, q, out_dtype="float32")
    assert Expected.of(x, q).admits(y, 512)


@pytest.mark.parametrize(
    ("name", "dtype"), sampled(product(NAMES, TYPES), lambda name, _: name, lambda _, dtype: dtype)
)
def test_columns_have_their_places(name, dtype, run):
    """With one 1 in each row of x the result is a column of weights, rounded twice at most."""
    q = of_bytes(name, 17, 256, seed=1)
    w = values(q)
    each = q.dequantize(dtype="float32")
    for first in range(0, 256, 16):
        x = np.eye(256, dtype=F32)[first : first + 16].astype(DTYPES[dtype])
        y = run(cq.linear, x, q, out_dtype="float32")
        if q.format.offset != "min":
            assert np.array_equal(y, each[:, first : first + 16].T)
        assert Expected.of(x, q).admits(y, 0), first
        assert np.abs(w).max() > 0


@pytest.mark.parametrize(
    ("name", "dtype"),
    sampled(
        product(["q4_0", "q5_0", "q8_0", "q3_k", "q6_k"], TYPES),
        lambda name, _: name,
        lambda _, dtype: dtype,
    ),
)
def test_weights_of_0_give_0(name, dtype, run):
    q = cq.quantize(np.zeros((17, 256), F32), cq.get_format(name))
    assert not run(cq.linear, normal((9, 256), dtype), q).any()


@pytest.mark.parametrize(
    ("name", "field"),
    [
        *(
            (name, "scale_byte")
            for name in ("q4_0", "q4_1", "q2_k", "q3_k", "q4_k", "q6_k", "q8_0")
        ),
        *((name, "minimum_byte") for name in ("q4_1", "q5_1", "q2_k", "q5_k")),
    ],
)
def test_a_number_that_is_nan_hurts_its_row_alone(name, field, run):
    q, x = of_bytes(name, 35, 768), normal((9, 768), "float16")
    clean = run(cq.linear, x, q, out_dtype="float32")
    blocks = q.arrays()["blocks"].copy()
    at = getattr(BLOCK_LAYOUTS[name], field)
    blocks[[4, 21], [0, -1], at + 1] = 0x7E
    y = run(cq.linear, x, with_blocks(name, blocks, 768), out_dtype="float32")
    others = np.delete(np.arange(35), [4, 21])
    assert np.isnan(y[:, [4, 21]]).all()
    assert np.isfinite(clean).all() and bits_equal(y[:, others], clean[:, others])


@pytest.mark.parametrize(
    ("name", "depth"),
    [("q4_0", 800), ("q4_1", 800), ("q2_k", 768), ("q3_k", 768), ("q4_k", 768)],
)
@pytest.mark.parametrize("rows", [3, 12])
def test_nan_and_infinity_of_x_stay_in_their_row(name, depth, rows, run):
    """K may end within a group of 256."""
    q, x = weight(name, (19, depth)), normal((rows, depth), "float16")
    x[0, 3], x[2, -1] = np.nan, np.inf
    y = run(cq.linear, x, q, out_dtype="float32")
    wanted = np.ones(y.shape, bool)
    wanted[[0, 2]] = np.isfinite(cq.linear(x, q, out_dtype="float32"))[[0, 2]]
    assert np.array_equal(np.isfinite(y), wanted) and not wanted[[0, 2]].any()


def test_the_same_bits_in_every_order_of_threads(built):
    case, numbers = DIVIDED[7]
    runs = []
    for order in ORDERS:
        with divided(numbers):
            run = Products(Emulator(order=order, arch=ARCH))
            runs.append(run_case(run, case, out_dtype="float32"))
    assert all(bits_equal(run, runs[0]) for run in runs)


def test_rows_that_do_not_start_on_16_bytes_go_to_the_plain_kernel(run):
    x, q, y = run_misaligned(run)
    assert Expected.of(x, q).admits(y, 64)


# ---- what happens to the sums -------------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("rows", [3, 12])
def test_epilogues(run, activation, rows):
    """Each function is within a few ulp of NumPy's, on the same sums; then one rounding."""
    q, x = weight("q4_0", (35, 512)), normal((rows, 512), "float16")
    sums = run(cq.linear, x, q, out_dtype="float32")
    names = list(DTYPES)
    for i, (with_bias, with_residual) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        bias = normal((35,), names[i % 3]) if with_bias else None
        residual = normal((rows, 70), names[(i + 1) % 3])[:, ::2] if with_residual else None
        wanted = finished(sums, bias, activation, residual)
        off = 8 * UNIT * np.maximum(np.abs(finished(sums, bias)), 1)
        for dtype in names:
            y = run(
                cq.linear, x, q, bias, activation=activation, residual=residual, out_dtype=dtype
            )
            assert y.dtype == DTYPES[dtype]
            bound = off + ULP[dtype] * (np.abs(wanted) + off) + UNIT
            assert (np.abs(values(y) - wanted) <= bound).all()


@pytest.mark.parametrize("layout", ["whole", *WRITABLE])
def test_out_lies_anywhere(run, layout):
    """What lies between and beside its elements is left alone. N is no multiple of 4."""
    case, where = Case("q4_0", "float16", 3, (35, 512)), LAYOUTS[layout]
    for dtype in DTYPES.values():
        base = run.backend.empty(where.base((3, 35)), dtype)
        base[...] = 7
        out = where.view(base, (3, 35))
        assert run_case(run, case, out=out) is out
        assert Expected.of(case.x, case.weight).admits(np.array(out), 512)
        out[...] = 7
        assert (base == 7).all()


# ---- gated units --------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [ARCH, BOX_ARCH])
@pytest.mark.parametrize("numbers", [None, (2, 3, 5, 1)], ids=str)
@pytest.mark.parametrize("rows", [3, 12])
@pytest.mark.parametrize(("name", "dtype"), GATED)
def test_swiglu(name, dtype, rows, numbers, arch, built):
    run = Products(Emulator(arch=arch))
    gate, up = gated(name)
    x = normal((rows if numbers is None else 3, 512), dtype)
    if numbers is None:
        y = run(cq.swiglu, x, gate, up)
    else:
        with divided(numbers):
            y = run(cq.swiglu, x, gate, up)
    true, bound = swiglu_bound(x, gate, up, 512 + 24)
    assert (np.abs(values(y) - true) <= bound).all()


@pytest.mark.parametrize("other", ["q4_1", "nf4"])
def test_swiglu_of_two_formats_goes_to_the_plain_kernel(other, run):
    gate, up = gated("q4_0")[0], weight(other, (70, 512))
    x = normal((3, 512), "float16")
    wanted = cq.swiglu(x, gate, up)
    assert np.allclose(values(run(cq.swiglu, x, gate, up)), wanted, rtol=2e-3, atol=2e-3)
