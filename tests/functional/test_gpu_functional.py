"""`functional` and QuantArrays on a GPU: the bytes of NumPy's, the library and device that came.

Every test runs on arrays like CuPy's and torch's whose kernels the emulator runs, and, with
`-m gpu`, on real ones.
"""

import copy
import functools
import pickle

import fake_gpu
import numpy as np
import pytest
from emulator import Emulator, Recorder
from functional_inputs import A8, BF16, CALLS, F32, TYPES, X, leaves, normal
from in_turn import in_turn
from oracle import bits_equal

import cuquant as cq
import cuquant.functional as F
from cuquant import interop
from cuquant.gpu import device as devices

NAN = np.where(np.arange(X.size).reshape(X.shape) % 200 == 77, np.float32(np.nan), X)
SUBNORMAL = (normal(4, 1, seed=3) * F32(1e-40)).astype(F32)
EVERYWHERE = np.linspace(-3.3e38, 3e38, 1000, dtype=F32)  # max - min is beyond float32
LEVELS = np.sort(normal(256, seed=5))
HALF = X.astype(np.float16)


def nested(to):
    """A double quantization whose map is not the usual one, and whose last group is not full."""
    codes, packed = np.arange(300, dtype=np.uint8), np.full(300 * 32 - 3, 0x5A, np.uint8)
    parts = {
        "absmax_q": codes, "nested_absmax": np.array([3, 0.5], np.float16), "nested_map": LEVELS,
        "offset": np.array(0.25, F32),
    }  # fmt: skip
    return F.dequantize_nf4(to(packed), {name: to(part) for name, part in parts.items()}, 19193)


CASES = {
    # The sums of "gemm" have another order on a GPU: see test_gpu_q8_1.py.
    **{name: call for name, call in CALLS.items() if name != "gemm"},
    **{f"quantize_{n}": lambda to, n=n: getattr(F, f"quantize_{n}")(to(X)) for n in TYPES},
    **{
        f"dequantize_{n}": lambda to, n=n: getattr(F, f"dequantize_{n}")(
            to(getattr(F, f"quantize_{n}")(X))
        )
        for n in TYPES
    },
    "quantize_nf4 of NaN": lambda to: F.quantize_nf4(to(NAN), 128),
    "quantize_nf4 odd": lambda to: F.quantize_nf4(to(X.reshape(-1)[:777].astype(BF16))),
    "quantize_nf4 of a view": lambda to: F.quantize_nf4(to(X)[::2, 1::2]),
    "quantize_nf4 of nothing": lambda to: F.quantize_nf4(to(X[:0])),
    "dequantize_nf4 nested": nested,
    "dequantize_nf4 of half absmax": lambda to: F.dequantize_nf4(
        to(np.arange(64, dtype=np.uint8)), to(np.array([1.5, 6e-8], np.float16)), (2, 64)
    ),
    "dequantize_nf4 beside NumPy": lambda to: F.dequantize_nf4(
        to(np.arange(64, dtype=np.uint8)), np.array([1, 2], F32), dtype="float16"
    ),
    "dequantize_nf4 of nothing": lambda to: F.dequantize_nf4(
        to(np.zeros(0, np.uint8)), to(np.zeros(0, F32))
    ),
    "kbit planes": lambda to: F.quantize_kbit(to(HALF), 5, packing="planes"),
    "kbit word": lambda to: F.quantize_kbit(to(X), 3, "linear", 64, "word"),
    "dequantize_kbit float32": lambda to: F.dequantize_kbit(
        to(np.arange(96, dtype=np.int32)), to(normal(32)), 3, (32, 32), block_size=32
    ),
    "dequantize_kbit word": lambda to: F.dequantize_kbit(
        to(np.arange(103, dtype=np.uint32)), to(HALF[0, :32]), 3, 1024, packing="word"
    ),
    "convert_packing 5": lambda to: F.convert_packing(
        to(np.arange(25, dtype=np.int32)), 5, 150, "planes", "dense"
    ),
    "quantize_tensor 5": lambda to: F.quantize_tensor(to(X), 5),
    "quantize_tensor of NaN": lambda to: F.quantize_tensor(to(NAN)),
    "dequantize_tensor subnormal": lambda to: F.dequantize_tensor(to(A8), to(SUBNORMAL)),
    "dequantize_tensor to subnormal": lambda to: F.dequantize_tensor(to(A8), -3e-40),
    "dequantize_tensor wide": lambda to: F.dequantize_tensor(
        to(np.array([[2**31 - 1, -(2**31), 0, 16777217]], np.int32)),
        to(np.array([[0.5], [-1e38], [1.1e-38]], F32)[:1]),
    ),
    "dequantize_tensor per column": lambda to: F.dequantize_tensor(to(A8), X[0, :64]),
    "dynamic_quantize bf16": lambda to: F.dynamic_quantize(to(X.astype(BF16))),
    "dynamic_quantize of all": lambda to: F.dynamic_quantize(to(EVERYWHERE)),
    "dynamic_quantize of all bf16": lambda to: F.dynamic_quantize(to(EVERYWHERE.astype(BF16))),
    "pack_int4 odd": lambda to: F.pack_int4(to((A8 % 8).astype(np.int64)[:3]), axis=0),
    "unpack_int4 odd": lambda to: F.unpack_int4(to(A8.view(np.uint8)), 7, axis=0),
}
FORMATS = {
    "nf4": {}, "nf4 double": {"double_quant": True}, "k3": {}, "int8": {}, "uint4": {}, "mxfp4": {},
    "nvfp4": {"global_scale": 1}, "fp8_e4m3 tiles": {"block_size": (4, 64)},
    "int4 tensor": {"block_size": "tensor"}, "fp16": {}, "q8_0": {}, "q4_k": {},
}  # fmt: skip
WIDE = normal(8, 512, seed=9)
OPTIONS = [  # that have kernels of their own
    ("nf4", {"nonfinite": "raise"}), ("nf4", {"axis": 0}), ("k3", {"nonfinite": "clamp"}),
    ("int4", {"nonfinite": "raise"}), ("int8", {"scale": 1.0}), ("nvfp4", {}),
    ("uint8", {"scale": np.ones((8, 4), F32), "zero_point": np.zeros((8, 4), np.uint8)}),
    ("int8", {"stochastic": True}),
]  # fmt: skip


def quantized(case, to, x=WIDE, **options):
    return cq.quantize(to(x), case.split()[0], **FORMATS[case], **options)


@functools.cache
def build():
    """Compile all kernels of this file together, which is much faster than one by one."""
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        to = fake_gpu.install("cupy", patch, recorder)
        for call in CASES.values():
            call(to)
        for case in FORMATS:
            q = quantized(case, to)
            q.dequantize(), q.codes(), q.packed, q.scale, q.minimum
            q.dequantize(dtype="bfloat16")
            q.dequantize(out=to(np.zeros((8, 1024), F32))[:, ::2])
        for name, options in OPTIONS:
            cq.quantize(to(WIDE), name, **options).dequantize()
        cq.quantize(to(WIDE.reshape(8, 64, 8)), "nf4", axis=1)
    Emulator().build(recorder.programs)


@pytest.fixture(params=fake_gpu.KINDS)
def to(request, monkeypatch):
    """What moves NumPy arrays to a GPU."""
    if request.param.startswith("fake"):
        build()
    return fake_gpu.use(request.param, monkeypatch)


def host(x):
    return interop.to_host(x) if interop.kind(x) else x


def same(found, wanted):
    """Equality of bytes; a NaN equals a NaN: the sign that arithmetic gives them differs."""
    found = host(found)
    if found.dtype.kind == "f":
        both = np.isnan(found) & np.isnan(wanted)
        found, wanted = np.where(both, 0, found), np.where(both, 0, wanted)
    return bits_equal(found, wanted)


def assert_same(found, wanted, to):
    like = to(np.zeros(1, F32))
    parts, plain = leaves(found), leaves(wanted)
    assert len(parts) == len(plain)
    for part, want in zip(parts, plain, strict=True):
        assert (interop.kind(part), interop.device(part)) == (interop.kind(like), "cuda:0")
        assert same(part, want)


@pytest.mark.parametrize("name", CASES)
def test_the_bytes_of_numpy(name, to):
    assert_same(CASES[name](to), CASES[name](lambda x: x), to)


def test_kinds_and_places_are_not_mixed(to):
    packed, absmax = F.quantize_nf4(to(X))
    with pytest.raises(cq.BackendUnavailable, match=r"absmax is on 'cuda:0'"):
        F.dequantize_nf4(host(packed), absmax)
    with pytest.raises(ValueError, match=r"scale has shape \(5,\)"):
        F.dequantize_tensor(to(A8), to(np.ones(5, F32)))
    with pytest.raises(TypeError, match="absmax must be float32"):
        F.dequantize_nf4(packed, to(np.ones(16, np.int32)))
    with pytest.raises(cq.FormatError, match="absmax has 15 entries; 16"):
        F.dequantize_nf4(packed, absmax[1:])
    with pytest.raises(ValueError, match="0-d"):
        F.quantize_nf4(to(np.array(1, F32)))


@fake_gpu.needs_compiler
@fake_gpu.needs_torch
def test_libraries_are_not_mixed_on_a_gpu(monkeypatch):
    to_torch = fake_gpu.install("torch", monkeypatch)
    packed, absmax = F.quantize_nf4(to_torch(X))
    with pytest.raises(ValueError, match=r"absmax is a cupy array on cuda:0, .* a torch one"):
        F.dequantize_nf4(packed, fake_gpu.mover("cupy")(host(absmax)))


def test_cupy_that_finds_no_gpu(monkeypatch):
    fake_gpu.install("cupy", monkeypatch, Recorder())
    runtime = interop.load_cupy().cuda.runtime
    monkeypatch.setattr(runtime, "getDeviceCount", lambda: 0)
    for call in (interop.load_cupy, lambda: cq.quantize(X, "nf4").to("cuda")):
        with pytest.raises(cq.BackendUnavailable, match="finds no GPU"):
            call()
    assert not devices.gpu_available() and devices.resolve() == "cpu"


# ---- QuantArrays --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FORMATS)
def test_members(case, to):
    q, plain = quantized(case, to), quantized(case, lambda x: x)
    assert_same(q, plain, to)
    assert q.device == "cuda:0" and repr(q) == repr(plain).replace("=cpu", "=cuda:0")
    assert (q.nbytes, q.shape, q.dtype, len(q)) == (plain.nbytes, plain.shape, plain.dtype, 8)
    for name in ("packed", "scale", "minimum", "zero_point"):
        found, wanted = getattr(q, name), getattr(plain, name)
        assert (found is None) == (wanted is None)
        assert found is None or same(found, wanted)
    assert same(q.codes(), plain.codes()) and same(q.T.codes(), plain.T.codes())
    assert same(q.dequantize(), plain.dequantize())
    assert same(q.T.dequantize(dtype="bfloat16"), plain.T.dequantize(dtype="bfloat16"))


@pytest.mark.parametrize("case", FORMATS)
def test_to_numpy_and_back(case, to, tmp_path):
    q, plain = quantized(case, to), quantized(case, lambda x: x)
    assert leaves(q.numpy()) and all(isinstance(part, np.ndarray) for part in leaves(q.numpy()))
    for made in (q.numpy(), q.to("cpu").numpy(), pickle.loads(pickle.dumps(q)).numpy()):
        assert all(bits_equal(a, b) for a, b in zip(leaves(made), leaves(plain), strict=True))
    assert_same(copy.copy(q), plain, to)
    assert_same(pickle.loads(pickle.dumps(q)), plain, to)
    q.save(tmp_path / "q")
    assert cq.load(tmp_path / "q")["array"].shape == q.shape
    with pytest.raises(TypeError, match="dequantize"):
        np.asarray(q)


SLICES = {
    "rows": np.s_[2:6],
    "blocks of rows": np.s_[4:],
    "steps": np.s_[::2],
    "backwards": np.s_[::-3],
    "one row": np.s_[-1],
    "columns": np.s_[:, 256:],
    "both": np.s_[1:7:2, :256],
    "chosen": np.array([5, 0, 0, -1]),
    "nothing": np.s_[3:3],
}


TALL = {"fp8_e4m3 tiles": ["columns", "blocks of rows"]}  # rows share scales in blocks of 4


@pytest.mark.parametrize("case", FORMATS)
@in_turn("index", SLICES)
def test_slices(case, index, to):
    if index not in TALL.get(case, SLICES):
        return
    q, plain = quantized(case, to), quantized(case, lambda x: x)
    found, wanted = q[SLICES[index]], plain[SLICES[index]]
    assert found.shape == wanted.shape
    assert_same(found, wanted, to)


def test_an_index_may_be_on_the_gpu_too(to):
    q = cq.quantize(to(WIDE), "nf4")
    assert same(q[to(np.array([3, 1]))].packed, host(q.packed)[[3, 1]])


@pytest.mark.parametrize("case", [c for c in FORMATS if "tensor" not in c])
def test_joins(case, to):
    parts = [WIDE, WIDE[:4] * 2]
    found, wanted = (
        cq.concatenate([quantized(case, to, x) for x in parts]) for to in (to, lambda x: x)
    )
    assert_same(found, wanted, to)
    if case != "int8":  # whose rows have one scale
        found, wanted = (
            cq.concatenate([quantized(case, to), quantized(case, to)[:, :256]], axis=1)
            for to in (to, lambda x: x)
        )
        assert_same(found, wanted, to)


@pytest.mark.parametrize("name", ["q4_0", "q6_k", "mxfp4", "nvfp4"])
def test_blocks_there_and_back(name, to):
    options = {"global_scale": 1} if name == "nvfp4" else {}
    q, plain = (cq.quantize(to(WIDE), name, **options) for to in (to, lambda x: x))
    blocks = q.to_blocks()
    assert_same(blocks, plain.to_blocks(), to)
    back = cq.QuantArray.from_blocks(blocks, name, WIDE.shape)
    assert_same(back, cq.QuantArray.from_blocks(host(blocks), name, WIDE.shape), to)
    assert same(back.dequantize(), plain.dequantize())
    with pytest.raises(cq.FormatError, match="blocks are uint8"):
        cq.QuantArray.from_blocks(blocks, name, (8, 256))


def test_blocks_are_refused_as_on_the_cpu(to):
    with pytest.raises(ValueError, match="quantize with global_scale=1"):
        cq.quantize(to(WIDE), "nvfp4").to_blocks()
    with pytest.raises(ValueError, match="multiple of 32 elements a row, got 40"):
        cq.quantize(to(WIDE[:, :40]), "mxfp4").to_blocks()
    with pytest.raises(ValueError, match="no ggml block"):
        cq.quantize(to(WIDE), "int8").to_blocks()


@pytest.mark.parametrize("case", FORMATS)
def test_error(case, to):
    q, plain = quantized(case, to), quantized(case, lambda x: x)
    wanted = cq.error(WIDE, plain)
    for x, other in ((to(WIDE), q), (WIDE, q), (to(WIDE), plain), (to(WIDE), q.dequantize())):
        assert cq.error(x, other) == pytest.approx(wanted, rel=1e-12)
    with pytest.raises(ValueError, match=r"x has shape \(4, 256\) and q \(8, 512\)"):
        cq.error(to(X), q)


# ---- quantize and dequantize --------------------------------------------------------------------


@pytest.mark.parametrize("case", FORMATS)
def test_out(case, to):
    q, plain = quantized(case, to), quantized(case, lambda x: x, -WIDE)
    before = leaves(q)
    assert quantized(case, to, -WIDE, out=q) is q
    assert all(a is b for a, b in zip(leaves(q), before, strict=True))
    assert_same(q, plain, to)
    out = to(np.full(WIDE.shape, np.nan, BF16))
    assert q.dequantize(out=out) is out and same(out, plain.dequantize(dtype=BF16))
    strided = to(np.zeros((8, 1024), F32))[:, ::2]
    assert q.dequantize(out=strided) is strided and same(strided, plain.dequantize())
    with pytest.raises(ValueError, match=r"out has dtype bfloat16, but float32 is asked for"):
        q.dequantize(out=out, dtype="float32")
    with pytest.raises(ValueError, match=r"out has shape \(8, 512\); this call gives \(4, 256\)"):
        quantized(case, to, X, out=q)


def test_nonfinite_is_raised_or_clamped(to):
    bad = WIDE.copy()
    bad[3, 7] = np.inf
    with pytest.raises(ValueError, match="x holds inf at flat index 1543 of 4096") as found:
        cq.quantize(to(bad), "nf4", nonfinite="raise")
    with pytest.raises(ValueError) as wanted:
        cq.quantize(bad, "nf4", nonfinite="raise")
    assert str(found.value) == str(wanted.value)
    for policy in ("clamp", "propagate"):
        found, wanted = (cq.quantize(to(bad), "k3", nonfinite=policy) for to in (to, lambda x: x))
        assert_same(found, wanted, to)
    with pytest.raises(ValueError, match="scale"):
        cq.quantize(to(WIDE * F32(1e30)), "int4", nonfinite="raise")


@pytest.mark.parametrize("numbers", ["host", "gpu"])
def test_static_scales(numbers, to):
    scale, point = np.abs(WIDE[:, :4]) / 8 + F32(0.01), np.arange(32, dtype=np.uint8).reshape(8, 4)
    given = to if numbers == "gpu" else lambda x: x
    found = cq.quantize(to(WIDE), "uint8", scale=given(scale), zero_point=given(point))
    assert_same(found, cq.quantize(WIDE, "uint8", scale=scale, zero_point=point), to)
    found = cq.quantize(to(WIDE), "int8", scale=given(np.array(0.03, F32)))
    assert_same(found, cq.quantize(WIDE, "int8", scale=0.03), to)
    with pytest.raises(ValueError, match=r"scale has shape \(3,\); the scales have shape \(8, 4\)"):
        cq.quantize(to(WIDE), "uint8", scale=given(np.ones(3, F32)))


def test_axes_strides_and_seeds(to):
    for axis, x in ((0, WIDE), (1, WIDE.reshape(8, 64, 8)), (-1, WIDE[:, :500])):
        found, wanted = (cq.quantize(to(x), "nf4", axis=axis) for to in (to, lambda x: x))
        assert_same(found, wanted, to)
        assert same(found.dequantize(), wanted.dequantize())
    options = {"stochastic": True, "seed": 2**63 + 5}
    found, wanted = (cq.quantize(to(WIDE), "int8", **options) for to in (to, lambda x: x))
    assert_same(found, wanted, to)


def test_refusals_before_any_launch(to):
    with pytest.raises(TypeError, match="x must be float32"):
        cq.quantize(to(A8.astype(np.complex64)))
    with pytest.raises(ValueError, match="multiple of 32"):
        cq.quantize(to(X[:, :40]), "q4_0")
    with pytest.raises(TypeError, match="stream must be a CuPy or torch stream"):
        cq.quantize(to(X), stream=3)
