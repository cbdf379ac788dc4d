"""What happens to a product before it is stored, as kernels are told it."""

import struct
from dataclasses import dataclass
from typing import Any

from cuquant.gpu.backend import Backend
from cuquant.lazy import lazy

# matmul/epilogue.cuh's Type; products of codes have coded_results.cuh's CodedType too.
TYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "int8": 3, "int32": 4}
GATED = 4  # its activation that multiplies by silu(residual)
ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "silu": 3, "gated": GATED}  # its Activation
# Its Epilogue: the addresses of out, bias and residual, then an Epilogue's `constants`.
_STRUCT = struct.Struct("<3Q3q4i")
PACK, UNPACK = _STRUCT.pack, _STRUCT.unpack


@dataclass(frozen=True)
class Epilogue:
    """activation(sum + bias) + residual, stored to `out`: Epilogue of matmul/epilogue.cuh.

    Attributes
    ----------
    out
        Array of the result, whose dtype is named `out_type`; its rows are `out_stride` elements
        apart and its columns `out_column`.
    bias, residual
        [N] contiguous and [M, N] with contiguous rows `residual_stride` elements apart, or None.
    activation
        None, "relu", "gelu", "silu", or "gated": silu(residual) * (sum).
    """

    out: Any
    out_type: str
    out_stride: int
    out_column: int = 1
    bias: Any = None
    bias_type: str = "float32"
    activation: str | None = None
    residual: Any = None
    residual_type: str = "float32"
    residual_stride: int = 0

    @lazy
    def constants(self) -> tuple[int, ...]:
        """All of the struct but its addresses."""
        return (
            self.out_stride,
            self.out_column,
            self.residual_stride,
            TYPES[self.out_type],
            TYPES[self.bias_type],
            TYPES[self.residual_type],
            ACTIVATIONS[self.activation],
        )

    def pack(self, backend: Backend) -> bytes:
        """The struct's 64 bytes."""
        arrays = (self.out, self.bias, self.residual)
        pointers = (0 if array is None else backend.pointer(array) for array in arrays)
        return PACK(*pointers, *self.constants)
