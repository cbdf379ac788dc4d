"""Models between transformers and GGUF: names, the order of rows, settings, tokens."""

import json

import numpy as np
import pytest

import cuquant as cq
from cuquant.io.architectures.names import ARCHITECTURES, of_hf, row_order
from cuquant.io.architectures.positions import rope_factors
from cuquant.io.container.gguf import GgufReader, GgufWriter

CONFIG = {
    "num_hidden_layers": 1, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 256, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "vocab_size": 96,
    "rope_theta": 5e5, "bos_token_id": 1, "eos_token_id": [2, 3], "tie_word_embeddings": False,
}  # fmt: skip
SHAPES = {
    "model.embed_tokens": (96, 128), "model.norm": (128,), "lm_head": (96, 128),
    "model.layers.0.self_attn.q_proj": (128, 128), "model.layers.0.self_attn.k_proj": (64, 128),
    "model.layers.0.self_attn.v_proj": (64, 128), "model.layers.0.self_attn.o_proj": (128, 128),
    "model.layers.0.mlp.gate_proj": (256, 128), "model.layers.0.mlp.up_proj": (256, 128),
    "model.layers.0.mlp.down_proj": (128, 256), "model.layers.0.input_layernorm": (128,),
    "model.layers.0.post_attention_layernorm": (128,),
}  # fmt: skip


def model(folder, model_type="llama", **more):
    """A folder with a model of random weights, and its arrays."""
    rng = np.random.default_rng(3)
    arrays = {f"{n}.weight": rng.standard_normal(s).astype(np.float16) for n, s in SHAPES.items()}
    folder.mkdir()
    cq.save(folder / "model.safetensors", arrays)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": model_type, **more}))
    return arrays


@pytest.mark.parametrize("found", ARCHITECTURES, ids=lambda a: a.name)
def test_names_are_those_of_the_gguf_package(found):
    gguf = pytest.importorskip("gguf")
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == found.name)
    table = gguf.get_tensor_name_map(arch, 3)
    names = [f"model.layers.2.{inner}.weight" for inner in found._names.values()]
    for name in (*names, "model.embed_tokens.weight", "model.norm.weight"):
        ours = found.in_gguf(name)
        wanted = table.get_name(name, try_suffixes=(".weight",))
        if wanted is not None:  # a part that this architecture has
            assert ours == wanted
            assert found.in_hf(wanted) == name
    assert found.in_hf("output.weight") == "lm_head.weight"
    assert found.in_gguf("model.layers.0.self_attn.rotary_emb.inv_freq") is None
    assert found.in_hf("rope_freqs.weight") is None


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_model_goes_to_gguf_and_back(tmp_path, model_type):
    arrays = model(tmp_path / "in", model_type)
    with pytest.warns(UserWarning, match=r"no tokenizer\.json"):
        cq.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf", format="q8_0")
    with GgufReader(tmp_path / "m.gguf") as reader:
        told = reader.metadata
        name = told["general.architecture"]
        assert name == of_hf(model_type).name
        assert told[f"{name}.attention.head_count_kv"] == np.uint32(2)
        assert told[f"{name}.rope.freq_base"] == np.float32(5e5)
        assert told[f"{name}.attention.layer_norm_rms_epsilon"] == np.float32(1e-6)
        assert told[f"{name}.rope.dimension_count"] == np.uint32(32)
        assert reader.tensors["blk.0.ffn_up.weight"].type.name == "Q8_0"
        assert reader.tensors["blk.0.attn_norm.weight"].type.name == "F32"
    by_hf = cq.load(tmp_path / "m.gguf", names="hf")
    assert by_hf.keys() == arrays.keys()
    for key, value in arrays.items():
        want = cq.quantize(value, "q8_0").dequantize(np.float32) if value.ndim > 1 else value
        found = by_hf[key].dequantize() if value.ndim > 1 else by_hf[key]
        np.testing.assert_array_equal(found, want, err_msg=key)
    raw = cq.load(tmp_path / "m.gguf")["blk.0.attn_q.weight"].dequantize()
    is_same = np.array_equal(raw, by_hf["model.layers.0.self_attn.q_proj.weight"].dequantize())
    assert is_same == (not of_hf(model_type).is_permuted)
    with pytest.warns(UserWarning, match="tokens stay behind"):
        cq.convert(tmp_path / "m.gguf", tmp_path / "out", "compressed-tensors")
    back = cq.load(tmp_path / "out")
    for key, value in by_hf.items():
        a, b = (v.dequantize(np.float32) if isinstance(v, cq.QuantArray) else v
                for v in (value, back[key]))  # fmt: skip
        np.testing.assert_array_equal(a, b)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == of_hf(model_type).model_types[0]
    kept = {k: v for k, v in CONFIG.items() if k not in ("bos_token_id", "eos_token_id")}
    assert {key: config[key] for key in kept} == kept


def test_rows_of_a_head_come_from_both_halves_by_turns():
    order = row_order(64, 2)
    heads = np.arange(64).reshape(2, 2, 16)
    assert order.tolist() == np.stack([heads[:, 0], heads[:, 1]], axis=-1).reshape(-1).tolist()
    with pytest.raises(ValueError, match="63 rows are not those of 2 heads"):
        row_order(63, 2)


def test_quantized_rows_are_moved_whole(tmp_path):
    model(tmp_path / "in")
    cq.convert(tmp_path / "in", tmp_path / "gptq", "gptq", format="int4:32")
    with pytest.warns(UserWarning, match="tokenizer"):
        steps = cq.convert(tmp_path / "gptq", tmp_path / "m.gguf", "gguf")
    assert not any(step.rounds for step in steps)
    a, b = cq.load(tmp_path / "gptq"), cq.load(tmp_path / "m.gguf", names="hf")
    for key, value in a.items():
        if isinstance(value, cq.QuantArray):
            assert str(b[key].format) == "q4_0"
            np.testing.assert_array_equal(value.dequantize(np.float32), b[key].dequantize())


def test_rows_that_share_scales_are_refused(tmp_path):
    model(tmp_path / "in")
    cq.convert(tmp_path / "in", tmp_path / "fp8", "fp8", format="fp8_e4m3:32x32")
    with pytest.raises(ValueError, match=r"share scales.* another format first"):
        cq.convert(tmp_path / "fp8", tmp_path / "m.gguf", "gguf")


def test_a_file_by_ggufs_names_is_compared_by_them(tmp_path):
    model(tmp_path / "in")
    with pytest.warns(UserWarning, match=r"no tokenizer\.json"):
        cq.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf")
    cq.convert(tmp_path / "m.gguf", tmp_path / "own.safetensors", "cuquant")
    for other in ("own.safetensors", "in"):
        for a, b in ((other, "m.gguf"), ("m.gguf", other)):
            found = cq.compare(tmp_path / a, tmp_path / b)
            assert found.is_equal and len(found.arrays) == len(SHAPES), str(found)
    assert cq.compare(tmp_path / "m.gguf", cq.load(tmp_path / "m.gguf")).is_equal


def test_norms_of_gemma_are_one_more_in_gguf(tmp_path):
    arrays = model(tmp_path / "in", "gemma")
    with pytest.warns(UserWarning, match="tokenizer"):
        cq.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf")
    raw, hf = cq.load(tmp_path / "m.gguf"), cq.load(tmp_path / "m.gguf", names="hf")
    norm = arrays["model.norm.weight"].astype(np.float32)
    np.testing.assert_array_equal(raw["output_norm.weight"], norm + 1)
    np.testing.assert_array_equal(hf["model.norm.weight"], norm + np.float32(1) - np.float32(1))


def test_stretched_positions(tmp_path):
    llama3 = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 5e5,
    }  # fmt: skip
    factors = rope_factors({**CONFIG, "head_dim": 128, "rope_parameters": llama3})
    assert factors.shape == (64,) and factors[0] == 1 and factors[-1] == 8
    assert (np.diff(factors) >= 0).all()
    model(tmp_path / "in", rope_scaling=llama3)
    with pytest.warns(UserWarning):
        cq.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf")
    assert cq.load(tmp_path / "m.gguf")["rope_freqs.weight"].shape == (16,)
    model(tmp_path / "yarn", rope_scaling={"type": "yarn", "factor": 4.0})
    with pytest.warns(UserWarning):
        cq.convert(tmp_path / "yarn", tmp_path / "y.gguf", "gguf")
    with GgufReader(tmp_path / "y.gguf") as reader:
        assert reader.metadata["llama.rope.scaling.type"] == "yarn"
        assert reader.metadata["llama.rope.scaling.factor"] == np.float32(4)
    model(tmp_path / "long", rope_scaling={"type": "longrope"})  # llama's
    with pytest.raises(ValueError, match="longrope"):
        cq.convert(tmp_path / "long", tmp_path / "l.gguf", "gguf")


LONGROPE = {
    "max_position_embeddings": 1024, "original_max_position_embeddings": 64,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {
        "type": "longrope", "long_factor": [1.5 + i for i in range(12)],
        "short_factor": [1 + i / 10 for i in range(12)],
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:there is no tokenizer")
@pytest.mark.filterwarnings("ignore:.*have no name")
@pytest.mark.filterwarnings("ignore:tokens stay behind")
def test_long_and_short_factors_of_phi3(tmp_path):
    """Of 32 columns of a head 24 are rotated, in 12 pairs."""
    model(tmp_path / "in", "phi3", **LONGROPE)
    cq.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf")
    with GgufReader(tmp_path / "m.gguf") as reader:
        told = reader.metadata
        assert told["phi3.rope.dimension_count"] == 24
        assert told["phi3.rope.scaling.original_context_length"] == 64
        want = np.float32(np.sqrt(1 + np.log(16) / np.log(64)))
        assert told["phi3.rope.scaling.attn_factor"] == want
        assert reader.read("rope_factors_long.weight").tolist() == [1.5 + i for i in range(12)]
    cq.convert(tmp_path / "m.gguf", tmp_path / "out", "compressed-tensors", format="int4:32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    for key in ("max_position_embeddings", "original_max_position_embeddings"):
        assert config[key] == LONGROPE[key]
    assert config["partial_rotary_factor"] == 0.75
    for key in ("long_factor", "short_factor"):
        assert config["rope_scaling"][key] == LONGROPE["rope_scaling"][key]
    assert not [name for name in cq.load(tmp_path / "out") if "rope_factors" in name]
    for i, changed in enumerate((
        {"partial_rotary_factor": 1.0}, {"partial_rotary_factor": 2}, {"rope_scaling": {
            **LONGROPE["rope_scaling"], "long_factor": None}}, {"rope_scaling": {
            **LONGROPE["rope_scaling"], "short_factor": ["x"] * 12}},
        {"original_max_position_embeddings": None}, {"original_max_position_embeddings": 2048},
        {"rope_scaling": {**LONGROPE["rope_scaling"], "attention_factor": "x"}},
    )):  # fmt: skip
        model(tmp_path / f"{i}", "phi3", **{**LONGROPE, **changed})
        with pytest.raises(ValueError, match=r"config\.json"):
            cq.convert(tmp_path / f"{i}", tmp_path / f"{i}.gguf", "gguf")


@pytest.mark.filterwarnings("ignore:there is no tokenizer")
@pytest.mark.filterwarnings("ignore:.*have no name")
def test_gemma3_is_written_where_llama_cpp_computes_the_same(tmp_path):
    usual = {
        "head_dim": 32, "sliding_window": 512, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }  # fmt: skip
    told = {key: value for key, value in CONFIG.items() if key != "rope_theta"}
    arrays = model(tmp_path / "in", "gemma3_text")

    def convert(path, **more):
        config = {**told, "model_type": "gemma3_text", **usual, **more}
        (tmp_path / "in" / "config.json").write_text(json.dumps(config))
        cq.convert(tmp_path / "in", tmp_path / path, "gguf")

    convert("m.gguf")
    with GgufReader(tmp_path / "m.gguf") as reader:
        found = reader.metadata
    assert found["gemma3.rope.freq_base"] == np.float32(1e6)
    assert found["gemma3.rope.scaling.factor"] == np.float32(8)
    assert found["gemma3.attention.sliding_window"] == 512
    norm = arrays["model.norm.weight"].astype(np.float32)
    np.testing.assert_array_equal(cq.load(tmp_path / "m.gguf")["output_norm.weight"], norm + 1)
    for why, more in (
        ("query_pre_attn_scalar", {"query_pre_attn_scalar": 168}),
        ("sliding_window_pattern", {"sliding_window_pattern": 4}),
        ("layer_types", {"layer_types": ["full_attention"]}),
        ("rope_local_base_freq", {"rope_local_base_freq": 1e6, "rope_parameters": None}),
        ("num_hidden_layers", {"num_hidden_layers": 10**9}),
    ):
        with pytest.raises(ValueError, match=why):
            convert("bad.gguf", **more)


BYTES = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
    "added_tokens": [{"id": 3, "content": "<|end|>", "special": True}],
}
PIECES = {
    "model": {
        "type": "BPE", "byte_fallback": True, "merges": ["▁ a", "a b"],
        "vocab": {"<unk>": 0, "<0x00>": 1, "▁": 2, "a": 3, "b": 4, "▁a": 5, "ab": 6},
    },
    "added_tokens": [{"id": 0, "content": "<unk>", "special": True}],
}  # fmt: skip


def test_tokens_of_bytes(tmp_path):
    model(tmp_path / "in", "qwen2", vocab_size=5)
    (tmp_path / "in" / "tokenizer.json").write_text(json.dumps(BYTES))
    (tmp_path / "in" / "tokenizer_config.json").write_text(json.dumps(
        {"pad_token": {"content": "<|end|>"}, "add_bos_token": False, "chat_template": "{{ x }}"}
    ))  # fmt: skip
    cq.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf")
    with GgufReader(tmp_path / "m.gguf") as reader:
        told = {k.removeprefix("tokenizer."): v for k, v in reader.metadata.items()}
    assert list(told["ggml.tokens"]) == ["a", "b", "ab", "<|end|>", "[PAD4]"]
    assert told["ggml.token_type"].tolist() == [1, 1, 1, 3, 5]
    assert list(told["ggml.merges"]) == ["a b"]
    assert (told["ggml.model"], told["ggml.pre"]) == ("gpt2", "qwen2")
    ids = {k: int(told[f"ggml.{k}_token_id"]) for k in ("bos", "eos", "padding")}
    assert ids == {"bos": 1, "eos": 2, "padding": 3}
    assert told["ggml.add_bos_token"] is False and told["chat_template"] == "{{ x }}"


def test_tokens_of_pieces(tmp_path):
    model(tmp_path / "in", vocab_size=7)
    (tmp_path / "in" / "tokenizer.json").write_text(json.dumps(PIECES))
    cq.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf")
    with GgufReader(tmp_path / "m.gguf") as reader:
        told = reader.metadata
    assert told["tokenizer.ggml.model"] == "llama"
    assert told["tokenizer.ggml.token_type"].tolist() == [2, 6, 1, 1, 1, 1, 1]
    assert told["tokenizer.ggml.scores"].tolist() == [0, 0, -2, -2, -2, 0, -1]


DAMAGED = (
    {"model": {"type": "Unigram"}}, {"model": {"vocab": {"a": -1}}}, {"model": 3},
    {"model": {"vocab": {"a": 1e9}}}, {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": "x"}]},
)  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
def test_other_tokenizers_are_left_out_with_a_warning(tmp_path, damage):
    model(tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_text(json.dumps(damage))
    with pytest.warns(UserWarning, match="the file has no tokens"):
        cq.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf")


def test_an_unknown_architecture_keeps_its_names(tmp_path):
    arrays = model(tmp_path / "in", "odd")
    with pytest.warns(UserWarning, match="architecture is not known"):
        cq.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf")
    assert cq.load(tmp_path / "m.gguf").keys() == arrays.keys()
    with pytest.raises(ValueError, match="names of the architecture None are not known"):
        cq.load(tmp_path / "m.gguf", names="hf")


@pytest.mark.parametrize("value", ["x", True, -1, [1]])
def test_settings_that_are_none_are_refused(tmp_path, value):
    model(tmp_path / "in", intermediate_size=value)
    with pytest.raises(cq.FormatError, match="intermediate_size"):
        cq.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf")


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
LLAMA_3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
ODD = {
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads 0"),
    "heads of text": ({"num_attention_heads": "4"}, "num_attention_heads '4'"),
    "no size": ({"hidden_size": [128]}, "hidden_size"),
    "a head of many columns": ({"head_dim": 1 << 40}, "head_dim"),
    "a length beyond uint32": (
        {"rope_scaling": {**YARN, "original_max_position_embeddings": 1 << 40}},
        "original_max_position_embeddings",
    ),
    "a factor that is none": ({"rope_scaling": {**YARN, "factor": float("nan")}}, "factor nan"),
    "a factor of text": ({"rope_scaling": {**LLAMA_3, "factor": "8"}}, "factor '8'"),
    "a base of text": ({"rope_scaling": {**LLAMA_3, "rope_theta": "x"}}, "rope_theta 'x'"),
    "factors of one frequency": (
        {"rope_scaling": {**LLAMA_3, "low_freq_factor": 4}}, "factors from 4 to 4"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_sizes_that_are_none_are_refused(tmp_path, case):
    changed, why = ODD[case]
    model(tmp_path / "in", **changed)
    with pytest.raises(cq.FormatError, match=why):
        cq.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf")
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.filterwarnings("ignore:no array is quantized")
def test_a_file_that_tells_no_heads_keeps_its_names(tmp_path):
    rng = np.random.default_rng(3)
    names = ("blk.0.attn_q.weight", "blk.0.ffn_up.weight", "plain")
    arrays = {name: rng.standard_normal((64, 64)).astype(np.float16) for name in names}
    specs = {name: (np.float16, (64, 64)) for name in names}
    with GgufWriter(tmp_path / "m.gguf", specs, {"general.architecture": "llama"}) as writer:
        for name, array in arrays.items():
            writer.write(name, array)
    with pytest.warns(UserWarning, match="how many heads"):
        cq.convert(tmp_path / "m.gguf", tmp_path / "out", "fp8")
    found = cq.load(tmp_path / "out")
    assert found.keys() == arrays.keys()
    assert all(np.array_equal(found[name], array) for name, array in arrays.items())
    with pytest.raises(cq.FormatError, match="tells no number of heads"):
        cq.load(tmp_path / "m.gguf", names="hf")
