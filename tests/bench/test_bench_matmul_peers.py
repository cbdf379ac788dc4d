"""Other libraries at the same products, with fakes or torch on the CPU in their place."""

from types import SimpleNamespace

import numpy as np
import pytest
from fake_bench import FakeEngine, FakeProductPeer, on_cpu

import cuquant as cq
from cuquant.bench import gemm_peers, matmul_peers
from cuquant.bench.checked import Expected


def test_missing_and_broken_peers_are_notes():
    def broken():
        raise OSError("libcudart.so.12:\nno such file")

    table = {
        "a": (None, FakeProductPeer),
        "b": ("no_such_module", FakeProductPeer),
        "c": (None, broken),
    }
    found, notes = matmul_peers.find_product_peers(table, table)
    assert [peer.name for peer in found] == ["other 1.0"]
    assert notes == [
        "b: no_such_module is not installed",
        "c cannot be used: libcudart.so.12: no such file",
    ]
    with pytest.raises(ValueError, match="known are a, b, c"):
        matmul_peers.check_peers(["d"], table)


def test_all_peers_are_made_or_explained():
    """Whatever is installed here: no peer's constructor raises through."""
    for table in (matmul_peers.PEERS, gemm_peers.PEERS):
        found, notes = matmul_peers.find_product_peers(table, table)
        assert len(found) + len(notes) == len(table)


def operands(name, dtype="float16", **options):
    rng = np.random.default_rng(1)
    kind = np.dtype(dtype)
    q = cq.quantize(rng.standard_normal((48, 256), np.float32), name, **options)
    return q, rng.standard_normal((3, 256), np.float32).astype(kind)


def timed(peer, q, x, dtype="float16"):
    """The timing of a peer, which checks its result."""
    calls = peer.prepare(q, dtype, 1000)
    if calls is None:
        return None
    expected = Expected.of(x, q.dequantize(dtype="float32"), dtype)
    return matmul_peers.time_product(peer, lambda: calls([x, x.copy()]), 10, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_cublas_by_torch_multiplies_with_decoded_weights(dtype):
    peer = on_cpu(matmul_peers.TorchCublas)
    q, x = operands("nf4", dtype)
    assert timed(peer, q, x, dtype).problem is None
    (call,) = peer.products([q.dequantize(dtype=dtype)], [x])
    assert tuple(call().shape) == (3, 48)


def test_cublas_by_cupy_multiplies_with_decoded_weights():
    peer = object.__new__(matmul_peers.CupyCublas)
    peer._cupy, peer.engine, peer.name = np, FakeEngine(), "cuBLAS"
    peer.columns = lambda y, which: y[:, which].astype(np.float64)
    q, x = operands("nf4", "float32")
    assert timed(peer, q, x, "float32").problem is None


@pytest.mark.parametrize("name, block", [("nf4", 64), ("fp4", 128)])
def test_bitsandbytes_multiplies_with_its_own_bytes(name, block):
    log = []

    def quantize_4bit(values, **options):
        log.append(options)
        return values, "state"

    def matmul_4bit(x, packed, state):
        assert state == "state"
        return x @ packed

    library = SimpleNamespace(
        functional=SimpleNamespace(quantize_4bit=quantize_4bit), matmul_4bit=matmul_4bit
    )
    peer = on_cpu(matmul_peers.BitsandbytesMatmul, _library=library)
    q, x = operands(name, block_size=block)
    assert timed(peer, q, x).problem is None
    assert set(map(str, log)) == {str({"blocksize": block, "quant_type": name})}
    for other, options in (("int4", {}), ("nf4", {"double_quant": True}), ("q4_0", {})):
        assert peer.prepare(operands(other, **options)[0], "float16", 1000) is None


@pytest.mark.parametrize("name, group", [("int4", 32), ("uint4", 64), ("int4", 128)])
def test_tinygemm_gets_the_same_codes(name, group):
    torch = pytest.importorskip("torch")

    def pack(codes, inner):
        assert codes.dtype == torch.uint8 and inner == 8
        return codes

    def product(x, packed, size, pair):
        """w = (code - 8) * scale + value of 8; pairs are [groups, N, 2]."""
        assert x.dtype == pair.dtype == torch.bfloat16 and size == group
        codes = torch.stack([packed >> 4, packed & 15], dim=2).reshape(len(packed), -1)
        wide = pair.float().transpose(0, 1).repeat_interleave(size, dim=1)
        w = (codes.float() - 8) * wide[..., 0] + wide[..., 1]
        return (x.float() @ w.T).to(torch.bfloat16)

    ops = SimpleNamespace(_convert_weight_to_int4pack=pack, _weight_int4pack_mm=product)
    peer = on_cpu(matmul_peers.Tinygemm, _ops=ops)
    q, x = operands(name, block_size=group)
    assert timed(peer, q, x).problem is None
    for other, options in (("int3", {}), ("nf4", {}), ("int4", {"block_size": 16})):
        assert peer.prepare(operands(other, **options)[0], "float16", 1000) is None


class FakeHummingLayer:
    """Decodes offset-binary codes of int formats, each in an int32 here."""

    def __init__(self, **options):
        self.options, self.is_ready = options, False

    def cuda(self):
        return self

    def load_from_tensors(self, tensors):
        self.tensors = tensors

    def transform(self):
        self.is_ready = True

    def __call__(self, x):
        config = self.options["weight_config"]
        assert self.is_ready and self.options["torch_dtype"] == x.dtype
        codes, scale = self.tensors["weight"], self.tensors["weight_scale"].float()
        size = config["group_size"] or codes.shape[1]
        middle = 1 << (int(config["dtype"].removeprefix("int")) - 1)
        w = (codes - middle).float() * scale.repeat_interleave(size, dim=1)
        return (x.float() @ w.T).to(x.dtype)


@pytest.mark.parametrize(
    "name, options", [("int4", {}), ("int3", {"block_size": 64}), ("int8", {}), ("int2", {})]
)
def test_humming_gets_the_same_codes(name, options):
    torch = pytest.importorskip("torch")

    def pack_weight(codes, bits):
        assert codes.dtype == torch.int32 and bits == int(name[3])
        return codes

    peer = on_cpu(
        matmul_peers.Humming,
        _ops=SimpleNamespace(pack_weight=pack_weight),
        _layer=FakeHummingLayer,
    )
    q, x = operands(name, **options)
    assert timed(peer, q, x).problem is None
    for other in ("nf4", "uint4", "q4_0", "mxfp4"):
        assert peer.prepare(operands(other)[0], "float16", 1000) is None


class FakeGemliteLinear:
    def __init__(self, bits, **options):
        self.bits, self.options = bits, options

    def pack(self, codes, scale, zero, bias):
        assert str(codes.dtype) == "torch.uint8" and zero == 1 << (self.bits - 1) and bias is None
        wide = scale.float().repeat_interleave(self.options["group_size"], dim=1)
        self.w = (codes.float() - zero) * wide

    def __call__(self, x):
        assert self.options["input_dtype"] == self.options["output_dtype"] == "half"
        return (x.float() @ self.w.T).to(x.dtype)


@pytest.mark.parametrize("name", ["int2", "int4", "int8"])
def test_gemlite_gets_the_same_codes(name):
    library = SimpleNamespace(
        DType=SimpleNamespace(FP16="half", BF16="wide"), GemLiteLinear=FakeGemliteLinear
    )
    peer = on_cpu(matmul_peers.Gemlite, _library=library)
    q, x = operands(name)
    assert timed(peer, q, x).problem is None
    for other in ("int3", "uint4", "nf4", "q8_0"):
        assert peer.prepare(operands(other)[0], "float16", 1000) is None
