"""Where kernels run: the few things that launching needs of an array library."""

from typing import Any, Protocol

import numpy as np

from cuquant.jit import Launch


class Backend(Protocol):
    """An array library on one device and one stream; tests run the same kernels on the CPU."""

    multiprocessors: int

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """A C-contiguous array on 256 bytes, uninitialised."""
        ...

    def pointer(self, array: Any) -> int:
        """The address of an array's first element."""
        ...

    def upload(self, array: np.ndarray) -> Any:
        """A constant NumPy array on the device; kept, so that the same table travels once."""
        ...

    def launch(self, launch: Launch, *arguments: int | float | bytes) -> None:
        """Start a kernel.

        An int is a pointer or an integer parameter, a float a float32 one, and bytes are a struct
        passed by value.
        """
        ...
