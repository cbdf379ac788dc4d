"""What readers share: slabs of rows, and rows that are unpacked some at a time."""

import tracemalloc

import numpy as np
import pytest

import cuquant as cq
from cuquant.io.schema import pieces
from cuquant.io.schema.pieces import of_slabs, packed_by_rows

RNG = np.random.default_rng(2)
SHIFTS = {4: (4, 0), 2: (0, 2, 4, 6), 3: tuple(range(27, -1, -3))}


@pytest.mark.parametrize("bits", SHIFTS)
def test_slabs_give_any_rows(bits):
    shifts, tall = SHIFTS[bits], 5
    codes = RNG.integers(0, 1 << bits, (len(shifts) * tall, 8)).astype(np.uint8)
    words = np.zeros((tall, 8), np.int32 if bits == 3 else np.uint8)
    for slab, shift in enumerate(shifts):
        words |= codes[slab * tall : (slab + 1) * tall].astype(words.dtype) << shift
    for start in range(len(codes) + 1):
        for stop in range(start, len(codes) + 1):
            found = of_slabs(words, bits, shifts, start, stop)
            np.testing.assert_array_equal(found, codes[start:stop])
    with pytest.raises(ValueError, match="slabs of 5"):
        of_slabs(words, bits, shifts, 0, len(codes) + 1)


def test_rows_are_packed_some_at_a_time(monkeypatch):
    fmt = cq.get_format("uint3:32+min")
    codes = RNG.integers(0, 8, (37, 64)).astype(np.uint8)
    want = fmt.row_packing.pack(codes, fmt.zero_code)
    for chunk in (1, 64 * 9, 1 << 19):
        monkeypatch.setattr(pieces, "CHUNK", chunk)
        found = packed_by_rows(fmt, 37, 64, lambda a, b: codes[a:b])
        np.testing.assert_array_equal(found, want, f"{chunk}")
    assert packed_by_rows(fmt, 0, 64, lambda a, b: codes[a:b]).shape == (0, want.shape[1])


def test_memory_holds_the_array_and_what_is_read(tmp_path):
    """2 x 8 MB of codes, and a few MB of those that are unpacked."""
    rows, depth = 4096, 4096
    groups = rows * depth // 128
    tensors = {
        "a.weight._data._data": np.zeros((groups // 2, 128), np.uint8),
        "a.weight._scale": np.ones((groups, 1), np.float16),
        "a.weight._shift": np.ones((groups, 1), np.float16),
        "a.bias": np.zeros(rows, np.float16),
    }
    cq.save(tmp_path / "m.safetensors", tensors)
    with cq.open(tmp_path / "m.safetensors") as file:
        entry = file["a.weight"]
        tracemalloc.start()
        q = entry.read()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert q.shape == (rows, depth)
    assert peak < 2.5 * q.nbytes
