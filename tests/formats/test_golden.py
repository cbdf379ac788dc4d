"""Byte equality with the format's owners: bitsandbytes' CUDA kernels, gguf, ml_dtypes, OCP MX."""

from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from oracle import DTYPES, bits_equal

import cuquant as cq

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "bitsandbytes_1.npz")
BLOCKS = {
    "nf4": (32, 64, 128, 256, 4096),
    "fp4": (32, 64, 128, 256, 4096),
    "dynamic8": (64, 256, 4096),
}
CASES = [(name, block) for name, blocks in BLOCKS.items() for block in blocks]


def golden(dtype: str, key: str) -> np.ndarray:
    values = GOLDEN[f"{dtype}/{key}"]
    return values.view(ml_dtypes.bfloat16) if values.dtype == np.uint16 else values


def unexplained(x: np.ndarray, q: cq.QuantArray, codes: np.ndarray, block: int) -> tuple[int, int]:
    """(codes that differ, those of them that DESIGN.md section 6 does not allow).

    Allowed: a zero block (ours encode 0.0), and a value within 2 ulp of a border, which
    bitsandbytes' approximate reciprocal may put on the other side.
    """
    ours = q.codes()
    differs = ours != codes
    scale = np.repeat(q.scale.astype(np.float32), block)[: len(x)]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        value = (x.astype(np.float32) / scale).astype(np.float32)
    borders = q.format.codec.borders
    near = np.clip(np.searchsorted(borders, value), 1, len(borders) - 1)
    gap = np.minimum(np.abs(value - borders[near - 1]), np.abs(value - borders[near]))
    close = gap <= 2 * np.spacing(np.abs(value))
    zero = scale == 0
    return int(differs.sum()), int((differs & ~close & ~zero).sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "block"), CASES)
def test_bitsandbytes_codes(name, block, dtype):
    x = golden(dtype, "x")
    q = cq.quantize(x, name, block_size=block)
    assert bits_equal(q.scale, golden(dtype, f"{name}/{block}/absmax"))
    packed = golden(dtype, f"{name}/{block}/codes")
    codes = packed if name == "dynamic8" else q.format.packing.unpack(packed[None], len(x))[0]
    differs, wrong = unexplained(x, q, codes, block)
    assert wrong == 0
    # Zero blocks make up to four blocks of the golden input; borders at most a few values.
    zeros = int((np.repeat(q.scale, block)[: len(x)] == 0).sum())
    assert differs <= zeros + 8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "block"), [("nf4", 64), ("nf4", 256), ("fp4", 64), ("fp4", 256), ("dynamic8", 256)]
)
def test_bitsandbytes_values(name, block, dtype):
    """Their codes, decoded by us, are their values, bit for bit but for the sign of zeros."""
    x = golden(dtype, "x")
    q = cq.quantize(x, name, block_size=block)
    packed = golden(dtype, f"{name}/{block}/codes").reshape(q.packed.shape)
    q.components["packed"][...] = packed
    wanted = golden(dtype, f"{name}/{block}/dequantized")
    values = q.dequantize()
    assert values.dtype == wanted.dtype
    same = values.view(f"u{wanted.itemsize}") == wanted.view(f"u{wanted.itemsize}")
    zero = (values == 0) & (wanted == 0)
    assert (same | zero).all()
    scale = np.repeat(q.scale, block)[: len(x)]
    tiny = scale < np.finfo(np.float32).tiny / 0.005  # there a product may vanish to -0.0
    assert (same | tiny).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_bitsandbytes_double_quantization(name, dtype):
    x = golden(dtype, "x")
    parts = cq.quantize(x, name, double_quant=True).arrays()
    offset = golden(dtype, f"{name}/double/offset")
    assert abs(parts["nested_offset"] - offset) <= 2 * np.spacing(offset)
    wanted = golden(dtype, f"{name}/double/nested_absmax")
    assert (np.abs(parts["nested_scale"] - wanted) <= 4 * np.spacing(wanted)).all()
    codes = golden(dtype, f"{name}/double/absmax_q").reshape(-1)
    differs = parts["scale"] != codes
    # The offset moves every scale by up to 2 ulp, so a code may step by one at a border.
    assert np.abs(parts["scale"][differs].astype(int) - codes[differs]).max(initial=0) <= 1
    assert differs.sum() <= 2


def test_bitsandbytes_int8_rows():
    x = GOLDEN["int8_vectorwise/0.0/x"]
    q = cq.quantize(x, "int8")
    scale = GOLDEN["int8_vectorwise/0.0/row_absmax"] / np.float32(127)
    assert bits_equal(q.scale[:, 0], scale)
    # Theirs is rint(x * (127 / absmax)), ours rint(x * (1 / scale)): they part only at halves.
    differs = q.packed != GOLDEN["int8_vectorwise/0.0/codes"]
    exact = x.astype(np.float64) / np.maximum(scale, 1e-30)[:, None]
    half = np.abs(np.abs(exact - np.trunc(exact)) - 0.5)
    assert (half[differs] < 1e-4).all() and differs.sum() <= 4


@pytest.mark.parametrize("rows", [1, 4, 17])
def test_bitsandbytes_matmul(rows):
    a, packed, absmax, y = (
        GOLDEN[f"matmul_4bit/{rows}/{k}"] for k in ("a", "codes", "absmax", "y")
    )
    out, inner = y.shape[1], a.shape[1]
    q = cq.quantize(np.ones((out, inner), np.float16), "nf4")
    q.components["packed"][...] = packed.reshape(q.packed.shape)
    q.components["scale"][...] = absmax.reshape(q.scale.shape)
    exact = a.astype(np.float64) @ q.dequantize(dtype="float32").astype(np.float64).T
    mine = cq.linear(a, q)
    # Ours rounds once. Theirs rounds weights to float16 too: 2^-11 of each product.
    bound = (
        np.abs(a).astype(np.float64) @ np.abs(q.dequantize(dtype="float32").astype(np.float64)).T
    )
    assert (np.abs(mine - exact) <= 2**-11 * np.abs(exact) + 512 * 2**-24 * bound).all()
    assert (np.abs(y.astype(np.float64) - exact) <= 2**-10 * bound).all()


# ---- gguf -----------------------------------------------------------------------------------

GGUF_TYPES = {"q4_0": 32, "q4_1": 32, "q5_0": 32, "q5_1": 32, "q8_0": 32}


def gguf_rows() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    normal = rng.standard_normal((64, 256)).astype(np.float32)
    bf16 = normal.astype(ml_dtypes.bfloat16).astype(np.float32)
    zeros = normal.copy()
    zeros[::3] = 0
    signs = rng.choice([-3.0, 3.0, 1.0, -1.0, 0.0], (64, 256)).astype(np.float32)
    return {
        "normal": normal,
        "bf16": bf16,
        "grid": np.round(normal * 4) / 4,
        "halves": (rng.integers(-16, 17, (64, 256)) / 2).astype(np.float32),
        "tiny": normal * np.float32(1e-30),
        "small": normal * np.float32(1e-7),
        "huge": normal * np.float32(1e5),
        "zeros": zeros,
        "sparse": np.where(rng.random((64, 256)) < 0.9, 0, normal).astype(np.float32),
        "both signs": signs,
        "outlier": np.where(np.arange(256) == 17, 1e4, normal).astype(np.float32),
    }


GGUF_ROWS = gguf_rows()


@pytest.mark.parametrize("rows", GGUF_ROWS)
@pytest.mark.parametrize("name", GGUF_TYPES)
def test_gguf_bytes(name, rows):
    x = GGUF_ROWS[rows]
    with np.errstate(all="ignore"):
        wanted = gguf.quants.quantize(x, getattr(gguf.GGMLQuantizationType, name.upper()))
    blocks = cq.quantize(x, name).to_blocks()
    assert bits_equal(blocks.reshape(wanted.shape), wanted)


@pytest.mark.parametrize("rows", [r for r in GGUF_ROWS if r != "tiny"])
def test_mxfp4_differs_from_gguf_only_by_ties_and_negative_zero(rows):
    """gguf takes the lower code of a tie and never -0; ours are OCP's: even, and sign kept."""
    x = GGUF_ROWS[rows]
    with np.errstate(all="ignore"):
        theirs = gguf.quants.quantize(x, gguf.GGMLQuantizationType.MXFP4)
    theirs = cq.QuantArray.from_blocks(theirs, "mxfp4", x.shape)
    ours = cq.quantize(x, "mxfp4")
    assert bits_equal(ours.arrays()["scale"], theirs.arrays()["scale"])
    a, b = ours.codes(), theirs.codes()
    differs = a != b
    minus_zero = differs & (a == 8) & (b == 0)
    value = x / ours.scale.repeat(32, -1)
    levels = ours.format.codec.values
    tie = differs & (np.abs(value - levels[a]) == np.abs(value - levels[b])) & (a % 2 == 0)
    assert (differs == (minus_zero | tie)).all()
    assert minus_zero.sum() == (a == 8).sum()  # every -0 of ours, counted


DECODABLE = [
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q8_0",
    "q2_k",
    "q3_k",
    "q4_k",
    "q5_k",
    "q6_k",
    "iq4_nl",
    "iq4_xs",
]


@pytest.mark.parametrize("name", DECODABLE)
def test_gguf_decodes_random_bytes_alike(name):
    layout = cq.get_format(name).packing
    blocks = np.random.default_rng(3).integers(0, 256, (16, 8, layout.nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(
            blocks.reshape(16, -1), getattr(gguf.GGMLQuantizationType, name.upper())
        )
    q = cq.QuantArray.from_blocks(blocks, name, (16, 8 * layout.elements))
    values = q.dequantize()
    nan = np.isnan(wanted)
    assert (np.isnan(values) == nan).all()
    assert bits_equal(values[~nan], wanted[~nan].astype(np.float32))


@pytest.mark.parametrize("name", DECODABLE)
def test_gguf_decodes_what_we_quantize(name):
    x = np.random.default_rng(5).standard_normal((8, 512)).astype(np.float32)
    q = cq.quantize(x, name)
    wanted = gguf.quants.dequantize(
        q.to_blocks().reshape(8, -1), getattr(gguf.GGMLQuantizationType, name.upper())
    )
    assert bits_equal(q.dequantize(), wanted.astype(np.float32))


# ---- ml_dtypes ------------------------------------------------------------------------------

CASTS = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
}


@pytest.mark.parametrize("name", CASTS)
def test_scale_one_is_a_saturating_cast(name, rng):
    dtype = CASTS[name]
    top = float(ml_dtypes.finfo(dtype).max)
    x = np.concatenate(
        [
            rng.standard_normal(5000) * top / 3,
            np.arange(1 << (8 * 1), dtype=np.uint8)[: 1 << cq.get_format(name).bits].view(dtype),
            [0.0, -0.0, top, -top, 2 * top, -1e30, 1e-30],
        ]
    ).astype(np.float32)
    x = x[np.isfinite(x)]
    q = cq.quantize(x, name, scale=1.0, block_size="tensor")
    wanted = np.clip(x, -top, top).astype(dtype)
    assert (q.codes() == wanted.view(np.uint8)).all()
    assert bits_equal(q.dequantize(), wanted.astype(np.float32))


def test_16_bit_floats_are_casts(rng):
    x = (rng.standard_normal(5000) * np.exp2(rng.uniform(-30, 13, 5000))).astype(np.float32)
    assert bits_equal(cq.quantize(x, "fp16").packed, x.astype(np.float16))
    assert bits_equal(cq.quantize(x, "bf16").packed, x.astype(ml_dtypes.bfloat16))


MX = {
    "mxfp8": (8, 448),
    "mxfp8_e5m2": (15, 57344),
    "mxfp6": (2, 7.5),
    "mxfp6_e3m2": (4, 28),
    "mxfp4": (2, 6),
}


@pytest.mark.parametrize("name", MX)
def test_mx_scales_come_from_exponent_bits(name):
    """2^(floor(log2 amax) - emax) at powers of two and one step beside them, where log2f slips."""
    emax, _ = MX[name]
    exponents = np.arange(-110, 120)
    powers = np.exp2(exponents.astype(np.float64)).astype(np.float32)
    for tops, shift in [
        (powers, 0),
        (np.nextafter(powers, np.float32(0)), -1),
        (np.nextafter(powers, np.float32(np.inf)), 0),
    ]:
        x = np.zeros((len(tops), 32), np.float32)
        x[:, 5] = -tops
        byte = cq.quantize(x, name).arrays()["scale"][:, 0]
        assert (byte == np.clip(exponents + shift - emax + 127, 0, 254)).all()
