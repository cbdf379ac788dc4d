"""Options that change how an array lies, and leave what kernels see: `Format.plain`."""

from dataclasses import replace

import numpy as np

from cuquant.errors import clipped
from cuquant.formats.codecs import Uniform
from cuquant.formats.format import Format
from cuquant.formats.scales import FLAT, Scale


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
