"""Other libraries at the same products: prepared from the same quantized weight, timed alike.

None of them is a dependency, and torch, which most of them need, is not imported here by name.
What a peer computes is compared with the float64 product, loosely: a figure of a product that is
wrong would be none.
"""

import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from cuquant.array.quant_array import QuantArray
from cuquant.bench.checked import Expected
from cuquant.bench.gpu import CupyEngine
from cuquant.bench.peers import TorchPeer, reason
from cuquant.bench.report import PeerTiming
from cuquant.bench.timing import Call, Engine, copies, measure
from cuquant.errors import clipped, did_you_mean
from cuquant.formats import Uniform
from cuquant.interop import load_cupy

MOST_ERROR = 0.02  # of a peer's result, rms over rms: bfloat16's scales and sums make 0.005

T = TypeVar("T")
# By the name that selects it: the module that must be installed, and what makes the peer.
Peers = Mapping[str, tuple[str | None, Callable[[], T]]]
# Calls for these rows of x, of which there are several copies.
Calls = Callable[[Sequence[Any]], list[Call]]


class TimedPeer(Protocol):
    """A library whose products are timed and compared with the right ones."""

    @property
    def name(self) -> str:
        """With its version behind a space."""
        ...

    @property
    def engine(self) -> Engine:
        """Its clock."""
        ...

    @property
    def is_dense(self) -> bool:
        """Whether it multiplies with decoded weights, and its time is that of every format."""
        ...

    def columns(self, y: Any, which: np.ndarray) -> np.ndarray:
        """Some columns of a call's result [M, N] on the host, in float64."""
        ...


class ProductPeer(TimedPeer, Protocol):
    """A library that multiplies with weights of some formats."""

    def prepare(self, q: QuantArray, dtype: str, l2_bytes: int) -> Calls | None:
        """Its own weights, [N, K] like `q`'s, enough of them to exceed the cache; or None.

        None where it has no such format. `dtype` is x's.
        """
        ...


def time_product(
    peer: TimedPeer,
    make: Callable[[], list[Call] | None],
    repeats: int,
    expected: Expected,
) -> PeerTiming | None:
    """A peer's timing; its errors, and wrong results, are a part of the result.

    Parameters
    ----------
    make
        Makes its calls; None where it has no such product.
    expected
        What some columns of the product are.
    """
    try:
        calls = make()
        if calls is None:
            return None
        timing = measure(peer.engine, calls, repeats)
        found = peer.columns(calls[0](), expected.columns)
        error = np.linalg.norm(found - expected.wanted) / np.linalg.norm(expected.wanted)
    except Exception as problem:  # whatever another library raises is no reason to stop
        return PeerTiming(peer.name, None, reason(problem))
    if not error < MOST_ERROR:
        return PeerTiming(peer.name, None, f"its result is off by {error:.2g} of its size")
    return PeerTiming(peer.name, timing)


def check_peers(names: Iterable[str], known: Peers[Any]) -> None:
    """ValueError for a name that is not in a table of peers."""
    for name in names:
        if name not in known:
            near = did_you_mean(name, known)
            raise ValueError(f"peer {clipped(name)} is unknown{near}; known are {', '.join(known)}")


def find_product_peers(names: Iterable[str], known: Peers[T]) -> tuple[list[T], list[str]]:
    """Those of a table of peers that can be used, and why others cannot."""
    found: list[T] = []
    notes = []
    for name in names:
        module, make = known[name]
        if module is not None and importlib.util.find_spec(module) is None:
            notes.append(f"{name}: {module} is not installed")
            continue
        try:
            found.append(make())
        except Exception as error:  # its import loads libraries, which may fail in any way
            notes.append(f"{name} cannot be used: {reason(error)}")
    return found, notes


# ---- dense weights ------------------------------------------------------------------------------


class CupyCublas:
    """cuBLAS by CuPy, whose products no graph records: the host's time is in small ones."""

    is_dense = True

    def __init__(self) -> None:
        self._cupy = load_cupy()
        importlib.import_module("cupy_backends.cuda.libs.cublas")  # the library may be missing
        self.engine = CupyEngine(self._cupy)
        self.name = f"cuBLAS (CuPy {self._cupy.__version__})"

    def prepare(self, q: QuantArray, dtype: str, l2_bytes: int) -> Calls:
        first = q.dequantize(dtype=dtype)
        weights = [first, *(first.copy() for _ in range(copies(l2_bytes, first.nbytes) - 1))]
        return lambda xs: self.products(weights, xs)

    def products(self, weights: Sequence[Any], xs: Sequence[Any]) -> list[Call]:
        """x @ w.T for each weight."""
        made = []
        for i, w in enumerate(weights):
            x = xs[i % len(xs)]
            y = self._cupy.empty((x.shape[0], w.shape[0]), x.dtype)
            made.append(lambda x=x, w=w, y=y: self._cupy.matmul(x, w.T, out=y))
        return made

    def columns(self, y: Any, which: np.ndarray) -> np.ndarray:
        return y.get()[:, which].astype(np.float64)


class TorchProductPeer(TorchPeer):
    """What peers share that multiply torch's tensors."""

    is_dense = False

    def dtype(self, name: str) -> Any:
        return getattr(self.torch, name)

    def columns(self, y: Any, which: np.ndarray) -> np.ndarray:
        return y[:, self.torch.as_tensor(which, device=y.device)].double().cpu().numpy()

    def paired(
        self, weights: Sequence[Any], call: Callable[[Any, Any], Any], dtype: str | None = None
    ) -> Calls:
        """`call(x, weight)` for each weight; x is cast first where a dtype is given."""

        def calls(xs: Sequence[Any]) -> list[Call]:
            tensors = [self.tensor(x) for x in xs]
            if dtype is not None:
                tensors = [tensor.to(self.dtype(dtype)) for tensor in tensors]
            return [
                partial(call, tensors[i % len(tensors)], weight) for i, weight in enumerate(weights)
            ]

        return calls


class TorchCublas(TorchProductPeer):
    """cuBLAS by torch, with decoded weights."""

    is_dense = True

    def __init__(self) -> None:
        super().__init__()
        self.name = f"cuBLAS (torch {self.torch.__version__})"

    def prepare(self, q: QuantArray, dtype: str, l2_bytes: int) -> Calls:
        first = self.tensor(q.dequantize(dtype=dtype))
        count = copies(l2_bytes, first.numel() * first.element_size())
        weights = [first, *(first.clone() for _ in range(count - 1))]
        return self.paired(weights, self.torch.nn.functional.linear)

    def products(self, weights: Sequence[Any], xs: Sequence[Any]) -> list[Call]:
        """x @ w.T for each weight."""
        tensors = [self.tensor(w) for w in weights]
        return self.paired(tensors, self.torch.nn.functional.linear)(xs)


def cublas() -> TorchCublas | CupyCublas:
    """cuBLAS by torch, whose calls a graph records, or else by CuPy."""
    if importlib.util.find_spec("torch") is not None:
        try:
            return TorchCublas()
        except Exception:  # a torch that is broken or has no CUDA
            return CupyCublas()
    return CupyCublas()


# ---- quantized weights --------------------------------------------------------------------------


def group_of(q: QuantArray, depth: int) -> int | None:
    """Columns that share a scale; None where these are no runs of a row, or scales are nested."""
    rule = q.format.scale
    if rule is None or rule.nested or q.format.is_blocks:
        return None
    if rule.block == "row":
        return depth
    return rule.block if isinstance(rule.block, int) else None


def is_signed(q: QuantArray) -> bool:
    """Whether values are (code - 2^(bits - 1)) * scale."""
    return (
        isinstance(q.format.codec, Uniform) and re.fullmatch("int[2-8]", q.format.name) is not None
    )


class BitsandbytesMatmul(TorchProductPeer):
    """nf4 and fp4 of bitsandbytes."""

    def __init__(self) -> None:
        super().__init__()
        self._library = importlib.import_module("bitsandbytes")
        self.name = f"bitsandbytes {importlib.metadata.version('bitsandbytes')}"

    def prepare(self, q: QuantArray, dtype: str, l2_bytes: int) -> Calls | None:
        fmt = q.format
        group = group_of(q, q.shape[1])
        if fmt.name not in ("nf4", "fp4") or group is None or group == q.shape[1]:
            return None
        values = self.tensor(q.dequantize(dtype=dtype))
        weights = [
            self._library.functional.quantize_4bit(values, blocksize=group, quant_type=fmt.name)
            for _ in range(copies(l2_bytes, q.nbytes))
        ]
        return self.paired(weights, lambda x, w: self._library.matmul_4bit(x, w[0].t(), w[1]))


class Tinygemm(TorchProductPeer):
    """torch's own product with int4 weights; x and y are bfloat16 whatever was asked for."""

    GROUPS = (32, 64, 128, 256)
    INNER = 8  # tiles of 16 columns that lie together

    def __init__(self) -> None:
        super().__init__()
        self._ops = self.torch.ops.aten
        self._ops._weight_int4pack_mm  # noqa: B018  (an AttributeError where torch has none)
        self.name = f"tinygemm (torch {self.torch.__version__}, bfloat16)"

    def prepare(self, q: QuantArray, dtype: str, l2_bytes: int) -> Calls | None:
        group = group_of(q, q.shape[1])
        if q.format.name not in ("int4", "uint4") or group not in self.GROUPS:
            return None
        codes = self.tensor(q.codes())
        scale = self.tensor(q.scale).float()
        middle = 0 * scale  # the value of code 8
        if q.zero_point is not None:
            middle = (8 - self.tensor(q.zero_point).float()) * scale
        pair = self.torch.stack([scale, middle], dim=2).transpose(0, 1)  # [groups, N, 2]
        pair = pair.to(self.torch.bfloat16).contiguous()
        packed = self._ops._convert_weight_to_int4pack(
            (codes[:, ::2] << 4 | codes[:, 1::2]).contiguous(), self.INNER
        )
        weights = [(packed.clone(), pair.clone()) for _ in range(copies(l2_bytes, q.nbytes))]
        call = self._ops._weight_int4pack_mm
        return self.paired(weights, lambda x, w: call(x, w[0], group, w[1]), "bfloat16")


HUMMING_FLOATS = {
    "fp4_e2m1": "float4e2m1", "fp6_e2m3": "float6e2m3", "fp6_e3m2": "float6e3m2",
    "fp8_e4m3": "float8e4m3", "fp8_e5m2": "float8e5m2",
}  # fmt: skip


def humming_kind(q: QuantArray) -> str | None:
    """humming's name of a format's codes, or None."""
    return q.format.name if is_signed(q) else HUMMING_FLOATS.get(q.format.name)


class Humming(TorchProductPeer):
    """humming-kernels: signed integers of 2 to 8 bits, and small floats."""

    def __init__(self) -> None:
        super().__init__()
        self._layer = importlib.import_module("humming.layer").HummingLayer
        self._ops = importlib.import_module("humming.ops")
        self.name = f"humming {importlib.metadata.version('humming-kernels')}"

    def prepare(self, q: QuantArray, dtype: str, l2_bytes: int) -> Calls | None:
        if dtype == "float32":
            return None
        layers = self.layers(q, dtype, l2_bytes)
        return None if layers is None else self.paired(layers, lambda x, layer: layer(x))

    def layers(
        self, q: QuantArray, dtype: str, l2_bytes: int, input_kind: str | None = None
    ) -> list[Any] | None:
        """Layers with `q`'s codes, for x of `dtype`, or for x that is quantized a row; or None."""
        rows, depth = q.shape
        group, kind = group_of(q, depth), humming_kind(q)
        if kind is None or group is None:
            return None
        codes = self.tensor(q.codes()).to(self.torch.int32)
        tensors = {
            "weight": self._ops.pack_weight(codes, q.format.codec.bits),
            "weight_scale": self.tensor(q.scale).to(self.dtype(dtype)),
        }
        config = {"dtype": kind, "group_size": 0 if group == depth else group}
        beside = {} if input_kind is None else {"input_config": {"dtype": input_kind}}
        layers = []
        for _ in range(copies(l2_bytes, q.nbytes)):
            layer = self._layer(
                shape_n=rows,
                shape_k=depth,
                weight_config=dict(config),
                torch_dtype=self.dtype(dtype),
                **{name: dict(value) for name, value in beside.items()},
            ).cuda()
            layer.load_from_tensors(tensors)
            layer.transform()
            layers.append(layer)
        return layers


class Gemlite(TorchProductPeer):
    """gemlite: signed integers of 2, 4 and 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self._library = importlib.import_module("gemlite")
        self.name = f"gemlite {importlib.metadata.version('gemlite')}"

    def prepare(self, q: QuantArray, dtype: str, l2_bytes: int) -> Calls | None:
        rows, depth = q.shape
        group, bits = group_of(q, depth), q.format.codec.bits
        if not is_signed(q) or bits not in (2, 4, 8) or group is None or dtype == "float32":
            return None
        codes, scale = self.tensor(q.codes()), self.tensor(q.scale).to(self.dtype(dtype))
        kind = {"float16": "FP16", "bfloat16": "BF16"}[dtype]
        kind = getattr(self._library.DType, kind)
        layers = []
        for _ in range(copies(l2_bytes, q.nbytes)):
            layer = self._library.GemLiteLinear(
                bits,
                group_size=group,
                in_features=depth,
                out_features=rows,
                input_dtype=kind,
                output_dtype=kind,
            )
            layer.pack(codes.clone(), scale.clone(), 1 << (bits - 1), None)
            layers.append(layer)
        return self.paired(layers, lambda x, layer: layer(x))


PEERS: Peers[ProductPeer] = {
    "cublas": (None, cublas),
    "bitsandbytes": ("bitsandbytes", BitsandbytesMatmul),
    "tinygemm": ("torch", Tinygemm),
    "humming": ("humming", Humming),
    "gemlite": ("gemlite", Gemlite),
}
