"""Rows of a matrix by their numbers, decoded by dequantize/rows.cu."""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from cuquant.formats import Format
from cuquant.formats.scales import INVERSE_127
from cuquant.gpu.backend import Backend
from cuquant.gpu.jit import Launch, Program
from cuquant.gpu.view import View
from cuquant.lazy import lazy
from cuquant.ops import cpp, geometry
from cuquant.ops.dequantize.decoder import decoder, limit
from cuquant.ops.geometry import CHUNK

THREADS = 256
WORD_BYTES = 4  # on which ggml's blocks start where they are read by words


class Matrix(NamedTuple):
    """How a matrix [V, D] is stored.

    Attributes
    ----------
    shape
        V and D.
    stored
        Of the components: (V, D), or (D, V) where blocks run along the first axis; (V * D,) where
        they run over the flattened array.
    by_rows
        Whether it is stored in the order of its rows.
    order
        The address of int64, the place of each column of what is stored; 0: they lie in order.
    """

    shape: tuple[int, int]
    stored: tuple[int, ...]
    by_rows: bool
    order: int = 0

    def places(self) -> bytes:
        """The Places struct of rows.cu."""
        known, columns = self.shape
        if len(self.stored) == 1:
            steps = (0, 0, columns, 1) if self.by_rows else (0, 0, 1, known)
        else:
            steps = (1, 0, 0, 1) if self.by_rows else (0, 1, 1, 0)
        return struct.pack("<4qQ", *steps, self.order)


@dataclass(frozen=True)
class DecodeRows:
    """The orchestrator of one plain format; `absmax`: its scales are absmax, not absmax / 127."""

    fmt: Format
    absmax: bool = False

    @lazy
    def facts(self) -> cpp.Facts:
        return cpp.facts(self.fmt, decoding=True)

    def __call__(
        self,
        backend: Backend,
        parts: Mapping[str, Any],
        matrix: Matrix,
        ids: View,
        target: View,
    ) -> None:
        """Write row ids[i] of the matrix to row i of `target` [..., D], NaN where there is none.

        `ids` are contiguous, int32 or int64.
        """
        if not target.size:
            return
        columns, count = matrix.shape[1], ids.size
        whole = self.is_whole(backend, parts, matrix, target)
        backend.launch(
            self.launch(target, count * -(-columns // CHUNK), whole),
            self.source(backend, parts, matrix, target),
            cpp.lookup(self.fmt.codec, backend),
            struct.pack("<Qq", ids.pointer, ids.dtype.itemsize == 8),
            matrix.places(),
            target.pointer,
            geometry.strided(target, len(target.shape) - 1, with_flat=False),
            count,
            columns,
            matrix.shape[0],
        )

    def is_whole(
        self, backend: Backend, parts: Mapping[str, Any], matrix: Matrix, target: View
    ) -> bool:
        """Whether the kernel may take rows in whole chunks."""
        if not matrix.by_rows or matrix.order:
            return False
        if self.fmt.is_blocks:
            aligned = backend.pointer(parts["blocks"]) % WORD_BYTES == target.pointer % 16 == 0
            return aligned and target.is_contiguous
        return decoder(self.fmt).is_fast(backend.pointer(parts["packed"]), matrix.shape, target)

    @property
    def source_type(self) -> str:
        """What rows.cu calls numbers that are stored so."""
        if self.fmt.is_blocks:
            return f"BlockRows<{self.facts.type}>"
        word = cpp.WORDS[self.fmt.row_packing.dtype.itemsize]
        return f"CodeRows<{self.facts.type}, {word}, {int(self.absmax)}>"

    def source(
        self, backend: Backend, parts: Mapping[str, Any], matrix: Matrix, target: View
    ) -> bytes:
        """The struct of that type."""
        columns = matrix.stored[-1]
        if self.fmt.is_blocks:
            layout = self.fmt.layout
            row_bytes = columns // layout.elements * layout.nbytes
            return struct.pack("<2q", backend.pointer(parts["blocks"]), row_bytes)
        packing = self.fmt.row_packing
        last = math.prod(matrix.stored) * packing.bits // 32 - 1
        numbers = packing.words(columns), last, limit(self.fmt, target.dtype), INVERSE_127
        return b"".join(
            (
                struct.pack("<Q", backend.pointer(parts["packed"])),
                cpp.scale_arrays(backend, self.fmt, parts),
                geometry.tiles_of(self.fmt, matrix.stored),
                struct.pack("<2q2f", *numbers),
            )
        )

    def launch(self, target: View, chunks: int, whole: bool) -> Launch:
        """Of so many chunks of the result."""
        element = cpp.element_of(target.dtype)
        arguments = (self.source_type, element, THREADS, int(whole))
        program = Program("dequantize/rows.cu", "decode_rows", arguments, self.facts.text)
        return Launch(program, (-(-chunks // THREADS), 1, 1), THREADS)


@lru_cache(maxsize=256)
def row_decoder(fmt: Format, absmax: bool = False) -> DecodeRows:
    """The orchestrator of a format, kept: its facts are made once."""
    return DecodeRows(fmt, absmax)
