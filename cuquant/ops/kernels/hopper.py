"""Many rows of x times a prepacked weight on Hopper's tensor cores: matmul_hopper.cu."""

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from cuquant.formats import Format
from cuquant.fragments import FRAGMENTS_LAYOUT, UNIT
from cuquant.jit import Launch, Program
from cuquant.ops.backend import Backend
from cuquant.ops.kernels import facts as words
from cuquant.ops.kernels import prepacked
from cuquant.ops.kernels.operands import Problem, Product, Routing, Weight
from cuquant.ops.kernels.prepacked import Groups

GROUP_ROWS = 64  # of a weight, that a warpgroup takes
DRAIN = 64  # rows of x that are stored at a time
DRAIN_PITCH = 68
STAGES = 12  # of x in shared memory, at most
ONE, GATED, EXPERTS = 0, 1, 2  # matmul_hopper.cu's Kind
GATHER_THREADS = 256
VECTOR = 8  # elements of 16 bytes
I32 = np.dtype(np.int32)
NOT_ROUTED = bytes(24)  # its Routed


@dataclass(frozen=True)
class Shape:
    """How matmul_hopper.cu divides a product.

    Attributes
    ----------
    tokens
        Rows of x of a block.
    row_groups, depth_groups
        Warpgroups of a block that have different rows of the weight, or each one of the two weights
        of a gated unit; and different parts of K.
    split
        Blocks that share K.
    ahead, stages
        Units of the weight that are loaded ahead, and steps of x in shared memory.
    kind
        ONE weight, the two of a GATED unit, or EXPERTS.
    """

    tokens: int
    row_groups: int
    depth_groups: int
    split: int
    ahead: int
    stages: int
    kind: int = ONE

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
    def persistent(self) -> bool:
        """Whether blocks take one tile after the other: sums have a place beside x."""
        return self.alone or self.kind == EXPERTS


def shared_bytes(shape: Shape, table: int) -> int:
    """Dynamic shared memory of a block."""
    stage = shape.tokens * UNIT * 2 * shape.depth_groups + 16
    drain = 0
    if shape.alone:
        drain = shape.row_groups * min(shape.tokens, DRAIN) * DRAIN_PITCH * 4
    elif shape.persistent:
        drain = shape.depth_groups * shape.tokens * (shape.row_groups * GROUP_ROWS + 4) * 4
    return shape.stages * stage + drain + table


def staged(shape: Shape, table: int) -> Shape:
    """The shape with as many stages as fit."""
    while shared_bytes(shape, table) > prepacked.SHARED_MOST:
        shape = replace(shape, stages=shape.stages - 1)
    return shape


@lru_cache(maxsize=4096)
def divide(
    rows: int,
    columns: int,
    depth: int,
    bits: int,
    fine: int,
    table: int,
    multiprocessors: int,
    kind: int = ONE,
    offset: bool = False,
) -> Shape:
    """How to divide x [rows, depth] times a weight [columns, depth], or two of a gated unit.

    Up to 128 rows of x a block has 64 rows of the weight, and three warpgroups that share K hide
    each other's decoding. More rows of x want larger tiles, of which each multiprocessor has one.
    Where there are too few tiles two blocks of a cluster share K. Of EXPERTS `rows` are those of a
    segment, and so of a tile.
    """
    units = -(-depth // UNIT)
    tokens = rows if kind == EXPERTS else next((n for n in (32, 64, 128) if rows <= n), 256)
    light = bits <= 4 and fine == 1 and not offset  # what is loaded ahead takes few registers
    wide = kind == GATED or tokens > (64 if kind == EXPERTS else 128)
    groups = (2, 1) if wide else (1, 3 if light else 2)
    rows_of_block = GROUP_ROWS * (1 if kind == GATED else groups[0])
    if kind != EXPERTS and tokens == 256:
        full = -(-columns // rows_of_block) * -(-rows // tokens)
        if _is_heavy(bits, fine) or 2 * full <= multiprocessors:
            tokens = 128
    tiles = -(-columns // rows_of_block) * -(-rows // tokens)
    few = kind != EXPERTS and 2 * tiles <= multiprocessors
    split = 2 if few and units >= 8 * groups[1] else 1
    ahead = 4 if light and groups == (2, 1) and tokens <= 128 else 2
    return staged(Shape(tokens, *groups, split, ahead, STAGES, kind), table)


def _is_heavy(bits: int, fine: int) -> bool:
    """Whether decoding leaves no registers for the sums of 256 rows of x."""
    return bits > 4 and fine == 4


def takes_experts(problem: Problem) -> bool:
    """Whether it multiplies rows of x, wherever these lie, with those of experts' weights."""
    p = problem
    plain = p.batches == 1 and not p.gated and not p.swapped and p.depth > 0
    return p.experts > 0 and p.arch == 90 and p.layout == FRAGMENTS_LAYOUT and plain


def segment_rows(problem: Problem) -> int:
    """Rows of x of a tile, where a Problem has experts.

    An expert's rows are about as many as the others', so that most of them have one tile, or large
    ones.
    """
    fmt = problem.format
    assert fmt is not None
    fine = Groups.of(fmt, problem.depth).fine
    tokens = next((n for n in (16, 32, 64) if 3 * problem.rows <= 2 * n), 256)
    heavy = _is_heavy(fmt.bits, fine) or (fmt.is_blocks and fine == 4)
    return 128 if tokens == 256 and (problem.rows <= 128 or heavy) else tokens


@dataclass(frozen=True)
class Hopper:
    """The orchestrator of matmul_hopper.cu."""

    layouts = (FRAGMENTS_LAYOUT,)
    height = 0  # as segment_rows says

    def prepare(self, backend: Backend, product: Product) -> Callable[[Backend, int, bytes], None]:
        weights = [weight for weight in product.weights if isinstance(weight, Weight)]
        fmt, dtype, routing = weights[0].fmt, product.x.dtype.name, product.routing
        rows, columns, depth = product.rows, product.columns, product.depth
        shape = _shape(product, fmt, backend.multiprocessors)
        token_tiles = routing.most if routing else -(-rows // shape.tokens)
        row_tiles = -(-columns // shape.rows)
        scalings = [prepacked.scaling(backend, fmt, weight.parts, dtype) for weight in weights]
        launch = _launch(
            _program(fmt, dtype, shape, Groups.of(fmt, depth), any(s.wide for s in scalings)),
            shape,
            token_tiles * row_tiles,
            prepacked.table_bytes(fmt),
            backend.multiprocessors,
        )
        packed = [
            prepacked.pack(backend, fmt, weight.parts, (columns, depth), scaling.unit)
            for weight, scaling in zip(weights, scalings, strict=True)
        ]
        numbers = (rows, columns, token_tiles, row_tiles)
        if routing is not None:
            gather = _gather(backend, product, routing)
            arrays = (routing.order, routing.segments, routing.count)
            routed = struct.pack("<3Q", *map(backend.pointer, arrays))

            def run_sorted(backend: Backend, pointer: int, epilogue: bytes) -> None:
                own, stride = gather(backend, pointer)
                at = backend.pointer(own)
                x = backend.tensor_map(at, rows, depth, stride, shape.tokens, dtype)
                backend.launch(launch, x, packed[0], packed[-1], epilogue, routed, *numbers)

            return run_sorted
        # One row may have any stride, but a tensor map wants one of whole vectors.
        stride = 2 * (product.x.row_stride if rows > 1 else -(-depth // VECTOR) * VECTOR)

        def run(backend: Backend, pointer: int, epilogue: bytes) -> None:
            x = backend.tensor_map(pointer, rows, depth, stride, shape.tokens, dtype)
            backend.launch(launch, x, packed[0], packed[-1], epilogue, NOT_ROUTED, *numbers)

        return run


def _shape(product: Product, fmt: Format, multiprocessors: int) -> Shape:
    routing = product.routing
    kind = EXPERTS if routing else GATED if len(product.weights) > 1 else ONE
    return divide(
        routing.height if routing else product.rows,
        product.columns,
        product.depth,
        fmt.bits,
        Groups.of(fmt, product.depth).fine,
        prepacked.table_bytes(fmt),
        multiprocessors,
        kind,
        bool(fmt.offset),
    )


def _launch(program: Program, shape: Shape, tiles: int, table: int, multiprocessors: int) -> Launch:
    blocks = min(tiles, multiprocessors) if shape.persistent else tiles * shape.split
    return Launch(program, (blocks, 1, 1), shape.threads, shared_bytes(shape, table))


def _gather(
    backend: Backend, product: Product, routing: Routing
) -> Callable[[Backend, int], tuple[Any, int]]:
    """What copies rows of x as they are sorted: to an array, whose rows are so many bytes apart."""
    rows, depth, x = product.rows, product.depth, product.x
    pitch = -(-depth // VECTOR) * VECTOR
    vectors = x.is_aligned() and depth % VECTOR == 0
    program = Program("gather.cu", "gather", (GATHER_THREADS, int(vectors)))
    launch = Launch(program, (rows, 1, 1), GATHER_THREADS)
    strides, order = (x.row_stride, x.column_stride), backend.pointer(routing.order)

    def gather(backend: Backend, pointer: int) -> tuple[Any, int]:
        made = backend.empty((rows, pitch // 2), I32)
        backend.launch(launch, pointer, *strides, order, depth, pitch, backend.pointer(made))
        return made, 2 * pitch

    return gather


@lru_cache(maxsize=4096)
def _program(fmt: Format, dtype: str, shape: Shape, groups: Groups, wide: bool) -> Program:
    facts = words.facts(fmt, decoding=not fmt.is_blocks)
    arguments = (
        facts.type,
        words.ELEMENTS[dtype],
        shape.tokens,
        shape.row_groups,
        shape.depth_groups,
        shape.split,
        shape.ahead,
        shape.stages,
        groups.units,
        groups.fine,
        prepacked.lie(fmt, FRAGMENTS_LAYOUT),
        shape.kind,
        int(wide),
    )
    return Program(
        "matmul_hopper.cu", "matmul_hopper", arguments, facts.text, features=True, contract=True
    )
