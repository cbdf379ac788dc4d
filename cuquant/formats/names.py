"""Names of formats and of what their options may be, for type checkers and editors."""

import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict

if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack
else:
    Unpack = getattr(typing, "Unpack", typing.Optional)  # Python 3.10 has no name for it

if TYPE_CHECKING:
    # Those of `list_formats()`, in its order; a test compares them.
    FormatName = Literal[
        "nf4", "fp4", "bof4s", "dynamic8", "linear8", "k2", "k3", "k4", "k5", "k6", "k7", "k8",
        "int8", "int7", "int6", "int5", "int4", "int3", "int2", "int1", "uint8", "uint7", "uint6",
        "uint5", "uint4", "uint3", "uint2", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "fp6_e2m3",
        "fp6_e3m2", "fp4_e2m1", "mxfp8", "mxfp8_e5m2", "mxfp6", "mxfp6_e3m2", "mxfp4", "nvfp4",
        "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q8_1", "iq4_nl", "iq4_xs", "q2_k", "q3_k",
        "q4_k", "q5_k", "q6_k", "ggml_mxfp4", "ggml_nvfp4",
    ]  # fmt: skip
else:
    FormatName = str  # help() and notebooks would show all names wherever a format is taken
Packing = Literal["dense", "word", "planes"]
ScaleDtype = Literal["float32", "float16", "bfloat16", "e8m0"]
Span = Literal["row", "tensor", "flat"]
Nonfinite = Literal["propagate", "raise", "clamp"]


class _Array(Protocol):
    def __array__(self, *args: Any, **kwargs: Any) -> Any: ...


Levels = Literal["lloyd", "normal", "linear"] | Sequence[float] | _Array


class FormatOptions(TypedDict, total=False):
    """The options of `get_format`; None is as good as none."""

    block_size: int | Span | tuple[int, int] | None
    double_quant: bool | None
    levels: Levels | None
    packing: Packing | None
    offset: Literal["zero_point", "min"] | None
    scale_dtype: ScaleDtype | None
    permuted: bool | None
    absmax: bool | None
    divisor: bool | None
    per_matrix: bool | None
