"""The searching kernel has the reference's bytes, on the CPU under the emulator."""

import ml_dtypes
import numpy as np
import pytest
from emulator import Emulator, compiler
from samples import sampled

from cuquant import reference
from cuquant.formats import get_format
from cuquant.formats.blocks import BLOCK_LAYOUTS
from cuquant.formats.search import SEARCHES
from cuquant.ops.quantize.search import MOST_PIECES, Search, pieces, search_facts

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to compile kernels with")

F32 = np.float32
NAMES = sorted(SEARCHES)
DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name, name)) for name in ("float32", "float16", "bfloat16")
}
ELEMENTS = 256 * 12  # of each kind of data
TOP = float(np.finfo(F32).max)


def scattered(rng: np.random.Generator) -> np.ndarray:
    """Rows of ELEMENTS numbers of every size, sign and distribution that has its own path."""
    n = ELEMENTS
    normal = rng.standard_normal(n)
    wild = rng.integers(0, 1 << 32, n, dtype=np.uint32).view(F32)
    sizes = np.exp2(rng.uniform(-149, 127, (n // 16, 1))) * rng.standard_normal((n // 16, 16))
    rows = [
        normal,
        rng.standard_t(3, n),
        normal + 2,  # no minimum is needed
        normal - 2,
        np.rint(normal * 3),  # ties
        rng.choice([-1.0, 1.0], n),
        np.abs(normal) ** 4,
        normal * 1e-3 + 2,  # normal equations that are nearly singular
        normal * 1e-2 - 2,
        normal * 1e-4,  # float16 scales are subnormal
        normal * 1e-6,
        normal * 1e-30,
        normal * 1e-38,
        normal * 1e-42,
        normal * 1e9,  # infinite, or saturating
        np.clip(normal, -1, 1) * TOP,
        np.zeros(n),
        np.full(n, -0.0),
        np.repeat(rng.standard_normal(n // 32), 32),  # constant sub-blocks
        np.repeat(rng.standard_normal(n // 256), 256),
        np.where(np.arange(n) % 37, normal, normal * 1e4),  # outliers
        np.where(np.arange(n) // 16 % 2, normal, normal * 1e-38),
        np.where(np.arange(n) // 32 % 3, 0, normal),  # zero sub-blocks
        np.where(np.arange(n) % 7, -0.0, normal),
        sizes.reshape(-1),
        np.nan_to_num(wild, nan=1.0, posinf=TOP, neginf=-TOP),
    ]
    with np.errstate(over="ignore"):
        return np.clip(np.stack(rows), -TOP, TOP).astype(F32)


def with_nonfinite(rng: np.random.Generator) -> np.ndarray:
    x = rng.standard_normal((4, ELEMENTS)).astype(F32)
    x[0, ::97] = np.nan
    x[1, ::301] = np.inf
    x[2, ::301] = -np.inf
    x[3, ::1024], x[3, 1::700] = np.nan, np.inf
    return x


@pytest.fixture(scope="module", autouse=True)
def built():
    programs = [
        Search(get_format(name)).launch(dtype, 1).program
        for name in NAMES
        for dtype in DTYPES.values()
    ]
    Emulator().build(programs)


def both(name: str, x: np.ndarray, nonfinite: str, order: str = "mixed"):
    """The kernel's bytes and the reference's, of blocks of the type."""
    fmt, emulator = get_format(name), Emulator(order)
    blocks = x.reshape(-1, fmt.layout.elements)
    out = emulator.empty((len(blocks), fmt.layout.nbytes), np.dtype(np.uint8))
    clamp = nonfinite == "clamp"
    at = emulator.pointer(emulator.upload(blocks))
    Search(fmt)(
        emulator, at, x.dtype, len(blocks), emulator.pointer(out), saturate=clamp, clamp=clamp
    )
    with np.errstate(all="ignore"):
        wanted = reference.quantize(blocks, fmt, nonfinite=nonfinite)["blocks"]
    return out, wanted.reshape(out.shape)


@pytest.mark.parametrize("nonfinite", ["propagate", "clamp"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_the_references(name, dtype, nonfinite, rng):
    x = np.concatenate([scattered(rng), with_nonfinite(rng)])
    with np.errstate(over="ignore"):
        x = x.astype(DTYPES[dtype])
    found, wanted = both(name, x, nonfinite)
    wrong = np.flatnonzero((found != wanted).any(-1)) // (ELEMENTS // BLOCK_LAYOUTS[name].elements)
    assert not len(wrong), f"rows {np.unique(wrong)}"


@pytest.mark.parametrize("name", sampled(NAMES, lambda name: BLOCK_LAYOUTS[name].elements))
def test_rounding_shows_in_many_blocks(name, rng):
    """Sums in another order, or with an FMA, change some of 4096 blocks only."""
    x = rng.standard_t(5, 4096 * BLOCK_LAYOUTS[name].elements).astype(F32)
    found, wanted = both(name, x, "propagate")
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_threads_does_not_matter(name, rng):
    x = rng.standard_normal((1, ELEMENTS)).astype(F32)
    for order in ("ascending", "descending", "shuffled"):
        found, wanted = both(name, x, "propagate", order)
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 31, 33])
@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_blocks(name, count, rng):
    """Lanes without a block write nothing: the array behind the blocks is guarded."""
    x = rng.standard_normal((count, BLOCK_LAYOUTS[name].elements)).astype(F32)
    found, wanted = both(name, x, "propagate")
    assert np.array_equal(found, wanted)


def test_no_blocks_need_no_launch():
    Search(get_format("q4_k"))(Emulator(), 0, np.dtype(F32), 0, 0, saturate=False, clamp=False)


@pytest.mark.parametrize("name", NAMES)
def test_few_threads_loop_over_many_blocks(name, rng, monkeypatch):
    monkeypatch.setattr("cuquant.ops.quantize.search.MOST_GRID", 2)
    x = rng.standard_normal((1, 40 * ELEMENTS)).astype(F32)
    assert Search(get_format(name)).launch(x.dtype, x.size // 32).grid == (2, 1, 1)
    found, wanted = both(name, x, "propagate")
    assert np.array_equal(found, wanted)


def test_grids_fit_in_31_bits():
    launch = Search(get_format("iq4_nl")).launch(np.dtype(F32), 1 << 40)
    assert launch.grid == (2**31 - 1, 1, 1)


@pytest.mark.parametrize("name", NAMES)
def test_infinite_scales_are_counted(name, rng):
    fmt, emulator = get_format(name), Emulator()
    x = rng.standard_normal((9, fmt.layout.elements)).astype(F32)
    x[[2, 5, 8]] *= F32(1e12)
    x[7, 3] = np.nan
    out = emulator.empty((9, fmt.layout.nbytes), np.dtype(np.uint8))
    counter = emulator.zeros((1,), np.dtype(np.uint32))
    for saturate, wanted in ((False, 3 * fmt.layout.sub_blocks), (True, 0)):
        counter[0] = 0
        Search(fmt)(
            emulator,
            emulator.pointer(emulator.upload(x)),
            x.dtype,
            9,
            emulator.pointer(out),
            saturate=saturate,
            clamp=False,
            overflow=emulator.pointer(counter),
        )
        assert counter[0] == wanted


@pytest.mark.parametrize("name", NAMES)
def test_pieces_hold_every_bit_once(name):
    """Assembled from random fields as the kernel does, they are what `pack` makes."""
    layout, rng = BLOCK_LAYOUTS[name], np.random.default_rng(5)
    raw = rng.integers(0, 256, (50, layout.nbytes), dtype=np.uint8)
    stored = layout.stored(raw)
    sc = stored.get("sc", np.zeros((50, layout.sub_blocks), np.int8)).view(np.uint8)
    m = stored.get("m", np.zeros((50, layout.sub_blocks), np.uint8))
    halves = [stored[f].view(np.uint8).reshape(50, 2) for f in ("scale", "minimum") if f in stored]
    fields = np.concatenate([stored["codes"], sc + np.uint8(layout.sc_zero), m, *halves], axis=1)
    table = pieces(layout)
    assert table.shape == (layout.nbytes, MOST_PIECES)
    for byte, row in enumerate(table):
        value, low = np.zeros(50, np.uint32), 0
        for piece in row:
            bits = (int(piece) >> 12) + 1
            part = fields[:, piece & 511] >> (piece >> 9 & 7) & ((1 << bits) - 1)
            value |= part.astype(np.uint32) << low
            low += bits
            if low >= 8:
                break
        assert low == 8
        assert (value == raw[:, byte]).all()


def test_facts_are_named_by_what_they_say():
    texts = dict(search_facts(get_format(name)) for name in NAMES)
    assert len(texts) == len(NAMES)
    assert not any(name in text for text in texts.values() for name in NAMES)
