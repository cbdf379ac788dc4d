"""Weights to the layout "fragments/1" and back, by the kernels of layout/prepack.cu."""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cuquant.array.fragments import LANES, Fragments
from cuquant.gpu.backend import Backend
from cuquant.gpu.jit import Launch, Program
from cuquant.ops import cpp
from cuquant.ops.cpp import WORDS, packing_type

THREADS = 256
FIELDS = ("scale", "minimum", "sum", "sub_scale", "sub_minimum")  # of BlockFields, in its order

Parts = dict[str, Any]


class Maker(Protocol):
    """What `rows` needs of a Backend."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any: ...
    def pointer(self, array: Any) -> int: ...
    def launch(self, launch: Launch, *arguments: int | float | bytes) -> None: ...


def _launch(program: Program, items: int) -> Launch:
    """A thread for each item."""
    return Launch(program, (-(-items // THREADS), 1, 1), THREADS)


@dataclass(frozen=True)
class Prepack:
    """The orchestrator of one weight's layout; all arrays are contiguous."""

    layout: Fragments

    def lay_out(self, backend: Backend, parts: Mapping[str, Any]) -> Parts:
        """The components of the layout, of those of the QuantArray; some are the same arrays."""
        layout, fmt = self.layout, self.layout.fmt
        kept = {part.name: parts[part.name] for part in layout.kept}
        made = self._empty(backend, layout.components, kept)
        lanes = self._lanes
        if lanes and fmt.is_blocks:
            backend.launch(
                _launch(self._program("fragments_of_blocks"), lanes),
                backend.pointer(parts["blocks"]),
                self._laid(),
                backend.pointer(made["codes"]),
                self._fields(backend, made),
            )
        elif lanes:
            packed = backend.pointer(parts["packed"])
            row_bytes = self._row_words * layout.packing.dtype.itemsize
            backend.launch(
                _launch(self._program("fragments_of_rows"), lanes),
                packed,
                self._laid(),
                self._row_words,
                int(packed % 8 == 0 and row_bytes % 8 == 0),
                backend.pointer(made["codes"]),
                self._pointer(backend, made, "tail"),
                layout.tail_words,
                self._pointer(backend, made, "spare"),
                self._spare_bytes,
            )
        if not fmt.is_blocks:
            self._move_scales(backend, "strips_of_scales", parts, made)
        return {part.name: made[part.name] for part in layout.components}

    def rows(
        self, backend: Maker, parts: Mapping[str, Any], into: Mapping[str, Any] | None = None
    ) -> Parts:
        """The components of the QuantArray: the inverse of `lay_out`. `into`: those it makes."""
        layout, fmt = self.layout, self.layout.fmt
        kept = {part.name: parts[part.name] for part in layout.kept} | dict(into or {})
        wanted = fmt.components(layout.shape)
        made = self._empty(backend, wanted, kept)
        target = made["blocks" if fmt.is_blocks else "packed"]
        size = math.prod(target.shape)
        if size and fmt.is_blocks:
            backend.launch(
                _launch(self._program("blocks_of_fragments"), size),
                backend.pointer(parts["codes"]),
                self._fields(backend, parts),
                self._laid(),
                backend.pointer(target),
            )
        elif size:
            packed = backend.pointer(target)
            row_bytes = self._row_words * layout.packing.dtype.itemsize
            width = 4 * fmt.bits  # bytes of 32 codes
            width = min(16, width & -width)
            backend.launch(
                _launch(self._program("rows_of_fragments"), size if self._by_word else self._lanes),
                backend.pointer(parts["codes"]),
                self._pointer(backend, parts, "tail"),
                self._pointer(backend, parts, "spare"),
                self._laid(),
                self._row_words,
                int(packed % width == 0 and row_bytes % width == 0),
                layout.tail_words,
                self._spare_bytes,
                packed,
            )
        if not fmt.is_blocks:
            self._move_scales(backend, "scales_of_strips", parts, made)
        return {part.name: made[part.name] for part in wanted}

    def _move_scales(
        self, backend: Maker, entry: str, source: Mapping[str, Any], target: Parts
    ) -> None:
        """A thread a number of what is written."""
        for part in self.layout.per_group:
            items = math.prod(target[part.name].shape)
            if not items:
                continue
            program = Program("layout/prepack.cu", entry, (WORDS[part.dtype.itemsize],))
            backend.launch(
                _launch(program, items),
                backend.pointer(source[part.name]),
                self._laid(),
                part.groups,
                backend.pointer(target[part.name]),
            )

    def _program(self, entry: str) -> Program:
        fmt = self.layout.fmt
        if fmt.is_blocks:
            facts = cpp.facts(fmt)
            return Program("layout/prepack.cu", entry, (facts.type,), facts.text)
        packing = self.layout.packing
        arguments = (packing_type(packing), WORDS[packing.dtype.itemsize], int(self.layout.joined))
        return Program("layout/prepack.cu", entry, arguments)

    def _laid(self) -> bytes:
        """The Laid struct."""
        at = self.layout
        return struct.pack("<5q", at.experts, *at.shape[-2:], at.strips, at.units)

    @property
    def _row_words(self) -> int:
        return self.layout.packing.words(self.layout.shape[-1])

    @property
    def _lanes(self) -> int:
        """Of all units."""
        return LANES * self.layout.experts * self.layout.strips * self.layout.units

    @property
    def _by_word(self) -> bool:
        """Whether 32 codes are no whole words."""
        packing = self.layout.packing
        return packing.order == "word" and 32 % packing.bits > 0

    @property
    def _spare_bytes(self) -> int:
        """Of a row."""
        spare = self.layout.spare_packing
        return 0 if spare is None else spare.words(self._row_words)

    def _fields(self, backend: Maker, parts: Mapping[str, Any]) -> bytes:
        """The BlockFields struct."""
        return struct.pack("<5Q", *(self._pointer(backend, parts, name) for name in FIELDS))

    @staticmethod
    def _pointer(backend: Maker, parts: Mapping[str, Any], name: str) -> int:
        return backend.pointer(parts[name]) if name in parts else 0

    @staticmethod
    def _empty(backend: Maker, wanted: Sequence[Any], kept: Parts) -> Parts:
        made = {c.name: backend.empty(c.shape, c.dtype) for c in wanted if c.name not in kept}
        return {**made, **kept}
