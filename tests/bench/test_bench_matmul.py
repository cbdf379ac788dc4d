"""The benchmark of products with NumPy in the place of a GPU, and peers with fakes in theirs."""

import json
from dataclasses import replace

import numpy as np
import pytest
from bench_results import product_results
from fake_bench import MACHINE, FakeCublas, FakeEngine, FakeGpu, FakeProductPeer, QuickEngine
from samples import sampled
from typer.testing import CliRunner

import cuquant as cq
from cuquant.bench import (
    checked,
    matmul,
    matmul_peers,
    matmul_report,
    product_report,
    report,
    roofline,
    tiles,
    timing,
)
from cuquant.bench import gpu as gpu_module
from cuquant.bench.matmul_report import ProductResults
from cuquant.bench.quantize import parse_formats
from cuquant.bench.report import Ceilings, PeerTiming
from cuquant.cli import app
from cuquant.gpu.rates import H100_TILES, Rates, TileCosts

PNG = b"\x89PNG"


@pytest.fixture
def gpu(monkeypatch):
    made = FakeGpu()
    made.machine = replace(MACHINE, l2_bytes=5000)
    made.engine = QuickEngine()
    monkeypatch.setattr(gpu_module, "CupyGpu", lambda: made)
    monkeypatch.setattr(timing, "HOST_CALLS", 1)
    monkeypatch.setattr(matmul_peers, "cublas", FakeCublas)
    monkeypatch.setattr(roofline, "GEMM_SIZE", 32)
    peers = {"cublas": (None, FakeCublas), "humming": ("no_such_module", FakeProductPeer)}
    monkeypatch.setattr(matmul_peers, "PEERS", peers)
    return made


def settings(names, **changes):
    made = matmul.Settings(parse_formats(names), shapes=((70, 256),), batches=(1, 3), repeats=10)
    return replace(made, **changes)


def command(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "matmul", *map(str, arguments)])


SMALL = ("--shapes", "70x256", "--batch", "1,3", "--repeats", 10)


# ---- measuring ----------------------------------------------------------------------------------

NAMES = ["int4", "uint4:64", "k3", "nvfp4", "fp16", "q8_0", "int8:tensor", "nf4+dq"]


def test_bytes_are_the_weight_x_and_y():
    for name, fmt in parse_formats(NAMES).items():
        stored = cq.quantize(np.ones((6, 256), np.float32), fmt).nbytes
        assert matmul.product_bytes(fmt, (6, 256), 5, 2) == stored + 2 * 5 * (6 + 256), name


@pytest.mark.parametrize(
    "dtype, prepack", [("float16", True), ("float16", False), ("bfloat16", True), ("float32", True)]
)
def test_every_kind_of_format_is_measured_and_right(dtype, prepack, gpu):
    chosen = settings(NAMES, dtypes=(dtype,), shapes=((70, 256), (5, 512)), prepack=prepack)
    began = []
    found = list(matmul.run(gpu, chosen, begin=began.append))
    cases = [(s, name, m) for s in chosen.shapes for name in NAMES for m in chosen.batches]
    assert [(m.shape, m.format, m.batch) for m in found] == cases
    assert all(m.right for m in found) and {m.dtype for m in found} == {dtype}
    assert began[:2] == [f"int4 {dtype} 70x256", f"int4 {dtype} 70x256, batch 1"]
    layouts = {m.format: m.layout for m in found}
    assert layouts["int4"] == ("fragments/1" if prepack else "rows/1")
    assert layouts["fp16"] == "rows/1"
    for m in found:
        assert m.flops == 2 * m.batch * m.shape[0] * m.shape[1] and m.host_us > 0
        assert m.tbps == pytest.approx(m.nbytes / m.timing.microseconds / 1e6)
        assert m.tflops == pytest.approx(m.flops / m.timing.microseconds / 1e6)


def test_operands_are_rotated_past_the_cache(gpu, monkeypatch):
    seen = []

    def noted(x, w, *, out):
        seen.append((x, w, out))
        return cq.linear(x, w, out=out)

    monkeypatch.setattr(matmul, "linear", noted)
    gpu.machine = MACHINE
    (found,) = matmul.run(gpu, settings(["int4"], batches=(1,)))
    count = timing.copies(MACHINE.l2_bytes, found.nbytes)
    assert count > 8 and found.timing.calls == count
    operands = [(id(x), id(w), id(out)) for x, w, out in seen]
    assert len(set(operands)) == count
    memory = {id(next(iter(w.arrays().values()))) for _, w, _ in seen}
    assert len(memory) == count


def test_warm_weights_are_the_same_in_each_call(gpu, monkeypatch):
    seen = []

    def noted(x, w, *, out):
        seen.append((id(x), id(w), id(out)))
        return cq.linear(x, w, out=out)

    monkeypatch.setattr(matmul, "linear", noted)
    gpu.machine = MACHINE
    (found,) = matmul.run(gpu, settings(["int4"], batches=(3,), cold=False))
    assert found.right and found.timing.calls == timing.copies(MACHINE.l2_bytes, found.nbytes)
    xs, weights, ys = map(set, zip(*seen, strict=True))
    assert len(weights) == 1 and len(xs) == len(ys) == found.timing.calls


@pytest.mark.parametrize("where", [(0, 0), (2, 69), (1, 35)])
def test_a_wrong_number_is_seen(where, gpu, monkeypatch):
    def wrong(x, w, *, out):
        cq.linear(x, w, out=out)
        if len(out) > 1:
            out[where] += 2

    monkeypatch.setattr(matmul, "linear", wrong)
    chosen = settings(["int4"])
    assert [m.right for m in matmul.run(gpu, chosen)] == [True, False]
    assert where[1] in checked.some_columns(70)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_lost_column_of_many_is_seen(dtype):
    """Which the bound of each number may not see."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 1024)).astype(dtype)
    w = rng.standard_normal((64, 1024)).astype(np.float32)
    x[:, -1] = 2
    wanted, bound = checked.bounded_product(x, w, dtype, dtype)
    found = x.astype(np.float64) @ w.astype(dtype).astype(np.float64).T
    lost = found - x[:, -1:].astype(np.float64) @ w[:, -1:].astype(np.float64).T
    gap, gap_lost = np.abs(found.astype(dtype).astype(np.float64) - wanted), np.abs(lost - wanted)
    assert (gap <= bound).all() and checked.is_near(gap, wanted, dtype, dtype, 1024)
    assert not checked.is_near(gap_lost, wanted, dtype, dtype, 1024)


def test_what_was_never_written_is_seen(gpu, monkeypatch):
    monkeypatch.setattr(matmul, "linear", lambda x, w, *, out: None)
    assert not any(m.right for m in matmul.run(gpu, settings(["nf4"])))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_bound_holds_the_roundings_of_weights_and_of_the_sum(dtype):
    kind = np.dtype(dtype)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 512)).astype(kind)
    w = rng.standard_normal((9, 512)).astype(np.float32)
    wanted, bound = checked.bounded_product(x, w, dtype, dtype)
    rounded = x.astype(np.float32) @ w.astype(kind).astype(np.float32).T
    assert (np.abs(rounded.astype(kind).astype(np.float64) - wanted) <= bound).all()
    assert (bound < 0.1 * np.abs(x.astype(np.float64)) @ np.abs(w.astype(np.float64)).T).all()
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    assert np.array_equal(wanted, exact)


def test_host_time_is_the_median_of_rounds(monkeypatch):
    ticks = iter(np.cumsum([0] + [1e-3, 9e-3] * 10) * timing.HOST_CALLS)  # 1 ms a call
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ticks))
    calls = []
    found = timing.host_time(FakeEngine(), [lambda: calls.append(0), lambda: calls.append(1)], 3)
    assert found == pytest.approx(1e3) and len(calls) == 10 * timing.HOST_CALLS
    assert calls.count(0) == calls.count(1)


# ---- peers --------------------------------------------------------------------------------------


def test_peers_are_timed_beside_where_they_have_the_format(gpu):
    peer, dense = FakeProductPeer(), FakeCublas()
    chosen = settings(["int4", "nf4"])
    found = list(matmul.run(gpu, chosen, [peer, dense]))
    names = [[p.name for p in m.peers] for m in found]
    assert names == [["other 1.0", "cuBLAS (fake 1.0)"]] * 2 + [["cuBLAS (fake 1.0)"]] * 2
    assert all(p.timing.graph and p.problem is None for m in found for p in m.peers)
    assert peer.prepared == [(n, "float16", 5000) for n in ("int4", "nf4")]
    assert dense.prepared == peer.prepared[:1]  # its time is that of every format
    assert [m.peers[-1] for m in found[:2]] == [m.peers[-1] for m in found[2:]]


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"problem": "prepare"}, "no nvcc"),
        ({"problem": "call"}, "no kernel"),
        ({"factor": 1.05}, "its result is off by 0.05 of its size"),
        ({"factor": np.nan}, "its result is off by nan of its size"),
    ],
)
def test_a_peer_that_fails_has_a_problem_instead(changes, problem, gpu):
    chosen = settings(["int4"])
    for m in matmul.run(gpu, chosen, [FakeProductPeer(**changes)]):
        assert m.peers == (PeerTiming("other 1.0", None, problem),) and m.right


# ---- results ------------------------------------------------------------------------------------


def test_the_floor_is_that_of_bytes_or_of_operations():
    found = product_results()
    first, second, _ = found.measurements
    assert found.floor(first) == pytest.approx(8_667_136 / 3e6)
    assert found.floor(second) == pytest.approx(2 * 4096**3 / 800e6)
    assert product_results(gemm={}).floor(second) == pytest.approx(75_759_616 / 3e6)
    assert found.of_floor(second) == pytest.approx(found.floor(second) / 400)


def test_the_table():
    found = product_results()
    assert matmul_report.headings(found) == (
        "format", "dtype", "N x K", "batch", "us", "TB/s", "TFLOP/s", "of floor", "host us",
        "check", "cuBLAS", "humming", "faster",
    )  # fmt: skip
    assert matmul_report.rows(found) == [
        ("int4", "float16", "4096x4096", "1", "10.0", "0.87", "3.4", "0.29", "11.2", "right",
         "20.0", "15.0", "1.50x"),
        ("int4", "float16", "4096x4096", "4096", "400.0 (no graph)", "0.19", "343.6", "0.43",
         "11.2", "WRONG", "20.0", "", "0.05x"),
        ("nf4", "float16", "4096x4096", "1", "10.0", "0.87", "3.4", "0.29", "11.2", "right",
         "", "", ""),
    ]  # fmt: skip
    alone = product_results(measurements=found.measurements[2:])
    assert matmul_report.headings(alone)[-1] == "check"
    assert {len(row) for row in matmul_report.rows(alone)} == {10}
    assert alone.right and not found.right


def test_the_header_names_machine_ceilings_peers_and_problems():
    lines = product_results().header()
    assert lines[0] == str(MACHINE)
    assert lines[1:] == [
        "ceilings measured here: copy 2.50 TB/s, read 3.00, write 3.20, cuBLAS float16 800 TFLOP/s",
        matmul.FORMULA,
        "peers, us: cuBLAS (torch 2.11.0), humming 0.1.19",
        "a note",
        "gemlite 0.6.0 failed at int4 float16 4096x4096: no triton",
    ]


def test_json_goes_there_and_back():
    found = product_results()
    text = found.to_json()
    assert ProductResults.from_json(text) == found
    described = json.loads(text)
    assert described["schema"] == "cuquant.bench.matmul/1"
    first = described["measurements"][0]
    assert first["of_floor"] == pytest.approx(first["floor_us"] / 10)
    for name in [*described, *first]:
        assert name in report.__doc__ + product_report.__doc__ + matmul_report.__doc__, name
    for bad in ("[]", "{}", '{"schema": "cuquant.bench/1"}'):
        with pytest.raises(ValueError, match=r"cuquant\.bench\.matmul/1"):
            ProductResults.from_json(bad)


@pytest.mark.parametrize("suffix", sampled(["png", "svg", "pdf"]))
@pytest.mark.parametrize("gemm", [{}, {"float16": 800.0}])
def test_the_picture_is_written(suffix, gemm, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"roof.{suffix}"
    roofline.plot_products(product_results(gemm=gemm), path)
    assert path.read_bytes().startswith({"png": PNG, "svg": b"<?xml", "pdf": b"%PDF"}[suffix])


def test_the_rate_of_cublas_counts_two_operations_a_product(monkeypatch):
    assert roofline.GEMM_SIZE >= 4096
    monkeypatch.setattr(roofline, "GEMM_SIZE", 64)
    # 3 us: warming, 4 us: a first replay; then 5..14 us for rounds of 8 calls.
    found = roofline.measure_gemm(FakeCublas(), FakeGpu(), "float16", 10)
    assert found == pytest.approx(2 * 64**3 / (9.5 / 8) / 1e6)


def test_rates_are_bytes_and_operations_in_a_microsecond(monkeypatch):
    monkeypatch.setattr(roofline, "measure_ceilings", lambda *_: Ceilings(2.9, 3.15, 3.2))
    monkeypatch.setattr(roofline, "measure_gemm", lambda *a: {"float16": 670, "float32": 44}[a[2]])
    found = roofline.measure_rates(FakeGpu(), FakeCublas(), 10)
    assert (found.read, found.tensor, found.float32) == pytest.approx((3.15e6, 670e6, 44e6))


def test_calibrate_prints_a_row_of_the_table_of_rates(gpu, monkeypatch):
    monkeypatch.setattr(roofline, "GEMM_SIZE", 64)
    monkeypatch.setattr(roofline, "CEILING_BYTES", 1 << 20)
    monkeypatch.setattr(matmul_peers, "cublas", FakeCublas)
    for costs in (None, H100_TILES):  # as on other GPUs, and on Hopper
        monkeypatch.setattr(tiles, "calibrated", lambda *_, costs=costs: costs)
        result = CliRunner().invoke(app, ["bench", "calibrate"])
        assert result.exit_code == 0, result.output
        (row,) = eval(f"{{{result.stdout}}}", {"Rates": Rates, "TileCosts": TileCosts}).items()
        assert row[0] == MACHINE.device and row[1].read > 0 and row[1].tensor > 0
        assert costs is None or row[1].tiles == costs


# ---- the command --------------------------------------------------------------------------------


def test_the_command_prints_writes_and_draws(gpu, tmp_path):
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    result = command(*SMALL, "--dtypes", "float16,bfloat16", "--json", out, "--plot", picture)
    assert result.exit_code == 0, result.output
    for text in (str(MACHINE), "humming: no_such_module is not installed", "weights: prepacked"):
        assert text in result.output
    table = [line.split() for line in result.output.splitlines() if "70x256" in line]
    assert len(table) == 2 * 2 * 2 and {line[9] for line in table} == {"right"}
    assert {len(line) for line in table} == {12}
    found = ProductResults.from_json(out.read_text(encoding="utf-8"))
    assert [m.format for m in found.measurements] == ["int4", "int4", "nf4", "nf4"] * 2
    assert set(found.gemm) == {"float16", "bfloat16"} and found.machine == gpu.machine
    assert picture.read_bytes().startswith(PNG)


def test_without_cublas_the_floor_is_that_of_the_bytes(gpu, monkeypatch):
    def missing():
        raise ImportError("libcublas.so.12 is not there")

    monkeypatch.setattr(matmul_peers, "cublas", missing)
    result = command(*SMALL, "--peers", "none", "--no-prepack")
    assert result.exit_code == 0, result.output
    assert "the floor is that of the bytes alone: libcublas.so.12" in result.output
    assert "not prepacked" in result.output and "faster\n" not in result.output


def test_warm_weights_are_said_and_have_no_peers(gpu):
    result = command(*SMALL, "--warm", "--peers", "none")
    assert result.exit_code == 0 and "in the L2 cache where they fit" in result.output
    assert "below the floor" in " ".join(result.output.split())
    assert "in the L2 cache" not in command(*SMALL, "--peers", "none").output
    result = command(*SMALL, "--warm")
    assert result.exit_code == 2 and "--peers none" in result.output


def test_what_was_measured_stays_when_the_run_is_ended(gpu, tmp_path, monkeypatch):
    def ends(x, w, *, out):
        if len(x) > 1:
            raise RuntimeError("the machine is given back")
        cq.linear(x, w, out=out)

    monkeypatch.setattr(matmul, "linear", ends)
    out = tmp_path / "bench.json"
    assert command(*SMALL, "--json", out).exit_code == 1
    assert [m.batch for m in ProductResults.from_json(out.read_text()).measurements] == [1]


def test_a_wrong_result_is_said_and_exit_code_1(gpu, monkeypatch):
    monkeypatch.setattr(matmul, "linear", lambda x, w, *, out: None)
    result = command("-f", "nf4", *SMALL, "--peers", "cublas")
    assert result.exit_code == 1
    assert result.output.count("WRONG") == 3 and "marked WRONG" in result.output


@pytest.mark.parametrize(
    "arguments, code",
    [
        (["--shapes", "4096"], 2), (["--batch", "0"], 2), (["--batch", "1,x"], 2),
        (["--plot", "x.txt"], 2), (["--json", "none/x.json"], 2), (["--repeats", 2], 2),
        (["-f", "nf5"], 1), (["--dtypes", "float64"], 1), (["--peers", "marlin"], 1),
    ],
)  # fmt: skip
def test_wrong_usage_is_refused_before_the_work(arguments, code, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_module, "CupyGpu", None)
    monkeypatch.chdir(tmp_path)
    result = command(*arguments)
    assert result.exit_code == code and isinstance(result.exception, SystemExit), result.output


def test_bench_lists_it():
    result = CliRunner().invoke(app, ["bench", "--help"])
    assert result.exit_code == 0 and "matmul" in result.output and "quantize" in result.output
