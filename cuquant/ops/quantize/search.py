"""Quantization by the kernel that searches: K-quants and iq4."""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cuquant.formats import Format
from cuquant.formats.blocks import IQ4_LEVELS, BlockLayout, Run
from cuquant.formats.search import SEARCHES
from cuquant.gpu.backend import Backend
from cuquant.gpu.jit import Launch, Program
from cuquant.ops.cpp import element_of

THREADS, WARP = 128, 32
MOST_GRID = 2**31 - 1  # blocks of threads along x
MOST_PIECES = 8  # of a byte: one a bit


def search_facts(fmt: Format) -> tuple[str, str]:
    """The C++ struct of what a type's search tries: its name in namespace formats, and its text."""
    search, layout = SEARCHES[fmt.name], fmt.layout
    low, high = search.sub_scales
    fields = (
        ("int", "low", search.low),
        ("int", "high", search.high),
        ("bool", "uneven", str(search.nonuniform).lower()),
        ("int", "elements", layout.elements),
        ("int", "bytes", layout.nbytes),
        ("int", "sub_block", layout.sub_block),
        ("int", "sub_low", low),
        ("int", "sub_high", high),
        ("int", "sub_zero", layout.sc_zero),
        ("bool", "has_min", str(layout.has_min).lower()),
    )
    lines = [f"    static constexpr {kind} {field} = {value};" for kind, field, value in fields]
    lines.append(f"    static constexpr double anchor_step = {search.anchor_step.hex()};")
    if search.nonuniform:
        listed = ", ".join(map(str, IQ4_LEVELS))
        lines += [
            f"    static constexpr int levels = {len(IQ4_LEVELS)};",
            "    __device__ static constexpr int level(int i) {",
            f"        constexpr int all[] = {{{listed}}};",
            "        return all[i];",
            "    }",
        ]
    body = "\n".join(lines)
    digest = hashlib.sha256(body.encode()).hexdigest()[:8]
    name = f"Search_{layout.bits}_{layout.sub_block}_{digest}"
    return name, f"struct {name} {{\n{body}\n}};\n"


@lru_cache(maxsize=16)
def pieces(layout: BlockLayout) -> np.ndarray:
    """uint16 [nbytes, 8]: which bits of which fields make a byte; byte_of in quantize/search.cu.

    Fields are bytes: the codes, the integer scales, the integer minimums, and float16's two bytes
    of the scale and of the minimum.
    """
    sc = layout.elements
    m, halves = sc + layout.sub_blocks, sc + 2 * layout.sub_blocks
    placed = [(layout.code_runs, 0), (layout.sc_runs, sc), (layout.m_runs, m)]
    placed.append(((Run(layout.scale_byte, 2, 0, 0, 8),), halves))
    if layout.minimum_byte is not None:
        placed.append(((Run(layout.minimum_byte, 2, 0, 0, 8),), halves + 2))
    table = np.zeros((layout.nbytes, MOST_PIECES), np.uint16)
    used = np.zeros(layout.nbytes, int)
    runs = [(run, base) for group, base in placed for run in group]
    for run, base in sorted(runs, key=lambda placed_run: placed_run[0].low):
        where = np.arange(run.byte, run.byte + run.count)
        field = base + run.first + run.step * np.arange(run.count)
        table[where, used[where]] = field | run.shift << 9 | (run.bits - 1) << 12
        used[where] += 1
    return table


@dataclass(frozen=True)
class Search:
    """Quantization of one type whose scales are searched for."""

    fmt: Format

    def launch(self, dtype: np.dtype, blocks: int) -> Launch:
        """Of search: a lane a sub-block."""
        name, text = search_facts(self.fmt)
        program = Program(
            "quantize/search.cu",
            "search",
            (f"formats::{name}", element_of(dtype), THREADS),
            text,
        )
        lanes = blocks * self.fmt.layout.sub_blocks
        return Launch(program, (min(-(-lanes // THREADS), MOST_GRID), 1, 1), THREADS)

    def __call__(
        self,
        backend: Backend,
        x: int,
        dtype: np.dtype,
        blocks: int,
        out: int,
        *,
        saturate: bool,
        clamp: bool,
        overflow: int = 0,
    ) -> None:
        """The bytes of `blocks` blocks of contiguous elements at `x`, on 16 bytes, to `out`.

        `saturate`: store 65504 for a float16 that would be infinite; `clamp`: NaN counts as 0 and
        an infinity as the dtype's largest number. `overflow`: the address of a uint32 that counts
        sub-blocks whose scale became infinite, or 0.
        """
        if not blocks:
            return
        table = backend.upload(pieces(self.fmt.layout))
        backend.launch(
            self.launch(dtype, blocks),
            x,
            backend.pointer(table),
            blocks,
            int(saturate),
            int(clamp),
            out,
            overflow,
        )
