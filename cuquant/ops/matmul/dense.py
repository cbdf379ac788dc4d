"""Products of codes with codes on Hopper's tensor cores: matmul/dense.cu.

A block multiplies 128 rows of one side, `a`, by up to 256 of the other, `b`; either is x. Which
one, and how large tiles are, follows from a model of the time.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from cuquant.gpu.backend import Backend
from cuquant.gpu.jit import Launch, Program
from cuquant.gpu.limits import SHARED
from cuquant.gpu.rates import H100
from cuquant.ops import cpp
from cuquant.ops.matmul.coded import FLOATS, INTEGERS, LEAST_BLOCK, Coded, Groups, bytes_of

ARCH = 90
LINE = 128  # bytes of K of a stage
ROWS = 128  # of side a
THREADS = 384
AREA = 8 * 2560  # bytes in which warps order results
BARRIERS, OTHER_BARRIERS = 16, 16  # bytes of a stage's two, and of the others
BATCH, BATCHES = 4, 2  # sums whose scales are brought together, and how many such there is room for
KINDS = {"int8": 0, "uint8": 1, "fp8_e4m3": 2, "fp8_e5m2": 3, "bits": 4}  # CodeKind
COLUMNS = (16, 32, 64, 96, 112, 128, 144, 192, 224, 256)  # of a tile: a program each
WAYS = ((2, 1), (1, 1), (1, 2), (1, 4), (1, 8))  # share and split
# Columns whose sums, and scales that change along K, find registers: by Tile.blocks.
MOST_SCALED, MOST_FINE = {0: 160, 1: 256, 2: 160}, 128
ALIGNED = 8  # rows of weights of a tile are a multiple: results are stored by so many
INVARIANT_ROWS = 64  # of x: rows that must not depend on their number suit tiles for so many
COARSE, FINE = 128, 32  # bytes of K whose sums are promoted, where these have scales
RUN = 256  # and of small floats without: the tensor cores add up with about 14 bits
LEAST_STAGES, MOST_STAGES = 3, 12

# What takes how long, in cycles of a multiprocessor: so long that it does OPERATIONS in one where
# large products reach what Rates say. Fitted to H100 and H200, whose clocks follow power: what
# counts is how ways compare.
OPERATIONS = 6200
DIRECT = 4.1  # products of a line of 128 rows with a row of b
PROMOTED = {0: 6.0, 1: 5.3, 2: 6.4}  # where their sums are promoted, by Tile.blocks
UNSCALED = 5.0  # where these have no scales
DOUBLE, MOST_DOUBLE = 0.94, 128  # of that, up to so many columns: with the sums of two lines
# Of a line, beside: warps wait for each other, or for those of another block.
LINE_CYCLES, PROMOTED_LINE, SHARED_LINE = 250.0, 150.0, 5.0
FINE_TIMES = 4.0  # where there are four sums of a line
# Of a line, to bring the scale of a row of b that no other row has: more do not stay in L1.
SCALE_CYCLES, MORE_CYCLES, FEW_COLUMNS = 3.0, 6.0, 64
BROUGHT = 48.0  # bytes to a multiprocessor in a cycle
LEAST_LINE = 400.0  # of a line, however few columns
END_CYCLES = 1000.0  # after the products of a tile
RESULT_CYCLES = {False: 10.0, True: 20.0}  # and for each of its columns, by Tile.swapped
ADDED_CYCLES, ADDED_COLUMN = 1500.0, 30.0  # likewise, where blocks add up their sums
FILL_CYCLES = 2000.0  # before the first products
START_US, LAST_US = 2.0, 2.0  # of a kernel; and from the last bytes read to its end
READ = 1.1  # by how much faster memory is read than rates say, which are those of a whole kernel
CLUSTERS = {1: 1.0, 2: 1.0, 4: 0.9, 8: 0.85}  # part of the multiprocessors that clusters find


@dataclass(frozen=True)
class Tile:
    """How matmul/dense.cu divides a product: see DenseTile in matmul/dense_tiles.cuh.

    Attributes
    ----------
    columns
        Rows of side b of a block.
    stages
        Lines of both sides in shared memory.
    promote
        Bytes of K whose products the tensor cores add up before they meet others in float32: FINE,
        COARSE or RUN; 0: all of them.
    scaled
        Whether each of those sums is multiplied by its scales: 1 where all of them are float32, or
        2; 0: scales follow at the end.
    blocks
        Blocks of scales that the columns of a part are of, 1 or 2; 0: each column has its own.
    swapped
        Whether the weights are side a, and x is side b.
    share
        2: the two blocks of a cluster bring half of b each to both.
    split
        Blocks of a cluster that share K.
    """

    columns: int
    stages: int = 0
    promote: int = 0
    scaled: int = 0
    blocks: int = 0
    swapped: bool = False
    share: int = 1
    split: int = 1

    @property
    def cluster(self) -> int:
        return self.share * self.split


class Work(NamedTuple):
    """What is to be divided.

    Attributes
    ----------
    rows
        Of x in a group, or in all of them where these are told on the device.
    columns, lines
        N, and K in lines of LINE bytes.
    kinds
        KINDS of x and of the weights.
    promote, scaled, tall
        As Tile says; and rows of the weights that share scales which change along K.
    groups, told
        How many, and how only the device knows their rows: by "offsets" or "counts"; else "".
    processors, read, codes
        Multiprocessors; and of Rates.
    """

    rows: int
    columns: int
    lines: int
    kinds: tuple[str, str]
    promote: int = 0
    scaled: int = 0
    tall: int = 1
    groups: int = 1
    told: str = ""
    processors: int = 132
    read: float = H100.read
    codes: float = H100.codes

    @property
    def cycles(self) -> float:
        """In a microsecond."""
        return self.codes / (self.processors * OPERATIONS)

    @property
    def is_float(self) -> bool:
        return self.kinds[0] in FLOATS


# ---- shared memory ------------------------------------------------------------------------------


def scales_of(tile: Tile) -> int:
    """Scales of a batch: DenseTile's kScales."""
    return BATCH * (ROWS + (4 if tile.blocks else tile.columns)) if tile.scaled else 0


def shared_bytes(tile: Tile, *, is_float: bool) -> int:
    """Dynamic shared memory of a block."""
    sides = ROWS + tile.columns
    ends = (0 if tile.scaled else sides) + (ROWS if tile.swapped else tile.columns)
    ends += 0 if is_float or tile.scaled else 2 * sides
    floats = BATCHES * scales_of(tile) + ends
    return tile.stages * (sides * LINE + BARRIERS) + floats * 4 + AREA + OTHER_BARRIERS


@lru_cache(maxsize=4096)
def staged(tile: Tile, *, is_float: bool) -> Tile:
    """The tile with as many stages as fit and help; LEAST_STAGES - 1 and fewer are too few."""
    empty = shared_bytes(replace(tile, stages=0), is_float=is_float)
    each = shared_bytes(replace(tile, stages=1), is_float=is_float) - empty
    return replace(tile, stages=min((SHARED[ARCH] - empty) // each, MOST_STAGES))


# ---- the choice of a tile -----------------------------------------------------------------------


class Cut(NamedTuple):
    """Tiles of the two sides, and rows of the weights from one to the next."""

    a: int
    b: int
    step: int

    def blocks(self, tile: Tile) -> int:
        """Blocks that all tiles keep busy for the time of one."""
        return -(-self.a // tile.share) * tile.share * self.b * tile.split


@lru_cache(maxsize=4096)
def cut_of(tile: Tile, work: Work) -> Cut:
    """How many tiles there are.

    Where x is side b, the rows of the weights are divided evenly among the blocks of all rounds.
    """
    groups = Groups(work.groups, work.rows, offsets=int(work.told == "offsets"))
    x_tiles = groups.tiles(tile.columns if tile.swapped else ROWS)
    if not tile.swapped:
        return Cut(x_tiles, -(-work.columns // tile.columns), tile.columns)
    tiles = -(-work.columns // ROWS)
    at_once = clusters_at_once(tile, work) * tile.share
    rounds = -(-tiles * x_tiles // at_once)
    most = rounds * at_once // x_tiles
    step = min(-(-work.columns // (most * ALIGNED)) * ALIGNED, ROWS) if most else ROWS
    return Cut(-(-work.columns // step), x_tiles, step)


def clusters_at_once(tile: Tile, work: Work) -> int:
    """How many clusters of blocks find multiprocessors that are neighbours."""
    return max(int(work.processors * CLUSTERS[tile.cluster]) // tile.cluster, 1)


def time_us(tile: Tile, work: Work) -> float:
    """About how many microseconds a product takes that is divided so."""
    cut = cut_of(tile, work)
    lines = -(-work.lines // tile.split)
    brought = (cut.step if tile.swapped else ROWS) + tile.columns / tile.share
    beside = PROMOTED_LINE / max(tile.promote // LINE, 1) if tile.promote else LINE_CYCLES
    beside += SHARED_LINE if tile.share > 1 else 0
    line = _longer(_multiplied(tile, work) + beside, brought * LINE / BROUGHT, LEAST_LINE, power=8)
    end = END_CYCLES + tile.columns / tile.split * RESULT_CYCLES[tile.swapped]
    end += ADDED_CYCLES + tile.columns * ADDED_COLUMN if tile.split > 1 else 0
    rounds = -(-cut.blocks(tile) // (clusters_at_once(tile, work) * tile.cluster))
    busy = START_US + (rounds * (lines * line + end) + FILL_CYCLES) / work.cycles
    rows = work.rows * (1 if work.told == "offsets" else work.groups)
    moved = (work.columns * work.groups + rows) * work.lines * LINE
    reading = START_US + LAST_US + moved / (work.read * READ)
    return _longer(busy, reading, power=4)


def _longer(*times: float, power: int) -> float:
    """The longest one, and a little more where others are nearly as long."""
    return sum(time**power for time in times) ** (1 / power)


def _multiplied(tile: Tile, work: Work) -> float:
    """Cycles of the products of a line."""
    if not tile.promote:
        return tile.columns * DIRECT
    each = PROMOTED[tile.blocks] if tile.scaled else UNSCALED
    if tile.promote == FINE:
        each *= FINE_TIMES
    elif tile.promote == COARSE and tile.columns <= MOST_DOUBLE:
        each *= DOUBLE
    if tile.scaled and (tile.swapped or work.tall < LEAST_BLOCK):
        each += SCALE_CYCLES + (MORE_CYCLES if tile.columns > FEW_COLUMNS else 0)
    return tile.columns * each


def halves_of(tile: Tile) -> int:
    """Parts of the columns whose sums are promoted one after the other."""
    return 2 if tile.promote and tile.columns > 192 else 1


def blocks_of(tile: Tile, work: Work) -> int:
    """Blocks of scales that the columns of a part are of: see Tile."""
    part, tall = tile.columns // halves_of(tile), work.tall
    if not tile.scaled or tile.swapped:
        return 0
    if tall % part == 0 or tall >= work.columns:
        return 1
    # Tiles begin on multiples of this many columns of a block.
    begin = math.gcd(tall, tile.columns)
    return 2 if begin % ALIGNED == 0 and tall - begin + part <= 2 * tall else 0


def ways(work: Work) -> Iterator[Tile]:
    """All tiles that can multiply."""
    for swapped in (False, True):
        for columns in COLUMNS:
            base = Tile(columns, promote=work.promote, scaled=work.scaled, swapped=swapped)
            base = replace(base, blocks=blocks_of(base, work))
            if columns > _most(base):
                continue
            for share, split in WAYS:
                if share > 1 and not (swapped or (work.groups == 1 and not work.told)):
                    continue
                if split > 1 and (columns // 8 % split or work.lines < split):
                    continue
                tile = staged(replace(base, share=share, split=split), is_float=work.is_float)
                room = tile.stages * (ROWS + columns) * LINE
                if tile.stages < LEAST_STAGES or (split > 1 and room < ROWS * columns * 4):
                    continue
                cut = cut_of(tile, work)
                if (share > 1 and cut.a < 2) or (
                    split > 1 and cut.blocks(tile) > clusters_at_once(tile, work) * split
                ):
                    continue
                yield tile


def _most(tile: Tile) -> int:
    """Columns whose sums find registers."""
    most = MOST_SCALED[tile.blocks] if tile.scaled else max(COLUMNS)
    return min(most, MOST_FINE) if tile.promote == FINE else most


@lru_cache(maxsize=4096)
def tile_of(work: Work) -> Tile:
    """The tile that takes least."""
    return min(ways(work), key=lambda tile: time_us(tile, work))


def invariant_tile(work: Work) -> Tile:
    """The fastest one for INVARIANT_ROWS, of those whose blocks have all of K."""
    work = work._replace(rows=INVARIANT_ROWS, groups=1, told="")
    whole = (tile for tile in ways(work) if tile.cluster == 1)
    return min(whole, key=lambda tile: time_us(tile, work))


# ---- the product --------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def program_of(kinds: tuple[str, str], tile: Tile) -> Program:
    """The kernel for codes of x and of the weights."""
    a, b = (KINDS[kind] for kind in (reversed(kinds) if tile.swapped else kinds))
    facts = cpp.numbers("DenseTile", **asdict(tile))
    arguments = (f"Products<{a}, {b}>", facts.type)
    return Program(
        "matmul/dense.cu",
        "matmul_dense",
        arguments,
        facts.text,
        features=True,
        contract=True,
        overlaps=True,
    )


def promoted(a: Coded, b: Coded, depth: int) -> int | None:
    """Columns of K whose sums share their scales, as kernels have them: 0 for all, COARSE or FINE;
    None: fewer or others."""
    wides = [side.scaling.wide for side in (a, b) if side.scaling.wide < depth]
    if not wides:
        return 0
    return next((n for n in (COARSE, FINE) if not any(wide % n for wide in wides)), None)


def run_of(kind: str, depth: int) -> int:
    """Tile's promote, where scales do not change along K."""
    return RUN if kind in FLOATS and depth > RUN else 0


def takes(a: Coded, b: Coded, depth: int) -> bool:
    """Whether the kernel has such scales: bits, and integers with zero points, have one segment."""
    segments = promoted(a, b, depth)
    corrected = a.kind == "bits" or a.zero_point or b.zero_point
    return segments == 0 or (segments is not None and not corrected)


def work_of(
    backend: Backend,
    a: Coded,
    b: Coded,
    columns: int,
    depth: int,
    groups: Groups,
) -> Work:
    """What is to be divided: x `a` times the weights `b`."""
    nbytes = bytes_of(a.kind, depth)
    promote = promoted(a, b, depth)
    assert promote is not None
    floats = all(
        side.scaling.scale and side.scaling.dtype == "float32" and not side.scaling.global_scale
        for side in (a, b)
    )
    scaled = (1 if floats else 2) if promote else 0
    tall = b.scaling.tall if promote else 1
    promote = promote or run_of(a.kind, depth)
    told = "offsets" if groups.offsets else "counts" if groups.counts else ""
    return Work(
        groups.rows, columns, -(-nbytes // LINE), (a.kind, b.kind), promote, scaled,
        tall, groups.count, told, backend.multiprocessors, backend.rates.read, backend.rates.codes,
    )  # fmt: skip


def dense(
    backend: Backend,
    a: Coded,
    b: Coded,
    columns: int,
    depth: int,
    groups: Groups,
    results: bytes,
    *,
    tile: Tile | None = None,
) -> None:
    """x times weights, both of codes.

    Parameters
    ----------
    a, b
        x and the weights; of kind "bits", codes are 0 and 1, eight a byte, and `sums` count ones.
    columns, depth
        N and K, of which each is at least 1.
    groups
        Which rows of x meet which weights.
    results
        The struct CodedResults of matmul/coded_results.cuh.
    tile
        How to divide the product, whatever else may be faster: for measuring.
    """
    work = work_of(backend, a, b, columns, depth, groups)
    _by_tile(backend, b, work, tile or tile_of(work), depth, groups)(backend, a, results)


def _by_tile(
    backend: Backend, b: Coded, work: Work, tile: Tile, depth: int, groups: Groups
) -> Callable[[Backend, Coded, bytes], None]:
    """What multiplies x at any addresses: all but x's own map and struct is made once."""
    cut, columns = cut_of(tile, work), work.columns
    boxes = [ROWS, tile.columns // tile.share]
    if tile.swapped:
        boxes[0] = cut.step
    of_x, of_b = boxes[::-1] if tile.swapped else boxes
    x_rows = groups.rows * (1 if groups.offsets else groups.count)
    nbytes = bytes_of(b.kind, depth)
    launch = launch_of(work, tile, cut)
    b_rows = groups.count * columns
    b_map = backend.tensor_map(b.codes, b_rows, nbytes, b.stride, of_b, "uint8", LINE)
    b_told, told = b.pack(), groups.pack()
    numbers = columns, depth, work.lines, cut.a, cut.b, cut.step, *boxes

    def run(backend: Backend, x: Coded, results: bytes) -> None:
        x_map = backend.tensor_map(x.codes, x_rows, nbytes, x.stride, of_x, "uint8", LINE)
        sides = x_map, b_map, x.pack(), b_told
        if tile.swapped:
            sides = b_map, x_map, b_told, sides[2]
        backend.launch(launch, *sides, told, results, *numbers)

    return run


def prepare(
    backend: Backend,
    a: Coded,
    b: Coded,
    columns: int,
    depth: int,
    groups: Groups,
    *,
    batch_invariant: bool = False,
) -> Callable[[Backend, Coded, bytes], None]:
    """What multiplies x and these weights, called with x at any addresses and a CodedResults.

    `batch_invariant`: by one tile, and all of K by one block, however many rows x has.
    """
    work = work_of(backend, a, b, columns, depth, groups)
    tile = invariant_tile(work) if batch_invariant else tile_of(work)
    return _by_tile(backend, b, work, tile, depth, groups)


@lru_cache(maxsize=4096)
def launch_of(work: Work, tile: Tile, cut: Cut) -> Launch:
    """As many clusters as there are tiles, or as run at a time."""
    clusters = -(-cut.a // tile.share) * cut.b
    if tile.split == 1:
        clusters = min(clusters, work.processors // tile.cluster)
    shared = shared_bytes(tile, is_float=work.is_float)
    grid = (clusters * tile.cluster, 1, 1)
    return Launch(program_of(work.kinds, tile), grid, THREADS, shared)


# ---- what is compiled ahead ---------------------------------------------------------------------

PAIRS: list[tuple[str, str]] = [
    *((one, other) for kinds in (INTEGERS, FLOATS) for one in kinds for other in kinds),
    ("bits", "bits"),
]
# Rows of x, columns and K of products that are divided in different ways.
USUAL = (
    (1, 4096, 4096), (16, 14336, 4096), (64, 4096, 4096), (64, 14336, 4096), (128, 576, 7168),
    (256, 14336, 4096), (1024, 14336, 4096), (4096, 576, 7168), (4096, 4096, 4096),
    (4096, 14336, 4096),
)  # fmt: skip
# Columns and rows of the weights' blocks, 0 for all of them, and how Tile has their scales.
SCALINGS = ((0, 1, 0), (COARSE, 128, 1), (COARSE, 1, 1), (COARSE, 128, 2), (FINE, 1, 2))
SCALED_PAIRS = (("int8", "int8"), ("fp8_e4m3", "fp8_e4m3"))


def programs() -> list[Program]:
    """Those of usual products."""
    found: dict[Program, None] = {}
    for kinds, (rows, columns, depth) in product(PAIRS, USUAL):
        lines = -(-bytes_of(kinds[0], depth) // LINE)
        for promote, tall, scaled in SCALINGS if kinds in SCALED_PAIRS else SCALINGS[:1]:
            promote = promote or run_of(kinds[0], depth)
            work = Work(rows, columns, lines, kinds, promote, scaled, tall)
            found[program_of(kinds, tile_of(work))] = None
    return list(found)
