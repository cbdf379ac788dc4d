"""README, the guides and the notebooks: what they show happens, and what they name exists."""

import ast
import builtins
import importlib
import importlib.util
import re
import shlex
import shutil
import struct
import subprocess
import symtable
import sys
from operator import attrgetter
from pathlib import Path

import documents
import numpy as np
import pytest
from documents import DOCUMENTS, GUIDES, README, ROOT, between, blocks

import cuquant as cq
from cuquant.bench.gemm_report import GemmResults
from cuquant.bench.markdown import DENSE, markdown
from cuquant.bench.matmul_report import ProductResults
from cuquant.bench.quantize_report import Results
from cuquant.gpu import elf, jit
from cuquant.gpu.device import gpu_available
from cuquant.gpu.view import View
from cuquant.ops.dequantize.decoder import decoder
from cuquant.ops.programs import ADDRESS, PROGRAMS, Plan

TORCH = importlib.util.find_spec("torch") is not None
PEFT = TORCH and all(importlib.util.find_spec(name) for name in ("transformers", "peft"))
MOST_LINES = 180  # of README
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)


# What differs from run to run and from machine to machine in what commands print.
MASKS = {
    r"\b[\d.]+ (ms|s|min)\b": "TIME",
    r"\b[\d.]+ GB/s": "RATE",
    r"^computed by .*$": "computed by DEVICE",
    r" +": " ",  # columns are as wide as what stands in them
    r"-{3,}": "---",
    r" $": "",
}


def masked(text):
    """A text without times, rates and the device."""
    for pattern, what in MASKS.items():
        text = re.sub(pattern, what, text, flags=re.MULTILINE)
    return text


def check_outputs(found):
    """What was printed is what the documents show."""
    for document, pairs in found.items():
        for block, text in pairs:
            where = f"the block at line {block.line} of {document.name}"
            assert masked(text) == masked(block.output), where


def test_blocks_print_what_the_documents_show(tmp_path):
    needs = frozenset(["torch"] * TORCH + ["peft"] * PEFT)
    found = documents.run(DOCUMENTS, tmp_path, needs)
    assert any(found.values())
    check_outputs(found)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "document",
    [path for path in DOCUMENTS if any("gpu" in block.needs for block in blocks(path))],
    ids=lambda path: path.stem,
)
def test_blocks_for_a_gpu_print_what_the_document_shows(document, tmp_path):
    torch = pytest.importorskip("torch")
    if not (gpu_available() and torch.cuda.is_available()):
        pytest.skip("no GPU that CuPy and torch can use")
    check_outputs(documents.run([document], tmp_path, frozenset(documents.NEEDS)))


@each_document
def test_python_blocks_name_what_exists(document):
    """Also those that need what is not here: they parse, and cuquant has what they take from it."""
    for block in blocks(document):
        if block.language != "python":
            continue
        for node in ast.walk(ast.parse(block.text)):
            if not isinstance(node, ast.Attribute):
                continue
            module, _, name = ast.unparse(node).rpartition("torch.")
            if found := re.fullmatch(r"cq((\.\w+)+)", ast.unparse(node)):
                attrgetter(found[1][1:])(cq)
            elif module == "cuquant." and name.isidentifier() and TORCH:
                getattr(importlib.import_module("cuquant.torch"), name)


@each_document
@pytest.mark.parametrize(
    "needs", [("gpu",), ("torch",), ("gpu", "torch"), ("torch", "peft")], ids="+".join
)
def test_python_blocks_use_names_that_an_earlier_block_binds(document, needs):
    """Also where a GPU is needed to run them: none is forgotten to be imported."""
    known = set(dir(builtins))
    for block in blocks(document):
        if block.language != "python" or not block.needs <= set(needs):
            continue
        table = symtable.symtable(block.text, str(document), "exec")
        inner, used = [table], set()
        while inner:
            scope = inner.pop()
            inner += scope.get_children()
            names = scope.get_symbols()
            used |= {s.get_name() for s in names if s.is_global() or scope is table}
        known |= {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
        assert used <= known, f"the block at line {block.line}"


@each_document
def test_names_in_the_text_exist(document):
    """`cq.save(...)`, `cuquant.gpu.workspace.release()` and the like."""
    text = document.read_text(encoding="utf-8")
    for name in re.findall(r"`(?:cq|cuquant)\.([\w.]+)[^`\n]*`", text):
        if (name.startswith("torch") and not TORCH) or (name.startswith("integr") and not PEFT):
            continue
        module, found = "cuquant", cq
        for part in name.split("."):
            module = f"{module}.{part}"
            if module in sys.modules or not hasattr(found, part):
                found = importlib.import_module(module)
            else:
                found = getattr(found, part)


# ---- shell commands -----------------------------------------------------------------------------


def commands(text: str) -> list[list[str]]:
    """The simple commands of a shell text, as words."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word in ("&&", "|", "||"):
                if words:
                    found.append(words)
                words = []
            elif words or not re.match(r"\w+=", word):  # variables in front of a command
                words.append(word)
    return found


def complaint(words: list[str]) -> str | None:
    """Why a command cannot be typed; None where it can."""
    from typer.main import get_command

    from cuquant.cli import app

    if words[0] == "cuquant":
        command, rest = get_command(app), words[1:]
        while rest and getattr(command, "commands", None) and not rest[0].startswith("-"):
            command = command.commands.get(rest.pop(0))  # type: ignore[attr-defined]
            if command is None:
                return "no such command"
        known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {
            "-h", "--help", "--install-completion", "--show-completion",
        }  # fmt: skip
        unknown = [word for word in rest if word.startswith("-") and word not in known]
        return f"no option {unknown}" if unknown else None
    if words[:3] == ["python", "-m", "pip"]:
        extras = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        asked = re.findall(r"^\.\[(.*)\]$", "\n".join(words), re.MULTILINE)
        missing = [e for names in asked for e in names.split(",") if f"\n{e} = [" not in extras]
        return f"no extra {missing}" if missing else None
    if words[:2] == ["python", "-m"]:
        return None if importlib.util.find_spec(words[2]) else "no such module"
    if words[0] == "python" and words[1].startswith("tests/"):
        return None if (ROOT / words[1]).is_file() else "no such file"
    plain = words[0] in ("cd", "export", "g++", "ls") or words[0].startswith("./")
    return None if plain else "unknown"


@each_document
def test_shell_commands_exist(document):
    text = document.read_text(encoding="utf-8")
    inline = [t for t in re.findall(r"`([^`\n]+)`", text) if re.match(r"cuquant [a-z]", t)]
    shell = [block.text for block in blocks(document) if block.language == "sh"]
    wrong = {
        shlex.join(words): why
        for part in (*inline, *shell)
        for words in commands(part)
        if (why := complaint(words))
    }
    assert not wrong


def test_the_set_up_commands_are_marked():
    """.ci/run takes them from README, as one line each."""
    text = README.read_text(encoding="utf-8")
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for name, end in (("demo", " && cuquant demo"), ("test", " && python -m pytest -n auto")):
        lines = between(text, name).splitlines()
        assert (lines[0], lines[2:]) == ("```sh", ["```"]) and lines[1].endswith(end)
        assert f"between {name})" in ci


# ---- links and paths ----------------------------------------------------------------------------


def anchors(document: Path) -> set[str]:
    """What #... in a link may name: headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_document
def test_links_lead_somewhere(document):
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if ":" in path:
            continue
        file = document.parent / path if path else document
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@each_document
def test_files_of_the_checkout_that_are_named_exist(document):
    text = document.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:tests|kernels|cuquant|examples)/[\w./]+)`", text))
    assert not [path for path in named if not (ROOT / path).exists()]


def test_every_guide_is_linked_from_the_readme():
    text = README.read_text(encoding="utf-8")
    guides = [*GUIDES, *(ROOT / "examples").glob("*.ipynb")]
    assert not [path.name for path in guides if f"](examples/{path.name})" not in text]


def test_the_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


# ---- tables -------------------------------------------------------------------------------------


def test_the_guide_holds_the_table_of_formats():
    from cuquant.formats.table import format_table

    text = (ROOT / "examples" / "formats.md").read_text(encoding="utf-8")
    assert between(text, "formats").strip() == format_table().strip()


def cells(table: str) -> list[list[str]]:
    """Rows of a Markdown table, without its heading."""
    rows = [line.strip("| ").split(" | ") for line in table.strip().splitlines()]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_bits_and_errors_of_the_readmes_choice_are_what_the_code_gives():
    """The values are those that README names: a million normal numbers."""
    w = np.random.default_rng(0).standard_normal((256, 4096), dtype=np.float32)
    rows = cells(between(README.read_text(encoding="utf-8"), "choose"))
    assert len(rows) >= 6
    for row in rows:
        name = row[1].strip("`")
        q = cq.quantize(w, name)
        assert row[2:] == [f"{q.bits_per_element:.4g}", f"{cq.error(w, q).sqnr_db:.1f}"], name


BENCHMARKS = ROOT / "examples" / "benchmarks.md"


def test_the_readmes_rows_of_speed_are_those_of_the_guide():
    """Six of one of its tables, below the same heading."""
    quoted = between(README.read_text(encoding="utf-8"), "speed").strip().splitlines()
    tables = re.findall(r"(?:^\|.*\n)+", BENCHMARKS.read_text(encoding="utf-8"), re.MULTILINE)
    (table,) = (table.splitlines() for table in tables if table.startswith(f"{quoted[0]}\n"))
    assert len(quoted) == 2 + 6 and set(quoted) <= set(table)


@pytest.mark.parametrize(
    "results", sorted((ROOT / "examples" / "benchmarks").glob("*.json")), ids=lambda p: p.stem
)
def test_the_guide_holds_the_tables_of_what_the_benchmarks_wrote(results):
    marker = f"benchmarks/{results.name}"
    table = markdown(results.read_text(encoding="utf-8"))
    assert between(BENCHMARKS.read_text(encoding="utf-8"), marker).strip() == table.strip()


def readme_text():
    """README in one line."""
    return " ".join(README.read_text(encoding="utf-8").split())


def kept(name):
    """The JSON of a run that is kept."""
    return (ROOT / "examples" / "benchmarks" / name).read_text(encoding="utf-8")


def test_the_readme_says_how_much_faster_products_are():
    runs = [ProductResults.from_json(kept(name)) for name in ("layers.json", "products.json")]
    ratios = [
        peer.timing.microseconds / m.timing.microseconds
        for run in runs
        for m in run.measurements
        for peer in m.peers
        if peer.timing and peer.name.startswith(DENSE)
    ]
    assert f"up to {max(ratios):.1f} times as fast as float16 ones" in readme_text()


@pytest.mark.parametrize("pair, peer", [("int8", "_int_mm"), ("fp8_e4m3", "_scaled_mm")])
def test_the_readme_says_how_fast_products_of_two_quantized_sides_are(pair, peer):
    ratios = [
        m.timing.microseconds / p.timing.microseconds
        for m in GemmResults.from_json(kept("gemm.json")).measurements
        for p in m.peers
        if m.format == pair and p.timing and p.name.startswith(f"{peer} (")
    ]
    assert f"{min(ratios):.2f} to {max(ratios):.2f} of `torch.{peer}`'s" in readme_text()


def test_the_readme_says_how_much_slower_products_of_other_numbers_of_rows_are():
    """From 257 rows on; the guide's table has cuBLAS below the formats of a shape."""
    guide = BENCHMARKS.read_text(encoding="utf-8")
    table = guide.partition("### Rows that are no power of two")[2].split("\n\n")[2]
    first = table.splitlines()[0].split(" | ").index("M=300")
    times = {(row[0], row[1]): [float(cell) for cell in row[first:]] for row in cells(table)}
    ratios = [
        own / dense
        for (name, shape), row in times.items()
        if not name.startswith(DENSE)
        for own, dense in zip(row, times[f"{DENSE}, float16", shape], strict=True)
    ]
    assert f"up to {max(ratios):.1f} times as long as cuBLAS" in readme_text()


def test_the_readme_says_how_fast_quantize_and_dequantize_are():
    run = Results.from_json(kept("quantize.json"))
    assert {m.dtype for m in run.measurements} == {"float16"}
    rates = {(m.operation, m.format): m.tbps for m in run.measurements}
    apart = [f"{name} ({rates.pop(('quantize', name)):.2f})" for name in ("nf4+dq", "q6_k", "q4_k")]
    lowest, highest = min(rates.values()), max(rates.values())
    assert (
        f"move {lowest:.1f} to {highest:.1f} TB/s, where reading alone reaches "
        f"{run.ceilings.read:.2f}; {apart[0]}, {apart[1]} and {apart[2]} quantize more slowly"
    ) in readme_text()


def test_the_guide_has_the_speed_of_every_format_on_the_cpu():
    rows = cells(
        BENCHMARKS.read_text(encoding="utf-8").partition("## On the CPU")[2].split("\n\n")[2]
    )
    assert [row[0].strip("`") for row in rows if "stochastic" not in row[0]] == cq.list_formats()


# ---- exported kernels and the program that launches one -----------------------------------------

CUBIN = ROOT / "examples" / "cubin.md"
# A driver that keeps what a launch is given: SIZES are those of the kernel's parameters.
DRIVER = """
#include <cuda.h>
#include <cstdlib>
#include <fstream>
CUresult cuGetErrorString(CUresult, const char**) { return CUDA_SUCCESS; }
CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice*, int) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext*, CUdevice) { return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuModuleLoad(CUmodule*, const char*) { return CUDA_SUCCESS; }
CUresult cuModuleEnumerateFunctions(CUfunction*, unsigned, CUmodule) { return CUDA_SUCCESS; }
CUresult cuMemAlloc(CUdeviceptr* at, size_t) { *at = ADDRESS; return CUDA_SUCCESS; }
CUresult cuMemcpyHtoD(CUdeviceptr, const void*, size_t) { return CUDA_SUCCESS; }
CUresult cuMemcpyDtoH(void*, CUdeviceptr, size_t) { return CUDA_SUCCESS; }
CUresult cuLaunchKernel(
    CUfunction, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
    unsigned shared, CUstream, void** arguments, void**) {
    std::ofstream file("launched.bin", std::ios::binary);
    for (unsigned number : {x, y, z, threads, shared})
        file.write(reinterpret_cast<const char*>(&number), sizeof number);
    int i = 0;
    for (int size : {SIZES}) file.write(static_cast<const char*>(arguments[i++]), size);
    return CUDA_SUCCESS;
}
"""


def documented_sizes(kernel):
    rows = cells(between(CUBIN.read_text(encoding="utf-8"), kernel))
    return tuple(int(row[1]) for row in rows)


@pytest.mark.parametrize("kernel", ["dequantize", "quantize"])
def test_the_documented_signature_is_that_of_the_kernel(kernel):
    pytest.importorskip("cupy")
    program = next(p for p in PROGRAMS[kernel](cq.get_format("int4")) if p.entry == kernel)
    try:
        code = jit.compiled(program, 90).code
    except cq.BackendUnavailable as error:
        pytest.skip(str(error))
    assert documented_sizes(kernel) == elf.resources(code, kernel).parameters


def test_the_program_launches_as_the_library_does(tmp_path):
    if shutil.which("g++") is None or not documents.headers():
        pytest.skip("no g++, or no cuda.h")
    (block,) = (block for block in blocks(CUBIN) if block.language == "cpp")
    sizes = documented_sizes("dequantize")
    driver = DRIVER.replace("SIZES", ", ".join(map(str, sizes))).replace("ADDRESS", str(ADDRESS))
    (tmp_path / "dequantize.cpp").write_text(block.text)
    (tmp_path / "driver.cpp").write_text(driver)
    for name in ("packed.bin", "scale.bin"):
        (tmp_path / name).touch()
    flags = ["-std=c++17", "-Wall", "-Werror", f"-I{documents.headers()[-1]}"]
    build = ["g++", *flags, "dequantize.cpp", "driver.cpp", "-o", "dequantize"]
    subprocess.run(build, cwd=tmp_path, check=True)
    subprocess.run(["./dequantize", "kernel.cubin"], cwd=tmp_path, check=True)

    launch, *arguments = library_launch("int4", (1024, 4096))
    grid = struct.pack("<5I", *launch.grid, launch.threads, launch.shared)
    limit = arguments.pop()
    packed = [
        a if isinstance(a, bytes) else struct.pack("<q", a)[:size]
        for a, size in zip(arguments, sizes, strict=False)
    ]
    given = (tmp_path / "launched.bin").read_bytes()
    assert given[:-4] == b"".join([grid, *packed])
    assert struct.unpack("<f", given[-4:])[0] == pytest.approx(limit, rel=1e-5)


def library_launch(name, shape):
    """The launch that decodes a weight to float16, and its arguments."""
    launches = []

    class Recording(Plan):
        def launch(self, launch, *arguments):
            launches.append((launch, *arguments))

    fmt, parts = cq.get_format(name), cq.quantize(np.ones(shape, np.float32), name).arrays()
    target = View(ADDRESS, shape, (shape[1], 1), np.dtype(np.float16))
    decoder(fmt)(Recording(), parts, shape, target)
    (found,) = launches
    return found


# ---- notebooks and the changelog ----------------------------------------------------------------


def test_the_version_has_a_changelog_entry():
    assert f"## {cq.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.full
@pytest.mark.parametrize(
    "notebook", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda p: p.stem
)
def test_notebooks_run(notebook):
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(notebook, as_version=4)
    NotebookClient(
        book, timeout=1200, resources={"metadata": {"path": str(notebook.parent)}}
    ).execute()
    outputs = [o for cell in book.cells if cell.cell_type == "code" for o in cell.outputs]
    assert any("image/png" in o.get("data", {}) for o in outputs)
    assert not [o for o in outputs if o.output_type == "error"]
