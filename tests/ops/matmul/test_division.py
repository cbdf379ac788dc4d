"""How products with prepacked weights are divided: all of them once, by what a GPU has."""

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import prepack_cases
import pytest
from division_cases import ARCHS, LAID, SHARED, TABLES, depths, processors, sizes
from emulator import Recorder
from hypothesis import given
from hypothesis import strategies as st
from in_turn import in_turn
from kernel_arrays import LEVELS

import cuquant as cq
from cuquant.array.fragments import FRAGMENTS_LAYOUT, Fragments, takes
from cuquant.formats import Codebook, Minifloat
from cuquant.gpu.rates import H100_TILES
from cuquant.ops.layout import packed_weight as prepacked
from cuquant.ops.layout.packed_weight import Groups
from cuquant.ops.matmul import hopper_tiles as tiles
from cuquant.ops.matmul import stream
from cuquant.ops.matmul.choose import FAMILIES, choose
from cuquant.ops.matmul.problem import Dense, Problem, Product, Weight

# ---- groups, tables, numbers --------------------------------------------------------------------


@in_turn("case", prepack_cases.ALL)
def test_groups_are_those_of_the_layout(case):
    """As many as there are scales, and each 16 columns of a unit in the right one."""
    rows, depth = case.shape[-2:]
    fmt, groups = case.fmt, Groups.of(case.fmt, depth)
    found = {part.name: part.groups for part in Fragments(fmt, case.shape).per_group}
    count = groups.count(fmt, depth)
    if fmt.is_blocks:
        assert count == depth // fmt.layout.sub_block
        assert count * found["scale"] == count * (depth // fmt.layout.elements)
    elif "scale" in found:
        assert count == found["scale"]
    else:
        shape = next(c.shape for c in fmt.components((rows, depth)) if c.name == "scale")
        assert count == (shape[-1] if shape else 1)
    block = fmt.layout.sub_block if fmt.is_blocks else fmt.rule.block
    block = block[1] if isinstance(block, tuple) else block
    for column in range(0, depth, 16):
        unit = column // 64
        if groups.fine > 1:
            group = unit * groups.fine + column % 64 // (64 // groups.fine)
        else:
            group = unit // groups.units if groups.units else 0
        assert group == (column // block if isinstance(block, int) else 0) < count


def test_tables_hold_pairs_of_levels_or_levels():
    """For each of 32, 16 or 8 lanes, 4 bytes an entry; within what the oldest GPU has."""
    for fmt in LAID.values():
        found = prepacked.table_bytes(fmt)
        looked_up = isinstance(fmt.codec, Codebook) or (
            fmt.bits == 4 and isinstance(fmt.codec, Minifloat)
        )
        if not looked_up:
            assert found == 0
        elif fmt.bits <= 4:
            assert found == 4**fmt.bits * 128
        else:
            assert found == 2**fmt.bits * 4 * {5: 32, 6: 32, 7: 16, 8: 8}[fmt.bits]
        assert found <= 32768


def test_levels_fit_16_bits_or_do_not():
    assert all(prepacked.fits(fmt) for fmt in LAID.values())
    known = {name: prepacked.fits(cq.get_format("k8", levels=LEVELS[name])) for name in LEVELS}
    assert [name for name, fits in known.items() if not fits] == ["huge", "tiny", "all sizes"]


# ---- matmul/hopper.cu ---------------------------------------------------------------------------


@given(
    sizes, sizes, depths, st.integers(1, 8),
    st.sampled_from(["computed", "looked_up", "heavy", "blocks"]), st.sampled_from(TABLES),
    processors, st.sampled_from([tiles.ONE, tiles.GATED, tiles.EXPERTS]),
)  # fmt: skip
def test_hopper_tiles_fit(rows, columns, depth, bits, decoding, table, processors, kind):
    if kind == tiles.EXPERTS:
        rows = max(n for n in tiles.TOKENS if n <= max(rows, tiles.TOKENS[0]))
        rows = min(rows, 128 if decoding in ("heavy", "blocks") else 256)
    tables = (table, table * {4: 2, 7: 2, 8: 8}.get(bits, 1))  # as table_bytes says
    how = tiles.Decoding(bits, decoding, tables)
    shape = tiles.divide(rows, tiles.Work(columns, depth, how, processors, H100_TILES, kind))
    assert tiles.shared_bytes(shape, bits, tables[shape.wide]) <= SHARED[90] * 1024
    assert shape.tokens in tiles.TOKENS and shape.kind == kind
    assert kind != tiles.EXPERTS or (shape.tokens == rows and not shape.streamed)
    assert kind != tiles.EXPERTS or shape.split == 1
    assert kind != tiles.GATED or shape.row_groups == 2
    # The kernel's static_asserts: registers and stages.
    groups = shape.row_groups * shape.depth_groups
    assert 2 <= groups <= 4 and shape.threads == 128 * (groups + 1)
    assert shape.stages % shape.depth_groups == 0 and shape.stages >= 2 * shape.depth_groups
    # Threads of a warpgroup hold its sums, and an operand or two: whole ones for late scales.
    launched = 65536 // shape.threads // 8 * 8 * (groups + 1)
    few = 40 if groups == 2 else 32
    operands = 4 * shape.buffers * (4 if shape.tokens <= 32 else shape.slices)
    assert shape.slices in (1, 2, 4) and shape.span <= 4
    assert shape.tokens // 2 + operands + 32 <= (launched - few) // groups // 8 * 8
    # A tile has whole strips, and where there are several rounds as many as it can, or for few rows
    # of x as many as leave no more rounds.
    token_tiles = -(-rows // shape.tokens)
    tile_rows = tiles.rows_of_tile(shape, columns, token_tiles, processors)
    assert 0 < tile_rows <= shape.rows and tile_rows % 16 == 0
    count, fewest = (token_tiles * -(-columns // each) for each in (tile_rows, shape.rows))
    few = shape.tokens == 16 and token_tiles == 1
    even = few and -(-count // processors) == -(-fewest // processors)
    assert tile_rows == shape.rows or count * shape.split <= processors or even
    assert count < 1 << 31 and count * shape.tokens * 4 < 1 << 62
    if shape.shared_x:  # and both blocks of a cluster always have a tile
        assert shape.alone and shape.span == 1 and kind == tiles.ONE and token_tiles > 1
        assert processors % 2 == 0 and count // token_tiles % 2 == 0
    if shape.split > 1:  # each block has a part of K, and one tile, whose sums take the place of x
        assert not (shape.streamed or shape.shared_x)
        assert count * 2 <= processors and -(-depth // 64) >= 2
        most = -(-shape.tokens // (16 * shape.depth_groups))  # eights of columns that some get
        given = 2048 * groups * (shape.depth_groups - 1) * 2 * most
        received = 2048 * shape.row_groups * shape.tokens // 16
        drain = groups * tiles.drain_of(shape) * tiles.DRAIN_PITCH * 4 + 1024
        unit = 64 * shape.tokens * 2 + 64 * shape.row_groups * 8 * bits
        assert given + received + drain <= shape.stages * shape.span * unit
    if shape.streamed:  # in portions that 32 bits hold
        assert tile_rows == shape.rows
        assert tiles.streamed_tiles(count, processors) * -(-depth // 64) < 1 << 31


@given(st.integers(1, 1000), processors, st.integers(1, 70), st.integers(1, 16))
def test_blocks_have_even_parts_of_the_last_tiles(count, processors, units, portion):
    """matmul/hopper_schedule.cuh: every portion is one block's, and nobody waits for nobody."""
    streamed = tiles.streamed_tiles(count, processors)
    assert (count - streamed) % processors == 0 and streamed < 2 * processors
    shape = tiles.Shape(16, 1, 1, 4, portion, 2, 4, streamed=True)
    blocks, each = tiles.blocks_of(shape, count, units, processors), -(-units // portion)
    assert blocks <= processors

    def begin_of(block: int) -> int:
        all_ = streamed * each
        at = all_ // blocks * block + min(block, all_ % blocks)
        if at % each < 2:
            return at - at % each
        return at + each - at % each if each - at % each < 2 else at

    begins = [begin_of(block) for block in range(blocks + 1)]
    assert begins[0] == 0 and begins[-1] == streamed * each and sorted(begins) == begins
    assert max(b - a for a, b in pairwise(begins)) <= -(-streamed * each // blocks) + 2
    for block, (first, end) in enumerate(pairwise(begins)):
        start = first // each * each  # of the tile that it has the last portions of
        if first == start or end < start + each:
            continue
        gives = [b for b in range(block) if begins[b + 1] > start]
        assert gives and all(begins[b] < begins[b + 1] for b in gives)
        assert gives == list(range(gives[0], block)) and begins[gives[0]] <= start


def test_rounds_of_few_rows_of_x_are_even():
    found = tiles.shape_of(replace(PROBLEM, rows=16))
    shape = replace(found, tokens=16, row_groups=2, streamed=False)
    for columns, rows in ((14336, 112), (28672, 112), (16896, 128), (50_688, 128), (16, 16)):
        assert tiles.rows_of_tile(shape, columns, 1, 132) == rows
    assert tiles.rows_of_tile(replace(shape, tokens=32), 28672, 1, 132) == 128
    assert tiles.rows_of_tile(shape, 28672, 2, 132) == 128


@pytest.mark.parametrize("name", ["int4", "nf4", "q4_k", "int8"])
def test_small_tiles_that_are_not_looked_at_would_not_be_the_fastest(name, monkeypatch):
    """Where there are many rows of x, `divide` passes over those that would be far too many."""
    shapes = (512, 2048), (4096, 4096), (4096, 14336), (11008, 4096)
    problems = [
        replace(PROBLEM, rows=rows, columns=n, depth=k, format=LAID[name], gated=gated)
        for (n, k), rows, gated in product(shapes, (272, 416, 1024, 3008), (False, True))
    ]
    found = list(map(tiles.shape_of, problems))
    monkeypatch.setattr(tiles, "SMALL_TILES", 1 << 30)
    tiles._fastest.cache_clear()
    assert list(map(tiles.shape_of, problems)) == found


def test_blocks_share_tiles_where_these_are_too_few_or_a_few_too_many():
    nf4 = replace(PROBLEM, rows=64, format=LAID["nf4"], columns=5120, depth=27648)
    assert tiles.shape_of(nf4).streamed
    assert tiles.shape_of(replace(nf4, gated=True)).streamed
    int4 = replace(nf4, format=LAID["int4"], columns=132 * 128, rows=256)
    assert not tiles.shape_of(int4).streamed
    assert not tiles.shape_of(replace(int4, depth=64)).streamed


def test_two_blocks_share_a_tile_where_there_are_few_small_ones():
    """And there where it would take them longer to hand sums over than to multiply more of K."""
    int4 = replace(PROBLEM, format=cq.get_format("int4:128"))
    for columns, depth, rows in ((2048, 8192, 128), (4096, 14336, 64), (4096, 4096, 32)):
        found = tiles.shape_of(replace(int4, rows=rows, columns=columns, depth=depth))
        assert found.split == 2 and found.once and not found.streamed
    for columns, depth, rows in ((5120, 27648, 64), (10240, 8192, 512)):
        found = tiles.shape_of(replace(int4, rows=rows, columns=columns, depth=depth))
        assert found.split == 1 and found.streamed


def test_blocks_share_x_where_two_have_the_same_rows_at_a_time():
    several = replace(PROBLEM, rows=1024, format=LAID["int4"], columns=14336, depth=4096)
    assert tiles.shape_of(several).shared_x
    one_tile = replace(several, rows=256)  # all blocks have them
    odd = replace(several, columns=14336 + 128)  # tiles of the weight's rows
    for problem in (one_tile, odd, replace(several, multiprocessors=131)):
        shape = tiles.shape_of(problem)
        assert not shape.shared_x


def test_tiles_have_as_many_rows_of_x_as_others():
    for rows, count, each in ((70, 1, 70), (257, 2, 144), (1030, 5, 208), (512, 2, 256)):
        assert tiles.tokens_of_tile(rows, count) == each


@given(sizes, st.sampled_from(tiles.TOKENS))
def test_every_tile_has_rows_of_x(rows, tokens):
    count = -(-rows // tokens)
    each = tiles.tokens_of_tile(rows, count)
    assert each <= tokens and (count - 1) * each < rows <= count * each
    assert count == 1 or each % 16 == 0  # whole boxes, of which two blocks have half


def test_the_large_table_of_levels_leaves_enough_stages():
    """Of a codebook of 4 bits 64 KB, where integers have none."""
    for rows in (256, 4096):
        for name, wide in (("nf4", True), ("mxfp4", True), ("int4", False), ("dynamic8", False)):
            shape = tiles.shape_of(replace(PROBLEM, rows=rows, format=LAID[name], columns=14336))
            assert shape.tokens == 256 and shape.wide == wide
            assert not wide or shape.stages >= tiles.LEAST_STAGES
            assert tiles.drain_of(shape) == (32 if wide else 64)


@given(st.integers(1, 40), st.integers(1, 40))
def test_every_tile_is_somebodys(token_tiles, row_tiles):
    """matmul_hopper.cu's `locate`, which takes 4 tiles of x at a time."""
    found = set()
    for tile in range(token_tiles * row_tiles):
        set_, in_set = divmod(tile, 4 * row_tiles)
        wide = min(4, token_tiles - set_ * 4)
        found.add((set_ * 4 + in_set % wide, in_set // wide))
    assert found == {(t, r) for t in range(token_tiles) for r in range(row_tiles)}


# ---- which kernel -------------------------------------------------------------------------------

PROBLEM = Problem(1, 4096, 4096, LAID["int4"], FRAGMENTS_LAYOUT, "float16", True, 90, 132)

problems = st.builds(
    Problem,
    rows=sizes,
    columns=sizes,
    depth=st.one_of(st.just(0), depths),
    format=st.sampled_from(list(LAID.values())),
    layout=st.sampled_from([FRAGMENTS_LAYOUT, "rows/1"]),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    aligned=st.booleans(),
    arch=st.sampled_from(ARCHS),
    multiprocessors=processors,
    contiguous=st.booleans(),
    direct=st.booleans(),
    batches=st.sampled_from([1, 2]),
    experts=st.sampled_from([0, 8]),
    gated=st.booleans(),
    swapped=st.booleans(),
    vendor=st.booleans(),
)


@given(problems)
def test_each_kernel_gets_only_what_it_takes(problem):
    p, name = problem, choose(problem)
    if name.startswith("plain"):
        return
    assert p.layout in FAMILIES[name].layouts
    assert p.depth and p.batches == 1 and not p.swapped
    if p.experts:
        assert name == "hopper" and p.arch == 90 and p.dtype != "float32" and not p.gated
        return
    assert p.contiguous
    if name == "vendor":
        assert p.vendor and p.rows > 16 and (p.dtype != "bfloat16" or p.arch >= 80)
        return
    assert p.dtype != "float32"
    if name == "hopper":
        assert p.arch == 90 and p.aligned
    else:
        assert p.arch >= 80
        shape = stream.shape_of(p)
        assert shape is not None and -(-p.rows // shape.tokens) < 1 << 16
    if p.layout != FRAGMENTS_LAYOUT:
        assert p.direct and prepacked.takes_rows(p.format, p.depth)


def test_usual_problems():
    """Few rows are streamed, many go to the tensor cores, and all else is there too."""
    assert choose(PROBLEM) == "stream"
    assert choose(replace(PROBLEM, rows=8)) == "stream"
    assert choose(replace(PROBLEM, rows=16)) == "stream"
    deep = replace(PROBLEM, rows=16, depth=28672)  # x does not fit
    assert choose(deep) == choose(replace(deep, gated=True)) == "hopper"
    assert choose(replace(deep, rows=2)) == choose(replace(deep, aligned=False)) == "stream"
    assert choose(replace(PROBLEM, rows=17)) == "hopper"
    assert choose(replace(PROBLEM, rows=512, arch=100)) == "stream"
    assert choose(replace(PROBLEM, rows=512, arch=89)) == "stream"
    assert choose(replace(PROBLEM, rows=512, aligned=False)) == "stream"
    assert choose(replace(PROBLEM, depth=1 << 18)) == "hopper"  # x fits no block
    assert choose(replace(PROBLEM, arch=75)) == "plain_rows"
    assert choose(replace(PROBLEM, dtype="float32", rows=64)) == "plain_tiles"
    assert choose(replace(PROBLEM, experts=8)) == "hopper"
    assert choose(replace(PROBLEM, experts=8, aligned=False)) == "hopper"
    assert choose(replace(PROBLEM, experts=8, arch=80)) == "plain_rows"
    direct = replace(PROBLEM, layout="rows/1", direct=True)
    assert choose(direct) == "stream"
    assert choose(replace(direct, rows=64)) == "plain_tiles"
    assert choose(replace(direct, direct=False)) == "plain_rows"
    assert choose(replace(direct, format=LAID["k3"])) == "stream"
    assert choose(replace(direct, depth=4000)) == "plain_rows"
    blocks = replace(direct, format=cq.get_format("q4_0"))
    assert choose(blocks) == choose(replace(blocks, depth=1 << 29)) == "blocks"
    assert choose(replace(blocks, depth=1 << 30)) == "plain_rows"  # rows of 2 GiB


@pytest.mark.parametrize(
    ("name", "depth", "wanted"),
    [
        ("int4", 8192, "stream"),
        ("int4", 14336, "hopper"),  # x does not fit
        ("nf4", 8192, "stream"),
        ("nf4", 14336, "hopper"),
        ("q4_0", 4096, "stream"),
        ("mxfp4", 4096, "stream"),
    ],
)
def test_16_rows_of_x_are_streamed_where_they_fit(name, depth, wanted):
    problem = replace(PROBLEM, rows=16, depth=depth, format=cq.get_format(name))
    assert choose(problem) == wanted


VENDOR = replace(PROBLEM, rows=4096, columns=8192, depth=8192, vendor=True)
NOT_DIRECT = replace(VENDOR, layout="rows/1")


def test_the_vendors_gemm_takes_many_rows():
    """Of weights that are not prepacked from a few dozen on, of others where a kernel is slower."""
    for arch in ARCHS:
        for dtype in ("float16", "bfloat16"):
            known = "vendor" if dtype == "float16" or arch >= 80 else "plain_tiles"
            for rows in (64, 4096):
                assert choose(replace(NOT_DIRECT, arch=arch, dtype=dtype, rows=rows)) == known
    assert choose(replace(NOT_DIRECT, rows=20)) == "plain_tiles"
    assert choose(replace(NOT_DIRECT, rows=64, dtype="float32")) == "plain_tiles"
    assert choose(replace(NOT_DIRECT, dtype="float32")) == "vendor"
    assert choose(replace(NOT_DIRECT, rows=64, columns=64, depth=64)) == "plain_tiles"
    for rows, name in ((32, "stream"), (256, "vendor"), (4096, "vendor")):
        assert choose(replace(VENDOR, arch=89, rows=rows)) == name
    for name in ("int4", "nf4", "uint4", "int8"):
        of = replace(VENDOR, format=LAID[name])
        assert choose(of) == choose(replace(of, rows=20_000)) == "hopper"
    for name in ("q4_k", "q6_k"):
        blocks = replace(VENDOR, format=LAID[name])
        assert choose(blocks) == "vendor" and choose(replace(blocks, rows=1024)) == "hopper"
    assert choose(replace(VENDOR, aligned=False)) == "vendor"


@given(problems)
def test_the_vendors_gemm_is_never_the_only_path(problem):
    """Where it is not installed the rule is what it was; and more rows do not lead away from it."""
    without = choose(replace(problem, vendor=False))
    assert without != "vendor"
    found = choose(replace(problem, vendor=True))
    assert found in ("vendor", without)
    few_now = without.startswith("plain") and problem.rows <= 1 << 29
    if found == "vendor" and few_now and not problem.gated:
        assert choose(replace(problem, vendor=True, rows=2 * problem.rows)) == "vendor"


@pytest.mark.parametrize("change", ["batches", "experts", "swapped", "contiguous", "depth", "wide"])
def test_what_a_gemm_does_not_take(change):
    changes = {
        "batches": {"batches": 2},
        "experts": {"experts": 8},
        "swapped": {"swapped": True},
        "contiguous": {"contiguous": False},
        "depth": {"depth": 0},
        "wide": {"columns": 2**31},
    }
    assert choose(NOT_DIRECT) == "vendor"
    assert choose(replace(NOT_DIRECT, **changes[change])) == "plain_tiles"


def test_problems_that_a_gemm_takes():
    """By their strides and weights; that cuBLAS is installed is asked of the backend."""
    fmt = LAID["int4"]
    part = {"packed": np.empty(0, np.uint8)}
    x = Dense(1 << 20, np.dtype(np.float16), 256, 1)
    w = Weight(fmt, part, (64, 256))

    def takes(rows: int = 40, x: Dense = x, *weights: Any) -> bool:
        return Product(rows, 64, 256, x, weights or (w,)).problem(Recorder()).vendor

    assert takes() and takes(40, replace(x, row_stride=1000)) and takes(1, replace(x, row_stride=0))
    for stride in (0, 255, -256, 2**31):
        assert not takes(40, replace(x, row_stride=stride))
    assert not takes(40, replace(x, column_stride=2))
    assert takes(40, x, w, replace(w, layout=FRAGMENTS_LAYOUT))
    for other in (replace(w, row_step=2), replace(w, stored=(1, 64, 256)), x):
        assert not takes(40, x, w, other)


def test_weights_of_two_kinds_are_not_multiplied_together():
    """The problem of a gated unit says so, whichever comes first."""
    x = Dense(1 << 20, np.dtype(np.float16), 256, 1)
    int4, nf4, packed = (
        Weight(LAID[name], {"packed": np.empty(0, np.uint8)}, (64, 256), layout=layout)
        for name, layout in (("int4", "rows/1"), ("nf4", "rows/1"), ("int4", FRAGMENTS_LAYOUT))
    )

    def chosen(*weights: Any) -> str:
        backend = Recorder(arch=90)
        backend.pointer = lambda _: 1 << 20  # type: ignore[method-assign]
        return choose(Product(1, 64, 256, x, weights).problem(backend))

    assert chosen(int4, int4) == chosen(packed, packed) == "stream"
    for pair in ((int4, nf4), (nf4, int4), (int4, packed), (packed, int4)):
        assert chosen(*pair) == "plain_rows"


@pytest.mark.parametrize("part", ["packed", "scale", "nested_scale", "nested_offset"])
def test_what_is_read_by_vectors_must_be_aligned(part):
    """And nothing else: a scalar may lie anywhere."""
    parts = {name: 1 << 20 for name in ("packed", "scale", "nested_scale", "nested_offset")}
    weight = Weight(LAID["nf4"], parts, (64, 256))
    backend = Recorder(arch=90)
    backend.pointer = int  # type: ignore[method-assign]
    assert weight.is_direct(backend)
    parts[part] += 4
    assert weight.is_direct(backend) == part.startswith("nested")


def test_what_is_taken_by_rows_is_laid_out_too():
    """Nothing gets slower by `prepack`."""
    for fmt in LAID.values():
        for depth in (64, 256, 4096):
            if prepacked.takes_rows(fmt, depth):
                assert takes(fmt, (64, depth))
