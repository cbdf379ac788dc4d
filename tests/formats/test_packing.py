import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_turn import in_turn

from cuquant.formats import Packing

PACKINGS = [Packing(1), Packing(4), Packing(4, "high"), Packing(8), Packing(8, signed=True)] + [
    Packing(k, order) for k in range(2, 9) for order in ("dense", "word", "planes")
]
IDS = [f"{p.bits}-{p.order}{'-signed' if p.signed else ''}" for p in PACKINGS]


def bit_of(words: np.ndarray, position: int) -> int:
    """Bit `position` of a row of little-endian words."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    return int(raw[position // 8] >> position % 8 & 1)


@pytest.mark.parametrize("packing", PACKINGS, ids=IDS)
@in_turn("count", [1, 2, 7, 8, 31, 32, 33, 63, 64, 127, 1000])
def test_unpack_inverts_pack(packing, count, rng):
    codes = rng.integers(0, 1 << packing.bits, (3, count), dtype=np.uint8)
    words = packing.pack(codes, pad=1)
    assert words.shape == (3, packing.words(count)) and words.dtype == packing.dtype
    assert (packing.unpack(words, count) == codes).all()


@pytest.mark.parametrize("packing", PACKINGS, ids=IDS)
@given(data=st.data())
def test_a_row_packed_alone_is_the_row_packed_with_others(packing, data):
    count = data.draw(st.integers(1, 100))
    seed = data.draw(st.integers(0, 2**32))
    codes = np.random.default_rng(seed).integers(0, 1 << packing.bits, (4, count), dtype=np.uint8)
    together = packing.pack(codes, pad=0)
    alone = [packing.pack(codes[i : i + 1], pad=0)[0] for i in range(4)]
    assert (together == np.stack(alone)).all()


@pytest.mark.parametrize("bits", range(2, 9))
def test_dense_is_a_bit_stream(bits, rng):
    codes = rng.integers(0, 1 << bits, (1, 77), dtype=np.uint8)
    words = Packing(bits, "dense").pack(codes, pad=0)[0]
    for i, code in enumerate(codes[0]):
        found = sum(bit_of(words, i * bits + b) << b for b in range(bits))
        assert found == code, f"code {i}"


@pytest.mark.parametrize("bits", range(2, 9))
def test_word_offsets_have_no_gaps(bits, rng):
    """Code i is in word i // n at bit i % n * bits, across every block border."""
    per_word = 32 // bits
    codes = rng.integers(0, 1 << bits, (1, 200), dtype=np.uint8)
    words = Packing(bits, "word").pack(codes, pad=0)[0]
    assert len(words) == -(-200 // per_word)
    for i, code in enumerate(codes[0]):
        assert int(words[i // per_word]) >> (i % per_word * bits) & ((1 << bits) - 1) == code


@pytest.mark.parametrize("bits", range(2, 9))
def test_planes_are_ballots(bits, rng):
    codes = rng.integers(0, 1 << bits, (1, 96), dtype=np.uint8)
    words = Packing(bits, "planes").pack(codes, pad=0)[0]
    for i, code in enumerate(codes[0]):
        found = sum((int(words[i // 32 * bits + b]) >> i % 32 & 1) << b for b in range(bits))
        assert found == code


def test_nibble_orders():
    codes = np.array([[1, 2, 3]], np.uint8)
    assert Packing(4, "low").pack(codes, pad=7).tolist() == [[0x21, 0x73]]
    assert Packing(4, "high").pack(codes, pad=7).tolist() == [[0x12, 0x37]]


def test_bits_come_low_first():
    codes = np.array([[1, 0, 0, 1, 1]], np.uint8)
    assert Packing(1).pack(codes, pad=1).tolist() == [[0b11111001]]


def test_the_tail_of_a_stream_holds_the_pad_code():
    """3 bits, one code: the word goes on with code 5 until it ends, inside a code."""
    stream = sum(code << 3 * i for i, code in enumerate([2] + [5] * 10)) & 0xFFFFFFFF
    assert Packing(3, "dense").pack(np.array([[2]], np.uint8), pad=5).tolist() == [[stream]]


def test_signed_bytes_are_twos_complement():
    packing = Packing(8, signed=True)
    codes = np.array([[0, 1, 127, 128, 255]], np.uint8)
    assert packing.pack(codes, pad=128).tolist() == [[-128, -127, -1, 0, 127]]
