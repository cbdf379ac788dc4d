"""The benchmark with NumPy in the place of a GPU: bytes, timing, checks, tables, files."""

import json
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from bench_results import quantize_results
from fake_bench import MACHINE, FakeEngine, FakeGpu, QuickEngine
from in_turn import in_turn
from typer.testing import CliRunner

import cuquant as cq
from cuquant.bench import gpu as gpu_module
from cuquant.bench import peers, quantize, quantize_report, report, roofline, timing
from cuquant.bench.quantize_report import (
    HEADINGS,
    PEER_HEADINGS,
    Results,
    headings,
    rows,
)
from cuquant.bench.report import PeerTiming
from cuquant.bench.timing import Timing
from cuquant.cli import app, bench_output

PNG = b"\x89PNG"


@pytest.fixture
def gpu(monkeypatch):
    made = FakeGpu()
    made.engine = QuickEngine()
    monkeypatch.setattr(gpu_module, "CupyGpu", lambda: made)
    monkeypatch.setattr(peers, "find_peers", lambda: ([], ["no peers here"]))
    return made


def command(*arguments):
    return CliRunner().invoke(app, ["bench", "quantize", *map(str, arguments)])


SMALL = ("--shape", "70x512", "--repeats", 10)


# ---- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*cq.list_formats(), "nf4+dq", "uint4:64", "int8:row"])
@in_turn("dtype", quantize.DTYPES)
def test_bytes_are_the_values_and_what_is_stored(name, dtype):
    (fmt,) = quantize.parse_formats([name]).values()
    x = np.random.default_rng(0).standard_normal((6, 512), np.float32).astype(np.dtype(dtype))
    stored = sum(part.nbytes for part in cq.quantize(x, fmt).arrays().values())
    assert quantize.quantize_bytes(fmt, x.shape, x.itemsize) == x.nbytes + stored
    assert quantize.dequantize_bytes(fmt, x.shape, x.itemsize) == x.nbytes + stored


def test_a_statistic_of_the_whole_tensor_reads_twice():
    shape, n = (64, 256), 64 * 256
    fmt = cq.get_format("int8", block_size="tensor")
    assert quantize.quantize_bytes(fmt, shape, 2) == 2 * n * 2 + n + 4
    assert quantize.dequantize_bytes(fmt, shape, 2) == 2 * n + n + 4
    fmt = cq.get_format("nvfp4")
    once = 4 * n + n // 2 + n // 16 + 4
    assert quantize.quantize_bytes(fmt, shape, 4) == once
    assert quantize.quantize_bytes(fmt, shape, 4, global_scale_given=False) == once + 4 * n


def test_formats_are_parsed():
    found = quantize.parse_formats(["nf4+dq", "int8:tensor", "fp8_e4m3:128x128"])
    assert [fmt.block_size for fmt in found.values()] == [64, "tensor", (128, 128)]
    assert list(quantize.parse_formats(["all"])) == cq.list_formats()
    for text, message in (("nf5", "unknown format"), ("nf4:x", "nf4:32"), ("nf4+-8", "nf4")):
        with pytest.raises(ValueError, match=message):
            quantize.parse_formats([text])


def test_a_size_is_that_of_the_values():
    settings = quantize.Settings({}, shapes=100_000_000)
    for dtype in quantize.DTYPES:
        ((rows, columns),) = settings.shapes_of(dtype)
        nbytes = rows * columns * np.dtype(dtype).itemsize
        assert abs(nbytes - 100_000_000) <= columns * 4
    assert quantize.Settings({}).shapes_of("float32") == quantize.SHAPES


def test_values_are_random_and_of_every_dtype():
    for dtype in quantize.DTYPES:
        x = quantize.random_values((7, 300), dtype)
        assert (x.shape, x.dtype) == ((7, 300), np.dtype(dtype))
        assert 0.9 < x.astype(np.float32).std() < 1.1 and len(np.unique(x[0])) > 100
    assert quantize.random_values((3, 2**23), "float16").shape == (3, 2**23)


# ---- timing -------------------------------------------------------------------------------------


def test_the_median_of_graph_replays():
    engine, calls = FakeEngine(), []
    found = timing.measure(engine, [lambda: calls.append(1), lambda: calls.append(2)], 11)
    # 3 us: warming, 4 us: a first replay; then 5..15 us for rounds of 8 calls.
    assert found == Timing(10 / 8, 5 / 8, 15 / 8, True, 11, 8)
    assert calls == [1, 2] * 4 * 13 and engine.captured == 1


def test_what_cannot_be_captured_is_timed_call_by_call():
    found = timing.measure(FakeEngine(captures=False), [lambda: None] * 20, 3)
    assert (found.graph, found.repeats, found.calls) == (False, timing.MIN_REPEATS, 20)


def test_other_errors_of_a_capture_surface():
    engine = FakeEngine()
    engine.capture = lambda run: 1 / 0
    with pytest.raises(ZeroDivisionError):
        timing.measure(engine, [lambda: None], 10)


@pytest.mark.parametrize("nbytes", [1, 1000, 10**6, 10**9])
def test_copies_together_exceed_three_times_the_cache(nbytes):
    count = timing.copies(50_000_000, nbytes)
    assert count * nbytes > 150_000_000 and count >= 2
    assert count == 2 or (count - 1) * nbytes <= 150_000_000


class FakeStream:
    def __init__(self, log):
        self.log = log

    def __enter__(self):
        self.log.append("enter")

    def __exit__(self, *_):
        self.log.append("exit")

    def begin_capture(self):
        self.log.append("begin")

    def end_capture(self):
        self.log.append("end")
        return SimpleNamespace(launch=lambda stream: self.log.append("launch"))


def test_a_capture_that_fails_is_ended():
    log = []
    cupy = SimpleNamespace(cuda=SimpleNamespace(Stream=lambda non_blocking: FakeStream(log)))
    engine = gpu_module.CupyEngine(cupy)
    engine.capture(lambda: log.append("run"))()
    assert log == ["enter", "begin", "run", "end", "exit", "launch"]
    log.clear()
    with pytest.raises(ZeroDivisionError):
        engine.capture(lambda: 1 / 0)
    assert log == ["enter", "begin", "end", "exit"]


def test_ceilings_count_a_copy_twice(gpu):
    # Two ways each; the first round of ten is the fastest: medians 9.5, 21.5 | 33.5, ...
    found = roofline.measure_ceilings(gpu, 10, 8 * 10**6)
    assert found.copy == pytest.approx(16e6 / (9.5 / 8) / 1e6)
    assert found.read == pytest.approx(8e6 / (33.5 / 8) / 1e6)
    assert found.write == pytest.approx(8e6 / (57.5 / 8) / 1e6)
    assert roofline.CEILING_BYTES >= 512 * 2**20


# ---- measuring ----------------------------------------------------------------------------------

CASES = [
    "nf4", "int8", "int8:tensor", "uint4", "k3", "nvfp4", "q4_k", "fp16", "nf4+dq",
    "fp8_e4m3:8x128", "int4+row",
]  # fmt: skip


@pytest.mark.parametrize("dtype", quantize.DTYPES)
def test_every_kind_of_format_is_measured_and_right(dtype, gpu):
    formats = quantize.parse_formats(CASES)
    settings = quantize.Settings(formats, (dtype,), ((70, 512), (5, 256)), 10)
    began = []
    found = list(quantize.run(gpu, settings, begin=began.append))
    assert [(m.format, m.operation) for m in found[: 2 * len(CASES)]] == [
        (name, operation) for name in CASES for operation in ("quantize", "dequantize")
    ]
    assert all(m.exact for m in found) and {m.dtype for m in found} == {dtype}
    assert [m.shape for m in found] == [(70, 512)] * 22 + [(5, 256)] * 22
    assert len(began) == 22 and began[0] == f"nf4 {dtype} 70x512" and gpu.released == 2
    for m in found:
        assert m.tbps == pytest.approx(m.nbytes / m.timing.microseconds / 1e6)


WRONG = {"first": (0, 0), "last": (-1, -1), "last but 30": (-30, 0), "middle": (40, 1)}


@pytest.mark.parametrize("where", WRONG)
@pytest.mark.parametrize("name", ["nf4", "fp8_e4m3:8x128", "int8:tensor", "nf4+dq"])
def test_a_wrong_code_is_seen(where, name, gpu, monkeypatch):
    def wrong(x, fmt, *, out=None, **options):
        q = cq.quantize(x, fmt, out=out, **options)
        if out is not None:
            out.components["packed"][WRONG[where]] ^= 1
        return q

    monkeypatch.setattr(quantize, "quantize", wrong)
    settings = quantize.Settings(quantize.parse_formats([name]), ("float16",), ((70, 512),), 10)
    first, second = quantize.run(gpu, settings)
    assert not first.exact and second.exact


def test_what_was_never_written_is_seen(gpu, monkeypatch):
    def lazy(q, *, out):
        out[:-1] = cq.dequantize(q)[:-1]

    monkeypatch.setattr(quantize, "dequantize", lazy)
    settings = quantize.Settings(quantize.parse_formats(["int8"]), ("float32",), ((70, 512),), 10)
    first, second = quantize.run(gpu, settings)
    assert first.exact and not second.exact


def test_equality_is_that_of_bytes():
    a = {"x": np.array([0.0, np.nan], np.float32)}
    assert quantize.same_bytes(a, {"x": a["x"].copy()})
    assert not quantize.same_bytes(a, {"x": np.array([-0.0, np.nan], np.float32)})
    assert not quantize.same_bytes(a, {"x": a["x"].view(np.uint32)})
    assert not quantize.same_bytes(a, {"y": a["x"]})


# ---- peers --------------------------------------------------------------------------------------


def test_a_missing_peer_is_a_note(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert peers.find_peers() == ([], ["bitsandbytes is not installed: no peer beside the figures"])


def test_a_broken_peer_is_a_note(monkeypatch):
    def broken(name):
        raise OSError("libcudart.so.12:\nno such file")

    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(peers.importlib, "import_module", broken)
    found, (note,) = peers.find_peers()
    assert found == [] and note.endswith("cannot be used: libcudart.so.12: no such file")


class FakePeer:
    name = "other 1.0"

    def __init__(self, problem=None):
        self.engine, self.problem = FakeEngine(), problem

    def calls(self, operation, fmt, xs):
        if fmt.name != "nf4":
            return None
        if self.problem:
            raise self.problem
        return [lambda: None for _ in xs]


def test_peers_are_timed_beside(gpu):
    formats = quantize.parse_formats(["nf4", "int8"])
    settings = quantize.Settings(formats, ("float16",), ((70, 512),), 10)
    found = list(quantize.run(gpu, settings, [FakePeer()]))
    assert [m.peer and m.peer.name for m in found] == ["other 1.0", "other 1.0", None, None]
    assert found[0].peer.timing.graph
    found = list(quantize.run(gpu, settings, [FakePeer(ValueError("no\nkernel"))]))
    assert found[0].peer == PeerTiming("other 1.0", None, "no kernel") and found[0].exact


def test_bitsandbytes_is_called_as_it_documents():
    log = []

    def record(name):
        def call(*arguments, **options):
            log.append((name, arguments, options))
            return f"{name} packed", f"{name} state"

        return call

    names = ("quantize_4bit", "dequantize_4bit", "quantize_blockwise", "dequantize_blockwise")
    peer = object.__new__(peers.Bitsandbytes)
    peer._functional = SimpleNamespace(**{name: record(name) for name in names})
    peer.tensor = lambda x: x
    for call in peer.calls("quantize", cq.get_format("fp4", block_size=128), ["x", "y"]):
        call()
    options = {"blocksize": 128, "quant_type": "fp4"}
    assert log == [("quantize_4bit", ("x",), options), ("quantize_4bit", ("y",), options)]
    log.clear()
    for call in peer.calls("dequantize", cq.get_format("dynamic8"), ["x"]):
        call()
    packed = "quantize_blockwise packed", "quantize_blockwise state"
    assert log == [
        ("quantize_blockwise", ("x",), {"blocksize": 256}),
        ("dequantize_blockwise", packed, {}),
    ]
    for name, options in (("int8", {}), ("fp16", {}), ("nf4", {"double_quant": True})):
        assert peer.calls("quantize", cq.get_format(name, **options), ["x"]) is None


def test_tensors_of_a_peer_keep_their_bits():
    torch = pytest.importorskip("torch")
    peer = object.__new__(peers.Bitsandbytes)

    def as_tensor(x, device):
        assert device == "cuda:2"
        return torch.from_numpy(x)

    class Array(np.ndarray):
        device = SimpleNamespace(id=2)

        def view(self, dtype):
            return np.asarray(self).view(dtype)

    peer.torch = SimpleNamespace(
        as_tensor=as_tensor, float32=torch.float32, float16=torch.float16, bfloat16=torch.bfloat16
    )
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        x = np.array([1.5, -2.0], dtype)
        tensor = peer.tensor(np.ndarray.view(x, Array))
        assert str(tensor.dtype) == f"torch.{x.dtype}" and tensor.tolist() == [1.5, -2.0]


# ---- results ------------------------------------------------------------------------------------


def test_the_table():
    found = quantize_results()
    assert headings(found) == HEADINGS + PEER_HEADINGS
    assert rows(found) == [
        ("nf4", "float16", "4096x14336", "quantize", "50.0", "3.00", "1.20", "1.00", "exact",
         "other 1.0", "600.0", "12.00x"),
        ("nf4", "float16", "4096x14336", "dequantize", "50.0", "3.00", "1.20", "1.00", "exact",
         "other 1.0", "failed", ""),
        ("int8", "float16", "4096x14336", "quantize", "75.0 (no graph)", "2.00", "0.80", "0.67",
         "WRONG", "", "", ""),
        ("nf4", "float16", "16384x16384", "quantize", "75.0 (no graph)", "9.16", "3.66", "3.05",
         "exact", "", "", ""),
    ]  # fmt: skip
    alone = quantize_results(measurements=found.measurements[2:])
    assert headings(alone) == HEADINGS
    assert {len(row) for row in rows(alone)} == {len(HEADINGS)}
    assert not found.exact and quantize_results(measurements=found.measurements[:2]).exact


def test_the_header_names_machine_ceilings_formula_and_problems():
    lines = quantize_results().header()
    assert lines[0] == ("Fake 100, driver 580.1, CUDA 13.0, CuPy 14.2.0, NVRTC 12.9, cuquant 0.1.0")
    assert lines[1:4] == [
        "ceilings measured here: copy 2.50 TB/s, read 3.00, write 3.20",
        quantize.FORMULA,
        "a note",
    ]
    assert lines[4:] == ["other 1.0 failed at dequantize nf4 float16: broken"]


def test_json_goes_there_and_back():
    found = quantize_results()
    text = found.to_json()
    assert Results.from_json(text) == found
    described = json.loads(text)
    assert described["schema"] == "cuquant.bench/1"
    first = described["measurements"][0]
    assert (first["tbps"], first["of_copy"], first["of_read"]) == pytest.approx((3.0, 1.2, 1.0))
    for bad in ("[]", "{}", '{"schema": "cuquant.bench/9"}'):
        with pytest.raises(ValueError, match=r"cuquant\.bench/1"):
            Results.from_json(bad)


def test_the_schema_is_documented():
    described = json.loads(quantize_results().to_json())
    for name in described:
        assert f"    {name} " in report.__doc__, name
    for name in described["measurements"][0]:
        assert name in report.__doc__ + quantize_report.__doc__, name


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_picture_is_written(suffix, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"roof.{suffix}"
    roofline.plot(quantize_results(), path)
    assert path.read_bytes().startswith({"png": PNG, "svg": b"<?xml", "pdf": b"%PDF"}[suffix])


def test_the_picture_shows_the_largest_shape():
    shown = roofline._largest(quantize_results().measurements)
    assert [(m.format, m.operation, m.nbytes) for m in shown] == [
        ("nf4", "quantize", 687_000_000),
        ("nf4", "dequantize", 150_000_000),
        ("int8", "quantize", 150_000_000),
    ]


# ---- the command --------------------------------------------------------------------------------


def test_the_command_prints_writes_and_draws(gpu, tmp_path):
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    result = command(
        "-f", "nf4,int8", "-f", "k3", "--dtypes", "float16,float32", *SMALL, "--json", out,
        "--plot", picture,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert str(MACHINE) in result.output and "no peers here" in result.output
    table = [line.split() for line in result.output.splitlines() if "70x512" in line]
    assert len(table) == 3 * 2 * 2 and {line[-1] for line in table} == {"exact"}
    found = Results.from_json(out.read_text(encoding="utf-8"))
    assert [m.format for m in found.measurements[::2]] == ["nf4", "int8", "k3"] * 2
    assert found.machine == MACHINE and picture.read_bytes().startswith(PNG)


def test_a_wrong_result_is_said_and_exit_code_1(gpu, tmp_path, monkeypatch):
    def wrong(q, *, out):
        out[...] = 0

    monkeypatch.setattr(quantize, "dequantize", wrong)
    out = tmp_path / "bench.json"
    result = command("-f", "nf4", "--dtypes", "float16", *SMALL, "--no-peers", "--json", out)
    assert result.exit_code == 1
    lines = [line for line in result.output.splitlines() if "70x512" in line]
    assert [line.split()[-1] for line in lines] == ["exact", "WRONG"]
    assert "marked WRONG" in result.output and "no peers here" not in result.output
    assert not Results.from_json(out.read_text(encoding="utf-8")).exact


def test_a_size_in_megabytes(gpu):
    result = command("-f", "int8", "--dtypes", "float16", "--size", 0.5, "--repeats", 10)
    assert result.exit_code == 0 and result.output.count("61x4096") == 2


@pytest.mark.parametrize(
    "outputs",
    [["--json", "a b.json", "--plot=x.png"], ["--output=a.json"], ["-o", "a.json"], ["-oa.json"]],
)
def test_the_recorded_command_leaves_out_the_files_it_writes(outputs, gpu, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    first, rest = ["-f", "int8", "--dtypes=float16", "--shape", "70x512"], ["--repeats", "10"]
    monkeypatch.setattr(sys, "argv", ["bin/cuquant", "bench", "quantize", *first, *outputs, *rest])
    assert command(*first, *outputs, *rest).exit_code == 0
    (written,) = tmp_path.glob("*.json")
    found = Results.from_json(written.read_text(encoding="utf-8"))
    assert found.command == " ".join(["cuquant bench quantize", *first, *rest])


@pytest.mark.parametrize("cupy", [None, "no gpu"])
def test_without_a_gpu_it_says_what_to_install(cupy, monkeypatch):
    class CUDARuntimeError(RuntimeError):
        pass

    def count():
        raise CUDARuntimeError("no CUDA-capable device is detected")

    runtime = SimpleNamespace(getDeviceCount=count, CUDARuntimeError=CUDARuntimeError)
    fake = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)) if cupy else None
    monkeypatch.setitem(sys.modules, "cupy", fake)
    result = command("-f", "nf4")
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    (line,) = result.output.splitlines()
    wanted = "`cuquant doctor` tells more" if cupy else "pip install '.[cuda12]'"
    assert line.startswith("error: CuPy") and wanted in line


@pytest.mark.parametrize(
    "arguments, code",
    [
        (["--shape", "4096"], 2), (["--shape", "0x8"], 2), (["--size", "-1"], 2),
        (["--shape", "8x8", "--size", 3], 2), (["--plot", "x.txt"], 2),
        (["--json", "none/x.json"], 2), (["--repeats", 2], 2), (["--cpu"], 2),
        (["-f", "nf5"], 1), (["--dtypes", "float64"], 1),
    ],
)  # fmt: skip
def test_wrong_usage_is_refused_before_the_work(arguments, code, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_module, "CupyGpu", None)
    monkeypatch.chdir(tmp_path)
    result = command(*arguments)
    assert result.exit_code == code and isinstance(result.exception, SystemExit), result.output


def test_a_picture_without_matplotlib_is_refused_before_the_work(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_module, "CupyGpu", None)
    monkeypatch.setattr(bench_output, "find_spec", lambda name: None)
    result = command("--plot", tmp_path / "x.png")
    assert result.exit_code == 1 and "pip install '.[plot]'" in result.output


def test_bench_lists_its_operations():
    result = CliRunner().invoke(app, ["bench", "--help"])
    assert result.exit_code == 0 and "quantize" in result.output
