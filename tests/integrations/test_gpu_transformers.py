"""Models of transformers on a GPU: loaded, saved, trained."""

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture
def transformers(torch):
    found = pytest.importorskip("transformers", reason="transformers is optional")
    found.logging.set_verbosity_error()
    found.logging.disable_progress_bar()
    torch.manual_seed(0)
    return found


@pytest.fixture
def folder(torch, transformers, tmp_path):
    """A float model of 30 MB in bfloat16, whose largest matrix takes 4 MB."""
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=8,
        vocab_size=1024, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "float")
    return tmp_path / "float"


def load(transformers, folder, **options):
    from cuquant.integrations.transformers import CuquantConfig

    if "format" in options:
        options["quantization_config"] = CuquantConfig(options.pop("format"))
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, device_map="cuda", **options)


def test_loading_takes_what_is_quantized_and_one_weight(torch, transformers, folder):
    load(transformers, folder, format="nf4")  # kernels are compiled
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load(transformers, folder, format="nf4")
    held = torch.cuda.memory_allocated() - before
    weight = 4096 * 512 * 2
    # One more: the rows of the weight that is prepacked, 4.5 bits of 16.
    assert torch.cuda.max_memory_allocated() - before <= held + weight * (1 + 4.5 / 16) + (1 << 20)
    assert model.model.layers[0].mlp.up_proj.is_prepacked


@pytest.mark.parametrize("form", ["nf4", "int4", "int8", "q8_0"])
def test_saved_models_have_the_same_logits(form, torch, transformers, folder, tmp_path):
    ids = torch.arange(14, device="cuda").view(2, 7)
    model = load(transformers, folder, format=form)
    with torch.no_grad():
        wanted = model(ids).logits
        model.save_pretrained(tmp_path / "saved")
        again = load(transformers, tmp_path / "saved")
        assert str(again) == str(model) and torch.equal(again(ids).logits, wanted)
        given = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        assert again.generate(ids, **given).shape == (2, 10)


def test_adapters_learn(torch, transformers, folder):
    peft = pytest.importorskip("peft", reason="PEFT is optional")
    ids = torch.arange(64, device="cuda").view(4, 16)
    config = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", r=4)
    model = peft.get_peft_model(load(transformers, folder, format="nf4"), config).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.2
