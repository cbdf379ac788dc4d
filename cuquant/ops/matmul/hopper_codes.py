"""Codes of x times a prepacked weight of 4 bits on Hopper's tensor cores: matmul/hopper.cu.

Products are of e4m3 or of int8 on both sides: what codes of the weight stand for becomes such
bytes in registers, and columns of x lie in the order that suits these.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from cuquant.array.fragments import UNIT
from cuquant.formats import Format, Minifloat
from cuquant.gpu.backend import Backend, aligned
from cuquant.gpu.jit import Launch, Program
from cuquant.ops.layout import packed_weight
from cuquant.ops.matmul.coded import Coded, Groups
from cuquant.ops.matmul.hopper import NO_MAP, NOT_ROUTED, TICKETS, program_of
from cuquant.ops.matmul.hopper_codes_tiles import (
    BITS,
    Scales,
    divide,
    divide_experts,
    scales_of,
    work_of,
)
from cuquant.ops.matmul.hopper_tiles import (
    blocks_of,
    rows_of_tile,
    shared_bytes,
    streamed_tiles,
    tokens_of_tile,
)
from cuquant.ops.matmul.problem import Routing, Weight
from cuquant.ops.matmul.route import INTEGER_BYTES, SEGMENT_BYTES, gathered

ARCH = 90
THREADS, VECTOR = 256, 16  # of matmul/code_rows.cu
# What it chooses, beside integers and beside floats.
ORDERS = ((0x5140, 0x7362), (0x5410, 0x7632))
EPILOGUE_BYTES = 64
EXPERTS_BOX = 16  # rows of x that are copied together, with experts
LIKELY = 4  # rows for each expert, from which on hardly any has none
NO_SEGMENTS, NO_GROUPS = bytes(32), bytes(32)  # its structs, where it makes no segments


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
    order
        Of four columns and of four that lie 8 behind them: see layout/byte_fragments.cuh.
    """

    rows: int
    all_rows: int
    groups: int
    pitch: int
    units: int
    stride: int
    order: tuple[int, int]

    @classmethod
    def of(
        cls, weight: Format, scales: Scales, depth: int, rows: int, all_rows: int, tokens: int
    ) -> "_Rows":
        groups = 1
        if scales.x_fine:
            wide = scales.x_units * UNIT if scales.x_units else UNIT // scales.x_fine
            groups = -(-depth // wide)
        pitch = -(-(all_rows + tokens) // 4) * 4  # a tile's scales lie within, and start on vectors
        stride = -(-depth // VECTOR) * VECTOR
        order = ORDERS[isinstance(weight.codec, Minifloat)]
        return cls(rows, all_rows, groups, pitch, scales.x_units, stride, order)

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
        numbers = self.rows, self.all_rows, self.groups, self.pitch, *self.order
        backend.launch(launch, x.pack(), groups, segments, order, *numbers, at, scale)
        matrix = at, self.all_rows, x.stride, x.stride, box
        scales = scale, self.pitch, self.groups, self.units
        told = struct.pack("<Qq2iQ2q", *scales, at, x.stride, self.all_rows)
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
    laid = _Rows.of(fmt, scales, depth, rows, rows, tile.tokens)
    handed = blocks * tile.handed_bytes

    used = sum(laid.sizes)

    def run(backend: Backend, x: Coded, epilogue: bytes, at: int) -> None:
        map_of_x, of_tokens = laid.lay_out(backend, x, at, tile_tokens)
        arguments = map_of_x, NO_MAP, packed, packed, epilogue, NOT_ROUTED
        backend.launch(launch, *arguments, *numbers, at + used, next(TICKETS), of_tokens)

    return Ready(used + handed, run)


# ---- experts ------------------------------------------------------------------------------------


class ReadyExperts(NamedTuple):
    """As Ready: `run` is told whose rows they are, as matmul/route.cu sorted them or by Groups."""

    nbytes: int
    run: Callable[[Backend, Coded, Routing | Groups, bytes, int], None]


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
    laid = _Rows.of(fmt, scales, depth, rows, gathered(rows, height), height)

    most = -(-rows // height) + (spans or known + 1)
    tiles = most * row_tiles
    blocks = blocks_of(tile, tiles, -(-depth // UNIT), processors)
    launch = Launch(program, (blocks, 1, 1), tile.threads, shared_bytes(tile, BITS, 0))
    probable = known if rows >= LIKELY * known else 0
    numbers = rows, columns, most, row_tiles, tile.tokens, tile.rows, probable
    used = sum(laid.sizes)
    sizes = (aligned(rows * INTEGER_BYTES), aligned(most * SEGMENT_BYTES), INTEGER_BYTES)

    def run(
        backend: Backend, x: Coded, experts: Routing | Groups, epilogue: bytes, at: int
    ) -> None:
        if isinstance(experts, Routing):
            map_of_x, of_tokens = laid.lay_out(backend, x, at, EXPERTS_BOX, experts.order)
            routed = experts.order, experts.segments, experts.count
        else:
            order = at + used
            places = order + sizes[0], order + sizes[0] + sizes[1]
            segments = struct.pack("<3Qq", *places, order, height)
            told = 0, segments, experts.pack()
            map_of_x, of_tokens = laid.lay_out(backend, x, at, EXPERTS_BOX, *told)
            routed = order, *places
        given = struct.pack("<3Q", *routed)
        arguments = map_of_x, NO_MAP, packed, packed, epilogue, given
        backend.launch(launch, *arguments, *numbers, 0, 0, of_tokens)

    return ReadyExperts(used + (sum(sizes) if spans else 0), run)
