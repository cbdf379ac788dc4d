"""`load_`: a file of quantized weights into a model, whichever way it was stored."""

import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from cuquant.array.packed_weight import PackedWeight, prepack, unpack
from cuquant.array.quant_array import QuantArray
from cuquant.array.raw_blocks import RawBlocks
from cuquant.errors import FormatError, clipped_text
from cuquant.io.architectures.names import of_gguf
from cuquant.io.files import GGUF, OWN, PLAIN, load, open
from cuquant.torch.experts import is_experts, is_transposed
from cuquant.torch.holder import Holder
from cuquant.torch.kinds import follow, obstacle
from cuquant.torch.load_experts import fused
from cuquant.torch.module import QuantLinear
from cuquant.torch.rules import Layer, layers_of
from cuquant.torch.swap import M, place


def load_(model: M, path: str | os.PathLike[str]) -> M:
    """Load a file of weights into a model, in place; its linear layers become `QuantLinear`.

    The file or folder is what `cuquant.load` reads: files of `cuquant quantize` and `save`, the
    state_dict of a model that `quantize_` made, GGUF of a known architecture, whose names become
    transformers', and the checkpoints of GPTQ, AWQ, compressed-tensors, bitsandbytes and others.
    Each nn.Linear whose weight is quantized in the file is swapped, and computes with its codes and
    scales; so are fused experts, whose matrices may lie one by one. A QuantLinear takes the file's
    format and layout. Other quantized tensors (embeddings, filters, experts of a format with one
    scale for all rows) are decoded. All else is copied, as `load_state_dict` does.

    Parameters
    ----------
    model
        On any device; on the meta device too, and then its tensors are the file's, on the CPU.
    path
        A file or folder with everything that the model holds, and nothing else. What another
        library stores beside its weights, such as the scales of activations, is left out with a
        warning.

    Returns
    -------
    The model.

    Raises
    ------
    FormatError
        For a malformed file, and types of ggml's that are not decoded.
    RuntimeError
        Where names or shapes of file and model differ; the model is then what it was.

    Warns
    -----
    UserWarning
        Where tensors of another library's file are left out, or where buffers that are no part of
        the state_dict stay on the meta device.

    Examples
    --------
    >>> import pathlib, tempfile, torch
    >>> import cuquant as cq
    >>> import cuquant.torch
    >>> path = pathlib.Path(tempfile.mkdtemp(), "m.safetensors")
    >>> cq.save(path, {"0.weight": cq.quantize(torch.ones(8, 64), "nf4")})
    >>> cuquant.torch.load_(torch.nn.Sequential(torch.nn.Linear(64, 8, bias=False)), path)
    Sequential(
      (0): QuantLinear(in_features=64, out_features=8, bias=False, format=nf4)
    )
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.Linear) and not isinstance(model, QuantLinear):
        raise ValueError(
            "model is itself an nn.Linear, which cannot be swapped inside a model; load_ takes "
            "torch.nn.Sequential(model), whose tensors are called 0.weight and 0.bias"
        )
    layers = [
        layer
        for layer in layers_of(model)
        if isinstance(layer.module, nn.Linear) or is_experts(layer.module)
    ]
    floats = {
        f"{name}.{key}": (layer, key)
        for layer in layers
        for key in layer.kind.names(layer.module)
        for name in layer.names
    }
    quantized = {
        f"{name}.weight" if name else "weight": module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Holder)
    }
    weights: dict[str, QuantArray | PackedWeight] = {}
    plain: dict[str, torch.Tensor] = {}
    state_dict = model.state_dict()
    found, left = _read(path, set(state_dict) | quantized.keys(), layers)
    swaps = _swaps(layers, found)
    swapped = {name for _, names in swaps for name in names}
    for name, value in found.items():
        if isinstance(value, RawBlocks):
            text = f"{name} is {value.type}, a type of ggml's that cuquant does not decode yet"
            raise FormatError(f"{path}: {clipped_text(text, 400)}")
        if not isinstance(value, (QuantArray, PackedWeight)):
            plain[name] = value
        elif name in quantized or name in swapped:
            weights[name] = value
        else:
            array = unpack(value) if isinstance(value, PackedWeight) else value
            decoded = array.dequantize(_exact(state_dict.get(name)))
            turned = name in floats and decoded.ndim == 3 and is_transposed(floats[name][0].module)
            plain[name] = decoded.transpose(1, 2) if turned else decoded

    held = _held(model, quantized, swapped)
    ties = _ties(held, plain)
    problems = _problems(held, plain, ties, weights, {**quantized, **floats})
    if problems:
        told = "; ".join(clipped_text(problem, 400) for problem in problems)
        raise RuntimeError(f"{path} does not fit {type(model).__name__}: {told}")

    if left:
        text = f"{path}: {len(left)} tensors have no place in the model and are left out: {left[0]}"
        warnings.warn(text, stacklevel=2)
    for layer, names in swaps:
        made = [_beside(weights[name], layer.module) for name in names]
        place(layer, follow(layer.kind.make(layer.module, made), layer.module))
    for name, module in quantized.items():
        module.weight = _beside(weights[name], module)
    state = {name: _moved(value, held[name]) for name, value in plain.items()}
    assign = any(isinstance(held[name], torch.Tensor) and held[name].is_meta for name in plain)
    model.load_state_dict(state, strict=False, assign=assign)
    for name, other in ties.items():
        parent, _, key = name.rpartition(".")
        model.get_submodule(parent)._parameters[key] = model.get_parameter(other)
    _warn_of_meta(model)
    return model


def _read(
    path: str | os.PathLike[str], held: set[str], layers: Sequence[Layer]
) -> tuple[dict[str, Any], list[str]]:
    """The arrays of a file by the model's names, and names that another library stores beside.

    A bias that is not zero is part of what a layer computes: it is not left out.
    """
    with open(path) as file:
        kind, is_known = file.kind, of_gguf(file.metadata) is not None
    found = load(path, library="torch", names="hf" if kind == GGUF and is_known else None)
    found = fused(found, [layer for layer in layers if is_experts(layer.module)])
    if kind in (OWN, PLAIN):
        return found, []
    left = [
        name
        for name, value in found.items()
        if name not in held
        and isinstance(value, torch.Tensor)
        and not name.endswith("weight")
        and not (name.endswith("bias") and value.any())
    ]
    return {name: value for name, value in found.items() if name not in left}, left


def _swaps(layers: Sequence[Layer], found: dict[str, Any]) -> list[tuple[Layer, list[str]]]:
    """Layers that become quantized, each with the names of its weights in the file."""
    made = []
    for layer in layers:
        keys = layer.kind.names(layer.module)
        for name in layer.names:
            if all(_takes(layer, key, found.get(f"{name}.{key}")) for key in keys):
                made.append((layer, [f"{name}.{key}" for key in keys]))
                break
    return made


def _takes(layer: Layer, key: str, weight: Any) -> bool:
    """Whether a quantized layer of this weight can stand for the layer."""
    if not isinstance(weight, (QuantArray, PackedWeight)):
        return False
    axes = len(_stored_shape(layer, key))
    along = isinstance(weight, PackedWeight) or weight.axes == tuple(range(axes))
    return (
        along and weight.ndim == axes and obstacle(layer.module, layer.kind, weight.format) is None
    )


def _stored_shape(layer: Layer, key: str) -> tuple[int, ...]:
    """The shape in which a layer's weight is quantized."""
    weight = layer.module._parameters[key]
    return tuple(layer.kind.rows(layer.module, weight.detach().to("meta")).shape)


def _held(model: nn.Module, quantized: Any, swaps: Any) -> dict[str, Any]:
    """What the model's state_dict holds beside the weights that are quantized in the file."""
    inside = {
        f"{name.removesuffix('weight')}{key}"
        for name, module in quantized.items()
        for key in module.state_dict()
        if key != "bias"
    }
    held = model.state_dict(keep_vars=True)
    return {k: v for k, v in held.items() if k not in inside and k not in swaps}


def _ties(held: dict[str, Any], plain: dict[str, Any]) -> dict[str, str]:
    """Names that the file leaves out, with another name of the same parameter that it has."""
    names = {id(held[name]): name for name in plain if name in held}
    return {
        name: names[id(value)]
        for name, value in held.items()
        if name not in plain and id(value) in names
    }


def _problems(held: Any, plain: Any, ties: Any, weights: Any, modules: Any) -> list[str]:
    """Why file and model do not fit, name by name."""
    found = []
    wanted = {name for name, module in modules.items() if isinstance(module, Holder)}
    missing = [name for name in (*held, *wanted) if name not in {*plain, *ties, *weights}]
    unknown = [name for name in plain if name not in held]
    for what, names in (("the file lacks", missing), ("the model has no", unknown)):
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            found.append(f"{what} {', '.join(names[:8])}{more}")
    for name, weight in weights.items():
        module = modules[name]
        shape = module._spec.shape if isinstance(module, Holder) else _stored_shape(*module)
        if weight.shape != shape:
            found.append(f"{name} is {list(weight.shape)}, not {list(shape)}")
    for name, value in plain.items():
        target = held.get(name)
        if isinstance(target, torch.Tensor) and target.shape != value.shape:
            found.append(f"{name} is {list(value.shape)}, not {list(target.shape)}")
    return found


def _beside(weight: QuantArray | PackedWeight, module: Any) -> QuantArray | PackedWeight:
    """A weight on the device of the module, where kernels want it as `quantize_` lays it."""
    device = next(module.parameters()).device
    if device.type != "cuda":
        return weight
    moved = weight.to(str(device))
    return prepack(moved) if isinstance(moved, QuantArray) else moved


def _exact(target: Any) -> torch.dtype | None:
    """float32 for what a float32 tensor takes: rounding on the way would lose digits."""
    is_held = isinstance(target, torch.Tensor) and not target.is_meta
    return torch.float32 if is_held and target.dtype == torch.float32 else None


def _warn_of_meta(model: nn.Module) -> None:
    """Buffers that no file holds, such as the frequencies of RoPE: nothing fills them."""
    empty = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if empty:
        warnings.warn(
            f"{len(empty)} buffers are on the meta device and in no file, such as {empty[0]}; "
            "fill them, or build the model without torch.device('meta')",
            stacklevel=3,
        )


def _moved(value: torch.Tensor, target: Any) -> torch.Tensor:
    """A plain tensor on the device of what it replaces; a meta tensor's place is the CPU."""
    if isinstance(target, torch.Tensor) and not target.is_meta:
        return value.to(target.device)
    return value
