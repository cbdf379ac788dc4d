"""torch tensors on the CPU, in and out, without a copy."""

import pickle
from functools import partial

import numpy as np
import pytest
from in_turn import in_turn
from oracle import bits_equal
from samples import sampled

import cuquant as cq
from cuquant import interop

torch = pytest.importorskip("torch", reason="torch is optional")

NAMES = cq.list_formats()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def to_numpy(tensor) -> np.ndarray:
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


@pytest.mark.parametrize("name", NAMES)
@in_turn("dtype", DTYPES)
def test_same_bytes_as_numpy(name, dtype):
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    q = cq.quantize(x, name)
    assert q.kind == "torch" and q.device == "cpu"
    assert all(isinstance(part, torch.Tensor) for part in q.arrays().values())
    host = x.float().numpy().astype(q.dtype)
    wanted = cq.quantize(host, name)
    for key, value in q.numpy().arrays().items():
        assert bits_equal(value, wanted.arrays()[key])
    y = q.dequantize()
    assert isinstance(y, torch.Tensor) and y.dtype == dtype and y.shape == x.shape
    assert bits_equal(
        to_numpy(y), to_numpy(torch.from_numpy(wanted.dequantize(dtype="float32")).to(dtype))
    )
    assert isinstance(q.codes(), torch.Tensor)
    assert q.scale is None or isinstance(q.scale, torch.Tensor)
    assert q[1:3].kind == q.T.kind == cq.concatenate([q, q]).kind == "torch"


def test_nothing_is_copied():
    x = torch.randn(8, 64)
    q = cq.quantize(x, "nf4")
    assert q.numpy().packed.ctypes.data == q.packed.data_ptr()
    out = torch.empty(8, 64)
    assert q.dequantize(out=out) is out
    assert bool((out == q.dequantize()).all())
    again = cq.quantize(x * 2, "nf4", out=q)
    assert again is q and q.packed.data_ptr() == again.packed.data_ptr()
    assert bool((q.scale == cq.quantize(x * 2, "nf4").scale).all())


def test_parameters_and_views():
    w = torch.nn.Parameter(torch.randn(128, 6))
    for view in (w, w.t(), w[::2], w[:, 1:4]):
        q = cq.quantize(view, "int8")
        wanted = cq.quantize(np.ascontiguousarray(view.detach().numpy()), "int8")
        assert bits_equal(q.numpy().packed, wanted.packed)
        assert not q.packed.requires_grad


def test_products():
    w, x = torch.randn(24, 256), torch.randn(2, 5, 256)
    q = cq.quantize(w, "int4")
    wanted = cq.linear(x.numpy(), q.numpy())
    linear = torch.nn.functional.linear
    results = [x @ q.T, torch.matmul(x, q.T), linear(x, q), cq.linear(x, q)]
    results += [linear(x, weight=q), linear(input=x, weight=q, bias=None)]
    results += [torch.matmul(input=x, other=q.T), torch.matmul(x, other=q.T)]
    results.append(torch.mm(input=x.reshape(10, 256), mat2=q.T).reshape(2, 5, 24))
    for y in results:
        assert isinstance(y, torch.Tensor) and bits_equal(y.numpy(), wanted)
    assert torch.equal(q @ x[0].T, cq.matmul(q, x[0].T))
    half = cq.linear(x.bfloat16(), q, torch.zeros(24).bfloat16(), activation="gelu")
    assert half.dtype == torch.bfloat16 and half.shape == (2, 5, 24)
    with pytest.raises(TypeError):
        torch.add(x, q)
    assert isinstance(x @ q.numpy().T, torch.Tensor)
    assert isinstance(x.numpy() @ q.T, np.ndarray)
    assert bits_equal((x @ q.numpy().T).numpy(), wanted)
    assert (x.requires_grad_() @ q.T).requires_grad
    with torch.no_grad():
        assert not (x @ q.T).requires_grad


def test_dtypes_by_torchs_names():
    q = cq.quantize(torch.randn(2, 64), "nf4")
    assert q.dequantize(dtype=torch.float16).dtype == torch.float16
    assert cq.linear(torch.randn(2, 64), q, out_dtype=torch.bfloat16).dtype == torch.bfloat16
    assert q.to(torch.device("cpu")).device == "cpu"
    for wrong in (torch.float8_e4m3fn, torch.complex64):
        with pytest.raises(TypeError, match="float32, float16 or bfloat16"):
            cq.quantize(torch.zeros(2, 64).to(wrong))
    for other in (torch.float64, torch.int8):
        assert cq.quantize(torch.zeros(2, 64).to(other)).dtype == np.float32


def test_fp8_is_handed_over_as_bytes():
    q = cq.quantize(torch.randn(2, 64), "fp8_e4m3")
    assert q.packed.dtype == torch.uint8
    values = q.packed.view(torch.float8_e4m3fn).float() * q.scale
    assert torch.equal(values, q.dequantize())


def test_files(tmp_path):
    x = torch.randn(4, 64)
    fp8, bf16 = x.to(torch.float8_e4m3fn), x.bfloat16()
    cq.save(tmp_path / "m", {"w": cq.quantize(x, "nf4"), "fp8": fp8, "bf16": bf16})
    loaded = cq.load(tmp_path / "m")
    assert loaded["fp8"].dtype.name == "float8_e4m3fn" and loaded["bf16"].dtype.name == "bfloat16"
    assert bits_equal(loaded["fp8"].view(np.uint8), fp8.view(torch.uint8).numpy())
    assert cq.error(x, cq.quantize(x, "nf4")) == cq.error(x.numpy(), loaded["w"])


def test_meta_and_cuda_tensors_are_refused():
    with pytest.raises(cq.BackendUnavailable, match="meta"):
        cq.quantize(torch.empty(2, 64, device="meta"))


@pytest.mark.parametrize("name", NAMES)
def test_pickles(name):
    """torch writes uint32 tensors into pickles that it cannot read."""
    q = cq.quantize(torch.randn(2, 512), name)
    again = pickle.loads(pickle.dumps(q))
    assert again.kind == "torch" and torch.equal(again.dequantize(), q.dequantize())
    assert all(again.arrays()[k].dtype == v.dtype for k, v in q.arrays().items())


def test_lazy_negatives():
    w = torch.randn(2, 64)
    assert torch.equal(cq.quantize(torch._neg_view(w), "fp16").dequantize(), (-w).half().float())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to move to")
def test_no_gpu_to_move_to():
    with pytest.raises(cq.BackendUnavailable, match="torch"):
        cq.quantize(torch.randn(2, 64), "nf4").to("cuda")


# ---- what torch expects of its tensors ----------------------------------------------------------


def product_args():
    return torch.randn(3, 64), cq.quantize(torch.randn(8, 64), "nf4")


def test_what_no_gradient_flows_back_to():
    x, q = product_args()
    bias = torch.zeros(8, requires_grad=True)
    for call in (
        lambda: cq.linear(cq.quantize(x, "int8"), q, bias),
        lambda: cq.matmul(cq.quantize(x, "int8"), q.T, bias=bias),
        lambda: cq.linear(x, q, out=torch.zeros(3, 8, requires_grad=True)),
        lambda: q.dequantize(out=torch.zeros(8, 64, requires_grad=True)),
    ):
        with pytest.raises(RuntimeError, match=r"requires grad.*no_grad"):
            call()
        with torch.no_grad():
            call()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_tangent_is_not_dropped():
    x, q = product_args()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert cq.linear(x, q).shape == (3, 8)
        for call in (
            lambda: cq.linear(dual, q),
            lambda: dual @ q.T,
            lambda: cq.swiglu(dual, q, q),
            lambda: cq.linear(dual.requires_grad_(), q),
        ):
            with pytest.raises(RuntimeError, match="no forward-mode derivative"):
                call()


def test_out_counts_as_changed():
    x, q = product_args()
    for call, shape in ((partial(cq.linear, x, q), (3, 8)), (q.dequantize, (8, 64))):
        out, factor = torch.randn(shape), torch.randn(shape, requires_grad=True)
        total = (factor * out).sum()
        call(out=out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()
    with torch.inference_mode():
        assert cq.linear(x, q, out=torch.zeros(3, 8)).abs().sum() > 0


def test_out_that_cannot_hold_a_result():
    x, q = product_args()
    for out, message in (
        (torch.zeros(1, 8).expand(3, 8), "more than once"),
        (torch.zeros(11).as_strided((3, 8), (1, 1)), "more than once"),
        (torch.zeros(3, 8, dtype=torch.complex64).conj().imag, "negates"),
    ):
        with pytest.raises(ValueError, match=message):
            cq.linear(x, q, out=out)


def test_out_beside_an_input_in_the_same_memory():
    x, q = product_args()
    both = torch.cat([x, torch.zeros(3, 8)], 1)
    out = both[:, 64:]
    assert cq.linear(both[:, :64], q, out=out) is out and torch.equal(out, cq.linear(x, q))
    with pytest.raises(ValueError, match="overlaps"):
        cq.linear(both[:, :64], q, out=both[:, 63:71])


@pytest.mark.parametrize(
    "function",
    sampled(
        [
            lambda x, q: torch.relu(cq.linear(x + 1, q)) * 2,
            lambda x, q: x @ q.T,
            lambda x, q: cq.swiglu(x, q, q),
            lambda x, q: torch.nn.functional.linear(x, q),
            lambda x, q: cq.linear(x, cq.prepack(q)),
            lambda x, q: x @ cq.dequantize(q).T,
        ]
    ),
)
def test_products_in_a_compiled_function(function):
    """The graph ends at them, and goes on behind."""
    x, q = product_args()
    compiled = torch.compile(function, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(compiled(x, q), function(x, q))


# ---- options of formats -------------------------------------------------------------------------


def test_tensors_as_options():
    """Levels that NumPy can read are taken; all else is an error that says what came."""
    levels = torch.tensor([-1.0, -0.25, 0.0, 0.5, 1.0])
    assert cq.get_format("k3", levels=levels).codec.levels == tuple(levels.tolist())
    wrong = {
        r"requires grad.*detach": {"levels": levels.clone().requires_grad_()},
        "levels must be": {"levels": levels.bfloat16()},
        "levels must be a name": {"levels": levels.to("meta")},
        "levels must": {"levels": levels.to_sparse()},
        "complex": {"levels": levels.to(torch.complex64)},
        "levels must be a name or": {"levels": (levels[0], levels.requires_grad_()[1])},
    }
    for message, options in wrong.items():
        for call in (cq.get_format, lambda f, **o: cq.quantize(torch.ones(2, 64), f, **o)):
            with pytest.raises(TypeError, match=f"(?s){message}"):
                call("k3", **options)
    for value in (torch.tensor(True), torch.tensor(False), torch.tensor([1, 2]), np.ones(2)):
        for call in (cq.get_format, lambda f, **o: cq.quantize(torch.ones(2, 64), f, **o)):
            with pytest.raises(TypeError, match="double_quant must be True or False"):
                call("nf4", double_quant=value)
    assert cq.get_format("nf4", double_quant=np.False_) == cq.get_format("nf4")
    with pytest.raises(TypeError, match="block_size must be"):
        cq.get_format("nf4", block_size=torch.tensor([32, 32]))


def test_levels_that_change_are_read_again():
    levels = torch.tensor([-1.0, 0.5, 1.0])
    first = cq.get_format("k3", levels=levels)
    levels[1] = 0.50001  # which is printed as 0.5000
    assert cq.get_format("k3", levels=levels) != first
    scalars = tuple(levels)
    second = cq.get_format("k3", levels=scalars)
    scalars[1].fill_(0.50002)
    assert cq.get_format("k3", levels=scalars) != second


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "uint8"])
def test_read_only_arrays_are_copied_for_torch(dtype):
    """torch warns of them, and then writes to them."""
    x = np.ones((2, 8), np.float32).astype(interop.numpy_dtype(dtype))
    x.flags.writeable = False
    tensor = interop.from_numpy(x, "torch")
    tensor.zero_()
    assert bool((x == 1).all())
