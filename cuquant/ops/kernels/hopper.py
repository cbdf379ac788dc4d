"""Many rows of x times a prepacked weight on Hopper's tensor cores: matmul_hopper.cu."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from cuquant.formats import Format
from cuquant.fragments import FRAGMENTS_LAYOUT, UNIT
from cuquant.jit import Launch, Program
from cuquant.ops.backend import Backend
from cuquant.ops.kernels import facts as words
from cuquant.ops.kernels import prepacked
from cuquant.ops.kernels.operands import Product
from cuquant.ops.kernels.prepacked import Groups

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
        Units of the weight that are loaded ahead, and steps of x.
    """

    tokens: int
    row_groups: int
    depth_groups: int
    split: int
    ahead: int
    stages: int

    @property
    def alone(self) -> bool:
        """Whether a warpgroup's sums are the whole ones."""
        return self.depth_groups == self.split == 1


def shared_bytes(shape: Shape, table: int) -> int:
    """Dynamic shared memory of a block."""
    stage = shape.tokens * UNIT * 2 * shape.depth_groups + 16
    drain = shape.row_groups * min(shape.tokens, DRAIN) * DRAIN_PITCH * 4 if shape.alone else 0
    return shape.stages * stage + drain + table


@lru_cache(maxsize=4096)
def divide(
    rows: int, columns: int, depth: int, fine: int, table: int, multiprocessors: int
) -> Shape:
    """How to divide x [rows, depth] times a weight [columns, depth].

    Tiles are as large as still give every multiprocessor one; where there are fewer, blocks of a
    cluster share K.
    """
    units = -(-depth // UNIT)
    tokens = next((n for n in (32, 64, 128) if rows <= n), 256)
    if tokens == 256:
        tiles = -(-columns // (2 * GROUP_ROWS)) * -(-rows // 256)
        if 2 * tiles <= multiprocessors:
            tokens = 128
    row_groups, depth_groups = (1, 2) if tokens <= 64 else (2, 1)
    tiles = -(-columns // (row_groups * GROUP_ROWS)) * -(-rows // tokens)
    split = 1
    while tokens <= 128 and 2 * split * tiles <= multiprocessors and split < 2:
        if units < 8 * split * depth_groups:
            break
        split *= 2
    ahead = 2 if tokens == 256 or fine > 1 else 4
    shape = Shape(tokens, row_groups, depth_groups, split, ahead, STAGES)
    while shared_bytes(shape, table) > prepacked.SHARED_MOST:
        shape = Shape(tokens, row_groups, depth_groups, split, ahead, shape.stages - 1)
    return shape


@dataclass(frozen=True)
class Hopper:
    """The orchestrator of matmul_hopper.cu."""

    layouts = (FRAGMENTS_LAYOUT,)
    height = 0

    def prepare(self, backend: Backend, product: Product) -> Callable[[Backend, int, bytes], None]:
        (weight,) = product.weights
        fmt, rows, columns, depth = weight.fmt, product.rows, product.columns, product.depth
        groups = Groups.of(fmt, depth)
        table = prepacked.table_bytes(fmt)
        shape = divide(rows, columns, depth, groups.fine, table, backend.multiprocessors)
        token_tiles = -(-rows // shape.tokens)
        row_tiles = -(-columns // (shape.row_groups * GROUP_ROWS))
        tiles = token_tiles * row_tiles
        blocks = min(tiles, backend.multiprocessors) if shape.alone else tiles * shape.split
        dtype = product.x.dtype.name
        launch = Launch(
            _program(fmt, dtype, shape, groups),
            (blocks, 1, 1),
            128 * (shape.row_groups * shape.depth_groups + 1),
            shared_bytes(shape, table),
        )
        unit = 1.0
        if dtype == "float16" and prepacked.is_wide(fmt):
            unit = prepacked.unit_of(backend, fmt, weight.parts)
        packed = prepacked.pack(backend, fmt, weight.parts, (columns, depth), unit)
        stride = product.x.row_stride * 2

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
    )
    return Program(
        "matmul_hopper.cu", "matmul_hopper", arguments, facts.text, features=True, contract=True
    )
