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
DRAIN, DRAIN_SMALL = 64, 32  # rows of x that are stored at a time
DRAIN_PITCH = 72  # floats that each of them has room for
UNITS = 64  # bytes, of a power of two for each warp
BOX_ALIGNMENT = 1024  # bytes on which those begin that the copy engine stores
BOX_TOKENS, BOX_SMALL = 16, 8  # that it stores, where tiles have no whole DRAIN
STAGES = 24  # in shared memory, at most
LEAST_STAGES = 4  # beside a large table, of the most rows of x: with 3 it is a fifth slower
MANY = (160, 192, 224, 256)  # rows of x, of which a multiprocessor has two warpgroups
QUARTERED = (160, 224)  # of these, those that are stored by quarters
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
    split
        Blocks that share K.
    stages, span
        Parts of x and of the weight in shared memory, and units of each.
    buffers, slices
        Decoded operands of a warpgroup, and how many times 16 columns each of them has.
    wide
        Whether the table of a codebook is the larger one.
    kind
        ONE weight, the two of a GATED unit, or EXPERTS.
    paired
        Whether the last tiles, that are too few for all multiprocessors, are shared by two blocks.
    beside
        Whether parts of sums, of warpgroups that share K, have a place beside x.
    shared_x
        Whether the two blocks of a cluster have the same rows of x, of which each brings half to
        both.
    halved
        Whether the last tiles of the two blocks of a cluster have 64 rows of the weight in common,
        of which each multiplies half of K.
    """

    tokens: int
    row_groups: int
    depth_groups: int
    split: int
    stages: int
    span: int
    buffers: int
    slices: int
    kind: int = ONE
    wide: bool = False
    paired: bool = False
    beside: bool = False
    shared_x: bool = False
    halved: bool = False

    @property
    def rows(self) -> int:
        """Columns of the result, of a block."""
        return GROUP_ROWS if self.kind == GATED else self.row_groups * GROUP_ROWS

    @property
    def threads(self) -> int:
        """Of a block: one warpgroup is for the copies."""
        return 128 * (self.row_groups * self.depth_groups + 1)

    @property
    def alone(self) -> bool:
        """Whether a warpgroup's sums are the whole ones."""
        return self.depth_groups == self.split == 1

    @property
    def sends(self) -> bool:
        """Whether the copy engine stores whole tiles of results."""
        return self.alone and self.kind == ONE and self.tokens in MANY

    @property
    def persistent(self) -> bool:
        """Whether blocks take one tile after the other: sums have a place beside x."""
        return self.alone or self.kind == EXPERTS or self.beside


def drain_of(shape: Shape) -> int:
    """Rows of x that are stored at a time: few where other things need the place; an even part."""
    if shape.tokens in QUARTERED:
        return shape.tokens // 4
    large = shape.wide and shape.tokens == TOKENS[-1]
    small = large or shape.row_groups == 4 or shape.tokens == 192
    most = DRAIN_SMALL if small else DRAIN
    return most * 3 // 4 if shape.tokens == FEW_MORE else most


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
    drain = 0
    if shape.alone:
        each = min(shape.tokens, drain_of(shape)) * DRAIN_PITCH * 4
        whole = BOX_ALIGNMENT if shape.tokens in MANY else 1
        drain = shape.row_groups * -(-each // whole) * whole
    elif shape.persistent:
        drain = shape.depth_groups * shape.tokens * (width + 4) * 4
    received = 16 if shape.split > 1 or shape.paired or shape.halved else 0
    return shape.stages * stage + drain + table + UNITS + received


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


def has_place(shape: Shape, bits: int) -> bool:
    """Whether sums fit where x was."""
    width = shape.row_groups * GROUP_ROWS
    sums = shape.depth_groups * shape.tokens * (width + 4) * 4
    return sums <= shape.stages * shape.span * (shape.tokens * UNIT * 2 + width * UNIT * bits // 8)


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
    """What decoding leaves registers for: 2, four warpgroups that have different rows of a weight,
    and to skip stages; 1, four for up to 64 rows of x; 0, no more than three."""
    if fmt.is_blocks:
        return int(fmt.layout.elements <= UNIT)
    fine = Groups.of(fmt, depth).fine
    many = fmt.bits > 4 or (fmt.bits == 3 and (dtype == "bfloat16" or bool(fmt.offset)))
    taken = many + bool(fmt.offset) + (fine > 1)
    return 2 if taken <= 1 else int(fine <= 2 or not fmt.offset)


# What a multiprocessor does in a cycle, as was measured on an H100: bytes that come in from L2,
# those of a weight from memory, of which all of them have a part, and multiply-adds.
FEED, MEMORY, MULTIPLIED = 48.2, 12.95, 1943
# Of weights that are computed, looked up, or take many registers: cycles that a warpgroup needs for
# a unit, as its instructions wait for each other, and those in which no other one's can be issued.
# And more for each row of x, by buffers and slices of an operand, where products keep a warpgroup
# waiting. Where few stages fit, codes come late. Some of it is never hidden.
COMPUTED, LOOKED_UP, HEAVY = (610, 33), (608, 57), (960, 95)
WAITING = {(1, 4): 4.3, (2, 4): 0.75, (2, 2): 0.2, (2, 1): 0.2}
COMING_LATE, IN_TURN, IN_TURN_READING = 1.31, 0.04, 0.13
UNUSUAL = 1.04  # what products of QUARTERED rows of x take more than their part of others'
# Cycles of blocks whose sums are parts, and of those that meet another block; floats that
# warpgroups of a block give each other in a cycle, and that blocks do.
PARTS, MEETING, GIVEN, SENT = 420, 280, 10, 9


def _cost(
    shape: Shape,
    ways: tuple[bool, bool],
    rows: int,
    tile_rows: int,
    tiles: int,
    units: int,
    decoding: Decoding,
    processors: int,
) -> float:
    """Cycles that a product takes, but for what is the same for all shapes.

    `ways`: whether its tiles are paired, and halved.
    """
    paired, halved = ways
    s, width = shape, shape.row_groups * GROUP_ROWS
    latency, issue = HEAVY if decoding.heavy else LOOKED_UP if decoding.looked_up else COMPUTED
    codes = (width if s.kind == GATED else tile_rows) * UNIT * (decoding.bits + 0.25) / 8
    alone = (latency + s.tokens * WAITING[s.buffers, s.slices]) / s.depth_groups
    if s.buffers == 2 and s.stages < 3 * s.depth_groups:
        alone *= COMING_LATE
    step = max(
        (s.tokens * UNIT * 2 + codes) / FEED,
        width * s.tokens * UNIT / MULTIPLIED + s.row_groups * issue,
        alone,
    )
    step += IN_TURN * alone
    sums, end = width * s.tokens, 0.0
    if s.depth_groups > 1:
        end += PARTS + (s.depth_groups - 1) * sums / GIVEN
    together = PARTS + MEETING + sums / SENT
    rounds: float = -(-tiles * s.split // processors)
    if s.split > 1:
        end += together
    if paired:
        end, rounds = together / rounds, rounds - 0.5
    if halved:
        end = (PARTS + MEETING + sums / s.row_groups / SENT) / rounds
        rounds -= 0.5 / s.row_groups
    reading = 0.0  # all weights once; the last rounds have what others leave them
    if rows <= TOKENS[-1]:
        reading = tiles * units * codes / (processors * MEMORY)
        reading += IN_TURN_READING * units / s.split * alone + end
    cost = max(rounds * (units / s.split * step + end), reading)
    return cost * UNUSUAL if s.tokens in QUARTERED else cost


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
            for split in (1,) if kind == EXPERTS else (1, 2):
                for span in SPANS[tokens]:
                    yield Shape(
                        tokens, row_groups, depth_groups, split, STAGES, span, *operands, kind
                    )


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
    bits, heavy, _, room = decoding
    best: tuple[float, Shape, bool, bool, int, int] | None = None
    for shape, staged_shapes in _candidates(rows if kind == EXPERTS else most, decoding, kind):
        if shape.tokens == FEW_MORE and rows > FEW_MORE:
            continue
        token_tiles = -(-rows // shape.tokens)
        tile_rows = rows_of_tile(shape, columns, token_tiles, multiprocessors)
        tiles = -(-columns // tile_rows) * token_tiles
        if shape.split > 1 and tiles * shape.split > multiprocessors:
            continue
        if shape.tokens < LARGE <= rows and tiles > SMALL_TILES * multiprocessors:
            continue
        found = staged_shapes[_is_beside(shape, tiles, multiprocessors)]
        if found is None or not (found.persistent or has_place(found, bits)):
            continue
        paired = not heavy and has_place(found, bits)
        paired = paired and _is_paired(found, tiles, units, multiprocessors)
        common = halves_of(found, columns, multiprocessors)
        halved = room == 2 and is_halved(found, common, tiles, token_tiles, multiprocessors)
        if halved:
            paired, tile_rows, tiles = False, common.rows, common.rounds * common.blocks
        ways = paired, halved
        cost = _cost(found, ways, rows, tile_rows, tiles, units, decoding, multiprocessors)
        if best is None or cost < best[0]:
            best = cost, found, paired, halved, token_tiles, tiles
    assert best is not None
    _, shape, paired, halved, token_tiles, tiles = best
    shape = replace(shape, paired=paired, halved=halved)
    shape = replace(shape, shared_x=_shares_x(shape, token_tiles, tiles, multiprocessors))
    parts = shape.halved or shape.split > 1
    if decoding.looked_up and not heavy and shape.tokens in MANY and parts:
        shape = replace(shape, slices=2)  # a block's few products have less to hide decoding behind
    return shape


@lru_cache(maxsize=1024)
def _candidates(
    most: int, decoding: Decoding, kind: int
) -> tuple[tuple[Shape, tuple[Shape | None, Shape | None]], ...]:
    """All shapes with at most so many rows of x in a tile, and what they are with their stages:
    where sums take the place of x, and where they have one beside it."""
    tables = decoding.tables

    def found(shape: Shape, beside: bool) -> Shape | None:
        for wide in (True, False) if tables[1] > tables[0] else (False,):
            own = replace(shape, wide=wide, beside=beside)
            made = staged(own, decoding.bits, tables[wide])
            if made and (shape.tokens < TOKENS[-1] or made.stages >= LEAST_STAGES):
                return made
        return None

    shapes = _shapes(most, decoding, kind)
    return tuple((shape, (found(shape, False), found(shape, True))) for shape in shapes)


def _is_paired(shape: Shape, tiles: int, units: int, processors: int) -> bool:
    """Whether blocks are so many, and the last ones so few, that two may share a tile."""
    left = tiles % processors
    fits = shape.alone and shape.kind == ONE and units > 1
    return fits and processors % 2 == 0 and tiles > processors and 0 < left <= processors // 2


class Halves(NamedTuple):
    """Tiles of blocks that have half of K of some of their rows: so many of each, and those of two
    rows of the weight have, on average."""

    rounds: int
    blocks: int
    rows: int


def halves_of(shape: Shape, columns: int, processors: int) -> Halves:
    """The fewest rounds in which two blocks have one warpgroup's rows in common."""
    groups, pairs = -(-columns // GROUP_ROWS), max(processors // 2, 1)
    both = 2 * shape.row_groups
    rounds = -(-(-(-groups // pairs) + 1) // both)
    each = both * rounds - 1
    return Halves(rounds, 2 * -(-groups // each), GROUP_ROWS * each // (2 * rounds))


def is_halved(shape: Shape, halves: Halves, tiles: int, token_tiles: int, processors: int) -> bool:
    """Whether the blocks of a cluster have a warpgroup's rows in common: where this takes no more
    rounds, of which the last one is shorter."""
    able = shape.alone and shape.kind == ONE and shape.row_groups > 1 and token_tiles == 1
    parts = shape.tokens > drain_of(shape)
    fits = 2 <= halves.blocks <= processors and halves.rounds <= -(-tiles // processors)
    return able and parts and fits


def _shares_x(shape: Shape, token_tiles: int, tiles: int, processors: int) -> bool:
    """Whether the two blocks of a cluster have the same rows of x, of which each brings half.

    With one tile of them all blocks read the same ones at the same time.
    """
    large = shape.tokens in MANY and shape.alone and shape.kind == ONE and shape.span == 1
    return large and token_tiles > 1 and processors % 2 == 0 and tiles // token_tiles % 2 == 0


def _is_beside(shape: Shape, tiles: int, processors: int) -> bool:
    """Whether blocks take several tiles of few rows of x: what comes next is then on its way while
    sums meet."""
    several = tiles > processors and shape.tokens <= TOKENS[1]
    return several and shape.kind == ONE and shape.split == 1 and shape.depth_groups > 1


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
    if shape.kind != ONE or shape.halved or not (rounds == 1 or (rounds > 1 and few)):
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
