"""The kernels that decode give the reference's values, on the CPU under the emulator."""

from collections.abc import Iterator
from functools import cache
from itertools import product

import kernel_cases as cases
import ml_dtypes
import numpy as np
import pytest
from emulator import Emulator, Recorder, compiler
from in_turn import in_turn
from kernel_cases import FEW, FORMATS, NAMES, OWN, Case, same_values, scales_of
from on_emulator import OnEmulator
from oracle import DTYPES, bits_equal
from samples import sampled, selected

import cuquant as cq
from cuquant.formats import Codebook

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to compile kernels with")

F32 = np.float32
BLOCKS = [name for name in NAMES if name not in OWN]


def _made(case: Case, backend: Emulator | Recorder) -> cq.QuantArray:
    return OnEmulator(backend).copy(case.expected())


@pytest.fixture(scope="module", autouse=True)
def built(request) -> None:
    """All kernels of the tests that run, compiled together."""
    recorder = Recorder()
    run = OnEmulator(recorder)
    decoded = [given["case"].expected() for given in selected(request, "test_the_matrix")]
    codes = selected(request, "test_every_code_with_scales_of_every_kind")
    decoded += [given["q"] for given in codes]
    for test in OF_A_NAME:
        names = dict.fromkeys(given["name"] for given in selected(request, test))
        decoded += [Case(name, "float32").expected() for name in names]
    for q in decoded:
        for dtype in DTYPES:
            run.dequantize(run.copy(q), dtype)
    for given in selected(request, "test_values_go_anywhere"):
        for q, out, _ in targets(recorder, given["name"]):
            run.dequantize(q, out=out)
    for given in selected(request, "test_codes_and_packed"):
        q = _made(given["case"], recorder)
        run.codes(q), run.packed(q)
    for given in selected(request, "test_effective_scales"):
        run.effective(_made(given["case"], recorder), "scale")
    Emulator().build(recorder.programs)


OF_A_NAME = (
    "test_components_lie_anywhere",
    "test_random_bytes_of_ggml_blocks",
    "test_any_number_of_ggml_blocks",
)


def check(q: cq.QuantArray) -> None:
    for dtype in DTYPES.values():
        emulator = Emulator()
        found = OnEmulator(emulator).dequantize(OnEmulator(emulator).copy(q), dtype)
        assert same_values(found, q.dequantize(dtype=dtype))


# ---- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", sampled(cases.DECODED, "format", *cases.AXES_OF_CASES, "options"), ids=str
)
def test_the_matrix(case):
    check(case.expected())


@cache
def every_code() -> list[cq.QuantArray]:
    """Each code of each format beside scales of every kind, and a zero point."""
    made = []
    for name in OWN:
        fmt = FORMATS[name]
        codes = cases.all_codes(fmt)
        rows = 8 if len(codes) < 64 else 1
        codes = np.tile(codes, (rows, 1))
        packing, stored = fmt.row_packing, codes.shape
        packed = packing.pack(codes, 0).view(fmt.components(stored)[0].dtype)
        parts = {"packed": packed}
        rng = np.random.default_rng(13)
        for component in fmt.components(stored)[1:]:
            parts[component.name] = _any(component, rng)
        made.append(cq.QuantArray(fmt, stored, DTYPES["float32"], parts, (0, 1)))
    return made


def _any(component, rng: np.random.Generator) -> np.ndarray:
    """Scales: random, zero, subnormal, near the largest, not finite; other parts: random."""
    shape, dtype = component.shape, component.dtype
    if dtype == np.uint8:
        return rng.integers(0, 4 if component.name == "zero_point" else 256, shape, np.uint8)
    top = np.finfo(dtype).max
    special = [1, -0.7, 0, np.finfo(dtype).tiny / 4, top, np.inf, np.nan, -np.inf]
    scales = np.resize(np.array(special, dtype), shape)
    scales.reshape(-1)[6::16] = signalling(dtype)
    return scales


def signalling(dtype: np.dtype) -> np.generic:
    """A NaN that arithmetic would make a quiet one."""
    bits, word = {2: (0x7C01, np.uint16), 4: (0x7F800001, np.uint32)}[dtype.itemsize]
    return np.array([bits], word).view(dtype)[0]


@pytest.mark.parametrize("q", every_code(), ids=lambda q: q.format.name)
def test_every_code_with_scales_of_every_kind(q):
    check(q)


def test_every_code_is_there():
    for q in every_code():
        codec = q.format.codec
        count = len(codec.levels) if isinstance(codec, Codebook) else 1 << q.format.bits
        assert len(np.unique(q.codes())) == count


def changed(q: cq.QuantArray, **parts: np.ndarray) -> cq.QuantArray:
    """The array with other components."""
    return cq.QuantArray(q.format, q.shape, q.dtype, {**q.arrays(), **parts}, q.axes)


ONES = [name for name in OWN if FORMATS[name].scale and FORMATS[name].scale_is_plain]


@pytest.mark.parametrize("name", ONES)
def test_an_infinite_scale_makes_nothing_finite(name):
    """An infinity times a number is infinite, times 0 NaN; finite scales beside it saturate."""
    fmt = cq.get_format(name, block_size=8)
    q = cq.quantize(np.linspace(-1, 1, 64, dtype=F32).reshape(2, 32), fmt)
    scale = q.components["scale"]
    top = np.finfo(scale.dtype).max
    scale[...] = np.array([[np.inf, top, -np.inf, 1], [0, top, 2, np.nan]], scale.dtype)
    scale[1, 0] = signalling(scale.dtype)
    plain = q.codes().astype(F32)
    if q.zero_point is not None:
        plain -= np.repeat(q.zero_point, 8, axis=1)
    else:
        plain = fmt.codec.decode(q.codes())
    with np.errstate(invalid="ignore"):
        exact = plain.astype(np.float64) * np.repeat(scale.astype(np.float64), 8, axis=1)
    for dtype in DTYPES.values():
        values = q.dequantize(dtype=dtype).astype(np.float64)
        limit = float(ml_dtypes.finfo(dtype).max)
        wanted = np.where(np.isfinite(exact), np.clip(exact, -limit, limit), exact)
        np.testing.assert_allclose(values, wanted, rtol=2**-7)
    check(q)


@pytest.mark.parametrize("part", ["nested_scale", "nested_offset"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_an_infinite_nested_scale_makes_nothing_finite(part, value):
    q = cq.quantize(cases.normal((4, 256), F32), "nf4", block_size=32, double_quant=True)
    q.components[part][...] = value
    assert not np.isfinite(q.scale).any() and not np.isfinite(q.dequantize()).any()
    check(q)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_an_infinite_global_scale_makes_nothing_finite(value):
    q = cq.quantize(cases.normal((4, 256), F32), "nvfp4")
    q.components["global_scale"][...] = value
    assert not np.isfinite(q.scale).any() and not np.isfinite(q.dequantize()).any()
    check(q)


def test_a_scale_that_is_the_product_of_finite_ones_saturates():
    q = cq.quantize(cases.normal((4, 256), F32), "nvfp4")
    q.components["global_scale"][...] = 3e38
    assert np.isfinite(q.dequantize()).all() and q.scale.max() == np.finfo(F32).max
    check(q)


def test_infinite_codes_stay_infinite():
    """quantize makes none, but a file may hold them: 0x7C, also beside a scale that overflows."""
    packed = np.full((2, 64), 0x7C, np.uint8)
    for scales in ([1, 2], [1, 3e38]):
        parts = {"packed": packed, "scale": F32(scales)[:, None]}
        check(cq.QuantArray(FORMATS["fp8_e5m2"], (2, 64), DTYPES["float32"], parts, (0, 1)))


def random_blocks(name: str) -> cq.QuantArray:
    """ggml's blocks of random bytes: every code, scale and minimum, also NaN and infinite ones."""
    layout, rng = FORMATS[name].layout, np.random.default_rng(17)
    raw = rng.integers(0, 256, (40, 512 // layout.elements, layout.nbytes), np.uint8)
    return cq.QuantArray.from_blocks(raw, name, (40, 512))


@pytest.mark.parametrize("name", BLOCKS)
def test_random_bytes_of_ggml_blocks(name):
    check(random_blocks(name))


@pytest.mark.parametrize("name", BLOCKS)
@in_turn("count", [1, 2, 7, 8, 9, 63])
def test_any_number_of_ggml_blocks(name, count):
    fmt, rng = FORMATS[name], np.random.default_rng(count)
    raw = rng.integers(0, 60, (1, count, fmt.layout.nbytes), np.uint8)
    check(cq.QuantArray.from_blocks(raw, name, (1, count * fmt.layout.elements)))


# ---- where values go to, and components lie -----------------------------------------------------


def targets(
    backend: Emulator | Recorder, name: str
) -> Iterator[tuple[cq.QuantArray, np.ndarray, np.ndarray]]:
    """QuantArrays, arrays to write to, and the memory these are views of."""
    for axis, shape in ((-1, (24, 256)), (0, (256, 24))):
        q = _made(Case(name, "float32", shape, axis), backend)
        for layout in cases.WRITABLE:
            where = cases.LAYOUTS[layout]
            base = backend.empty(where.base(shape), DTYPES[cases.dtype_of(name)])
            base[...] = 7
            yield q, where.view(base, shape), base


@pytest.mark.parametrize("name", [*FEW, "bf16", "q4_0", "q5_k"])
def test_values_go_anywhere(name):
    """What lies between and beside them is left alone."""
    emulator = Emulator()
    for q, out, base in targets(emulator, name):
        wanted = q.dequantize(dtype=out.dtype)
        assert OnEmulator(emulator).dequantize(q, out=out) is out
        assert same_values(np.array(out), wanted)
        out[...] = 7
        assert (base == 7).all()


@pytest.mark.parametrize(
    ("name", "layout"),
    sampled(
        product([*FEW, "fp16", "q4_0", "q6_k"], ["misaligned", "steps", "rows", "reversed"]),
        lambda name, _: name,
        lambda _, layout: layout,
    ),
)
def test_components_lie_anywhere(name, layout):
    """What a user makes a QuantArray of need not be contiguous, nor start on 16 bytes."""
    q, emulator, parts = Case(name, "float32").expected(), Emulator(), {}
    for key, part in q.arrays().items():
        where = cases.LAYOUTS[layout if part.ndim else "whole"]
        base = emulator.zeros(where.base(part.shape), part.dtype)
        parts[key] = where.view(base, part.shape)
        parts[key][...] = part
    moved = cq.QuantArray(q.format, q.shape, q.dtype, parts, q.axes)
    for dtype in DTYPES.values():
        assert same_values(OnEmulator(emulator).dequantize(moved, dtype), q.dequantize(dtype=dtype))


# ---- codes, packed and scales -------------------------------------------------------------------

PARTS = [
    *cases.BASICS[1::3],
    *(Case(name, cases.dtype_of(name), (5, 131)) for name in OWN),
    *cases.PACKINGS,
    *cases.DOUBLE,
    *(case for case in cases.AXES if case.format in (*FEW, "q4_0", "q4_k")),
]
SOME_PARTS = sampled(PARTS, "format", *cases.AXES_OF_CASES)


@pytest.mark.parametrize("case", SOME_PARTS, ids=str)
def test_codes_and_packed(case):
    q, emulator = case.expected(), Emulator()
    run = OnEmulator(emulator)
    copy = run.copy(q)
    assert bits_equal(run.codes(copy), q.codes())
    if q.format.is_blocks or q.format.row_packing.bits < 16:
        assert bits_equal(run.packed(copy).view(q.packed.dtype), q.packed)


@pytest.mark.parametrize("case", SOME_PARTS, ids=str)
def test_effective_scales(case):
    q, emulator = case.expected(), Emulator()
    run = OnEmulator(emulator)
    copy = run.copy(q)
    scale, minimum = scales_of(q)
    for name, wanted in (("scale", scale), ("minimum", minimum)):
        found = run.effective(copy, name)
        assert (found is None) == (wanted is None)
        assert wanted is None or same_values(found, np.asarray(wanted, F32))


@pytest.mark.parametrize("name", NAMES)
@in_turn("shape", [(0,), (0, 256), (3, 0)])
def test_empty_arrays_launch_nothing(name, shape):
    q, recorder = cq.quantize(np.zeros(shape, F32), name), Recorder()
    run = OnEmulator(recorder)
    assert run.dequantize(q).shape == run.codes(q).shape == shape
    run.effective(q, "scale"), run.packed(q)
    launched = {launch.program.entry for launch in recorder.launches}
    assert launched <= {"effective", "block_scales"}, "rows without elements have scales"
