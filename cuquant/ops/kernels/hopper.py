"""Many rows of x times a prepacked weight on Hopper's tensor cores: matmul_hopper.cu."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from cuquant.formats import Format
from cuquant.fragments import FRAGMENTS_LAYOUT, UNIT
from cuquant.jit import Launch, Program
from cuquant.ops.backend import Backend
from cuquant.ops.kernels import facts as words
from cuquant.ops.kernels import prepacked
from cuquant.ops.kernels.epilogue import GATED, PACK, TYPES, UNPACK
from cuquant.ops.kernels.operands import Operand, Product, Weight
from cuquant.ops.kernels.prepacked import Groups

F32 = np.dtype(np.float32)
GROUP_ROWS = 64  # of a weight, that a warpgroup takes
DRAIN = 64  # rows of x that are stored at a time
DRAIN_PITCH = 68
STAGES = 12  # of x in shared memory, at most


@dataclass(frozen=True)
class Shape:
    """How matmul_hopper.cu divides a product.

    Attributes
    ----------
    tokens
        Rows of x of a block.
    row_groups, depth_groups
        Warpgroups of a block that have different rows of the weight, and different parts of K.
    split
        Blocks that share K.
    ahead, stages
        Units of the weight that are loaded ahead, and steps of x in shared memory.
    """

    tokens: int
    row_groups: int
    depth_groups: int
    split: int
    ahead: int
    stages: int

    @property
    def rows(self) -> int:
        """Of the weight, of a block."""
        return self.row_groups * GROUP_ROWS

    @property
    def threads(self) -> int:
        """Of a block: one warpgroup is for the copies."""
        return 128 * (self.row_groups * self.depth_groups + 1)

    @property
    def alone(self) -> bool:
        """Whether a warpgroup's sums are the whole ones."""
        return self.depth_groups == self.split == 1


def shared_bytes(shape: Shape, table: int) -> int:
    """Dynamic shared memory of a block."""
    stage = shape.tokens * UNIT * 2 * shape.depth_groups + 16
    drain = shape.row_groups * min(shape.tokens, DRAIN) * DRAIN_PITCH * 4 if shape.alone else 0
    return shape.stages * stage + drain + table


def staged(shape: Shape, table: int) -> Shape:
    """The shape with as many stages as fit."""
    while shared_bytes(shape, table) > prepacked.SHARED_MOST:
        shape = replace(shape, stages=shape.stages - 1)
    return shape


@lru_cache(maxsize=4096)
def divide(
    rows: int, columns: int, depth: int, bits: int, fine: int, table: int, multiprocessors: int
) -> Shape:
    """How to divide x [rows, depth] times a weight [columns, depth].

    Up to 128 rows of x a block has 64 rows of the weight, and three warpgroups that share K hide
    each other's decoding. More rows of x want larger tiles, of which each multiprocessor has one.
    Where there are too few tiles two blocks of a cluster share K.
    """
    units = -(-depth // UNIT)
    tokens = next((n for n in (32, 64, 128) if rows <= n), 256)
    light = bits <= 4 and fine == 1  # what is loaded ahead takes few registers
    groups = (1, 3 if light else 2) if tokens <= 128 else (2, 1)
    heavy = bits > 4 and fine == 4  # its decoding leaves no registers for the sums of 256
    if tokens == 256 and (heavy or 2 * _tiles(rows, columns, tokens, 2) <= multiprocessors):
        tokens = 128
    tiles = _tiles(rows, columns, tokens, groups[0])
    split = 2 if 2 * tiles <= multiprocessors and units >= 8 * groups[1] else 1
    ahead = 4 if light and groups == (2, 1) and tokens == 128 else 2
    return staged(Shape(tokens, *groups, split, ahead, STAGES), table)


def _tiles(rows: int, columns: int, tokens: int, row_groups: int) -> int:
    return -(-columns // (row_groups * GROUP_ROWS)) * -(-rows // tokens)


@dataclass(frozen=True)
class Hopper:
    """The orchestrator of matmul_hopper.cu."""

    layouts = (FRAGMENTS_LAYOUT,)
    height = 0

    def prepare(self, backend: Backend, product: Product) -> Callable[[Backend, int, bytes], None]:
        first, *others = (self._one(backend, product, weight) for weight in product.weights)
        if not others:
            return first
        (second,) = others
        rows, columns = product.rows, product.columns

        def run(backend: Backend, pointer: int, epilogue: bytes) -> None:
            gate = backend.empty((rows, columns), F32)
            at = backend.pointer(gate)
            first(backend, pointer, PACK(at, 0, 0, columns, 1, 0, TYPES["float32"], 0, 0, 0))
            out, _, _, stride, step, _, kind, *_ = UNPACK(epilogue)
            constants = (stride, step, columns, kind, 0, TYPES["float32"], GATED)
            second(backend, pointer, PACK(out, 0, at, *constants))

        return run

    @staticmethod
    def _one(
        backend: Backend, product: Product, weight: Operand
    ) -> Callable[[Backend, int, bytes], None]:
        """x times one weight."""
        assert isinstance(weight, Weight)
        fmt, rows, columns, depth = weight.fmt, product.rows, product.columns, product.depth
        groups = Groups.of(fmt, depth)
        table = prepacked.table_bytes(fmt)
        shape = divide(rows, columns, depth, fmt.bits, groups.fine, table, backend.multiprocessors)
        token_tiles, row_tiles = -(-rows // shape.tokens), -(-columns // shape.rows)
        tiles = token_tiles * row_tiles
        blocks = min(tiles, backend.multiprocessors) if shape.alone else tiles * shape.split
        dtype = product.x.dtype.name
        launch = Launch(
            _program(fmt, dtype, shape, groups),
            (blocks, 1, 1),
            shape.threads,
            shared_bytes(shape, table),
        )
        unit = 1.0
        if dtype == "float16" and prepacked.is_wide(fmt):
            unit = prepacked.unit_of(backend, fmt, weight.parts)
        packed = prepacked.pack(backend, fmt, weight.parts, (columns, depth), unit)
        # One row may have any stride, but a tensor map wants one of whole vectors.
        stride = 2 * (product.x.row_stride if rows > 1 else -(-depth // 8) * 8)

        def run(backend: Backend, pointer: int, epilogue: bytes) -> None:
            x = backend.tensor_map(pointer, rows, depth, stride, shape.tokens, dtype)
            backend.launch(launch, x, packed, epilogue, rows, columns, token_tiles, row_tiles)

        return run


@lru_cache(maxsize=4096)
def _program(fmt: Format, dtype: str, shape: Shape, groups: Groups) -> Program:
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
    )
    return Program(
        "matmul_hopper.cu", "matmul_hopper", arguments, facts.text, features=True, contract=True
    )
