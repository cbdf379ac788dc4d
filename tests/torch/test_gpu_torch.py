"""cuquant.torch on a GPU: the operator, QuantLinear and quantize_ compute what cq.linear does."""

import copy
import gc
import warnings

import numpy as np
import pytest
import waiting
from kernel_cases import FEW, NAMES
from oracle import bits_equal

import cuquant as cq
from cuquant import interop

pytestmark = pytest.mark.gpu

K, N = 512, 80
SAMPLE = (*FEW, "k5", "int8", "fp16", "q4_0", "q4_k", "double")


@pytest.fixture
def layers(torch):
    """The module cuquant.torch."""
    import cuquant.torch

    return cuquant.torch


@pytest.fixture
def random(torch):
    """random(*shape, dtype=, seed=): numbers on the GPU, which the CPU makes."""

    def make(*shape, dtype=torch.float32, seed=0):
        numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return numbers.to(dtype).cuda()

    return make


@pytest.fixture
def linear(torch, random):
    """linear(n, k, dtype): an nn.Linear on the GPU."""

    def make(n=N, k=K, dtype=torch.float16, seed=0):
        made = torch.nn.Linear(k, n, device="cuda", dtype=dtype)
        with torch.no_grad():
            made.weight.copy_(random(n, k, seed=seed))
            made.bias.copy_(random(n, seed=seed + 1))
        return made

    return make


def format_of(name: str) -> cq.Format:
    return cq.get_format("nf4", double_quant=True) if name == "double" else cq.get_format(name)


def bytes_of(tensor) -> np.ndarray:
    return interop.to_host(tensor)


# ---- the same as cq.linear ----------------------------------------------------------------------


@pytest.mark.parametrize("prepack", [False, True])
@pytest.mark.parametrize("name", [*NAMES, "double"])
def test_equals_linear(name, prepack, torch, layers, random, linear):
    """Bit for bit, on the same tensors."""
    plain = linear()
    layer = layers.QuantLinear.from_linear(
        plain, format_of(name), activation="silu", prepack=prepack
    )
    q = cq.quantize(plain.weight.detach(), format_of(name))
    weight = cq.prepack(q) if prepack else q
    dtypes = (torch.float16, torch.bfloat16, torch.float32) if name in FEW else (torch.float16,)
    for dtype in dtypes:
        for rows in (1, 5, 40, 300):
            x = random(rows, K, dtype=dtype, seed=2)
            wanted = cq.linear(x, weight, plain.bias.detach(), activation="silu")
            y = layer(x)
            assert y.dtype == dtype and y.is_cuda and torch.equal(y, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_of_a_model_are_the_cpus(name, torch, layers, linear):
    model = torch.nn.Sequential(linear(), linear(24, 100, seed=4))  # ggml's types keep the second
    host = copy.deepcopy(model).cpu()
    for each in (model, host):
        layers.quantize_(each, name, prepack=False)
    found, wanted = model.state_dict(), host.state_dict()
    assert list(found) == list(wanted)
    for key, value in found.items():
        assert key.endswith("_extra_state") or value.is_cuda
        assert bits_equal(bytes_of(value), bytes_of(wanted[key])), key


def test_weights_on_a_gpu_are_prepacked(torch, layers, linear):
    model = layers.quantize_(torch.nn.Sequential(linear()), "nf4")
    assert model[0].layout == "fragments/1"
    there = layers.quantize_(torch.nn.Sequential(linear()).cpu(), "nf4", prepack=True)
    state = there.state_dict()
    for key, value in model.state_dict().items():
        assert bits_equal(bytes_of(value), bytes_of(state[key])), key


@pytest.mark.parametrize("name", SAMPLE)
def test_layers_move(name, torch, layers, random, linear):
    """GPU to CPU and back, and made on the CPU: the same codes, the same results."""
    plain, x = linear(), random(3, K, dtype=torch.float16)
    for prepack in (False, True):
        layer = layers.QuantLinear.from_linear(plain, format_of(name), prepack=prepack)
        wanted = layer(x)
        moved = copy.deepcopy(layer).cpu()
        assert not any(part.is_cuda for part in moved.state_dict().values())
        host = copy.deepcopy(plain).cpu()
        made = layers.QuantLinear.from_linear(host, format_of(name), prepack=prepack)
        for each in (moved.cuda(), made.to("cuda")):
            assert torch.equal(each(x), wanted)
        with torch.device("meta"):
            empty = torch.nn.Linear(K, N, dtype=torch.float16)
        empty = layers.QuantLinear.from_linear(empty, format_of(name), prepack=prepack)
        empty.load_state_dict(layer.state_dict(), assign=True)
        assert torch.equal(empty(x), wanted)
        for cast in (lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.float()):
            cast(layer)
        layer.bias.data = plain.bias.detach().clone()
        assert torch.equal(layer(x), wanted)


@pytest.mark.parametrize("prepack", [False, True])
@pytest.mark.parametrize("by", [1, 4, 8])
@pytest.mark.parametrize("name", SAMPLE)
def test_a_state_cut_out_of_one_buffer(name, by, prepack, torch, layers, random, linear):
    """As a server's flat checkpoint is: components begin anywhere, which kernels cannot read."""
    layer = layers.QuantLinear.from_linear(linear(), format_of(name), prepack=prepack)
    state = layer.state_dict()
    room = torch.zeros(sum(t.nbytes + 512 for t in state.values()), dtype=torch.uint8).cuda()
    at, cut = 0, {}
    for key, tensor in state.items():
        at += -(room.data_ptr() + at) % 256 + (by if tensor.dtype == torch.uint8 else 0)
        cut[key] = room[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        cut[key].copy_(tensor)
        at += tensor.nbytes
    other = layers.QuantLinear.from_linear(linear(seed=5), format_of(name), prepack=prepack)
    other.load_state_dict(cut, assign=True)
    for rows in (1, 5, 40, 300):
        x = random(rows, K, dtype=torch.float16)
        assert torch.equal(other(x), layer(x))
    for key, part in zip(layer._names, layer._parts(), strict=True):
        other.get_parameter(key).data = cut[key]  # past load_state_dict
        assert torch.equal(part, cut[key])
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("prepack", [False, True])
@pytest.mark.parametrize("name", SAMPLE)
def test_the_weight_as_an_nn_linears(name, prepack, torch, layers, random, linear):
    plain, x = linear(), random(3, K, dtype=torch.float16)
    layer = layers.QuantLinear.from_linear(plain, format_of(name), prepack=prepack)
    values = cq.quantize(plain.weight.detach(), format_of(name)).dequantize()
    w = layer.weight
    assert (w.dtype, w.device, w.shape) == (plain.weight.dtype, plain.weight.device, (N, K))
    assert torch.equal(w.detach(), values) and w.detach().is_cuda
    assert torch.equal(torch.nn.functional.linear(x, w, layer.bias), layer(x))
    layer.weight.data += 0.25
    fresh = cq.quantize(values + 0.25, format_of(name))
    assert torch.equal(layer.weight.detach(), fresh.dequantize())


@pytest.mark.parametrize("prepack", [False, True])
def test_files_go_to_the_gpu(prepack, tmp_path, torch, layers, random, linear):
    plain, x = torch.nn.Sequential(linear()), random(3, K, dtype=torch.float16)
    q = cq.quantize(plain[0].weight.detach(), "nf4")
    weight, bias = cq.prepack(q) if prepack else q, plain[0].bias
    cq.save(tmp_path / "m", {"0.weight": weight, "0.bias": bias, "b": bias.detach().bfloat16()})
    for library in ("torch", "cupy"):
        found = cq.load(tmp_path / "m", library=library, device="cuda:0")
        assert found["0.weight"].kind == library and found["0.weight"].device == "cuda:0"
        assert interop.device(found["b"]) == "cuda:0" and interop.kind(found["b"]) == library
        assert bits_equal(bytes_of(found["b"]), bytes_of(bias.detach().bfloat16()))
    cq.save(tmp_path / "m", {"0.weight": weight, "0.bias": bias})
    model = layers.load_(torch.nn.Sequential(linear(seed=7)), tmp_path / "m")
    assert model[0].layout == "fragments/1"
    assert torch.equal(model(x), cq.linear(x, cq.prepack(q), bias.detach()))


# ---- compilers and graphs -----------------------------------------------------------------------


@pytest.mark.parametrize("prepack", [False, True])
@pytest.mark.parametrize("name", ["nf4", "k3", "q4_k", "fp16"])
def test_opcheck(name, prepack, torch, layers, random, linear):
    from cuquant.torch.op import LINEAR

    layer = layers.QuantLinear.from_linear(linear(), name, prepack=prepack)
    x = random(2, 3, K, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        arguments = (x, layer._parts(), *layer._words, layer.bias, "gelu")
        torch.library.opcheck(LINEAR, arguments)
        residual = random(2, 3, N, dtype=torch.float16)
        more = {"residual": residual, "out_dtype": torch.float32}
        torch.library.opcheck(LINEAR, arguments, more)


@pytest.mark.parametrize("how", ["aot_eager", "inductor", "reduce-overhead"])
def test_compile_without_graph_breaks(how, torch, layers, random, linear):
    model = torch.nn.Sequential(linear(256), torch.nn.SiLU(), linear(64, 256), torch.nn.ReLU())
    model.requires_grad_(False)
    layers.quantize_(model, {"0": "nf4", "2": "int4"})
    x = random(4, K, dtype=torch.float16)
    options = {"mode": how} if how == "reduce-overhead" else {"backend": how}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler's own
        compiled = torch.compile(model, fullgraph=True, **options)
        for seed in range(4):  # graphs are captured in the second or third call
            x.copy_(random(4, K, seed=seed))
            torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("prepack", [False, True])
@pytest.mark.parametrize("name", SAMPLE)
def test_a_graph_is_captured_and_replayed(name, prepack, torch, layers, random, linear):
    model = torch.nn.Sequential(linear(128), torch.nn.ReLU(), linear(64, 128)).requires_grad_(False)
    # The second's rows are too short for K-quants, and it stays what it is.
    layers.quantize_(model, format_of(name), prepack=prepack)
    static = random(6, K, dtype=torch.float16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(static)
    for seed in range(3):
        static.copy_(random(6, K, seed=seed))
        graph.replay()
        assert torch.equal(y, model(static))


@pytest.mark.parametrize("prepack", [False, True])
@pytest.mark.parametrize("name", SAMPLE)
def test_nothing_waits(name, prepack, torch, layers, random, linear):
    layer = layers.QuantLinear.from_linear(linear(), format_of(name), prepack=prepack)
    x = random(6, K, dtype=torch.float16)
    layer(x)
    for rows in (1, 6):
        layer(x[:rows])  # what is done once for a shape may wait
    with waiting.refused(torch):
        for rows in (1, 6):
            layer(x[:rows])


def test_a_side_stream(torch, layers, random, linear):
    layer = layers.QuantLinear.from_linear(linear(), "nf4")
    x = random(6, K, dtype=torch.float16)
    wanted = layer(x)
    late, side = torch.zeros_like(x), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        late.copy_(x)
        y = layer(late)
    assert not side.query(), "the call waited"
    side.synchronize()
    assert torch.equal(y, wanted)


# ---- what is refused, what is freed -------------------------------------------------------------


@pytest.mark.parametrize("rows", [2, 64])  # few are multiplied, for many the weight is decoded
@pytest.mark.parametrize("prepack", [False, True])
def test_gradients(torch, layers, random, linear, rows, prepack):
    layer = layers.QuantLinear.from_linear(linear(), "nf4", prepack=prepack)
    x, g = random(rows, K).requires_grad_(), random(rows, N, seed=1)
    w = layer.quantized.dequantize(torch.float32)
    for _ in range(2):  # the second time by a plan
        y = layer(x)
        (found,) = torch.autograd.grad(y, x, g)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(layer(x), layer(x.detach())) and torch.equal(y, layer(x))
    wanted = g.double() @ w.double()
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    stack = cq.quantize(torch.stack([w, -w]), "int8")
    experts = torch.arange(rows, device="cuda") % 2
    (found,) = torch.autograd.grad(cq.grouped_linear(x, stack, experts), x, g)
    wanted = (g * (1 - 2 * experts)[:, None]).double() @ stack.dequantize()[0].double()
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_autocast_as_for_nn_linear(torch, layers, random, linear):
    layer = layers.QuantLinear.from_linear(linear(), "nf4")
    x = random(2, K)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16 and torch.equal(y, layer(x.bfloat16()))


def test_devices_that_differ(torch, layers, random, linear):
    layer = layers.QuantLinear.from_linear(linear(), "nf4")
    with pytest.raises((ValueError, cq.BackendUnavailable)):
        layer(random(2, K).cpu())
    with pytest.raises((ValueError, cq.BackendUnavailable)):
        layer.cpu()(random(2, K))


def test_memory_comes_back_with_the_model(torch, layers, random):
    def used() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    x = random(2, 4096, dtype=torch.float16)

    def run(prepack: bool, before: int) -> None:
        plain = torch.nn.Linear(4096, 4096, device="cuda", dtype=torch.float16)
        model = layers.quantize_(torch.nn.Sequential(plain), "nf4", prepack=prepack)
        del plain
        model(x)
        assert used() - before < 4096 * 4096 * 0.75  # 4.5 bits of 16, and what kernels keep

    for prepack in (False, True):
        run(prepack, used())  # kernels keep tables and workspaces for good
        before = used()
        run(prepack, before)
        assert used() == before


@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_llm_int8_waits_for_nothing(torch, layers, random, threshold):
    """Nor do its gradients; a graph of it takes rows with other columns of outliers."""
    codes, absmax, _ = cq.functional.quantize_llm_int8(random(N, K, dtype=torch.float16), 0)
    x, g = random(33, K, dtype=torch.float16), random(33, N, dtype=torch.float16)
    x.requires_grad_()

    def run():
        y = torch.ops.cuquant.llm_int8(x, codes, absmax, threshold, None)
        return y.detach(), *torch.autograd.grad(y, x, g)

    run()
    with waiting.refused(torch):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dx = run()
    with torch.no_grad():
        x[:, 5] = 40
    graph.replay()
    wanted = run()
    assert torch.equal(y, wanted[0]) and torch.equal(dx, wanted[1])
    here = cq.functional.llm_int8_linear(
        x.detach().cpu(), codes.cpu(), absmax.cpu(), threshold=threshold
    )
    gap = (y.cpu().double() - here.double()).abs().max()
    assert gap <= (2**-10 + 4e-5) * here.double().abs().max()
    exact = g.double() @ (codes.double() * (absmax.double() / 127)[:, None])
    assert (dx.double() - exact).norm() <= 2e-3 * exact.norm()


@pytest.mark.parametrize("operation", ["rmsnorm", "layernorm", "silu_mul", "gelu_mul", "hadamard"])
def test_rows_are_quantized_by_an_operator(torch, layers, random, operation):
    """To the CPU's bytes, with a graph of torch.compile's around it."""
    call = getattr(cq.functional, f"{operation}_quantize")
    x, w, up = random(5, K), random(K, seed=1), random(5, K, seed=2)
    args = {"hadamard": (x,), "silu_mul": (x, up), "gelu_mul": (x, up)}.get(operation, (x, w))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler's own
        found = torch.compile(call, fullgraph=True, backend="aot_eager")(*args)
    wanted = call(*(a.cpu() for a in args))
    for part, want in zip(found.arrays().values(), wanted.arrays().values(), strict=True):
        assert torch.equal(part.cpu(), want)


@pytest.mark.parametrize("what", ["quantize", "by a format", "matmul", "linear", "dequantize"])
def test_functions_are_operators_to_a_compiler(torch, layers, random, what):
    """With one graph, and what they give without it."""
    x, q = random(5, K), cq.quantize(random(N, K, seed=1), "nf4")
    p, other = cq.prepack(q), cq.get_format("int4", block_size=32)
    call = {
        "quantize": lambda x: cq.quantize(x, "int8").dequantize(),
        "by a format": lambda x: cq.quantize(x, other).dequantize(),
        "matmul": lambda x: torch.relu(x @ q.T),
        "linear": lambda x: torch.relu(cq.linear(x, p)),
        "dequantize": lambda x: x + q.dequantize()[0],
    }[what]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler's own
        found = torch.compile(call, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(found, call(x))


@pytest.mark.parametrize("rows", [5, 400])
@pytest.mark.parametrize("prepack", [False, True])
def test_gradients_of_experts(torch, layers, random, rows, prepack):
    q = cq.quantize(random(4, N, K), "int8")
    held = cq.prepack(q) if prepack else q
    experts = torch.arange(rows, device="cuda") % 4
    for dtype, close in ((torch.float32, 1e-5), (torch.bfloat16, 2**-7)):
        x, g = random(rows, K, dtype=dtype).requires_grad_(), random(rows, N, dtype=dtype, seed=3)
        (dx,) = torch.autograd.grad(cq.grouped_linear(x, held, experts), x, g)
        w = q.dequantize(torch.float32).double()[experts]
        wanted = torch.einsum("tn,tnk->tk", g.double(), w)
        assert dx.dtype == dtype and (dx.double() - wanted).norm() <= close * wanted.norm()
