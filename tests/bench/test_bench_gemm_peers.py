"""Other libraries at products of two quantized arrays, with torch on the CPU or fakes in theirs."""

from types import SimpleNamespace

import numpy as np
import pytest
from fake_bench import FakeEngine, on_cpu

import cuquant as cq
from cuquant.bench import gemm, gemm_peers, matmul_peers
from cuquant.bench.checked import Expected

M, N, K = 24, 256, 512


def operands(name, depth=K):
    (pair,) = gemm.parse_pairs([name]).values()
    x, w = (np.random.default_rng(s).standard_normal((r, depth), np.float32) for s, r in
            enumerate((M, N)))  # fmt: skip
    return cq.quantize(x, pair.x), cq.quantize(w, pair.w)


def timed(peer, x, w):
    """The timing of a peer, which checks its result; None where it has no such pair."""
    expected = Expected.of(x.dequantize(dtype="float32"), w.dequantize(dtype="float32"), gemm.DTYPE)
    return matmul_peers.time_product(peer, lambda: peer.calls(x, w, 1000), 10, expected)


def refuses(peer, *names):
    return all(timed(peer, *operands(name)) is None for name in names)


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3@int4"])
def test_cublas_multiplies_decoded_sides(name, monkeypatch):
    monkeypatch.setattr(gemm_peers, "cublas", lambda: on_cpu(matmul_peers.TorchCublas))
    assert timed(gemm_peers.Dense(), *operands(name)).problem is None


@pytest.mark.parametrize("name", ["int8", "int8:tensor", "int8@int8:tensor", "int8:tensor@int8"])
def test_int_mm_gets_the_codes_and_its_sums_are_scaled_to_be_compared(name):
    peer = on_cpu(gemm_peers.IntMm)
    assert timed(peer, *operands(name)).problem is None
    assert refuses(peer, "int8@int4", "int8:32", "fp8_e4m3", "uint8:row", "int8+absmax")


def scaled_mm(torch, seen):
    """torch._scaled_mm on the CPU, with the shapes and strides that CUDA's wants."""

    def call(a, b, of_a, of_b, *, out_dtype, use_fast_accum):
        assert a.is_contiguous() and b.stride(0) == 1 and out_dtype == torch.bfloat16
        (m, k), n = a.shape, b.shape[1]
        if of_a.numel() == 1:
            kind = "tensor"
        elif of_a.shape == (m, 1) and of_b.shape == (1, n):
            assert of_a.is_contiguous() and of_b.is_contiguous()
            kind = "row"
        else:
            assert of_a.shape == (m, k // 128) and of_a.stride() == (1, m)
            tiles = of_b.shape == (k // 128, n // 128)
            assert tiles or of_b.shape == (k // 128, n)
            assert of_b.t().stride() == ((k // 128, 1) if tiles else (1, n))
            kind = "128x128" if tiles else "1x128"
            of_a = of_a.repeat_interleave(128, 1)
            of_b = of_b.repeat_interleave(128, 0).repeat_interleave(n // of_b.shape[1], 1)
        seen.add((kind, use_fast_accum))
        return ((a.float() * of_a) @ (b.float() * of_b)).to(out_dtype)

    return call


@pytest.mark.parametrize(
    "name, kind",
    [
        ("fp8_e4m3", "row"), ("fp8_e4m3:tensor@fp8_e5m2:tensor", "tensor"),
        ("fp8_e4m3:128@fp8_e4m3:128x128", "128x128"), ("fp8_e4m3:1x128", "1x128"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("peer", [gemm_peers.ScaledMm, gemm_peers.FastScaledMm])
def test_scaled_mm_gets_scales_as_it_wants_them(name, kind, peer, monkeypatch):
    torch, seen = pytest.importorskip("torch"), set()
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm(torch, seen))
    made = on_cpu(peer)
    if peer.fast and kind.startswith("1"):
        assert refuses(made, name)
    else:
        assert timed(made, *operands(name)).problem is None and seen == {(kind, peer.fast)}
    assert refuses(made, "int8", "fp8_e4m3@fp4_e2m1:row", "fp8_e4m3@fp8_e4m3:tensor", "mxfp8")


class FakeHummingLayer:
    """Multiplies codes of x with offset-binary codes of w."""

    def __init__(self, **options):
        self.options = options
        assert options["input_config"] == {"dtype": options["input_config"]["dtype"]}

    def cuda(self):
        return self

    def load_from_tensors(self, tensors):
        self.tensors = tensors

    def transform(self):
        size = self.options["weight_config"]["group_size"] or K
        scale = self.tensors["weight_scale"].float().repeat_interleave(size, dim=1)
        codes = self.tensors["weight"]
        middle = 1 << (int(self.options["weight_config"]["dtype"][3:]) - 1)
        self.w = (codes - middle).float() * scale

    def __call__(self, x, input_scale):
        assert str(x.dtype).endswith(
            {"int8": "int8", "float8e4m3": "float8_e4m3fn"}[self.options["input_config"]["dtype"]]
        )
        return ((x.float() * input_scale) @ self.w.T).to(self.options["torch_dtype"])


@pytest.mark.parametrize("name", ["int8", "int8@int4", "fp8_e4m3@int4"])
def test_humming_gets_the_codes_of_both_sides(name):
    peer = on_cpu(
        gemm_peers.HummingGemm,
        _ops=SimpleNamespace(pack_weight=lambda codes, bits: codes),
        _layer=FakeHummingLayer,
    )
    assert timed(peer, *operands(name)).problem is None
    assert refuses(peer, "fp8_e4m3:128", "int8:tensor", "int4", "int8@nf4", "int8@q4_0")


def test_deep_gemm_gets_scales_of_rows_in_its_order():
    torch = pytest.importorskip("torch")

    def multiply(a, b, y):
        of_a, of_b = a[1].repeat_interleave(128, 1), b[1].repeat_interleave(128, 1)
        assert a[1].stride() == (1, M) and y.dtype == torch.bfloat16
        of_b = of_b.repeat_interleave(128, 0)
        y.copy_((a[0].float() * of_a) @ (b[0].float() * of_b).T)

    library = SimpleNamespace(
        get_mn_major_tma_aligned_tensor=lambda s: s.t().contiguous().t(), fp8_gemm_nt=multiply
    )
    peer = on_cpu(gemm_peers.DeepGemm, _library=library)
    assert timed(peer, *operands("fp8_e4m3:128@fp8_e4m3:128x128")).problem is None
    assert refuses(peer, "fp8_e4m3:1x128", "fp8_e4m3", "int8")


def test_operands_are_rotated_past_the_cache():
    torch = pytest.importorskip("torch")
    peer = on_cpu(gemm_peers.IntMm)
    seen = []
    a, b = torch.zeros(4, 8).t(), torch.zeros(8, 8)
    calls = peer.rotated(lambda *own: seen.append(own), [a, b], 1000)
    for call in calls:
        call()
    assert len(calls) == 3 * 1000 // (4 * (32 + 64)) + 1
    assert len({own[1].data_ptr() for own in seen}) == len(calls)
    assert {own[0].stride() for own in seen} == {a.stride()}
    assert isinstance(peer.engine, FakeEngine)
