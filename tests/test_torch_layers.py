"""cuquant.torch on the CPU: the operator, QuantLinear, quantize_."""

import copy
import io
import json
import logging
import pickle
import subprocess
import sys
import warnings
import weakref
from functools import partial

import numpy as np
import pytest
from oracle import bits_equal

import cuquant as cq

torch = pytest.importorskip("torch", reason="torch is optional")

import cuquant.torch  # noqa: E402
from cuquant.torch import QuantLinear, op, quantize_  # noqa: E402
from cuquant.torch.spec import WeightSpec, format_text, parse_format  # noqa: E402

nn = torch.nn
NAMES = cq.list_formats()
FEW = ("nf4", "k3", "int4", "uint4", "int8", "mxfp4", "nvfp4", "fp16", "bf16", "q4_0", "q4_k")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
VARIANTS = {
    "double": cq.get_format("nf4", double_quant=True),
    "levels": cq.get_format("k3", levels=(-1.0, -0.25, 0.0, 0.1, 0.7)),
    "words": cq.get_format("k3", packing="word"),
    "pair": cq.get_format("fp8_e4m3", block_size=(128, 128)),
    "tensor": cq.get_format("int8", block_size="tensor"),
}


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear(n=24, k=256, bias=True, seed=0, dtype=torch.float32):
    made = nn.Linear(k, n, bias=bias, dtype=dtype)
    with torch.no_grad():
        made.weight.copy_(random(n, k, seed=seed))
        if bias:
            made.bias.copy_(random(n, seed=seed + 1))
    return made


class Block(nn.Module):
    """A transformer's MLP, with a norm and a head; the head may be the embedding's weight."""

    def __init__(self, tied=False, width=64, hidden=96, words=40):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.mlp = nn.ModuleDict(
            {"gate": nn.Linear(width, hidden, bias=False), "down": nn.Linear(hidden, width)}
        )
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, words, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.mlp["down"](nn.functional.silu(self.mlp["gate"](x)))
        return self.lm_head(self.norm(x))


def kinds(model):
    return {n: type(m).__name__ for n, m in model.named_modules() if "Linear" in type(m).__name__}


def buffers_equal(a, b):
    mine, others = a.state_dict(), b.state_dict()
    return list(mine) == list(others) and all(
        v.dtype == others[k].dtype and torch.equal(v, others[k]) for k, v in mine.items()
    )


def arguments(layer):
    """What the layer hands to the operator behind x."""
    return layer._parts(), *layer._words


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
    assert cuquant.torch.__all__ == ["QuantLinear", "quantize_"]
    assert cuquant.torch.__doc__ and quantize_.__doc__ and QuantLinear.__doc__


# ---- the operator -------------------------------------------------------------------------------


def test_schema():
    assert str(torch.ops.cuquant.linear.default._schema) == (
        "cuquant::linear(Tensor x, Tensor[] components, str format, str layout, SymInt[] shape, "
        "ScalarType dtype, Tensor? bias=None, str? activation=None, Tensor? residual=None, "
        "ScalarType? out_dtype=None) -> Tensor"
    ).replace("SymInt[]", "int[]")
    assert torch.Tag.pt2_compliant_tag in torch.ops.cuquant.linear.default.tags


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", [*NAMES, *VARIANTS])
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


@pytest.mark.parametrize("fmt", [*NAMES, *VARIANTS])
def test_prepacked_equals_linear(fmt):
    fmt = VARIANTS.get(fmt, fmt)
    plain, x = linear(n=20), random(3, 256)
    layer = QuantLinear.from_linear(plain, fmt, prepack=True)
    q = cq.quantize(plain.weight.detach(), fmt)
    p = cq.prepack(q)
    assert layer.layout == p.layout and torch.equal(layer(x), cq.linear(x, q, plain.bias.detach()))
    if p.layout == "rows/1":
        assert isinstance(layer.weight, cq.QuantArray)
        return
    assert layer.weight.layout == p.layout and layer._names == tuple(p.components)
    assert all(
        torch.equal(part.view(torch.uint8), layer.weight.components[name].view(torch.uint8))
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
    first = layer.weight
    layer(random(1, 256))
    assert layer.weight is first
    other = QuantLinear(cq.quantize(random(24, 256, seed=5), "nf4"))
    assert other.weight is not first and layer.weight is first
    layer.packed.data = other.packed.clone()  # the same tensor, elsewhere
    assert torch.equal(layer.weight.packed, other.weight.packed)
    fp4 = op.weight_of(layer._parts(), "fp4", *layer._words[1:])  # the same tensors, other words
    assert fp4.format.name == "fp4" and layer.weight.format.name == "nf4"


@pytest.mark.parametrize("fmt", ["nf4", "q4_0", "bf16"])
def test_nothing_keeps_a_layers_memory(fmt):
    layer = QuantLinear.from_linear(linear(), fmt)
    layer(random(1, 256))
    first = next(layer.buffers())
    key, storage = id(first), weakref.ref(first.untyped_storage())
    assert key in op._kept
    del layer, first
    assert key not in op._kept and storage() is None  # at once, without gc


def test_the_weight_follows_what_is_loaded_into_the_buffers():
    layer, other = (QuantLinear.from_linear(linear(seed=s), "int4") for s in (0, 1))
    x = random(2, 256)
    assert not torch.equal(layer(x), other(x))
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer(x), other(x))


def test_format_texts():
    for fmt in (*map(cq.get_format, NAMES), *VARIANTS.values()):
        assert parse_format(format_text(fmt)) == fmt
    for wrong in ("nf5", "{}", '{"name": "nf4"}', '{"name": "nf4", "options": 3}', "{", "[1]"):
        with pytest.raises(ValueError):
            parse_format(wrong)


# ---- gradients, autocast, devices ---------------------------------------------------------------


def test_lost_gradients_are_errors():
    layer = QuantLinear.from_linear(linear(), "nf4")
    x = random(2, 256).requires_grad_()
    with pytest.raises(RuntimeError, match=r"x requires grad.*no_grad"):
        layer(x)
    with pytest.raises(RuntimeError, match="bias requires grad"):
        op.LINEAR(x.detach(), *arguments(layer), layer.bias.clone().requires_grad_())
    with pytest.raises(RuntimeError, match="residual requires grad"):
        op.LINEAR(x.detach(), *arguments(layer), residual=random(2, 24).requires_grad_())
    with pytest.raises(Exception, match="x requires grad"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    wanted = layer(x.detach())
    assert not wanted.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = layer(x)
            assert not y.requires_grad and torch.equal(y, wanted)
            compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
            assert torch.equal(compiled(x), wanted)
    assert [p.requires_grad for p in layer.parameters()] == [False]


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
    assert all(b.is_meta for b in layer.buffers()) and layer.weight.device == "meta"
    y = layer(torch.empty(3, 5, 256, device="meta", dtype=torch.float16))
    assert y.is_meta and y.shape == (3, 5, 24) and y.dtype == torch.float16


# ---- torch.compile, export ----------------------------------------------------------------------


@pytest.mark.parametrize("prepack", [False, True])
def test_compile_without_graph_breaks(prepack):
    model = Block().eval().requires_grad_(False)
    quantize_(model, {"mlp.gate": "k3", "*": "nf4"}, prepack=prepack)
    tokens = torch.arange(12).reshape(2, 6)
    wanted = model(tokens)
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


# ---- QuantLinear --------------------------------------------------------------------------------


def test_repr_and_attributes():
    layer = QuantLinear.from_linear(linear(), cq.get_format("int4", block_size=64), prepack=True)
    assert repr(layer) == (
        "QuantLinear(in_features=256, out_features=24, bias=True, format=int4(block_size=64), "
        "layout=fragments/1)"
    )
    assert (layer.in_features, layer.out_features, layer.activation) == (256, 24, None)
    assert layer.format == cq.get_format("int4", block_size=64)
    assert QuantLinear(layer.weight).bias is None


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_from_a_weight(activation):
    """QuantArray or PackedWeight, of NumPy or torch, without a copy."""
    w, b, x = random(24, 128), random(24), random(2, 128)
    q = cq.quantize(w.numpy(), "k5")
    for weight in (q, cq.prepack(q), cq.quantize(w, "k5"), cq.prepack(cq.quantize(w, "k5"))):
        layer = QuantLinear(weight, b, activation=activation)
        assert torch.equal(layer(x), cq.linear(x, weight, b, activation=activation))
    part = next(iter(q.arrays().values()))
    assert QuantLinear(q).packed.data_ptr() == part.ctypes.data


def test_wrong_weights():
    q = cq.quantize(random(24, 128), "nf4")
    for wrong in (random(24, 128), None, nn.Linear(2, 2)):
        with pytest.raises(TypeError, match="QuantArray or PackedWeight"):
            QuantLinear(wrong)
    for wrong in (q.T, q[0], cq.quantize(random(2, 24, 128), "nf4")):
        with pytest.raises(ValueError, match=r"\[N, K\]"):
            QuantLinear(wrong)
    with pytest.raises(ValueError, match="bias has shape"):
        QuantLinear(q, random(23))
    with pytest.raises(TypeError, match="bias must be"):
        QuantLinear(q, random(24).double())
    with pytest.raises(TypeError, match="bias must be a tensor"):
        QuantLinear(q, np.zeros(24, np.float32))
    with pytest.raises(ValueError, match="relu, gelu, silu"):
        QuantLinear(q, activation="tanh")
    with pytest.raises(TypeError, match=r"nn\.Linear"):
        QuantLinear.from_linear(nn.Identity(), "nf4")
    with pytest.raises(ValueError, match="unknown format"):
        QuantLinear.from_linear(linear(), "nf5")
    with pytest.raises(ValueError, match="multiple of 256"):
        QuantLinear.from_linear(linear(k=128), "q4_k")
    with pytest.raises(TypeError, match="float64"):
        QuantLinear.from_linear(linear().double(), "nf4")


def test_from_linear_takes_nothing_of_the_linear_and_leaves_it():
    plain = linear().eval()
    before = copy.deepcopy(plain.state_dict())
    layer = QuantLinear.from_linear(plain, "nf4")
    assert not layer.training and layer.bias.data_ptr() != plain.bias.data_ptr()
    assert plain.bias.requires_grad and all(
        torch.equal(v, before[k]) for k, v in plain.state_dict().items()
    )


CASTS = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "float": lambda m: m.half().float(),
    "to": lambda m: m.to(torch.bfloat16),
    "to device": lambda m: m.to("cpu", torch.float16),
    "type": lambda m: m.type(torch.float16),
    "parent": lambda m: nn.Sequential(m).half()[0],
    "share": lambda m: m.share_memory(),
}


@pytest.mark.parametrize("how", CASTS)
@pytest.mark.parametrize("fmt", [*FEW, *VARIANTS])
def test_casts_change_no_code_and_no_scale(fmt, how):
    layer = QuantLinear.from_linear(linear(), VARIANTS.get(fmt, fmt))
    codes = {name: part.clone() for name, part in layer.named_buffers()}
    x = random(2, 256)
    wanted = layer(x)
    cast = CASTS[how](layer)
    assert cast is layer and set(codes) == {c.name for c in layer._spec.components()}
    for name, part in layer.named_buffers():
        assert part.dtype == torch.uint8 and torch.equal(part, codes[name])
    if how == "share":
        assert all(part.is_shared() for part in layer.buffers())
    layer.bias = nn.Parameter(linear().bias.detach(), requires_grad=False)
    assert torch.equal(layer(x), wanted)


def test_the_bias_is_cast():
    layer = QuantLinear.from_linear(linear(), "nf4").half()
    assert layer.bias.dtype == torch.float16 and layer(random(2, 256).half()).dtype == torch.float16


@pytest.mark.parametrize("prepack", [False, True])
@pytest.mark.parametrize("fmt", [*NAMES, *VARIANTS])
def test_state_dict_round_trip(fmt, prepack, tmp_path):
    fmt = VARIANTS.get(fmt, fmt)
    layer = QuantLinear.from_linear(linear(n=20), fmt, prepack=prepack)
    torch.save(layer.state_dict(), tmp_path / "state")
    saved = torch.load(tmp_path / "state", weights_only=True)
    other = QuantLinear.from_linear(linear(n=20, seed=7), fmt, prepack=prepack)
    assert not buffers_equal(layer, other)
    assert str(other.load_state_dict(saved)) == "<All keys matched successfully>"
    assert buffers_equal(layer, other)
    for name, part in layer.weight.components.items():
        found = other.weight.components[name]
        assert found.dtype == part.dtype and bits_equal(
            found.reshape(-1).view(torch.uint8).numpy(), part.reshape(-1).view(torch.uint8).numpy()
        )
    assert torch.equal(layer(random(2, 256)), other(random(2, 256)))


@pytest.mark.parametrize("prepack", [False, True])
@pytest.mark.parametrize("fmt", ["nf4", "k3", "q4_k", "fp16"])
def test_meta_model_and_assign(fmt, prepack):
    state = QuantLinear.from_linear(linear(), fmt, prepack=prepack).state_dict()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(256, 24))
    quantize_(model, fmt, prepack=prepack)
    assert all(t.is_meta for t in (*model.buffers(), *model.parameters()))
    model.load_state_dict({f"0.{k}": v for k, v in state.items()}, assign=True)
    assert model[0].bias.data_ptr() == state["bias"].data_ptr()
    plain = QuantLinear.from_linear(linear(), fmt)
    assert torch.equal(model(random(3, 256)), plain(random(3, 256)))
    emptied = model.to("meta").to_empty(device="cpu")
    emptied.load_state_dict({f"0.{k}": v for k, v in state.items()})
    assert torch.equal(emptied(random(3, 256)), plain(random(3, 256)))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("prepack", [False, True])
def test_load_takes_over_the_layout(prepack, assign):
    layer = QuantLinear.from_linear(linear(), "int4", prepack=prepack)
    other = QuantLinear.from_linear(linear(seed=3), "int4", prepack=not prepack)
    other(random(1, 256))
    other.load_state_dict(layer.state_dict(), assign=assign)
    assert other.layout == layer.layout and buffers_equal(layer, other)
    assert torch.equal(layer(random(2, 256)), other(random(2, 256)))


def test_load_refuses_what_is_no_such_weight():
    layer = QuantLinear.from_linear(linear(), "int4")
    x = random(2, 256)
    wanted, state = layer(x), layer.state_dict()

    def said(**changes):
        spec = json.loads(bytes(state["_extra_state"].tolist()))
        return torch.tensor(list(json.dumps({**spec, **changes}).encode()), dtype=torch.uint8)

    prepacked = QuantLinear.from_linear(linear(), "int4", prepack=True).state_dict()
    cases = {
        "fragments/2": {**prepacked, "_extra_state": said(layout="fragments/2")},
        "uint4": QuantLinear.from_linear(linear(), "uint4").state_dict(),
        "block_size=64": {**state, "_extra_state": said(format='{"name": "int4", "options": '
                                                        '{"block_size": 64}}')},
        "version 2": {**state, "_extra_state": said(version=2)},
        "unknown format": {**state, "_extra_state": said(format="int44")},
        r"\(24, 128\)": {**state, "_extra_state": said(shape=[24, 128])},
        "malformed": {**state, "_extra_state": said(dtype="float64")},
        "no JSON": {**state, "_extra_state": torch.zeros(9, dtype=torch.uint8)},
        "no uint8 tensor": {**state, "_extra_state": {"layout": "rows/1"}},
        "scale is torch.float16": {**state, "scale": state["scale"].view(torch.float16)},
        "packed is torch.float32": {**state, "packed": state["packed"].float()},
        "codes is missing": {k: v for k, v in prepacked.items() if k != "codes"},
        "Missing key": {k: v for k, v in state.items() if k != "_extra_state"},
        "Missing key.*scale": {k: v for k, v in state.items() if k != "scale"},
        "Unexpected key": {**state, "codes": state["packed"]},
        "size mismatch": {**state, "packed": state["packed"][:5]},
        "size mismatch for bias": {**state, "bias": random(5)},
    }  # fmt: skip
    for message, wrong in cases.items():
        fresh = copy.deepcopy(layer)
        with pytest.raises(RuntimeError, match=f"(?s){message}"):
            fresh.load_state_dict(wrong)
    for message in list(cases)[:12]:
        with pytest.raises(RuntimeError, match=f"(?s){message}"):
            layer.load_state_dict(cases[message], strict=False)
    assert torch.equal(layer(x), wanted) and layer.layout == "rows/1"
    model = nn.Sequential(layer)
    with pytest.raises(RuntimeError, match=r"0: the saved weight is uint4"):
        model.load_state_dict({f"0.{k}": v for k, v in cases["uint4"].items()})


def test_set_extra_state_alone():
    layer = QuantLinear.from_linear(linear(), "int4")
    state = layer.get_extra_state()
    assert state.dtype == torch.uint8 and state.device.type == "cpu"
    layer.set_extra_state(state)
    with torch.device("meta"):
        assert torch.equal(layer.get_extra_state(), state)
    with pytest.raises(cq.FormatError):
        layer.set_extra_state(state.to("meta"))


@pytest.mark.parametrize("prepack", [False, True])
@pytest.mark.parametrize("fmt", [*FEW, *VARIANTS])
def test_copies(fmt, prepack):
    layer = QuantLinear.from_linear(
        linear(), VARIANTS.get(fmt, fmt), activation="relu", prepack=prepack
    )
    x = random(2, 256)
    wanted = layer(x)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for made in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded, copy.copy(layer)):
        assert buffers_equal(made, layer) and torch.equal(made(x), wanted)
        assert repr(made) == repr(layer) and made.weight is not None
    deep = copy.deepcopy(layer)
    next(deep.buffers()).zero_()
    assert torch.equal(layer(x), wanted)


def test_state_dict_of_a_model_goes_into_safetensors(tmp_path):
    from safetensors.torch import load_file, save_file

    model = quantize_(Block(), {"*.gate": "k3", "*": "nf4"})
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    other = quantize_(Block(), {"*.gate": "k3", "*": "nf4"})
    other.load_state_dict(load_file(tmp_path / "m.safetensors"))
    assert buffers_equal(model, other)


def test_the_weight_can_be_saved(tmp_path):
    layer = QuantLinear.from_linear(linear(), "k3")
    cq.save(tmp_path / "w", {"w": layer.weight})
    assert torch.equal(QuantLinear(cq.load(tmp_path / "w")["w"])(random(2, 256)),
                       cq.linear(random(2, 256), layer.weight))  # fmt: skip


# ---- quantize_ ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", ["nf4", cq.get_format("int4", block_size=32), "mxfp4", "q4_0"])
def test_a_model_computes_what_cq_linear_does(fmt, dtype):
    model = Block().to(dtype).eval()
    plain = copy.deepcopy(model)
    tokens = torch.arange(10).reshape(2, 5)
    assert quantize_(model, fmt) is model
    assert set(kinds(model).values()) == {"QuantLinear"}

    def through(layer, x):
        bias = None if layer.bias is None else layer.bias.detach()
        return cq.linear(x, cq.quantize(layer.weight.detach(), fmt), bias)

    with torch.no_grad():
        x = plain.embed(tokens)
        inner = nn.functional.silu(through(plain.mlp["gate"], x))
        x = x + through(plain.mlp["down"], inner)
        assert torch.equal(model(tokens), through(plain.lm_head, plain.norm(x)))
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("options", "swapped"),
    [
        ({}, "mlp.gate mlp.down lm_head"),
        ({"exclude": "lm_head"}, "mlp.gate mlp.down"),
        ({"exclude": ["lm_head", "*.gate"]}, "mlp.down"),
        ({"exclude": ["mlp"]}, "lm_head"),
        ({"exclude": ("nothing.*", "m")}, "mlp.gate mlp.down lm_head"),
        ({"include": "mlp.*"}, "mlp.gate mlp.down"),
        ({"include": ["mlp"]}, "mlp.gate mlp.down"),
        ({"include": ["mlp.down", "lm_head"], "exclude": ["lm_*"]}, "mlp.down"),
        ({"include": ["*"]}, "mlp.gate mlp.down lm_head"),
        ({"format": {"*.gate": "int8", "mlp": None, "*": "nf4"}}, "mlp.gate lm_head"),
        ({"format": {"*": None, "lm_head": "int8"}}, "lm_head"),
        ({"format": {"mlp.*": "int8"}}, "mlp.gate mlp.down"),
        ({"format": {"mlp.*": "int8"}, "exclude": "*.down"}, "mlp.gate"),
    ],
)
def test_names(options, swapped):
    model = quantize_(Block(), **{"format": "nf4", **options})
    assert [n for n, kind in kinds(model).items() if kind == "QuantLinear"] == swapped.split()


def test_exact_names_are_no_globs():
    model = nn.ModuleDict({"a[1]": linear(8, 64), "a1": linear(8, 64)})
    quantize_(model, "nf4", include="a[1]")
    assert set(kinds(model).values()) == {"QuantLinear"}  # the name, and what the glob means
    model = nn.ModuleDict({"a[1]": linear(8, 64), "a1": linear(8, 64)})
    quantize_(model, {"a?": "int8", "a[1]": "nf4"})
    assert [model[name].format.name for name in ("a[1]", "a1")] == ["nf4", "int8"]


def test_formats_by_name():
    config = {"*": "nf4", "mlp": cq.get_format("int8"), "mlp.down": "q8_0"}
    model = quantize_(Block(), config)
    found = {n: m.format.name for n, m in model.named_modules() if isinstance(m, QuantLinear)}
    assert found == {"mlp.gate": "nf4", "mlp.down": "q8_0", "lm_head": "nf4"}
    model = quantize_(Block(), dict(reversed(config.items())))
    found = {n: m.format.name for n, m in model.named_modules() if isinstance(m, QuantLinear)}
    assert found == {"mlp.gate": "int8", "mlp.down": "q8_0", "lm_head": "nf4"}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"format": "nf5"}, ValueError, "unknown format 'nf5'"),
        ({"format": {"lm_head": "nf5"}}, ValueError, "unknown format"),
        ({"format": {"head": "nf4"}}, ValueError, "'head' selects no nn.Linear.*mlp.gate"),
        ({"format": {3: "nf4"}}, TypeError, "patterns are strings"),
        ({"format": None}, TypeError, "format"),
        ({"include": ["mlp.*", "*.up"]}, ValueError, r"'\*.up' selects no nn.Linear"),
        ({"include": 3}, TypeError, "include must be"),
        ({"exclude": [3]}, TypeError, "exclude holds 3"),
    ],
)
def test_wrong_arguments_change_nothing(options, error, message):
    model = Block()
    before = list(model.modules())
    with pytest.raises(error, match=message):
        quantize_(model, **options)
    assert list(model.modules()) == before


def test_models_that_are_none():
    with pytest.raises(ValueError, match="from_linear"):
        quantize_(nn.Linear(64, 64), "nf4")
    with pytest.raises(TypeError, match=r"nn\.Module"):
        quantize_([nn.Linear(64, 64)], "nf4")
    for empty in (nn.Sequential(nn.ReLU()), quantize_(nn.Sequential(linear()), "nf4")):
        with pytest.warns(UserWarning, match=r"no layer \(the model has no nn.Linear\)"):
            assert quantize_(empty, "nf4") is empty


def test_an_error_in_the_middle_changes_nothing(monkeypatch):
    from cuquant.torch import swap

    model = Block()
    before, quantized, seen = list(model.modules()), swap.quantized_weight, []

    def failing(weight, *rest):
        seen.append(weight)
        if len(seen) == 3:
            raise MemoryError("no memory")
        return quantized(weight, *rest)

    monkeypatch.setattr(swap, "quantized_weight", failing)
    with pytest.raises(MemoryError):
        quantize_(model, "nf4")
    assert list(model.modules()) == before


def test_layers_that_do_not_fit_are_kept(caplog):
    model = nn.Sequential(linear(64, 256), linear(8, 64), nn.Linear(64, 64).double())
    with caplog.at_level(logging.INFO, "cuquant.torch"):
        quantize_(model, "q4_k")
    assert list(kinds(model).values()) == ["QuantLinear", "Linear", "Linear"]
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "0: q4_k",
        "1: kept, 64 columns do not divide into blocks of q4_k",
        "2: kept, float64 values",
        "1 of 3 nn.Linear layers quantized",
    ]
    with pytest.warns(UserWarning, match="1: 64 columns do not divide"):
        quantize_(model, "q4_k")


def test_layers_with_a_life_of_their_own_are_kept():
    class Adapted(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    class Renamed(nn.Linear):
        pass

    patched = linear()
    patched.forward = lambda x: x
    model = nn.ModuleDict(
        {
            "adapted": Adapted(64, 64),
            "patched": patched,
            "parametrized": nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64)),
            "lazy": nn.LazyLinear(4),
            "attention": nn.MultiheadAttention(64, 4),
            "renamed": Renamed(64, 64),
        }
    )
    quantize_(model, "nf4")
    assert [n for n, m in model.named_modules() if isinstance(m, QuantLinear)] == ["renamed"]
    x = random(3, 1, 64)
    assert model["attention"](x, x, x)[0].shape == x.shape


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("prepack", [False, True])
def test_a_transformer_of_torchs_own(prepack, training):
    """It looks at the weights of its linear layers to choose a path of its own."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    plain = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    model = quantize_(copy.deepcopy(plain), "int8", prepack=prepack)
    names = [n for n, m in model.named_modules() if isinstance(m, QuantLinear)]
    assert names == [f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)]
    for name in names:  # what it is to compute, in torch's own layers
        linear, quantized = plain.get_submodule(name), model.get_submodule(name)
        with torch.no_grad():
            linear.weight.copy_(quantized(torch.eye(linear.in_features)).T - linear.bias[:, None])
    x = random(2, 5, 64)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), atol=1e-5, rtol=1e-5)


def test_functional_linear_of_a_packed_weight():
    p, x = cq.prepack(cq.quantize(random(24, 128), "int4")), random(2, 128)
    assert torch.equal(nn.functional.linear(x, p), cq.linear(x, p))


# ---- what is shared -----------------------------------------------------------------------------


def test_a_module_at_two_places_stays_one():
    shared = linear(64, 64)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, linear(64, 64, seed=4))})
    quantize_(model, "nf4", exclude="b.1")
    assert model["a"] is model["b"][0] and isinstance(model["a"], QuantLinear)
    assert type(model["b"][1]) is nn.Linear
    twice = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    with pytest.warns(UserWarning, match="excluded"):
        quantize_(twice, "nf4", exclude="b")  # either name will do
    assert twice["a"] is shared
    block = nn.Sequential(linear(64, 64))
    albert = quantize_(nn.Sequential(block, block), "nf4", include="1.0")
    assert albert[0] is albert[1] and isinstance(albert[0][0], QuantLinear)


def test_a_weight_of_two_layers_stays_one():
    model = nn.Sequential(linear(64, 64), linear(64, 64))
    model[1].weight = model[0].weight
    quantize_(model, "nf4")
    assert model[0].packed.data_ptr() == model[1].packed.data_ptr()
    assert not torch.equal(model[0].bias, random(3)[:0]) and model[0] is not model[1]
    kept = nn.Sequential(linear(64, 64), linear(64, 64))
    kept[1].weight = kept[0].weight
    with pytest.warns(UserWarning, match="its weight is also that of '1', which stays"):
        quantize_(kept, "nf4", exclude="1")


@pytest.mark.parametrize(
    ("options", "swapped"),
    [
        ({}, False),
        ({"include": ["*"]}, False),
        ({"format": {"*": "nf4"}}, False),
        ({"include": ["mlp.*", "lm_head"]}, True),
        ({"include": ["*", "lm_head"]}, True),
        ({"include": ["*", "mlp.*"]}, False),
        ({"format": {"lm_head": "int8", "*": "nf4"}}, True),
        ({"format": {"lm_head": "int8"}, "exclude": "lm_head"}, False),
    ],
)
def test_a_head_tied_to_the_embedding(options, swapped):
    model = Block(tied=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_(model, **{"format": "nf4", **options})
    assert isinstance(model.lm_head, QuantLinear) == swapped
    assert type(model.embed.weight) is nn.Parameter
    if not swapped:
        assert model.lm_head.weight is model.embed.weight


def test_hooks_move():
    model, seen = nn.Sequential(linear(8, 64)), []
    handle = model[0].register_forward_hook(lambda module, args, y: seen.append(y.shape))
    model[0].register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs), with_kwargs=True
    )
    quantize_(model, "nf4")
    model(random(2, 64))
    handle.remove()
    model(random(2, 64))
    assert seen == [(2, 8)]
