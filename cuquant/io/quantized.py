"""QuantArrays in safetensors files: each component is a tensor, the header says what they mean.

The metadata key "cuquant" holds JSON: {"version": 1, "arrays": {name: {"format", "options",
"shape", "dtype", "axes", "components": {component: {"dtype", "shape"}}}}}. The tensor of a
component is called "name.component". The entry of a PackedWeight also names its "layout", with a
version, whose components these are. Everything else in a file is a plain array, but for the
state_dict of a `cuquant.torch` model (cuquant/io/state.py), which describes its weights in tensors.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from cuquant import interop, reference
from cuquant.array.arranged import check_permutation, exact
from cuquant.array.components import OPERATIONS
from cuquant.array.packed_weight import ROWS_LAYOUT, PackedWeight, layout_components, unpack
from cuquant.array.quant_array import QuantArray
from cuquant.errors import FormatError, shortened
from cuquant.formats import Format, get_format
from cuquant.formats.format import Component
from cuquant.io.container.messages import quote
from cuquant.io.container.safetensors import SafetensorsReader, SafetensorsWriter, TensorInfo
from cuquant.io.state import (
    EXTRA,
    MAX_BYTES,
    Description,
    bytes_shape,
    is_description,
    parse_format,
)

KEY, VERSION = "cuquant", 1
MAX_AXES = 64  # NumPy's own limit
# Kinds of files that save and `cuquant quantize` do not write, by the ending of their names.
OTHER_KINDS = {
    ".gguf": "GGUF", ".ggml": "GGML", ".npz": "NumPy", ".npy": "NumPy", ".pt": "PyTorch",
    ".pth": "PyTorch", ".bin": "PyTorch", ".ckpt": "PyTorch", ".pkl": "pickle", ".onnx": "ONNX",
    ".h5": "HDF5", ".json": "JSON", ".zip": "zip",
}  # fmt: skip

Specs = dict[str, tuple[np.dtype, tuple[int, ...]]]


def save(
    path: str | os.PathLike[str],
    arrays: Mapping[str, Any],
    *,
    nonfinite: Literal["raise", "propagate"] = "raise",
) -> None:
    """Write quantized and plain arrays to a safetensors file.

    Parameters
    ----------
    path
        Replaced only once the file is complete. Its name may not end as another kind of files.
    arrays
        QuantArray, PackedWeight or array (NumPy, CuPy or torch) by name.
    nonfinite
        "raise": refuse a QuantArray that decodes to NaN or infinity; "propagate": write it.

    Raises
    ------
    ValueError
        For a path such as w.gguf, names that collide, or a non-finite QuantArray (its name is
        given); nothing is written.

    Examples
    --------
    >>> import numpy as np, cuquant as cq, tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp(), "w.safetensors")
    >>> cq.save(path, {"w": cq.quantize(np.ones((4, 64), np.float32), "mxfp4"), "b": np.zeros(4)})
    >>> cq.load(path)["w"]
    QuantArray(mxfp4, shape=(4, 64), dtype=float32, 4.25 bits/element, device=cpu)
    """
    if not isinstance(arrays, Mapping):
        raise TypeError(
            f"save takes a path and a dict of arrays by name, got {type(arrays).__name__} for it"
        )
    if (kind := OTHER_KINDS.get(Path(path).suffix.lower())) is not None:
        raise ValueError(
            f"{os.fspath(path)}: save writes safetensors, not {kind}; "
            f"call it {Path(path).with_suffix('.safetensors').name}"
            + (", and cuquant.convert makes GGUF of it" if kind == "GGUF" else "")
        )
    if nonfinite not in ("raise", "propagate"):
        raise ValueError(f"nonfinite must be 'raise' or 'propagate', got {quote(nonfinite)}")
    parts: dict[str, np.ndarray] = {}
    entries: dict[str, Any] = {}
    for name, value in arrays.items():
        if not isinstance(name, str):
            raise TypeError(f"names are strings, got {quote(name)}")
        if isinstance(value, (QuantArray, PackedWeight)):
            value.check()
            host = value.numpy()
            if nonfinite == "raise":
                refuse_nonfinite(name, unpack(host) if isinstance(host, PackedWeight) else host)
            entries[name] = _entry_of(value)
            found = {f"{name}.{key}": part for key, part in host.arrays().items()}
        else:
            found = {name: interop.to_host(value, shortened(name))}
        if clash := parts.keys() & found.keys():
            raise ValueError(f"two tensors would be called {quote(min(clash))}; rename one array")
        parts |= found
    specs = {name: (part.dtype, part.shape) for name, part in parts.items()}
    with SafetensorsWriter(path, specs, metadata(entries)) as writer:
        for name, part in parts.items():
            writer.write(name, part)


def metadata(entries: Mapping[str, Any]) -> dict[str, str]:
    """The `__metadata__` of a file with these entries."""
    if not entries:
        return {}
    return {KEY: json.dumps({"version": VERSION, "arrays": entries}, allow_nan=False)}


def _entry_of(value: QuantArray | PackedWeight) -> dict[str, Any]:
    """`entry` of an array, whichever it is."""
    if isinstance(value, QuantArray):
        return entry(value.format, value.shape, value.dtype, value.axes)
    axes = tuple(range(value.ndim))
    return entry(value.format, value.shape, value.dtype, axes, value.layout)


def entry(
    fmt: Format,
    shape: tuple[int, ...],
    dtype: np.dtype,
    axes: tuple[int, ...],
    layout: str | None = None,
) -> dict[str, Any]:
    """What the header says of one quantized array, of a layout where it is a PackedWeight."""
    stored = stored_shape(shape, axes)
    held = _components(fmt, stored, layout)
    parts = {c.name: {"dtype": str(c.dtype), "shape": c.shape} for c in held}
    described = {
        "format": fmt.name,
        "options": dict(fmt.options),
        "shape": shape,
        "dtype": str(dtype),
        "axes": axes,
        "components": parts,
    }
    return described if layout is None else {**described, "layout": layout}


def _components(fmt: Format, stored: tuple[int, ...], layout: Any) -> tuple[Component, ...]:
    """The arrays of a QuantArray, or of a PackedWeight where there is a layout."""
    return fmt.components(stored) if layout is None else layout_components(fmt, stored, layout)


def stored_shape(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """[rows..., K]: the shape as the components lie, where axis i is axis axes[i] of them."""
    return tuple(shape[axes.index(i)] for i in range(len(shape)))


def component_specs(name: str, fmt: Format, stored: tuple[int, ...]) -> Specs:
    """Tensor names, dtypes and shapes that an array stored as [rows..., K] will take."""
    return {f"{name}.{c.name}": (c.dtype, c.shape) for c in fmt.components(stored)}


def refuse_nonfinite(name: str, q: QuantArray) -> None:
    """ValueError where an array would decode to NaN or infinity."""
    if not q.size:
        return
    q = exact(q)
    blocks = reference.effective(q.arrays(), q.format, q.stored_shape)
    bad = sum(int((~np.isfinite(v)).sum()) for v in vars(blocks).values() if v is not None)
    if bad:
        raise ValueError(
            f"{quote(name)} has {bad} blocks with NaN or infinity; repair the values, or pass "
            "nonfinite='propagate' to cuquant.save to write them as they are"
        )
    values = getattr(q.format.codec, "values", None)
    if values is None or np.isfinite(values).all():
        return
    # Floats have codes of NaN and infinity, codebooks of fewer than 2^bits levels unused ones.
    bad = int((~np.isfinite(values)).take(q.codes()).sum())
    if bad:
        raise ValueError(
            f"{quote(name)} has {bad} codes that stand for no finite number; repair the values, or "
            "pass nonfinite='propagate' to cuquant.save"
        )


def read_entries(reader: SafetensorsReader) -> dict[str, Any]:
    """The quantized arrays that a file's header describes; {} for other files."""
    text = reader.metadata.get(KEY)
    if text is None:
        return {}
    try:
        described = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{reader.path}: its cuquant metadata is no JSON ({shortened(str(error))})"
        ) from error
    version = described.get("version") if isinstance(described, dict) else None
    if version != VERSION:
        raise FormatError(
            f"{reader.path}: cuquant metadata of version {quote(version)}; "
            f"this cuquant reads {VERSION}"
        )
    entries = described.get("arrays")
    if not isinstance(entries, dict):
        raise FormatError(f"{reader.path}: its cuquant metadata names no arrays")
    for name, value in entries.items():
        if not isinstance(value, dict) or not isinstance(value.get("components"), dict):
            raise FormatError(f"{reader.path}: the entry of {quote(name)} is malformed")
    return entries


def _no_constant(text: str) -> Any:
    raise ValueError(f"{shortened(text)} is no JSON number")


class Tensors(Protocol):
    """What reads tensors by name: a file, or several."""

    def read(self, name: str) -> np.ndarray:
        """A tensor."""
        ...

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows of a tensor."""
        ...


class Listed(Protocol):
    """A file or a folder of shards whose tensors are listed: a Checkpoint."""

    path: Path
    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> np.ndarray:
        """A tensor by its name."""
        ...


@dataclass(frozen=True)
class Described:
    """A quantized array of a file, as its header describes it and its tensors confirm.

    Attributes
    ----------
    format, shape, dtype, axes
        Of the array.
    layout
        Of a PackedWeight; None for a QuantArray.
    parts
        The tensor of each component.
    """

    format: Format
    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[int, ...]
    layout: str | None
    parts: Mapping[str, TensorInfo]

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.parts.values())

    @property
    def has_rows(self) -> bool:
        """Whether it is a matrix whose rows have all that they are of in rows of its tensors."""
        if self.layout is not None or self.axes != (0, 1):
            return False
        rows = self.shape[0]
        return all(
            not part.shape or (len(part.shape) > 1 and part.shape[0] == rows)
            for part in self.format.components(self.shape)
        )

    def rows(self, reader: Tensors, start: int, stop: int) -> QuantArray:
        """Rows of the array, where it `has_rows`."""
        shape = (stop - start, self.shape[1])
        parts = {}
        for component in self.format.components(shape):
            name = self.parts[component.name].name
            part = reader.read_rows(name, start, stop) if component.shape else reader.read(name)
            parts[component.name] = part.view(component.dtype).reshape(component.shape)
        return QuantArray(self.format, shape, self.dtype, parts, (0, 1))

    def read(self, reader: Tensors, name: str) -> QuantArray | PackedWeight:
        """The array itself."""
        stored = stored_shape(self.shape, self.axes)
        wanted = _components(self.format, stored, self.layout)
        parts = {}
        for component in wanted:
            part = reader.read(self.parts[component.name].name)
            parts[component.name] = part.view(component.dtype).reshape(component.shape)
        try:
            check_permutation(parts)
        except FormatError as error:
            raise FormatError(f"{quote(name)}: {error}") from error
        if self.layout is not None:
            return PackedWeight(self.format, self.layout, parts, self.shape, self.dtype)
        return QuantArray(self.format, self.shape, self.dtype, parts, self.axes)


def described(reader: SafetensorsReader) -> dict[str, Described]:
    """The quantized arrays that a file's header describes, by name.

    Raises
    ------
    FormatError
        Where a description does not fit the tensors of the file.
    """
    entries = read_entries(reader)
    return {name: _described_array(reader, name, value) for name, value in entries.items()}


def _described_array(reader: SafetensorsReader, name: str, entry: dict[str, Any]) -> Described:
    where = f"{reader.path}: {quote(name)}"
    fmt, shape, dtype, axes = parse_entry(where, entry)
    layout, stored = entry.get("layout"), stored_shape(shape, axes)
    try:
        fmt.check_shape(stored)
        wanted = _components(fmt, stored, layout)
    except (ValueError, OverflowError) as error:
        raise FormatError(f"{where}: {shortened(str(error), 500)}") from error
    if layout is not None and axes != tuple(range(len(shape))):
        raise FormatError(
            f"{where}: layout {layout!r} is of weights [..., N, K], not of axes {axes}"
        )
    if {c.name for c in wanted} != set(entry["components"]):
        raise FormatError(f"{where}: {fmt} has the components {[c.name for c in wanted]}")
    parts = {}
    for part in wanted:
        info = reader.tensors.get(f"{name}.{part.name}")
        if info is None:
            raise FormatError(f"{where}: its tensor {part.name!r} is missing")
        if (info.numpy_dtype, info.shape) != (part.dtype, part.shape):
            raise FormatError(
                f"{where}: {part.name} is {info.numpy_dtype}{list(info.shape)}; "
                f"{fmt} of shape {shape} needs {part.dtype}{list(part.shape)}"
            )
        parts[part.name] = info
    return Described(fmt, shape, dtype, axes, layout, parts)


def states(files: Listed) -> tuple[dict[str, Described], set[str]]:
    """Weights that a state_dict describes, by name, and the tensors that say so.

    A weight may lie in several shards. One that lies nowhere is left out where another has the same
    words: they are tied, and the file has one of them.

    Raises
    ------
    FormatError
        Where a description does not fit the tensors.
    """
    found: dict[str, Described] = {}
    said: dict[str, Description] = {}
    for extra, info in files.tensors.items():
        small = info.numpy_dtype == np.uint8 and len(info.shape) == 1 and info.nbytes <= MAX_BYTES
        if extra.rpartition(".")[2] != EXTRA or not small:
            continue
        stored = files.read(extra).tobytes()
        if not is_description(stored):
            continue
        try:
            said[extra] = Description.from_bytes(stored)
        except FormatError as error:
            where = f"{files.path}: {quote(extra.removesuffix(EXTRA) + 'weight')}"
            raise FormatError(f"{where}: {shortened(str(error), 500)}") from error
    there = {each for extra, each in said.items() if _has_some(files, extra, each)}
    for extra, each in said.items():
        if _has_some(files, extra, each) or each not in there:
            found[extra.removesuffix(EXTRA) + "weight"] = _stated(files, extra, each)
    return found, {*said}


def _has_some(files: Listed, extra: str, said: Description) -> bool:
    return any(extra.removesuffix(EXTRA) + c.name in files.tensors for c in said.components())


def _stated(files: Listed, extra: str, said: Description) -> Described:
    prefix = extra.removesuffix(EXTRA)
    where = f"{files.path}: {quote(prefix + 'weight')}"
    parts = {}
    for part in said.components():
        found = files.tensors.get(prefix + part.name)
        if found is None:
            raise FormatError(f"{where}: its tensor {quote(prefix + part.name)} is missing")
        if (found.numpy_dtype, found.shape) != (np.uint8, bytes_shape(part)):
            raise FormatError(
                f"{where}: {part.name} is {found.numpy_dtype}{list(found.shape)}; "
                f"it is stored as uint8{list(bytes_shape(part))}"
            )
        parts[part.name] = found
    layout = None if said.layout == ROWS_LAYOUT else said.layout
    axes, fmt = tuple(range(len(said.shape))), parse_format(said.format)
    return Described(fmt, said.shape, interop.float_dtype(said.dtype), axes, layout, parts)


def parse_entry(
    where: str, described: Mapping[str, Any]
) -> tuple[Format, tuple[int, ...], np.dtype, tuple[int, ...]]:
    """Format, shape, dtype and axes of a header entry; FormatError for anything unexpected."""
    shape: Any = described.get("shape")
    axes: Any = described.get("axes")
    if not _sizes(shape) or not _sizes(axes) or sorted(axes) != list(range(len(shape))):
        raise FormatError(f"{where}: its shape and axes do not describe an array")
    options, name, dtype = (described.get(key) for key in ("options", "format", "dtype"))
    if not isinstance(options, dict) or not isinstance(name, str) or not isinstance(dtype, str):
        raise FormatError(f"{where}: its format, options or dtype are malformed")
    try:
        fmt, found = get_format(name, **options), interop.float_dtype(dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise FormatError(f"{where}: {shortened(str(error), 500)}") from error
    return fmt, tuple(shape), found, tuple(axes)


def _sizes(value: object) -> bool:
    if not isinstance(value, list) or len(value) > MAX_AXES:
        return False
    return all(type(n) is int and 0 <= n < 2**63 for n in value)


OPERATIONS["save"] = save
