"""Adapters of PEFT, as it is, on models of transformers that are quantized."""

import pytest

import cuquant as cq

torch = pytest.importorskip("torch", reason="torch is optional")
transformers = pytest.importorskip("transformers", reason="transformers is optional")
peft = pytest.importorskip("peft", reason="PEFT is optional")

import cuquant.torch as cqt  # noqa: E402
from cuquant.integrations.transformers import CuquantConfig  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad"),
]
Causal = transformers.AutoModelForCausalLM
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
IDS = torch.arange(64).view(4, 16) * 37 % 256
LAYERS = 14  # linear ones, the lm_head left out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A float model."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("model")
    Causal.from_config(transformers.LlamaConfig(**SIZES)).save_pretrained(made)
    return made


def quantized(folder, format="nf4", **options):
    config = CuquantConfig(format, **{k: options.pop(k) for k in ["compute_dtype"] if k in options})
    return Causal.from_pretrained(folder, quantization_config=config, **options)


def adapted(model, **options):
    given = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", "r": 4, **options}
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(**given))


def train(model, steps=8, after=lambda step: None):
    """First and last loss."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(steps):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        after(step)
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses[0], losses[-1]


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


KINDS = {
    "lora": {}, "dora": {"use_dora": True}, "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"}, "rslora": {"use_rslora": True},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_all_linear_layers_learn_and_are_loaded_again(kind, folder, tmp_path):
    model = adapted(quantized(folder), **KINDS[kind])
    assert sum("lora_A" in name for name, _ in model.named_parameters()) == LAYERS
    first, last = train(model)
    assert last < first - 0.2
    wanted = logits(model)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(quantized(folder), tmp_path)
    assert torch.equal(logits(again), wanted)


def test_merging_quantizes_the_sum_and_unmerging_the_difference(folder):
    model = adapted(quantized(folder, "int8"))
    train(model)
    wanted = logits(model)
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    weight, delta = layer.base_layer.weight.detach(), layer.get_delta_weight("default").detach()
    model.merge_adapter()
    merged = cq.quantize(weight + delta, "int8")
    assert cq.array_equal(layer.base_layer.quantized, merged)
    assert (logits(model) - wanted).norm() / wanted.norm() < 0.02  # of int8; of 4 bits it is more
    model.unmerge_adapter()
    back = cq.quantize(merged.dequantize() - delta, "int8")
    assert cq.array_equal(layer.base_layer.quantized, back)
    assert (logits(model) - wanted).norm() / wanted.norm() < 0.02
    plain = model.merge_and_unload()
    assert type(plain.model.layers[0].mlp.up_proj) is cqt.QuantLinear
    assert (logits(plain) - wanted).norm() / wanted.norm() < 0.02


def test_adapters_that_merge_in_place_are_merged(folder):
    config = peft.OFTConfig(
        r=0, oft_block_size=8, target_modules=["up_proj"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(quantized(folder, "int8"), config)
    train(model)
    wanted = logits(model)
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    with torch.no_grad():
        turned = layer.get_delta_weight("default") @ layer.base_layer.weight.detach().T
    model.merge_adapter()
    assert cq.array_equal(layer.base_layer.quantized, cq.quantize(turned.T.contiguous(), "int8"))
    assert (logits(model) - wanted).norm() / wanted.norm() < 0.02


def test_dequantized_models_merge_without_loss(folder):
    model = adapted(quantized(folder))
    train(model)
    wanted = logits(model)
    plain = cqt.dequantize_(model).merge_and_unload()
    assert type(plain.model.layers[0].mlp.up_proj) is torch.nn.Linear
    torch.testing.assert_close(logits(plain), wanted, rtol=1e-4, atol=1e-5)


def test_adalora_learns(folder, tmp_path):
    config = peft.AdaLoraConfig(
        target_modules="all-linear", task_type="CAUSAL_LM", init_r=6, target_r=3, total_step=30,
        tinit=20, tfinal=5,
    )  # fmt: skip
    model = peft.get_peft_model(quantized(folder), config)
    first, last = train(model, after=lambda step: model.base_model.update_and_allocate(step))
    assert last < first - 0.2
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(quantized(folder), tmp_path)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize(
    "config",
    [
        peft.IA3Config(
            task_type="CAUSAL_LM",
            target_modules=["k_proj", "v_proj", "down_proj"],
            feedforward_modules=["down_proj"],
        ),
        peft.LoKrConfig(target_modules=["q_proj", "up_proj"]),
        peft.OFTConfig(target_modules=["q_proj", "up_proj"], oft_block_size=8, r=0),
        peft.VeraConfig(target_modules=["q_proj", "o_proj"], r=4),
    ],
    ids=lambda config: type(config).__name__,
)
def test_other_adapters_learn(config, folder):
    model = peft.get_peft_model(quantized(folder), config)
    first, last = train(model)
    assert last < first - 1e-3


def test_experts_stay_quantized_below_adapters(tmp_path):
    config = transformers.Qwen3MoeConfig(
        **SIZES, head_dim=16, moe_intermediate_size=64, num_local_experts=4, num_experts_per_tok=2
    )
    torch.manual_seed(0)
    Causal.from_config(config).save_pretrained(tmp_path)
    model = adapted(quantized(tmp_path), target_modules=["q_proj", "v_proj"])
    first, last = train(model)
    assert last < first - 0.1
    assert isinstance(model.base_model.model.model.layers[0].mlp.experts, cqt.QuantExperts)


def test_qlora_of_a_model_in_bfloat16(folder):
    options = {"compute_dtype": "bfloat16", "dtype": torch.bfloat16}
    model = peft.prepare_model_for_kbit_training(quantized(folder, "nf4+dq", **options))
    model.gradient_checkpointing_enable()  # PEFT does it for quantizers that it knows by name
    first, last = train(adapted(model))
    assert last < first - 0.2


def test_trainer_with_checkpointing_and_the_adapter_that_it_saves(folder, tmp_path):
    pytest.importorskip("accelerate")
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    arguments = transformers.TrainingArguments(
        tmp_path, per_device_train_batch_size=4, max_steps=6, learning_rate=1e-2, use_cpu=True,
        gradient_checkpointing=True, logging_steps=1, save_steps=6, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    model = adapted(quantized(folder))
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()
    losses = [said["loss"] for said in trainer.state.log_history if "loss" in said]
    assert losses[-1] < losses[0] - 0.1
    again = quantized(folder)
    again.load_adapter(tmp_path / "checkpoint-6")
    assert torch.equal(logits(again.eval()), logits(model.eval()))
    with pytest.raises(ValueError, match="attach trainable adapters"):
        transformers.Trainer(quantized(folder), arguments, train_dataset=rows)
