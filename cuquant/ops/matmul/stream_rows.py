"""Codes by rows, as a QuantArray has them, in matmul/stream.cu: how they come to a warp, and how
many units of them it multiplies together (matmul/stream_rows.cuh)."""

from collections.abc import Iterator
from typing import NamedTuple

from cuquant.array.fragments import STRIP, UNIT
from cuquant.formats import Uniform
from cuquant.ops.layout.packed_weight import Groups
from cuquant.ops.matmul.problem import Problem

TILE = 8  # rows of x that one product of a warp takes
CHUNK, LONG_CHUNK = 4, 8  # units that go through shared memory together
RING_CHUNKS = 2  # of a warp
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
    short
        Whether half of the warps will do, since the product is over soon.
    """

    copied: bool = False
    span: int = 1
    short: bool = False

    @classmethod
    def of(cls, problem: Problem, groups: Groups) -> "Way":
        """That of a product on a GPU with clusters."""
        fmt = problem.format
        assert fmt is not None
        units = -(-problem.depth // UNIT)
        paired = _in_pairs(problem, groups, units)
        if _has_ring(fmt.bits, groups, units, paired):
            return cls(True, 1 + paired, _is_short(problem, groups))
        return cls(span=1 + paired)

    def rooms(self, bits: int) -> Iterator[tuple[int, int, int]]:
        """What codes that are copied may take: bytes of a warp's ring, units of a chunk, and units
        in which warps share K.

        Long chunks of small codes are whole bursts of memory's, and of 5 bits save what a chunk
        takes where warps are few; unless they leave room for fewer warps or half of x. Of 4 bits
        they are slower.
        """
        chunks = [(CHUNK, CHUNK)]
        if self.span == 2 and (bits <= 3 or (bits == 5 and self.short)):
            chunks = [(LONG_CHUNK, LONG_CHUNK), (LONG_CHUNK, CHUNK), *chunks]
        for chunk, share in chunks:
            yield RING_CHUNKS * STRIP * _row_bytes(bits, chunk, self.span), chunk, share


def _has_ring(bits: int, groups: Groups, units: int, paired: bool) -> bool:
    """Whether codes go through shared memory: whose rows begin on 16 bytes, where a lane's own
    codes are no whole words or less than 8 bytes, or scales are many."""
    if units * bits % 2 or groups.units not in (0, 1, 2, 4):
        return False
    many = bits == 4 and groups.units == 1
    return bits in (3, 5, 6, 7) or many or (bits <= 2 and paired)


def _row_bytes(bits: int, chunk: int, span: int) -> int:
    """What a row of a chunk of codes takes in shared memory: matmul/stream_rows.cuh's row_bytes."""
    return chunk * UNIT * bits // 8 + (16 if bits <= 3 or (bits == 5 and span == 2) else 0)


def _is_short(problem: Problem, groups: Groups) -> bool:
    """Whether a product is short, and its codes take long to decode."""
    p, fmt = problem, problem.format
    assert fmt is not None
    plain = not p.gated and groups.fine == 1
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


def _in_pairs(problem: Problem, groups: Groups, units: int) -> bool:
    """Whether units are multiplied two at a time: of few bits, where groups are not shorter.

    Of integers of 2 bits x is paired for it before warps begin, which very short products with more
    than a few rows of it do not make up for.
    """
    p, fmt = problem, problem.format
    assert fmt is not None
    uniform = isinstance(fmt.codec, Uniform)
    five = fmt.bits == 5 and uniform and p.rows <= TILE
    late = fmt.bits == 2 and uniform and p.rows > FEW_ROWS and _is_small(p, SHORTEST)
    few_bits = (fmt.bits <= 3 and not late) or five
    return few_bits and units % 2 == 0 and groups.units in (0, 2, 4)
