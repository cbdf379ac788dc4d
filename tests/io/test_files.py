"""save and load: every format, hostile headers, nothing half-written."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import bits_equal

import cuquant as cq
from cuquant.io.container.safetensors import SafetensorsReader, SafetensorsWriter
from cuquant.io.streaming import quantize_file

NAMES = cq.list_formats()


def sample(name: str, shape=(4, 512), **options) -> cq.QuantArray:
    x = np.random.default_rng(4).standard_normal(shape).astype(np.float32)
    return cq.quantize(x, name, **options)


def same(a: cq.QuantArray, b: cq.QuantArray) -> bool:
    fields = ("format", "shape", "dtype", "axes")
    alike = all(getattr(a, f) == getattr(b, f) for f in fields)
    return alike and all(bits_equal(v, b.arrays()[k]) for k, v in a.arrays().items())


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name, tmp_path):
    path = tmp_path / "w.safetensors"
    arrays = {"w": sample(name), "t": sample(name, (512, 2), axis=0).T, "e": sample(name, (0, 512))}
    cq.save(path, arrays)
    loaded = cq.load(path)
    assert list(loaded) == list(arrays)
    for key, q in arrays.items():
        assert same(q, loaded[key])
        parts = [part for part in loaded[key].components.values() if part.size]
        assert all(part.ctypes.data % 256 == 0 and part.flags.writeable for part in parts)


OPTIONS = [
    ("nf4", {"double_quant": True}),
    ("nf4", {"block_size": "tensor"}),
    ("fp8_e4m3", {"block_size": (2, 64)}),
    ("k3", {"levels": [-1.0, -0.3, 0.0, 0.1, 1.0]}),
    ("k8", {"levels": np.linspace(-1, 1, 256) ** 3}),
    ("k5", {"levels": "normal", "block_size": 32}),
    ("int4", {"block_size": "row"}),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_options_round_trip(name, options, tmp_path):
    q = sample(name, **options)
    q.save(tmp_path / "q")
    assert same(q, cq.load(tmp_path / "q")["array"])
    fmt = cq.get_format("k4", packing="planes", scale_dtype="float32", double_quant=True)
    q = cq.quantize(np.ones((2, 64), np.float32), fmt)
    q.save(tmp_path / "q")
    assert same(q, cq.load(tmp_path / "q")["array"])


def test_plain_arrays_and_packed_weights(tmp_path):
    path = tmp_path / "m"
    plain = {
        "f32": np.arange(6, dtype=np.float32).reshape(2, 3),
        "nan": np.full(3, np.nan),
        "bf16": np.ones(3, ml_dtypes.bfloat16),
        "fp8": np.ones((2, 2), ml_dtypes.float8_e4m3fn),
        "fp4": np.array([1, -2, 3, 6], ml_dtypes.float4_e2m1fn),
        "ids": np.array(3),
        "b": np.array([True]),
    }
    packed = cq.prepack(sample("int4"))
    cq.save(path, {**plain, "w": packed})
    loaded = cq.load(path)
    for key, value in plain.items():
        assert bits_equal(loaded[key], value)
    assert isinstance(loaded["w"], cq.PackedWeight)
    assert same(cq.unpack(loaded["w"]), cq.unpack(packed))


def test_files_of_others_load_as_arrays(tmp_path):
    from safetensors.numpy import save_file

    save_file({"a": np.eye(3, dtype=np.float32)}, tmp_path / "x", {"format": "pt"})
    loaded = cq.load(tmp_path / "x")
    assert list(loaded) == ["a"] and bits_equal(loaded["a"], np.eye(3, dtype=np.float32))


def test_our_files_are_plain_safetensors(tmp_path):
    from safetensors.numpy import load_file

    q = sample("nf4")
    cq.save(tmp_path / "x", {"w": q})
    raw = load_file(tmp_path / "x")
    assert {f"w.{k}" for k in q.arrays()} == set(raw)
    assert bits_equal(raw["w.packed"], q.packed)


@pytest.mark.parametrize("name", [name for name in NAMES if cq.get_format(name).holds_nan])
def test_nonfinite_is_refused_and_nothing_is_written(name, tmp_path):
    path = tmp_path / "w"
    cq.save(path, {"old": np.zeros(1)})
    x = np.random.default_rng(0).standard_normal((2, 512)).astype(np.float32)
    x[1, 3] = np.nan
    q = cq.quantize(x, name)
    with pytest.raises(ValueError, match="'bad'"):
        cq.save(path, {"good": sample(name), "bad": q})
    assert list(cq.load(path)) == ["old"] and list(tmp_path.iterdir()) == [path]
    cq.save(path, {"bad": q}, nonfinite="propagate")
    assert same(q, cq.load(path)["bad"])


def test_nan_codes_are_found_too(tmp_path):
    q = sample("fp8_e4m3")
    q.components["packed"][0, 0] = 0x7F
    with pytest.raises(ValueError, match="1 codes"):
        q.save(tmp_path / "q")
    q = sample("k3", levels=[-1.0, 0.0, 1.0])
    q.components["packed"][0, 0] |= 7
    with pytest.raises(ValueError, match="codes"):
        q.save(tmp_path / "q")
    assert not any(tmp_path.iterdir())


def test_names_that_collide(tmp_path):
    with pytest.raises(ValueError, match="two tensors"):
        cq.save(tmp_path / "x", {"w": sample("nf4"), "w.packed": np.zeros(1)})
    for arrays, error in [
        ({1: np.zeros(1)}, TypeError),
        ([np.zeros(1)], TypeError),
        ({"w": 3}, TypeError),
        ({"w": np.array(["a"])}, TypeError),
    ]:
        with pytest.raises(error):
            cq.save(tmp_path / "x", arrays)
    assert not any(tmp_path.iterdir())


# ---- hostile headers ------------------------------------------------------------------------


def rewrite(path: Path, change) -> None:
    """The file with its cuquant metadata changed by `change(entry)` (or replaced by its result)."""
    with SafetensorsReader(path) as reader:
        described = json.loads(reader.metadata["cuquant"])
        result = change(described)
        described = described if result is None else result
        text = described if isinstance(described, str) else json.dumps(described)
        specs = {n: (i.dtype, i.shape) for n, i in reader.tensors.items()}
        data = {n: reader.read(n) for n in reader.tensors}
    with SafetensorsWriter(path, specs, {"cuquant": text}) as writer:
        for name, value in data.items():
            writer.write(name, value)


def entry(key, value):
    def change(described):
        described["arrays"]["w"][key] = value

    return change


def without(key):
    def change(described):
        del described["arrays"]["w"][key]

    return change


HOSTILE = {
    "not json": lambda d: "{",
    "a list": lambda d: "[]",
    "NaN": lambda d: '{"version": NaN}',
    "deep": lambda d: "[" * 100_000,
    "version": lambda d: {**d, "version": 99},
    "no arrays": lambda d: {"version": 1},
    "arrays a list": lambda d: {"version": 1, "arrays": []},
    "entry a list": lambda d: {"version": 1, "arrays": {"w": []}},
    "unknown format": entry("format", "nf5"),
    "format a list": entry("format", ["nf4"]),
    "options a list": entry("options", []),
    "unknown option": entry("options", {"color": 1}),
    "bad option": entry("options", {"block_size": -1}),
    "levels": entry("options", {"levels": [0, 1]}),
    "another block": entry("options", {"block_size": 128}),
    "negative": entry("shape", [-4, 512]),
    "float": entry("shape", [4.0, 512]),
    "bool": entry("shape", [True, 512]),
    "huge": entry("shape", [2**70, 2]),
    "large": entry("shape", [2**40, 2**40]),
    "another shape": entry("shape", [8, 256]),
    "fewer axes": entry("axes", [0]),
    "axes twice": entry("axes", [1, 1]),
    "axes": entry("axes", "01"),
    "1000 axes": entry("shape", [1] * 1000),
    "dtype": entry("dtype", "int8"),
    "dtype a dict": entry("dtype", {}),
    "components": entry("components", {"packed": {}}),
    "components a list": entry("components", []),
    "more components": entry("components", {"packed": {}, "scale": {}, "zero_point": {}}),
    "layout": entry("layout", "tiles/7"),
    "no shape": without("shape"),
    "no format": without("format"),
    "no components": without("components"),
    "0-d": lambda d: (entry("shape", [])(d), entry("axes", [])(d))[1],
    "missing tensor": lambda d: {"version": 1, "arrays": {"v": d["arrays"]["w"]}},
    "code in a dtype": entry("dtype", "__import__('os').system('true')"),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=list(HOSTILE))
def test_a_hostile_header_is_a_format_error(change, tmp_path):
    path = tmp_path / "w"
    cq.save(path, {"w": sample("nf4")})
    rewrite(path, change)
    with pytest.raises(cq.FormatError, match="w"):
        cq.load(path)


LONG = "x" * 10**6
LONGWINDED = {
    "no json": lambda d: "x" * 10**6,
    "a number": lambda d: '{"version": -' + "9" * 4000 + "}",
    "version": lambda d: {**d, "version": LONG},
    "name": lambda d: {**d, "arrays": {LONG: d["arrays"]["w"]}},
    "name of no entry": lambda d: {**d, "arrays": {LONG: 3}},
    "format": entry("format", LONG),
    "format and options": entry("format", f"nf4+{LONG}"),
    "option": entry("options", {LONG: 1}),
    "block": entry("options", {"block_size": LONG}),
    "levels": entry("options", {"levels": LONG}),
    "many levels": entry("options", {"levels": [1] * 10**5}),
    "dtype": entry("dtype", LONG),
    "shape": entry("shape", [LONG]),
    "axes": entry("axes", [LONG, LONG]),
    "components": entry("components", {LONG: 1}),
    "layout": entry("layout", LONG),
    "layout of a list": entry("layout", [LONG] * 3),
}


@pytest.mark.parametrize("case", LONGWINDED)
def test_messages_are_short_however_long_the_header(case, tmp_path):
    path = tmp_path / "w"
    cq.save(path, {"w": sample("nf4")})
    rewrite(path, LONGWINDED[case])
    with pytest.raises(cq.FormatError) as caught:
        cq.load(path)
    assert len(str(caught.value)) < 1500
    assert str(path) in str(caught.value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_loads_or_is_a_format_error(data, tmp_path):
    path = tmp_path / "w"
    cq.save(path, {"w": sample("nvfp4", (2, 64)), "b": np.zeros(3)})
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    try:
        for value in cq.load(path).values():
            if isinstance(value, cq.QuantArray):
                value.dequantize()
    except cq.FormatError:
        pass


@pytest.mark.parametrize("size", [0, 4, 8, 100])
def test_truncated(size, tmp_path):
    path = tmp_path / "w"
    cq.save(path, {"w": sample("nf4")})
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(cq.FormatError, match="w"):
        cq.load(path)


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        cq.load(tmp_path / "none")


# ---- streaming ------------------------------------------------------------------------------


def model(path: Path) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tensors = {
        "a.weight": rng.standard_normal((8, 256)).astype(np.float32),
        "b.weight": rng.standard_normal((4, 100)).astype(ml_dtypes.bfloat16),
        "c.weight": rng.standard_normal((2, 3, 256)).astype(np.float16),
        "norm": rng.standard_normal(256).astype(np.float32),
        "ids": np.arange(10).reshape(2, 5),
    }
    cq.save(path, tensors)
    return tensors


@pytest.mark.parametrize("name", NAMES)
def test_quantize_file(name, tmp_path):
    tensors = model(tmp_path / "in")
    reports = list(
        quantize_file(tmp_path / "in", tmp_path / "out", cq.get_format(name), device="cpu")
    )
    loaded = cq.load(tmp_path / "out")
    assert set(loaded) == set(tensors) == {r.name for r in reports}
    for report in reports:
        value, true = loaded[report.name], tensors[report.name]
        if report.reason is None:
            assert same(value, cq.quantize(true, name))
            assert (
                report.sqnr_db == cq.error(true, value).sqnr_db and report.bytes_out == value.nbytes
            )
        else:
            assert bits_equal(value, true) and report.bytes_out == true.nbytes
    kept = {r.name for r in reports if r.reason}
    assert kept == {"norm", "ids"} | ({"b.weight"} if cq.get_format(name).is_blocks else set())


def test_globs_and_same_file(tmp_path):
    tensors = model(tmp_path / "m")
    fmt = cq.get_format("nf4")
    plans = []
    done = list(
        quantize_file(
            tmp_path / "m",
            tmp_path / "m",
            fmt,
            include=["*.weight"],
            exclude=["b.*"],
            begin=plans.extend,
        )
    )
    assert [p.info.name for p in plans] == [r.name for r in done]
    loaded = cq.load(tmp_path / "m")
    assert isinstance(loaded["a.weight"], cq.QuantArray) and bits_equal(
        loaded["b.weight"], tensors["b.weight"]
    )
    with pytest.raises(ValueError, match="quantized already"):
        list(quantize_file(tmp_path / "m", tmp_path / "n", fmt))


def test_nothing_is_left_of_an_unfinished_file(tmp_path):
    tensors = model(tmp_path / "in")
    (tmp_path / "out").write_bytes(b"old")
    fmt = cq.get_format("nf4")
    steps = quantize_file(tmp_path / "in", tmp_path / "out", fmt)
    next(steps)
    steps.close()
    tensors["c.weight"][1, 1, 1] = np.nan
    cq.save(tmp_path / "in", tensors)
    with pytest.raises(ValueError, match=r"'c.weight': .*flat index 1025"):
        list(quantize_file(tmp_path / "in", tmp_path / "out", fmt))
    assert (tmp_path / "out").read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]
    assert len(list(quantize_file(tmp_path / "in", tmp_path / "out", fmt, nonfinite="clamp"))) == 5


def test_save_does_not_call_safetensors_by_the_name_of_another_kind(tmp_path):
    for name, kind in (("w.gguf", "GGUF"), ("w.PT", "PyTorch"), ("w.npz", "NumPy")):
        with pytest.raises(ValueError, match=f"not {kind}; call it w.safetensors"):
            cq.save(tmp_path / name, {"w": np.ones(3)})
    assert not list(tmp_path.iterdir())


def test_swapped_arguments_of_save_are_told(tmp_path):
    with pytest.raises(TypeError, match="save takes a path and a dict of arrays by name, got str"):
        cq.save({"w": sample("nf4")}, "w.safetensors")
