"""Checkpoints that another library has quantized are recognised and left alone."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

import cuquant as cq
from cuquant.cli import app
from cuquant.io import foreign
from cuquant.io.container.safetensors import SafetensorsReader, SafetensorsWriter
from cuquant.io.streaming import quantize_file

NF4 = cq.get_format("nf4")


def checkpoint(path, tensors):
    """A file of zeros: {name: (tag, shape)}."""
    with SafetensorsWriter(path, tensors) as writer:
        for name, info in writer.tensors.items():
            writer.write_raw(name, bytes(info.nbytes))
    return path


# What each library writes for a Linear, as its own files have it; and how the error names it.
LAYERS = {
    "gptq": (
        "GPTQ", {"qweight": ("I32", (16, 128)), "qzeros": ("I32", (1, 16)),
                 "scales": ("F16", (64, 128)), "g_idx": ("I32", (128,))},
    ),
    "awq gemm": (
        "AWQ", {"qweight": ("I32", (256, 8)), "qzeros": ("I32", (2, 8)),
                "scales": ("F16", (64, 64))},
    ),
    "awq gemv_fast": (
        "AWQ", {"qweight": ("I16", (16, 256)), "qzeros": ("F16", (8, 64)),
                "scales": ("F16", (8, 64))},
    ),
    "TensorRT-LLM int4": (
        "TensorRT-LLM", {"weight": ("I8", (128, 32)), "weights_scaling_factor": ("F16", (64, 64))},
    ),
    "TensorRT-LLM int8": (
        "TensorRT-LLM", {"weight": ("I8", (128, 64)), "per_channel_scale": ("F16", (64, 64))},
    ),
    "TensorRT-LLM fp8": (
        "TensorRT-LLM",
        {"weight": ("F8_E4M3", (128, 64)), "weights_scaling_factor": ("F32", (1,))},
    ),
    "smooth quantization": (
        "another library", {"weight": ("I8", (128, 64)), "dequant_scale": ("F32", (64, 64))},
    ),
    "fp8 in blocks": (
        "FP8", {"weight": ("F8_E4M3", (512, 1024)), "weight_scale_inv": ("F32", (4, 64))},
    ),
    "fp8 of DeepSeek's own": (
        "FP8", {"weight": ("F8_E4M3", (128, 8192)), "scale": ("F32", (2, 64))},
    ),
    "fp8 of Mistral": (
        "FP8", {"weight": ("F8_E4M3", (8, 8)), "qscale_weight": ("F32", ()),
                "bias": ("F32", (2, 64))},
    ),
    "fp8 of FBGEMM": (
        "FBGEMM", {"weight": ("F8_E4M3", (40, 96)), "weight_scale": ("F32", (40, 64)),
                   "input_scale_ub": ("F32", (1,))},
    ),
    "fp8 static": (
        "FP8", {"weight": ("F8_E4M3", (8, 8)), "weight_scale": ("BF16", (8, 64)),
                "input_scale": ("BF16", (1,))},
    ),
    "compressed-tensors": (
        "compressed-tensors", {"weight_packed": ("I32", (24, 12)), "weight_shape": ("I64", (2,)),
                               "weight_scale": ("F16", (24, 64))},
    ),
    "compressed-tensors, int8": (
        "another library", {"weight": ("I8", (64, 96)), "weight_scale": ("BF16", (64, 64)),
                            "weight_zero_point": ("I8", (64, 1))},
    ),
    "compressed-tensors, sparse": (
        "compressed-tensors", {"compressed": ("BF16", (64, 64)), "bitmask": ("U8", (64, 8)),
                               "shape": ("I64", (2, 1))},
    ),
    "nvfp4 of ModelOpt": (
        "ModelOpt", {"weight": ("U8", (64, 32)), "weight_scale": ("F8_E4M3", (64, 4)),
                     "weight_scale_2": ("F32", ()), "more": ("F32", (2, 64))},
    ),
    "int4 of ModelOpt": (
        "another library", {"weight": ("U8", (64, 128)), "weight_scale": ("F32", (128, 64))},
    ),
    "bitsandbytes, 4 bits": (
        "bitsandbytes", {"weight": ("U8", (768, 1)), "weight.absmax": ("F32", (2, 64)),
                         "weight.quant_map": ("F32", (16,)),
                         "weight.quant_state.bitsandbytes__nf4": ("U8", (77,))},
    ),
    "bitsandbytes, 8 bits": (
        "bitsandbytes", {"weight": ("I8", (24, 50)), "SCB": ("F32", (2, 64)),
                         "weight_format": ("U8", ())},
    ),
    "comfyui": (
        "ComfyUI", {"weight": ("I8", (24, 48)), "weight_scale": ("F32", ()),
                    "comfy_quant": ("U8", (29,)), "bias": ("F32", (2, 64))},
    ),
    "hqq": ("HQQ", {"W_q": ("U8", (32, 32)), "scale": ("F16", (2, 64)), "zero": ("F16", (2, 64))}),
    "mlx": (
        "MLX", {"weight": ("U32", (96, 16)), "scales": ("F16", (96, 64)),
                "biases": ("F16", (96, 64))},
    ),
    "mlx, mxfp4": ("MLX", {"weight": ("U32", (64, 8)), "scales": ("U8", (64, 2)),
                           "more": ("F32", (2, 64))}),
    "mxfp4 of gpt-oss": (
        "MXFP4", {"down_proj_blocks": ("U8", (3, 64, 2, 16)),
                  "down_proj_scales": ("U8", (3, 64, 2)), "down_proj_bias": ("BF16", (3, 64))},
    ),
    "torchao": (
        "torchao", {"_weight_qdata": ("I8", (64, 64)), "_weight_scale": ("F32", (64, 64)),
                    "_weight_zero_point": ("I8", (64, 1))},
    ),
    "quanto": (
        "optimum-quanto", {"weight._data._data": ("U8", (32, 64)),
                           "weight._scale": ("BF16", (64, 64)),
                           "weight._shift": ("BF16", (64, 64))},
    ),
    "aqlm": (
        "AQLM", {"codes": ("I16", (24, 12, 1)), "codebooks": ("F16", (1, 64, 1, 8)),
                 "scales": ("F16", (24, 1, 1, 1))},
    ),
    "bitsandbytes before its quant_state": (
        "bitsandbytes", {"weight": ("U8", (768, 1)), "weight.absmax": ("F32", (2, 64))},
    ),
    "int8 embeddings": (
        "another library", {"weight": ("I8", (96, 64)), "scale": ("F32", (96, 64))},
    ),
    "a weight of ours, prepacked, without its metadata": (
        "cuquant", {"weight.codes": ("U32", (1, 2, 64)), "weight.scale": ("F32", (1, 2, 64))},
    ),
    "experts without modules": (
        "FP8", {"gate_up_proj": ("F8_E4M3", (4, 8, 8)), "gate_up_proj_scale": ("F32", (4, 64))},
    ),
    "a state_dict of cuquant.torch": (
        "cuquant", {"packed": ("U8", (8, 32)), "scale": ("F32", (8, 64)),
                    "_extra_state": ("U8", (99,))},
    ),
    "a file of ours without its metadata": (
        "cuquant", {"weight.packed": ("U8", (8, 32)), "weight.scale": ("F32", (8, 64))},
    ),
}  # fmt: skip


def quantize_here(folder, name="model.safetensors"):
    return list(quantize_file(folder / name, folder / "out", NF4, device="cpu"))


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("module", ["", "model.layers.0.mlp."])
def test_what_others_have_quantized_is_refused_by_name(kind, module, tmp_path):
    owner, layer = LAYERS[kind]
    tensors = {module + name: spec for name, spec in layer.items()}
    checkpoint(
        tmp_path / "model.safetensors", {**tensors, "model.embed.weight": ("BF16", (96, 128))}
    )
    with pytest.raises(cq.FormatError, match=r"quantized already, by .*original") as caught:
        quantize_here(tmp_path)
    message = str(caught.value)
    assert owner in message and str(tmp_path / "model.safetensors") in message
    assert any(repr(name) in message for name in tensors), "a tensor shows it"
    assert os.listdir(tmp_path) == ["model.safetensors"], "nothing is written"


# ---- ordinary models ------------------------------------------------------------------------

W = ("F32", (8, 64))
ORDINARY = {
    "LayerScale": {"block.weight": W, "block.scale": W, "block.scales": W},
    "a scale of its own": {"scale": W, "scales": W, "logit_scale": ("F32", ())},
    "Swin's indices beside its scale": {
        "attn.relative_position_index": ("I64", (49, 49)), "attn.logit_scale": W, "attn.weight": W
    },
    "uint8 masks": {"attn.mask": ("U8", (8, 8)), "attn.weight": W, "attn.scale": W},
    "weights in training with learned scales": {"l.weight": W, "l.weight_scale": W,
                                                "l.weight_scale_inv": W},
    "codebooks of VQ": {"quantize.codebooks": W, "quantize.codes": W, "quantize.weight": W},
    "ids": {"embeddings.position_ids": ("I64", (1, 512)), "embeddings.weight": W},
    "float8 without scales": {"l.weight": ("F8_E4M3", (8, 8)), "m.weight": W},
    "ActNorm": {"norm._scale": W, "norm._shift": W},
    "attention in its own words": {"attn.W_q": W, "attn.W_k": W, "attn.scale": ("F32", ())},
    "a state of its own": {"te.weight": W, "te.scale": W, "te._extra_state": ("U8", (9,))},
    "training with fake quantization": {
        "l.weight": W, "l.weight_fake_quant.scale": ("F32", (1,)),
        "l.weight_fake_quant.zero_point": ("I32", (1,)),
        "l.weight_fake_quant.fake_quant_enabled": ("U8", (1,)), "l.weight_global_scale": W,
        "l.input_scale": W,
    },
    "LoRA": {"l.lora_A.weight": W, "l.lora_B.weight": W, "l.B": W, "l.s": W},
    "weight_norm": {"l.weight_g": W, "l.weight_v": W, "l.codes": W, "l.absmax": W},
    "a norm of integers": {"norm.weight": ("I8", (64,)), "norm.scale": ("F32", (64,)), "w": W},
    "a norm stored in 8 bits": {"norm.weight": ("F8_E4M3", (64,)), "norm.scale": W},
    "a vector of its own": {"steps": ("I32", (8,)), "steps_scale": W, "ids": ("F8_E4M3", (8,)),
                            "ids_scale": W},
    "statistics of calibration": {"l.weight": W, "l.weight.absmax": W, "l.SCB": W,
                                  "l.weight_scale": W, "l.pre_quant_scale": W,
                                  "l.input_scale_ub": ("F32", (1,))},
    "codes of VQ beside its codebooks": {"vq.codes": ("I32", (8, 8)), "vq.codebooks": W},
    "codes of VQ beside a scale": {"vq.codes": ("I32", (8,)), "vq.scale": W},
    "masks of blocks beside scales": {"attn_blocks": ("U8", (8, 8)), "attn_scales": W},
    "masks in bits": {"l.compressed": W, "l.bitmask": W},
    "bookkeeping of a graph": {"conv.g_idx": ("I32", (64,)), "conv.weight": W, "conv.scales": W},
    "int8 without scales": {"embeddings.weight": ("I8", (64, 64)), "w": W},
    "names that end alike": {"a.unqweight": ("I32", (8, 8)), "a.unqzeros": ("I32", (8, 8)), "w": W},
}  # fmt: skip


@pytest.mark.parametrize("kind", ORDINARY)
def test_ordinary_models_are_quantized(kind, tmp_path):
    checkpoint(tmp_path / "model.safetensors", ORDINARY[kind])
    (tmp_path / "config.json").write_text('{"model_type": "llama", "quantization_config": null}')
    done = quantize_here(tmp_path)
    floats = {name for name, spec in ORDINARY[kind].items() if spec == W}
    assert {report.name for report in done if report.reason is None} == floats


# ---- shards ---------------------------------------------------------------------------------


def test_codes_and_scales_in_two_shards(tmp_path):
    one = {"l.scales": ("F16", (64, 128)), "norm.weight": ("F16", (128,))}
    two = {"l.qweight": ("I32", (16, 128)), "l.g_idx": ("I32", (128,))}
    checkpoint(tmp_path / "model-00001-of-00002.safetensors", one)
    checkpoint(tmp_path / "model-00002-of-00002.safetensors", two)
    index = {"weight_map": {n: f"model-0000{i}-of-00002.safetensors"
                            for i, part in ((1, one), (2, two)) for n in part}}  # fmt: skip
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(cq.FormatError, match=r"'l.qweight' .* in 'model-00002-of-00002"):
        quantize_here(tmp_path, "model-00001-of-00002.safetensors")


@pytest.mark.parametrize("ending", ["weight_scale", "weight_scale_inv"])
def test_scales_alone_in_a_shard(ending, tmp_path):
    checkpoint(tmp_path / "model.safetensors", {f"l.{ending}": W, "m.weight": W})
    with pytest.raises(cq.FormatError, match=f"l.{ending}"):
        quantize_here(tmp_path)


def test_an_index_does_not_lead_out_of_its_folder(tmp_path):
    inside = tmp_path / "in"
    inside.mkdir()
    checkpoint(tmp_path / "secret.safetensors", LAYERS["mlx"][1])
    checkpoint(inside / "model.safetensors", {"w": W})
    names = {"w": "model.safetensors", "x": "../secret.safetensors", "y": "none.safetensors"}
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert len(quantize_here(inside)) == 1


# ---- what lies beside -----------------------------------------------------------------------

CONFIGS = {
    "gptq": ("config.json", {"quantization_config": {"quant_method": "gptq"}}, "GPTQ"),
    "in capitals": ("config.json", {"quantization_config": {"quant_method": "AWQ"}}, "AWQ"),
    "unknown": ("config.json", {"quantization_config": {"quant_method": "newer"}}, "newer"),
    "endless": (
        "config.json", {"quantization_config": {"quant_method": "x" * 10_000}}, "another library"
    ),
    "no method": ("config.json", {"quantization_config": {"bits": 4}}, "another library"),
    "mlx, under both keys": (
        "config.json", {"quantization": {"group_size": 64, "bits": 4},
                        "quantization_config": {"group_size": 64, "bits": 4}}, "MLX",
    ),
    "TensorRT-LLM": (
        "config.json", {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}},
        "TensorRT-LLM",
    ),
    "TensorRT-LLM, groups": (
        "config.json", {"quantization": {"quant_algo": "W4A16_AWQ", "group_size": 64}},
        "TensorRT-LLM",
    ),
    "mlx, other bits": ("config.json", {"quantization": {"bits": 4}}, "MLX"),
    "mlx": ("config.json", {"quantization": {"group_size": 64, "bits": 4}}, "MLX"),
    "old": ("config.json", {"compression_config": {"quant_method": "compressed-tensors"}},
            "compressed-tensors"),
    "quanto": ("quanto_qmap.json", {"lm_head": {"weights": "qint4"}}, "optimum-quanto"),
    "autogptq": ("quantize_config.json", {"bits": 4}, "GPTQ or AWQ"),
    "a part": (
        "config.json", {"text_config": {"quantization_config": {"quant_method": "awq"}}}, "AWQ"
    ),
    "autoawq": ("quant_config.json", {"w_bit": 4}, "AWQ"),
    "modelopt": ("hf_quant_config.json", {"quantization": {}}, "ModelOpt"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_what_a_configuration_says_counts(case, tmp_path):
    name, config, owner = CONFIGS[case]
    checkpoint(tmp_path / "model.safetensors", {"lm_head.weight": W})
    (tmp_path / name).write_text(json.dumps(config))
    with pytest.raises(cq.FormatError, match=rf"by .*{owner}.* \({name}") as caught:
        quantize_here(tmp_path)
    assert len(str(caught.value)) < 600
    assert sorted(os.listdir(tmp_path)) == sorted([name, "model.safetensors"])


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", "[" * 100_000, '{"quantization_config": 3}', "\0",
        '{"quantization": {"codebooks": 8, "codebook_size": 2048}}',  # of sounds, by VQ
    ],
)  # fmt: skip
def test_a_configuration_that_says_nothing(text, tmp_path):
    checkpoint(tmp_path / "model.safetensors", {"w": W})
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / name).write_text(text)
    assert len(quantize_here(tmp_path)) == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no FIFOs")
def test_a_configuration_that_is_no_file(tmp_path):
    checkpoint(tmp_path / "model.safetensors", {"w": W})
    os.mkfifo(tmp_path / "config.json")
    os.symlink("/dev/zero", tmp_path / "quantize_config.json")
    with (tmp_path / "hf_quant_config.json").open("wb") as file:
        file.truncate(20 << 30)  # sparse
    assert len(quantize_here(tmp_path)) == 1


def test_an_fp8_file_may_not_replace_itself(tmp_path):
    w = np.random.default_rng(0).standard_normal((128, 256)).astype(np.float32)
    scale = np.abs(w).reshape(1, 128, 2, 128).max((1, 3)) / 448
    stored = (w / np.repeat(scale, 128, 1)).astype(ml_dtypes.float8_e4m3fn)
    path = tmp_path / "model.safetensors"
    cq.save(path, {"l.weight": stored, "l.weight_scale_inv": scale})
    before = path.read_bytes()
    with pytest.raises(cq.FormatError, match="FP8"):
        list(quantize_file(path, path, NF4, device="cpu"))
    assert path.read_bytes() == before
    with SafetensorsReader(path) as reader:
        assert foreign.recognise(reader).owner.startswith("FP8")


def test_the_command_says_it_in_one_line(tmp_path):
    source = checkpoint(tmp_path / "gptq.safetensors", LAYERS["gptq"][1])
    result = CliRunner().invoke(app, ["quantize", str(source), "-o", str(tmp_path / "out")])
    (line,) = result.output.splitlines()
    assert result.exit_code == 1
    assert line.startswith(f"error: {source}: is quantized already, by GPTQ (tensor 'qweight'")
    assert os.listdir(tmp_path) == ["gptq.safetensors"]
