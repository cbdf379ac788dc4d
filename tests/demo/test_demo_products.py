"""The demo of a file: products with its matrices as they lie."""

import numpy as np
import pytest
from command_line import run

import cuquant as cq
from cuquant.demo import products as module
from cuquant.demo.products import products


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0)


@pytest.fixture
def path(tmp_path):
    rng = np.random.default_rng(2)
    w = rng.standard_normal((64, 256)).astype(np.float32)
    arrays = {
        "a.weight": cq.quantize(w, "q4_k"),
        "b.weight": cq.quantize(w + 1, "q4_k"),
        "c.weight": cq.quantize(w, "q8_0"),
        "plain.weight": w,
        "norm.weight": w[0],
    }
    cq.save(tmp_path / "m.safetensors", {**arrays, "p.weight": cq.prepack(cq.quantize(w, "int4"))})
    del arrays["plain.weight"]
    cq.save(tmp_path / "g.safetensors", arrays)
    with pytest.warns(UserWarning, match="architecture is not known"):
        cq.convert(tmp_path / "g.safetensors", tmp_path / "m.gguf", "gguf")
    return tmp_path


def test_each_format_and_shape_is_measured_once(path):
    begun = []
    rows = list(products(path / "m.gguf", rows=3, begin=begun.append))
    assert begun == ["q4_k 64 x 256", "q8_0 64 x 256"]
    assert [(str(r.format), r.shape, r.count, r.bits_per_weight) for r in rows] == [
        ("q4_k", (64, 256), 2, 4.5), ("q8_0", (64, 256), 1, 8.5),
    ]  # fmt: skip
    assert [r.nbytes for r in rows] == [2 * 64 * 144, 64 * 8 * 34]
    assert all(r.sqnr_db > 100 and r.seconds > 0 and r.decoded_seconds > 0 for r in rows)
    assert {str(r.format) for r in products(path / "m.safetensors")} == {"q4_k", "q8_0", "int4"}


def test_the_command_shows_a_row_for_each(path):
    result = run("demo", "--from", path / "m.gguf", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "q4_k    64 x 256      2          4.5" in result.stdout
    assert "35.8 kB of quantized matrices" in result.stdout
    assert "the CPU decodes w for each product" in result.stdout  # why SQNR is inf


def test_formats_of_a_file_are_not_chosen(path):
    result = run("demo", "--from", path / "m.gguf", "-f", "nf4", "--device", "cpu")
    assert result.exit_code == 2 and "leave out one of the two" in " ".join(result.stderr.split())


def test_files_without_quantized_matrices_and_damaged_ones_are_one_line(path):
    cq.save(path / "plain.safetensors", {"w": np.ones((2, 2), np.float32)})
    result = run("demo", "--from", path / "plain.safetensors", "--device", "cpu")
    assert result.exit_code == 1 and "has no quantized matrices" in result.stderr
    (path / "cut.gguf").write_bytes((path / "m.gguf").read_bytes()[:500])
    result = run("demo", "--from", path / "cut.gguf", "--device", "cpu")
    assert result.exit_code == 1 and result.stderr.count("\n") == 1, result.stderr
