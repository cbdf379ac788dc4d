"""Products of ggml's blocks with q8_1 activations, on the CPU under the emulator."""

from functools import cache

import numpy as np
import pytest
from emulator import ORDERS, Emulator, Recorder, compiler
from functional_inputs import F32, FLOATS, WEIGHTS
from in_turn import in_turn
from kernel_arrays import DATA
from oracle import bits_equal
from q8_1_products import exact, operands, parts

import cuquant.functional as F
from cuquant.formats.blocks import BLOCK_LAYOUTS
from cuquant.gpu import limits as gpus
from cuquant.ops.matmul import q8_1

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to compile kernels with")


def run(backend, name: str, weights: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """float32 [M, N] by the kernel."""
    given = [backend.array(array) for array in (weights, tokens)]
    columns = tokens.shape[1] * 32
    shape = (len(weights), len(tokens), columns)
    return q8_1.gemm(backend, name, *given, shape)


# One whose groups are not whole words, one with minimums, one that is looked up in sub-blocks.
FEWER = ["q3_k", "q4_1", "nvfp4"]


class Recorder90(Recorder):
    arch = 90


class Emulator90(Emulator):
    arch = 90  # thread blocks have the shared memory that the fast launches want


@cache
def built() -> None:
    recorder, narrow = Recorder90(), Recorder()
    for name in WEIGHTS:
        for m, n in ((1, 1), (1, 5), (1, 9), (33, 1), (33, 5), (33, 9), (130, 65)):
            run(recorder, name, *operands(name, m, n, 1))
        if name in FEWER:
            run(narrow, name, *operands(name, 1, 5, 1))
    for dtype in FLOATS:
        recorder.launch(q8_1.values_launch(dtype, 1))
    Emulator().build([*recorder.programs, *narrow.programs])


@pytest.fixture(scope="module", autouse=True)
def kernels_are_built():
    built()


# M, N and blocks of K. Rows of 9 or 33 blocks are no multiple of 4 bytes in some types; 70 blocks
# are 9 groups of 256 columns and more: a warp's second turn. More than 32 rows: warps share tokens,
# of which the last ones have no row.
SHAPES = [(1, 1, 1), (16, 8, 2), (17, 4, 3), (35, 17, 9), (3, 5, 33), (2, 2, 70)]
SHAPES += [(33, 4, 9), (49, 7, 70)]


@pytest.mark.parametrize("name", WEIGHTS)
@in_turn("shape", SHAPES)
def test_products(name, shape):
    weights, tokens = operands(name, *shape)
    found = run(Emulator90(), name, weights, tokens)
    wanted, bound = exact(name, weights, tokens)
    assert found.shape == shape[:2] and found.dtype == F32
    assert (np.abs(found - wanted) <= bound).all()
    if shape[0] > 1:
        assert np.abs(wanted).max() > 50 * bound.max()  # so it is a tight one


@pytest.mark.parametrize(("m", "n", "columns"), [(130, 67, 1280), (129, 17, 256)])
@pytest.mark.parametrize("name", WEIGHTS)
def test_tiles_of_many_rows_and_tokens(name, m, n, columns):
    """Two row tiles, the last one with warps that have no row, and tokens beside whole tiles."""
    assert q8_1.operand(name).launch(m, n, 90, 2).program.entry == "matmul_q8_1_tiles"
    weights, tokens = operands(name, m, n, columns // BLOCK_LAYOUTS[name].elements)
    found = run(Emulator90(), name, weights, tokens)
    wanted, bound = exact(name, weights, tokens)
    assert (np.abs(found - wanted) <= bound).all()


def test_tiles_of_rows_that_are_no_whole_words():
    weights, tokens = operands("q4_0", 130, 17, 25)
    found = run(Emulator90(), "q4_0", weights, tokens)
    wanted, bound = exact("q4_0", weights, tokens)
    assert (np.abs(found - wanted) <= bound).all()


@pytest.mark.parametrize(
    ("m", "n", "arch", "entry", "tokens", "threads"),
    [
        (4096, 1, 90, "matmul_q8_1", 4, 256),  # one token is not shared
        (4096, 2, 90, "matmul_q8_1", 4, 512),
        (2048, 2, 90, "matmul_q8_1", 4, 256),  # sharing warps would leave half idle
        (4096, 8, 90, "matmul_q8_1", 8, 512),
        (4096, 128, 90, "matmul_q8_1", 16, 512),  # and 64 tiles would
        (4096, 192, 90, "matmul_q8_1_tiles", 64, 256),
        (4096, 16, 86, "matmul_q8_1", 8, 256),  # 100 KB
        (4096, 512, 86, "matmul_q8_1_tiles", 64, 256),
        (4096, 512, 75, "matmul_q8_1", 8, 128),
        (4096, 1, 999, "matmul_q8_1", 4, 128),  # a GPU that nobody knows
    ],
)
def test_launches(m, n, arch, entry, tokens, threads):
    launch = q8_1.operand("q4_0").launch(m, n, arch, 132)
    assert (launch.program.entry, launch.program.arguments[1]) == (entry, tokens)
    assert launch.threads == threads and launch.shared <= gpus.SHARED.get(arch, 64 << 10)


@pytest.mark.parametrize("name", WEIGHTS)
def test_shared_memory_is_there_on_every_gpu(name):
    for arch, limit in gpus.SHARED.items():
        for n in (1, 5, 9, 512):
            assert q8_1.operand(name).launch(4096, n, arch, 132).shared <= limit


@pytest.mark.parametrize("name", WEIGHTS)
def test_every_column_takes_part(name):
    """One weight and one activation at a time that are not 0, each in a column of its own."""
    layout = BLOCK_LAYOUTS[name]
    columns = max(256, layout.elements)
    weights, _ = operands(name, 3, 1, columns // layout.elements)
    tokens = (
        BLOCK_LAYOUTS["q8_1"]
        .pack(
            (np.eye(columns, dtype=np.uint8) + np.uint8(128)).reshape(-1, 32),
            np.ones(columns * columns // 32, F32),
            sum=np.zeros(columns * columns // 32, F32),
        )
        .reshape(columns, -1, 36)
    )
    scaled, minimum = parts(name, weights)
    found = run(Emulator90(), name, weights, tokens)
    # A code times its scale and its minimum are exact; their sum is rounded once.
    assert np.array_equal(found, (scaled + minimum).astype(F32))


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_result_does_not_depend_on_its_neighbours(name):
    weights, tokens = operands(name, 19, 9, 11)
    whole = run(Emulator90(), name, weights, tokens)
    for n in (1, 2, 4, 6):
        assert bits_equal(run(Emulator90(), name, weights[3:7], tokens[:n]), whole[3:7, :n])
    for order in ORDERS:
        assert bits_equal(run(Emulator90(order), name, weights, tokens), whole)


@pytest.mark.parametrize("name", FEWER)
def test_fewer_warps_where_shared_memory_is_small(name):
    assert Emulator().arch == 75
    weights, tokens = operands(name, 17, 5, 37)
    found = run(Emulator(), name, weights, tokens)
    wanted, bound = exact(name, weights, tokens)
    assert (np.abs(found - wanted) <= bound).all()


@pytest.mark.parametrize("name", [n for n in WEIGHTS if not n.startswith("ggml")])  # have no NaN
def test_what_is_not_finite_stays_in_its_row_and_token(name):
    layout = BLOCK_LAYOUTS[name]
    weights, tokens = operands(name, 20, 6, 9)
    width = {"half": 2, "e8m0": 1, "e4m3": 4}[layout.scale_kind]
    nan = np.array([0x7E00], "<u2").view(np.uint8) if width == 2 else np.uint8(0xFF)
    infinite = np.array([0x7C00], "<u2").view(np.uint8)
    weights[7, 3, layout.scale_byte : layout.scale_byte + width] = nan
    tokens[2, 5, :2] = np.array([0x7E00], "<u2").view(np.uint8)
    tokens[4, 1, :2] = infinite
    found = run(Emulator90(), name, weights, tokens)
    wanted = np.ones((20, 6), bool)
    wanted[7], wanted[:, 2], wanted[:, 4] = False, False, False
    assert np.array_equal(np.isfinite(found), wanted)
    assert np.isnan(found[7]).all() and np.isnan(found[:, 2]).all()
    if layout.minimum_byte is not None:
        weights[9, 0, layout.minimum_byte : layout.minimum_byte + 2] = nan
        wanted[9] = False
        found = run(Emulator90(), name, weights, tokens)
        assert np.array_equal(np.isfinite(found), wanted)


def test_the_stored_sum_is_not_read():
    weights, tokens = operands("q4_1", 4, 3, 4)
    other = tokens.copy()
    other[..., 2:4] = 0xFF
    found = [run(Emulator90(), "q4_1", weights, each) for each in (tokens, other)]
    assert bits_equal(*found)


def test_empty_products():
    weights, tokens = operands("q4_0", 2, 2, 1)
    assert run(Emulator90(), "q4_0", weights[:0], tokens).shape == (0, 2)
    assert run(Emulator90(), "q4_0", weights, tokens[:0]).shape == (2, 0)
    assert not run(Emulator90(), "q4_0", weights[:, :0], tokens[:, :0]).any()


# ---- quantize_q8_1(sum="values") ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", ["normal", "nasty"])
def test_q8_1_of_values(dtype, kind):
    x = DATA[kind]((9, 416), dtype)
    x[0, :32], x[1, :16] = 0, -x[1, 16:32]
    x[2, :32], x[2, 0] = 0.5, 127  # halves go away from zero
    emulator = Emulator90()
    found = q8_1.quantize_values(emulator, emulator.array(x), dtype, x.shape)
    assert bits_equal(found, F.quantize_q8_1(x, sum="values"))
