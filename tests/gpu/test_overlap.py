"""Kernels that start while those before them end: how they are started, and what they do first."""

import ctypes
import re
import shutil
import struct
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from planted import FakeCupy
from programs import number
from samples import sampled

import cuquant as cq
from cuquant.formats import Format
from cuquant.gpu import driver, elf, jit
from cuquant.gpu.elf import Resources
from cuquant.gpu.jit import Program
from cuquant.gpu.kernel import Kernel
from cuquant.gpu.source import kernel_folder
from cuquant.ops.programs import PROGRAMS

# ---- how they are started -----------------------------------------------------------------------

DRIVER = """
#include <cuda.h>
extern "C" {
unsigned long long seen[16];
CUresult cuDriverGetVersion(int* version) { *version = 13000; return CUDA_SUCCESS; }
CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void** parameters, void** extra) {
    const CUlaunchAttribute& only = c->attrs[0];
    if (c->numAttrs != 1 || only.id != CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION ||
        only.value.programmaticStreamSerializationAllowed != 1 || extra)
        return CUDA_ERROR_INVALID_VALUE;
    const unsigned long long all[] = {
        c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
        c->sharedMemBytes, reinterpret_cast<unsigned long long>(c->hStream),
        reinterpret_cast<unsigned long long>(f), *static_cast<unsigned long long*>(parameters[0]),
        *static_cast<unsigned*>(parameters[1])};
    for (int i = 0; i < 11; ++i) seen[i] = all[i];
    return c->gridDimX == 100 ? CUDA_ERROR_LAUNCH_FAILED : CUDA_SUCCESS;
}
}
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """A library with the driver's two functions, compiled with its own header."""
    include = Path(pytest.importorskip("nvidia.cuda_runtime").__path__[0]) / "include"
    if shutil.which("g++") is None or not (include / "cuda.h").exists():
        pytest.skip("no g++, or no cuda.h")
    (tmp_path / "stub.cpp").write_text(DRIVER)
    command = ["g++", "-shared", "-fPIC", f"-I{include}", "stub.cpp", "-o", "stub.so"]
    subprocess.run(command, cwd=tmp_path, check=True)
    library = ctypes.CDLL(str(tmp_path / "stub.so"))
    monkeypatch.setattr(driver, "library", lambda: library)
    driver.starter.cache_clear()
    yield library
    driver.starter.cache_clear()


def test_the_driver_reads_what_is_written(stub):
    """Structs and the call itself, as cuda.h has them."""
    start = driver.starter()
    assert start is not None
    api = SimpleNamespace(launchKernel=None, check_status=check_status)
    pointer, stream = 2**47 + 24, 2**46 + 8
    made = Kernel(api, SimpleNamespace(ptr=pointer), Resources("k", 32, 0, 0, 1024, (8, 4)), start)
    made.launch((7, 2, 1), 128, 4096, (2**40 + 1, 5), stream)
    seen = list((ctypes.c_uint64 * 16).in_dll(stub, "seen"))[:11]
    assert seen == [7, 2, 1, 128, 1, 1, 4096, stream, pointer, 2**40 + 1, 5]
    with pytest.raises(RuntimeError, match="status 719"):
        made.launch((100, 1, 1), 32, 0, (1, 2), 0)


def check_status(status):
    raise RuntimeError(f"status {status}")


class Started:
    """Stands for cuLaunchKernelEx: reads what it is given, as the driver does."""

    def __init__(self, sizes, status=0):
        self.sizes, self.status, self.seen = sizes, status, []

    def __call__(self, config, function, parameters, extra):
        *sizes, stream, attributes, count = driver.CONFIG.unpack(
            ctypes.string_at(config, driver.CONFIG.size)
        )
        assert (function, extra, count) == (99, 0, 1)
        assert ctypes.string_at(attributes, driver.ATTRIBUTE.size) == driver.OVERLAP
        addresses = (ctypes.c_void_p * len(self.sizes)).from_address(parameters)
        values = [ctypes.string_at(a, n) for a, n in zip(addresses, self.sizes, strict=True)]
        self.seen.append((tuple(sizes), stream, values))
        return self.status


def test_such_a_kernel_is_started_by_the_driver():
    start = Started((8, 4))
    api = SimpleNamespace(launchKernel=None, check_status=check_status)
    made = Kernel(api, SimpleNamespace(ptr=99), Resources("k", 32, 0, 0, 1024, (8, 4)), start)
    for x in (1, 2):
        made.launch((7, 2, 1), 128, 64, (2**40 + x, -1), 2**47 + 8)
    shape, stream = (7, 2, 1, 128, 1, 1, 64), 2**47 + 8
    values = [[struct.pack("<Q", 2**40 + x), struct.pack("<i", -1)] for x in (1, 2)]
    assert start.seen == [(shape, stream, value) for value in values]
    start.status = 719
    with pytest.raises(RuntimeError, match="status 719"):
        made.launch((1, 1, 1), 32, 0, (1, 2), 0)


@pytest.mark.parametrize(
    ("program", "capability", "wanted"),
    [
        (Program("adding.cu", "adding", overlaps=True), 9, True),
        (Program("adding.cu", "adding", overlaps=True), 8, False),
        (Program("adding.cu", "adding"), 9, False),
    ],
)
def test_only_kernels_that_wait_start_early(nvrtc, monkeypatch, program, capability, wanted):
    fake = FakeCupy()
    fake.cuda.runtime.deviceGetAttribute = lambda number, _: {75: capability, 76: 0}[number]
    monkeypatch.setattr(jit, "_cupy", lambda: fake)
    monkeypatch.setattr(driver, "starter", lambda: "start")
    assert jit.load(program, 0)._start == ("start" if wanted else None)


class Library:
    """libcuda of a version."""

    def __init__(self, version, status=0):
        self.version, self.status = version, status
        self.cuLaunchKernelEx = SimpleNamespace()

    def cuDriverGetVersion(self, to):
        to._obj.value = self.version
        return self.status


DRIVERS = (
    (Library(13000), True),
    (Library(12030), True),
    (Library(12020), False),
    (Library(13000, status=3), False),
    (None, False),
)


@pytest.mark.parametrize(("library", "there"), DRIVERS)
def test_old_drivers_start_kernels_one_after_the_other(monkeypatch, library, there):
    def load():
        if library is None:
            raise cq.BackendUnavailable("the CUDA driver cannot be loaded")
        return library

    monkeypatch.setattr(driver, "library", load)
    driver.starter.cache_clear()
    try:
        assert (driver.starter() is not None) == there
    finally:
        driver.starter.cache_clear()


# ---- what they do first -------------------------------------------------------------------------

NAMES = ("nf4", "int4", "k5", "uint5", "uint5/16", "nvfp4", "q4_k", "q8_1")  # and their blocks
# Reads and writes of global memory, but for lines that come to L2.
TOUCHES = re.compile(r"(LDG|STG|LD|ST|LDGSTS|UTMALDG|UBLKCP|RED|ATOMG?)\b")
# With what each kernel reads its weights, which it may before it waits: not with what x is read.
EARLY = {
    "matmul_stream": "LDG",
    "matmul_hopper": "LDG",  # levels of a codebook, and scales: x comes by the copy engine
    "matmul_blocks": "LDGSTS",  # or boxes: UTMALDG
    "matmul_q8_1": "LDGSTS",
    "matmul_q8_1_tiles": "LDGSTS",
}


# What comes through shared memory: copies of a lane. Of prepacked weights' groups two chunks.
GROUPS = {"nvfp4": 2, "uint5/16": 4, "q4_k": 8, "q8_1": 2}
# matmul_stream's kAhead and kRing among its arguments: units of a chunk, and whether codes come so.


def copies_of_codes(name: str, units: int) -> int:
    """By rows, of one chunk, since x is wanted before the second: as many rows at a time as a lane
    each suffices for, and one copy in a loop for what is not all there."""
    vectors = units * named(name).bits // 2
    rows = 1 << (32 // vectors).bit_length() - 1
    return 16 // rows + 1


def named(name: str) -> Format:
    name, _, block = name.partition("/")
    return cq.get_format(name, **({"block_size": int(block)} if block else {}))


def programs(name: str) -> list[Program]:
    found = [
        program
        for operation in ("quantize", "matmul", "gemm_q8_1")
        for program in PROGRAMS[operation](named(name), dtypes=("float16",), arch=90)
    ]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("name", NAMES)
def test_kernels_that_wait_are_those_that_may_start_early(name):
    """And which read no weights that a kernel makes which lets the next one start."""
    for program in programs(name):
        text = (kernel_folder() / program.file).read_text()
        own = name == "q8_1" and program.entry == "matmul_blocks"
        assert program.overlaps == ("wait_for_earlier();" in text and not own), program.name
        assert program.overlaps == ("let_next_start();" in text and not own), program.name


def opcodes(sass: str) -> list[str]:
    """Of a kernel's instructions, in the order of the text."""
    found = re.findall(
        r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", sass, re.MULTILINE
    )
    return [opcode for opcode in found if opcode]


@pytest.mark.parametrize("name", sampled(NAMES, lambda name: name == "q8_1"))
def test_nothing_but_weights_is_touched_before_the_wait(name):
    try:
        jit.nvrtc()
    except cq.BackendUnavailable as error:
        pytest.skip(str(error))
    # Of matmul_stream all: as rows lie, and prepacked; of matmul_blocks with boxes, and without.
    entries: dict[str | Program, Program] = {}
    for program in programs(name):
        boxes = program.entry == "matmul_blocks" and number(program, "boxes")
        if program.overlaps:
            key = program if program.entry == "matmul_stream" else f"{program.entry} {boxes}"
            entries.setdefault(key, program)
    assert entries
    for key, program in entries.items():
        sass = elf.disassembled(jit.compiled(program, 90).code)
        if sass is None:
            pytest.skip("no nvdisasm; pip install nvidia-cuda-nvdisasm")
        code = opcodes(sass)
        assert "PREEXIT" in code, program.name
        before = [op for op in code[: code.index("ACQBULK")] if TOUCHES.match(op)]
        streamed = program.entry == "matmul_stream"
        if streamed and number(program, "ring"):
            copies = copies_of_codes(name, number(program, "ahead"))
        else:
            copies = GROUPS.get(name, 0)
        if streamed and copies:
            kinds = Counter(op.split(".")[0] for op in before)
            assert set(kinds) <= {"LDGSTS", "LDG"} and kinds["LDGSTS"] == copies, program.name
            assert kinds["LDG"] or name != "uint5", "zero points come after the wait"
            late = name == "uint5/16" and number(program, "ring")
            assert not (late and kinds["LDG"]), "scales and zero points come early"
            continue
        early = "UTMALDG" if key == "matmul_blocks 1" else EARLY.get(program.entry)
        assert {op.split(".")[0] for op in before} <= {early}, program.name
        if program.entry in EARLY and program.entry != "matmul_hopper":
            assert before, "weights come after the wait"


# ---- on a GPU -----------------------------------------------------------------------------------

N, K = 2048, 4096
F16 = np.float16


@pytest.fixture
def late(gpu):
    """late(to, source): copies on the current stream, after a while."""
    text = r"""
    extern "C" __global__ void late(unsigned char* to, const unsigned char* from, long long n) {
        unsigned long long first, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(first));
        do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - first < 200000);
        const long long first_byte = blockIdx.x * 256ll + threadIdx.x, step = gridDim.x * 256ll;
        for (long long i = first_byte; i < n; i += step) to[i] = from[i];
    }"""
    kernel = gpu.RawKernel(text, "late")

    def run(to, source):
        kernel((64,), (256,), (to, source, np.int64(to.nbytes)))

    return run


def orders(gpu, call):
    """`call`, as it is and in a CUDA graph that is launched three times."""
    call()
    gpu.cuda.runtime.deviceSynchronize()
    yield call
    with gpu.cuda.Stream(non_blocking=True) as stream:
        call()  # gets the stream's workspace
        stream.synchronize()
        stream.begin_capture()
        call()
        graph = stream.end_capture()

        def replay():
            for _ in range(3):
                graph.launch(stream)
            stream.synchronize()

        yield replay


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 16, 128])
@pytest.mark.parametrize("name", ["nf4", "int4", "q4_0"])
@pytest.mark.parametrize("packed", [True, False], ids=["prepacked", "as it is"])
def test_gpu_what_was_just_written_is_read(gpu, late, name, rows, packed):
    """x, and the weight itself, are written by the kernel before; then x by the kernel behind."""
    random = np.random.default_rng(0)
    w = [gpu.asarray(random.standard_normal((N, K), dtype=np.float32)) for _ in range(2)]
    xs = [gpu.asarray(random.standard_normal((rows, K)).astype(F16)) for _ in range(2)]
    weights = [cq.prepack(cq.quantize(v, name)) if packed else cq.quantize(v, name) for v in w]
    wanted = cq.linear(xs[1], weights[1]).get()
    x, y = xs[0].copy(), gpu.empty((rows, N), F16)
    parts = [weight.components for weight in weights]
    first = {key: part.copy() for key, part in parts[0].items()}
    zeros = gpu.zeros_like(x)

    def call():
        late(x, xs[0])
        for key, part in parts[0].items():
            late(part, first[key])
        cq.linear(x, weights[0], out=y)
        late(x, xs[1])
        for key, part in parts[0].items():
            late(part, parts[1][key])
        cq.linear(x, weights[0], out=y)
        x[...] = zeros

    for run in orders(gpu, call):
        y.fill(0)
        run()
        gpu.cuda.runtime.deviceSynchronize()
        assert (y.get() == wanted).all()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 32, 256])
@pytest.mark.parametrize("name", ["nf4", "int4", "k5"])
def test_gpu_layers_wait_for_each_other(gpu, name, rows):
    """A chain in which each layer reads what the one before wrote, into memory used in turn."""
    random = np.random.default_rng(1)
    layers = []
    for _ in range(8):
        w = gpu.asarray(random.standard_normal((N, N), dtype=np.float32) / 45)
        layers.append(cq.prepack(cq.quantize(w, name)))
    x = gpu.asarray(random.standard_normal((rows, N)).astype(F16))
    rooms = [gpu.empty((rows, N), F16) for _ in range(2)]

    def call():
        at = x
        for i, layer in enumerate(layers):
            at = cq.linear(at, layer, out=rooms[i % 2])

    at = x
    for layer in layers:
        at = cq.linear(at, layer)
        gpu.cuda.runtime.deviceSynchronize()
    wanted = at.get()
    assert np.isfinite(wanted).all() and wanted.any()
    for run in orders(gpu, call):
        for _ in range(20):
            rooms[1].fill(0)
            run()
            gpu.cuda.runtime.deviceSynchronize()
            assert (rooms[1].get() == wanted).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["q4_0", "q4_k", "q8_0"])
def test_gpu_activations_are_quantized_before_they_are_multiplied(gpu, name):
    random = np.random.default_rng(2)
    w = gpu.asarray(random.standard_normal((N, K), dtype=np.float32))
    weights = getattr(cq.functional, f"quantize_{name}")(w)
    product = getattr(cq.functional, f"gemm_{name}_q8_1")
    xs = [gpu.asarray(random.standard_normal((4, K), dtype=np.float32)) for _ in range(20)]
    wanted = []
    for x in xs:
        activations = cq.functional.quantize_q8_1(x)
        gpu.cuda.runtime.deviceSynchronize()
        wanted.append(product(weights, activations, N, 4, K).get())
    found = [product(weights, cq.functional.quantize_q8_1(x), N, 4, K) for x in xs]
    assert all((y.get() == z).all() for y, z in zip(found, wanted, strict=True))
