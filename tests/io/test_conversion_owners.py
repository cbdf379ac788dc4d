"""What convert writes, read by the owners of the kinds: each test needs the owner's library."""

import json

import numpy as np
import pytest

import cuquant as cq
from cuquant.io.checkpoint import Checkpoint
from cuquant.io.schema.compressed_tensors import group_of

RNG = np.random.default_rng(11)


def converted(folder, kind, *names, shape=(64, 256)):
    """Arrays of these formats, and the folder of a kind that holds them."""
    arrays = {
        f"layers.{i}.weight": cq.quantize(RNG.standard_normal(shape).astype(np.float16), name)
        for i, name in enumerate(names)
    }
    cq.save(folder / "in.safetensors", arrays)
    cq.convert(folder / "in.safetensors", folder / "out", kind)
    return arrays, folder / "out"


def tensors_of(folder):
    """All tensors by name, torch's."""
    safetensors = pytest.importorskip("safetensors.torch")
    return safetensors.load_file(folder / "model.safetensors")


COMPRESSED = (
    "int4", "uint4", "int3:32", "uint5:64", "int8", "int6:row", "fp8_e4m3", "fp8_e4m3:tensor",
    "fp8_e4m3:32x64", "mxfp4", "mxfp8",
)  # fmt: skip


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_reads_the_same_numbers(tmp_path, name):
    pytest.importorskip("compressed_tensors")
    torch = pytest.importorskip("torch")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

    arrays, out = converted(tmp_path, "compressed-tensors", name, "int7")
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    QuantizationConfig.model_validate(said)
    found = tensors_of(out)
    with Checkpoint(out) as c:
        for key, q in arrays.items():
            stem = key.removesuffix("weight")
            scheme = QuantizationScheme.model_validate(dict(group_of(c, stem)))
            own = {k.removeprefix(stem): v for k, v in found.items() if k.startswith(stem)}
            compressor = BaseCompressor.get_value_from_registry(scheme.format)
            weight = compressor.decompress(own, scheme)["weight"]
            want = torch.from_numpy(q.dequantize(np.float32))
            assert torch.equal(weight.float(), want.to(weight.dtype).float())


@pytest.mark.parametrize("name", ["nf4", "fp4:128", "nf4:32+dq"])
def test_bitsandbytes_reads_the_same_numbers(tmp_path, name):
    bnb = pytest.importorskip("bitsandbytes")
    arrays, out = converted(tmp_path, "bitsandbytes", name)
    found = tensors_of(out)
    ((key, q),) = arrays.items()
    parts = {k: v for k, v in found.items() if k.startswith(key + ".")}
    state = bnb.functional.QuantState.from_dict(parts, device="cpu")
    assert state.shape == q.shape
    state.dtype = bnb.functional.torch.float32
    weight = bnb.functional.dequantize_4bit(found[key], state)
    want = q.dequantize(np.float32)
    if q.format.rule.nested is None:
        np.testing.assert_array_equal(weight.numpy(), want)
    else:  # nested scales are rounded twice, and their sum once more
        np.testing.assert_allclose(weight.numpy(), want, rtol=3e-7)


@pytest.mark.parametrize("name", ["nf4:flat", "fp4:flat128", "int8+absmax"])
def test_bitsandbytes_reads_rows_that_blocks_do_not_divide(tmp_path, name):
    """49 columns: its kernel for CPUs is wrong where an even number is no multiple of a block."""
    bnb = pytest.importorskip("bitsandbytes")
    arrays, out = converted(tmp_path, "bitsandbytes", name, shape=(33, 49))
    found = tensors_of(out)
    ((key, q),) = arrays.items()
    if name == "int8+absmax":
        assert int(found["layers.0.weight_format"]) == 0
        weight = bnb.functional.int8_vectorwise_dequant(found[key], found["layers.0.SCB"])
    else:
        parts = {k: v for k, v in found.items() if k.startswith(key + ".")}
        state = bnb.functional.QuantState.from_dict(parts, device="cpu")
        state.dtype = bnb.functional.torch.float32
        weight = bnb.functional.dequantize_4bit(found[key], state)
    np.testing.assert_array_equal(weight.numpy(), q.dequantize(np.float32))


MLX = ("mxfp4", "mxfp8", "int4", "uint4:32", "int3:64", "q4_1", "q8_0")


@pytest.mark.parametrize("name", MLX)
def test_mlx_reads_the_same_numbers(tmp_path, name):
    mx = pytest.importorskip("mlx.core")
    arrays, out = converted(tmp_path, "mlx", name)
    said = json.loads((out / "config.json").read_text())["quantization"]
    found = mx.load(str(out / "model.safetensors"))
    ((key, q),) = arrays.items()
    stem = key.removesuffix("weight")
    weight = mx.dequantize(
        found[key], found[f"{stem}scales"], found.get(f"{stem}biases"), said["group_size"],
        said["bits"], mode=said["mode"],
    )  # fmt: skip
    np.testing.assert_array_equal(np.array(weight.astype(mx.float32)), q.dequantize(np.float32))


@pytest.mark.parametrize("name", ["fp8_e4m3:64x128", "fp8_e4m3:tensor"])
def test_transformers_reads_the_same_numbers_of_fp8(tmp_path, name):
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    arrays, out = converted(tmp_path, "fp8", name)
    found = tensors_of(out)
    ((key, q),) = arrays.items()
    operation = module.Fp8Dequantize(None)
    torch = pytest.importorskip("torch")
    weight = operation._dequantize_one(found[key], found[f"{key}_scale_inv"], torch.float32)
    np.testing.assert_array_equal(weight.numpy(), q.dequantize(np.float32))


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "gemma2"])
def test_transformers_reads_a_model_of_gguf(tmp_path, model_type):
    """The same logits, also of what the GGUF file becomes: rows, norms and settings are right."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch = pytest.importorskip("torch")
    config = transformers.AutoConfig.for_model(
        model_type, num_hidden_layers=2, hidden_size=128, num_attention_heads=4, head_dim=32,
        num_key_value_heads=2, intermediate_size=256, max_position_embeddings=64, vocab_size=96,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for part in model.parameters():
            if part.ndim == 1:  # norms of multiples of 1/64, of which 1 more are float32 too
                part.copy_(torch.randint(1, 99, part.shape) / 64)
    model.save_pretrained(tmp_path / "in")
    with pytest.warns(UserWarning, match="tokenizer"):
        cq.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf")
    plain = pytest.warns(UserWarning, match="no array is quantized")
    with plain, pytest.warns(UserWarning, match="tokens stay behind"):
        cq.convert(tmp_path / "m.gguf", tmp_path / "out", "fp8")
    ids = torch.arange(10)[None] + 3
    want = model(ids).logits
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert torch.equal(load(tmp_path, gguf_file="m.gguf").eval()(ids).logits, want)
    assert torch.equal(load(tmp_path / "out").eval()(ids).logits, want)


GPTQ = (
    "int4:32", "uint4:32", "uint4", "int8:32+float16", "int3:32", "int2:32", "int4:row",
    "uint4:32+permuted",
)  # fmt: skip


@pytest.mark.parametrize("name", GPTQ)
def test_gptqmodel_reads_the_same_numbers(tmp_path, name):
    """Its layer decodes in float16, with one rounding."""
    torch = pytest.importorskip("torch")
    qlinear = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch")
    weight = cq.quantize(RNG.standard_normal((64, 256)).astype(np.float16), name)
    if weight.format.permuted:
        order = RNG.permutation(256).astype(np.int32)
        weight = weight._with(components={**weight.components, "permutation": order})
    cq.save(tmp_path / "in.safetensors", {"up.weight": weight})
    cq.convert(tmp_path / "in.safetensors", tmp_path / "out", "gptq")
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    layer = qlinear.TorchLinear(
        **{key: said[key] for key in ("bits", "group_size", "sym", "desc_act")},
        in_features=256, out_features=64, bias=False, pack_dtype=torch.int32, register_buffers=True,
    )  # fmt: skip
    found = tensors_of(tmp_path / "out")
    layer.load_state_dict({key.removeprefix("up."): value for key, value in found.items()})
    layer.post_init()
    decoded = layer.dequantize_weight().T.float().numpy()
    assert np.array_equal(decoded, weight.dequantize(np.float16).astype(np.float32))


@pytest.mark.parametrize("name", ["int4:32", "uint4:64", "uint4:128+bfloat16"])
def test_awq_of_gptqmodel_reads_the_same_numbers(tmp_path, name):
    pytest.importorskip("torch")
    packing = pytest.importorskip("gptqmodel.quantization.awq.utils.packing_utils")
    arrays, out = converted(tmp_path, "awq", name)
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    found = tensors_of(out)
    for key, q in arrays.items():
        stem = key.removesuffix("weight")
        parts = (found[stem + end] for end in ("qweight", "qzeros", "scales"))
        decoded = packing.dequantize_gemm(*parts, said["bits"], said["group_size"])
        rounded = q.dequantize(np.float16 if "bfloat16" not in name else "bfloat16")
        assert np.array_equal(decoded.T.float().numpy(), rounded.astype(np.float32))
