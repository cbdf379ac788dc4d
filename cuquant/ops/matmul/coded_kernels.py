"""Which kernel multiplies codes with codes: Hopper's where it takes them, or that of any GPU."""

from collections.abc import Callable

from cuquant.gpu.backend import Backend
from cuquant.ops.matmul import dense, dense_warps
from cuquant.ops.matmul.coded import Coded, Groups

# Multiplies, called with x and the bytes of a CodedResults.
Run = Callable[[Backend, Coded, bytes], None]


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
    if backend.arch == dense.ARCH and depth and dense.takes(x, weights, depth):
        return dense.prepare(
            backend, x, weights, columns, depth, groups, batch_invariant=batch_invariant
        )
    return dense_warps.prepare(x, weights, shape, groups, segment, batch_invariant=batch_invariant)
