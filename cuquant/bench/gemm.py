"""The benchmark of products of two quantized arrays: cases, times, and whether they are right."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cuquant.array.packed_weight import prepack
from cuquant.array.quant_array import QuantArray
from cuquant.bench.checked import Expected, time_checked
from cuquant.bench.gemm_peers import GemmPeer
from cuquant.bench.gemm_report import GemmMeasurement
from cuquant.bench.gpu import Gpu
from cuquant.bench.matmul import copy_weight
from cuquant.bench.matmul_peers import time_product
from cuquant.bench.quantize import random_values
from cuquant.bench.report import PeerTiming
from cuquant.bench.timing import MIN_REPEATS, copies
from cuquant.errors import clipped
from cuquant.formats import Format, get_format
from cuquant.interop import float_dtype
from cuquant.ops.matmul.coded import codes_of
from cuquant.ops.matmul.door import linear
from cuquant.ops.quantize.door import quantize

FORMULA = (
    "x and w are quantized before, and w prepacked where it is narrower than a byte, which is not "
    "timed; TOP/s = 2 M N K / time; TB/s = (x and w with their scales + y) / time; operands rotate "
    "past the L2 cache; faster: than the fastest peer"
)
DTYPE = "bfloat16"  # of y
# What is multiplied: rows, tensors and blocks that share a scale, and narrower weights.
PAIRS = (
    "int8", "fp8_e4m3", "fp8_e4m3:tensor", "fp8_e4m3:128@fp8_e4m3:128x128", "int8@int4",
    "fp8_e4m3@fp4_e2m1:row",
)  # fmt: skip
SHAPES = (
    (64, 14336, 4096), (256, 14336, 4096), (1024, 14336, 4096), (4096, 4096, 4096),
    (4096, 14336, 4096), (4096, 4096, 14336), (8192, 8192, 8192), (8192, 28672, 8192),
)  # fmt: skip


class Pair(NamedTuple):
    """The formats of x and of w."""

    x: Format
    w: Format

    @property
    def inner(self) -> str | None:
        """What sums are rounded to: float32 those of integers, which are exact in a block. Sums of
        small floats keep 14 bits on Hopper's tensor cores, which bfloat16's bound leaves room for.
        """
        kinds = codes_of(self.x, self.w)
        return "float32" if kinds is not None and kinds[0].endswith("int8") else None

    def nbytes(self, shape: tuple[int, int, int]) -> int:
        """Bytes that a product must move: all components of both sides, and y.

        >>> pair = parse_pairs(["int8"])["int8"]
        >>> pair.nbytes((64, 128, 256)) - (64 + 128) * (256 + 4)
        16384
        """
        m, n, k = shape
        return self.x.nbytes((m, k)) + self.w.nbytes((n, k)) + float_dtype(DTYPE).itemsize * m * n


def parse_pairs(texts: Iterable[str]) -> dict[str, Pair]:
    """Pairs by the strings they were asked for: "X@W", or one format for both sides.

    >>> {text: str(pair.w) for text, pair in parse_pairs(["int8@int4:64", "fp8_e4m3"]).items()}
    {'int8@int4:64': 'int4:64', 'fp8_e4m3': 'fp8_e4m3'}
    """
    found = {}
    for text in texts:
        names = text.split("@")
        if len(names) > 2 or not all(names):
            raise ValueError(
                f"{clipped(text)} is no pair of formats; pass x's and w's with one @ between them, "
                "such as int8@int4, or one format for both"
            )
        found[text] = Pair(get_format(names[0]), get_format(names[-1]))
    return found


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes
    ----------
    pairs
        Of formats, by the name that was asked for.
    shapes
        (M, N, K).
    repeats
        Rounds of each timing.
    """

    pairs: Mapping[str, Pair]
    shapes: tuple[tuple[int, int, int], ...] = SHAPES
    repeats: int = 2 * MIN_REPEATS


def run(
    gpu: Gpu,
    settings: Settings,
    peers: Sequence[GemmPeer] = (),
    begin: Callable[[str], None] = lambda text: None,
) -> Iterator[GemmMeasurement]:
    """Measure everything: for each shape all pairs.

    Parameters
    ----------
    gpu
        Where.
    settings
        What.
    peers
        All that have a pair are timed beside ours.
    begin
        Called with a text before each measurement.
    """
    for shape in settings.shapes:
        m, n, k = shape
        dense: dict[str, PeerTiming] = {}  # of peers that decode, whose time all pairs share
        x, w = (
            gpu.upload(random_values(size, DTYPE, seed))
            for seed, size in enumerate(((m, k), (n, k)))
        )
        for name, pair in settings.pairs.items():
            begin(f"{name} {m}x{n}x{k}")
            yield _measure(gpu, name, pair, x, w, settings.repeats, peers, dense)
            gpu.release()


def _measure(
    gpu: Gpu,
    name: str,
    pair: Pair,
    x: Any,
    w: Any,
    repeats: int,
    peers: Sequence[GemmPeer],
    dense: dict[str, PeerTiming],
) -> GemmMeasurement:
    """One pair and shape; `dense` gets the timings of the peers that decode."""
    shape = len(x), len(w), x.shape[1]
    nbytes = pair.nbytes(shape)
    xq, wq = quantize(x, pair.x), quantize(w, pair.w)
    expected = Expected.of(_decoded(gpu, xq), _decoded(gpu, wq), DTYPE, pair.inner)
    more = range(copies(gpu.machine.l2_bytes, nbytes) - 1)
    # Codes narrower than a byte are laid out for products, as who multiplies often has them.
    weight = prepack(wq) if pair.w.bits < 8 else wq
    xs, weights = ([q, *(copy_weight(gpu, q) for _ in more)] for q in (xq, weight))
    timing, host, right = time_checked(
        gpu,
        lambda x, w, y: linear(x, w, out_dtype=DTYPE, out=y),
        xs,
        weights,
        shape[1],
        expected,
        repeats,
    )
    found = []
    for peer in peers:
        timed = dense.get(peer.name)
        if timed is None:
            make = partial(peer.calls, xq, wq, gpu.machine.l2_bytes)
            timed = time_product(peer, make, repeats, expected)
        if timed is not None:
            found.append(timed)
            if peer.is_dense:
                dense[peer.name] = timed
    return GemmMeasurement(name, DTYPE, shape, nbytes, timing, host, right, tuple(found))


def _decoded(gpu: Gpu, q: QuantArray) -> np.ndarray:
    """What it decodes to, by `dequantize`, whose own benchmark compares it with the reference."""
    return gpu.download(q.dequantize(dtype=np.float32))
