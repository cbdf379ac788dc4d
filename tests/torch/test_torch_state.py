"""State dicts of quantized models: both ways to store one, views of flat buffers, damage."""

import copy
import json
import random as chance

import numpy as np
import pytest

import cuquant as cq

torch = pytest.importorskip("torch", reason="torch is optional")

from safetensors.torch import load_file  # noqa: E402
from samples import sampled  # noqa: E402
from torch_models import FEW, NAMES, VARIANTS, buffers_equal, components, linear, random  # noqa: E402

import cuquant.torch  # noqa: E402
from cuquant.torch import QuantLinear, quantize_  # noqa: E402
from cuquant.torch.spec import usable  # noqa: E402

nn = torch.nn
PREPACK = pytest.mark.parametrize("prepack", [False, True])


# ---- load_state_dict takes what `save` wrote ----------------------------------------------------


@PREPACK
@pytest.mark.parametrize("fmt", [*NAMES, *VARIANTS])
def test_load_state_dict_takes_the_names_of_save(fmt, prepack, tmp_path):
    """As `cuquant quantize` writes them: q_proj.weight.packed, and a header that is not seen."""
    fmt, plain = VARIANTS.get(fmt, fmt), linear(n=20)
    q = cq.quantize(plain.weight.detach(), fmt)
    cq.save(tmp_path / "m", {"0.weight": cq.prepack(q) if prepack else q, "0.bias": plain.bias})
    wanted = QuantLinear(q, plain.bias)
    for assign in (False, True):
        model = quantize_(nn.Sequential(linear(n=20, seed=5)), fmt, prepack=not prepack)
        model.load_state_dict(load_file(tmp_path / "m"), assign=assign)
        assert torch.equal(model(random(3, 256)), wanted(random(3, 256)))
        assert model[0].layout == (cq.prepack(q).layout if prepack else "rows/1")


@PREPACK
def test_load_state_dict_takes_arrays(prepack):
    q = cq.quantize(random(24, 256), "nf4:32+dq")
    for weight in (q, q.numpy()):
        weight = cq.prepack(weight) if prepack else weight
        model = quantize_(nn.Sequential(linear(bias=False)), "nf4:32+dq")
        model.load_state_dict({"0.weight": weight})
        assert torch.equal(model(random(3, 256)), cq.linear(random(3, 256), q))
    other = quantize_(nn.Sequential(linear(bias=False)), "fp4")
    with pytest.raises(RuntimeError, match=r"(?s)0: the saved weight is nf4:32\+dq.*is fp4"):
        other.load_state_dict({"0.weight": q})


def test_names_of_save_that_do_not_fit():
    model = quantize_(nn.Sequential(linear(bias=False)), "int4")
    q = cq.quantize(random(24, 256), "int4")
    parts = {f"0.weight.{name}": part for name, part in q.arrays().items()}
    wanted = model(random(2, 256))
    for message, wrong in {
        "components packed, which": {"0.weight.packed": q.packed},
        "components packed, scale, zero_point": {**parts, "0.weight.zero_point": q.packed},
        "weight.scale is float32": {**parts, "0.weight.scale": q.scale.float()},
        r"weight.packed is uint8\[23, 128\]": {**parts, "0.weight.packed": q.packed[1:]},
        "weight.packed must be a tensor": {**parts, "0.weight.packed": 3},
    }.items():
        with pytest.raises(RuntimeError, match=f"(?s)0: .*{message}"):
            model.load_state_dict(wrong)
    assert torch.equal(model(random(2, 256)), wanted)


@PREPACK
def test_a_permutation_that_is_none_changes_nothing(prepack):
    """It is looked at before columns of x follow it."""
    model = quantize_(nn.Sequential(linear()), "int4+permuted", prepack=prepack)
    wanted = model(random(2, 256))
    for place, value in ((0, 256), (5, -1), (3, 4)):
        order = torch.arange(256, dtype=torch.int32)
        order[place] = value
        state = model.state_dict() | {"0.permutation": order.view(torch.uint8)}
        with pytest.raises(RuntimeError, match="0: permutation"):
            model.load_state_dict(state)
        assert torch.equal(model(random(2, 256)), wanted)
    order = torch.arange(256, dtype=torch.int32).flip(0)
    model.load_state_dict(model.state_dict() | {"0.permutation": order.view(torch.uint8)})
    assert torch.allclose(model(random(2, 256).flip(1)), wanted, atol=1e-5)


# ---- views of one flat buffer -------------------------------------------------------------------


def flat(state, by):
    """The same state, its tensors cut out of one buffer, each `by` bytes off."""
    size = sum(t.numel() * t.element_size() + 300 for t in state.values())
    room, at, made = torch.zeros(size, dtype=torch.uint8), 0, {}
    for key, tensor in state.items():
        own = by if tensor.dtype == torch.uint8 else 0  # others cannot lie there in torch
        at += -(room.data_ptr() + at) % 256 + own
        view = room[at : at + tensor.numel() * tensor.element_size()]
        made[key] = view.view(tensor.dtype).view(tensor.shape)
        made[key].copy_(tensor)
        at += view.numel()
    return made


@PREPACK
@pytest.mark.parametrize("by", sampled([1, 2, 3, 4, 7], lambda by: by % 4 == 0))
@pytest.mark.parametrize("fmt", [*FEW, *VARIANTS])
def test_a_state_cut_out_of_one_buffer(fmt, by, prepack):
    layer = QuantLinear.from_linear(linear(), VARIANTS.get(fmt, fmt), prepack=prepack)
    x, state = random(2, 256), layer.state_dict()
    for assign in (True, False):
        other = QuantLinear.from_linear(
            linear(seed=3), VARIANTS.get(fmt, fmt), prepack=prepack, activation="relu"
        )
        other.load_state_dict(flat(state, by), assign=assign)
        assert torch.equal(other(x), torch.relu(layer(x))) and buffers_equal(layer, other)
        assert torch.equal(other.weight.detach(), layer.weight.detach())
        assert torch.equal(copy.deepcopy(other)(x), other(x))
    twice = QuantLinear(layer.quantized, layer.bias)
    for name, part in flat(dict(components(layer)), by).items():
        twice.get_parameter(name).data = part
    assert torch.equal(twice(x), layer(x))
    for name, part in components(twice):  # no copy was kept: what is written later is seen
        if name != "permutation":  # of which zeros are none
            part.zero_()
    zeros = QuantLinear(twice.quantized, layer.bias)
    assert torch.equal(twice(x), zeros(x))


@pytest.mark.parametrize(("address", "copied"), [(0, False), (16, False), (4, True), (8, True)])
def test_kernels_read_16_bytes_at_once(address, copied):
    class Part:
        """A tensor on a GPU, at an address."""

        is_meta, is_cuda = False, True

        def storage_offset(self):
            return 0

        def element_size(self):
            return 1

        def data_ptr(self):
            return 2**40 + address

        def clone(self, memory_format):
            return "a copy"

        def contiguous(self):
            return self

    part = Part()
    component = QuantLinear.from_linear(linear(), "nf4")._spec.components()[0]
    assert usable(component, part) == ("a copy" if copied else part)


def test_a_state_that_is_not_in_c_order():
    layer = QuantLinear.from_linear(linear(), "int4")
    state = {k: v.T.contiguous().T if v.ndim == 2 else v for k, v in layer.state_dict().items()}
    assert not state["packed"].is_contiguous()
    other = QuantLinear.from_linear(linear(seed=3), "int4")
    other.load_state_dict(state, assign=True)
    assert torch.equal(other(random(2, 256)), layer(random(2, 256)))


# ---- damage -------------------------------------------------------------------------------------


def described(said):
    return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)


WRONG = (
    None, True, -1, 3.5, 2**70, "", "nf4", "x" * 5000, [], [1], {}, {"a": 1}, [[]], float("inf"),
    '{"name": "nf4", "options": {"block_size": []}}', '{"name": "nf4", "options": {"levels": {}}}',
    '{"name": "k3", "options": {"levels": [1, [2]]}}', '{"name": [], "options": {}}', "{" * 2000,
    '{"name": "nf4", "options": {"block_size": 1e400}}', '{"name": "nf4", "options": {"": 1}}',
    '{"name": "nf4", "options": {"block_size": [1, 2, 3]}}', "nf4:" + "9" * 300, "k3+custom",
    '{"name": "nf4", "options": {"block_size": {"a": 1}, "double_quant": []}}', [24, "256"],
)  # fmt: skip


@PREPACK
@pytest.mark.parametrize("field", ["version", "format", "layout", "shape", "dtype"])
def test_a_damaged_description_is_torchs_error_with_its_name(field, prepack):
    model = quantize_(nn.Sequential(linear()), "nf4", prepack=prepack)
    x, state = random(2, 256), model.state_dict()
    wanted = model(x)
    said = json.loads(bytes(state["0._extra_state"].tolist()))
    for wrong in WRONG:
        if said[field] == wrong:
            continue
        damaged = described({**said, field: wrong})
        with pytest.raises(RuntimeError, match=r"(?s)loading state_dict for Sequential.*0: "):
            model.load_state_dict({**state, "0._extra_state": damaged})
        with pytest.raises(ValueError):
            model[0].set_extra_state(damaged)
    assert torch.equal(model(x), wanted)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("key", ["packed", "scale", "_extra_state", "bias"])
def test_values_that_are_no_such_tensors(key, assign):
    model = quantize_(nn.Sequential(linear()), "nf4")
    state = model.state_dict()
    odd = (
        3, "a", b"", [1], {}, object(), np.zeros(3), torch.zeros(2, 2), torch.zeros(()),
        torch.zeros(5, dtype=torch.int64), torch.zeros(0, dtype=torch.uint8), torch.eye(3) > 0,
        torch.zeros(4, dtype=torch.complex64), torch.zeros(9, dtype=torch.uint8).to_sparse(),
        nn.Linear(2, 2), model[0],
        torch.full((10**6,), 91, dtype=torch.uint8), cq.quantize(random(24, 256), "nf4"),
    )  # fmt: skip
    for value in odd:
        fresh = copy.deepcopy(model)
        with pytest.raises(RuntimeError, match=r"(?s)loading state_dict for Sequential.*0"):
            fresh.load_state_dict({**state, f"0.{key}": value}, assign=assign)
    assert torch.equal(fresh(random(2, 256)), model(random(2, 256)))


def test_damaged_bytes_of_a_description():
    """Every one of 3,000 random changes is an error of torch's, or changes nothing that matters."""
    model, draw = quantize_(nn.Sequential(linear()), "k3:32+normal"), chance.Random(0)
    state = model.state_dict()
    good = state["0._extra_state"].tolist()
    for _ in range(3000):
        bad = list(good)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(bad))
            if draw.random() < 0.3:
                del bad[at : at + draw.randint(1, 9)]
            else:
                bad[at] = draw.choice(b'{}[]",:0123456789.eE+-\\ nulltrue\x00\xff')
        try:
            model.load_state_dict({**state, "0._extra_state": torch.tensor(bad, dtype=torch.uint8)})
        except RuntimeError as error:
            assert "0: " in str(error)
    assert model(random(1, 256)).shape == (1, 24)


def test_a_description_that_is_none_is_named():
    model = quantize_(nn.Sequential(nn.Linear(64, 8)), "nf4")
    state = model.state_dict()
    with pytest.raises(RuntimeError, match="0: _extra_state is None"):
        model.load_state_dict({**state, "0._extra_state": None})


def test_a_layout_of_a_million_letters_is_cut():
    model = quantize_(nn.Sequential(nn.Linear(64, 8)), "nf4")
    state = model.state_dict()
    said = json.loads(bytes(state["0._extra_state"].tolist()))
    text = json.dumps({**said, "layout": "A" * 1_000_000}).encode()
    described = torch.tensor(list(text), dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="layout 'AAA") as caught:
        model.load_state_dict({**state, "0._extra_state": described})
    assert len(str(caught.value)) < 1000


def test_parameters_that_torch_swaps(monkeypatch):
    """torch.__future__.set_swap_module_params_on_conversion wants no weak reference to them."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    layer, x = QuantLinear.from_linear(linear(8, 64), "nf4"), random(3, 64)
    before = layer(x)
    layer.half()
    assert layer(x.half()).dtype == torch.float16
    other = QuantLinear.from_linear(linear(8, 64, seed=5), "nf4")
    layer.load_state_dict(other.state_dict())
    assert not torch.equal(layer.float()(x), before)
    assert torch.equal(layer.packed, other.packed)
