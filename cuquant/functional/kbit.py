"""k-bit codebooks of a flat array: codes in uint32 words and a scale for each block."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cuquant import interop
from cuquant.array.quant_array import QuantArray
from cuquant.errors import FormatError
from cuquant.formats import Codebook, Format, get_format
from cuquant.formats import Packing as Order
from cuquant.formats.names import Levels, Packing
from cuquant.functional.checks import extents, flat, floats, integer, like, typed
from cuquant.ops.plain_arrays import pack_codes, unpack_codes
from cuquant.ops.quantize.door import quantize

MAP_ENTRIES = 256


def quantize_kbit(
    x: Any, k: int, levels: Levels = "lloyd", block_size: int = 32, packing: Packing = "dense"
) -> tuple[Any, Any]:
    """Quantize to the nearest of up to 2^k levels, k = 2..8, block by block.

    Parameters
    ----------
    x
        NumPy, CuPy or torch array of float32, float16 or bfloat16, any shape but 0-d; it is
        flattened.
    k
        Bits of a code, 2 to 8.
    levels
        "lloyd" (least squared error on normal data, scaled by the signed maximum), "normal",
        "linear", or an array of 2 to 2^k ascending values (scaled by absmax).
    block_size
        Elements that share a scale, a multiple of 8.
    packing
        "dense": a bit stream, code i from bit i * k on; "word": 32 // k codes in each word;
        "planes": word b of 32 elements holds bit b of each code. Low bits come first.

    Returns
    -------
    packed
        uint32, one axis; the unused tail holds the code of 0.
    scale
        float16 [ceil(n / block_size)].

    Raises
    ------
    TypeError
        Where x is no array of these dtypes.
    ValueError
        For another k, block size, packing or levels that do not fit k.

    Notes
    -----
    The formats k2..k8 of `cuquant.quantize`, which keep rows apart instead of flattening. The
    planes are those of bitsandbytes' k-bit branch (pull request 1858).

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> x = np.linspace(-1, 1, 64, dtype=np.float32)
    >>> packed, scale = cq.functional.quantize_kbit(x, 3)
    >>> packed.shape, scale
    ((6,), array([-1.,  1.], dtype=float16))
    """
    fmt = _format(k, levels, block_size, packing)
    parts = quantize(flat(x), fmt).components
    return parts["packed"], parts["scale"]


def dequantize_kbit(
    packed: Any,
    scale: Any,
    k: int,
    shape: int | Sequence[int],
    levels: Levels = "lloyd",
    block_size: int = 32,
    packing: Packing = "dense",
    dtype: object = "float32",
) -> Any:
    """The values of `quantize_kbit`'s arrays: level of the code times scale, rounded once.

    Parameters
    ----------
    packed
        uint32 (or int32 with the same bits), as `quantize_kbit` gives it.
    scale
        Floats [ceil(n / block_size)].
    k
        Bits of a code, 2 to 8.
    shape
        Of the result, n elements.
    levels, block_size, packing
        As they were quantized with.
    dtype
        float32, float16 or bfloat16.

    Returns
    -------
    Array of `shape` and `dtype`, of packed's kind and on its device.

    Raises
    ------
    TypeError
        For another dtype of packed, scale or the result.
    ValueError
        For another k, block size, packing or levels that do not fit k.
    FormatError
        Where the lengths contradict each other, or a code has no level (on a GPU, where looking
        for one would wait, it stands for NaN).

    Notes
    -----
    The formats k2..k8 of `cuquant.quantize`.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> x = np.array([-1, -0.5, 0, 1] * 8, np.float32)
    >>> packed, scale = cq.functional.quantize_kbit(x, 2, levels=[-1, 0, 1])
    >>> cq.functional.dequantize_kbit(packed, scale, 2, (8, 4), levels=[-1, 0, 1])[0]
    array([-1., -1.,  0.,  1.], dtype=float32)
    """
    scale = floats(scale, "scale", near=packed).reshape(-1)
    if interop.dtype_of(scale) != np.float16:  # what the format stores; other floats as float32
        scale = interop.astype(scale, np.float32)
    fmt = _format(k, levels, block_size, packing, interop.dtype_of(scale).name)
    shape = extents(shape)
    count = math.prod(shape)
    words = _words(packed, fmt.row_packing, count)
    _, (blocks,) = (part.shape for part in fmt.components((count,)))
    if len(scale) != blocks:
        raise FormatError(f"scale has {len(scale)} entries; {count} elements have {blocks} blocks")
    parts = {"packed": words, "scale": scale}
    q = QuantArray(fmt, (count,), np.dtype(np.float32), parts, (0,))
    if not interop.is_on_gpu(words):
        _check_codes(q)
    return like(q.dequantize(dtype=dtype).reshape(shape), packed)


def convert_packing(
    packed: Any, k: int, n: int, source: Packing, target: Packing, levels: Levels = "lloyd"
) -> Any:
    """The same n codes in another packing of `quantize_kbit`.

    Parameters
    ----------
    packed
        uint32 (or int32 with the same bits), one axis, packed as `source`.
    k
        Bits of a code, 2 to 8.
    n
        Codes.
    source, target
        "dense", "word" or "planes".
    levels
        Those of the codes; they decide only what fills the unused tail, the code of 0.

    Returns
    -------
    uint32, one axis, of packed's kind: what `quantize_kbit(..., packing=target)` gives.

    Raises
    ------
    TypeError
        For another dtype of packed.
    ValueError
        For another k or packing.
    FormatError
        Where packed has not the words of n codes.

    Notes
    -----
    The packings: `cuquant.formats.Packing`.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> dense = np.array([0b10_01_00], np.uint32)
    >>> [f"{word:b}" for word in cq.functional.convert_packing(dense, 2, 16, "dense", "word")]
    ['100100']
    """
    formats = [_format(k, levels, None, packing) for packing in (source, target)]
    before, after = (fmt.row_packing for fmt in formats)
    n = integer(n, "n", 0)
    codes = unpack_codes(_words(packed, before, n), before, n)
    return like(pack_codes(codes, after, formats[1].zero_code), packed)


def compact_codebook(map256: Any) -> tuple[Any, Any]:
    """The distinct values of a padded codebook, ascending, zero kept.

    bitsandbytes stores every map in 256 entries: its 3-bit linear map is 7 levels around 249
    zeros, so 7 levels come back, not 2^3.

    Parameters
    ----------
    map256
        Floats, one axis of 1 to 256 finite entries in any order; on a GPU this waits for them.

    Returns
    -------
    levels
        float32 [count], ascending and distinct; `quantize_kbit(levels=)` takes them.
    index
        int64 [count]: where each level stands in map256, the first place of several.

    Raises
    ------
    TypeError
        Where map256 is no array of floats.
    ValueError
        For another shape, NaN or infinity.

    Notes
    -----
    The maps: create_linear_map and the other create_*_map of bitsandbytes' functional.py. Their
    torch.linspace may miss 0 in its middle, by 2.98e-8 in the 3-bit map; where zeros pad the map,
    a lone value within 2^-23 of the largest is that residue and counts as zero.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> third = np.linspace(-1, 1, 7, dtype=np.float32)
    >>> map256 = np.concatenate([third[:3], np.zeros(249, np.float32), third[3:]])
    >>> cq.functional.compact_codebook(map256)[1]
    array([  0,   1,   2,   3, 253, 254, 255])
    """
    host = interop.to_host(map256, "map256")
    if host.dtype.kind != "f" and host.dtype.name != "bfloat16":
        raise TypeError(f"map256 must hold floats, got {host.dtype}")
    if host.ndim != 1 or not 1 <= host.size <= MAP_ENTRIES:
        raise ValueError(f"map256 has shape {host.shape}; it must be one axis of 1 to 256 entries")
    with np.errstate(over="ignore"):
        values = host.astype(np.float32)
    if not np.isfinite(values).all():
        raise ValueError("map256 must be finite, in float32")
    zeros = np.flatnonzero(values == 0)
    if len(zeros) > 1:
        values[_residue(values)] = 0
    levels, index = np.unique(values, return_index=True)
    index[levels == 0] = zeros[:1]  # an exact 0.0, not the residue that counts as one
    return like(levels + np.float32(0), map256), like(index.astype(np.int64), map256)


def _residue(values: np.ndarray) -> np.ndarray:
    """Where the lone nonzero value within rounding of zero stands; nowhere if there are several.

    Several are levels: bitsandbytes' fp8 e5m2 map has two zeros beside 70 values that small.
    """
    size = np.abs(values)
    small = np.flatnonzero((size > 0) & (size <= np.float32(2**-23) * size.max()))
    return small if len(small) == 1 else small[:0]


def _format(
    k: Any, levels: Any, block_size: Any, packing: Any, scale_dtype: str | None = None
) -> Format:
    k = integer(k, "k", 2, 8)
    if block_size is not None:
        block_size = integer(block_size, "block_size", 1)
    if interop.kind(levels):
        levels = interop.to_host(levels, "levels")
    options = {"block_size": block_size, "packing": packing, "scale_dtype": scale_dtype}
    return get_format(f"k{k}", levels=levels, **options)


def _words(packed: Any, packing: Order, count: int) -> Any:
    words = typed(packed, "packed", np.uint32, np.int32, near=packed)
    shape = tuple(words.shape)
    if shape != (packing.words(count),):
        raise FormatError(
            f"packed has shape {shape}; {count} codes of {packing.bits} bits in packing "
            f"{packing.order!r} are {packing.words(count)} words in one axis"
        )
    return interop.viewed(interop.contiguous(words), np.uint32)


def _check_codes(q: QuantArray) -> None:
    """FormatError for a code above the last level, where there are fewer than 2^k."""
    codec = q.format.codec
    count = len(codec.levels) if isinstance(codec, Codebook) else 0
    if count == 1 << q.format.bits or not q.size:
        return
    highest = int(q.codes().max())
    if highest >= count:
        raise FormatError(f"packed holds code {highest}, and there are only {count} levels")
