"""cuquant.torch on the CPU: the package, and the operator."""

import copy
import dataclasses
import pickle
import subprocess
import sys
import warnings
import weakref
from functools import partial

import fake_gpu
import pytest
from emulator import Emulator
from in_turn import in_turn

import cuquant as cq

torch = pytest.importorskip("torch", reason="torch is optional")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch_models import DTYPES, NAMES, VARIANTS, Block, arguments, components, linear, random  # noqa: E402

import cuquant.torch  # noqa: E402
from cuquant.torch import QuantLinear, op, operators, quantize_  # noqa: E402
from cuquant.torch.spec import WeightSpec, format_text, parse_format  # noqa: E402

nn = torch.nn


# ---- the package --------------------------------------------------------------------------------


def test_import_cuquant_does_not_import_torch():
    code = "import sys, cuquant; assert 'torch' not in {*sys.modules, *dir(cuquant)}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_torch_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "try: import cuquant.torch\n"
        "except ImportError as error: assert 'pip install' in str(error), error\n"
        "else: raise SystemExit('no error')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names():
    assert cuquant.torch.__all__ == sorted(cuquant.torch.__all__)
    assert {"QuantLinear", "load_", "quantize_"} <= {*cuquant.torch.__all__}
    assert all(getattr(cuquant.torch, name).__doc__ for name in cuquant.torch.__all__)


# ---- the operator -------------------------------------------------------------------------------


def test_schema():
    assert str(torch.ops.cuquant.linear.default._schema) == (
        "cuquant::linear(Tensor x, Tensor[] components, str format, str layout, SymInt[] shape, "
        "ScalarType dtype, Tensor? bias=None, str? activation=None, Tensor? residual=None, "
        "ScalarType? out_dtype=None) -> Tensor"
    ).replace("SymInt[]", "int[]")
    assert torch.Tag.pt2_compliant_tag in torch.ops.cuquant.linear.default.tags


def test_schema_of_llm_int8():
    assert str(torch.ops.cuquant.llm_int8.default._schema) == (
        "cuquant::llm_int8(Tensor x, Tensor weight_codes, Tensor absmax, float threshold, "
        "Tensor? bias) -> Tensor"
    )


@pytest.mark.parametrize("name", ["nf4", "k3", "fp16", "q4_k"])
@pytest.mark.parametrize("prepack", [False, True])
def test_opcheck(name, prepack):
    layer = QuantLinear.from_linear(linear(), name, prepack=prepack)
    check = partial(torch.library.opcheck, op.LINEAR)
    check((random(2, 3, 256), *arguments(layer)))
    half = random(5, 256, dtype=torch.bfloat16), *arguments(layer), layer.bias, "gelu"
    check(half, {"residual": random(5, 24), "out_dtype": torch.float16}, atol=0, rtol=0)


@pytest.mark.parametrize("x", [random(256), random(0, 256), random(4, 6, 256)[::2, 1:3]])
def test_opcheck_of_odd_shapes(x):
    layer = QuantLinear.from_linear(linear(), "int4")
    torch.library.opcheck(op.LINEAR, (x, *arguments(layer), layer.bias))
    transposed = random(256, 5).T
    torch.library.opcheck(op.LINEAR, (transposed, *arguments(layer), layer.bias))


@pytest.mark.parametrize("fmt", [*NAMES, *VARIANTS])
@in_turn("dtype", DTYPES)
def test_equals_linear(fmt, dtype):
    """Bit for bit, for every format."""
    fmt = VARIANTS.get(fmt, fmt)
    plain, x = linear(), random(3, 256, dtype=dtype, seed=9)
    layer = QuantLinear.from_linear(plain, fmt, activation="silu")
    q = cq.quantize(plain.weight.detach(), fmt)
    wanted = cq.linear(x, q, plain.bias.detach(), activation="silu")
    y = layer(x)
    assert y.dtype == dtype and torch.equal(y, wanted)
    residual = random(3, 24, seed=3)
    out = op.LINEAR(x, *arguments(layer), layer.bias, "silu", residual, torch.float16)
    more = {"activation": "silu", "residual": residual, "out_dtype": torch.float16}
    assert torch.equal(out, cq.linear(x, q, plain.bias.detach(), **more))


class Subclass(torch.Tensor):
    pass


class _Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11's own
def test_who_watches_operators_sees_one_and_nobody_else_needs_to(monkeypatch):
    """The layer's product is the operator for all that looks at operators; else the same bits come
    without torch's dispatcher."""
    layer, x = QuantLinear.from_linear(linear(), "int4", prepack=True), random(2, 256)
    asked = []
    product = op.LINEAR
    monkeypatch.setattr(op, "LINEAR", lambda *a: asked.append(1) or product(*a))
    with torch.no_grad():
        wanted = layer(x)
        assert not asked
        modes = [torch.profiler.profile(), torch.device("cpu"), _Seen()]
        for mode in modes:
            with mode:
                assert torch.equal(layer(x), wanted)
        assert "cuquant::linear" in modes[2].names
        assert "cuquant::linear" in {event.key for event in modes[0].key_averages()}
        assert torch.equal(layer(x.as_subclass(Subclass)), wanted)
        with pytest.raises(
            RuntimeError, match=r"Batching rule not implemented for cuquant::linear"
        ):
            torch.func.vmap(layer)(x[None])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            traced = torch.jit.trace(layer, x, check_trace=False)
        assert "cuquant::linear" in str(traced.inlined_graph) and torch.equal(traced(x), wanted)
    assert len(asked) >= 5
    assert torch.equal(layer(x), wanted)  # gradients are on, and nobody wants one


@pytest.mark.parametrize("fmt", [*NAMES, *VARIANTS])
def test_prepacked_equals_linear(fmt):
    fmt = VARIANTS.get(fmt, fmt)
    plain, x = linear(n=20), random(3, 256)
    layer = QuantLinear.from_linear(plain, fmt, prepack=True)
    q = cq.quantize(plain.weight.detach(), fmt)
    p = cq.prepack(q)
    assert layer.layout == p.layout and torch.equal(layer(x), cq.linear(x, q, plain.bias.detach()))
    if p.layout == "rows/1":
        assert isinstance(layer.quantized, cq.QuantArray)
        return
    assert layer.quantized.layout == p.layout and layer._names == tuple(p.components)
    assert all(
        torch.equal(part.view(torch.uint8), layer.quantized.components[name].view(torch.uint8))
        for name, part in p.components.items()
        if part.ndim
    )


def test_components_may_be_themselves_or_their_bytes():
    plain = linear()
    q = cq.quantize(plain.weight.detach(), "int4")
    x, spec = random(2, 256), WeightSpec.of(q)
    words = (spec.format, spec.layout, spec.shape, spec.dtype)
    wanted = cq.linear(x, q)
    scale = q.arrays()["scale"]
    assert scale.dtype == torch.float16
    for part in (scale, scale.view(torch.uint8)):
        assert torch.equal(torch.ops.cuquant.linear(x, [q.packed, part], *words), wanted)
    for wrong, message in (
        ([q.packed], "1 tensors"),
        ([], "0 tensors"),
        ([q.packed, scale.float()], "float32"),
        ([q.packed, scale.view(torch.bfloat16)], "bfloat16"),
        ([q.packed, scale[:, :1]], "scale"),
        ([q.packed.T.contiguous().T, scale], "contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            torch.ops.cuquant.linear(x, wrong, *words)
    with pytest.raises(ValueError, match="unknown format"):
        torch.ops.cuquant.linear(x, [q.packed, scale], "nf5", *words[1:])
    with pytest.raises(ValueError, match="fragments/9"):
        torch.ops.cuquant.linear(x, [q.packed, scale], words[0], "fragments/9", *words[2:])
    with pytest.raises(ValueError, match=r"\[N, K\]"):
        torch.ops.cuquant.linear(x, [q.packed, scale], *words[:2], [256], words[3])


def test_the_weight_is_made_once():
    layer = QuantLinear.from_linear(linear(), "nf4")
    first = layer.quantized
    layer(random(1, 256))
    assert layer.quantized is first
    other = QuantLinear(cq.quantize(random(24, 256, seed=5), "nf4"))
    assert other.quantized is not first and layer.quantized is first
    layer.packed.data = other.packed.clone()  # the same tensor, elsewhere
    assert torch.equal(layer.quantized.packed, other.quantized.packed)
    fp4 = op.weight_of(layer._parts(), "fp4", *layer._words[1:])  # the same tensors, other words
    assert fp4.format.name == "fp4" and layer.quantized.format.name == "nf4"


@pytest.mark.parametrize("fmt", ["nf4", "q4_0", "bf16"])
def test_nothing_keeps_a_layers_memory(fmt):
    layer = QuantLinear.from_linear(linear(), fmt)
    layer(random(1, 256))
    first = components(layer)[0][1]
    key, storage = id(first), weakref.ref(first.untyped_storage())
    assert key in op._kept
    del layer, first
    assert key not in op._kept and storage() is None  # at once, without gc


def test_the_weight_follows_what_is_loaded_into_the_components():
    layer, other = (QuantLinear.from_linear(linear(seed=s), "int4") for s in (0, 1))
    x = random(2, 256)
    assert not torch.equal(layer(x), other(x))
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer(x), other(x))


def test_format_texts():
    for fmt in (*map(cq.get_format, NAMES), *VARIANTS.values()):
        assert parse_format(format_text(fmt)) == fmt
        # What torch.compile reads is with a Format until it is changed.
        assert pickle.loads(pickle.dumps(fmt)).text == fmt.text == format_text(fmt)
        assert dataclasses.replace(fmt, name="nf4").text is None
    for wrong in ("nf5", "{}", '{"name": "nf4"}', '{"name": "nf4", "options": 3}', "{", "[1]"):
        with pytest.raises(ValueError):
            parse_format(wrong)


# ---- autocast, devices --------------------------------------------------------------------------


def test_a_layer_without_its_weight_is_an_error():
    """On the meta device nothing is computed, and what is computed elsewhere must be there."""
    with torch.device("meta"):
        layer = quantize_(nn.Sequential(linear()), "nf4")
    assert layer(random(2, 256).to("meta")).is_meta
    with pytest.raises(ValueError, match="is on meta, and x on cpu"):
        layer(random(2, 256))
    with pytest.raises(Exception, match="is on meta, and x on cpu"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(random(2, 256))
    whole = QuantLinear.from_linear(linear(), "nf4")
    with pytest.raises(ValueError, match="bias is on meta"):
        op.LINEAR(random(2, 256), *arguments(whole), torch.zeros(24, device="meta"))


def test_x_must_be_a_tensor():
    with pytest.raises(TypeError, match="x must be a tensor, got ndarray"):
        QuantLinear.from_linear(linear(), "nf4")(random(2, 256).numpy())


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.bool, torch.float64, torch.complex64], ids=str
)
def test_autocast_casts_no_other_dtypes(dtype):
    layer = QuantLinear(cq.quantize(random(8, 64), "int4"))
    refused = pytest.raises(TypeError, match="x must be")
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad(), refused:
        layer(torch.ones(1, 64, dtype=dtype))


def test_autocast_as_for_nn_linear():
    plain = linear()
    layer = QuantLinear.from_linear(plain, "int8")
    x = random(2, 256)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        y = layer(x)
        assert y.dtype == plain(x).dtype == torch.bfloat16
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), y)
    assert torch.equal(y, layer(x.bfloat16()))


def test_wrong_x():
    layer = QuantLinear.from_linear(linear(), "nf4")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"\(2, 255\)"):
        layer(random(2, 255))
    with pytest.raises(Exception, match="its last axis must be 256"):
        compiled(random(2, 255))
    with pytest.raises(TypeError, match="float64"):
        layer(random(2, 256).double())


def test_meta_tensors():
    layer = QuantLinear.from_linear(linear(), "nf4").to("meta")
    assert all(p.is_meta for _, p in components(layer)) and layer.quantized.device == "meta"
    y = layer(torch.empty(3, 5, 256, device="meta", dtype=torch.float16))
    assert y.is_meta and y.shape == (3, 5, 24) and y.dtype == torch.float16


# ---- torch.compile, export ----------------------------------------------------------------------


@pytest.mark.parametrize("prepack", [False, True])
def test_compile_without_graph_breaks(prepack):
    model = Block().eval().requires_grad_(False)
    quantize_(model, {"mlp.gate": "k3", "*": "nf4"}, prepack=prepack)
    tokens = torch.arange(12).reshape(2, 6)
    wanted = model(tokens)
    torch._dynamo.utils.counters.clear()  # other tests' breaks
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    assert torch.equal(compiled(tokens), wanted)
    assert torch.equal(compiled(tokens[:, :5]), model(tokens[:, :5]))
    counts = torch._dynamo.utils.counters["graph_break"]
    assert not counts


def test_inductor():
    """Layers alone: whatever inductor fuses itself costs ten seconds of g++."""
    model = quantize_(nn.Sequential(linear(32, 64), linear(16, 32)).requires_grad_(False), "int4")
    x = random(3, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler's own
        assert torch.equal(torch.compile(model, fullgraph=True)(x), model(x))


def test_export():
    model = quantize_(nn.Sequential(linear(32, 64), nn.ReLU()).requires_grad_(False), "nf4")
    program = torch.export.export(model, (random(3, 64),))
    assert "cuquant.linear.default" in str(program.graph)
    assert torch.equal(program.module()(random(3, 64, seed=2)), model(random(3, 64, seed=2)))


# ---- repeated products --------------------------------------------------------------------------


@pytest.fixture
def slow(monkeypatch):
    """A GPU's tensors, which pass for plain ones; and the products that no plan made."""
    calls, product = [], op._product
    fake_gpu.install("torch", monkeypatch, Emulator(arch=80))
    for module in (operators, op):
        monkeypatch.setattr(module, "PLAIN", (*op.PLAIN, fake_gpu.CudaTensor))
    monkeypatch.setattr(op, "_product", lambda *a, **k: calls.append(1) or product(*a, **k))
    return calls


def on_fake_gpu(layer):
    for name, part in layer._parameters.items():
        if part is not None:
            moved = part.data.clone().as_subclass(fake_gpu.CudaTensor)
            layer._parameters[name] = moved.requires_grad_(False)
    return layer


@fake_gpu.needs_compiler
@pytest.mark.parametrize("fmt", ["int4", "int8+absmax"])
def test_a_repeated_product_is_made_by_its_plan(slow, fmt):
    """Where plans of such a format are found by the weight; what differs has a plan of its own."""
    here = QuantLinear.from_linear(linear(), fmt, activation="relu")
    layer, plans = on_fake_gpu(copy.deepcopy(here)), fmt == "int4"
    xs = [random(rows, 256, seed=rows) for rows in (1, 1, 3, 1, 3)]
    there = [x.as_subclass(fake_gpu.CudaTensor) for x in xs]
    with torch.no_grad():
        for x, y in zip(xs, map(layer, there), strict=True):
            assert torch.allclose(y.cpu(), here(x), atol=1e-4)
    assert len(slow) == (2 if plans else 5) + 5
    half = xs[0].half()
    with torch.no_grad():
        found = layer(half.as_subclass(fake_gpu.CudaTensor)).cpu()
        assert found.dtype == torch.float16 and torch.allclose(found, here(half), atol=1e-2)
        other = QuantLinear.from_linear(linear(seed=4), fmt, activation="relu")
        layer._parameters["packed"].data = other.packed.clone()  # elsewhere
        layer._parameters["scale"].copy_(other.scale)
        layer._parameters["bias"].copy_(other.bias)
        assert torch.allclose(layer(there[0]).cpu(), other(xs[0]), atol=1e-4)
