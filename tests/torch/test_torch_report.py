"""report, plan, dequantize_ and prepack_ on the CPU."""

import copy
import json
import warnings
import weakref

import numpy as np
import pytest

import cuquant as cq

torch = pytest.importorskip("torch", reason="torch is optional")

from torch_models import VARIANTS, Block, kinds, linear, random  # noqa: E402

import cuquant.torch  # noqa: E402
from cuquant.torch import (  # noqa: E402
    QuantLinear,
    dequantize_,
    load_,
    plan,
    prepack_,
    quantize_,
    report,
)

nn = torch.nn


# ---- report -------------------------------------------------------------------------------------


def test_every_parameter_is_listed_once():
    for model in (Block(), Block(tied=True)):
        plain = sum(p.numel() for p in model.parameters())
        found = report(model)
        assert [row.name for row in found.rows] == [n for n, _ in model.named_parameters()]
        assert found.kept_share == 1 and sum(row.count for row in found.rows) == plain
        quantize_(model, {"mlp": "int4"})
        found = report(model)
        assert sum(row.count for row in found.rows) == plain
        assert found.nbytes == sum(p.numel() * p.element_size() for p in model.parameters())
        assert {row.name for row in found.rows if row.reason is None} == {
            "mlp.gate.weight",
            "mlp.down.weight",
        }
        assert len(str(found).splitlines()) == len(found.rows) + 2


def test_reasons():
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(40, 64),
            "first": linear(8, 64),
            "second": linear(8, 64),
            "short": linear(8, 3),
            "norm": nn.LayerNorm(8),
            "heads": nn.MultiheadAttention(64, 4),
            "filters": nn.Conv2d(4, 8, 3),
        }
    )
    model.positions = nn.Parameter(torch.zeros(5, 64))
    with pytest.warns(UserWarning, match="heads"):
        quantize_(model, "nf4", exclude="second")
    found = {row.name: row.reason for row in report(model).rows}
    assert found["first.weight"] is None and found["second.weight"] == "excluded"
    assert "would take" in found["short.weight"] and "vector" in found["norm.weight"]
    assert "reads its projections itself" in found["heads.in_proj_weight"]
    assert "reads its projections itself" in found["heads.out_proj.weight"]
    for name in ("embed", "filters"):
        assert "by its name, or a pattern that selects no nn.Linear" in found[f"{name}.weight"]
    assert found["positions"].startswith("a parameter of ModuleDict")
    copied = {row.name: row.reason for row in report(copy.deepcopy(model)).rows}
    assert copied.keys() == found.keys() and copied["second.weight"] is not None
    with pytest.raises(TypeError, match=r"nn\.Module"):
        report([model])


def kept_of(model, *args, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quantize_(model, *args, **options)
    return [str(w.message) for w in caught]


def test_a_twentieth_that_stays_float_is_told_once():
    assert [text.partition(" (")[0] for text in kept_of(Block(), "nf4")] == [
        "16% of the parameters stay float"
    ]
    assert "embed.weight: an nn.Embedding is swapped by its name" in kept_of(Block(), "nf4")[0]
    assert not kept_of(Block(), {"embed": "int8", "*": "nf4"})
    assert not kept_of(Block(), {"embed": None, "*": "nf4"})
    assert not kept_of(Block(), "nf4", exclude="embed")
    assert not kept_of(nn.Sequential(linear(64, 256), nn.LayerNorm(64)), "nf4")


# ---- plan ---------------------------------------------------------------------------------------


def test_a_plan_is_carried_out_as_it_says(tmp_path):
    model = Block()
    config = {"embed": "q8_0", "*.gate": VARIANTS["levels"], "lm_head": "nf4:32+dq", "*": None}
    found = plan(model, config)
    assert set(kinds(model).values()) == {"Linear"}  # nothing was done
    assert dict(found)["lm_head"] == "nf4:32+dq" and found["mlp.down"] is None
    found.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text()) == dict(found)
    wanted = quantize_(copy.deepcopy(model), config)
    for how in (found, tmp_path / "plan.json", str(tmp_path / "plan.json"), dict(found)):
        made = quantize_(copy.deepcopy(model), how)
        assert torch.equal(made(torch.arange(4)), wanted(torch.arange(4)))
        assert made.mlp["gate"].format == VARIANTS["levels"]
    table = str(found).splitlines()
    assert table[0].split() == [
        "layer",
        "kind",
        "format",
        "bytes",
        "then",
        "why",
        "it",
        "is",
        "kept",
    ]
    assert table[-1].startswith("69,") or "->" in table[-1]
    assert next(line for line in table if line.startswith("mlp.down")).endswith("'*': None")


def test_a_plan_says_what_is_stored():
    model = Block().half()
    found = plan(model, {"embed": "q8_0", "*": "int4"})
    then = int(str(found).rpartition("-> ")[2].replace(",", ""))
    quantize_(model, found)
    rows = report(model).rows
    assert then == sum(row.nbytes for row in rows if row.reason is None)


def test_plans_of_quantized_inputs_and_wrong_plans(tmp_path):
    model = nn.Sequential(linear(24, 256), linear(8, 24))
    found = plan(model, {"0": {"format": "int4", "activations": "int8:tensor", "input_scale": 0.1}})
    with pytest.raises(KeyError):
        found["2"]
    assert found["0"] == {"format": "int4", "activations": "int8:tensor", "input_scale": 0.1}
    assert "int4, input int8:tensor (static)" in str(found)
    made = quantize_(copy.deepcopy(model), json.loads(json.dumps(dict(found))))
    assert made[0].activations == cq.get_format("int8:tensor") and type(made[1]) is nn.Linear
    found = plan(model, "int8", activations="fp8_e4m3", exclude="1")
    assert dict(found) == {"0": {"format": "int8", "activations": "fp8_e4m3"}, "1": None}
    (tmp_path / "a").write_text("[1]")
    (tmp_path / "b").write_text("{")
    for name in "ab":
        with pytest.raises(ValueError, match="no plan"):
            quantize_(model, tmp_path / name)


def test_a_plan_keeps_no_layer_and_knows_lazy_ones():
    model = nn.Sequential(nn.LazyLinear(8), linear(24, 256))
    weight, found = weakref.ref(model[1].weight), plan(model, "int4")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_(model, found)
    assert weight() is None and dict(found) == {"0": None, "1": "int4"}
    assert "its weight is no plain parameter" in str(found)


def test_a_scale_of_numpy_is_stored(tmp_path):
    entry = {"format": "int4", "activations": "int8", "input_scale": np.float32(0.5)}
    plan(nn.Sequential(linear(24, 256)), {"0": entry}).save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text()) == {"0": entry}


# ---- back, and prepacked ------------------------------------------------------------------------


@pytest.mark.parametrize("prepack", [False, True])
def test_dequantize_gives_what_is_decoded(prepack):
    model = quantize_(Block(), {"embed": "q8_0", "*": "int4"}, prepack=prepack)
    tokens, seen = torch.arange(6), []
    wanted, values = model(tokens), model.lm_head.weight.detach()
    handle = model.lm_head.register_forward_hook(lambda *args: seen.append(1))
    assert dequantize_(model, include="mlp") is model
    assert [type(m) for m in model.mlp.values()] == [nn.Linear] * 2
    assert isinstance(model.lm_head, QuantLinear)
    dequantize_(model, dtype=torch.float32)
    assert not any(isinstance(m, QuantLinear) for m in model.modules())
    assert torch.equal(model.lm_head.weight, values)
    torch.testing.assert_close(model(tokens), wanted)
    handle.remove()
    assert seen == [1] and all(p.requires_grad for p in model.parameters())
    model(tokens).sum().backward()
    assert dequantize_(nn.Sequential(nn.ReLU()))
    with pytest.raises(TypeError, match=r"nn\.Module"):
        dequantize_(3)


def test_layers_that_are_made_float_in_inference_mode_learn():
    model = quantize_(nn.Sequential(linear(24, 64)), "int8")
    with torch.inference_mode():
        dequantize_(model, dtype=torch.bfloat16)
    model(random(3, 64, dtype=torch.bfloat16)).sum().backward()
    assert model[0].weight.grad is not None and model[0].bias.grad is not None


def test_dequantize_says_what_it_cannot_do():
    model = quantize_(nn.Sequential(linear(64, 256), linear(64, 64)), "int4")
    with pytest.raises(ValueError, match="'mlp' selects no quantized layer"):
        dequantize_(model, include=["0", "mlp"])
    with pytest.raises(TypeError, match="include must be"):
        dequantize_(model, include=5)
    with pytest.raises(TypeError, match="one of floats"):
        dequantize_(model, dtype=torch.int8)
    with pytest.raises(ValueError, match="itself a quantized layer"):
        dequantize_(model[0])
    assert all(isinstance(layer, QuantLinear) for layer in model)
    dequantize_(model, dtype=torch.float16)
    assert model(random(2, 256).half()).dtype == torch.float16  # biases too


def test_dequantize_keeps_activations_and_shared_modules():
    layer = QuantLinear.from_linear(linear(), "int4", activation="gelu")
    model, x = nn.ModuleList([layer, layer]), random(3, 256)
    wanted = layer(x)
    dequantize_(model)
    assert model[0] is model[1] and isinstance(model[0], nn.Sequential)
    torch.testing.assert_close(model[0](x), wanted)


def test_prepack_of_layers_that_are_there():
    model = quantize_(Block(), {"embed": "int4", "*": "int4"})
    tokens, state = torch.arange(4), copy.deepcopy(model.state_dict())
    wanted = model(tokens)
    assert prepack_(model) is model and model.lm_head.layout == "fragments/1"
    assert torch.equal(model(tokens), wanted) and not model.embed.is_prepacked
    assert prepack_(model).lm_head.unpack_().layout == "rows/1"
    for layer in model.mlp.values():
        layer.unpack_()
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    twins = nn.Sequential(linear(64, 64), linear(64, 64))
    twins[1].weight = twins[0].weight
    prepack_(quantize_(twins, "int4"))
    assert twins[0]._parts()[0] is twins[1]._parts()[0] and twins[1].is_prepacked


def test_load_takes_tables_and_heads(tmp_path):
    model = quantize_(Block(), {"embed": "q8_0", "*": "int4"})
    cq.save(
        tmp_path / "m.safetensors",
        {
            **{
                f"{n}.weight": m.quantized for n, m in model.named_modules() if hasattr(m, "format")
            },
            **{n: p for n, p in model.named_parameters() if p.is_floating_point()},
        },
    )
    other = quantize_(Block(), {"embed": "q8_0", "*": "int4"})
    load_(other, tmp_path / "m.safetensors")
    assert torch.equal(other(torch.arange(4)), model(torch.arange(4)))
    assert cuquant.torch.QuantEmbedding is type(other.embed)
