"""QuantLinear on the CPU: what it is made of, casts, copies, and files."""

import copy
import io
import json
import pickle

import numpy as np
import pytest
from in_turn import in_turn
from oracle import bits_equal

import cuquant as cq

torch = pytest.importorskip("torch", reason="torch is optional")

from torch_models import FEW, NAMES, VARIANTS, Block, buffers_equal, components, linear, random  # noqa: E402

import cuquant.torch  # noqa: E402
from cuquant.torch import QuantLinear, quantize_  # noqa: E402

nn = torch.nn


# ---- QuantLinear --------------------------------------------------------------------------------


def test_repr_and_attributes():
    layer = QuantLinear.from_linear(linear(), cq.get_format("int4", block_size=64), prepack=True)
    assert repr(layer) == (
        "QuantLinear(in_features=256, out_features=24, bias=True, format=int4:64, "
        "layout=fragments/1)"
    )
    assert (layer.in_features, layer.out_features, layer.activation) == (256, 24, None)
    assert layer.format == cq.get_format("int4", block_size=64)
    assert QuantLinear(layer.quantized).bias is None


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
        with pytest.raises(TypeError, match=r"QuantArray or PackedWeight, got .*; from_linear"):
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


@pytest.mark.parametrize("fmt", [*FEW, *VARIANTS])
@in_turn("how", CASTS)
def test_casts_change_no_code_and_no_scale(fmt, how):
    layer = QuantLinear.from_linear(linear(), VARIANTS.get(fmt, fmt))
    codes = {name: part.clone() for name, part in components(layer)}
    x = random(2, 256)
    wanted = layer(x)
    cast = CASTS[how](layer)
    assert cast is layer and set(codes) == {c.name for c in layer._spec.components()}
    for name, part in components(layer):
        assert part.dtype == torch.uint8 and torch.equal(part, codes[name])
    if how == "share":
        assert all(part.is_shared() for _, part in components(layer))
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
    for name, part in layer.quantized.components.items():
        found = other.quantized.components[name]
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
    assert all(t.is_meta for t in model.parameters())
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
        "int4:64": {**state, "_extra_state": said(format='{"name": "int4", "options": '
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
        assert repr(made) == repr(layer) and made.quantized is not None
    deep = copy.deepcopy(layer)
    components(deep)[0][1].zero_()
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
    cq.save(tmp_path / "w", {"w": layer.quantized})
    assert torch.equal(QuantLinear(cq.load(tmp_path / "w")["w"])(random(2, 256)),
                       cq.linear(random(2, 256), layer.quantized))  # fmt: skip
