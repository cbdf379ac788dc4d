"""ggml's interleaved block bytes: where each bit of a block's codes and scales lies.

Layouts: ggml-common.h of https://github.com/ggml-org/ggml. All numbers are little-endian.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

F32 = np.float32
HALF_MAX = 65504  # the largest finite float16

# What a code of iq4_nl and iq4_xs stands for, before the scale.
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

# e2m1's numbers twice, so that they are integers; a code above 7 is 8 more than that of its size.
FLOAT_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True)
class Run:
    """`count` fields, one in each of `count` neighbouring bytes.

    Field `first + i * step` has `bits` of its bits, those from bit `shift` upwards, in byte
    `byte + i` of the block, from that byte's bit `low` upwards.
    """

    byte: int
    count: int
    first: int
    low: int
    bits: int
    shift: int = 0
    step: int = 1

    @property
    def bytes(self) -> slice:
        return slice(self.byte, self.byte + self.count)

    @property
    def fields(self) -> slice:
        return slice(self.first, self.first + self.count * self.step, self.step)

    @property
    def mask(self) -> int:
        return (1 << self.bits) - 1


@dataclass(frozen=True)
class Field:
    """`bits` of every code, those from bit `shift` upwards, in ggml's usual order from `byte` on.

    `span` bytes hold codes 0..span - 1 in their lowest bits, the next `span` codes in the bits
    above, and so on; then come the next `span` bytes. With a span of 1 neighbours share a byte.
    """

    byte: int
    bits: int
    span: int
    shift: int = 0

    def runs(self, fields: int) -> tuple[Run, ...]:
        """Where each of `fields` codes lies."""
        return _runs(self.byte, fields, self.bits, self.span, self.shift)


class Fields(NamedTuple):
    """What a block means: x' = value(codes) * scale + minimum, in float32."""

    codes: np.ndarray  # uint8 [n, elements], in element order
    scale: np.ndarray  # float32 [n, elements / sub_block], the effective one
    minimum: np.ndarray | None  # float32 like scale; None where the type has none


@dataclass(frozen=True)
class BlockLayout:
    """The bytes of one block of a ggml type.

    Attributes
    ----------
    name
        ggml's, in lower case.
    elements, nbytes
        Of a block.
    sub_block
        Elements that share an effective scale.
    bits
        Of a code. Codes are unsigned: an integer type's value is code - 2^(bits - 1), or the code
        itself where `has_min`; iq4_* index IQ4_LEVELS, the others of 4 bits FLOAT_LEVELS (as ggml
        reads mxfp4 and nvfp4) or e2m1's (as OCP does).
    code_fields
        Where the bits of the codes lie.
    sc_runs, m_runs
        Where those of the integer sub-block scales and minimums lie.
    scale_byte, minimum_byte, sum_byte
        Offsets of the float16 numbers (`scale_byte`: of `scale_kind`); None: there is none.
    scale_kind
        "half"; "e8m0": 2^(byte - 127), 255 is NaN; "e4m3": unsigned, bit 7 is ignored, 127 is NaN.
        Of ggml's own, which are halves since levels are doubled: "half_e8m0": 2^(byte - 128), no
        NaN; "half_e4m3": the unsigned number / 2, of which byte 127 is 0 and byte 255 is 240.
    sc_zero
        A sub-block scale is stored as sc + sc_zero.
    signed
        Whether a code is stored as the two's complement of code - 128 (q8_0, q8_1).
    """

    name: str
    elements: int
    nbytes: int
    sub_block: int
    bits: int
    code_fields: tuple[Field, ...]
    scale_byte: int = 0
    minimum_byte: int | None = None
    sum_byte: int | None = None
    scale_kind: str = "half"
    sc_runs: tuple[Run, ...] = ()
    m_runs: tuple[Run, ...] = ()
    sc_zero: int = 0
    signed: bool = False

    @property
    def code_runs(self) -> tuple[Run, ...]:
        """`code_fields`, code by code."""
        return tuple(run for field in self.code_fields for run in field.runs(self.elements))

    @property
    def has_min(self) -> bool:
        return self.minimum_byte is not None

    @property
    def sub_blocks(self) -> int:
        """Effective scales of a block."""
        return self.elements // self.sub_block

    @property
    def _scale_bytes(self) -> slice:
        count = 2 if self.has_half_scale else self.sub_blocks
        return slice(self.scale_byte, self.scale_byte + count)

    @property
    def has_half_scale(self) -> bool:
        """Whether the scale is a float16; else each sub-block has a byte."""
        return self.scale_kind == "half"

    def unpack(self, blocks: np.ndarray) -> Fields:
        """Codes and effective scales of `blocks` (uint8 [n, nbytes]).

        The products d * sc and dmin * m are float32, as in ggml's dequantize_row functions, so
        `value(codes) * scale + minimum` in float32 has ggml's bits.
        """
        parts = self.stored(blocks)
        stored = parts["scale"] if parts["scale"].ndim == 2 else parts["scale"][:, None]
        scale = self.decoded_scale(stored)
        with np.errstate(all="ignore"):  # float16 infinities and NaN are a block's to have
            if self.sc_runs:
                scale = scale * parts["sc"].astype(F32)
            if not self.has_min:
                return Fields(parts["codes"], scale, None)
            minimum = parts["minimum"].astype(F32)[:, None]
            if self.m_runs:
                minimum = -(minimum * parts["m"].astype(F32))
        return Fields(parts["codes"], scale, minimum)

    def decoded_scale(self, stored: np.ndarray) -> np.ndarray:
        """float32: what the stored scales of blocks, or of sub-blocks, are as numbers."""
        return _decode_scale(stored, self.scale_kind)

    def stored(self, blocks: np.ndarray) -> dict[str, np.ndarray]:
        """The fields as the block holds them: `pack(**stored(blocks))` gives `blocks` again.

        Returns
        -------
        dict
            codes uint8 [n, elements]; scale float16 [n], or uint8 [n] (e8m0), [n, 4] (e4m3); and
            where the type has them minimum float16 [n], sum float16 [n], sc int8 [n, sub_blocks],
            m uint8 [n, sub_blocks].
        """
        codes = _read(blocks, self.code_runs, self.elements)
        if self.signed:
            codes ^= 0x80
        if self.has_half_scale:
            parts = {"codes": codes, "scale": _read_half(blocks, self.scale_byte)}
        else:
            scale = blocks[:, self._scale_bytes]
            parts = {"codes": codes, "scale": scale[:, 0] if scale.shape[1] == 1 else scale}
        if self.minimum_byte is not None:
            parts["minimum"] = _read_half(blocks, self.minimum_byte)
        if self.sum_byte is not None:
            parts["sum"] = _read_half(blocks, self.sum_byte)
        if self.sc_runs:
            parts["sc"] = _read(blocks, self.sc_runs, self.sub_blocks)
            parts["sc"] = (parts["sc"] - np.uint8(self.sc_zero)).view(np.int8)
        if self.m_runs:
            parts["m"] = _read(blocks, self.m_runs, self.sub_blocks)
        return parts

    def pack(
        self,
        codes: np.ndarray,
        scale: np.ndarray,
        minimum: np.ndarray | None = None,
        *,
        sc: np.ndarray | None = None,
        m: np.ndarray | None = None,
        sum: np.ndarray | None = None,
        saturate: bool = False,
    ) -> np.ndarray:
        """The bytes of blocks with these fields; what a type does not have is not passed.

        Parameters
        ----------
        codes
            uint8 [n, elements], in element order, each below 2^bits.
        scale
            float32 or float16 [n] or [n, 1]: the scale, K-quants' and iq4_xs' d; rounded half to
            even. mxfp4: the E8M0 bytes, uint8 [n] or [n, 1]; nvfp4: the e4m3 bytes, uint8 [n, 4].
        minimum
            float like scale: the minimum of q4_1 and q5_1 (added), dmin of K-quants (m * dmin is
            subtracted).
        sc
            Integers [n, sub_blocks]: sub-block scales, signed in q3_k, q6_k and iq4_xs.
        m
            Integers [n, sub_blocks]: sub-block minimums.
        sum
            float [n]: q8_1's scale * sum(codes - 128), or whatever the caller's variant puts there.
        saturate
            Store +-65504 where a float16 would be infinite; NaN stays.

        Returns
        -------
        uint8 [n, nbytes].
        """
        n = len(codes)
        blocks = np.zeros((n, self.nbytes), np.uint8)
        _write(blocks, self.code_runs, codes ^ np.uint8(0x80) if self.signed else codes)
        if not self.has_half_scale:
            blocks[:, self._scale_bytes] = scale.reshape(n, self.sub_blocks)
            return blocks
        halves = {
            "scale": (scale, self.scale_byte),
            "minimum": (minimum, self.minimum_byte),
            "sum": (sum, self.sum_byte),
        }
        for field, (values, byte) in halves.items():
            if byte is not None:
                values = self._given(values, field)
                blocks[:, byte : byte + 2] = _half_bytes(values, saturate)
        if self.sc_runs:
            stored = self._given(sc, "sc").astype(np.int16) + self.sc_zero
            _write(blocks, self.sc_runs, stored.astype(np.uint8))
        if self.m_runs:
            _write(blocks, self.m_runs, self._given(m, "m").astype(np.uint8))
        return blocks

    def _given(self, values: np.ndarray | None, field: str) -> np.ndarray:
        if values is None:
            raise ValueError(f"{self.name} blocks hold {field}; pass {field}=")
        return values


def _read(blocks: np.ndarray, runs: tuple[Run, ...], count: int) -> np.ndarray:
    """uint8 [n, count]: the fields that `runs` place in `blocks`."""
    fields = np.zeros((len(blocks), count), np.uint8)
    stored: dict[tuple[int, int], np.ndarray] = {}  # several runs take other bits of the same bytes
    for run in runs:
        # In one piece: arithmetic on 16 bytes of every 18 takes three times as long.
        key = run.byte, run.count
        if key not in stored:
            stored[key] = np.ascontiguousarray(blocks[:, run.bytes])
        part = stored[key]
        if run.low:
            part = part >> np.uint8(run.low)
        if run.low + run.bits < 8:
            part = part & np.uint8(run.mask)
        if run.shift:
            part = part << np.uint8(run.shift)
            fields[:, run.fields] |= part
        else:
            fields[:, run.fields] = part
    return fields


def _write(blocks: np.ndarray, runs: tuple[Run, ...], fields: np.ndarray) -> None:
    """Put uint8 `fields` [n, count] where `runs` place them; those bits of `blocks` are 0."""
    for run in runs:
        part = np.ascontiguousarray(fields[:, run.fields])
        if run.shift:
            part = part >> np.uint8(run.shift)
        part = part & np.uint8(run.mask)
        blocks[:, run.bytes] |= part << np.uint8(run.low)


def _read_half(blocks: np.ndarray, byte: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, byte : byte + 2]).view("<f2")[:, 0]


def _half_bytes(values: np.ndarray, saturate: bool) -> np.ndarray:
    """uint8 [n, 2] of n floats; a float16 keeps its bits, a NaN its payload."""
    values = np.asarray(values).reshape(-1, 1)
    if saturate:
        values = np.clip(values, -HALF_MAX, HALF_MAX)
    with np.errstate(over="ignore", under="ignore"):
        return values.astype("<f2").view(np.uint8)


def _decode_scale(stored: np.ndarray, kind: str) -> np.ndarray:
    """float32 values of stored scales, float16 or bytes of `kind`."""
    if kind == "half":
        return stored.astype(F32)
    if kind == "half_e8m0":
        return np.ldexp(F32(1), stored.astype(np.int32) - 128)
    if kind == "half_e4m3":
        return np.where(stored == 127, F32(0), _unsigned_e4m3(stored) * F32(0.5))
    if kind == "e8m0":
        scale = np.ldexp(F32(1), np.minimum(stored, 254).astype(np.int32) - 127)
        return np.where(stored == 255, F32(np.nan), scale)
    return np.where((stored & 127) == 127, F32(np.nan), _unsigned_e4m3(stored))


def _unsigned_e4m3(stored: np.ndarray) -> np.ndarray:
    """The lower 7 bits as a number; of 127 it would be 480."""
    exponent = (stored >> 3 & 15).astype(np.int32)
    mantissa = (stored & 7).astype(F32) + F32(8) * (exponent > 0)
    return np.ldexp(mantissa, np.maximum(exponent, 1) - 10)  # mantissas in eighths, bias 7


def _runs(byte: int, fields: int, bits: int, span: int, shift: int = 0) -> tuple[Run, ...]:
    """The usual order: `span` bytes hold fields 0..span-1 in their lowest bits, the next `span`
    fields in the bits above, and so on; then come the next `span` bytes."""
    lanes = 8 // bits
    if span == 1:  # neighbouring fields share a byte
        return tuple(
            Run(byte, fields // lanes, lane, lane * bits, bits, shift, step=lanes)
            for lane in range(lanes)
        )
    return tuple(
        Run(byte + group * span, span, (group * lanes + lane) * span, lane * bits, bits, shift)
        for group in range(fields // (span * lanes))
        for lane in range(lanes)
    )


# Eight 6-bit scales and eight 6-bit minimums in the 12 bytes from byte 4 (q4_k, q5_k): bytes 0-3
# have scales 0-3 in their low 6 bits, bytes 4-7 minimums 0-3; bytes 8-11 have the low nibbles of
# scales 4-7 and, above them, of minimums 4-7, whose upper 2 bits top bytes 0-3 and 4-7.
_SC = (Run(4, 4, 0, 0, 6), Run(12, 4, 4, 0, 4), Run(4, 4, 4, 6, 2, shift=4))
_M = (Run(8, 4, 0, 0, 6), Run(12, 4, 4, 4, 4), Run(8, 4, 4, 6, 2, shift=4))

_LAYOUTS = (
    BlockLayout("q4_0", 32, 18, 32, 4, (Field(2, 4, 16),)),
    BlockLayout("q4_1", 32, 20, 32, 4, (Field(4, 4, 16),), minimum_byte=2),
    BlockLayout("q5_0", 32, 22, 32, 5, (Field(6, 4, 16), Field(2, 1, 1, shift=4))),
    BlockLayout("q5_1", 32, 24, 32, 5, (Field(8, 4, 16), Field(4, 1, 1, shift=4)), minimum_byte=2),
    BlockLayout("q8_0", 32, 34, 32, 8, (Field(2, 8, 32),), signed=True),
    BlockLayout("q8_1", 32, 36, 32, 8, (Field(4, 8, 32),), sum_byte=2, signed=True),
    BlockLayout("iq4_nl", 32, 18, 32, 4, (Field(2, 4, 16),)),
    BlockLayout(
        "iq4_xs",
        elements=256,
        nbytes=136,
        sub_block=32,
        bits=4,
        code_fields=(Field(8, 4, 16),),
        sc_runs=_runs(4, 8, 4, 1) + _runs(2, 8, 2, 1, shift=4),
        sc_zero=32,
    ),
    BlockLayout(
        "q2_k",
        elements=256,
        nbytes=84,
        sub_block=16,
        bits=2,
        code_fields=(Field(16, 2, 32),),
        scale_byte=80,
        minimum_byte=82,
        sc_runs=(Run(0, 16, 0, 0, 4),),
        m_runs=(Run(0, 16, 0, 4, 4),),
    ),
    BlockLayout(
        "q3_k",
        elements=256,
        nbytes=110,
        sub_block=16,
        bits=3,
        code_fields=(Field(32, 2, 32), Field(0, 1, 32, shift=2)),
        scale_byte=108,
        sc_runs=_runs(96, 16, 4, 8) + _runs(104, 16, 2, 4, shift=4),
        sc_zero=32,
    ),
    BlockLayout(
        "q4_k",
        elements=256,
        nbytes=144,
        sub_block=32,
        bits=4,
        code_fields=(Field(16, 4, 32),),
        minimum_byte=2,
        sc_runs=_SC,
        m_runs=_M,
    ),
    BlockLayout(
        "q5_k",
        elements=256,
        nbytes=176,
        sub_block=32,
        bits=5,
        code_fields=(Field(48, 4, 32), Field(16, 1, 32, shift=4)),
        minimum_byte=2,
        sc_runs=_SC,
        m_runs=_M,
    ),
    BlockLayout(
        "q6_k",
        elements=256,
        nbytes=210,
        sub_block=16,
        bits=6,
        code_fields=(Field(0, 4, 64), Field(128, 2, 32, shift=4)),
        scale_byte=208,
        sc_runs=_runs(192, 16, 8, 16),
    ),
    BlockLayout("mxfp4", 32, 17, 32, 4, (Field(1, 4, 16),), scale_kind="e8m0"),
    BlockLayout("nvfp4", 64, 36, 16, 4, (Field(4, 4, 8),), scale_kind="e4m3"),
    BlockLayout("ggml_mxfp4", 32, 17, 32, 4, (Field(1, 4, 16),), scale_kind="half_e8m0"),
    BlockLayout("ggml_nvfp4", 64, 36, 16, 4, (Field(4, 4, 8),), scale_kind="half_e4m3"),
)
BLOCK_LAYOUTS: dict[str, BlockLayout] = {layout.name: layout for layout in _LAYOUTS}
