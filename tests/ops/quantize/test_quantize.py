"""quantize and dequantize against an independent scalar oracle; what they take and give."""

import ml_dtypes
import numpy as np
import pytest
from in_turn import in_turn
from oracle import DTYPES, bits_equal, quantize_row, single_scale_formats

import cuquant as cq
from cuquant.formats import Packing

OWN = single_scale_formats()
# Options that change what a block's numbers are, or how they are stored.
VARIANTS = (
    "uint4:64+min",
    "uint2:32+min+bfloat16",
    "uint3:row+min+float32",
    "uint8:40+min",
    "uint4:tensor+bfloat16",
    "int4:64+bfloat16",
    "nf4+bfloat16",
    "k3:32+bfloat16",
    "int8:32+e8m0",
    "int4:64+e8m0",
    "int2:row+e8m0",
    "fp8_e4m3:128+e8m0",
    "fp6_e2m3:row+e8m0",
    "fp4_e2m1:16+bfloat16",
)
NAMES = cq.list_formats()
BLOCKED = [n for n in NAMES if cq.get_format(n).is_blocks]


def columns_for(name: str) -> int:
    """A row length that ends inside a block, where the format allows it."""
    return 512 if name in BLOCKED else 301


def hard_rows(rng: np.random.Generator, columns: int) -> np.ndarray:
    """Rows of every kind: normal, tiny, huge, tied, sparse, subnormal, constant, zero."""
    normal = rng.standard_normal(columns)
    tied = rng.choice([-2.0, -1.0, 0.0, 1.0, 2.0], columns)
    return np.stack(
        [
            normal,
            normal * 1e-20,
            normal * 1e30,
            tied,
            np.where(rng.random(columns) < 0.95, 0, normal),
            normal * 1e-41,
            np.full(columns, -0.75),
            np.zeros(columns),
            np.where(np.arange(columns) % 2 == 0, -0.0, 0.0),
            np.round(normal * 8) / 8,
            np.abs(normal) + 10,
        ]
    ).astype(np.float32)


@pytest.mark.parametrize("name", (*OWN, *VARIANTS))
@in_turn("dtype", DTYPES)
def test_equals_the_oracle(name, dtype, rng):
    """Codes, stored scales, zero points, minimums and values, block by block."""
    fmt = cq.get_format(name)
    if fmt.scale.block == "tensor":
        fmt = cq.get_format(fmt, block_size="row")  # the oracle's blocks are those of a row
    with np.errstate(over="ignore"):
        x = hard_rows(rng, 301).astype(DTYPES[dtype])
    finite = np.isfinite(x.astype(np.float32))
    x = np.where(finite, x, np.array(1, x.dtype))
    world = np.float32(0.25)
    options = {"global_scale": float(world)} if name == "nvfp4" else {}
    q = cq.quantize(x, fmt, **options)
    values, found = q.dequantize(dtype="float32"), q.codes()
    parts = q.arrays()
    for i, row in enumerate(x.astype(np.float32)):
        one = world if options else np.float32(1)
        codes, scales, points, minimums, wanted = quantize_row(row, fmt, one)
        assert found[i].tolist() == codes
        stored = (
            np.array(scales).astype(parts["scale"].dtype)
            if fmt.scale.dtype == "e8m0"
            else (
                np.array(scales, ml_dtypes.float8_e4m3fn).view(np.uint8)
                if options
                else np.array(scales, parts["scale"].dtype)
            )
        )
        assert (parts["scale"][i] == stored).all()
        if fmt.offset == "zero_point":
            assert q.zero_point[i].tolist() == points
        if fmt.offset == "min":
            assert bits_equal(q.minimum[i], np.array(minimums, parts["minimum"].dtype))
        assert (values[i] == np.array(wanted, np.float32)).all()


@pytest.mark.parametrize("name", OWN)
def test_packed_holds_the_codes_and_then_the_code_of_zero(name, rng):
    fmt = cq.get_format(name)
    q = cq.quantize(rng.standard_normal((2, 37)).astype(np.float32), fmt)
    packing: Packing = fmt.packing
    room = packing.words(37) * 8 * packing.dtype.itemsize // fmt.bits
    codes = packing.unpack(q.packed, room)
    assert (codes[:, :37] == q.codes()).all()
    assert (codes[:, 37:] == fmt.zero_code).all()


@pytest.mark.parametrize("name", NAMES)
@in_turn("axis", [0, 1, 2, -2])
def test_axis_is_a_moved_axis(name, axis, rng):
    shape = [40, 33, 70]
    if name in BLOCKED:
        shape = [3, 2, 2]
        shape[axis] = 256
    x = rng.standard_normal(shape, dtype=np.float32)
    q = cq.quantize(x, name, axis=axis)
    moved = cq.quantize(np.ascontiguousarray(np.moveaxis(x, axis, -1)), name)
    assert q.shape == x.shape and q.axis == axis % 3
    for part in q.arrays():
        assert bits_equal(q.arrays()[part], moved.arrays()[part])
    assert bits_equal(np.moveaxis(q.dequantize(), axis, -1), moved.dequantize())
    assert bits_equal(np.moveaxis(q.codes(), axis, -1), moved.codes())


@pytest.mark.parametrize("name", NAMES)
def test_strides_do_not_matter(name, rng):
    base = rng.standard_normal((8, 2050), dtype=np.float32)
    misaligned = np.frombuffer(b"\0" + base.tobytes(), np.uint8)[1:].view(np.float32)
    assert not misaligned.flags.aligned or misaligned.ctypes.data % 16
    views = {
        "columns": base[:, 2:],
        "steps": base[::3, 2::4],
        "negative": base[::-1, :1:-1],
        "transposed": base.T[:512].T,
        "broadcast": np.broadcast_to(base[0, :512], (4, 512)),
        "misaligned": misaligned.reshape(8, 2050)[:, 1:1025],
    }
    for kind, view in views.items():
        found = cq.quantize(view, name).arrays()
        for part, value in cq.quantize(np.array(view, order="C"), name).arrays().items():
            assert bits_equal(found[part], value), kind


@pytest.mark.parametrize("name", NAMES)
@in_turn("shape", [(0,), (0, 256), (3, 0), (2, 0, 256)])
def test_empty(name, shape):
    q = cq.quantize(np.zeros(shape, np.float32), name)
    assert q.dequantize().shape == q.codes().shape == shape
    assert q.nbytes == sum(a.nbytes for a in q.arrays().values())
    assert q.bits_per_element == 0


@pytest.mark.parametrize("name", NAMES)
def test_zero_d_is_refused(name):
    for x in (np.float32(1), np.array(1, np.float32)):
        with pytest.raises(ValueError, match="0-d"):
            cq.quantize(x, name)


WRONG = {
    "complex64": np.complex64,
    "complex128": np.complex128,
    "datetime": "M8[s]",
    "float8": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "int4": ml_dtypes.int4,
    "object": object,
    "str": "U4",
}


@pytest.mark.parametrize("dtype", WRONG.values(), ids=list(WRONG))
def test_other_dtypes_are_refused_by_name(dtype):
    with pytest.raises(TypeError, match="float32, float16 or bfloat16"):
        cq.quantize(np.zeros((2, 64), dtype))


OTHER = "float64 longdouble int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool >f4 >f8 >i2"


def numbers(dtype: str) -> np.ndarray:
    """[4, 64] of a dtype, with its largest and smallest values."""
    dtype = np.dtype(dtype)
    x = (np.random.default_rng(0).standard_normal((4, 64)) * 40).astype(np.float64)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        whole = np.clip(np.rint(x), max(limits.min, -100), 100).astype(dtype)
        whole[3, :3] = limits.min, limits.max, limits.max // 3
        return whole
    return (x > 0) if dtype.kind == "b" else x.astype(dtype)


@pytest.mark.parametrize("dtype", OTHER.split())
@in_turn("name", ["nf4", "int8", "mxfp4", "q4_k", "fp16"])
def test_other_numbers_are_computed_as_float32(dtype, name):
    x = np.tile(numbers(dtype), 4)
    q, wanted = cq.quantize(x, name), cq.quantize(x.astype(np.float32), name)
    assert q.dtype == wanted.dtype == np.float32 and q.dequantize().dtype == np.float32
    assert all(bits_equal(part, wanted.arrays()[key]) for key, part in q.arrays().items())
    out = cq.quantize(np.zeros_like(x, np.float32), name)
    assert cq.quantize(x, name, out=out) is out
    assert all(bits_equal(part, wanted.arrays()[key]) for key, part in out.arrays().items())


def test_a_big_endian_half_stays_a_half():
    assert cq.quantize(np.ones((2, 64), ">f2")).dtype == np.float16


class _Frame:
    """As pandas' objects: read by np.asarray."""

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.arange(64.0)


@pytest.mark.parametrize(
    "x",
    [[0.5] * 64, [[1, 2, 3], [4, 5, 6]], (1.0,), [True, False], range(64), _Frame(), [[], []]],
    ids=lambda x: type(x).__name__,
)
def test_lists_of_numbers_are_taken(x):
    q, wanted = cq.quantize(x), cq.quantize(np.asarray(x).astype(np.float32))
    assert (q.kind, q.dtype, q.shape) == ("numpy", np.float32, wanted.shape)
    assert all(bits_equal(part, wanted.arrays()[key]) for key, part in q.arrays().items())
    assert cq.error(x, q) == cq.error(np.asarray(x), q)


def test_what_is_beyond_float32_is_infinite():
    x = np.ones((2, 64))
    x[1, 5] = -1e39
    assert np.isnan(cq.quantize(x).dequantize()[1]).all()
    assert np.isfinite(cq.quantize(x).dequantize()[0]).all()
    with pytest.raises(ValueError, match="inf"):
        cq.quantize(x, nonfinite="raise")
    clamped = cq.quantize(x, "fp8_e5m2", nonfinite="clamp").dequantize()
    assert clamped[1, 5] == np.finfo(np.float32).min


@pytest.mark.parametrize(
    "x",
    [None, "x", ["a"], {}, {1.0}, object(), b"x", [None], [2**70], ["1", "2"]],
    ids=lambda x: type(x).__name__,
)
def test_only_numbers_are_taken(x):
    with pytest.raises(TypeError, match="x must be"):
        cq.quantize(x)


def test_a_list_of_complex_numbers_is_refused():
    with pytest.raises(TypeError, match="computed as float32; got complex128"):
        cq.quantize([1j])


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="x does not make an array"):
        cq.quantize([[1.0], [1.0, 2.0]])


def test_a_quantized_array_is_not_quantized_again():
    q = cq.quantize(np.ones((2, 64), np.float32))
    for x in (q, cq.prepack(q)):
        with pytest.raises(TypeError, match="dequantize"):
            cq.quantize(x)


def test_torch_tensors_of_other_dtypes():
    torch = pytest.importorskip("torch")
    x = numbers("float64")
    for dtype in ("float64", "int8", "int16", "int32", "int64", "uint8", "bool"):
        t = torch.tensor(x, requires_grad=dtype == "float64").to(getattr(torch, dtype))
        q, wanted = cq.quantize(t), cq.quantize(t.detach().float())
        assert q.kind == "torch" and q.dtype == np.float32
        assert q.dequantize().dtype == torch.float32
        assert all(torch.equal(part, wanted.arrays()[key]) for key, part in q.arrays().items())
    for dtype in (torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match="x must be float32"):
            cq.quantize(torch.zeros(2, 64).to(dtype))


def test_a_masked_array_is_refused():
    with pytest.raises(TypeError, match="masked"):
        cq.quantize(np.ma.masked_array(np.ones(64, np.float32), mask=[True] * 64))


def test_bad_arguments():
    x = np.ones((4, 128), np.float32)
    for options, kind in [
        ({"axis": 2}, ValueError),
        ({"axis": 1.0}, TypeError),
        ({"nonfinite": "ignore"}, ValueError),
        ({"seed": -1, "stochastic": True}, ValueError),
        ({"seed": "a", "stochastic": True}, TypeError),
        ({"zero_point": 3}, ValueError),
        ({"global_scale": 1.0}, ValueError),
        ({"scale": np.nan}, ValueError),
        ({"scale": np.ones((3, 2))}, ValueError),
        ({"scale": "1"}, TypeError),
        ({"stream": object()}, ValueError),
        ({"out": x}, TypeError),
        ({"scale": 1.0, "zero_point": 1}, ValueError),
        ({"double_quant": True, "scale": 1.0}, ValueError),
        ({"format": "q4_0", "stochastic": True}, ValueError),
        ({"format": "q4_0", "scale": 1}, ValueError),
        ({"format": "mxfp4", "scale": 3.0}, ValueError),
        ({"format": "mxfp4", "scale": -2.0}, ValueError),
        ({"format": "nvfp4", "scale": 1.0}, ValueError),
        ({"format": "nvfp4", "global_scale": 0}, ValueError),
        ({"format": "nvfp4", "global_scale": np.inf}, ValueError),
        ({"format": "uint4", "scale": 1.0, "zero_point": 16}, ValueError),
        ({"format": "uint4", "scale": 1.0, "zero_point": 1.5}, ValueError),
        ({"format": "q4_k"}, ValueError),
        ({"block_size": (64, 64), "axis": 0}, None),
    ]:
        if kind is None:
            cq.quantize(x, **options)
            continue
        with pytest.raises(kind):
            cq.quantize(x, **options)
    with pytest.raises(ValueError, match="two axes"):
        cq.quantize(x[0], "fp8_e4m3", block_size=(128, 128))


# ---- out= -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_out_is_overwritten(name, rng):
    first, second = rng.standard_normal((2, 4, 512), dtype=np.float32)
    out = cq.quantize(first, name)
    arrays = out.arrays()
    assert cq.quantize(second, name, out=out) is out
    wanted = cq.quantize(second, name)
    for part, value in wanted.arrays().items():
        assert bits_equal(arrays[part], value)


@pytest.mark.parametrize("name", NAMES)
@in_turn("dtype", DTYPES)
def test_dequantize_rounds_once_to_its_dtype(name, dtype, rng):
    q = cq.quantize(rng.standard_normal((4, 512), dtype=np.float32), name)
    wanted = q.dequantize().astype(DTYPES[dtype])
    assert bits_equal(q.dequantize(dtype=dtype), wanted)
    out = np.zeros((512, 4), DTYPES[dtype]).T
    assert q.dequantize(out=out) is out and (out == wanted).all()


def test_out_is_checked(rng):
    x = rng.standard_normal((4, 128), dtype=np.float32)
    q = cq.quantize(x, "fp16")
    other = cq.quantize(x, "nf4", block_size=32)
    for out in (other, cq.quantize(x[:2], "nf4"), cq.quantize(x.astype(np.float16), "nf4")):
        with pytest.raises(ValueError, match="out has"):
            cq.quantize(x, "nf4", out=out)
    for out, message in [
        (np.zeros((4, 127), np.float32), "shape"),
        (np.zeros((4, 128), np.float16), "dtype"),
        (q.packed, "overlaps"),
        (np.broadcast_to(np.float32(0), (4, 128)), "read-only"),
    ]:
        with pytest.raises(ValueError, match=message):
            q.dequantize(out=out, dtype="float16" if message == "overlaps" else "float32")
    with pytest.raises(TypeError, match="numpy array"):
        q.dequantize(out=[0])
    with pytest.raises(TypeError, match="dtype"):
        q.dequantize(dtype="int8")


@pytest.mark.parametrize("name", NAMES)
def test_arrays_start_on_256_bytes(name, rng):
    q = cq.quantize(rng.standard_normal((3, 512), dtype=np.float32), name)
    for part in (*q.arrays().values(), q.dequantize()):
        assert part.ctypes.data % 256 == 0 and part.flags.c_contiguous


@pytest.mark.parametrize("name", NAMES)
def test_the_input_is_not_changed(name, rng):
    x = rng.standard_normal((4, 512), dtype=np.float32)
    x[0, 0] = np.nan
    kept = x.copy()
    cq.quantize(x, name, nonfinite="clamp")
    cq.quantize(x, name)
    assert bits_equal(x, kept)
