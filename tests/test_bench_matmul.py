"""The benchmark of products with NumPy in the place of a GPU, and peers with fakes in theirs."""

import json
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from fake_bench import MACHINE, FakeEngine, FakeGpu
from typer.testing import CliRunner

import cuquant as cq
from cuquant.bench import gpu as gpu_module
from cuquant.bench import matmul, matmul_peers, matmul_report, roofline, timing
from cuquant.bench.matmul_report import ProductMeasurement, ProductResults
from cuquant.bench.quantize import parse_formats
from cuquant.bench.report import Ceilings, PeerTiming
from cuquant.bench.timing import Timing
from cuquant.cli import app

PNG = b"\x89PNG"


class QuickEngine(FakeEngine):
    """Replays of a graph do nothing: the results are there already."""

    def capture(self, run):
        super().capture(run)
        return lambda: None


class FakePeer:
    """Multiplies with what a weight decodes to."""

    is_dense = False

    def __init__(self, name="other 1.0", formats=("int4",), factor=1.0, problem=None):
        self.engine, self.name = QuickEngine(), name
        self.formats, self.factor, self.problem = formats, factor, problem
        self.prepared = []

    def prepare(self, q, dtype, l2_bytes):
        self.prepared.append((q.format.name, dtype, l2_bytes))
        if q.format.name not in self.formats:
            return None
        if self.problem == "prepare":
            raise OSError("no\nnvcc")
        w = q.dequantize(dtype="float32") * self.factor
        return lambda xs: [lambda x=x: self.call(x, w) for x in xs]

    def call(self, x, w):
        if self.problem == "call":
            raise ValueError("no kernel")
        return x.astype(np.float32) @ w.T

    def columns(self, y, which):
        return y[:, which].astype(np.float64)


class FakeCublas(FakePeer):
    is_dense = True

    def __init__(self):
        super().__init__("cuBLAS (fake 1.0)", ("int4", "nf4"))

    def products(self, weights, xs):
        return [lambda x=x, w=w: x @ w.T for w, x in zip(weights, xs, strict=True)]


@pytest.fixture
def gpu(monkeypatch):
    made = FakeGpu()
    made.machine = replace(MACHINE, l2_bytes=5000)
    made.engine = QuickEngine()
    monkeypatch.setattr(gpu_module, "CupyGpu", lambda: made)
    monkeypatch.setattr(timing, "HOST_CALLS", 1)
    monkeypatch.setattr(matmul_peers, "cublas", FakeCublas)
    monkeypatch.setattr(roofline, "GEMM_SIZE", 32)
    peers = {"cublas": (None, FakeCublas), "humming": ("no_such_module", FakePeer)}
    monkeypatch.setattr(matmul_peers, "PEERS", peers)
    return made


def settings(names, **changes):
    made = matmul.Settings(parse_formats(names), shapes=((70, 256),), batches=(1, 3), repeats=10)
    return replace(made, **changes)


def command(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "matmul", *map(str, arguments)])


SMALL = ("--shapes", "70x256", "--batch", "1,3", "--repeats", 10)


# ---- measuring ----------------------------------------------------------------------------------

NAMES = ["int4", "uint4+64", "k3", "nvfp4", "fp16", "q8_0", "int8+tensor", "nf4+double_quant"]


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


@pytest.mark.parametrize("where", [(0, 0), (2, 69), (1, 35)])
def test_a_wrong_number_is_seen(where, gpu, monkeypatch):
    def wrong(x, w, *, out):
        cq.linear(x, w, out=out)
        if len(out) > 1:
            out[where] += 2

    monkeypatch.setattr(matmul, "linear", wrong)
    chosen = settings(["int4"])
    assert [m.right for m in matmul.run(gpu, chosen)] == [True, False]
    columns = np.unique(np.linspace(0, 69, matmul.CHECKED_COLUMNS).astype(int))
    assert where[1] in columns


def test_what_was_never_written_is_seen(gpu, monkeypatch):
    monkeypatch.setattr(matmul, "linear", lambda x, w, *, out: None)
    assert not any(m.right for m in matmul.run(gpu, settings(["nf4"])))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_bound_holds_the_roundings_of_weights_and_of_the_sum(dtype):
    kind = np.dtype(dtype)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 512)).astype(kind)
    w = rng.standard_normal((9, 512)).astype(np.float32)
    wanted, bound = matmul.bounded_product(x, w)
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
    peer, dense = FakePeer(), FakeCublas()
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
    for m in matmul.run(gpu, chosen, [FakePeer(**changes)]):
        assert m.peers == (PeerTiming("other 1.0", None, problem),) and m.right


def test_missing_and_broken_peers_are_notes(monkeypatch):
    def broken():
        raise OSError("libcudart.so.12:\nno such file")

    table = {"a": (None, FakePeer), "b": ("no_such_module", FakePeer), "c": (None, broken)}
    monkeypatch.setattr(matmul_peers, "PEERS", table)
    found, notes = matmul_peers.find_product_peers(table)
    assert [peer.name for peer in found] == ["other 1.0"]
    assert notes == [
        "b: no_such_module is not installed",
        "c cannot be used: libcudart.so.12: no such file",
    ]
    with pytest.raises(ValueError, match="known are a, b, c"):
        matmul_peers.check_peers(["d"])


def test_all_peers_are_made_or_explained():
    """Whatever is installed here: no peer's constructor raises through."""
    found, notes = matmul_peers.find_product_peers(matmul_peers.PEERS)
    assert len(found) + len(notes) == len(matmul_peers.PEERS)


def on_cpu(kind, **attributes):
    """A peer with torch on the CPU in the place of the GPU's."""
    torch = pytest.importorskip("torch")
    peer = object.__new__(kind)
    peer.torch, peer.engine, peer.name = torch, FakeEngine(), kind.__name__
    for name, value in attributes.items():
        setattr(peer, name, value)

    def tensor(x):
        if x.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(np.ascontiguousarray(x))

    peer.tensor = tensor
    return peer


def operands(name, dtype="float16", **options):
    rng = np.random.default_rng(1)
    kind = np.dtype(dtype)
    q = cq.quantize(rng.standard_normal((48, 256), np.float32), name, **options)
    return q, rng.standard_normal((3, 256), np.float32).astype(kind)


def timed(peer, q, x, dtype="float16"):
    """The timing of a peer, which checks its result."""
    calls = peer.prepare(q, dtype, 1000)
    if calls is None:
        return None
    wanted = x.astype(np.float64) @ q.dequantize(dtype="float32").astype(np.float64).T
    which = np.arange(48)
    return matmul_peers.time_product(peer, calls, [x, x.copy()], 10, which, wanted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_cublas_by_torch_multiplies_with_decoded_weights(dtype):
    peer = on_cpu(matmul_peers.TorchCublas)
    q, x = operands("nf4", dtype)
    assert timed(peer, q, x, dtype).problem is None
    (call,) = peer.products([q.dequantize(dtype=dtype)], [x])
    assert tuple(call().shape) == (3, 48)


def test_cublas_by_cupy_multiplies_with_decoded_weights():
    peer = object.__new__(matmul_peers.CupyCublas)
    peer._cupy, peer.engine, peer.name = np, FakeEngine(), "cuBLAS"
    peer.columns = lambda y, which: y[:, which].astype(np.float64)
    q, x = operands("nf4", "float32")
    assert timed(peer, q, x, "float32").problem is None


@pytest.mark.parametrize("name, block", [("nf4", 64), ("fp4", 128)])
def test_bitsandbytes_multiplies_with_its_own_bytes(name, block):
    log = []

    def quantize_4bit(values, **options):
        log.append(options)
        return values, "state"

    def matmul_4bit(x, packed, state):
        assert state == "state"
        return x @ packed

    library = SimpleNamespace(
        functional=SimpleNamespace(quantize_4bit=quantize_4bit), matmul_4bit=matmul_4bit
    )
    peer = on_cpu(matmul_peers.BitsandbytesMatmul, _library=library)
    q, x = operands(name, block_size=block)
    assert timed(peer, q, x).problem is None
    assert set(map(str, log)) == {str({"blocksize": block, "quant_type": name})}
    for other, options in (("int4", {}), ("nf4", {"double_quant": True}), ("q4_0", {})):
        assert peer.prepare(operands(other, **options)[0], "float16", 1000) is None


@pytest.mark.parametrize("name, group", [("int4", 32), ("uint4", 64), ("int4", 128)])
def test_tinygemm_gets_the_same_codes(name, group):
    torch = pytest.importorskip("torch")

    def pack(codes, inner):
        assert codes.dtype == torch.uint8 and inner == 8
        return codes

    def product(x, packed, size, pair):
        """w = (code - 8) * scale + value of 8; pairs are [groups, N, 2]."""
        assert x.dtype == pair.dtype == torch.bfloat16 and size == group
        codes = torch.stack([packed >> 4, packed & 15], dim=2).reshape(len(packed), -1)
        wide = pair.float().transpose(0, 1).repeat_interleave(size, dim=1)
        w = (codes.float() - 8) * wide[..., 0] + wide[..., 1]
        return (x.float() @ w.T).to(torch.bfloat16)

    ops = SimpleNamespace(_convert_weight_to_int4pack=pack, _weight_int4pack_mm=product)
    peer = on_cpu(matmul_peers.Tinygemm, _ops=ops)
    q, x = operands(name, block_size=group)
    assert timed(peer, q, x).problem is None
    for other, options in (("int3", {}), ("nf4", {}), ("int4", {"block_size": 16})):
        assert peer.prepare(operands(other, **options)[0], "float16", 1000) is None


class FakeHummingLayer:
    """Decodes offset-binary codes of int formats, each in an int32 here."""

    def __init__(self, **options):
        self.options, self.is_ready = options, False

    def cuda(self):
        return self

    def load_from_tensors(self, tensors):
        self.tensors = tensors

    def transform(self):
        self.is_ready = True

    def __call__(self, x):
        config = self.options["weight_config"]
        assert self.is_ready and self.options["torch_dtype"] == x.dtype
        codes, scale = self.tensors["weight"], self.tensors["weight_scale"].float()
        size = config["group_size"] or codes.shape[1]
        middle = 1 << (int(config["dtype"].removeprefix("int")) - 1)
        w = (codes - middle).float() * scale.repeat_interleave(size, dim=1)
        return (x.float() @ w.T).to(x.dtype)


@pytest.mark.parametrize(
    "name, options", [("int4", {}), ("int3", {"block_size": 64}), ("int8", {}), ("int2", {})]
)
def test_humming_gets_the_same_codes(name, options):
    torch = pytest.importorskip("torch")

    def pack_weight(codes, bits):
        assert codes.dtype == torch.int32 and bits == int(name[3])
        return codes

    peer = on_cpu(
        matmul_peers.Humming,
        _ops=SimpleNamespace(pack_weight=pack_weight),
        _layer=FakeHummingLayer,
    )
    q, x = operands(name, **options)
    assert timed(peer, q, x).problem is None
    for other in ("nf4", "uint4", "q4_0", "mxfp4"):
        assert peer.prepare(operands(other)[0], "float16", 1000) is None


class FakeGemliteLinear:
    def __init__(self, bits, **options):
        self.bits, self.options = bits, options

    def pack(self, codes, scale, zero, bias):
        assert str(codes.dtype) == "torch.uint8" and zero == 1 << (self.bits - 1) and bias is None
        wide = scale.float().repeat_interleave(self.options["group_size"], dim=1)
        self.w = (codes.float() - zero) * wide

    def __call__(self, x):
        assert self.options["input_dtype"] == self.options["output_dtype"] == "half"
        return (x.float() @ self.w.T).to(x.dtype)


@pytest.mark.parametrize("name", ["int2", "int4", "int8"])
def test_gemlite_gets_the_same_codes(name):
    library = SimpleNamespace(
        DType=SimpleNamespace(FP16="half", BF16="wide"), GemLiteLinear=FakeGemliteLinear
    )
    peer = on_cpu(matmul_peers.Gemlite, _library=library)
    q, x = operands(name)
    assert timed(peer, q, x).problem is None
    for other in ("int3", "uint4", "nf4", "q8_0"):
        assert peer.prepare(operands(other)[0], "float16", 1000) is None


# ---- results ------------------------------------------------------------------------------------


def results(**changes):
    took = Timing(10.0, 9.0, 12.0, True, 20, 17)
    first = ProductMeasurement(
        "int4", "float16", (4096, 4096), 1, "fragments/1", 8_667_136, took, 11.25, True,
        (
            PeerTiming("cuBLAS (torch 2.11.0)", replace(took, microseconds=20.0)),
            PeerTiming("humming 0.1.19", replace(took, microseconds=15.0)),
            PeerTiming("gemlite 0.6.0", None, "no triton"),
        ),
    )  # fmt: skip
    slow = Timing(400.0, 400.0, 400.0, False, 10, 8)
    second = replace(
        first, batch=4096, nbytes=75_759_616, timing=slow, right=False, peers=first.peers[:1]
    )
    third = replace(first, format="nf4", peers=())
    found = ProductResults(
        MACHINE, Ceilings(2.5, 3.0, 3.2), matmul.FORMULA, (first, second, third),
        {"float16": 800.0}, "cuquant bench matmul", ("a note",),
    )  # fmt: skip
    return replace(found, **changes)


def test_the_floor_is_that_of_bytes_or_of_operations():
    found = results()
    first, second, _ = found.measurements
    assert found.floor(first) == pytest.approx(8_667_136 / 3e6)
    assert found.floor(second) == pytest.approx(2 * 4096**3 / 800e6)
    assert results(gemm={}).floor(second) == pytest.approx(75_759_616 / 3e6)
    assert found.of_floor(second) == pytest.approx(found.floor(second) / 400)


def test_the_table():
    found = results()
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
    alone = results(measurements=found.measurements[2:])
    assert matmul_report.headings(alone)[-1] == "check"
    assert {len(row) for row in matmul_report.rows(alone)} == {10}
    assert alone.right and not found.right


def test_the_header_names_machine_ceilings_peers_and_problems():
    lines = matmul_report.header(results())
    assert lines[0] == str(MACHINE)
    assert lines[1:] == [
        "ceilings measured here: copy 2.50 TB/s, read 3.00, write 3.20, cuBLAS float16 800 TFLOP/s",
        matmul.FORMULA,
        "peers, us: cuBLAS (torch 2.11.0), humming 0.1.19",
        "a note",
        "gemlite 0.6.0 failed at int4 float16 4096x4096: no triton",
    ]


def test_json_goes_there_and_back():
    found = results()
    text = found.to_json()
    assert ProductResults.from_json(text) == found
    described = json.loads(text)
    assert described["schema"] == "cuquant.bench.matmul/1"
    first = described["measurements"][0]
    assert first["of_floor"] == pytest.approx(first["floor_us"] / 10)
    for name in [*described, *first]:
        assert name in matmul_report.__doc__, name
    for bad in ("[]", "{}", '{"schema": "cuquant.bench/1"}'):
        with pytest.raises(ValueError, match=r"cuquant\.bench\.matmul/1"):
            ProductResults.from_json(bad)


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
@pytest.mark.parametrize("gemm", [{}, {"float16": 800.0}])
def test_the_picture_is_written(suffix, gemm, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"roof.{suffix}"
    roofline.plot_products(results(gemm=gemm), path)
    assert path.read_bytes().startswith({"png": PNG, "svg": b"<?xml", "pdf": b"%PDF"}[suffix])


def test_the_rate_of_cublas_counts_two_operations_a_product(monkeypatch):
    assert roofline.GEMM_SIZE >= 4096
    monkeypatch.setattr(roofline, "GEMM_SIZE", 64)
    # 3 us: warming, 4 us: a first replay; then 5..14 us for rounds of 8 calls.
    found = roofline.measure_gemm(FakeCublas(), FakeGpu(), "float16", 10)
    assert found == pytest.approx(2 * 64**3 / (9.5 / 8) / 1e6)


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
