"""A weight in a state_dict: what is saved under a module's name, by the names of its own state."""

from dataclasses import replace
from typing import Any

import torch

from cuquant import interop
from cuquant.array.arranged import ORDER, check_permutation
from cuquant.array.packed_weight import ROWS_LAYOUT, PackedWeight, layout_for
from cuquant.array.quant_array import QuantArray
from cuquant.formats.format import Component
from cuquant.io.state import EXTRA, bytes_shape, parse_format
from cuquant.torch.spec import Weight, WeightSpec, as_bytes, is_bytes, stated


def translated(saved: dict[str, Any], spec: WeightSpec) -> dict[str, Any]:
    """What is saved of a module, by the names of its own state_dict.

    "weight" may be a QuantArray or PackedWeight, and "weight.packed", ... may be the components as
    `cuquant.save` writes them, of the format of `spec`.
    """
    weight = saved.get("weight")
    if isinstance(weight, (QuantArray, PackedWeight)):
        saved = {k: v for k, v in saved.items() if k != "weight"}
        weight.check()
    else:
        parts = {k: v for k, v in saved.items() if k.startswith("weight.")}
        if not parts:
            return saved
        saved = {k: v for k, v in saved.items() if k not in parts}
        weight = _assembled({k.removeprefix("weight."): v for k, v in parts.items()}, spec)
    return saved | stated(weight, len(spec.shape))


def checked(spec: WeightSpec, state: Any) -> WeightSpec:
    """What a description says, if that is a weight of the format and shape of `spec`."""
    found = WeightSpec.from_tensor(state)
    mine = parse_format(spec.format), spec.shape
    if (parse_format(found.format), found.shape) != mine:
        raise ValueError(f"the saved weight is {found}; this layer's is {spec}")
    return found


def expect(saved: dict[str, Any], spec: WeightSpec) -> Any:
    """Check what is saved of a module that holds a weight of `spec`; the description, if any."""
    mine, described = spec.layout, saved.get(EXTRA)
    if described is None and EXTRA in saved:
        raise ValueError(f"{EXTRA} is None, where a uint8 tensor describes the weight")
    if described is not None:
        spec = checked(spec, described)
    for component in spec.components():
        name, wanted = component.name, bytes_shape(component)
        part = saved.get(name)
        if part is None and spec.layout != mine:
            raise ValueError(f"{name} is missing, a component of {spec}")
        if part is None:
            continue
        # Another dtype would be copied as numbers, and these are bytes.
        if not is_bytes(part):
            found = getattr(part, "dtype", type(part).__name__)
            raise ValueError(f"{name} is {found}; it is stored as uint8 bytes")
        if tuple(part.shape) != wanted:
            raise ValueError(f"size mismatch for {name}: {tuple(part.shape)}, not {wanted}")
        if name == ORDER and not part.is_meta:
            check_permutation({ORDER: part.detach().cpu().clone().view(torch.int32)})
    return described


def _assembled(parts: dict[str, Any], spec: WeightSpec) -> Weight:
    """A weight of the format of `spec` from its components."""
    for name, part in parts.items():
        if not isinstance(part, torch.Tensor):
            raise TypeError(f"weight.{name} must be a tensor, got {type(part).__name__}")
    fmt, names = parse_format(spec.format), ", ".join(sorted(parts))
    for layout in dict.fromkeys((ROWS_LAYOUT, layout_for(fmt, spec.shape))):
        found = replace(spec, layout=layout)
        wanted = found.components()
        if {c.name for c in wanted} == parts.keys():
            return found.weight([_own(c, parts[c.name]) for c in wanted])
    raise ValueError(f"the saved weight has the components {names}, which {spec} does not have")


def _own(component: Component, part: torch.Tensor) -> torch.Tensor:
    """A component as `cuquant.save` writes it, as bytes; ValueError for another dtype or shape."""
    found = interop.dtype_of(part), tuple(part.shape)
    if found != (component.dtype, component.shape):
        wanted = f"{component.dtype}{list(component.shape)}"
        raise ValueError(f"weight.{component.name} is {found[0]}{list(found[1])}, not {wanted}")
    return as_bytes(part.detach())
