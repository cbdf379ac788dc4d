"""What every operation means, in NumPy: the oracle of the kernels, and the CPU backend."""

from cuquant.reference.activations import ACTIVATIONS, erf, gelu, relu, silu
from cuquant.reference.decode import Blocks, codes, dequantize, effective, nested_scales
from cuquant.reference.encode import NONFINITE, Calibration, quantize
from cuquant.reference.memory import aligned, empty, holds
from cuquant.reference.philox import philox

__all__ = [
    "ACTIVATIONS",
    "NONFINITE",
    "Blocks",
    "Calibration",
    "aligned",
    "codes",
    "dequantize",
    "effective",
    "empty",
    "erf",
    "gelu",
    "holds",
    "nested_scales",
    "philox",
    "quantize",
    "relu",
    "silu",
]
