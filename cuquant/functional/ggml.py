"""ggml's blocks as plain bytes: quantize, dequantize and multiply, the same three for each type.

Block layouts and arithmetic: ggml-common.h and ggml-quants.c of https://github.com/ggml-org/ggml.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np

from cuquant import interop
from cuquant.array.quant_array import QuantArray
from cuquant.errors import FormatError, clipped
from cuquant.formats import get_format
from cuquant.formats.blocks import BLOCK_LAYOUTS
from cuquant.functional.checks import floats, integer, like, real, typed
from cuquant.ops.ggml import interleave
from cuquant.ops.matmul import q8_1_on_gpu
from cuquant.ops.quantize.door import quantize

F32 = np.float32
Sum = Literal["quants", "values"]
SUMS = get_args(Sum)

_QUANTIZE = """Quantize to ggml's {ggml}: blocks of {elements} elements in {nbytes} bytes.

    Parameters
    ----------
    x
        NumPy, CuPy or torch array [..., K] of float32, float16 or bfloat16; K a multiple of
        {elements}.

    Returns
    -------
    uint8 [..., K // {elements}, {nbytes}], of x's kind and on its device.

    Raises
    ------
    TypeError
        Where x is no array of these dtypes.
    ValueError
        For a 0-d x or another K.

    Notes
    -----
    The bytes of `cuquant.quantize(x, "{name}"{options}).to_blocks()`.
    Layout: block_{ggml} in ggml-common.h. {note}

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> cq.functional.quantize_{name}(np.ones((2, 512), np.float32)).shape
    (2, {blocks}, {nbytes})
    """

_DEQUANTIZE = """The values of ggml's {ggml} blocks, those of its dequantize_row_{ggml}{but}.

    Parameters
    ----------
    q
        uint8 [..., K // {elements}, {nbytes}], NumPy, CuPy or torch.
    K
        Elements of a row, checked against q if given.

    Returns
    -------
    float32 [..., K], of q's kind and on its device.

    Raises
    ------
    TypeError
        Where q is not uint8.
    FormatError
        Where the last axis of q is not {nbytes} bytes.
    ValueError
        Where K is not what q holds.

    Notes
    -----
    Layout: block_{ggml} in ggml-common.h.{note}

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> blocks = cq.functional.quantize_{name}(np.ones((2, 512), np.float32))
    >>> values = cq.functional.dequantize_{name}(blocks, 512)
    >>> values.shape, bool(abs(values - 1).max() < 0.05)
    ((2, 512), True)
    """

_GEMM = """W @ A.T of {name} weights and q8_1 activations: the values that both decode to.

    Parameters
    ----------
    weight_q
        uint8 [M, K // {elements}, {nbytes}], of `quantize_{name}`.
    activation_q
        uint8 [N, K // 32, 36], of `quantize_q8_1`.
    M, N, K
        Rows of W, rows of A and the columns of both.

    Returns
    -------
    float32 [M, N], of weight_q's kind and on its device.

    Raises
    ------
    TypeError
        Where an operand is not uint8.
    ValueError
        Where a shape is not that of M, N and K.

    Notes
    -----
    Layouts: block_{ggml} and block_q8_1 in ggml-common.h. Sums are float32: of the decoded values
    on the CPU; on a GPU of exact integer dot products of {sub_block} columns times their
    scales{offset}, in an order that M, N and the GPU decide: a call gives the same bits every
    time. The sum that activations store is not read.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> w = cq.functional.quantize_{name}(np.ones((2, 512), np.float32))
    >>> a = cq.functional.quantize_q8_1(np.ones((3, 512), np.float32))
    >>> c = cq.functional.gemm_{name}_q8_1(w, a, 2, 3, 512)
    >>> c.shape, bool(abs(c - 512).max() < 25)
    ((2, 3), True)
    """

_OWN_BYTES = """The bytes are those of ggml's quantize_row_{name}_ref. Only
    where the reciprocal of a scale is beyond float32 (scales below 2^-128: in q4_0 of numbers below
    2.4e-38) the codes are those of 0 here, and of infinities in ggml; the stored scale is 0."""
_SEARCHED = """The scales are searched for, and the bytes are not
    those of ggml's quantizer. The squared error is below that quantizer's in total, on normal and
    on Student-t numbers; a block alone may err more."""
_ROUNDED = """A tie goes to the even code, as OCP says, and
    what rounds to 0 keeps its sign; in ggml's quantizer a tie goes to the smaller size, and zeros
    are positive.{scales}"""
_QUANTIZE_NOTES = {
    "mxfp4": _ROUNDED.format(scales=" The scales are ggml's, from 2^-125 on."),
    "nvfp4": _ROUNDED.format(scales=" The scales are those of `cuquant.quantize`, not ggml's."),
    "ggml_mxfp4": """The bytes are those of ggml's quantize_row_mxfp4_ref from
    2^-125 on, below which its exponents are undefined and 0 here; NaN is quantized as 0.""",
    "ggml_nvfp4": """The bytes are those of ggml's quantize_row_nvfp4_ref. What is
    beyond its largest number, 2688, saturates, and far beyond it is 0 in ggml; NaN is quantized
    as 0.""",
}
_DEQUANTIZE_NOTES = {
    "mxfp4": """ Code 8 is -0.0 here and 0.0 in
    ggml. Of scale bytes 253 and 254 the values beyond float32 saturate here and are infinite in
    ggml; 255 is NaN here, as OCP says, and 2^128 in ggml.""",
    "nvfp4": """ Code 8 is -0.0 here and 0.0 in
    ggml. Scale bytes 0x7F and 0xFF are NaN here, as in e4m3, and 0 and 480 in ggml.""",
}


def _quantize_note(name: str) -> str:
    usual = _SEARCHED if get_format(name).rule.rule == "search" else _OWN_BYTES
    return _QUANTIZE_NOTES.get(name, usual.format(name=name))


def _named(
    function: Callable[..., Any], name: str, doc: str, type_name: str, note: str = ""
) -> None:
    layout = BLOCK_LAYOUTS[type_name]
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc.format(
        name=type_name,
        ggml=type_name.removeprefix("ggml_"),
        note=note,
        but=", but for what the notes say" if note else "",
        elements=layout.elements,
        nbytes=layout.nbytes,
        sub_block=layout.sub_block,
        offset=", and minimums" if layout.has_min else "",
        blocks=512 // layout.elements,
        options="".join(f", {k}={v}" for k, v in _options(type_name).items()),
    )


def _options(name: str) -> dict[str, Any]:
    """ggml's nvfp4 has no place for a global scale."""
    return {"global_scale": 1} if name == "nvfp4" else {}


def _quantizer(name: str) -> Callable[[Any], Any]:
    def call(x: Any) -> Any:
        q = quantize(real(x), name, **_options(name))
        if interop.is_on_gpu(x) and not q.format.is_blocks:
            return interleave(q, BLOCK_LAYOUTS[name])  # its global scale is 1: no need to look
        return q.components["blocks"] if q.format.is_blocks else q.to_blocks()

    _named(call, f"quantize_{name}", _QUANTIZE, name, _quantize_note(name))
    return call


def _dequantizer(name: str) -> Callable[..., Any]:
    def call(q: Any, K: int | None = None) -> Any:
        return like(_values(q, name, "q", K), q)

    _named(call, f"dequantize_{name}", _DEQUANTIZE, name, _DEQUANTIZE_NOTES.get(name, ""))
    return call


def _gemm(name: str) -> Callable[[Any, Any, int, int, int], Any]:
    def call(weight_q: Any, activation_q: Any, M: int, N: int, K: int) -> Any:
        M, N, K = (integer(v, n, 0) for v, n in ((M, "M"), (N, "N"), (K, "K")))
        blocks = _check_blocks(weight_q, name, "weight_q", (M, K), weight_q)
        active = _check_blocks(activation_q, "q8_1", "activation_q", (N, K), weight_q)
        if interop.is_on_gpu(weight_q):
            return q8_1_on_gpu.gemm(name, blocks, active, (M, N, K))
        weight = _values(weight_q, name, "weight_q", K)
        activation = _values(activation_q, "q8_1", "activation_q", K)
        with np.errstate(over="ignore", invalid="ignore"):
            return like(weight @ activation.T, weight_q)

    _named(call, f"gemm_{name}_q8_1", _GEMM, name)
    return call


def _values(q: Any, name: str, argument: str, K: int | None) -> Any:
    """float32 [..., K] of the blocks `q`, where they are."""
    layout = BLOCK_LAYOUTS[name]
    blocks = typed(q, argument, np.uint8, near=q)
    if blocks.ndim < 2 or blocks.shape[-1] != layout.nbytes:
        raise FormatError(
            f"{argument} has shape {tuple(blocks.shape)}; {name} blocks are "
            f"[..., K // {layout.elements}, {layout.nbytes}]"
        )
    *rows, count, _ = blocks.shape
    columns = count * layout.elements
    if K is not None and integer(K, "K", 0) != columns:
        raise ValueError(
            f"K is {K}, but {argument} has {count} blocks of {layout.elements} a row: K = {columns}"
        )
    return QuantArray.from_blocks(blocks, name, (*rows, columns)).dequantize()


def _check_blocks(q: Any, name: str, argument: str, shape: tuple[int, int], near: Any) -> Any:
    """The blocks where `near` is; ValueError unless they hold a matrix of `shape`."""
    layout = BLOCK_LAYOUTS[name]
    if shape[1] % layout.elements:
        raise ValueError(f"K is {shape[1]}; {name} needs a multiple of {layout.elements}")
    blocks = typed(q, argument, np.uint8, near=near)
    wanted = (shape[0], shape[1] // layout.elements, layout.nbytes)
    if tuple(blocks.shape) != wanted:
        raise ValueError(
            f"{argument} has shape {tuple(blocks.shape)}; {shape[0]} rows of {shape[1]} {name} "
            f"elements are {wanted}"
        )
    return blocks


quantize_q4_0 = _quantizer("q4_0")
quantize_q4_1 = _quantizer("q4_1")
quantize_q5_0 = _quantizer("q5_0")
quantize_q5_1 = _quantizer("q5_1")
quantize_q8_0 = _quantizer("q8_0")
quantize_iq4_nl = _quantizer("iq4_nl")
quantize_iq4_xs = _quantizer("iq4_xs")
quantize_q2_k = _quantizer("q2_k")
quantize_q3_k = _quantizer("q3_k")
quantize_q4_k = _quantizer("q4_k")
quantize_q5_k = _quantizer("q5_k")
quantize_q6_k = _quantizer("q6_k")
quantize_mxfp4 = _quantizer("mxfp4")
quantize_nvfp4 = _quantizer("nvfp4")
quantize_ggml_mxfp4 = _quantizer("ggml_mxfp4")
quantize_ggml_nvfp4 = _quantizer("ggml_nvfp4")

dequantize_q4_0 = _dequantizer("q4_0")
dequantize_q4_1 = _dequantizer("q4_1")
dequantize_q5_0 = _dequantizer("q5_0")
dequantize_q5_1 = _dequantizer("q5_1")
dequantize_q8_0 = _dequantizer("q8_0")
dequantize_q8_1 = _dequantizer("q8_1")
dequantize_iq4_nl = _dequantizer("iq4_nl")
dequantize_iq4_xs = _dequantizer("iq4_xs")
dequantize_q2_k = _dequantizer("q2_k")
dequantize_q3_k = _dequantizer("q3_k")
dequantize_q4_k = _dequantizer("q4_k")
dequantize_q5_k = _dequantizer("q5_k")
dequantize_q6_k = _dequantizer("q6_k")
dequantize_mxfp4 = _dequantizer("mxfp4")
dequantize_nvfp4 = _dequantizer("nvfp4")
dequantize_ggml_mxfp4 = _dequantizer("ggml_mxfp4")
dequantize_ggml_nvfp4 = _dequantizer("ggml_nvfp4")

gemm_q4_0_q8_1 = _gemm("q4_0")
gemm_q4_1_q8_1 = _gemm("q4_1")
gemm_q5_0_q8_1 = _gemm("q5_0")
gemm_q5_1_q8_1 = _gemm("q5_1")
gemm_q8_0_q8_1 = _gemm("q8_0")
gemm_iq4_nl_q8_1 = _gemm("iq4_nl")
gemm_iq4_xs_q8_1 = _gemm("iq4_xs")
gemm_q2_k_q8_1 = _gemm("q2_k")
gemm_q3_k_q8_1 = _gemm("q3_k")
gemm_q4_k_q8_1 = _gemm("q4_k")
gemm_q5_k_q8_1 = _gemm("q5_k")
gemm_q6_k_q8_1 = _gemm("q6_k")
gemm_mxfp4_q8_1 = _gemm("mxfp4")
gemm_nvfp4_q8_1 = _gemm("nvfp4")
gemm_ggml_mxfp4_q8_1 = _gemm("ggml_mxfp4")
gemm_ggml_nvfp4_q8_1 = _gemm("ggml_nvfp4")


def quantize_q8_1(x: Any, sum: Sum = "quants") -> Any:
    """Quantize activations to ggml's q8_1: 32 int8, their scale and a sum in 36 bytes.

    Parameters
    ----------
    x
        NumPy, CuPy or torch array [..., K] of float32, float16 or bfloat16; K a multiple of 32.
    sum
        What the sum is of. "quants": scale * sum of the int8 (ggml-quants.c). "values": of the 32
        original values, as llama.cpp's CUDA kernel adds them; its int8 come from a true division
        by the scale, where the other has a product with its reciprocal.

    Returns
    -------
    uint8 [..., K // 32, 36], of x's kind and on its device.

    Raises
    ------
    TypeError
        Where x is no array of these dtypes.
    ValueError
        For a 0-d x, another K or another `sum`.

    Notes
    -----
    Layout: block_q8_1 in ggml-common.h; "quants": quantize_row_q8_1_ref in ggml-quants.c;
    "values": quantize_q8_1 in ggml-cuda/quantize.cu.

    Examples
    --------
    >>> import numpy as np, cuquant as cq
    >>> x = np.array([[1.0] + [0.002] * 31], np.float32)
    >>> blocks = [cq.functional.quantize_q8_1(x, sum=kind) for kind in ("quants", "values")]
    >>> blocks[0].shape, [block[0, 0, 2:4].view(np.float16).item() for block in blocks]
    ((1, 1, 36), [1.0, 1.0615234375])
    """
    if sum not in SUMS:
        raise ValueError(f"sum must be one of {SUMS}, got {clipped(sum)}")
    if sum == "quants":
        return quantize(real(x), "q8_1").components["blocks"]
    fmt = get_format("q8_1")
    host = floats(x, "x", near=x)
    fmt.check_shape(tuple(host.shape))
    if interop.is_on_gpu(host):
        return q8_1_on_gpu.quantize_values(host)
    layout = BLOCK_LAYOUTS["q8_1"]
    *rows, columns = host.shape
    blocks = _q8_1_of_values(host.astype(F32).reshape(-1, layout.elements))
    return like(blocks.reshape(*rows, columns // layout.elements, layout.nbytes), x)


def _q8_1_of_values(values: np.ndarray) -> np.ndarray:
    """uint8 [n, 36] of float32 values [n, 32]; a block with NaN or infinity is NaN."""
    fmt = get_format("q8_1")
    peak = F32(fmt.rule.peak)
    with np.errstate(all="ignore"):
        scale = np.abs(values).max(-1, keepdims=True) / peak
        scale[~np.isfinite(scale)] = np.nan
        usable = scale > 0
        quotient = np.where(usable, values / np.where(usable, scale, F32(1)), F32(0))
        total = np.where(np.isnan(scale[:, 0]), F32(np.nan), _butterfly_sum(values))
    codes = fmt.codec.encode(quotient.astype(F32))
    return BLOCK_LAYOUTS["q8_1"].pack(codes, scale, sum=total)


def _butterfly_sum(values: np.ndarray) -> np.ndarray:
    """The sum of 32 lanes as a warp adds them: lane i takes lane i ^ 16, then ^ 8, 4, 2, 1.

    Both lanes of a pair hold the same sum afterwards, so the lower half of them is enough.
    """
    while values.shape[1] > 1:
        half = values.shape[1] // 2
        values = values[:, :half] + values[:, half:]
    return values[:, 0]
