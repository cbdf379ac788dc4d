"""PackedWeight: a weight matrix laid out for a matmul kernel."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from cuquant import interop, reference
from cuquant.array.components import OPERATIONS, ArrayT, Stored, torch_call
from cuquant.array.fragments import FRAGMENTS_LAYOUT, Fragments, takes
from cuquant.array.quant_array import QuantArray
from cuquant.errors import FormatError, clipped
from cuquant.formats import Format
from cuquant.formats.format import Component

_LINEAR = "cuquant.linear(x, p) is x @ w.T of a prepacked weight"
_NO_MATMUL = f"{_LINEAR}; cuquant.matmul and @ take a QuantArray"
ROWS_LAYOUT = "rows/1"  # name/version: the components of a QuantArray, as they are


def layout_for(fmt: Format, shape: tuple[int, ...]) -> str:
    """Name and version of the layout that `prepack` gives a weight [N, K] or [E, N, K]."""
    if not takes(fmt, shape):
        return ROWS_LAYOUT
    fits = all(reference.holds(part.shape, part.dtype) for part in Fragments(fmt, shape).components)
    return FRAGMENTS_LAYOUT if fits else ROWS_LAYOUT  # 2^60 rows without elements


def layout_components(fmt: Format, shape: tuple[int, ...], layout: str) -> tuple[Component, ...]:
    """The arrays that hold a weight in a layout: names, dtypes, shapes.

    Raises
    ------
    FormatError
        For a layout that this version does not know, or that is not one for this weight.
    """
    if layout not in (ROWS_LAYOUT, FRAGMENTS_LAYOUT) or len(shape) not in (2, 3):
        raise FormatError(f"layout {clipped(layout)} of {fmt} {shape} is unknown to this version")
    return _layout_components(fmt, shape, layout)


@lru_cache(maxsize=1024)
def _layout_components(fmt: Format, shape: tuple[int, ...], layout: str) -> tuple[Component, ...]:
    if layout == ROWS_LAYOUT:
        return fmt.components(shape)
    if not takes(fmt, shape):
        raise FormatError(f"layout {layout!r} does not take {fmt} of shape {shape}")
    return Fragments(fmt, shape).components


@dataclass(frozen=True, eq=False, repr=False)
class PackedWeight(Stored[ArrayT]):
    """A quantized weight [N, K] or [E, N, K], laid out once for matmul; made by `prepack`.

    Attributes
    ----------
    format
        The Format.
    layout
        Name and version of the layout: "fragments/1" (cuquant/array/fragments.py) is that of the
        tensor cores, "rows/1" that of the QuantArray.
    components
        The arrays that hold it, by name: NumPy, CuPy or torch ones, all on one device.
    shape, dtype
        Of the array it stands for.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> p = cq.prepack(cq.quantize(np.ones((8, 128), np.float32), "int4"))
    >>> {name: part.shape for name, part in p.arrays().items()}
    {'codes': (1, 2, 128), 'scale': (1, 1, 16)}
    """

    format: Format
    layout: str
    components: Mapping[str, Any]
    shape: tuple[int, ...]
    dtype: np.dtype

    def _wanted(self) -> tuple[Component, ...]:
        return layout_components(self.format, self.shape, self.layout)

    def __repr__(self) -> str:
        return (
            f"PackedWeight({self.format}, layout={self.layout}, shape={self.shape}, "
            f"dtype={self.dtype}, device={self.device})"
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """torch.nn.functional.linear(x, p), and tensor.copy_(p), which takes its values."""
        if getattr(func, "__name__", "") in ("matmul", "__matmul__", "__rmatmul__", "mm"):
            raise TypeError(_NO_MATMUL)
        return torch_call(func, args, kwargs)

    def _check_matmul(self) -> None:
        raise TypeError(_NO_MATMUL)

    def __rmatmul__(self, other: Any) -> Any:
        self._check_matmul()

    @property
    def T(self) -> Any:
        """There is none, and what to call in its place is said."""
        raise AttributeError(f"a PackedWeight has no transpose: {_LINEAR}")

    def dequantize(self, dtype: object = None, *, out: Any = None) -> ArrayT:
        """The values [N, K] or [E, N, K]: those of `unpack(p).dequantize(dtype, out=out)`."""
        if self.layout == FRAGMENTS_LAYOUT and self.device != "cpu":
            made = OPERATIONS["laid_values"](self, dtype, out)
            if made is not None:
                return made
        return unpack(self).dequantize(dtype, out=out)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError(
            f"a PackedWeight ({self.format}) does not turn into an array by itself; "
            "call p.dequantize() for the values, cuquant.unpack(p) for the QuantArray"
        )


@interop.untraced
def prepack(q: QuantArray[ArrayT]) -> PackedWeight[ArrayT]:
    """Lay a weight out for the matmul kernels; `unpack` gives it back bit for bit.

    Parameters
    ----------
    q
        QuantArray [N, K], or [E, N, K] for experts, quantized along K.

    Returns
    -------
    PackedWeight
        Of the layout "fragments/1"; fp16, bf16, ggml_mxfp4, ggml_nvfp4, nvfp4+per_matrix, and
        blocks that do not go with its units of 64 columns, keep "rows/1".

    Raises
    ------
    TypeError, ValueError
        For anything else; FormatError, a ValueError, where its arrays are not what its format says.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> p = cq.prepack(cq.quantize(np.ones((8, 64), np.float32), "int4"))
    >>> p
    PackedWeight(int4, layout=fragments/1, shape=(8, 64), dtype=float32, device=cpu)
    >>> cq.unpack(p).dequantize()[0, 0]
    np.float32(1.0)
    """
    if not isinstance(q, QuantArray):
        raise TypeError(f"prepack takes a QuantArray, got {type(q).__name__}")
    if q.ndim not in (2, 3) or q.axes != tuple(range(q.ndim)):
        raise ValueError(
            f"prepack takes [N, K] or [E, N, K] quantized along K; got {q.shape}, axis {q.axis}"
        )
    q.check()
    layout = layout_for(q.format, q.shape)
    parts = dict(q.components)
    if layout == FRAGMENTS_LAYOUT:
        parts = _converted(Fragments(q.format, q.shape), "lay_out", parts, q.device)
    return PackedWeight(q.format, layout, parts, q.shape, q.dtype)


@interop.untraced
def unpack(p: PackedWeight[ArrayT]) -> QuantArray[ArrayT]:
    """The QuantArray that was prepacked, bit for bit.

    Parameters
    ----------
    p
        PackedWeight [N, K] or [E, N, K].

    Returns
    -------
    QuantArray
        Of the same format, shape, dtype and kind.

    Raises
    ------
    TypeError
        For anything but a PackedWeight.
    FormatError
        Where it has another layout or other arrays than `prepack` makes.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> q = cq.quantize(np.ones((8, 64), np.float32), "nf4")
    >>> bool((cq.unpack(cq.prepack(q)).packed == q.packed).all())
    True
    """
    if not isinstance(p, PackedWeight):
        raise TypeError(f"unpack takes a PackedWeight, got {type(p).__name__}")
    p.check()
    parts = dict(p.components)
    if p.layout == FRAGMENTS_LAYOUT:
        parts = _converted(Fragments(p.format, p.shape), "rows", parts, p.device)
    return QuantArray(p.format, p.shape, p.dtype, parts, tuple(range(p.ndim)))


def _converted(
    layout: Fragments, way: str, parts: Mapping[str, Any], device: str
) -> dict[str, Any]:
    """`layout.lay_out(parts)` or `layout.rows(parts)`, in the parts' library and where they are."""
    if device != "cpu":
        return OPERATIONS[way](layout, parts)
    kind = interop.kind(next(iter(parts.values()))) or "numpy"
    host = {name: interop.to_numpy(part, name) for name, part in parts.items()}
    made = layout.lay_out(host) if way == "lay_out" else layout.rows(host)
    return {name: interop.from_numpy(part, kind) for name, part in made.items()}
