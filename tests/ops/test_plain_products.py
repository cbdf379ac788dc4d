"""Products of plain arrays by kernels, against exact arithmetic.

What takes `to` runs under the emulator and, with `-m gpu`, on a GPU.
"""

import ctypes
import struct
from typing import Any
from unittest import mock

import fake_gpu
import ml_dtypes
import numpy as np
import pytest
from emulator import Emulator
from emulator.cublas import Library
from oracle import bits_equal

import cuquant as cq
import cuquant.functional as F
from cuquant import interop
from cuquant.functional.integers import INT4
from cuquant.gpu import arrays as gpu
from cuquant.gpu.cublas import Cublas
from cuquant.gpu.view import View
from cuquant.ops import plain_products
from cuquant.ops.matmul.byte_rows import (
    BYTES,
    NIBBLES,
    ByteRows,
    bits_of,
    expanded,
    program_of,
    signs_of,
)
from cuquant.ops.matmul.coded import Coded, Groups

F32 = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(params=fake_gpu.KINDS)
def to(request, monkeypatch):
    """What moves NumPy arrays to a GPU; to that of the emulator as one of sm_80."""
    *fake, library = request.param.split()
    if not fake:
        return fake_gpu.real(library)
    return fake_gpu.install(library, monkeypatch, Emulator(arch=80))


def host(x: Any) -> np.ndarray:
    return interop.to_host(x)


def integers(low: int, high: int, shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, *shape])
    return rng.integers(low, high, shape, dtype, endpoint=True)


def any_integers(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    limits = np.iinfo(dtype)
    return integers(limits.min, limits.max, shape, dtype, seed)


def permuted(x: Any, *axes: int) -> Any:
    return x.permute(*axes) if interop.kind(x) == "torch" else x.transpose(*axes)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """int64 modulo 2^32."""
    return np.matmul(a.astype(np.int64), b.astype(np.int64)).astype(np.int32)


# ---- rows of bytes -------------------------------------------------------------------------------

# Of an array [rows, K]: what lies in memory, and the view of it. Each way of reading, and its ends.
LIES = {
    "rows": lambda r, k: (np.s_[r, k], lambda x: x),
    "rows of a multiple of 16": lambda r, k: (np.s_[r, -(-k // 16) * 16], lambda x: x[:, :k]),
    "columns": lambda r, k: (np.s_[k, r], lambda x: x.T),
    "columns of a multiple of 16": lambda r, k: (np.s_[k, -(-r // 16) * 16], lambda x: x[:, :r].T),
    "columns of a multiple of 4": lambda r, k: (
        np.s_[k, -(-r // 4) * 4 + 4],
        lambda x: x[:, 4 : r + 4].T,
    ),
    "columns from 5 on": lambda r, k: (np.s_[k, r + 5], lambda x: x[:, 5:].T),
    "every other": lambda r, k: (np.s_[2 * r, 2 * k], lambda x: x[::2, 1::2]),
    "backwards": lambda r, k: (np.s_[r, k], lambda x: x[::-1, ::-1]),
}
SIZES = [(1, 1), (3, 16), (128, 128), (129, 131), (200, 40), (16, 300), (5, 5)]


@fake_gpu.needs_compiler
@pytest.mark.parametrize("rows, depth", SIZES)
@pytest.mark.parametrize("lie", LIES)
def test_rows_of_bytes(lie, rows, depth):
    emulator = Emulator()
    shape, view = LIES[lie](rows, depth)
    x = view(emulator.array(any_integers(shape, np.int8)))
    assert x.shape == (rows, depth)
    found = ByteRows.along(emulator.view(x), -1, BYTES)
    assert (rows, found.width % 16, found.rows) == (rows, 0, rows)
    if found.is_ready:
        assert depth % 16 == 0 == found.stride % 16 and lie.startswith("rows")
        return
    out = emulator.empty((rows, found.stride), np.dtype(np.int8))
    found.make(emulator, out.ctypes.data)
    assert (out[:, :depth] == x).all() and (out[:, depth:] == 0).all()


@fake_gpu.needs_compiler
@pytest.mark.parametrize("dtype", [F32, np.float16, BF16, *"bBhHiIlL"], ids=str)
@pytest.mark.parametrize("lie", ["rows", "columns", "every other"])
def test_signs(lie, dtype):
    """0, -0.0 and NaN are +1; subnormals have signs."""
    emulator = Emulator()
    shape, view = LIES[lie](20, 50)
    x = with_specials(shape, dtype)
    with np.errstate(invalid="ignore"):
        wanted = np.where(view(x) < 0, -1, 1)
    x = view(emulator.array(x))
    made = emulator.empty((20, 64), np.dtype(np.int8))
    ByteRows.along(emulator.view(x), -1, signs_of(x.dtype)).make(emulator, made.ctypes.data)
    assert (made[:, :50] == wanted).all() and (made[:, 50:] == 0).all()


def with_specials(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Numbers of any sign; of floats the first are zeros, NaN, infinities and subnormals."""
    x = np.random.default_rng(1).integers(-2, 2, shape).astype(dtype)
    if x.dtype.kind not in "iu":
        flat = x.reshape(-1)
        tiny = ml_dtypes.finfo(dtype).smallest_subnormal
        specials = np.array([-0.0, np.nan, -np.inf, np.inf, tiny, -tiny, -np.nan], dtype)
        flat[: len(specials)] = specials[: flat.size]
    return x


@fake_gpu.needs_compiler
@pytest.mark.parametrize("dtype", [F32, np.float16, BF16, *"bBhHiIlL"], ids=str)
@pytest.mark.parametrize("lie", LIES)
def test_rows_of_bits(lie, dtype):
    """1 is +1, the first column in the lowest bit; behind K there are zeros."""
    emulator = Emulator()
    for rows, depth in ((1, 1), (3, 8), (130, 20), (5, 263), (2, 300), (9, 640)):
        shape, view = LIES[lie](rows, depth)
        x = with_specials(shape, dtype)
        with np.errstate(invalid="ignore"):
            wanted = np.packbits(~(view(x) < 0), axis=1, bitorder="little")
        x = view(emulator.array(x))
        found = ByteRows.along(emulator.view(x), -1, bits_of(x.dtype))
        assert not found.is_ready and found.stride == -(-depth // 128) * 16
        out = emulator.empty((rows, found.stride), np.dtype(np.uint8))
        out[:] = 0xAA
        found.make(emulator, out.ctypes.data)
        assert (out[:, : wanted.shape[1]] == wanted).all() and (
            out[:, wanted.shape[1] :] == 0
        ).all()


@fake_gpu.needs_compiler
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("depth", [1, 2, 33, 300])
def test_nibbles(depth, axis):
    emulator = Emulator()
    x = integers(-8, 7, (9, depth), np.int8)
    packed = emulator.array(F.pack_int4(x if axis else x.T, axis))
    found = ByteRows.along(emulator.view(packed), axis, NIBBLES, depth)
    out = emulator.empty((9, found.stride), np.dtype(np.int8))
    found.make(emulator, out.ctypes.data)
    assert (out[:, :depth] == x).all() and (out[:, depth:] == 0).all()
    assert INT4.words(depth) == packed.shape[axis]


@fake_gpu.needs_compiler
def test_rows_of_many_axes():
    """Axes that cannot be counted through together, more than the kernel has, and repeated ones."""
    emulator = Emulator()
    base = emulator.array(any_integers((2,) * 8 + (40,), np.int8))
    x = base[:, ::-1].transpose(7, 0, 5, 2, 1, 4, 3, 6, 8)
    found = ByteRows.along(emulator.view(x), -1, BYTES)
    out = emulator.empty((256, 48), np.dtype(np.int8))
    found.make(emulator, out.ctypes.data)
    assert (out[:, :40].reshape(x.shape) == x).all()
    y = emulator.array(any_integers((3, 1, 2, 33), np.uint8))
    found = ByteRows.along(expanded(emulator.view(y), (4, 3, 5, 2, 33)), -1, BYTES)
    out = emulator.empty((120, 48), np.dtype(np.uint8))
    found.make(emulator, out.ctypes.data)
    assert (out[:, :33].reshape(4, 3, 5, 2, 33) == y).all()


def test_rows_that_are_ready():
    def ready(shape, strides, pointer=64, dense=False):
        view = View(pointer, shape, strides, np.dtype(np.int8))
        return ByteRows.along(view, -1, BYTES, dense=dense).is_ready

    assert ready((5, 32), (32, 1)) and ready((2, 5, 32), (160, 32, 1)) and ready((5, 32), (48, 1))
    assert ready((5, 32), (0, 1)) and ready((5, 0), (0, 1))
    assert not ready((5, 31), (32, 1)) and not ready((5, 32), (32, 1), 72)
    assert not ready((5, 32), (40, 1)) and not ready((5, 32), (1, 5))
    assert not ready((2, 5, 32), (320, 32, 1)) and not ready((5, 32), (48, 1), dense=True)


# ---- integers ------------------------------------------------------------------------------------

SHAPES = [
    ((1, 1), (1, 1)),
    ((3, 33), (33, 5)),
    ((40, 64), (64, 24)),
    ((130, 48), (48, 70)),
    ((7, 300), (300, 9)),
    ((2, 0), (0, 3)),
    ((0, 4), (4, 2)),
    ((2, 4), (4, 0)),
    ((3, 4, 33), (33, 5)),
    ((3, 4, 32), (3, 32, 5)),
    ((4, 33), (2, 3, 33, 5)),
    ((2, 1, 4, 16), (3, 16, 5)),
    ((0, 4, 16), (16, 5)),
    ((2, 3, 4, 0), (0, 2)),
    ((3, 4, 33), (1, 33, 5)),
    ((4, 33), (1, 1, 33, 5)),
    ((1, 4, 33), (3, 1, 33, 5)),
]


@pytest.mark.parametrize("types", [(np.int8, np.int8), (np.uint8, np.int8), (np.int8, np.uint8)])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_integers_are_exact(to, shapes, types):
    a, b = (any_integers(s, t, i) for i, (s, t) in enumerate(zip(shapes, types, strict=True)))
    found = F.int8_matmul(to(a), to(b))
    assert interop.kind(found) == interop.kind(to(a)) and interop.is_on_gpu(found)
    assert bits_equal(host(found), product(a, b))
    points = int(np.iinfo(types[0]).min), int(np.iinfo(types[1]).max)
    found = F.int8_gemm(
        to(a), to(b), zero_point_a=to(np.array(points[0], types[0])), zero_point_b=points[1]
    )
    wanted = product(a.astype(np.int64) - points[0], b.astype(np.int64) - points[1])
    assert bits_equal(host(found), wanted)


@pytest.mark.parametrize("on_device", [True, False], ids=["device", "host"])
@pytest.mark.parametrize("shapes", SHAPES[1:2] + SHAPES[8:12] + SHAPES[14:], ids=str)
def test_scales_follow_each_other_as_on_the_cpu(to, shapes, on_device):
    a, b = (any_integers(shape, np.int8, i) for i, shape in enumerate(shapes))
    rng = np.random.default_rng(0)
    *batch, m, n = product(a, b).shape
    give = to if on_device else lambda x: x
    rows, columns = rng.standard_normal(m, F32), rng.standard_normal(n, F32)
    whole = rng.standard_normal((*batch, m, 1), F32), rng.standard_normal((*batch, 1, n), F32)
    one = np.array([1.1], F32)
    for scales in (
        (rows, columns, one),
        (rows[:, None], None, F32(1)),
        (None, columns[None], one),
        (None, columns.reshape((1,) * (len(batch) + 1) + (n,)), one),
        (*whole, F32(0.3)),
        (one, one, one),
    ):
        given = [scale if scale is None else give(np.asarray(scale)) for scale in scales]
        found = F.int8_matmul(to(a), to(b), *given, zero_point_a=-3)
        assert bits_equal(host(found), F.int8_matmul(a, b, *scales, zero_point_a=-3))
        with np.errstate(over="ignore"):
            given.append("float16")
            bias = rng.standard_normal(n, F32).astype(BF16)
            found = F.matmul_bias_relu(to(a), to(b), to(bias[None]), *given)
            wanted = F.matmul_bias_relu(a, b, bias, *scales, "float16")
        assert bits_equal(host(found), wanted)


def test_results_that_wrap(to):
    for dtype, value, depth in ((np.int8, -128, 131073), (np.uint8, 255, 140_001)):
        a = np.full((2, depth), value, dtype)
        found = F.int8_matmul(to(a), to(a.T))
        assert bits_equal(host(found), product(a, a.T)) and host(found)[0, 0] != depth * value**2
        found = F.matmul_bias_relu(to(a), to(a.T), to(np.array([1, 2], F32)))
        assert bits_equal(host(found), F.matmul_bias_relu(a, a.T, np.array([1, 2], F32)))


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "turned"])
def test_operands_lie_anywhere(to, turned):
    a, b = any_integers((2, 18, 80), np.int8), any_integers((2, 160, 36), np.uint8)
    if turned:
        a, b = any_integers((2, 80, 18), np.int8), any_integers((2, 36, 160), np.uint8)
    x, w = to(a), to(b)
    if turned:
        a, b, x, w = (permuted(each, 0, 2, 1) for each in (a, b, x, w))
    found = F.int8_matmul(x[:, ::2, 3:], w[:, 6::2, ::3])
    assert bits_equal(host(found), product(a[:, ::2, 3:], b[:, 6::2, ::3]))


@pytest.mark.parametrize("k", [0, 1, 2, 7, 64, 131])
def test_4_bits(to, k):
    a, b = integers(-8, 7, (2, 3, k), np.int8), integers(-8, 7, (2, k, 4), np.int8, 1)
    packed = F.pack_int4(a), F.pack_int4(b, axis=1)
    wanted = product(a, b)
    assert bits_equal(host(F.int4_matmul(*map(to, packed), k)), wanted)
    assert bits_equal(host(F.int4_matmul(*map(to, packed))), wanted)
    assert bits_equal(F.int4_matmul(*packed, k), wanted)
    if k % 2:  # what is in the unused nibble does not count once K is given
        dirty = packed[0].copy()
        dirty[..., -1] |= 0x50
        assert bits_equal(host(F.int4_matmul(to(dirty), to(packed[1] | np.uint8(0)), k)), wanted)


def test_binary(to):
    rng = np.random.default_rng(0)
    for kinds in ((F32, F32), (np.float16, np.int8), (BF16, np.int64)):
        a = (rng.standard_normal((2, 5, 100)) * 2).astype(kinds[0])
        b = (rng.standard_normal((100, 9)) * 2).astype(kinds[1])
        wanted = product(np.where(a < 0, -1, 1), np.where(b < 0, -1, 1))
        assert bits_equal(host(F.binary_matmul(to(a), to(b))), wanted)
    for a, b in ([with_specials(shape, F32) for shape in shapes] for shapes in SHAPES):
        wanted = product(np.where(a < 0, -1, 1), np.where(b < 0, -1, 1))
        assert bits_equal(host(F.binary_matmul(to(a), to(b))), wanted)
    a = np.array([[np.nan, -np.nan, -1, 0, -0.0]], F32)
    assert host(F.binary_matmul(to(a), to(np.ones((5, 1), F32)))) == 3


def at(address: int, count: int, dtype: Any) -> np.ndarray:
    """The array at an address of the host."""
    nbytes = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype)


def multiply_bits(backend: Any, x: Coded, w: Coded, shape: tuple, groups: Groups, segment: int):
    """In place of Hopper's kernel, whose tensor cores the emulator has not: K and ones alone tell
    what ones that meet stand for."""
    rows, columns, depth = shape
    assert x.kind == w.kind == "bits" and segment == depth and rows == groups.rows
    counts = groups.count * rows, groups.count * columns
    unpacked, ones = [], []
    for side, count, each in ((x, counts[0], rows), (w, counts[1], columns)):
        assert side.stride % 16 == side.codes % 16 == 0
        bits = np.unpackbits(at(side.codes, count * side.stride, np.uint8), bitorder="little")
        unpacked.append(bits.reshape(groups.count, each, -1).astype(np.int64))
        ones.append(at(side.sums, count, np.int32).reshape(groups.count, each))

    def run(backend: Any, x: Coded, results: bytes) -> None:
        both = unpacked[0] @ unpacked[1].swapaxes(1, 2)
        sums = 4 * both + depth - 2 * (ones[0][..., None] + ones[1][:, None])
        at(struct.unpack_from("<Q", results)[0], sums.size, np.int32)[:] = sums.reshape(-1)

    return run


@fake_gpu.needs_compiler
@pytest.mark.parametrize("library", ["cupy", pytest.param("torch", marks=fake_gpu.needs_torch)])
def test_binary_by_bits(library, monkeypatch):
    """As on Hopper, but for the product of bits itself."""
    to = fake_gpu.install(library, monkeypatch, Emulator(arch=90))
    seen = mock.Mock(side_effect=multiply_bits)
    monkeypatch.setattr(plain_products.coded_kernels, "prepare", seen)
    for i, shapes in enumerate(SHAPES):
        a, b = (with_specials(shape, (F32, np.float16)[i % 2]) for shape in shapes)
        wanted = product(np.where(a < 0, -1, 1), np.where(b < 0, -1, 1))
        if not shapes[0][-1]:  # which no tensor map has
            continue
        before = seen.call_count
        assert bits_equal(host(F.binary_matmul(to(a), to(b))), wanted)
        assert seen.call_count == before + bool(wanted.size)
    a, b = any_integers((2, 18, 280), np.int8), any_integers((2, 560, 36), np.int16)
    found = F.binary_matmul(to(a)[:, ::2, 3:], to(b)[:, 6::2, ::3])
    a, b = a[:, ::2, 3:], b[:, 6::2, ::3]
    assert bits_equal(host(found), product(np.where(a < 0, -1, 1), np.where(b < 0, -1, 1)))


def test_rows_of_bits_are_compiled_ahead_where_bits_are_multiplied():
    rows = [program_of(bits_of(name)) for name in ("float32", "float16")]
    for arch in (75, 80, 89, 90, 100):
        found = plain_products.programs(cq.get_format("int1"), ["float32", "float16"], arch)
        assert all((program in found) == (80 <= arch <= 90) for program in rows)


# ---- convolutions --------------------------------------------------------------------------------

CONVOLUTIONS = [
    ((1, 1, 1, 1), (1, 1, 1, 1), 1, 0),
    ((2, 3, 9, 8), (5, 3, 3, 3), 1, 1),
    ((2, 16, 9, 8), (40, 16, 3, 2), (2, 1), (0, 2)),
    ((1, 33, 5, 5), (3, 33, 5, 5), 1, 4),
    ((3, 20, 12, 6), (7, 20, 1, 1), 3, 0),
    ((0, 3, 4, 4), (2, 3, 2, 2), 1, 0),
    ((2, 3, 4, 4), (0, 3, 2, 2), 1, 0),
    ((2, 0, 4, 4), (3, 0, 2, 2), 1, 0),
    ((2, 5, 3, 4), (3, 5, 1, 2), 2, 3),
]


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_convolutions(to, case):
    shape, taps, stride, padding = case
    x, w = any_integers(shape, np.int8), any_integers(taps, np.uint8, 1)
    scale = np.linspace(0.3, 2, taps[0], dtype=F32)
    for given in (x, w), (x.view(np.uint8), w.view(np.int8)):
        wanted = F.int8_conv2d(*given, stride, padding)
        assert bits_equal(host(F.int8_conv2d(*map(to, given), stride, padding)), wanted)
    found = F.binary_conv2d(to(x), to(w.astype(F32) - F32(100)), stride, padding, to(scale))
    wanted = F.binary_conv2d(x, w.astype(F32) - F32(100), stride, padding, scale)
    assert bits_equal(host(found), wanted)


def test_pixels_that_lie_ready(to):
    """Channels last, in steps of 16 and with more beside them; and other views."""
    x, w = any_integers((2, 6, 7, 48), np.int8), any_integers((5, 3, 3, 48), np.int8, 1)
    axes = 0, 3, 1, 2
    turned = [permuted(to(each), *axes) for each in (x, w)]
    x, w = x.transpose(axes), w.transpose(axes)
    for channels in (np.s_[:], np.s_[16:], np.s_[:20]):
        part = np.s_[:, channels]
        found = F.int8_conv2d(turned[0][part], turned[1][part], padding=1)
        assert bits_equal(host(found), F.int8_conv2d(x[part], w[part], padding=1))
    part = np.s_[:, ::3, 1:, ::2]
    found = F.int8_conv2d(turned[0][part], turned[1][part])
    assert bits_equal(host(found), F.int8_conv2d(x[part], w[part]))


# ---- floats --------------------------------------------------------------------------------------


def small(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """Integers whose sums are exact in float32, in any order."""
    return integers(-4, 4, shape, np.int64, seed).astype(dtype)


@pytest.fixture
def vendor(monkeypatch):
    """The same as `to` of the emulator, with cuBLAS; and its calls."""
    to = fake_gpu.install("cupy", monkeypatch, Emulator(arch=80, vendor=True))
    library = Library(alignment=16)
    cublas = Cublas(library)
    monkeypatch.setattr(gpu.Gpu, "gemm", lambda self, gemm: cublas.gemm(0, gemm))
    return to, library.calls


DTYPES = [(F32, F32), (np.float16, np.float16), (BF16, BF16), (np.float16, F32)]
TIMES = np.array(0.3, F32), np.array([-0.7], F32)


def check_floats(to: Any, shapes: tuple, dtypes: tuple) -> np.ndarray:
    """The exact product, once all functions have given it."""
    a, b = (small(s, t, i) for i, (s, t) in enumerate(zip(shapes, dtypes, strict=True)))
    exact = np.matmul(a.astype(F32), b.astype(F32))
    *_, m, n = exact.shape
    c, bias, scale = small(exact.shape, BF16, 2), small((n,), F32, 3), small((m, 1), F32, 4)
    for out_dtype in ("float32", "float16", "bfloat16"):
        dtype = interop.float_dtype(out_dtype)
        found = F.fp16_gemm(to(a), to(b), out_dtype=out_dtype)
        assert bits_equal(host(found), exact.astype(dtype))
    for give in (to, lambda x: x):
        found = F.bf16_gemm(to(a), to(b), to(c), *map(give, TIMES))
        assert bits_equal(host(found), (TIMES[0] * exact + TIMES[1] * c.astype(F32)).astype(BF16))
    found = F.matmul_bias_relu(to(a), to(b), to(bias), to(scale), None, 0.1, "float16")
    wanted = np.maximum(exact * scale * F32(0.1) + bias, F32(0)).astype(np.float16)
    assert (host(found) == wanted).all()  # -0.0 is 0
    return exact


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_floats(to, shapes, dtypes):
    check_floats(to, shapes, dtypes)


@fake_gpu.needs_compiler
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_floats_by_the_vendor(vendor, shapes, dtypes):
    to, calls = vendor
    exact = check_floats(to, shapes, dtypes)
    taken = dtypes[0] == dtypes[1] and exact.size and shapes[0][-1]
    assert bool(calls) == bool(taken)


@fake_gpu.needs_compiler
@pytest.mark.parametrize("turned", range(4))
def test_floats_that_lie_anywhere(vendor, turned):
    """The vendor's GEMM takes rows and columns as they lie, and copies of the rest."""
    to, calls = vendor
    first, second = turned % 2, turned // 2
    a, b = small((24, 40), np.float16), small((40, 30), np.float16, 1)
    x, w = (to(m.T.copy()).T if t else to(m) for m, t in ((a, first), (b, second)))
    for part_a, part_b in ((np.s_[:], np.s_[:]), (np.s_[1:, 3:], np.s_[3:, 5:])):
        found = F.fp16_gemm(x[part_a], w[part_b])
        assert bits_equal(host(found), a[part_a].astype(F32) @ b[part_b].astype(F32))
    found = F.fp16_gemm(x[::2, ::2], w[::2, ::-1])
    assert bits_equal(host(found), a[::2, ::2].astype(F32) @ b[::2, ::-1].astype(F32))
    assert len(calls) == 3


def test_c_is_not_read_where_beta_is_0(to):
    a, c = to(np.ones((2, 3), np.float16)), to(np.full((2, 2), np.nan, np.float16))
    b = to(np.ones((3, 2), np.float16))
    for zero in (0, to(np.array(0, F32)), to(np.array([0], F32))):
        assert (host(F.fp16_gemm(a, b, c, beta=zero)) == 3).all()
    assert np.isnan(host(F.fp16_gemm(a, b, c, beta=to(np.array(1, F32))))).all()
    row = to(np.array([1, 2], np.float16))
    assert host(F.fp16_gemm(a, b, row, beta=1)).tolist() == [[4, 5], [4, 5]]


def test_rows_that_are_too_large_for_a_workspace(to):
    a, b = any_integers((9, 33), np.int8), any_integers((33, 5), np.int8)
    with mock.patch.object(plain_products, "MOST_KEPT", 16):
        assert bits_equal(host(F.int8_matmul(to(a), to(b))), product(a, b))


@pytest.mark.parametrize("lead", [(), (3, 1), (1,), (3, 2)], ids=str)
def test_c_broadcasts(to, lead):
    a, b, c = small((3, 2, 4, 8), F32), small((8, 5), F32, 1), small((*lead, 4, 5), F32, 2)
    wanted = np.matmul(a, b) + 2 * c
    assert bits_equal(host(F.fp16_gemm(to(a), to(b), to(c), beta=2)), wanted.astype(F32))


def test_nothing_is_read_back(to):
    """Scalars of the device stay there."""
    a, b = any_integers((4, 16), np.uint8), any_integers((16, 4), np.int8)
    number, point = to(np.array(0.5, F32)), to(np.array(3, np.uint8))
    x, w = to(a), to(b)
    with (
        mock.patch.object(gpu.CupyBackend, "read", side_effect=AssertionError),
        mock.patch.object(gpu.TorchBackend, "read", side_effect=AssertionError),
    ):
        found = F.int8_matmul(x, w, number, number, number, zero_point_a=point)
        F.fp16_gemm(
            to(np.ones((1, 1), F32)),
            to(np.ones((1, 1), F32)),
            to(np.ones((1, 1), F32)),
            number,
            number,
        )
    assert bits_equal(host(found), F.int8_matmul(a, b, 0.5, 0.5, 0.5, zero_point_a=3))


def test_refusals_before_any_launch(to):
    a = to(any_integers((16, 16), np.int8))
    with pytest.raises(TypeError, match="zero_point_a must be one integer, got float32"):
        F.int8_matmul(a, a, zero_point_a=to(np.array(1, F32)))
    with pytest.raises(ValueError, match="a's columns must be as many as b's rows"):
        F.int8_matmul(a, a[:3])
    bits = to(any_integers((16, 16), np.uint8))
    with pytest.raises(cq.FormatError, match="a has 16 bytes in a row; K = 30 integers have 15"):
        F.int4_matmul(bits, bits, 30)
    with pytest.raises(ValueError, match="beta is an array without a c"):
        x = to(np.ones((2, 2), F32))
        F.fp16_gemm(x, x, beta=to(np.array(1, F32)))
    with pytest.raises(TypeError, match="a must be float32"):
        F.fp16_gemm(a, a)
