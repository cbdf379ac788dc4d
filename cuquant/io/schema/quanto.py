"""optimum-quanto: subclasses of tensors, by their fields.

8 bits: weight._data I8 or F8 [N, K], weight._scale [N, 1]: w = code * scale. 4 and 2 bits:
weight._data._data U8, codes of [N K / g, g] in slabs of rows, the first in the low bits; _scale and
_shift [N K / g, 1]: w = code * scale - shift. g is K, or where K is more than 128 the first of
GROUPS that divides it; K is not stored. quanto_qmap.json may tell the type. Source: optimum-quanto
0.2.7, tensor/weights and nn/qmodule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from cuquant.formats import get_format
from cuquant.io.checkpoint import Checkpoint
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
from cuquant.io.schema.pieces import extent_of, integers, of_slabs, packed_by_rows

KIND = "quanto"
MAP = "quanto_qmap.json"  # by module: "weights", such as "qint4", and "activations"
DATA, SLABS, SCALE, SHIFT = "._data", "._data._data", "._scale", "._shift"
GROUPS = (128, 96, 64, 32)
SHIFTS = {4: (0, 4), 2: (0, 2, 4, 6)}  # where the slabs of codes of so many bits begin
# Of transformers' configuration, the columns of linear layers by the ends of their names.
COLUMNS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "hidden_size"),
    "lm_head": "hidden_size", "down_proj": "intermediate_size",
}  # fmt: skip
ROUNDS = "values are those of exact arithmetic, which quanto rounds twice in the scales' dtype"


def recognises(c: Checkpoint) -> bool:
    """By its configuration, or codes beside scales."""
    return c.method == KIND if c.method else any(True for _ in _weights(c))


def _weights(c: Checkpoint) -> Iterator[tuple[str, str]]:
    """A weight's name, and the ending of its codes."""
    for name in c:
        for end in (SLABS, DATA):
            weight = name.removesuffix(end)
            if weight != name and weight + SCALE in c:
                yield weight, end
                break


def layers(c: Checkpoint) -> Iterator[Found]:
    """Weights that are subclasses."""
    kinds = c.json(MAP)
    for name, end in _weights(c):
        if end == DATA:
            yield attempt(name, _whole, c, name)
            continue
        said = kinds.get(name.removesuffix(".weight"))
        yield attempt(
            name, _grouped, c, name, said.get("weights") if isinstance(said, dict) else None
        )


def _whole(c: Checkpoint, name: str) -> Layer:
    """One code a byte."""
    codes, scales = c.info(name + DATA), c.info(name + SCALE)
    dtype = model_dtype(c, scales)
    if codes.dtype in fp8.FORMATS:
        return replace(fp8.layer(c, codes, scales, None), name=name, dtype=dtype)
    extent = extent_of(codes.shape, scales.shape, name)
    return integers(c, name, codes, scales, extent, dtype)


def _grouped(c: Checkpoint, name: str, kind: object) -> Layer:
    """Several codes a byte, and minimums; `kind` is what MAP says of the module."""
    codes, scales, shifts = c.info(name + SLABS), c.info(name + SCALE), c.info(name + SHIFT)
    groups = math.prod(scales.shape)
    if codes.dtype != "U8" or len(codes.shape) != 2 or not math.prod(codes.shape):
        raise refuse(name, f"codes {codes.dtype}{list(codes.shape)} are none of quanto's")
    if (shifts.shape, shifts.dtype) != (scales.shape, scales.dtype):
        raise refuse(name, f"shifts {shifts.dtype}{list(shifts.shape)} are not those of scales")
    lines, size = codes.shape
    fitting = [bits for bits, at in SHIFTS.items() if -(-groups // len(at)) == lines]
    if isinstance(kind, str):
        fitting = [bits for bits in fitting if kind == f"qint{bits}"]
    if len(fitting) != 1:
        raise refuse(name, f"{lines} rows of bytes are not those of {groups} groups")
    bits = fitting[0]
    rows, depth = _shape(c, name, groups, size)
    kept = scale_dtype(scales, "scales")
    block = size if size < depth else "row"
    fmt = get_format(f"uint{bits}", block_size=block, offset="min", scale_dtype=kept)

    def parts() -> Parts:
        words, each = c.read(codes.name), depth // size

        def unpacked(start: int, stop: int) -> np.ndarray:
            return of_slabs(words, bits, SHIFTS[bits], start * each, stop * each)

        return {
            "packed": packed_by_rows(fmt, rows, depth, unpacked),
            "scale": c.read(scales.name),
            "minimum": -c.read(shifts.name),
        }

    names = (codes.name, scales.name, shifts.name)
    return Layer(name, fmt, (rows, depth), model_dtype(c, scales), names, parts, (ROUNDS,))


def _shape(c: Checkpoint, name: str, groups: int, size: int) -> tuple[int, int]:
    """[N, K] of a weight of so many groups: by the bias, or by what config.json says of the model.

    Raises
    ------
    FormatError
        Where neither tells, or what they tell does not fit.
    """
    stem = name.removesuffix("weight")
    bias = c.tensors.get(stem + "bias")
    depth = _columns(c, stem)
    if bias is not None and len(bias.shape) == 1 and bias.shape[0]:
        depth = groups * size // bias.shape[0]
    if depth is None:
        raise refuse(name, "its shape is not stored, and neither a bias nor config.json tells it")
    used = next((g for g in GROUPS if depth % g == 0), depth) if depth > GROUPS[0] else depth
    if not depth or used != size or groups * size % depth:
        raise refuse(name, f"{groups} groups of {size} are not those of rows of {depth}")
    return groups * size // depth, depth


def _columns(c: Checkpoint, stem: str) -> int | None:
    """Of a linear layer of transformers' models; None where config.json does not tell."""
    module = stem.removesuffix(".").rpartition(".")[2]
    config = c.config
    keys = ("num_attention_heads", "head_dim", COLUMNS.get(module, "hidden_size"))
    heads, own, found = (n if type(n := config.get(key)) is int and n > 0 else None for key in keys)
    if module == "o_proj":
        return heads * own if heads and own else found
    return found if module in COLUMNS else None
