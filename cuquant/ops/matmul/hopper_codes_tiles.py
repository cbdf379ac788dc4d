"""How codes of x and a prepacked weight of 4 bits are divided: which products these are, where
their scales change, and tiles."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from cuquant.array.fragments import FRAGMENTS_LAYOUT, UNIT
from cuquant.formats import Format, Minifloat, Uniform
from cuquant.gpu.backend import Backend
from cuquant.gpu.rates import TileCosts
from cuquant.ops.layout.packed_weight import Groups
from cuquant.ops.matmul.coded import codes_of, wide_of
from cuquant.ops.matmul.hopper_tiles import (
    DRAIN_PITCH,
    EXPERTS,
    GROUP_ROWS,
    LARGE,
    ONE,
    SMALL_TILES,
    SPANS,
    WARPGROUPS,
    Decoding,
    Shape,
    Work,
    cut,
    drain_of,
    staged,
    time_us,
)

BITS = 4
TOKENS = (16, 32, 64, 96, 128)
SLICES = 2  # of 32 columns, of a unit
# Units that Hopper's tensor cores add up, where no scales change: 256 columns of e4m3. Their sums
# keep 14 bits, of which each product of 32 columns may lose the last.
UNITS_ADDED = 4
REGISTERS = {2: 232, 3: 160, 4: 112}  # of a thread, by warpgroups that multiply
OTHERS = 66  # registers beside sums and operands
# As in hopper_tiles.py, bytes of codes; experts' were not measured.
COMING = {ONE: 48 << 10, EXPERTS: 72 << 10}
L2_BYTES = 60  # of a multiprocessor in a nanosecond, while all of them read
PROMOTED = 0.3  # nanoseconds that a lane's float32 sum takes, for four warps


class Scales(NamedTuple):
    """How scales of both sides divide K.

    Attributes
    ----------
    of_weight
        The weight's.
    x_fine, x_units
        Groups of x's in a unit, 0 where a row is one; and units of a group, 0 where it is less.
    exact
        Whether sums are of integers.
    folded
        Whether operands have their share of the weight's scales, powers of two that change along
        K: matmul/hopper_fold.cuh. Where x has several scales in a unit sums meet scales anyway.
    """

    of_weight: Groups
    x_fine: int
    x_units: int
    exact: bool
    folded: bool

    @property
    def pieces(self) -> int:
        """Parts of a unit whose sums meet other scales."""
        return max(1 if self.folded else self.of_weight.fine, self.x_fine, 1)

    def segment(self, shape: Shape, units: int) -> int:
        """Units between sums that are float32, of a weight with so many in a row."""
        of_weight = 0 if self.folded else self.of_weight.units
        groups = [n for n in (of_weight, self.x_units) if n]
        if self.pieces > 1:
            return 1
        if not groups:
            return 0 if self.exact else UNITS_ADDED
        # A warpgroup's units follow each other by twos, which begin with an even one.
        pairs = shape.span % 2 == 0 or shape.depth_groups == 1
        pairs &= shape.split == 1 or units % (2 * shape.split) == 0
        pairs &= not shape.streamed or shape.portion % 2 == 0
        return 2 if pairs and all(n % 2 == 0 for n in groups) else 1


@lru_cache(maxsize=1024)
def kind_of(x: Format, weight: Format, depth: int) -> str | None:
    """What codes of x, and of a prepacked weight, are multiplied as: "fp8_e4m3" or "int8"; or
    None."""
    if weight.bits != BITS or weight.scale is None or x.bits != 8:
        return None
    kinds = codes_of(x, weight)
    if kinds not in (("fp8_e4m3", "fp8_e4m3"), ("int8", "int8")) or x.offset or weight.offset:
        return None
    codec, wide = weight.codec, wide_of(x)
    if not (isinstance(codec, Minifloat) or (isinstance(codec, Uniform) and codec.offset == 8)):
        return None
    if isinstance(x.codec, Uniform) != (kinds[0] == "int8"):
        return None
    return kinds[0] if wide in (0, UNIT // 2) or wide % UNIT == 0 or wide >= depth else None


@lru_cache(maxsize=1024)
def scales_of(x: Format, weight: Format, depth: int) -> Scales:
    """How scales of x, and of a weight, divide rows of so many columns."""
    wide = wide_of(x)
    exact = isinstance(x.codec, Uniform)
    if wide == 0 or wide >= depth:
        fine, units = 0, 0
    else:
        fine, units = (2, 0) if wide < UNIT else (1, wide // UNIT)
    groups = Groups.of(weight, depth)
    powers = weight.scale is not None and weight.scale.dtype == "e8m0"
    folded = powers and isinstance(weight.codec, Minifloat) and groups.units > 0 and fine < 2
    return Scales(groups, fine, units, exact, folded)


# ---- how a product is divided -------------------------------------------------------------------


@lru_cache(maxsize=4096)
def divide(rows: int, work: Work, scales: Scales) -> Shape:
    """How to divide x [rows, depth] times a weight, so that it takes least."""
    return min(ways(rows, work, scales), key=lambda way: way[0])[1]


def ways(rows: int, work: Work, scales: Scales) -> Iterator[tuple[float, Shape]]:
    """All ways to divide a product, with the microseconds that each may take."""
    most = max(n for n in TOKENS if n < 2 * max(rows, TOKENS[0]))
    candidates = _candidates(most, work.units, scales)
    large = min(LARGE, max(s.tokens for s in candidates if not s.once))
    for shape in candidates:
        tiles = cut(shape, rows, work)[2]
        if shape.tokens < large <= rows and tiles > SMALL_TILES * work.processors:
            continue
        if shape.once and (tiles * shape.split > work.processors or work.units < shape.split):
            continue
        yield _time_us(shape, rows, work, scales), shape


def _time_us(shape: Shape, rows: int, work: Work, scales: Scales) -> float:
    """As hopper_tiles.py reckons it for 16-bit floats, at twice the speed; and sums that are added
    to float32 ones, and the L2 cache."""
    costs: TileCosts = work.costs
    every = shape.segment or 2 * UNITS_ADDED
    promoted = shape.row_groups * scales.pieces * shape.tokens / 2 / every * PROMOTED
    width = shape.row_groups * GROUP_ROWS
    came = shape.tokens * UNIT + width * UNIT * BITS / 8
    twice = costs._replace(multiplied=2 * costs.multiplied)
    slower = max(promoted, came / L2_BYTES)
    waits, issues = costs.computed
    own = twice._replace(computed=(waits + slower, issues / 2 + promoted))
    return time_us(shape, rows, work._replace(costs=own))


@lru_cache(maxsize=1024)
def _candidates(most: int, units: int, scales: Scales) -> tuple[Shape, ...]:
    return tuple(_shapes(most, units, scales))


def _shapes(most: int, units: int, scales: Scales, kind: int = ONE) -> Iterator[Shape]:
    for tokens in (n for n in TOKENS if n <= most):
        for row_groups, depth_groups in WARPGROUPS:
            for span in SPANS[tokens]:
                plain = Shape(tokens, row_groups, depth_groups, 0, span, 2, SLICES, kind, element=1)
                plain = replace(plain, x_fine=scales.x_fine, folded=scales.folded)
                kinds = [plain, replace(plain, streamed=True), replace(plain, once=True, split=2)]
                if depth_groups > 1:
                    kinds.append(replace(plain, once=True))
                for shape in kinds:
                    fits = _registers(shape, scales) <= REGISTERS[row_groups * depth_groups]
                    made = _staged(shape) if fits else None
                    if made is not None:
                        yield replace(made, segment=scales.segment(made, units))


def _registers(shape: Shape, scales: Scales) -> int:
    """Of a thread, about: what is more than that was seen to be spilled."""
    pieces, tokens = scales.pieces, shape.tokens
    is_plain = not (scales.of_weight.units or scales.x_fine)
    parts = 2 if pieces > 1 and tokens <= 64 else 1
    summed = 0 if scales.exact and is_plain else 1
    kept = 24 if pieces > 1 else 0
    if shape.kind == EXPERTS and not is_plain:
        kept += 32
    if pieces > 2 and shape.depth_groups > 1:
        kept += 16
    if shape.folded and shape.x_fine and shape.once:
        kept += 24
    return tokens // 2 * (parts + summed) + 8 * max(2, pieces) + kept + OTHERS


def _staged(shape: Shape) -> Shape | None:
    """With its stages; None where these do not fit, or sums do not fit into them."""
    made = staged(shape, BITS, 0, COMING[shape.kind])
    if made is None or not made.once:
        return made
    groups = made.row_groups * made.depth_groups
    given = made.tokens * GROUP_ROWS * 4 * made.row_groups  # of another block, and of warpgroups
    sums = given * (made.depth_groups - 1) + given * (made.split - 1) // 2
    drained = groups * drain_of(made) * DRAIN_PITCH * 4
    unit = made.tokens * UNIT + made.row_groups * GROUP_ROWS * UNIT * BITS // 8
    room = made.stages * made.span * unit
    return made if sums + drained <= room else None


def work_of(backend: Backend, columns: int, depth: int) -> Work:
    """What is to be divided, but for the rows of x."""
    decoding = Decoding(BITS, "computed", (0, 0))
    processors = backend.multiprocessors
    return Work(columns, depth, decoding, processors, backend.rates.tiles, ONE)


def height_of(x: Format, weight: Format, depth: int, rows: int) -> int:
    """Rows of x of a tile, where experts have about so many."""
    height = next((n for n in (16, 32, 64) if 3 * rows <= 2 * n), TOKENS[-1])
    scales = scales_of(x, weight, depth)
    while not _for_experts(height, scales):
        height = TOKENS[TOKENS.index(height) - 1]
    return height


@lru_cache(maxsize=1024)
def _for_experts(height: int, scales: Scales) -> tuple[Shape, ...]:
    """Shapes of tiles of so many rows of x, each of which is one block's."""
    alone = (
        shape
        for shape in _shapes(height, 0, scales, EXPERTS)
        if shape.tokens == height and not (shape.once or shape.streamed)
    )
    return tuple(alone)


@lru_cache(maxsize=4096)
def divide_experts(height: int, work: Work, scales: Scales) -> Shape:
    """How to divide rows of experts, in tiles of so many; of Work the columns are all experts'."""
    found = _for_experts(height, scales)
    return min(found, key=lambda shape: _time_us(shape, height, work, scales))


def reckoned_us(x: Format, weight: Format, rows: int, work: Work, experts: int = 0) -> float:
    """About how many microseconds a product takes as it is divided; of experts, whose columns Work
    has all, where each has as many of the rows."""
    scales = scales_of(x, weight, work.depth)
    if not experts:
        return min(us for us, _ in ways(rows, work, scales))
    each = -(-rows // experts)
    height = height_of(x, weight, work.depth, each)
    shape = divide_experts(height, work, scales)
    return -(-each // height) * _time_us(shape, height, work, scales)


def takes(x: Format, weight_format: Format, layout: str, depth: int) -> bool:
    """Whether a product is one of these, on a GPU of ARCH."""
    return layout == FRAGMENTS_LAYOUT and kind_of(x, weight_format, depth) is not None
