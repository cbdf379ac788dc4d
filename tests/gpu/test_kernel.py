"""Kernels from cubin to launch: loading, captures, forks, parameters."""

import ctypes
import os
import struct
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from planted import ADD, AFFINE, FakeCupy, FakeError, failing

import cuquant as cq
from cuquant.gpu import jit
from cuquant.gpu.elf import Resources
from cuquant.gpu.jit import Program
from cuquant.gpu.kernel import Kernel

# ---- loading ------------------------------------------------------------------------------------


def test_a_kernel_is_loaded_once_per_device(nvrtc, monkeypatch):
    fake = FakeCupy()
    monkeypatch.setattr(jit, "_cupy", lambda: fake)
    kernel = jit.load(AFFINE, 0, 5)
    assert kernel.name.startswith("_ZN7cuquant6affine")
    assert (kernel.shared_bytes, kernel.local_bytes, kernel.threads_limit) == (128, 0, 128)
    assert fake.calls == [("capturing", 5), ("use", 0), ("free", 0)]
    same = replace(AFFINE)
    assert jit.load(same, 0, 5) is kernel and jit.load(AFFINE, 1) is not kernel
    assert len(fake.modules) == 2


@pytest.mark.parametrize("capturing", [True, FakeError("cudaErrorStreamCaptureImplicit: ...")])
def test_the_first_use_in_a_capture_is_refused(kernels, monkeypatch, capturing):
    fake = FakeCupy(capturing)
    monkeypatch.setattr(jit, "_cupy", lambda: fake)
    with pytest.raises(RuntimeError, match=r"CUDA graph .* cuquant\.precompile\(\)"):
        jit.load(AFFINE, 0, 5)
    assert fake.calls == [("capturing", 5)] and not fake.modules
    jit._kernels[AFFINE, 0] = "loaded"  # type: ignore[assignment]
    assert jit.load(AFFINE, 0, 5) == "loaded", "what is loaded may be captured"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")
def test_a_forked_child_is_refused_with_advice(tmp_path):
    """In a process of its own: pytest's own has threads."""
    code = """
import os, sys
from cuquant.gpu import jit
def child(used):
    if used: jit._kernels[jit.Program("a.cu", "a"), 0] = "loaded"
    pid = os.fork()
    if pid: return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        jit.load(jit.Program("a.cu", "a"), 0)
    except RuntimeError as error:
        sys.stdout.write(f"{type(error).__name__} {error}\\n"); sys.stdout.flush()
    os._exit(0)
sys.modules["cupy"] = None
child(False); child(True)
assert jit._kernels
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first.startswith("BackendUnavailable CuPy is not installed"), "nothing was used before"
    assert second.startswith("RuntimeError this process was forked") and "spawn" in second


def test_no_gpu_is_said_in_one_line(nvrtc, monkeypatch):
    fake = FakeCupy(error=True)
    monkeypatch.setattr(jit, "_cupy", lambda: fake)
    with pytest.raises(cq.BackendUnavailable, match=r"^no usable GPU .*cuquant doctor"):
        jit.load(AFFINE, 0)
    monkeypatch.setattr(jit, "_process", os.getpid() + 1)
    with pytest.raises(cq.BackendUnavailable, match="no usable GPU"):
        jit.load(AFFINE, 0)
    monkeypatch.setattr(fake, "checked", failing(FakeError("cudaErrorInitializationError")))
    with pytest.raises(RuntimeError, match="forked"):
        jit.load(AFFINE, 0)


def test_an_error_that_was_pending_is_not_called_a_capture(nvrtc, monkeypatch):
    fake = FakeCupy(capturing=FakeError("cudaErrorIllegalAddress"))
    monkeypatch.setattr(jit, "_cupy", lambda: fake)
    with pytest.raises(FakeError, match="IllegalAddress"):
        jit.load(AFFINE, 0)


# ---- launching ----------------------------------------------------------------------------------


class FakeDriver:
    """Copies the parameters as the driver does: from the addresses, by the kernel's sizes."""

    def __init__(self, sizes):
        self.sizes, self.launches, self.attributes = sizes, [], []

    def launchKernel(self, function, *numbers):
        *shape, stream, parameters, extra = numbers
        addresses = (ctypes.c_void_p * len(self.sizes)).from_address(parameters)
        values = [ctypes.string_at(a, n) for a, n in zip(addresses, self.sizes, strict=True)]
        assert extra == 0
        self.launches.append((function, tuple(shape), stream, values))

    def funcSetAttribute(self, *arguments):
        self.attributes.append(arguments)


def kernel(*sizes, shared=0, known=True):
    driver = FakeDriver(sizes)
    resources = Resources("k", 32, 0, shared, 1024, sizes if known else ())
    return Kernel(driver, SimpleNamespace(ptr=99), resources), driver


GRID = ((7, 2, 1), 128, 0)


@pytest.mark.parametrize("known", [True, False], ids=["from a cubin", "from PTX"])
def test_parameters_arrive_as_the_kernel_reads_them(known):
    made, driver = kernel(8, 4, 4, 1, 20, 8, known=known)
    made.launch((7, 2, 1), 128, 64, (2**40, 5, 1.5, True, bytes(range(20)), 2**64 - 1), 13)
    assert driver.launches == [
        (
            99,
            (7, 2, 1, 128, 1, 1, 64),
            13,
            [
                struct.pack("<Q", 2**40),
                struct.pack("<i", 5),
                struct.pack("<f", 1.5),
                b"\1",
                bytes(range(20)),
                b"\xff" * 8,
            ],
        )
    ]


def test_negative_integers_and_other_kinds_are_packed_too():
    made, driver = kernel(8, 4)
    for arguments in [(1, 2), (-1, 2), (1, -2), (3, 0.5), (1, 2)]:
        made.launch(*GRID, arguments, 0)
    values = [launch[3] for launch in driver.launches]
    q, i, f = (struct.Struct(f"<{code}").pack for code in "qif")
    expected = [(q(1), i(2)), (q(-1), i(2)), (q(1), i(-2)), (q(3), f(0.5)), (q(1), i(2))]
    assert values == [list(pair) for pair in expected]


@pytest.mark.parametrize(
    "arguments", [(1,), (1, 2, 3), (1.0, 2), (b"1234", 1), (1, b"1"), ()], ids=str
)
def test_wrong_arguments_never_reach_the_driver(arguments):
    for first in (False, True):
        made, driver = kernel(8, 16)
        if first:
            made.launch(*GRID, (1, bytes(16)), 0)
        with pytest.raises(TypeError, match=r"parameters of \(8, 16\) bytes"):
            made.launch(*GRID, arguments, 0)
        assert len(driver.launches) == first


def test_shared_memory_above_48_kb_is_asked_for_once():
    made, driver = kernel(8, shared=1000)
    limit = 48 * 1024 - 1000
    for shared in (0, limit, limit + 1, limit + 1, 100_000, 90_000):
        made.launch((1, 1, 1), 32, shared, (0,), 0)
    assert driver.attributes == [(99, 8, limit + 1), (99, 8, 100_000)]


def test_threads_do_not_share_parameters():
    made, driver = kernel(8, 8)

    def use(number):
        for i in range(500):
            made.launch(*GRID, (number, number * i), 0)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(8)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    seen = sorted(tuple(int.from_bytes(v, "little") for v in call[3]) for call in driver.launches)
    assert seen == sorted((n, n * i) for n in range(8) for i in range(500))


def test_a_failed_launch_leaves_the_kernel_usable():
    made, driver = kernel(8)
    good, driver.launchKernel = driver.launchKernel, failing(FakeError("too many blocks"))
    made = Kernel(driver, SimpleNamespace(ptr=99), Resources("k", 32, 0, 0, 1024, (8,)))
    with pytest.raises(FakeError):
        made.launch(*GRID, (1,), 0)
    made._launch = good
    made.launch(*GRID, (2,), 0)
    assert driver.launches[0][3] == [struct.pack("<Q", 2)]


class NoContext(RuntimeError):
    """As CuPy's CUDADriverError of CUDA_ERROR_INVALID_CONTEXT."""

    status = 201


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_threads_first_call_gets_a_context(monkeypatch, overlaps):
    """Where all is cached nothing calls CUDA's runtime, which would make one."""
    _, driver = kernel(8)
    fake, refused = FakeCupy(), []
    launch, set_attribute = driver.launchKernel, driver.funcSetAttribute

    def refuse():
        raise NoContext

    def asking(call, refusal=refuse):
        def run(*arguments):
            if ("free", 0) in fake.calls:
                return call(*arguments)
            refused.append(arguments)
            return refusal()

        return run

    driver.launchKernel = asking(launch)
    driver.check_status = lambda status: refuse() if status == 201 else None
    start = asking(lambda *_: 0, lambda: 201) if overlaps else None
    monkeypatch.setitem(sys.modules, "cupy", fake)
    resources = Resources("k", 32, 0, 0, 1024, (8,))
    made = Kernel(driver, SimpleNamespace(ptr=99), resources, start)
    made.launch(*GRID, (1,), 0)
    assert len(refused) == 1 and fake.calls == [("free", 0)]
    assert overlaps or driver.launches[0][3] == [struct.pack("<Q", 1)]
    fake.calls.clear()
    driver.funcSetAttribute = asking(set_attribute)
    made.launch((1, 1, 1), 32, 100_000, (1,), 0)
    assert driver.attributes == [(99, 8, 100_000)] and fake.calls == [("free", 0)]


# ---- on a GPU -----------------------------------------------------------------------------------


@pytest.fixture
def cupy(nvrtc):
    found = pytest.importorskip("cupy")
    try:
        found.cuda.runtime.getDeviceCount()
    except found.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(str(error))
    return found


def add(cupy, made, x, y, stream=0, offset=0):
    """y = x + 15 + 0.5 by the kernel `adding`, its cells `offset` floats into shared memory."""
    five = struct.pack("<5i", 1, 2, 3, 4, 5)
    shared = 4 * (offset + x.size)
    made.launch((1, 1, 1), x.size, shared, (x.data.ptr, y.data.ptr, five, 0.5, offset), stream)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 20_000], ids=["48 KB", "80 KB"])
@pytest.mark.parametrize("ptx", [False, True], ids=["cubin", "PTX"])
def test_gpu_runs_what_was_compiled(cupy, monkeypatch, ptx, offset):
    if ptx:
        older = max(a for a in jit.nvrtc().getSupportedArchs() if a <= jit.device_arch(0))
        monkeypatch.setattr(jit, "_target", lambda *_: f"compute_{older}")
    made = jit.load(ADD, 0)
    x, y = cupy.arange(64, dtype=cupy.float32), cupy.zeros(64, cupy.float32)
    add(cupy, made, x, y, cupy.cuda.get_current_stream().ptr, offset)
    assert (y.get() == x.get() + 15.5).all()


@pytest.mark.gpu
@pytest.mark.parametrize("program", [ADD, AFFINE, Program("spilling.cu", "spilling", (40,))])
def test_gpu_driver_and_cubin_agree_on_resources(cupy, program):
    from cupy_backends.cuda.api import driver

    made = jit.load(program, 0)
    told = [driver.funcGetAttribute(number, made._pointer) for number in (4, 3, 1, 0)]
    assert [made.registers, made.local_bytes, made.shared_bytes] == told[:3]
    assert made.threads_limit == told[3]


@pytest.mark.gpu
def test_gpu_capture_survives_a_refusal(cupy):
    x, y = cupy.arange(64, dtype=cupy.float32), cupy.zeros(64, cupy.float32)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="precompile"):
            jit.load(ADD, 0, stream.ptr)
        stream.end_capture()
        made = jit.load(ADD, 0, stream.ptr)
        stream.begin_capture()
        add(cupy, jit.load(ADD, 0, stream.ptr), x, y, stream.ptr)
        graph = stream.end_capture()
        assert not y.get().any(), "only captured"
        graph.launch(stream)
        stream.synchronize()
    assert made is jit.load(ADD, 0)
    assert (y.get() == x.get() + 15.5).all()


@pytest.mark.gpu
def test_gpu_first_calls_of_many_threads(cupy):
    x = cupy.arange(64, dtype=cupy.float32)
    outs = [cupy.zeros(64, cupy.float32) for _ in range(32)]
    cupy.cuda.Device(0).synchronize()
    start = threading.Barrier(32)

    def use(y):
        start.wait()
        with cupy.cuda.Device(0):
            add(cupy, jit.load(ADD, 0), x, y)

    threads = [threading.Thread(target=use, args=(y,)) for y in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cupy.cuda.Device(0).synchronize()
    assert all((y.get() == x.get() + 15.5).all() for y in outs)
