"""`precompile`: what it compiles, counts, refuses and exports."""

import re

import pytest
from planted import AFFINE, KERNEL, FakeCupy, failing, files

import cuquant as cq
from cuquant.gpu import elf, jit
from cuquant.ops import precompile as ahead


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
