"""Packings: where the bits of a code go. One function owns each offset; all are lossless."""

from dataclasses import dataclass

import numpy as np

ORDERS = ("low", "high", "dense", "word", "planes")


@dataclass(frozen=True)
class Packing:
    """`bits`-wide codes of one row in words of `word` bits.

    Parameters
    ----------
    bits
        Of one code.
    order
        "low" / "high": 8 // bits codes a byte, the first one in the low / high bits;
        "dense": a bit stream, least significant bit first, in uint32 words: code i starts at bit
        i * bits, bits words hold 32 codes;
        "word": 32 // bits codes a uint32 word, low bits first, running on across blocks;
        "planes": 32 codes are `bits` uint32 words, word b holds bit b of each (code i in bit i).
    signed
        Bytes only: the byte is the two's complement integer, code - 128 (int8).

    A row ends on a whole word. What is left of it holds `pad`, the code of 0; left-over bits of
    "word" are 0.
    """

    bits: int
    order: str = "low"
    signed: bool = False

    @property
    def dtype(self) -> np.dtype:
        if self.order in ("low", "high"):
            if self.bits == 16:
                return np.dtype(np.uint16)
            return np.dtype(np.int8 if self.signed else np.uint8)
        return np.dtype(np.uint32)

    @property
    def group(self) -> int:
        """Codes that fill whole words exactly: a row may be cut at its multiples."""
        return 32 // self.bits if self.order == "word" else 32

    def splits_at(self, count: int) -> bool:
        """Whether the first `count` codes of a row end on a whole word."""
        if self.order in ("word", "planes"):
            return count % self.group == 0
        return count * self.bits % (8 * self.dtype.itemsize) == 0

    def words(self, count: int) -> int:
        """Words of a row of `count` codes."""
        if self.order == "planes":
            return -(-count // 32) * self.bits
        if self.order == "word":
            return -(-count // (32 // self.bits))
        if self.bits == 16:
            return count
        return -(-count * self.bits // (8 * self.dtype.itemsize))

    def pack(self, codes: np.ndarray, pad: int) -> np.ndarray:
        """Words [rows, words] of uint8 codes [rows, count]."""
        rows, count = codes.shape
        if self.bits == 16:
            return codes
        if not codes.size:
            return np.zeros((rows, self.words(count)), self.dtype)
        if self.bits == 8 and self.order in ("low", "high", "dense"):
            return self._pack_bytes(codes, pad)
        padded = -(-count // self.group) * self.group
        if padded != count:
            tail = np.full((rows, padded - count), pad, np.uint8)
            codes = np.concatenate([codes, tail], axis=1)
        words = self._pack_groups(np.ascontiguousarray(codes))
        return words[:, : self.words(count)]

    def unpack(self, words: np.ndarray, count: int) -> np.ndarray:
        """uint8 codes [rows, count] of words [rows, words]; the inverse of `pack`."""
        rows = len(words)
        if self.bits == 16:
            return words
        if not words.size:
            return np.zeros((rows, count), np.uint8)
        if self.bits == 8 and self.order in ("low", "high", "dense"):
            return self._unpack_bytes(words, count)
        whole = self.words(-(-count // self.group) * self.group)
        if whole != words.shape[1]:
            missing = np.zeros((rows, whole - words.shape[1]), words.dtype)
            words = np.concatenate([words, missing], axis=1)
        return self._unpack_groups(np.ascontiguousarray(words))[:, :count]

    def _pack_bytes(self, codes: np.ndarray, pad: int) -> np.ndarray:
        if self.order == "dense" and codes.shape[1] % 4:
            tail = np.full((len(codes), -codes.shape[1] % 4), pad, np.uint8)
            codes = np.concatenate([codes, tail], axis=1)
        if self.signed:
            codes = codes ^ np.uint8(128)
        return np.ascontiguousarray(codes).view(self.dtype)

    def _unpack_bytes(self, words: np.ndarray, count: int) -> np.ndarray:
        codes = np.ascontiguousarray(words).view(np.uint8)[:, :count]
        return codes ^ np.uint8(128) if self.signed else codes

    def _pack_groups(self, codes: np.ndarray) -> np.ndarray:
        rows = len(codes)
        if self.order == "planes":
            return self._pack_planes(codes)
        if self.order == "word":
            fields = codes.reshape(rows, -1, self.group)
            words = np.zeros(fields.shape[:2], np.uint32)
            for i in range(self.group):
                words |= fields[..., i].astype(np.uint32) << np.uint32(i * self.bits)
            return words
        if self.order == "dense" and 8 % self.bits:
            return self._pack_dense(codes)
        per_byte = 8 // self.bits
        fields = codes.reshape(rows, -1, per_byte)
        lanes = range(per_byte)[::-1] if self.order == "high" else range(per_byte)
        packed = np.zeros(fields.shape[:2], np.uint8)
        for i, lane in enumerate(lanes):
            packed |= fields[..., i] << np.uint8(lane * self.bits)
        return packed.view(self.dtype)  # of dense words too, the lowest byte first

    def _unpack_groups(self, words: np.ndarray) -> np.ndarray:
        rows = len(words)
        mask = (1 << self.bits) - 1
        if self.order == "planes":
            return self._unpack_planes(words)
        if self.order == "dense":
            if 8 % self.bits:
                return self._unpack_dense(words)
            words = words.view(np.uint8)
        width = 8 * words.itemsize
        lanes = list(range(width // self.bits))
        if self.order == "high":
            lanes.reverse()
        codes = np.empty((*words.shape, len(lanes)), np.uint8)
        for i, lane in enumerate(lanes):
            codes[..., i] = words >> words.dtype.type(lane * self.bits) & words.dtype.type(mask)
        return codes.reshape(rows, -1)

    def _pack_dense(self, codes: np.ndarray) -> np.ndarray:
        """Eight codes are `bits` bytes: put them together in a uint64 and keep those bytes."""
        rows = len(codes)
        eights = codes.reshape(rows, -1, 8)
        stream = np.zeros(eights.shape[:2], "<u8")
        for i in range(8):
            stream |= eights[..., i].astype("<u8") << np.uint64(i * self.bits)
        kept = stream.view(np.uint8).reshape(rows, -1, 8)[..., : self.bits]
        return np.ascontiguousarray(kept).reshape(rows, -1).view("<u4")

    def _unpack_dense(self, words: np.ndarray) -> np.ndarray:
        rows = len(words)
        kept = words.view(np.uint8).reshape(rows, words.shape[1] * 4 // self.bits, self.bits)
        stream = np.zeros((*kept.shape[:2], 8), np.uint8)
        stream[..., : self.bits] = kept
        stream = stream.view("<u8")[..., 0]
        codes = np.empty((*kept.shape[:2], 8), np.uint8)
        for i in range(8):
            codes[..., i] = stream >> np.uint64(i * self.bits) & np.uint64((1 << self.bits) - 1)
        return codes.reshape(rows, -1)

    def _pack_planes(self, codes: np.ndarray) -> np.ndarray:
        rows = len(codes)
        planes = [
            np.packbits(codes >> np.uint8(b) & np.uint8(1), axis=1, bitorder="little").view("<u4")
            for b in range(self.bits)
        ]
        return np.stack(planes, axis=-1).reshape(rows, -1)

    def _unpack_planes(self, words: np.ndarray) -> np.ndarray:
        rows = len(words)
        planes = words.reshape(rows, -1, self.bits)
        codes = np.zeros((rows, planes.shape[1] * 32), np.uint8)
        for b in range(self.bits):
            plane = np.ascontiguousarray(planes[..., b]).view(np.uint8)
            codes |= np.unpackbits(plane, axis=1, bitorder="little") << np.uint8(b)
        return codes
