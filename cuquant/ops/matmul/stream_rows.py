"""Codes by rows, as a QuantArray has them, in matmul/stream.cu: how they come to a warp, how many
units of them it multiplies together, and what their scales meet (matmul/stream_rows.cuh and
stream_meet.cuh)."""

from collections.abc import Iterator
from typing import NamedTuple

from cuquant.array.fragments import STRIP, UNIT
from cuquant.formats import Codebook, Format, Uniform
from cuquant.ops.layout.packed_weight import Groups
from cuquant.ops.matmul.problem import Problem

TILE = 8  # rows of x that one product of a warp takes
X_BYTES = 128  # of a unit of x in shared memory
CHUNK, LONG_CHUNK = 4, 8  # units that go through shared memory together
RING_CHUNKS = 2  # of a warp
AT_SUMS, AT_OPERANDS = 0, -1  # matmul/stream_meet.cuh's Meet
# Bits of codes that take long to decode, with few rows of x or more of them.
FEW_ROWS, SLOW_BITS, MORE_SLOW_BITS = 4, (3, 5), (2, 3, 5)
# Bytes of codes, of a multiprocessor, in a product that is over before memory has been busy for
# long, and in one that has hardly begun then.
MOST_SHORT, SHORTEST = 176 << 10, 64 << 10


class Way(NamedTuple):
    """How codes by rows are multiplied.

    Attributes
    ----------
    copied
        Whether they go through shared memory, chunk by chunk.
    span
        Units that are multiplied together.
    meet
        What the scales of several groups in a unit meet: sums, operands, or the sums of so many
        products whose columns are groups.
    short
        Whether half of the warps will do, since the product is over soon.
    """

    copied: bool = False
    span: int = 1
    meet: int = AT_SUMS
    short: bool = False

    @classmethod
    def all_of(cls, problem: Problem, groups: Groups) -> Iterator["Way"]:
        """Those of a product on a GPU with clusters: the fastest, and where scales come beside
        codes, another one that leaves more room for x."""
        fmt = problem.format
        assert fmt is not None
        units = -(-problem.depth // UNIT)
        for meet in dict.fromkeys((_meet(problem, groups), AT_SUMS)):
            paired = _in_pairs(problem, groups, units, meet)
            if _has_ring(fmt.bits, groups, units, paired):
                yield cls(True, 1 + paired, meet, _is_short(problem, groups, meet))
            else:
                yield cls(span=1 + paired)

    def rooms(self, fmt: Format, groups: Groups) -> Iterator[tuple[int, int, int, int]]:
        """What codes that are copied may take: bytes of a warp's ring, units of a chunk, units in
        which warps share K, and bytes of what lanes read that have no x in a column.

        Long chunks of small codes are whole bursts of memory's, and of 5 bits save what a chunk
        takes where warps are few; unless they leave room for fewer warps or half of x. Of 4 bits
        they are slower.
        """
        chunks = [(CHUNK, CHUNK)]
        if self.span == 2 and (fmt.bits <= 3 or (fmt.bits == 5 and self.short)):
            chunks = [(LONG_CHUNK, LONG_CHUNK), (LONG_CHUNK, CHUNK), *chunks]
        for chunk, share in chunks:
            row = _row_bytes(fmt.bits, chunk, self.span)
            if self.meet != AT_SUMS:  # float16 scales and zero points of a row, beside its codes
                row += chunk * groups.fine * (2 + bool(fmt.offset))
            zeros = (chunk + 1) * X_BYTES if self.meet > 0 else 0
            yield RING_CHUNKS * STRIP * row, chunk, share, zeros


def _has_ring(bits: int, groups: Groups, units: int, paired: bool) -> bool:
    """Whether codes go through shared memory: whose rows begin on 16 bytes, where a lane's own
    codes are no whole words or less than 8 bytes, or scales are many."""
    if units * bits % 2 or groups.units not in (0, 1, 2, 4):
        return False
    many = groups.fine > 1 or groups.units == 1
    return bits in (3, 5, 6, 7) or (bits == 4 and many) or (bits <= 2 and paired)


def _row_bytes(bits: int, chunk: int, span: int) -> int:
    """What a row of a chunk of codes takes in shared memory: matmul/stream_rows.cuh's row_bytes."""
    return chunk * UNIT * bits // 8 + (16 if bits <= 3 or (bits == 5 and span == 2) else 0)


def _is_short(problem: Problem, groups: Groups, meet: int) -> bool:
    """Whether a product is short, and its codes take long to decode."""
    p, fmt = problem, problem.format
    assert fmt is not None
    plain = not p.gated and (groups.fine == 1 or meet != AT_SUMS)
    slow_bits = MORE_SLOW_BITS if p.rows <= FEW_ROWS else SLOW_BITS
    slow = isinstance(fmt.codec, Uniform) and fmt.bits in slow_bits
    return plain and slow and _is_small(p, MOST_SHORT)


def _is_small(problem: Problem, most: int) -> bool:
    """Whether a product has at most so many bytes of codes, and two strips, for each
    multiprocessor."""
    p, fmt = problem, problem.format
    assert fmt is not None
    strips = -(-p.columns // STRIP)
    nbytes = p.columns * p.depth * fmt.bits // 8
    all_busy = p.multiprocessors <= strips <= 2 * p.multiprocessors
    return p.rows <= TILE and all_busy and nbytes <= most * p.multiprocessors


def _in_pairs(problem: Problem, groups: Groups, units: int, meet: int) -> bool:
    """Whether units are multiplied two at a time: of few bits, where groups are not shorter.

    Of integers of 2 bits x is paired for it before warps begin, which very short products with more
    than a few rows of it do not make up for.
    """
    p, fmt = problem, problem.format
    assert fmt is not None
    uniform = isinstance(fmt.codec, Uniform)
    if groups.fine > 1:
        return meet != AT_SUMS and _has_short_codes(fmt)
    five = fmt.bits == 5 and uniform and p.rows <= TILE
    late = fmt.bits == 2 and uniform and p.rows > FEW_ROWS and _is_small(p, SHORTEST)
    few_bits = (fmt.bits <= 3 and not late) or five
    return few_bits and units % 2 == 0 and groups.units in (0, 2, 4)


def _meet(problem: Problem, groups: Groups) -> int:
    """What the scales of several groups in a unit meet: see Way.

    Where groups of few rows of x are columns of one product, a sum meets one scale, and lanes have
    codes as they lie. Of more rows operands meet theirs, but for levels that were rounded; of
    bfloat16, which takes longer, with groups of 16 alone, and where two such products do not do.
    Where operands cannot, a few products take less than lanes that change codes, unless there is
    little to change, or what is looked up takes longest.
    """
    p, fmt = problem, problem.format
    if groups.fine == 1 or fmt is None or fmt.scale is None:
        return AT_SUMS
    stored = fmt.scale.dtype == "float16" and fmt.scale.nested is None
    whole = p.depth % (4 * UNIT) == 0  # pieces of rows: RowGroups
    own = fmt.bits < 8 and (fmt.bits != 4 or isinstance(fmt.codec, Uniform))  # words of a lane
    exact, halves = not isinstance(fmt.codec, Codebook), groups.fine == 2
    slight = halves and (fmt.bits in (4, 6) and not fmt.offset if exact else fmt.bits > 2)
    if not (stored and whole and own) or slight:
        return AT_SUMS
    columns = p.rows * groups.fine * (2 if _has_short_codes(fmt) else 1)
    products = 1 << (-(-columns // TILE) - 1).bit_length()
    half = p.dtype == "float16"
    operands = exact and not (halves and (fmt.bits == 4 or not half))
    few = 2 if operands or halves or fmt.bits not in (4, 6) else 4
    if products <= (1 if operands and half else few):
        return products
    return AT_OPERANDS if operands and p.rows <= TILE * (1 if halves else 2) else AT_SUMS


def _has_short_codes(fmt: Format) -> bool:
    """Whether two units of a row are multiplied together where scales come beside codes."""
    return fmt.bits <= 3 or (fmt.bits <= 5 and isinstance(fmt.codec, Uniform))
