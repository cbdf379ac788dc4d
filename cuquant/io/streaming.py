"""Quantize a safetensors file tensor by tensor: memory holds one at a time, or three on a GPU."""

import math
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any

import numpy as np

from cuquant import interop
from cuquant.array.metrics import error
from cuquant.array.quant_array import QuantArray
from cuquant.formats import Format
from cuquant.formats.names import Nonfinite
from cuquant.gpu.device import resolve
from cuquant.io.container.messages import quote
from cuquant.io.container.safetensors import SafetensorsReader, SafetensorsWriter, TensorInfo
from cuquant.io.cuda import make_slots
from cuquant.io.foreign import refuse_foreign
from cuquant.io.pipeline import Job, Pipeline
from cuquant.io.quantized import KEY, component_specs, entry, metadata
from cuquant.ops.quantize.door import quantize

SLOTS = 3  # tensors in memory on a GPU: one is read, one computes, one is written


@dataclass(frozen=True)
class Plan:
    """What will happen to one tensor: quantized, or kept for `reason`."""

    info: TensorInfo
    reason: str | None = None


@dataclass(frozen=True)
class Report:
    """What happened to one tensor.

    Attributes
    ----------
    name, shape
        Of the tensor.
    reason
        Why it was kept as it is; None where it was quantized.
    bytes_in, bytes_out
        Stored size before and after.
    sqnr_db
        Of the quantized tensor, over its finite values where NaN and infinity are clamped; None
        where kept.
    seconds
        To read, quantize, measure and write it; on a GPU, where these overlap with those of
        other tensors, since the report before.
    """

    name: str
    shape: tuple[int, ...]
    reason: str | None
    bytes_in: int
    bytes_out: int
    sqnr_db: float | None
    seconds: float

    @property
    def bits_per_weight(self) -> float:
        return self.bytes_out * 8 / max(math.prod(self.shape), 1)


def plan(
    reader: SafetensorsReader, fmt: Format, include: Sequence[str], exclude: Sequence[str]
) -> list[Plan]:
    """Which tensors of a file `fmt` will quantize: float matrices that the globs select.

    ValueError for a glob of `include` that selects nothing.
    """
    for pattern in include:
        if not any(fnmatchcase(name, pattern) for name in reader.tensors):
            some = ", ".join(map(quote, islice(reader.tensors, 3)))
            raise ValueError(
                f"{reader.path}: no tensor is called {quote(pattern)}, which include names; the "
                f"names are {some or 'none'}{', ...' if len(reader.tensors) > 3 else ''}"
            )
    return [
        Plan(info, why_kept(info.name, info.numpy_dtype, info.shape, fmt, include, exclude))
        for info in reader.tensors.values()
    ]


def why_kept(
    name: str,
    dtype: np.dtype,
    shape: tuple[int, ...],
    fmt: Format,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> str | None:
    """Why a tensor of a file is not quantized to `fmt`; None where it is."""
    if dtype.name not in interop.INPUT_DTYPES:
        return f"{dtype} values"
    if len(shape) < 2:
        return "fewer than two axes"
    if include and not any(fnmatchcase(name, pattern) for pattern in include):
        return "not included"
    if any(fnmatchcase(name, pattern) for pattern in exclude):
        return "excluded"
    try:
        fmt.check_shape(shape)
    except ValueError:
        return f"{shape[-1]} columns do not divide into blocks"
    return fmt.why_keep(shape, dtype.itemsize * math.prod(shape))


def quantize_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    fmt: Format,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    nonfinite: Nonfinite = "raise",
    device: object = None,
    begin: Callable[[list[Plan]], None] | None = None,
) -> Generator[Report, None, None]:
    """Quantize the float matrices of a safetensors file; yields a report after each tensor.

    The target appears under its name when the iterator is exhausted. If it is closed before, or
    an exception comes, nothing is left behind.

    Parameters
    ----------
    source, target
        Safetensors files; they may be the same.
    fmt
        Format of the result.
    include, exclude
        Globs of tensor names; without `include`, all are candidates. One of `include` that no
        name matches is refused.
    nonfinite
        As in `quantize`; by default a NaN or infinity is refused.
    device
        "cpu", "cuda" or "cuda:N"; the file is the same. None: a GPU where one is usable.
    begin
        Called once with the plan, before any tensor is read.

    Raises
    ------
    FormatError
        For a malformed source, or one that another library has quantized.
    ValueError
        For non-finite values, naming the tensor, names that collide, or a glob of `include` that
        matches none.
    BackendUnavailable
        Where a GPU is asked for and is not there.
    """
    where = resolve(device)
    with SafetensorsReader(source) as reader:
        if KEY in reader.metadata:
            raise ValueError(f"{source} is quantized already; quantize the original file")
        refuse_foreign(reader)
        plans = plan(reader, fmt, include, exclude)
        if begin is not None:
            begin(plans)
        specs, entries = _layout(plans, fmt)
        with SafetensorsWriter(target, specs, {**reader.metadata, **metadata(entries)}) as writer:
            if where == "cpu" or all(step.reason is not None for step in plans):
                for step in plans:
                    yield _convert(reader, writer, step, fmt, nonfinite)
            else:
                yield from _convert_overlapped(reader, writer, plans, fmt, nonfinite, where)
            reader.close()  # Windows replaces no file that is open, and the target may be it


def _layout(plans: Sequence[Plan], fmt: Format) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors of the target, and the header entries of the quantized ones."""
    specs: dict[str, Any] = {}
    entries: dict[str, Any] = {}
    for step in plans:
        info = step.info
        if step.reason is not None:
            added: dict[str, Any] = {info.name: (info.dtype, info.shape)}
        else:
            added = component_specs(info.name, fmt, info.shape)
            axes = tuple(range(len(info.shape)))
            entries[info.name] = entry(fmt, info.shape, info.numpy_dtype, axes)
        if clash := specs.keys() & added.keys():
            raise ValueError(f"two tensors would be called {quote(min(clash))}; exclude one")
        specs |= added
    return specs, entries


def _convert(
    reader: SafetensorsReader,
    writer: SafetensorsWriter,
    step: Plan,
    fmt: Format,
    nonfinite: Nonfinite,
) -> Report:
    started = time.perf_counter()
    info = step.info
    if step.reason is not None:
        return _keep(reader, writer, step, started)
    values = reader.read(info.name)
    try:
        q = quantize(values, fmt, nonfinite=nonfinite)
    except ValueError as problem:
        raise ValueError(f"{quote(info.name)}: {problem}") from problem
    for name, part in q.arrays().items():
        writer.write(f"{info.name}.{name}", part)
    sqnr = _sqnr_db(values, q, finite_only=nonfinite == "clamp")
    seconds = time.perf_counter() - started
    return Report(info.name, info.shape, None, info.nbytes, q.nbytes, sqnr, seconds)


def _sqnr_db(values: np.ndarray, q: QuantArray, *, finite_only: bool) -> float:
    """SQNR of a quantized tensor, over the finite values where asked for."""
    if not finite_only or (finite := np.isfinite(values)).all():
        return error(values, q).sqnr_db
    return error(values[finite], q.dequantize(dtype=np.float32)[finite]).sqnr_db


def _keep(
    reader: SafetensorsReader, writer: SafetensorsWriter, step: Plan, started: float
) -> Report:
    info = step.info
    writer.write_raw(info.name, reader.chunks(info.name))
    seconds = time.perf_counter() - started
    return Report(info.name, info.shape, step.reason, info.nbytes, info.nbytes, None, seconds)


def _convert_overlapped(
    reader: SafetensorsReader,
    writer: SafetensorsWriter,
    plans: Sequence[Plan],
    fmt: Format,
    nonfinite: Nonfinite,
    device: str,
) -> Iterator[Report]:
    """As `_convert`, on a GPU: a tensor is read while another is quantized and a third written."""
    chosen = [step.info for step in plans if step.reason is None]
    sizes = [(info.shape, info.nbytes) for info in chosen]
    pipeline = Pipeline(make_slots(device, fmt, nonfinite, sizes, SLOTS))
    started = time.perf_counter()
    with closing(pipeline.run(_job(reader, info) for info in chosen)) as made:
        for step in plans:
            info = step.info
            if step.reason is not None:
                report = _keep(reader, writer, step, started)
            else:
                _, (parts, sqnr) = next(made)
                for name, part in parts.items():
                    writer.write(f"{info.name}.{name}", part)
                seconds, nbytes = time.perf_counter() - started, fmt.nbytes(info.shape)
                report = Report(info.name, info.shape, None, info.nbytes, nbytes, sqnr, seconds)
            yield report
            started = time.perf_counter()


def _job(reader: SafetensorsReader, info: TensorInfo) -> Job:
    def read(staging: np.ndarray) -> None:
        reader.read_into(info.name, staging)

    return Job(info.name, info.shape, info.numpy_dtype, info.nbytes, read)
