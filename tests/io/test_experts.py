"""Arrays of several experts, [E, N, K], in files of other kinds."""

import json
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import cuquant as cq
from cuquant.io.architectures.names import ARCHITECTURES
from cuquant.io.container.gguf import GgufReader, GgufWriter
from cuquant.io.container.safetensors import SafetensorsReader, SafetensorsWriter
from cuquant.io.entries import Entry
from cuquant.io.experts import split

RNG = np.random.default_rng(5)
pytestmark = pytest.mark.filterwarnings("ignore:the architecture is not known")


def saved(path, fmt, shape=(3, 64, 96), name="experts.weight"):
    """A file of ours with an array of experts, and the array."""
    q = cq.quantize(RNG.standard_normal(shape).astype(np.float16), fmt)
    cq.save(path, {name: q})
    return q


def test_compressed_tensors_has_them_in_one_array(tmp_path):
    kinds = {
        "int4:32": "pack-quantized, 4 bits", "int3:row": "pack-quantized, 3 bits",
        "q4_0": "pack-quantized, 4 bits", "mxfp4": "mxfp4-pack-quantized",
        "mxfp8": "mxfp8-quantized", "fp8_e4m3": "float-quantized",
        "fp8_e4m3:32x32": "float-quantized", "fp8_e4m3:64x96": "float-quantized",
        "nvfp4+divisor": "nvfp4-pack-quantized",
        "nvfp4+divisor+per_matrix": "nvfp4-pack-quantized",
    }  # fmt: skip
    for i, (fmt, becomes) in enumerate(kinds.items()):
        q = saved(tmp_path / "in.safetensors", fmt)
        (step,) = cq.convert(tmp_path / "in.safetensors", tmp_path / f"{i}", "compressed-tensors")
        assert (step.becomes, step.rounds) == (becomes, False)
        found = cq.load(tmp_path / f"{i}")["experts.weight"]
        assert found.shape == q.shape
        np.testing.assert_array_equal(found.dequantize("float32"), q.dequantize("float32"), fmt)
        if "experts.weight_shape" in step.specs:
            with SafetensorsReader(tmp_path / f"{i}" / "model.safetensors") as reader:
                assert reader.read("experts.weight_shape").tolist() == list(q.shape)


@pytest.mark.parametrize(
    ("fmt", "why"),
    [("uint4:32", "zero points of experts"), ("fp8_e4m3:48x32", "share"), ("int8:tensor", "share")],
)  # fmt: skip
def test_what_experts_would_share_is_refused_by_name(tmp_path, fmt, why):
    saved(tmp_path / "in.safetensors", fmt)
    with pytest.raises(ValueError, match=rf"'experts\.weight'.*{why}"):
        cq.convert(tmp_path / "in.safetensors", tmp_path / "out", "compressed-tensors")
    assert not (tmp_path / "out").exists()
    (step,) = cq.convert(
        tmp_path / "in.safetensors", tmp_path / "out", "compressed-tensors", requantize=True
    )
    assert step.rounds and step.recipe is not None


# ---- scales of their own ------------------------------------------------------------------------


def checkpoint(folder, tensors, config=None, metadata=None):
    """A folder with these tensors, as another library would write them."""
    folder.mkdir(exist_ok=True)
    specs = {name: (value.dtype, value.shape) for name, value in tensors.items()}
    with SafetensorsWriter(folder / "model.safetensors", specs, metadata or {}) as writer:
        for name, value in tensors.items():
            writer.write(name, value)
    (folder / "config.json").write_text(json.dumps(config or {}))


def e4m3(bits):
    return bits.view(ml_dtypes.float8_e4m3fn)


def owners(packed, scale):
    """float32 numbers of nibbles [E, N, K / 2], the low one first, and scales that they have."""
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.where(codes & 8, -levels[codes & 7], levels[codes & 7])
    return values * np.repeat(scale, 16, -1)


PACKED = RNG.integers(0, 256, (3, 8, 32), np.uint8)
BYTES = RNG.integers(0, 0x7F, (3, 8, 4)).astype(np.uint8)
WORLD = np.array([3.3, 0.7, 1900.1], np.float32)
NVFP4 = ("weight_packed", "weight_scale", "weight_global_scale")


@pytest.mark.parametrize("axes", [(), (1,), (1, 1)])
@pytest.mark.parametrize("kind", ["compressed-tensors", "modelopt", "torchao"])
def test_each_expert_has_its_global_scale(tmp_path, kind, axes):
    """All three libraries' numbers, in their order of operations."""
    world, scale = WORLD.reshape(3, *axes), e4m3(BYTES)
    wide, spread = scale.astype(np.float32), WORLD[:, None, None]
    if kind == "torchao":
        ends = ("qdata", "scale", "per_tensor_scale")
        tensors = {
            f"up._weight_{end}": v for end, v in zip(ends, (PACKED, scale, world), strict=True)
        }
        said = json.dumps({"_type": "NVFP4Tensor", "_data": {"orig_dtype": "torch.float32"}})
        checkpoint(
            tmp_path / "in", tensors, metadata={"tensor_names": '["up.weight"]', "up.weight": said}
        )
    else:
        ends = NVFP4 if kind != "modelopt" else ("weight", "weight_scale", "weight_scale_2")
        tensors = {f"up.{end}": v for end, v in zip(ends, (PACKED, scale, world), strict=True)}
        checkpoint(tmp_path / "in", tensors, {"quantization_config": {"quant_method": kind}})
    q = cq.load(tmp_path / "in")["up.weight"]
    divides = kind == "compressed-tensors"
    assert str(q.format) == ("nvfp4+divisor+per_matrix" if divides else "nvfp4+per_matrix")
    want = owners(PACKED, wide / spread if divides else wide * spread)
    np.testing.assert_array_equal(q.dequantize("float32"), want)
    x, experts = RNG.standard_normal((5, 64)).astype(np.float32), np.array([2, 0, 1, 1, 2])
    y = np.einsum("tk,tnk->tn", x, want[experts])
    np.testing.assert_allclose(cq.grouped_linear(x, q, experts), y, atol=1e-3, rtol=1e-5)
    for i in range(3):
        np.testing.assert_array_equal(q[i].dequantize("float32"), want[i])


def test_global_scales_that_fit_no_experts_are_refused(tmp_path):
    for world, shape in ((WORLD, (3, 8, 32)), (WORLD[:2], (3, 8, 32)), (WORLD, (8, 32))):
        packed, scale = PACKED.reshape(-1, 8, 32), e4m3(BYTES)
        if world is WORLD and shape[0] == 3:
            world = world.reshape(1, 3)
        parts = (packed[0], scale[0]) if len(shape) == 2 else (packed, scale)
        tensors = {f"up.{end}": v for end, v in zip(NVFP4, (*parts, world), strict=True)}
        checkpoint(tmp_path / "in", tensors)
        with pytest.raises(cq.FormatError, match=r"'up\.weight': global scales \[.*do not fit"):
            cq.load(tmp_path / "in")


def test_compressed_tensors_gives_its_divisors_back(tmp_path):
    """The same bytes of every tensor, of a real file and of experts."""
    parts = (PACKED, e4m3(BYTES), WORLD[:, None, None])
    tensors = {f"up.{end}": v for end, v in zip(NVFP4, parts, strict=True)}
    checkpoint(tmp_path / "experts", tensors, {"torch_dtype": "float16"})
    for i, source in enumerate((tmp_path / "experts", Path("tests/data/checkpoints/ct-nvfp4"))):
        cq.convert(source, tmp_path / f"out{i}", "compressed-tensors")
        (file,) = source.glob("*.safetensors")
        with (
            SafetensorsReader(file) as was,
            SafetensorsReader(tmp_path / f"out{i}" / "model.safetensors") as made,
        ):
            seen = [name for name in was.tensors if name.endswith(NVFP4)]
            assert len(seen) >= 3
            for name in seen:
                assert was.tensors[name].shape == made.tensors[name].shape
                assert was.raw(name).tobytes() == made.raw(name).tobytes()


@pytest.mark.parametrize("axes", [(), (1,), (1, 1)])
def test_each_expert_has_a_scale_of_its_own(tmp_path, axes):
    """One for a matrix, of 8-bit floats and integers; rows of 20 are no multiple of 8."""
    for i, dtype in enumerate((ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8)):
        codes = RNG.integers(-60, 60, (3, 5, 20)).astype(dtype)
        tensors = {"up.weight": codes, "up.weight_scale": WORLD.reshape(3, *axes)}
        config = {"quantization_config": {"quant_method": "compressed-tensors"}}
        checkpoint(tmp_path / f"{i}", tensors, config)
        q = cq.load(tmp_path / f"{i}")["up.weight"]
        want = codes.astype(np.float32) * WORLD[:, None, None]
        np.testing.assert_array_equal(q.dequantize("float32"), want)
        np.testing.assert_array_equal(q[1].dequantize("float32"), want[1])
        x = RNG.standard_normal((4, 20)).astype(np.float32)
        found = cq.grouped_linear(x, q, np.array([0, 2, 2, 1]))
        y = np.einsum("tk,tnk->tn", x, want[[0, 2, 2, 1]])
        np.testing.assert_allclose(found, y, rtol=1e-4, atol=1)


@pytest.mark.parametrize("shape", [(3, 5, 1), (3, 5)])
def test_each_row_of_experts_has_a_scale(tmp_path, shape):
    scale = RNG.random(shape).astype(np.float32)
    for i, dtype in enumerate((ml_dtypes.float8_e4m3fn, np.int8)):
        codes = RNG.integers(-60, 60, (3, 5, 20)).astype(dtype)
        tensors = {"up.weight": codes, "up.weight_scale": scale}
        config = {"quantization_config": {"quant_method": "compressed-tensors"}}
        checkpoint(tmp_path / f"{i}", tensors, config)
        q = cq.load(tmp_path / f"{i}")["up.weight"]
        assert q.format.block_size == "row"
        want = codes.astype(np.float32) * scale.reshape(3, 5, 1)
        np.testing.assert_array_equal(q.dequantize("float32"), want)


# ---- names ---------------------------------------------------------------------------------------

CONFIG = {
    "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "vocab_size": 32,
    "rope_theta": 5e5, "num_experts_per_tok": 2,
}  # fmt: skip
QWEN = {"model_type": "qwen3_moe", "num_experts": 3, "moe_intermediate_size": 96,
        "norm_topk_prob": True}  # fmt: skip
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 3}
PARTS = {
    "qwen3_moe": ("mlp.experts.{}.", "gate_proj", "down_proj", "up_proj", "mlp.gate"),
    "mixtral": ("block_sparse_moe.experts.{}.", "w1", "w2", "w3", "block_sparse_moe.gate"),
}


def model(folder, more, dtype=np.float16):
    """A folder with a model of three experts, and its arrays."""
    stem, gate, down, up, router = PARTS[more["model_type"]]
    shapes = {"model.embed_tokens.weight": (32, 64), "model.norm.weight": (64,)}
    layer = "model.layers.0."
    shapes |= {f"{layer}self_attn.{n}_proj.weight": (64, 64) for n in "qkvo"}
    shapes[f"{layer}{router}.weight"] = (3, 64)
    for expert in range(3):
        own = layer + stem.format(expert)
        shapes |= {f"{own}{gate}.weight": (96, 64), f"{own}{up}.weight": (96, 64)}
        shapes[f"{own}{down}.weight"] = (64, 96)
    arrays = {name: RNG.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    folder.mkdir()
    cq.save(folder / "model.safetensors", arrays)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **more}))
    return arrays


def values(array):
    return array.dequantize("float32") if isinstance(array, cq.QuantArray) else np.float32(array)


@pytest.mark.filterwarnings("ignore:there is no tokenizer")
@pytest.mark.filterwarnings("ignore:tokens stay behind")
@pytest.mark.parametrize("more", [QWEN, MIXTRAL], ids=["qwen3moe", "mixtral"])
def test_experts_are_one_array_in_gguf_and_come_apart_again(tmp_path, more):
    arrays = model(tmp_path / "in", more)
    cq.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf", format="q4_0")
    with GgufReader(tmp_path / "m.gguf") as reader:
        told, tensors = reader.metadata, reader.tensors
        name = told["general.architecture"]
        assert name == ("qwen3moe" if more is QWEN else "llama")
        assert told[f"{name}.expert_count"] == 3 and told[f"{name}.expert_used_count"] == 2
        found = tensors["blk.0.ffn_down_exps.weight"]
        assert (found.type.name, found.shape) == ("Q4_0", (3, 64, 96))
        assert tensors["blk.0.ffn_gate_inp.weight"].type.name == "F32"  # as llama.cpp has it
    by_hf = cq.load(tmp_path / "m.gguf", names="hf")
    assert by_hf.keys() == arrays.keys()
    for key, value in arrays.items():
        is_plain = value.ndim == 1 or "gate.weight" in key
        want = value if is_plain else cq.quantize(value, "q4_0").dequantize("float32")
        np.testing.assert_array_equal(values(by_hf[key]), want, key)
    for kind in ("gptq", "compressed-tensors"):
        cq.convert(tmp_path / "m.gguf", tmp_path / kind, kind)
        back = cq.load(tmp_path / kind)
        config = json.loads((tmp_path / kind / "config.json").read_text())
        assert {key: config[key] for key in more} == more
        for key in arrays:
            np.testing.assert_array_equal(values(back[key]), values(by_hf[key]), key)
    cq.convert(tmp_path / "gptq", tmp_path / "again.gguf", "gguf")
    for key, value in cq.load(tmp_path / "m.gguf").items():
        np.testing.assert_array_equal(values(cq.load(tmp_path / "again.gguf")[key]), values(value))
    compared = cq.compare(tmp_path / "in", tmp_path / "m.gguf")
    assert not compared.only_a and not compared.only_b and not compared.left_out


@pytest.mark.filterwarnings("ignore:there is no tokenizer")
@pytest.mark.filterwarnings("ignore:tokens stay behind")
@pytest.mark.parametrize("more", [QWEN, MIXTRAL], ids=["qwen3moe", "mixtral"])
def test_experts_keep_their_global_scales_in_gguf(tmp_path, more):
    """NVFP4 with a scale for each expert; nothing of it is left over by transformers' names."""
    arrays = model(tmp_path / "in", more)
    held = {
        name: v
        if "norm" in name or "embed" in name or v.shape[0] == 3 or v.shape[1] % 64
        else cq.quantize(v * np.float16(i + 1), "nvfp4")
        for i, (name, v) in enumerate(arrays.items())
    }
    cq.save(tmp_path / "in" / "model.safetensors", held)
    cq.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf")
    with GgufReader(tmp_path / "m.gguf") as reader:
        assert reader.tensors["blk.0.ffn_up_exps.weight"].type.name == "NVFP4"
        assert reader.tensors["blk.0.ffn_up_exps.scale"].shape == (3,)
        assert reader.tensors["blk.0.attn_q.scale"].shape == (1,)
    one = cq.load(tmp_path / "m.gguf")["blk.0.ffn_up_exps.weight"]
    assert str(one.format) == "nvfp4+per_matrix"
    by_hf = cq.load(tmp_path / "m.gguf", names="hf")
    assert by_hf.keys() == held.keys()
    for key, value in held.items():
        np.testing.assert_array_equal(values(by_hf[key]), values(value), key)
        assert not isinstance(value, cq.QuantArray) or cq.array_equal(by_hf[key], value)
    cq.save(tmp_path / "in" / "model.safetensors", arrays)
    formats = {"*ffn_down_exps*": None, "*": "nvfp4"}
    cq.convert(tmp_path / "in", tmp_path / "one.gguf", "gguf", format=formats)
    with GgufReader(tmp_path / "one.gguf") as reader:  # one number for all, which each has
        assert reader.tensors["blk.0.ffn_up_exps.scale"].shape == (3,)


@pytest.mark.parametrize("more", [QWEN, MIXTRAL], ids=["qwen3moe", "mixtral"])
def test_experts_are_one_array_in_mlx(tmp_path, more):
    arrays = model(tmp_path / "in", more)
    cq.convert(tmp_path / "in", tmp_path / "mlx", "mlx", format="uint4:32+min")
    found = cq.load(tmp_path / "mlx")
    before = "mlp" if more is QWEN else "block_sparse_moe"
    for part in ("gate_proj", "down_proj", "up_proj"):
        assert found[f"model.layers.0.{before}.switch_mlp.{part}.weight"].ndim == 3
    assert not [name for name in found if "experts" in name]
    cq.convert(tmp_path / "mlx", tmp_path / "own.safetensors", "cuquant")  # by the file's names
    assert cq.load(tmp_path / "own.safetensors").keys() == found.keys()
    with pytest.raises(ValueError, match="and 14 more arrays"):  # GPTQ has no minimums
        cq.convert(tmp_path / "mlx", tmp_path / "gptq", "gptq")
    cq.convert(tmp_path / "mlx", tmp_path / "gptq", "gptq", requantize=True)
    assert cq.load(tmp_path / "gptq").keys() == arrays.keys()


def test_an_array_is_read_once_for_its_experts():
    read = []

    def whole():
        read.append(1)
        return np.arange(24).reshape(4, 2, 3)

    entry = Entry("x", None, (4, 2, 3), np.dtype(np.int64), 192, ("x",), (), whole)
    for _ in range(2):
        taken = [part.read() for part in split(entry, "a.{}.b")]
    assert len(read) == 2 and np.array_equal(np.stack(taken), whole())
    assert [part.name for part in split(entry, "{0.x}.{}.b")] == [
        f"{{0.x}}.{i}.b" for i in range(4)
    ]
    for shape in ((4, 2), (0, 2, 3), (1 << 40, 0, 0)):
        with pytest.raises(ValueError, match="no array of experts"):
            list(split(replace(entry, shape=shape), "a.{}.b"))


def test_experts_that_are_not_all_there_or_differ_are_refused(tmp_path):
    arrays = model(tmp_path / "in", QWEN)
    names = [name for name in arrays if ".experts.1." in name and "up_proj" in name]

    def refused(why, changed):
        cq.save(tmp_path / "in" / "model.safetensors", changed)
        with pytest.raises(ValueError, match=why):
            cq.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf")
        assert not (tmp_path / "m.gguf").exists()

    refused("not all", {name: value for name, value in arrays.items() if name not in names})
    refused("experts are one array", {**arrays, names[0]: arrays[names[0]][:, :32]})
    tiles = {
        name: cq.quantize(v, "fp8_e4m3:32x32") for name, v in arrays.items() if "_proj" in name
    }
    refused("cannot lie in one array", {**arrays, **tiles})
    odd = {n: cq.quantize(v, "nf4:flat") for n, v in arrays.items() if "experts" in n}
    refused("cannot lie in one array", {**arrays, **odd})
    config = {**CONFIG, **QWEN, "norm_topk_prob": False}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    refused("norm_topk_prob", arrays)


def test_damaged_experts_of_gguf_are_format_errors(tmp_path):
    name = "blk.0.ffn_up_exps.weight"
    for shape, count, why in (
        ((4, 32), np.uint32(3), "no array of experts"),
        ((4, 4, 32), np.int8(1), ""),
        ((4, 4, 32), "x", "not known"),
    ):
        told = {"general.architecture": "qwen3moe", "qwen3moe.expert_count": count,
                "qwen3moe.attention.head_count": np.uint32(1)}  # fmt: skip
        with GgufWriter(tmp_path / "m.gguf", {name: ("q4_0", shape)}, told) as writer:
            blocks = np.zeros((*shape[:-1], 18), np.uint8)
            writer.write(name, blocks)
        if not why:  # however many the file says there are
            assert len(cq.load(tmp_path / "m.gguf", names="hf")) == 4
            continue
        error = ValueError if why == "not known" else cq.FormatError
        with pytest.raises(error, match=why):
            cq.load(tmp_path / "m.gguf", names="hf")


def test_an_array_without_names_for_its_matrices_is_refused_by_name(tmp_path):
    saved(tmp_path / "in.safetensors", "int4:32")
    for kind in ("gptq", "awq", "bitsandbytes", "fp8"):
        with pytest.raises(ValueError, match=r"'experts\.weight'.*matrices"):
            cq.convert(tmp_path / "in.safetensors", tmp_path / "out", kind)


def test_names_of_experts_are_those_of_the_gguf_package():
    gguf = pytest.importorskip("gguf")
    for found in ARCHITECTURES:
        arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == found.name)
        table = gguf.get_tensor_name_map(arch, 3)
        for ours, theirs in found.experts.items():
            joined = f"model.layers.2.{theirs.replace('.{}.', '.')}.weight"
            assert table.get_name(joined, try_suffixes=(".weight",)) == f"blk.2.{ours}.weight"
            own = f"model.layers.2.{theirs.replace('{}', '7')}.weight"
            assert found.expert_in_gguf(own) == (f"blk.2.{ours}.weight", 7)
