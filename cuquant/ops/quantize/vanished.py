"""Counting blocks that underflowed, on the GPU."""

import math
from typing import Any

import numpy as np

from cuquant.formats import Format
from cuquant.gpu.backend import Backend
from cuquant.gpu.jit import Launch, Program
from cuquant.gpu.view import View
from cuquant.ops import cpp, geometry
from cuquant.ops.cpp import scale_arrays
from cuquant.ops.quantize.call import Parts
from cuquant.reference.tiles import Tiles

THREADS, WARP = 256, 32


def vanished(backend: Backend, fmt: Format, x: Any, view: View, axis: int, parts: Parts) -> int:
    """How many blocks of x (of which `view` tells where it lies) underflowed, as refuse.py says;
    waits for the device."""
    if not view.size:
        return 0
    facts, lookup = cpp.facts(fmt, decoding=True), cpp.lookup(fmt.codec, backend)
    element = cpp.element_of(view.dtype)
    counter = backend.zeros((1,), np.dtype(np.uint32))
    count = backend.pointer(counter)
    if fmt.is_blocks:
        program = Program(
            "quantize/vanished.cu", "vanished_blocks", (facts.type, element), facts.text
        )
        each = fmt.layout.elements if fmt.layout.has_half_scale else fmt.layout.sub_block
        launch = Launch(program, (-(-view.size // each // THREADS), 1, 1), THREADS)
        rows = backend.contiguous(x, axis)
        blocks = backend.pointer(parts["blocks"])
        backend.launch(launch, backend.pointer(rows), blocks, lookup, view.size, count)
        return int(backend.read(counter)[0])
    order = geometry.axis_last(len(view.shape), axis)
    tiles = Tiles.of(fmt, tuple(view.shape[a] for a in order))
    packing, blocks = fmt.row_packing, math.prod(tiles.grid)
    arguments = (facts.type, element, cpp.WORDS[packing.dtype.itemsize])
    program = Program("quantize/vanished.cu", "vanished", arguments, facts.text)
    launch = Launch(program, (-(-blocks * WARP // THREADS), 1, 1), THREADS)
    backend.launch(
        launch,
        view.pointer,
        backend.pointer(parts["packed"]),
        scale_arrays(backend, fmt, parts),
        lookup,
        geometry.strided(view, axis, with_flat=False),
        geometry.tiles_struct(tiles),
        blocks,
        packing.words(tiles.columns),
        count,
    )
    return int(backend.read(counter)[0])
