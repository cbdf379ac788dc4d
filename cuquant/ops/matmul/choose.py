"""Which kernel multiplies: the family that takes the least time, of those that take a Problem."""

from dataclasses import replace
from typing import Protocol

from cuquant.gpu.backend import Backend
from cuquant.ops.matmul import ggml, hopper, hopper_tiles, stream, vendor
from cuquant.ops.matmul.any import FEW, TILE, Plain
from cuquant.ops.matmul.problem import Prepared, Problem, Product


class Family(Protocol):
    """What launches the kernels of one file, or the vendor's."""

    @property
    def layouts(self) -> tuple[str, ...]:
        """Layouts of the weights that it takes."""
        ...

    @property
    def height(self) -> int:
        """Rows of x in a segment, where they are routed to experts."""
        ...

    def takes(self, p: Problem) -> bool:
        """Whether it multiplies this, and may be the fastest."""
        ...

    def time_us(self, p: Problem) -> float:
        """About how many microseconds that takes, where it takes it."""
        ...

    def prepare(self, backend: Backend, product: Product) -> Prepared:
        """What multiplies any x that is as aligned as `product`'s, whose rows are as far apart.

        It is kept as long as the weights live, so it must not hold their arrays.
        """
        ...


PLAIN_TILES, PLAIN_ROWS = Plain("matmul_tiles", TILE), Plain("matmul_rows", FEW)
FAMILIES: dict[str, Family] = {
    "hopper": hopper.Hopper(),
    "stream": stream.Stream(),
    "blocks": ggml.BlocksProduct(),
    "vendor": vendor.Vendor(),
    "plain_rows": PLAIN_ROWS,
    "plain_tiles": PLAIN_TILES,
}
"""Of two that take the same time, the first."""
TENSOR_CORES = ("hopper", "stream", "blocks")  # ours, which are faster than the plain kernels


def choose(problem: Problem) -> str:
    """The name in FAMILIES of what multiplies."""
    taking = [name for name, family in FAMILIES.items() if family.takes(problem)]
    if any(name in TENSOR_CORES for name in taking):
        taking = [name for name in taking if FAMILIES[name] not in (PLAIN_ROWS, PLAIN_TILES)]
    return min(taking, key=lambda name: FAMILIES[name].time_us(problem))


def invariant(problem: Problem) -> Family:
    """What multiplies rows of x alike, whatever other rows come with them."""
    many = replace(problem, rows=hopper_tiles.INVARIANT_ROWS)
    if many.layout in hopper.Hopper.layouts and hopper.Hopper().takes(many):
        return hopper.Hopper(hopper_tiles.invariant_shape(many))
    return PLAIN_TILES


def family_of(backend: Backend, problem: Problem) -> Family:
    """What multiplies on a backend, which may lack the vendor's library."""
    name = choose(problem)
    if name == "vendor" and not backend.has_vendor:
        name = choose(replace(problem, vendor=False))
    return FAMILIES[name]
