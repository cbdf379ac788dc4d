"""QuantArrays on a GPU: what they are made of, slices, files, out=, and what is refused."""

import kernel_cases as cases
import numpy as np
import pytest
from kernel_cases import FEW, NAMES, Case, differences, same_values
from oracle import bits_equal

import cuquant as cq
from cuquant import interop
from cuquant.gpu import arrays as gpu_backend

pytestmark = pytest.mark.gpu

F32 = np.float32
SAMPLE = [*FEW, "k5", "fp16", "q4_0", "q4_k"]


@pytest.fixture(params=["cupy", "torch"])
def on_gpu(request):
    """NumPy array -> the same on the GPU, in one library or the other."""
    library = request.getfixturevalue("gpu" if request.param == "cupy" else "torch")
    if request.param == "cupy":
        return library.asarray
    return lambda x: interop.from_numpy(np.ascontiguousarray(x), "torch").to("cuda")


def host(x) -> np.ndarray:
    return interop.to_host(x)


def quantized(name: str, on_gpu, shape=(64, 512), **options):
    """A QuantArray on the GPU, and NumPy's."""
    x = cases.normal(shape, np.dtype(np.float32))
    return cq.quantize(on_gpu(x), name, **options), cq.quantize(x, name, **options)


# ---- parts and views ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_arrays_of_the_same_kind(name, on_gpu):
    q, wanted = quantized(name, on_gpu)
    assert q.device == "cuda:0" and q.kind != "numpy"
    assert q.nbytes == wanted.nbytes and q.shape == wanted.shape and q.dtype == wanted.dtype
    for part in (*q.arrays().values(), q.codes(), q.packed, q.scale, q.minimum, q.zero_point):
        assert part is None or (interop.kind(part), interop.device(part)) == (q.kind, "cuda:0")
    assert all(_address(part) % 16 == 0 for part in q.arrays().values())


def _address(x) -> int:
    return x.data_ptr() if interop.kind(x) == "torch" else x.data.ptr


@pytest.mark.parametrize("name", SAMPLE)
def test_slices_transposes_and_sums_of_rows(name, on_gpu):
    q, wanted = quantized(name, on_gpu)
    for found, want in (
        (q[3:20], wanted[3:20]),
        (q[::-2], wanted[::-2]),
        (q[5], wanted[5]),
        (q.T, wanted.T),
        (q.T[:, 2:9], wanted.T[:, 2:9]),
        (cq.concatenate([q[:7], q[40:]]), cq.concatenate([wanted[:7], wanted[40:]])),
    ):
        assert not differences(found.numpy(), want)
        assert same_values(host(found.dequantize()), want.dequantize())
        assert bits_equal(host(found.codes()), want.codes())


@pytest.mark.parametrize("name", ["nf4", "mxfp4", "q4_0", "int4"])
def test_slices_of_columns(name, on_gpu):
    q, wanted = quantized(name, on_gpu)
    found, want = q[:, 128:384], wanted[:, 128:384]
    assert not differences(found.numpy(), want)
    assert same_values(host(found.dequantize()), want.dequantize())


@pytest.mark.parametrize("name", ["q4_0", "q6_k", "iq4_xs", "mxfp4"])
def test_ggml_bytes(name, on_gpu):
    q, wanted = quantized(name, on_gpu)
    blocks = q.to_blocks()
    assert interop.kind(blocks) == q.kind and bits_equal(host(blocks), wanted.to_blocks())
    back = cq.QuantArray.from_blocks(blocks, name, q.shape)
    assert same_values(host(back.dequantize()), wanted.dequantize())


@pytest.mark.parametrize("name", SAMPLE)
def test_files_and_devices(name, on_gpu, tmp_path):
    q, wanted = quantized(name, on_gpu)
    path = tmp_path / "q.safetensors"
    q.save(path)
    (loaded,) = cq.load(path).values()
    assert not differences(loaded, wanted)
    there = wanted.to("cuda")
    assert there.kind == "cupy" and not differences(there.to("cpu"), wanted)


@pytest.mark.parametrize("axis", [0, 1, 2, -2])
@pytest.mark.parametrize("name", ["nf4", "int8", "uint4", "q4_0"])
def test_any_axis_of_a_fortran_array(name, axis, gpu):
    x = cases.normal((32, 64, 96), np.dtype(np.float16))
    q = cq.quantize(gpu.asarray(x).transpose(2, 0, 1), name, axis=axis)
    wanted = cq.quantize(x.transpose(2, 0, 1), name, axis=axis)
    assert not differences(q.numpy(), wanted)
    assert same_values(q.dequantize().get(), wanted.dequantize())


def test_too_many_axes_to_merge(gpu):
    """More strides than a kernel keeps: told, not computed wrongly."""
    x = gpu.zeros((3,) * 9, gpu.float32)[::2, ::2, ::2, ::2, ::2, ::2, ::2, ::2, ::2]
    with pytest.raises(ValueError, match="contiguous"):
        cq.quantize(x, "nf4")
    assert cq.quantize(gpu.ascontiguousarray(x), "nf4").shape == x.shape


# ---- out= ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLE)
def test_out_of_quantize(name, on_gpu):
    case = Case(name, "float32", (16, 512), data="normal")
    out = cq.quantize(on_gpu(np.ones(case.shape, F32)), name)
    before = {key: _address(part) for key, part in out.arrays().items()}
    assert cq.quantize(on_gpu(case.base), name, out=out) is out
    assert not differences(out.numpy(), case.expected())
    assert before == {key: _address(part) for key, part in out.arrays().items()}


@pytest.mark.parametrize("name", SAMPLE)
def test_out_of_dequantize(name, on_gpu):
    """What lies between and beside the values is left alone."""
    q, wanted = quantized(name, on_gpu, (24, 256))
    for dtype in ("float32", "float16", "bfloat16"):
        for layout in ("whole", "rows", "misaligned", "steps", "transposed"):
            where = cases.LAYOUTS[layout]
            expected = np.full(where.base(q.shape), 7, interop.numpy_dtype(dtype))
            base = on_gpu(expected.copy())
            out = where.view(base, q.shape)
            assert q.dequantize(out=out) is out
            where.view(expected, q.shape)[...] = wanted.dequantize(dtype=dtype)
            assert same_values(host(base), expected)


@pytest.fixture
def no_launch(monkeypatch):
    def launch(*_):
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(gpu_backend.Gpu, "launch", launch)


def test_out_that_does_not_fit_is_refused_before_a_launch(on_gpu, monkeypatch, request):
    x = on_gpu(cases.normal((16, 256), np.dtype(np.float32)))
    q, half = cq.quantize(x, "nf4"), on_gpu(np.zeros((16, 256), np.float16))
    rows = cq.quantize(x[:8], "nf4")
    request.getfixturevalue("no_launch")
    for out, said in ((rows, "shape"), (q.to("cpu"), "kind|device"), (q.T, "shape|axes")):
        with pytest.raises(ValueError, match=said):
            cq.quantize(x, "nf4", out=out)
    with pytest.raises(ValueError, match="format"):
        cq.quantize(x, "fp4", out=q)
    with pytest.raises(ValueError, match="dtype"):
        cq.quantize(half, "nf4", out=q)
    with pytest.raises(TypeError):
        cq.quantize(x, "nf4", out=x)
    with pytest.raises(ValueError, match="shape"):
        q.dequantize(out=x[:8])
    with pytest.raises(ValueError, match="dtype"):
        q.dequantize(out=half, dtype="float32")
    with pytest.raises(TypeError):
        q.dequantize(out=host(x))
    with pytest.raises(TypeError, match="float"):
        q.dequantize(out=on_gpu(np.zeros((16, 256), np.int32)))


def test_out_that_overlaps_is_refused(gpu, no_launch):
    memory = gpu.zeros(1 << 16, gpu.uint8)
    x = memory[: 16 * 256 * 4].view(gpu.float32).reshape(16, 256)
    parts = {
        "packed": memory[1024 : 1024 + 2048].reshape(16, 128),
        "scale": gpu.zeros((16, 4), gpu.float32),
    }
    q = cq.QuantArray(cq.get_format("nf4"), (16, 256), np.dtype(F32), parts, (0, 1))
    with pytest.raises(ValueError, match="overlaps"):
        cq.quantize(x, "nf4", out=q)
    with pytest.raises(ValueError, match="overlaps"):
        q.dequantize(out=x)


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_other_dtypes_are_refused(dtype, gpu, no_launch):
    x = np.ones((4, 64), dtype)
    with pytest.raises(TypeError) as wanted:
        cq.quantize(x, "nf4")
    with pytest.raises(TypeError) as found:
        cq.quantize(gpu.asarray(x), "nf4")
    assert str(found.value) == str(wanted.value)


@pytest.mark.parametrize(
    ("shape", "name", "options"),
    [
        ((), "nf4", {}),
        ((4, 64), "nf4", {"axis": 2}),
        ((4, 100), "q4_0", {}),
        ((64,), "nf4", {"block_size": (16, 16)}),
        ((4, 64), "nf4", {"block_size": 3}),
        ((4, 64), "nf4", {"scale": np.ones((5, 5), np.float32)}),
        ((4, 64), "q4_0", {"scale": 1.0}),
        ((4, 64), "mxfp4", {"scale": 3.0}),
        ((4, 64), "int8", {"scale": np.nan}),
        ((4, 64), "uint4", {"scale": 1.0, "zero_point": 16}),
        ((4, 64), "q4_0", {"stochastic": True}),
        ((4, 64), "nf4", {"nonfinite": "ignore"}),
    ],
)
def test_what_numpy_refuses_is_refused_alike(shape, name, options, gpu, no_launch):
    x = np.ones(shape, F32)
    with pytest.raises(ValueError) as wanted:
        cq.quantize(x, name, **options)
    with pytest.raises(ValueError) as found:
        cq.quantize(gpu.asarray(x), name, **options)
    assert str(found.value) == str(wanted.value)


def test_calibrated_numbers_of_the_wrong_place_or_shape(gpu, torch, no_launch):
    x = gpu.ones((4, 64), gpu.float32)
    with pytest.raises(ValueError, match="torch"):
        cq.quantize(x, "int8", scale=torch.ones(4, 1, device="cuda"))
    with pytest.raises(ValueError, match="shape"):
        cq.quantize(x, "int8", scale=gpu.ones((3, 1), gpu.float32))
    with pytest.raises(TypeError, match="numeric"):
        cq.quantize(x, "int8", scale=gpu.ones((4, 1), bool))
    with pytest.raises(ValueError, match="integer"):
        cq.quantize(x, "uint4", scale=gpu.ones(()), zero_point=gpu.ones((), gpu.float32))


def test_a_gradient_does_not_hinder(torch):
    x = torch.randn(4, 64, device="cuda", requires_grad=True)
    q = cq.quantize(x, "nf4")
    assert not differences(q.numpy(), cq.quantize(x.detach().cpu().numpy(), "nf4"))


# ---- devices ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cupy", "torch"])
def test_work_is_done_where_the_data_is(kind, two, request):
    case = Case("nf4", "float32", (16, 512), data="normal")
    if kind == "cupy":
        with two.cuda.Device(1):
            x = two.asarray(case.base)
    else:
        request.getfixturevalue("torch")
        x = interop.from_numpy(case.base, "torch").to("cuda:1")
    before = two.cuda.runtime.getDevice()
    q = cq.quantize(x, "nf4")
    assert q.device == "cuda:1" and q.kind == kind
    assert interop.device(q.dequantize()) == "cuda:1"
    assert not differences(q.numpy(), case.expected())
    assert two.cuda.runtime.getDevice() == before


def test_mixed_devices_are_refused(two):
    x = two.ones((4, 64), two.float32)
    with two.cuda.Device(1):
        scale = two.ones((4, 1), two.float32)
        other = cq.quantize(two.ones((4, 64), two.float32), "nf4")
    with pytest.raises(ValueError, match="cuda:1"):
        cq.quantize(x, "int8", scale=scale)
    with pytest.raises(ValueError, match="device"):
        cq.quantize(x, "nf4", out=other)
    with pytest.raises(ValueError, match="cuda:0"):
        other.dequantize(out=x)
