"""How matmul/hopper.cu divides a product: tiles of x and of the weight, and who takes them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from cuquant.array.fragments import STRIP, UNIT
from cuquant.formats import Format
from cuquant.gpu.limits import SHARED
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
STAGES = 24  # in shared memory, at most
LEAST_STAGES = 4  # beside a large table, of the most rows of x: with 3 it is a fifth slower
MANY = (160, 192, 224, 256)  # rows of x, of which a multiprocessor has two warpgroups
UNUSUAL_ROWS = (160, 224)  # of these, those whose products are a little slower
# Units of a stage, by rows of x.
SPANS = {16: (2,), 32: (2,), 64: (2,), 96: (2, 1), 128: (2, 1), **dict.fromkeys(MANY, (1,))}
TOKENS = tuple(SPANS)
FEW_MORE = 96  # than 64, in one tile: more than two warpgroups along K are slower than these
LARGE = 128  # rows of x of a tile; smaller ones are slower where there are many of them
SMALL_TILES = 4  # of a multiprocessor
ALONE = 224  # rows of x, of which two warpgroups along K are slower than one
WARPGROUPS = ((1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1))  # of rows, and of K
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

    @property
    def rows(self) -> int:
        """Columns of the result, of a block."""
        return GROUP_ROWS if self.kind == GATED else self.row_groups * GROUP_ROWS

    @property
    def threads(self) -> int:
        """Of a block: one warpgroup is for the copies."""
        return 128 * (self.row_groups * self.depth_groups + 1)

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
    small = shape.row_groups == 4 or not shape.alone or shape.tokens == 192 or large
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
    stage = shape.span * (shape.tokens * UNIT * 2 + width * UNIT * bits // 8) + 16
    whole = BOX_ALIGNMENT if shape.tokens in MANY else 1
    each = -(-drain_of(shape) * DRAIN_PITCH * 4 // whole) * whole
    pairs = shape.row_groups * shape.depth_groups * (shape.depth_groups - 1)  # that give sums
    most = -(-shape.tokens // (8 * shape.depth_groups))
    given = pairs and pairs * min(most, GIVEN_AT_ONCE // pairs) * GIVEN_BYTES
    drain = max(shape.row_groups * shape.depth_groups * each, given)
    drain = 0 if shape.once else drain
    return shape.stages * stage + drain + table + KEPT + (BARRIER if shape.split > 1 else 0)


@lru_cache(maxsize=4096)
def staged(shape: Shape, bits: int, table: int) -> Shape | None:
    """The shape with as many stages as fit, each of which belongs to one depth group; or None.

    Where so few fit that warps would wait for each other, stages have one unit.
    """
    each = shape.depth_groups
    for span in dict.fromkeys((shape.span, 1)):
        for stages in range(STAGES // each * each, max(3, 2 * each) - 1, -each):
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
    heavy
        Whether it takes many registers.
    tables
        Bytes of the smaller and of the larger table of a codebook; 0 where there is none.
    room
        What it leaves registers for: see room_of.
    """

    bits: int
    heavy: bool
    tables: tuple[int, int]
    room: int = 2

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(fmt: Format, depth: int, dtype: str) -> "Decoding":
        """That of a weight of so many columns, where x has this dtype."""
        tables = packed_weight.table_bytes(fmt), packed_weight.table_bytes(fmt, wide=True)
        return Decoding(fmt.bits, is_heavy(fmt, depth), tables, room_of(fmt, depth, dtype))

    @property
    def looked_up(self) -> bool:
        """Whether what codes stand for is looked up in a table."""
        return bool(self.tables[0])


def is_heavy(fmt: Format, depth: int) -> bool:
    """Whether decoding takes many registers."""
    return fmt.is_blocks or fmt.bits > 4 or bool(fmt.offset) or Groups.of(fmt, depth).fine > 1


def room_of(fmt: Format, depth: int, dtype: str) -> int:
    """What decoding leaves registers for: 2, four warpgroups that have different rows of a weight;
    1, four for up to 64 rows of x; 0, no more than three."""
    if fmt.is_blocks:
        return int(fmt.layout.elements <= UNIT)
    fine = Groups.of(fmt, depth).fine
    many = fmt.bits > 4 or (fmt.bits == 3 and (dtype == "bfloat16" or bool(fmt.offset)))
    taken = many + bool(fmt.offset) + (fine > 1)
    return 2 if taken <= 1 else int(fine <= 2 or not fmt.offset)


# What a multiprocessor does in a cycle, as was measured on an H100: bytes that come in from L2,
# those of a weight from memory, of which all of them have a part, and multiply-adds.
FEED, MEMORY, MULTIPLIED = 48.2, 12.95, 1943
# Bytes from L2 where blocks are not at the same units of x at a time: fewer requests are one.
FEED_APART = 33.5
# Of weights that are computed, looked up, or take many registers: cycles that a warpgroup needs for
# a unit, as its instructions wait for each other, and those in which no other one's can be issued.
# And more for each row of x, by buffers and slices of an operand, where products keep a warpgroup
# waiting. Where few stages fit, codes come late. Some of it is never hidden.
COMPUTED, LOOKED_UP, HEAVY = (610, 33), (608, 57), (960, 95)
WAITING = {(1, 4): 4.3, (2, 4): 0.75, (2, 2): 0.2, (2, 1): 0.2}
COMING_LATE, IN_TURN, IN_TURN_READING = 1.31, 0.04, 0.13
UNUSUAL = 1.04  # what products of UNUSUAL_ROWS rows of x take more than their part of others'
# Cycles of warpgroups whose sums are parts, of blocks of a cluster that meet, and of blocks that
# hand sums to others; floats of them in a cycle.
PARTS, MEETING, HANDING, GIVEN, SENT, HANDED = 420, 280, 4800, 10, 9, 6


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


def _cost(
    shape: Shape,
    rows: int,
    tile_rows: int,
    tiles: int,
    units: int,
    decoding: Decoding,
    processors: int,
) -> float:
    """Cycles that a product takes, but for what is the same for all shapes."""
    s, width = shape, shape.row_groups * GROUP_ROWS
    latency, issue = HEAVY if decoding.heavy else LOOKED_UP if decoding.looked_up else COMPUTED
    codes = (width if s.kind == GATED else tile_rows) * UNIT * (decoding.bits + 0.25) / 8
    alone = (latency + s.tokens * WAITING[s.buffers, s.slices]) / s.depth_groups
    if s.buffers == 2 and s.stages < 3 * s.depth_groups:
        alone *= COMING_LATE
    step = max(
        (s.tokens * UNIT * 2 + codes) / (FEED_APART if s.streamed else FEED),
        width * s.tokens * UNIT / MULTIPLIED + s.row_groups * issue,
        alone,
    )
    step += IN_TURN * alone
    sums = width * s.tokens
    end = 0.0 if s.alone else PARTS + (s.depth_groups - 1) * sums / GIVEN
    blocks, handing = blocks_of(s, tiles, units, processors), 0.0
    rounds: float = -(-tiles * s.split // blocks)
    if s.split > 1:
        end += PARTS + MEETING + sums / SENT
    if s.streamed:  # a block begins within one tile, and ends within another one
        rounds, handed = tiles / blocks, (1 + max(1, blocks / tiles)) * sums
        handing = end + HANDING + handed / HANDED
    reading = 0.0  # all weights once; the last rounds have what others leave them
    if rows <= TOKENS[-1]:
        reading = tiles * units * codes / (processors * MEMORY)
        reading += IN_TURN_READING * units / s.split * min(rounds, 1) * alone + end
    cost = max(rounds * (units / s.split * step + end), reading) + handing
    return cost * UNUSUAL if s.tokens in UNUSUAL_ROWS else cost


def _operands(tokens: int, groups: int, decoding: Decoding) -> tuple[int, int]:
    """Decoded operands of a warpgroup, and slices of each: what is fast and finds registers.

    Products that follow each slice leave less to wait for, but all four warps meet at each.
    """
    few_bits = decoding.bits < 3 and not decoding.looked_up
    if tokens in (FEW_MORE, 128) and groups == 4 and (decoding.heavy or few_bits):
        return 2, 1
    if decoding.heavy:
        return 2, 2
    if tokens == 64 and groups == 4:
        return 1, 4
    if tokens in (FEW_MORE, 128) and groups > 2:
        return 2, groups - 2
    return 2, 2 if decoding.looked_up and tokens <= 32 else 4


def _shapes(most: int, decoding: Decoding, kind: int) -> Iterator[Shape]:
    """All that the kernel can be, with as many stages as there may be."""
    for tokens in (most,) if kind == EXPERTS else (n for n in TOKENS if n <= most):
        for row_groups, depth_groups in WARPGROUPS:
            groups = row_groups * depth_groups
            if tokens == FEW_MORE and depth_groups > 2:
                continue
            if tokens == ALONE and depth_groups > 1:
                continue
            if row_groups == 4 and decoding.room < (2 if tokens >= FEW_MORE else 1):
                continue
            if (tokens in MANY and groups > 2) or (kind == GATED and row_groups != 2):
                continue
            operands = _operands(tokens, groups, decoding)
            for span in SPANS[tokens]:
                shape = Shape(tokens, row_groups, depth_groups, STAGES, span, *operands, kind)
                if kind != EXPERTS:
                    yield replace(shape, once=True, split=2)
                    if depth_groups > 1:
                        yield replace(shape, once=True)
                if tokens >= LARGE and row_groups == depth_groups == 2:
                    continue  # no registers are left for what comes after a tile
                if kind != EXPERTS:
                    yield replace(shape, streamed=True)
                yield shape


def divide(
    rows: int, columns: int, depth: int, decoding: Decoding, multiprocessors: int, kind: int = ONE
) -> Shape:
    """How to divide x [rows, depth] times a weight [columns, depth], or two of a gated unit.

    The shape that takes the fewest cycles: what comes in from L2, decoding and multiplying overlap,
    and the slowest of them counts. Of EXPERTS `rows` are those of a segment, and so of a tile.
    """
    # Tiles are whole TOKENS[0]: so many rows have as many tiles as the next multiple of it has.
    most = max(n for n in TOKENS if n < 2 * rows or n == TOKENS[0])
    rows = -(-rows // TOKENS[0]) * TOKENS[0]
    return _fastest(rows, most, columns, depth, decoding, multiprocessors, kind)


@lru_cache(maxsize=4096)
def _fastest(
    rows: int,
    most: int,
    columns: int,
    depth: int,
    decoding: Decoding,
    multiprocessors: int,
    kind: int,
) -> Shape:
    """`divide`, of a multiple of TOKENS[0] rows, with at most so many in a tile."""
    units = -(-depth // UNIT)
    best: tuple[float, Shape, int, int] | None = None
    for shape in _candidates(rows if kind == EXPERTS else most, decoding, kind):
        if shape.tokens == FEW_MORE and rows > FEW_MORE:
            continue
        token_tiles = -(-rows // shape.tokens)
        tile_rows = rows_of_tile(shape, columns, token_tiles, multiprocessors)
        tiles = -(-columns // tile_rows) * token_tiles
        if shape.tokens < LARGE <= rows and tiles > SMALL_TILES * multiprocessors:
            continue
        if shape.once and (tiles * shape.split > multiprocessors or units < shape.split):
            continue
        cost = _cost(shape, rows, tile_rows, tiles, units, decoding, multiprocessors)
        if best is None or cost < best[0]:
            best = cost, shape, token_tiles, tiles
    assert best is not None
    _, shape, token_tiles, tiles = best
    shape = replace(shape, shared_x=_shares_x(shape, token_tiles, tiles, multiprocessors))
    few = (shape.streamed or shape.split > 1) and shape.tokens in MANY
    if decoding.looked_up and not decoding.heavy and few:
        shape = replace(shape, slices=2)  # a block's few products have less to hide decoding behind
    return shape


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
    decoding = Decoding.of(p.format, p.depth, p.dtype)
    return lambda rows: divide(rows, p.columns, p.depth, decoding, p.multiprocessors, kind)


def shape_of(problem: Problem) -> Shape:
    """How to divide a Problem without experts."""
    return divider(problem)(problem.rows)
