"""Checkpoints of other libraries, and GGUF, in a model of torch's."""

import json
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import cuquant as cq

torch = pytest.importorskip("torch", reason="torch is optional")

from in_turn import in_turn  # noqa: E402

from cuquant.io.container.gguf import GgufReader  # noqa: E402
from cuquant.torch import QuantLinear, load_  # noqa: E402

nn = torch.nn
ROOT = Path("tests/data/checkpoints")
SETS = (
    "gptq-4bit", "gptq-4bit-actorder", "gptq-3bit", "bitsandbytes-nf4", "bitsandbytes-int8",
    "bitsandbytes-nf4-double", "awq-gemm-gptqmodel", "awq-autoawq-gemv",
    "ct-w4a16", "ct-w4a16-asym", "ct-w8a8-static", "ct-nvfp4",
    "ct-mxfp8", "ct-fp8-block", "hf-fp8-block128", "mlx-mxfp4", "modelopt-nvfp4", "torchao-int8",
)  # fmt: skip


class Norm(nn.Module):
    """A vector, as a norm has it."""

    def __init__(self, count):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(count))


def skeleton(path, **options):
    """A model of the modules that a checkpoint has weights for, by their names."""
    shapes = {n: tuple(v.shape) for n, v in cq.load(path, **options).items()}
    root = nn.Module()
    for name, shape in shapes.items():
        stem, _, last = name.rpartition(".")
        if last != "weight" or len(shape) > 2:
            continue
        parent = root
        *outer, inner = stem.split(".")
        for key in outer:
            if key not in parent._modules:
                parent.add_module(key, nn.Module())
            parent = parent.get_submodule(key)
        has_bias = f"{stem}.bias" in shapes
        if len(shape) == 1:
            made = Norm(shape[0])
        elif "embed" in inner:
            made = nn.Embedding(*shape)
        else:
            made = nn.Linear(shape[1], shape[0], bias=has_bias)
        parent.add_module(inner, made)
    return root


@pytest.mark.filterwarnings("ignore:.*have no place in the model")
@in_turn("name", SETS)
def test_layers_compute_with_the_codes_of_the_file(name):
    found = cq.load(ROOT / name, library="torch")
    model = load_(skeleton(ROOT / name), ROOT / name)
    layers = {k: m for k, m in model.named_modules() if isinstance(m, QuantLinear)}
    quantized = {
        k.removesuffix(".weight")
        for k, v in found.items()
        if isinstance(v, cq.QuantArray) and v.ndim == 2 and "embed" not in k
    }
    assert layers.keys() == quantized and quantized
    for key, layer in layers.items():
        assert cq.array_equal(layer.quantized, found[f"{key}.weight"])
        x = torch.randn(2, layer.in_features)
        wanted = cq.linear(x, found[f"{key}.weight"], found.get(f"{key}.bias"))
        assert torch.equal(layer(x), wanted)


def model_of(folder):
    """A small llama in a folder, and its arrays."""
    sys.path.insert(0, str(Path("tests/io")))
    try:
        from test_architectures import model
    finally:
        sys.path.pop(0)
    return model(folder)


def test_gguf_comes_by_transformers_names(tmp_path):
    arrays = model_of(tmp_path / "in")
    with pytest.warns(UserWarning, match=r"no tokenizer\.json"):
        cq.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf", format="q8_0")
    found = cq.load(tmp_path / "m.gguf", names="hf", library="torch")
    made = load_(skeleton(tmp_path / "in"), tmp_path / "m.gguf")
    attention = made.get_submodule("model.layers.0.self_attn")
    for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
        name = f"model.layers.0.self_attn.{part}.weight"
        layer = attention.get_submodule(part)
        assert cq.array_equal(layer.quantized, found[name]) and str(layer.format) == "q8_0"
        x = torch.randn(3, layer.in_features)
        exact = x @ torch.from_numpy(arrays[name].astype(np.float32)).T
        assert (layer(x) - exact).abs().max() < 0.1 * exact.abs().max()
    embedded = made.get_submodule("model.embed_tokens").weight
    assert torch.equal(embedded, found["model.embed_tokens.weight"].dequantize())


@pytest.mark.filterwarnings("ignore:there is no tokenizer")
def test_nvfp4_of_gguf_computes_with_the_scale_beside_it(tmp_path):
    """llama.cpp's order: the product with the blocks, times NAME.scale."""
    arrays = model_of(tmp_path / "in")
    held = {
        name: cq.quantize(value, "nvfp4") if "_proj" in name and value.shape[1] % 64 == 0 else value
        for name, value in arrays.items()
    }
    cq.save(tmp_path / "in" / "model.safetensors", held)
    cq.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf")
    with GgufReader(tmp_path / "m.gguf") as reader:
        name = "blk.0.attn_output"
        scale = reader.read(f"{name}.scale")
        shape = reader.tensors[f"{name}.weight"].shape
        blocks = cq.QuantArray.from_blocks(reader.read(f"{name}.weight"), "ggml_nvfp4", shape)
    assert scale.shape == (1,) and scale != 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is left over
        made = load_(skeleton(tmp_path / "in"), tmp_path / "m.gguf")
    layer = made.get_submodule("model.layers.0.self_attn.o_proj")
    assert str(layer.format) == "nvfp4"
    x = torch.randn(3, layer.in_features)
    want = (x.numpy() @ blocks.dequantize().T) * scale
    np.testing.assert_allclose(layer(x).numpy(), want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


def test_types_that_are_not_decoded_are_refused_by_name(tmp_path):
    path = Path("tests/data/gguf/gguf-random-blocks/random.gguf")
    made = skeleton(path)
    before = {name: type(module) for name, module in made.named_modules()}
    with pytest.raises(cq.FormatError, match=r"blk\.0\.iq\w+\.weight is IQ.*not decode"):
        load_(made, path)
    assert before == {name: type(module) for name, module in made.named_modules()}


def test_a_bias_that_counts_is_not_left_out(tmp_path):
    folder = tmp_path / "gptq"
    weight = cq.quantize(np.ones((32, 64), np.float32), "int4:32")
    bias = np.zeros(32, np.float32)
    cq.save(tmp_path / "w.safetensors", {"up.weight": weight, "up.bias": bias, "up.in_scale": bias})
    cq.convert(tmp_path / "w.safetensors", folder, "gptq")
    model = nn.Module()
    model.up = nn.Linear(64, 32, bias=False)
    with pytest.warns(UserWarning, match="2 tensors have no place in the model and are left out"):
        load_(model, folder)
    assert isinstance(model.up, QuantLinear)
    cq.save(tmp_path / "w.safetensors", {"up.weight": weight, "up.bias": bias + 1})
    cq.convert(tmp_path / "w.safetensors", tmp_path / "b", "gptq")
    model.up = nn.Linear(64, 32, bias=False)
    with pytest.raises(RuntimeError, match=r"the model has no up\.bias"):
        load_(model, tmp_path / "b")
    assert type(model.up) is nn.Linear


def test_a_folder_that_is_damaged_changes_nothing(tmp_path):
    folder = tmp_path / "gptq"
    weight = cq.quantize(np.ones((32, 64), np.float32), "int4:32")
    cq.save(tmp_path / "w.safetensors", {"up.weight": weight})
    cq.convert(tmp_path / "w.safetensors", folder, "gptq")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["bits"] = 8
    (folder / "config.json").write_text(json.dumps(config))
    model = nn.Module()
    model.up = nn.Linear(64, 32, bias=False)
    with pytest.raises(cq.FormatError, match=r"up\.weight"):
        load_(model, folder)
    assert type(model.up) is nn.Linear
