"""The matrix that the kernels of quantize and dequantize are compared with the reference on.

A case says which array is quantized how; it is the same for the emulator and for a GPU. Every
format meets the basics, and every axis of variation meets a few formats that differ in codec, scale
rule, offset and storage.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from typing import Any

import numpy as np
from kernel_arrays import DATA, LAYOUTS, LEVELS, VIEWS, WRITABLE, normal, placed
from oracle import DTYPES

import cuquant as cq
from cuquant.formats import Codebook, Format
from cuquant.reference import effective

__all__ = ["LAYOUTS", "WRITABLE", "normal", "placed"]  # for those who use cases

F32 = np.float32
NAMES = cq.list_formats()
FORMATS = {name: cq.get_format(name) for name in NAMES}
OWN = [name for name in NAMES if not FORMATS[name].is_blocks]
SCALED = [name for name in OWN if FORMATS[name].scale is not None]
# absmax kept exactly, signed and absmax codebooks, integers with and without a zero point, a mean
# of magnitudes, a float8, a power of two, and two scales in one.
FEW = ("nf4", "k3", "int4", "uint4", "int1", "fp8_e4m3", "mxfp4", "nvfp4")
PLACED = ("nf4", "uint4", "k3", "fp16", "nvfp4", "q4_0", "q4_k")
SEED = 0x1234_5678_9ABC_DEF0


# ---- cases --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One call of `quantize`.

    Attributes
    ----------
    format
        A name; `options` are those of `get_format`, where levels are a name of LEVELS.
    given
        Which numbers are found beforehand: "scale", "one scale" (for all blocks), "zero point"
        (and scale), "global" or "global and scale".
    """

    format: str
    dtype: str = "float16"
    shape: tuple[int, ...] = (8, 1024)
    axis: int = -1
    layout: str = "whole"
    data: str = "nasty"
    options: tuple[tuple[str, Any], ...] = ()
    given: str = ""
    nonfinite: str = "propagate"
    stochastic: bool = False

    def __str__(self) -> str:
        usual = Case(self.format)
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        shape = "x".join(map(str, fields.pop("shape")))
        options = [f"{k}={v}" for k, v in fields.pop("options")]
        own = [
            f"{name} {v}"
            for name, v in fields.items()
            if name != "dtype" and v != vars(usual)[name]
        ]
        return "-".join([self.format, self.dtype, shape, *options, *own]).replace(" ", "_")

    @cached_property
    def fmt(self) -> Format:
        options = dict(self.options)
        if "levels" in options:
            options["levels"] = LEVELS[options["levels"]]
        return cq.get_format(self.format, **options)

    @property
    def stored(self) -> tuple[int, ...]:
        return tuple(np.moveaxis(np.empty(self.shape, bool), self.axis, -1).shape)

    @cached_property
    def base(self) -> np.ndarray:
        """What the array is a view of."""
        values = DATA[self.data](self.stored, DTYPES[self.dtype])
        return placed(np.ascontiguousarray(np.moveaxis(values, -1, self.axis)), self.layout)

    def view(self, base: Any) -> Any:
        """The array to quantize, of a base in any library."""
        return LAYOUTS[self.layout].view(base, self.shape)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Of `quantize`, but for x and the format."""
        found: dict[str, Any] = {"axis": self.axis, "nonfinite": self.nonfinite, **self._given()}
        if self.stochastic:
            found |= {"stochastic": True, "seed": SEED}
        return found

    def _given(self) -> dict[str, Any]:
        if not self.given:
            return {}
        if self.given == "global":
            return {"global_scale": 0.003}
        rule, rng = self.fmt.rule, np.random.default_rng(11)
        shape = () if self.given == "one scale" else rule.shape(self.stored)
        scale = np.exp2(rng.integers(-8, 3, shape)).astype(F32)
        if rule.dtype != "e8m0":
            scale *= rng.choice(
                F32([1, 1.37, 0.9, 1e-30, 0, 1e30]), shape, p=[0.4, 0.3, 0.2, 0.04, 0.03, 0.03]
            )
        if rule.rule == "signed_max":
            scale *= rng.choice(F32([1, -1]), shape)
        found: dict[str, Any] = {"scale": np.asarray(scale, F32)}
        if self.given == "zero point":
            found["zero_point"] = rng.integers(0, self.fmt.codec.high + 1, shape)
        if rule.nested == "global":
            found["global_scale"] = 0.01
        return found

    def expected(self) -> cq.QuantArray:
        """What NumPy makes of it; kept."""
        return _expected(self)


@cache
def _expected(case: Case) -> cq.QuantArray:
    return cq.quantize(case.view(case.base), case.fmt, **case.arguments)


def dtype_of(name: str) -> str:
    """One dtype for each format, so that cases share their kernels; all dtypes are met."""
    return list(DTYPES)[NAMES.index(name) % 3]


def _one(name: str, **fields: Any) -> Case:
    return Case(name, fields.pop("dtype", dtype_of(name)), **fields)


def _options(**options: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(options.items())


# ---- what a sample of cases meets all of --------------------------------------------------------


def kind_of(name: str) -> tuple:
    """What kernels are told of a format, but for its numbers of bits and of elements in a block."""
    fmt, scale = FORMATS[name], FORMATS[name].scale
    if fmt.is_blocks:
        return ("blocks", name[-2:] == "_k", fmt.layout.elements, fmt.offset)
    if scale is None:
        return (type(fmt.codec).__name__,)
    return (type(fmt.codec).__name__, fmt.offset, fmt.rule.rule, scale.dtype, scale.nested)


def codec(case: Case) -> tuple:
    return (kind_of(case.format)[0],)


def ends(case: Case) -> tuple:
    """Of which sides the array has, and whether the one with blocks ends within one."""
    return len(case.shape), case.axis, case.stored[-1] % 32 != 0, case.stored[-1] == 1


def told(case: Case) -> tuple[str, ...]:
    """What is told beside the array and its format."""
    named = ("offset", "scale_dtype")
    options = [f"{k} {v if k in named else type(v).__name__}" for k, v in case.options]
    return (case.given, case.nonfinite, str(case.stochastic), *options)


def of_own_dtype(case: Case) -> str:
    return case.format if case.dtype == dtype_of(case.format) else ""


# For cases that are all of one group.
AXES_OF_CASES = (codec, "dtype", "layout", "data", ends, told)


# ---- the matrix ---------------------------------------------------------------------------------

BASICS = [Case(name, dtype) for name, dtype in product(NAMES, DTYPES)]

AXES = [
    *(_one(name, shape=(512, 64), axis=0) for name in NAMES),
    *(_one(name, shape=(3, 256, 24), axis=1) for name in (*FEW, "fp16", "q4_0", "q4_k")),
    *(_one(name, shape=(256, 3, 8), axis=0) for name in FEW),
    *(_one(name, shape=(3, 70, 5), axis=axis) for name in (*FEW, "bf16") for axis in (0, 1)),
    *(Case("nf4", dtype, (320, 40), 0) for dtype in DTYPES),
]

SHAPES = [
    *(_one(name, shape=(5, k)) for name in OWN for k in (1, 31, 33, 127, 131)),
    *(_one(name, shape=(k,), data="normal") for name in FEW for k in (1, 7, 8, 63, 65)),
    *(_one(name, shape=(2, 3, 5, 40)) for name in FEW),
    *(_one(name, shape=(5, 200)) for name in FEW),
    *(_one(name, shape=(3, 256)) for name in NAMES if name not in OWN),
    Case("q4_0", "float32", (1, 32)),
    Case("iq4_nl", "float32", (7, 32)),
]

VIEWED = [_one(name, shape=(24, 256), layout=view) for name in PLACED for view in VIEWS] + [
    _one(name, shape=(256, 24), layout=view, axis=0)
    for name in ("nf4", "uint4", "q4_0")
    for view in VIEWS
]

SIZES: tuple[Any, ...] = (
    8, 16, 24, 32, 96, 128, 256, 512, 1024, 4096,
    "row", "tensor", (1, 128), (128, 128), (16, 8), (128, 1),
)  # fmt: skip
SOME_SIZES: tuple[Any, ...] = (8, 24, 512, "row", "tensor", (128, 128), (16, 8))
WHOLE, PARTIAL = (128, 1024), (150, 200)


def _sized(name: str, sizes: tuple[Any, ...]) -> list[Case]:
    made = []
    for size in sizes:
        data = "normal" if size == "tensor" else "nasty"
        tall = isinstance(size, tuple) and size[0] > 1
        for shape in (WHOLE if tall else (8, 1024), PARTIAL if tall else (5, 520)):
            made.append(_one(name, shape=shape, options=_options(block_size=size), data=data))
    return made


BLOCKS = [
    *(case for name in ("nf4", "uint4") for case in _sized(name, SIZES)),
    *(case for name in ("k3", "int1", "mxfp4", "fp8_e4m3") for case in _sized(name, SOME_SIZES)),
    *(
        _one(name, shape=(3, 140, 136), options=_options(block_size=size), data="normal")
        for name in ("nf4", "int4", "int1")
        for size in ("tensor", (16, 8), (128, 128))
    ),
    _one("nf4", shape=(150, 131), options=_options(block_size=(16, 8))),
    _one("int4", shape=(131, 300), axis=0, options=_options(block_size=(128, 128)), data="normal"),
    _one("int1", shape=(4, 5000), data="normal"),
    _one("int1", shape=(3, 2048), data="finite"),
    _one("int4", shape=(4, 16384), options=_options(block_size=16384), data="outliers"),
    _one("uint4", shape=(2, 40000), options=_options(block_size="row"), data="normal"),
]

CLAMPED = [
    *(_one(name, nonfinite="clamp") for name in NAMES),
    *(_one(name, nonfinite="clamp", shape=(37, 131)) for name in (*FEW, "fp16")),
    *(_one(name, nonfinite="clamp", shape=(256, 24), axis=0) for name in FEW),
    *(_one(name, nonfinite="clamp", options=_options(block_size="tensor")) for name in FEW),
]

STOCHASTIC = [
    *(_one(name, stochastic=True, shape=(8, 512)) for name in OWN),
    *(_one(name, stochastic=True, shape=(37, 131)) for name in FEW),
    *(_one(name, stochastic=True, shape=(256, 24), axis=0) for name in FEW),
    *(_one(name, stochastic=True, shape=(3, 70, 5), axis=1) for name in ("nf4", "int4", "fp16")),
    _one("nf4", stochastic=True, shape=(24, 256), layout="transposed"),
    _one("int4", stochastic=True, shape=(20, 520), options=_options(block_size=(16, 8))),
    _one("k5", stochastic=True, options=_options(levels="5", packing="word")),
    _one("uint4", stochastic=True, nonfinite="clamp"),
]

GIVEN = [
    *(_one(name, given="scale") for name in SCALED),
    *(_one(name, given="zero point") for name in SCALED if name.startswith("uint")),
    *(_one(name, given="scale", shape=(37, 131)) for name in FEW),
    *(_one(name, given="scale", shape=(256, 24), axis=0) for name in FEW),
    *(_one(name, given="one scale") for name in FEW),
    _one("uint4", given="zero point", shape=(37, 131)),
    _one("uint4", given="zero point", shape=(20, 520), options=_options(block_size=(16, 8))),
    _one("int8", given="one scale", options=_options(block_size="tensor")),
    _one("int8", given="scale", stochastic=True),
    _one("nf4", given="scale", nonfinite="clamp"),
    *(_one("nvfp4", given="global", shape=shape) for shape in ((8, 1024), (37, 131))),
]

DOUBLE = [
    *(
        _one(name, shape=shape, data=data, options=_options(double_quant=True))
        for name in ("nf4", "int8", "fp8_e4m3", "dynamic8")
        for shape, data in (((8, 1024), "nasty"), ((40, 1024), "normal"), ((37, 131), "nasty"))
    ),
    _one("fp4", options=_options(double_quant=True), nonfinite="clamp"),
    _one("nf4", shape=(256, 24), axis=0, options=_options(double_quant=True)),
    _one("nf4", shape=(16, 8192), options=_options(block_size=8, double_quant=True), data="normal"),
    _one("k3", options=_options(scale_dtype="float32", double_quant=True), data="normal"),
    _one("int4", options=_options(scale_dtype="float32", double_quant=True), stochastic=True),
    _one("nf4", options=_options(block_size="tensor", double_quant=True), data="normal"),
]


def _learned(name: str, **fields: Any) -> Case:
    count = len(LEVELS[name])
    bits = max(2, (count - 1).bit_length())
    return Case(f"k{bits}", "float32", options=_options(levels=name), **fields)


LEARNED = [
    *(_learned(name, data=data) for name in LEVELS for data in ("nasty", "normal")),
    *(_learned(name, shape=(37, 131)) for name in LEVELS),
    *(_learned(name, shape=(8, 512), stochastic=True) for name in ("3", "200", "16 close")),
]

PACKINGS = [
    _one(f"k{bits}", shape=(3, columns), options=_options(packing=packing))
    for bits in range(2, 9)
    for packing in ("word", "planes")
    for columns in (131, 512)
]

# Differences of numbers with a zero point.
RANGES = [
    Case(name, dtype, shape, axis, data="ends", options=_options(block_size=64, scale_dtype=scale))
    for name in ("uint2", "uint4", "uint8")
    for dtype in ("float32", "bfloat16")
    for scale in ("float32", "bfloat16", "float16")
    for shape, axis in (((8, 1024), -1), ((37, 131), -1), ((256, 24), 0))
]

# Formats whose small scales are chosen by the error that they leave.
CONTESTED = [
    name
    for name in SCALED
    if FORMATS[name].rule.dtype in ("float16", "e4m3") and FORMATS[name].rule.rule != "mean_abs"
]
SMALL = [
    *(_one(name, dtype=dtype, data="small") for name in NAMES for dtype in ("float32", "bfloat16")),
    *(_one(name, dtype="float32", data="small", shape=(37, 131)) for name in CONTESTED),
    *(_one(name, dtype="float32", data="small", shape=(256, 24), axis=0) for name in CONTESTED),
    *(
        _one(name, dtype="float32", data="small", options=_options(block_size=size), shape=shape)
        for name in ("int4", "uint4", "k3", "nvfp4")
        for size, shape in (
            (8, (8, 1024)),
            (256, (8, 1024)),
            ("row", (64, 192)),
            ((16, 8), (40, 520)),
        )
    ),
    _one("uint4", dtype="float32", data="small", nonfinite="clamp"),
    _one("int4", dtype="float32", data="small", stochastic=True),
    _one("k3", dtype="float32", data="small", options=_options(packing="planes")),
    *(_learned(name, data="small") for name in LEVELS),
]


def _stored(name: str, scale_dtype: str | None = None, **fields: Any) -> Case:
    """Of an option of `_options`: block_size, or of a format with minimums."""
    own = {key: fields.pop(key) for key in ("block_size", "offset") if key in fields}
    if scale_dtype:
        own["scale_dtype"] = scale_dtype
    return _one(name, options=_options(**own), **fields)


# Minimums beside scales, and scales of other types, by each kernel: blocks of a few lanes, of a
# thread block, along another axis, of two axes, partial ones, and ones of any size.
STORED = [
    *(
        _stored("uint4", **fields, block_size=size, offset="min", scale_dtype=dtype)
        for dtype, size, fields in (
            (None, 64, {"dtype": "float32"}),
            ("bfloat16", 64, {"dtype": "float32", "shape": (5, 200)}),
            ("float32", 256, {}),
            (None, "row", {"shape": (3, 4096)}),
            (None, (16, 8), {"shape": (40, 520), "data": "normal"}),
            ("bfloat16", "tensor", {"shape": (37, 131), "data": "normal"}),
            (None, 32, {"shape": (256, 24), "axis": 0}),
            (None, 64, {"dtype": "float32", "data": "small"}),
            (None, 40, {"dtype": "float32", "data": "small", "shape": (37, 131)}),
            (None, 64, {"nonfinite": "clamp"}),
            ("bfloat16", 64, {"stochastic": True}),
        )
    ),
    *(_stored(f"uint{bits}", block_size=32, offset="min") for bits in (2, 3, 8)),
    _stored("uint5", "bfloat16", block_size=48, offset="min", shape=(5, 200)),
    *(_stored(name, "bfloat16", block_size=64) for name in ("nf4", "k3", "int4", "uint4")),
    *(_stored(name, "bfloat16", dtype="float32", data="small") for name in ("int4", "uint4")),
    _stored("fp8_e4m3", "bfloat16", block_size=(16, 8), shape=(40, 520)),
    *(_stored(name, "e8m0", block_size=32) for name in ("int8", "int4", "fp8_e4m3", "fp4_e2m1")),
    _stored("fp8_e4m3", "e8m0", block_size=(128, 128), shape=(150, 200)),
    _stored("int8", "e8m0", block_size="tensor", shape=(37, 131), data="normal"),
    _stored("int2", "e8m0", block_size="row", shape=(3, 4096), stochastic=True),
    _one("int8", given="scale", options=_options(block_size=32, scale_dtype="e8m0")),
    _one("int4", given="scale", options=_options(scale_dtype="bfloat16")),
]

GROUPS = {
    "basics": BASICS,
    "axes": AXES,
    "shapes": SHAPES,
    "views": VIEWED,
    "block sizes": BLOCKS,
    "clamp": CLAMPED,
    "stochastic": STOCHASTIC,
    "static": GIVEN,
    "double": DOUBLE,
    "levels": LEARNED,
    "packings": PACKINGS,
    "small": SMALL,
    "stored": STORED,
}
# What the GPU's own tests add: kernels that nothing else in a process has loaded before.
UNSEEN = _one("uint5", options=_options(block_size=48))
ONLY_ON_GPU = [UNSEEN]
ALL = list(dict.fromkeys(case for group in GROUPS.values() for case in group))

# What is decoded beyond the results of the cases above, each to every dtype.
DECODED = [
    *BASICS[::3],
    *(_one(name, shape=(5, k)) for name in OWN for k in (1, 33, 131)),
    *BLOCKS,
    *DOUBLE,
    *STORED,
    *LEARNED,
    *PACKINGS,
    *(case for case in AXES if case.format in PLACED),
    *(case for case in GIVEN if case.format in FEW),
]
DECODED = list(dict.fromkeys(DECODED))


# ---- comparing ----------------------------------------------------------------------------------


def differences(found: cq.QuantArray, wanted: cq.QuantArray) -> str:
    """Which components of two NumPy QuantArrays differ, and where first; "" where none does."""
    texts = []
    for name, want in wanted.arrays().items():
        got = found.arrays()[name]
        if (got.dtype, got.shape) != (want.dtype, want.shape):
            texts.append(f"{name}: {got.dtype} {got.shape}, not {want.dtype} {want.shape}")
            continue
        a, b = _bytes(got), _bytes(want)
        wrong = np.flatnonzero((a != b).any(-1)) if a.size else []
        if len(wrong):
            i = wrong[0]
            texts.append(
                f"{name}: {len(wrong)} of {want.size}, first {got.reshape(-1)[i]} at {i}, "
                f"not {want.reshape(-1)[i]}"
            )
    return "; ".join(texts)


def _bytes(x: np.ndarray) -> np.ndarray:
    flat = np.ascontiguousarray(x).reshape(-1)
    return flat.view(np.uint8).reshape(len(flat), x.dtype.itemsize)


def same_values(a: np.ndarray, b: np.ndarray) -> bool:
    """Same dtype, shape and numbers: all NaN are alike, and -0.0 is not 0.0."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    a, b = a.astype(F32), b.astype(F32)
    nan = np.isnan(a) & np.isnan(b)
    return bool((nan | ((a == b) & (np.signbit(a) == np.signbit(b)))).all())


def all_codes(fmt: Format) -> np.ndarray:
    """uint8 or uint16 [rows, 64]: every code that the format has."""
    count = len(fmt.codec.levels) if isinstance(fmt.codec, Codebook) else 1 << fmt.bits
    codes = np.arange(max(count, 64)) % count
    return (
        codes.astype(fmt.codec.code_dtype).reshape(-1, 64)
        if count >= 64
        else (codes.astype(fmt.codec.code_dtype)[None])
    )


def scales_of(q: cq.QuantArray) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The reference's effective scales and minimums."""
    blocks = effective(q._host, q.format, q.stored_shape)
    return blocks.scale, blocks.minimum
