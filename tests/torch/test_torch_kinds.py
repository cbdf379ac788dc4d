"""Layers of other kinds on the CPU: tables, filters, GPT-2's Conv1D, experts; quantized inputs."""

import copy
import itertools
import pickle

import pytest

import cuquant as cq

torch = pytest.importorskip("torch", reason="torch is optional")

from torch_models import DTYPES, Block, assert_close, buffers_equal, linear, random, wanting  # noqa: E402

from cuquant.torch import (  # noqa: E402
    QuantConv2d,
    QuantEmbedding,
    QuantExperts,
    QuantLinear,
    dequantize_,
    prepack_,
    quantize_,
)

nn, F = torch.nn, torch.nn.functional


# ---- tables -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", ["nf4", "int8", "q8_0", "q4_k", "mxfp4", "k3"])
def test_a_table_decodes_the_rows_that_are_asked_for(fmt, dtype):
    plain = nn.Embedding(50, 256, padding_idx=3).to(dtype)
    table = QuantEmbedding.from_embedding(plain, fmt)
    values = cq.quantize(plain.weight.detach(), fmt).dequantize()
    for ids in (torch.tensor([[3, 49], [0, 3]]), torch.tensor(7), torch.empty(0, 2).int()):
        found = table(ids)
        assert found.dtype == dtype and torch.equal(found, values[ids.long()])
        assert torch.equal(F.embedding(ids, table.weight), found)
    assert torch.equal(table.weight.detach(), values) and table.padding_idx == 3
    with pytest.raises(IndexError, match=r"0\.\.49"):
        table(torch.tensor([50]))
    assert not any(p.requires_grad for p in table.parameters())
    other = QuantEmbedding.from_embedding(nn.Embedding(50, 256).to(dtype), fmt)
    other.load_state_dict(table.state_dict())
    assert buffers_equal(table, other) and torch.equal(copy.deepcopy(other)(ids), table(ids))
    assert other.half().weight.dtype == torch.float16


def test_a_table_is_compiled_and_exported():
    table, ids = QuantEmbedding.from_embedding(nn.Embedding(50, 64), "int4"), torch.tensor([[3, 9]])
    compiled = torch.compile(table, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(ids), table(ids))
    program = torch.export.export(table, (ids,))
    assert torch.equal(program.module()(ids), table(ids))


def test_tables_that_cannot_be():
    with pytest.raises(TypeError, match=r"nn\.Embedding"):
        QuantEmbedding.from_embedding(linear(), "nf4")
    with pytest.raises(ValueError, match="max_norm"):
        QuantEmbedding.from_embedding(nn.Embedding(4, 64, max_norm=1.0), "nf4")
    model = quantize_(
        nn.Sequential(nn.Embedding(40, 64, max_norm=1.0), linear(8, 64)), {"*": "nf4"}
    )
    assert type(model[0]) is nn.Embedding


@pytest.mark.parametrize(
    ("options", "swapped"),
    [
        ({}, False),
        ({"format": {"*": "nf4"}}, False),
        ({"format": {"*e*": "nf4"}}, False),
        ({"format": {"embed": "int8", "*": "nf4"}}, True),
        ({"format": {"emb*": "int8", "*": "nf4"}}, True),
        ({"include": ["embed", "mlp"]}, True),
        ({"include": ["embed", "mlp"], "exclude": "emb*"}, False),
    ],
)
def test_tables_are_swapped_where_a_pattern_means_them(options, swapped):
    model = quantize_(Block(), **{"format": "nf4", **options})
    assert isinstance(model.embed, QuantEmbedding) == swapped
    assert model(torch.arange(4)).shape == (4, 40)


@pytest.mark.parametrize("prepack", [None, True])
def test_a_table_and_its_head_are_one_array(prepack):
    model = Block(tied=True)
    quantize_(model, {"embed": "int8", "*": "int8"}, prepack=prepack)
    mine, others = model.embed._parts(), model.lm_head._parts()
    assert all(a is b for a, b in zip(mine, others, strict=True)) and mine
    assert isinstance(model.lm_head, QuantLinear) and not model.lm_head.is_prepacked
    assert model.mlp["gate"].is_prepacked == bool(prepack)
    tokens = torch.arange(5)
    wanted = model(tokens)
    assert not prepack_(model).lm_head.is_prepacked and torch.equal(model(tokens), wanted)
    back = dequantize_(copy.deepcopy(model))
    assert back.lm_head.weight is back.embed.weight and type(back.embed) is nn.Embedding
    torch.testing.assert_close(back(tokens), wanted)
    head = linear(40, 64)  # and as transformers ties them, one to the other
    untied = nn.ModuleDict({"embed": nn.Embedding(40, 64), "head": head})
    quantize_(untied, {"embed": "q8_0", "head": "q8_0"}, prepack=True)
    untied["embed"].weight = untied["head"].weight
    assert untied["embed"]._parts()[0] is untied["head"]._parts()[0]
    assert torch.equal(untied["embed"](tokens), untied["head"].weight.detach()[tokens])


# ---- filters and Conv1D -------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    {}, {"stride": 2, "padding": 1, "bias": False}, {"groups": 4, "dilation": 2},
    {"padding": "same", "padding_mode": "circular"},
])  # fmt: skip
def test_filters_are_decoded(options):
    conv = nn.Conv2d(16, 32, 3, **options)
    layer = QuantConv2d.from_conv(conv, "int8")
    same = copy.deepcopy(conv)
    rows = cq.quantize(conv.weight.detach().flatten(1), "int8")
    with torch.no_grad():
        same.weight.copy_(rows.dequantize().view(conv.weight.shape))
    x = wanting(2, 16, 9, 9)
    y = layer(x)
    assert torch.equal(y, same(x)) and layer.weight.shape == conv.weight.shape
    y.square().sum().backward()
    assert x.grad is not None and torch.equal(layer.weight.detach(), same.weight)
    assert layer(random(1, 16, 9, 9).half()).dtype == torch.float16
    layer.weight.data = layer.weight.data * 2
    assert torch.allclose(layer.weight.detach(), same.weight * 2)
    back = dequantize_(quantize_(nn.Sequential(conv), {"0": "int8"}))[0]
    assert type(back) is nn.Conv2d and torch.equal(back(x), same(x))
    with pytest.raises(ValueError, match="filters"):
        layer.weight = cq.quantize(random(32, 99), "int8")


def test_filters_are_swapped_where_a_pattern_means_them():
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.Flatten(), linear(8, 32))
    assert type(quantize_(copy.deepcopy(model), "int8")[0]) is nn.Conv2d
    quantize_(model, {"0": "int8", "*": "nf4"})
    assert isinstance(model[0], QuantConv2d) and model(random(1, 16, 3, 3)).shape == (1, 8)


class Conv1D(nn.Module):
    """GPT-2's, of transformers: y = x @ weight + bias."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(random(nx, nf)), nn.Parameter(random(nf, seed=1))

    def forward(self, x):
        return x @ self.weight + self.bias


def test_conv1d_becomes_a_linear_layer():
    plain = Conv1D(24, 64)
    model, x = quantize_(nn.Sequential(copy.deepcopy(plain)), "int8"), random(3, 64)
    q = cq.quantize(plain.weight.detach().T.contiguous(), "int8")
    assert isinstance(model[0], QuantLinear) and model[0].out_features == 24
    assert torch.equal(model(x), cq.linear(x, q, plain.bias.detach()))


@pytest.mark.parametrize("fmt", ["int8", "llm_int8"])
def test_conv1d_comes_back_but_below_an_adapter(fmt):
    """Its weight is [K, N], which a file of the float model has, and no adapter of an nn.Linear."""
    model = quantize_(nn.Sequential(Conv1D(64, 64)), fmt)
    values, copies = model[0].weight.detach(), pickle.loads(pickle.dumps(model))
    for each in (model, copies):
        made = dequantize_(each)[0]
        assert type(made) is Conv1D and torch.equal(made.weight, values.T)
        assert made.weight.is_contiguous() and made.bias.shape == (64,)
    adapter = nn.Module()
    adapter.base_layer = Conv1D(64, 64)
    dequantize_(quantize_(adapter, "int8"))
    assert type(adapter.base_layer) is nn.Linear


# ---- experts ------------------------------------------------------------------------------------


class Experts(nn.Module):
    """As transformers keep them; a token goes through its own, and the weighted are added."""

    def __init__(self, count=4, width=64, inner=32):
        super().__init__()
        self.num_experts, self.act_fn = count, nn.SiLU()
        self.gate_up_proj = nn.Parameter(random(count, 2 * inner, width) / 8)
        self.down_proj = nn.Parameter(random(count, width, inner, seed=1) / 6)

    def gated(self, y):
        gate, up = y.chunk(2, -1)
        return self.act_fn(gate) * up

    def one(self, x, e):
        return self.gated(x @ self.gate_up_proj[e].T) @ self.down_proj[e].T

    def forward(self, x, index, weights):
        made = torch.zeros_like(x)
        for row, k in itertools.product(range(len(x)), range(index.shape[1])):
            if index[row, k] < self.num_experts:
                made[row] += self.one(x[row], index[row, k]) * weights[row, k]
        return made


class UpOnly(Experts):
    def __init__(self, count=4, width=64, inner=32):
        super().__init__(count, width, inner)
        del self.gate_up_proj
        self.up_proj = nn.Parameter(random(count, inner, width) / 8)

    def one(self, x, e):
        return self.act_fn(x @ self.up_proj[e].T) @ self.down_proj[e].T


class Turned(Experts):
    """gpt-oss: [E, K, N], biases, alternating and clamped gates."""

    def __init__(self, count=4, width=64, inner=32):
        super().__init__()
        self.alpha, self.limit = 1.702, 1.0
        del self.act_fn
        self.gate_up_proj = nn.Parameter(random(count, width, 2 * inner) / 8)
        self.gate_up_proj_bias = nn.Parameter(random(count, 2 * inner, seed=2))
        self.down_proj = nn.Parameter(random(count, inner, width, seed=1) / 6)
        self.down_proj_bias = nn.Parameter(random(count, width, seed=3))

    def one(self, x, e):
        y = x @ self.gate_up_proj[e] + self.gate_up_proj_bias[e]
        gate, up = y[..., ::2].clamp(max=self.limit), y[..., 1::2].clamp(-self.limit, self.limit)
        inner = (up + 1) * gate * torch.sigmoid(gate * self.alpha)
        return inner @ self.down_proj[e] + self.down_proj_bias[e]


class OwnGate(Experts):
    def _apply_gate(self, y):
        return self.gated(y).clamp(max=0.5)

    def one(self, x, e):
        return self._apply_gate(x @ self.gate_up_proj[e].T) @ self.down_proj[e].T


def routed(tokens=7, chosen=2, count=4):
    index = torch.stack([torch.randperm(count)[:chosen] for _ in range(tokens)])
    return index, torch.rand(tokens, chosen)


@pytest.mark.parametrize("prepack", [False, True])
@pytest.mark.parametrize("cls", [Experts, UpOnly, Turned, OwnGate])
def test_experts_are_found_by_their_structure(cls, prepack):
    model = quantize_(nn.ModuleDict({"experts": cls()}), "int8", prepack=prepack)
    experts, same = model["experts"], dequantize_(copy.deepcopy(model))["experts"]
    assert isinstance(experts, QuantExperts) and type(same) is cls
    x, (index, weights) = random(7, 64), routed()
    index[2, 1] = 4  # no expert
    with torch.no_grad():
        assert_close(experts(x, index, weights), same(x, index, weights))
        one = torch.zeros(7, 4).scatter(1, index.clamp(max=3)[:, :1], weights[:, :1])
        assert_close(experts(x, index[:, :1], one), same(x, index[:, :1], weights[:, :1]))
        named = experts(hidden_states=x[None], router_indices=index, routing_weights=weights)
        assert torch.equal(named[0], experts(x, index, weights))
        turns = torch.arange(4).repeat_interleave(2)[:, None]
        whole = experts(random(8, 64))
        assert_close(whole, same(random(8, 64), turns, torch.ones(8, 1)))
    first = getattr(same, experts.first_name).detach()
    plain = getattr(cls(), experts.first_name).detach()
    assert first.shape == plain.shape and (first - plain).abs().max() < 0.02


def test_experts_of_no_tokens_and_their_states():
    model = quantize_(nn.ModuleDict({"experts": Turned()}), "int4")
    experts = model["experts"]
    empty = experts(random(0, 64), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))
    assert empty.shape == (0, 64)
    other = quantize_(nn.ModuleDict({"experts": Turned()}), "int4")
    with torch.no_grad():
        other["experts"].down_proj_bias.zero_()
    other.load_state_dict(model.state_dict())
    assert buffers_equal(other, model)
    keys = [k for k in model.state_dict() if not k.endswith("_extra_state")]
    assert keys == ["experts.gate_up_proj_bias", "experts.down_proj_bias"] + [
        f"experts.{name}.{part}"
        for name in ("gate_up_proj", "down_proj")
        for part in ("packed", "scale")
    ]
    again = quantize_(nn.ModuleDict({"experts": Turned()}), "int4", prepack=True)
    again.load_state_dict(model.state_dict())
    assert again["experts"].down_proj.layout == "rows/1"


def test_files_hold_experts(tmp_path):
    from safetensors.torch import save_file

    model = quantize_(nn.ModuleDict({"experts": Experts()}), "int4")
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    found = cq.load(tmp_path / "m.safetensors", library="torch")
    q = found["experts.gate_up_proj.weight"]
    assert q.shape == (4, 64, 64) and cq.array_equal(q, model["experts"].gate_up_proj.quantized)


def test_gradients_flow_through_experts():
    model = quantize_(nn.ModuleDict({"experts": Turned()}), "int8")
    experts, same = model["experts"], dequantize_(copy.deepcopy(model))["experts"]
    index, weights = routed()
    x, y, w, v = wanting(7, 64), wanting(7, 64), weights.clone(), weights.clone()
    experts(x, index, w.requires_grad_()).square().sum().backward()
    same(y, index, v.requires_grad_()).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(w.grad, v.grad, rtol=1e-4, atol=1e-4)


def test_experts_are_compiled():
    experts = quantize_(nn.ModuleDict({"experts": Experts()}), "int4")["experts"]
    x, (index, weights) = random(7, 64), routed()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_close(compiled(x, index, weights), experts(x, index, weights))


def test_experts_with_one_weight_have_one_behind_it():
    model = nn.ModuleList([Experts(), Experts()])
    model[1].gate_up_proj = model[0].gate_up_proj
    dequantize_(quantize_(model, "int4"))
    assert model[1].gate_up_proj is model[0].gate_up_proj


def test_experts_that_are_kept_have_a_reason():
    class Normed(Experts):
        has_post_expert_norm = True

    class More(Experts):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

    class Silent(Experts):
        def __init__(self):
            super().__init__()
            del self.act_fn

    class Counting(Experts):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))

    kept = (Normed, "a norm behind"), (More, "scale"), (Counting, "seen"), (Silent, "no act_fn")
    for cls, why in kept:
        model = nn.ModuleDict({"experts": cls(), "head": linear(8, 64)})
        with pytest.warns(UserWarning, match=f"experts.gate_up_proj: it has .*{why}|{why}"):
            quantize_(model, "nf4")
        assert type(model["experts"]) is cls


# ---- quantized inputs ---------------------------------------------------------------------------


@pytest.mark.parametrize("prepack", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("fmt", "of_input"),
    [("int8", "int8"), ("int4", "int8"), ("fp8_e4m3", "fp8_e4m3"), ("mxfp4", "mxfp8"),
     ("int8:tensor", "int8:tensor"), ("nvfp4", "nvfp4")],
)  # fmt: skip
def test_inputs_are_quantized(fmt, of_input, dtype, prepack):
    """W8A8, W4A8, fp8, MX; tensor by tensor, as the layer of seed 004 does it."""
    plain, x = linear(24, 256), random(5, 256, dtype=dtype)
    layer = QuantLinear.from_linear(plain, fmt, activations=of_input, prepack=prepack)
    q = cq.quantize(x, of_input)
    wanted = cq.linear(q, layer.quantized, layer.bias.detach(), out_dtype=dtype)
    assert layer(x).dtype == dtype and torch.equal(layer(x), wanted)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), wanted)
    assert torch.equal(F.linear(x, layer.weight, layer.bias), wanted)
    model = nn.Sequential(linear(24, 256))
    quantize_(model, fmt, activations=of_input, prepack=prepack)
    assert torch.equal(model(x), wanted)


def test_static_scales():
    layer = QuantLinear.from_linear(linear(), "int8", activations="int8:tensor", input_scale=0.05)
    x = random(5, 256)
    q = cq.quantize(x, "int8:tensor", scale=0.05)
    wanted = cq.linear(q, layer.quantized, layer.bias.detach(), out_dtype="float32")
    assert torch.equal(layer(x), wanted) and "static" in repr(layer)
    state = layer.state_dict()
    assert state["input_scale"] == torch.tensor(0.05)
    other = QuantLinear.from_linear(
        linear(seed=5), "int8", activations="int8:tensor", input_scale=1.0
    )
    other.load_state_dict(state)
    assert torch.equal(other(x), wanted)
    moved = layer.half().to("meta").to_empty(device="cpu")
    assert moved.input_scale.dtype == torch.float32
    assert other.bfloat16().input_scale == torch.tensor(0.05)
    entry = {"format": "int8", "activations": "int8:tensor", "input_scale": 0.05}
    for config in ({"0": entry}, entry):
        model = quantize_(nn.Sequential(linear(), nn.ReLU()), config)
        assert torch.equal(model[0](x), wanted)
    named = quantize_(nn.ModuleDict({"format": linear(), "other": linear()}), {"format": "int8"})
    assert isinstance(named["format"], QuantLinear) and type(named["other"]) is nn.Linear
    with pytest.raises(ValueError, match="a layer's entry has a format and may have"):
        quantize_(nn.Sequential(linear()), {"format": "int8", "activation": "int8"})
    with pytest.raises(ValueError, match="input_scale"):
        QuantLinear.from_linear(linear(), "int8", input_scale=0.05)
    with pytest.raises(ValueError, match="input_scale"):
        quantize_(nn.Sequential(linear()), {"0": {"format": "int8", "input_scale": 0.05}})
    with pytest.raises(ValueError, match="has a format"):
        quantize_(nn.Sequential(linear()), {"0": {"format": "int8", "activation": "relu"}})


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_gradients_flow_past_the_rounding_of_inputs(activation):
    """As if x had not been rounded, but for what the activation's slope is taken of."""
    plain = linear(24, 256)
    layer = QuantLinear.from_linear(plain, "int8", activation=activation, activations="int8")
    layer.bias.requires_grad_()
    x, g = wanting(5, 256), random(5, 24, seed=4)
    layer(x).backward(g)
    values = layer.weight.detach()
    took = cq.linear(cq.quantize(x.detach(), "int8"), layer.quantized, layer.bias.detach())
    z = took.requires_grad_()
    act = {None: lambda t: t * 1, "relu": F.relu, "gelu": F.gelu, "silu": F.silu}[activation]
    act(z).backward(g)
    torch.testing.assert_close(x.grad, z.grad @ values, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(layer.bias.grad, z.grad.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prepack", [False, True])
def test_inputs_of_experts_are_quantized(prepack):
    model = quantize_(
        nn.ModuleDict({"experts": Experts()}), "int4", activations="int8", prepack=prepack
    )
    experts, (index, weights) = model["experts"], routed()
    stack, x, offsets = experts.gate_up_proj, random(5, 64), torch.tensor([0, 1, 1, 3, 5])
    wanted = cq.grouped_linear(cq.quantize(x, "int8"), stack.quantized, offsets=offsets)
    assert torch.equal(stack(x, offsets=offsets), wanted) and "activations=int8" in repr(stack)
    assert stack(x.half(), offsets=offsets).dtype == torch.float16
    y = wanting(7, 64)
    same = dequantize_(copy.deepcopy(model))["experts"]
    made, exact = experts(y, index, weights), same(y, index, weights)
    assert (made - exact).norm() < 0.02 * exact.norm()  # 127 steps: 0.3 %, twice
    made.sum().backward()
    assert y.grad is not None
    torch._dynamo.reset()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_close(compiled(y, index, weights), made)
    entry = {"format": "int4", "activations": "int8", "input_scale": 0.1}
    with pytest.raises(ValueError, match="inputs of their own"):
        quantize_(nn.ModuleDict({"experts": Experts()}), {"experts": entry})


def test_tables_have_no_inputs_to_quantize():
    model = quantize_(Block(), {"embed": "int8", "*": "int8"}, activations="int8")
    assert model.lm_head.activations is not None and not hasattr(model.embed, "activations")
    assert model(torch.arange(4)).shape == (4, 40)


# ---- the dtype that is computed in --------------------------------------------------------------


@pytest.mark.parametrize("of_input", [None, "int8"])
def test_compute_dtype(of_input):
    """As bitsandbytes' compute_dtype: x is cast, and the result is cast back."""
    x = wanting(3, 256)
    model = quantize_(
        nn.Sequential(linear()), "nf4", activations=of_input, compute_dtype=torch.bfloat16
    )
    layer = model[0]
    assert layer.compute_dtype == torch.bfloat16 and "compute_dtype=bfloat16" in repr(layer)
    y = layer(x)
    layer.compute_in_(None)
    assert not hasattr(layer, "compute_dtype")
    assert y.dtype == torch.float32 and torch.equal(y, layer(x.bfloat16()).float())
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    layer.compute_in_(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.float16):
        assert layer(x).dtype == torch.float16
    assert copy.deepcopy(layer).compute_dtype == torch.bfloat16
    for wrong in (torch.float64, torch.int8):
        with pytest.raises(TypeError, match="compute_dtype"):
            quantize_(nn.Sequential(linear()), "nf4", compute_dtype=wrong)


def test_layers_made_in_inference_mode_learn_and_load():
    tied = Block(tied=True)
    with torch.inference_mode():
        model = quantize_(tied, {"embed": "int4", "*": "int4"})
        made = quantize_(nn.ModuleDict({"experts": Turned()}), "int4")
    assert not any(
        p.is_inference() for m in (model, made["experts"].down_proj) for p in m.parameters()
    )
    model.load_state_dict(quantize_(Block(tied=True), {"embed": "int4", "*": "int4"}).state_dict())
    x = wanting(2, 64)
    model.mlp["gate"](x).sum().backward()
    assert x.grad is not None


# ---- files --------------------------------------------------------------------------------------


def test_a_table_and_its_head_in_safetensors(tmp_path):
    """What two modules share is stored once, as safetensors does it with float weights."""
    from safetensors.torch import load_model, save_model

    model = quantize_(Block(tied=True), {"embed": "int8", "*": "int8"})
    save_model(model, str(tmp_path / "m.safetensors"))
    other = quantize_(Block(tied=True), {"embed": "int8", "*": "int8"})
    assert not buffers_equal(model, other)
    missing, unexpected = load_model(other, str(tmp_path / "m.safetensors"))
    assert not missing and not unexpected and buffers_equal(model, other)
    assert other.embed._parts()[0] is other.lm_head._parts()[0]
