"""The layout "fragments/1" of a weight: codes where the lanes of a warp multiply them.

Tensor-core instructions want of each lane a few codes of a few rows. In this layout they lie
together: a lane loads them by one 16-, 8- or 4-byte access, and a warp's loads are contiguous.

Codes
-----
A weight is [N, K], or [E, N, K], where every expert is laid out alone. A strip is 16 rows, a unit
16 rows x 64 columns; N and K are padded to whole units with code 0. Lane l of a unit, with
g = l // 4 and t = l % 4, holds 16 pairs of neighbouring codes. Pair p = 4 s + r, with s and r in
0..3, has

    row     g + (8 if r is odd)
    columns 16 s + 2 t + (8 if r >= 2) and the next one: its low and its high element

so that pairs 4 s .. 4 s + 3 are the A fragment of mma.m16n8k16 for columns 16 s .. 16 s + 15.

Codes of b bits (`q.codes()`: unsigned, also int8's) fill b uint32 words of a lane. A pair's low
element has its bits in bits 0..15 of these words, the high element at the same places of bits
16..31. Bit i of the low element of pair p is (`position` is this table)

    b = 1, 2, 4, 8   in word p // F at bit b (p % F) + i, where F = 16 // b
    b = 3, 5         the same with F = 15 // b for pairs 0..14; of pair 15 in word i at bit 15
    b = 6            bits 0..3 as b = 4 in words 0..3, bits 4..5 as b = 2 in words 4..5
    b = 7            as b = 6, and bit 6 as b = 1 in word 6

But for codebooks and floats of 4 bits, whose pairs kernels look up: there pair p is byte p % 4 of
word p // 4, with the low element in its lower four bits.

The words of a lane are cut into sections of 4, then 2, then 1 words (b = 7: 4 + 2 + 1; b = 8:
4 + 4; b = 3: 2 + 1). In memory the sections of a unit follow each other, each [32 lanes][its
words]: word `first + j` of lane l, in a section of `count` words from `first` on, is word
32 first + l count + j of the unit.

Components
----------
codes         uint32 [E?, ceil(N / 16), ceil(K / 64), 32 b]
scale, zero_point, minimum
              where they have a value for each row and group ("row": one group), with their dtype
              [E?, ceil(N / 16), groups, 16]: entry 2 g + h of a strip is row g + 8 h; rows of the
              padding have 0
tail          the last word of each row as it is packed (of order "planes" the last `bits` words),
              [E?, N, words]; only where the row's codes do not fill it, whose other bits it keeps
spare         of order "word", where codes leave the upper s = 32 % b bits of every word: these
              bits, packed as `Packing(s)`, [E?, N, bytes]

All other components (scales of a tensor or of 2-D blocks, nested_scale, nested_offset,
global_scale) are those of the QuantArray. Of ggml's blocks, instead of `blocks` and the scale:

scale, minimum, sum
              the float16 d, m or dmin, and d * sum of each block, [E?, strips, blocks, 16]
sub_scale, sub_minimum
              the small integers of the sub-blocks as they are stored, before an offset is taken
              off, uint8 [E?, strips, sub-blocks, 16]

These lie as scales do.

Codes have 1 to 8 bits, and a block that does not hold the whole row has 16, 32 or a multiple of 64
columns, so that each 16 columns of a unit share a group. Other formats, and those of ggml's blocks
that have a byte for a scale, stay in "rows/1". The
columns that fill up the last unit may lie beyond the last group.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from cuquant.formats import Codebook, Format, Minifloat, Packing
from cuquant.formats.format import Component
from cuquant.lazy import lazy
from cuquant.reference import empty

FRAGMENTS_LAYOUT = "fragments/1"
STRIP = 16  # rows
UNIT = 64  # columns
LANES, PAIRS = 32, 16
WORD = np.dtype(np.uint32)

_SLAB = 1 << 20  # codes that are re-laid at a time: what the caches hold

Parts = dict[str, np.ndarray]


# ---- where a code is ----------------------------------------------------------------------------


@cache
def position(bits: int, pair: int) -> tuple[tuple[int, int], ...]:
    """(word, shift) of each bit of a pair's low element, in its lane; the high one's are 16 above.

    Not of codebooks and floats of 4 bits.

    >>> position(4, 5)
    ((1, 4), (1, 5), (1, 6), (1, 7))
    >>> position(3, 15)
    ((0, 15), (1, 15), (2, 15))
    """
    if bits in (6, 7):
        lower, upper = (4, 2) if bits == 6 else (6, 1)
        moved = ((lower + word, shift) for word, shift in position(upper, pair))
        return (*position(lower, pair), *moved)
    whole = 15 if bits in (3, 5) else 16  # pairs that lie as one piece
    if pair >= whole:
        return tuple((i, 15) for i in range(bits))
    fits = whole // bits
    return tuple((pair // fits, bits * (pair % fits) + i) for i in range(bits))


@cache
def sections(bits: int) -> tuple[tuple[int, int], ...]:
    """(first word, words) of the sections that a lane's words are cut into.

    >>> sections(7)
    ((0, 4), (4, 2), (6, 1))
    """
    found, first = [], 0
    while first < bits:
        count = next(size for size in (4, 2, 1) if size <= bits - first)
        found.append((first, count))
        first += count
    return tuple(found)


def word_in_unit(bits: int, lane: int, word: int) -> int:
    """Where a lane's word lies among the 32 * bits words of a unit.

    >>> word_in_unit(7, 3, 5)
    135
    """
    first, count = next(s for s in sections(bits) if s[0] <= word < sum(s))
    return LANES * first + lane * count + word - first


def lane_and_pair(row: int, column: int) -> tuple[int, int]:
    """Lane and pair of a code of a unit; it is the pair's high element where the column is odd.

    >>> lane_and_pair(9, 27)
    (5, 7)
    """
    lane = row % 8 * 4 + column % 8 // 2
    return lane, column // 16 * 4 + column % 16 // 8 * 2 + row // 8


class Piece(NamedTuple):
    """Bits of a pair's elements that lie together: `bits` from `bit` on, at `shift` of a word."""

    word: int
    shift: int
    pair: int
    bit: int
    bits: int


@cache
def pieces(bits: int) -> tuple[Piece, ...]:
    """`position` of all pairs, in as few pieces as there are."""
    found: list[Piece] = []
    for pair in range(PAIRS):
        places = position(bits, pair)
        starts = [i for i in range(bits) if not i or not _follows(places[i - 1], places[i])]
        for start, end in zip(starts, [*starts[1:], bits], strict=True):
            found.append(Piece(*places[start], pair, start, end - start))
    return tuple(found)


def _follows(place: tuple[int, int], after: tuple[int, int]) -> bool:
    return after == (place[0], place[1] + 1)


# ---- which weights, and the arrays that hold them -----------------------------------------------


def takes(fmt: Format, shape: tuple[int, ...]) -> bool:
    """Whether this layout is one for a weight [N, K] or [E, N, K] of a format."""
    if fmt.scale is None or fmt.bits > 8 or len(shape) not in (2, 3) or fmt.is_flat:
        return False
    if fmt.scale.per_matrix:  # products are of scales that it does not store
        return False
    if fmt.is_blocks and (shape[-1] % fmt.layout.elements or not fmt.layout.has_half_scale):
        return False
    block = fmt.scale.block[1] if isinstance(fmt.scale.block, tuple) else fmt.scale.block
    return isinstance(block, str) or block >= shape[-1] or block in (16, 32) or block % UNIT == 0


class Strips(NamedTuple):
    """A component with one value for each row and group: its name, dtype and groups."""

    name: str
    dtype: np.dtype
    groups: int


FIELDS = {
    "scale": "scale",
    "minimum": "minimum",
    "sum": "sum",
    "sub_scale": "sc",
    "sub_minimum": "m",
}
"""Components of ggml's blocks -> what `BlockLayout.stored` calls them."""


@dataclass(frozen=True)
class Fragments:
    """How a weight [N, K] or [E, N, K] of a format lies; made only where `takes` says yes.

    `lay_out` and `rows` are the layout itself, on NumPy arrays; kernels/prepack.cu does the same.
    """

    fmt: Format
    shape: tuple[int, ...]

    @property
    def experts(self) -> int:
        """E; 1 for a weight [N, K]."""
        return self.shape[0] if len(self.shape) == 3 else 1

    @property
    def strips(self) -> int:
        """Strips of 16 rows of one expert."""
        return -(-self.shape[-2] // STRIP)

    @property
    def units(self) -> int:
        """Units of 64 columns of a strip."""
        return -(-self.shape[-1] // UNIT)

    @property
    def packing(self) -> Packing:
        """Of the QuantArray's codes; of ggml's blocks, what their codes would be packed as."""
        return self.fmt.row_packing

    @property
    def joined(self) -> bool:
        """Whether a pair's two codes are a byte."""
        return isinstance(self.fmt.codec, (Codebook, Minifloat)) and self.fmt.bits == 4

    @property
    def tail_words(self) -> int:
        """Words at the end of a row that its codes do not fill."""
        packing, columns = self.packing, self.shape[-1]
        if self.fmt.is_blocks or not columns:
            return 0
        if packing.order == "planes":
            return packing.bits if columns % 32 else 0
        if packing.order == "word":
            return int(columns % packing.group > 0)
        return int(columns * packing.bits % (8 * packing.dtype.itemsize) > 0)

    @property
    def spare_packing(self) -> Packing | None:
        """How the bits above the codes of each word are packed; None where there are none."""
        spare = 32 % self.packing.bits
        return Packing(spare) if self.packing.order == "word" and spare else None

    @lazy
    def per_group(self) -> tuple[Strips, ...]:
        """The components that lie in strips, one value for each row and group."""
        columns = self.shape[-1]
        if self.fmt.is_blocks:
            layout = self.fmt.layout
            blocks, half = columns // layout.elements, np.dtype(np.float16)
            subs, small = columns // layout.sub_block, np.dtype(np.uint8)
            present = {
                "scale": (half, blocks),
                "minimum": (half, blocks) if layout.has_min else None,
                "sum": (half, blocks) if layout.sum_byte is not None else None,
                "sub_scale": (small, subs) if layout.sc_runs else None,
                "sub_minimum": (small, subs) if layout.m_runs else None,
            }
            return tuple(Strips(name, *found) for name, found in present.items() if found)
        if isinstance(self.fmt.rule.block, tuple) or self.fmt.rule.block == "tensor":
            return ()
        parts = self.fmt.components(self.shape)
        own = (part for part in parts if part.name in ("scale", "zero_point", "minimum"))
        return tuple(Strips(part.name, part.dtype, part.shape[-1]) for part in own)

    @lazy
    def kept(self) -> tuple[Component, ...]:
        """The QuantArray's components that stay as they are."""
        if self.fmt.is_blocks:
            return ()
        moved = {"packed", *(part.name for part in self.per_group)}
        return tuple(part for part in self.fmt.components(self.shape) if part.name not in moved)

    @lazy
    def components(self) -> tuple[Component, ...]:
        """The arrays that hold the weight: names, dtypes, shapes."""
        lead, rows = self.shape[:-2], self.shape[-2]
        strips, packing = self.strips, self.packing
        words = (*lead, strips, self.units, LANES * self.fmt.bits)
        found = [Component("codes", WORD, words)]
        for part in self.per_group:
            found.append(Component(part.name, part.dtype, (*lead, strips, part.groups, STRIP)))
        if self.tail_words:
            found.append(Component("tail", packing.dtype, (*lead, rows, self.tail_words)))
        if (spare := self.spare_packing) is not None:
            count = spare.words(packing.words(self.shape[-1]))
            found.append(Component("spare", np.dtype(np.uint8), (*lead, rows, count)))
        return (*found, *self.kept)

    # ---- on NumPy arrays --------------------------------------------------------------------

    def lay_out(self, parts: Mapping[str, np.ndarray]) -> Parts:
        """The components of this layout, of those of the QuantArray."""
        kept = {part.name: parts[part.name] for part in self.kept}
        made = {c.name: empty(c.shape, c.dtype) for c in self.components if c.name not in kept}
        words = made["codes"].reshape(self.experts, *made["codes"].shape[-3:])
        fields = {} if not self.fmt.is_blocks else self._empty_fields()
        for expert, strips, rows in self._slabs():
            if self.fmt.is_blocks:
                codes = self._read_blocks(parts, fields, expert, rows)
            else:
                packed = self._by_expert(parts["packed"])[expert, rows]
                codes = self.packing.unpack(packed, self.shape[-1])
                if (spare := self.spare_packing) is not None:
                    above = (packed >> np.uint32(32 - spare.bits)).astype(np.uint8)
                    self._by_expert(made["spare"])[expert, rows] = spare.pack(above, 0)
            words[expert, strips] = _words_of_codes(self._padded(codes), self.fmt.bits, self.joined)
        if "tail" in made:
            made["tail"][...] = parts["packed"][..., -self.tail_words :]
        for part in self.per_group:
            values = fields[part.name] if self.fmt.is_blocks else self._by_expert(parts[part.name])
            self._to_strips(values, made[part.name])
        return {**made, **kept}

    def rows(self, parts: Mapping[str, np.ndarray]) -> Parts:
        """The components of the QuantArray: the inverse of `lay_out`."""
        kept = {part.name: parts[part.name] for part in self.kept}
        wanted = self.fmt.components(self.shape)
        made = {c.name: empty(c.shape, c.dtype) for c in wanted if c.name not in kept}
        values = {p.name: self._of_strips(parts[p.name], p) for p in self.per_group}
        if not self.fmt.is_blocks:
            for name, found in values.items():
                made[name][...] = found.reshape(made[name].shape)
        words = parts["codes"].reshape(self.experts, *parts["codes"].shape[-3:])
        for expert, strips, rows in self._slabs():
            codes = _codes_of_words(words[expert, strips], self.fmt.bits, self.joined)
            codes = codes[: rows.stop - rows.start, : self.shape[-1]]
            if self.fmt.is_blocks:
                self._write_blocks(made["blocks"], codes, values, expert, rows)
                continue
            packed = self.packing.pack(codes, 0)
            if (spare := self.spare_packing) is not None:
                above = spare.unpack(
                    self._by_expert(parts["spare"])[expert, rows], packed.shape[-1]
                )
                packed = packed | above.astype(np.uint32) << np.uint32(32 - spare.bits)
            self._by_expert(made["packed"])[expert, rows] = packed
        if self.tail_words:
            made["packed"][..., -self.tail_words :] = parts["tail"]
        found = {**made, **kept}
        return {part.name: found[part.name] for part in wanted}

    def _by_expert(self, part: np.ndarray) -> np.ndarray:
        return part.reshape(self.experts, *part.shape[len(self.shape) - 2 :])

    def _slabs(self) -> Iterator[tuple[int, slice, slice]]:
        """Expert, strips and rows of what is re-laid at a time."""
        rows, columns = self.shape[-2:]
        if not rows * columns:
            return
        step = max(1, _SLAB // (STRIP * columns))
        for expert in range(self.experts):
            for first in range(0, self.strips, step):
                last = min(first + step, self.strips)
                yield expert, slice(first, last), slice(first * STRIP, min(last * STRIP, rows))

    def _padded(self, codes: np.ndarray) -> np.ndarray:
        """uint8 [16 strips, 64 units] of codes [rows, K]."""
        rows, columns = codes.shape
        shape = (-(-rows // STRIP) * STRIP, self.units * UNIT)
        if shape == codes.shape:
            return np.ascontiguousarray(codes)
        padded = np.zeros(shape, np.uint8)
        padded[:rows, :columns] = codes
        return padded

    def _to_strips(self, values: np.ndarray, out: np.ndarray) -> None:
        """[E, N, groups] to [E?, strips, groups, 16]."""
        experts, rows, groups = values.shape
        padded = np.zeros((experts, self.strips * STRIP, groups), values.dtype)
        padded[:, :rows] = values
        halves = padded.reshape(experts, self.strips, 2, 8, groups)
        out.reshape(experts, self.strips, groups, 8, 2)[...] = halves.transpose(0, 1, 4, 3, 2)

    def _of_strips(self, strips: np.ndarray, part: Strips) -> np.ndarray:
        """[E, N, groups] of [E?, strips, groups, 16]."""
        halves = strips.reshape(self.experts, self.strips, part.groups, 8, 2)
        rows = halves.transpose(0, 1, 4, 3, 2).reshape(
            self.experts, self.strips * STRIP, part.groups
        )
        return rows[:, : self.shape[-2]]

    def _empty_fields(self) -> Parts:
        """Arrays [E, N, groups] for what ggml's blocks hold beside codes."""
        shape = (self.experts, self.shape[-2])
        return {p.name: np.empty((*shape, p.groups), p.dtype) for p in self.per_group}

    def _read_blocks(
        self, parts: Mapping[str, np.ndarray], fields: Parts, expert: int, rows: slice
    ) -> np.ndarray:
        """Codes [rows, K] of some rows; what else they hold goes to `fields`."""
        layout = self.fmt.layout
        blocks = self._by_expert(parts["blocks"])[expert, rows]
        held = layout.stored(blocks.reshape(-1, layout.nbytes))
        if "sc" in held:
            held["sc"] = held["sc"].view(np.uint8) + np.uint8(layout.sc_zero)
        for name, values in fields.items():
            values[expert, rows] = held[FIELDS[name]].reshape(len(blocks), values.shape[-1])
        return held["codes"].reshape(len(blocks), self.shape[-1])

    def _write_blocks(
        self, out: np.ndarray, codes: np.ndarray, values: Parts, expert: int, rows: slice
    ) -> None:
        layout = self.fmt.layout
        count = codes.size // layout.elements
        held: dict[str, Any] = {
            FIELDS[name]: found[expert, rows].reshape(count, -1) for name, found in values.items()
        }
        if "sc" in held:
            held["sc"] = held["sc"].astype(np.int16) - layout.sc_zero
        blocks = layout.pack(codes.reshape(count, layout.elements), **held)
        target = self._by_expert(out)[expert, rows]
        target[...] = blocks.reshape(target.shape)


def _words_of_codes(codes: np.ndarray, bits: int, joined: bool) -> np.ndarray:
    """uint32 [strips, units, 32 bits] of uint8 codes [16 strips, 64 units]."""
    strips, units = codes.shape[0] // STRIP, codes.shape[1] // UNIT
    eights = codes.view(np.uint64).reshape(strips, 2, 8, units, 4, 2)  # row 8 h + g; 16 s + 8 c
    order = np.ascontiguousarray(eights.transpose(4, 5, 1, 0, 3, 2))  # [s, c, h, strip, unit, g]
    pairs = order.view(np.uint16).reshape(PAIRS, strips, units, LANES)
    words = np.zeros((bits, strips, units, LANES), WORD)
    if joined:
        for pair, codes_of_pair in enumerate(pairs):
            byte = (codes_of_pair | codes_of_pair >> np.uint16(4)).astype(np.uint8)
            words.view(np.uint8).reshape(*words.shape, 4)[pair // 4, ..., pair % 4] = byte
    else:
        spread = [_spread(pair) for pair in pairs]
        for word, shift, pair, bit, own in pieces(bits):
            value = spread[pair]
            if own != bits:
                value = value >> np.uint32(bit) & _both(own)
            words[word] |= value << np.uint32(shift)
    laid = np.empty((strips, units, LANES * bits), WORD)
    for first, count in sections(bits):
        part = laid[..., LANES * first : LANES * (first + count)]
        part.reshape(strips, units, LANES, count)[...] = np.moveaxis(
            words[first : first + count], 0, -1
        )
    return laid


def _codes_of_words(laid: np.ndarray, bits: int, joined: bool) -> np.ndarray:
    """uint8 codes [16 strips, 64 units] of uint32 [strips, units, 32 bits]."""
    strips, units, _ = laid.shape
    words = np.empty((bits, strips, units, LANES), WORD)
    for first, count in sections(bits):
        part = laid[..., LANES * first : LANES * (first + count)]
        words[first : first + count] = np.moveaxis(part.reshape(strips, units, LANES, count), -1, 0)
    pairs = np.zeros((PAIRS, strips, units, LANES), np.uint16)
    if joined:
        for pair in range(PAIRS):
            byte = words.view(np.uint8).reshape(*words.shape, 4)[pair // 4, ..., pair % 4]
            pairs[pair] = (byte | byte.astype(np.uint16) << np.uint16(4)) & np.uint16(0x0F0F)
    else:
        for word, shift, pair, bit, own in pieces(bits):
            value = words[word] >> np.uint32(shift) & _both(own)
            pairs[pair] |= (value | value >> np.uint32(8)).astype(np.uint16) << np.uint16(bit)
    order = pairs.view(np.uint64).reshape(4, 2, 2, strips, units, 8)  # [s, c, h, strip, unit, g]
    eights = np.ascontiguousarray(order.transpose(3, 2, 5, 4, 0, 1))
    return eights.view(np.uint8).reshape(strips * STRIP, units * UNIT)


def _spread(pairs: np.ndarray) -> np.ndarray:
    """uint32 with a pair's low byte in bits 0..7 and its high byte in bits 16..23."""
    wide = pairs.astype(WORD)
    return (wide | wide << np.uint32(8)) & np.uint32(0x00FF00FF)


def _both(bits: int) -> np.uint32:
    """The mask of so many bits for the low and the high element of a word."""
    return np.uint32(((1 << bits) - 1) * 0x00010001)
