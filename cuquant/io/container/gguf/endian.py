"""Big-endian files: numbers are turned; whether blocks are to be turned, their scales tell.

`gguf.GGUFWriter` turns plain arrays and leaves blocks as they are. gguf-convert-endian turns the
float16 scales inside blocks too, of the types that it knows. BF16 comes both ways from the writer,
which is often handed its bytes. Nothing in the file says which of them made it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cuquant.io.container.gguf.types import GgufType

# Where the float16 scales lie in a block, in bytes; other types are never turned.
SCALES = {"Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}

BF16 = "BF16"
SAMPLE_BLOCKS = 256  # of a tensor that is looked at
SAMPLE_TENSORS = 64


@dataclass(frozen=True)
class Turned:
    """What of a big-endian file is turned, beside the other plain numbers."""

    scales: bool = False
    bf16: bool = False


def is_told_by_samples(kind: GgufType) -> bool:
    """Whether a tensor's bytes are needed to know how it is stored."""
    return kind.name in SCALES or kind.name == BF16


def turned(samples: list[tuple[GgufType, np.ndarray]]) -> Turned:
    """Decide from the first blocks of tensors, uint8 [whole blocks] each."""
    scales = [scale_words(stored, kind).ravel() for kind, stored in samples if kind.name in SCALES]
    plain = [stored.view("<u2") for kind, stored in samples if kind.name == BF16]
    return Turned(
        scales=bool(scales) and is_turned(np.concatenate(scales), mantissa_bits=10),
        # Weights are near 1, next to the range of bfloat16.
        bf16=bool(plain) and is_turned(np.concatenate(plain), mantissa_bits=7, middle=127),
    )


def is_turned(words: np.ndarray, mantissa_bits: int, middle: int | None = None) -> bool:
    """Whether 16-bit floats make more sense with their bytes exchanged.

    Parameters
    ----------
    words : numpy.ndarray
        Little-endian uint16 [n], as they are stored.
    mantissa_bits : int
    middle : int, optional
        The exponent field about which they lie; None: their median.

    Examples
    --------
    >>> scales = np.array([0.011, 0.013, 0.012], "<f2").view("<u2")
    >>> is_turned(scales, 10), is_turned(scales.byteswap(), 10)
    (False, True)
    """
    words = words[words != 0]
    if not words.size:
        return False
    as_they_are, exchanged = (_oddness(w, mantissa_bits, middle) for w in (words, words.byteswap()))
    return exchanged < as_they_are


def _oddness(words: np.ndarray, mantissa_bits: int, middle: int | None) -> tuple[int, float]:
    """How many are not finite, and how far exponents are from each other or from the middle.

    The exponents of exchanged bytes come from a mantissa: they are as good as random.
    """
    exponents = ((words & 0x7FFF) >> mantissa_bits).astype(np.int64)
    infinite = int((exponents == 0x7FFF >> mantissa_bits).sum())
    middle = int(np.median(exponents)) if middle is None else middle
    return infinite, float(np.abs(exponents - middle).mean())


def scale_words(stored: np.ndarray, kind: GgufType) -> np.ndarray:
    """The float16 scales of blocks as uint16 [blocks, scales of a block], copied."""
    blocks = stored.reshape(-1, kind.nbytes)
    at = [byte + i for byte in SCALES[kind.name] for i in (0, 1)]
    return np.ascontiguousarray(blocks[:, at]).view("<u2")


def turn(stored: np.ndarray, kind: GgufType, how: Turned) -> None:
    """Make the bytes of whole blocks, uint8 [nbytes], those of a little-endian file, in place."""
    if kind.name == BF16 and not how.bf16:
        return
    if kind.is_plain:
        stored.view(f"u{kind.nbytes}").byteswap(inplace=True)
    elif how.scales and kind.name in SCALES:
        blocks = stored.reshape(-1, kind.nbytes)
        for byte in SCALES[kind.name]:
            blocks[:, [byte, byte + 1]] = blocks[:, [byte + 1, byte]]
