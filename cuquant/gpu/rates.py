"""What a GPU does in a microsecond: what the times of products are reckoned from."""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple


class TileCosts(NamedTuple):
    """What matmul/hopper.cu's work takes on one multiprocessor, but for `memory`: times in
    nanoseconds, and rates of a nanosecond.

    Attributes
    ----------
    arriving
        How long a unit of x and of the weights is on its way, while others are too.
    memory
        Bytes of the weights from memory, for all multiprocessors together.
    multiplied
        Multiply-adds.
    computed, looked_up, heavy, blocks
        Of a unit of weights that are computed, looked up, take many registers, or are ggml's: how
        long its instructions wait for each other, and how long a warpgroup's take to be issued.
    row_of_four, row_of_two
        How much longer they wait for each row of x, where an operand has four slices or fewer.
    given, sent, handed
        Floats of sums that warpgroups, blocks of a cluster and other blocks give each other.
    handing
        What that takes at least, between blocks.
    start
        Of a kernel, whatever it does.
    """

    arriving: float
    memory: float
    multiplied: float
    computed: tuple[float, float]
    looked_up: tuple[float, float]
    heavy: tuple[float, float]
    blocks: tuple[float, float]
    row_of_four: float
    row_of_two: float
    given: float
    sent: float
    handed: float
    handing: float
    start: float


H100_TILES = TileCosts(
    arriving=2180, memory=2660, multiplied=3790,
    computed=(73, 68), looked_up=(69, 75), heavy=(92, 90), blocks=(249, 168),
    row_of_four=0.548, row_of_two=0.504,
    given=23, sent=12.7, handed=22.6, handing=3520, start=1790,
)  # fmt: skip


@dataclass(frozen=True)
class Rates:
    """Of one GPU, a microsecond.

    Attributes
    ----------
    read
        Bytes of its memory, read in order.
    tensor, float32
        Operations (two of a multiply-add) of cuBLAS: with float16 and bfloat16, and with float32.
    codes
        Operations of matmul/dense.cu, whose sides are codes of 8 bits.
    tiles
        Of Hopper's tiles; nothing else reads them.
    """

    read: float
    tensor: float
    float32: float
    codes: float = 1.4e9
    tiles: TileCosts = H100_TILES


H100 = Rates(read=3.15e6, tensor=670e6, float32=44e6, codes=1.4e9)
MEASURED = {"NVIDIA H100 80GB HBM3": H100}
"""By CUDA's name of the device; `cuquant bench calibrate` prints such a row."""

# For other GPUs: operations of a multiprocessor in a clock, with float16 (summed in float32) and
# with float32, by compute capability; those in between are like the one before.
PER_CLOCK = {
    75: (1024, 128), 80: (2048, 128), 86: (512, 256), 90: (4096, 256), 100: (8192, 256),
    120: (512, 256),
}  # fmt: skip
PART_OF_PEAK = (0.94, 0.68, 0.66)  # of memory, float16 and float32: what an H100 reaches
_CLOCK, _MULTIPROCESSORS, _MEMORY_CLOCK, _BUS_BITS = 13, 16, 36, 37  # cudaDeviceAttr; clocks in kHz


@cache
def rates_of(device: int) -> Rates:
    """A device's rates: measured ones, or reckoned from its clocks and width; an H100's where it
    does not tell those."""
    import cupy  # type: ignore[import-not-found]

    runtime = cupy.cuda.runtime
    name = runtime.getDeviceProperties(device)["name"].decode()
    if name in MEASURED:
        return MEASURED[name]
    wanted = (_CLOCK, _MULTIPROCESSORS, _MEMORY_CLOCK, _BUS_BITS, 75, 76)
    clock, processors, memory_clock, bus_bits, major, minor = (
        runtime.deviceGetAttribute(number, device) for number in wanted
    )
    if not (clock and processors and memory_clock and bus_bits):
        return H100
    return reckoned(clock, processors, memory_clock, bus_bits, 10 * major + minor)


def reckoned(
    clock: int, multiprocessors: int, memory_clock: int, bus_bits: int, arch: int
) -> Rates:
    """Rates of a GPU by its clocks in kHz; memory moves two bits of each wire in a clock.

    >>> rates = reckoned(1_980_000, 132, 2_619_000, 5120, 90)
    >>> f"{rates.read:.3g} {rates.tensor:.3g} {rates.float32:.3g}"
    '3.15e+06 7.28e+08 4.42e+07'
    """
    tensor, float32 = PER_CLOCK[max(known for known in PER_CLOCK if known <= max(arch, 75))]
    cycles = multiprocessors * clock / 1e3  # of all multiprocessors, in a microsecond
    peaks = (2 * memory_clock / 1e3 * bus_bits / 8, tensor * cycles, float32 * cycles)
    read, tensor, float32 = (part * peak for part, peak in zip(PART_OF_PEAK, peaks, strict=True))
    memory = H100_TILES.memory * read / H100.read
    codes = 2 * tensor  # the tensor cores' rate with 8 bits
    return Rates(read, tensor, float32, codes, tiles=H100_TILES._replace(memory=memory))
