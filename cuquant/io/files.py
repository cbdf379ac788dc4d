"""Opening and loading: any file or folder that holds weights, as arrays by name."""

from __future__ import annotations

import builtins
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cuquant import interop
from cuquant.array.packed_weight import PackedWeight
from cuquant.array.quant_array import QuantArray
from cuquant.array.raw_blocks import RawBlocks
from cuquant.errors import FormatError, did_you_mean
from cuquant.io.checkpoint import Checkpoint
from cuquant.io.container.gguf import GgufReader
from cuquant.io.container.messages import quote
from cuquant.io.entries import Entry, Opened
from cuquant.io.foreign import find_sign
from cuquant.io.gguf_entries import entries
from cuquant.io.quantized import Described, described, states
from cuquant.io.renaming import in_hf
from cuquant.io.schema import schema_of
from cuquant.io.schema.layer import Found, Plain, Unread

OWN, PLAIN, GGUF = "cuquant", "safetensors", "gguf"
MAX_HEADER_BYTES = 100_000_000


def open(  # as gzip.open and h5py's File: cuquant.open(path)
    path: str | os.PathLike[str], *, max_header_bytes: int = MAX_HEADER_BYTES
) -> Opened:
    """List the arrays of a file or a folder of weights; each is read when it is asked for.

    Parameters
    ----------
    path
        A safetensors or GGUF file, a folder of shards, or the index of one. The kind is recognised
        by config.json and by the tensors; nothing in it is executed or trusted.
    max_header_bytes
        A larger header is refused.

    Raises
    ------
    FormatError
        For damaged files, and kinds that are not read; the message names them.

    Examples
    --------
    >>> import numpy as np, cuquant as cq, tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp(), "w.safetensors")
    >>> cq.save(path, {"w": cq.quantize(np.ones((4, 64), np.float32), "nf4")})
    >>> with cq.open(path) as file:
    ...     print(file.kind, file["w"].format, file["w"].shape, file["w"].nbytes)
    cuquant nf4 (4, 64) 144
    """
    file = listed(path, max_header_bytes=max_header_bytes)
    if file.unread:
        file.close()
        raise FormatError(f"{file.path}: {file.unread}")
    return file


def listed(path: str | os.PathLike[str], *, max_header_bytes: int = MAX_HEADER_BYTES) -> Opened:
    """As `open`; files of libraries that are not read are listed too, with a note."""
    path = Path(path)
    if _is_gguf(path):
        return _open_gguf(path, max_header_bytes)
    c = Checkpoint(path, max_header_bytes=max_header_bytes)
    try:
        kind, entries, unread = _entries(c)
        return Opened(path, kind, entries, c.config, c.close, c.metadata, unread)
    except BaseException:
        c.close()
        raise


def load(
    path: str | os.PathLike[str],
    *,
    device: object = None,
    library: Literal["numpy", "cupy", "torch"] | None = None,
    names: Iterable[str] | Literal["hf"] | None = None,
    max_header_bytes: int = MAX_HEADER_BYTES,
) -> dict[str, Any]:
    """Read a file or a folder of weights: QuantArrays where they are quantized, else arrays.

    Files of `save`, state_dicts of `cuquant.torch`, GGUF files and the checkpoints of other
    libraries give their weights by name ("model.layers.0.mlp.up_proj.weight"), with the codes and
    scales that lie in the file.

    Parameters
    ----------
    path
        A safetensors or GGUF file, a folder of shards, or the index of one; nothing in it is
        executed or trusted.
    device
        "cpu", "cuda" or "cuda:N". None: the CPU, or the current GPU for CuPy.
    library
        "numpy", "cupy" or "torch", which gets bfloat16 and 8-bit floats as its own. None: NumPy, or
        CuPy where `device` is a GPU.
    names
        Of the arrays to read. None: all. "hf": all of a GGUF file by the names, and with the order
        of rows, that transformers has for llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, gemma,
        gemma2, gemma3 and phi3; experts are matrices of their own then.
    max_header_bytes
        A larger header is refused.

    Returns
    -------
    dict of QuantArray, PackedWeight, RawBlocks or array by name.

    Raises
    ------
    FormatError
        For a damaged file, or a kind that is not read; the message names it.
    ValueError
        For a library that has no arrays on that device, a name that the file does not have, or
        "hf" of an architecture that is not known.
    BackendUnavailable
        Where library or device is not there.

    Examples
    --------
    >>> import numpy as np, cuquant as cq, tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp(), "w.safetensors")
    >>> cq.save(path, {"w": cq.quantize(np.ones((4, 64), np.float32), "int4")})
    >>> cq.load(path)
    {'w': QuantArray(int4, shape=(4, 64), dtype=float32, 4.25 bits/element, device=cpu)}
    """
    which, place = interop.destination(library, device)
    if isinstance(names, str) and names != "hf":
        raise TypeError(f"names must be several, such as [{quote(names)}], or 'hf'")
    with open(path, max_header_bytes=max_header_bytes) as file:
        if names == "hf":
            renamed = in_hf(file) if file.kind == GGUF else file
            return {name: _placed(e.read(), which, place) for name, e in renamed.items()}
        wanted = list(file) if names is None else list(names)
        if unknown := [name for name in wanted if name not in file]:
            hint = did_you_mean(str(unknown[0]), file)
            raise ValueError(f"{path} has no array {quote(unknown[0])}{hint}")
        return {name: _placed(file[name].read(), which, place) for name in wanted}


def _placed(value: Any, library: str, device: str) -> Any:
    if isinstance(value, (QuantArray, PackedWeight)):
        parts = {
            name: interop.placed(part, library, device, True)
            for name, part in value.components.items()
        }
        return value._with(components=parts)
    if isinstance(value, RawBlocks):
        return RawBlocks(value.type, value.shape, interop.placed(value.blocks, library, device))
    return interop.placed(value, library, device)


# ---- safetensors --------------------------------------------------------------------------------


def _entries(c: Checkpoint) -> tuple[str, dict[str, Entry], str]:
    """The kind of a checkpoint, its arrays, and why they are not read, or ""."""
    arrays, inside = own_arrays(c)
    plain = [name for name in c if name not in inside]
    if twice := arrays.keys() & set(plain):
        raise FormatError(f"{c.path}: {quote(min(twice))} is both an array and a tensor")
    if arrays:
        own = {name: _own(c, name, array) for name, array in arrays.items()}
        return OWN, own | {name: _plain(c, name) for name in plain}, ""
    schema = schema_of(c)
    if schema is None:
        if (sign := find_sign(c.tensors)) is not None:
            shown = f"is quantized by {sign[0]} (tensor {quote(sign[1].name)})"
            why = f"{shown}, whose files cuquant does not read"
            return sign[0], {name: _plain(c, name) for name in c}, why
        return PLAIN, {name: _plain(c, name) for name in c}, ""
    layers: dict[str, Found] = {}
    for layer in schema.layers(c):
        if layer.name in layers:
            raise FormatError(f"{c.path}: {quote(layer.name)} is there twice")
        layers[layer.name] = layer
    read = [layer for layer in layers.values() if not isinstance(layer, Unread)]
    used = {name for layer in read for name in layer.tensors}
    rest = {name: _plain(c, name) for name in c if name not in used}
    if clash := rest.keys() & {layer.name for layer in read}:
        raise FormatError(f"{c.path}: {quote(min(clash))} is both made of tensors and one of them")
    return schema.KIND, rest | {name: _foreign(c, layer) for name, layer in layers.items()}, ""


def own_arrays(c: Checkpoint) -> tuple[dict[str, Described], set[str]]:
    """Quantized arrays of our own, by headers and by states, and all tensors that belong to them.

    Raises
    ------
    FormatError
        Where a description does not fit the tensors.
    """
    arrays: dict[str, Described] = {}
    stated, words = states(c)
    for found in (*map(described, c.readers()), stated):
        if twice := arrays.keys() & found.keys():
            raise FormatError(f"{c.path}: {quote(min(twice))} is described twice")
        arrays |= found
    return arrays, words | {i.name for array in arrays.values() for i in array.parts.values()}


def _plain(c: Checkpoint, name: str) -> Entry:
    info = c.info(name)
    return Entry(
        name, None, info.shape, info.numpy_dtype, info.nbytes, (name,), (), lambda: c.read(name)
    )


def _own(c: Checkpoint, name: str, array: Described) -> Entry:
    tensors = tuple(info.name for info in array.parts.values())
    return Entry(
        name, array.format, array.shape, array.dtype, array.nbytes, tensors, (),
        lambda: array.read(c, name),
        None if array.axes == tuple(range(len(array.shape))) else array.axes, array.layout,
        rows=(lambda start, stop: array.rows(c, start, stop)) if array.has_rows else None,
    )  # fmt: skip


def _foreign(c: Checkpoint, layer: Found) -> Entry:
    if isinstance(layer, Unread):
        return _unread(c, layer)
    nbytes = sum(c.info(name).nbytes for name in layer.tensors)
    fmt, axes = (None, None) if isinstance(layer, Plain) else (layer.format, layer.axes)
    return Entry(
        layer.name, fmt, layer.shape, layer.dtype, nbytes, layer.tensors, layer.notes, layer.read,
        axes,
    )  # fmt: skip


def _unread(c: Checkpoint, layer: Unread) -> Entry:
    def read() -> Any:
        raise FormatError(f"{c.path}: {layer.error}")

    notes = (str(layer.error),)
    dtype = np.dtype(np.float32)
    return Entry(layer.name, None, (), dtype, 0, (), notes, read, error=layer.error)


# ---- GGUF ---------------------------------------------------------------------------------------


def _is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with builtins.open(path, "rb") as file:
        return file.read(4) == b"GGUF"


def _open_gguf(path: Path, max_header_bytes: int) -> Opened:
    reader = GgufReader(path, max_header_bytes=max_header_bytes)
    try:
        return Opened(path, GGUF, entries(reader), reader.metadata, reader.close)
    except BaseException:
        reader.close()
        raise
