"""QuantArray: an immutable array in a quantization format."""

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuquant import interop, reference
from cuquant.array import arranged, slicing
from cuquant.array.components import OPERATIONS, ArrayT, Stored, torch_call
from cuquant.errors import FormatError, clipped
from cuquant.formats import Format, get_format
from cuquant.formats.blocks import BLOCK_LAYOUTS, BlockLayout
from cuquant.formats.format import Component


@dataclass(frozen=True, eq=False, repr=False)
class QuantArray(Stored[ArrayT]):
    """An array in a quantization format: a few component arrays and what they mean.

    Made by `quantize`, `load` or `from_blocks`.

    Attributes
    ----------
    format
        The Format.
    shape
        Of the array it stands for.
    dtype
        NumPy dtype that was quantized, and that `dequantize` returns.
    components
        The arrays that hold it, by name: NumPy, CuPy or torch ones, all on one device. They lie as
        `moveaxis(x, axis, -1)` does, the quantized axis last. `arrays()`, `packed` and the like
        are read-only views of NumPy's; whoever writes to these changes the array.
    axes
        Axis i of the array is axis axes[i] of that layout.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> q = cq.quantize(np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64), "nf4")
    >>> q
    QuantArray(nf4, shape=(2, 64), dtype=float32, 4.5 bits/element, device=cpu)
    >>> {name: part.shape for name, part in q.arrays().items()}
    {'packed': (2, 32), 'scale': (2, 1)}
    """

    format: Format
    shape: tuple[int, ...]
    dtype: np.dtype
    components: Mapping[str, Any]
    axes: tuple[int, ...]

    # ---- what it is -------------------------------------------------------------------------

    def _wanted(self) -> tuple[Component, ...]:
        return self.format.components(self.stored_shape)

    @property
    def size(self) -> int:
        """Elements of the array it stands for."""
        return math.prod(self.shape)

    @property
    def axis(self) -> int:
        """The quantized axis, along which blocks run."""
        return self.axes.index(self.ndim - 1)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """[rows..., K]: the shape with the quantized axis last, as the components lie."""
        return tuple(self.shape[self.axes.index(i)] for i in range(self.ndim))

    @property
    def bits_per_element(self) -> float:
        """8 * nbytes / size; 0 for an empty array."""
        return self.nbytes * 8 / self.size if self.size else 0.0

    def __repr__(self) -> str:
        return (
            f"QuantArray({self.format}, shape={self.shape}, dtype={self.dtype}, "
            f"{self.bits_per_element:.4g} bits/element, device={self.device})"
        )

    # ---- its parts --------------------------------------------------------------------------

    def codes(self) -> Any:
        """The unsigned code of each element: uint8 (uint16 for fp16 and bf16), of `shape`."""
        if not self.format.is_plain:
            return arranged.from_stored(self, arranged.plain(self).codes())
        if self.device != "cpu":
            return OPERATIONS["codes"](self)
        codes = reference.codes(self._host, self.format, self.stored_shape)
        return self._out(codes.transpose(self.axes))

    @property
    def packed(self) -> Any:
        """The codes as they are packed, [rows..., words].

        For ggml types, whose codes are interleaved with scales, they are packed on demand: bytes,
        nibbles with the low one first, or a dense stream of uint32 words.
        """
        if not self.format.is_blocks:
            return self._view("packed")
        if self.device != "cpu":
            return OPERATIONS["packed"](self)
        codes = reference.codes(self._host, self.format, self.stored_shape)
        *rows, columns = codes.shape
        flat = codes.reshape(math.prod(rows), columns)
        packed = self.format.row_packing.pack(flat, self.format.zero_code)
        return self._out(packed.reshape(*rows, packed.shape[-1]))

    @property
    def scale(self) -> Any:
        """The effective scale of each block; None for fp16 and bf16.

        Shape: [rows..., ceil(K / block)]; [rows..., 1] for "row", [] for "tensor", [ceil(M / bm),
        ceil(K / bk)] for a pair and [ceil(size / block)] for "flat". float32; float16 or bfloat16
        where it is stored so. Nested pieces are multiplied out, or divided. With absmax it is
        absmax / 127, and values may differ from code * scale by one unit in the last place; of
        permuted columns blocks are those of the columns as they are stored.
        """
        if "scale" in self.components and self.format.scale_is_plain:
            return self._view("scale")
        return self._block_values("scale")

    @property
    def minimum(self) -> Any:
        """What is added to each block's values (`+min`, q4_1, q2_k), like `scale`; else None."""
        if "minimum" in self.components:
            return self._view("minimum")
        return self._block_values("minimum") if self.format.offset == "min" else None

    @property
    def zero_point(self) -> Any:
        """uint8, the code of 0 in each block of an uint format; None for the others."""
        return self._view("zero_point") if "zero_point" in self.components else None

    def _block_values(self, name: str) -> Any:
        if not self.format.is_plain:
            return getattr(arranged.exact(self), name)
        if self.device != "cpu":
            return OPERATIONS["effective"](self, name)
        values = getattr(reference.effective(self._host, self.format, self.stored_shape), name)
        return None if values is None else self._out(values)

    def _out(self, values: np.ndarray) -> Any:
        return interop.from_numpy(values, self.kind)

    # ---- what it becomes --------------------------------------------------------------------

    def dequantize(self, dtype: object = None, *, out: Any = None, stream: object = None) -> ArrayT:
        """The values; the same as `cuquant.dequantize(q, ...)`."""
        return OPERATIONS["dequantize"](self, dtype=dtype, out=out, stream=stream)

    @property
    def T(self) -> "QuantArray[ArrayT]":
        """The transpose, on the same components: `x @ w.T` multiplies by quantized rows."""
        return self._with(shape=self.shape[::-1], axes=self.axes[::-1])

    def transpose(self, *axes: Any) -> "QuantArray[ArrayT]":
        """The axes in another order, on the same components; reversed where none is given.

        >>> import numpy as np, cuquant as cq
        >>> q = cq.quantize(np.ones((2, 3, 64), np.float32))
        >>> q.transpose(0, 2, 1).shape
        (2, 64, 3)
        """
        if axes in ((), (None,)):
            return self.T
        order = _ints(axes)
        named = [axis + self.ndim if axis < 0 else axis for axis in order]
        if sorted(named) != list(range(self.ndim)):
            raise ValueError(f"axes {order} do not name each of the {self.ndim} axes once")
        shape = tuple(self.shape[axis] for axis in order)
        return self._with(shape=shape, axes=tuple(self.axes[axis] for axis in order))

    def reshape(self, *shape: Any) -> "QuantArray[ArrayT]":
        """The same elements in another shape, on the same memory; one extent may be -1.

        The quantized axis stays the last one and keeps its length, or both lengths are made of
        whole blocks and whole words.

        Raises
        ------
        ValueError
            For another number of elements, and where blocks or words would be cut.

        >>> import numpy as np, cuquant as cq
        >>> cq.quantize(np.ones((2, 3, 64), np.float32)).reshape(-1, 64).shape
        (6, 64)
        """
        return reshaped(self, _ints(shape))

    def astype(self, dtype: object) -> "QuantArray[ArrayT]":
        """The same codes and scales, which `dequantize` makes this dtype of.

        >>> import numpy as np, cuquant as cq
        >>> cq.quantize(np.ones((2, 64), np.float32)).astype("float16").dequantize().dtype
        dtype('float16')
        """
        return self._with(dtype=interop.float_dtype(dtype))

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError(
            f"a QuantArray ({self.format}) does not turn into an array by itself; "
            "call q.dequantize() for the values or q.arrays() for what is stored"
        )

    # ---- ggml's bytes -----------------------------------------------------------------------

    def to_blocks(self) -> Any:
        """ggml's interleaved bytes, uint8 [rows..., K // block, bytes].

        For every ggml type, for mxfp4 (17 bytes per 32) and for nvfp4 (36 bytes per 64), whose
        global scale is looked at: on a GPU this waits for it.

        Raises
        ------
        ValueError
            For other formats, a K that is no multiple of the block, or an nvfp4 array whose
            global scale is not 1 (quantize it with global_scale=1).
        """
        if self.format.is_blocks:
            return self._view("blocks")
        layout = _block_layout(self.format)
        if self.stored_shape[-1] % layout.elements:
            raise ValueError(
                f"ggml's {layout.name} needs a multiple of {layout.elements} elements a row, "
                f"got {self.stored_shape[-1]}"
            )
        if self.device != "cpu":
            return OPERATIONS["to_blocks"](self, layout)
        parts = self._host
        if "global_scale" in parts:
            check_global_scale(parts["global_scale"])
        codes = reference.codes(parts, self.format, self.stored_shape)
        count = codes.size // layout.elements
        scale = parts["scale"].reshape(count, layout.sub_blocks)
        blocks = layout.pack(codes.reshape(count, layout.elements), scale=scale)
        *rows, columns = self.stored_shape
        return self._out(blocks.reshape(*rows, columns // layout.elements, layout.nbytes))

    @classmethod
    def from_blocks(
        cls,
        blocks: ArrayT,
        format: str | Format,
        shape: Sequence[int] | int,
        dtype: object = "float32",
    ) -> "QuantArray[ArrayT]":
        """An array from ggml's interleaved bytes, as `to_blocks` gives them.

        Parameters
        ----------
        blocks
            uint8, [rows..., K // block, bytes] or [rows..., K // block * bytes].
        format
            A ggml type, "mxfp4" or "nvfp4".
        shape
            [rows..., K] of the array.
        dtype
            What `dequantize` returns by default.

        Raises
        ------
        FormatError
            Where dtype or size do not fit the shape.

        Examples
        --------
        >>> import numpy as np, cuquant as cq
        >>> blocks = cq.functional.quantize_q8_0(np.ones((2, 64), np.float32))
        >>> cq.QuantArray.from_blocks(blocks, "q8_0", (2, 64)).dequantize().shape
        (2, 64)
        """
        fmt = get_format(format)
        layout = fmt.layout if fmt.is_blocks else _block_layout(fmt)
        shape = tuple(operator.index(n) for n in np.atleast_1d(shape))
        if interop.kind(blocks) is None:
            raise TypeError(f"blocks must be an array, got {type(blocks).__name__}")
        if not shape or shape[-1] % layout.elements:
            raise FormatError(f"{fmt} holds multiples of {layout.elements} a row, not {shape}")
        *rows, columns = shape
        wanted = (*rows, columns // layout.elements, layout.nbytes)
        found = interop.dtype_of(blocks)
        size = math.prod(tuple(blocks.shape))
        if found != np.uint8 or size != math.prod(wanted):
            raise FormatError(
                f"blocks are {found}{list(blocks.shape)}; {fmt} of shape {shape} is "
                f"uint8{list(wanted)}"
            )
        if fmt.is_blocks and interop.is_on_gpu(blocks):
            parts = {"blocks": blocks.reshape(wanted)}
        elif interop.is_on_gpu(blocks):
            parts = OPERATIONS["from_blocks"](blocks.reshape(wanted), fmt, layout, shape)
        else:
            stored = np.ascontiguousarray(interop.to_numpy(blocks, "blocks")).reshape(wanted)
            made = {"blocks": stored} if fmt.is_blocks else {}
            made = made or _from_layout(fmt, layout, stored, shape)
            parts = {name: interop.like(part, blocks) for name, part in made.items()}
        return cls(fmt, shape, interop.float_dtype(dtype), parts, tuple(range(len(shape))))

    # ---- slices -----------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> "QuantArray[ArrayT]":
        """Rows by ints, slices or one array of ints; columns by slices on block boundaries.

        The result has memory of its own. Double-quantized scales, whose nested blocks a slice
        would cut, become the float32 ones they decode to.
        """
        index = _full_index(index, self.ndim)
        stored = [index[self.axes.index(i)] for i in range(self.ndim)]
        for entry, extent in zip(stored, self.stored_shape, strict=True):
            if not isinstance(entry, slice) and np.size(entry):
                low, high = np.min(entry), np.max(entry)
                if low < -extent or high >= extent:
                    raise IndexError(
                        f"index {high if high >= extent else low} is outside 0..{extent - 1}"
                    )
        if not isinstance(stored[-1], slice):
            raise ValueError("the quantized axis takes slices on block boundaries, not indices")
        _check_arrays(stored, self.axes)
        fmt, parts, shape = slicing.take(self.format, self.components, self.stored_shape, stored)
        if any(isinstance(entry, np.ndarray) and entry.ndim != 1 for entry in stored):
            axes = tuple(range(len(shape)))
        else:
            kept = [axis for axis in self.axes if not isinstance(stored[axis], int)]
            axes = tuple(sorted(kept).index(axis) for axis in kept)
        logical = tuple(shape[axis] for axis in axes)
        return self._with(format=fmt, shape=logical, components=parts, axes=axes)

    def __iter__(self) -> Iterator["QuantArray[ArrayT]"]:
        return (self[i] for i in range(len(self)))

    # ---- products ---------------------------------------------------------------------------

    def __matmul__(self, other: Any) -> ArrayT:
        return OPERATIONS["matmul"](self, other)

    def __rmatmul__(self, other: Any) -> ArrayT:
        return OPERATIONS["matmul"](other, self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """torch_tensor @ q, torch.matmul and torch.nn.functional.linear."""
        return torch_call(func, args, kwargs)


def reshaped(q: QuantArray[ArrayT], wanted: tuple[int, ...]) -> QuantArray[ArrayT]:
    """`q.reshape(wanted)`: its components as they lie, in the shapes of the new array."""
    shape = _whole_shape(q, wanted)
    if shape == q.shape:
        return q
    if q.axes != tuple(range(q.ndim)):
        raise ValueError(
            f"an array that is quantized along axis {q.axis} of {q.shape} lies in another order; "
            "reshape it before it is transposed, or quantize it along its last axis"
        )
    q.format.check_shape(shape)
    if q.format.is_flat:
        return q._with(shape=shape, axes=tuple(range(len(shape))))
    if q.format.permuted and q.shape[-1:] != shape[-1:]:
        raise ValueError(f"columns are permuted; the last axis stays {q.shape[-1]} long")
    _check_reshape(q.format, q.shape, shape)
    wanted_parts = q.format.components(shape)
    parts = {part.name: q.components[part.name].reshape(part.shape) for part in wanted_parts}
    return q._with(shape=shape, axes=tuple(range(len(shape))), components=parts)


def _ints(given: tuple[Any, ...]) -> tuple[int, ...]:
    """Ints, which NumPy's methods take one by one or as one sequence."""
    if len(given) == 1 and not isinstance(given[0], (int, np.integer)):
        given = tuple(given[0])
    return tuple(operator.index(value) for value in given)


def _whole_shape(q: QuantArray, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with its -1 found; ValueError where it has another number of elements."""
    rest = math.prod(extent for extent in wanted if extent != -1)
    shape = wanted
    if wanted.count(-1) == 1 and rest:
        shape = tuple(q.size // rest if extent == -1 else extent for extent in wanted)
    if min(shape, default=0) < 0 or math.prod(shape) != q.size:
        raise ValueError(f"cannot reshape {q.shape} into {wanted}: another number of elements")
    return shape


def _check_reshape(fmt: Format, old: tuple[int, ...], new: tuple[int, ...]) -> None:
    """ValueError where the components of one shape are not those of the other, end to end."""
    columns, block = (old[-1], new[-1]), None if fmt.scale is None else fmt.scale.block
    tall, wide = block if isinstance(block, tuple) else (1, block)
    if columns[0] != columns[1]:
        if block == "row" or tall > 1:
            held = "a row has one scale" if block == "row" else f"blocks hold {tall} rows"
            raise ValueError(f"{held}; the last axis stays {columns[0]} long, not {columns[1]}")
        if isinstance(wide, int) and any(extent % wide for extent in columns):
            raise ValueError(
                f"{fmt} has blocks of {wide}, which do not divide both {columns[0]} and "
                f"{columns[1]} columns"
            )
        if not fmt.is_blocks and not all(map(fmt.row_packing.splits_at, columns)):
            raise ValueError(
                f"a row of {fmt} ends on a whole byte or word, and {columns[0]} or {columns[1]} "
                "codes do not fill one"
            )
    if tall > 1 and old[-2] != new[-2] and (old[-2] % tall or new[-2] % tall):
        raise ValueError(
            f"{fmt} has blocks of {tall} rows, which do not divide both {old[-2]} and {new[-2]}"
        )
    sizes = [[math.prod(part.shape) for part in fmt.components(shape)] for shape in (old, new)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"{fmt} of {old} and of {new} have different numbers of scales")


def _check_arrays(stored: Sequence[Any], axes: tuple[int, ...]) -> None:
    """IndexError where NumPy would reorder axes by rules that the stored order cannot follow."""
    arrays = [entry for entry in stored if isinstance(entry, np.ndarray)]
    mixed = any(isinstance(entry, int) for entry in stored) or any(a.ndim != 1 for a in arrays)
    if arrays and mixed and axes != tuple(range(len(axes))):
        raise IndexError(
            "an array quantized along another axis takes an index array of one axis alone; "
            "index in two steps"
        )


def _full_index(index: Any, ndim: int) -> list[Any]:
    """One int, slice or int array for each axis."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if sum(entry is Ellipsis for entry in entries) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if not any(entry is Ellipsis for entry in entries):
        entries.append(Ellipsis)
    at = next(i for i, entry in enumerate(entries) if entry is Ellipsis)
    missing = ndim - len(entries) + 1
    if missing < 0:
        raise IndexError(f"{len(entries) - 1} indices for an array of {ndim} axes")
    entries[at : at + 1] = [slice(None)] * missing
    entries = [_entry(entry) for entry in entries]
    if sum(isinstance(entry, np.ndarray) for entry in entries) > 1:
        raise IndexError("only one axis can be indexed by an array")
    return entries


def _entry(entry: Any) -> Any:
    if isinstance(entry, slice):
        return entry
    if isinstance(entry, (int, np.integer)) and not isinstance(entry, (bool, np.bool_)):
        return int(entry)
    if isinstance(entry, list) or interop.kind(entry):
        rows = np.asarray(entry) if isinstance(entry, list) else interop.to_host(entry, "index")
        rows = rows if rows.size else rows.astype(np.int64)
        if rows.dtype.kind in "iu":
            return rows.astype(np.int64)
    raise IndexError(
        f"a QuantArray is indexed by ints, slices, '...' or int arrays, not {clipped(entry)}"
    )


def _block_layout(fmt: Format) -> BlockLayout:
    layout = BLOCK_LAYOUTS.get(fmt.name)
    if layout is None or fmt.block_size != layout.sub_block or not fmt.is_plain:
        known = ", ".join(BLOCK_LAYOUTS)
        raise ValueError(
            f"{fmt} has no ggml block; these have: {known} (with their own block size)"
        )
    return layout


def check_global_scale(value: np.ndarray) -> None:
    """ValueError unless an nvfp4 array's global scale is the 1 that ggml's blocks stand for."""
    if value != 1:
        raise ValueError(
            f"ggml's nvfp4 has no global scale, and this one is {value}; "
            "quantize with global_scale=1"
        )


def _from_layout(
    fmt: Format, layout: BlockLayout, blocks: np.ndarray, shape: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """The components of mxfp4 or nvfp4 from ggml's blocks."""
    held = layout.stored(blocks.reshape(blocks.size // layout.nbytes, layout.nbytes))
    codes = held["codes"].reshape(math.prod(shape[:-1]), shape[-1])
    found = {"packed": fmt.row_packing.pack(codes, fmt.zero_code), "scale": held["scale"]}
    if fmt.scale is not None and fmt.scale.nested == "global":
        found["scale"] = held["scale"] & np.uint8(0x7F)  # ggml's are unsigned: it ignores the bit
        found["global_scale"] = np.ones((), np.float32)
    return {c.name: found[c.name].reshape(c.shape) for c in fmt.components(shape)}


def concatenate(arrays: Sequence[QuantArray[ArrayT]], axis: int = 0) -> QuantArray[ArrayT]:
    """QuantArrays of one format joined along an axis, without decoding them.

    Along the quantized axis every array but the last must end on a block boundary. Double-
    quantized scales become the float32 ones they decode to.

    Raises
    ------
    ValueError
        Where formats, shapes or shared scales (a tensor's, nvfp4's global one) differ.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> q = cq.quantize(np.ones((4, 64), np.float32), "int4")
    >>> cq.concatenate([q, q[:2]]).shape
    (6, 64)
    """
    arrays = list(arrays)
    if not arrays:
        raise ValueError("concatenate needs at least one array")
    first = arrays[0]
    for q in arrays:
        if not isinstance(q, QuantArray):
            raise TypeError(f"concatenate joins QuantArrays, got {type(q).__name__}")
        if (q.ndim, q.axes, q.kind, q.device) != (first.ndim, first.axes, first.kind, first.device):
            raise ValueError(
                "the arrays differ in number of axes, quantized axis, library or device"
            )
    if not -first.ndim <= axis < first.ndim:
        raise ValueError(f"axis {axis} is outside an array of {first.ndim} axes")
    states = [(q.format, dict(q.components), q.stored_shape) for q in arrays]
    fmt, parts, stored = slicing.join(states, first.axes[axis % first.ndim])
    shape = tuple(stored[i] for i in first.axes)
    return first._with(format=fmt, shape=shape, components=parts)
