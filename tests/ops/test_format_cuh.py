"""kernels/format.cuh means what cuquant.formats means: its words one by one, under the emulator."""

import ml_dtypes
import numpy as np
import pytest
from emulator import Emulator, compiler
from in_turn import in_turn

import cuquant as cq
from cuquant.formats import Codebook, Packing, Uniform
from cuquant.gpu.jit import Launch, Program
from cuquant.ops import cpp as facts
from cuquant.reference.philox import uniform

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to compile kernels with")

WORDS = """
#include "device/random.cuh"
#include "format/e2m1.cuh"
#include "format/scaling.cuh"

namespace cuquant {

constexpr int kThreads = 64;

template <class Codec>
__global__ void codec(
    const float* x, const u32* codes, u32* encoded, float* decoded, Lookup lookup, int zero_point,
    i64 n, i64 m) {
    __shared__ typename Codec::EncodeTables encode_tables;
    __shared__ typename Codec::DecodeTables decode_tables;
    Codec::fill(encode_tables, lookup, threadIdx.x, kThreads);
    Codec::fill(decode_tables, lookup, threadIdx.x, kThreads);
    __syncthreads();
    const i64 i = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (i < n) {
        if constexpr (Codec::is_codebook)
            encoded[i] = lookup.steps > 1 ? Codec::encode_crowded(x[i], encode_tables, lookup)
                                          : Codec::encode(x[i], 0, encode_tables, lookup);
        else
            encoded[i] = Codec::encode(x[i], zero_point, encode_tables, lookup) - Codec::bias;
    }
    if (i < m) decoded[i] = Codec::decode(codes[i], Codec::shift_of(zero_point), decode_tables);
}

// Words of eight e2m1 codes: of x, of x * inverse, and of bfloat16 x times a power of two.
template <class Packing>
__global__ void e2m1(
    const float* x, u32* plain, u32* scaled, u32* paired, float inverse, float power, i64 n) {
    const i64 i = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= n) return;
    const float* own = x + i * kChunk;
    u32 pairs[4];
    for (int p = 0; p < 4; ++p)
        pairs[p] = bits_of(own[2 * p]) >> 16 | (bits_of(own[2 * p + 1]) & 0xFFFF0000u);
    plain[i] = e2m1_codes<Packing>(own);
    scaled[i] = e2m1_codes<Packing>(own, own, inverse);
    paired[i] = e2m1_codes<Packing>(pairs, power);
}

template <class Codec>
__global__ void stochastic(const float* x, const float* draws, u32* encoded, Lookup lookup, i64 n) {
    __shared__ typename Codec::EncodeTables tables;
    Codec::fill(tables, lookup, threadIdx.x, kThreads);
    __syncthreads();
    const i64 i = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= n) return;
    encoded[i] = Codec::encode_stochastic(x[i], draws[i], 0, tables, lookup) - Codec::bias;
}

template <class Packing, typename Word>
__global__ void packing(
    const u32* codes, const Word* row, u32* got, Word* made, u32 pad, i64 n, i64 words) {
    const i64 i = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (i < n) got[i] = Packing::get(row, i);
    const auto code = [&](i64 j) { return j < n ? codes[j] : pad; };
    if (i < words) made[i] = static_cast<Word>(Packing::word(i, code));
}

// A row of x by one thread, halves of it merged in either order.
template <class Rule>
__global__ void statistic(const float* x, float* found, u8* lost, int zero, i64 rows, i64 columns) {
    const i64 row = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (row >= rows) return;
    auto first = Rule::none(), second = Rule::none();
    for (i64 i = 0; i < columns; ++i) {
        auto& half = i < columns / 2 ? first : second;
        half = Rule::merge(Rule::of(x[row * columns + i], i), half);
    }
    const auto all = row % 2 ? Rule::merge(first, second) : Rule::merge(second, first);
    lost[row] = Rule::lost(all);
    found[row] = Rule::statistic(all, zero);
}

__global__ void means(const float* x, double* sums, u8* exact, i64 rows, i64 columns) {
    const i64 row = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (row >= rows) return;
    auto found = MeanAbs::none();
    for (i64 i = columns - 1; i >= 0; --i)
        found = MeanAbs::merge(MeanAbs::of(x[row * columns + i], i), found);
    sums[row] = found.sum;
    exact[row] = found.any_order();
}

// Counts numbers whose quotient by the peak is not the one of a division.
template <int kPeakBits>
__global__ void division(u32 first, u32 step, u32 count, u32* wrong) {
    const u32 threads = gridDim.x * kThreads;
    u32 found = 0;
    for (u32 i = blockIdx.x * kThreads + threadIdx.x; i < count; i += threads) {
        const float x = float_of(first + i * step);
        const float peak = float_of(static_cast<u32>(kPeakBits));
        found += bits_of(divided<kPeakBits>(x)) != bits_of(__fdiv_rn(x, peak));
    }
    if (found) atomicAdd(wrong, found);
}

__global__ void powers(const float* x, int emax, float* found, u8* is_usable, i64 n) {
    const i64 i = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= n) return;
    found[i] = power_below(bits_of(x[i]), emax);
    is_usable[i] = usable(__frcp_rn(x[i]));
}

template <Stored kStored>
__global__ void storing(const float* x, u32* stored, float* effective, u8* overflow, i64 n) {
    const i64 i = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    bool over;
    if (i >= n) return;
    store_of<kStored>(x[i], 1.0f, stored[i], effective[i], over);
    overflow[i] = over;
}

__global__ void draws(const u64* index, float* found, u64 seed, i64 n) {
    const i64 i = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (i < n) found[i] = uniform_draw(seed, index[i]);
}

__global__ void odd(const double* x, u32* halves, i64 n) {
    const i64 i = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (i < n) halves[i] = halves_of(to_odd(x[i]), 0.0f) & 0xFFFFu;
}

}  // namespace cuquant
"""

THREADS = 64
F32, U8, U32 = np.dtype(np.float32), np.dtype(np.uint8), np.dtype(np.uint32)
CODECS = {name: cq.get_format(name).codec for name in cq.list_formats()}
CODECS |= {
    "uneven": Codebook((-1.0, -0.25, 0.0, 0.5, 1.0)),
    "crowded": Codebook((-1.0, 0.3, 0.3000001, 0.3000002, 0.3000003, 0.3000004, 1.0)),
    "even ties": Codebook((-1.0, -0.5, 0.0, 0.5, 1.0), tie="even"),
    "many": Codebook(tuple(np.linspace(-3, 5, 130, dtype=np.float32).tolist())),
    "near zero": Codebook(tuple((np.linspace(-1, 1, 99, dtype=np.float32) ** 9).tolist())),
}
PACKINGS = [
    *(Packing(bits, order) for bits in (1, 2, 4) for order in ("low", "high")),
    *(Packing(bits) for bits in (8, 16)),
    Packing(8, "low", True),
    *(Packing(bits, order) for bits in range(2, 9) for order in ("dense", "word", "planes")),
]
SCALES = [fmt.scale for name in cq.list_formats() if (fmt := cq.get_format(name)).scale]
PEAKS = sorted({scale.peak for scale in SCALES} | {7.5, 28.0})


def words(entry: str, *arguments: str | int) -> Program:
    return Program("words.cu", entry, arguments)


def packing_words(packing: Packing) -> Program:
    return words("packing", facts.packing_type(packing), facts.WORDS[packing.dtype.itemsize])


def dividing(peak: float) -> Program:
    bits = int(np.float32(peak).view(np.uint32))
    return words("division", f"static_cast<int>({bits:#x}u)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("words")
    (made / "words.cu").write_text(WORDS, encoding="utf-8")
    types = dict.fromkeys(facts.codec_type(codec) for codec in CODECS.values())
    Emulator(folders=[made]).build(
        [
            *(words(entry, kind) for kind in types for entry in ("codec", "stochastic")),
            *map(packing_words, PACKINGS),
            *(words("e2m1", facts.packing_type(Packing(4, order))) for order in ("low", "high")),
            *map(dividing, PEAKS),
            *(words("statistic", rule) for rule in ("AbsMax", "SignedMax", "Range")),
            *(
                words("storing", f"Stored::{kind}")
                for kind in ("Float32", "Float16", "E8M0", "E4M3")
            ),
            *map(words, ("means", "powers", "draws", "odd")),
        ]
    )
    return made


class Words:
    """Arrays in, arrays out: a word of format.cuh for each element."""

    def __init__(self, folder) -> None:
        self.emulator = Emulator(folders=[folder])

    def given(self, array: np.ndarray) -> int:
        return self.emulator.pointer(self.emulator.upload(np.ascontiguousarray(array)))

    def made(self, count: int, dtype: np.dtype) -> np.ndarray:
        return self.emulator.empty((count,), dtype)

    def run(self, program: Program, count: int, *arguments) -> None:
        pointers = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments]
        self.emulator.launch(Launch(program, (-(-count // THREADS), 1, 1), THREADS), *pointers)


@pytest.fixture
def run(folder):
    return Words(folder)


# ---- codecs -------------------------------------------------------------------------------------


def probes(codec, rng) -> np.ndarray:
    """Random numbers in and around the codec's range, and every border with its neighbours."""
    if isinstance(codec, Codebook):
        edges = np.concatenate([codec.borders, codec.numbers])
    elif isinstance(codec, Uniform):
        edges = np.arange(codec.low - 2, codec.high + 3, 0.5, dtype=np.float32)
    else:
        known = np.unique(codec.numbers[np.isfinite(codec.numbers)])
        edges = np.concatenate([known, known[1:] / 2 + known[:-1] / 2])
    reach = np.abs(edges).max() * np.float32(1.5 if codec.bits < 16 else 0.9)
    near = [edges, *(np.nextafter(edges, np.float32(s * np.inf)) for s in (-1, 1))]
    tiny = np.float32([0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-30, 3e38, -3e38])
    spread = rng.uniform(-1, 1, 4000).astype(np.float32) * reach  # fp16, bf16: within its range
    small = spread * np.exp2(rng.uniform(-20, 0, 4000)).astype(np.float32)
    return np.concatenate([*near, tiny, spread, small]).astype(np.float32)


@pytest.mark.parametrize("name", CODECS)
def test_codecs(name, run, rng):
    """encode at and around every border, decode of every code."""
    codec = CODECS[name]
    x = probes(codec, rng)
    count = len(codec.levels) if isinstance(codec, Codebook) else 1 << codec.bits
    every = np.arange(count, dtype=codec.code_dtype)
    encoded, decoded = run.made(len(x), U32), run.made(count, F32)
    for zero_point in (0, codec.high, 1) if name.startswith("uint") else (0,):
        extra = {"zero_point": np.full(len(x), zero_point, np.float32)} if zero_point else {}
        run.run(
            words("codec", facts.codec_type(codec)),
            max(len(x), count),
            run.given(x),
            run.given(every.astype(np.uint32)),
            encoded,
            decoded,
            facts.lookup(codec, run.emulator),
            zero_point,
            len(x),
            count,
        )
        with np.errstate(over="ignore", invalid="ignore"):
            assert (encoded == codec.encode(x, **extra)).all()
            wanted = codec.decode(every) - np.float32(zero_point)
        nan = np.isnan(wanted)
        assert (np.isnan(decoded) == nan).all()
        assert decoded[~nan].tobytes() == wanted[~nan].tobytes()


@pytest.mark.parametrize("name", CODECS)
def test_stochastic_codecs(name, run, rng):
    """Draws of 0, just below 1 and between take the neighbours that the reference takes."""
    codec = CODECS[name]
    x = probes(codec, rng)
    draws = rng.random(len(x), np.float32)
    draws[::5], draws[1::5] = 0, np.nextafter(np.float32(1), np.float32(0))
    encoded = run.made(len(x), U32)
    run.run(
        words("stochastic", facts.codec_type(codec)),
        len(x),
        run.given(x),
        run.given(draws),
        encoded,
        facts.lookup(codec, run.emulator),
        len(x),
    )
    with np.errstate(all="ignore"):
        wanted = codec.encode_stochastic(x, draws)
    assert (encoded == wanted).all()


@pytest.mark.parametrize("order", ["low", "high"])
def test_words_of_e2m1(order, run, rng):
    """Eight codes at once are those of the codec: borders, their neighbours, every bfloat16."""
    codec, packing = CODECS["mxfp4"], Packing(4, order)
    every = (np.arange(1 << 16, dtype=np.uint32) << 16).view(F32)
    x = np.concatenate([probes(codec, rng), every[np.isfinite(every)]]).astype(F32)
    x = x[: len(x) // 8 * 8]
    inverse, power = F32.type(1.7182817), F32.type(2.0**-3)
    made = [run.made(len(x) // 8, U32) for _ in range(3)]
    kind = facts.packing_type(packing)
    count = len(x) // 8
    run.run(words("e2m1", kind), count, run.given(x), *made, float(inverse), float(power), count)
    short = (x.view(np.uint32) & 0xFFFF0000).view(F32)
    with np.errstate(over="ignore"):
        for found, z in zip(made, (x, x * inverse, short * power), strict=True):
            wanted = packing.pack(codec.encode(z)[None], 0)[0].view(np.uint32)
            assert (found == wanted).all()


# ---- packings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", PACKINGS, ids=facts.packing_type)
@in_turn("count", [1, 31, 32, 997])
def test_packings(packing, count, run, rng):
    """Codes out of a row, and words of a row whose tail is padded."""
    codes = rng.integers(0, 1 << packing.bits, (1, count), np.uint32)
    small = codes.astype(np.uint16 if packing.bits == 16 else np.uint8)
    pad = (1 << packing.bits) - 2
    row = np.ascontiguousarray(packing.pack(small, pad)[0]).view(f"u{packing.dtype.itemsize}")
    got, made = run.made(count, U32), run.made(len(row), row.dtype)
    arguments = (run.given(codes[0]), run.given(row), got, made, pad, count, len(row))
    run.run(packing_words(packing), max(count, len(row)), *arguments)
    assert (got == codes[0]).all()
    assert (made == row).all()


# ---- statistics and scales ----------------------------------------------------------------------


def rows_of(rng) -> np.ndarray:
    """Rows with ties, zeros of both signs, numbers of one sign, NaN and infinity."""
    normal = rng.standard_normal((40, 24)).astype(np.float32)
    ties = rng.choice(np.float32([-2, -1, -0.0, 0, 1, 2]), (40, 24))
    zeros = rng.choice(np.float32([-0.0, 0]), (8, 24))
    lost = normal[:8].copy()
    lost[:4, ::7], lost[2:6, 11], lost[6:, 3] = np.nan, np.inf, -np.inf
    return np.concatenate([normal, ties, zeros, np.abs(normal), -np.abs(ties), lost])


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("rule", ["AbsMax", "SignedMax", "Range"])
def test_statistics(rule, zero, run, rng):
    x = rows_of(rng)
    found, lost = run.made(len(x), F32), run.made(len(x), U8)
    run.run(words("statistic", rule), len(x), run.given(x), found, lost, zero, *x.shape)
    bad = ~np.isfinite(x).all(1)
    assert (lost == bad).all()
    furthest = x[np.arange(len(x)), np.abs(x).argmax(1)]
    low, high = x.min(1), x.max(1)
    if zero:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
    with np.errstate(invalid="ignore"):
        wanted = {"AbsMax": np.abs(furthest), "SignedMax": furthest, "Range": high - low}[rule]
    good = ~bad
    assert (found[good] == wanted[good]).all()
    if rule == "SignedMax":
        assert (np.signbit(found[good]) == np.signbit(wanted[good])).all()


def test_sums_that_are_exact_in_any_order_are_known(run, rng):
    """A sum that is said to be so is the one in index order; sums of like numbers are said so."""
    like = rng.standard_normal((50, 200)).astype(np.float16).astype(np.float32)
    wild = (rng.standard_normal((50, 200)) * np.exp2(rng.integers(-120, 120, (50, 200)))).astype(
        F32
    )
    x = np.concatenate([like, wild, np.zeros((2, 200), np.float32)])
    sums, exact = run.made(len(x), np.dtype(np.float64)), run.made(len(x), U8)
    run.run(words("means"), len(x), run.given(x), sums, exact, *x.shape)
    in_order = np.cumsum(np.abs(x), axis=1, dtype=np.float64)[:, -1]
    assert exact[:50].all() and exact[-2:].all() and not exact[50:100].any()
    assert (sums == in_order)[exact != 0].all()


@pytest.mark.parametrize("peak", PEAKS)
def test_division_by_a_peak_is_a_division(peak, run):
    """Every mantissa of one exponent, and numbers of every exponent."""
    wrong = run.emulator.zeros((1,), U32)
    grid = Launch(dividing(peak), (4, 1, 1), THREADS)
    mantissas = 1 << (23 if np.frexp(peak)[0] not in (0.5, -0.5) else 10)
    one = int(np.float32(1).view(np.uint32))
    for first, step, count in ((one, 1, mantissas), (0, 4099, 1 << 19)):
        run.emulator.launch(grid, first, step, count, wrong.ctypes.data)
    assert wrong[0] == 0


@pytest.mark.parametrize("emax", [0, 2, 8, 15])
def test_powers_and_usable_inverses(emax, run, rng):
    x = np.concatenate(
        [
            np.exp2(np.arange(-149, 128, dtype=np.float32)),
            np.abs(rng.integers(1, 0x7F800000, 4000, np.uint32).view(np.float32)),
            np.float32([0]),
        ]
    )
    found, is_usable = run.made(len(x), F32), run.made(len(x), U8)
    run.run(words("powers"), len(x), run.given(x), emax, found, is_usable, len(x))
    exponent = np.clip(np.frexp(x)[1] - 1 - emax, -127, 127)
    assert (found == np.where(x == 0, 0, np.ldexp(np.float32(1), exponent))).all()
    with np.errstate(all="ignore"):
        inverse = np.float32(1) / x
    assert (is_usable == (np.isfinite(inverse) & (inverse != 0))).all()


@pytest.mark.parametrize("kind", ["Float32", "Float16", "E8M0", "E4M3"])
def test_stored_scales(kind, run, rng):
    """Rounded once, saturating; NaN is the canonical one."""
    x = rng.integers(0, 0x7F800000, 20000, np.uint32).view(np.float32)
    near = np.float32(
        [65504, 65519.99, 65520, 448, 464, 464.00003, 6e-8, 2.9e-8, 0, np.inf, np.nan]
    )
    x = np.concatenate([x, np.exp2(rng.uniform(-26, 17, 5000)).astype(np.float32), near])
    if kind == "E8M0":
        x = np.append(np.exp2(np.arange(-127, 128, dtype=np.float32)), np.float32([0, np.nan]))
    stored, effective = run.made(len(x), U32), run.made(len(x), F32)
    overflow = run.made(len(x), U8)
    arguments = (run.given(x), stored, effective, overflow, len(x))
    run.run(words("storing", f"Stored::{kind}"), len(x), *arguments)
    if kind == "E8M0":
        exponent = np.where(x == 0, 0, np.frexp(np.where(np.isnan(x), 1, x))[1] + 126)
        assert (stored == np.where(np.isnan(x), 255, exponent)).all() and not overflow.any()
        return
    dtype = {"Float16": np.float16, "E4M3": ml_dtypes.float8_e4m3fn}.get(kind, np.float32)
    top = np.float32(ml_dtypes.finfo(dtype).max)
    with np.errstate(over="ignore"):
        rounded = x.astype(dtype)
    over = ~np.isfinite(rounded) & ~np.isnan(x)
    wanted = np.where(over, top, rounded.astype(np.float32))
    assert (overflow == over).all()
    nan = np.isnan(x)
    assert (effective[~nan] == wanted[~nan]).all()
    assert (stored[~nan] == wanted[~nan].astype(dtype).view(f"u{np.dtype(dtype).itemsize}")).all()
    canonical = {"Float16": 0x7E00, "E4M3": 0x7F}.get(kind, 0x7FC00000)
    assert (stored[nan] == canonical).all()


def test_float64_is_rounded_to_float16_once(run, rng):
    """Through a float32 that is odd where it is not exact; the nasty ones lie beside a tie."""
    ties = (rng.integers(0, 0x7BFF, 4000).astype(np.uint16)).view(np.float16).astype(np.float64)
    steps = np.spacing(ties.astype(np.float16)).astype(np.float64)
    half = ties + steps / 2
    x = np.concatenate([half, half * (1 + 2.0**-40), half * (1 - 2.0**-40), ties])
    found = run.made(len(x), U32)
    run.run(words("odd"), len(x), run.given(x), found, len(x))
    with np.errstate(over="ignore"):
        assert (found == x.astype(np.float16).view(np.uint16)).all()


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**64 - 1])
def test_draws_are_the_references(seed, run, rng):
    """For any index: arrays of more than 2^32 elements draw numbers of their own, too."""
    edges = np.array([0, 1, 2**31, 2**32 - 1, 2**32, 2**40 + 7, 2**63], np.uint64)
    index = np.concatenate([edges, rng.integers(0, 2**63, 1000, np.uint64)])
    found = run.made(len(index), F32)
    run.run(words("draws"), len(index), run.given(index), found, seed, len(index))
    assert (found == uniform(seed, index)).all()
