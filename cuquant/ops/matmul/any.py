"""Products by the plain kernels."""

import struct
from dataclasses import dataclass
from functools import lru_cache

from cuquant.gpu.backend import Backend
from cuquant.gpu.jit import Launch, Program
from cuquant.ops.geometry import CHUNK
from cuquant.ops.matmul.problem import Prepared, Problem, Product, Run

MOST_GRID = 2**31 - 1  # thread blocks along x
MOST_DIMS = 6  # matmul/any.cu's Batch::most
THREADS, WARP = 256, 32
TILE, FEW = 64, 8  # rows of x that a block of matmul_tiles and of matmul_rows takes
MOST_ROWS = 16  # of x for matmul_rows, which reads and decodes the weights anew for each FEW
PART = 5 / 7  # of cuBLAS's rate with float32 that matmul_tiles reaches
PAIR = 2  # rows of weights that a warp of matmul_rows takes


@dataclass(frozen=True)
class Plain:
    """matmul_plain.cu: operands of any kind, format, shape and strides.

    Attributes
    ----------
    entry
        "matmul_tiles" or "matmul_rows".
    height
        Rows of x that a thread block takes.
    """

    entry: str
    height: int

    layouts = ("rows/1", "dense")

    def takes(self, p: Problem) -> bool:
        """Any product: matmul_rows those of few rows of x, and matmul_tiles the others."""
        return (p.rows <= MOST_ROWS) == (self.height == FEW)

    def time_us(self, p: Problem) -> float:
        """That of its multiply-adds, or of reading the weights, where they are codes."""
        bits = p.format.bits if p.format is not None else 0
        reading = p.weights * bits / 8 / p.rates.read
        return max(reading, 2 * p.rows * p.weights / (PART * p.rates.float32))

    def prepare(self, backend: Backend, product: Product) -> Prepared:
        first, second = product.weights[0], product.weights[-1]
        routing, batch, bare = product.routing, product.batch, product.bare
        gated = len(product.weights) > 1
        x_steps, weight_steps = (tuple(dim[i] for dim in batch) for i in (1, 2))
        x = product.x.pack(backend, x_steps)[8:]
        first_ = first.pack(backend, weight_steps)
        second_ = first_ if second is first else second.pack(backend, weight_steps)
        types = first.type, second.type
        facts = "".join(dict.fromkeys((first.facts, second.facts)))

        def of_rows(rows: int) -> Run:
            down = routing.most if routing else -(-rows // self.height)
            splits = self.splits(bare, down, backend.multiprocessors)
            across = -(-bare.columns // self.width(splits, gated))
            tiles = down * across * bare.batches
            launch = plain_launch(self.entry, types, facts, tiles)
            numbers = self._problem(bare, rows, down, across, tiles, splits)

            def run(backend: Backend, pointer: int, epilogue: bytes) -> None:
                given = pointer.to_bytes(8, "little") + x
                backend.launch(launch, given, first_, second_, epilogue, numbers)

            return run

        return of_rows

    def splits(self, product: Product, down: int, multiprocessors: int) -> int:
        """Warps of matmul_rows that share rows of weights, so that there is work for all."""
        if self.entry == "matmul_tiles":
            return 1
        each = 1 if len(product.weights) > 1 else PAIR
        warps = down * product.batches * -(-product.columns // each)
        wanted = min(48 * multiprocessors // max(warps, 1), product.depth // (WARP * CHUNK))
        return 1 << min(max(wanted, 1).bit_length() - 1, 3)

    def width(self, splits: int, gated: bool) -> int:
        """Rows of weights that a thread block takes, of each matrix."""
        if self.entry == "matmul_tiles":
            return TILE if gated else 2 * TILE
        return THREADS // WARP // splits * (1 if gated else PAIR)

    @staticmethod
    def _problem(
        product: Product, rows: int, down: int, across: int, tiles: int, splits: int
    ) -> bytes:
        """The Problem struct of matmul/any.cu."""
        routing, batch = product.routing, product.batch
        pointers = (routing.order, routing.segments, routing.count) if routing else (0, 0, 0)
        padded = [*batch, *[(1, 0, 0, 0)] * (MOST_DIMS - len(batch))]
        columns = [n for column in zip(*padded, strict=True) for n in column]
        return struct.pack(
            "<6q3Qq2iq25q",
            rows,
            product.columns,
            product.depth,
            down,
            across,
            tiles,
            *pointers,
            routing.step if routing else 0,
            len(product.weights) > 1,
            product.swapped,
            splits,
            len(batch),
            *columns,
        )


@lru_cache(maxsize=1024)
def plain_launch(entry: str, types: tuple[str, ...], facts: str, tiles: int) -> Launch:
    """Of the kernel for two operands, with a thread block for each tile, or as many as go."""
    program = Program("matmul/any.cu", entry, types, facts)
    return Launch(program, (min(tiles, MOST_GRID), 1, 1), THREADS)
