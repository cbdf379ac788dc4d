"""The kernels of fused row quantization that `precompile` makes: a few of all there may be."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cuquant import interop
from cuquant.formats import Format, get_format
from cuquant.gpu.backend import Backend
from cuquant.gpu.view import View, c_strides
from cuquant.ops.quantize.call import Known, Task
from cuquant.ops.rows.kernel import takes_format
from cuquant.ops.rows.on_gpu import quantize_rows
from cuquant.ops.rows.source import GELU, LAYER, RMS, SILU, Rows, Source

SHAPE = (256, 4096)
USUAL = (
    Source(norm=RMS, weight=True),
    Source(adds=True, norm=RMS, weight=True),
    Source(gate=SILU),
)
OTHERS = (
    Source(norm=LAYER, weight=True, bias=True),
    Source(gate=GELU),
    Source(group=128, weight=True),
    Source(group=1024),
)
# All operations to the first format, the usual ones to the others.
FORMATS = ("int8", "fp8_e4m3", "mxfp8", "mxfp4", "nvfp4")


def plan_rows(
    plan: Backend,
    array: Callable[[tuple[int, ...]], Any],
    address: int,
    fmt: Format,
    dtypes: Sequence[str],
) -> None:
    """Have `plan` note the kernels for a format; of what `array` makes only the shape counts."""
    if fmt.name not in FORMATS or not takes_format(fmt, SHAPE[1]) or fmt.rule.block == "tensor":
        return
    sources = (*USUAL, *OTHERS) if fmt == get_format(FORMATS[0]) else USUAL
    for name in dtypes:
        dtype = interop.float_dtype(name)
        parts = {c.name: array(c.shape) for c in fmt.components(SHAPE)}
        view = View(address, SHAPE, c_strides(SHAPE), dtype)
        known = Known(global_scale=1.0 if "global_scale" in parts else None)
        task = Task(view, 1, known, parts, not fmt.holds_nan, False, 0)
        for source in sources:
            rows = Rows(source, array(SHAPE), eps=np.float32(1e-6))
            quantize_rows(plan, rows, fmt, task)
