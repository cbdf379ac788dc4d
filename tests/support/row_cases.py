"""Calls of the fused row quantizers, the same for NumPy, the emulator and a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from kernel_arrays import LAYOUTS, nasty, normal, placed
from oracle import DTYPES

import cuquant as cq
import cuquant.functional as F

F32 = np.float32
OPERATIONS = ("rmsnorm", "add_rmsnorm", "layernorm", "silu_mul", "gelu_mul", "hadamard", "signed")
FORMATS = {
    "int8": {"block_size": "row"},
    "int8 128": {"block_size": 128},
    "int8 clamped": {"nonfinite": "clamp"},
    "int8 static": {"block_size": "tensor", "scale": 0.05},
    "int8 static rows": {"block_size": "row", "scale": 0.05},
    "fp8_e4m3": {"block_size": "row"},
    "fp8_e4m3 128": {"block_size": 128},
    "fp8_e4m3 static": {"block_size": "tensor", "scale": 0.05},
    "fp8_e4m3 clamped": {"block_size": "tensor", "scale": 0.05, "nonfinite": "clamp"},
    "fp8_e4m3 tensor": {"block_size": "tensor"},
    "fp8_e5m2": {"block_size": 64},
    "mxfp8": {},
    "mxfp4": {},
    "nvfp4": {"global_scale": 0.01},
    "nvfp4 dynamic": {},
    "int4": {"block_size": "row"},
    "int4 32": {"block_size": 32},
    "uint8": {"block_size": "row"},
    "uint4": {"block_size": 16},
    "nf4": {},
    "k3": {},
    "nf4 double": {"double_quant": True},
    "q8_0": {},
    "int8 stochastic": {"stochastic": True, "seed": 7},
}


def sizes(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Rows of all sizes, of which some leave float32's squares; one of zeros, one not finite."""
    x = normal(shape, dtype).astype(F32).reshape(-1, shape[-1])
    factors = F32([1, 1e20, 1e-25, 0, 1e30, 1e-38, 3e38, 1e-3])
    with np.errstate(over="ignore"):
        x *= np.resize(factors, len(x))[:, None]
        return x.astype(dtype).reshape(shape)


def level(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Rows of one number each, of all sizes, and rows of like numbers far from 0."""
    levels = F32([1 / 3, 123.456, -1e-40, 3e38, -3e38, 1e9, 2e37, 0, 1e-20])
    x = normal(shape, np.dtype(F32)).reshape(-1, shape[-1])
    x[::2] = np.resize(levels, len(x[::2]))[:, None]
    x[1::2] += np.resize(F32([1e3, -1e6, 1e7]), len(x[1::2]))[:, None]
    with np.errstate(over="ignore"):
        return x.astype(dtype).reshape(shape)


def ends(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Rows of the largest numbers of both signs, and what is not finite as the first element."""
    most = F32(min(3e38, float(ml_dtypes.finfo(dtype).max)))
    x = np.where(normal(shape, np.dtype(F32)) < 0, -most, most).reshape(-1, shape[-1])
    x[1::4, :16], x[1::4, 16:] = most, -most
    x[2::4, 0], x[2::4, 1:] = -most, most
    x[3::4] = normal((len(x[3::4]), shape[-1]), np.dtype(F32))
    x[3::8, 0], x[7::8, 0] = np.nan, -np.inf
    return x.astype(dtype).reshape(shape)


DATA: dict[str, Callable[..., np.ndarray]] = {
    "normal": normal, "nasty": nasty, "sizes": sizes, "level": level, "ends": ends
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One call: arrays of `data` that lie as `layout` says."""

    operation: str
    format: str = "int8"
    dtype: str = "bfloat16"
    shape: tuple[int, ...] = (5, 512)
    data: str = "normal"
    layout: str = "whole"
    group: int = 128

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        parts = (self.operation, self.format, self.dtype, shape, self.data, self.layout)
        return " ".join((*parts, str(self.group))).replace(" ", "-")

    def __call__(self, to: Callable[[Any], Any]) -> tuple[cq.QuantArray, Any]:
        """The QuantArray, and x + residual where there is one; `to` moves arrays to a library."""
        dtype, where = DTYPES[self.dtype], LAYOUTS[self.layout]
        values = DATA[self.data](self.shape, dtype), normal((*self.shape[::-1], 1), dtype)
        values = values[0], values[1].reshape(self.shape)
        x, other = (where.view(to(placed(v, self.layout)), self.shape) for v in values)
        columns = self.shape[-1]
        weight, bias = (to(normal((columns + n,), dtype)[:columns]) for n in (1, 2))
        how = {"format": self.format.split()[0], **FORMATS[self.format]}
        match self.operation:
            case "rmsnorm":
                return F.rmsnorm_quantize(x, weight, **how), None
            case "layernorm":
                return F.layernorm_quantize(x, weight, bias, **how), None
            case "add_rmsnorm":
                total = where.view(to(placed(values[0], self.layout)), self.shape)
                made = F.add_rmsnorm_quantize(x, other, weight, residual_out=total, **how)
                return made, total
            case "silu_mul":
                return F.silu_mul_quantize(x, other, **how), None
            case "gelu_mul":
                return F.gelu_mul_quantize(x, other, **how), None
        signs = to(np.where(normal(self.shape[-1:], np.dtype(F32)) > 0, F32(1), F32(-1)))
        given = signs if self.operation == "signed" else None
        return F.hadamard_quantize(x, group=self.group, signs=given, **how), None


DTYPE_OF = dict(zip(FORMATS, list(DTYPES) * len(FORMATS), strict=False))
MATRIX = [
    Case(operation, format, DTYPE_OF[format], data=("normal", "nasty")[i % 2])
    for i, operation in enumerate(OPERATIONS)
    for format in FORMATS
]
BY_DTYPE = [
    Case(operation, format, dtype, data="nasty")
    for operation in OPERATIONS
    for format in ("int8", "fp8_e4m3 128", "nvfp4")
    for dtype in DTYPES
]
COLUMNS = [
    Case(operation, "int8", dtype, (3, columns))
    for operation in ("rmsnorm", "layernorm", "gelu_mul")
    for columns in (1, 16, 20, 48, 128, 640, 1024, 2048, 4096, 5120, 8192, 16400, 40000)
    for dtype in ("bfloat16",)
] + [
    *(Case("add_rmsnorm", "fp8_e4m3 128", "float32", (3, k)) for k in (128, 1024, 4096, 8192)),
    *(Case("silu_mul", "mxfp4", "float16", (rows, 96)) for rows in (1, 7, 130)),
    *(Case("silu_mul", "int8 128", "bfloat16", (2, k)) for k in (128, 40064)),
    *(
        Case(op, "int8", dt, (2, k))
        for op, dt, k in (
            ("silu_mul", "bfloat16", 28672),
            ("add_rmsnorm", "float16", 28672),
            ("silu_mul", "float32", 16384),
            ("layernorm", "float32", 10240),
        )
    ),
]
GROUPS = [
    Case(operation, format, dtype, (3, 2048), data, group=group)
    for operation in ("hadamard", "signed")
    for group in (1, 2, 16, 32, 256, 512, 1024, 2048)
    for format, dtype, data in (("int8", "float16", "nasty"), ("mxfp8", "bfloat16", "sizes"))
]
SIZES = [
    Case(operation, "fp8_e4m3", dtype, (9, columns), "sizes")
    for operation in OPERATIONS
    for dtype, columns in (
        ("float32", 256),
        ("bfloat16", 4096),
        ("bfloat16", 1000),
        ("float32", 128),
    )
    if columns % 128 == 0 or not operation.startswith(("hadamard", "signed"))
]
LEVEL = [
    Case("layernorm", "int8", dtype, (20, columns), data)
    for columns in (1, 17, 256, 1000, 4096)
    for data in ("level", "ends")
    for dtype in ("float32", "bfloat16")
] + [
    Case(operation, "int8 128", dtype, (9, 256), data)
    for operation in ("layernorm", "rmsnorm")
    for data in ("level", "ends")
    for dtype in ("float32", "float16")
]
PLACED = [
    Case(operation, format, "bfloat16", (6, 256), layout=layout)
    for operation, format in (("add_rmsnorm", "int8"), ("silu_mul", "mxfp8"), ("signed", "nf4"))
    for layout in LAYOUTS
    if not layout.startswith(("repeated", "reversed", "upside"))  # torch has no such strides
]
BATCHED = [Case(operation, "int8", "float16", (2, 3, 4, 256)) for operation in OPERATIONS]
EMPTY = [Case(op, "int8", shape=shape) for op in OPERATIONS[:5] for shape in ((0, 64), (3, 0))]
ALL = list(
    dict.fromkeys(
        [*MATRIX, *BY_DTYPE, *COLUMNS, *GROUPS, *SIZES, *LEVEL, *PLACED, *BATCHED, *EMPTY]
    )
)
