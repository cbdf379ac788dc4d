"""The tensor types of GGUF: ids, names, block sizes, and which of our formats has the same bytes.

Source: ggml's `ggml_type` and `type_traits` (ggml/include/ggml.h, ggml/src/ggml-common.h). The
bytes of q8_1 are those of the C struct; the `gguf` package's table has an older size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cuquant.errors import did_you_mean
from cuquant.io.container.messages import quote

MAX_DIMS = 4  # ggml's GGML_MAX_DIMS


@dataclass(frozen=True)
class GgufType:
    """What a tensor of a GGUF file is made of.

    Parameters
    ----------
    id : int
        The number in the file.
    name : str
        ggml's, in capitals.
    elements : int
        Of a block, which lies in a row; 1 for plain numbers, 0 for an id that is not known here.
    nbytes : int
        Of a block; 0 likewise.
    dtype : numpy.dtype
        Of the array that holds a tensor: uint8 for blocks.
    format : str, optional
        Our format whose packed rows have the same bytes.

    Examples
    --------
    >>> gguf_type("q4_k").stored_shape((3, 512))
    (3, 288)
    """

    id: int
    name: str
    elements: int
    nbytes: int
    dtype: np.dtype[Any]
    format: str | None = None

    @property
    def is_known(self) -> bool:
        """Whether the size of a block is known, without which nothing can be read."""
        return self.elements > 0

    @property
    def is_plain(self) -> bool:
        """Whether elements are numbers of their own, and not codes in a block."""
        return self.elements == 1

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the array that holds a tensor: of blocks, rows are in bytes."""
        if self.is_plain or not self.is_known:
            return shape
        return (*shape[:-1], shape[-1] // self.elements * self.nbytes)

    def stored_nbytes(self, shape: tuple[int, ...]) -> int:
        """The bytes that a tensor takes in a file; ValueError says why it cannot be one."""
        if len(shape) > MAX_DIMS or any(size < 0 for size in shape):
            raise ValueError(
                f"its shape is {quote(shape)}; at most {MAX_DIMS} non-negative sizes are wanted"
            )
        # Zeros count as ones, as in NumPy: its strides overflow even where the array is empty.
        if math.prod(size or 1 for size in shape) * max(self.nbytes, 1) >= 2**63:
            raise ValueError(f"{self.name} {quote(shape)} overflows 2^63 bytes")
        if not self.is_known:
            return 0
        if (shape[-1] if shape else 1) % self.elements:
            raise ValueError(
                f"{self.name} {quote(shape)} has rows that are no multiple of its blocks of "
                f"{self.elements}"
            )
        return math.prod(shape) // self.elements * self.nbytes


def _plain(number: int, name: str, dtype: Any) -> GgufType:
    made = np.dtype(dtype)
    return GgufType(number, name, 1, made.itemsize, made)


def _blocks(
    number: int, name: str, elements: int, nbytes: int, ours: bool = True, prefix: str = ""
) -> GgufType:
    """`ours`: whether there is a format of these bytes, called so behind a prefix."""
    fmt = prefix + name.lower() if ours else None
    return GgufType(number, name, elements, nbytes, np.dtype(np.uint8), fmt)


TYPES: dict[int, GgufType] = {
    made.id: made
    for made in (
        _plain(0, "F32", np.float32),
        _plain(1, "F16", np.float16),
        _blocks(2, "Q4_0", 32, 18),
        _blocks(3, "Q4_1", 32, 20),
        _blocks(6, "Q5_0", 32, 22),
        _blocks(7, "Q5_1", 32, 24),
        _blocks(8, "Q8_0", 32, 34),
        _blocks(9, "Q8_1", 32, 36),
        _blocks(10, "Q2_K", 256, 84),
        _blocks(11, "Q3_K", 256, 110),
        _blocks(12, "Q4_K", 256, 144),
        _blocks(13, "Q5_K", 256, 176),
        _blocks(14, "Q6_K", 256, 210),
        _blocks(15, "Q8_K", 256, 292, ours=False),
        _blocks(16, "IQ2_XXS", 256, 66, ours=False),
        _blocks(17, "IQ2_XS", 256, 74, ours=False),
        _blocks(18, "IQ3_XXS", 256, 98, ours=False),
        _blocks(19, "IQ1_S", 256, 50, ours=False),
        _blocks(20, "IQ4_NL", 32, 18),
        _blocks(21, "IQ3_S", 256, 110, ours=False),
        _blocks(22, "IQ2_S", 256, 82, ours=False),
        _blocks(23, "IQ4_XS", 256, 136),
        _plain(24, "I8", np.int8),
        _plain(25, "I16", np.int16),
        _plain(26, "I32", np.int32),
        _plain(27, "I64", np.int64),
        _plain(28, "F64", np.float64),
        _blocks(29, "IQ1_M", 256, 56, ours=False),
        _plain(30, "BF16", ml_dtypes.bfloat16),
        _blocks(34, "TQ1_0", 256, 54, ours=False),
        _blocks(35, "TQ2_0", 256, 66, ours=False),
        _blocks(39, "MXFP4", 32, 17, prefix="ggml_"),  # others than mxfp4 and nvfp4, of OCP's rules
        _blocks(40, "NVFP4", 64, 36, prefix="ggml_"),
        _blocks(41, "Q1_0", 128, 18, ours=False),
        _blocks(42, "Q2_0", 64, 18, ours=False),
    )
}
"""Every type by its id; ids that are missing were withdrawn by ggml or came later."""

_BY_NAME = {made.name: made for made in TYPES.values()}
_BY_DTYPE = {made.dtype: made for made in TYPES.values() if made.is_plain}


def type_of_id(number: int) -> GgufType:
    """The type with this id; one that can be listed, though not read, where it is not known.

    >>> type_of_id(12).name, type_of_id(99).name
    ('Q4_K', 'type 99')
    """
    return TYPES.get(number) or GgufType(number, f"type {number}", 0, 0, np.dtype(np.uint8))


def gguf_type(which: Any) -> GgufType:
    """The type that a caller names.

    Parameters
    ----------
    which : GgufType, str or NumPy dtype
        Strings are names of ggml's types in any case: ``"F16"``, ``"q4_k"``.

    Raises
    ------
    ValueError
        For an unknown name.
    TypeError
        For a dtype that GGUF cannot store.

    Examples
    --------
    >>> gguf_type(np.float32).id, gguf_type("q6_k").nbytes
    (0, 210)
    """
    if isinstance(which, GgufType):
        return which
    if isinstance(which, str):
        if which.upper() not in _BY_NAME:
            raise ValueError(
                f"unknown GGUF type {quote(which)}{did_you_mean(which, map(str.lower, _BY_NAME))}; "
                f"known: {_listed(_BY_NAME)}"
            )
        return _BY_NAME[which.upper()]
    dtype = np.dtype(which).newbyteorder("=")
    if dtype not in _BY_DTYPE:
        raise TypeError(
            f"GGUF has no tensors of {dtype}; give one of {_listed(map(str, _BY_DTYPE))}, or the "
            "name of a type for blocks"
        )
    return _BY_DTYPE[dtype]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies in a file, and what it is.

    Parameters
    ----------
    name : str
        An opaque string; never use it as a path.
    type : GgufType
    shape : tuple of int
        In elements, the slowest axis first as in NumPy: the reverse of the file's order.
    offset : int
        Bytes from the start of the file that holds it.
    nbytes : int
        Bytes stored; of an unknown type those up to the next tensor.
    part : int
        Of a split file, the part that holds it, from 0.

    Examples
    --------
    >>> GgufTensor("w", gguf_type("q8_0"), (4, 64), offset=96, nbytes=272).stored_shape
    (4, 68)
    """

    name: str
    type: GgufType
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    part: int = 0

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the array that holds this tensor in memory."""
        return self.type.dtype

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of that array."""
        return self.type.stored_shape(self.shape)
