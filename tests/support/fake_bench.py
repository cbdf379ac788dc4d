"""NumPy in the place of a GPU that is measured, and of the libraries beside it."""

import ml_dtypes
import numpy as np
import pytest

from cuquant.bench.report import Machine

MACHINE = Machine("Fake 100", "580.1", "13.0", "14.2.0", "12.9", "0.1.0", 1 << 16)


class FakeEngine:
    """A device that takes 3, 4, 5, ... microseconds for whatever it is given."""

    def __init__(self, captures=True):
        self.captures, self.clock, self.captured = captures, 2.0, 0

    def capture(self, run):
        if not self.captures:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captured += 1
        return run

    def elapsed(self, run):
        run()
        self.clock += 1
        return self.clock


class FakeGpu:
    """NumPy arrays on a device."""

    def __init__(self, captures=True):
        self.machine, self.engine = MACHINE, FakeEngine(captures)
        self.released = 0

    def upload(self, x):
        return x.copy()

    def download(self, x):
        return x.copy()

    def copy(self, x):
        return x.copy()

    def poison(self, x):
        x.reshape(-1).view(np.uint8)[...] = 0xA5

    def memory_calls(self, nbytes):
        return {name: [lambda: None, lambda: None] for name in ("copy", "read", "write")}

    def release(self):
        self.released += 1


class QuickEngine(FakeEngine):
    """Replays of a graph do nothing: the results are there already."""

    def capture(self, run):
        super().capture(run)
        return lambda: None


class FakeProductPeer:
    """Multiplies with what a weight decodes to."""

    is_dense = False

    def __init__(self, name="other 1.0", formats=("int4",), factor=1.0, problem=None):
        self.engine, self.name = QuickEngine(), name
        self.formats, self.factor, self.problem = formats, factor, problem
        self.prepared = []

    def prepare(self, q, dtype, l2_bytes):
        self.prepared.append((q.format.name, dtype, l2_bytes))
        if q.format.name not in self.formats:
            return None
        if self.problem == "prepare":
            raise OSError("no\nnvcc")
        w = q.dequantize(dtype="float32") * self.factor
        return lambda xs: [lambda x=x: self.call(x, w) for x in xs]

    def call(self, x, w):
        if self.problem == "call":
            raise ValueError("no kernel")
        return x.astype(np.float32) @ w.T

    def columns(self, y, which):
        return y[:, which].astype(np.float64)


class FakeCublas(FakeProductPeer):
    is_dense = True

    def __init__(self):
        super().__init__("cuBLAS (fake 1.0)", ("int4", "nf4"))

    def products(self, weights, xs):
        return [lambda x=x, w=w: x @ w.T for w, x in zip(weights, xs, strict=True)]


class FakeGemmPeer(FakeProductPeer):
    """Multiplies what two quantized arrays decode to."""

    def __init__(self, name="other 1.0", formats=("int8",), **changes):
        super().__init__(name, formats, **changes)

    def calls(self, x, w, l2_bytes):
        made = self.prepare(w, "float32", l2_bytes)
        return made and made([x.dequantize(dtype="float32")] * 2)


class FakeDenseGemm(FakeGemmPeer):
    is_dense = True

    def __init__(self):
        super().__init__("cuBLAS (fake 1.0)", ("int8", "int4", "fp8_e4m3"))


def on_cpu(kind, **attributes):
    """A peer with torch on the CPU in the place of the GPU's."""
    torch = pytest.importorskip("torch")
    peer = object.__new__(kind)
    peer.torch, peer.engine, peer.name = torch, FakeEngine(), kind.__name__
    for name, value in attributes.items():
        setattr(peer, name, value)

    def tensor(x):
        if x.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(np.array(x))

    peer.tensor = tensor
    return peer
