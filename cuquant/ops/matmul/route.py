"""Rows of x sorted by expert, in memory that a call has meanwhile: matmul/route.cu, gather.cu."""

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from cuquant.gpu.backend import Backend, aligned
from cuquant.gpu.jit import Launch, Program
from cuquant.gpu.view import View
from cuquant.ops.cpp import WORDS
from cuquant.ops.matmul.problem import Product, Routing

ROUTE_THREADS, GATHER_THREADS, WARP = (256, 1024), 256, 32
INTEGER_BYTES, SEGMENT_BYTES, ELEMENT_BYTES = 8, 24, 2
VECTOR = 8  # elements of 16 bytes
VECTOR_BYTES = 16


def _threads(rows: int) -> int:
    return ROUTE_THREADS[rows > 1024]


def _most(rows: int, known: int, height: int) -> int:
    """At least as many as there are segments."""
    return rows // height + min(rows, known + 1)


def _places(rows: int, known: int, height: int) -> list[int]:
    """Where `places`, `order`, `offsets`, `count` and `segments` of route.cu begin, and where they
    end."""
    integers = ((known + 1) * (_threads(rows) // WARP), rows, known + 1, 1)
    sizes = [n * INTEGER_BYTES for n in integers]
    sizes.append(_most(rows, known, height) * SEGMENT_BYTES)
    return list(accumulate(map(aligned, sizes), initial=0))


def route_bytes(rows: int, known: int, height: int) -> int:
    """How much memory `route` wants."""
    return _places(rows, known, height)[-1]


def route(
    backend: Backend, experts: View, known: int, height: int, expert_step: int, at: int
) -> Routing:
    """Sort rows of x by expert on the device, into segments of up to `height`.

    Parameters
    ----------
    experts
        Where [rows] integers lie; those that are not in 0..known - 1 make segments of expert -1.
    expert_step
        From the rows of an expert's weights to those of the next.
    at
        The address of route_bytes of memory, aligned as a workspace is.
    """
    rows, threads = experts.size, _threads(experts.size)
    places, order, offsets, count, segments, end = (at + n for n in _places(rows, known, height))
    size = experts.dtype.itemsize * (1 if experts.dtype.kind == "u" else -1)
    backend.launch(
        Launch(Program("matmul/route.cu", "route", (threads,)), (1, 1, 1), threads),
        experts.pointer,
        size,
        experts.strides[0],
        rows,
        known,
        height,
        *(places, order, offsets, segments, count),
    )
    most = _most(rows, known, height)
    return Routing(order, offsets, segments, count, most, expert_step, height, end)


def pitch(depth: int) -> int:
    """Elements from one row of x to the next where rows begin on a vector."""
    return -(-depth // VECTOR) * VECTOR


def gathered(rows: int, height: int) -> int:
    """Rows that `gather` makes: a segment that begins with the last one of x has `height`, for what
    is behind a matrix takes the copy engine longer than a row."""
    return rows + height - 1


def gather_bytes(rows: int, depth: int, height: int) -> int:
    """How much memory `gather` wants behind a Routing."""
    return gathered(rows, height) * pitch(depth) * ELEMENT_BYTES


def gather(product: Product, routing: Routing) -> Callable[[Backend, int], None]:
    """What copies rows of x as they are sorted to the memory behind a Routing, `pitch` apart."""
    rows, depth, x = product.rows, product.depth, product.x
    vectors = x.is_aligned() and depth % VECTOR == 0
    launch = _by_rows("gather", ELEMENT_BYTES, gathered(rows, routing.height), int(vectors))
    steps = (x.row_stride, x.column_stride)
    numbers = (*steps, routing.order, rows, depth, pitch(depth), routing.end)

    def run(backend: Backend, pointer: int) -> None:
        backend.launch(launch, pointer, *numbers)

    return run


def gather_part(backend: Backend, part: View, routing: Routing) -> Any:
    """A contiguous array [T, ...] with its rows as they are sorted, in a new one."""
    rows, *others = part.shape
    columns, itemsize = math.prod(others), part.dtype.itemsize
    made = backend.empty(part.shape, part.dtype)
    vectors = all(n % VECTOR_BYTES == 0 for n in (part.pointer, columns * itemsize))
    launch = _by_rows("gather", itemsize, rows, int(vectors))
    numbers = columns, 1, routing.order, rows, columns, columns
    backend.launch(launch, part.pointer, *numbers, backend.pointer(made))
    return made


def scatter(backend: Backend, made: int, routing: Routing, known: int, out: View) -> None:
    """Write sorted rows of floats, contiguous at an address, to `out` [T, N] in the order of x;
    those whose expert does not exist become NaN."""
    rows, columns = out.shape
    end = routing.offsets + known * INTEGER_BYTES
    launch = _by_rows("scatter", out.dtype.itemsize, rows)
    backend.launch(launch, made, routing.order, end, columns, out.pointer, *out.strides)


def _by_rows(entry: str, itemsize: int, rows: int, *facts: int) -> Launch:
    program = Program("matmul/gather.cu", entry, (WORDS[itemsize], GATHER_THREADS, *facts))
    return Launch(program, (rows, 1, 1), GATHER_THREADS)
