"""What a QuantArray and a PackedWeight share: a few component arrays that stand for one array."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from cuquant import interop
from cuquant.errors import FormatError
from cuquant.formats import Format
from cuquant.formats.format import Component

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

    NotImplemented for those that know nothing of it.
    """
    name = getattr(func, "__name__", "")
    if name == "__rmatmul__":  # torch hands over (tensor, other) for other @ tensor
        return OPERATIONS["matmul"](args[1], args[0])
    if name not in _TORCH_CALLS:
        return NotImplemented
    operation, names = _TORCH_CALLS[name]
    given = {names.get(key, key): value for key, value in (kwargs or {}).items()}
    return OPERATIONS[operation](*args, **given)


S = TypeVar("S", bound="Stored")


class Stored:
    """Base of the frozen dataclasses that hold quantized data; they say which arrays they store."""

    format: Format
    shape: tuple[int, ...]
    dtype: np.dtype
    components: Mapping[str, Any]

    __array_ufunc__ = None  # numpy_array @ q comes to __rmatmul__

    def _wanted(self) -> tuple[Component, ...]:
        """What is stored: names, dtypes and shapes of the components."""
        raise NotImplementedError

    def check(self) -> None:
        """FormatError unless the components have the names, dtypes and shapes that they must."""
        wanted = self._wanted()
        found = {
            name: (interop.dtype_of(part), tuple(part.shape)) if interop.kind(part) else type(part)
            for name, part in self.components.items()
        }
        if found != {part.name: (part.dtype, part.shape) for part in wanted}:
            said = f"{type(self).__name__} of {self.format} {self.shape}"
            raise FormatError(f"a {said} holds {found}; it must hold {list(wanted)}")

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

    def __len__(self) -> int:
        return self.shape[0]

    def arrays(self) -> dict[str, Any]:
        """The component arrays by name; they are what is stored, not copies."""
        return dict(self.components)

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
        return type(self)(**{**self.__dict__, **changes})

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: torch cannot read back the uint32 tensors that it writes, so as int32."""
        parts = {name: interop.to_pickle(part) for name, part in self.components.items()}
        return {**self.__dict__, "components": parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        dtypes = {part.name: part.dtype for part in self._wanted()}
        parts = {n: interop.from_pickle(p, dtypes[n]) for n, p in self.components.items()}
        self.__dict__["components"] = parts
