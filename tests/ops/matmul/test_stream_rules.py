"""How matmul/stream.cu divides products: all of them once, by what a GPU has."""

from dataclasses import replace
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from division_cases import ARCHS, SHARED, TABLES, depths, kinds, processors, sizes
from hypothesis import example, given
from hypothesis import strategies as st

import cuquant as cq
from cuquant.array.fragments import FRAGMENTS_LAYOUT
from cuquant.array.packed_weight import ROWS_LAYOUT, layout_components
from cuquant.ops.layout.packed_weight import Groups
from cuquant.ops.matmul import stream
from cuquant.ops.matmul.problem import Dense, Problem, Product, Weight, shared_evenly
from cuquant.ops.programs import Plan

PRESSURES = [stream.LIGHT, stream.USUAL, stream.BLOCKS, stream.FINE]


# Units of a chunk, and those in which K is shared where codes go through shared memory.
CHUNKS = [(0, 0), (4, 4), (8, 8), (8, 4)]


def parts_of_k(shape: stream.Shape, groups: Groups, units: int, share: int) -> list[int]:
    """Where the kernel's parts of K begin and end, in units: matmul/stream.cu's `border`."""
    group = groups.units or 1 << 20
    share = share or (shape.ahead if group >= shape.ahead else group)
    shares, parts = -(-units // share), shape.split * shape.depth
    return [min(shares * part // parts * share, units) for part in range(parts + 1)]


@given(
    st.integers(1, 300), sizes, depths, kinds, st.sampled_from(TABLES), st.sampled_from(ARCHS[1:]),
    processors, st.booleans(), st.sampled_from(PRESSURES),
    st.sampled_from(CHUNKS), st.sampled_from([0, 192, 768, 4096]),
)  # fmt: skip
@example(1, 128_256, 4096, Groups(2, 1), 0, 86, 28, False, 0, (0, 0), 0)
@example(8, 1_000_000, 4096, Groups(1, 1), 32768, 89, 20, True, 0, (0, 0), 0)
@example(8, 4096, 14336, Groups(1, 2), 32768, 90, 132, False, 1, (4, 4), 4096)
@example(4, 4096, 14336, Groups(2, 1), 0, 90, 132, False, 1, (8, 4), 6656)
def test_streams_fit_and_cover_everything_once(
    rows, columns, depth, groups, table, arch, processors, gated, pressure, chunk, ring
):  # fmt: skip
    if groups.fine == 1:
        pressure = min(pressure, stream.USUAL)
    if groups.units not in (0, 1, 2, 4):
        chunk = 0, 0
    memory = stream.Memory(table, ring, *chunk)
    shape = stream.divide(rows, columns, depth, groups, memory, arch, processors, gated, pressure)
    units, strips = -(-depth // 64), -(-columns // 16)
    if shape is None:
        # One row of x, the table and the sums of one round of strips are too much.
        least = table + units * 128 + 128 + 8 * (16 * 16 * (1 + gated) + 4) * 4
        assert least + 16 * ring + 8 * 128 > 99 * 1024
        return
    bytes = stream.shared_bytes(shape, groups, units, memory, gated)
    table += shape.strips * shape.depth * ring
    assert bytes <= SHARED[arch] * 1024
    assert shape.split == 1 or (shape.split == 2 and 90 <= arch < 100)
    assert 1 <= shape.tokens <= min(rows, 8 * shape.tiles) and shape.tiles in (1, 2, 4)
    most = 16 if shape.tiles < 4 and (90 <= arch < 100 or pressure == stream.LIGHT) else 8
    assert shape.strips * shape.depth <= most and shape.rounds >= 1
    # The kernel's static_assert.
    units_of_group = groups.units or 1 << 20
    long = units_of_group >= shape.ahead
    assert (units_of_group % shape.ahead if long else shape.ahead % units_of_group) == 0
    # K: the parts follow each other, begin with a group where they add up by groups, and x of a
    # block's part lies in what shared_bytes counts.
    borders = parts_of_k(shape, groups, units, memory.share)
    assert borders[0] == 0 and borders[-1] == units and borders == sorted(borders)
    if not long:
        assert all(border % units_of_group == 0 for border in borders[:-1])
    own = [borders[(r + 1) * shape.depth] - borders[r * shape.depth] for r in range(shape.split)]
    pitch = shape.taken * 16 * (1 + gated) + 4
    sums = shape.depth * shape.tiles * 8 * pitch * 4
    assert table + 16 + max(own) * shape.tokens * 128 + sums <= bytes
    # Strips: of the last block some may not exist.
    blocks = -(-strips // shape.taken)
    assert (blocks - 1) * shape.taken < strips
    assert blocks * shape.split < 1 << 31


def test_usual_products_are_one_wave():
    """Of a large GPU; and no small one reads its weights more than once for 8 rows of x."""
    groups = Groups(2, 1)
    for rows in (1, 8, 16):
        for columns, depth in ((4096, 4096), (14336, 4096), (4096, 14336), (128_256, 4096)):
            shape = stream.divide(rows, columns, depth, groups, stream.Memory(), 90, 132)
            assert shape is not None
            assert shape.tokens == (8 if (rows, depth) == (16, 14336) else rows)
            blocks = -(-columns // 16 // shape.taken) * shape.split
            assert blocks <= 132
    for columns in (4096, 32_000, 128_256):
        shape = stream.divide(8, columns, 4096, groups, stream.Memory(), 86, 28)
        assert shape is not None and shape.tokens == 8


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "nf4"])
def test_codes_by_rows_that_go_through_shared_memory(name):
    """On Hopper; the larger table, unless it leaves room for fewer warps or for half of x."""
    rows = Weight.layout
    problem = Problem(1, 4096, 14336, cq.get_format(name), rows, "float16", True, 90, 132)
    for count, wide in ((1, True), (2, True), (4, True), (8, False)):
        found = stream.division_of(replace(problem, rows=count))
        assert found is not None and found.memory.chunk and found.memory.ring == 2 * 16 * 128
        assert (found.wide, found.shape.tokens) == (wide, count)
        assert found.shape.strips * found.shape.depth == 16
    for other in (*(replace(problem, arch=arch) for arch in (80, 89, 100, 120)),):
        found = stream.division_of(other)
        assert found is not None and not found.memory.chunk and found.memory.ring == 0
    found = stream.division_of(replace(problem, layout=FRAGMENTS_LAYOUT))
    assert found is not None and not found.memory.chunk


@pytest.mark.parametrize(
    ("name", "block", "depth", "through"),
    [
        ("int3", 128, 4096, True),
        ("int3", 64, 192, False),  # rows of 72 bytes
        ("int5", 128, 4096, True),
        ("int6", 64, 192, True),
        ("int7", 256, 4096, True),
        ("int7", 512, 4096, False),
        ("int4", 64, 4096, True),
        ("int4", 128, 4096, False),  # lanes load what they need, and scales are few
        ("int2", 64, 4096, False),
        ("int2", 128, 4096, True),
        ("int2", 128, 4160, False),  # an odd number of units, and two are multiplied together
        ("int2", 512, 4096, False),
        ("int1", 128, 4096, True),
        ("int1", 64, 4096, False),
        ("int3", 32, 4096, True),
        ("fp6_e2m3", 32, 4096, True),
        ("int8", 64, 4096, False),
    ],
)
def test_which_codes_by_rows_go_through_shared_memory(name, block, depth, through):
    fmt = cq.get_format(name, block_size=block)
    problem = Problem(1, 4096, depth, fmt, Weight.layout, "float16", True, 90, 132)
    found = stream.division_of(problem)
    assert found is not None and bool(found.memory.chunk) == through
    few_bits = fmt.bits <= 3 or fmt.bits == 5
    assert found.span == (2 if through and few_bits and block >= 64 else 1)
    row = found.memory.chunk * 8 * fmt.bits + (16 if few_bits else 0)
    long = found.span == 2 and fmt.bits <= 3
    assert found.memory.chunk == (8 if long else 4 if through else 0)
    assert found.memory.ring == (2 * 16 * row if through else 0)


@pytest.mark.parametrize(
    ("columns", "depth", "parts", "chunk", "share"),
    [
        (8192, 8192, 4, 8, 8),
        (4096, 14336, 8, 8, 4),  # 28 units for each part, where whole chunks are 24 or 32
        (4096, 2304, 8, 4, 4),  # 4.5 long chunks are less than one for each
    ],
)
def test_chunks_are_whole_where_warps_have_as_many(columns, depth, parts, chunk, share):
    for name in ("k3", "int1", "int2", "uint3"):
        fmt = cq.get_format(name, block_size=128)
        problem = Problem(3, columns, depth, fmt, Weight.layout, "float16", True, 90, 132)
        found = stream.division_of(problem)
        assert found is not None and (found.memory.chunk, found.memory.share) == (chunk, share)
        assert found.shape.split * found.shape.depth == parts
        units = depth // 64
        borders = parts_of_k(found.shape, found.groups, units, share)
        most = max(b - a for a, b in pairwise(borders))
        assert most == -(-units // parts // 4) * 4


@pytest.mark.parametrize("clusters", [1, 2, 4, 5, 131, 132])
def test_strips_are_shared_evenly(clusters):
    for strips in range(clusters, 4 * clusters + 2):
        found, most, fewer = shared_evenly(strips, 9, clusters)
        assert found == clusters
        firsts = [rank * (most - 1) + min(rank, fewer) for rank in range(clusters + 1)]  # Taken
        counts = [most - (rank >= fewer) for rank in range(clusters)]
        assert firsts[0] == 0 and firsts[-1] == strips and 0 < fewer <= clusters
        assert [b - a for a, b in pairwise(firsts)] == counts and min(counts) >= most - 1 > -1
        fewest, most, _ = shared_evenly(strips, clusters, 0)
        assert (fewest - 1) * clusters < strips <= fewest * most <= fewest * clusters


@pytest.mark.parametrize(
    ("name", "layout", "shape", "alone"),
    [
        ("k5", ROWS_LAYOUT, (8192, 8192), True),
        ("int4", ROWS_LAYOUT, (8192, 8192), False),
        ("mxfp4", FRAGMENTS_LAYOUT, (14336, 4096), True),  # 448 threads of 72 registers
        ("iq4_nl", FRAGMENTS_LAYOUT, (14336, 4096), True),
        ("int4", FRAGMENTS_LAYOUT, (14336, 4096), False),
    ],
)
def test_blocks_whose_weights_go_through_shared_memory_are_alone(name, layout, shape, alone):
    """Two of them find no room on a multiprocessor, whose registers would do for two; blocks whose
    lanes load everything leave the rest of it to the cache."""
    assert (2 * (launched_bytes(90, name, layout, shape) + 1024) > 228 * 1024) == alone


@pytest.mark.parametrize("layout", [ROWS_LAYOUT, FRAGMENTS_LAYOUT])
@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch >= 80])
def test_blocks_ask_for_no_more_shared_memory_than_there_is(arch, layout):
    for name in ("int4", "uint3", "k5", "nf4", "mxfp4", "fp4_e2m1", "nvfp4"):
        for shape in ((14336, 4096), (4096, 14336)):
            assert launched_bytes(arch, name, layout, shape) <= SHARED[arch] * 1024


def launched_bytes(arch: int, name: str, layout: str, shape: tuple[int, int]) -> int:
    """Of shared memory, for one row of x."""
    plan, fmt = Plan(arch), cq.get_format(name)
    parts = {c.name: None for c in layout_components(fmt, shape, layout)}
    weight = Weight(fmt, parts, shape, layout=layout)
    x = Dense(1 << 20, np.dtype(np.float16), shape[1], 1)
    with mock.patch.object(plan, "launch") as launched:
        product = Product(1, *shape, x, (weight,))
        stream.Stream().prepare(plan, product)(1)(plan, 1 << 20, bytes(64))
    return launched.call_args.args[0].shared


@pytest.mark.parametrize("name", ["nf4", "mxfp4"])
def test_fewer_warps_rather_than_fewer_rows_of_x(name):
    """A table and the rings of 16 warps leave no room for 16 rows; those of 8 do."""
    fmt = cq.get_format(name)
    problem = Problem(16, 8192, 8192, fmt, Weight.layout, "float16", True, 90, 132)
    for rows, tokens, warps in ((8, 8, 16), (16, 16, 8)):
        found = stream.division_of(replace(problem, rows=rows))
        assert found is not None and found.shape.tokens == tokens
        assert found.shape.strips * found.shape.depth == warps


@pytest.mark.parametrize(
    ("name", "options", "row", "floats"),
    [
        ("q4_0", {}, 8 * 2, 8),
        ("q4_1", {}, 8 * (2 + 2), 16),
        ("q4_k", {}, 2 * (2 + 2) + 8 * (1 + 1), 16),  # it may begin within a block
        ("q6_k", {}, 2 * 2 + 16, 16),
        ("q2_k", {}, 2 * (2 + 2) + 16 * (1 + 1), 32),
        ("nvfp4", {}, 16, 16),
        ("mxfp4", {}, 8, 8),
        ("uint4", {"block_size": 16}, 16 * (2 + 1), 16),
        ("nf4", {"block_size": 32}, 8 * 4, 8),
        ("nf4", {"block_size": 64}, 0, 0),
        ("nf4", {"block_size": 32, "double_quant": True}, 0, 0),
        ("int8", {"block_size": (8, 32)}, 0, 0),
    ],
)
def test_groups_that_go_through_shared_memory(name, options, row, floats):
    """Of a prepacked weight: for 256 columns of a row, bytes, twice, and what is made of them."""
    fmt = cq.get_format(name, **options)
    for arch in (80, 90, 120):
        problem = Problem(1, 4096, 4096, fmt, FRAGMENTS_LAYOUT, "float16", True, arch, 132)
        found = stream.division_of(problem)
        assert found is not None and not found.memory.chunk
        assert found.memory.ring == 16 * (2 * row + 4 * floats)


def test_warps_share_strips_of_one_tile_and_have_their_own_of_several():
    """Where a block has many: for few rows of x all warps read some strips together, if none takes
    more of them; for more each has its own, so that schedulers have as much to do."""
    groups = Groups(2, 1)
    for rows, numbers in ((1, (2, 8, 7)), (8, (4, 4, 7)), (16, (16, 1, 2))):
        shape = stream.divide(rows, 28672, 8192, groups, stream.Memory(), 90, 132)
        assert shape is not None and (shape.strips, shape.depth, shape.rounds) == numbers


@pytest.mark.parametrize(
    ("warps", "taken", "load"),
    [(14, 28, 8), (16, 28, 7), (12, 28, 8.5), (16, 17, 6.5), (12, 17, 5.5), (1, 3, 7.5)],
)
def test_the_load_of_a_scheduler_is_that_of_every_fourth_warp(warps, taken, load):
    """Round by round, but as if it had two or three."""
    assert stream._load(stream.Shape(16, 2, warps, 1, 2, taken, 4)) == load


@pytest.mark.parametrize("gated", [False, True])
def test_schedulers_have_as_much_to_do_where_there_are_several_tiles(gated):
    """So many warps have strips at a time that the last round is not much shorter."""
    rest = Groups(2, 1), stream.Memory(), 90, 132, gated
    for columns, numbers in ((14336, (14, 14)), (28672, (16, 28)), (40_000, (15, 38))):
        shape = stream.divide(16, columns, 4096, *rest)
        assert shape is not None and (shape.strips, shape.taken, shape.depth) == (*numbers, 1)


@pytest.mark.parametrize(("bits", "numbers"), [(4, (4, 4, 1)), (3, (4, 4, 1)), (2, (2, 8, 2))])
def test_small_codes_are_read_by_deeper_blocks(bits, numbers):
    rest = Groups(2, 1), stream.Memory(), 90, 132
    shape = stream.divide(1, 8192, 8192, *rest, bits=bits)
    assert shape is not None and (shape.strips, shape.depth, shape.rounds) == numbers


@pytest.mark.parametrize(
    ("rows", "depth", "split"),
    [(1, 14336, 1), (4, 14336, 2), (4, 8192, 1), (8, 8192, 2), (8, 4096, 1), (16, 4096, 2)],
)
def test_two_blocks_share_x_where_it_is_large(rows, depth, split):
    groups = Groups(2, 1)
    for arch in (80, 90):
        shape = stream.divide(rows, 8192, depth, groups, stream.Memory(), arch, 132)
        assert shape is not None and shape.split == (split if arch == 90 else 1)


@pytest.mark.parametrize(
    ("columns", "depth", "numbers"),
    [(4096, 4096, (4, 4, 1)), (8192, 8192, (8, 2, 1)), (14336, 4096, (14, 1, 1))],
)
def test_two_tiles_have_16_warps_whatever_the_format(columns, depth, numbers):
    for name in ("int3", "uint4", "int8", "nf4", "q4_k", "nvfp4"):
        fmt = cq.get_format(name)
        for dtype in ("float16", "bfloat16"):
            problem = Problem(16, columns, depth, fmt, FRAGMENTS_LAYOUT, dtype, True, 90, 132)
            shape = stream.shape_of(problem)
            assert shape is not None and (shape.strips, shape.depth, shape.rounds) == numbers
