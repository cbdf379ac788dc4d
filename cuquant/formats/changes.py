"""What the options of `get_format` change in a format.

The first ones change what kernels see; flat, permuted, absmax, divisor and per_matrix how an array
lies, and leave that as it is: `Format.plain`.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from cuquant.errors import clipped
from cuquant.formats.codecs import Minifloat, Uniform
from cuquant.formats.format import Format
from cuquant.formats.scales import FLAT, PLAIN, Scale, check_block, is_flat


def with_block(fmt: Format, block: object) -> Format:
    """Elements that share a scale, in rows or flat."""
    block = check_block(block)
    if isinstance(block, str) and is_flat(block):
        return with_flat_blocks(fmt, block)
    if fmt.scale is None:
        raise ValueError(f"{fmt.name} has no blocks; leave block_size out")
    if fmt.is_blocks:
        if block not in (fmt.scale.block, fmt.layout.elements):
            raise ValueError(
                f"{fmt.name} has blocks of {fmt.layout.elements}, fixed by ggml; got {block}"
            )
        return fmt
    return replace(fmt, scale=replace(fmt.scale, block=block))


def with_scale_dtype(fmt: Format, dtype: object) -> Format:
    """Scales of another dtype."""
    if not isinstance(dtype, str) or dtype not in (*PLAIN, "e8m0"):
        raise ValueError(
            f"scale_dtype must be one of {', '.join(PLAIN)} or e8m0, got {clipped(dtype)}"
        )
    if fmt.scale is None or fmt.is_blocks or fmt.scale.dtype not in PLAIN:
        raise ValueError(f"the scales of {fmt.name} have a dtype of their own")
    if dtype == "e8m0":
        return _with_powers_of_two(fmt, fmt.scale)
    return replace(fmt, scale=replace(fmt.scale, dtype=dtype))


def _with_powers_of_two(fmt: Format, scale: Scale) -> Format:
    """OCP MX's rule; that of MXINT8 is the one of other integers too."""
    if isinstance(fmt.codec, Minifloat):
        peak = fmt.codec.peak
    elif isinstance(fmt.codec, Uniform) and fmt.codec.low < 0:
        peak = float(fmt.codec.high)
    else:
        raise ValueError(
            f"{fmt.name} takes no scales of e8m0, which are positive powers of two; "
            "fp4, fp6, fp8 and int2..int8 do"
        )
    return replace(fmt, scale=replace(scale, rule="e8m0", peak=peak, dtype="e8m0"))


def with_offset(fmt: Format, offset: object) -> Format:
    """A zero point or a minimum."""
    if not isinstance(offset, str) or offset not in ("zero_point", "min"):
        raise ValueError(f"offset must be 'zero_point' or 'min', got {clipped(offset)}")
    if fmt.is_blocks or fmt.offset is None:
        raise ValueError(f"{fmt.name} takes no offset=; uint2..uint8 do")
    return replace(fmt, offset=offset)


def with_double_quant(fmt: Format, flag: object) -> Format:
    """Scales that are quantized too."""
    if not isinstance(flag, (bool, np.bool_)):
        raise TypeError(f"double_quant must be True or False, got {clipped(flag)}")
    if fmt.scale is None or fmt.is_blocks or fmt.scale.dtype != "float32":
        raise ValueError(
            f"double_quant compresses float32 scales, and those of {fmt.name} are not; "
            "pass another format or get_format(..., scale_dtype='float32')"
        )
    if fmt.offset == "min":
        raise ValueError("double_quant has no place for minimums; leave out one of +dq and +min")
    return replace(fmt, scale=replace(fmt.scale, nested="double"))


def with_flat_blocks(fmt: Format, block: str) -> Format:
    """Blocks over the flattened array; "flat" alone has the size of the format's own block."""
    if fmt.scale is None:
        raise ValueError(f"{fmt.name} has no blocks; leave block_size out")
    if fmt.is_blocks:
        raise ValueError(f"{fmt.name} has ggml's blocks, which end with a row; they are never flat")
    if block == FLAT:
        own = fmt.scale.block
        if not isinstance(own, int):
            raise ValueError(
                f"{fmt.name} has no size of blocks of its own; say it, as in {fmt.name}:flat64"
            )
        block = f"{FLAT}{own}"
    return replace(fmt, scale=replace(fmt.scale, block=block))


def with_permuted(fmt: Format, flag: object) -> Format:
    """Columns sorted by group, with the permutation beside them."""
    _check_flag(flag, "permuted")
    if fmt.scale is None or fmt.is_blocks or fmt.is_flat or fmt.scale.absmax:
        raise ValueError(
            f"{fmt.name} cannot be permuted: columns are sorted by the block of a row that they "
            "lie in, as in int4+permuted"
        )
    return replace(fmt, permuted=True)


def with_absmax(fmt: Format, flag: object) -> Format:
    """The largest size in a row in place of its scale (LLM.int8())."""
    _check_flag(flag, "absmax")
    scale = fmt.scale
    is_int8 = isinstance(fmt.codec, Uniform) and fmt.bits == 8 and fmt.offset is None
    if scale is None or not is_int8 or fmt.is_blocks:
        raise ValueError(f"{fmt.name} has no absmax in place of a scale; int8 does")
    if (scale.block, scale.dtype, scale.nested, fmt.permuted) != ("row", "float32", None, False):
        raise ValueError("int8+absmax has one float32 for each row; leave other options out")
    return replace(fmt, scale=replace(scale, absmax=True))


def with_divisor(fmt: Format, flag: object) -> Format:
    """A global scale that divides the blocks' (compressed-tensors)."""
    _check_flag(flag, "divisor")
    return replace(fmt, scale=replace(_with_global_scale(fmt), divisor=True))


def with_per_matrix(fmt: Format, flag: object) -> Format:
    """A global scale for each matrix of the leading axes (experts)."""
    _check_flag(flag, "per_matrix")
    scale = _with_global_scale(fmt)
    if scale.block == "tensor":
        raise ValueError(f"{fmt} has one scale for all matrices; leave one of the two out")
    return replace(fmt, scale=replace(scale, per_matrix=True))


def _with_global_scale(fmt: Format) -> Scale:
    if fmt.scale is None or fmt.scale.nested != "global":
        raise ValueError(f"{fmt.name} has no global scale; nvfp4 does")
    if fmt.permuted or fmt.is_flat:
        raise ValueError(f"{fmt.name} with a divisor or per_matrix is neither permuted nor flat")
    return fmt.scale


def _check_flag(flag: object, name: str) -> None:
    if not isinstance(flag, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {clipped(flag)}")


CHANGES: dict[str, Callable[[Format, object], Format]] = {
    "block_size": with_block,
    "offset": with_offset,
    "scale_dtype": with_scale_dtype,
    "double_quant": with_double_quant,
    "permuted": with_permuted,
    "absmax": with_absmax,
    "divisor": with_divisor,
    "per_matrix": with_per_matrix,
}
"""By option, in the order in which they are made."""
