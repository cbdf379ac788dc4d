"""Few rows of x times a prepacked weight, read at memory speed: matmul_stream.cu."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from cuquant.formats import Format, Uniform
from cuquant.fragments import FRAGMENTS_LAYOUT, STRIP, UNIT
from cuquant.jit import Launch, Program
from cuquant.ops.backend import Backend
from cuquant.ops.kernels import facts as words
from cuquant.ops.kernels import prepacked
from cuquant.ops.kernels.operands import Problem, Product, Weight
from cuquant.ops.kernels.prepacked import Groups

ROW_BYTES = 128  # of a unit of x in shared memory
BARRIER_BYTES = 16
BY_ELEMENTS, BY_VECTORS, IN_RUNS = 0, 1, 2  # matmul_stream.cu's Copies
# Of a block, at most: for 8, 16 and 32 rows of x, by _pressure, which is BLOCKS for ggml's, and
# FINE or more where what is loaded ahead leaves room for more warps.
BLOCKS, FINE = 3, 5
WARPS = ((16, 16, 12, 12, 8, 16, 16, 16), (16, 12, 8, 8, 8, 8, 8, 8), (8,) * 8)
TILE = 8  # rows of x that one product of a warp takes
MOST_TILES = 4
MOST_DEPTH = 8
MOST_MORE = 8  # rounds than the fewest
MOST_GRID_Y = 65535
# Bytes for x and tables where weights lie by rows: what is loaded ahead, of 16 rows, takes whole
# lines of the L1 cache, which is the rest.
ROWS_SHARED = 150_000
RING_BYTES = 4096  # of a warp, where codes of 4 bits by rows go through shared memory


@dataclass(frozen=True)
class Shape:
    """How matmul_stream.cu divides a product.

    Attributes
    ----------
    tokens, tiles
        Rows of x of a block, and the products of 8 that they take.
    strips, depth, split, rounds
        Strips of the weight and parts of K that a block's warps share; blocks that share K; and
        how often a warp takes another strip.
    ahead
        Units that are loaded ahead.
    """

    tokens: int
    tiles: int
    strips: int
    depth: int
    split: int
    rounds: int
    ahead: int


def _ahead(groups: Groups, bits: int, pressure: int, tiles: int) -> int:
    """Units that are loaded ahead: about 4, or 8 where they are small, in step with the groups."""
    if pressure >= FINE and tiles == 1:
        return 4 - (pressure - FINE)
    if pressure == BLOCKS and groups.fine > 1:
        return 3 if tiles <= 2 else 2
    if groups.fine > 1 and bits == 6 and tiles == 1:
        return 3  # what registers have room for
    if bits <= 2 and not pressure and groups.fine == 1 and groups.units in (0, 1, 2, 4, 8):
        return 8
    if groups.fine > 1 or groups.units in (0, 1, 2, 4):
        return 4
    return next(n for n in (4, 3, 6, 5, 7, 2, 1) if groups.units % n == 0)


def _pressure(fmt: Format, groups: Groups, layout: str, dtype: str, gated: bool) -> int:
    """How many registers decoding takes: an index of WARPS."""
    laid = layout == FRAGMENTS_LAYOUT
    unit = _registers(fmt, groups) + gated
    if laid and groups.fine > 1 and unit <= (9 if fmt.bits < 8 else 11):
        return FINE + (0 if unit <= 8 and fmt.bits > 1 else 1 if unit <= 9 else 2)
    if fmt.is_blocks or (laid and groups.fine == 4):
        return BLOCKS
    uniform = isinstance(fmt.codec, Uniform)
    if (fmt.offset and fmt.bits == 8) or (uniform and fmt.bits == 7):
        return 4
    if not laid and fmt.bits == 4 and (groups.fine > 1 or fmt.offset) and dtype == "float16":
        return 1
    three = uniform and fmt.bits == 3 and laid and groups.fine == 1
    if three and (dtype == "float16" or not fmt.offset):
        return 1
    if groups.fine > 1 or fmt.offset or fmt.bits not in (2, 4):
        return 2
    if uniform:  # integers of bfloat16 take more steps
        return 2 if dtype == "bfloat16" else int(not laid)
    return 1 if laid else 2


def _registers(fmt: Format, groups: Groups) -> int:
    """What a lane loads of a unit: codes, and numbers of its groups for two rows."""
    scale = fmt.scale
    if fmt.is_blocks:
        parts = fmt.layout
        numbers, more = 1 + parts.has_min, bool(parts.sc_runs)
        return fmt.bits + groups.fine * numbers * (1 + more) + more  # and where blocks begin
    if scale is None:
        return fmt.bits
    numbers = 2 if scale.dtype == "float32" else 1
    nested = 2 if scale.nested == "double" else 0
    looked_up = scale.dtype == "float16" and prepacked.table_bytes(fmt) > 0  # halves beside levels
    return fmt.bits + groups.fine * (numbers + nested + bool(fmt.offset)) + looked_up


def _warps(tiles: int, pressure: int, clusters: bool) -> int:
    """Of a block, at most. What was not measured on sm_90 has room for whatever decoding takes."""
    if not clusters and pressure:
        return WARPS[-1][pressure]
    return WARPS[min(tiles - 1, 2)][pressure]


def _has_clusters(arch: int) -> bool:
    """And with them the shared memory of a data center's GPU."""
    return 90 <= arch < 100


def shared_bytes(
    shape: Shape, groups: Groups, units: int, table: int, gated: bool, ring: int = 0
) -> int:
    """Dynamic shared memory of a block; `ring`: bytes of a warp."""
    share = shape.ahead if not groups.units else min(groups.units, shape.ahead)
    shares = -(-units // share)
    x = (shares + 2 * shape.split - 1) // shape.split * share * shape.tokens * ROW_BYTES
    pitch = shape.strips * shape.rounds * STRIP * (2 if gated else 1) + 4
    table += shape.strips * shape.depth * ring
    return table + x + shape.depth * shape.tiles * TILE * pitch * 4 + BARRIER_BYTES


@lru_cache(maxsize=4096)
def divide(
    rows: int,
    columns: int,
    depth: int,
    groups: Groups,
    table: int,
    arch: int,
    multiprocessors: int,
    gated: bool = False,
    pressure: int = 0,
    bits: int = 4,
    most: int = 0,
    ring: int = 0,
) -> Shape | None:
    """How to divide x [rows, depth] times a weight [columns, depth]; None where x does not fit.

    One wave of blocks, or more where the sums of so many rows of the weight do not fit, with as
    many warps as have work; K is shared by warps of a block first, since their sums meet in
    shared memory, and by two blocks of a cluster where x is large. `pressure`: see _pressure.
    `most`: bytes of shared memory, but for all that a block may have.
    """
    strips, units = -(-columns // STRIP), -(-depth // UNIT)
    clusters = _has_clusters(arch)
    most = most or (prepacked.SHARED_MOST if clusters else prepacked.SHARED_OLD)
    tokens = min(rows, MOST_TILES * TILE)
    while tokens:
        tiles = 1 << (-(-tokens // TILE) - 1).bit_length()
        ahead = _ahead(groups, bits, pressure, tiles)
        splits = (1,) if not clusters or units < 2 * ahead else (1, 2) if tokens <= TILE else (2, 1)
        all_each = [-(-strips // max(multiprocessors // split, 1)) for split in splits]
        warps = _warps(tiles, pressure, clusters)
        for split, each in _shares(splits, all_each, warps):
            found: list[Shape] = []
            least = -(-each // warps)
            for rounds in range(least, min(each, least + MOST_MORE) + 1):
                own = -(-each // rounds)
                deep = max(min(warps // own, MOST_DEPTH, units // (split * ahead)), 1)
                shape = Shape(tokens, tiles, own, deep, split, rounds, ahead)
                if shared_bytes(shape, groups, units, table, gated, ring) <= most:
                    found.append(shape)
            if found:  # the fewest rounds in which about as many warps have work as in any
                best = max(shape.depth / shape.rounds for shape in found)
                return next(s for s in found if s.depth / s.rounds >= 0.8 * best)
        tokens = tokens // 2 if tokens > TILE else tokens - 1
    return None


def _shares(splits: tuple[int, ...], each: list[int], warps: int) -> Iterator[tuple[int, int]]:
    """A split and the strips of a block: one wave for each split, then more of them."""
    while each:
        yield from zip(splits, each, strict=True)
        each = [-(-n // 2) for n in each] if max(each) > warps else []


class Division(NamedTuple):
    """A Shape, groups of the weight's scales, a codebook's table, and a warp's ring of codes."""

    shape: Shape
    groups: Groups
    wide: bool
    table: int
    ring: int = 0


def division_of(problem: Problem) -> Division | None:
    """How to divide a Problem; None where matmul_stream.cu does not take it."""
    p, fmt = problem, problem.format
    assert fmt is not None
    groups, table = Groups.of(fmt, p.depth), prepacked.table_bytes(fmt)
    pressure = _pressure(fmt, groups, p.layout, p.dtype, p.gated)
    numbers = p.rows, p.columns, p.depth
    larger = prepacked.table_bytes(fmt, wide=_has_clusters(p.arch))
    rest = p.arch, p.multiprocessors, p.gated, pressure, fmt.bits
    by_rows = p.layout != FRAGMENTS_LAYOUT and _has_clusters(p.arch)
    if by_rows and fmt.bits == 4 and groups.fine > 1:
        return _with_ring(numbers, groups, (larger, table), rest)
    if by_rows:
        shape = divide(*numbers, groups, larger, *rest, most=ROWS_SHARED)
        if shape is not None and shape.tokens == min(p.rows, MOST_TILES * TILE):
            if shape.rounds > 1 and pressure == 2 and p.rows <= TILE and fmt.bits in (4, 8):
                # Scarce registers cost less than another round.
                rest = p.arch, p.multiprocessors, p.gated, 1, fmt.bits
                more = divide(*numbers, groups, larger, *rest, most=ROWS_SHARED)
                if more is not None and more.rounds < shape.rounds and more.split == 1:
                    shape = more
            return Division(shape, groups, larger > table, larger)
    shape = divide(*numbers, groups, table, *rest)
    if shape is None or -(-p.rows // shape.tokens) > MOST_GRID_Y:
        return None
    wide = larger > table and divide(*numbers, groups, larger, *rest) == shape
    return Division(shape, groups, wide, larger if wide else table)


def _with_ring(
    numbers: tuple[int, int, int], groups: Groups, tables: tuple[int, int], rest: Any
) -> Division | None:
    """How to divide a product whose codes go through shared memory.

    The larger table saves instructions, unless it leaves room for fewer warps, or for half of x.
    """
    found = []
    for table in tables:
        shape = divide(*numbers, groups, table, *rest, ring=RING_BYTES)
        if shape is not None and -(-numbers[0] // shape.tokens) <= MOST_GRID_Y:
            found.append(Division(shape, groups, table > tables[1], table, RING_BYTES))
    if not found:
        return None

    def cost(division: Division) -> tuple[int, int, int, int]:
        s = division.shape
        return -s.tokens, s.rounds, -s.strips * s.depth, s.split

    return min(found, key=cost)


def shape_of(problem: Problem) -> Shape | None:
    """How the rows and columns of a Problem are divided, or None."""
    division = division_of(problem)
    return None if division is None else division.shape


@dataclass(frozen=True)
class Stream:
    """The orchestrator of matmul_stream.cu."""

    layouts = (FRAGMENTS_LAYOUT, Weight.layout)
    height = 0

    def prepare(self, backend: Backend, product: Product) -> Callable[[Backend, int, bytes], None]:
        weights = [weight for weight in product.weights if isinstance(weight, Weight)]
        first, second = weights[0], weights[-1]
        fmt, gated = first.fmt, len(product.weights) > 1
        division = division_of(product.problem(backend))
        assert division is not None
        shape, groups, wide, table, ring = division
        strips = -(-product.columns // STRIP)
        blocks = -(-strips // (shape.strips * shape.rounds)) * shape.split
        units = -(-product.depth // UNIT)
        launch = Launch(
            _program(fmt, product.x.dtype.name, shape, groups, first.layout, gated, wide, ring > 0),
            (blocks, -(-product.rows // shape.tokens), 1),
            32 * shape.strips * shape.depth,
            shared_bytes(shape, groups, units, table, gated, ring),
        )
        packed = [
            prepacked.pack(backend, w.fmt, w.parts, (product.columns, product.depth))
            for w in (first, second)
        ]
        stride = product.x.row_stride
        copies = BY_ELEMENTS
        if product.x.is_aligned():
            # Two rows in runs lie in the same banks, which matters where tables are looked up.
            few = shape.tokens <= (1 if table else 2)
            copies = IN_RUNS if backend.arch >= 90 and few else BY_VECTORS
        numbers = (product.rows, product.columns, product.depth)
        rest = (*numbers, shape.rounds, shape.tokens, copies)

        def run(backend: Backend, pointer: int, epilogue: bytes) -> None:
            backend.launch(launch, pointer, stride, *packed, epilogue, *rest)

        return run


@lru_cache(maxsize=4096)
def _program(
    fmt: Format,
    dtype: str,
    shape: Shape,
    groups: Groups,
    layout: str,
    gated: bool,
    wide: bool,
    ring: bool,
) -> Program:
    facts = words.facts(fmt, decoding=not fmt.is_blocks)
    arguments = (
        facts.type,
        words.ELEMENTS[dtype],
        shape.tiles,
        shape.strips,
        shape.depth,
        shape.split,
        shape.ahead,
        groups.units,
        groups.fine,
        prepacked.lie(fmt, layout),
        int(gated),
        int(wide),
        int(ring),
    )
    return Program(
        "matmul_stream.cu", "matmul_stream", arguments, facts.text, contract=True, overlaps=True
    )
