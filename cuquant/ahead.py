"""Compiling ahead of the first use: before a CUDA graph is captured, or for another machine."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cuquant.array.packed_weight import ROWS_LAYOUT, PackedWeight
from cuquant.array.quant_array import QuantArray
from cuquant.errors import clipped, did_you_mean
from cuquant.formats import Format, get_format, list_formats
from cuquant.formats.names import FormatName
from cuquant.gpu import cubins, jit
from cuquant.gpu.arrays import Gpu
from cuquant.gpu.boards import parse_arch
from cuquant.interop import INPUT_DTYPES, name_of
from cuquant.io.checkpoint import Checkpoint
from cuquant.io.files import own_arrays
from cuquant.io.quantized import stored_shape
from cuquant.ops import programs
from cuquant.ops.quantize.arranged import formats_of

OPERATIONS = ("quantize", "dequantize")  # of formats, where none is named
Progress = Callable[[int, int, str], object]


class Precompiled(NamedTuple):
    """What `precompile` did: kernels compiled, kernels that were there, and seconds."""

    compiled: int
    found: int
    seconds: float


def precompile(
    *formats: FormatName | str | Format,
    model: Any = None,
    operations: Iterable[str] | None = None,
    dtypes: Iterable[str] | None = None,
    arch: str | int | tuple[int, int] | None = None,
    export: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    progress: bool | Progress = False,
) -> Precompiled:
    """Compile kernels ahead of their first use, several at a time.

    Parameters
    ----------
    formats
        Names, strings such as "nf4:32+dq" or Formats; all formats where neither these nor a model
        is given.
    model
        A safetensors file that `save`, the command `quantize` or torch wrote of quantized weights,
        a folder of such files, what `load` returns, or a torch module with QuantLinear layers.
        Compiled are the kernels that its weights need: for products with any number of rows of x,
        and to be decoded.
    operations
        Whose kernels, for `formats`; None: quantize and dequantize.
    dtypes
        Of the arrays that are quantized, dequantized to or multiplied. None: all three; for a
        model's weights their own.
    arch
        The GPU to compile for, such as "sm_90", "90" or (9, 0); it need not be there. None is the
        current device, on which the kernels are then also loaded, ready for a CUDA graph.
    export
        A folder that gets a copy of each kernel: with CUQUANT_CUBINS naming it, another machine
        runs them without compiling anything, whatever its NVRTC.
    jobs
        How many are compiled at the same time; None is one for each processor.
    progress
        True for a line on stderr, or what is called with the number done, the number of all and
        the kernel's name.

    Raises
    ------
    ValueError
        For an unknown format, operation, dtype or arch, and for a model without quantized weights,
        before anything is compiled.
    FormatError
        For a malformed file.
    BackendUnavailable
        Without NVRTC; without a GPU where no `arch` is given.
    CompileError
        Where NVRTC rejects a kernel.

    Examples
    --------
    >>> import cuquant as cq
    >>> cq.precompile("nf4", arch="sm_90", export="kernels")  # doctest: +SKIP
    Precompiled(compiled=12, found=0, seconds=1.4)
    """
    names = formats or (list_formats() if model is None else ())
    values = [plain for name in names for plain in formats_of(get_format(name))]
    own = None if dtypes is None else _known("dtype", dtypes, INPUT_DTYPES)
    every = INPUT_DTYPES if own is None else own
    chosen = OPERATIONS if operations is None else operations
    chosen = _known("operation", chosen, sorted(programs.PROGRAMS))
    weights = dict.fromkeys(_weights(model)) if model is not None else {}
    target = jit.device_arch() if arch is None else parse_arch(arch)
    device = jit.current_device() if arch is None else None
    needed = dict.fromkeys(
        program
        for operation in chosen
        for fmt in values
        for program in programs.PROGRAMS[operation](fmt, dtypes=every, arch=target)
    )
    needed.update(_plan_of(weights, own, target, device).programs)
    jit.nvrtc()  # that it is missing is said once, not by each thread
    one = _Task(target, device, None if export is None else Path(export))
    report = _to_stderr if progress is True else progress or (lambda *_: None)
    return _in_parallel(list(needed), one, jobs, report)


# ---- models -------------------------------------------------------------------------------------


class _Weight(NamedTuple):
    """What decides a weight's kernels."""

    format: Format
    shape: tuple[int, ...]
    layout: str
    dtype: str


def _plan_of(
    weights: Iterable[_Weight], dtypes: Sequence[str] | None, arch: int, device: int | None
) -> programs.Plan:
    """The programs that weights need, on a device or, for None, on one like those of `arch`."""
    plan = programs.Plan(arch)
    if device is not None and weights:
        gpu = Gpu(device, 0)
        plan = programs.Plan(arch, gpu.multiprocessors, gpu.rates, has_vendor=gpu.has_vendor)
    for weight in weights:
        chosen = (weight.dtype,) if dtypes is None else dtypes
        programs.plan_weight(plan, weight.format, weight.shape, weight.layout, chosen)
    return plan


def _weights(model: Any) -> Iterator[_Weight]:
    """The quantized weights of a model; ValueError where it has none."""
    if isinstance(model, (str, os.PathLike)):
        found = _described(Path(model))
    elif isinstance(model, Mapping):
        found = [_of(value) for value in model.values() if _is_weight(value)]
    elif callable(getattr(model, "modules", None)):
        held = (getattr(module, "quantized", None) for module in model.modules())
        found = [_of(value) for value in held if _is_weight(value)]
    else:
        raise TypeError(
            "model must be a file, a folder, a dict of weights or a torch module, got "
            f"{type(model).__name__}"
        )
    if not found:
        named = f"{model}" if isinstance(model, (str, os.PathLike)) else "the model"
        raise ValueError(f"{named} has no quantized weights; `cuquant quantize` makes them")
    return iter(found)


def _is_weight(value: Any) -> bool:
    return isinstance(value, (QuantArray, PackedWeight))


def _of(weight: Any) -> _Weight:
    if isinstance(weight, PackedWeight):
        return _Weight(weight.format, weight.shape, weight.layout, name_of(weight.dtype))
    return _Weight(weight.format, weight.stored_shape, ROWS_LAYOUT, name_of(weight.dtype))


def _described(path: Path) -> list[_Weight]:
    """The quantized weights of a file, or of a folder of shards."""
    if path.is_dir() and not any(path.glob("*.safetensors")):
        raise ValueError(f"{path} holds no safetensors files")
    with Checkpoint(path) as files:
        arrays, _ = own_arrays(files)
    return [
        _Weight(a.format, stored_shape(a.shape, a.axes), a.layout or ROWS_LAYOUT, name_of(a.dtype))
        for a in arrays.values()
    ]


# ---- names --------------------------------------------------------------------------------------


def _known(what: str, names: Iterable[str], known: Sequence[str]) -> tuple[str, ...]:
    """The names, refused where one is unknown."""
    chosen = (names,) if isinstance(names, str) else tuple(names)
    for name in chosen:
        if name not in known:
            near = did_you_mean(str(name), known)
            raise ValueError(
                f"{what} {clipped(name)} is unknown{near}; known: {', '.join(known) or 'none'}"
            )
    return chosen


# ---- compiling ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    """What is done with each program."""

    arch: int
    device: int | None  # where it is loaded
    export: Path | None

    def __call__(self, program: jit.Program) -> bool:
        """Whether the program had to be compiled."""
        compiled = jit.compiled(program, self.arch)
        if self.export is not None:
            name = jit.cubin_name(program, jit.source(program), self.arch)
            self.export.mkdir(parents=True, exist_ok=True)
            cubins.write(self.export / f"{name}.cubin", name, compiled)
        if self.device is not None:
            jit.load(program, self.device)
        return compiled.fresh


def _in_parallel(
    programs: list[jit.Program],
    one: Callable[[jit.Program], bool],
    jobs: int | None,
    report: Progress,
) -> Precompiled:
    """Run `one` for each program on threads: NVRTC lets go of the interpreter's lock."""
    start = time.perf_counter()
    done = made = 0
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        futures = {pool.submit(one, program): program for program in programs}
        try:
            for future in as_completed(futures):
                made += future.result()
                done += 1
                report(done, len(programs), futures[future].name)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return Precompiled(made, done - made, time.perf_counter() - start)


def _to_stderr(done: int, total: int, name: str) -> None:
    """One line that is written over on a terminal, one for each kernel in a log."""
    line = f"{done}/{total} {name[:100]}"
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        sys.stderr.write(f"\r\x1b[K{line}{end}")
    else:
        sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
