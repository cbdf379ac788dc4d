"""What `functional` does to plain arrays: codes to words and back, nested scales, products.

Arrays are NumPy's or on a GPU, and the results are where they are.
"""

import math
import struct
from typing import Any

import numpy as np

from cuquant import interop
from cuquant.formats import Packing, get_format
from cuquant.gpu.arrays import backend_of
from cuquant.gpu.jit import Launch, Program
from cuquant.ops import cpp
from cuquant.ops.cpp import scale_arrays
from cuquant.ops.dequantize.decoder import THREADS, decoder
from cuquant.ops.layout.pack import pack_launch

F32 = np.dtype(np.float32)


def pack_codes(codes: Any, packing: Packing, pad: int) -> Any:
    """Words [rows..., words] of uint8 codes [rows..., K]; `pad` fills the last word of a row."""
    *rows, columns = codes.shape
    count, words = math.prod(rows), packing.words(columns)
    if not interop.is_on_gpu(codes):
        flat = np.ascontiguousarray(codes).reshape(count, columns)
        return packing.pack(flat, pad).reshape(*rows, words)
    with backend_of(codes) as backend:
        given = backend.contiguous(codes, -1)
        out = backend.empty((*rows, words), packing.dtype)
        if count * words:
            launch = pack_launch(packing, "pack", count * words)
            pointers = backend.pointer(given), backend.pointer(out)
            backend.launch(launch, *pointers, count, columns, words, pad)
        return out


def unpack_codes(packed: Any, packing: Packing, columns: int) -> Any:
    """uint8 codes [rows..., columns] of words [rows..., words]."""
    *rows, words = packed.shape
    count = math.prod(rows)
    if not interop.is_on_gpu(packed):
        flat = np.ascontiguousarray(packed).reshape(count, words)
        return packing.unpack(flat, columns).reshape(*rows, columns)
    with backend_of(packed) as backend:
        given = backend.contiguous(packed, -1)
        out = backend.empty((*rows, columns), np.dtype(np.uint8))
        if count * columns:
            launch = pack_launch(packing, "unpack", count * columns)
            pointers = backend.pointer(given), backend.pointer(out)
            backend.launch(launch, *pointers, count, columns, words)
        return out


def nested_absmax(codes: Any, absmax: Any, levels: Any, offset: Any) -> Any:
    """float32 [blocks] on a GPU: levels[codes] * absmax[i // 256] + offset, double quantization.

    The kernel is that of an array whose scales are nested, with the given levels for a table.
    """
    fmt = get_format("nf4", double_quant=True)
    with backend_of(codes) as backend:
        given = {"scale": codes, "nested_scale": absmax, "nested_offset": offset.reshape(1)}
        parts = {name: backend.contiguous(part, -1) for name, part in given.items()}
        table = backend.contiguous(levels, -1)
        out = backend.empty(tuple(codes.shape), F32)
        count = math.prod(codes.shape)
        if count:
            facts = decoder(fmt).facts
            program = Program("dequantize/dequantize.cu", "effective", (facts.type,), facts.text)
            arrays = scale_arrays(backend, fmt, parts)
            arrays = arrays[:-8] + struct.pack("<Q", backend.pointer(table))
            launch = Launch(program, (-(-count // THREADS), 1, 1), THREADS)
            backend.launch(launch, arrays, backend.pointer(out), count)
        return out


def scaled(q: Any, factor: Any) -> Any:
    """q * factor in float32, of integers and a float32 array that broadcasts to them."""
    if interop.kind(q) != "cupy":
        return interop.astype(q, F32) * factor
    with backend_of(q) as backend:  # CuPy's own kernels take float32 subnormals for 0
        shape, count = tuple(q.shape), math.prod(q.shape)
        values = backend.broadcast(q, shape, np.dtype(np.int32))
        factors = backend.broadcast(factor, shape, F32)
        out = backend.empty(shape, F32)
        if count:
            program = Program("dequantize/scaled.cu", "scaled", (THREADS,))
            pointers = [backend.pointer(array) for array in (values, factors, out)]
            launch = Launch(program, (-(-count // THREADS), 1, 1), THREADS)
            backend.launch(launch, *pointers, count)
        return out


def quotients(x: Any, scale: Any, zero_point: Any) -> Any:
    """uint8 rint(x / scale) + zero_point, saturated; 0 where 1 / scale is 0 or not finite."""
    if not interop.is_on_gpu(x):
        values = np.asarray(x, F32)
        with np.errstate(all="ignore"):
            inverse = F32.type(1) / scale
            if not (np.isfinite(inverse) and inverse):
                return np.zeros(values.shape, np.uint8)
            q = np.rint(values / scale)
        q += F32.type(zero_point)
        return np.clip(q, 0, 255, out=q).astype(np.uint8)
    with backend_of(x) as backend:
        given, count = backend.contiguous(x, -1), math.prod(x.shape)
        out = backend.empty(tuple(x.shape), np.dtype(np.uint8))
        if count:
            element = cpp.element_of(interop.dtype_of(x))
            program = Program("quantize/quotients.cu", "quotients", (element, THREADS))
            pointers = [backend.pointer(array) for array in (given, scale, zero_point, out)]
            launch = Launch(program, (-(-count // THREADS), 1, 1), THREADS)
            backend.launch(launch, *pointers, count)
        return out
