"""Models of transformers: quantized while they load, saved, loaded again, and used."""

import json
import warnings
import weakref
from pathlib import Path

import pytest

import cuquant as cq

torch = pytest.importorskip("torch", reason="torch is optional")
transformers = pytest.importorskip("transformers", reason="transformers is optional")

import cuquant.torch as cqt  # noqa: E402
from cuquant.integrations import placing  # noqa: E402
from cuquant.integrations.transformers import (  # noqa: E402
    CuquantConfig,
    load_pretrained,
    mark_quantized,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
Causal = transformers.AutoModelForCausalLM
CHECKPOINTS = Path("tests/data/checkpoints")

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {**SIZES, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
STATE = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256, "eos_token_id": None}
IDS = torch.arange(14).view(2, 7) * 17 % 256


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)


def llama(**options):
    return Causal.from_config(transformers.LlamaConfig(**SIZES, **options)).eval()


@pytest.fixture
def saved(tmp_path):
    """Save a model in a folder of its own."""

    def save(model, **options):
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        model.save_pretrained(folder, **options)
        return folder

    return save


def loaded(folder, config=None, model_class=Causal, **options):
    """A model, of which nothing was missing and nothing left over."""
    if config is not None:
        options["quantization_config"] = config
    model, told = model_class.from_pretrained(folder, output_loading_info=True, **options)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    return model


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


# ---- round trips ---------------------------------------------------------------------------------

MODELS = {
    "llama": lambda: llama(),
    "bfloat16": lambda: llama().to(torch.bfloat16),
    "tied": lambda: llama(tie_word_embeddings=True),
    "experts": lambda: Causal.from_config(
        transformers.Qwen3MoeConfig(**EXPERTS, moe_intermediate_size=64)
    ),
    "mixtral": lambda: Causal.from_config(
        transformers.MixtralConfig(**{k: v for k, v in EXPERTS.items() if k != "head_dim"})
    ),
    "turned experts": lambda: Causal.from_config(transformers.GptOssConfig(**EXPERTS)),
    "conv1d": lambda: Causal.from_config(
        transformers.GPT2Config(
            n_embd=64, n_layer=2, n_head=2, vocab_size=256, bos_token_id=1, eos_token_id=None
        )
    ),
    "falcon": lambda: Causal.from_config(
        transformers.FalconConfig(**STATE, num_attention_heads=4, bias=True)
    ),
    "mamba": lambda: Causal.from_config(transformers.MambaConfig(**STATE, state_size=8)),
    "falcon mamba": lambda: Causal.from_config(
        transformers.FalconMambaConfig(**STATE, state_size=8)
    ),
}
CASES = [
    ("llama", CuquantConfig("nf4")),
    ("llama", CuquantConfig("int4", block_size=32, prepack=True)),
    ("llama", CuquantConfig("llm_int8")),
    ("llama", CuquantConfig("int8", activations="int8", compute_dtype="bfloat16")),
    ("llama", CuquantConfig({"lm_head": "q8_0", "*.mlp.*": "int4", "*": "nf4+dq"})),
    ("bfloat16", CuquantConfig("nf4")),
    ("tied", CuquantConfig("mxfp4")),
    ("tied", CuquantConfig({"model.embed_tokens": "q8_0", "*": "nf4"})),
    ("experts", CuquantConfig("nf4")),
    ("experts", CuquantConfig("int4", activations="int8")),
    ("turned experts", CuquantConfig("q8_0")),
    ("conv1d", CuquantConfig("nf4")),
    ("falcon", CuquantConfig("nf4")),
    ("mamba", CuquantConfig("nf4")),
    ("falcon mamba", CuquantConfig("int8")),
]


@pytest.mark.parametrize(("name", "config"), CASES)
def test_saved_models_have_the_same_logits(name, config, saved):
    plain = MODELS[name]().eval()
    model = loaded(saved(plain), config)
    wanted = logits(model)
    assert 0 < (wanted - logits(plain)).norm() / wanted.norm() < 0.2
    folder = saved(model, max_shard_size="20KB")
    assert len([*folder.glob("*.safetensors")]) > 2
    again = loaded(folder)
    assert again.dtype == plain.dtype and torch.equal(logits(again), wanted)
    assert torch.equal(logits(loaded(saved(again))), wanted)
    assert str(again) == str(model)
    given = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    if "mamba" not in name:
        static = again.generate(IDS, **given, cache_implementation="static")
        assert torch.equal(static, model.generate(IDS, **given))


@pytest.mark.parametrize("tied", [False, True])
def test_files_are_read_without_transformers_too(tied, saved):
    """Also where shards part a weight from what describes it, and where one of two ties lies."""
    config = CuquantConfig({"lm_head": "q8_0", "*": "nf4"})
    model = loaded(saved(llama(tie_word_embeddings=tied)), config)
    folder = saved(model, max_shard_size="7KB")
    found = cq.load(folder, library="torch")
    layer = model.model.layers[1].mlp.down_proj
    assert cq.array_equal(found["model.layers.1.mlp.down_proj.weight"], layer.quantized)
    plain = cqt.load_(llama(tie_word_embeddings=tied), folder)
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-6)


def test_weights_are_those_of_quantize(saved):
    model, plain = llama(), llama()
    plain.load_state_dict(model.state_dict())
    cqt.quantize_(plain, "nf4", exclude="lm_head")
    assert torch.equal(logits(loaded(saved(model), CuquantConfig("nf4"))), logits(plain))


def test_weights_are_there_one_by_one(saved, monkeypatch):
    """Each is gone before the next: what is quantized and one weight are in memory."""
    folder, before, count = saved(llama()), [], 0
    take = placing.Placing.take

    def watched(self, name, values):
        nonlocal count
        assert not [name for name, weight in before if weight() is not None]
        before.append((name, weakref.ref(values)))
        count += 1
        return take(self, name, values)

    monkeypatch.setattr(placing.Placing, "take", watched)
    model = loaded(folder, CuquantConfig("nf4"))
    assert count == 14 and isinstance(model.model.layers[1].mlp.up_proj, cqt.QuantLinear)


def test_what_is_quantized_takes_no_gradient(saved):
    model = loaded(saved(MODELS["turned experts"]()), CuquantConfig("nf4"))
    assert not any(p.requires_grad for p in model.model.layers[0].mlp.experts.parameters())
    assert not model.model.layers[0].self_attn.q_proj.bias.requires_grad
    assert model.lm_head.weight.requires_grad


# ---- which layers --------------------------------------------------------------------------------


def kept(model):
    kinds = torch.nn.Linear, cqt.QuantLinear
    return {n for n, m in model.named_modules() if isinstance(m, kinds[0]) and type(m) is kinds[0]}


def test_modules_to_keep_add_to_those_that_are_kept_by_default(saved):
    folder = saved(llama())
    assert kept(loaded(folder, CuquantConfig("nf4"))) == {"lm_head"}
    more = CuquantConfig("nf4", modules_to_not_convert=["up_proj"], exclude="*.1.mlp.gate_proj")
    layers = {f"model.layers.{i}.mlp.up_proj" for i in (0, 1)}
    model = loaded(folder, more)
    assert kept(model) == {"lm_head", "model.layers.1.mlp.gate_proj", *layers}
    assert kept(loaded(saved(model))) == kept(model)
    assert not kept(loaded(folder, CuquantConfig({"lm_head": "q8_0", "*": "nf4"})))


def test_tied_layers_become_one_array(saved):
    config = CuquantConfig({"lm_head": "q8_0", "*": "nf4"})
    model = loaded(saved(llama(tie_word_embeddings=True)), config)
    for found in (model, loaded(folder := saved(model))):
        assert found.lm_head.blocks is found.model.embed_tokens.blocks
    with cq.open(folder) as file:
        assert "lm_head.weight" not in file
    with pytest.raises(ValueError, match=r"weight\.data must be of shape"):
        model.resize_token_embeddings(300)
    model.dequantize()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.resize_token_embeddings(300)
    assert logits(model).shape == (2, 7, 300)


def test_all_layers_of_one_weight_follow(saved):
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**sizes, vocab_size=256, decoder_start_token_id=0)
    kind, given = transformers.T5ForConditionalGeneration, {"decoder_input_ids": IDS}
    plain = kind(config).eval()
    for plan in ("nf4", {"shared": "q8_0", "*": "nf4"}):
        model = loaded(saved(plain), CuquantConfig(plan), kind, dtype=torch.bfloat16)
        again = loaded(saved(model), model_class=kind)
        assert torch.equal(again(IDS, **given).logits, model(IDS, **given).logits)
    tables = [again.shared, again.encoder.embed_tokens, again.decoder.embed_tokens]
    assert len({id(table.blocks) for table in tables}) == 1
    assert type(again.encoder.block[0].layer[1].DenseReluDense.wo) is torch.nn.Linear  # float32


def test_a_tied_layer_that_cannot_follow_is_an_error(saved):
    folder = saved(llama(tie_word_embeddings=True))
    with pytest.raises(ValueError, match="exclude both or none"):
        loaded(folder, CuquantConfig({"lm_head": "nf4"}, exclude="model.embed_tokens"))


def test_patterns_that_select_nothing_are_errors(saved):
    with pytest.raises(ValueError, match=r"selects no nn\.Linear"):
        loaded(saved(llama()), CuquantConfig({"*.mpl.*": "nf4"}))


# ---- what else is done to models -----------------------------------------------------------------


def test_models_without_or_with_another_head_take_a_saved_one(saved):
    model = loaded(saved(llama()), CuquantConfig("nf4"))
    folder = saved(model)
    base, told = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"] and told["unexpected_keys"] == {"lm_head.weight"}
    wanted = model.model(IDS).last_hidden_state
    assert torch.equal(base(IDS).last_hidden_state, wanted)
    assert torch.equal(Causal.from_pretrained(saved(base)).model(IDS).last_hidden_state, wanted)
    judge = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert kept(judge) == {"score"}


def test_a_part_of_a_model_takes_a_saved_one_with_a_tied_table(saved):
    config = CuquantConfig({"model.embed_tokens": "q8_0", "*": "nf4"}, activations="int8")
    model = loaded(saved(MODELS["tied"]()), config)
    base = transformers.AutoModel.from_pretrained(saved(model))
    assert torch.equal(base(IDS).last_hidden_state, model.model(IDS).last_hidden_state)
    again = Causal.from_pretrained(saved(base))
    assert torch.equal(logits(again), logits(model))


def test_what_config_json_says_is_in_order_and_of_now(saved):
    """transformers sorts its keys, and the first pattern counts."""
    plan = {"*.mlp.*": {"format": "int8", "activations": "int8"}, "*": "nf4"}
    model = loaded(saved(llama()), CuquantConfig(plan))
    folder = saved(model)
    again = loaded(folder)
    assert str(again) == str(model) and torch.equal(logits(again), logits(model))
    assert again.config.quantization_config.format == plan
    again.model.layers[1].self_attn.q_proj.quantize_input_("int8:tensor", 0.05)
    again.model.layers[0].mlp.up_proj.quantize_input_(None)
    for layer in (m for m in again.modules() if isinstance(m, cqt.QuantLinear)):
        layer.compute_in_(torch.bfloat16)
    third = loaded(saved(again))
    assert str(third) == str(again) and torch.equal(logits(third), logits(again))
    base = transformers.AutoModel.from_pretrained(saved(again))  # its names are shorter
    assert torch.equal(base(IDS).last_hidden_state, again.model(IDS).last_hidden_state)


def test_what_config_json_cannot_say_is_an_error(saved):
    model = mark_quantized(cqt.quantize_(llama(), "llm_int8"))
    up = model.model.layers[0].mlp.up_proj
    up.threshold = 3.0
    with pytest.raises(ValueError, match=r"up_proj: no plan says threshold=3\.0"):
        saved(model)
    up.threshold = 6.0
    up.compute_in_("bfloat16")
    with pytest.raises(ValueError, match="one compute_dtype, and linear layers have several"):
        mark_quantized(model)
    model.model.layers[0].mlp.up_proj = cqt.QuantLinear(up.quantized, activation="silu")
    with pytest.raises(ValueError, match="up_proj: no plan says activation='silu'"):
        mark_quantized(model)


def test_models_are_loaded_in_another_dtype(saved):
    folder = saved(loaded(saved(llama()), CuquantConfig("nf4")))
    model = loaded(folder, dtype=torch.bfloat16)
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert logits(model).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["experts", "conv1d"])
def test_dequantized_models_are_saved_as_float_ones(name, saved):
    model = loaded(saved(MODELS[name]()), CuquantConfig("nf4"))
    wanted = logits(model)
    saved(model)  # which makes a string of config.dtype
    model.dequantize()
    assert not any(isinstance(m, cqt.QuantLinear) for m in model.modules())
    again = loaded(saved(model))
    assert torch.equal(logits(again), logits(model))
    torch.testing.assert_close(logits(again), wanted, rtol=1e-5, atol=1e-5)


def test_embeddings_are_resized(saved):
    model = loaded(saved(llama(tie_word_embeddings=True)), CuquantConfig("nf4"))
    model.resize_token_embeddings(300)
    assert torch.equal(logits(loaded(saved(model))), logits(model))
    model = loaded(saved(llama()), CuquantConfig({"lm_head": "q8_0", "*": "nf4"}))
    model.resize_token_embeddings(300)
    assert logits(model).shape == (2, 7, 300)
    model = loaded(saved(llama()), CuquantConfig({"model.embed_tokens": "q8_0", "*": "nf4"}))
    with pytest.raises(ValueError, match="first what is to be resized"):
        model.resize_token_embeddings(300)
    cqt.dequantize_(model, include="model.embed_tokens").resize_token_embeddings(300)
    assert torch.equal(logits(loaded(saved(model))), logits(model))


def test_tensor_parallelism_is_refused(saved, monkeypatch):
    """As `from_pretrained` leaves a model that it has distributed."""
    folder = saved(llama())
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_tp_size", 2)
    with pytest.raises(ValueError, match=r"plan of tensor parallelism; device_map="):
        loaded(folder, CuquantConfig("int4"))


def test_saved_models_are_offloaded_and_float_ones_only_before(saved, tmp_path):
    pytest.importorskip("accelerate")
    where = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu"}
    where |= {"model.layers.1": "disk", "model.norm": "cpu", "lm_head": "cpu"}
    given = {"device_map": where, "offload_folder": tmp_path / "disk"}
    folder = saved(llama())
    with pytest.raises(ValueError, match="device_map sends modules to the disk"):
        loaded(folder, CuquantConfig("nf4"), **given)
    with pytest.raises(ValueError, match="device_map sends modules to the disk"):
        loaded(
            folder, CuquantConfig("nf4"), **given | {"device_map": "auto"}, max_memory={"cpu": 1}
        )
    model = loaded(folder, CuquantConfig("nf4"), device_map="cpu")
    assert torch.equal(logits(loaded(saved(model), **given)), logits(model))


def test_a_file_without_codes_is_an_error(saved):
    from safetensors.torch import load_file, save_file

    folder = saved(loaded(saved(llama()), CuquantConfig("nf4")))
    state = load_file(folder / "model.safetensors")
    del state["model.layers.0.mlp.up_proj.packed"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(cq.FormatError, match=r"up_proj\.packed is missing"):
        Causal.from_pretrained(folder)


def test_compiled_models_have_no_graph_break(saved):
    model = loaded(saved(llama()), CuquantConfig("nf4"))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(logits(compiled), logits(model))


# ---- models that were quantized elsewhere --------------------------------------------------------


def test_models_of_quantize_are_marked(saved):
    model = MODELS["experts"]().eval()
    static = {"format": "int8", "activations": "int8:tensor", "input_scale": 0.05}
    mark_quantized(cqt.quantize_(model, {"lm_head": static, "*": "int4"}))
    again = loaded(saved(model))
    assert torch.equal(logits(again), logits(model)) and str(again) == str(model)
    with pytest.raises(ValueError, match="no quantized layer"):
        mark_quantized(llama())


@pytest.mark.parametrize(
    "name", ["gptq-4bit", "awq-gemm-gptqmodel", "bitsandbytes-nf4-double", "ct-w4a16"]
)
def test_checkpoints_of_other_libraries_become_models(name, saved):
    ids = torch.tensor([[1, 5, 9]])
    model = load_pretrained(CHECKPOINTS / name)
    layer = model.model.layers[0].mlp.up_proj
    found = cq.load(CHECKPOINTS / name, library="torch")["model.layers.0.mlp.up_proj.weight"]
    assert cq.array_equal(layer.quantized, found)
    assert torch.equal(loaded(saved(model))(ids).logits, model(ids).logits)


def test_load_pretrained_makes_a_plain_model_of_plain_floats(saved):
    plain = llama()
    model = load_pretrained(saved(plain))
    assert torch.equal(logits(model), logits(plain)) and not hasattr(model, "hf_quantizer")


def test_a_folder_of_ours_becomes_a_model(saved, tmp_path):
    cq.convert(saved(llama()), tmp_path / "ours", to="cuquant", format="nf4")
    model = load_pretrained(tmp_path / "ours")
    assert model.model.layers[0].mlp.up_proj.format == cq.get_format("nf4")
    assert torch.equal(logits(loaded(saved(model))), logits(model))


def test_a_layers_entry_stands_for_all_layers():
    entry = {"format": "int8", "activations": "int8:tensor", "input_scale": 0.05}
    assert CuquantConfig(entry).format == {"*": entry}
    assert CuquantConfig({"format": "int8", "*": "nf4"}).format == {"format": "int8", "*": "nf4"}


def test_load_pretrained_says_which_path_it_wants(saved):
    with pytest.raises(FileNotFoundError, match=r"download it first: 'nobody/no-such-model'"):
        load_pretrained("nobody/no-such-model")
    with pytest.raises(ValueError, match=r"model\.safetensors: is a file; name the folder"):
        load_pretrained(Path(saved(llama())) / "model.safetensors")


def test_gpt_oss_is_read_as_it_is_published(saved):
    model = load_pretrained(CHECKPOINTS / "hf-mxfp4-gpt-oss")
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, cqt.QuantExperts)
    assert experts.gate_up_proj.format == experts.down_proj.format == cq.get_format("mxfp4")
    ids = torch.tensor([[1, 5, 9]])
    assert torch.equal(loaded(saved(model))(ids).logits, model(ids).logits)


@pytest.mark.parametrize("to", ["gptq", "compressed-tensors"])
@pytest.mark.parametrize("name", ["experts", "mixtral"])
def test_experts_of_other_libraries_become_one_array(name, to, saved, tmp_path):
    plain = MODELS[name]().eval()
    form = {"gptq": "uint8:32", "compressed-tensors": "int8:32"}[to]
    cq.convert(saved(plain), tmp_path / "theirs", to=to, format=form)
    model = load_pretrained(tmp_path / "theirs")
    assert isinstance(model.model.layers[1].mlp.experts, cqt.QuantExperts)
    wanted = logits(model)
    assert (wanted - logits(plain)).norm() / wanted.norm() < 0.02
    assert torch.equal(logits(loaded(saved(model))), wanted)


@pytest.mark.filterwarnings("ignore:there is no tokenizer.json")
def test_gguf_files_become_models(saved, tmp_path):
    pytest.importorskip("gguf")
    plain = llama(tie_word_embeddings=False)
    cq.convert(saved(plain), tmp_path / "m.gguf", to="gguf", format="q8_0")
    model = load_pretrained(tmp_path / "m.gguf", dtype=torch.float32)
    assert model.model.layers[0].mlp.up_proj.format == cq.get_format("q8_0")
    wanted = logits(model)
    assert (wanted - logits(plain)).norm() / wanted.norm() < 0.02
    assert torch.equal(logits(loaded(saved(model))), wanted)


# ---- the config ----------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [config for _, config in CASES])
def test_config_is_json_and_back(config):
    said = json.loads(config.to_json_string())
    assert CuquantConfig.from_dict(said).to_dict() == said == config.to_dict()
    assert said["quant_method"] == "cuquant"
    assert CuquantConfig.from_dict({**said, "of_a_later_version": 1}).to_dict() == said


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"format": "nf5"}, ValueError),
        ({"fromat": "nf4"}, TypeError),
        ({"compute_dtype": "float8"}, ValueError),
        ({"prepack": "yes"}, TypeError),
        ({"exclude": 1}, TypeError),
    ],
)
def test_wrong_configs_are_errors(given, error):
    with pytest.raises(error):
        CuquantConfig(**given)
    with pytest.raises(ValueError, match="format must be pairs"):
        CuquantConfig.from_dict({"format": [["*"]]})


def test_the_config_of_a_saved_model_is_the_files(saved):
    folder = saved(loaded(saved(llama()), CuquantConfig("nf4")))
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        model = loaded(folder, CuquantConfig("int8"))
    assert model.model.layers[0].mlp.up_proj.format == cq.get_format("nf4")
