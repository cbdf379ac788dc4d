"""cuquant: every quantization format people use, one NumPy-style API.

NumPy arrays and CPU tensors are computed on the CPU; CuPy arrays and CUDA tensors are quantized,
decoded and multiplied on their GPU, by kernels that compile themselves.

>>> import numpy as np, cuquant as cq
>>> w = np.random.default_rng(0).standard_normal((128, 256), dtype=np.float32)
>>> q = cq.quantize(w, "nf4")
>>> q.dequantize().shape
(128, 256)
"""

from typing import TYPE_CHECKING, Any

from cuquant import functional
from cuquant.ahead import precompile
from cuquant.array.components import array_equal
from cuquant.array.metrics import Error, error
from cuquant.array.packed_weight import PackedWeight, prepack, unpack
from cuquant.array.quant_array import QuantArray, concatenate
from cuquant.array.raw_blocks import RawBlocks
from cuquant.diagnosis import doctor
from cuquant.errors import BackendUnavailable, CompileError, FormatError
from cuquant.formats import Format, get_format, list_formats
from cuquant.interop import OPERATORS as _OPERATORS
from cuquant.io.comparison import compare
from cuquant.io.conversion.door import convert
from cuquant.io.files import load, open
from cuquant.io.quantized import save
from cuquant.ops.dequantize.door import dequantize
from cuquant.ops.dequantize.gathered import embedding
from cuquant.ops.explanation import Explanation, explain
from cuquant.ops.layout import on_gpu as _prepack  # noqa: F401  (what `prepack` does on a GPU)
from cuquant.ops.matmul.door import linear, matmul, swiglu
from cuquant.ops.matmul.grouped import grouped_linear
from cuquant.ops.quantize.door import quantize

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "CompileError",
    "Error",
    "Explanation",
    "Format",
    "FormatError",
    "PackedWeight",
    "QuantArray",
    "RawBlocks",
    "array_equal",
    "compare",
    "concatenate",
    "convert",
    "dequantize",
    "doctor",
    "embedding",
    "error",
    "explain",
    "functional",
    "get_format",
    "grouped_linear",
    "linear",
    "list_formats",
    "load",
    "matmul",
    "open",
    "precompile",
    "prepack",
    "quantize",
    "save",
    "swiglu",
    "unpack",
]


def _by_operator(name: str) -> Any:
    """A function of the layer that imports torch, once an operation asks for it."""
    from cuquant.torch import functions

    return getattr(functions, name)


_OPERATORS.append(_by_operator)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


if not TYPE_CHECKING:  # a type checker would take every name for known

    def __getattr__(name: str) -> object:
        if name == "torch":
            text = "cuquant.torch is imported by its own name: import cuquant.torch"
        else:
            text = f"module 'cuquant' has no attribute {name!r}"
        import sys

        raise AttributeError(text, name=name, obj=sys.modules[__name__])
