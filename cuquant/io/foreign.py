"""Checkpoints that another library has quantized: what shows them, so that none is quantized twice.

Sources of the names: the libraries' own files. Codes and scales lie in tensors of one module whose
names differ in the ending, so a checkpoint is recognised by pairs: an ordinary model may have a
parameter that is called `scale` or `scales`, but not beside codes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuquant.disk import read_bounded
from cuquant.errors import FormatError
from cuquant.io.container.messages import quote
from cuquant.io.container.safetensors import SafetensorsReader, TensorInfo

FLOAT8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
PACKED = ("U8", "I8", "I16", "U16", "I32", "U32", "F4", "F6_E2M3", "F6_E3M2")
CODES = (*FLOAT8, *PACKED)
WIDE = ("F16", "BF16", "F32", "F64")
SCALES = (
    "weight_scale", "weight_scales", "weight_scale_inv", "scale", "scales", "scale_weight",
    "qscale_weight", "weight.scale", "weight_scale_2", "weight_zero_point", "dequant_scale",
)  # fmt: skip
BESIDE_PARAMETERS = ("_scale", "_scales", "_scale_inv", "_weight_scale")

MAX_CONFIG_BYTES = 1 << 24  # of a JSON file beside the checkpoint; real ones have some kB
MAX_SHARDS = 4096  # whose headers are read


@dataclass(frozen=True)
class Sign:
    """A tensor that only one library writes.

    Attributes
    ----------
    owner
        The library, as an error names it.
    ending
        Of the tensor's name; what comes before is the stem, which names the module.
    dtypes
        Of which the tensor has one; () is any.
    beside
        Endings, one of which another tensor of the same stem has; () needs none.
    unless
        Ending of a tensor of the same stem that, with a dtype in WIDE, makes it an ordinary model.
    axes
        That the tensor has at least: codes of a matrix have two, a norm's weight and ids one.
    """

    owner: str
    ending: str
    dtypes: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    unless: str | None = None
    axes: int = 0


# The first that fits names the library.
SIGNS = (
    Sign("cuquant.torch", "_extra_state", ("U8",), ("packed", "codes", "blocks")),
    Sign("cuquant", ".packed", PACKED, (".scale",)),
    Sign("cuquant", ".codes", ("U32",), (".scale",)),
    Sign("bitsandbytes", ".quant_state.bitsandbytes__nf4"),
    Sign("bitsandbytes", ".quant_state.bitsandbytes__fp4"),
    Sign("bitsandbytes", "SCB", (), ("weight", "weight_format"), unless="weight"),
    Sign("bitsandbytes", ".absmax", (), (".quant_map", ".nested_absmax", ""), unless=""),
    Sign("GPTQ", "qweight", PACKED, ("g_idx",)),
    Sign("SVDQuant", "qweight", PACKED, ("wscales",)),
    Sign("AWQ", "qweight", PACKED, ("qzeros",)),
    Sign("GPTQ or AWQ", "qweight", PACKED),
    Sign("GPTQ or AWQ", "qzeros", PACKED, ("scales",)),
    Sign("compressed-tensors", "weight_packed", PACKED),
    Sign("compressed-tensors", "weight_global_scale", (), (), unless="weight"),
    Sign("compressed-tensors", "weight_shape", ("I64",), ("weight_scale",)),
    Sign("compressed-tensors (sparse)", "bitmask", ("U8",), ("compressed",)),
    Sign("FP8 with a scale for each block", "weight_scale_inv", (), (), unless="weight"),
    Sign("NVIDIA ModelOpt", "weight_scale_2", (), (), unless="weight"),
    Sign("NVIDIA ModelOpt", "pre_quant_scale", (), ("weight_scale",), unless="weight"),
    Sign("TensorRT-LLM", "weights_scaling_factor", (), (), unless="weight"),
    Sign("TensorRT-LLM", "per_channel_scale", (), (), unless="weight"),
    Sign("FBGEMM FP8", "input_scale_ub", (), ("weight_scale",), unless="weight"),
    Sign("MXFP4", "_scales", ("U8",), ("_blocks",)),
    Sign("torchao", "_weight_qdata", CODES),
    Sign("torchao", "_weight_scale", (), ("_weight_qdata", "_weight_zero_point")),
    Sign("optimum-quanto", "._data", CODES, ("._scale",)),
    Sign("optimum-quanto", "._data._data", CODES, ("._scale", "._shift")),
    Sign("optimum-quanto", "weight._shift", (), ("weight._scale",)),
    Sign("HQQ", "W_q", PACKED, ("scale", "zero", "nbits")),
    Sign("MLX", "weight", ("U32",), ("scales", "biases")),
    Sign("Marlin", "B", ("I32",), ("s",)),
    Sign("ExLlamaV2", "q_weight", ("I32",), ("q_scale",)),
    Sign("ExLlamaV3", "trellis", ("I16",), ("suh", "svh")),
    Sign("AQLM", "codes", PACKED, ("scales",), axes=3),  # VQ has codes beside codebooks too
    Sign("QuIP#", "Qidxs", ("I64", *PACKED), ("SU", "SV", "Wscale")),
    Sign("ComfyUI", "comfy_quant", ("U8",)),
    Sign("FP8 (ComfyUI)", "scaled_fp8", FLOAT8),
    Sign("FP8", "weight", FLOAT8, SCALES, axes=2),
    Sign("another library", "weight", PACKED, (*SCALES, "zeros", "qzeros"), axes=2),
    Sign("another library", "weight_quantized", CODES),
    Sign("another library", "w_q", PACKED, ("w_s", "w_z")),
    # Alone, in a shard that has the scales and not the codes.
    Sign("another library", "weight_scale", (), (), unless="weight"),
    # Parameters without a module of their own, such as experts.gate_up_proj and its _scale.
    Sign("FP8", "", FLOAT8, (*BESIDE_PARAMETERS, ".scale"), axes=2),
    Sign("another library", "", PACKED, BESIDE_PARAMETERS, axes=2),
)

# What configurations call the libraries above, in lower case.
METHODS = {
    "gptq": "GPTQ", "awq": "AWQ", "fp8": "FP8", "fbgemm_fp8": "FBGEMM FP8", "mxfp4": "MXFP4",
    "modelopt": "NVIDIA ModelOpt", "hqq": "HQQ", "quanto": "optimum-quanto", "aqlm": "AQLM",
}  # fmt: skip

# Files beside a checkpoint that only one library writes.
COMPANIONS = {
    "quantize_config.json": "GPTQ or AWQ",
    "quant_config.json": "AWQ",
    "hf_quant_config.json": "NVIDIA ModelOpt",
    "quanto_qmap.json": "optimum-quanto",
}


@dataclass(frozen=True)
class Foreign:
    """What shows that another library has quantized a checkpoint.

    Attributes
    ----------
    owner
        The library or format.
    evidence
        The tensor, or what a file beside the checkpoint says.
    """

    owner: str
    evidence: str


def refuse_foreign(reader: SafetensorsReader) -> None:
    """Refuse to quantize a checkpoint, or a shard of one, that another library has quantized.

    Raises
    ------
    FormatError
        Which says whose it is and what shows it.
    """
    if (found := recognise(reader)) is not None:
        raise FormatError(
            f"{reader.path}: is quantized already, by {found.owner} ({found.evidence}); "
            "quantize the original file of float weights"
        )


def recognise(reader: SafetensorsReader) -> Foreign | None:
    """What shows that another library has quantized this checkpoint; None for float models.

    Tensors of the file, and of the other shards that an index beside it lists, are looked at
    together: the codes of a layer may lie in one shard and its scales in another. Then comes the
    configuration beside the file.
    """
    configured = _configured(reader.path.parent)
    tensors, shard_of = _whole_checkpoint(reader)
    if (sign := find_sign(tensors)) is None:
        return configured
    owner, *shown = sign
    evidence = "tensor " + " beside ".join(_shown(info, shard_of) for info in shown if info)
    return Foreign(configured.owner if configured else owner, evidence)


def find_sign(
    tensors: Mapping[str, TensorInfo],
) -> tuple[str, TensorInfo, TensorInfo | None] | None:
    """The owner, the tensor that shows it and the one beside it; None for an ordinary model.

    Examples
    --------
    >>> codes, scales = TensorInfo("a.qweight", "I32", (8, 8), 0, 256), TensorInfo(
    ...     "a.scales", "F16", (2, 8), 256, 32)
    >>> find_sign({info.name: info for info in (codes, scales)})[0]
    'GPTQ or AWQ'
    >>> find_sign({"a.scales": scales}) is None
    True
    """
    for sign in SIGNS:
        for name, info in tensors.items():
            if not name.endswith(sign.ending) or len(info.shape) < sign.axes:
                continue
            if sign.dtypes and info.dtype not in sign.dtypes:
                continue
            stem = name[: len(name) - len(sign.ending)]
            if sign.ending[:1].isalpha() and stem and not stem.endswith("."):
                continue  # "requant_qweight" is a name of its own
            ordinary = None if sign.unless is None else tensors.get(stem + sign.unless)
            if ordinary is not None and ordinary.dtype in WIDE:
                continue
            partners = [tensors[stem + end] for end in sign.beside if stem + end in tensors]
            if partners or not sign.beside:
                return sign.owner, info, partners[0] if partners else None
    return None


def _shown(info: TensorInfo, shard_of: Mapping[str, str]) -> str:
    text = f"{quote(info.name)} {info.dtype} {list(info.shape)}"
    return text if info.name not in shard_of else f"{text} in {quote(shard_of[info.name])}"


def _whole_checkpoint(reader: SafetensorsReader) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Tensors of all shards by name, and the shard of those that lie in another file."""
    tensors: dict[str, TensorInfo] = {}
    shard_of: dict[str, str] = {}
    for name in _other_shards(reader.path):
        try:
            with SafetensorsReader(reader.path.with_name(name)) as other:
                tensors |= other.tensors
                shard_of |= dict.fromkeys(other.tensors, name)
        except (OSError, FormatError):
            continue  # not fetched yet, or damaged: it shows nothing
    for name in reader.tensors:
        shard_of.pop(name, None)
    return {**reader.tensors, **tensors, **reader.tensors}, shard_of  # its own come first


def _other_shards(path: Path) -> list[str]:
    """The other shards of the checkpoint that `path` is one of: plain names in the same folder."""
    for index in sorted(path.parent.glob("*.safetensors.index.json"))[:MAX_SHARDS]:
        names = shard_names(index)
        if path.name in names and len(names) <= MAX_SHARDS:
            plain = (name for name in names if name == Path(name).name)
            return sorted(name for name in plain if name != path.name)
    return []


def shard_names(index: Path) -> set[str]:
    """The files that a *.safetensors.index.json lists; none where it is no such file."""
    mapped = _json(index).get("weight_map")
    values = mapped.values() if isinstance(mapped, dict) else ()
    return {name for name in values if isinstance(name, str)}


def _configured(folder: Path) -> Foreign | None:
    """What the files beside a checkpoint say of its quantization."""
    config = _json(folder / "config.json")
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]  # text_config
    keys = ("quantization_config", "compression_config", "quantization")
    for part, key in ((part, key) for part in parts for key in keys):
        found = part.get(key)
        if not isinstance(found, dict) or not found:
            continue
        method = found.get("quant_method")
        if not isinstance(method, str):
            if isinstance(algorithm := found.get("quant_algo"), str):
                return Foreign("TensorRT-LLM", f"config.json has quant_algo {quote(algorithm)}")
            if key == "quantization" and not found.keys() & {"bits", "group_size"}:
                continue  # of sounds or images, in a model's own words
            is_mlx = key == "quantization" or "group_size" in found  # MLX writes both keys
            owner = "MLX" if is_mlx else "another library"
            return Foreign(owner, f"config.json beside it has the key {key!r}")
        owner = METHODS.get(method.lower(), method if len(method) <= 40 else "another library")
        return Foreign(owner, f"config.json beside it has quant_method {quote(method)}")
    for name, owner in COMPANIONS.items():
        if _json(folder / name):
            return Foreign(owner, f"{name} lies beside it")
    return None


def _json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is none, or one that cannot be read."""
    try:
        found = json.loads(read_bounded(path, MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
