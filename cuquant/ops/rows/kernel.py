"""How the threads of kernels/quantize/rows.cu share rows: rules that need no GPU."""

import math
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np

from cuquant.formats import Format
from cuquant.gpu.jit import Launch, Program
from cuquant.ops import cpp
from cuquant.ops.rows.source import LAYER, Source
from cuquant.reference.rows import UNIT

WARP, THREADS = 32, 256
SHARES = (1, 2, 4, 8, 16, 32)  # units of a block whose scale neighbouring threads find together
BITS = (1, 2, 4, 8)  # of codes, whose units are whole words of their own
RULES = ("absmax", "signed_max", "range", "e8m0")
# Units of a thread by the size of an element: the usual ones, and the most that registers hold.
USUAL, MOST = {2: 2, 4: 1}, {2: 8, 4: 4}
FEW = (1, 2)  # units that share a scale where codes take longest
PLAIN_THREADS = 256
GROUPS = (16, 32, 64, 128, 256, 512, 1024)  # of a transform in registers


@dataclass(frozen=True)
class Work:
    """How a kernel's work is divided.

    Attributes
    ----------
    lanes
        Neighbouring threads that hold a row.
    units
        16 elements each that a thread holds.
    threads
        Of a block.
    share
        Units that share a scale; 0: those of a row do.
    whole
        Whether a row has as many units as its threads hold, and a block one row.
    """

    lanes: int
    units: int
    threads: int
    share: int = 0
    whole: bool = False

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.threads // self.lanes


def share_of(fmt: Format, columns: int) -> int | None:
    """Units that share a scale, 0 for a row's; None where rows.cu does not take the blocks."""
    block = fmt.rule.block
    if isinstance(block, tuple) and block[0] == 1:
        block = block[1]
    if block in ("row", columns) or block == "tensor":
        return 0
    if not isinstance(block, int) or columns % block or block % UNIT:
        return None
    return block // UNIT if block // UNIT in SHARES else None


def takes_format(fmt: Format, columns: int) -> bool:
    """Whether rows.cu makes the codes of rows of so many columns."""
    if fmt.scale is None or fmt.is_blocks or not fmt.is_plain or columns % UNIT:
        return False
    packing = fmt.row_packing
    words = columns * fmt.bits % (8 * packing.dtype.itemsize) == 0
    return (
        fmt.bits in BITS
        and packing.order not in ("word", "planes")
        and words
        and fmt.rule.rule in RULES
        and fmt.scale.nested != "double"
        and share_of(fmt, columns) is not None
    )


@lru_cache(maxsize=1024)
def work_of(source: Source, share: int | None, columns: int, itemsize: int) -> Work | None:
    """The division for rows of so many columns; None where registers do not hold one.

    `share` None: the values are stored themselves.
    """
    if columns % UNIT or (source.group and source.group not in GROUPS):
        return None
    least = max(source.least_lanes, share or 1)
    usual = USUAL[itemsize]
    if not source.has_rows and share != 0:
        return Work(THREADS // 2, usual, THREADS // 2, share or 0)
    along = columns // UNIT
    few = source.norm == LAYER and not source.wide and share in FEW
    if few and itemsize == 2 and along == _power(along):
        usual *= 2  # two sums cost more than registers
    lanes = max(least, min(THREADS, _power(along / usual)))
    # Fewer threads that hold more each, where fewer of them have nothing to do.
    while lanes // 2 >= max(least, WARP) and _idle(lanes // 2, along) < _idle(lanes, along):
        if -(-along // (lanes // 2)) > 2 * usual:
            break
        lanes //= 2
    units = -(-along // lanes)
    if units > MOST[itemsize] - 2 * (source.norm == LAYER and itemsize == 2):
        return None
    threads = lanes if lanes > WARP else THREADS // 2
    whole = lanes == threads and units * lanes == along
    return Work(lanes, units, threads, share or 0, whole)


def _idle(lanes: int, along: int) -> int:
    return -(-along // lanes) * lanes - along


def _power(least: float) -> int:
    """The smallest power of two that is not below."""
    return 1 << math.ceil(math.log2(max(least, 1)))


def fitting(source: Source) -> int:
    """Blocks that must fit a multiprocessor; 0 says nothing of it.

    Left alone, the compiler holds transforms and norms to 48, 64 or 72 registers, at the price
    of 8 or 16 bytes of local memory on some architectures; it takes more for others when told.
    """
    return 1 if source.group or source.norm else 0


@lru_cache(maxsize=1024)
def launch_of(
    fmt: Format | None, dtype: np.dtype, source: Source, work: Work, flags: int, rows: int
) -> Launch:
    """Of the kernel `rows`, for so many of them; fmt None stores the values themselves."""
    facts = cpp.Facts("", "") if fmt is None else cpp.facts(fmt)
    of_work = cpp.numbers("Work", **asdict(work), fitting=fitting(source))
    arguments = (
        "Values" if fmt is None else facts.type,
        cpp.element_of(dtype),
        source.facts.type,
        of_work.type,
        flags,
    )
    text = facts.text + source.facts.text + of_work.text
    program = Program("quantize/rows.cu", "rows", arguments, text)
    return Launch(program, (-(-rows // work.rows), 1, 1), work.threads)


def lose_launch(fmt: Format, multiprocessors: int, chunks: int) -> Launch:
    """Of `lose`, after rows that may have lost a tensor's scale."""
    facts = cpp.facts(fmt)
    program = Program("quantize/rows.cu", "lose", (facts.type, THREADS), facts.text)
    return Launch(program, (min(-(-chunks // THREADS), 4 * multiprocessors), 1, 1), THREADS)


def plain_launch(dtype: np.dtype, source: Source, blocks: int) -> Launch:
    """Of rows_plain.cu: `rows_values` of so many rows, or `turned` of so many groups."""
    entry = "turned" if source.group else "rows_values"
    arguments = (cpp.element_of(dtype), source.facts.type, PLAIN_THREADS)
    program = Program("quantize/rows_plain.cu", entry, arguments, source.facts.text)
    return Launch(program, (blocks, 1, 1), PLAIN_THREADS)
