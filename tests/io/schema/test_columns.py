"""g_idx: columns of GPTQ's desc_act and compressed-tensors' actorder, and what may be wrong."""

import json
from pathlib import Path

import numpy as np
import pytest
from in_turn import in_turn

import cuquant as cq

RNG = np.random.default_rng(5)
CODES = RNG.integers(0, 16, (8, 80), dtype=np.uint8)  # [N, K]
ORDER = RNG.permutation(80)
G_IDX = np.empty(80, np.int32)
G_IDX[ORDER] = np.arange(80) // 32  # groups of 32, 32 and 16
SCALES = (RNG.random((3, 8)) + 0.5).astype(np.float16)  # [G, N]
WANT = (CODES.astype(np.float32) - 8) * SCALES.T.astype(np.float32)[:, G_IDX]
MISSING = object()


def words(codes):
    """int32 words of codes of 4 bits along the last axis, the first one in the low bits."""
    eights = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32)
    return (eights << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1, dtype=np.uint32).view(np.int32)


def gptq(folder: Path, g_idx, **config):
    folder.mkdir()
    tensors = {
        "up.qweight": np.ascontiguousarray(words(CODES).T),
        "up.qzeros": words(np.full((3, 8), 8, np.uint8)),
        "up.scales": SCALES,
        "up.g_idx": g_idx,
    }
    said = {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True,
        "checkpoint_format": "gptq_v2", **config,
    }  # fmt: skip
    return _written(folder, tensors, said)


def compressed(folder: Path, g_idx, **weights):
    folder.mkdir()
    tensors = {
        "up.weight_packed": words(CODES),
        "up.weight_scale": np.ascontiguousarray(SCALES.T),
        "up.weight_shape": np.array([8, 80]),
        "up.weight_g_idx": g_idx,
    }
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32, **weights},
    }
    said = {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": group},
    }  # fmt: skip
    return _written(folder, tensors, said)


def _written(folder, tensors, said):
    kept = {name: value for name, value in tensors.items() if value is not MISSING}
    cq.save(folder / "model.safetensors", kept)
    (folder / "config.json").write_text(json.dumps({"quantization_config": said}))
    return folder


@pytest.mark.parametrize("kind", [gptq, compressed])
def test_columns_have_the_scale_of_their_group(kind, tmp_path):
    q = cq.load(kind(tmp_path / "m", G_IDX))["up.weight"]
    assert str(q.format) == {"gptq": "uint4:32+permuted"}.get(kind.__name__, "int4:32+permuted")
    np.testing.assert_array_equal(q.dequantize("float32"), WANT)
    np.testing.assert_array_equal(q.codes(), CODES)
    found = q.arrays()["permutation"]
    np.testing.assert_array_equal(found, np.argsort(G_IDX, kind="stable"))
    x = RNG.standard_normal((2, 80)).astype(np.float32)
    np.testing.assert_allclose(cq.linear(x, q), x @ WANT.T, rtol=1e-5, atol=1e-4)
    cq.convert(tmp_path / "m", tmp_path / "out", "gptq")  # a short last group too
    again = cq.load(tmp_path / "out")["up.weight"]
    np.testing.assert_array_equal(again.dequantize("float32"), WANT)
    np.testing.assert_array_equal(again.arrays()["permutation"], found)
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert said["desc_act"] is True


@pytest.mark.parametrize("kind", [gptq, compressed])
def test_columns_in_order_are_not_permuted(kind, tmp_path):
    q = cq.load(kind(tmp_path / "m", np.arange(80, dtype=np.int32) // 32))["up.weight"]
    assert not q.format.permuted
    np.testing.assert_array_equal(q.codes(), CODES)


def changed(place, value):
    found = G_IDX.copy()
    found[place] = value
    return found


WRONG = {
    "beyond the last group": (changed(7, 3), "holds 0..3; groups are 0..2"),
    "far beyond": (changed(7, 2**31 - 1), "groups are 0..2"),
    "below zero": (changed(7, -5), "holds -5..2"),
    "too short": (G_IDX[:-1], "80 columns have a group each"),
    "too long": (np.append(G_IDX, 0).astype(np.int32), "80 columns have a group each"),
    "empty": (G_IDX[:0], "80 columns have a group each"),
    "two axes": (G_IDX.reshape(8, 10), "80 columns have a group each"),
    "floats": (G_IDX.astype(np.float32), "80 columns have a group each"),
    "unequal groups": (changed(int(np.argmax(G_IDX == 0)), 1), "group 0 31 columns"),
    "one group": (np.zeros(80, np.int32), "group 0 80 columns"),
}


@in_turn("name", WRONG)
def test_a_wrong_g_idx_is_refused_by_name(name, tmp_path):
    g_idx, why = WRONG[name]
    for kind in (gptq, compressed):
        folder = kind(tmp_path / f"{name} {kind.__name__}", g_idx)
        with pytest.raises(cq.FormatError, match=rf"up\.weight.*{why}"):
            cq.load(folder)


def test_a_missing_g_idx_is_refused_where_it_is_needed(tmp_path):
    with pytest.raises(cq.FormatError, match=r"up\.weight.*g_idx is missing"):
        cq.load(gptq(tmp_path / "a", MISSING))
    assert not cq.load(gptq(tmp_path / "b", MISSING, desc_act=False))["up.weight"].format.permuted
    assert not cq.load(compressed(tmp_path / "c", MISSING))["up.weight"].format.permuted


def test_minus_one_says_that_columns_are_in_order(tmp_path):
    q = cq.load(compressed(tmp_path / "m", np.full(80, -1, np.int32)))["up.weight"]
    assert not q.format.permuted
