"""bitsandbytes: NF4 and FP4, whose state is JSON in a tensor, and LLM.int8().

4 bits: weight U8 [ceil(N K / 2), 1], or the same bytes as another dtype; absmax F32, or U8 codes
with nested_absmax; quant_state.bitsandbytes__nf4 or __fp4, JSON as U8. 8 bits: weight I8 [N, K] and
SCB F32 [N]: w = (code * SCB) * float32(1 / 127). Blocks of 4 bits run over the flattened weight:
where they do not end with its rows, the format is flat. Source: bitsandbytes 0.50.2,
functional.QuantState.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cuquant.array.quant_array import QuantArray
from cuquant.errors import FormatError
from cuquant.formats import get_format
from cuquant.formats.catalogue import MAPS
from cuquant.formats.codecs import Codebook
from cuquant.formats.scales import FLAT
from cuquant.interop import float_dtype
from cuquant.io.checkpoint import Checkpoint
from cuquant.io.container.messages import quote
from cuquant.io.schema.layer import (
    Found,
    Layer,
    Parts,
    attempt,
    integer,
    model_dtype,
    refuse,
    stems,
)
from cuquant.io.schema.recipe import Recipe, Source, Specs, Tensors, same

KIND = "bitsandbytes"
STATE = ".quant_state.bitsandbytes__"
TYPES = ("nf4", "fp4")
MAX_STATE = 1 << 16  # bytes of the JSON


def recognises(c: Checkpoint) -> bool:
    """By its configuration, or the tensors that only it writes."""
    if c.method:
        return c.method == "bitsandbytes"
    return any(STATE in name for name in c) or any(_eights(c))


def layers(c: Checkpoint) -> Iterator[Found]:
    """Weights with a state, and int8 weights beside SCB."""
    for name in c:
        weight, mark, kind = name.partition(STATE)
        if mark and kind in TYPES:
            yield attempt(weight, _four, c, weight, name, kind)
    for stem in _eights(c):
        yield attempt(stem + "weight", _eight, c, stem)


def _eights(c: Checkpoint) -> Iterator[str]:
    for stem in stems(c, "SCB"):
        if stem + "weight" in c and c.info(stem + "weight").dtype == "I8":
            yield stem


def _eight(c: Checkpoint, stem: str) -> Layer:
    codes, scales = c.info(stem + "weight"), c.info(stem + "SCB")
    if len(codes.shape) != 2 or (scales.dtype, scales.shape) != ("F32", codes.shape[:1]):
        raise refuse(codes.name, f"SCB is {scales.dtype}{list(scales.shape)}")

    def parts() -> Parts:
        return {"packed": c.read(codes.name), "scale": c.read(scales.name)}

    names = [codes.name, scales.name]
    names += [name for name in (stem + "weight_format",) if name in c]
    fmt = get_format("int8", absmax=True)
    return Layer(codes.name, fmt, codes.shape, model_dtype(c), tuple(names), parts)


def _four(c: Checkpoint, name: str, state: str, kind: str) -> Layer:
    said = _state(c, state)
    codes = c.info(name)
    shape = said.get("shape")
    if not isinstance(shape, list) or not shape or not all(type(n) is int and n > 0 for n in shape):
        raise refuse(name, f"its state has shape {quote(shape)}")
    if said.get("quant_type") != kind:
        raise refuse(name, f"its state has quant_type {quote(said.get('quant_type'))}")
    size = integer(said, "blocksize", 8, 1 << 20)
    if codes.nbytes != -(-math.prod(shape) // 2):
        raise refuse(name, f"{codes.nbytes} bytes do not hold {shape} codes of 4 bits")
    nested = name + ".nested_absmax" in c
    flat = FLAT if shape[-1] % size else ""
    fmt = get_format(f"{kind}:{flat}{size}", double_quant=nested)
    ends = ["absmax", "quant_map", *(["nested_absmax", "nested_quant_map"] if nested else [])]
    names = [f"{name}.{end}" for end in ends]
    for part in names:
        c.info(part)

    def parts() -> Parts:
        if not _is_map(c.read(f"{name}.quant_map"), fmt.codec):
            raise refuse(name, f"its levels are not {kind}'s")
        found = {"packed": c.read(name).reshape(-1).view(np.uint8), "scale": c.read(names[0])}
        if nested:
            if integer(said, "nested_blocksize", 1, 1 << 20) != 256:
                raise refuse(name, "blocks of its scales are not 256")
            if not np.array_equal(
                c.read(f"{name}.nested_quant_map"), np.asarray(MAPS["dynamic"], np.float32)
            ):
                raise refuse(name, "the levels of its scales are not bitsandbytes' own")
            found["nested_scale"] = c.read(f"{name}.nested_absmax")
            offset = said.get("nested_offset")
            if isinstance(offset, bool) or not isinstance(offset, (int, float)):
                raise refuse(name, f"its nested_offset is {quote(offset)}")
            found["nested_offset"] = np.asarray(offset, np.float32)
        return found

    dtype, told = model_dtype(c), said.get("dtype")
    if isinstance(told, str):
        try:
            dtype = float_dtype(told)
        except TypeError as error:
            raise refuse(name, str(error)) from error
    return Layer(name, fmt, tuple(shape), dtype, (name, *names, state), parts)


def _state(c: Checkpoint, name: str) -> dict[str, Any]:
    info = c.info(name)
    if info.dtype != "U8" or info.nbytes > MAX_STATE:
        raise refuse(name, f"a state of {info.nbytes} bytes of {info.dtype}")
    try:
        said = json.loads(c.read(name).tobytes())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{quote(name)}: is no JSON") from error
    if not isinstance(said, dict):
        raise refuse(name, "holds no JSON object")
    return said


def _is_map(levels: np.ndarray, codec: object) -> bool:
    """Whether 16 levels are those that a codec's codes stand for."""
    assert isinstance(codec, Codebook)
    return levels.shape == (16,) and np.array_equal(levels, codec.values[:16])


# ---- writing ------------------------------------------------------------------------------------

NEAREST = {4: "nf4"}
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
ODD = ("flat", "absmax")


def recipe(source: Source) -> Recipe:
    """nf4 and fp4, flat or in blocks that divide rows, and int8 with absmax."""
    fmt, shape = source.format, source.shape
    rows, depth = source.matrix(KIND)
    if fmt.odd == ("absmax",):
        return _recipe_of_eight(source)
    if fmt.name not in TYPES:
        raise ValueError(
            "bitsandbytes holds nf4 and fp4, and int8+absmax (int8 has scales, and its SCB = 127 "
            "times the scale rounds)"
        )
    if fmt.rule.dtype != "float32" or isinstance(fmt.rule.block, tuple):
        raise ValueError("bitsandbytes has float32 scales of blocks in a row")
    size = fmt.rule.flat or min(fmt.rule.tile(rows, depth)[1], depth)
    is_whole = fmt.is_flat or not (depth % size or fmt.rule.block == "tensor")
    if size not in BLOCKS or not is_whole:
        raise ValueError(f"bitsandbytes has whole blocks of {BLOCKS}, not {size} of {depth}")
    name, nested = source.name, fmt.rule.nested == "double"
    source.stem  # noqa: B018  (a module's weight, or ValueError)
    blocks = -(-rows * depth // size)
    state = name + STATE + fmt.name
    offset = float(source.read().components["nested_offset"]) if nested else None
    text = _written_state(fmt.name, size, source.dtype, shape, offset)
    specs: Specs = {
        name: ("U8", (-(-rows * depth // 2), 1)),
        f"{name}.absmax": ("U8" if nested else "F32", (blocks,)),
        f"{name}.quant_map": ("F32", (16,)),
        state: ("U8", (len(text),)),
    }
    if nested:
        specs[f"{name}.nested_absmax"] = ("F32", (-(-blocks // 256),))
        specs[f"{name}.nested_quant_map"] = ("F32", (256,))

    def encode(q: QuantArray) -> Tensors:
        parts = q.arrays()
        assert isinstance(q.format.codec, Codebook)
        made = {
            name: parts["packed"].reshape(-1, 1),
            f"{name}.absmax": parts["scale"].reshape(-1),
            f"{name}.quant_map": np.asarray(q.format.codec.values[:16], np.float32),
            state: text,
        }
        if nested:
            made[f"{name}.nested_absmax"] = parts["nested_scale"]
            made[f"{name}.nested_quant_map"] = np.asarray(MAPS["dynamic"], np.float32)
        return made

    said = {"quant_type": fmt.name, "double_quant": nested}
    return Recipe(specs, encode, str(fmt), said, source.module)


def _recipe_of_eight(source: Source) -> Recipe:
    """LLM.int8()'s weight and the absmax of its rows."""
    name, stem, shape = source.name, source.stem, source.shape
    specs: Specs = {
        name: ("I8", shape),
        stem + "SCB": ("F32", shape[:1]),
        stem + "weight_format": ("U8", ()),
    }

    def encode(q: QuantArray) -> Tensors:
        parts = q.arrays()
        absmax = np.ascontiguousarray(parts["scale"].reshape(-1))
        rows = np.zeros((), np.uint8)  # bitsandbytes.utils.LINEAR_8BIT_WEIGHTS_FORMAT_MAPPING
        return {name: parts["packed"], stem + "SCB": absmax, stem + "weight_format": rows}

    said = {"quant_type": source.format.name, "double_quant": False}
    return Recipe(specs, encode, str(source.format), said, source.module)


def _written_state(
    kind: str, size: int, dtype: np.dtype, shape: tuple[int, ...], offset: float | None
) -> np.ndarray:
    """The JSON of a state, as bytes."""
    said: dict[str, Any] = {
        "quant_type": kind, "blocksize": size, "dtype": dtype.name, "shape": list(shape),
    }  # fmt: skip
    if offset is not None:
        said |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    return np.frombuffer(json.dumps(said).encode(), np.uint8)


def configuration(recipes: Sequence[Recipe], plain: Sequence[str]) -> dict[str, Any]:
    """One type for all modules."""
    if not recipes:
        return {}
    kind = same(recipes, "quant_type", KIND)
    return {
        "quantization_config": {
            "quant_method": KIND,
            "load_in_4bit": kind in TYPES,
            "load_in_8bit": kind not in TYPES,
            "bnb_4bit_quant_type": kind if kind in TYPES else "fp4",
            "bnb_4bit_use_double_quant": same(recipes, "double_quant", KIND),
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_compute_dtype": "float32",
            "llm_int8_skip_modules": list(plain),
            "llm_int8_threshold": 6.0,
            "llm_int8_has_fp16_weight": False,
        }
    }
