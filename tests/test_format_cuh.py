"""kernels/format.cuh means what cuquant.formats means: compiled by g++ and compared."""

import ctypes
import shutil
import subprocess

import numpy as np
import pytest

import cuquant as cq
from cuquant.formats import Codebook, Minifloat, Packing, Uniform
from cuquant.jit import kernel_folder

SHIM = """
#include <cmath>
#include <cstring>
static float __uint_as_float(unsigned u) { float f; std::memcpy(&f, &u, 4); return f; }
static unsigned __float_as_uint(float f) { unsigned u; std::memcpy(&u, &f, 4); return u; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __frcp_rn(float a) { return 1.0f / a; }
#define __device__
"""

BODY = """
#include "format.cuh"
using namespace cuquant;
template <class Codec> void run(const float* x, u32* codes, float* values, long n,
                                const typename Codec::Tables& tables) {
    for (long i = 0; i < n; ++i) {
        codes[i] = Codec::encode(x[i], tables);
        values[i] = Codec::decode(codes[i], tables);
    }
}
template <class Rule> float statistic(const float* x, long n) {
    typename Rule::State state = Rule::of(x[0], 0);
    for (long i = 1; i < n; ++i) state = Rule::combine(Rule::of(x[i], i), state);
    return Rule::statistic(state);
}
extern "C" {
float absmax(const float* x, long n) { return statistic<AbsMax>(x, n); }
float signed_max(const float* x, long n) { return statistic<SignedMax>(x, n); }
float inverse(float x) { return inverse_of(x); }
"""

ROUNDINGS = {"half_even": "HalfEven", "half_away": "HalfAway", "half_up": "HalfUp"}
SPECIALS = {(4, 3): "OneNan", (5, 2): "Ieee", (5, 10): "Ieee", (8, 7): "Ieee"}
CODECS = {name: cq.get_format(name).codec for name in cq.list_formats()}
PACKINGS = [
    Packing(1),
    Packing(4),
    Packing(4, "high"),
    Packing(8),
    *(Packing(k, order) for k in range(2, 9) for order in ("dense", "word", "planes")),
]


def codec_type(codec) -> str:
    if isinstance(codec, Codebook):
        return f"Codebook<{len(codec.levels)}>"
    if isinstance(codec, Uniform):
        return f"Uniform<{codec.low}, {codec.high}, Rounding::{ROUNDINGS[codec.rounding]}>"
    kind = SPECIALS.get((codec.exponent, codec.mantissa), "None")
    return f"Minifloat<{codec.exponent}, {codec.mantissa}, Specials::{kind}>"


def packing_name(packing: Packing) -> str:
    return f"get_{packing.order}_{packing.bits}"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the CUDA words with")
    text = [SHIM, BODY]
    for name, codec in CODECS.items():
        tables = "{borders, codes_of_ranks, levels}" if isinstance(codec, Codebook) else "{}"
        text.append(
            f"void codec_{name}(const float* x, u32* codes, float* values, long n, const float* "
            f"borders, const u8* codes_of_ranks, const float* levels) {{ "
            f"run<{codec_type(codec)}>(x, codes, values, n, {tables}); }}"
        )
    for packing in PACKINGS:
        word = "u8" if packing.dtype == np.uint8 else "u32"
        order = packing.order.capitalize()
        kind = f"Packing<{packing.bits}, Order::{order}>"
        text.append(
            f"void {packing_name(packing)}(const {word}* row, u32* codes, long n) "
            f"{{ for (long i = 0; i < n; ++i) codes[i] = {kind}::get(row, i); }}"
        )
    text.append("}")
    folder = tmp_path_factory.mktemp("format_cuh")
    source, binary = folder / "words.cpp", folder / "words.so"
    source.write_text("\n".join(text), encoding="utf-8")
    subprocess.run(
        [
            compiler,
            "-std=c++17",
            "-O1",
            "-ffp-contract=off",
            "-Wall",
            "-Werror",
            "-shared",
            "-fPIC",
            f"-I{kernel_folder()}",
            str(source),
            "-o",
            str(binary),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    return ctypes.CDLL(str(binary))


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


def probes(codec, rng) -> np.ndarray:
    """Random numbers in and around the codec's range, and every border with its neighbours."""
    if isinstance(codec, Codebook):
        edges = codec.borders
    elif isinstance(codec, Uniform):
        edges = np.arange(codec.low - 2, codec.high + 3, 0.5, dtype=np.float32)
    else:
        known = np.unique(codec.values[np.isfinite(codec.values)])
        edges = np.concatenate([known, known[1:] / 2 + known[:-1] / 2])
    reach = np.float32(1.5) * np.abs(edges).max() if codec.bits < 16 else np.float32(60000)
    near = [edges, *(np.nextafter(edges, np.float32(s * np.inf)) for s in (-1, 1))]
    tiny = np.float32([0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-30])
    spread = rng.uniform(-1, 1, 4000).astype(np.float32) * reach
    small = spread * np.exp2(rng.uniform(-20, 0, 4000)).astype(np.float32)
    return np.concatenate([*near, tiny, spread, small])


@pytest.mark.parametrize("name", CODECS)
def test_codecs(name, library, rng):
    codec = CODECS[name]
    x = probes(codec, rng)
    if codec.bits == 16:
        x = x[np.abs(x) <= codec.peak]
    codes, values = np.zeros(len(x), np.uint32), np.zeros(len(x), np.float32)
    tables = [np.zeros(1, np.float32), np.zeros(1, np.uint8), np.zeros(1, np.float32)]
    if isinstance(codec, Codebook):
        tables = [codec.borders, codec.ranks_to_codes, codec.values]
    run = getattr(library, f"codec_{name}")
    run(
        pointer(x),
        pointer(codes),
        pointer(values),
        ctypes.c_long(len(x)),
        *(pointer(np.ascontiguousarray(t)) for t in tables),
    )
    wanted = codec.encode(x)
    assert (codes == wanted).all()
    assert values.tobytes() == codec.decode(wanted).tobytes()


@pytest.mark.parametrize("name", [n for n, c in CODECS.items() if isinstance(c, Minifloat)])
def test_every_code_of_a_minifloat_decodes(name, library):
    """Through the encoder of its own values; NaN and infinity have codes that saturation avoids."""
    codec = CODECS[name]
    values = codec.values[np.isfinite(codec.values)]
    x = np.ascontiguousarray(values)
    codes, back = np.zeros(len(x), np.uint32), np.zeros(len(x), np.float32)
    empty = pointer(np.zeros(1, np.float32))
    getattr(library, f"codec_{name}")(
        pointer(x), pointer(codes), pointer(back), ctypes.c_long(len(x)), empty, empty, empty
    )
    assert back.tobytes() == x.tobytes()
    assert (codes == np.flatnonzero(np.isfinite(codec.values))).all()


@pytest.mark.parametrize("packing", PACKINGS, ids=packing_name)
def test_packings(packing, library, rng):
    codes = rng.integers(0, 1 << packing.bits, (1, 997), dtype=np.uint8)
    row = np.ascontiguousarray(packing.pack(codes, pad=0)[0])
    found = np.zeros(997, np.uint32)
    getattr(library, packing_name(packing))(pointer(row), pointer(found), ctypes.c_long(997))
    assert (found == codes[0]).all()


def test_statistics(library, rng):
    library.absmax.restype = library.signed_max.restype = ctypes.c_float
    x = rng.choice(np.float32([-2, -1, 0, 1, 2]), 64)
    first = x[np.argmax(np.abs(x))]
    assert library.signed_max(pointer(x), ctypes.c_long(64)) == first
    assert library.absmax(pointer(x), ctypes.c_long(64)) == abs(first)
    x[7] = np.nan
    assert np.isnan(library.absmax(pointer(x), ctypes.c_long(64)))
    assert np.isnan(library.signed_max(pointer(x), ctypes.c_long(64)))


def test_inverse(library):
    library.inverse.restype, library.inverse.argtypes = ctypes.c_float, [ctypes.c_float]
    assert library.inverse(4.0) == 0.25
    for dead in (0.0, -0.0, 1e-45, np.nan, np.inf, -np.inf):
        assert library.inverse(dead) == 0.0
    assert library.inverse(3e38) == np.float32(1) / np.float32(3e38)  # subnormal, and kept
