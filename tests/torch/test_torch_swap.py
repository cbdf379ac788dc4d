"""quantize_ on the CPU: which layers of a model are swapped, and what they share."""

import copy
import logging
import typing
import unittest
import warnings
import weakref

import pytest

import cuquant as cq

torch = pytest.importorskip("torch", reason="torch is optional")

from torch.nn.utils import prune  # noqa: E402
from torch_models import DTYPES, Block, kinds, linear, random  # noqa: E402

import cuquant.torch  # noqa: E402
from cuquant.torch import QuantLinear, dequantize_, plan, quantize_  # noqa: E402

nn = torch.nn


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
        ({"activation": "int8"}, TypeError, r"'activation'.* \(did you mean 'activations'\?\)"),
        ({"group_size": 32}, TypeError, r"'group_size'.* \(did you mean 'block_size'\?\)"),
        ({"load_in_4bit": True}, TypeError, "'load_in_4bit'; in place of bitsandbytes' options"),
    ],
)
def test_wrong_arguments_change_nothing(options, error, message):
    model = Block()
    before = list(model.modules())
    with pytest.raises(error, match=message):
        quantize_(model, **options)
    assert list(model.modules()) == before


def test_a_plan_has_no_layout():
    with pytest.raises(TypeError, match="prepack is no part of a plan; pass it to quantize_"):
        plan(Block(), "nf4", prepack=True)


def test_models_that_are_none():
    with pytest.raises(ValueError, match="from_linear"):
        quantize_(nn.Linear(64, 64), "nf4")
    with pytest.raises(TypeError, match=r"nn\.Module"):
        quantize_([nn.Linear(64, 64)], "nf4")
    done = quantize_(nn.Sequential(linear()), "nf4")
    for empty, why in ((nn.Sequential(nn.ReLU()), "the model has no"), (done, "all are quantized")):
        with pytest.warns(UserWarning, match=rf"no layer \({why}"):
            assert quantize_(empty, "nf4") is empty


def test_an_error_in_the_middle_leaves_a_model_that_goes_on(monkeypatch):
    from cuquant.torch import swap

    model = Block()
    quantized, seen = swap.quantized_weight, []
    weights = [weakref.ref(m.weight) for m in model.modules() if isinstance(m, nn.Linear)]

    def failing(weight, *rest):
        assert sum(ref() is None for ref in weights) == len(seen)  # those before are free
        seen.append(weight.shape)
        if len(seen) == 3:
            raise MemoryError("no memory")
        return quantized(weight, *rest)

    monkeypatch.setattr(swap, "quantized_weight", failing)
    with pytest.raises(MemoryError):
        quantize_(model, "nf4")
    found = ["Linear", "QuantLinear", "QuantLinear"]
    assert sorted(kinds(model).values()) == found and model(torch.arange(3)).shape == (3, 40)
    monkeypatch.undo()
    assert set(kinds(quantize_(model, "nf4")).values()) == {"QuantLinear"}


def test_another_call_goes_on_with_patterns_of_layers_that_are_done():
    config = {"0": "nf4", "1": "int4"}
    model = quantize_(nn.Sequential(linear(64, 64), linear(64, 64)), {"0": "nf4", "1": None})
    assert [layer.format.name for layer in quantize_(model, config)] == ["nf4", "int4"]
    with pytest.raises(ValueError, match="'0' is quantized already, to nf4 and not to int8"):
        quantize_(model, {"0": "int8"})
    with pytest.raises(ValueError, match=r"'head' selects no nn.Linear of .*it has: 0, 1"):
        quantize_(model, {"head": "nf4"})


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        ({"activations": "q8_0"}, ValueError, "1, its input: q8_0 needs .* multiple of 32"),
        ({"activations": "int8", "input_scale": "x"}, TypeError, "must be a number, got 'x'"),
        ({"activations": "int8", "input_scale": True}, TypeError, "must be a number, got True"),
        ({"activations": "int8", "input_scale": [1.0]}, TypeError, "must be a number"),
        ({"activations": "int8", "input_scale": float("nan")}, ValueError, "finite and above 0"),
        ({"activations": "int8", "input_scale": 0}, ValueError, "finite and above 0"),
        ({"format": "llm_int8", "activations": "int8"}, ValueError, "quantizes its input itself"),
    ],
)
def test_inputs_that_cannot_be_are_told_before_a_layer_is_swapped(entry, error, message):
    model = nn.Sequential(linear(64, 64), linear(64, 72))
    with pytest.raises(error, match=message):
        quantize_(model, {"0": "int4", "1": {"format": "int4", **entry}})
    assert type(model[0]) is nn.Linear
    with pytest.raises(ValueError, match="no options"):
        quantize_(model, "llm_int8", block_size=32)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: setattr(m, "bias", nn.Parameter(m.bias.double())), r"float64\[64\], and not"),
        (lambda m: setattr(m, "bias", nn.Parameter(torch.zeros(1))), r"float32\[1\], and not"),
        (lambda m: m.register_parameter("gain", nn.Parameter(torch.ones(64))), "'gain' beside"),
        (lambda m: m.register_buffer("seen", torch.zeros(())), "'seen' beside"),
        (lambda m: m.add_module("adapter", nn.ReLU()), "'adapter' beside"),
        (lambda m: m.register_state_dict_pre_hook(print), "its state_dict has hooks"),
        (lambda m: m.register_load_state_dict_pre_hook(print), "its state_dict has hooks"),
    ],
)
def test_what_a_layer_holds_besides_is_not_lost(change, why):
    model = nn.Sequential(linear(64, 64))
    change(model[0])
    with pytest.warns(UserWarning, match=why):
        quantize_(model, "nf4")
    assert type(model[0]) is nn.Linear


def test_layers_that_do_not_fit_are_kept():
    model = nn.Sequential(linear(64, 256), linear(8, 64), nn.Linear(64, 64).double())
    with unittest.TestCase().assertLogs("cuquant.torch", logging.INFO) as log:
        quantize_(model, "q4_k")
    assert list(kinds(model).values()) == ["QuantLinear", "Linear", "Linear"]
    said = [record.getMessage() for record in log.records]
    assert said == [
        "0: q4_k",
        "1: kept, 64 columns do not divide into blocks of q4_k",
        "2: kept, float64 values",
        "1 of 3 layers quantized",
    ]
    with pytest.warns(UserWarning, match="1: 64 columns do not divide"):
        quantize_(model, "q4_k")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layers_that_would_not_shrink_are_kept(device):
    layers = [linear(64, 64), nn.Linear(1, 64), nn.Linear(3, 64), nn.Linear(4, 64).half()]
    model = nn.Sequential(*layers).to(device)
    quantize_(model, {"0": "nf4", "3": "int8:8", "*": "mxfp4"})
    assert list(kinds(model).values()) == ["QuantLinear", "Linear", "Linear", "Linear"]
    with pytest.warns(UserWarning, match=r"1: short rows of 1 would take 16 bits.*3: no smaller"):
        quantize_(model, {"3": "int8:8", "*": "mxfp4"})


def test_layers_with_a_life_of_their_own_are_kept():
    class Adapted(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    class Renamed(nn.Linear):
        pass

    patched, pruned = linear(), nn.Linear(64, 64)
    patched.forward = lambda x: x
    prune.l1_unstructured(pruned, "bias", 0.5)
    model = nn.ModuleDict(
        {
            "adapted": Adapted(64, 64),
            "patched": patched,
            "pruned": pruned,
            "parametrized": nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64)),
            "lazy": nn.LazyLinear(4),
            "attention": nn.MultiheadAttention(64, 4),
            "renamed": Renamed(64, 64),
        }
    )
    with pytest.warns(UserWarning, match=r"attention: nn\.MultiheadAttention reads its proj"):
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
    model = quantize_(copy.deepcopy(plain), "int8", prepack=prepack, exclude="*.self_attn")
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
    assert torch.equal(nn.functional.linear(x, weight=p), cq.linear(x, p))
    for call in (lambda: x.numpy() @ p.numpy(), lambda: 2 @ p):
        with pytest.raises(TypeError, match=r"cuquant.linear\(x, p\)"):
            call()
    with pytest.raises(AttributeError, match=r"cuquant.linear\(x, p\)"):
        _ = p.T


class Experts(nn.Module):
    """Fused experts beside a router, as in Mixtral's family."""

    def __init__(self, experts=4, width=64):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * width, width))
        self.router = linear(experts, width)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Experts(), r"32,768 weights .*0\.gate_up_proj: a parameter \[4, 128, 64\]"),
        (lambda: nn.MultiheadAttention(64, 4), r"16,384 weights .*0: nn\.MultiheadAttention"),
        (lambda: nn.MultiheadAttention(64, 4, kdim=32, vdim=16), r"11,264 weights .*0: nn"),
        (lambda: nn.TransformerEncoderLayer(64, 4, 64), r"16,384 weights .*0\.self_attn: nn"),
    ],
)
def test_weights_that_stay_float_are_named(build, said):
    for options in ({}, {"include": "*"}, {"format": {"*": "nf4"}}, {"prepack": True}):
        with pytest.warns(UserWarning, match=said):
            quantize_(nn.Sequential(build(), linear()), **options)
    for options in ({"exclude": "0"}, {"include": "1"}, {"format": {"0": None, "*": "nf4"}}):
        quantize_(nn.Sequential(build(), linear()), **options)


def test_what_is_no_linear_layer_is_not_named():
    model = nn.Sequential(nn.Conv1d(64, 64, 16), nn.Embedding(64, 64), nn.LayerNorm(64), linear())
    model.positions = nn.Parameter(torch.zeros(1, 64, 64))
    model.heads = nn.Parameter(torch.zeros(4, 1, 64))
    quantize_(model, "nf4")


# ---- formats ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("nf4", {"double_quant": True, "block_size": 32}),
        ("nf4:32+dq", {}),
        ("NF4:32", {"double_quant": True}),
        (cq.get_format("nf4:32+dq"), {}),
        ({"*": "nf4+dq"}, {"block_size": 32}),
        ({"1": "nf4:32+dq", "0": None}, {}),
    ],
)
def test_options_of_formats(format, options):
    wanted = cq.get_format("nf4", block_size=32, double_quant=True)
    model = quantize_(nn.Sequential(nn.Identity(), linear()), format, **options)
    assert model[1].format == wanted
    if not isinstance(format, dict):
        assert QuantLinear.from_linear(linear(), format, **options).format == wanted


def test_options_that_are_wrong():
    for options, message in (
        ({"format": "nf4:32", "block_size": 64}, "contradict"),
        ({"format": "nf4", "levels": "normal"}, "no levels"),
        ({"format": "nf5"}, "nf4"),
        ({"format": "nf4:32+dp"}, "dp"),
        ({"format": {"*": "int4"}, "double_quant": True}, "float32 scales"),
    ):
        model = nn.Sequential(linear())
        with pytest.raises(ValueError, match=message):
            quantize_(model, **options)
        assert type(model[0]) is nn.Linear
    with pytest.raises(TypeError, match="block_sise"):
        quantize_(nn.Sequential(linear()), "nf4", block_sise=32)
    with pytest.raises(TypeError, match="format"):
        quantize_(nn.Sequential(linear()), None)


def test_states_of_options_in_another_order():
    one = quantize_(nn.Sequential(linear()), "nf4", double_quant=True, block_size=32)
    two = quantize_(nn.Sequential(linear(seed=4)), "nf4", block_size=32, double_quant=True)
    two.load_state_dict(one.state_dict())
    assert torch.equal(one(random(2, 256)), two(random(2, 256)))


def test_the_callers_type_is_kept():
    """As tests/checked_types.py says, which pyright reads."""
    assert typing.get_type_hints(quantize_)["return"] is typing.get_type_hints(quantize_)["model"]


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


def test_a_bias_that_others_hold_stays_one():
    model = nn.Sequential(linear(64, 64), linear(64, 64), nn.Module())
    model[1].bias = model[2].bias = model[0].bias
    quantize_(model, "nf4")
    assert model[0].bias is model[1].bias and model[1].bias is model[2].bias


def test_what_others_set_moves_both_ways():
    model, seen = nn.Sequential(linear(8, 64)), []
    model[0].place = 3
    model[0].register_full_backward_pre_hook(lambda module, grad: seen.append("before"))
    model[0].register_full_backward_hook(lambda module, *grads: seen.append("behind"))
    quantize_(model, "nf4", compute_dtype="bfloat16")
    assert model[0].place == 3 and model[0].compute_dtype is torch.bfloat16
    model(random(2, 64).requires_grad_()).sum().backward()
    assert seen == ["before", "behind"]
    dequantize_(model)
    assert model[0].place == 3 and vars(model[0]).keys() == vars(linear(8, 64)).keys() | {"place"}


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
