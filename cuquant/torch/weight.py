"""The `weight` of a quantized module: a tensor whose values are decoded where they are read."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from cuquant.torch.holder import Holder
    from cuquant.torch.spec import Weight, WeightSpec

_T: Any = torch.Tensor
# Ways to a tensor's memory that go past torch's operators: they get the decoded values.
_READERS = ("__array__", "__deepcopy__", "__dlpack__", "__reduce_ex__", "item", "numpy", "tolist")
_READERS = frozenset(getattr(_T, name) for name in _READERS)
_GRADIENT = (_T.requires_grad_, _T.requires_grad.__set__)
_NO_MEMORY = (_T.data_ptr, _T.untyped_storage, _T.storage)
_IN_PLACE = (
    "{} would change a quantized weight in place; assign new values to layer.weight or "
    "layer.weight.data, which quantizes them"
)


class QuantWeight(torch.Tensor):
    """The weight of a quantized module, as code that expects one of torch's own sees it.

    Shape, dtype and device cost nothing. Whatever reads values decodes all of them to a new tensor,
    and torch.nn.functional.linear and embedding take the quantized weight, as the layer does.
    Setting `.data` quantizes new values into the layer, in its format, and so does changing what it
    gave in place, though not by a view that is left alone. Nothing changes the weight itself in
    place: operations that would are errors, and those on what else was read change only that.
    """

    _layer: "Holder"
    _held: "tuple[WeightSpec, list[Any]]"
    _is_hf_initialized = True  # transformers asks it before it draws weights that no file holds

    @staticmethod
    def __new__(cls, layer: "Holder") -> "QuantWeight":
        spec, device = layer._spec, layer._parts()[0].device
        made = _T._make_wrapper_subclass(cls, layer._shape(), dtype=spec.dtype, device=device)
        made._layer, made._held = layer, (spec, layer._parts())
        return made

    def __init__(self, layer: "Holder") -> None:
        """All is done in __new__, as torch wants it."""

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The decoded values, a new tensor; setting or changing it quantizes what is set."""
        return _lent(self._layer)

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self._layer._fill(values)

    @property
    def quantized(self) -> "Weight":
        """The QuantArray or PackedWeight."""
        return self._layer.quantized

    def dequantize(self) -> torch.Tensor:
        """The decoded values, a new tensor."""
        return self._layer._decoded()

    def __repr__(self, **_: Any) -> str:
        return (
            f"QuantWeight({self._layer.format}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device={self.device})"
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Products take the layer's way; all else goes on to torch, which reads what it needs."""
        given: Mapping[str, Any] = kwargs or {}
        if func in _PRODUCTS:
            return _PRODUCTS[func](*args, **given)
        if func in _READERS:
            args = (args[0].dequantize(), *args[1:])
        elif func in _GRADIENT and (*args, *given.values(), True)[1]:
            raise RuntimeError("a quantized weight has no gradient; train what is beside it")
        elif func is _T.__setitem__:
            raise RuntimeError(_IN_PLACE.format("item assignment"))
        elif func in _NO_MEMORY:
            raise RuntimeError(
                f"a quantized weight has no memory that {func.__name__} could name; "
                "layer.weight.detach() is a tensor of its values, layer.quantized what is stored"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **given)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """An operator, with decoded values in place of the weights."""
        given = kwargs or {}
        for at, argument in enumerate(func._schema.arguments):
            value = args[at] if at < len(args) else given.get(argument.name)
            if isinstance(value, cls) and _is_written(argument):
                raise RuntimeError(_IN_PLACE.format(func.name()))
        args, given = tree_map_only(cls, cls.dequantize, (tuple(args), given))
        return func(*args, **given)


# ---- values that others change -------------------------------------------------------------------


@dataclass
class Loan:
    """Values that `weight.data` gave away, as long as somebody has them.

    They are a plain tensor, for others make parameters of them. So a layer looks whether they have
    changed when it is used, and once nobody has them any more.

    Attributes
    ----------
    values
        On the memory that was given away; torch counts changes of both as one.
    version
        The count that the layer knows of.
    """

    values: torch.Tensor
    version: int


def _lent(layer: "Holder") -> torch.Tensor:
    """Decoded values, which are quantized into the layer where they are changed in place."""
    with torch.inference_mode(False):  # whose tensors count no changes
        values = layer._decoded()
    loan = Loan(values.detach(), values._version)
    layer._loans = (*layer._loans, loan)
    weakref.finalize(values, _returned, weakref.ref(layer), loan).atexit = False
    return values


def _returned(of: "weakref.ref[Holder]", loan: Loan) -> None:
    layer = of()
    if layer is not None and any(held is loan for held in layer._loans):
        settle(layer)
        layer._loans = tuple(held for held in layer._loans if held is not loan)


def settle(layer: "Holder") -> None:
    """Quantize what was changed of the values that a layer gave away."""
    loans, layer._loans = layer._loans, ()  # nothing asks for it meanwhile
    for loan in loans:
        if loan.values._version != loan.version:
            loan.version = loan.values._version
            layer._fill(loan.values)
    layer._loans = loans


def _is_written(argument: Any) -> bool:
    """Whether an operator writes to an argument; torch before 2.5 says it of the alias only."""
    return argument.alias_info is not None and argument.alias_info.is_write


def _linear(input: Any, weight: Any, bias: Any = None) -> torch.Tensor:
    """torch.nn.functional.linear where the weight, or another argument, is a QuantWeight."""
    ours = isinstance(weight, QuantWeight) and weight.ndim == 2
    if ours and not any(isinstance(other, QuantWeight) for other in (input, bias)):
        return weight._layer._multiply(input, bias, None)
    decoded = tree_map_only(QuantWeight, QuantWeight.dequantize, (input, weight, bias))
    return torch.nn.functional.linear(*decoded)


def _embedding(input: Any, weight: Any, *rest: Any, **others: Any) -> torch.Tensor:
    """torch.nn.functional.embedding of a table: of the rows that are asked for, where it can."""
    look_up = getattr(weight._layer, "_look_up", None) if type(weight) is QuantWeight else None
    rescales = {**dict(zip(("padding_idx", "max_norm"), rest, strict=False)), **others}
    if look_up is not None and not isinstance(input, QuantWeight) and not rescales.get("max_norm"):
        return look_up(input)
    decoded = tree_map_only(QuantWeight, QuantWeight.dequantize, (input, weight))
    return torch.nn.functional.embedding(*decoded, *rest, **others)


_PRODUCTS = {torch.nn.functional.linear: _linear, torch.nn.functional.embedding: _embedding}
