"""The compile matrix: every kernel for every architecture, without a GPU.

A kernel that spills registers, or whose wgmma instructions the compiler serialized, is a defect.
compile_record.json says what was compiled without a failure: a hash for each source and
architecture, of its kernels' texts without comments, options and compiler. What it does not say is
compiled: a sample for each architecture by the test suite, all of it for sm_90 by `pytest -m full`,
all of it for every one by
`PYTHONPATH=tests/support python tests/compile/test_compile.py --all`.
`--record` adds to the record, `--anew` does not look at it. What is unchanged is found in the cache
(CUQUANT_CACHE_DIR).
"""

import argparse
import hashlib
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
from samples import sampled

import cuquant as cq
from cuquant.array.fragments import FRAGMENTS_LAYOUT
from cuquant.gpu import elf, jit
from cuquant.gpu.jit import Program
from cuquant.gpu.source import flatten
from cuquant.ops.layout.packed_weight import Groups
from cuquant.ops.matmul import hopper, stream
from cuquant.ops.matmul import hopper_tiles as tiles
from cuquant.ops.matmul.problem import Problem, Weight
from cuquant.ops.programs import PROGRAMS

RECORD = Path(__file__).with_name("compile_record.json")
ARCHS = (75, 80, 86, 89, 90, 100, 120)
MAIN_ARCH = 90
SAMPLE = 4  # kernels of an architecture that the test suite compiles, of those not in the record
SAMPLES = 3  # as many of other kernels; two architectures' first are for every run of the tests

# The kernels at the memory roof: what they read or write by 16 bytes.
WIDE = {"quantize": "LDG", "dequantize": "STG", "embedding": "STG"}
WIDE_FORMATS = ("nf4", "int8", "fp8_e4m3", "mxfp4", "q4_0")


# Formats whose kernels are others than those of any name: minimums, and scales of other types.
VARIANTS = ("uint4:64+min", "uint5:32+min+bfloat16", "int4+bfloat16", "fp8_e4m3:128x128+e8m0")


class Failure(NamedTuple):
    """A kernel that is not as it should be."""

    arch: int
    name: str
    complaint: str

    def __str__(self) -> str:
        return f"sm_{self.arch} {self.name}: {self.complaint}"


# ---- what is checked ----------------------------------------------------------------------------


def programs(operation: str, name: str, **options) -> list[Program]:
    return PROGRAMS[operation](cq.get_format(name), **options)


def all_programs(arch: int = MAIN_ARCH) -> list[Program]:
    """Each distinct one for an architecture, in a fixed order."""
    names = [*cq.list_formats(), *VARIANTS]
    pairs = ((operation, name) for operation in sorted(PROGRAMS) for name in names)
    found = [program for pair in pairs for program in programs(*pair, arch=arch)]
    return list(dict.fromkeys([*found, *(fine() + tall() if arch == MAIN_ARCH else [])]))


# Weights with other blocks than their format's, whose kernels are short of registers: several
# groups in a unit, a block of all of its warps. Format, block, dtype of x, rows of x.
FINE = [
    ("uint2", 16, "bfloat16", 2),
    ("uint3", 16, "bfloat16", 2),
    ("uint4", 16, "bfloat16", 4),
    ("uint5", 32, "bfloat16", 4),
    ("uint5", 16, "float16", 8),
    ("int3", 16, "float16", 12),
    ("int2", 16, "bfloat16", 12),
    ("uint5", 16, "bfloat16", 8),
    ("uint6", 16, "bfloat16", 8),
    ("uint7", 32, "bfloat16", 8),
    ("k2", 32, "float16", 4),
    ("k3", 16, "float16", 2),
    ("k6", 16, "float16", 8),
    ("uint4+min", 32, "bfloat16", 4),
    ("uint5+min", 16, "float16", 8),
    ("uint3+min+float32", 32, "bfloat16", 8),
]


@cache
def fine() -> list[Program]:
    """Kernels of FINE."""
    found = []
    for name, block, dtype, rows in FINE:
        fmt, shape = cq.get_format(name, block_size=block), (4096, 14336)
        problem = Problem(
            rows, *shape, fmt, Weight.layout, dtype, True, MAIN_ARCH, 132, direct=True
        )
        for gated in (False, True):
            division = stream.division_of(replace(problem, gated=gated))
            assert division is not None
            found.append(stream._program(fmt, dtype, division, Weight.layout, gated))
    return found


@cache
def tall() -> list[Program]:
    """Kernels of tiles of other rows of x, of blocks that share tiles and of some that do not."""
    found, rows_of_x = [], (32, 64, 80, 128, 160, 192, 224)
    for i, name in enumerate(("int4", "nf4", "uint4", "int8", "uint3", "k6", "q4_1", "q4_k")):
        fmt, dtype = cq.get_format(name), ("float16", "bfloat16")[i % 2]
        for rows, shape in product(rows_of_x, ((28672, 8192), (5120, 13824))):
            problem = Problem(rows, *shape, fmt, FRAGMENTS_LAYOUT, dtype, True, MAIN_ARCH, 132)
            tile = tiles.shape_of(problem)
            assert tile.streamed or tile.split > 1 or shape != (5120, 13824)
            found.append(hopper.program_of(fmt, dtype, tile, Groups.of(fmt, shape[1])))
    return found


def failures(program: Program, arch: int) -> list[Failure]:
    """What is wrong with a kernel on an architecture."""
    try:
        made = jit.compiled(program, arch)
    except cq.CompileError as error:
        return [Failure(arch, program.name, str(error))]
    found = []
    if "wgmma" in made.log and "serialized" in made.log:
        found.append(made.log.strip())
    local = elf.resources(made.code, program.entry).local_bytes
    if local:
        found.append(f"{local} bytes of local memory a thread")
    return [Failure(arch, program.name, complaint) for complaint in found]


def all_failures(jobs: list[tuple[Program, int]]) -> list[Failure]:
    """Of many kernels, compiled on as many threads as there are processors."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda job: failures(*job), jobs)
        return [failure for one in found for failure in one]


def sass_faults(sass: str, wide: str) -> list[str]:
    """What the SASS of a kernel at the memory roof lacks; `wide` is LDG or STG."""
    found = [] if re.search(rf"\b{wide}\.E\.(\w+\.)*128\b", sass) else [f"no 16-byte {wide}"]
    return found + [f"{op} in it" for op in ("LDL", "STL") if re.search(rf"\b{op}\b", sass)]


# ---- the record ---------------------------------------------------------------------------------

Record = dict[str, dict[str, str]]  # of a source, of an architecture: `digest`

FACTS = "struct facts_of_a_format;"  # stands for them in a text, which is else its file's
_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


def recorded() -> Record:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def digest(programs: Sequence[Program], arch: int) -> str:
    """Of all that decides what the compiler makes of them."""
    files = {program.file for program in programs}
    around = {file: bare(flatten(jit.kernel_folder(), file, FACTS)) for file in files}
    texts = {
        (file, facts): around[file].replace(FACTS, bare(facts))
        if facts
        else bare(flatten(jit.kernel_folder(), file))
        for file, facts in dict.fromkeys((program.file, program.facts) for program in programs)
    }
    names = sorted(jit.cache_name(p, texts[p.file, p.facts], arch) for p in programs)
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:40]


@lru_cache(maxsize=64)
def bare(text: str) -> str:
    """A text without what compiles to nothing: comments, blank lines, names of files."""
    lines = (line for line in text.splitlines() if not line.startswith("#line "))
    kept = _STRING_OR_COMMENT.sub(
        lambda found: found[0] if found[0][0] == '"' else " ", "\n".join(lines)
    )
    return "\n".join(line.rstrip() for line in kept.splitlines() if line.strip())


def unproven(found: Sequence[Program], arch: int, record: Record) -> dict[str, list[Program]]:
    """By source: the kernels of which the record does not say that they were compiled."""
    sources: defaultdict[str, list[Program]] = defaultdict(list)
    for program in found:
        sources[program.file].append(program)
    return {
        file: programs
        for file, programs in sources.items()
        if record.get(file, {}).get(str(arch)) != digest(programs, arch)
    }


def check(found: Sequence[Program], arch: int, record: Record) -> tuple[int, list[Failure]]:
    """How many kernels were looked at, and what is wrong; what is right goes into the record."""
    count, bad = 0, []
    for file, programs in unproven(found, arch, record).items():
        count += len(programs)
        wrong = all_failures([(program, arch) for program in programs])
        bad += wrong
        if not wrong:
            record.setdefault(file, {})[str(arch)] = digest(programs, arch)
    return count, bad


# ---- tests --------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    """The cache that CUQUANT_CACHE_DIR names, else one of this run: not the user's."""
    run = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        run = run.parent
    with pytest.MonkeyPatch.context() as patch:
        if not os.environ.get("CUQUANT_CACHE_DIR"):
            patch.setenv("CUQUANT_CACHE_DIR", str(run / "cubins"))
        for name in ("CUQUANT_CUBINS", "CUQUANT_DUMP", "CUQUANT_PRINT_SOURCE"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(autouse=True)
def _compiler():
    try:
        jit.nvrtc()
    except cq.BackendUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("arch", "sample"),
    sampled(product(ARCHS, range(SAMPLES)), lambda arch, _: arch == MAIN_ARCH),
)
def test_a_sample_of_what_is_not_recorded_compiles_without_local_memory(arch, sample):
    unknown = unproven(all_programs(arch), arch, recorded())
    found = [program for programs in unknown.values() for program in programs]
    step = max(1, len(found) // SAMPLE)
    start = (ARCHS.index(arch) + sample * step // SAMPLES) % step  # others for each architecture
    assert not all_failures([(program, arch) for program in found[start::step]])


@pytest.mark.full
def test_every_kernel_compiles_without_local_memory():
    assert not check(all_programs(), MAIN_ARCH, recorded())[1]


@pytest.mark.parametrize(
    ("operation", "name"), sampled(product(WIDE, WIDE_FORMATS), lambda operation, _: operation)
)
def test_some_kernel_at_the_memory_roof_has_16_byte_accesses(operation, name):
    """Of the kernels for half precision: the plain one, which takes any shape, has none."""
    faults = []
    for program in PROGRAMS[operation](cq.get_format(name), dtypes=("float16",)):
        sass = elf.disassembled(jit.compiled(program, MAIN_ARCH).code)
        if sass is None:
            pytest.skip("no nvdisasm; pip install nvidia-cuda-nvdisasm")
        faults.append(sass_faults(sass, WIDE[operation]))
        if not faults[-1]:
            return
    pytest.fail(str(faults))


def test_what_an_architecture_lacks_is_not_compiled_for_it():
    """Asynchronous copies and bfloat16 before sm_80, and Hopper's own but for sm_90."""
    for arch in ARCHS:
        found = programs("matmul", "nf4", arch=arch)
        files = {program.file for program in found}
        assert ("matmul/stream.cu" in files) == (arch >= 80)
        assert ("matmul/hopper.cu" in files) == any(p.features for p in found) == (arch == 90)


# ---- the checks can fail ------------------------------------------------------------------------

CLEAN = """
namespace cuquant {
template <int k> __global__ void clean(const uint4* x, uint4* y) {
    uint4 v = x[threadIdx.x];
    v.x += k;
    y[threadIdx.x] = v;
}
template <int n> __global__ void spilled(const float* p, const int* at, float* y) {
    float a[n];
    for (int i = 0; i < n; ++i) a[i] = p[i];
    for (int i = 0; i < n; ++i) a[at[i]] += a[at[i + 1]];
    for (int i = 0; i < n; ++i) y[i] = a[i];
}
}
"""


@pytest.fixture
def planted(tmp_path, monkeypatch):
    (tmp_path / "format.cuh").write_text("#pragma once\n")
    (tmp_path / "planted.cu").write_text(CLEAN)
    monkeypatch.setattr(jit, "kernel_folder", lambda: tmp_path)
    monkeypatch.setenv("CUQUANT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("arch", [75, 90, 120])
def test_a_planted_spill_is_seen(planted, arch):
    bad, good = Program("planted.cu", "spilled", (40,)), Program("planted.cu", "clean", (1,))
    wrong = Program("planted.cu", "clean", ("nothing",))
    found = all_failures([(good, arch), (bad, arch), (wrong, arch)])
    assert [failure.name for failure in found] == [bad.name, wrong.name]
    assert "160 bytes of local memory" in str(found[0]) and "nothing" in str(found[1])


def test_a_serialized_wgmma_is_seen_also_in_the_cache(planted, monkeypatch):
    """The warning as NVRTC words it; the log is kept with the kernel."""
    program = Program("planted.cu", "clean", (2,))
    warning = "Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."
    build = jit.build
    monkeypatch.setattr(jit, "build", lambda *a: build(*a)._replace(log=warning))
    for _ in range(2):
        (found,) = failures(program, MAIN_ARCH)
        assert "serialized" in found.complaint
        monkeypatch.setattr(jit, "build", build)
    assert not jit.compiled(program, MAIN_ARCH).fresh


@pytest.mark.parametrize("arch", [75, 90, 120])
def test_the_sass_is_read(planted, arch):
    clean = elf.disassembled(jit.compiled(Program("planted.cu", "clean", (3,)), arch).code)
    if clean is None:
        pytest.skip("no nvdisasm; pip install nvidia-cuda-nvdisasm")
    assert sass_faults(clean, "LDG") == sass_faults(clean, "STG") == []
    bad = elf.disassembled(jit.compiled(Program("planted.cu", "spilled", (40,)), arch).code)
    assert sass_faults(bad or "", "LDG") == ["no 16-byte LDG", "LDL in it", "STL in it"]


def test_what_was_compiled_is_not_looked_at_again(planted, tmp_path):
    clean = [Program("planted.cu", "clean", (n,)) for n in (4, 5)]
    spilled = Program("planted.cu", "spilled", (41,))
    record: Record = {}
    assert check(clean, 90, record) == (2, [])
    assert check(clean, 90, record) == (0, [])
    assert check(clean, 80, record) == (2, [])
    assert set(record["planted.cu"]) == {"80", "90"}
    before = json.dumps(record)
    count, bad = check([*clean, spilled], 90, record)  # another kernel of that source
    assert count == 3 and [failure.name for failure in bad] == [spilled.name]
    assert json.dumps(record) == before
    (tmp_path / "planted.cu").write_text(f"// a comment\n{CLEAN}/* and\nanother */\n")
    assert check(clean, 90, record) == (0, [])
    (tmp_path / "planted.cu").write_text(CLEAN.replace("v.x += k", "v.y += k"))
    assert check(clean, 90, record) == (2, [])


# ---- python tests/compile/test_compile.py -------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description="compile the kernels for many architectures")
    parser.add_argument("--all", action="store_true", help="every kernel for every architecture")
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHS))
    parser.add_argument("--record", action="store_true", help="write what was compiled")
    parser.add_argument("--anew", action="store_true", help="also what the record has")
    options = parser.parse_args()
    if not options.all:
        parser.error("nothing to do without --all")
    start, total, looked_at = time.perf_counter(), 0, 0
    record = {} if options.anew else recorded()
    bad: list[Failure] = []
    for arch in options.arch:
        found = all_programs(arch)
        count, wrong = check(found, arch, record)
        total, looked_at, bad = total + len(found), looked_at + count, bad + wrong
        seconds = time.perf_counter() - start
        print(
            f"sm_{arch}: {len(found)} kernels, {count} compiled after {seconds:.0f} s", flush=True
        )
        for gone in set(record) - {program.file for program in found}:
            record[gone].pop(str(arch), None)
        if options.record:
            there = {file: archs for file, archs in record.items() if archs}
            RECORD.write_text(json.dumps(there, indent=1, sort_keys=True) + "\n")
    for failure in bad:
        print(failure)
    known = total - looked_at
    print(
        f"{total} kernels for {len(options.arch)} architectures, {known} of them as recorded: "
        f"{len(bad)} failures"
    )
    return 1 if bad or not total else 0


if __name__ == "__main__":
    raise SystemExit(main())
