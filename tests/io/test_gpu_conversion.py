"""Conversions that quantize on a GPU: the same files as on the CPU."""

import numpy as np
import pytest

import cuquant as cq
from cuquant.demo import products as module
from cuquant.demo.products import products

pytestmark = pytest.mark.gpu


@pytest.fixture
def model(tmp_path):
    rng = np.random.default_rng(4)
    folder = tmp_path / "model"
    folder.mkdir()
    arrays = {f"l.{i}.weight": rng.standard_normal((96, 512)).astype("f2") for i in range(4)}
    cq.save(folder / "model.safetensors", {**arrays, "l.0.bias": np.ones(96, np.float32)})
    return folder


@pytest.mark.parametrize("kind", ["cuquant", "gguf", "gptq", "bitsandbytes", "mlx"])
def test_files_are_those_of_the_cpu(gpu, model, tmp_path, kind):
    held = {"cuquant": "uint4:32+min", "gguf": "q8_0", "gptq": "int8:32+float16"}
    usual = {"gguf": "q4_k", "gptq": "int4:32", "bitsandbytes": "nf4", "mlx": "mxfp4"}
    formats = {"l.1": held.get(kind, usual.get(kind)), "*": usual.get(kind, "nf4+dq")}
    made = {}
    for device in ("cpu", "cuda"):
        (tmp_path / device).mkdir()
        target = tmp_path / device / ("m.gguf" if kind == "gguf" else "m")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("warnings.warn", lambda *a, **k: None)  # of what GGUF will not say
            cq.convert(model, target, kind, formats, device=device)
        files = [target] if kind == "gguf" else target.iterdir()
        made[device] = {path.name: path.read_bytes() for path in files}
    assert made["cpu"] == made["cuda"]


def test_products_of_a_file(gpu, model, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0)
    cq.convert(model, tmp_path / "out", "gptq", "int4:32", device="cuda")
    (row,) = products(tmp_path / "out", device="cuda:0")
    assert row.count == 4 and row.sqnr_db > 40  # x and the result are float16
