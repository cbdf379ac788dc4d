"""Names, dtypes and bytes of the tensors in a safetensors file."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cuquant.io.container.messages import quote

_NUMPY_DTYPES = {
    tag: np.dtype(scalar)
    for tag, scalar in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "U16": np.uint16,
        "I16": np.int16,
        "U32": np.uint32,
        "I32": np.int32,
        "U64": np.uint64,
        "I64": np.int64,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F32": np.float32,
        "F64": np.float64,
        "C64": np.complex64,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
        "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
        "F4": ml_dtypes.float4_e2m1fn,
        "F6_E2M3": ml_dtypes.float6_e2m3fn,
        "F6_E3M2": ml_dtypes.float6_e3m2fn,
    }.items()
}


TAGS = {dtype: tag for tag, dtype in _NUMPY_DTYPES.items()}


SUB_BYTE_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}  # bits an element takes in the file


HIGHEST_BYTE = {"BOOL": 1} | {tag: 2**bits - 1 for tag, bits in SUB_BYTE_BITS.items()}


METADATA = "__metadata__"


CHUNK = 1 << 20  # elements copied or packed at once; a multiple of every packing group


def numpy_dtype(tag: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a safetensors dtype tag.

    Parameters
    ----------
    tag : str
        Such as ``"F32"`` or ``"F8_E4M3"``.

    Returns
    -------
    numpy.dtype
        Sub-byte tags (F4, F6_*) give an ml_dtypes type of one byte an element.

    Raises
    ------
    ValueError
        If the tag is unknown.

    Examples
    --------
    >>> numpy_dtype("BF16")
    dtype(bfloat16)
    """
    if not isinstance(tag, str) or tag not in _NUMPY_DTYPES:
        raise ValueError(f"unknown dtype {quote(tag)}; known: {', '.join(_NUMPY_DTYPES)}")
    return _NUMPY_DTYPES[tag]


def tag_of(dtype: Any) -> str:
    """Return the safetensors tag of a NumPy dtype.

    Parameters
    ----------
    dtype : numpy.dtype or scalar type
        Little-endian; ml_dtypes types included.

    Returns
    -------
    str

    Raises
    ------
    TypeError
        If safetensors has no such dtype or its byte order is big-endian.

    Examples
    --------
    >>> tag_of(np.float16)
    'F16'
    """
    dtype = np.dtype(dtype)
    refuse_big_endian(dtype)
    if dtype not in TAGS:
        known = ", ".join(str(known) for known in TAGS)
        raise TypeError(f"safetensors has no dtype for {dtype}; cast to one of {known}")
    return TAGS[dtype]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies in a file, and what it is.

    Parameters
    ----------
    name : str
        An opaque string; never use it as a path.
    dtype : str
        safetensors tag.
    shape : tuple of int
        In elements, also for sub-byte dtypes.
    offset : int
        Bytes from the start of the file.
    nbytes : int
        Bytes stored in the file.

    Examples
    --------
    >>> TensorInfo("w", "F4", (4, 2), offset=256, nbytes=4).numpy_dtype
    dtype(float4_e2m1fn)
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of the array that holds this tensor in memory."""
        return _NUMPY_DTYPES[self.dtype]


def stored_nbytes(tag: str, shape: Iterable[int]) -> int:
    """Return the bytes that a tensor takes in a file; ValueError says why it cannot be one."""
    shape = tuple(shape)
    itemsize = _NUMPY_DTYPES[tag].itemsize
    # Zeros count as ones, as in NumPy: its strides overflow even where the array is empty.
    if math.prod(size or 1 for size in shape) * itemsize >= 2**63:
        raise ValueError(f"{tag} {quote(shape)} overflows 2^63 bytes")
    bits = math.prod(shape) * SUB_BYTE_BITS.get(tag, 8 * itemsize)
    if bits % 8:
        raise ValueError(
            f"{tag} {quote(shape)} takes {bits} bits, which is not a whole number of bytes"
        )
    return bits // 8


def check_text(text: Any, what: str) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{what} is {quote(text)}; a string is wanted")
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: JSON can spell it, UTF-8 cannot
        raise ValueError(f"{what} is {quote(text)}, which is not valid Unicode") from None


def checked_metadata(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, Mapping):
        raise ValueError(f"{METADATA} is {quote(metadata)}; a map of strings to strings is wanted")
    for key, value in metadata.items():
        check_text(key, f"a key of {METADATA}")
        check_text(value, f"{METADATA}[{quote(key)}]")
    return dict(metadata)


def _group(bits: int) -> tuple[int, int]:
    """Return (codes, bytes) of the shortest run of `bits`-bit codes that fills whole bytes."""
    codes = 8 // math.gcd(bits, 8)
    return codes, codes * bits // 8


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack uint8 codes [n] into uint8 bytes [n * bits / 8], least significant bits first."""
    codes_per_group, bytes_per_group = _group(bits)
    codes = codes.reshape(-1, codes_per_group)
    words = np.zeros(len(codes), "<u4")  # a group is at most 24 bits
    for i in range(codes_per_group):
        words |= codes[:, i].astype("<u4") << (bits * i)
    return words.view(np.uint8).reshape(-1, 4)[:, :bytes_per_group].flatten()


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Undo `pack` in chunks: uint8 bytes [n * bits / 8] to uint8 codes [n]."""
    codes_per_group, bytes_per_group = _group(bits)
    groups = packed.reshape(-1, bytes_per_group)
    codes = np.empty((len(groups), codes_per_group), np.uint8)
    for start in range(0, len(groups), CHUNK):
        part = groups[start : start + CHUNK]
        words = np.pad(part, ((0, 0), (0, 4 - bytes_per_group))).view("<u4")[:, 0]
        for i in range(codes_per_group):
            codes[start : start + CHUNK, i] = (words >> (bits * i)) & (2**bits - 1)
    return codes.reshape(-1)


def refuse_big_endian(dtype: np.dtype[Any]) -> None:
    if dtype.byteorder == ">" or (dtype.byteorder == "=" and sys.byteorder == "big"):
        raise TypeError(
            f"dtype {dtype} is big-endian, safetensors is little-endian; convert with "
            'x.astype(x.dtype.newbyteorder("<"))'
        )
