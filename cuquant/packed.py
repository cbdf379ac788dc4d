"""PackedWeight: a weight matrix laid out for a matmul kernel."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuquant.array import QuantArray
from cuquant.formats import Format

ROWS_LAYOUT = "rows/1"  # name/version: the components of a QuantArray, as they are


@dataclass(frozen=True, eq=False, repr=False)
class PackedWeight:
    """A quantized weight [N, K], laid out once for matmul; made by `prepack`.

    Attributes
    ----------
    format
        The Format.
    layout
        Name and version of the layout; "rows/1" is that of the QuantArray.
    components
        The arrays that hold it, by name.
    shape, dtype
        Of the array it stands for.
    """

    format: Format
    layout: str
    components: Mapping[str, Any]
    shape: tuple[int, ...]
    dtype: np.dtype

    def __repr__(self) -> str:
        return f"PackedWeight({self.format}, layout={self.layout}, shape={self.shape})"


def prepack(q: QuantArray) -> PackedWeight:
    """Lay a weight out for the matmul kernels; `unpack` gives it back bit for bit.

    Parameters
    ----------
    q
        QuantArray [N, K], or [E, N, K] for experts, quantized along K.

    Returns
    -------
    PackedWeight

    Raises
    ------
    TypeError, ValueError
        For anything else.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> p = cq.prepack(cq.quantize(np.ones((8, 64), np.float32), "int4"))
    >>> p
    PackedWeight(int4, layout=rows/1, shape=(8, 64))
    >>> cq.unpack(p).dequantize()[0, 0]
    np.float32(1.0)
    """
    if not isinstance(q, QuantArray):
        raise TypeError(f"prepack takes a QuantArray, got {type(q).__name__}")
    if q.ndim not in (2, 3) or q.axes != tuple(range(q.ndim)):
        raise ValueError(
            f"prepack takes [N, K] or [E, N, K] quantized along K; got {q.shape}, axis {q.axis}"
        )
    return PackedWeight(q.format, ROWS_LAYOUT, q.arrays(), q.shape, q.dtype)


def unpack(p: PackedWeight) -> QuantArray:
    """The QuantArray that was prepacked, bit for bit.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> q = cq.quantize(np.ones((8, 64), np.float32), "nf4")
    >>> bool((cq.unpack(cq.prepack(q)).packed == q.packed).all())
    True
    """
    if not isinstance(p, PackedWeight):
        raise TypeError(f"unpack takes a PackedWeight, got {type(p).__name__}")
    return QuantArray(p.format, p.shape, p.dtype, dict(p.components), tuple(range(len(p.shape))))
