"""Products of ggml's blocks with q8_1 activations, and q8_1 as llama.cpp's CUDA kernel makes it."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from cuquant import interop
from cuquant.formats import Codebook, Format, Minifloat, get_format
from cuquant.formats.blocks import BLOCK_LAYOUTS, BlockLayout
from cuquant.gpu.backend import Backend
from cuquant.gpu.jit import Launch, Program
from cuquant.gpu.limits import SHARED
from cuquant.lazy import lazy
from cuquant.ops import cpp
from cuquant.ops.cpp import element_of
from cuquant.ops.dequantize.ggml import GROUP

WARP, WARPS, QUANTIZE_THREADS = 32, 8, 256
ROWS, STEPS = 16, GROUP // 32  # of weights in a thread block; of 32 columns in a group
FEW, MANY, MOST = 4, 8, 16  # tokens of a thread block of matmul_q8_1
TILE, TILE_WITH_MINIMUMS = 64, 32  # and of matmul_q8_1_tiles: what registers have room for
TOKEN_BYTES = 36  # of q8_1's block of 32
TOKEN_PITCH = 304  # bytes of a token's group in shared memory
STAGES = 2  # groups that a warp has on their way
NARROW_WARPS = 4  # along the columns, where 8 do not find enough shared memory
SHARE = 2  # warps that have the same tokens and different rows
Q8_1 = get_format("q8_1")


@dataclass(frozen=True)
class Operand:
    """What matmul/q8_1.cu is told about the weights of a ggml type.

    Integer codes become signed bytes without a subtraction: a code of b bits without a minimum
    moves to the top of its byte, where flipping the top bit takes off 2^(b - 1); `unit` undoes the
    factor. Codes that are looked up become their levels as integers, times `unit`.
    """

    layout: BlockLayout
    fmt: Format

    @property
    def lookup(self) -> bool:
        return isinstance(self.fmt.codec, (Codebook, Minifloat))

    @property
    def centred(self) -> bool:
        return not (self.lookup or self.layout.has_min or self.layout.signed)

    @property
    def unit(self) -> float:
        if self.lookup:
            return 0.5 if isinstance(self.fmt.codec, Minifloat) else 1.0
        return 2.0 ** (self.layout.bits - 8) if self.centred else 1.0

    @lazy
    def levels(self) -> bytes:
        """16 signed bytes: the level of each code over `unit`; -128 where codes are integers."""
        if not isinstance(self.fmt.codec, (Codebook, Minifloat)):
            return b"\x80" * 16
        return (self.fmt.codec.values[:16] / np.float32(self.unit)).astype(np.int8).tobytes()

    @property
    def stored(self) -> str:
        """How scales are stored: a name of the kernels' Stored."""
        return cpp.SCALE_KINDS[self.layout.scale_kind]

    @lazy
    def facts(self) -> cpp.Facts:
        body = "\n".join(
            [
                cpp.layout_struct(self.layout),
                f"    static constexpr int bits = {self.layout.bits};",
                f"    static constexpr bool lookup = {str(self.lookup).lower()};",
                f"    static constexpr bool centred = {str(self.centred).lower()};",
                f"    static constexpr Stored stored = Stored::{self.stored};",
                f"    static constexpr float unit = {self.unit}f;",
            ]
        )
        name = f"blocks_{hashlib.sha256(body.encode()).hexdigest()[:8]}"
        return cpp.Facts(name, f"struct {name} {{\n{body}\n}};\n")

    @property
    def row_bytes(self) -> int:
        """Bytes of shared memory that a group of one row takes: see Geometry in the kernel."""
        nbytes = GROUP // self.layout.elements * self.layout.nbytes
        vectors = (nbytes + (12 if nbytes % 4 == 0 else 14) + 15) // 16
        return 16 * (vectors | 1)

    @property
    def box_bytes(self) -> int:
        """The same where the copy engine brings it, of rows that start on 16 bytes."""
        nbytes = GROUP // self.layout.elements * self.layout.nbytes
        return 16 * ((nbytes + 31 - math.gcd(nbytes, 16)) // 16 | 1)

    @property
    def table_bytes(self) -> int:
        """Of the scales, and minimums, of a group."""
        tables = 2 if self.layout.has_min else 1
        return 4 * tables * ROWS * (GROUP // self.layout.sub_block + 4)

    @property
    def token_table_bytes(self) -> int:
        """Of a token's scales and, where weights have minimums, of its sums."""
        sums = GROUP // self.layout.sub_block + 4 if self.layout.has_min else 0
        return 4 * (STEPS + 4 + sums)

    def shared(self, tokens: int, turns: int, share: int = 1) -> int:
        """Bytes of dynamic shared memory of a thread block of so many tokens."""
        weights = STAGES * ROWS * self.row_bytes + self.table_bytes
        each = STAGES * TOKEN_PITCH + self.token_table_bytes
        return turns * (share * weights + tokens * each)

    @property
    def tile(self) -> int:
        """Tokens of a thread block of matmul_q8_1_tiles."""
        return TILE_WITH_MINIMUMS if self.layout.has_min else TILE

    @property
    def tile_shared(self) -> int:
        """The same of matmul_q8_1_tiles."""
        tokens = self.tile * (2 * TOKEN_PITCH + self.token_table_bytes)
        return tokens + WARPS * (2 * ROWS * self.row_bytes + self.table_bytes)

    def launch(self, m: int, n: int, arch: int, multiprocessors: int) -> Launch:
        """How [m, n] results are made on GPUs of a compute capability.

        Tiles of many rows and tokens where these can fill two thirds of the GPU: they take two
        thirds of the operations, and most of the traffic of shared memory's ring is saved. Else
        few tokens at a time, whose sums have an order that m and n do not change; two warps share
        them where half as many thread blocks still fill the GPU, but not one token, nor few where
        weights are looked up: that is faster than what two warps wait for each other.
        """
        limit = SHARED.get(arch, SHARED[75])  # others have as much, or more
        blocks = -(-m // (ROWS * WARPS)) * -(-n // self.tile)
        if 3 * blocks >= 2 * multiprocessors and n > MOST and self.tile_shared <= limit:
            arguments = (self.facts.type, self.tile, WARPS)
            program = self._program("matmul_q8_1_tiles", arguments)
            return Launch(program, (blocks, 1, 1), WARP * WARPS, self.tile_shared)
        turns = WARPS if self.shared(MANY, WARPS) <= limit else NARROW_WARPS
        kind = FEW if n <= FEW else MANY
        if n > MANY and self.shared(MOST, turns) <= limit:
            kind = MOST
        share, tiles = 1, -(-n // kind)
        full = 10 * -(-m // (SHARE * ROWS)) * tiles >= 9 * multiprocessors
        alone = n == 1 or (self.lookup and n <= FEW)
        if limit >= SHARED[80] and full and not alone and self.shared(kind, turns, SHARE) <= limit:
            share = SHARE
        grid = -(-m // (share * ROWS)) * tiles
        arguments = (self.facts.type, kind, turns, STAGES, share)
        program = self._program("matmul_q8_1", arguments)
        return Launch(program, (grid, 1, 1), WARP * turns * share, self.shared(kind, turns, share))

    def _program(self, entry: str, arguments: tuple[str | int, ...]) -> Program:
        return Program(
            f"matmul/{entry.removeprefix('matmul_')}.cu",
            entry,
            arguments,
            self.facts.text,
            overlaps=True,
        )


@lru_cache(maxsize=64)
def operand(name: str) -> Operand:
    """That of a ggml type."""
    return Operand(BLOCK_LAYOUTS[name], get_format(name))


def gemm(
    backend: Backend, name: str, weights: Any, activations: Any, shape: tuple[int, int, int]
) -> Any:
    """float32 [M, N] of blocks [M, K // elements, bytes] and q8_1's [N, K // 32, 36].

    Both are contiguous and start on 16 bytes; `shape` is M, N, K.
    """
    m, n, k = shape
    out = backend.empty((m, n), np.dtype(np.float32))
    if m and n:
        made = operand(name)
        launch = made.launch(m, n, backend.arch, backend.multiprocessors)
        pointers = [backend.pointer(array) for array in (weights, activations, out)]
        backend.launch(launch, *pointers, made.levels, m, n, k)
    return out


# ---- quantize_q8_1(sum="values") -----------------------------------------------------------------


def values_launch(dtype: np.dtype, blocks: int) -> Launch:
    """Of quantize_q8_1."""
    made = cpp.facts(Q8_1)
    arguments = (made.type, element_of(dtype), QUANTIZE_THREADS)
    program = Program("quantize/q8_1.cu", "quantize_q8_1", arguments, made.text, overlaps=True)
    return Launch(program, (-(-blocks * WARP // QUANTIZE_THREADS), 1, 1), QUANTIZE_THREADS)


def quantize_values(backend: Backend, x: Any, dtype: np.dtype, shape: tuple[int, ...]) -> Any:
    """uint8 [..., K // 32, 36] of a contiguous x of this shape."""
    *rows, columns = shape
    out = backend.empty((*rows, columns // 32, TOKEN_BYTES), np.dtype(np.uint8))
    blocks = math.prod(shape) // 32
    if blocks:
        launch = values_launch(dtype, blocks)
        lookup = cpp.lookup(Q8_1.codec, backend)
        backend.launch(launch, backend.pointer(x), backend.pointer(out), lookup, blocks)
    return out


def programs(fmt: Format, dtypes: Sequence[str] = ("float32",), arch: int = 0) -> list[Program]:
    """The programs that multiply weights of a ggml type, or that make activations."""
    if fmt.name == Q8_1.name:
        return [values_launch(interop.float_dtype(name), 1).program for name in dtypes]
    if fmt.name not in BLOCK_LAYOUTS:
        return []
    made = operand(fmt.name)
    sizes = [(1, n, count) for n in (1, FEW, MANY, MOST) for count in (ROWS, 1)]
    sizes.append((ROWS * WARPS, TILE, 1))
    archs = (arch,) if arch else SHARED
    found = {made.launch(m, n, a, count).program: None for m, n, count in sizes for a in archs}
    return list(found)
