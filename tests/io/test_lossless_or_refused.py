"""Odd arrays in every kind of files: the same numbers when they are read again, or a refusal that
names the array."""

import ml_dtypes
import numpy as np
import pytest
from gguf_files import container, tensor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cuquant as cq
from cuquant.io.conversion.plan import WRITERS

pytestmark = [
    pytest.mark.filterwarnings("ignore:the architecture is not known"),
    pytest.mark.filterwarnings("ignore:no array is quantized"),
]
BFLOAT16 = ml_dtypes.bfloat16
NAME = "model.layers.0.up.weight"


def values_of(array):
    """The numbers of an array, float32."""
    if isinstance(array, cq.QuantArray):
        return array.dequantize(np.float32)
    return np.asarray(array).astype(np.float32)


def converted(folder, kind, array, **options):
    """The array in a kind of files; None where it is refused by name, and nothing is left."""
    source, target = folder / "in.safetensors", folder / f"out-{kind}"
    if kind == "gguf":
        target = target.with_suffix(".gguf")
    cq.save(source, {NAME: array}, nonfinite="propagate")
    before = sorted(folder.iterdir())
    try:
        cq.convert(source, target, kind, **options)
    except ValueError as error:
        assert NAME in str(error), error
        assert sorted(folder.iterdir()) == before
        return None
    return cq.load(target)[NAME]


CASES = {
    "values of float16 in a model of bfloat16": ("fp16", (16, 64), BFLOAT16),
    "values of bfloat16 in a model of float16": ("bf16", (16, 64), np.float16),
    "one zero point for all": ("uint4:tensor", (16, 64), np.float16),
    "a ragged group of floats": ("fp8_e4m3:40", (24, 72), np.float16),
    "groups of floats that do not divide a row": ("fp8_e4m3:40", (8, 1024), np.float16),
    "no rows": ("int4:32", (0, 64), np.float16),
    "no columns": ("q8_0", (64, 0), np.float16),
    "floats of no rows": ("fp8_e4m3:tensor", (0, 64), np.float16),
    "levels of no columns": ("nf4", (64, 0), np.float32),
}


@pytest.mark.parametrize("case", CASES)
def test_odd_arrays_keep_their_numbers_or_are_refused(case, tmp_path):
    fmt, shape, dtype = CASES[case]
    x = np.random.default_rng(3).standard_normal(shape).astype(dtype)
    q = cq.quantize(x * dtype(1 + 2**-6), fmt)
    for kind in WRITERS:
        folder = tmp_path / kind
        folder.mkdir()
        found = converted(folder, kind, q)
        if found is not None:
            np.testing.assert_array_equal(values_of(found), values_of(q), kind)


def test_what_holds_an_odd_array_takes_it(tmp_path):
    """A refusal of everything would satisfy the test above."""
    for kind, fmt, shape in (
        ("compressed-tensors", "fp8_e4m3:40", (24, 72)),
        ("compressed-tensors", "fp8_e4m3:40", (8, 1024)),
        ("gptq", "fp16", (16, 64)),
        ("cuquant", "int4:32", (0, 64)),
    ):
        folder = tmp_path / f"{kind}-{shape}"
        folder.mkdir()
        q = cq.quantize(np.ones(shape, np.float32), fmt)
        assert converted(folder, kind, q) is not None


def changed(fmt, part, value):
    """A weight [16, 256] of which one number of a component is `value`."""
    x = np.random.default_rng(3).standard_normal((16, 256)).astype(np.float32)
    q = cq.quantize(x, fmt)
    parts = {name: np.array(array) for name, array in q.arrays().items()}
    parts[part].flat[-1] = value
    return q._with(components=parts)


ODD_NUMBERS = [
    ("uint4:32", "zero_point", 16), ("uint2:32", "zero_point", 4), ("uint4:32", "zero_point", 15),
    ("uint4:32", "scale", np.inf), ("int4:32+bfloat16", "scale", 3e38), ("mxfp4", "scale", 255),
    ("uint4:32+min", "minimum", np.inf), ("mxfp4", "scale", 253), ("int8:32", "scale", np.nan),
    ("mxfp4", "scale", 0), ("mxfp8", "scale", 254), ("nvfp4", "scale", 0x7F),
    ("nvfp4", "global_scale", 0), ("int8+absmax", "scale", np.inf), ("nf4", "scale", -1),
    ("fp8_e4m3:tensor", "scale", np.inf),
]  # fmt: skip


@pytest.mark.parametrize(("fmt", "part", "value"), ODD_NUMBERS)
def test_odd_scales_and_zero_points_are_kept_or_refused(tmp_path, fmt, part, value):
    q = changed(fmt, part, value)
    for kind in WRITERS:
        folder = tmp_path / kind
        folder.mkdir()
        with np.errstate(all="ignore"):
            found = converted(folder, kind, q)
            if found is not None:
                np.testing.assert_array_equal(values_of(found), values_of(q), kind)


@pytest.mark.parametrize("kind", [kind for kind in WRITERS if kind != "cuquant"])
def test_arrays_without_elements_stay_plain(kind, tmp_path):
    empty = np.empty((0, 64), np.float16)
    for name, array in (("plain", empty), ("quantized", cq.quantize(empty, "int4:32"))):
        folder = tmp_path / name
        folder.mkdir()
        found = converted(folder, kind, array, format="q8_0", requantize=True)
        assert found.shape == empty.shape and not isinstance(found, cq.QuantArray)


FORMATS = st.builds(
    "{}{}{}".format,
    st.sampled_from(sorted(cq.list_formats())),
    st.sampled_from(["", ":32", ":40", ":64", ":row", ":tensor", ":flat", ":32x64"]),
    st.sampled_from(["", "+bfloat16", "+float32", "+min", "+dq", "+absmax", "+permuted"]),
)
SHAPES = st.sampled_from([
    (1, 1), (1, 64), (64, 1), (33, 49), (32, 64), (40, 40), (16, 96), (8, 256), (2, 8, 64), (64,),
    (0, 32), (32, 0), (2, 2, 8, 32),
])  # fmt: skip
DTYPES = st.sampled_from([np.float32, np.float16, BFLOAT16])


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(FORMATS, SHAPES, DTYPES, st.sampled_from(sorted(WRITERS)), st.booleans())
def test_any_format_and_shape(tmp_path_factory, fmt, shape, dtype, kind, requantize):
    x = np.random.default_rng(len(fmt)).standard_normal(shape).astype(dtype)
    try:
        q = cq.quantize(x, fmt)
    except (ValueError, TypeError):
        return  # no such format, or not of such a shape
    folder = tmp_path_factory.mktemp("any")
    found = converted(folder, kind, q, requantize=requantize)
    if found is None:
        return
    assert found.shape == q.shape
    if not requantize:
        np.testing.assert_array_equal(values_of(found), values_of(q))


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_what_is_not_finite_is_compared(tmp_path, value):
    """On either side, as arrays and as files."""
    sides = {"a": np.ones((4, 4)), "b": np.ones((4, 4))}
    sides["b"][0, 0] = value
    for name, array in sides.items():
        cq.save(tmp_path / name, {"w": array})
    for a, b in (("a", "b"), ("b", "a"), ("b", "b")):
        with np.errstate(over="ignore"):
            found = cq.compare(tmp_path / a, tmp_path / b)
            same = cq.compare({"w": sides[a]}, {"w": sides[b]})
        assert str(found) == str(same) and found.is_equal == (a == b and value == 1e300)


@pytest.mark.parametrize("kind", ["gguf", "fp8"])
def test_an_unknown_type_of_ggml_is_damage(tmp_path, kind):
    path = tmp_path / "m.gguf"
    path.write_bytes(container(tensors=[tensor("a", (32,), 99)], data=bytes(32)))
    with cq.open(path) as file:
        assert file["a"].format == "type 99"
    for read in (cq.load, lambda p: cq.convert(p, tmp_path / f"out.{kind}", kind)):
        with pytest.raises(cq.FormatError, match=r"'a'.*type 99"):
            read(path)


def test_a_state_of_bitsandbytes_with_no_dtype_is_damage(tmp_path):
    cq.save(tmp_path / "w", {NAME: cq.quantize(np.ones((8, 64), np.float16), "nf4")})
    cq.convert(tmp_path / "w", tmp_path / "out", "bitsandbytes")
    path = tmp_path / "out" / "model.safetensors"
    stored = path.read_bytes()
    assert stored.count(b'"float16"') == 1
    path.write_bytes(stored.replace(b'"float16"', b'"floax16"'))
    with pytest.raises(cq.FormatError, match="'floax16' is no dtype"):
        cq.load(tmp_path / "out")
