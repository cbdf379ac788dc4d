"""LLMInt8Linear: bitsandbytes' layer, by the operator that computes it."""

import copy

import pytest

import cuquant as cq

torch = pytest.importorskip("torch", reason="torch is optional")

from torch_models import Block, buffers_equal, linear, random  # noqa: E402

from cuquant.torch import LLMInt8Linear, QuantLinear, dequantize_, plan, quantize_  # noqa: E402

nn = torch.nn


def with_outliers(rows=5, columns=256, dtype=torch.float16):
    x = random(rows, columns, dtype=dtype)
    x[0, 3], x[2, 200], x[1, 7] = 8.0, -30.0, 6.0
    return x


def test_the_weight_is_rounded_as_bitsandbytes_rounds():
    plain = linear()
    layer = LLMInt8Linear.from_float(plain)
    half = plain.weight.detach().half()
    absmax = half.abs().amax(1).float()
    codes = torch.round(half.float() * (127.0 / absmax)[:, None]).to(torch.int8)
    assert torch.equal(layer.quantized.packed, codes)
    assert torch.equal(layer.quantized.components["scale"].view(-1), absmax)
    assert layer.weight.dtype == torch.float32 and "threshold=6.0" in repr(layer)
    with torch.device("meta"):
        assert LLMInt8Linear.from_float(nn.Linear(256, 24)).weight.is_meta
    assert isinstance(layer, QuantLinear) and layer.prepack_().layout == "rows/1"


def test_wrong_layers():
    with pytest.raises(ValueError, match=r"int8\+absmax"):
        LLMInt8Linear(cq.quantize(random(24, 256), "int8"))
    q = cq.quantize(random(24, 256), "int8+absmax")
    with pytest.raises(ValueError, match="threshold"):
        LLMInt8Linear(q, threshold=-1)
    with pytest.raises(TypeError, match=r"nn\.Linear"):
        LLMInt8Linear.from_float(nn.Identity())
    with pytest.raises(TypeError, match="from_float"):
        LLMInt8Linear.from_linear(nn.Linear(64, 8))
    assert LLMInt8Linear(cq.prepack(q)).layout == "rows/1"


def test_states_of_bitsandbytes():
    layer, other = LLMInt8Linear.from_float(linear()), LLMInt8Linear.from_float(linear(seed=4))
    q = layer.quantized
    theirs = {
        "weight": q.packed.clone(),
        "bias": layer.bias,
        "SCB": q.components["scale"].view(-1).clone(),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    with pytest.raises(RuntimeError, match="SCB"):
        QuantLinear(q, layer.bias).load_state_dict(theirs)
    other.load_state_dict(theirs)
    mine, found = layer.quantized.components, other.quantized.components
    assert all(torch.equal(mine[key], found[key]) for key in mine)
    copied = copy.deepcopy(layer)
    copied.load_state_dict(layer.state_dict())
    assert buffers_equal(copied, layer) and copied.threshold == 6.0


def test_a_model_of_such_layers():
    model = Block()
    assert plan(model, "llm_int8")["lm_head"] == "llm_int8"
    quantize_(model, {"*.gate": "llm_int8", "*": "nf4"}, prepack=True)
    assert type(model.mlp["gate"]) is LLMInt8Linear and type(model.lm_head) is QuantLinear
    back = dequantize_(model)
    assert type(back.mlp["gate"]) is nn.Linear
    assert back.mlp["gate"].weight.dtype == torch.float32


@pytest.mark.parametrize("threshold", [0.0, 6.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_products(dtype, threshold):
    plain, x = linear(), with_outliers(dtype=dtype)
    layer = LLMInt8Linear.from_float(plain, threshold)
    q = layer.quantized
    absmax = q.components["scale"].view(-1)
    wanted = torch.ops.cuquant.llm_int8(x, q.packed, absmax, threshold, layer.bias)
    assert torch.equal(layer(x), wanted) and wanted.dtype == dtype
    exact = x.float() @ layer.weight.detach().float().T + plain.bias.detach()
    scale = x.float().abs().amax() * plain.weight.detach().abs().amax() * 256**0.5 / 127
    assert (wanted.float() - exact).abs().max() < scale
    activated = LLMInt8Linear(q, layer.bias, threshold=threshold, activation="relu")
    assert torch.equal(activated(x), wanted.relu())


def test_compile_and_gradients():
    layer = LLMInt8Linear.from_float(linear())
    x = with_outliers().requires_grad_()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))
    layer(x).float().sum().backward()
    values = layer.weight.detach()
    assert torch.allclose(x.grad.float(), values.sum(0).expand(5, 256), rtol=2e-3, atol=2e-2)
