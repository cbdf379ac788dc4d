"""matmul_hopper.cu against float64, on the CPU under the emulator."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import count, product
from typing import Any
from unittest import mock

import numpy as np
import pytest
from emulator import Emulator, Recorder, compiler
from fragment_products import (
    AXES,
    BLOCKS,
    OPTIONS,
    SMALLEST,
    STORED,
    TYPES,
    Case,
    Expected,
    check_epilogues,
    check_nan_scales,
    check_nonfinite_x,
    check_out,
    operand,
    run_case,
    unit_of,
)
from kernel_arrays import LAYOUTS, WRITABLE
from oracle import bits_equal
from prepack_cases import LAID
from products import TINY, ULP, UNIT, Products, normal, values, weight
from samples import each_number, sampled, selected

import cuquant as cq
from cuquant.ops.matmul import hopper, stream
from cuquant.ops.matmul import hopper_tiles as tiles
from cuquant.ops.matmul.hopper_tiles import Shape
from cuquant.reference import ACTIVATIONS

F32 = np.float32
ARCH = 90
pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to compile kernels with")


def _many(case: Case, rows: int) -> Case:
    """With rows of x that the copy engine takes: of whole vectors."""
    shape = (case.shape[0], case.shape[1] // 8 * 8)
    return Case(case.format, case.dtype, rows, shape, "whole", case.options)


# One program for each format; the other shapes of tiles meet few of them.
EACH = [Case(name, TYPES[i % 2], 19, (70, 256)) for i, name in enumerate(LAID)]
CASES = [
    *EACH,
    *(_many(case, 17) for case in (*BLOCKS, *OPTIONS, *STORED)),
    *(Case("nf4", "float16", 20, shape) for shape in ((1, 8), (64, 64), (65, 136), (130, 328))),
    *(Case("int4", "bfloat16", rows, (70, 264)) for rows in (17, 32, 33, 65, 128, 129, 260)),
    Case("q4_k", "float16", 130, (70, 256)),
    *(Case(name, "bfloat16", 20, (70, 32)) for name in ("q4_0", "q5_1", "q8_0")),  # one block
    Case("nf4", "float16", 18, (70, 256), "rows"),
]

# Of x [rows, K] and a weight [150, K]: tokens, row_groups, depth_groups, stages, span, buffers,
# slices; kind, wide, shared_x, streamed, once, split.
SHAPES = [
    (32, 1, 3, 6, 2, 2, 4),
    (32, 1, 2, 4, 4, 1, 4),
    (64, 2, 1, 2, 1, 2, 4),
    (64, 2, 2, 6, 2, 2, 4),
    (128, 2, 1, 3, 1, 1, 4),
    (256, 2, 1, 2, 1, 2, 4),
    (16, 1, 3, 6, 2, 2, 4),
    (128, 3, 1, 6, 1, 1, 4),
    (32, 3, 1, 5, 1, 2, 4),
    (64, 1, 3, 6, 2, 2, 2),
    (16, 1, 3, 6, 2, 2, 1),
    (32, 1, 3, 6, 2, 2, 2),
    (256, 2, 1, 4, 1, 2, 1),
    (192, 2, 1, 3, 1, 2, 4),
    (160, 1, 2, 4, 1, 2, 2),
    (96, 2, 1, 3, 1, 2, 4),
    (96, 3, 1, 3, 1, 2, 1),
    # A large table of levels.
    (32, 1, 3, 6, 2, 2, 4, tiles.ONE, True),
    (256, 2, 1, 2, 1, 2, 4, tiles.ONE, True),
    # Blocks of one tile, whose sums take the place of x.
    (16, 2, 2, 4, 2, 2, 2, tiles.ONE, False, False, False, True),
    (128, 1, 2, 4, 2, 2, 2, tiles.ONE, False, False, False, True),
    (96, 1, 2, 4, 1, 2, 1, tiles.ONE, False, False, False, True),
    # Two blocks with the same rows of x.
    (256, 2, 1, 2, 1, 2, 4, tiles.ONE, False, True),
    (32, 2, 1, 3, 1, 2, 4, tiles.ONE, False, True),
]
# Blocks that share the units of the last tiles.
STREAMED = [
    (*numbers, tiles.ONE, False, False, True)
    for numbers in (
        (16, 1, 3, 6, 2, 2, 2),
        (32, 1, 3, 6, 2, 2, 4),
        (32, 3, 1, 5, 1, 2, 4),
        (64, 2, 2, 4, 1, 1, 4),
        (64, 1, 3, 6, 2, 1, 4),
        (64, 2, 1, 4, 2, 2, 4),
        (96, 3, 1, 3, 1, 2, 1),
        (128, 1, 2, 4, 1, 2, 2),
        (128, 3, 1, 3, 1, 2, 1),
        (160, 2, 1, 3, 1, 2, 2),
        (192, 1, 2, 4, 1, 2, 4),
        (256, 2, 1, 3, 1, 2, 4),
    )
]
# Two blocks that share K of a tile.
PAIR = (False, False, False, True, 2)
SPLIT = [
    (*numbers, tiles.ONE, *PAIR)
    for numbers in (
        (16, 1, 3, 6, 2, 2, 2),
        (16, 2, 1, 3, 1, 1, 4),
        (32, 1, 2, 4, 4, 1, 4),
        (32, 1, 3, 6, 2, 2, 4),
        (64, 2, 2, 4, 2, 1, 4),
        (96, 1, 2, 6, 2, 2, 1),
        (96, 3, 1, 5, 1, 2, 4),
        (128, 3, 1, 6, 1, 1, 4),
        (128, 1, 3, 6, 1, 2, 1),
        (160, 2, 1, 4, 1, 2, 4),
        (160, 1, 2, 4, 1, 2, 2),
        (192, 1, 2, 4, 1, 2, 4),
        (256, 2, 1, 3, 1, 2, 4),
    )
]
BOTH = (64, 2, 1, 4, 1, 2, 4, tiles.ONE, False, True, True)
DIVIDED = [
    *((Case("nf4", "float16", 70, (150, 1160)), shape) for shape in (*SHAPES, *STREAMED, *SPLIT)),
    *(
        (Case(name, "bfloat16", 40, (150, 1280), options=options), shape)
        for name, options in (("q4_k", ()), ("uint3", (("block_size", 16),)), ("int8", ()))
        for shape in (SHAPES[1], SHAPES[2], STREAMED[1], STREAMED[5], SPLIT[3])
    ),
    *(
        (Case("uint4", "float16", 40, (150, 1280), options=options), shape)
        for options in ((("offset", "min"),), (("offset", "min"), ("block_size", 16)))
        for shape in (SHAPES[1], STREAMED[5])
    ),
]
# Format, rows of x, [N, K], sizes of the gate's and the other's numbers, and a shape or ().
GATED = [
    *((name, 20, (70, 256), (1, 1), ()) for name in ("nf4", "q4_k", "int4", "uint4", "nvfp4")),
    ("q3_k", 300, (70, 256), (1, 1), ()),
    ("nf4", 70, (150, 1160), (1, 1), (32, 2, 1, 4, 4, 2, 4, tiles.GATED, False, False, True)),
    ("nf4", 70, (150, 1160), (1, 1), (32, 2, 1, 4, 4, 2, 4, tiles.GATED, *PAIR)),
    ("nf4", 71, (150, 1160), (1, 1), (64, 2, 2, 6, 1, 1, 4, tiles.GATED, *PAIR)),
    ("nf4", 71, (150, 1160), (1, 1), (64, 2, 1, 4, 2, 1, 4, tiles.GATED)),
    ("nf4", 71, (150, 1160), (1, 1), (64, 2, 2, 4, 1, 1, 4, tiles.GATED, False, False, True)),
    ("int4", 140, (150, 648), (1, 1), (128, 2, 1, 2, 2, 1, 4, tiles.GATED)),
    ("int4", 140, (150, 648), (1, 1), (128, 2, 1, 3, 1, 2, 4, tiles.GATED, False, False, True)),
    ("int4", 170, (150, 648), (1, 1), (160, 2, 1, 3, 1, 2, 4, tiles.GATED)),
    ("int4", 270, (150, 648), (1, 1), (256, 2, 1, 2, 1, 2, 4, tiles.GATED)),
    ("int4", 22, (70, 256), (1e-4, 2e4), ()),  # one is in float16's range, and one is not
    ("nf4", 22, (70, 256), (1e-3, 1e3), ()),
]
# Integers whose scales have no place in bfloat16, or have one in float16.
ROUNDED = [(name, dtype) for name in ("int3", "int4", "int5") for dtype in TYPES]
# Scales that are wider than float16, or times codes beyond it; weights have minimums or none.
UNEVEN = ["fp8_e5m2", "fp8_e4m3", "mxfp8_e5m2", "int8", "nf4", "bof4s", "q8_0", "q4_k", "q6_k"]
# Weights of about this size, whose scales their format holds.
SIZES = [
    *(("nf4", size) for size in (1e-30, 1e-6, 1.0, 1e5, 1e30)),
    *((name, 1e5) for name in ("int4", "uint4", "fp6_e3m2", "q4_0", "q4_k", "iq4_nl")),
    *((name, 1e-6) for name in ("int4", "k4", "fp6_e3m2")),
    *((name, 1e-5) for name in ("q4_0", "iq4_nl")),
]


def expected(case: Case) -> Expected:
    return expect(case.x, case.weight)


def expect(x: np.ndarray, q: cq.QuantArray) -> Expected:
    return Expected.of(x, q, unit_of(x, q))


def divided(numbers: tuple[int, ...]) -> Any:
    """The rule names this shape."""
    return mock.patch.object(tiles, "divide", lambda *_: Shape(*numbers))


@cache
def sized(name: str, size: float) -> cq.QuantArray:
    return cq.quantize(normal((70, 256)) * F32(size), name)


@pytest.fixture(scope="module")
def built(request) -> None:
    """The programs of the tests that run, compiled together."""
    recorder = Recorder(arch=ARCH)
    run = Products(recorder)
    for given in selected(request, "test_the_matrix"):
        run_case(run, given["case"])
    for given in selected(request, "test_every_way_to_divide"):
        with divided(given["numbers"]):
            run_case(run, given["case"])
    for given in selected(request, "test_results_that_the_copy_engine_stores"):
        with divided(stored(given["tokens"])):
            run_case(run, given["case"])
            run_case(run, given["case"], out_dtype="float32")
    for given in selected(request, "test_blocks_share_tiles_of_each_format"):
        with divided(STREAMED[2]):
            run_case(run, given["case"])
    for given in selected(request, "test_blocks_that_share_tiles"):
        with divided(given["numbers"]):
            run_case(run, of_several(given["columns"], given["depth"]))
    for given in selected(request, "test_blocks_of_a_cluster_that_share_a_tile"):
        with divided(given["numbers"]):
            run_case(run, of_several(152, given["depth"]))
    for given in selected(request, "test_swiglu"):
        name, rows, shape, sizes, numbers = given["gated"]
        with divided(numbers) if numbers else nullcontext():
            packed = map(cq.prepack, pair(name, shape, sizes))
            run(cq.swiglu, normal((rows, shape[1]), TYPES[rows % 2]), *packed)
    for given in selected(request, "test_weights_of_any_size"):
        run(cq.linear, normal((19, 256), "float16"), cq.prepack(sized(**given)))
    for given in selected(request, "test_an_integer_that_meets_its_scale_is_rounded_once"):
        with divided(SHAPES[2]):
            x = normal((40, 256), given["dtype"])
            run(cq.linear, x, cq.prepack(weight(given["name"], (70, 256))))
    one = "test_a_weight_that_meets_its_scale_is_off_by_little_more_than_one_rounding"
    for given in selected(request, one):
        with divided(SHAPES[2]):
            x = normal((40, 256), given["dtype"])
            run(cq.linear, x, cq.prepack(uneven(given["name"], 1.0)))
    for given in selected(request, "test_a_scale_that_is_nan_hurts_its_row_alone"):
        q, x = with_few(given["name"])
        run(cq.linear, x, cq.prepack(q))
    for given in selected(request, "test_bfloat16_needs_no_power_of_two"):
        run(cq.linear, normal((19, 256), "bfloat16"), cq.prepack(sized(**given)))
    assert {program.file for program in recorder.programs} <= {"matmul/hopper.cu"}
    Emulator().build(recorder.programs)


@pytest.fixture
def run(built) -> Products:
    return Products(Emulator(arch=ARCH))


# ---- linear -------------------------------------------------------------------------------------


def test_all_cases_are_multiplied_by_this_kernel():
    """Each of them by it alone: also those that only `-m full` runs."""
    for case in CASES:
        recorder = Recorder(arch=ARCH)
        run_case(Products(recorder), case)
        assert {program.file for program in recorder.programs} == {"matmul/hopper.cu"}, case


@pytest.mark.parametrize("case", [*EACH, *sampled(CASES[len(EACH) :], "rows", *AXES[1:])], ids=str)
def test_the_matrix(case, run):
    x, wanted = case.x, expected(case)
    y = run_case(run, case)
    assert y.dtype == x.dtype and y.shape == wanted.sums.shape
    assert wanted.admits(y, case.shape[1])
    wide = run_case(run, case, out_dtype="float32")
    assert wide.dtype == F32 and wanted.admits(wide, case.shape[1])


@pytest.mark.parametrize(
    ("case", "numbers"),
    sampled(DIVIDED, "format", *each_number(13)),
    ids=lambda v: v if isinstance(v, tuple) else str(v),
)
def test_every_way_to_divide(case, numbers, run):
    """Fewer stages than steps, so that they are used again; blocks that have several tiles."""
    with divided(numbers):
        y = run_case(run, case, out_dtype="float32")
    assert expected(case).admits(y, case.shape[1])


@pytest.mark.parametrize("multiprocessors", [4, 10])
def test_blocks_that_share_x_and_tiles(multiprocessors, built):
    """Of 6 pairs of tiles two clusters take one each, which is whole, and both share the others;
    or five clusters share them all."""
    case = Case("nf4", "float16", 190, (450, 1160))
    with divided(BOTH):
        emulator = Emulator(multiprocessors=multiprocessors, arch=ARCH)
        y = run_case(Products(emulator), case, out_dtype="float32")
    assert expected(case).admits(y, case.shape[1])


# Tokens, case, rows of the weight in a tile, of x in a box, and of y in one that is stored.
STORED = [
    (256, Case("int4", "float16", 300, (200, 320)), 128, 160, 16),
    (256, Case("nf4", "bfloat16", 257, (136, 320)), 128, 144, 16),
    (256, Case("nf4", "float16", 139, (136, 320)), 128, 139, 64),
    (192, Case("nf4", "float16", 400, (136, 320)), 128, 144, 16),
    (192, Case("int4", "float16", 384, (200, 320)), 128, 192, 32),
    (160, Case("int4", "bfloat16", 300, (200, 320)), 128, 160, 40),
    (160, Case("nf4", "float16", 280, (136, 320)), 128, 144, 8),
    (256, Case("int4", "bfloat16", 219, (200, 320)), 128, 219, 64),
    (160, Case("int4", "float16", 131, (136, 320)), 128, 131, 40),
    # A box has rows of another tile, and follows one that has none.
    (256, Case("int4", "bfloat16", 300, (224, 320)), 112, 160, 16),
    (256, Case("int4", "float16", 1030, (224, 64)), 112, 208, 16),
]


def stored(tokens: int) -> tuple[int, ...]:
    return (tokens, 2, 1, 3, 1, 2, 4)


@pytest.mark.parametrize(
    ("tokens", "case", "tile_rows", "box", "sent_at_once"),
    sampled(STORED, lambda tokens, *_: tokens, lambda *given: given[2]),
    ids=str,
)
def test_results_that_the_copy_engine_stores(tokens, case, tile_rows, box, sent_at_once, built):
    """Tiles end within the rows of x and of the weight; what is beside the output stays."""
    rows, columns = case.rows, case.shape[0]
    bias = normal((columns,), "float32")
    rule = mock.patch.object(hopper, "rows_of_tile", lambda *_: tile_rows)
    shape = divided(stored(tokens))
    with shape, rule:  # by threads, which round once too
        wide = run_case(Products(Emulator(arch=ARCH)), case, out_dtype="float32", bias=bias)
    for begin, sent in ((8, True), (3, False)):
        around = np.full((rows + 1, 256), 7, dtype=case.x.dtype)
        out = around[:rows, begin : begin + columns]
        emulator = Emulator(arch=ARCH)
        spy = mock.patch.object(emulator, "tensor_map", side_effect=emulator.tensor_map)
        with shape, rule, spy as made:
            run_case(Products(emulator), case, out=out, bias=bias)
        boxes = {call.args[4] for call in made.call_args_list}  # rows of x, and of y
        assert boxes == {box, *((sent_at_once,) if sent else ())}
        assert bits_equal(out, wide.astype(out.dtype))
        around[:rows, begin : begin + columns] = 7
        assert (values(around) == 7).all()


# Multiprocessors, and N and K of the weight: tiles that one block has, and that up to seven share;
# several in turn, and whole ones before; K of one unit, and more blocks than units; parts that end
# just behind the beginning of a tile.
SHARES = [
    (2, 150, 1160),
    (3, 300, 1160),
    (4, 700, 648),
    (7, 60, 1160),
    (5, 830, 64),
    (6, 60, 8),
    (9, 64, 256),
    (8, 190, 1992),
    (3, 1500, 136),
]
SHARED = [
    (numbers, *share)
    for i, numbers in enumerate(STREAMED)
    for j, share in enumerate(SHARES)
    if numbers[0] <= 64 or (i + j) % 3 == 0
]

PAIRS = [(numbers, depth) for numbers in SPLIT for depth in (72, 136, 1160)]


def bits_of(case: Case) -> tuple[int, bool]:
    return cq.get_format(case.format).bits, cq.get_format(case.format).is_blocks


def of_several(columns: int, depth: int) -> Case:
    return Case("nf4", "float16", 70, (columns, depth))


class Seen(Emulator):
    """It keeps the workspaces that kernels had, which begin with whatever memory holds."""

    def __init__(self, **options: Any) -> None:
        super().__init__(arch=ARCH, **options)
        self.seen: list[np.ndarray] = []

    @contextmanager
    def workspace(self, nbytes: int) -> Iterator[int]:
        array = self.empty((nbytes,), np.dtype(np.uint8))
        array[...] = np.random.default_rng(len(self.seen)).integers(0, 256, nbytes, np.uint8)
        self.seen.append(array)
        yield array.ctypes.data


def flags(memory: np.ndarray, shape: Shape) -> np.ndarray:
    """Those that the warps of each block raise for another one."""
    blocks = memory.reshape(-1, shape.handed_bytes)[:, : tiles.FLAG_BYTES]
    return blocks.copy().view(np.uint64)[:, : 4 * shape.row_groups * shape.depth_groups]


@pytest.mark.parametrize(
    ("numbers", "multiprocessors", "columns", "depth"),
    sampled(SHARED, lambda numbers, *_: numbers[:3], lambda _, *share: share),
    ids=str,
)
def test_blocks_that_share_tiles(numbers, multiprocessors, columns, depth, built):
    """Their sums meet in memory that nobody has cleared, and leave no ticket in it."""
    case, shape = of_several(columns, depth), Shape(*numbers)
    emulator = Seen(multiprocessors=multiprocessors)
    ticket = next(hopper.TICKETS)
    with divided(numbers):
        y = run_case(Products(emulator), case, out_dtype="float32")
    assert expected(case).admits(y, depth)
    (memory,) = emulator.seen
    assert not (flags(memory, shape) == ticket + 1).any()


@pytest.mark.parametrize(
    ("numbers", "depth"),
    sampled(PAIRS, lambda numbers, _: numbers[:3], lambda _, depth: depth),
    ids=str,
)
def test_blocks_of_a_cluster_that_share_a_tile(numbers, depth, built):
    """K of two units, and of three: less than a stage of each; x ends within the first half."""
    for rows in (70, 18):
        case = replace(of_several(152, depth), rows=rows)
        with divided(numbers):
            y = run_case(Products(Emulator(arch=ARCH)), case, out_dtype="float32")
            narrow = run_case(Products(Emulator(arch=ARCH)), case)
        wanted = expected(case)
        assert wanted.admits(y, depth) and wanted.admits(narrow, depth)


@pytest.mark.parametrize("case", sampled(EACH, bits_of), ids=str)
def test_blocks_share_tiles_of_each_format(case, run):
    """Two blocks have two units each, and each finds what brings its own into float16's range."""
    emulator = Seen(multiprocessors=3)
    with divided(STREAMED[2]):
        y = run_case(Products(emulator), case, out_dtype="float32")
    assert len(emulator.seen) == 1 and expected(case).admits(y, case.shape[1])


def test_who_gives_sums_and_who_takes_them(built):
    """Each block gives the sums of the tile that it has the first units of, once."""
    numbers = STREAMED[5]
    case, shape = of_several(300, 1160), Shape(*numbers)
    emulator = Seen(multiprocessors=7)
    with mock.patch.object(hopper, "TICKETS", count(1 << 40)), divided(numbers):
        run_case(Products(emulator), replace(case, rows=20))
    # 3 tiles of 10 portions: blocks' parts begin with portions 0, 5, 10, 14, 18, 22 and 26.
    cleared = (flags(emulator.seen[0], shape) == 0).all(1)
    assert cleared.tolist() == [True, False, True, True, True, True, False]


@pytest.mark.parametrize(
    ("case", "numbers"),
    [*sampled(DIVIDED[2:4]), *sampled((of_several(150, 1160), n) for n in (*STREAMED, *SPLIT))],
    ids=str,
)
def test_the_same_bits_in_every_order_of_threads(case, numbers, built):
    runs = []
    for order in ("ascending", "descending", "shuffled"):
        with divided(numbers):
            emulator = Emulator(order=order, arch=ARCH)
            runs.append(run_case(Products(emulator), case, out_dtype="float32"))
    assert all(bits_equal(run, runs[0]) for run in runs)


@pytest.mark.parametrize(("name", "dtype"), ROUNDED)
def test_an_integer_that_meets_its_scale_is_rounded_once(name, dtype, run):
    """A row of x that is 1 in one column has that column's weights for results."""
    q, x = weight(name, (70, 256)), np.zeros_like(normal((40, 256), dtype))
    columns = 97 * np.arange(40) % 256
    x[np.arange(40), columns] = 1
    with divided(SHAPES[2]):
        y = run(cq.linear, x, cq.prepack(q), out_dtype="float32")
    assert bits_equal(y, q.dequantize().astype(x.dtype).T[columns].astype(F32))


@cache
def uneven(name: str, size: float) -> cq.QuantArray:
    """Rows whose largest weights are up to 2^10 apart."""
    sizes = F32(size) * F32(2.0) ** -(np.arange(70, dtype=F32) % 11)
    return cq.quantize(normal((70, 256)) * sizes[:, None], name)


@pytest.mark.parametrize(
    ("name", "size", "dtype"),
    sampled(product(UNEVEN, [1.0, 0.02], TYPES), lambda name, *_: name, lambda *c: c[1:]),
)
def test_a_weight_that_meets_its_scale_is_off_by_little_more_than_one_rounding(
    name, size, dtype, run
):
    """However small its scale is: sums hide what this sees, column by column."""
    q, x = uneven(name, size), np.zeros_like(normal((40, 256), dtype))
    columns = 97 * np.arange(40) % 256
    x[np.arange(40), columns] = 1
    with divided(SHAPES[2]):
        y = run(cq.linear, x, cq.prepack(q), out_dtype="float32")
    w, sizes = (part[:, columns].T for part in operand(q, dtype))
    bound = 1.01 * ULP[dtype] * np.abs(w) + 8 * UNIT * sizes + SMALLEST[dtype] / unit_of(x, q)
    assert (np.abs(y - w) <= bound).all()


def with_few(name: str) -> tuple[cq.QuantArray, np.ndarray]:
    """A weight whose last group is a part of one, and x."""
    kind = LAID.index(cq.get_format(name).name) % 2
    return weight(name, (70, 136)), normal((19, 136), TYPES[kind])


@pytest.mark.parametrize(
    "name", ["nf4", "uint4", "int8", "mxfp4", "fp8_e4m3", "k3", "uint4:64+min", "int4+bfloat16"]
)
def test_a_scale_that_is_nan_hurts_its_row_alone(name, run):
    """Also that of the last group, which the columns behind K share."""
    q, x = with_few(name)
    check_nan_scales(run, q, x, 61)


def test_nan_and_infinity_of_x_go_through(run):
    check_nonfinite_x(run, weight("nf4", (70, 136)), normal((19, 136), "float16"))


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_weights_of_any_size(name, size, run):
    """float16 does not hold them, but with a power of two."""
    q = sized(name, size)
    x = normal((19, 256), "float16")
    y = run(cq.linear, x, cq.prepack(q), out_dtype="float32")
    assert np.isfinite(y).all() and expect(x, q).admits(y, 256)
    largest = np.abs(values(q)).max()
    assert largest > 65504 if size > 1e4 else largest < 1e-3 or size == 1.0
    assert np.abs(y).max() > largest / 4


@pytest.mark.parametrize(("name", "size"), [("int4", 1e5), ("fp6_e3m2", 1e-6), ("nf4", 1e30)])
def test_bfloat16_needs_no_power_of_two(name, size, run):
    q, x = sized(name, size), normal((19, 256), "bfloat16")
    y = run(cq.linear, x, cq.prepack(q), out_dtype="float32")
    assert Expected.of(x, q, 1.0).admits(y, 256)


def test_one_row_that_shared_memory_does_not_hold(run):
    """Whatever its stride is."""
    q = weight("int4", (70, 264))
    x = run.backend.array(normal((1, 264), "bfloat16"))
    x = np.lib.stride_tricks.as_strided(x, x.shape, (0, 2))
    with mock.patch.object(stream, "divide", lambda *_: None):
        y = run(cq.linear, x, cq.prepack(q), out_dtype="float32")
    assert expect(x, q).admits(y, 264)


# ---- what happens to the sums -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "activation"),
    sampled(product([70, 72], [None, *ACTIVATIONS]), lambda c, _: c, lambda _, a: a),
)
def test_epilogues(run, activation, columns):
    """Results of 16 bits without activation and residual go a way of their own where N does."""
    check_epilogues(run, weight("int4", (columns, 264)), normal((129, 264), "bfloat16"), activation)


@pytest.mark.parametrize(
    ("case", "layout"),
    sampled(
        product([CASES[0], Case("int4", "bfloat16", 129, (72, 264))], ["whole", *WRITABLE]),
        "format",
        lambda _, layout: layout,
    ),
    ids=str,
)
def test_out_lies_anywhere(run, layout, case):
    check_out(run, case, layout, expected(case))


# ---- gated units --------------------------------------------------------------------------------


def pair(name: str, shape: tuple[int, int], sizes: tuple[float, float]) -> list[cq.QuantArray]:
    """Gate and up, of numbers of about these sizes."""
    return [cq.quantize(normal(shape, seed=i + 3) * F32(sizes[i]), name) for i in range(2)]


def check_swiglu(run: Products, x: np.ndarray, gate: cq.QuantArray, up: cq.QuantArray) -> None:
    """|silu'| < 1.1 and |silu(a)| <= |a|."""
    y = run(cq.swiglu, x, cq.prepack(gate), cq.prepack(up))
    a, b = expect(x, gate), expect(x, up)
    with np.errstate(over="ignore"):
        true = a.sums / (1 + np.exp(-a.sums)) * b.sums
    roundings = UNIT * (x.shape[1] + 24)
    first, second = (side.off + roundings * (side.size + side.off) for side in (a, b))
    bound = 1.1 * first * (np.abs(b.sums) + second) + np.abs(a.sums) * second
    name = np.dtype(x.dtype).name
    bound += (8 * UNIT + ULP[name]) * (np.abs(true) + bound) + TINY[name]
    assert y.dtype == x.dtype and np.isfinite(values(y)).all()
    assert (np.abs(values(y) - true) <= bound).all()


def tokens_of(gated: tuple) -> int:
    """Whether a shape is given, and one of few rows of x or of many."""
    return (gated[4][0] > 64) + 1 if gated[4] else 0


@pytest.mark.parametrize(
    "gated",
    sampled(
        [(gated,) for gated in GATED], lambda gated: gated[0], lambda gated: gated[3], tokens_of
    ),
    ids=str,
)
def test_swiglu(gated, run):
    name, rows, shape, sizes, numbers = gated
    x = normal((rows, shape[1]), TYPES[rows % 2])
    with divided(numbers) if numbers else nullcontext():
        check_swiglu(run, x, *pair(name, shape, sizes))


def test_swiglu_takes_no_memory_but_for_its_result(run):
    """One launch, and no array beside `out`."""
    name, rows, shape, sizes, _ = GATED[0]
    packed = [run.guarded(cq.prepack(q)) for q in pair(name, shape, sizes)]
    x, out = run.guarded(normal((rows, shape[1]), "float16")), np.zeros((rows, shape[0]), "f2")
    recorder = Recorder(arch=ARCH)
    with (
        mock.patch.object(recorder, "empty", side_effect=AssertionError("an array was made")),
        Products(recorder).in_place(),
    ):
        cq.swiglu(x, *packed, out=out)
    assert len(recorder.launches) == 1


@pytest.mark.parametrize("layout", WRITABLE)
def test_out_of_a_gated_unit_lies_anywhere(run, layout):
    name, rows, shape, sizes, _ = GATED[0]
    weights = [cq.prepack(q) for q in pair(name, shape, sizes)]
    x, where = normal((rows, shape[1]), TYPES[rows % 2]), LAYOUTS[layout]
    base = run.backend.empty(where.base((rows, shape[0])), x.dtype)
    base[...] = 7
    out = where.view(base, (rows, shape[0]))
    assert run(cq.swiglu, x, *weights, out=out) is out
    assert bits_equal(np.array(out), run(cq.swiglu, x, *weights))
    out[...] = 7
    assert (base == 7).all()
