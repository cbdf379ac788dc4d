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


class Way(NamedTuple):
    """How codes by rows are multiplied.

    Attributes
    ----------
    copied
        Whether they go through shared memory, chunk by chunk.
    span
        Units that are multiplied together.
    """

    copied: bool = False
    span: int = 1

    @classmethod
    def of(cls, problem: Problem, groups: Groups) -> "Way":
        """That of a product on a GPU with clusters."""
        fmt = problem.format
        assert fmt is not None
        units = -(-problem.depth // UNIT)
        paired = _in_pairs(problem, groups, units)
        if _has_ring(fmt.bits, groups, units, paired):
            return cls(True, 1 + paired)
        return cls(span=1 + paired)

    def rooms(self, bits: int) -> Iterator[tuple[int, int, int]]:
        """What codes that are copied may take: bytes of a warp's ring, units of a chunk, and units
        in which warps share K.

        Long chunks of small codes are whole bursts of memory's, unless they leave room for fewer
        warps or half of x. Of 4 bits they are slower.
        """
        chunks = [(CHUNK, CHUNK)]
        if self.span == 2 and bits <= 3:
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


def _in_pairs(problem: Problem, groups: Groups, units: int) -> bool:
    """Whether units are multiplied two at a time: of few bits, where groups are not shorter."""
    p, fmt = problem, problem.format
    assert fmt is not None
    five = fmt.bits == 5 and isinstance(fmt.codec, Uniform) and p.rows <= TILE
    return (fmt.bits <= 3 or five) and units % 2 == 0 and groups.units in (0, 2, 4)
