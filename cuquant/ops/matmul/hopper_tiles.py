"""How matmul/hopper.cu divides a product: tiles of x and of the weight, and who takes them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from cuquant.array.fragments import STRIP, UNIT
from cuquant.formats import Format
from cuquant.gpu.limits import SHARED
from cuquant.gpu.rates import TileCosts
from cuquant.ops.layout import packed_weight
from cuquant.ops.layout.packed_weight import Groups
from cuquant.ops.matmul.problem import Problem

GROUP_ROWS = 64  # of a weight, that a warpgroup takes
DRAIN, DRAIN_SMALL = 64, 32  # rows of x that are stored at a time, at most
DRAIN_PITCH = 72  # floats that each of them has room for
KEPT = 384  # bytes, of a power of two and of five numbers for each warp
GIVEN_AT_ONCE = 12  # eights of rows of x that warpgroups along K give each other at a time
GIVEN_BYTES = 2048  # of each of them
BARRIER = 16  # bytes of the one for what another block gives, and to 16 of them
FLAG_BYTES = 128  # of a block, beside the sums that it hands to another one
BOX_ALIGNMENT = 1024  # bytes on which those begin that the copy engine stores
BOX_TOKENS, BOX_SMALL = 16, 8  # that it stores, where tiles have no whole DRAIN
# Bytes of codes that a block has on their way: where they are two or three times as many, all
# blocks together read memory up to a fifth more slowly.
ON_THEIR_WAY = 48 << 10
# But so many stages at least, of a block and of each depth group, and units of each: fewer are
# slower.
STAGES, EACH, UNITS = 4, 3, 8
LEAST_STAGES = 4  # beside a large table, of the most rows of x: with 3 it is a fifth slower
MANY = (160, 192, 256)  # rows of x, of which a multiprocessor has two warpgroups
# Units of a stage, by rows of x.
SPANS = {16: (4,), 32: (2,), 64: (2,), 96: (2, 1), 128: (2, 1), **dict.fromkeys(MANY, (1,))}
TOKENS = tuple(SPANS)
FEW_MORE = 96  # than 64, in one tile: more than two warpgroups along K are slower than these
LARGE = 128  # rows of x of a tile; smaller ones are slower where there are many of them
SMALL_TILES = 4  # of a multiprocessor
INVARIANT_ROWS = 64  # of x: rows that must not depend on their number suit tiles for so many
WARPGROUPS = ((1, 2), (1, 3), (2, 1), (2, 2), (3, 1))  # of rows, and of K
ONE, GATED, EXPERTS = 0, 1, 2  # matmul/hopper.cu's Kind


@dataclass(frozen=True)
class Shape:
    """How matmul/hopper.cu divides a product.

    Attributes
    ----------
    tokens
        Rows of x of a block.
    row_groups, depth_groups
        Warpgroups of a block that have different rows of the weight, or each one of the two weights
        of a gated unit; and different parts of K.
    stages, span
        Parts of x and of the weight in shared memory, and units of each.
    buffers, slices
        Decoded operands of a warpgroup, and how many times 16 columns each of them has.
    wide
        Whether the table of a codebook is the larger one.
    kind
        ONE weight, the two of a GATED unit, or EXPERTS.
    shared_x
        Whether the two blocks of a cluster have the same rows of x, of which each brings half to
        both.
    streamed
        Whether blocks share the units of the last tiles: see streamed_tiles.
    once
        Whether no block has two tiles, so that sums that meet take the place of x.
    split
        Blocks that share K of a tile: the two of a cluster.
    element
        Bytes of what x has and codes become.
    x_fine, segment, folded
        Of bytes: groups of x's scales in a unit, units between sums that are float32, and whether
        operands have their share of the weight's scales, as matmul/hopper_codes.cuh has them.
    """

    tokens: int
    row_groups: int
    depth_groups: int
    stages: int
    span: int
    buffers: int
    slices: int
    kind: int = ONE
    wide: bool = False
    shared_x: bool = False
    streamed: bool = False
    once: bool = False
    split: int = 1
    element: int = 2
    x_fine: int = 0
    segment: int = 0
    folded: bool = False

    @property
    def rows(self) -> int:
        """Columns of the result, of a block."""
        return GROUP_ROWS if self.kind == GATED else self.row_groups * GROUP_ROWS

    @property
    def threads(self) -> int:
        """Of a block: one warpgroup is for the copies."""
        return 128 * (self.row_groups * self.depth_groups + 1)

    @property
    def scale_bytes(self) -> int:
        """Of x's scales in a unit, whose first ones need not start on a vector with EXPERTS."""
        return self.x_fine * (self.tokens + (4 if self.kind == EXPERTS else 0)) * 4

    @property
    def portion(self) -> int:
        """Units that no two blocks share: those that the warpgroups along K take together."""
        return self.span * self.depth_groups

    @property
    def alone(self) -> bool:
        """Whether a warpgroup's sums are those of its block."""
        return self.depth_groups == 1

    @property
    def sends(self) -> bool:
        """Whether the copy engine stores whole tiles of results."""
        return self.alone and self.split == 1 and self.kind == ONE and self.tokens in MANY

    @property
    def handed_bytes(self) -> int:
        """Memory for the sums that a block hands to another one; 0 where none does."""
        sums = self.tokens * self.row_groups * GROUP_ROWS * 4
        return FLAG_BYTES + sums if self.streamed else 0


def drain_of(shape: Shape) -> int:
    """Rows of x that a warpgroup stores at a time: matmul/hopper_drain.cuh's drain_of."""
    large = shape.wide and shape.tokens == TOKENS[-1]
    small = not shape.alone or shape.tokens == 192 or large
    tokens = shape.tokens // shape.split
    own = 8 if tokens % (8 * shape.depth_groups) else tokens // shape.depth_groups
    each = min(own, DRAIN_SMALL if small else DRAIN)
    while own % each or (shape.alone and each < own and own // each % 2):
        each -= 8
    return each


def box_of(shape: Shape, token_tiles: int, tile_tokens: int) -> int:
    """And by the copy engine: fewer where there are several tiles, which have no whole ones."""
    drain = drain_of(shape)
    if token_tiles == 1 or tile_tokens % drain == 0:
        return drain
    return BOX_SMALL if drain % BOX_TOKENS else BOX_TOKENS


def shared_bytes(shape: Shape, bits: int, table: int) -> int:
    """Dynamic shared memory of a block."""
    width = shape.row_groups * GROUP_ROWS
    unit = shape.tokens * UNIT * shape.element + width * UNIT * bits // 8 + shape.scale_bytes
    stage = shape.span * unit + 16
    whole = BOX_ALIGNMENT if shape.tokens in MANY else 1
    each = -(-drain_of(shape) * DRAIN_PITCH * 4 // whole) * whole
    pairs = shape.row_groups * shape.depth_groups * (shape.depth_groups - 1)  # that give sums
    most = -(-shape.tokens // (8 * shape.depth_groups))
    given = pairs and pairs * min(most, GIVEN_AT_ONCE // pairs) * GIVEN_BYTES
    drain = max(shape.row_groups * shape.depth_groups * each, given)
    drain = 0 if shape.once else drain
    return shape.stages * stage + drain + table + KEPT + (BARRIER if shape.split > 1 else 0)


@lru_cache(maxsize=4096)
def staged(shape: Shape, bits: int, table: int, coming: int = ON_THEIR_WAY) -> Shape | None:
    """The shape with as many stages as help and fit, each of which belongs to one depth group; or
    None.

    `coming` bytes of codes are on their way. Where so few fit that warps would wait for each other,
    stages have one unit.
    """
    each, codes = shape.depth_groups, shape.row_groups * GROUP_ROWS * UNIT * bits // 8
    for span in dict.fromkeys((shape.span, 1)):
        least = max(-(-STAGES // each), EACH, -(-UNITS // span))
        most = max(least, coming // (span * codes * each)) * each
        for stages in range(most, max(3, 2 * each) - 1, -each):
            found = replace(shape, stages=stages, span=span)
            if shared_bytes(found, bits, table) <= SHARED[90]:
                return found
    return None


class Decoding(NamedTuple):
    """What it takes to decode a weight.

    Attributes
    ----------
    bits
        Of a code.
    kind
        The field of TileCosts that tells its time.
    tables
        Bytes of the smaller and of the larger table of a codebook; 0 where there is none.
    """

    bits: int
    kind: str
    tables: tuple[int, int]

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(fmt: Format, depth: int) -> "Decoding":
        """That of a weight of so many columns."""
        tables = packed_weight.table_bytes(fmt), packed_weight.table_bytes(fmt, wide=True)
        kind = "blocks" if fmt.is_blocks else "looked_up" if tables[0] else "computed"
        heavy = kind != "blocks" and is_heavy(fmt, depth)
        return Decoding(fmt.bits, "heavy" if heavy else kind, tables)

    @property
    def heavy(self) -> bool:
        """Whether it takes many registers."""
        return self.kind in ("heavy", "blocks")


def is_heavy(fmt: Format, depth: int) -> bool:
    """Whether decoding takes many registers."""
    return fmt.is_blocks or fmt.bits > 4 or bool(fmt.offset) or Groups.of(fmt, depth).fine > 1


class Work(NamedTuple):
    """What is to be divided, but for the rows of x.

    Attributes
    ----------
    columns, depth
        N and K; of a gated unit, N of each weight.
    decoding
        Of the weight.
    processors, costs
        Multiprocessors, and what they take.
    kind
        As Shape has it.
    """

    columns: int
    depth: int
    decoding: Decoding
    processors: int
    costs: TileCosts
    kind: int = ONE

    @property
    def units(self) -> int:
        """Of K."""
        return -(-self.depth // UNIT)


def streamed_tiles(tiles: int, processors: int) -> int:
    """Of how many tiles blocks share the units: those behind the last round but one of whole ones.

    So each of them has at least a whole tile's units, where there are so many, and few meet.
    """
    return tiles if tiles < processors else processors + tiles % processors


def blocks_of(shape: Shape, tiles: int, units: int, processors: int) -> int:
    """Blocks of the kernel, each of which has something to do."""
    if shape.once:
        return tiles * shape.split
    return min(processors, tiles * (-(-units // shape.portion) if shape.streamed else 1))


def cut(shape: Shape, rows: int, work: Work) -> tuple[int, int, int]:
    """Rows of a tile of the weight; tiles along x, and all of them."""
    token_tiles = -(-rows // shape.tokens)
    tile_rows = rows_of_tile(shape, work.columns, token_tiles, work.processors)
    return tile_rows, token_tiles, token_tiles * -(-work.columns // tile_rows)


def time_us(shape: Shape, rows: int, work: Work) -> float:
    """About how many microseconds a product takes that is divided so.

    Copies, decoding and multiplying of units overlap, so that the slowest of them counts, and the
    others a little where they take nearly as long.
    """
    tile_rows, _, tiles = cut(shape, rows, work)
    s, width = shape, shape.row_groups * GROUP_ROWS
    costs, bits, units = work.costs, work.decoding.bits, work.units
    waits, issues = getattr(costs, work.decoding.kind)
    waits += s.tokens * (costs.row_of_four if s.slices == 4 else costs.row_of_two)
    codes = (width if s.kind == GATED else tile_rows) * UNIT * (bits + 0.25) / 8
    arriving = costs.arriving / (s.stages * s.span)
    multiplied = width * s.tokens * UNIT / costs.multiplied + s.row_groups * issues
    unit = (arriving**4 + multiplied**4 + waits**4) ** 0.25
    sums = width * s.tokens
    end = (s.depth_groups - 1) * sums / costs.given
    if s.split > 1:
        end += sums / costs.sent
    blocks, handing = blocks_of(s, tiles, units, work.processors), 0.0
    rounds: float = -(-tiles * s.split // blocks)
    if s.streamed:  # a block begins within one tile, and ends within another one
        rounds, handed = tiles / blocks, (1 + max(1, blocks / tiles)) * sums
        handing = end + costs.handing + handed / costs.handed
    reading = 0.0  # all weights once; the last rounds have what others leave them
    if rows <= TOKENS[-1]:
        reading = tiles * units * codes / costs.memory + end
    busy = max(rounds * (units / s.split * unit + end), reading) + handing
    return (costs.start + busy) / 1000


def _operands(tokens: int, groups: int, decoding: Decoding) -> tuple[int, int]:
    """Decoded operands of a warpgroup, and slices of each: what is fast and finds registers.

    Products that follow each slice leave less to wait for, but all four warps meet at each.
    """
    few_bits = decoding.bits < 3 and decoding.kind == "computed"
    if tokens in (FEW_MORE, 128) and groups == 4 and (decoding.heavy or few_bits):
        return 2, 1
    if decoding.heavy:
        return 2, 2
    if tokens == 64 and groups == 4:
        return 1, 4
    if tokens in (FEW_MORE, 128) and groups > 2:
        return 2, groups - 2
    return 2, 2 if decoding.kind == "looked_up" and tokens <= 32 else 4


def _shapes(most: int, decoding: Decoding, kind: int) -> Iterator[Shape]:
    """All that the kernel can be, with as many stages as there may be."""
    for tokens in (most,) if kind == EXPERTS else (n for n in TOKENS if n <= most):
        for row_groups, depth_groups in WARPGROUPS:
            groups = row_groups * depth_groups
            if tokens == FEW_MORE and depth_groups > 2:
                continue
            if (tokens in MANY and groups > 2) or (kind == GATED and row_groups != 2):
                continue
            operands = _operands(tokens, groups, decoding)
            for span in SPANS[tokens]:
                shape = Shape(tokens, row_groups, depth_groups, 0, span, *operands, kind)
                if kind != EXPERTS:
                    yield replace(shape, once=True, split=2)
                    if depth_groups > 1:
                        yield replace(shape, once=True)
                if tokens >= LARGE and row_groups == depth_groups == 2:
                    continue  # no registers are left for what comes after a tile
                if tokens in MANY and depth_groups == 2:
                    # Two warpgroups of rows were faster in every product that was measured.
                    continue
                if kind != EXPERTS:
                    yield replace(shape, streamed=True)
                yield shape


def divide(rows: int, work: Work) -> Shape:
    """How to divide x [rows, depth] times a weight, or two of a gated unit, so that it takes least.

    Of EXPERTS `rows` are those of a segment, and so of a tile.
    """
    return _fastest(-(-rows // TOKENS[0]) * TOKENS[0], work)


@lru_cache(maxsize=4096)
def _fastest(rows: int, work: Work) -> Shape:
    return min(ways(rows, work), key=lambda way: way[0])[1]


def ways(rows: int, work: Work) -> Iterator[tuple[float, Shape]]:
    """All ways to divide a product, with the microseconds that each may take.

    Tiles are whole TOKENS[0]: any number of rows has the ways of the next multiple of it.
    """
    rows = -(-rows // TOKENS[0]) * TOKENS[0]
    most = max(n for n in TOKENS if n < 2 * rows)
    decoding, processors = work.decoding, work.processors
    for shape in _candidates(rows if work.kind == EXPERTS else most, decoding, work.kind):
        if shape.tokens == FEW_MORE and rows > FEW_MORE:
            continue
        _, token_tiles, tiles = cut(shape, rows, work)
        if shape.tokens < LARGE <= rows and tiles > SMALL_TILES * processors:
            continue
        if shape.once and (tiles * shape.split > processors or work.units < shape.split):
            continue
        shared_x = _shares_x(shape, token_tiles, tiles, processors)
        # A block's few products have less to hide decoding behind.
        few = (shape.streamed or shape.split > 1) and shape.tokens in MANY
        slices = 2 if decoding.kind == "looked_up" and few else shape.slices
        if shared_x or slices != shape.slices:
            shape = replace(shape, shared_x=shared_x, slices=slices)
        yield time_us(shape, rows, work), shape


@lru_cache(maxsize=1024)
def _candidates(most: int, decoding: Decoding, kind: int) -> tuple[Shape, ...]:
    """All shapes with at most so many rows of x in a tile, with their stages: those of the larger
    table of a codebook, where it leaves room for enough."""
    tables = decoding.tables

    def found(shape: Shape) -> Shape | None:
        for wide in (True, False) if tables[1] > tables[0] else (False,):
            made = staged(replace(shape, wide=wide), decoding.bits, tables[wide])
            if made and (shape.tokens < TOKENS[-1] or made.stages >= LEAST_STAGES):
                return made
        return None

    return tuple(filter(None, map(found, _shapes(most, decoding, kind))))


def _shares_x(shape: Shape, token_tiles: int, tiles: int, processors: int) -> bool:
    """Whether the two blocks of a cluster have the same rows of x, of which each brings half.

    With one tile of them all blocks read the same ones at the same time.
    """
    able = shape.sends and shape.span == 1 and token_tiles > 1
    return able and processors % 2 == 0 and tiles // token_tiles % 2 == 0


def tokens_of_tile(rows: int, token_tiles: int) -> int:
    """Rows of x of a tile: as many of each, where there are several, but for a box."""
    if token_tiles == 1:
        return rows
    return -(-rows // (token_tiles * BOX_TOKENS)) * BOX_TOKENS


def rows_of_tile(shape: Shape, columns: int, token_tiles: int, processors: int) -> int:
    """Rows of a tile, whole strips: fewer than there may be where no block has two tiles, and for
    few rows of x, which weights keep waiting, in any case, so that all rounds are full."""
    blocks = processors // (token_tiles * shape.split)
    rounds = -(-columns // (blocks * shape.rows)) if blocks else 0
    few = shape.tokens == TOKENS[0] and token_tiles == 1
    if shape.kind != ONE or shape.streamed or not (rounds == 1 or (rounds > 1 and few)):
        return shape.rows
    return -(-columns // (rounds * blocks * STRIP)) * STRIP


def divider(p: Problem, *, experts: bool = False) -> Callable[[int], Shape]:
    """How to divide a Problem of so many rows of x; with experts, of their segments."""
    assert p.format is not None
    kind = EXPERTS if experts else GATED if p.gated else ONE
    decoding = Decoding.of(p.format, p.depth)
    work = Work(p.columns, p.depth, decoding, p.multiprocessors, p.rates.tiles, kind)
    return lambda rows: divide(rows, work)


def shape_of(problem: Problem) -> Shape:
    """How to divide a Problem without experts."""
    return divider(problem)(problem.rows)


def invariant_shape(problem: Problem) -> Shape:
    """How to divide a Problem so that a row's sums do not depend on how many rows there are.

    Each tile is one block's, from its first unit to its last: the fastest such way for
    INVARIANT_ROWS.
    """
    assert problem.format is not None
    decoding = Decoding.of(problem.format, problem.depth)
    rates, processors = problem.rates.tiles, problem.multiprocessors
    work = Work(problem.columns, problem.depth, decoding, processors, rates)
    found = ways(INVARIANT_ROWS, work)
    alone = [way for way in found if not (way[1].once or way[1].streamed or way[1].shared_x)]
    return min(alone, key=lambda way: way[0])[1]
