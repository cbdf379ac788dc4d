"""cuquant's functions of torch's tensors, by operators that torch knows (`interop.by_operator`).

`cuquant.linear` and the other products call the function of the same name here, with the same
arguments, where a tensor requires a gradient; torch.compile follows these in place of all.
"""

from typing import Any

import numpy as np
import torch

from cuquant import interop
from cuquant.array.packed_weight import ROWS_LAYOUT, PackedWeight
from cuquant.array.quant_array import QuantArray
from cuquant.formats import Format, get_format
from cuquant.io.state import format_text, parse_format
from cuquant.ops.matmul.check import stored
from cuquant.ops.quantize.door import format_options
from cuquant.torch import codes, llm_int8, op, products, rows
from cuquant.torch.module import QuantLinear
from cuquant.torch.spec import DTYPES, tensor_of

_WHERE = ("out", "stream", "out_scale", "batch_invariant")  # which operators are not told


def linear(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    activation: str | None = None,
    residual: Any = None,
    out_dtype: object = None,
    **where: Any,
) -> torch.Tensor:
    """`cuquant.linear`."""
    if isinstance(w, QuantArray) and w.axes == (1, 0):  # its blocks run along N
        finish = {"bias": bias, "activation": activation, "residual": residual}
        return matmul(x, w.T, out_dtype=out_dtype, **finish, **where)
    x, bias, residual = _checked(where, x=x, bias=bias, residual=residual)
    return op.linear(x, *_weight(w), bias, activation, residual, _dtype(out_dtype))


def matmul(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    residual: Any = None,
    out_dtype: object = None,
    **where: Any,
) -> torch.Tensor:
    """`cuquant.matmul`."""
    on_left = isinstance(a, QuantArray)
    q, x = (a, b) if on_left else (b, a)
    given = {"b" if on_left else "a": x, "bias": bias, "residual": residual}
    x, bias, residual = _checked(where, **given)
    if not isinstance(q, QuantArray):
        raise TypeError(f"b must be a QuantArray, got {type(q).__name__}")
    parts, fmt, _, shape, dtype = _described(q, q.stored_shape)
    factor = parts, fmt, shape, q.axes, dtype, on_left
    return products.matmul(x, *factor, bias, activation, residual, _dtype(out_dtype))


def swiglu(x: Any, w_gate: Any, w_up: Any, **where: Any) -> torch.Tensor:
    """`cuquant.swiglu`."""
    (x,) = _checked(where, x=x)
    return products.swiglu(x, *_weight(w_gate, "w_gate"), *_weight(w_up, "w_up"))


def grouped_linear(
    x: Any, w: Any, experts: Any = None, *, offsets: Any = None, counts: Any = None, **where: Any
) -> torch.Tensor:
    """`cuquant.grouped_linear`."""
    (x,) = _checked(where, x=x)
    by = "experts" if experts is not None else "offsets" if offsets is not None else "counts"
    integers = next(given for given in (experts, offsets, counts) if given is not None)
    if interop.kind(integers) is None:
        integers = np.asarray(integers)
    return products.grouped_linear(x, *_weight(w, "w", 3), by, tensor_of(integers))


def quantize(
    x: torch.Tensor,
    format: Any = "nf4",
    *,
    axis: int = -1,
    nonfinite: str = "propagate",
    block_size: Any = None,
    levels: Any = None,
    double_quant: bool = False,
    **_: Any,
) -> QuantArray:
    """`cuquant.quantize`, of its arguments that are no arrays."""
    fmt = _format(format, block_size, levels, double_quant)
    return _array(x, fmt, axis, codes.quantize(x, _text(fmt), axis, nonfinite))


def _array(x: torch.Tensor, fmt: Format, axis: int, made: list[torch.Tensor]) -> QuantArray:
    """What of x was quantized along an axis, of its components."""
    parts = dict(zip(_component_names(_text(fmt)), made, strict=True))
    order = [i for i in range(x.ndim) if i != axis % x.ndim] + [axis % x.ndim]
    axes = tuple(order.index(i) for i in range(x.ndim))
    return QuantArray(fmt, tuple(x.shape), _numpy_dtype(x.dtype), parts, axes)


def _quantized_rows(
    operation: str,
    x: torch.Tensor,
    other: Any = None,
    weight: Any = None,
    bias: Any = None,
    eps: float = 0.0,
    group: int | None = None,
    *,
    total: torch.Tensor | None = None,
    format: Any = "int8",
    axis: int = -1,
    nonfinite: str = "propagate",
    block_size: Any = None,
    levels: Any = None,
    double_quant: bool = False,
    **_: Any,
) -> QuantArray:
    """A row quantizer of `cuquant.functional`, of its arguments that say no more."""
    fmt = _format(format, block_size, levels, double_quant)
    args = x, operation, other, weight, bias, float(eps), group, _text(fmt), axis, nonfinite
    if total is None:
        return _array(x, fmt, axis, rows.quantize_rows(*args))
    *made, added = rows.with_sum(*args)
    total.copy_(added)
    return _array(x, fmt, axis, made)


def rmsnorm_quantize(x: Any, weight: Any, *, eps: float = 1e-6, **options: Any) -> QuantArray:
    """`cuquant.functional.rmsnorm_quantize`."""
    return _quantized_rows("rmsnorm", x, None, weight, None, eps, **options)


def add_rmsnorm_quantize(
    x: Any,
    residual: Any,
    weight: Any,
    *,
    eps: float = 1e-6,
    residual_out: Any = None,
    **options: Any,
) -> QuantArray:
    """`cuquant.functional.add_rmsnorm_quantize`."""
    total = residual_out
    return _quantized_rows("add_rmsnorm", x, residual, weight, None, eps, total=total, **options)


def layernorm_quantize(
    x: Any, weight: Any, bias: Any = None, *, eps: float = 1e-5, **options: Any
) -> QuantArray:
    """`cuquant.functional.layernorm_quantize`."""
    return _quantized_rows("layernorm", x, None, weight, bias, eps, **options)


def silu_mul_quantize(gate: Any, up: Any, **options: Any) -> QuantArray:
    """`cuquant.functional.silu_mul_quantize`."""
    return _quantized_rows("silu_mul", gate, up, **options)


def gelu_mul_quantize(gate: Any, up: Any, **options: Any) -> QuantArray:
    """`cuquant.functional.gelu_mul_quantize`."""
    return _quantized_rows("gelu_mul", gate, up, **options)


def hadamard_quantize(
    x: Any, *, group: int | None = None, signs: Any = None, **options: Any
) -> QuantArray:
    """`cuquant.functional.hadamard_quantize`."""
    return _quantized_rows("hadamard", x, weight=signs, group=group, **options)


def llm_int8_linear(
    x: torch.Tensor, weight: Any, absmax: Any, bias: Any = None, *, threshold: float = 6.0
) -> torch.Tensor:
    """`cuquant.functional.llm_int8_linear`."""
    x, bias = _checked({}, x=x, bias=bias)
    weight, absmax = (tensor_of(a) if interop.kind(a) == "numpy" else a for a in (weight, absmax))
    interop.refuse_gradient(absmax, "absmax")
    return llm_int8.llm_int8(x, weight, absmax, float(threshold), bias)


def dequantize(q: QuantArray, dtype: Any = None, **_: Any) -> torch.Tensor:
    """`cuquant.dequantize`."""
    parts, fmt, layout, shape, own = _described(q, q.stored_shape)
    values = op.decoded(parts, fmt, layout, shape, own if dtype is None else _dtype(dtype))
    return values if q.axes == tuple(range(q.ndim)) else values.permute(q.axes)


def embedding(ids: torch.Tensor, q: QuantArray, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    """`cuquant.embedding`."""
    parts, fmt, _, shape, own = _described(q, q.stored_shape)
    made = own if dtype is None else _dtype(dtype)
    return codes.embedding(ids, parts, fmt, shape, q.axes, made)


def traced(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch.compile sees in place of a call of cuquant's: what comes of operators.

    None where no operator takes the arguments. The code here is what Dynamo follows.
    """
    takes = _TAKES.get(name, _takes_factors)
    return _FUNCTIONS[name](*args, **kwargs) if takes(name, args, kwargs) else None


def _takes_factors(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = *args, *kwargs.values()
    weights = [w for w in given if isinstance(w, (QuantArray, PackedWeight, QuantLinear))]
    return (
        len(weights) == (2 if name == "swiglu" else 1)
        and not _told(kwargs)
        and any(isinstance(value, torch.Tensor) for value in given)
        and all(isinstance(w, QuantLinear) or w.kind == "torch" for w in weights)
    )


def _takes_values(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    x = args[0] if args else kwargs.get("x")
    words = [*args[1:], *(value for key, value in kwargs.items() if key != "x")]
    return (
        isinstance(x, torch.Tensor)
        and x.dtype in DTYPES.values()
        and all(isinstance(word, (str, int, tuple, Format)) or word is None for word in words)
        and not any(kwargs.get(key) for key in ("stochastic", "seed", "stream"))
    )


def _takes_rows(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    arrays = [*args, *(kwargs[key] for key in kwargs if key in _OF_ROWS)]
    return (
        len(arrays) > 0
        and all(isinstance(a, torch.Tensor) or a is None for a in arrays)
        and all(a is None or a.dtype in DTYPES.values() for a in arrays)
        and not any(value for key, value in kwargs.items() if key not in _TAKEN_BY_ROWS)
    )


def _takes_tensors(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return all(
        isinstance(a, (torch.Tensor, float, int)) or a is None for a in (*args, *kwargs.values())
    )


def _takes_codes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    q = args[0] if args else kwargs.get("q")
    told = kwargs.get("out") is not None or kwargs.get("stream") is not None
    return isinstance(q, QuantArray) and q.kind == "torch" and not told


def _takes_ids(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = dict(zip(("ids", "q"), args, strict=False)) | kwargs
    q = given.get("q")
    is_table = isinstance(q, QuantArray) and q.kind == "torch" and q.ndim == 2
    return is_table and isinstance(given.get("ids"), torch.Tensor) and given.get("out") is None


def _checked(where: dict[str, Any], **arrays: Any) -> list[Any]:
    """Arrays as tensors, those of NumPy on their own memory; the first must be one, for where codes
    are multiplied nothing flows back to what is added to them.

    RuntimeError for what says where or how a result is made, which operators are not told.
    """
    if told := _told(where):
        raise RuntimeError(
            f"a product that gradients flow through takes no {', '.join(told)}=; call it under "
            "torch.no_grad(), or pass x.detach()"
        )
    name, first = next(iter(arrays.items()))
    if not isinstance(first, torch.Tensor):
        for name, value in arrays.items():
            interop.refuse_gradient(value, name)
    return [
        interop.from_numpy(value, "torch") if interop.kind(value) == "numpy" else value
        for value in arrays.values()
    ]


def _told(given: dict[str, Any]) -> list[str]:
    """What of a call's arguments by name says where or how a result is made."""
    return [key for key in _WHERE if given.get(key) is not None and given.get(key) is not False]


@torch.compiler.assume_constant_result
def _dtype(value: Any) -> torch.dtype | None:
    return None if value is None else interop.torch_dtype(interop.float_dtype(value, "out_dtype"))


def _weight(w: Any, name: str = "w", ndim: int = 2) -> tuple[Any, ...]:
    """A weight [N, K] or [E, N, K], or what holds one, as an operator takes it."""
    if isinstance(w, QuantLinear) and ndim == 2:
        return w._parts(), *w._words
    w = stored(w)
    if not isinstance(w, (QuantArray, PackedWeight)):
        raise TypeError(f"{name} must be a QuantArray or PackedWeight, got {type(w).__name__}")
    if len(w.shape) != ndim:
        wanted = "[N, K]" if ndim == 2 else "[E, N, K]"
        raise ValueError(f"{name} has shape {w.shape}; it must be {wanted}")
    if isinstance(w, QuantArray) and w.axes != tuple(range(ndim)):
        raise ValueError(f"{name} must be quantized along its last axis for gradients to flow")
    return _described(w, w.shape)


def _described(w: QuantArray | PackedWeight, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """A weight as an operator takes it: its arrays as tensors, and what they mean."""
    if not interop.is_followed():  # where the kernel does
        w.check()
    own = w.kind == "torch"
    tensors = [part if own else tensor_of(part) for part in w.components.values()]
    parts = [part.contiguous() for part in tensors]
    layout = w.layout if isinstance(w, PackedWeight) else ROWS_LAYOUT
    return parts, _text(w.format), layout, tuple(shape), DTYPES[w.dtype.name]


def _text(fmt: Format) -> str:
    """`format_text`; of what get_format made without a call, to which Dynamo passes no object."""
    return _said(fmt) if fmt.text is None else fmt.text


class _Formats:
    """Formats as attributes: Dynamo takes an object from where it lies, and not from a call."""


_formats = _Formats()


def _format(format: Any, *options: Any) -> Format:
    """`get_format`."""
    said = _text(format) if isinstance(format, Format) else format
    return getattr(_formats, _named(said, *options))


@torch.compiler.assume_constant_result
def _named(format: Any, *options: Any) -> str:
    """The attribute of `_formats` where a Format is, of a name or of `_text`."""
    is_text = isinstance(format, str) and format.startswith("{")
    made = get_format(parse_format(format) if is_text else format, **format_options(*options))
    names = {id(held): name for name, held in vars(_formats).items()}
    name = names.get(id(made), f"format_{len(names)}")
    setattr(_formats, name, made)
    return name


@torch.compiler.assume_constant_result
def _component_names(text: str) -> tuple[str, ...]:
    """Of a format, the same for every shape."""
    return tuple(component.name for component in parse_format(text).components(_ANY_SHAPE))


@torch.compiler.assume_constant_result
def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return interop.numpy_dtype(dtype)


_ANY_SHAPE = (128, 4096)  # that blocks of every format divide
_PRODUCTS = linear, matmul, swiglu, grouped_linear
_ROWS = (
    rmsnorm_quantize,
    add_rmsnorm_quantize,
    layernorm_quantize,
    silu_mul_quantize,
    gelu_mul_quantize,
    hadamard_quantize,
)
_OF_ROWS = {"x", "gate", "up", "residual", "weight", "bias", "signs", "residual_out"}
_WORDS = {"eps", "group", "format", "axis", "nonfinite", "block_size", "levels", "double_quant"}
_TAKEN_BY_ROWS = _OF_ROWS | _WORDS
_FUNCTIONS = {
    f.__name__: f for f in (*_PRODUCTS, *_ROWS, quantize, dequantize, embedding, llm_int8_linear)
}
_TAKES = {  # whether an operator takes what a function is called with
    "quantize": _takes_values,
    "dequantize": _takes_codes,
    "embedding": _takes_ids,
    "llm_int8_linear": _takes_tensors,
    **{f.__name__: _takes_rows for f in _ROWS},
}
_said = torch.compiler.assume_constant_result(format_text)
