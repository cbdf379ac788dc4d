"""`load_` of experts: one array in the file, or a matrix for each, into a model that fuses them."""

import numpy as np
import pytest

import cuquant as cq

torch = pytest.importorskip("torch", reason="torch is optional")

from cuquant.torch import QuantExperts, load_, quantize_  # noqa: E402

nn = torch.nn
COUNT, INNER, OUTER = 3, 32, 64


class Experts(nn.Module):
    def __init__(self, turned=False):
        super().__init__()
        self.act_fn = nn.SiLU()
        first, last = (COUNT, 2 * INNER, OUTER), (COUNT, OUTER, INNER)
        if turned:
            first, last = (COUNT, OUTER, 2 * INNER), (COUNT, INNER, OUTER)
        self.gate_up_proj = nn.Parameter(torch.zeros(first))
        self.down_proj = nn.Parameter(torch.zeros(last))


def model(turned=False):
    return nn.ModuleDict({"mlp": nn.ModuleDict({"experts": Experts(turned)})})


def matrices(rng):
    """By part: [E, N, K]."""
    shapes = {"gate_proj": (INNER, OUTER), "up_proj": (INNER, OUTER), "down_proj": (OUTER, INNER)}
    return {
        key: rng.standard_normal((COUNT, *shape)).astype(np.float32)
        for key, shape in shapes.items()
    }


def saved(path, found, fmt, name="mlp.experts.{}.{}.weight", names=None):
    arrays = {
        name.format(i, (names or {}).get(key, key)): cq.quantize(one, fmt) if fmt else one
        for key, value in found.items()
        for i, one in enumerate(value)
    }
    cq.save(path, arrays)
    return path


@pytest.mark.parametrize("fmt", ["nf4:32", "int4:32", "int8", "q8_0", "mxfp4", "uint4:32+min"])
@pytest.mark.parametrize("turned", [False, True])
def test_matrices_become_one_array_with_their_codes(fmt, turned, rng, tmp_path):
    found = matrices(rng)
    made = load_(model(turned), saved(tmp_path / "m", found, fmt)).mlp.experts
    assert isinstance(made, QuantExperts)
    both = np.concatenate([found["gate_proj"], found["up_proj"]], axis=1)
    for key, wanted in (("gate_up_proj", both), ("down_proj", found["down_proj"])):
        q = cq.quantize(torch.from_numpy(wanted), fmt)
        assert cq.array_equal(getattr(made, key).quantized, q)


@pytest.mark.parametrize("fmt", ["nvfp4", "int8:tensor", None])
@pytest.mark.parametrize("turned", [False, True])
def test_what_cannot_lie_in_one_array_is_decoded(fmt, turned, rng, tmp_path):
    found = matrices(rng)
    made = load_(model(turned), saved(tmp_path / "m", found, fmt)).mlp.experts
    assert type(made) is Experts
    one = found["down_proj"][1]
    wanted = cq.quantize(one, fmt).dequantize() if fmt else one
    got = made.down_proj.detach().numpy()[1]
    assert np.array_equal(got.T if turned else got, wanted)


def test_names_of_mixtral(rng, tmp_path):
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    name = "block_sparse_moe.experts.{}.{}.weight"
    path = saved(tmp_path / "m", matrices(rng), "int4:32", f"x.{name}", names)
    outer = nn.ModuleDict({"x": model()})
    assert isinstance(load_(outer, path).x.mlp.experts, QuantExperts)


def test_the_state_of_a_quantized_model_goes_into_a_float_one(rng, tmp_path):
    from safetensors.torch import save_file

    made = quantize_(model(), "int4:32")
    save_file(made.state_dict(), tmp_path / "m.safetensors")
    again = load_(model(), tmp_path / "m.safetensors")
    assert isinstance(again.mlp.experts, QuantExperts)


def test_a_matrix_that_is_missing_is_named(rng, tmp_path):
    found = matrices(rng)
    path = saved(tmp_path / "m", {k: v[:2] for k, v in found.items()}, "int4:32")
    with pytest.raises(RuntimeError, match=r"the file lacks mlp\.experts\.gate_up_proj"):
        load_(model(), path)
