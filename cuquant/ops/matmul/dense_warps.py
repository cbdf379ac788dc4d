"""Products of codes on the tensor cores of any GPU: matmul/dense_warps.cu."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from cuquant.gpu.backend import Backend
from cuquant.gpu.jit import Launch, Program
from cuquant.ops import cpp
from cuquant.ops.matmul.coded import KINDS, Coded, Groups, bytes_of
from cuquant.ops.matmul.patches import Patches

WARP = 32
# Multiplies, called with x and the bytes of a CodedResults.
Run = Callable[[Backend, Coded | Patches, bytes], None]
SHORT, STEP = 16, 32  # columns of a product, where segments are short and otherwise


@dataclass(frozen=True)
class Tile:
    """What a thread block makes: the struct of the same name in matmul/dense_warps.cu.

    Attributes
    ----------
    tokens, rows
        Of x and of the weights.
    row_warps, token_warps, depth_warps
        Warps that share the rows, the tokens, and K.
    span, stages
        Columns that come to shared memory together, and how often.
    """

    tokens: int
    rows: int
    row_warps: int
    token_warps: int
    depth_warps: int
    span: int
    stages: int

    @property
    def threads(self) -> int:
        return WARP * self.row_warps * self.token_warps * self.depth_warps

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return (self.tokens + self.rows) * (self.span + 16) * self.stages


# By the rows of x that they suit; the last one suits all.
TILES = (
    Tile(8, 32, 2, 1, 4, 256, 4),
    Tile(16, 32, 2, 1, 4, 256, 4),
    Tile(32, 32, 2, 1, 4, 256, 3),
    Tile(64, 64, 2, 2, 2, 128, 3),
    Tile(128, 128, 4, 2, 1, 64, 3),
)


INVARIANT = TILES[3]  # of rows that must not depend on how many come with them


def tile_of(rows: int, *, segmented: bool = False) -> Tile:
    """The tile for so many rows of x in a group; where scales change along K, there are registers
    for the sums of the last but one."""
    tiles = TILES[:-1] if segmented else TILES
    return next((tile for tile in tiles if rows <= tile.tokens), tiles[-1])


@lru_cache(maxsize=1024)
def program_of(
    kinds: tuple[str, str], tile: Tile, step: int, segmented: bool, x: str = Coded.struct
) -> Program:
    """The kernel for x's codes, which are those of a struct `x`, and the weights'."""
    codes = cpp.numbers("Codes", x=KINDS[kinds[0]], weights=KINDS[kinds[1]])
    own = cpp.numbers("Tile", **vars(tile), step=step, segmented=segmented)
    arguments, text = (codes.type, own.type, x), codes.text + own.text
    return Program("matmul/dense_warps.cu", "dense_warps", arguments, text)


def prepare(
    x: Coded | Patches,
    weights: Coded,
    shape: tuple[int, int, int],
    groups: Groups,
    segment: int,
    *,
    batch_invariant: bool = False,
) -> Run:
    """What multiplies x @ weights.T of every group, of x at any addresses.

    `shape` is M, N and K, and M the rows of a group's x; `segment` columns share scales on both
    sides, all of them of bits.
    """
    _, columns, depth = shape
    segmented = segment < depth
    tile = INVARIANT if batch_invariant else tile_of(groups.typical, segmented=segmented)
    step = SHORT if segmented and segment % STEP else STEP
    program = program_of((x.kind, weights.kind), tile, step, segmented, x.struct)
    token_tiles = groups.tiles(tile.tokens)
    blocks = token_tiles * -(-columns // tile.rows)
    launch = Launch(program, (blocks, 1, 1), tile.threads, tile.shared)
    packed, told = weights.pack(), groups.pack()
    numbers = columns, bytes_of(x.kind, depth), segment, token_tiles

    def run(backend: Backend, x: Coded | Patches, results: bytes) -> None:
        backend.launch(launch, x.pack(), packed, told, results, *numbers)

    return run
