"""quantize and dequantize against an independent scalar oracle, and every nasty input."""

import time

import ml_dtypes
import numpy as np
import pytest
from oracle import DTYPES, bits_equal, quantize_row, single_scale_formats

import cuquant as cq
from cuquant.formats import Packing

OWN = single_scale_formats()
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OWN)
def test_equals_the_oracle(name, dtype, rng):
    """Codes, stored scales, zero points and values, block by block."""
    fmt = cq.get_format(name)
    with np.errstate(over="ignore"):
        x = hard_rows(rng, 301).astype(DTYPES[dtype])
    finite = np.isfinite(x.astype(np.float32))
    x = np.where(finite, x, np.array(1, x.dtype))
    world = np.float32(0.25)
    options = {"global_scale": float(world)} if name == "nvfp4" else {}
    q = cq.quantize(x, fmt, **options)
    values = q.dequantize(dtype="float32")
    parts = q.arrays()
    for i, row in enumerate(x.astype(np.float32)):
        codes, scales, points, wanted = quantize_row(row, fmt, world if options else np.float32(1))
        assert q.codes()[i].tolist() == codes
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
@pytest.mark.parametrize("axis", [0, 1, 2, -2])
def test_axis_is_a_moved_axis(name, axis, rng):
    x = rng.standard_normal((256, 256, 256) if name in BLOCKED else (40, 33, 70), dtype=np.float32)
    x = x[:3] if axis != 0 and name in BLOCKED else x
    x = x[:, :2] if axis not in (1, -2) and name in BLOCKED else x
    x = x[:, :, :2] if axis != 2 and name in BLOCKED else x
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
        copy = np.array(view, order="C")
        for part, value in cq.quantize(copy, name).arrays().items():
            assert bits_equal(cq.quantize(view, name).arrays()[part], value), kind


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0,), (0, 256), (3, 0), (2, 0, 256)])
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


@pytest.mark.parametrize("name", [n for n in NAMES if n not in BLOCKED])
@pytest.mark.parametrize("block", ["own", "row", "tensor"])
def test_zeros_decode_to_positive_zero(name, block):
    """All codes are that of 0, all scales 0 (E8M0: byte 0), and no NaN byte anywhere."""
    fmt = cq.get_format(name)
    if fmt.scale is None:
        q = cq.quantize(np.zeros((3, 100), np.float32), name)
    else:
        q = cq.quantize(
            np.zeros((3, 100), np.float32), name, block_size=None if block == "own" else block
        )
        assert (q.arrays()["scale"] == 0).all() and not np.signbit(q.scale).any()
    assert (q.codes() == q.format.zero_code).all()
    values = q.dequantize()
    assert (values == 0).all() and not np.signbit(values).any()


@pytest.mark.parametrize("name", BLOCKED)
def test_zero_blocks_of_ggml_decode_to_zero(name):
    assert (cq.quantize(np.zeros((2, 512), np.float32), name).dequantize() == 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_nonfinite_makes_its_block_nan_and_no_other(name, dtype, bad, rng):
    x = rng.standard_normal((4, 1024)).astype(DTYPES[dtype])
    clean = cq.quantize(x, name, **({"global_scale": 0.01} if name == "nvfp4" else {}))
    x[1, 700] = bad
    q = cq.quantize(x, name, **({"global_scale": 0.01} if name == "nvfp4" else {}))
    values, before = q.dequantize(), clean.dequantize()
    block = q.format.block_size
    elements = q.format.packing.elements if name in BLOCKED else block
    elements = 1024 if block == "row" else 1 if block is None else elements
    start = 700 // elements * elements
    inside = np.zeros(x.shape, bool)
    inside[1, start : start + elements] = True
    if q.format.scale is None:
        assert bits_equal(values[inside], x[inside])
    else:
        assert np.isnan(values[inside]).all()
        assert (q.codes()[inside] == q.format.zero_code).all()
    assert bits_equal(values[~inside], before[~inside])


@pytest.mark.parametrize("name", ["nf4", "int8", "fp8_e4m3", "k3", "uint4", "int1"])
def test_a_nan_scale_is_the_canonical_one(name):
    x = np.array([[-np.nan, 1.0] * 64], np.float32)
    x.view(np.uint32)[0, 2] = 0xFFC12345  # a NaN with a sign and a payload
    scale = cq.quantize(x, name).scale
    canonical = {2: 0x7E00, 4: 0x7FC00000}[scale.dtype.itemsize]
    assert scale.view(f"u{scale.dtype.itemsize}").reshape(-1)[0] == canonical


@pytest.mark.parametrize("name", NAMES)
def test_raise_names_the_flat_index_and_writes_nothing(name, rng):
    x = rng.standard_normal((4, 512), dtype=np.float32)
    out = cq.quantize(x, name)
    kept = {part: value.copy() for part, value in out.arrays().items()}
    x[2, 77] = np.nan
    with pytest.raises(ValueError, match="flat index 1101"):
        cq.quantize(x, name, nonfinite="raise", out=out)
    for part, value in out.arrays().items():
        assert bits_equal(value, kept[part])


def test_raise_finds_the_index_of_a_view(rng):
    x = rng.standard_normal((512, 4), dtype=np.float32).T
    x[2, 77] = np.inf
    with pytest.raises(ValueError, match="flat index 1101"):
        cq.quantize(x, "nf4", axis=0, nonfinite="raise")


@pytest.mark.parametrize("name", NAMES)
def test_clamp_is_quantizing_the_repaired_array(name, rng):
    x = rng.standard_normal((2, 512)).astype(np.float16)
    x[0, 3], x[1, 4], x[1, 200] = np.nan, np.inf, -np.inf
    repaired = np.nan_to_num(x, nan=0.0)  # infinities to +-65504
    q = cq.quantize(x, name, nonfinite="clamp")
    wanted = cq.quantize(repaired, name)
    assert bits_equal(q.codes(), wanted.codes())
    assert np.isfinite(q.dequantize(dtype="float32")).all()


@pytest.mark.parametrize(
    "name", [n for n in OWN if cq.get_format(n).scale.dtype in ("float16", "e4m3")]
)
def test_a_scale_that_overflows_saturates(name):
    x = np.full((1, 128), 3e38, np.float32)
    x[0, 1::2] = -3e38
    options = {"global_scale": 1.0} if name == "nvfp4" else {}
    q = cq.quantize(x, name, **options)
    assert np.abs(q.scale).max() == (448 if options else 65504)
    assert np.isfinite(q.dequantize()).all()
    with pytest.raises(ValueError, match="overflow"):
        cq.quantize(x, name, nonfinite="raise", **options)


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "q4_k", "iq4_nl"])
def test_ggml_scales_overflow_as_ggml_does(name):
    x = np.full((1, 256), 3e38, np.float32)
    assert np.isinf(cq.quantize(x, name).scale).all()
    with pytest.raises(ValueError, match="overflow"):
        cq.quantize(x, name, nonfinite="raise")
    assert np.isfinite(cq.quantize(x, name, nonfinite="clamp").scale).all()


def test_fp16_saturates_and_bf16_rounds():
    x = np.array([1e6, -1e6, 65519.0, 1e-8, np.inf], np.float32)
    q = cq.quantize(x, "fp16")
    assert q.dequantize().tolist() == [65504, -65504, 65504, np.float32(np.float16(1e-8)), np.inf]
    with pytest.raises(ValueError, match="overflow"):
        cq.quantize(x[:4], "fp16", nonfinite="raise")
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38], np.float32)
    largest = (2 - 2.0**-7) * 2.0**127  # 3.39e38
    assert cq.quantize(x, "bf16").dequantize().tolist() == [1.0, 1 + 4 * 2**-8, largest]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [1e-45, 1e-40, 1.2e-38, 2.0**-127, 2.0**-133])
def test_subnormal_blocks_are_finite(name, value):
    x = np.zeros((1, 256), np.float32)
    x[0, ::3], x[0, 1::3] = value, -value
    values = cq.quantize(x, name).dequantize()
    assert np.isfinite(values).all()
    assert np.abs(values).max() <= 2 * value


def test_e8m0_reaches_its_lowest_scale():
    q = cq.quantize(np.full((1, 32), 2.0**-127, np.float32), "mxfp4")
    assert q.arrays()["scale"].tolist() == [[0]] and q.scale[0, 0] == 2.0**-127
    assert (q.dequantize() == 2.0**-127).all()


@pytest.mark.parametrize(
    "name",
    ["fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "mxfp8", "mxfp4", "nvfp4", "fp6_e2m3", "fp16", "bf16"],
)
def test_negative_zero_is_kept_where_the_format_has_it(name):
    x = np.array([[1.0, -0.0, 0.0, -1.0] * 8], np.float32)
    assert np.signbit(cq.quantize(x, name).dequantize()[0, :4]).tolist() == [
        False,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("name", ["nf4", "int4", "k3", "bof4s", "int8", "uint4"])
def test_negative_zero_becomes_zero_elsewhere(name):
    x = np.array([[1.0, -0.0, 0.0, -2.0] * 32], np.float32)  # a negative scale under signed max
    values = cq.quantize(x, name).dequantize()
    assert not np.signbit(values[values == 0]).any()


WRONG = {
    "float64": np.float64,
    "int32": np.int32,
    "uint8": np.uint8,
    "bool": np.bool_,
    "complex64": np.complex64,
    "big-endian": ">f4",
    "big-endian half": ">f2",
    "float8": ml_dtypes.float8_e4m3fn,
    "int4": ml_dtypes.int4,
    "object": object,
    "str": "U4",
}


@pytest.mark.parametrize("dtype", WRONG.values(), ids=list(WRONG))
def test_other_dtypes_are_refused_by_name(dtype):
    with pytest.raises(TypeError, match="float32, float16 or bfloat16"):
        cq.quantize(np.zeros((2, 64), dtype))


@pytest.mark.parametrize("x", [[1.0, 2.0], 1.0, None, "x", (1.0,)], ids=str)
def test_only_arrays_are_taken(x):
    with pytest.raises(TypeError, match="array"):
        cq.quantize(x)


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


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("block", [8, 24, 40, 4096, "row", "tensor"])
def test_block_sizes(name, block, rng):
    """Each block stands alone: quantizing it by itself gives the same codes."""
    x = rng.standard_normal((3, 100), dtype=np.float32)
    options = {"global_scale": 0.01} if name == "nvfp4" else {}
    q = cq.quantize(x, name, block_size=block, **options)
    width = {"row": 100, "tensor": 100}.get(block, block)
    if block == "tensor":
        assert q.scale.shape == ()
        flat = cq.quantize(x.reshape(1, 300), name, block_size="row", **options)
        assert bits_equal(q.codes().reshape(1, 300), flat.codes())
        return
    for start in range(0, 100, width):
        part = cq.quantize(x[:, start : start + width], name, block_size=block, **options)
        assert bits_equal(q.codes()[:, start : start + width], part.codes())
        assert (q.scale[:, start // width] == part.scale[:, 0]).all()


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("tile", [(1, 32), (16, 16), (8, 40), (128, 128), (3, 8)])
def test_two_dimensional_blocks(name, tile, rng):
    x = rng.standard_normal((2, 37, 100), dtype=np.float32)
    options = {"global_scale": 0.01} if name == "nvfp4" else {}
    q = cq.quantize(x, name, block_size=tile, **options)
    tall, wide = tile
    assert q.scale.shape == (2, -(-37 // tall), -(-100 // wide))
    for b in range(2):
        for i in range(0, 37, tall):
            for j in range(0, 100, wide):
                part = x[b, i : i + tall, j : j + wide]
                alone = cq.quantize(
                    np.ascontiguousarray(part), name, block_size="tensor", **options
                )
                assert q.scale[b, i // tall, j // wide] == alone.scale
                assert bits_equal(q.codes()[b, i : i + tall, j : j + wide], alone.codes())


@pytest.mark.parametrize("name", ["nf4", "int4", "int8", "int1", "uint4", "k3"])
@pytest.mark.parametrize("block", ["row", "tensor", (70, 70000)])
def test_blocks_larger_than_a_piece(name, block, rng):
    """Statistics are combined over pieces, in index order; ties of |x| keep the first."""
    x = np.round(rng.standard_normal((3, 150_000)) * 4).astype(np.float32)
    q = cq.quantize(x, name, block_size=block)
    parts = {
        "row": [x[i] for i in range(3)],
        "tensor": [x],
        (70, 70000): [x[:, j : j + 70000] for j in range(0, 150_000, 70000)],
    }[block]
    for part, scale in zip(parts, q.scale.reshape(-1), strict=True):
        flat = part.reshape(-1)
        fmt = q.format
        first = flat[np.argmax(np.abs(flat))]
        exact = {
            "absmax": np.abs(first) / np.float32(fmt.scale.peak),
            "signed_max": first / np.float32(fmt.scale.peak),
            "range": (flat.max() - flat.min()) / np.float32(fmt.scale.peak),
            "mean_abs": np.float64(np.abs(flat).sum(dtype=np.float64))
            / flat.size,  # integers: exact
        }[fmt.scale.rule]
        assert scale == exact.astype(scale.dtype)


# ---- static quantization --------------------------------------------------------------------


def test_static_scale_is_used_as_it_is(rng):
    x = rng.standard_normal((4, 256), dtype=np.float32)
    q = cq.quantize(x, "int8", scale=0.02, block_size="tensor")
    assert q.scale == np.float32(0.02)
    inverse = np.float32(1) / np.float32(0.02)
    assert (q.packed == np.clip(np.rint(x * inverse), -127, 127)).all()


def test_static_zero_point():
    x = np.array([[-1.0, 0.0, 1.0, 300.0, -300.0, np.nan, np.inf, -np.inf]], np.float32)
    q = cq.quantize(x, "uint8", scale=1.0, zero_point=10, block_size="tensor")
    assert q.codes().tolist() == [[9, 10, 11, 255, 0, 10, 255, 0]]
    assert q.dequantize()[0, :3].tolist() == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize("name", [n for n in OWN if n != "nvfp4"])
def test_static_with_the_dynamic_scales_gives_the_dynamic_codes(name, rng):
    """Where codes use the stored scale, giving it back changes nothing."""
    x = rng.standard_normal((4, 300), dtype=np.float32)
    q = cq.quantize(x, name)
    again = cq.quantize(x, name, scale=q.scale, zero_point=q.zero_point)
    for part, value in q.arrays().items():
        assert bits_equal(again.arrays()[part], value)


def test_static_nvfp4(rng):
    x = rng.standard_normal((4, 256), dtype=np.float32)
    q = cq.quantize(x, "nvfp4", global_scale=0.5)
    again = cq.quantize(x, "nvfp4", scale=q.scale, global_scale=0.5)
    for part, value in q.arrays().items():
        assert bits_equal(again.arrays()[part], value)


def test_static_codebooks_still_see_nan():
    x = np.ones((1, 128), np.float32)
    x[0, 5] = np.nan
    values = cq.quantize(x, "nf4", scale=1.0).dequantize()
    assert np.isnan(values[0, :64]).all() and (values[0, 64:] == 1).all()


# ---- double quantization and nvfp4 ----------------------------------------------------------


@pytest.mark.parametrize(
    "name", [n for n in OWN if cq.get_format(n).scale.dtype == "float32"] + ["k4"]
)
def test_double_quantization(name, rng):
    x = rng.standard_normal((16, 4096), dtype=np.float32)
    fmt = cq.get_format(name, scale_dtype="float32" if name == "k4" else None)
    plain = cq.quantize(x, fmt)
    q = cq.quantize(x, cq.get_format(fmt, double_quant=True))
    if fmt.scale.encode_with == "exact":  # bitsandbytes': codes know nothing of the nesting
        assert bits_equal(q.codes(), plain.codes())
    else:
        static = cq.quantize(x, fmt, scale=q.scale)
        assert bits_equal(q.codes(), static.codes())
        assert cq.error(x, q).sqnr_db > cq.error(x, plain).sqnr_db - 0.2
    scale = plain.scale.reshape(-1)
    parts = q.arrays()
    offset = np.float32(np.cumsum(scale, dtype=np.float64)[-1] / len(scale))
    assert parts["nested_offset"] == offset
    nested = cq.quantize(scale - offset, "dynamic8", block_size=256)
    assert bits_equal(parts["scale"].reshape(-1), nested.packed)
    assert bits_equal(parts["nested_scale"], nested.scale)
    assert (q.scale.reshape(-1) == nested.dequantize() + offset).all()
    assert q.nbytes < plain.nbytes


def test_double_quantization_keeps_nan_in_its_nested_block(rng):
    x = rng.standard_normal((2, 64 * 256), dtype=np.float32)
    x[1, 0] = np.nan
    values = cq.quantize(x, "nf4", double_quant=True).dequantize()
    assert np.isfinite(values[0]).all() and np.isnan(values[1, :64]).all()


def test_nvfp4_global_scale(rng):
    x = rng.standard_normal((4, 256), dtype=np.float32)
    q = cq.quantize(x, "nvfp4")
    world = np.abs(x).max() / np.float32(6 * 448)
    assert q.arrays()["global_scale"] == world
    stored = q.arrays()["scale"].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert bits_equal(q.scale, stored * world)
    assert stored.max() == 448
    zero = cq.quantize(np.zeros((1, 16), np.float32), "nvfp4")
    assert zero.arrays()["global_scale"] == 1 and zero.arrays()["scale"].tolist() == [[0]]


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
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


# ---- what once went wrong -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OWN)
def test_the_largest_value_of_a_dtype_stays_finite(name, dtype):
    """127 * (FLT_MAX / 127) overflows, and so does 15 * half(65504 / 15) in float16."""
    top = float(ml_dtypes.finfo(DTYPES[dtype]).max)
    x = np.array([[top, 1.0, -top, np.inf] * 8], DTYPES[dtype])
    values = cq.quantize(x, name, nonfinite="clamp").dequantize()
    assert values.dtype == x.dtype and np.isfinite(values).all()
    assert np.isfinite(cq.quantize(x[:, :3], name).dequantize()).all()


@pytest.mark.parametrize("name", ["q8_0", "q8_1", "q5_1", "q4_0"])
def test_the_largest_float16_stays_finite_in_ggml_types(name):
    x = np.array([[65504.0, 1.0, -65504.0, 3.0] * 8], np.float16)
    assert np.isfinite(cq.quantize(x, name).dequantize()).all()


@pytest.mark.parametrize("name", BLOCKED)
def test_scales_that_overflow_are_silent(name):
    x = np.full((1, 256), 1e38, np.float32)
    x[0, ::2] = 3e38
    cq.quantize(x, name).dequantize()  # any warning is an error here


def test_a_tiny_nvfp4_tensor_keeps_a_usable_global_scale():
    for value in (1e-45, 1e-42, 5e-42, 1e-40):
        x = np.full((1, 64), value, np.float32)
        q = cq.quantize(x, "nvfp4", nonfinite="raise")
        world = q.arrays()["global_scale"]
        assert world > 0 and np.abs(q.dequantize()).max() <= 2 * value
        cq.quantize(x, "nvfp4", global_scale=world)


def test_many_small_matrices_in_two_dimensional_blocks_are_not_slow():
    x = np.ones((5000, 8, 8), np.float32)
    start = time.process_time()
    cq.quantize(x, "int8", block_size=(8, 8))
    assert x.nbytes / 1e6 / (time.process_time() - start) >= 50
