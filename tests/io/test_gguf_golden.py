"""GGUF files of ggml's own blocks: their values are the gguf package's, and our bytes are ggml's.

random.gguf holds random bytes of every type; arrays.gguf what ggml's C quantizers make of an array.
"""

import random
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from in_turn import in_turn

import cuquant as cq
from cuquant.io.container.gguf import GgufReader, GgufWriter

DATA = Path(__file__).parents[1] / "data" / "gguf"
RANDOM, ARRAYS = DATA / "gguf-random-blocks", DATA / "gguf-ggml-arrays"
DIRECT = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4", "nvfp4")  # quantized without a search


@in_turn("folder", [RANDOM, ARRAYS])
def test_values_are_the_owners(folder):
    """Bit by bit, of every type that is decoded; -0.0, infinities and all."""
    (path,) = folder.glob("*.gguf")
    found, wanted = cq.load(path), np.load(folder / "dequantized.npz")
    decoded = {n: q for n, q in found.items() if isinstance(q, cq.QuantArray)}
    assert {"ggml_mxfp4", "ggml_nvfp4", "q4_k"} <= {str(q.format) for q in decoded.values()}
    for name, q in decoded.items():
        with np.errstate(all="ignore"):
            values = q.dequantize()
        theirs = wanted[name].reshape(values.shape)
        same = values.view(np.uint32) == theirs.view(np.uint32)
        assert (same | (np.isnan(values) & np.isnan(theirs))).all(), name


@pytest.mark.parametrize("name", DIRECT)
def test_bytes_are_ggmls(name):
    x = np.load(ARRAYS / "original.npz")["x"]
    stored = cq.load(ARRAYS / "arrays.gguf")[f"{name}.plain"]
    assert cq.array_equal(cq.quantize(x, stored.format), stored)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_blocks_become_ocps_format_and_are_written_again(name, tmp_path):
    """Codes and scales as they are: no scale of these is one that OCP reads otherwise."""
    stored = cq.load(ARRAYS / "arrays.gguf")[f"{name}.plain"]
    other = cq.QuantArray.from_blocks(stored.to_blocks(), name, stored.shape)
    assert other.format.name == name
    assert (other.dequantize() == stored.dequantize()).all()
    for i, q in enumerate((stored, other)):
        cq.save(tmp_path / f"{i}.safetensors", {"w": q})
        with pytest.warns(UserWarning, match="architecture"):
            cq.convert(tmp_path / f"{i}.safetensors", tmp_path / f"{i}.gguf", "gguf")
        assert cq.array_equal(cq.load(tmp_path / f"{i}.gguf")["w"], stored)


# ---- NVFP4 with a scale beside it ----------------------------------------------------------------

SCALED = np.array([0.37, 2.5, 1e-3], np.float32)


def scaled(path, scale, shape=(3, 8, 128), name="blk.0.ffn_up_exps."):
    """A file with NVFP4 as llama.cpp's converter writes it, and its blocks."""
    rng = np.random.default_rng(2)
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // 64, 36)).astype(np.uint8)
    blocks[..., :4] &= 0x7F  # 0x7F is there: 0 for ggml
    blocks[..., 0, 0] = 0x7F
    specs = {
        f"{name}weight": ("NVFP4", shape), f"{name}scale": ("F32", scale.shape),
        f"{name}input_scale": ("F32", (1,)),
    }  # fmt: skip
    stored = blocks.reshape(*shape[:-1], -1)
    with GgufWriter(path, specs, {"general.architecture": "llama"}) as writer:
        values = {"weight": stored, "scale": scale, "input_scale": np.ones(1, np.float32)}
        for end, value in values.items():
            writer.write(name + end, value)
    return cq.QuantArray.from_blocks(blocks, "ggml_nvfp4", shape)


@pytest.mark.parametrize("scale", [SCALED, SCALED[:1]])
def test_nvfp4_is_multiplied_by_the_scale_beside_it(scale, tmp_path):
    path = tmp_path / "m.gguf"
    theirs = scaled(path, scale).dequantize()
    found = cq.load(path)
    assert set(found) == {"blk.0.ffn_up_exps.weight", "blk.0.ffn_up_exps.input_scale"}
    q = found["blk.0.ffn_up_exps.weight"]
    assert str(q.format) == ("nvfp4+per_matrix" if len(scale) > 1 else "nvfp4")
    np.testing.assert_array_equal(q.arrays()["global_scale"], scale if len(scale) > 1 else scale[0])
    want = theirs * (scale if len(scale) == 1 else scale[:, None, None])
    np.testing.assert_allclose(q.dequantize(), want, rtol=1e-6)  # two products in another order
    for i in range(3):
        np.testing.assert_array_equal(q[i].dequantize(), q.dequantize()[i])
    if len(scale) == 1:  # experts have one each, as llama.cpp wants it
        scale, q = (
            np.repeat(scale, 3),
            q._with(
                format=cq.get_format("nvfp4+per_matrix"),
                components={**q.components, "global_scale": np.repeat(scale, 3)},
            ),
        )
    again = tmp_path / "again.gguf"
    cq.convert(path, again, "gguf")
    assert cq.array_equal(cq.load(again)["blk.0.ffn_up_exps.weight"], q)
    with GgufReader(path) as was, GgufReader(again) as made:
        assert list(made.tensors) == list(was.tensors)
        np.testing.assert_array_equal(made.read("blk.0.ffn_up_exps.scale"), scale)


def test_rows_of_nvfp4_are_scaled_too(tmp_path):
    scaled(tmp_path / "m.gguf", SCALED[:1], (6, 64))
    with cq.open(tmp_path / "m.gguf") as file:
        entry = file["blk.0.ffn_up_exps.weight"]
        assert cq.array_equal(entry.rows(2, 5), entry.read()[2:5])
        assert entry.tensors == ("blk.0.ffn_up_exps.weight", "blk.0.ffn_up_exps.scale")
        assert entry.nbytes == 6 * 36 + 4


def test_scales_that_fit_nothing_are_refused_or_told(tmp_path):
    for scale in (SCALED[:2], SCALED.reshape(1, 3)):
        scaled(tmp_path / "m.gguf", scale)
        with pytest.raises(cq.FormatError, match=r"ffn_up_exps\.scale.*is no scale of"):
            cq.load(tmp_path / "m.gguf", names=["blk.0.ffn_up_exps.weight"])
    scaled(tmp_path / "m.gguf", SCALED[:1], (2, 64))
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    data[data.index(b"\x7f", len(data) - 2 * 36 - 128)] = 0xFF
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(
        cq.FormatError, match="1 scales of blocks are 0xff, which ggml reads as 480"
    ):
        cq.load(tmp_path / "m.gguf")
    specs = {"a.weight": ("Q8_0", (1, 32)), "a.scale": ("F32", (1,))}
    with GgufWriter(tmp_path / "o.gguf", specs, {}) as writer:
        writer.write("a.weight", np.zeros((1, 34), np.uint8))
        writer.write("a.scale", np.ones(1, np.float32))
    with cq.open(tmp_path / "o.gguf") as file:
        assert file["a.weight"].notes == ("llama.cpp multiplies the product with it by 'a.scale'",)
        assert "a.scale" in file


def test_a_damaged_file_with_scales_is_refused_or_fits(tmp_path):
    path, rng, read = tmp_path / "m.gguf", random.Random(1), 0
    scaled(path, SCALED)
    good = path.read_bytes()
    for _ in range(200):
        data = bytearray(good)
        for _ in range(rng.randint(1, 2)):
            data[rng.randrange(420)] = rng.choice([0, 1, 2, 255, rng.randrange(256)])  # the header
        path.write_bytes(data)
        with suppress(cq.FormatError), cq.open(path) as file:
            for entry in file.values():
                with suppress(cq.FormatError):
                    value = entry.read()
                    assert tuple(value.shape) == entry.shape
                    if isinstance(value, cq.QuantArray):
                        value.check()
                        read += np.isfinite(value.dequantize()).all()
    assert read > 20
