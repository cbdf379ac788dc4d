"""Which kernel multiplies: `choose` names it for a Problem, and ORCHESTRATORS launches it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from cuquant.array.fragments import FRAGMENTS_LAYOUT
from cuquant.gpu.backend import Backend
from cuquant.ops.layout.packed_weight import fits, takes_rows
from cuquant.ops.matmul import ggml, hopper, stream, vendor
from cuquant.ops.matmul.any import FEW, TILE, Plain
from cuquant.ops.matmul.problem import Problem, Product

# Called with the backend, x's address and the bytes of an Epilogue.
Run = Callable[[Backend, int, bytes], None]

MOST_ROWS = 16  # of x for matmul_rows, which reads the weights anew for each 8
FEW_ROWS = 16  # of x for which matmul_stream may be faster than matmul_hopper


def choose(problem: Problem) -> str:
    """The name in ORCHESTRATORS of the kernel that multiplies."""
    p = problem
    single = p.contiguous and p.batches == 1 and not p.swapped and not p.experts and p.depth > 0
    gemm = single and vendor.takes(p)
    small = p.format is not None and p.dtype in ("float16", "bfloat16") and fits(p.format)
    if small and hopper.takes_experts(p):
        return "hopper"
    if small and single and p.arch >= 80:
        assert p.format is not None
        if p.layout == FRAGMENTS_LAYOUT:
            by_hopper = p.arch == 90 and p.aligned
            shape = None if by_hopper and p.rows > FEW_ROWS else stream.shape_of(p)
            many = shape is None or shape.tokens < p.rows
            if by_hopper and (many or hopper.takes_few(p)):
                return "vendor" if gemm and vendor.beats_hopper(p) else "hopper"
            if shape is not None:
                return "vendor" if gemm and vendor.beats_stream(p, shape.tokens) else "stream"
        elif ggml.takes(p):
            return "blocks"
        elif p.rows <= FEW_ROWS and p.direct and takes_rows(p.format, p.depth):
            shape = stream.shape_of(p)
            if shape is not None:
                return "stream"
    if gemm and vendor.beats_plain(p):
        return "vendor"
    return "plain_rows" if problem.rows <= MOST_ROWS else "plain_tiles"


class Orchestrator(Protocol):
    """What launches a kernel."""

    @property
    def layouts(self) -> tuple[str, ...]:
        """Layouts of the weights that it takes."""
        ...

    @property
    def height(self) -> int:
        """Rows of x in a segment, where they are routed to experts."""
        ...

    def prepare(self, backend: Backend, product: Product) -> Run:
        """What multiplies, for any x that is as aligned as `product`'s.

        It is kept as long as the weights live, so it must not hold their arrays.
        """
        ...


PLAIN_TILES, PLAIN_ROWS = Plain("matmul_tiles", TILE), Plain("matmul_rows", FEW)
ORCHESTRATORS: dict[str, Orchestrator] = {
    "plain_tiles": PLAIN_TILES,
    "plain_rows": PLAIN_ROWS,
    "stream": stream.Stream(),
    "hopper": hopper.Hopper(),
    "vendor": vendor.Vendor(),
    "blocks": ggml.BlocksProduct(),
}


def orchestrator_of(backend: Backend, problem: Problem) -> Orchestrator:
    """What multiplies on a backend, which may lack the vendor's library."""
    name = choose(problem)
    if name == "vendor" and not backend.has_vendor:
        name = choose(replace(problem, vendor=False))
    return ORCHESTRATORS[name]
