"""Few rows of x times a prepacked weight, read at memory speed: matmul/stream.cu."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from cuquant.array.fragments import FRAGMENTS_LAYOUT, STRIP, UNIT
from cuquant.formats import Format, Uniform
from cuquant.gpu.backend import Backend
from cuquant.gpu.jit import Launch, Program
from cuquant.gpu.limits import SHARED, SHARED_OF_ALL, is_hopper
from cuquant.ops import cpp
from cuquant.ops.layout import packed_weight
from cuquant.ops.layout.packed_weight import Groups
from cuquant.ops.matmul.problem import (
    LARGE_X,
    Prepared,
    Problem,
    Product,
    Run,
    Weight,
    shared_evenly,
)
from cuquant.ops.matmul.stream_rows import CHUNK, RING_CHUNKS, TILE, Way

X_BYTES = 128  # of a unit of x in shared memory
PAD_BYTES = 64  # between rows of x in shared memory, at most
BARRIER_BYTES, ENDING_BYTES = 32, 32
BY_ELEMENTS, BY_VECTORS, IN_RUNS = 0, 1, 2  # matmul/stream.cu's Copies
MANY_WARPS, FEW_WARPS = 16, 8  # of a block, at most
# Shared memory that leaves no room for a second block, where codes by rows or groups go through it:
# registers may have room. The next product's blocks would meet on the multiprocessors that are free
# first, and it would wait for them. What lanes load of rows wants the L1 cache instead, and GPUs
# without clusters may have less than this.
ALONE = 114 << 10
# What takes registers: little, what is usual, several groups in a unit that lanes load, or that go
# through shared memory.
LIGHT, USUAL, BLOCKS, FINE = range(4)
SCHEDULERS = 4  # of a multiprocessor, which has every fourth warp
SATURATED = 2.5  # warps of a scheduler: fewer take as long
MOST_TILES = 4
MOST_DEPTH = 8
MOST_MORE = 8  # rounds than the fewest
STORED_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}  # of a scale; others have one
MOST_GRID_Y = 65535
# Bytes for x and tables where weights lie by rows: what is loaded ahead, of 16 rows, takes whole
# lines of the L1 cache, which is the rest.
ROWS_SHARED = 150_000
FEW_ROWS = 16  # of x for which it may be faster than matmul/hopper.cu, and takes weights by rows


@dataclass(frozen=True)
class Shape:
    """How matmul/stream.cu divides a product.

    Attributes
    ----------
    tokens, tiles
        Rows of x of a block, and the products of 8 that they take.
    strips, depth, split
        Strips of the weight and parts of K that a block's warps share; blocks that share K.
    taken
        Strips that a block takes, so many as its warps share at a time.
    ahead
        Units that are loaded ahead.
    """

    tokens: int
    tiles: int
    strips: int
    depth: int
    split: int
    taken: int
    ahead: int

    @property
    def rounds(self) -> int:
        """How often a warp takes a strip, at most."""
        return -(-self.taken // self.strips)


def _ahead(groups: Groups, bits: int, pressure: int, tiles: int) -> int:
    """Units that are loaded ahead: about 4, or 8 where they are small, in step with the groups."""
    if pressure == FINE and tiles == 1 and bits == 8:
        return 2
    if pressure == BLOCKS:
        return 3 if tiles <= 2 else 2
    if bits <= 2 and pressure == LIGHT and groups.units in (0, 1, 2, 4, 8):
        return 8
    if groups.fine > 1 or groups.units in (0, 1, 2, 4):
        return 4
    return next(n for n in (4, 3, 6, 5, 7, 2, 1) if groups.units % n == 0)


def _pressure(fmt: Format, groups: Groups, layout: str, dtype: str) -> int:
    """How many registers decoding takes."""
    laid = layout == FRAGMENTS_LAYOUT
    if laid and groups.fine > 1:
        return FINE if _copies_groups(fmt, groups) else BLOCKS
    computed = isinstance(fmt.codec, Uniform) and fmt.bits in (2, 4) and not fmt.offset
    light = computed and laid and groups.fine == 1 and dtype == "float16"
    return LIGHT if light else USUAL


def _warps(tiles: int, pressure: int, clusters: bool) -> int:
    """Of a block, at most. What was not measured on sm_90 has room for whatever decoding takes."""
    return MANY_WARPS if tiles <= 2 and (clusters or pressure == LIGHT) else FEW_WARPS


class Memory(NamedTuple):
    """Bytes of shared memory beside x and the sums.

    Attributes
    ----------
    table
        A codebook's.
    ring
        Of a warp, for what it copies of chunks.
    chunk, share
        Units of a chunk of codes that the ring holds, and those in which warps share K then.
    """

    table: int = 0
    ring: int = 0
    chunk: int = 0
    share: int = 0


def shared_bytes(shape: Shape, groups: Groups, units: int, memory: Memory, gated: bool) -> int:
    """Dynamic shared memory of a block."""
    share = memory.share or min(groups.units or shape.ahead, shape.ahead)
    own_units = (-(-units // share) + 2 * shape.split - 1) // shape.split * share
    x = (own_units * X_BYTES + PAD_BYTES) * shape.tokens
    pitch = shape.taken * STRIP * (2 if gated else 1) + 4
    rings = shape.strips * shape.depth * memory.ring
    sums = shape.depth * shape.tiles * TILE * pitch * 4
    return memory.table + rings + BARRIER_BYTES + ENDING_BYTES + sums + x


@lru_cache(maxsize=4096)
def divide(
    rows: int,
    columns: int,
    depth: int,
    groups: Groups,
    memory: Memory,
    arch: int,
    multiprocessors: int,
    gated: bool = False,
    pressure: int = LIGHT,
    bits: int = 4,
    most: int = 0,
) -> Shape | None:
    """How to divide x [rows, depth] times a weight [columns, depth]; None where x does not fit.

    One wave of blocks, or more where the sums of so many rows of the weight do not fit, with as
    many warps as have work; K is shared by warps of a block first, since their sums meet in
    shared memory, and by two blocks of a cluster where x is large. `pressure`: see _pressure.
    `most`: bytes of shared memory, but for all that a block may have.
    """
    strips, units = -(-columns // STRIP), -(-depth // UNIT)
    clusters = is_hopper(arch)
    most = most or (SHARED[90] if clusters else SHARED_OF_ALL)

    def fits(shape: Shape) -> bool:
        return shared_bytes(shape, groups, units, memory, gated) <= most

    tokens = min(rows, MOST_TILES * TILE)
    while tokens:
        tiles = 1 << (-(-tokens // TILE) - 1).bit_length()
        ahead = memory.chunk or _ahead(groups, bits, pressure, tiles)
        large = tokens > TILE or tokens * units * X_BYTES > LARGE_X
        splits = (1,) if not clusters or units < 2 * ahead else (2, 1) if large else (1, 2)
        all_each = [-(-strips // max(multiprocessors // split, 1)) for split in splits]
        for warps in sorted({_warps(tiles, pressure, clusters), FEW_WARPS}, reverse=True):
            for split, each in _shares(splits, all_each, warps):
                blank = Shape(tokens, tiles, 1, 1, split, each, ahead)
                shape = _of_block(blank, warps, units, bits <= 2 and not memory.chunk, fits)
                if shape is not None:
                    return shape
        tokens = tokens // 2 if tokens > TILE else tokens - 1
    return None


def _of_block(
    blank: Shape, warps: int, units: int, few_bits: bool, fits: Callable[[Shape], bool]
) -> Shape | None:
    """How a block's warps share the strips that it takes and its part of K, or None."""
    each, least = blank.taken, -(-blank.taken // warps)
    found: list[Shape] = []
    for rounds in range(least, min(each, least + MOST_MORE) + 1):
        own = -(-each // rounds)
        deep = max(min(warps // own, MOST_DEPTH, units // (blank.split * blank.ahead)), 1)
        shape = replace(blank, strips=own, depth=deep)
        if fits(shape):
            found.append(shape)
    if not found:
        return None
    # The fewest rounds in which about as many warps have work as in any.
    best = max(shape.depth / shape.rounds for shape in found)
    usual = next(s for s in found if s.depth / s.rounds >= 0.8 * best)
    if usual.tiles == 1:
        return _deeper(usual, found, few_bits)
    if usual.depth > 1:
        return usual
    others = [replace(usual, strips=n) for n in range(1, warps + 1)]
    return min([usual, *filter(fits, others)], key=_load)


def _deeper(usual: Shape, found: list[Shape], few_bits: bool) -> Shape:
    """For one tile, another shape where warps have strips of their own, or codes few bits: warps
    that read the strips of a block together are faster, if no block takes more of them and no fewer
    warps have work."""
    if usual.depth > 1 and not few_bits:
        return usual
    most = usual.strips * usual.rounds
    others = [s for s in found if s.strips * s.rounds <= most]
    return max(others, key=lambda s: (s.strips * s.depth, s.depth))


def _load(shape: Shape) -> float:
    """How long the busiest scheduler has instructions, in strips, where warps have all of K: the
    last round of a block may have fewer strips."""
    warps = [min(shape.strips, shape.taken - at) for at in range(0, shape.taken, shape.strips)]
    return sum(max(-(-n // SCHEDULERS), SATURATED) for n in warps)


def _shares(splits: tuple[int, ...], each: list[int], warps: int) -> Iterator[tuple[int, int]]:
    """A split and the strips of a block: one wave for each split, then more of them."""
    while each:
        yield from zip(splits, each, strict=True)
        each = [-(-n // 2) for n in each] if max(each) > warps else []


class Division(NamedTuple):
    """A Shape, groups of the weight's scales, whether a codebook's table is wide, memory, and units
    that are multiplied together."""

    shape: Shape
    groups: Groups
    wide: bool
    memory: Memory
    span: int


def division_of(problem: Problem) -> Division | None:
    """How to divide a Problem; None where matmul/stream.cu does not take it."""
    p, fmt = problem, problem.format
    assert fmt is not None
    groups = Groups.of(fmt, p.depth)
    units = -(-p.depth // UNIT)
    by_rows = p.layout != FRAGMENTS_LAYOUT and is_hopper(p.arch)
    pressure = _pressure(fmt, groups, p.layout, p.dtype)
    ring = _chunk_groups(fmt, groups) if p.layout == FRAGMENTS_LAYOUT else 0
    tables = [packed_weight.table_bytes(fmt, wide=wide) for wide in (False, is_hopper(p.arch))]
    small, large = (Memory(table, ring) for table in tables)
    way = Way.of(p, groups) if by_rows else Way()

    def divided(memory: Memory, most: int = 0) -> Division | None:
        rest = p.arch, p.multiprocessors, p.gated, pressure, fmt.bits, most
        rows = min(p.rows, MOST_TILES * TILE)  # more are divided alike
        shape = divide(rows, p.columns, p.depth, groups, memory, *rest)
        if shape is None or -(-p.rows // shape.tokens) > MOST_GRID_Y:
            return None
        return Division(shape, groups, memory.table > small.table, memory, way.span)

    if way.copied:  # the larger table saves instructions
        rooms = [Memory(t, *room) for t in tables[::-1] for room in way.rooms(fmt.bits)]
        found = filter(None, map(divided, rooms))
        return min(found, key=lambda division: _cost(division, units), default=None)
    if by_rows:
        found = divided(large, ROWS_SHARED)
        if found is not None and found.shape.tokens == min(p.rows, MOST_TILES * TILE):
            return found
    found, wide = divided(small), divided(large)
    return wide if found and wide and wide.shape == found.shape else found


def _copies_groups(fmt: Format, groups: Groups) -> bool:
    """Whether groups of a prepacked weight go through shared memory: several in a unit."""
    scale = fmt.scale
    in_strips = packed_weight.lie(fmt, FRAGMENTS_LAYOUT) == packed_weight.IN_STRIPS
    nested = scale is not None and scale.nested == "double"
    return groups.fine > 1 and in_strips and not nested


def _chunk_groups(fmt: Format, groups: Groups) -> int:
    """Bytes of a warp for groups of chunks, as they are stored and made ready: ChunkGroups of
    matmul/stream_scales.cuh."""
    if not _copies_groups(fmt, groups):
        return 0
    count, numbers = CHUNK * groups.fine, 1
    if fmt.is_blocks:
        parts = fmt.layout
        per_block = parts.elements // parts.sub_block
        blocks = count if per_block == 1 else (count - 1) // per_block + 2
        numbers += parts.has_min
        row = numbers * (blocks * 2 + count * bool(parts.sc_runs))
    else:
        assert fmt.scale is not None
        numbers += fmt.offset == "min"
        row = count * (
            STORED_BYTES.get(fmt.scale.dtype, 1) * numbers + (fmt.offset == "zero_point")
        )
    return STRIP * (RING_CHUNKS * row + count * 4 * numbers)


def _cost(division: Division, units: int) -> tuple[int, int, int, int, int]:
    s, share = division.shape, division.memory.share
    busiest = -(-units // (share * s.split * s.depth)) * share
    return -s.tokens, s.rounds, -s.strips * s.depth, busiest, s.split


@lru_cache(maxsize=4096)
def shape_of(problem: Problem) -> Shape | None:
    """How the rows and columns of a Problem are divided, or None."""
    division = division_of(problem)
    return None if division is None else division.shape


@dataclass(frozen=True)
class Stream:
    """The orchestrator of matmul/stream.cu."""

    layouts = (FRAGMENTS_LAYOUT, Weight.layout)
    height = 0

    def takes(self, p: Problem) -> bool:
        """Prepacked weights, but with many rows of x on Hopper; and with few rows of x weights as
        they lie, if their rows are whole units."""
        if not (p.is_single and p.takes_halves and p.arch >= 80):
            return False
        assert p.format is not None
        if p.layout == FRAGMENTS_LAYOUT:
            known = p.rows <= FEW_ROWS or not (p.arch == 90 and p.aligned)
        else:
            known = p.rows <= FEW_ROWS and p.direct and packed_weight.takes_rows(p.format, p.depth)
        return known and shape_of(p) is not None

    def time_us(self, p: Problem) -> float:
        """It decodes anew for each `tokens` rows of x. A pass of 32 rows takes as long as it takes
        to read about 1.2 bytes a weight, one of 8 rows 0.7: that was measured on an H100."""
        shape = shape_of(p)
        assert shape is not None and p.format is not None
        passes = -(-p.rows // shape.tokens)
        return passes * p.weights * max(p.format.bits / 8, 0.5 + shape.tokens / 48) / p.rates.read

    def prepare(self, backend: Backend, product: Product) -> Prepared:
        weights = [weight for weight in product.weights if isinstance(weight, Weight)]
        first, second = weights[0], weights[-1]
        fmt, layout, gated = first.fmt, first.layout, len(product.weights) > 1
        problem, columns, depth = product.problem(backend), product.columns, product.depth
        strips, units, dtype = -(-columns // STRIP), -(-depth // UNIT), product.x.type_name
        packed = [
            packed_weight.pack(backend, w.fmt, w.parts, (columns, depth)) for w in (first, second)
        ]
        stride = product.x.row_stride
        copies = BY_ELEMENTS
        if product.x.is_aligned():
            copies = IN_RUNS if backend.arch >= 90 else BY_VECTORS

        def of_rows(rows: int) -> Run:
            division = division_of(replace(problem, rows=rows))
            assert division is not None
            shape, groups, memory = division.shape, division.groups, division.memory
            clusters, *taken = shared_evenly(strips, shape.taken)
            alone = memory.ring > 0 and is_hopper(backend.arch)
            launch = Launch(
                _program(fmt, dtype, division, layout, gated),
                (clusters * shape.split, -(-rows // shape.tokens), 1),
                32 * shape.strips * shape.depth,
                max(shared_bytes(shape, groups, units, memory, gated), ALONE if alone else 0),
            )
            rest = (rows, columns, depth, *taken, shape.tokens, copies)

            def run(backend: Backend, pointer: int, epilogue: bytes) -> None:
                backend.launch(launch, pointer, stride, *packed, epilogue, *rest)

            return run

        return of_rows


@lru_cache(maxsize=4096)
def _program(fmt: Format, dtype: str, division: Division, layout: str, gated: bool) -> Program:
    shape, groups = division.shape, division.groups
    facts = cpp.facts(fmt, decoding=not fmt.is_blocks)
    tile = cpp.numbers(
        "Tile",
        tiles=shape.tiles,
        strips=shape.strips,
        depth=shape.depth,
        split=shape.split,
        ahead=shape.ahead,
        group_units=groups.units,
        in_unit=groups.fine,
        lie=packed_weight.lie(fmt, layout),
        gated=gated,
        wide=division.wide,
        ring=division.memory.share,
        span=division.span,
    )
    arguments, text = (facts.type, cpp.ELEMENTS[dtype], tile.type), facts.text + tile.text
    return Program(
        "matmul/stream.cu", "matmul_stream", arguments, text, contract=True, overlaps=True
    )
