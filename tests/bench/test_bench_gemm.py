"""The benchmark of products of two quantized arrays, with NumPy in the place of a GPU."""

import json
from dataclasses import replace

import numpy as np
import pytest
from bench_results import gemm_results
from fake_bench import MACHINE, FakeDenseGemm, FakeGemmPeer, FakeGpu, QuickEngine
from typer.testing import CliRunner

import cuquant as cq
from cuquant.array.packed_weight import PackedWeight
from cuquant.bench import gemm, gemm_peers, gemm_report, product_report, report, roofline, timing
from cuquant.bench import gpu as gpu_module
from cuquant.bench.gemm_report import GemmResults
from cuquant.bench.markdown import markdown
from cuquant.bench.report import PeerTiming
from cuquant.cli import app

SHAPE = (7, 70, 256)
SMALL = ("--shape", "7x70x256", "--repeats", 10)


@pytest.fixture
def gpu(monkeypatch):
    made = FakeGpu()
    made.machine = replace(MACHINE, l2_bytes=5000)
    made.engine = QuickEngine()
    monkeypatch.setattr(gpu_module, "CupyGpu", lambda: made)
    monkeypatch.setattr(timing, "HOST_CALLS", 1)
    monkeypatch.setattr(roofline, "CEILING_BYTES", 1 << 10)
    peers = {
        "cublas": (None, FakeDenseGemm),
        "int_mm": (None, FakeGemmPeer),
        "humming": ("no_such_module", FakeGemmPeer),
    }
    monkeypatch.setattr(gemm_peers, "PEERS", peers)
    return made


def settings(names=gemm.PAIRS, **changes):
    return replace(gemm.Settings(gemm.parse_pairs(names), (SHAPE,), 10), **changes)


def command(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "gemm", *map(str, arguments)])


# ---- pairs --------------------------------------------------------------------------------------


def test_one_format_is_for_both_sides():
    pairs = gemm.parse_pairs(["fp8_e4m3:128x128", "fp8_e4m3:128@nf4:32+dq"])
    assert [tuple(map(str, pair)) for pair in pairs.values()] == [
        ("fp8_e4m3:128x128", "fp8_e4m3:128x128"),
        ("fp8_e4m3:128", "nf4:32+dq"),
    ]


@pytest.mark.parametrize("text", ["int8@", "@int8", "int8@int8@int8", "@"])
def test_what_is_no_pair_is_refused(text):
    with pytest.raises(ValueError, match="is no pair of formats"):
        gemm.parse_pairs([text])


@pytest.mark.parametrize("name", gemm.PAIRS)
def test_bytes_are_both_sides_and_y(name):
    (pair,) = gemm.parse_pairs([name]).values()
    m, n, k = SHAPE
    x, w = (np.ones(shape, np.float32) for shape in ((m, k), (n, k)))
    stored = cq.quantize(x, pair.x).nbytes + cq.quantize(w, pair.w).nbytes
    assert pair.nbytes(SHAPE) == stored + 2 * m * n


# ---- measuring ----------------------------------------------------------------------------------


def test_every_pair_is_measured_and_right(gpu):
    began = []
    chosen = settings(shapes=(SHAPE, (1, 5, 512)))
    found = list(gemm.run(gpu, chosen, begin=began.append))
    assert [(m.shape, m.format) for m in found] == [
        (shape, name) for shape in chosen.shapes for name in gemm.PAIRS
    ]
    assert began[0] == "int8 7x70x256" and len(began) == len(found)
    for m in found:
        assert m.right and m.dtype == "bfloat16" and m.host_us > 0
        assert m.flops == 2 * np.prod(m.shape)
        assert m.tflops == pytest.approx(m.flops / m.timing.microseconds / 1e6)


def test_operands_are_rotated_past_the_cache(gpu, monkeypatch):
    seen = []

    def noted(x, w, **options):
        seen.append((x, w, options["out"]))
        return cq.linear(x, w, **options)

    monkeypatch.setattr(gemm, "linear", noted)
    gpu.machine = MACHINE
    (found,) = gemm.run(gpu, settings(["int8@int4"]))
    count = timing.copies(MACHINE.l2_bytes, found.nbytes)
    assert count > 4 and found.timing.calls >= count
    memory = [{id(x.packed), id(w.components["codes"]), id(out)} for x, w, out in seen]
    assert len(set.union(*memory)) == 3 * count
    assert all(isinstance(w, PackedWeight) for _, w, _ in seen)  # as nibbles are multiplied


def test_both_sides_hold_different_numbers(gpu, monkeypatch):
    seen = []

    def noted(x, w, **options):
        seen.append((x, w))
        return cq.linear(x, w, **options)

    monkeypatch.setattr(gemm, "linear", noted)
    list(gemm.run(gpu, settings(["int8"], shapes=((70, 70, 256),))))
    x, w = seen[0]
    assert not np.array_equal(x.packed, w.packed)


@pytest.mark.parametrize("where", [(0, 0), (6, 69)])
def test_a_wrong_number_is_seen(where, gpu, monkeypatch):
    def wrong(x, w, *, out, **options):
        cq.linear(x, w, out=out, **options)
        out[where] += 8

    monkeypatch.setattr(gemm, "linear", wrong)
    assert not any(m.right for m in gemm.run(gpu, settings(["fp8_e4m3"])))


@pytest.mark.parametrize("name", ["int8", "int8@int4", "uint8:row@int8"])
def test_one_lost_column_of_integers_is_seen(name, gpu, monkeypatch):
    def loses(x, w, *, out, **options):
        values = w.dequantize(dtype="float32")
        values[:, -1] = 0
        out[...] = x.dequantize(dtype="float32") @ values.T

    monkeypatch.setattr(gemm, "linear", loses)
    chosen = settings([name], shapes=((9, 70, 4096),))
    assert not any(m.right for m in gemm.run(gpu, chosen))


def test_what_was_never_written_is_seen(gpu, monkeypatch):
    monkeypatch.setattr(gemm, "linear", lambda x, w, **_: None)
    assert not any(m.right for m in gemm.run(gpu, settings()))


def test_peers_are_timed_where_they_have_the_pair(gpu):
    peer, dense = FakeGemmPeer(), FakeDenseGemm()
    found = list(gemm.run(gpu, settings(["int8", "int8@int4"]), [peer, dense]))
    assert [[p.name for p in m.peers] for m in found] == [
        ["other 1.0", "cuBLAS (fake 1.0)"], ["cuBLAS (fake 1.0)"]
    ]  # fmt: skip
    assert len(peer.prepared) == 2 and len(dense.prepared) == 1  # its time is that of every pair
    assert found[0].peers[1] == found[1].peers[0]


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"problem": "prepare"}, "no nvcc"),
        ({"problem": "call"}, "no kernel"),
        ({"factor": 1.05}, "its result is off by 0.05 of its size"),
    ],
)
def test_a_peer_that_fails_has_a_problem_instead(changes, problem, gpu):
    (found,) = gemm.run(gpu, settings(["int8"]), [FakeGemmPeer(**changes)])
    assert found.peers == (PeerTiming("other 1.0", None, problem),) and found.right


# ---- results ------------------------------------------------------------------------------------


def test_the_table():
    found = gemm_results()
    assert gemm_report.headings(found) == (
        "x@w", "y", "M x N x K", "us", "TOP/s", "TB/s", "host us", "check",
        "cuBLAS", "_int_mm", "faster",
    )  # fmt: skip
    assert gemm_report.rows(found) == [
        ("int8", "bfloat16", "64x14336x4096", "10.0", "751.6", "6.00", "21.2", "right",
         "40.0", "25.0", "2.50x"),
        ("fp8_e4m3@int4", "bfloat16", "64x14336x4096", "10.0", "751.6", "6.00", "21.2", "WRONG",
         "40.0", "", "4.00x"),
    ]  # fmt: skip


def test_the_header_says_what_is_not_timed():
    lines = gemm_results().header()
    assert lines[0] == str(MACHINE) and "which is not timed" in lines[2]
    assert lines[3] == (
        "peers, us: cuBLAS (torch 2.11.0), _int_mm (torch 2.11.0, int32 sums alone)"
    )
    assert lines[-1].startswith("humming 0.1.19 failed at int8 bfloat16 64x14336x4096: no nvcc")


def test_json_goes_there_and_back():
    found = gemm_results()
    described = json.loads(found.to_json())
    assert GemmResults.from_json(found.to_json()) == found
    assert described["schema"] == "cuquant.bench.gemm/1"
    for name in [*described, *described["measurements"][0]]:
        assert name in report.__doc__ + product_report.__doc__ + gemm_report.__doc__, name


def test_the_guides_table_has_a_row_for_each_shape():
    found = gemm_results()
    right = replace(found, measurements=tuple(replace(m, right=True) for m in found.measurements))
    assert markdown(right.to_json()).splitlines()[5:] == [
        "| M x N x K | int8 | _int_mm, int8 | fp8_e4m3@int4 | cuBLAS, bfloat16 |",
        "| --- | --- | --- | --- | --- |",
        "| 64 x 14336 x 4096 | 10.0 | 25.0 | 10.0 | 40.0 |",
    ]
    with pytest.raises(ValueError, match="wrong"):
        markdown(found.to_json())


# ---- the command --------------------------------------------------------------------------------


def test_the_command_prints_and_writes(gpu, tmp_path):
    out = tmp_path / "bench.json"
    result = command(*SMALL, "-f", "int8,int8@int4", "--json", out)
    assert result.exit_code == 0, result.output
    assert "humming: no_such_module is not installed" in result.output
    table = [line.split() for line in result.output.splitlines() if "7x70x256" in line]
    assert [line[0] for line in table] == ["int8", "int8@int4"]
    assert all("right" in line for line in table)
    found = GemmResults.from_json(out.read_text(encoding="utf-8"))
    assert [m.shape for m in found.measurements] == [SHAPE] * 2
    assert found.command == "cuquant" or "--json" not in found.command


def test_what_was_measured_stays_when_the_run_is_ended(gpu, tmp_path, monkeypatch):
    def ends(x, w, **options):
        if w.format.name == "int4":
            raise RuntimeError("the machine is given back")
        cq.linear(x, w, **options)

    monkeypatch.setattr(gemm, "linear", ends)
    out = tmp_path / "bench.json"
    assert command(*SMALL, "-f", "int8,int8@int4", "--json", out).exit_code == 1
    assert [m.format for m in GemmResults.from_json(out.read_text()).measurements] == ["int8"]


def test_a_wrong_result_is_said_and_exit_code_1(gpu, monkeypatch):
    monkeypatch.setattr(gemm, "linear", lambda x, w, **_: None)
    result = command("-f", "int8", *SMALL, "--peers", "none")
    assert result.exit_code == 1
    assert result.output.count("WRONG") == 2 and "marked WRONG" in result.output
    assert "cuBLAS" not in result.output


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (["--shape", "64x64"], 2, "M, N and K"), (["--shape", "0x1x1"], 2, "M, N and K"),
        (["--json", "none/x.json"], 2, "no folder"), (["--repeats", 2], 2, "10"),
        (["-f", "int9"], 1, "did you mean 'int"), (["-f", "int8@int8@int8"], 1, "no pair"),
        (["--peers", "marlin"], 1, "known are cublas, int_mm, scaled_mm, scaled_mm_fast, "),
    ],
)  # fmt: skip
def test_wrong_usage_is_refused_before_the_work(arguments, code, said, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_module, "CupyGpu", None)
    monkeypatch.chdir(tmp_path)
    result = command(*arguments)
    assert result.exit_code == code and isinstance(result.exception, SystemExit), result.output
    assert said in " ".join(result.output.replace("│", " ").split())
