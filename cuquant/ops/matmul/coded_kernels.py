"""Which kernel multiplies codes with codes: Hopper's where it takes them, or that of any GPU."""

from collections.abc import Callable

from cuquant.gpu.backend import Backend
from cuquant.ops.matmul import dense, dense_warps
from cuquant.ops.matmul.coded import BITS, Coded, Groups, are_bits
from cuquant.ops.matmul.problem import Weight

# Multiplies, called with x and the bytes of a CodedResults.
Run = Callable[[Backend, Coded, bytes], None]


def has_bits(arch: int) -> bool:
    """Whether tensor cores multiply bits: not before sm_80 as kernels want it, and from sm_100 on
    compilers do it with other instructions."""
    return 80 <= arch < 100


def kinds_on(
    backend: Backend, x: Weight, weights: Weight, kinds: tuple[str, str]
) -> tuple[str, str]:
    """What two arrays are multiplied as: bits where a GPU has products of them, or `kinds`."""
    as_bits = has_bits(backend.arch) and are_bits(backend, x, weights)
    return (BITS, BITS) if as_bits else kinds


def is_hoppers(backend: Backend, x: Coded, weights: Coded, depth: int) -> bool:
    """Whether matmul/dense.cu multiplies them; else matmul/dense_warps.cu does."""
    return backend.arch == dense.ARCH and depth > 0 and dense.takes(x, weights, depth)


def prepare(
    backend: Backend,
    x: Coded,
    weights: Coded,
    shape: tuple[int, int, int],
    groups: Groups,
    segment: int,
    *,
    batch_invariant: bool = False,
) -> Run:
    """What multiplies x @ weights.T of every group, of x at any addresses.

    `shape` is M, N and K, and M the rows of a group's x; `segment` columns share scales on both
    sides.
    """
    _, columns, depth = shape
    if is_hoppers(backend, x, weights, depth):
        return dense.prepare(
            backend, x, weights, columns, depth, groups, batch_invariant=batch_invariant
        )
    return dense_warps.prepare(x, weights, shape, groups, segment, batch_invariant=batch_invariant)
