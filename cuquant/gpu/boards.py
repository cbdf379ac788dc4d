"""GPUs by name or compute capability, for whoever asks about one that is not here."""

from __future__ import annotations

import re
from typing import NamedTuple

from cuquant.errors import clipped
from cuquant.gpu.rates import H100, Rates, reckoned


class Board(NamedTuple):
    """A GPU, as the rule that chooses kernels sees it."""

    name: str
    arch: int  # compute capability, 90 for 9.0
    multiprocessors: int
    rates: Rates


def _board(
    name: str, arch: int, multiprocessors: int, clock: int, memory_clock: int, bus_bits: int
) -> Board:
    rates = reckoned(clock, multiprocessors, memory_clock, bus_bits, arch)
    return Board(name, arch, multiprocessors, rates)


# Clocks in kHz and bits of the bus, of the makers' data sheets; an H100's rates are measured.
BOARDS = (
    _board("T4", 75, 40, 1_590_000, 5_001_000, 256),
    _board("A100", 80, 108, 1_410_000, 1_593_000, 5120),
    _board("A10", 86, 72, 1_695_000, 6_251_000, 384),
    _board("RTX 4090", 89, 128, 2_520_000, 10_501_000, 384),
    Board("H100", 90, 132, H100),
    _board("B200", 100, 148, 1_965_000, 3_996_000, 8192),
    _board("RTX 5090", 120, 170, 2_407_000, 14_001_000, 512),
)
"""One for each architecture that kernels are compiled for."""
OTHERS = (87, 88, 101, 103, 110, 121)
"""Compute capabilities of GPUs that are like the board before."""


def board_of(arch: str | int | tuple[int, int]) -> Board:
    """A board by its name, or the one of a compute capability.

    >>> board_of("A100").arch, board_of("sm_90").name, board_of((8, 9)).name
    (80, 'H100', 'RTX 4090')

    Raises
    ------
    ValueError
        For what is neither.
    """
    for board in BOARDS:
        if isinstance(arch, str) and arch.lower() == board.name.lower():
            return board
    try:
        number = parse_arch(arch)
    except ValueError:
        number = 0
    if number not in (*(board.arch for board in BOARDS), *OTHERS):
        known = [f"{board.name} (sm_{board.arch})" for board in BOARDS]
        known += [f"sm_{other}" for other in OTHERS]
        raise ValueError(f"arch {clipped(arch)} is no GPU; known are {', '.join(known)}")
    return [board for board in BOARDS if board.arch <= number][-1]._replace(arch=number)


def parse_arch(arch: str | int | tuple[int, int]) -> int:
    """90 for "sm_90", "sm_90a", "90", "9.0", 90 and (9, 0)."""
    if isinstance(arch, tuple) and len(arch) == 2:
        arch = f"{arch[0]}.{arch[1]}"
    found = re.fullmatch(r"(?:sm_)?(\d+)\.?(\d)[af]?", str(arch))
    if found is None:
        raise ValueError(
            f"arch {clipped(arch)} is unknown; pass a compute capability such as 'sm_90'"
        )
    return int(found[1] + found[2])
