"""Other libraries at products of two quantized arrays, given the same codes and scales.

Each keeps the rules of cuquant/bench/matmul_peers.py: none is a dependency, torch is not imported
by name, and what a peer computes is compared with the float64 product.
"""

import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from cuquant.array.quant_array import QuantArray
from cuquant.bench.matmul_peers import (
    CupyCublas,
    Humming,
    Peers,
    TimedPeer,
    TorchCublas,
    TorchProductPeer,
    cublas,
    humming_kind,
)
from cuquant.bench.timing import Call, copies
from cuquant.formats import Format

# torch's dtypes by the names of formats.
FP8 = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


class GemmPeer(TimedPeer, Protocol):
    """A library that multiplies quantized arrays of some pairs of formats."""

    def calls(self, x: QuantArray, w: QuantArray, l2_bytes: int) -> list[Call] | None:
        """x [M, K] @ w [N, K].T to bfloat16, with enough operands to exceed the cache; or None.

        None where it has no such pair.
        """
        ...


class Dense:
    """cuBLAS in bfloat16, with both sides decoded: one time for every pair."""

    is_dense = True

    def __init__(self) -> None:
        self._cublas: TorchCublas | CupyCublas = cublas()
        self.name, self.engine = self._cublas.name, self._cublas.engine

    def calls(self, x: QuantArray, w: QuantArray, l2_bytes: int) -> list[Call]:
        rows = x.dequantize(dtype="bfloat16")
        made = self._cublas.prepare(w, "bfloat16", l2_bytes)
        return made([rows, rows.copy()])

    def columns(self, y: Any, which: np.ndarray) -> np.ndarray:
        return self._cublas.columns(y, which)


class TorchGemmPeer(TorchProductPeer):
    """What peers share that take torch's tensors on both sides."""

    def rotated(
        self, call: Callable[..., Any], operands: Sequence[Any], l2_bytes: int
    ) -> list[Call]:
        """`call(*operands)` with copies of the tensors that lie as these do."""
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in operands)
        made = [tuple(operands)]
        for _ in range(copies(l2_bytes, nbytes) - 1):
            made.append(tuple(tensor.clone() for tensor in operands))  # clones keep strides
        return [lambda own=own: call(*own) for own in made]

    def codes(self, q: QuantArray) -> Any:
        """The codes of int8 or fp8, a byte each, as torch has them."""
        packed = self.tensor(q.packed)
        name = FP8.get(q.format.name)
        return packed if name is None else packed.view(self.dtype(name))


class IntMm(TorchGemmPeer):
    """torch._int_mm: bare int32 sums, which are scaled here to be compared, not timed."""

    def __init__(self) -> None:
        super().__init__()
        self.name = f"_int_mm (torch {self.torch.__version__}, int32 sums alone)"

    def calls(self, x: QuantArray, w: QuantArray, l2_bytes: int) -> list[Call] | None:
        kinds = {(q.format.name, _scaling(q.format)) for q in (x, w)}
        if not kinds <= {("int8", "row"), ("int8", "tensor")}:
            return None
        scales = [self.tensor(q.scale).float().reshape(-1) for q in (x, w)]
        multiply = self.torch._int_mm

        def call(a: Any, b: Any) -> Any:
            return multiply(a, b.t()), scales

        return self.rotated(call, [self.codes(q) for q in (x, w)], l2_bytes)

    def columns(self, y: Any, which: np.ndarray) -> np.ndarray:
        sums, (rows, columns) = y
        each = columns.expand(sums.shape[1])  # one for the tensor, or one a column
        scaled = super().columns(sums, which) * super().columns(each[None], which)
        return scaled * rows.double().cpu().numpy()[:, None]


class ScaledMm(TorchGemmPeer):
    """torch._scaled_mm: a scale for a tensor, for a row, or for 1x128 and 128x128 elements.

    As by default, sums of fewer bits meet others in float32; `fast`: the tensor cores keep all of a
    sum, as they do for scales of rows and tensors alone.
    """

    fast = False

    def __init__(self) -> None:
        super().__init__()
        fast = " fast" if self.fast else ""
        self.name = f"_scaled_mm{fast} (torch {self.torch.__version__})"

    def calls(self, x: QuantArray, w: QuantArray, l2_bytes: int) -> list[Call] | None:
        if not {x.format.name, w.format.name} <= FP8.keys():
            return None
        pair = _scaling(x.format), _scaling(w.format)
        scales = [self.tensor(q.scale) for q in (x, w)]
        if pair in ((128, 128), (128, (128, 128))) and not self.fast:
            # Scales of rows lie column after column, those of tiles as they are.
            scales = [s if block == (128, 128) else s.t().contiguous().t()
                      for s, block in zip(scales, pair, strict=True)]  # fmt: skip
        elif pair not in (("row", "row"), ("tensor", "tensor")):
            return None
        multiply, dtype = self.torch._scaled_mm, self.torch.bfloat16

        def call(a: Any, b: Any, of_a: Any, of_b: Any) -> Any:
            return multiply(a, b.t(), of_a, of_b.t(), out_dtype=dtype, use_fast_accum=self.fast)

        return self.rotated(call, [self.codes(x), self.codes(w), *scales], l2_bytes)


class FastScaledMm(ScaledMm):
    """torch._scaled_mm with use_fast_accum."""

    fast = True


class HummingGemm(Humming, TorchGemmPeer):
    """humming-kernels with int8 and fp8 x, a scale for each row of it."""

    def calls(self, x: QuantArray, w: QuantArray, l2_bytes: int) -> list[Call] | None:
        if _scaling(x.format) != "row" or x.format.name not in ("int8", *FP8):
            return None
        layers = self.layers(w, "bfloat16", l2_bytes, humming_kind(x))
        if layers is None:
            return None
        codes, scale = self.codes(x), self.tensor(x.scale)
        return [partial(layer, codes.clone(), input_scale=scale.clone()) for layer in layers]


class DeepGemm(TorchGemmPeer):
    """DeepGEMM: fp8 with scales for 1x128 elements of x and 128x128 of w."""

    def __init__(self) -> None:
        super().__init__()
        self._library = importlib.import_module("deep_gemm")
        self.name = f"DeepGEMM {getattr(self._library, '__version__', '')}".strip()

    def calls(self, x: QuantArray, w: QuantArray, l2_bytes: int) -> list[Call] | None:
        named = {x.format.name, w.format.name} == {"fp8_e4m3"}
        if not named or (_scaling(x.format), _scaling(w.format)) != (128, (128, 128)):
            return None
        rows, columns = x.shape[0], w.shape[0]
        aligned = self._library.get_mn_major_tma_aligned_tensor(self.tensor(x.scale))
        of_w = self.tensor(w.scale)
        y = self.torch.empty(rows, columns, dtype=self.torch.bfloat16, device=of_w.device)

        def call(a: Any, b: Any, y: Any) -> Any:
            self._library.fp8_gemm_nt((a, aligned), (b, of_w), y)
            return y

        return self.rotated(call, [self.codes(x), self.codes(w), y], l2_bytes)


def _scaling(fmt: Format) -> Any:
    """The elements that share a plain float32 scale: "row", "tensor", 128 or a pair; else None."""
    rule = fmt.scale
    if rule is None or rule.nested or fmt.is_blocks or rule.dtype != "float32" or rule.absmax:
        return None
    block = rule.block
    return 128 if block == (1, 128) else block


PEERS: Peers[GemmPeer] = {
    "cublas": (None, Dense),
    "int_mm": ("torch", IntMm),
    "scaled_mm": ("torch", ScaledMm),
    "scaled_mm_fast": ("torch", FastScaledMm),
    "humming": ("humming", HummingGemm),
    "deep_gemm": ("deep_gemm", DeepGemm),
}
