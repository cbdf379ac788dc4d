"""HQQ: layers whose settings are tensors too.

W_q holds the codes of [N K / g, g] (axis 1) in slabs of rows, the first in the high bits; scale and
zero [N K / g, 1]; shape, nbits, group_size, axis as numbers, packing as text in U8.
w = (code - zero) * scale in compute_dtype; zero is a fraction unless round_zero. Source: hqq 0.2.8,
core/quantize and core/bitpack.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from cuquant.formats import get_format
from cuquant.interop import float_dtype
from cuquant.io.checkpoint import Checkpoint
from cuquant.io.container.messages import quote
from cuquant.io.schema.layer import (
    SCALE_DTYPES,
    Found,
    Layer,
    Parts,
    Plain,
    attempt,
    model_dtype,
    refuse,
    stems,
)
from cuquant.io.schema.pieces import ONE_BIT, of_slabs, packed_by_rows

KIND = "hqq"
CODES = "W_q"
# Each packing: bits of a code, dtype of W_q, and where its slabs begin.
PACKINGS = {
    "8bit_u8": ((5, 6, 8), "U8", (0,)),
    "4bit_u8": ((4,), "U8", (4, 0)),
    "3bit_32": ((3,), "I32", tuple(range(27, -1, -3))),
    "2bit_u8": ((2,), "U8", (6, 4, 2, 0)),
    "1bit_u8": ((1,), "U8", tuple(range(7, -1, -1))),
}
DTYPES = ("float16", "bfloat16", "float32")
SETTINGS = (
    "axis", "channel_wise", "compute_dtype", "encoded_state_dict", "group_size", "nbits",
    "offload_meta", "optimize", "packing", "quant_scale", "quant_zero", "round_zero", "shape",
    "stores_quant_config", "unpack_view_dtype", "view_as_float",
)  # fmt: skip
ACROSS = "groups of axis 0 lie across rows, which no format has: it is decoded"
ROUNDS = "values are those of exact arithmetic, which HQQ rounds twice in its compute_dtype"


def recognises(c: Checkpoint) -> bool:
    """By its configuration, or codes beside scale and zero."""
    return c.method == "hqq" if c.method else any(True for _ in _modules(c))


def _modules(c: Checkpoint) -> Iterator[str]:
    for stem in stems(c, CODES):
        if stem + "scale" in c and stem + "zero" in c:
            yield stem


def layers(c: Checkpoint) -> Iterator[Found]:
    """Modules with codes, scales and zeros."""
    for stem in _modules(c):
        yield attempt(stem + "weight", _layer, c, stem)


def _layer(c: Checkpoint, stem: str) -> Layer | Plain:
    name = stem + "weight"
    codes, scales, zeros = (c.info(stem + end) for end in (CODES, "scale", "zero"))
    rows, depth = _shape(c, stem)
    axis = _number(c, stem, "axis", 1)
    if axis not in (0, 1):
        raise refuse(name, f"its axis is {axis}")
    for key in ("quant_scale", "quant_zero", "view_as_float"):
        if _number(c, stem, key, 0):
            raise refuse(name, f"HQQ's {key} is not read; quantize it again without")
    packing = _text(c, stem, "packing")
    if packing not in PACKINGS:
        raise refuse(name, f"HQQ's packing {quote(packing)} is not read")
    known, dtype, shifts = PACKINGS[packing]
    bits, groups = _number(c, stem, "nbits", 0), math.prod(scales.shape)
    if bits not in known or codes.dtype != dtype or len(codes.shape) != 2:
        raise refuse(name, f"{bits} bits in {codes.dtype}{list(codes.shape)} as {packing}")
    if axis == 0:
        return _across_rows(c, stem, (rows, depth), bits, packing)
    size = codes.shape[1]
    if zeros.shape != scales.shape or groups * size != rows * depth or not size or depth % size:
        raise refuse(name, f"{groups} groups of {size} do not make {rows} rows of {depth}")
    if scales.dtype not in SCALE_DTYPES or zeros.dtype not in SCALE_DTYPES:
        raise refuse(name, f"scales {scales.dtype} and zeros {zeros.dtype} are unknown")
    whole = bool(_number(c, stem, "round_zero", 0)) and _are_codes(c.read(zeros.name), bits)
    fmt = get_format(
        f"uint{max(bits, 2)}",
        block_size=size if size < depth else "row",
        offset="zero_point" if whole else "min",
        scale_dtype=SCALE_DTYPES[scales.dtype] if whole else "float32",
    )

    def parts() -> Parts:
        words, each = c.read(codes.name), depth // size

        def unpacked(start: int, stop: int) -> np.ndarray:
            return _fields(words, bits, shifts, start * each, stop * each, name)

        stored, zero = c.read(scales.name), c.read(zeros.name)
        found = {"packed": packed_by_rows(fmt, rows, depth, unpacked)}
        if whole:
            return {**found, "scale": stored, "zero_point": zero.astype(np.uint8)}
        scale = stored.astype(np.float32)
        with np.errstate(all="ignore"):
            return {**found, "scale": scale, "minimum": -zero.astype(np.float32) * scale}

    names = (codes.name, scales.name, zeros.name)
    settings = tuple(stem + end for end in SETTINGS if stem + end in c)
    notes = (*(() if whole else (ROUNDS,)), *((ONE_BIT,) if bits == 1 else ()))
    made = _dtype(c, stem)
    return Layer(name, fmt, (rows, depth), made, (*names, *settings), parts, notes)


def _fields(
    words: np.ndarray, bits: int, shifts: tuple[int, ...], start: int, stop: int, name: str
) -> np.ndarray:
    """uint8 codes of rows [start, stop) of words; a code of 5 or 6 bits takes a byte."""
    held = 8 if words.dtype == np.uint8 and len(shifts) == 1 else bits
    fields = of_slabs(words, held, shifts, start, stop)
    if held > bits and fields.max(initial=0) >> bits:
        raise refuse(name, f"a code has more than {bits} bits")
    return fields


def _across_rows(
    c: Checkpoint, stem: str, shape: tuple[int, int], bits: int, packing: str
) -> Plain:
    """A weight whose groups are columns of [g, N K / g], which lie across its rows: it is decoded,
    with HQQ's roundings."""
    name, (_, _, shifts) = stem + "weight", PACKINGS[packing]
    codes, scales, zeros = (c.info(stem + end) for end in (CODES, "scale", "zero"))
    groups = codes.shape[1]
    tall = math.prod(shape) // max(groups, 1)
    fits = groups * tall == math.prod(shape) and tall <= len(shifts) * codes.shape[0]
    if not fits or {scales.shape, zeros.shape} != {(1, groups)}:
        raise refuse(name, f"{groups} groups across rows do not make a weight of {list(shape)}")
    if scales.dtype not in SCALE_DTYPES or zeros.dtype != scales.dtype:
        raise refuse(name, f"scales {scales.dtype} and zeros {zeros.dtype} are unknown")
    made = _dtype(c, stem)

    def make() -> np.ndarray:
        fields = _fields(c.read(codes.name), bits, shifts, 0, tall, name)
        scale, zero = (c.read(info.name).astype(made) for info in (scales, zeros))
        values = fields.astype(made)
        with np.errstate(all="ignore"):
            values -= zero
            values *= scale
        return values.reshape(shape)

    names = (codes.name, scales.name, zeros.name)
    settings = tuple(stem + end for end in SETTINGS if stem + end in c)
    return Plain(name, shape, made, (*names, *settings), make, (ACROSS,))


def _are_codes(zeros: np.ndarray, bits: int) -> bool:
    """Whether zero points are whole numbers that codes of so many bits have."""
    numbers = zeros.astype(np.float32)
    if not ((numbers >= 0) & (numbers < 1 << bits)).all():  # or NaN
        return False
    return bool((numbers == np.floor(numbers)).all())


def _shape(c: Checkpoint, stem: str) -> tuple[int, int]:
    info = c.info(stem + "shape")
    if info.dtype not in ("I64", "I32") or info.shape != (2,):
        raise refuse(stem + "weight", f"shape is {info.dtype}{list(info.shape)}")
    rows, depth = (int(n) for n in c.read(info.name))
    if not (0 < rows < 2**40 and 0 < depth < 2**40):
        raise refuse(stem + "weight", f"its shape is {(rows, depth)}")
    return rows, depth


def _number(c: Checkpoint, stem: str, key: str, usual: int) -> int:
    """A setting, or the usual one where it is not there."""
    if stem + key not in c:
        return usual
    info = c.info(stem + key)
    if math.prod(info.shape) != 1 or not np.issubdtype(info.numpy_dtype, np.integer):
        raise refuse(stem + "weight", f"{key} is {info.dtype}{list(info.shape)}")
    return int(c.read(info.name).reshape(()))


def _text(c: Checkpoint, stem: str, key: str) -> str:
    info = c.info(stem + key)
    if info.dtype != "U8" or info.nbytes > 99:
        raise refuse(stem + "weight", f"{key} is {info.dtype}{list(info.shape)}")
    return c.read(info.name).tobytes().decode("ascii", "replace")


def _dtype(c: Checkpoint, stem: str) -> np.dtype:
    said = _text(c, stem, "compute_dtype") if stem + "compute_dtype" in c else ""
    known = said.removeprefix("torch.")
    return float_dtype(known) if known in DTYPES else model_dtype(c, c.info(stem + "scale"))
