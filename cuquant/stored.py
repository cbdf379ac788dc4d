"""What a QuantArray and a PackedWeight share: a few component arrays that stand for one array."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from cuquant import interop
from cuquant.formats import Format
from cuquant.formats.format import Component

# Methods that are shorthands for operations of the layers above; those register themselves here,
# so that imports go one way.
OPERATIONS: dict[str, Callable[..., Any]] = {}

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
