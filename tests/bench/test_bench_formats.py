"""Formats on the demo's model: a small one and made-up embeddings in the place of the real ones."""

import json
import math
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_bench import MACHINE, FakeCublas, FakeEngine, FakeGpu
from typer.testing import CliRunner

import cuquant as cq
from cuquant.bench import formats, matmul_peers
from cuquant.bench import gpu as gpu_module
from cuquant.cli import app
from cuquant.demo import products, run
from cuquant.demo.encoder import linear_weights

CONFIG = {"num_hidden_layers": 1}
SHAPES = [(64, 64)] * 4 + [(128, 64), (64, 128)]
LAYERS = [np.random.default_rng(i).standard_normal(s, np.float32) for i, s in enumerate(SHAPES)]
MODEL = SimpleNamespace(weights=Path("model"), config=CONFIG)


@pytest.fixture
def model(monkeypatch):
    """A model, of which only the products are real; and the CPU's clock is quick."""
    asked = {}

    def compare(model, chosen, *, count, device, begin):
        asked.update(formats=list(chosen), count=count, device=device)
        whole = run.Row("fp32", 32.0, 90.0, math.inf, 0.0, 1.0, 0.0, 1.0)
        return [whole, *(run.Row(name, f.bits_per_element, 90 * f.bits_per_element / 32, 20.0,
                                 0.25, 0.9, 0.0, 1.0) for name, f in chosen.items())]  # fmt: skip

    monkeypatch.setattr(run, "compare", compare)
    monkeypatch.setattr(run, "missing", lambda plot: None)
    monkeypatch.setattr(run, "find_model", lambda: MODEL)
    weights = dict(zip(linear_weights(CONFIG), LAYERS, strict=True))
    monkeypatch.setattr(formats, "load_weights", lambda path: weights)
    monkeypatch.setattr(products, "SECONDS", 0)
    return asked


def command(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "formats", *map(str, arguments)])


def test_fp16_is_always_there():
    assert list(formats.chosen([])) == ["fp16", *formats.FORMATS]
    assert list(formats.chosen(["nf4", "fp16"])) == ["fp16", "nf4"]


def test_the_cpu_multiplies_with_every_layer(model, monkeypatch):
    seen = []
    monkeypatch.setattr(formats, "seconds", lambda call, device: seen.append(call()) or 2e-6)
    chosen = formats.chosen(["int8"])
    found = formats.compare(MODEL, chosen, gpu=None, rows=(1, 3), count=5)
    assert model == {"formats": ["fp16", "int8"], "count": 5, "device": "cpu"}
    assert [r.format for r in found] == ["fp32", "fp16", "int8"]
    assert [s.rows for r in found for s in r.speeds] == [1, 3] * 3
    assert {s.microseconds for r in found for s in r.speeds} == {2.0}
    assert [[y.shape for y in ys] for ys in seen] == [
        [(m, n) for n, _ in SHAPES] for _ in found for m in (1, 3)
    ]
    x = formats.random_values((3, 64), "float32")
    np.testing.assert_array_equal(seen[-1][0], cq.linear(x, cq.quantize(LAYERS[0], "int8")))


def test_a_gpu_has_cublas_for_floats_and_prepacked_weights_for_the_others(monkeypatch):
    vendor, seen = FakeCublas(), []
    vendor.engine = FakeEngine()
    monkeypatch.setattr(matmul_peers, "cublas", lambda: vendor)

    def noted(x, w, *, out):
        seen.append((x.dtype, type(w), w.format.name, out.shape))
        return cq.linear(x, w, out=out)

    monkeypatch.setattr(formats, "linear", noted)
    gpu = FakeGpu()
    for fmt in (None, cq.get_format("bf16"), cq.get_format("int4")):
        assert formats.layers_time(gpu, LAYERS, fmt, 2, 10) > 0
    assert vendor.engine.captured == 2 and gpu.engine.captured == 1 and gpu.released == 3
    once = [(np.float16, cq.PackedWeight, "int4", (2, n)) for n, _ in SHAPES]
    assert seen[: len(SHAPES)] == once


def results():
    speed = formats.Speed
    made = (
        ("fp32", 32.0, 90.0, None, 1.0, 1.0, (8.0, 800.0)),
        ("fp16", 16.0, 45.0, 73.0, 1.0, 1.0, (4.0, 100.0)),
        ("int4", 4.125, 12.6, 19.25, 0.94, 0.85, (2.0, 200.0)),
    )
    rows = [
        formats.FormatRow(*row[:6], (speed(1, row[6][0]), speed(64, row[6][1]))) for row in made
    ]
    return formats.FormatResults("cuquant bench formats", "a device", ("a note",), tuple(rows))


def test_the_table_has_speeds_beside_fp32_and_fp16():
    assert formats.headings(results()) == (
        "format", "bits", "MB", "memory", "us, M=1", "fp32, M=1", "fp16, M=1",
        "us, M=64", "fp32, M=64", "fp16, M=64", "SQNR dB", "cosine", "top-10",
    )  # fmt: skip
    assert formats.rows(results()) == [
        ("fp32", "32", "90.0", "100.0%", "8", "1.00x", "0.50x", "800", "1.00x", "0.12x", "",
         "1.00000", "100.0%"),
        ("fp16", "16", "45.0", "50.0%", "4", "2.00x", "1.00x", "100", "8.00x", "1.00x", "73.0",
         "1.00000", "100.0%"),
        ("int4", "4.125", "12.6", "14.0%", "2", "4.00x", "2.00x", "200", "4.00x", "0.50x", "19.2",
         "0.94000", "85.0%"),
    ]  # fmt: skip


def test_the_json_says_what_its_module_tells():
    described = json.loads(results().to_json())
    assert described["schema"] == formats.FormatResults.SCHEMA
    first = described["rows"][0]
    for name in [*described, *first, *first["speeds"][0]]:
        assert name in formats.__doc__, name
    assert first["sqnr_db"] is None and len(described["rows"]) == 3


def test_the_command_says_that_the_times_are_the_cpus(model, tmp_path):
    out = tmp_path / "formats.json"
    result = command("--device", "cpu", "-f", "int8", "--rows", "1,2", "--json", out)
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "on the CPU, which decodes a weight for each product" in said and "cores" in said
    table = [line.split()[0] for line in result.output.splitlines() if "%" in line]
    assert table == ["fp32", "fp16", "int8"] and "us, M=2" in result.output
    assert [row["format"] for row in json.loads(out.read_text())["rows"]] == table


def test_the_command_names_the_gpu(model, monkeypatch):
    monkeypatch.setattr(run, "pick_device", lambda asked: ("cuda:0", ""))
    monkeypatch.setattr(sys.modules["cuquant.cli.bench"], "use", lambda device: nullcontext())
    monkeypatch.setattr(gpu_module, "CupyGpu", FakeGpu)
    monkeypatch.setattr(matmul_peers, "cublas", FakeCublas)
    result = command("-f", "int8", "--rows", 2)
    assert result.exit_code == 0, result.output
    assert str(MACHINE) in result.output and "as a CUDA graph" in result.output
    assert model["device"] == "cuda:0"


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(run, "missing", lambda plot: "python -m pip install tokenizers")
    result = command()
    assert result.exit_code == 1 and "python -m pip install tokenizers" in result.output


@pytest.mark.parametrize(
    "arguments, code",
    [(["--rows", "0"], 2), (["--rows", "x"], 2), (["--device", "gpu9"], 2), (["-f", "int9"], 1),
     (["--json", "none/x.json"], 2), (["--passages", "1"], 2)],
)  # fmt: skip
def test_wrong_usage_is_refused_before_the_work(arguments, code, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = command(*arguments)
    assert result.exit_code == code and isinstance(result.exception, SystemExit), result.output
    assert not model
