"""`cuquant::linear`: a linear layer with a quantized weight, as an operator that torch knows.

    torch.ops.cuquant.linear(x, components, format, layout, shape, dtype,
                             bias=None, activation=None, residual=None, out_dtype=None)
    torch.ops.cuquant.dequantize(components, format, layout, shape, dtype)

are `cuquant.linear` of the weight that `components` hold, which the four arguments behind them
describe (`WeightSpec`), and its values. They are registered once, when this module is imported, for
CPU and CUDA tensors and, as a calculation of the result's shape, for fake and meta ones:
torch.compile, export and CUDA graphs see one operator and do not look inside. They have no
gradient.

`multiply` is what layers call: the same product, without torch's dispatcher where nobody watches
it. From Python through the dispatcher and back takes the host longer than the product itself.
"""

import inspect
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from cuquant import interop
from cuquant.array.packed_weight import PackedWeight, unpack
from cuquant.ops.dequantize.door import dequantize
from cuquant.ops.matmul.door import linear
from cuquant.torch.spec import Weight, WeightSpec

_C: Any = torch._C
_product = inspect.unwrap(linear)  # torch.compile does not look into the operator anyway
_decode, _rows = inspect.unwrap(dequantize), inspect.unwrap(unpack)
_DEQUANTIZE = (
    "dequantize(Tensor[] components, str format, str layout, int[] shape, ScalarType dtype) "
    "-> Tensor"
)
_SCHEMA = (
    "linear(Tensor x, Tensor[] components, str format, str layout, int[] shape, ScalarType dtype, "
    "Tensor? bias=None, str? activation=None, Tensor? residual=None, ScalarType? out_dtype=None) "
    "-> Tensor"
)


class _Kept(NamedTuple):
    """A weight made before, and what it was made of."""

    said: tuple[object, ...]
    parts: tuple[tuple[weakref.ref[torch.Tensor], int], ...]  # each with its address
    weight: Weight

    def is_of(self, said: tuple[object, ...], components: Sequence[torch.Tensor]) -> bool:
        if self.said != said or len(self.parts) != len(components):
            return False
        for (ref, address), part in zip(self.parts, components, strict=True):
            if ref() is not part or part.data_ptr() != address:  # `part.data = ...` moves it
                return False
        return True


# By the id of the first component. The weights hold aliases of the components, so that these die
# as if nothing were kept here, and take their entry with them.
_kept: dict[int, _Kept] = {}


def weight_of(
    components: Sequence[torch.Tensor],
    format: str,
    layout: str,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Weight:
    """The QuantArray or PackedWeight of these tensors; the same object as long as they live, unless
    one must be copied, because it starts where its elements cannot: the copy would not see changes.

    Raises
    ------
    ValueError
        Where the tensors are not what the words describe.
    """
    said = (format, layout, tuple(shape), dtype)
    found = _kept.get(id(components[0])) if components else None
    if found is not None and found.is_of(said, components):
        return found.weight
    if len(shape) != 2:
        raise ValueError(f"shape must be [N, K], got {list(shape)}")
    weight = WeightSpec(format, layout, (shape[0], shape[1]), dtype).weight(components)
    key = id(components[0])
    mine = zip(weight.components.values(), components, strict=True)
    if any(alias.data_ptr() != part.data_ptr() for alias, part in mine):
        _kept.pop(key, None)
        return weight

    def forget(_: object) -> None:
        _kept.pop(key, None)

    parts = tuple((weakref.ref(part, forget), part.data_ptr()) for part in components)
    _kept[key] = _Kept(said, parts, weight)
    return weight


def _linear(
    x: torch.Tensor,
    components: list[torch.Tensor],
    format: str,
    layout: str,
    shape: list[int],
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    weight = weight_of(components, format, layout, shape, dtype)
    return _product(x, weight, bias, activation=activation, residual=residual, out_dtype=out_dtype)


def multiply(
    x: torch.Tensor,
    components: list[torch.Tensor],
    words: tuple[str, str, tuple[int, int], torch.dtype],
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """The operator's result, by the shortest way; `words` are its arguments behind components."""
    if is_watched(x) or components[0].is_meta:
        return LINEAR(x, components, *words, bias, activation)
    return _product(x, weight_of(components, *words), bias, activation=activation)


def is_watched(x: torch.Tensor) -> bool:
    """Whether someone must see the operator that is called: a subclass of Tensor, torch.compile or
    another tracer, a mode, a transform such as vmap, the profiler, or who only asks for a shape."""
    return (
        type(x) is not torch.Tensor
        or x.is_meta
        or torch.compiler.is_compiling()
        or _C._len_torch_dispatch_stack() > 0
        or _C._len_torch_function_stack() > 0
        or _C._functorch.peek_interpreter_stack() is not None
        or _C._get_tracing_state() is not None
        or _C._autograd._profiler_enabled()
    )


def _fake_linear(
    x: torch.Tensor,
    components: list[torch.Tensor],
    format: str,
    layout: str,
    shape: list[int],
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    parts = [(f"components[{i}]", part) for i, part in enumerate(components)]
    for name, tensor in (*parts, ("bias", bias), ("residual", residual)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, and x on {x.device}; move one there")
    width, depth = shape
    if x.ndim == 0 or x.shape[-1] != depth:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; with w {(width, depth)} its last axis must be {depth}"
        )
    return x.new_empty((*x.shape[:-1], width), dtype=out_dtype or x.dtype)


def _dequantize(
    components: list[torch.Tensor], format: str, layout: str, shape: list[int], dtype: torch.dtype
) -> torch.Tensor:
    weight = weight_of(components, format, layout, shape, dtype)
    return _decode(_rows(weight) if isinstance(weight, PackedWeight) else weight)


def _fake_dequantize(
    components: list[torch.Tensor], format: str, layout: str, shape: list[int], dtype: torch.dtype
) -> torch.Tensor:
    return components[0].new_empty(shape, dtype=dtype)


def _checked_linear(*args: Any, **named: Any) -> torch.Tensor:
    """Where autograd looks at a call: once it is known that nobody expects a gradient, go on."""
    for name, value in (*zip(_NAMES, args, strict=False), *named.items()):
        if isinstance(value, torch.Tensor):
            interop.refuse_gradient(value, name)
    with torch._C._AutoDispatchBelowAutograd():
        return LINEAR(*args, **named)


_library = torch.library.Library("cuquant", "FRAGMENT")
_library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("linear", _linear, "CPU")
_library.impl("linear", _linear, "CUDA")
_library.impl("linear", _checked_linear, "Autograd")
torch.library.register_fake("cuquant::linear", _fake_linear, lib=_library)
_library.define(_DEQUANTIZE, tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("dequantize", _dequantize, "CPU")
_library.impl("dequantize", _dequantize, "CUDA")
torch.library.register_fake("cuquant::dequantize", _fake_dequantize, lib=_library)

LINEAR = torch.ops.cuquant.linear.default
DEQUANTIZE = torch.ops.cuquant.dequantize.default
_NAMES = [argument.name for argument in LINEAR._schema.arguments]
