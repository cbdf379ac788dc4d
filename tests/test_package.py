"""The package as a whole: layers, light imports, the wheel."""

import ast
import functools
import importlib.util
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import numpy as np
import optional
import pytest
from in_turn import in_turn

import cuquant as cq
from cuquant.gpu.device import gpu_available

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "cuquant"
LOWEST = ROOT / "tests" / "lowest.txt"

# A module may import from its own layer and from those above it in this list. The longest name
# counts: what a folder holds beside the modules named here is in the folder's layer.
LAYERS = [
    ["errors", "disk", "lazy"],
    ["formats"],
    ["reference"],
    ["interop"],
    ["gpu.driver", "gpu.elf", "gpu.source", "gpu.view", "gpu.limits", "gpu.rates"],
    ["gpu.cubins", "gpu.kernel", "gpu.tensor_map", "gpu.device"],
    ["gpu.jit"],
    ["gpu.backend"],
    ["gpu.cublas", "gpu.workspace"],
    ["gpu"],
    ["array.arranged"],
    ["array.components", "array.fragments", "array.slicing"],
    ["array.quant_array"],
    ["array.packed_weight"],
    ["array"],
    ["ops.cpp", "ops.geometry", "ops.outputs", "ops.remember"],
    ["ops.layout"],
    ["ops.dequantize"],
    ["ops.quantize"],
    ["ops.rows"],
    ["ops.matmul.epilogue", "ops.matmul.check"],
    ["ops.matmul.problem"],
    ["ops.matmul.operands", "ops.matmul.experts", "ops.matmul.coded"],
    ["ops.matmul.byte_rows", "ops.matmul.patches"],
    ["ops.matmul.dense_warps", "ops.matmul.dense"],
    ["ops.matmul.coded_kernels"],
    ["ops.matmul.route", "ops.matmul.stream_rows", "ops.matmul.hopper_tiles", "ops.matmul.q8_1"],
    ["ops.matmul.any", "ops.matmul.stream", "ops.matmul.hopper", "ops.matmul.ggml"],
    ["ops.matmul.hopper_codes_tiles", "ops.matmul.decoded"],
    ["ops.matmul.vendor", "ops.matmul.hopper_codes"],
    ["ops.matmul.choose"],
    ["ops.matmul.prepared", "ops.matmul.unpacked"],
    ["ops.matmul.coded_on_gpu"],
    ["ops.matmul.packed_codes_on_gpu"],
    ["ops.matmul.on_gpu", "ops.matmul.q8_1_on_gpu", "ops.matmul.prepacked"],
    ["ops.matmul"],
    ["ops.plain_arrays", "ops.plain_products", "ops.ggml"],
    ["ops.plain_convolutions", "ops.plain_floats", "ops.llm_int8"],
    ["ops.programs"],
    ["ops"],
    ["functional", "io", "diagnosis", "demo", "bench", "torch"],
    ["integrations"],
    ["ahead"],
    ["cli"],
    ["__init__", "__main__"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
SOURCES = sorted(PACKAGE.rglob("*.py"))

# The same of folders of kernels; format.cuh stands before every program.
KERNEL_LAYERS = ["device", "format", "layout", "dequantize", "quantize", "matmul"]
KERNELS = sorted(p for p in (ROOT / "kernels").rglob("*") if p.is_file())


def level_of(name: str) -> int:
    """The layer of a name below cuquant, such as "gpu.jit.Program"."""
    parts = name.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((LEVEL[prefix] for prefix in prefixes if prefix in LEVEL), LEVEL["__init__"])


def owner(path: Path) -> str:
    """The layer's name that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def imported(path: Path) -> set[str]:
    """What a file imports, also inside its functions, as dotted names; not for types alone."""
    names = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@in_turn("path", SOURCES)
def test_imports_go_one_way(path):
    level = level_of(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
    for name in imported(path):
        if name.startswith("cuquant."):
            target = level_of(name.removeprefix("cuquant."))
            assert target <= level, f"{path.name} imports {name}, from a layer above its own"


@in_turn("path", SOURCES)
def test_nothing_holds_a_lock_while_it_computes_a_property(path):
    assert "functools.cached_property" not in imported(path), "cuquant.lazy holds none"


def test_includes_of_kernels_go_one_way():
    for path in KERNELS:
        if path.name == "README.md":
            continue
        level = KERNEL_LAYERS.index(path.relative_to(ROOT / "kernels").parts[0].split(".")[0])
        for name in re.findall(r'^#include "(.+)"', path.read_text(encoding="utf-8"), re.MULTILINE):
            target = KERNEL_LAYERS.index(Path(name).parts[0].split(".")[0])
            assert target <= level, f"{path.name} includes {name}, from a layer above its own"


def test_asm_is_in_kernels_device_alone():
    texts = {path: path.read_text(encoding="utf-8") for path in KERNELS}
    assert {p.parent.name for p, text in texts.items() if re.search(r"\basm\b.*\(", text)} == {
        "device"
    }


@in_turn("path", SOURCES)
def test_no_file_imports_torch_or_what_executes_data(path):
    roots = {name.split(".")[0] for name in imported(path)}
    if optional.belongs(path, "torch"):
        roots -= {"torch"}
    assert not roots & {"torch", "pickle", "marshal", "shelve", "dill", "dlpack", "joblib"}
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"eval", "exec", "compile", "print" if owner(path) != "cli" else ""}


# What pip calls them, where that differs from the module.
DISTRIBUTIONS = {"sklearn": "scikit-learn", "click": "typer", "cupy_backends": "cupy"}


def declared(heading: str) -> set[str]:
    """Names of the distributions in a list of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(rf"^{heading} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    assert found, heading
    return set(re.findall(r'"([\w-]+)', found[1]))


def test_dependencies_are_what_is_imported():
    """What every installation brings is used outside the extras, and nothing else is needed."""
    used: dict[str, set[str]] = {}  # by distribution: the layers that import it
    for path in SOURCES:
        for root in {name.split(".")[0] for name in imported(path)}:
            if root not in sys.stdlib_module_names and root not in ("cuquant", "_typeshed"):
                used.setdefault(DISTRIBUTIONS.get(root, root), set()).add(owner(path))
    needed = declared("dependencies")
    assert needed == {"numpy", "ml_dtypes", "typer", "rich", "platformdirs"}
    for name in needed:
        assert used.get(name, set()) - {"demo", "bench", "torch"}, f"only an extra uses {name}"
    extras = declared("demo") | declared("torch") | declared("plot") | declared("transformers")
    peers = {"cupy", "nvidia", "cuda", "bitsandbytes", "torchao", "humming", "gemlite", "gguf"}
    assert used.keys() <= needed | extras | peers


def test_the_lowest_releases_that_are_tested_are_those_that_are_allowed():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^dependencies = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    assert listed
    bounds = dict(re.findall(r'"([\w-]+)>=([\d.]+)"', listed[1]))
    assert bounds.keys() == declared("dependencies")  # each has a bound, and nothing but one
    pinned = re.findall(r"^([\w-]+)==([\d.]+)$", LOWEST.read_text(encoding="utf-8"), re.MULTILINE)
    assert [name for name, _ in pinned] == list(bounds)
    for name, release in pinned:
        assert numbers(release) == numbers(bounds[name]), name
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert LOWEST.relative_to(ROOT).as_posix() in ci


def numbers(release: str) -> list[int]:
    """The parts of a release, without zeros at its end: 13.0.0 is 13."""
    parts = [int(part) for part in release.split(".")]
    while parts[-1] == 0:
        parts.pop()
    return parts


def run(code: str, *flags: str) -> str:
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_import_is_light():
    heavy = (
        "torch cupy typer rich click safetensors gguf matplotlib platformdirs tokenizers sklearn "
        "transformers"
    )
    found = run(f"import sys, cuquant; print([m for m in {heavy.split()} if m in sys.modules])")
    assert found == "[]"


def test_import_takes_no_second(tmp_path, monkeypatch):
    # As installed: pip compiles bytecode, so the first run here does it and is not timed.
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    code = (
        "import time, numpy, ml_dtypes; t = time.process_time(); import cuquant;"
        "print(time.process_time() - t)"
    )
    run(code)
    assert min(float(run(code)) for _ in range(3)) < 1  # on a busy machine too


@pytest.mark.full
def test_every_file_of_tests_is_collected():
    """Also those that need a GPU all through, which other runs do not read where there is none."""
    words = ["-m", "pytest", "--collect-only", "-q", "-m", "gpu or not gpu", "tests"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    files = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert files <= set(re.findall(r"(test_\w+\.py)::", done.stdout))


def test_the_package_lists_its_public_names_alone():
    assert dir(cq) == sorted([*cq.__all__, "__version__"])
    for name in dir(cq):
        getattr(cq, name)


def test_a_name_that_is_not_there_says_what_to_type():
    code = """
import importlib.util
import cuquant as cq
for name in ("torch", "quantise"):
    try:
        getattr(cq, name)
    except AttributeError as error:
        print(error)
assert not hasattr(cq, "torch")
if importlib.util.find_spec("torch"):
    from cuquant import torch
    print(torch.__name__)
"""
    torch, other, *imported = run(code).splitlines()
    assert torch == "cuquant.torch is imported by its own name: import cuquant.torch"
    assert other.startswith("module 'cuquant' has no attribute 'quantise'")
    assert imported == (["cuquant.torch"] if _importable("cuquant.torch") else [])


def _importable(name: str) -> bool:
    path = PACKAGE.parent / name.replace(".", "/")
    absent = optional.left_out()
    return not any(
        p.is_relative_to(part) for p in (path, path.with_suffix(".py")) for part in absent
    )


def test_submodules_do_not_replace_public_names():
    """Import every submodule, then see that each public name is still what it was."""
    before = {name: getattr(cq, name) for name in cq.__all__}
    for module in pkgutil.walk_packages(cq.__path__, "cuquant."):
        if not module.name.endswith("__main__") and _importable(module.name):
            importlib.import_module(module.name)
    for name, value in before.items():
        assert getattr(cq, name) is value
    submodules = {m.name for m in pkgutil.iter_modules(cq.__path__)}
    assert submodules & set(cq.__all__) == {"functional"}


def test_every_public_name_can_be_called(tmp_path):
    """After all imports: functions work, classes are classes, errors are exceptions."""
    x = np.ones((2, 64), np.float32)
    q = cq.quantize(x, "nf4")
    stack = cq.quantize(np.ones((1, 2, 64), np.float32), "nf4")
    cq.save(tmp_path / "f", {"w": q})
    calls = {
        "array_equal": lambda: cq.array_equal(q, q),
        "compare": lambda: cq.compare({"w": x}, tmp_path / "f"),
        "concatenate": lambda: cq.concatenate([q, q]),
        "convert": lambda: cq.convert(tmp_path / "f", tmp_path / "c", to="cuquant"),
        "dequantize": lambda: cq.dequantize(q),
        "doctor": cq.doctor,
        "embedding": lambda: cq.embedding([1, 0], q),
        "error": lambda: cq.error(x, q),
        "explain": lambda: cq.explain("linear", format="nf4", shape=(8, 64)),
        "get_format": lambda: cq.get_format("nf4"),
        "grouped_linear": lambda: cq.grouped_linear(x, stack, [0, 0]),
        "linear": lambda: cq.linear(x, q),
        "list_formats": cq.list_formats,
        "load": lambda: cq.load(tmp_path / "f"),
        "matmul": lambda: cq.matmul(x, q.T),
        "open": lambda: cq.open(tmp_path / "f").close(),
        "prepack": lambda: cq.prepack(q),
        "quantize": lambda: cq.quantize(x),
        "save": lambda: cq.save(tmp_path / "g", {"w": q}),
        "swiglu": lambda: cq.swiglu(x, q, q),
        "unpack": lambda: cq.unpack(cq.prepack(q)),
    }
    for name in cq.__all__:
        value = getattr(cq, name)
        if inspect.isclass(value) or inspect.ismodule(value):
            continue
        if name == "precompile":
            if gpu_available():
                assert sum(value("fp16", dtypes="float32")[:2])
                continue
            with pytest.raises(cq.BackendUnavailable):
                value()
            continue
        calls.pop(name)()
    assert not calls


def public_functions() -> list[tuple[str, object]]:
    found = [(name, getattr(cq, name)) for name in cq.__all__]
    found += [(f"functional.{n}", getattr(cq.functional, n)) for n in cq.functional.__all__]
    found += [
        (f"QuantArray.{n}", v)
        for kind in cq.QuantArray.__mro__[:-1]
        for n, v in vars(kind).items()
        if not n.startswith("_") and (callable(v) or isinstance(v, property | classmethod))
    ]
    return [(n, v) for n, v in found if not inspect.ismodule(v)]


def test_public_names_are_documented():
    for name, value in public_functions():
        text = inspect.getdoc(getattr(value, "__func__", value))
        assert text and text.split("\n")[0].strip().endswith((".", ":", ";")), name


# ---- the checkout ---------------------------------------------------------------------------


def test_the_top_level_is_tidy():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not listed:
        pytest.skip("not a git checkout")
    top = {name.split("/")[0] for name in listed}
    allowed = {
        "pyproject.toml",
        "cuquant",
        "kernels",
        "tests",
        "examples",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
    }
    assert {name for name in top if not name.startswith(".")} == allowed


# ---- the wheel ------------------------------------------------------------------------------


def test_an_editable_install_exposes_nothing_but_cuquant(tmp_path):
    """As pip does it; bitsandbytes and transformers take a package `kernels` for that library."""
    pytest.importorskip("editables", reason="hatchling makes editable installs with editables")
    code = "import sys; from hatchling.build import build_editable as b; print(b(sys.argv[1]))"
    made = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, cwd=ROOT, capture_output=True
    )
    site = tmp_path / "site"
    with zipfile.ZipFile(tmp_path / made.stdout.decode().split()[-1]) as wheel:
        wheel.extractall(site)
    use = f"""
import importlib.util, site, sys
sys.path[:] = [p for p in sys.path if p != {str(ROOT)!r}]
sys.modules.pop("cuquant", None)
site.addsitedir({str(site)!r})
print([n for n in ("kernels", "tests", "examples") if importlib.util.find_spec(n)])
import cuquant
from cuquant.gpu.source import kernel_folder
print(cuquant.__file__, kernel_folder())
"""
    done = subprocess.run(
        [sys.executable, "-c", use], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    exposed, where = done.stdout.splitlines()
    assert exposed == "[]", exposed
    assert where == f"{PACKAGE / '__init__.py'} {ROOT / 'kernels'}"


def test_editable_installs_are_exact():
    """What the test above needs of the settings, for those who have no editables."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert "\ndev-mode-exact = true\n" in text and "dev-mode-dirs" not in text


def test_the_wheel_works_outside_the_checkout(tmp_path):
    """Built, unpacked and used from another folder: kernels inside, no sources of ours needed."""
    subprocess.run(
        [
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            str(tmp_path),
            str(ROOT),
        ],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    kernels = {f"cuquant/{p.relative_to(ROOT).as_posix()}" for p in KERNELS}
    sources = {f"cuquant/{p.relative_to(PACKAGE).as_posix()}" for p in SOURCES}
    assert kernels <= names and sources <= names and "cuquant/py.typed" in names
    assert "cuquant/kernels/__init__.py" not in names
    assert not [n for n in names if n.startswith("tests")]
    home = tmp_path / "env"
    venv.create(home, system_site_packages=False, with_pip=False)
    site = next(home.rglob("site-packages"))
    zipfile.ZipFile(wheel).extractall(site)
    paths = os.pathsep.join(p for p in sys.path if p.endswith("site-packages"))
    code = (
        "import cuquant, numpy as np; from cuquant.gpu.jit import kernel_folder;"
        "q = cuquant.quantize(np.ones((2, 64), np.float32));"
        "print(cuquant.__file__, kernel_folder(), q.dequantize().sum())"
    )
    done = subprocess.run(
        [
            next(home.rglob("python")),
            "-c",
            f"import sys; sys.path += {paths.split(os.pathsep)}; {code}",
        ],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    where, kernels_at, total = done.stdout.split()
    assert Path(where).is_relative_to(site) and Path(kernels_at) == site / "cuquant" / "kernels"
    assert float(total) == 128


def test_kernels_are_found_in_an_editable_install():
    from cuquant.gpu.jit import kernel_folder

    assert (kernel_folder() / "format.cuh").is_file()


def test_the_release_of_transformers_that_is_needed_is_said_alike():
    """Of the extra, of the guide, and of what is said where it is older."""
    (needed,) = set(
        re.findall(r'"transformers>=([\d.]+)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    )
    for file in ("examples/transformers.md", "cuquant/integrations/transformers.py"):
        assert f"{needed} or newer" in (ROOT / file).read_text(encoding="utf-8")
