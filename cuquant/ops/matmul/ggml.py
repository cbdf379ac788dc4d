"""Few rows of x in 16 bits times ggml's blocks as they lie: matmul/ggml.cu."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from cuquant.gpu.backend import Backend
from cuquant.gpu.jit import Launch, Program
from cuquant.gpu.limits import SHARED, SHARED_OF_ALL, is_hopper
from cuquant.ops import cpp
from cuquant.ops.dequantize.ggml import GROUP
from cuquant.ops.matmul.problem import (
    LARGE_X,
    Prepared,
    Problem,
    Product,
    Run,
    Weight,
    shared_evenly,
)
from cuquant.ops.matmul.q8_1 import ROWS, WARP, Operand, operand

TILE, MOST_ROWS = 8, 16  # rows of x that one product of a warp takes; and a thread block
FEW_WARPS, LEAST_WARPS = 8, 4  # of a thread block
NARROW = (86, 89)  # architectures with little shared memory, like those from 120 on
RING = 2  # groups that a warp has on their way
BOX_ARCHS = range(90, 120)  # for sm_120 CUDA 12.9 makes boxes with stores to local memory
BARRIER_BYTES = 8  # for each of them, of what counts their bytes
ENDING_BYTES, OWNERS_BYTES = 32, 8  # what the end needs to know: of a block, and of a strip
LINE_BYTES = 80  # of 16 sums of a row of x
PAD_BYTES = 32  # between rows of x
LEVELS_BYTES = (32 << 10, 64 << 10)  # of the table of pairs of levels, and of a wide one
MOST_STRIPS = 64  # of a thread block
MOST_SHORT = 48  # groups of a multiprocessor, of a short product
FEW_ROWS = 2  # of x, with which a small table is enough
MOST_BOX = 1.25  # bytes of boxes for one of a group's, in a short product
MOST_DEPTH = 1 << 30  # the bytes of a row are 32-bit numbers


@dataclass(frozen=True)
class FloatCodes:
    """What matmul/ggml.cu is told about the weights of a ggml type.

    Attributes
    ----------
    zero
        What the bytes that it makes of codes exceed the numbers by.
    wide
        Whether they are signed bytes instead.
    """

    made: Operand

    @property
    def wide(self) -> bool:
        return self.made.layout.signed or self.made.lookup

    @property
    def zero(self) -> int:
        return 0 if self.made.layout.has_min or self.wide else 1 << (self.made.layout.bits - 1)

    @property
    def table_bytes(self) -> int:
        """Of a warp's table of scales; none where each 32 columns have one."""
        layout, stored = self.made.layout, self.made.stored
        direct = layout.elements == 32 and stored == "Float16"
        return 0 if direct else 4 * ROWS * (GROUP // layout.sub_block + 4)

    @property
    def facts(self) -> cpp.Facts:
        body = "\n".join(
            [
                cpp.layout_struct(self.made.layout),
                f"    static constexpr int bits = {self.made.layout.bits};",
                f"    static constexpr bool lookup = {str(self.made.lookup).lower()};",
                "    static constexpr bool centred = false;",
                f"    static constexpr Stored stored = Stored::{self.made.stored};",
                "    static constexpr float unit = 1.0f;",
                f"    static constexpr int zero = {self.zero};",
                f"    static constexpr bool wide = {str(self.wide).lower()};",
            ]
        )
        name = f"float_codes_{hashlib.sha256(body.encode()).hexdigest()[:8]}"
        return cpp.Facts(name, f"struct {name} {{\n{body}\n}};\n")


@lru_cache(maxsize=64)
def float_codes(name: str) -> FloatCodes:
    """Those of a ggml type."""
    return FloatCodes(operand(name))


@dataclass(frozen=True)
class Shape:
    """How matmul/ggml.cu divides a product.

    Attributes
    ----------
    split, strips
        Blocks of a cluster, which share K; and strips of 16 rows of the weight that they take.
    warps
        Of a block.
    chunk
        Groups of 256 columns of x that are in shared memory at a time.
    wide
        Whether the table of pairs of levels is the larger one.
    boxes
        Whether the copy engine brings weights.
    spread
        Whether each multiprocessor has a block, and as many strips as any other, but for one.
    """

    split: int
    strips: int
    warps: int
    chunk: int
    wide: bool = False
    boxes: bool = False
    spread: bool = False


def shared_bytes(made: Operand, rows: int, shape: Shape, sets: int) -> int:
    """Dynamic shared memory of a block; `sets`: weights, 2 where gated."""
    tokens, strips = -(-rows // TILE) * TILE, sets * shape.strips
    table = LEVELS_BYTES[shape.wide] if made.lookup else 0
    x = rows * (shape.chunk * 2 * GROUP + PAD_BYTES)
    row = made.box_bytes if shape.boxes else made.row_bytes
    warp = RING * (ROWS * row + BARRIER_BYTES) + FloatCodes(made).table_bytes
    pieces = (shape.warps + strips) * tokens * LINE_BYTES
    lines = rows if shape.split == 1 else rows + shape.split * -(-rows // shape.split)
    sums = lines * (strips * ROWS + 4) * 4 + ENDING_BYTES + OWNERS_BYTES * strips
    return table + x + shape.warps * warp + pieces + sums


def _most_warps(rows: int, arch: int) -> int:
    """Of a thread block, whose registers then hold what the kernel needs."""
    most = 12 if arch in NARROW or arch >= 120 else 16
    return most if rows <= TILE else most - 4


def _is_short(
    rows: int, columns: int, depth: int, multiprocessors: int, gated: bool = False
) -> bool:
    """Whether a product is over before memory has been busy for long."""
    groups = -(-columns // ROWS) * -(-depth // GROUP) * (2 if gated else 1)
    return groups <= MOST_SHORT * multiprocessors and rows <= TILE


@lru_cache(maxsize=4096)
def divide(
    name: str,
    rows: int,
    columns: int,
    depth: int,
    arch: int,
    multiprocessors: int,
    gated: bool = False,
    boxes: bool = False,
) -> Shape:
    """How to divide x [rows, depth] times a weight [columns, depth] of a ggml type.

    One wave of blocks where the sums of their strips fit into shared memory. Two blocks share K
    where x is large, and where there are few strips; warps share it in any case. Fewer warps, and
    then chunks of K, where x does not fit. A short product takes half of the warps, so that the
    weights of the next one come beside it.
    """
    made, groups, strips = operand(name), -(-depth // GROUP), -(-columns // ROWS)
    limit, sets = SHARED.get(arch, SHARED_OF_ALL), 2 if gated else 1
    split = 1
    if is_hopper(arch) and groups > 1:
        large = rows * depth * 2 > LARGE_X
        split = 2 if large or 2 * strips <= multiprocessors else 1
    most = -(-groups // split)
    short = _is_short(rows, columns, depth, multiprocessors, gated)
    early = arch >= 90 and split == 1  # the next product's blocks begin beside this one's
    spread = short and early and strips >= multiprocessors

    def shapes(each: int) -> Iterator[Shape]:
        all_at_once = spread and each * multiprocessors >= strips
        many = FEW_WARPS if all_at_once else _most_warps(rows, arch)
        for warps in range(many, FEW_WARPS - 1, -2):
            yield Shape(split, each, warps, most, boxes=boxes, spread=all_at_once)
        for warps in range(FEW_WARPS, LEAST_WARPS - 1, -2):
            none = Shape(split, each, warps, 0, boxes=boxes)
            room = limit - shared_bytes(made, rows, none, sets)
            chunk = min(room // (rows * 2 * GROUP), most)
            if chunk > 0:
                yield replace(none, chunk=-(-most // -(-most // chunk)))

    each = -(-strips // max(multiprocessors // split, 1))
    waves = -(-each // MOST_STRIPS)
    while True:
        for shape in shapes(-(-each // waves)):
            if shared_bytes(made, rows, shape, sets) <= limit:
                # The next product's block finds room beside a small table, which is soon filled.
                wide = replace(shape, wide=made.lookup and not (shape.spread and rows <= FEW_ROWS))
                return wide if shared_bytes(made, rows, wide, sets) <= limit else shape
        waves += 1


def in_boxes(
    name: str,
    rows: int,
    columns: int,
    depth: int,
    pointers: Sequence[int],
    arch: int,
    multiprocessors: int,
    gated: bool = False,
) -> bool:
    """Whether the copy engine brings weights: it takes rows that start on 16 bytes.

    Boxes do too, so that those of small blocks have up to a third of other groups' bytes, which
    does not pay in a short product.
    """
    layout, box = operand(name).layout, operand(name).box_bytes
    group, row = (n // layout.elements * layout.nbytes for n in (GROUP, depth))
    short = _is_short(rows, columns, depth, multiprocessors, gated)
    pays = box <= MOST_BOX * group or not short
    return pays and arch in BOX_ARCHS and not any(n % 16 for n in (row, *pointers))


@dataclass(frozen=True)
class BlocksProduct:
    """The orchestrator of matmul/ggml.cu."""

    layouts = (Weight.layout,)
    height = 0

    def takes(self, p: Problem) -> bool:
        """Few rows of x, and blocks [N, K] as ggml writes them."""
        whole = p.format is not None and p.format.is_blocks and p.direct
        few = p.rows <= MOST_ROWS and p.depth < MOST_DEPTH
        return whole and few and p.is_single and p.takes_halves and p.arch >= 80

    def time_us(self, p: Problem) -> float:
        """That of reading the weights."""
        assert p.format is not None
        return p.weights * p.format.bits / 8 / p.rates.read

    def prepare(self, backend: Backend, product: Product) -> Prepared:
        weights = [weight for weight in product.weights if isinstance(weight, Weight)]
        first = weights[0]
        name, gated = first.fmt.layout.name, len(weights) > 1
        columns, depth = product.columns, product.depth
        strips, groups = -(-columns // ROWS), -(-depth // GROUP)
        pointers = [backend.pointer(w.parts["blocks"]) for w in weights]
        machine = backend.arch, backend.multiprocessors
        layout, made = first.fmt.layout, operand(name)
        row_bytes = depth // layout.elements * layout.nbytes
        matrix = (columns, row_bytes // 2, row_bytes, ROWS, "uint16", made.box_bytes // 2)
        dtype, stride = product.x.type_name, product.x.row_stride
        is_aligned = int(product.x.is_aligned())

        def of_rows(rows: int) -> Run:
            boxes = in_boxes(name, rows, columns, depth, pointers, *machine, gated)
            shape = divide(name, rows, columns, depth, *machine, gated, boxes)
            each = backend.multiprocessors if shape.spread else 0
            clusters, *taken = shared_evenly(strips, shape.strips, each)
            launch = Launch(
                _program(name, dtype, -(-rows // TILE), shape, gated),
                (clusters * shape.split, 1, 1),
                WARP * shape.warps,
                shared_bytes(made, rows, shape, 2 if gated else 1),
            )
            blocks: list[int | bytes] = [*pointers]
            if shape.boxes:
                blocks = [backend.tensor_map(pointer, *matrix) for pointer in pointers]
            reciprocal = (1 << 32) // shape.warps + 1
            numbers = (rows, columns, depth, *taken, shape.chunk, groups, is_aligned, reciprocal)
            given = (blocks[0], blocks[-1], made.levels)

            def run(backend: Backend, pointer: int, epilogue: bytes) -> None:
                backend.launch(launch, pointer, stride, *given, epilogue, *numbers)

            return run

        return of_rows


@lru_cache(maxsize=1024)
def _program(name: str, dtype: str, tiles: int, shape: Shape, gated: bool) -> Program:
    facts = float_codes(name).facts
    kinds = {"gated": gated, "wide": shape.wide, "boxes": shape.boxes}
    tile = cpp.numbers("Tile", tiles=tiles, split=shape.split, **kinds)
    arguments, text = (facts.type, cpp.ELEMENTS[dtype], tile.type), facts.text + tile.text
    early = name != "q8_1"  # which quantize/q8_1.cu makes, and lets the next kernel start
    return Program(
        "matmul/ggml.cu", "matmul_blocks", arguments, text, contract=True, overlaps=early
    )
