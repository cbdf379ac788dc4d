"""Which programs an operation needs: the orchestrators run on arrays that do not exist."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from cuquant import interop
from cuquant.array.arranged import ends_with_rows
from cuquant.array.fragments import FRAGMENTS_LAYOUT, Fragments, takes
from cuquant.formats import Format, Uniform, get_format
from cuquant.formats.format import Component
from cuquant.gpu.backend import Gemm
from cuquant.gpu.jit import Launch, Program
from cuquant.gpu.rates import H100, Rates
from cuquant.gpu.tensor_map import COLUMNS, MAP_BYTES
from cuquant.gpu.view import View, c_strides
from cuquant.ops import llm_int8
from cuquant.ops.dequantize.decoder import decoder
from cuquant.ops.dequantize.rows import Matrix, row_decoder
from cuquant.ops.geometry import axis_last
from cuquant.ops.layout.prepack import Prepack
from cuquant.ops.matmul import dense, dense_warps, hopper_codes, hopper_codes_tiles, q8_1
from cuquant.ops.matmul.choose import (
    FAMILIES,
    PLAIN_ROWS,
    PLAIN_TILES,
    choose,
    family_of,
)
from cuquant.ops.matmul.coded import Groups, codes_of, segment_of, side, sides
from cuquant.ops.matmul.coded_kernels import kinds_on
from cuquant.ops.matmul.experts import Rows, clear_lost
from cuquant.ops.matmul.hopper import segment_rows
from cuquant.ops.matmul.problem import Dense, Product, Routing, Weight
from cuquant.ops.matmul.route import VECTOR_BYTES, gather_part, route, scatter
from cuquant.ops.plain_floats import END
from cuquant.ops.plain_products import programs as integer_programs
from cuquant.ops.quantize.call import Known, Task
from cuquant.ops.quantize.quantizer import quantizer
from cuquant.ops.rows.planned import plan_rows

ADDRESS = 1 << 20  # of everything
MULTIPROCESSORS = 132
ARCH = 90
DTYPES = ("float32", "float16", "bfloat16")
# Rows of weights and activations; blocks along the first axis; what the fast kernels do not take.
SHAPES = (((256, 4096), -1), ((256, 14336), -1), ((4096, 256), 0), ((37, 131), -1))
# Rows of x and weights [N, K] that matmul/stream.cu and matmul/hopper.cu divide in different ways.
PRODUCTS = (
    (1, (4096, 4096)),
    (16, (4096, 4096)),
    (32, (4096, 4096)),
    (128, (14336, 4096)),
    (512, (4096, 4096)),
    (512, (14336, 4096)),
    (16384, (4096, 4096)),
)
# Integers of few bits are divided in another way where there are many rows of the weight.
FEW_BITS, FEW_BITS_PRODUCTS = 3, ((1, (28672, 8192)), (16, (28672, 8192)))
# And those that matmul/ggml.cu divides in still other ways.
BLOCK_PRODUCTS = ((1, (14336, 2048)), (8, (4096, 14336)), (16, (14336, 2048)))

# Those of gated units, for the GPUs with kernels of their own; and experts.
GATED_PRODUCTS = ((16, (4096, 4096)), (512, (4096, 4096)))
EXPERTS, EXPERT, EXPERT_ROWS = 8, (4096, 4096), (4, 512)
# Rows of x for which a given weight's kernels are found: the division changes between few others.
ROWS = (*range(1, 129), *range(136, 1025, 8), *range(1088, 8193, 64))
# What products of two quantized arrays are compiled with: x's formats beside the weight's own, rows
# of the weight, and columns, of which the last are no whole vectors.
CODED_WITH, CODED_COLUMNS, CODED_DEPTHS = ("int8", "fp8_e4m3"), 256, (4096, 131)
# And those of two with a prepacked one: x's formats and rows.
PACKED_WITH, PACKED_ROWS = ("int8", "fp8_e4m3", "fp8_e4m3:1x128", "mxfp8"), (1, 32, 64, 128, 512)
# What layouts depend on: rows that end inside a word and units, blocks of ggml's.
LAID_OUT = ((32, 512), (37, 131))


class _Nothing:
    """An array of which only the shape is known."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape


class Plan:
    """A Backend that launches nothing and notes the programs."""

    def __init__(
        self,
        arch: int = ARCH,
        multiprocessors: int = MULTIPROCESSORS,
        rates: Rates = H100,
        *,
        has_vendor: bool = True,
    ) -> None:
        self.arch, self.multiprocessors, self.has_vendor = arch, multiprocessors, has_vendor
        self.rates = rates
        self.programs: dict[Program, None] = {}

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        return _Nothing(shape)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        return _Nothing(shape)

    def contiguous(self, x: Any, axis: int) -> Any:
        return x

    def broadcast(self, array: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        return _Nothing(shape)

    def copy_into(self, target: Any, source: Any) -> None:
        pass

    def read(self, array: Any) -> np.ndarray:
        return np.ones(array.shape, np.float32)

    def tensor_map(
        self,
        pointer: int,
        rows: int,
        columns: int,
        stride: int,
        height: int,
        dtype: str,
        width: int = COLUMNS,
    ) -> bytes:
        return bytes(MAP_BYTES)

    def pointer(self, array: Any) -> int:
        return ADDRESS

    def upload(self, array: np.ndarray) -> Any:
        return _Nothing(array.shape)

    def gemm(self, gemm: Gemm) -> None:
        pass

    def workspace(self, nbytes: int) -> AbstractContextManager[int]:
        return nullcontext(ADDRESS)

    def launch(self, launch: Launch, *arguments: int | float | bytes) -> None:
        self.programs[launch.program] = None


def _fits(fmt: Format, stored: tuple[int, ...]) -> bool:
    try:
        fmt.check_shape(stored)
    except ValueError:
        return False
    return True


def quantize_programs(
    fmt: Format, dtypes: Sequence[str] = DTYPES, arch: int = ARCH
) -> list[Program]:
    """The programs that quantize arrays of the usual shapes."""
    plan = Plan(arch)
    for name in dtypes:
        dtype = interop.float_dtype(name)
        for shape, axis in SHAPES:
            axis %= len(shape)
            stored = tuple(shape[a] for a in axis_last(len(shape), axis))
            if not _fits(fmt, stored):
                continue
            parts = {c.name: _Nothing(c.shape) for c in fmt.components(stored)}
            view = View(ADDRESS, shape, c_strides(shape), dtype)
            task = Task(view, axis, Known(), parts, False, False, 0)
            quantizer(fmt)(plan, _Nothing(shape), task)
    return list(plan.programs)


def dequantize_programs(
    fmt: Format, dtypes: Sequence[str] = DTYPES, arch: int = ARCH
) -> list[Program]:
    """The programs that decode arrays of the usual shapes, and their codes and scales."""
    plan = Plan(arch)
    for name in dtypes:
        dtype = interop.float_dtype(name)
        for stored, _ in SHAPES:
            if not _fits(fmt, stored):
                continue
            parts = {c.name: _Nothing(c.shape) for c in fmt.components(stored)}
            target = View(ADDRESS, stored, c_strides(stored), dtype)
            decoder(fmt)(plan, parts, stored, target)
            decoder(fmt).codes(plan, parts, stored, _Nothing(stored))
            if fmt.scale is not None and not fmt.scale_is_plain:
                scale = _Nothing(fmt.scale.shape(stored))
                if math.prod(scale.shape):
                    decoder(fmt).scales(plan, parts, scale, scale if fmt.offset == "min" else None)
    return list(plan.programs)


def embedding_programs(
    fmt: Format, dtypes: Sequence[str] = DTYPES, arch: int = ARCH
) -> list[Program]:
    """The programs that decode rows of matrices of the usual shapes, stored by rows or columns."""
    plan = Plan(arch)
    decode = row_decoder(fmt.exact, "absmax" in fmt.odd)
    for name in dtypes:
        dtype = interop.float_dtype(name)
        for shape, axis in SHAPES:
            known, columns = shape
            stored = (math.prod(shape),) if fmt.is_flat else shape if axis else shape[::-1]
            if not _fits(fmt, stored):
                continue
            parts = _parts(decode.fmt.components(stored))
            ids = View(ADDRESS, (1,), (1,), np.dtype(np.int64))
            target = View(ADDRESS, (1, columns), (columns, 1), dtype)
            decode(plan, parts, Matrix((known, columns), stored, bool(axis)), ids, target)
    return list(plan.programs)


def matmul_programs(fmt: Format, dtypes: Sequence[str] = DTYPES, arch: int = ARCH) -> list[Program]:
    """The programs that multiply with weights of the usual shapes, and with decoded ones."""
    plan = Plan(arch)
    _plan_routes(plan)
    for name in dtypes:
        dtype = interop.float_dtype(name)
        for stored, _ in SHAPES:
            if not _fits(fmt, stored):
                continue
            columns, depth = stored
            x, decoded = (Dense(ADDRESS, d, depth, 1) for d in (dtype, np.dtype(np.float32)))
            for weight in (_weight(fmt, stored, Weight.layout), decoded):
                for plain in (PLAIN_ROWS, PLAIN_TILES):
                    product = Product(plain.height, columns, depth, x, (weight,))
                    plain.prepare(plan, product)(plain.height)(plan, ADDRESS, bytes(64))
        for rows, *weights in _products(fmt, arch):
            columns, depth = weights[0].stored
            x = Dense(ADDRESS, dtype, depth, 1)
            product = Product(rows, columns, depth, x, tuple(weights))
            problem = product.problem(plan)
            for vendor in {problem.vendor, False}:  # also where it is not installed
                chosen = FAMILIES[choose(replace(problem, vendor=vendor))]
                if chosen not in (PLAIN_ROWS, PLAIN_TILES):
                    chosen.prepare(plan, product)(rows)(plan, ADDRESS, bytes(64))
        if takes(fmt, (EXPERTS, *EXPERT)):
            weight = _weight(fmt, (EXPERTS, *EXPERT), FRAGMENTS_LAYOUT)
            for rows in EXPERT_ROWS:
                _plan_experts(plan, weight, dtype, rows, plain=False)
    return list(plan.programs)


def _plan_routes(plan: Plan) -> Routing:
    """Few and many rows to be sorted by expert."""
    some, _ = (
        route(plan, View(ADDRESS, (rows,), (1,), np.dtype(np.int64)), 8, 8, 1, ADDRESS)
        for rows in (1, 1 << 16)
    )
    return some


def _plan_experts(
    plan: Plan, weight: Weight, dtype: np.dtype, rows: int, *, plain: bool = True
) -> None:
    """So many rows of x for each of the experts [E, N, K]; `plain`: by the plain kernels too."""
    experts, columns, depth = weight.stored
    x = Dense(ADDRESS, dtype, depth, 1)
    product = Product(rows * experts, columns, depth, x, (weight,))
    problem = replace(product.problem(plan), rows=rows, experts=experts)
    chosen = FAMILIES[choose(problem)]
    if chosen in (PLAIN_ROWS, PLAIN_TILES) and not plain:
        return
    height = chosen.height or segment_rows(problem)
    numbers = View(ADDRESS, (rows * experts,), (1,), np.dtype(np.int64))
    routed = replace(product, routing=route(plan, numbers, experts, height, columns, ADDRESS))
    chosen.prepare(plan, routed)(routed.rows)(plan, ADDRESS, bytes(64))


def plan_weight(
    plan: Plan, fmt: Format, shape: tuple[int, ...], layout: str, dtypes: Sequence[str]
) -> None:
    """Have `plan` note what a weight needs: to be decoded to arrays of `dtypes`, and, where it is
    [N, K] or [E, N, K], for products with any number of rows of x."""
    if not math.prod(shape):
        return
    if fmt.is_flat and not ends_with_rows(fmt, shape):
        _plan_decoded(plan, fmt.plain, shape, dtypes)
        return
    is_decoded = "absmax" not in fmt.odd  # whose values the array's library multiplies
    read = fmt.exact  # what is decoded, in rows
    if fmt.usual is not fmt:
        parts = _parts(fmt.usual.components(shape))
        decoder(fmt.usual).scales(plan, parts, _Nothing(fmt.rule.shape(shape)))
    fmt = fmt.plain
    weight = _weight(fmt, shape, layout)
    rows = weight
    if layout != Weight.layout:
        rows = _weight(fmt, shape, Weight.layout)
        Prepack(Fragments(fmt, shape)).rows(plan, dict(weight.parts))
    for name in dtypes:
        dtype = interop.float_dtype(name)
        target = View(ADDRESS, shape, c_strides(shape), dtype)
        if is_decoded:
            decoder(read)(plan, _parts(read.components(shape)), shape, target)
        for count in ROWS if len(shape) in (2, 3) else ():
            if len(shape) == 3:
                _plan_experts(plan, weight, dtype, count)
            else:
                _plan_layer(plan, weight, rows, dtype, count)


def _plan_decoded(plan: Plan, fmt: Format, shape: tuple[int, ...], dtypes: Sequence[str]) -> None:
    """A flat weight: decoded along one axis, and products with float32 where it is a matrix."""
    size = math.prod(shape)
    for name in dict.fromkeys((*dtypes, "float32")):
        target = View(ADDRESS, (size,), (1,), interop.float_dtype(name))
        decoder(fmt)(plan, _parts(fmt.components((size,))), (size,), target)
    if len(shape) != 2:
        return
    columns, depth = shape
    decoded = Dense(ADDRESS, np.dtype(np.float32), depth, 1)
    for name in dtypes:
        x = Dense(ADDRESS, interop.float_dtype(name), depth, 1)
        for count in ROWS:
            product = Product(count, columns, depth, x, (decoded,))
            family_of(plan, product.problem(plan)).prepare(plan, product)(count)(
                plan, ADDRESS, bytes(64)
            )


def _plan_layer(plan: Plan, weight: Weight, rows: Weight, dtype: np.dtype, count: int) -> None:
    """So many rows of x times a weight [N, K], which also lies in rows for kernels that want it."""
    columns, depth = weight.stored
    product = Product(count, columns, depth, Dense(ADDRESS, dtype, depth, 1), (weight,))
    chosen = family_of(plan, product.problem(plan))
    if weight.layout not in chosen.layouts:
        product = replace(product, weights=(rows,))
    chosen.prepare(plan, product)(count)(plan, ADDRESS, bytes(64))


def _weight(fmt: Format, shape: tuple[int, ...], layout: str) -> Weight:
    laid = layout == FRAGMENTS_LAYOUT
    components = Fragments(fmt, shape).components if laid else fmt.components(shape)
    return Weight(fmt, _parts(components), shape, layout=layout)


def _parts(components: Iterable[Component]) -> dict[str, Any]:
    return {c.name: _Nothing(c.shape) for c in components}


def _products(fmt: Format, arch: int) -> Iterator[tuple[Any, ...]]:
    """Rows of x, and one weight or the two of a gated unit."""
    for rows, shape in PRODUCTS:
        for weight in _weights(fmt, shape):
            yield rows, weight
            if arch == ARCH and (rows, shape) in GATED_PRODUCTS:
                yield rows, weight, weight
    few = isinstance(fmt.codec, Uniform) and fmt.bits <= FEW_BITS
    for rows, shape in FEW_BITS_PRODUCTS if few else ():
        for weight in _weights(fmt, shape):
            yield rows, weight
    for rows, (columns, depth) in BLOCK_PRODUCTS if fmt.is_blocks else ():
        # With one block more the rows of most types do not start on 16 bytes.
        for shape in ((columns, depth), (columns, depth + fmt.layout.elements)):
            yield rows, _weight(fmt, shape, Weight.layout)


def _weights(fmt: Format, shape: tuple[int, int]) -> Iterator[Weight]:
    """A weight [N, K] as it is, and prepacked."""
    if _fits(fmt, shape):
        yield _weight(fmt, shape, Weight.layout)
    if takes(fmt, shape):
        yield _weight(fmt, shape, FRAGMENTS_LAYOUT)


def prepack_programs(fmt: Format, dtypes: Sequence[str] = (), arch: int = 0) -> list[Program]:
    """The programs that lay out weights of a format, and those that bring them back."""
    plan = Plan()
    for shape in LAID_OUT:
        if not takes(fmt, shape):
            continue
        layout = Fragments(fmt, shape)
        for way, given in (("lay_out", fmt.components(shape)), ("rows", layout.components)):
            parts = {part.name: plan.empty(part.shape, part.dtype) for part in given}
            getattr(Prepack(layout), way)(plan, parts)
    return list(plan.programs)


def coded_programs(fmt: Format, dtypes: Sequence[str] = (), arch: int = ARCH) -> list[Program]:
    """The programs that multiply weights of a format with x of the same, of int8 and of fp8_e4m3,
    as codes; and those that groups need."""
    plan = Plan(arch)
    for other in (fmt, *map(get_format, CODED_WITH)):
        kinds = codes_of(other, fmt)
        if kinds is None:
            continue
        for tile in dense_warps.TILES:
            for depth in CODED_DEPTHS:
                shapes = (tile.tokens, depth), (CODED_COLUMNS, depth)
                x, w = (
                    _weight(f, shape, Weight.layout)
                    for f, shape in zip((other, fmt), shapes, strict=True)
                )
                segment = segment_of(other, fmt, depth)
                # Of Hopper's products of bits see dense.programs.
                own = kinds if arch == dense.ARCH else kinds_on(plan, x, w, kinds)
                with sides(plan, x, w, own, segment) as pair:
                    shape, groups = (tile.tokens, CODED_COLUMNS, depth), Groups(1, tile.tokens)
                    run = dense_warps.prepare(*pair, shape, groups, segment)
                    run(plan, pair[0], bytes(80))
    if plan.programs and arch == dense.ARCH:
        plan.programs.update(dict.fromkeys(dense.programs()))
    if arch == hopper_codes.ARCH:
        _plan_packed_codes(plan, fmt)
    if plan.programs:
        rows = Rows("offsets", None, (1,), 1)
        groups = rows.groups(plan, _Nothing((2,)))
        rows.ids(plan, groups)
        routing = _plan_routes(plan)
        for name in DTYPES:
            out = View(ADDRESS, (1, 1), (1, 1), interop.float_dtype(name))
            clear_lost(plan, groups, out)
            scatter(plan, ADDRESS, routing, 1, out)
        for part in fmt.components((CODED_COLUMNS, CODED_DEPTHS[0])):
            if not part.shape:  # one number for all rows
                continue
            for step in (1, VECTOR_BYTES):  # from its address on vectors
                gather_part(plan, View(ADDRESS + step, part.shape, (), part.dtype), routing)
    return list(plan.programs)


def _plan_packed_codes(plan: Plan, fmt: Format) -> None:
    """Codes of x with prepacked weights [N, K], and those of experts."""
    columns, depth = shape = EXPERT
    for other in map(get_format, PACKED_WITH):
        if not takes(fmt, shape) or hopper_codes_tiles.kind_of(other, fmt, depth) is None:
            continue
        kind = str(hopper_codes_tiles.kind_of(other, fmt, depth))
        weight = _weight(fmt, shape, FRAGMENTS_LAYOUT)
        for rows in PACKED_ROWS:
            x = _weight(other, (rows, depth), Weight.layout)
            given = other, weight, kind, (rows, columns, depth)
            ready = hopper_codes.prepare(plan, *given)
            ready.run(plan, side(plan, x, kind, ADDRESS), bytes(64), ADDRESS)
        if not takes(fmt, (EXPERTS, *EXPERT)):
            continue
        weight = _weight(fmt, (EXPERTS, *EXPERT), FRAGMENTS_LAYOUT)
        for each in EXPERT_ROWS:
            rows = each * EXPERTS
            x = _weight(other, (rows, depth), Weight.layout)
            height = hopper_codes_tiles.height_of(other, fmt, depth, each)
            given = other, weight, kind, (rows, columns, depth), EXPERTS, height, 1
            ready = hopper_codes.prepare_experts(plan, *given)
            codes = side(plan, x, kind, ADDRESS)
            ready.run(plan, codes, Groups(EXPERTS, rows), bytes(64), ADDRESS)


def row_programs(fmt: Format, dtypes: Sequence[str] = DTYPES, arch: int = ARCH) -> list[Program]:
    """The programs of the usual fused row quantizers."""
    plan = Plan(arch)
    plan_rows(plan, _Nothing, ADDRESS, fmt, dtypes)
    return list(plan.programs)


def plain_programs(fmt: Format, dtypes: Sequence[str] = DTYPES, arch: int = ARCH) -> list[Program]:
    """The programs of products and convolutions of plain arrays, by the format they are like."""
    if fmt.name in ("fp16", "bf16"):
        return [END]
    of_rows = llm_int8.programs(dtypes) if fmt.name == "int8" else []
    return [*integer_programs(fmt, dtypes, arch), *of_rows]


# By operation: (format, dtypes=names of the float arrays, arch=90 for 9.0) -> its programs.
PROGRAMS: dict[str, Callable[..., list[Program]]] = {
    "quantize": quantize_programs,
    "dequantize": dequantize_programs,
    "embedding": embedding_programs,
    "matmul": matmul_programs,
    "matmul_codes": coded_programs,
    "matmul_plain": plain_programs,
    "prepack": prepack_programs,
    "gemm_q8_1": q8_1.programs,
    "rows": row_programs,
}
