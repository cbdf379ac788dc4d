"""Few rows of x times a prepacked weight, read at memory speed: matmul_stream.cu."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from cuquant.formats import Format
from cuquant.fragments import FRAGMENTS_LAYOUT, STRIP, UNIT
from cuquant.jit import Launch, Program
from cuquant.ops.backend import Backend
from cuquant.ops.kernels import facts as words
from cuquant.ops.kernels import prepacked
from cuquant.ops.kernels.operands import Problem, Product, Weight
from cuquant.ops.kernels.prepacked import Groups

ROW_BYTES = 128  # of a unit of x in shared memory
WARPS = 16  # of a block, at most
TILE = 8  # rows of x that one product of a warp takes
MOST_TILES = 4
MOST_GRID_Y = 65535


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


def _ahead(groups: Groups, heavy: bool) -> int:
    """Units that are loaded ahead: about 4, in step with the groups; few where registers are."""
    if heavy and (groups.fine > 1 or groups.units % 2 == 0):
        return 2
    if groups.fine > 1 or groups.units in (0, 1, 2, 4):
        return 4
    return next(n for n in (4, 3, 6, 5, 7, 2, 1) if groups.units % n == 0)


def shared_bytes(shape: Shape, groups: Groups, units: int, table: int, gated: bool) -> int:
    """Dynamic shared memory of a block."""
    share = shape.ahead if not groups.units else min(groups.units, shape.ahead)
    shares = -(-units // share)
    x = (shares + 2 * shape.split - 1) // shape.split * share * shape.tokens * ROW_BYTES
    pitch = shape.strips * shape.rounds * STRIP * (2 if gated else 1) + 4
    return table + ROW_BYTES + x + shape.depth * shape.tiles * TILE * pitch * 4


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
    heavy: bool = False,
) -> Shape | None:
    """How to divide x [rows, depth] times a weight [columns, depth]; None where x does not fit.

    One wave of blocks, each with about 16 warps, or more where the sums of so many rows of the
    weight do not fit; K is shared by warps of a block first, since their sums meet in shared
    memory, and by two blocks of a cluster where x is large. `heavy`: what is loaded ahead takes
    many registers.
    """
    strips, units, ahead = -(-columns // STRIP), -(-depth // UNIT), _ahead(groups, heavy)
    clusters = 90 <= arch < 100
    most = prepacked.SHARED_MOST if clusters else prepacked.SHARED_OLD
    tokens = min(rows, MOST_TILES * TILE)
    while tokens:
        tiles = 1 << (-(-tokens // TILE) - 1).bit_length()
        splits = (1,) if not clusters or units < 2 * ahead else (1, 2) if tokens <= TILE else (2, 1)
        all_each = [-(-strips // max(multiprocessors // split, 1)) for split in splits]
        for split, each in _shares(splits, all_each):
            for rounds in range(-(-each // WARPS), each + 1):
                own = -(-each // rounds)
                deep = 1
                while own * deep * 2 <= WARPS and deep < 8 and units >= 2 * deep * split * ahead:
                    deep *= 2
                shape = Shape(tokens, tiles, own, deep, split, rounds, ahead)
                if shared_bytes(shape, groups, units, table, gated) <= most:
                    return shape
                if rounds > 8:
                    break
        tokens = tokens // 2 if tokens > TILE else tokens - 1
    return None


def _shares(splits: tuple[int, ...], each: list[int]) -> Iterator[tuple[int, int]]:
    """A split and the strips of a block: one wave for each split, then more of them."""
    while each:
        yield from zip(splits, each, strict=True)
        each = [-(-n // 2) for n in each] if max(each) > WARPS else []


def _is_heavy(fmt: Format, groups: Groups, layout: str) -> bool:
    return layout != FRAGMENTS_LAYOUT and (groups.fine == 4 or fmt.bits == 8)


def shape_of(problem: Problem) -> Shape | None:
    """How to divide a Problem; None where matmul_stream.cu does not take it."""
    p = problem
    assert p.format is not None
    groups, table = Groups.of(p.format, p.depth), prepacked.table_bytes(p.format)
    heavy = _is_heavy(p.format, groups, p.layout)
    shape = divide(
        p.rows, p.columns, p.depth, groups, table, p.arch, p.multiprocessors, p.gated, heavy
    )
    return None if shape is None or -(-p.rows // shape.tokens) > MOST_GRID_Y else shape


@dataclass(frozen=True)
class Stream:
    """The orchestrator of matmul_stream.cu."""

    layouts = (FRAGMENTS_LAYOUT, Weight.layout)
    height = 0

    def prepare(self, backend: Backend, product: Product) -> Callable[[Backend, int, bytes], None]:
        weights = [weight for weight in product.weights if isinstance(weight, Weight)]
        first, second = weights[0], weights[-1]
        fmt, gated = first.fmt, len(product.weights) > 1
        groups = Groups.of(fmt, product.depth)
        table = prepacked.table_bytes(fmt)
        numbers = (product.rows, product.columns, product.depth)
        heavy = _is_heavy(fmt, groups, first.layout)
        shape = divide(*numbers, groups, table, backend.arch, backend.multiprocessors, gated, heavy)
        assert shape is not None
        strips = -(-product.columns // STRIP)
        blocks = -(-strips // (shape.strips * shape.rounds)) * shape.split
        units = -(-product.depth // UNIT)
        launch = Launch(
            _program(fmt, product.x.dtype.name, shape, groups, first.layout, gated),
            (blocks, -(-product.rows // shape.tokens), 1),
            32 * shape.strips * shape.depth,
            shared_bytes(shape, groups, units, table, gated),
        )
        packed = [
            prepacked.pack(backend, w.fmt, w.parts, (product.columns, product.depth))
            for w in (first, second)
        ]
        stride = product.x.row_stride
        vectors = int(product.x.is_aligned())
        rest = (*numbers, shape.rounds, shape.tokens, vectors)

        def run(backend: Backend, pointer: int, epilogue: bytes) -> None:
            backend.launch(launch, pointer, stride, *packed, epilogue, *rest)

        return run


@lru_cache(maxsize=4096)
def _program(
    fmt: Format, dtype: str, shape: Shape, groups: Groups, layout: str, gated: bool
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
    )
    return Program("matmul_stream.cu", "matmul_stream", arguments, facts.text, contract=True)
