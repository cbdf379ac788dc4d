"""What a QuantArray and a PackedWeight share: a few component arrays that stand for one array."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from cuquant import interop
from cuquant.array.arranged import check_permutation
from cuquant.errors import FormatError
from cuquant.formats import Format
from cuquant.formats.format import Component

if TYPE_CHECKING:
    import torch

# For type checkers: an array comes out of the library that it came in from. CuPy has no types.
ArrayT = TypeVar("ArrayT", np.ndarray, "torch.Tensor")

# Methods that are shorthands for operations of the layers above; those register themselves here,
# so that imports go one way.
OPERATIONS: dict[str, Callable[..., Any]] = {}

# The operations, and their arguments, that functions of torch's stand for, by name.
_TORCH_CALLS = {
    "linear": ("linear", {"input": "x", "weight": "w"}),
    "matmul": ("matmul", {"input": "a", "other": "b"}),
    "__matmul__": ("matmul", {}),
    "mm": ("matmul", {"input": "a", "mat2": "b"}),
}


def torch_call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """What a function of torch's gives for arguments of which some are quantized.

    A float tensor takes the values, as nn.Module.load_state_dict has it. TypeError for functions
    that know nothing of quantized arrays.
    """
    name = getattr(func, "__name__", "")
    if name == "copy_" and isinstance(args[1], Stored) and not isinstance(args[0], Stored):
        stored: Any = args[1]
        values = stored.dequantize()
        tensor = interop.from_numpy(values, "torch") if stored.kind == "numpy" else values
        return args[0].copy_(tensor, *args[2:], **(kwargs or {}))
    if name == "__rmatmul__":  # torch hands over (tensor, other) for other @ tensor
        return OPERATIONS["matmul"](args[1], args[0])
    if name in ("matmul", "__matmul__") and interop.is_operator_of_dynamo(func):
        return _either_way(*args)
    if name not in _TORCH_CALLS:
        raise TypeError(
            f"torch's {name} does not take a quantized array; call it with q.dequantize()'s "
            "values, or compare with cuquant.array_equal"
        )
    operation, names = _TORCH_CALLS[name]
    given = {names.get(key, key): value for key, value in (kwargs or {}).items()}
    return OPERATIONS[operation](*args, **given)


def _either_way(tensor: Any, other: Any) -> Any:
    """tensor @ other, or other @ tensor: torch.compile hands both over alike, and shapes tell.

    Where they do not, the graph ends before the operator, and Python calls the right one.
    """
    forward, back = _fit(tensor.shape, other.shape), _fit(other.shape, tensor.shape)
    if forward and back:
        return _unknown(tensor, other)
    return OPERATIONS["matmul"](other, tensor) if back else OPERATIONS["matmul"](tensor, other)


def _fit(a: Sequence[int], b: Sequence[int]) -> bool:
    return len(a) > 0 and len(b) > 0 and a[-1] == b[-2 if len(b) > 1 else 0]


@interop.untraced
def _unknown(tensor: Any, other: Any) -> Any:
    raise TypeError("torch.compile does not say which factor is on the left; call cuquant.matmul")


def array_equal(a: "Stored[Any]", b: "Stored[Any]") -> bool:
    """Whether two quantized arrays have the same format, shape and bytes; waits for a GPU.

    Parameters
    ----------
    a, b
        QuantArrays or PackedWeights, of any library and device. One of each are not equal, and a
        NaN equals the same NaN. What `dequantize` returns by default is not compared.

    Raises
    ------
    TypeError
        For anything else.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> x = np.ones((2, 64), np.float32)
    >>> q = cq.quantize(x)
    >>> cq.array_equal(q, cq.quantize(x)), cq.array_equal(q, cq.quantize(-x))
    (True, False)
    """
    for value in (a, b):
        if not isinstance(value, Stored):
            raise TypeError(
                f"array_equal compares QuantArrays and PackedWeights, got {type(value).__name__}; "
                "np.array_equal(x, q.dequantize()) compares values"
            )
    if type(a) is not type(b) or a.components.keys() != b.components.keys():
        return False
    for name in vars(a).keys() - {"components", "dtype"}:  # format, shape, axes or layout
        if getattr(a, name) != getattr(b, name):
            return False
    return all(_same_bytes(part, b.components[name]) for name, part in a.components.items())


def _same_bytes(a: Any, b: Any) -> bool:
    left, right = interop.to_host(a), interop.to_host(b)
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and (left is right or left.tobytes() == right.tobytes())
    )


class _Ufuncs:
    """NumPy's protocol, which it looks up in the type: np.matmul, and no other function.

    CuPy looks it up in the instance, where None says that `cupy_array @ q` is for `q` to compute.
    """

    def __get__(self, instance: object, owner: type) -> Any:
        return _ufunc if instance is None else None


def _ufunc(self: "Stored[Any]", ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
    """np.matmul(a, b, out=, dtype=) as `matmul`; TypeError for the others."""
    if ufunc.__name__ != "matmul" or method != "__call__":
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        hint = "; cuquant.array_equal(a, b) compares" if "equal" in name else ""
        raise TypeError(
            f"np.{name} does not take a {type(self).__name__}; call it with q.dequantize()'s "
            f"values{hint}"
        )
    out, dtype = options.pop("out", (None,))[0], options.pop("dtype", None)
    if options:
        raise TypeError(f"np.matmul with a quantized array takes no {', '.join(options)}=")
    for value in inputs:
        if isinstance(value, Stored):
            value._check_matmul()
    return OPERATIONS["matmul"](*inputs, out=out, out_dtype=dtype)


class _Parts(dict[str, Any]):
    """Components by name, with the read-only views of NumPy's that are handed out."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        super().__init__(parts)
        self._views: dict[str, tuple[Any, Any]] = {}  # the component, and its view

    def view(self, name: str) -> Any:
        part = self[name]
        kept = self._views.get(name)
        if kept is None or kept[0] is not part:
            kept = self._views[name] = part, interop.read_only(part)
        return kept[1]

    def __reduce__(self) -> Any:
        return type(self), (dict(self),)


S = TypeVar("S", bound="Stored[Any]")


class Stored(Generic[ArrayT]):
    """Base of the frozen dataclasses that hold quantized data; they say which arrays they store."""

    format: Format
    shape: tuple[int, ...]
    dtype: np.dtype
    components: Mapping[str, Any]

    __array_ufunc__ = _Ufuncs()

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """np.array_equal and array_equiv, which answer False where an array is refused, refuse.

        All other functions of NumPy's do what they do with objects that are no arrays.
        """
        if func.__name__ in ("array_equal", "array_equiv"):
            raise TypeError(
                f"np.{func.__name__} does not take a {type(self).__name__}; cuquant.array_equal(a, "
                "b) compares format and bytes, q.dequantize() gives values"
            )
        return func._implementation(*args, **kwargs)

    def __post_init__(self) -> None:
        if not interop.is_followed():  # a graph hands out a plain dict
            object.__setattr__(self, "components", self._parts)

    def _wanted(self) -> tuple[Component, ...]:
        """What is stored: names, dtypes and shapes of the components."""
        raise NotImplementedError

    def _check_matmul(self) -> None:
        """TypeError where `a @ self` is not defined."""

    def check(self) -> None:
        """FormatError unless the components have the names, dtypes and shapes that they must.

        A permutation on the CPU must name each column once.
        """
        wanted = self._wanted()
        found = {
            name: (interop.dtype_of(part), tuple(part.shape)) if interop.kind(part) else type(part)
            for name, part in self.components.items()
        }
        if found != {part.name: (part.dtype, part.shape) for part in wanted}:
            said = f"{type(self).__name__} of {self.format} {self.shape}"
            raise FormatError(f"a {said} holds {found}; it must hold {list(wanted)}")
        if self.format.permuted:
            check_permutation(self.components)

    @property
    def ndim(self) -> int:
        """Axes of the array it stands for."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all components."""
        return sum(part.nbytes for part in self._wanted())

    @property
    def kind(self) -> str:
        """ "numpy", "cupy" or "torch": the library of the components."""
        return interop.kind(next(iter(self.components.values()))) or "numpy"

    @property
    def device(self) -> str:
        """ "cpu", "cuda:0", ..."""
        return interop.device(next(iter(self.components.values())))

    def __eq__(self, other: object) -> bool:
        if self is other:  # what dicts and weak references ask
            return True
        if isinstance(other, Stored) or interop.kind(other):
            raise TypeError(
                f"== of a {type(self).__name__} is not defined; cuquant.array_equal(a, b) compares "
                "format and bytes, q.dequantize() gives values"
            )
        return NotImplemented

    __hash__ = object.__hash__

    def __len__(self) -> int:
        return self.shape[0]

    def arrays(self) -> dict[str, Any]:
        """The component arrays by name: what is stored, not copies, read-only where NumPy's."""
        return {name: self._view(name) for name in self.components}

    def _view(self, name: str) -> Any:
        """A component, as it is handed out."""
        return self._parts.view(name)

    @property
    def _parts(self) -> _Parts:
        if type(self.components) is not _Parts:  # unpickled, or out of a graph
            object.__setattr__(self, "components", _Parts(self.components))
        return self.components  # type: ignore[return-value]

    def copy(self: S) -> S:
        """The same in memory of its own."""
        parts = {name: interop.copied(part) for name, part in self.components.items()}
        return self._with(components=parts)

    def to(self: S, device: object) -> S:
        """The same on "cpu", "cuda" or "cuda:N": NumPy becomes CuPy and back.

        Raises
        ------
        BackendUnavailable
            Where there is no GPU or no CuPy.
        """
        name = interop.device_name(device)
        parts = {key: interop.to_device(part, name) for key, part in self.components.items()}
        return self._with(components=parts)

    def numpy(self: S) -> S:
        """The same with NumPy components (torch's memory is shared)."""
        return self._with(components=self.to("cpu")._host)

    def save(self, path: Any) -> None:
        """Write a safetensors file that `cuquant.load` reads back as {"array": ...}."""
        OPERATIONS["save"](path, {"array": self})

    @property
    def _host(self) -> dict[str, np.ndarray]:
        """NumPy views of the components, made anew: a copy must not keep old ones."""
        return {name: interop.to_numpy(part, name) for name, part in self.components.items()}

    def _with(self: S, **changes: Any) -> S:
        # Dynamo follows this, and not a look into __dict__.
        kind: Any = type(self)
        own = {name: getattr(self, name) for name in kind.__dataclass_fields__}
        return kind(**{**own, **changes})

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: torch cannot read back the uint32 tensors that it writes, so as int32."""
        parts = {name: interop.to_pickle(part) for name, part in self.components.items()}
        return {**self.__dict__, "components": parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        dtypes = {part.name: part.dtype for part in self._wanted()}
        parts = {n: interop.from_pickle(p, dtypes[n]) for n, p in self.components.items()}
        self.__dict__["components"] = parts
