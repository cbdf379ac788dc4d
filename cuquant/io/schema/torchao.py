"""torchao's safetensors: subclasses of tensors, which the metadata describes.

`__metadata__` has tensor_names, a JSON list, and of each name JSON {_type, _data,
_tensor_data_names}; its tensors are STEM._weight_qdata, _weight_scale, and so on. Source: torchao
0.18, prototype/safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cuquant.errors import FormatError
from cuquant.formats import get_format
from cuquant.interop import float_dtype
from cuquant.io.checkpoint import Checkpoint
from cuquant.io.container.messages import quote
from cuquant.io.schema import fp8
from cuquant.io.schema.layer import (
    Found,
    Layer,
    Parts,
    attempt,
    model_dtype,
    refuse,
    scale_dtype,
)
from cuquant.io.schema.pieces import block_floats, extent_of, integers

KIND = "torchao"
NAMES = "tensor_names"
Data = Mapping[str, Any]


def recognises(c: Checkpoint) -> bool:
    """By the list in the metadata."""
    return NAMES in c.metadata and any("_weight_qdata" in name for name in c)


def layers(c: Checkpoint) -> Iterator[Found]:
    """Names of the list that are subclasses."""
    for name in _json(c, NAMES, list):
        if not isinstance(name, str) or name not in c.metadata:
            continue
        said = _json(c, name, dict)
        if said.get("_type") != "Tensor":
            yield attempt(name, _layer, c, name, said)


def _layer(c: Checkpoint, name: str, said: Data) -> Layer:
    kind, data = said.get("_type"), said.get("_data")
    if not isinstance(kind, str) or kind not in READERS:
        raise refuse(name, f"torchao's {quote(kind)} is not read; export it in another class")
    own = data if isinstance(data, dict) else {}
    if own.get("is_swizzled_scales"):
        raise refuse(name, "its scales are in the order of a kernel")
    return READERS[kind](c, name, own)


def _json(c: Checkpoint, key: str, kind: type) -> Any:
    try:
        found = json.loads(c.metadata[key])
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{c.path}: metadata {quote(key)} is no JSON") from error
    if not isinstance(found, kind):
        raise FormatError(f"{c.path}: metadata {quote(key)} is {type(found).__name__}")
    return found


def _part(c: Checkpoint, name: str, end: str) -> str:
    """The tensor of a subclass's field: "a.weight" has "a._weight_qdata"."""
    before, dot, last = name.rpartition(".")
    return f"{before}{dot}_{last}_{end}"


def _dtype(c: Checkpoint, data: Data) -> np.dtype:
    for key in ("dtype", "orig_dtype"):
        said = data.get(key)
        text = said.get("_data") if isinstance(said, dict) else said
        if isinstance(text, str) and text.removeprefix("torch.") in (
            "float16",
            "bfloat16",
            "float32",
        ):
            return float_dtype(text.removeprefix("torch."))
    return model_dtype(c)


def _integers(c: Checkpoint, name: str, data: Data) -> Layer:
    codes, scales = c.info(_part(c, name, "qdata")), c.info(_part(c, name, "scale"))
    zeros = _part(c, name, "zero_point")
    has_zeros = zeros in c and bool(np.any(c.read(zeros)))
    extent = extent_of(codes.shape, scales.shape, name)
    made = integers(c, name, codes, scales, extent, _dtype(c, data), zeros if has_zeros else None)
    return made if has_zeros or zeros not in c else replace(made, tensors=(*made.tensors, zeros))


def _int4(c: Checkpoint, name: str, data: Data) -> Layer:
    """Nibbles of two's complement, low first; scales and zero points [K / g, N]: the number is
    code * scale + zero point. Codes that count from 0 have another minimum, in float32."""
    codes, scales = c.info(_part(c, name, "qdata")), c.info(_part(c, name, "scale"))
    zeros = c.info(_part(c, name, "zero_point"))
    if codes.dtype not in ("I8", "U8") or len(codes.shape) != 2 or len(scales.shape) != 2:
        raise refuse(name, f"codes {codes.dtype}{list(codes.shape)} are none of a matrix")
    rows, depth, groups = codes.shape[0], 2 * codes.shape[1], scales.shape[0]
    if scales.shape[1] != rows or not groups or depth % groups:
        raise refuse(name, f"scales {list(scales.shape)} do not fit codes {list(codes.shape)}")
    if (zeros.shape, zeros.dtype) != (scales.shape, scales.dtype):
        raise refuse(name, f"zero points {zeros.dtype}{list(zeros.shape)} are not those of scales")
    scale_dtype(scales, "scales")
    size = depth // groups
    block = size if size < depth else "row"
    fmt = get_format("uint4", block_size=block, offset="min", scale_dtype="float32")

    def parts() -> Parts:
        scale, zero = (c.read(info.name).T.astype(np.float32) for info in (scales, zeros))
        with np.errstate(all="ignore"):
            minimum = zero - np.float32(8) * scale
        packed = c.read(codes.name).view(np.uint8) ^ np.uint8(0x88)
        return {"packed": packed, "scale": scale, "minimum": minimum}

    names = (codes.name, scales.name, zeros.name)
    notes = ("minimums are zero point - 8 scale, rounded where float32 does not hold that",)
    return Layer(name, fmt, (rows, depth), model_dtype(c, scales), names, parts, notes)


def _floats(c: Checkpoint, name: str, data: Data) -> Layer:
    codes, scales = c.info(_part(c, name, "qdata")), c.info(_part(c, name, "scale"))
    made = fp8.layer(c, codes, scales, data.get("block_size"))
    return Layer(name, made.format, made.shape, _dtype(c, data), made.tensors, made.parts)


def _mx(c: Checkpoint, name: str, data: Data) -> Layer:
    codes, scales = c.info(_part(c, name, "qdata")), c.info(_part(c, name, "scale"))
    said = str(data.get("elem_dtype"))
    known = {"float4_e2m1": "mxfp4", "fp6_e2m3": "mxfp6", "fp6_e3m2": "mxfp6_e3m2",
             "float8_e4m3": "mxfp8", "float8_e5m2": "mxfp8_e5m2"}  # fmt: skip
    kind = next((fmt for key, fmt in known.items() if key in said), None)
    if kind is None:
        raise refuse(name, f"elem_dtype {quote(said)} is unknown")
    fmt = get_format(kind)
    shape = (*codes.shape[:-1], codes.shape[-1] * (2 if fmt.bits == 4 else 1))

    def parts() -> Parts:
        packed = c.read(codes.name).view(np.uint8)
        if fmt.bits == 6:  # one code a byte
            rows = packed.reshape(-1, shape[-1])
            packed = fmt.row_packing.pack(rows, fmt.zero_code)
        return {"packed": packed, "scale": c.read(scales.name).view(np.uint8)}

    return Layer(name, fmt, shape, _dtype(c, data), (codes.name, scales.name), parts)


def _nvfp4(c: Checkpoint, name: str, data: Data) -> Layer:
    codes, scales = c.info(_part(c, name, "qdata")), c.info(_part(c, name, "scale"))
    whole = (_part(c, name, "per_tensor_scale"), np.positive)
    given = whole if whole[0] in c else None
    return block_floats(c, name, "nvfp4", codes, scales, _dtype(c, data), given)


READERS: dict[str, Callable[[Checkpoint, str, Data], Layer]] = {
    "Int8Tensor": _integers,
    "IntxUnpackedToInt8Tensor": _integers,
    "Int4Tensor": _int4,
    "Float8Tensor": _floats,
    "MXTensor": _mx,
    "NVFP4Tensor": _nvfp4,
}
