"""QuantLinear.weight: what code that expects an nn.Linear's weight does with it."""

import copy
import gc
import io
import pickle
import weakref

import numpy as np
import pytest

import cuquant as cq

torch = pytest.importorskip("torch", reason="torch is optional")

from torch_models import FEW, VARIANTS, buffers_equal, components, linear, random  # noqa: E402

import cuquant.torch  # noqa: E402
from cuquant.torch import QuantLinear, quantize_  # noqa: E402

nn, F = torch.nn, torch.nn.functional
PREPACK = pytest.mark.parametrize("prepack", [False, True])


def quantized(fmt="int8", n=24, k=256, **options):
    """A layer, and the values that its weight decodes to."""
    plain = linear(n, k)
    layer = QuantLinear.from_linear(plain, fmt, **options)
    return layer, cq.quantize(plain.weight.detach(), fmt).dequantize()


@PREPACK
def test_products_take_it_and_the_layer(prepack):
    layer, _ = quantized(prepack=prepack)
    other, x = quantized(prepack=prepack)[0], random(3, 256)
    with torch.no_grad():
        wanted = cq.linear(x, layer.quantized)
        assert torch.equal(cq.linear(x, layer.weight), wanted)
        assert torch.equal(cq.linear(x, layer), wanted)
        gated = cq.swiglu(x, layer.quantized, other.quantized)
        assert torch.equal(cq.swiglu(x, layer.weight, other), gated)
    with pytest.raises(TypeError, match="w must be a QuantArray or PackedWeight, got Tensor"):
        cq.linear(x, layer.weight.detach())


@PREPACK
def test_it_looks_as_an_nn_linears_weight(prepack):
    plain = linear().half()
    layer = QuantLinear.from_linear(plain, "nf4", prepack=prepack)
    assert isinstance(layer, nn.Linear) and isinstance(layer.weight, torch.Tensor)
    for what in (
        lambda w: w.dtype,
        lambda w: w.device,
        lambda w: w.shape,
        lambda w: w.size(),
        lambda w: w.size(0),
        lambda w: (w.ndim, w.dim(), len(w), w.numel(), w.stride(), w.element_size(), w.nbytes),
        lambda w: (w.is_floating_point(), w.is_cuda, w.is_meta, w.layout, w.is_contiguous()),
        lambda w: w.device.type,
        lambda w: random(2, 3).to(w.dtype).dtype,
        lambda w: random(2, 3).to(w.device).device,
        lambda w: random(2, 3).to(w).dtype,
        lambda w: w.new_zeros(3).dtype,
        lambda w: torch.finfo(w.dtype).max,
        lambda w: w.type(),
    ):
        assert what(layer.weight) == what(plain.weight)
    assert not layer.weight.requires_grad and layer.weight.grad is None
    assert [n for n, p in layer.named_parameters() if p.is_floating_point()] == ["bias"]
    assert "nf4" in repr(layer.weight)
    moved = layer.to("meta")
    assert moved.weight.is_meta and moved.weight.detach().is_meta


@PREPACK
@pytest.mark.parametrize("fmt", [*FEW, *VARIANTS])
def test_reading_decodes(fmt, prepack):
    layer, values = quantized(VARIANTS.get(fmt, fmt), prepack=prepack)
    w, x = layer.weight, random(3, 256)
    buffer = io.BytesIO()
    torch.save(w, buffer)
    buffer.seek(0)
    for read, wanted in (
        (w.detach(), values),
        (w.data, values),
        (w.clone(), values),
        (w.dequantize(), values),
        (w.t(), values.T),
        (w.T, values.T),
        (w[1:3], values[1:3]),
        (w.bfloat16(), values.bfloat16()),
        (w + 1, values + 1),
        (w == w, values == values),
        (x @ w.T, x @ values.T),
        (torch.cat([w, w]), torch.cat([values, values])),
        (F.embedding(torch.tensor([2, 0]), w), values[[2, 0]]),
        (torch.as_tensor(np.asarray(w)), values),
        (torch.tensor(w.tolist()), values),
        (copy.deepcopy(w), values),
        (pickle.loads(pickle.dumps(w)), values),
        (torch.load(buffer, weights_only=True), values),
    ):
        assert type(read) is torch.Tensor and torch.equal(read, wanted)
    assert torch.equal(torch.nn.Parameter(w.data), values)
    assert torch.equal(w.to(torch.float32).cpu().contiguous().detach(), values)


@PREPACK
def test_functional_linear_is_the_layers_product(prepack):
    layer, values = quantized("nf4", prepack=prepack)
    x = random(3, 256)
    assert torch.equal(F.linear(x, layer.weight, layer.bias), layer(input=x))
    assert torch.equal(F.linear(x, weight=layer.weight), cq.linear(x, layer.quantized))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert torch.equal(F.linear(x, layer.weight, layer.bias), layer(x))
    assert torch.equal(F.linear(layer.weight, values), F.linear(values, values))
    leaf = x.clone().requires_grad_()
    F.linear(leaf, layer.weight).sum().backward()
    assert torch.allclose(leaf.grad, values.sum(0).expand(3, 256))


def test_compiled_code_reads_it():
    layer, values = quantized("int4")
    other = nn.Linear(24, 8)

    def function(x):
        h = F.linear(x.to(layer.weight.dtype), layer.weight) * layer.weight.shape[0]
        return other(layer(x) + h)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = random(3, 256)
    with torch.no_grad():
        assert torch.allclose(compiled(x), function(x), atol=1e-2, rtol=1e-4)
    arguments = layer._parts(), *layer._words
    torch.library.opcheck(cuquant.torch.op.DEQUANTIZE, arguments)
    assert torch.equal(torch.ops.cuquant.dequantize(*arguments), values)


def test_nothing_changes_it_in_place():
    layer, values = quantized()
    w = layer.weight
    for change in (
        lambda: w.add_(1),
        lambda: w.copy_(values),
        lambda: w.zero_(),
        lambda: w.fill_(3),
        lambda: w.__setitem__(0, 0.0),
        lambda: torch.add(values, values, out=w),
        lambda: nn.init.normal_(w),
        layer.reset_parameters,
    ):
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"assign new values to layer\.we"):
            change()
    with pytest.raises(RuntimeError, match="no gradient"):
        w.requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient"):
        w.requires_grad = True
    w.requires_grad_(False).requires_grad = False
    with pytest.raises(RuntimeError, match=r"layer\.weight\.detach\(\)"):
        w.data_ptr()
    assert torch.equal(layer.weight.detach(), values)


@PREPACK
@pytest.mark.parametrize("fmt", [*FEW, *VARIANTS])
def test_values_that_are_set_are_quantized(fmt, prepack):
    """PEFT merges by `weight.data += delta`; the buffers stay, and who shares them follows."""
    fmt = VARIANTS.get(fmt, fmt)
    layer, values = quantized(fmt, prepack=prepack)
    twin, before, delta = copy.copy(layer), layer._parts(), random(24, 256, seed=7)
    layer.weight.data += delta
    wanted = QuantLinear(layer.quantized)
    wanted.weight = values + delta
    fresh = cq.quantize(values + delta, fmt)
    assert torch.equal(layer.weight.detach(), fresh.dequantize())
    assert buffers_equal(wanted, QuantLinear(cq.prepack(fresh) if prepack else fresh))
    assert all(a is b for a, b in zip(layer._parts(), before, strict=True))
    assert torch.equal(twin(random(2, 256)), layer(random(2, 256)))
    with pytest.raises(ValueError, match=r"\(24, 256\)"):
        layer.weight.data = random(24, 512)


CHANGES = {
    "a function": lambda values: values.copy_(-values),
    "items": lambda values: values.__setitem__(3, 0),
    "out": lambda values: torch.mul(values, 2, out=values),
    "in inference mode": torch.inference_mode()(lambda values: values.zero_()),
}


@PREPACK
@pytest.mark.parametrize("change", CHANGES)
def test_values_that_are_changed_in_place_are_quantized(change, prepack):
    """PEFT merges OFT by `weight.data.copy_(...)`; a change that nobody sees would be lost."""
    layer, values = quantized(prepack=prepack)
    before = layer._parts()
    CHANGES[change](layer.weight.data)
    CHANGES[change](values)
    wanted = cq.quantize(values, "int8")
    assert torch.equal(layer.weight.detach(), wanted.dequantize())
    assert all(a is b for a, b in zip(layer._parts(), before, strict=True))
    assert not layer._loans


def test_values_that_others_still_have_are_asked_for():
    layer, _ = quantized()
    given = layer.weight.data
    given.zero_()
    copies = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), quantized()[0]
    copies[2].load_state_dict(layer.state_dict())
    for each in (layer, *copies):
        assert not each(random(2, 256)).sub(layer.bias).any()
    given[0] = 1
    assert layer.weight.sum() == 256 and not any(each.weight.any() for each in copies)
    parameter = nn.Parameter(given)  # which is a plain one
    assert type(parameter) is nn.Parameter
    del given
    with torch.no_grad():
        parameter.zero_()
    assert layer.weight.sum() == 256 and not layer._loans


def test_values_that_a_layer_has_left_do_not_come_back():
    layer, _ = quantized()
    given = layer.weight.data
    layer.weight = random(24, 256, seed=3)
    wanted = layer.weight.detach()
    given.zero_()
    assert torch.equal(layer.weight.detach(), wanted)
    gone = weakref.ref(layer)
    given = layer.weight.data
    del layer
    gc.collect()
    assert gone() is None  # values keep no layer
    given.zero_()


@PREPACK
def test_assignment(prepack):
    layer, values = quantized("int4", prepack=prepack)
    first = layer._parts()
    layer.weight = layer.weight
    assert all(a is b for a, b in zip(layer._parts(), first, strict=True))
    other, there = quantized("nf4", n=8)
    other.bias = None
    layer.weight = other.weight  # tied
    assert layer.format == other.format and (layer.out_features, layer.in_features) == (8, 256)
    assert layer._parts()[0].data_ptr() == other._parts()[0].data_ptr()
    assert torch.equal(layer.weight.detach(), there)
    layer.weight = cq.quantize(values, "k3")
    assert layer.format.name == "k3" and layer.out_features == 24
    layer.weight = nn.Parameter(random(40, 256).half())
    assert layer.format.name == "k3" and layer.weight.shape == (40, 256)
    assert layer.weight.dtype == torch.float16 and "weight" not in layer._parameters
    for wrong in (None, 3, random(40), random(4, 4, 4), random(4, 256).double()):
        with pytest.raises((TypeError, ValueError), match=r"weight|array"):
            layer.weight = wrong
    assert layer.weight.shape == (40, 256)


def test_its_dtype_follows_casts():
    """As a float weight's does: x.to(layer.weight.dtype) is then x of the rest of the model."""
    model = quantize_(nn.Sequential(linear(24, 256), nn.LayerNorm(24)), "nf4")
    parts = [part.clone() for _, part in components(model[0])]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert model.to(dtype)[0].weight.dtype == model[1].weight.dtype == dtype
        assert model[0].weight.detach().dtype == dtype
        assert model(random(2, 256).to(model[0].weight.dtype)).dtype == dtype
    assert model.type(torch.float16)[0].weight.dtype == torch.float16
    assert all(torch.equal(a, b) for a, (_, b) in zip(parts, components(model[0]), strict=True))
    assert model.double()[0].weight.dtype == torch.float16  # which there are no weights of
    saved = quantize_(nn.Sequential(linear(24, 256), nn.LayerNorm(24)), "nf4").state_dict()
    model.half().load_state_dict(saved)  # copies into what is there, as it does for floats
    assert model[0].weight.dtype == torch.float16
    model.load_state_dict(saved, assign=True)
    assert model[0].weight.dtype == torch.float32


def test_a_weight_keeps_its_layer_and_nothing_else_does():
    layer, values = quantized()
    alive, w = weakref.ref(layer), layer.weight
    del layer
    assert torch.equal(w.detach(), values)
    del w
    gc.collect()
    assert alive() is None


def test_a_weight_of_two_layers_has_the_parameters_of_one():
    """As in torch: what moves, loads or fills one is the other's, and files name it twice."""
    model = nn.Sequential(linear(64, 64), linear(64, 64))
    model[1].weight = model[0].weight
    quantize_(model, "nf4")
    mine, others = components(model[0]), components(model[1])
    assert all(a is b for (_, a), (_, b) in zip(mine, others, strict=True))
    assert len(components(model)) == len(mine)
    model[0].weight.data = random(64, 64, seed=9)
    assert torch.equal(model[1].weight.detach(), model[0].weight.detach())
    other = QuantLinear.from_linear(linear(8, 256), "int4")
    other.weight = model[0].weight
    assert other._parts()[0] is model[0]._parts()[0] and other.in_features == 64


def test_traps_of_parameters_that_are_bytes():
    """As the docstring says: torch refuses a gradient of them, and averages them to garbage."""
    model = quantize_(nn.Sequential(linear(), nn.LayerNorm(24)), "nf4")
    with pytest.raises(RuntimeError, match="floating point"):
        model.requires_grad_(True)
    model.requires_grad_(False)
    model[1].requires_grad_(True)
    before = [part.clone() for _, part in components(model)]
    step = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    model(random(2, 256)).square().sum().backward()
    step.step()
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, components(model), strict=True))


def test_a_weight_that_is_exchanged_for_a_call_is_put_back():
    layer = QuantLinear.from_linear(linear(8, 64), "nf4")
    x = random(3, 64)
    before, kept = layer(x), layer.weight
    assert torch.equal(
        torch.func.functional_call(layer, {"weight": torch.zeros(8, 64)}, (x,)),
        (layer.bias.expand(3, 8)),
    )
    assert torch.equal(layer(x), before)
    layer.weight = random(16, 64)
    layer.weight = kept
    assert torch.equal(layer(x), before) and layer.out_features == 8
    with pytest.raises(RuntimeError, match="weight requires grad"):
        wanted = torch.zeros(8, 64, requires_grad=True)
        torch.func.functional_call(layer, {"weight": wanted}, (x,))
    assert torch.equal(layer(x), before)


def test_rows_that_a_lookup_rescales():
    table = cuquant.torch.QuantEmbedding(cq.quantize(random(8, 64), "q8_0"))
    ids = torch.tensor([2, 1])
    wanted = torch.nn.functional.embedding(ids, table.weight.detach(), max_norm=1.0)
    assert torch.equal(torch.nn.functional.embedding(ids, table.weight, None, 1.0), wanted)
    assert torch.equal(torch.nn.functional.embedding(ids, table.weight, max_norm=1.0), wanted)
