"""cuquant: every quantization format people use, one NumPy-style API.

>>> import numpy as np, cuquant as cq
>>> w = np.random.default_rng(0).standard_normal((128, 256), dtype=np.float32)
>>> q = cq.quantize(w, "nf4")
>>> q.dequantize().shape
(128, 256)
"""
from cuquant.array import QuantArray, concatenate
from cuquant.errors import BackendUnavailable, CompileError, FormatError
from cuquant.formats import Format, get_format, list_formats
from cuquant.ops.dequantize import dequantize
from cuquant.ops.quantize import quantize
