"""`precompile`: what it compiles, counts, refuses and exports."""

import re

import fake_gpu
import gpu_products
import numpy as np
import pytest
from emulator import Recorder
from planted import AFFINE, KERNEL, FakeCupy, failing, files
from products import normal
from typer.testing import CliRunner

import cuquant as cq
from cuquant import ahead
from cuquant.cli import app
from cuquant.gpu import arrays as gpu
from cuquant.gpu import elf, jit
from cuquant.ops import programs


def precompile(*formats, **options):
    return cq.precompile(*formats, **{"operations": ["quantize"], "arch": "sm_90", **options})


def test_precompile_counts_what_it_made(nvrtc, operation, tmp_path):
    seen = []
    done = precompile("nf4", dtypes=["float16"], progress=lambda *a: seen.append(a))
    assert done[:2] == (2, 0) and done.seconds > 0
    assert operation == [("nf4", ("float16",))]
    assert [(number, total) for number, total, _ in seen] == [(1, 2), (2, 2)]
    assert {name for *_, name in seen} == {f"cuquant::affine<formats::twice, {n}>" for n in (3, 10)}
    assert precompile("nf4", "fp4", dtypes=("float16", "float32"))[:2] == (1, 2), "both names: 3"
    assert len(files(tmp_path / "cache")) == 3


def test_no_formats_means_all(nvrtc, operation):
    precompile(dtypes=[], arch=(8, 0))
    assert [name for name, _ in operation] == list(cq.list_formats())


def test_progress_goes_to_stderr(nvrtc, operation, capsys):
    precompile("nf4", dtypes=[], progress=True)
    shown = capsys.readouterr()
    assert shown.out == "" and "1/1 cuquant::affine" in shown.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"formats": ("nf5",)}, "nf5"),
        ({"operations": ["quantise"]}, "known: quantize"),
        ({"dtypes": ["float64"]}, "known: float32, float16, bfloat16"),
        ({"arch": "hopper"}, "sm_90"),
        ({"arch": "9"}, "sm_90"),
        ({"arch": (9,)}, "sm_90"),
    ],
)
def test_unknown_names_are_refused_before_anything_is_compiled(
    kernels, operation, monkeypatch, arguments, named
):
    monkeypatch.setattr(jit, "build", failing(AssertionError("compiled")))
    with pytest.raises(ValueError, match=named):
        precompile(*arguments.pop("formats", ("nf4",)), **arguments)


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a", "90", "9.0", 90, (9, 0)])
def test_one_architecture_has_many_names(arch):
    assert ahead.parse_arch(arch) == 90
    assert ahead.parse_arch("12.0") == ahead.parse_arch("sm_120") == ahead.parse_arch((12, 0))


def test_a_failing_kernel_stops_precompile(nvrtc, operation, kernels):
    (kernels / "affine.cu").write_text(KERNEL.replace("+ k", "+ q"))
    with pytest.raises(cq.CompileError, match=r"kernels/affine\.cu\(11\)"):
        precompile("nf4")


def test_exported_kernels_need_no_compiler(nvrtc, operation, tmp_path, monkeypatch):
    out = tmp_path / "out"
    precompile("nf4", dtypes=[], export=out)
    assert precompile("nf4", dtypes=[], export=out)[:2] == (0, 1)
    (file,) = files(out)
    monkeypatch.setenv("CUQUANT_CACHE_DIR", str(tmp_path / "other machine"))
    monkeypatch.setenv("CUQUANT_CUBINS", str(out))
    monkeypatch.setattr(jit, "nvrtc", failing(cq.BackendUnavailable("no NVRTC")))
    found = jit.compiled(AFFINE, 90)
    assert not found.fresh and elf.resources(found.code, "affine").registers
    with pytest.raises(cq.BackendUnavailable, match="no NVRTC"):
        jit.compiled(AFFINE, 80)  # not exported: compiled as ever
    file.write_bytes(file.read_bytes()[:-60])
    with pytest.raises(cq.FormatError, match=re.escape(str(file))):
        jit.compiled(AFFINE, 90)
    monkeypatch.setenv("CUQUANT_CUBINS", str(file))
    with pytest.raises(cq.BackendUnavailable, match="is no folder"):
        jit.compiled(AFFINE, 90)


def test_without_a_gpu_an_arch_is_needed(operation, kernels):
    fake = FakeCupy(error=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "_cupy", lambda: fake)
        with pytest.raises(cq.BackendUnavailable, match=r"no usable GPU \(insufficient driver\)"):
            cq.precompile("nf4", operations=["quantize"])


def test_with_a_gpu_its_kernels_are_loaded(nvrtc, operation, monkeypatch):
    fake = FakeCupy()
    monkeypatch.setattr(jit, "_cupy", lambda: fake)
    cq.precompile("nf4", operations=["quantize"], dtypes=["float16"])
    assert len(fake.modules) == 2 and {device for _, device in jit._kernels} == {0}


# ---- models -------------------------------------------------------------------------------------

# Of each way to multiply: formats, whether weights are prepacked, dtypes and architectures.
CASES = [
    ("int4", True, "bfloat16", 90),
    ("nf4", True, "float16", 80),
    ("nf4", True, "float32", 90),
    ("int4", False, "float16", 90),
    ("q4_k", True, "bfloat16", 90),
    ("q4_k", False, "float16", 80),
    ("mxfp4", False, "float16", 75),
    ("nf4:flat1024", False, "float16", 90),
    ("int4+permuted", True, "float16", 90),
    ("int8+absmax", False, "bfloat16", 80),
    ("nvfp4+divisor", True, "float16", 90),
    ("nvfp4+per_matrix", False, "float16", 90),
]


@pytest.fixture
def planned(monkeypatch):
    """The programs that `precompile` would compile, of the last call."""
    found = []

    def noted(needed, *_):
        found[:] = needed
        return ahead.Precompiled(len(needed), 0, 0.0)

    monkeypatch.setattr(ahead, "_in_parallel", noted)
    monkeypatch.setattr(jit, "nvrtc", lambda: None)
    return found


@pytest.mark.parametrize(("name", "laid_out", "dtype", "arch"), CASES)
def test_a_models_kernels_are_those_that_its_products_launch(
    name, laid_out, dtype, arch, planned, monkeypatch
):
    """All of them, for whatever rows of x, and no others."""
    q = cq.quantize(normal((96, 512), dtype), name)
    w = cq.prepack(q) if laid_out else q
    cq.precompile(model={"w": w}, arch=arch)
    backend = Recorder(programs.MULTIPROCESSORS, arch, vendor=True)
    move = fake_gpu.install("cupy", monkeypatch, backend)
    monkeypatch.setattr(gpu.Gpu, "gemm", lambda *_: None)
    monkeypatch.setattr(gpu.Gpu, "tensor_map", staticmethod(lambda *_: bytes(128)))
    there = gpu_products.moves(move)(q)
    there = cq.prepack(there) if laid_out else there
    backend.launches.clear()
    cq.dequantize(cq.unpack(there) if laid_out else there, dtype)
    x = move(np.zeros((max(programs.ROWS), 512), w.dtype))
    for rows in programs.ROWS:
        cq.linear(x[:rows], there)
        for odd in (rows + 1, rows + 5) if rows < max(programs.ROWS) else ():
            cq.linear(x[:odd], there)
    launched = set(backend.programs)
    assert launched - set(planned) == set()
    assert {p.entry for p in set(planned) - launched} <= {"finish_sums"}  # with a bias


def _module(q):
    torch = pytest.importorskip("torch", reason="torch is optional")
    import cuquant.torch

    layer = torch.nn.Linear(256, 64, dtype=torch.float16)
    layer.weight.data = torch.from_numpy(q.dequantize().copy())
    return cuquant.torch.quantize_(torch.nn.Sequential(layer), q.format, prepack=False)


@pytest.mark.parametrize("kind", ["file", "folder", "dict", "module", "state"])
def test_a_model_is_a_file_a_folder_a_dict_or_a_module(kind, planned, tmp_path):
    q = cq.quantize(normal((64, 256), "float16"), "int8")
    plan = programs.Plan(80)
    programs.plan_weight(plan, q.format, q.shape, "rows/1", ["float16"])
    file = tmp_path / "model.safetensors"
    if kind == "module":
        model = _module(q)
    elif kind == "state":
        save_file = pytest.importorskip("safetensors.torch").save_file
        save_file(_module(q).state_dict(), file)
        model = file
    else:
        arrays = {"w": q, "again": q, "bias": np.zeros(64, np.float32)}
        cq.save(file, arrays)
        model = {"dict": arrays, "file": str(file)}.get(kind, tmp_path)
    assert cq.precompile(model=model, arch="sm_80").compiled == len(plan.programs)
    assert planned == list(plan.programs)
    cq.precompile("nf4", model=model, operations="dequantize", dtypes="float32", arch="sm_80")
    of_format = programs.PROGRAMS["dequantize"](cq.get_format("nf4"), dtypes=["float32"], arch=80)
    assert planned[: len(of_format)] == of_format and len(planned) > len(of_format)


def test_experts_and_arrays_that_are_no_weights(planned):
    stack = cq.quantize(normal((4, 64, 128)), "int8")
    vector, empty = cq.quantize(normal((256,)), "nf4"), cq.quantize(np.zeros((0, 64)), "nf4")
    cq.precompile(model={"stack": stack}, arch="sm_90")
    assert {"matmul_rows", "matmul_tiles", "dequantize"} <= {p.entry for p in planned}
    cq.precompile(model={"vector": vector, "empty": empty}, arch="sm_90")
    assert {p.entry for p in planned} == {"dequantize"}


def test_what_is_no_model_is_refused(planned, tmp_path):
    with pytest.raises(TypeError, match="model must be a file, a folder, a dict"):
        cq.precompile(model=3, arch="sm_90")
    with pytest.raises(ValueError, match="holds no safetensors files"):
        cq.precompile(model=tmp_path, arch="sm_90")
    cq.save(tmp_path / "plain.safetensors", {"x": np.zeros(3)})
    for model in (tmp_path, tmp_path / "plain.safetensors", {"x": np.zeros(3)}):
        with pytest.raises(ValueError, match="no quantized weights"):
            cq.precompile(model=model, arch="sm_90")
    with pytest.raises(FileNotFoundError):
        cq.precompile(model=tmp_path / "missing", arch="sm_90")


def test_the_command(planned, tmp_path):
    cq.save(tmp_path / "model.safetensors", {"w": cq.quantize(normal((64, 256)), "int8")})
    done = CliRunner().invoke(app, ["precompile", "--model", str(tmp_path), "--arch", "sm_80"])
    said = r"\d+ kernels compiled in .*, 0 were there"
    assert done.exit_code == 0 and re.match(said, done.stdout) and planned
    done = CliRunner().invoke(app, ["precompile", "--model", str(tmp_path / "x"), "--arch", "80"])
    assert done.exit_code == 1 and "No such file" in done.stderr
    done = CliRunner().invoke(app, ["precompile", "-f", "nf5", "--arch", "sm_80"])
    assert done.exit_code == 1 and "nf4" in done.stderr
