"""Many rows of x times a prepacked weight on Hopper's tensor cores: matmul/hopper.cu."""

import secrets
import struct
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count

from cuquant.array.fragments import FRAGMENTS_LAYOUT, UNIT
from cuquant.formats import Format
from cuquant.gpu.backend import Backend
from cuquant.gpu.jit import Launch, Program
from cuquant.gpu.tensor_map import MAP_BYTES
from cuquant.ops import cpp
from cuquant.ops.layout import packed_weight
from cuquant.ops.layout.packed_weight import Groups
from cuquant.ops.matmul import stream
from cuquant.ops.matmul.epilogue import TYPES, UNPACK
from cuquant.ops.matmul.hopper_tiles import (
    BOX_ALIGNMENT,
    Shape,
    blocks_of,
    box_of,
    divider,
    is_heavy,
    rows_of_tile,
    shared_bytes,
    streamed_tiles,
    tokens_of_tile,
)
from cuquant.ops.matmul.problem import Prepared, Problem, Product, Run, Weight
from cuquant.ops.matmul.route import ELEMENT_BYTES, gather, gathered, pitch

NOT_ROUTED = bytes(24)  # matmul/hopper.cu's Routed
NO_MAP = bytes(MAP_BYTES)  # where no kernel reads it
NO_SCALES = bytes(48)  # matmul/hopper_codes.cuh's TokenScales
# What x and decoded weights are.
ELEMENTS = cpp.ELEMENTS | {"fp8_e4m3": "E4m3", "int8": "Int8"}
# By how much it is slower than cuBLAS with ggml's blocks, of up to 4 bits and of more: at 4096 x
# 4096 x 14336 on an H100 nf4 took 624 us, q4_k 670 and q6_k 731, where decoding and cuBLAS took
# 674, 659 and 669. A GEMM's memory counts too.
SLOWER_BY_4, SLOWER_BY_8 = 1 / 12, 2 / 15
# By which warps say that their sums are there: of each call another one, whatever memory holds.
TICKETS = count(secrets.randbits(62))


def segment_rows(problem: Problem) -> int:
    """Rows of x of a tile, where a Problem has experts.

    An expert's rows are about as many as the others', so that most of them have one tile, or large
    ones.
    """
    fmt = problem.format
    assert fmt is not None
    tokens = next((n for n in (16, 32, 64) if 3 * problem.rows <= 2 * n), 256)
    heavy = is_heavy(fmt, problem.depth)
    return 128 if tokens == 256 and (problem.rows <= 128 or heavy) else tokens


@dataclass(frozen=True)
class Hopper:
    """The orchestrator of matmul/hopper.cu.

    Attributes
    ----------
    shape
        How all products are divided, whatever else may be faster: for measuring.
    """

    shape: Shape | None = None

    layouts = (FRAGMENTS_LAYOUT,)
    height = 0  # as segment_rows says

    def takes(self, p: Problem) -> bool:
        """Prepacked weights and experts, but for few rows of x that matmul/stream.cu multiplies at
        once: of 320 products of 8 and 16 rows that takes 1.3 % longer than the faster of the two.
        """
        if not (p.takes_halves and p.layout == FRAGMENTS_LAYOUT and p.arch == 90):
            return False
        if p.experts:
            return p.batches == 1 and not p.gated and not p.swapped and p.depth > 0
        if not (p.is_single and p.aligned):
            return False
        if p.rows > stream.FEW_ROWS:
            return True
        shape = stream.shape_of(p)
        return shape is None or shape.tokens < p.rows

    def time_us(self, p: Problem) -> float:
        """That of reading the weights, or of a GEMM."""
        assert p.format is not None
        slower = 0.0
        if p.format.is_blocks:
            slower = SLOWER_BY_4 if p.format.bits <= 4 else SLOWER_BY_8
        reading = p.weights * p.format.bits / 8 / p.rates.read
        return max(reading, 2 * p.rows * p.weights * (1 + slower) / p.rates.tensor)

    def prepare(self, backend: Backend, product: Product) -> Prepared:
        weights = [weight for weight in product.weights if isinstance(weight, Weight)]
        fmt, dtype, routing = weights[0].fmt, product.x.type_name, product.routing
        columns, depth, processors = product.columns, product.depth, backend.multiprocessors
        shape_of_rows = divider(product.problem(backend), experts=routing is not None)
        packed = [
            packed_weight.pack(backend, fmt, weight.parts, (columns, depth)) for weight in weights
        ]
        packed_pair = (packed[0], packed[-1])
        sort = None
        if routing is not None:
            addresses = struct.pack("<3Q", routing.order, routing.segments, routing.count)
            sort = gather(product, routing), routing.end, addresses, routing.height
        # One row may have any stride, but a tensor map wants one of whole vectors.
        row_stride = product.x.row_stride * ELEMENT_BYTES
        whole_stride = pitch(depth) * ELEMENT_BYTES

        def of_rows(rows: int) -> Run:
            shape = self.shape or shape_of_rows(routing.height if routing else rows)
            token_tiles = routing.most if routing else -(-rows // shape.tokens)
            tile_tokens = shape.tokens if routing else tokens_of_tile(rows, token_tiles)
            tile_rows = rows_of_tile(shape, columns, token_tiles, processors)
            row_tiles = -(-columns // tile_rows)
            tiles = token_tiles * row_tiles
            whole = tiles - streamed_tiles(tiles, processors) if shape.streamed else tiles
            table = packed_weight.table_bytes(fmt, shape.wide)
            blocks = blocks_of(shape, tiles, -(-depth // UNIT), processors)
            launch = Launch(
                program_of(fmt, dtype, shape, Groups.of(fmt, depth)),
                (blocks, 1, 1),
                shape.threads,
                shared_bytes(shape, fmt.bits, table),
            )
            handed = blocks * shape.handed_bytes
            numbers = (rows, columns, token_tiles, row_tiles, tile_tokens, tile_rows, whole)
            if sort is not None:
                copy, sorted_x, routed, height = sort
                box_of_x = gathered(rows, height), depth, whole_stride, shape.tokens

                def run_sorted(backend: Backend, pointer: int, epilogue: bytes) -> None:
                    copy(backend, pointer)
                    x = backend.tensor_map(sorted_x, *box_of_x, dtype)
                    arguments = (x, NO_MAP, *packed_pair, epilogue, routed, *numbers)
                    backend.launch(launch, *arguments, 0, 0, NO_SCALES)

                return run_sorted

            sends = shape.sends and table % BOX_ALIGNMENT == 0
            box = box_of(shape, token_tiles, tile_tokens)
            results = partial(_map_of_results, rows, columns, box, dtype)
            stride = row_stride if rows > 1 else whole_stride
            each = tile_tokens // (2 if shape.shared_x else 1)

            def run(backend: Backend, pointer: int, epilogue: bytes) -> None:
                x = backend.tensor_map(pointer, rows, depth, stride, each, dtype)
                y = results(backend, epilogue) if sends else NO_MAP
                arguments = (x, y, *packed_pair, epilogue, NOT_ROUTED, *numbers)
                with backend.workspace(handed) if handed else nullcontext(0) as memory:
                    backend.launch(launch, *arguments, memory, next(TICKETS), NO_SCALES)

            return run

        return of_rows


def _map_of_results(
    rows: int, columns: int, box: int, dtype: str, backend: Backend, epilogue: bytes
) -> bytes:
    """Of those of x's type, in rows of whole vectors: the kernel sends no others."""
    out, _, _, stride, column, _, out_type, *_ = UNPACK(epilogue)
    whole = column == 1 and not (out | stride * ELEMENT_BYTES) % 16
    if not whole or out_type != TYPES[dtype]:
        return NO_MAP
    return backend.tensor_map(out, rows, columns, stride * ELEMENT_BYTES, box, dtype)


def _pace(shape: Shape) -> dict[str, int]:
    """What matmul/hopper_codes.cuh's Pace wants of a Tile."""
    return {"x_fine": shape.x_fine, "segment": shape.segment, "folded": shape.folded}


@lru_cache(maxsize=4096)
def program_of(fmt: Format, dtype: str, shape: Shape, groups: Groups) -> Program:
    """The kernel of a weight whose scales are `groups`; `dtype` is one of ELEMENTS."""
    facts = cpp.facts(fmt, decoding=not fmt.is_blocks)
    tile = cpp.numbers(
        "Tile",
        tokens=shape.tokens,
        row_groups=shape.row_groups,
        depth_groups=shape.depth_groups,
        stages=shape.stages,
        span=shape.span,
        buffers=shape.buffers,
        slices=shape.slices,
        group_units=groups.units,
        fine=groups.fine,
        lie=packed_weight.lie(fmt, FRAGMENTS_LAYOUT),
        kind=shape.kind,
        wide=shape.wide,
        shared_x=shape.shared_x,
        streamed=shape.streamed,
        once=shape.once,
        split=shape.split,
        **(_pace(shape) if shape.element == 1 else {}),
    )
    arguments, text = (facts.type, ELEMENTS[dtype], tile.type), facts.text + tile.text
    return Program(
        "matmul/hopper.cu",
        "matmul_hopper",
        arguments,
        text,
        features=True,
        contract=True,
        overlaps=True,
    )
