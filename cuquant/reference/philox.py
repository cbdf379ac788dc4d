"""Philox4x32-10 (Salmon et al., SC 2011): random bits as a pure function of a seed and an index."""

import numpy as np

MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (0x9E3779B9, 0xBB67AE85)
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


def philox(seed: int, index: np.ndarray) -> np.ndarray:
    """The first of the four uint32 words of each counter.

    Parameters
    ----------
    seed
        0 to 2^64 - 1: the key, low word first.
    index
        uint64 array: the counter's two low words; the two high ones are 0.

    Returns
    -------
    uint32 array of index's shape.

    Examples
    --------
    The known answer of Random123 for counter 0, key 0:

    >>> import numpy as np
    >>> hex(philox(0, np.zeros(1, np.uint64))[0])
    '0x6627e8d5'
    """
    words = [index & LOW, index >> HALF, np.zeros_like(index), np.zeros_like(index)]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first, second = words[0] * MULTIPLIERS[0], words[2] * MULTIPLIERS[1]
        words = [
            (second >> HALF) ^ words[1] ^ np.uint64(key[0]),
            second & LOW,
            (first >> HALF) ^ words[3] ^ np.uint64(key[1]),
            first & LOW,
        ]
        key = [(k + w) & 0xFFFFFFFF for k, w in zip(key, WEYL, strict=True)]
    return words[0].astype(np.uint32)


def uniform(seed: int, index: np.ndarray) -> np.ndarray:
    """float32 in [0, 1): the upper 24 bits of `philox`, an exact multiple of 2^-24."""
    return (philox(seed, index) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
