"""Files quantized through slots: the bytes and errors of the CPU's path, in any order of events."""

import ctypes
import os
import random
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from in_turn import in_turn

import cuquant as cq
from cuquant.gpu import device as devices
from cuquant.io import cuda, streaming
from cuquant.io.pipeline import Job, Made, Pipeline
from cuquant.io.streaming import quantize_file

READER = "cuquant reader"


class FakeSlot:
    """A device made of a thread: its work takes a random time and reads the staging memory late."""

    def __init__(self, nonfinite, capacity, pool, delays):
        self.staging = np.full(capacity, 0xA5, np.uint8)
        self.nonfinite, self.pool, self.delays = nonfinite, pool, delays
        self.running: Future | None = None
        self.closed = 0

    def start(self, job):
        assert self.running is None, "a slot was started twice"
        values = self.staging[: job.nbytes].view(job.dtype).reshape(job.shape)
        if self.nonfinite == "raise":  # as a GPU does, which must look before it goes on
            cq.quantize(values, job.format, nonfinite="raise")
        self.running = self.pool.submit(
            self.compute, values, job.format, self.delays.random() * 0.01
        )

    def compute(self, values, fmt, delay):
        time.sleep(delay)
        q = cq.quantize(values, fmt, nonfinite=self.nonfinite)
        return q, cq.error(values, q).sqnr_db

    def finish(self):
        assert self.running is not None
        q, sqnr = self.running.result()
        self.running = None
        parts = {}
        for part, start in cuda._placed(q.format, q.shape):
            if part.name:
                place = self.staging[start : start + cuda._nbytes(part)]
                parts[part.name] = place.view(part.dtype).reshape(part.shape)
                parts[part.name][...] = q.arrays()[part.name]
        return Made(parts, sqnr)

    def close(self):
        if self.running is not None:
            self.running.exception()
            self.running = None
        self.closed += 1


@pytest.fixture
def fake(monkeypatch):
    """Makes `quantize_file(device="cuda")` run on fake slots; holds the slots it made."""
    made = []
    pool = ThreadPoolExecutor(4)

    def make_slots(device, nonfinite, jobs, count):
        assert device == "cuda:0"
        capacity = max(cuda.staging_bytes(j.format, j.shape, j.nbytes) for j in jobs)
        delays = random.Random(len(made))
        made.extend(FakeSlot(nonfinite, capacity, pool, delays) for _ in range(count))
        return made[-count:]

    monkeypatch.setattr(
        streaming, "resolve", lambda device: "cuda:0" if device == "cuda" else "cpu"
    )
    monkeypatch.setattr(streaming, "make_slots", make_slots)
    yield made
    pool.shutdown()
    assert all(slot.closed == 1 and slot.running is None for slot in made)
    assert READER not in {thread.name for thread in threading.enumerate()}


def model(path, count=12):
    """Tensors of every kind between each other; some are kept."""
    rng = np.random.default_rng(5)
    dtypes = [np.float32, np.float16, ml_dtypes.bfloat16]
    tensors = {}
    for i in range(count):
        shape = (int(rng.integers(0, 9)), 256 * int(rng.integers(1, 4)))
        tensors[f"{i}.weight"] = rng.standard_normal(shape, np.float32).astype(dtypes[i % 3])
        if i % 4 == 1:
            tensors[f"{i}.bias"] = rng.standard_normal(7, np.float32)
    tensors["odd"] = rng.standard_normal((3, 100), np.float32)  # kept by ggml's types
    cq.save(path, tensors)
    return tensors


FORMATS = {
    "nf4": {}, "nf4 nested": {"double_quant": True}, "k3": {}, "uint4": {}, "nvfp4": {},
    "q4_k": {}, "fp16": {}, "int8 tensor": {"block_size": "tensor"},
    "int8 small": {"block_size": 8},
}  # fmt: skip


@pytest.mark.parametrize("case", FORMATS)
def test_the_file_and_the_reports_are_those_of_the_cpu(case, fake, tmp_path):
    fmt = cq.get_format(case.split()[0], **FORMATS[case])
    model(tmp_path / "in")
    wanted = list(quantize_file(tmp_path / "in", tmp_path / "cpu", fmt, device="cpu"))
    for _ in range(3):
        found = list(quantize_file(tmp_path / "in", tmp_path / "gpu", fmt, device="cuda"))
        assert (tmp_path / "gpu").read_bytes() == (tmp_path / "cpu").read_bytes()
        assert [replace(r, seconds=0) for r in found] == [replace(r, seconds=0) for r in wanted]
        assert all(report.seconds >= 0 for report in found)
    assert len(fake) == 3 * streaming.SLOTS


def test_a_file_may_replace_itself(fake, tmp_path):
    tensors = model(tmp_path / "m")
    list(quantize_file(tmp_path / "m", tmp_path / "m", cq.get_format("int8"), device="cuda"))
    loaded = cq.load(tmp_path / "m")
    assert loaded.keys() == tensors.keys() and os.listdir(tmp_path) == ["m"]


def test_nothing_to_quantize_needs_no_slots(fake, tmp_path):
    model(tmp_path / "in")
    fmt = cq.get_format("nf4")
    reports = quantize_file(tmp_path / "in", tmp_path / "out", fmt, exclude=["*"], device="cuda")
    assert all(report.reason for report in reports) and fake == []


@pytest.mark.parametrize("bad", [0, 5, 11])
def test_an_error_names_its_tensor_after_the_reports_before_it(bad, fake, tmp_path):
    tensors = model(tmp_path / "in")
    tensors[f"{bad}.weight"] = np.full((2, 256), np.inf, np.float32)
    cq.save(tmp_path / "in", tensors)
    (tmp_path / "out").write_bytes(b"old")
    seen = {}
    for device in ("cpu", "cuda"):
        reports = quantize_file(
            tmp_path / "in", tmp_path / "out", cq.get_format("nf4"), device=device
        )
        names = []
        with pytest.raises(ValueError, match=f"'{bad}.weight': ") as caught:
            names.extend(report.name for report in reports)
        seen[device] = names, str(caught.value)
    assert seen["cpu"] == seen["cuda"]
    assert (tmp_path / "out").read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


@pytest.mark.parametrize("after", [0, 1, 4, 9])
def test_a_closed_iterator_leaves_nothing(after, fake, tmp_path):
    model(tmp_path / "in")
    steps = quantize_file(tmp_path / "in", tmp_path / "out", cq.get_format("nf4"), device="cuda")
    for _ in range(after):
        next(steps)
    steps.close()
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("where", ["start", "finish"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_an_interrupt_leaves_nothing(where, error, fake, tmp_path, monkeypatch):
    model(tmp_path / "in")
    true, calls = getattr(FakeSlot, where), []

    def interrupted(self, *arguments):
        calls.append(where)
        if len(calls) == 5:
            raise error("stop")
        return true(self, *arguments)

    monkeypatch.setattr(FakeSlot, where, interrupted)
    with pytest.raises(error, match="stop"):
        list(quantize_file(tmp_path / "in", tmp_path / "out", cq.get_format("nf4"), device="cuda"))
    assert os.listdir(tmp_path) == ["in"]


def test_a_file_that_is_cut_short_amid_the_work(fake, tmp_path, monkeypatch):
    model(tmp_path / "in")
    start = FakeSlot.start

    def cutting(self, job):
        os.truncate(tmp_path / "in", 100)
        return start(self, job)

    monkeypatch.setattr(FakeSlot, "start", cutting)
    with pytest.raises(cq.FormatError, match="cut short while it was read"):
        list(quantize_file(tmp_path / "in", tmp_path / "out", cq.get_format("nf4"), device="cuda"))
    assert os.listdir(tmp_path) == ["in"]


def test_an_error_of_the_reading_thread_comes_out(fake, tmp_path, monkeypatch):
    model(tmp_path / "in")
    read = streaming.SafetensorsReader.read_into

    def fail(self, name, *arguments):
        if name == "7.weight":
            raise OSError(5, "Input/output error")
        return read(self, name, *arguments)

    monkeypatch.setattr(streaming.SafetensorsReader, "read_into", fail)
    names = []
    with pytest.raises(OSError, match="Input/output"):
        names.extend(
            report.name
            for report in quantize_file(
                tmp_path / "in", tmp_path / "out", cq.get_format("nf4"), device="cuda"
            )
        )
    assert names[-1] == "5.weight" and os.listdir(tmp_path) == ["in"]


# ---- the pipeline alone -----------------------------------------------------------------------


class CountingSlot:
    """Counts what is in memory at once."""

    def __init__(self):
        self.staging = np.zeros(8, np.uint8)

    def start(self, job):
        self.job = job

    def finish(self):
        return Made({"value": self.staging[:1]}, float(self.job.name))

    def close(self):
        pass


def counting_jobs(count, log):
    def job(i):
        def read(staging):
            assert staging.size == 4
            log.append(("read", i))
            staging[:] = i

        return Job(str(i), (4,), np.dtype(np.uint8), 4, cq.get_format("nf4"), read)

    return [job(i) for i in range(count)]


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_slots_bound_what_is_read_ahead(slots):
    log = []
    pipeline = Pipeline([CountingSlot() for _ in range(slots)])
    for i, (job, made) in enumerate(pipeline.run(counting_jobs(20, log))):
        time.sleep(0.002)
        assert (job.name, made.sqnr_db, made.parts["value"][0]) == (str(i), i, i)
        # Those before i have left their slots; i and what is read ahead of it fill them.
        assert len(log) <= i + slots
    assert log == [("read", i) for i in range(20)]


def test_three_slots_read_while_one_computes_and_one_is_with_the_caller():
    log = []
    steps = Pipeline([CountingSlot() for _ in range(3)]).run(counting_jobs(20, log))
    next(steps)
    deadline = time.monotonic() + 120
    while len(log) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(log) == 3
    steps.close()
    assert len(log) == 3


def test_no_jobs():
    assert list(Pipeline([CountingSlot()]).run([])) == []


# ---- the slot of a GPU, on a CuPy made of NumPy -------------------------------------------------


class DeviceArray(np.ndarray):
    """A NumPy array that has a pointer where CuPy's has it."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data, owner=self)


def fake_cupy():
    def memcpy(to, source, nbytes, kind, stream):
        assert stream == 7 and kind in (1, 2)
        ctypes.memmove(to, source, nbytes)

    class Stream:
        ptr = 7

        def __init__(self, non_blocking):
            assert non_blocking

        __enter__ = __exit__ = synchronize = lambda self, *_: None

    def reduction(types, out, mapped, *_):
        def call(*arrays, axis):
            x = arrays[0].astype(np.float64)
            gap = x - arrays[1] if len(arrays) == 2 else x
            counted = np.isfinite(x) if "isfinite" in mapped else True
            return (gap * gap).sum(axis=axis, where=counted)

        return call

    runtime = SimpleNamespace(
        memcpyAsync=memcpy, memcpyHostToDevice=1, memcpyDeviceToHost=2, CUDARuntimeError=OSError
    )
    return SimpleNamespace(
        cuda=SimpleNamespace(
            Stream=Stream, runtime=runtime, PinnedMemory=bytearray,
            PinnedMemoryPointer=lambda memory, _: memory,
        ),
        ndarray=lambda shape, dtype, data: np.ndarray(
            shape, dtype, data.owner.view(np.ndarray)
        ).view(DeviceArray),
        empty=lambda n, dtype: np.empty(n, dtype).view(DeviceArray),
        stack=lambda arrays: np.stack(arrays).view(DeviceArray),
        ReductionKernel=reduction,
    )  # fmt: skip


@pytest.fixture
def fake_gpu(monkeypatch):
    def quantize(x, fmt, **options):
        q = cq.quantize(x, fmt, **options)
        parts = {name: part.view(DeviceArray) for name, part in q.arrays().items()}
        return replace(q, components=parts)

    cupy = fake_cupy()
    monkeypatch.setattr(cuda, "load_cupy", lambda: cupy)
    monkeypatch.setattr(cuda, "use", lambda device: nullcontext())
    monkeypatch.setattr(cuda, "quantize", quantize)
    monkeypatch.setattr(streaming, "resolve", lambda device: str(device))
    cuda._kernels.cache_clear()
    yield
    cuda._kernels.cache_clear()


@pytest.mark.parametrize("case", FORMATS)
def test_the_slot_of_a_gpu(case, fake_gpu, tmp_path):
    fmt = cq.get_format(case.split()[0], **FORMATS[case])
    model(tmp_path / "in")
    wanted = list(quantize_file(tmp_path / "in", tmp_path / "cpu", fmt, device="cpu"))
    found = list(quantize_file(tmp_path / "in", tmp_path / "gpu", fmt, device="cuda:0"))
    assert (tmp_path / "gpu").read_bytes() == (tmp_path / "cpu").read_bytes()
    for a, b in zip(wanted, found, strict=True):
        assert (a.name, a.bytes_out, a.reason) == (b.name, b.bytes_out, b.reason)
        assert (a.sqnr_db is None) == (b.sqnr_db is None)
        assert (a.sqnr_db or 0) == pytest.approx(b.sqnr_db or 0, rel=1e-12)


def clamped_model(path):
    """Finite values of one magnitude, but for a NaN and two infinities."""
    rng = np.random.default_rng(3)
    w = rng.standard_normal((16, 256)).astype(np.float32)
    w[0, 0], w[1, 1], w[2, 2] = np.nan, np.inf, -np.inf
    cq.save(path, {"w": w})
    return w


def check_clamped(w, report, q):
    """The SQNR counts what was finite: the block beside an infinity is lost, and that shows."""
    finite = np.isfinite(w)
    gap = w[finite].astype(np.float64) - q.dequantize()[finite]
    wanted = 10 * np.log10((w[finite].astype(np.float64) ** 2).sum() / (gap**2).sum())
    assert report.sqnr_db == pytest.approx(wanted, rel=1e-9) and 5 < wanted < 20


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_after_clamp_the_error_is_a_number(device, fake_gpu, tmp_path):
    w = clamped_model(tmp_path / "in")
    steps = quantize_file(
        tmp_path / "in", tmp_path / "out", cq.get_format("nf4"), nonfinite="clamp", device=device
    )
    (report,) = steps
    check_clamped(w, report, cq.load(tmp_path / "out")["w"])


@pytest.mark.gpu
@pytest.mark.skipif(not devices.gpu_available(), reason="no GPU")
def test_after_clamp_the_error_of_a_real_gpu_is_a_number(tmp_path):
    w = clamped_model(tmp_path / "in")
    fmt = cq.get_format("nf4")
    steps = quantize_file(tmp_path / "in", tmp_path / "out", fmt, nonfinite="clamp", device="cuda")
    (report,) = steps
    check_clamped(w, report, cq.load(tmp_path / "out")["w"])


@pytest.mark.parametrize("name", cq.list_formats())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_tensor_grows(name, dtype, tmp_path):
    """Filters, columns, scalars a row: quantized where that saves bytes, else as they were."""
    shapes = [
        (64, 64, 1, 1), (64, 64, 3, 3), (16, 8, 7, 7), (64, 1), (64, 2), (64, 8), (64, 31),
        (1, 1), (2, 256), (0, 256), (256, 0),
    ]  # fmt: skip
    rng = np.random.default_rng(2)
    tensors = {str(shape): rng.standard_normal(shape).astype(np.dtype(dtype)) for shape in shapes}
    cq.save(tmp_path / "in", tensors)
    fmt = cq.get_format(name)
    reports = quantize_file(tmp_path / "in", tmp_path / "out", fmt, device="cpu")
    by_name = {report.name: report for report in reports}
    loaded = cq.load(tmp_path / "out")
    for key, x in tensors.items():
        report, found = by_name[key], loaded[key]
        if fmt.scale is None:
            assert report.reason is None and found.nbytes == 2 * x.size
        elif report.reason is None:
            assert found.nbytes < x.nbytes, key
            assert found.nbytes * 8 < 1.5 * fmt.bits_per_element * x.size, key
        else:
            assert found.dtype == x.dtype and found.tobytes() == x.tobytes(), key
            assert report.bytes_out == report.bytes_in
    if dtype == "bfloat16" and fmt.bits_per_element < 8 and not fmt.is_blocks:
        assert by_name["(2, 256)"].reason is None


@pytest.mark.parametrize("name, bits", [("nf4", 16), ("mxfp4", 8), ("nvfp4", 8), ("int8", 18.7)])
def test_filters_are_kept_in_every_format(name, bits):
    said = f"short rows of 3 would take {bits} bits a weight"
    assert cq.get_format(name).why_keep((256, 256, 3, 3), 4 * 256 * 256 * 9) == said


def test_filters_are_kept_with_the_reason(tmp_path):
    filters = {
        "1x1": np.ones((256, 256, 1, 1), np.float32), "3x3": np.ones((256, 256, 3, 3), np.float32),
        "column": np.ones((512, 1), np.float32), "wide": np.ones((4, 64), np.float32),
    }  # fmt: skip
    cq.save(tmp_path / "in", filters)
    steps = quantize_file(tmp_path / "in", tmp_path / "out", cq.get_format("nf4"), device="cpu")
    assert {report.name: report.reason for report in steps} == {
        "1x1": "short rows of 1 would take 40 bits a weight",
        "3x3": "short rows of 3 would take 16 bits a weight",
        "column": "short rows of 1 would take 40 bits a weight",
        "wide": None,
    }


@pytest.mark.parametrize("name", cq.list_formats())
@in_turn("shape", [(4, 512), (0, 256), (3, 2, 256)])
def test_components_do_not_overlap_in_the_staging_memory(name, shape):
    fmt = cq.get_format(name)
    end = 0
    for part, start in cuda._placed(fmt, shape):
        assert start % cuda.ALIGNMENT == 0 and start >= end
        end = start + cuda._nbytes(part)
    assert cuda.staging_bytes(fmt, shape, 0) == end
    assert cuda.staging_bytes(fmt, shape, 10**9) == 10**9


# ---- devices ------------------------------------------------------------------------------------


def cupy_with(count):
    class CUDARuntimeError(RuntimeError):
        pass

    def get_count():
        if count is None:
            raise CUDARuntimeError("cudaErrorNoDevice")
        return count

    runtime = SimpleNamespace(
        getDeviceCount=get_count, getDevice=lambda: 1, CUDARuntimeError=CUDARuntimeError,
        getDeviceProperties=lambda i: {"name": b"GPU %d" % i},
    )  # fmt: skip
    return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))


@pytest.mark.parametrize("cupy", [None, cupy_with(None)], ids=["none", "old"])
def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused(cupy, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert not devices.gpu_available()
    assert devices.resolve() == devices.resolve(None) == devices.resolve("cpu") == "cpu"
    with pytest.raises(cq.BackendUnavailable, match=r"\[cuda12\]|cuquant doctor"):
        devices.resolve("cuda")


def test_a_gpu_is_chosen_by_number(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", cupy_with(2))
    assert devices.gpu_available()
    assert (devices.resolve(), devices.resolve("cuda")) == ("cuda:1", "cuda:1")
    assert devices.resolve("cuda:0") == "cuda:0" and devices.describe("cuda:0") == "cuda:0 (GPU 0)"
    with pytest.raises(cq.BackendUnavailable, match="no cuda:2; the last GPU is cuda:1"):
        devices.resolve("cuda:2")
    with pytest.raises(ValueError, match="tpu"):
        devices.resolve("tpu")


def test_other_errors_of_cupy_mean_no_gpu_for_this_reason(monkeypatch):
    cupy = cupy_with(1)

    def broken():
        raise RuntimeError("a defect")

    cupy.cuda.runtime.getDeviceCount = broken
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert devices.resolve() == "cpu"
    with pytest.raises(cq.BackendUnavailable, match="a defect"):
        devices.resolve("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not devices.gpu_available(), reason="no GPU")
@pytest.mark.parametrize("case", FORMATS)
def test_a_real_gpu_writes_the_bytes_of_the_cpu(case, tmp_path):
    fmt = cq.get_format(case.split()[0], **FORMATS[case])
    tensors = model(tmp_path / "in", 24)
    list(quantize_file(tmp_path / "in", tmp_path / "cpu", fmt, device="cpu"))
    found = list(quantize_file(tmp_path / "in", tmp_path / "gpu", fmt, device="cuda"))
    assert (tmp_path / "gpu").read_bytes() == (tmp_path / "cpu").read_bytes()
    assert {report.name for report in found} == tensors.keys()
