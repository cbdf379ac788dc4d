"""Codes of x times a prepacked weight of 4 bits on Hopper's tensor cores: matmul/hopper.cu.

Products are of e4m3 or of int8 on both sides: what codes of the weight stand for becomes such
bytes in registers, and columns of x lie in the order that suits these.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from cuquant.array.fragments import FRAGMENTS_LAYOUT, UNIT
from cuquant.formats import Format, Minifloat, Uniform
from cuquant.gpu.backend import Backend, aligned
from cuquant.gpu.jit import Launch, Program
from cuquant.gpu.rates import TileCosts
from cuquant.ops.layout import packed_weight
from cuquant.ops.layout.packed_weight import Groups
from cuquant.ops.matmul.coded import Coded, codes_of, wide_of
from cuquant.ops.matmul.hopper import NO_MAP, NOT_ROUTED, TICKETS, program_of
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
    blocks_of,
    cut,
    drain_of,
    rows_of_tile,
    shared_bytes,
    staged,
    streamed_tiles,
    time_us,
    tokens_of_tile,
)
from cuquant.ops.matmul.problem import Weight
from cuquant.ops.matmul.route import INTEGER_BYTES, SEGMENT_BYTES, gathered

ARCH = 90
BITS = 4
TOKENS = (16, 32, 64, 96, 128)
SLICES = 2  # of 32 columns, of a unit
# Units that Hopper's tensor cores add up, where no scales change: 256 columns of e4m3. Their sums
# keep 14 bits, of which each product of 32 columns may lose the last.
UNITS_ADDED = 4
REGISTERS = {2: 232, 3: 160, 4: 112}  # of a thread, by warpgroups that multiply
OTHERS = 66  # registers beside sums and operands
THREADS, VECTOR = 256, 16  # of matmul/code_rows.cu
EPILOGUE_BYTES = 64
EXPERTS_BOX = 16  # rows of x that are copied together, with experts
LIKELY = 4  # rows for each expert, from which on hardly any has none
# As in hopper_tiles.py: rows of x have half as many bytes, and leave room for more.
ON_THEIR_WAY = 72 << 10
NO_SEGMENTS, NO_GROUPS = bytes(32), bytes(32)  # its structs, where it makes no segments
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
    """

    of_weight: Groups
    x_fine: int
    x_units: int
    exact: bool

    @property
    def pieces(self) -> int:
        """Parts of a unit that have other scales."""
        return max(self.of_weight.fine, self.x_fine, 1)

    def segment(self, shape: Shape, units: int) -> int:
        """Units between sums that are float32, of a weight with so many in a row."""
        groups = [n for n in (self.of_weight.units, self.x_units) if n]
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
    return Scales(Groups.of(weight, depth), fine, units, exact)


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
                plain = replace(plain, x_fine=scales.x_fine)
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
    return tokens // 2 * (parts + summed) + 8 * max(2, pieces) + kept + OTHERS


def _staged(shape: Shape) -> Shape | None:
    """With its stages; None where these do not fit, or sums do not fit into them."""
    made = staged(shape, BITS, 0, ON_THEIR_WAY)
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


# ---- one product --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """How x's rows lie for the kernel: matmul/code_rows.cu makes them so.

    Attributes
    ----------
    rows, all_rows
        Of x, and of what is made.
    groups
        Of scales along K.
    pitch
        From those of a group to those of the next.
    units
        Units of K that a group has; 0 where a unit has several.
    stride
        Bytes from row to row.
    """

    rows: int
    all_rows: int
    groups: int
    pitch: int
    units: int
    stride: int

    @classmethod
    def of(cls, scales: Scales, depth: int, rows: int, all_rows: int, tokens: int) -> "_Rows":
        groups = 1
        if scales.x_fine:
            wide = scales.x_units * UNIT if scales.x_units else UNIT // scales.x_fine
            groups = -(-depth // wide)
        pitch = -(-(all_rows + tokens) // 4) * 4  # a tile's scales lie within, and start on vectors
        stride = -(-depth // VECTOR) * VECTOR
        return cls(rows, all_rows, groups, pitch, scales.x_units, stride)

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of codes and of scales."""
        return aligned(self.all_rows * self.stride), aligned(self.groups * self.pitch * 4)

    def lay_out(
        self,
        backend: Backend,
        x: Coded,
        at: int,
        box: int,
        order: int = 0,
        segments: bytes = NO_SEGMENTS,
        groups: bytes = NO_GROUPS,
    ) -> tuple[bytes, bytes]:
        """Write codes and scales at an address: the map of codes' boxes of `box` rows, and the
        TokenScales."""
        assert x.stride == self.stride
        vectors = self.all_rows * (x.stride // VECTOR)
        launch = Launch(ROWS_PROGRAM, (-(-vectors // THREADS), 1, 1), THREADS)
        scale = at + self.sizes[0]
        numbers = self.rows, self.all_rows, self.groups, self.pitch
        backend.launch(launch, x.pack(), groups, segments, order, *numbers, at, scale)
        matrix = at, self.all_rows, x.stride, x.stride, box
        told = struct.pack("<Qq2i", scale, self.pitch, self.groups, self.units)
        return backend.tensor_map(*matrix, "uint8"), told


ROWS_PROGRAM = Program("matmul/code_rows.cu", "code_rows", overlaps=True)


class Ready(NamedTuple):
    """A product whose weights were looked at.

    Attributes
    ----------
    nbytes
        How much memory it wants.
    run
        Multiplies: called with x, the bytes of an Epilogue and the address of that memory.
    """

    nbytes: int
    run: Callable[[Backend, Coded, bytes, int], None]

    def again(self, backend: Backend, x: Coded, results: bytes) -> None:
        """The same with memory of its own, and with a CodedResults, which begins as an Epilogue."""
        with backend.workspace(self.nbytes) as at:
            self.run(backend, x, results[:EPILOGUE_BYTES], at)


def prepare(
    backend: Backend, x: Format, weight: Weight, kind: str, shape: tuple[int, int, int]
) -> Ready:
    """What multiplies codes of x [M, K], at any address, and a prepacked weight [N, K].

    `shape` is M, N and K.
    """
    rows, columns, depth = shape
    fmt, processors = weight.fmt, backend.multiprocessors
    scales = scales_of(x, fmt, depth)
    tile = divide(rows, work_of(backend, columns, depth), scales)
    token_tiles = -(-rows // tile.tokens)
    tile_tokens = tokens_of_tile(rows, token_tiles)
    tile_rows = rows_of_tile(tile, columns, token_tiles, processors)
    row_tiles = -(-columns // tile_rows)
    tiles = token_tiles * row_tiles
    whole = tiles - streamed_tiles(tiles, processors) if tile.streamed else tiles
    blocks = blocks_of(tile, tiles, -(-depth // UNIT), processors)
    program = program_of(fmt, kind, tile, scales.of_weight)
    launch = Launch(program, (blocks, 1, 1), tile.threads, shared_bytes(tile, BITS, 0))
    packed = packed_weight.pack(backend, fmt, weight.parts, (columns, depth))
    numbers = (rows, columns, token_tiles, row_tiles, tile_tokens, tile_rows, whole)
    laid = _Rows.of(scales, depth, rows, rows, tile.tokens)
    handed = blocks * tile.handed_bytes

    used = sum(laid.sizes)

    def run(backend: Backend, x: Coded, epilogue: bytes, at: int) -> None:
        map_of_x, of_tokens = laid.lay_out(backend, x, at, tile_tokens)
        arguments = map_of_x, NO_MAP, packed, packed, epilogue, NOT_ROUTED
        backend.launch(launch, *arguments, *numbers, at + used, next(TICKETS), of_tokens)

    return Ready(used + handed, run)


# ---- experts ------------------------------------------------------------------------------------


class Experts(NamedTuple):
    """Which rows of x are whose, on the device.

    Attributes
    ----------
    order, segments, made
        As matmul/route.cu sorted the rows; or 0.
    offsets, counts
        Or else as Groups has them.
    room
        Rows of x that each expert has room for, with counts; else all.
    """

    order: int = 0
    segments: int = 0
    made: int = 0
    offsets: int = 0
    counts: int = 0
    room: int = 0


class ReadyExperts(NamedTuple):
    """As Ready: `run` is told whose rows they are."""

    nbytes: int
    run: Callable[[Backend, Coded, Experts, bytes, int], None]


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


def prepare_experts(
    backend: Backend,
    x: Format,
    weight: Weight,
    kind: str,
    shape: tuple[int, int, int],
    known: int,
    height: int,
    spans: int = 0,
) -> ReadyExperts:
    """What multiplies codes of x [T, K] and experts' prepacked weights [E, N, K].

    `shape` is T, N and K, `known` is E, and `height` that of height_of. Where rows come by offsets
    or counts, `spans` is how many parts of them have an expert or none.
    """
    rows, columns, depth = shape
    fmt, processors = weight.fmt, backend.multiprocessors
    scales = scales_of(x, fmt, depth)
    tile = divide_experts(height, work_of(backend, columns * known, depth), scales)
    row_tiles = -(-columns // tile.rows)
    program = program_of(fmt, kind, tile, scales.of_weight)
    packed = packed_weight.pack(backend, fmt, weight.parts, (columns, depth))
    laid = _Rows.of(scales, depth, rows, gathered(rows, height), height)

    most = -(-rows // height) + (spans or known + 1)
    tiles = most * row_tiles
    blocks = blocks_of(tile, tiles, -(-depth // UNIT), processors)
    launch = Launch(program, (blocks, 1, 1), tile.threads, shared_bytes(tile, BITS, 0))
    probable = known if rows >= LIKELY * known else 0
    numbers = rows, columns, most, row_tiles, tile.tokens, tile.rows, probable
    used = sum(laid.sizes)
    sizes = (aligned(rows * INTEGER_BYTES), aligned(most * SEGMENT_BYTES), INTEGER_BYTES)

    def run(backend: Backend, x: Coded, experts: Experts, epilogue: bytes, at: int) -> None:
        if experts.order:
            map_of_x, of_tokens = laid.lay_out(backend, x, at, EXPERTS_BOX, experts.order)
            routed = experts.order, experts.segments, experts.made
        else:
            order = at + used
            places = order + sizes[0], order + sizes[0] + sizes[1]
            segments = struct.pack("<3Qq", *places, order, height)
            groups = struct.pack("<2q2Q", known, experts.room, experts.offsets, experts.counts)
            map_of_x, of_tokens = laid.lay_out(backend, x, at, EXPERTS_BOX, 0, segments, groups)
            routed = order, *places
        given = struct.pack("<3Q", *routed)
        arguments = map_of_x, NO_MAP, packed, packed, epilogue, given
        backend.launch(launch, *arguments, *numbers, 0, 0, of_tokens)

    return ReadyExperts(used + (sum(sizes) if spans else 0), run)


def takes(x: Format, weight_format: Format, layout: str, depth: int) -> bool:
    """Whether a product is one of these, on a GPU of ARCH."""
    return layout == FRAGMENTS_LAYOUT and kind_of(x, weight_format, depth) is not None
