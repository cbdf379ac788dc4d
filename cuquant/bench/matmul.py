"""The benchmark of products: cases, bytes, times on the device and the host, and whether right."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from cuquant.array.packed_weight import ROWS_LAYOUT, PackedWeight, prepack
from cuquant.array.quant_array import QuantArray
from cuquant.bench.checked import Expected, time_checked
from cuquant.bench.gpu import Gpu
from cuquant.bench.matmul_peers import Calls, ProductPeer, time_product
from cuquant.bench.matmul_report import ProductMeasurement
from cuquant.bench.peers import reason
from cuquant.bench.quantize import on_host, random_values
from cuquant.bench.report import PeerTiming
from cuquant.bench.timing import MIN_REPEATS, copies
from cuquant.formats import Format
from cuquant.interop import float_dtype
from cuquant.ops.matmul.door import linear
from cuquant.ops.quantize.door import quantize

FORMULA = (
    "TB/s = (weight and scales + x + y) / time; TFLOP/s = 2 M N K / time; the floor is the longer "
    "of bytes at the reading rate and operations at cuBLAS's; faster: than the fastest peer"
)
FORMATS = ("int4", "nf4")
DTYPES = ("float16",)
SHAPES = ((4096, 4096), (8192, 8192), (14336, 4096), (4096, 14336), (28672, 8192))
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes
    ----------
    formats
        Of the weights, by the name that was asked for.
    dtypes
        Of x and y.
    shapes
        Of the weights, [N, K].
    batches
        Rows of x.
    prepack
        Whether weights are laid out by `cuquant.prepack`, or are QuantArrays as they are.
    repeats
        Rounds of each timing.
    cold
        Whether each call has another copy of the weight, so that none is in the L2 cache; else all
        have the same one, which stays there where it fits.
    """

    formats: dict[str, Format]
    dtypes: tuple[str, ...] = DTYPES
    shapes: tuple[tuple[int, int], ...] = SHAPES
    batches: tuple[int, ...] = BATCHES
    prepack: bool = True
    repeats: int = 2 * MIN_REPEATS
    cold: bool = True


def product_bytes(fmt: Format, shape: tuple[int, int], batch: int, itemsize: int) -> int:
    """Bytes that x @ w.T must move: all components of w, x and y.

    >>> from cuquant.formats import get_format
    >>> product_bytes(get_format("int4"), (4096, 4096), 1, 2) - 2 * (4096 + 4096)
    8650752
    """
    rows, depth = shape
    return fmt.nbytes(shape) + itemsize * batch * (rows + depth)


def run(
    gpu: Gpu,
    settings: Settings,
    peers: Sequence[ProductPeer] = (),
    begin: Callable[[str], None] = lambda text: None,
) -> Iterator[ProductMeasurement]:
    """Measure everything: for each dtype and shape all formats, for each of these all batches.

    Parameters
    ----------
    gpu
        Where.
    settings
        What.
    peers
        All that have a format are timed beside ours.
    begin
        Called with a text before each measurement.
    """
    for dtype in settings.dtypes:
        for shape in settings.shapes:
            dense: dict[tuple[str, int], PeerTiming] = {}  # of peers that decode the weight
            values = random_values(shape, dtype)
            x = random_values((max(settings.batches), shape[1]), dtype)
            for name, fmt in settings.formats.items():
                case = f"{name} {dtype} {shape[0]}x{shape[1]}"
                begin(case)
                bench = Bench(gpu, name, fmt, values, x, settings, peers, dense)
                for batch in settings.batches:
                    begin(f"{case}, batch {batch}")
                    yield bench.measure(batch)
                del bench
                gpu.release()


class Bench:
    """One format on one matrix.

    Parameters
    ----------
    gpu, settings, peers
        See `run`.
    name, fmt
        The format, and how it was asked for.
    values, x
        The weight [N, K], and as many rows of x as the largest batch, on the host.
    dense
        Timings of the dense peers by name and batch, which all formats of a shape share.
    """

    def __init__(
        self,
        gpu: Gpu,
        name: str,
        fmt: Format,
        values: np.ndarray,
        x: np.ndarray,
        settings: Settings,
        peers: Sequence[ProductPeer],
        dense: dict[tuple[str, int], PeerTiming],
    ) -> None:
        self.gpu, self.name, self.fmt, self.settings, self.dense = gpu, name, fmt, settings, dense
        self.shape = len(values), x.shape[1]
        self.dtype, self.x = str(x.dtype), gpu.upload(x)
        q = quantize(gpu.upload(values), fmt)
        count = copies(gpu.machine.l2_bytes, q.nbytes) if settings.cold else 1
        weight = prepack(q) if settings.prepack else q
        self.weights = [weight, *(copy_weight(gpu, weight) for _ in range(count - 1))]
        self.peers = [(peer, self._prepared(peer, q)) for peer in peers]
        decoded = on_host(gpu, q).dequantize(dtype=np.float32)
        self.expected = Expected.of(x, decoded, self.dtype)

    def measure(self, batch: int) -> ProductMeasurement:
        shape = self.shape
        nbytes = product_bytes(self.fmt, shape, batch, float_dtype(self.dtype).itemsize)
        count = copies(self.gpu.machine.l2_bytes, nbytes)
        weights = self.weights[:count] if self.settings.cold else self.weights * count
        xs = [self.gpu.copy(self.x[:batch]) for _ in weights]
        expected, repeats = self.expected.first(batch), self.settings.repeats
        timing, host, right = time_checked(
            self.gpu,
            lambda x, w, y: linear(x, w, out=y),
            xs,
            weights,
            shape[0],
            expected,
            repeats,
        )
        peers = [self._time_peer(peer, prepared, xs, expected) for peer, prepared in self.peers]
        layout = getattr(self.weights[0], "layout", ROWS_LAYOUT)
        return ProductMeasurement(
            self.name, self.dtype, shape, nbytes, timing, host, right,
            tuple(peer for peer in peers if peer is not None), batch, layout,
        )  # fmt: skip

    # ---- peers --------------------------------------------------------------------------------

    def _prepared(self, peer: ProductPeer, q: QuantArray) -> Calls | PeerTiming | None:
        """What makes the peer's calls; its problem; None where it has no such format."""
        if peer.is_dense and any(name == peer.name for name, _ in self.dense):
            return None
        try:
            return peer.prepare(q, self.dtype, self.gpu.machine.l2_bytes)
        except Exception as error:  # as in `time_product`
            return PeerTiming(peer.name, None, reason(error))

    def _time_peer(
        self,
        peer: ProductPeer,
        prepared: Calls | PeerTiming | None,
        xs: Sequence[Any],
        expected: Expected,
    ) -> PeerTiming | None:
        batch = len(expected.wanted)
        if prepared is None:
            return self.dense.get((peer.name, batch))
        if isinstance(prepared, PeerTiming):
            found: PeerTiming | None = prepared
        else:
            found = time_product(peer, partial(prepared, xs), self.settings.repeats, expected)
        if peer.is_dense and found is not None:
            self.dense[peer.name, batch] = found
        return found


def copy_weight(gpu: Gpu, weight: QuantArray | PackedWeight) -> QuantArray | PackedWeight:
    return replace(weight, components={n: gpu.copy(part) for n, part in weight.arrays().items()})
