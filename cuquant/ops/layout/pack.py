"""Codes to packed words and back on the GPU, in every order."""

import math
from typing import Any

from cuquant.formats import Format, Packing
from cuquant.gpu.backend import Backend
from cuquant.gpu.jit import Launch, Program
from cuquant.ops.cpp import WORDS, packing_type

THREADS = 256


def pack_launch(packing: Packing, entry: str, items: int) -> Launch:
    """Of pack (a thread a word) or unpack (a thread a code)."""
    code = "u16" if packing.bits == 16 else "u8"
    word = WORDS[packing.dtype.itemsize]
    program = Program("layout/pack.cu", entry, (packing_type(packing), code, word))
    return Launch(program, (-(-items // THREADS), 1, 1), THREADS)


def pack(backend: Backend, fmt: Format, codes: Any, packed: Any, stored: tuple[int, ...]) -> None:
    """The words of a format's packing, from codes [rows..., K] in C order."""
    *rows, columns = stored
    count, row_words = math.prod(rows), fmt.row_packing.words(columns)
    if not count * row_words:
        return
    backend.launch(
        pack_launch(fmt.row_packing, "pack", count * row_words),
        backend.pointer(codes),
        backend.pointer(packed),
        count,
        columns,
        row_words,
        fmt.zero_code,
    )


def unpack(backend: Backend, fmt: Format, packed: Any, codes: Any, stored: tuple[int, ...]) -> None:
    """Codes [rows..., K] of packed words: the inverse of `pack`."""
    *rows, columns = stored
    count, row_words = math.prod(rows), fmt.row_packing.words(columns)
    if not count * columns:
        return
    backend.launch(
        pack_launch(fmt.row_packing, "unpack", count * columns),
        backend.pointer(packed),
        backend.pointer(codes),
        count,
        columns,
        row_words,
    )
