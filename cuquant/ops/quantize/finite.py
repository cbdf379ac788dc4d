"""Looking for NaN and infinity on the GPU."""

import math

import numpy as np

from cuquant.gpu.backend import Backend
from cuquant.gpu.jit import Launch, Program
from cuquant.gpu.view import View
from cuquant.ops import geometry
from cuquant.ops.cpp import element_of
from cuquant.ops.geometry import CHUNK

THREADS = 256


def first_launch(dtype: np.dtype, items: int) -> Launch:
    """Of first_nonfinite, a thread a chunk."""
    program = Program("quantize/finite.cu", "first_nonfinite", (element_of(dtype),))
    return Launch(program, (-(-items // THREADS), 1, 1), THREADS)


def first_nonfinite(backend: Backend, view: View) -> int | None:
    """The lowest flat index of a NaN or an infinity, or None; waits for the device."""
    axis = len(view.shape) - 1
    source = geometry.strided(view, axis, with_flat=True)
    rows, columns = math.prod(view.shape[:-1]), view.shape[-1]
    found = backend.zeros((1,), np.dtype(np.uint64))
    launch = first_launch(view.dtype, rows * -(-columns // CHUNK))
    backend.launch(launch, view.pointer, backend.pointer(found), source, rows, columns)
    complement = int(backend.read(found).view(np.uint64)[0])
    return complement ^ (2**64 - 1) if complement else None
