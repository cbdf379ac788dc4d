"""explain: which kernel a product or a quantization runs, and why, without running it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from cuquant import interop
from cuquant.array.fragments import FRAGMENTS_LAYOUT, takes
from cuquant.array.packed_weight import ROWS_LAYOUT
from cuquant.errors import clipped, did_you_mean
from cuquant.formats import Format, get_format, list_formats
from cuquant.gpu.boards import Board, board_of
from cuquant.gpu.device import gpu_available
from cuquant.ops.candidate import Candidate
from cuquant.ops.explain_codes import Asked, explain_codes, swapped_problem
from cuquant.ops.explain_rows import SOURCES, explain_rows
from cuquant.ops.matmul.choose import FAMILIES, TENSOR_CORES, choose
from cuquant.ops.matmul.problem import Problem
from cuquant.ops.programs import PROGRAMS

Operation = Literal[
    "linear",
    "matmul",
    "swiglu",
    "grouped_linear",
    "quantize",
    "dequantize",
    "rmsnorm_quantize",
    "add_rmsnorm_quantize",
    "layernorm_quantize",
    "silu_mul_quantize",
    "gelu_mul_quantize",
    "hadamard_quantize",
]
PRODUCTS = ("linear", "matmul", "swiglu", "grouped_linear")
MEMORY = ("quantize", "dequantize")
FLOATS_FROM = 16  # bits of a code: formats of plain floats, which a dtype would say
# What a family's kernel is: its file in kernels/, and what it does in a few words.
KERNELS = {
    "hopper": ("matmul/hopper.cu", "weights by TMA, decoded beside wgmma"),
    "stream": ("matmul/stream.cu", "weights read once at memory speed, few rows of x"),
    "blocks": ("matmul/ggml.cu", "ggml's blocks as they lie"),
    "vendor": ("cuBLAS", "weights decoded to floats, then a GEMM"),
    "plain_rows": ("matmul/any.cu", "any strides and shapes, few rows of x"),
    "plain_tiles": ("matmul/any.cu", "any strides and shapes"),
}


@dataclass(frozen=True)
class Explanation:
    """What an operation runs, and why; `str` gives a table.

    Attributes
    ----------
    operation, format, shape, rows, dtype
        As they were asked for; shape is the weight's [N, K], or the array's, and dtype x's format
        where x is quantized.
    gpu, arch
        The GPU that times are reckoned for, and its compute capability, 90 for 9.0.
    candidates
        Kernels that take it, by weights; the first of those whose weights lie so is chosen.
    floor_us
        Microseconds that it takes at least: `floor` says why.
    floor
        "memory" or "arithmetic".
    moved_bytes
        That it must read and write, each once.
    """

    operation: str
    format: Format
    shape: tuple[int, ...]
    rows: int
    dtype: str
    gpu: str
    arch: int
    candidates: tuple[Candidate, ...]
    floor_us: float
    floor: str
    moved_bytes: int

    @property
    def chosen(self) -> Candidate:
        """The kernel that runs; of a product the one for prepacked weights where there is one."""
        return next(c for c in self.candidates if c.is_chosen)

    def __str__(self) -> str:
        what = " x ".join(map(str, self.shape))
        of_x = (
            f", {self.rows} row{'s' * (self.rows > 1)} of x" if self.operation in PRODUCTS else ""
        )
        lines = [f"{self.operation} {self.format} {what}{of_x} {self.dtype} on {self.gpu}"]
        table = [("", "kernel", "weights", "us", "")]
        for c in self.candidates:
            us = "" if c.estimated_us is None else f"{c.estimated_us:.1f}"
            table.append(("*" if c.is_chosen else "", c.kernel, c.weights, us, c.note))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for row in table:
            cells = (
                text.rjust(width) if i == 3 else text.ljust(width)
                for i, (text, width) in enumerate(zip(row, widths, strict=True))
            )
            lines.append("  ".join(cells).rstrip())
        size = f"{self.moved_bytes / 1e6:.1f} MB"
        lines.append(f"floor: {self.floor_us:.1f} us, of {self.floor}; {size}; * is what runs")
        return "\n".join(lines)


def explain(
    operation: Operation,
    *,
    format: str | Format,
    shape: tuple[int, ...],
    rows: int = 1,
    dtype: str | Format = "float16",
    arch: str | int | tuple[int, int] | None = None,
) -> Explanation:
    """Which kernel an operation runs, and why; nothing is run, and no GPU is needed.

    Parameters
    ----------
    operation
        A product: "linear", "matmul" (of x and the transposed weight), "swiglu" or
        "grouped_linear"; "quantize" or "dequantize"; or a fused quantizer of cuquant.functional:
        "rmsnorm_quantize", "add_rmsnorm_quantize" (which also writes the sum),
        "layernorm_quantize", "silu_mul_quantize", "gelu_mul_quantize" or "hadamard_quantize".
    format
        Of the weight, or of the array.
    shape
        (N, K) of the weight, (E, N, K) of experts, or the array's shape.
    rows
        Of x; of experts all tokens.
    dtype
        Of x, or of the floats that are quantized or decoded: float16, bfloat16 or float32. Of a
        product also the format of a quantized x, such as "fp8_e4m3:row", "int8" or "mxfp8": both
        sides are multiplied as codes where kernels have such a pair, and the result is float32.
    arch
        A compute capability such as "sm_90", or a name: "T4", "A100", "A10", "RTX 4090", "H100",
        "B200", "RTX 5090". None: the current GPU, or an H100 where there is none.

    Returns
    -------
    Explanation
        Candidates with the microseconds that the rule reckons, which is chosen, and the floor.

    Raises
    ------
    ValueError
        For an unknown operation, dtype or GPU, or a shape that the format cannot have.

    Examples
    --------
    >>> print(explain("linear", format="int4", shape=(14336, 4096), rows=1, arch="H100"))
    linear int4 14336 x 4096, 1 row of x float16 on H100
       kernel            weights        us
    *  matmul/stream.cu  prepacked     9.7  weights read once at memory speed, few rows of x
    *  matmul/stream.cu  as quantized  9.7  weights read once at memory speed, few rows of x
    floor: 9.6 us, of memory; 30.3 MB; * is what runs
    >>> both = {"format": "fp8_e4m3:row", "dtype": "fp8_e4m3:row"}
    >>> explain("linear", **both, shape=(14336, 4096), rows=512, arch="H100").chosen.kernel
    'matmul/dense.cu'
    """
    known = (*PRODUCTS, *MEMORY, *SOURCES)
    if operation not in known:
        raise ValueError(
            f"operation {clipped(operation)} is unknown{did_you_mean(str(operation), known)}; "
            f"known are {', '.join(known)}"
        )
    dtype = _dtype_of(dtype)
    codes = _codes_of(dtype, operation)
    if not (_is_whole(rows) and rows > 0):
        raise ValueError(f"rows is {clipped(rows)}; a positive number of rows of x is wanted")
    fmt, shape, rows = get_format(format), _shape_of(shape), int(rows)
    fmt.check_shape(shape)
    if not math.prod(shape):
        raise ValueError(f"shape is {shape}; an array without elements runs nothing")
    board = _here() if arch is None else board_of(arch)
    if operation in PRODUCTS:
        found = _product(operation, fmt, shape, rows, dtype if codes is None else codes, board)
    elif operation in SOURCES:
        candidates, moved = explain_rows(operation, fmt.plain, shape, str(dtype), board)
        found = candidates, moved, 0.0
    else:
        found = _at_memory_speed(operation, fmt, shape, str(dtype), board)
    candidates, moved, busy = found
    by_memory = moved / board.rates.read
    floor, floor_us = "memory" if by_memory >= busy else "arithmetic", max(by_memory, busy)
    if operation in PRODUCTS:
        candidates = [_not_below(floor_us, c) for c in candidates]
    return Explanation(
        operation, fmt, shape, rows, str(dtype), board.name, board.arch, tuple(candidates),
        floor_us, floor, moved,
    )  # fmt: skip


def _not_below(floor_us: float, c: Candidate) -> Candidate:
    """A rule looks at what tells kernels apart, such as codes; scales, x and the result, which all
    of them read and write, take their time too."""
    us = c.estimated_us
    return c if us is None else replace(c, estimated_us=max(us, floor_us))


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _shape_of(shape: Any) -> tuple[int, ...]:
    """ValueError unless it is a sequence of ints that are not negative."""
    given = list(shape) if isinstance(shape, np.ndarray) and shape.ndim == 1 else shape
    is_listed = isinstance(given, Sequence) and not isinstance(given, str)
    if not (is_listed and all(_is_whole(n) and int(n) >= 0 for n in given)):
        raise ValueError(
            f"shape is {clipped(shape)}; a tuple of positive ints is wanted, such as (4096, 4096)"
        )
    return tuple(int(n) for n in given)


def _dtype_of(dtype: Any) -> str | Format:
    """A dtype of NumPy's or torch's by its name; what has one, or is a format, as it is."""
    if isinstance(dtype, (str, Format)):
        return dtype
    try:
        name = "" if dtype is None else interop.numpy_dtype(dtype).name
    except TypeError:
        name = ""
    if name not in interop.INPUT_DTYPES:
        floats = ", ".join(interop.INPUT_DTYPES)
        raise ValueError(f"dtype {clipped(dtype)} is unknown; known are {floats}")
    return name


def _codes_of(dtype: str | Format, operation: str) -> Format | None:
    """The format of a quantized x; None where a dtype of floats is named."""
    floats, is_product = ", ".join(interop.INPUT_DTYPES), operation in PRODUCTS
    if dtype in interop.INPUT_DTYPES:
        return None
    if not is_product:
        raise ValueError(f"dtype {clipped(dtype)} is unknown; {operation} takes {floats}")
    try:
        found = get_format(dtype)
        why = "is of floats" if found.bits >= FLOATS_FROM else ""
    except ValueError:
        known = (*interop.INPUT_DTYPES, *list_formats())
        found, why = None, f"is unknown{did_you_mean(str(dtype), known)}"
    if found is None or why:
        raise ValueError(
            f"dtype {clipped(dtype)} {why}; known are {floats}, and of a quantized x its format, "
            "such as 'int8', 'fp8_e4m3:row' or 'mxfp8'"
        )
    return found


def _here() -> Board:
    """The current GPU, or an H100."""
    if not gpu_available():
        return board_of("H100")
    from cuquant.gpu.arrays import Gpu
    from cuquant.gpu.jit import current_device

    gpu = Gpu(current_device(), 0)
    return Board("this GPU", gpu.arch, gpu.multiprocessors, gpu.rates)


_Found = tuple[list[Candidate], int, float]  # and bytes, and microseconds of arithmetic


def _product(
    operation: str,
    fmt: Format,
    shape: tuple[int, ...],
    rows: int,
    x: str | Format,
    board: Board,
) -> _Found:
    """Of x of a dtype, or quantized."""
    experts = operation == "grouped_linear"
    if len(shape) != 2 + experts:
        wanted = "(E, N, K)" if experts else "(N, K)"
        raise ValueError(f"shape is {shape}; {operation} has weights of {wanted}")
    *count, columns, depth = shape
    gated = operation == "swiglu"
    weights = fmt.nbytes(shape) * (1 + gated)
    if isinstance(x, Format):
        x.check_shape((rows, depth))
        moved = weights + x.nbytes((rows, depth)) + 4 * rows * columns
        each = count[0] if count else 0
        asked = Asked(x.plain, fmt.plain, rows, columns, depth, each, gated, board)
        if (coded := explain_codes(asked)) is not None:
            return coded[0], moved, coded[1]
        candidates = _decoded(operation, asked, shape)
        return candidates, moved, 2 * rows * columns * depth * (1 + gated) / board.rates.float32
    moved = weights + interop.float_dtype(x).itemsize * rows * (columns + depth)
    rate = board.rates.float32 if x == "float32" else board.rates.tensor
    busy = 2 * rows * columns * depth * (1 + gated) / rate
    return _of_floats(operation, fmt.plain, shape, rows, x, board), moved, busy


def _of_floats(
    operation: str, plain: Format, shape: tuple[int, ...], rows: int, dtype: str, board: Board
) -> list[Candidate]:
    *count, columns, depth = shape
    each = count[0] if count else 1
    problem = Problem(
        -(-rows // max(each, 1)), columns, depth, plain, ROWS_LAYOUT, dtype, True,
        board.arch, board.multiprocessors, direct=True, experts=each if count else 0,
        gated=operation == "swiglu", vendor=not count, rates=board.rates,
    )  # fmt: skip
    found = []
    for layout, words in ((FRAGMENTS_LAYOUT, "prepacked"), (ROWS_LAYOUT, "as quantized")):
        if layout == FRAGMENTS_LAYOUT and not takes(plain, shape):
            continue
        found += _candidates(replace(problem, layout=layout), words)
    return found


def _decoded(operation: str, asked: Asked, shape: tuple[int, ...]) -> list[Candidate]:
    """Of a quantized x that kernels do not multiply as codes: one side becomes floats."""
    if operation == "matmul" and asked.rows > asked.columns:
        found, which = _candidates(swapped_problem(asked), "as quantized"), "weights"
    else:
        found = _of_floats(operation, asked.weight, shape, asked.rows, "float32", asked.board)
        which = "x"
    return [replace(c, note=f"{c.note}; {which} decoded to float32 first") for c in found]


def _candidates(problem: Problem, weights: str) -> list[Candidate]:
    """Families that take a problem, the chosen one first, then by their times."""
    chosen = choose(problem)
    taking = [name for name, family in FAMILIES.items() if family.takes(problem)]
    if any(name in TENSOR_CORES for name in taking):  # as `choose` has it
        taking = [name for name in taking if not name.startswith("plain")]
    found = []
    for name in taking:
        kernel, note = KERNELS[name]
        if problem.layout not in FAMILIES[name].layouts:
            note += "; laid out in rows first"
        us = FAMILIES[name].time_us(problem) * max(problem.experts, 1)
        found.append(Candidate(kernel, weights, us, note, name == chosen))
    return sorted(found, key=lambda c: (not c.is_chosen, c.estimated_us or 0))


def _at_memory_speed(
    operation: str, fmt: Format, shape: tuple[int, ...], dtype: str, board: Board
) -> _Found:
    """quantize and dequantize: all bytes once."""
    moved = interop.float_dtype(dtype).itemsize * math.prod(shape) + fmt.nbytes(shape)
    programs = PROGRAMS[operation](fmt.plain, dtypes=(dtype,), arch=board.arch)
    files = list(dict.fromkeys(program.file for program in programs))
    found = [
        Candidate(
            file, "", moved / board.rates.read if i == 0 else None, _NOTES.get(file, ""), i == 0
        )
        for i, file in enumerate(files)
    ]
    return found, moved, 0.0


_NOTES = {
    "quantize/quantize.cu": "whole blocks by 16 bytes, aligned rows",
    "quantize/plain.cu": "any strides, blocks and alignment",
    "dequantize/dequantize.cu": "whole rows by 16 bytes",
}
