"""A model's two files, the command's and the state_dict's, for cq.load and cuquant.torch.load_."""

import json
import subprocess
import sys
import warnings
from itertools import product

import numpy as np
import pytest

import cuquant as cq

torch = pytest.importorskip("torch", reason="torch is optional")

from safetensors.torch import load_file, save_file  # noqa: E402
from samples import sampled  # noqa: E402
from torch_models import NAMES, VARIANTS, Block, linear, random  # noqa: E402

import cuquant.torch  # noqa: E402
from cuquant.torch import QuantLinear, load_, quantize_  # noqa: E402

nn = torch.nn
TOKENS = torch.arange(12).reshape(2, 6)


def build(seed=0, **options):
    torch.manual_seed(seed)
    return Block(**options).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A quantized model, and its files: as the command writes it, and as a state_dict."""
    plain, folder = build(), tmp_path_factory.mktemp("files")
    save_file(plain.state_dict(), folder / "float.safetensors")
    run = [sys.executable, "-m", "cuquant", "quantize", str(folder / "float.safetensors")]
    run += ["-f", "nf4", "-o", str(folder / "cli"), "--device", "cpu", "--exclude", "embed*"]
    subprocess.run(run, check=True, capture_output=True)
    model = quantize_(plain, "nf4")
    save_file(model.state_dict(), folder / "state")
    save_file(quantize_(build(), "nf4", prepack=True).state_dict(), folder / "prepacked")
    return model, {name: folder / name for name in ("cli", "state", "prepacked")}


WAYS = ("cli", "state", "prepacked")


@pytest.mark.parametrize("way", WAYS)
def test_load_gives_one_dict(way, files):
    model, paths = files
    found = cq.load(paths[way])
    names = {"embed.weight", "norm.weight", "norm.bias", "mlp.down.bias"}
    weights = {"mlp.gate.weight", "mlp.down.weight", "lm_head.weight"}
    assert found.keys() == names | weights
    for name in weights:
        q = cq.unpack(found[name]) if way == "prepacked" else found[name]
        assert isinstance(q, cq.QuantArray) and q.kind == "numpy"
        layer = model.get_submodule(name.removesuffix(".weight"))
        for key, part in q.arrays().items():
            assert (part == layer.quantized.arrays()[key].numpy()).all()


@pytest.mark.parametrize("way", WAYS)
def test_load_for_torch(way, files):
    model, paths = files
    found = cq.load(paths[way], library="torch", device="cpu")
    assert all(isinstance(v, torch.Tensor) or v.kind == "torch" for v in found.values())
    again = quantize_(build(3), "nf4")
    again.load_state_dict(found)
    assert torch.equal(again(TOKENS), model(TOKENS))


@pytest.mark.parametrize(
    ("quantized", "device", "way"),
    sampled(
        product([None, "nf4", "int8"], ["cpu", "meta"], WAYS),
        lambda quantized, *_: quantized,
        lambda _, *how: how,
    ),
)
def test_load_into_a_model(way, device, quantized, files):
    model, paths = files
    with torch.device(device):
        other = build(5)
    if quantized:
        quantize_(other, quantized)
    assert load_(other, paths[way]) is other
    assert torch.equal(other(TOKENS), model(TOKENS)) and not other.training
    assert all(isinstance(other.get_submodule(n), QuantLinear) for n in ("mlp.gate", "lm_head"))
    assert other.mlp["gate"].layout == ("fragments/1" if way == "prepacked" else "rows/1")


@pytest.mark.parametrize("way", WAYS)
def test_load_state_dict_of_each_file(way, files):
    model, paths = files
    other = quantize_(build(5), "nf4")
    other.load_state_dict(load_file(paths[way]))
    assert torch.equal(other(TOKENS), model(TOKENS))


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("way", WAYS)
def test_a_float_model_takes_the_values(way, library, files):
    """load_state_dict of what cq.load gives."""
    model, paths = files
    plain = build(5)
    state = cq.load(paths[way], library="torch", device="cpu")
    if library == "numpy":
        state |= {k: v for k, v in cq.load(paths[way]).items() if not isinstance(v, np.ndarray)}
    plain.load_state_dict(state)
    assert torch.equal(plain.lm_head.weight, model.lm_head.weight.dequantize())
    assert torch.allclose(plain(TOKENS), model(TOKENS), atol=1e-5)
    with pytest.raises(RuntimeError, match="size mismatch for lm_head"):
        plain.load_state_dict({**state, "lm_head.weight": cq.quantize(np.ones((2, 64)), "int8")})


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_no_linear_layer_is_decoded(device, tmp_path):
    model = build()
    state = {k: cq.quantize(v, "int8") if v.ndim > 1 else v for k, v in model.state_dict().items()}
    cq.save(tmp_path / "all", state)
    with torch.device(device):
        other = build(5)
    load_(other, tmp_path / "all")
    assert type(other.embed) is nn.Embedding
    assert torch.equal(other.embed.weight, state["embed.weight"].dequantize())
    wanted = quantize_(model, "int8")
    wanted.embed.weight.copy_(other.embed.weight)
    assert torch.equal(other(TOKENS), wanted(TOKENS))
    for cast in (torch.float16, torch.bfloat16):
        load_(other.to(cast), tmp_path / "all")
        assert other.embed.weight.dtype == cast


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tied_head_that_the_file_leaves_out(device, tmp_path):
    state = dict(build(tied=True).state_dict())
    del state["lm_head.weight"]
    q = {k: cq.quantize(v, "nf4") if "mlp" in k and v.ndim > 1 else v for k, v in state.items()}
    cq.save(tmp_path / "tied", q)
    with torch.device(device):
        other = build(5, tied=True)
    load_(other, tmp_path / "tied")
    assert other.lm_head.weight is other.embed.weight
    assert torch.equal(other(TOKENS), quantize_(build(tied=True), "nf4")(TOKENS))


def test_files_that_do_not_fit_change_nothing(files, tmp_path):
    model, paths = files
    arrays = cq.load(paths["cli"])
    cases = {
        "the file lacks mlp.down.bias": {k: v for k, v in arrays.items() if k != "mlp.down.bias"},
        "the file lacks lm_head.weight": {k: v for k, v in arrays.items() if "lm" not in k},
        "the model has no more": {**arrays, "more": np.zeros(3)},
        r"lm_head.weight is \[41, 64\], not \[40, 64\]": {
            **arrays, "lm_head.weight": cq.quantize(random(41, 64), "nf4")
        },
        r"norm.bias is \[63\], not \[64\]": {**arrays, "norm.bias": np.zeros(63)},
    }  # fmt: skip
    for message, wrong in cases.items():
        cq.save(tmp_path / "wrong", wrong)
        for other in (build(5), quantize_(build(5), "nf4")):
            before, modules = other(TOKENS), list(other.modules())
            with pytest.raises(RuntimeError, match=message):
                load_(other, tmp_path / "wrong")
            assert list(other.modules()) == modules and torch.equal(other(TOKENS), before)
    with pytest.raises(ValueError, match="Sequential"):
        load_(linear(), paths["cli"])
    with pytest.raises(TypeError, match=r"nn\.Module"):
        load_([linear()], paths["cli"])
    torch.save(model.state_dict(), tmp_path / "m.pt")
    with pytest.raises(cq.FormatError):
        load_(build(), tmp_path / "m.pt")


@pytest.mark.parametrize("fmt", [*NAMES, *VARIANTS])
def test_every_format_as_a_state(fmt, tmp_path):
    layer = QuantLinear.from_linear(linear(n=20), VARIANTS.get(fmt, fmt))
    save_file(layer.state_dict(), tmp_path / "state")
    found = cq.load(tmp_path / "state")
    assert found.keys() == {"weight", "bias"} and found["weight"].format == layer.format
    values = torch.from_numpy(found["weight"].dequantize())
    assert torch.equal(values, layer.weight.detach())
    for library in ("numpy", "torch"):
        cq.save(tmp_path / "saved", cq.load(tmp_path / "state", library=library))
        again = load_(QuantLinear.from_linear(linear(n=20, seed=8), "q8_0"), tmp_path / "saved")
        assert torch.equal(again(random(2, 256)), layer(random(2, 256)))


def test_plain_arrays_are_torchs_own(tmp_path):
    dtypes = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
              torch.bool, torch.uint8, torch.float64)  # fmt: skip
    state = {str(dtype): (random(3, 4) * 5).to(dtype) for dtype in dtypes}
    state["torch.zero"] = torch.tensor(2.5)
    save_file(state, tmp_path / "plain")
    found = cq.load(tmp_path / "plain", library="torch")
    for name, wanted in state.items():
        got = found[name]
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        assert torch.equal(got.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8))
        got.copy_(wanted)  # it is writable


def test_names_libraries_and_devices(files):
    _, paths = files
    for path in paths.values():
        assert cq.load(path, names=["lm_head.weight"]).keys() == {"lm_head.weight"}
        assert cq.load(path, names=()) == {}
    with pytest.raises(ValueError, match=r"no array 'lm_head.weigh'.*lm_head\.weight"):
        cq.load(paths["state"], names=["lm_head.weigh"])
    with pytest.raises(TypeError, match="several"):
        cq.load(paths["state"], names="bias")
    for options, message in (
        ({"library": "jax"}, "numpy, cupy, torch"),
        ({"device": "tpu"}, "'cpu', 'cuda'"),
        ({"library": "numpy", "device": "cuda:0"}, "numpy has no arrays on 'cuda:0'"),
        ({"library": "cupy", "device": "cpu"}, "cupy has no arrays on 'cpu'"),
    ):
        with pytest.raises(ValueError, match=message):
            cq.load("no such file", **options)


def test_extra_states_of_others_stay_tensors(tmp_path):
    texts = (b"{}", b"[1]", b"\x80\x05K\x01.", b"", json.dumps({"format": "nf4"}).encode())
    state = {f"{i}._extra_state": torch.tensor(list(t), dtype=torch.uint8)
             for i, t in enumerate(texts)}  # fmt: skip
    save_file(state, tmp_path / "others")
    found = cq.load(tmp_path / "others")
    assert {k: bytes(v) for k, v in found.items()} == {
        f"{i}._extra_state": text for i, text in enumerate(texts)
    }


def test_damaged_states_in_files(tmp_path):
    state = QuantLinear.from_linear(linear(), "nf4").state_dict()
    said = json.loads(bytes(state["_extra_state"].tolist()))

    def damaged(**changes):
        text = json.dumps({**said, **changes}).encode()
        return {**state, "_extra_state": torch.tensor(list(text), dtype=torch.uint8)}

    for message, wrong in (
        ("unknown format", damaged(format="nf5")),
        ("version 7", damaged(version=7)),
        ("shape", damaged(shape=[24, -1])),
        ("fragments/9", damaged(layout="fragments/9")),
        ("packed is uint8", damaged(shape=[2**62, 256])),
        ("packed' is missing", {k: v for k, v in state.items() if k != "packed"}),
        ("scale is float32", {**state, "scale": state["scale"].view(torch.float32)}),
        ("both an array and a tensor", {**state, "weight": random(24, 256)}),
    ):
        save_file({f"q.{k}": v for k, v in wrong.items()}, tmp_path / "bad")
        with pytest.raises(cq.FormatError, match=rf"(?s)q\.weight.*{message}|{message}"):
            cq.load(tmp_path / "bad")


class Rotating(nn.Module):
    """A model with a buffer that is no part of its state_dict, as transformers' have for RoPE."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 64)
        self.up = nn.Linear(64, 16, bias=False)
        self.register_buffer("frequencies", torch.ones(4), persistent=False)


def test_weights_of_a_state_lie_in_several_shards(tmp_path):
    """As transformers parts a state_dict: by size, with no eye on what belongs together."""
    model = quantize_(build(), "nf4")
    state = model.state_dict()
    for i, part in enumerate(("packed", "scale", "_extra_state", "")):
        named = {k: v for k, v in state.items() if (k.rpartition(".")[2] == part if part else True)}
        save_file(named, tmp_path / f"model-{i}.safetensors")
        state = {k: v for k, v in state.items() if k not in named}
    found = cq.load(tmp_path)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantLinear)}
    for name, layer in layers.items():
        assert np.array_equal(found[f"{name}.weight"].packed, layer.packed.numpy())
    assert torch.equal(load_(build(seed=1), tmp_path)(TOKENS), model(TOKENS))
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(cq.FormatError, match=r"its tensor '.*scale' is missing"):
        cq.load(tmp_path)


def test_a_tied_weight_of_a_state_lies_once(tmp_path):
    q = cuquant.torch.QuantLinear(cq.quantize(torch.ones(8, 64), "int4")).state_dict()
    save_file({**{f"a.{k}": v for k, v in q.items()}, "b._extra_state": q["_extra_state"].clone()},
              tmp_path / "m.safetensors")  # fmt: skip
    assert list(cq.load(tmp_path / "m.safetensors")) == ["a.weight"]


def test_load_tells_of_buffers_that_stay_on_the_meta_device(tmp_path):
    weights = {"embed.weight": random(8, 64), "up.weight": cq.quantize(random(16, 64), "nf4")}
    cq.save(tmp_path / "w.safetensors", weights)
    with torch.device("meta"):
        empty = Rotating()
    with pytest.warns(UserWarning, match="1 buffers .* such as frequencies; fill them"):
        load_(empty, tmp_path / "w.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_(Rotating(), tmp_path / "w.safetensors")


def test_embeddings_of_a_float32_model_are_not_rounded_to_float16(tmp_path):
    embed = cq.quantize(random(8, 64).half(), "nf4")
    weights = {"embed.weight": embed, "up.weight": random(16, 64)}
    cq.save(tmp_path / "w.safetensors", weights)
    model = load_(Rotating(), tmp_path / "w.safetensors")
    exact = embed.dequantize(torch.float32)
    assert not torch.equal(exact, embed.dequantize().float())  # or this test says nothing
    assert torch.equal(model.embed.weight, exact)
    half = load_(Rotating().half(), tmp_path / "w.safetensors")
    assert torch.equal(half.embed.weight, embed.dequantize())
