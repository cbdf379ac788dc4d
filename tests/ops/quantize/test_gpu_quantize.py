"""The matrix on a GPU: what quantize and dequantize make of CuPy arrays and torch tensors is what
they make of NumPy's, byte for byte."""

import kernel_cases as cases
import numpy as np
import pytest
from kernel_cases import FORMATS, NAMES, OWN, Case, differences, same_values
from oracle import DTYPES, bits_equal

import cuquant as cq
from cuquant import interop

pytestmark = pytest.mark.gpu

F32 = np.float32


def check_values(q: cq.QuantArray, wanted: cq.QuantArray) -> None:
    for dtype in DTYPES.values():
        found = q.dequantize(dtype=dtype)
        assert interop.kind(found) == q.kind and interop.device(found) == q.device
        assert same_values(interop.to_host(found), wanted.dequantize(dtype=dtype))


def check_parts(q: cq.QuantArray, wanted: cq.QuantArray) -> None:
    assert bits_equal(interop.to_host(q.codes()), wanted.codes())
    assert bits_equal(interop.to_host(q.packed), wanted.packed)
    for name in ("scale", "minimum", "zero_point"):
        found, want = getattr(q, name), getattr(wanted, name)
        assert (found is None) == (want is None)
        if want is not None:
            assert interop.kind(found) == q.kind
            assert same_values(interop.to_host(found), np.asarray(want))


@pytest.mark.parametrize("case", cases.ALL, ids=str)
def test_cupy_arrays(case, gpu):
    x = case.view(gpu.asarray(case.base))
    q, wanted = cq.quantize(x, case.fmt, **case.arguments), case.expected()
    assert (q.kind, q.device, q.dtype, q.shape) == ("cupy", "cuda:0", x.dtype, x.shape)
    assert not differences(q.numpy(), wanted)
    check_values(q, wanted)
    check_parts(q, wanted)


@pytest.mark.parametrize("case", cases.DECODED, ids=str)
def test_decoding_what_numpy_encoded(case, gpu):
    wanted = case.expected()
    check_values(wanted.to("cuda"), wanted)


FOR_TORCH = [
    case
    for case in dict.fromkeys([*cases.BASICS, *cases.ALL[::7]])
    if case.layout not in ("reversed", "upside down")  # torch has no negative strides
]


def tensor(torch, values: np.ndarray):
    return interop.from_numpy(np.ascontiguousarray(values), "torch").to("cuda")


@pytest.mark.parametrize("case", FOR_TORCH, ids=str)
def test_torch_tensors(case, torch):
    x = case.view(tensor(torch, case.base))
    q, wanted = cq.quantize(x, case.fmt, **case.arguments), case.expected()
    assert (q.kind, q.device, q.shape) == ("torch", "cuda:0", tuple(x.shape))
    assert not differences(q.numpy(), wanted)
    check_values(q, wanted)
    check_parts(q, wanted)


# ---- any codes and bytes ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OWN])
def test_random_bytes_of_ggml_blocks(name, gpu):
    layout, rng = FORMATS[name].layout, np.random.default_rng(17)
    raw = rng.integers(0, 256, (40, 512 // layout.elements, layout.nbytes), np.uint8)
    wanted = cq.QuantArray.from_blocks(raw, name, (40, 512))
    q = cq.QuantArray.from_blocks(gpu.asarray(raw), name, (40, 512))
    check_values(q, wanted)
    check_parts(q, wanted)


@pytest.mark.parametrize("name", OWN)
def test_every_code(name, gpu):
    fmt = FORMATS[name]
    codes = cases.all_codes(fmt)
    packed = fmt.row_packing.pack(codes, 0).view(fmt.components(codes.shape)[0].dtype)
    parts = {"packed": packed}
    for part in fmt.components(codes.shape)[1:]:
        parts[part.name] = np.full(part.shape, 3 if part.dtype == np.uint8 else 0.7, part.dtype)
    wanted = cq.QuantArray(fmt, codes.shape, DTYPES["float32"], parts, (0, 1))
    check_values(wanted.to("cuda"), wanted)
    assert bits_equal(wanted.to("cuda").codes().get(), codes)


# ---- NaN and infinity ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_raise_says_what_the_reference_says(name, gpu):
    x = cases.normal((4, 256), DTYPES["float32"])
    with_nan, with_infinity = x.copy(), x.copy()
    with_nan[2, 200], with_infinity[0, 3] = np.nan, np.inf
    for values in (with_nan, with_infinity, x * F32(1e10), x * F32(1e37), x):
        try:
            wanted = cq.quantize(values, name, nonfinite="raise")
        except ValueError as error:
            with pytest.raises(ValueError) as found:
                cq.quantize(gpu.asarray(values), name, nonfinite="raise")
            assert str(found.value) == str(error)
        else:
            found = cq.quantize(gpu.asarray(values), name, nonfinite="raise")
            assert not differences(found.numpy(), wanted)


@pytest.mark.parametrize("layout", ["whole", *cases.WRITABLE])
def test_the_first_nonfinite_number_is_named_wherever_it_lies(layout, gpu):
    values = np.ones((24, 256), np.float16)
    values[3, 100:] = np.inf
    case = Case("nf4", shape=values.shape, layout=layout)
    base = cases.placed(values, layout)
    for axis in (0, 1):
        with pytest.raises(ValueError) as wanted:
            cq.quantize(case.view(base), "nf4", axis=axis, nonfinite="raise")
        with pytest.raises(ValueError) as found:
            cq.quantize(case.view(gpu.asarray(base)), "nf4", axis=axis, nonfinite="raise")
        assert str(found.value) == str(wanted.value)


# ---- numbers that were found beforehand, on the GPU ---------------------------------------------


@pytest.mark.parametrize("case", cases.GIVEN, ids=str)
def test_calibrated_numbers_that_are_on_the_gpu(case, gpu):
    given = {
        name: gpu.asarray(value) if name in ("scale", "zero_point", "global_scale") else value
        for name, value in case.arguments.items()
    }
    q = cq.quantize(case.view(gpu.asarray(case.base)), case.fmt, **given)
    assert not differences(q.numpy(), case.expected())


@pytest.mark.parametrize("shape", [(0,), (0, 256), (3, 0), (2, 0, 256)])
@pytest.mark.parametrize("name", NAMES)
def test_empty_arrays(name, shape, gpu):
    x = np.zeros(shape, F32)
    q, wanted = cq.quantize(gpu.asarray(x), name), cq.quantize(x, name)
    assert q.kind == "cupy" and not differences(q.numpy(), wanted)
    check_values(q, wanted)
    check_parts(q, wanted)
