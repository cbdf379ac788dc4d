"""The benchmark of the fused row quantizers, with NumPy in the place of a GPU."""

import json
import math

import numpy as np
import pytest
from fake_bench import FakeGpu, QuickEngine
from in_turn import in_turn
from typer.testing import CliRunner

from cuquant.bench import gpu as gpu_module
from cuquant.bench import rows
from cuquant.bench.quantize import parse_formats
from cuquant.cli import app

FORMATS = parse_formats(rows.FORMATS)


@pytest.fixture
def gpu(monkeypatch):
    made = FakeGpu()
    made.engine = QuickEngine()
    monkeypatch.setattr(gpu_module, "CupyGpu", lambda: made)
    return made


@pytest.mark.parametrize("operation", rows.OPERATIONS)
@in_turn("name", FORMATS)
def test_bytes_are_what_is_read_and_written(operation, name):
    shape, itemsize = (6, 512), 2
    x = np.ones(shape, np.float16)
    vectors = (np.ones(512, np.float16),) * 3
    how = {"global_scale": 1.0} if name == "nvfp4" else {}
    which = rows.OPERATIONS[operation]
    q = which.call(x, x, x.copy() if which.writes else None, vectors, format=name, **how)
    stored = sum(part.nbytes for part in q.arrays().values())
    own = (which.reads + which.writes) * x.nbytes + which.vectors * 512 * itemsize
    assert rows.moved_bytes(operation, FORMATS[name], shape, itemsize) == own + stored


def test_everything_is_measured_and_right(gpu):
    settings = rows.Settings(FORMATS, shapes=((70, 512),), repeats=10)
    began = []
    found = list(rows.run(gpu, settings, began.append))
    assert [(m.operation, m.format) for m in found] == [
        (operation, name) for operation in rows.OPERATIONS for name in FORMATS
    ]
    assert all(m.exact and m.dtype == "bfloat16" and m.shape == (70, 512) for m in found)
    assert began[0] == "rmsnorm int8:row bfloat16 70x512" and gpu.released == 1
    assert all(math.isclose(m.tbps, m.nbytes / m.timing.microseconds / 1e6) for m in found)


@pytest.mark.parametrize("what", ["packed", "sum"])
@pytest.mark.parametrize("row", [0, 35, -1])
def test_what_is_wrong_is_seen(row, what, gpu, monkeypatch):
    whole = rows.OPERATIONS["add_rmsnorm"].call

    def wrong(x, y, total, vectors, **how):
        q = whole(x, y, total, vectors, **how)
        if "out" in how:
            target = q.components["packed"] if what == "packed" else total
            target[row].view(np.uint8)[3] ^= 1
        return q

    monkeypatch.setitem(rows.OPERATIONS, "add_rmsnorm", rows.Operation(wrong, 2, 1, 1))
    settings = rows.Settings(parse_formats(["int8:row"]), ("add_rmsnorm",), shapes=((70, 64),))
    assert [m.exact for m in rows.run(gpu, settings)] == [False]


def test_command(gpu, tmp_path):
    file = tmp_path / "rows.json"
    arguments = ("--operations", "rmsnorm,silu_mul", "-f", "int8:row,mxfp8", "--shape", "70x512")
    found = CliRunner().invoke(app, ["bench", "rows", *arguments, "--json", str(file)])
    assert found.exit_code == 0, found.output
    assert "silu_mul" in found.output and "exact" in found.output
    results = rows.RowResults.from_json(file.read_text())
    assert len(results.measurements) == 4 and json.loads(file.read_text())["schema"].endswith("/1")
    found = CliRunner().invoke(app, ["bench", "rows", "--operations", "rmsnrm"])
    assert found.exit_code and "did you mean" in found.output + found.stderr
