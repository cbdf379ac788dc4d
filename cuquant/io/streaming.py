"""Quantize a safetensors file tensor by tensor: memory holds one at a time, or three on a GPU."""

import math
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

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
from cuquant.io.selection import Formats, Selection
from cuquant.ops.quantize.door import quantize

SLOTS = 3  # tensors in memory on a GPU: one is read, one computes, one is written


@dataclass(frozen=True)
class Plan:
    """What will happen to one tensor: quantized to `format`, or kept for `reason`."""

    info: TensorInfo
    format: Format | None
    reason: str | None = None

    @property
    def bytes_out(self) -> int:
        """That it will take."""
        return self.format.nbytes(self.info.shape) if self.format else self.info.nbytes


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


def plan(reader: SafetensorsReader, chosen: Selection) -> list[Plan]:
    """Which tensors of a file are quantized: float matrices that the globs select.

    Raises
    ------
    FormatError
        For a file that another library has quantized.
    ValueError
        For one of cuquant's, and a glob that selects nothing.
    """
    if KEY in reader.metadata:
        raise ValueError(f"{reader.path} is quantized already; quantize the original file")
    refuse_foreign(reader)
    chosen.refuse_unused({name: (name,) for name in reader.tensors}, reader.path)
    return [
        Plan(info, *chosen.decide((info.name,), info.numpy_dtype, info.shape))
        for info in reader.tensors.values()
    ]


def quantize_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    formats: Formats,
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
    formats
        Of the result: one for all tensors, or {glob: format}, of which the first that fits decides;
        None keeps a tensor.
    include, exclude
        Globs of names of tensors or modules; without `include`, all are candidates. A glob of
        `include` or `formats` that no name matches is refused.
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
        For non-finite values, naming the tensor, names that collide, or a glob that matches
        none.
    BackendUnavailable
        Where a GPU is asked for and is not there.
    """
    where = resolve(device)
    chosen = Selection.of(formats, include, exclude)
    with SafetensorsReader(source) as reader:
        plans = plan(reader, chosen)
        if begin is not None:
            begin(plans)
        specs, entries = _layout(plans)
        with SafetensorsWriter(target, specs, {**reader.metadata, **metadata(entries)}) as writer:
            if where == "cpu" or all(step.reason is not None for step in plans):
                for step in plans:
                    yield _convert(reader, writer, step, nonfinite)
            else:
                yield from _convert_overlapped(reader, writer, plans, nonfinite, where)
            reader.close()  # Windows replaces no file that is open, and the target may be it


def _layout(plans: Sequence[Plan]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors of the target, and the header entries of the quantized ones."""
    specs: dict[str, Any] = {}
    entries: dict[str, Any] = {}
    for step in plans:
        info = step.info
        if step.format is None:
            added: dict[str, Any] = {info.name: (info.dtype, info.shape)}
        else:
            added = component_specs(info.name, step.format, info.shape)
            axes = tuple(range(len(info.shape)))
            entries[info.name] = entry(step.format, info.shape, info.numpy_dtype, axes)
        if clash := specs.keys() & added.keys():
            raise ValueError(f"two tensors would be called {quote(min(clash))}; exclude one")
        specs |= added
    return specs, entries


def _convert(
    reader: SafetensorsReader,
    writer: SafetensorsWriter,
    step: Plan,
    nonfinite: Nonfinite,
) -> Report:
    started = time.perf_counter()
    info = step.info
    if step.format is None:
        return _keep(reader, writer, step, started)
    values = reader.read(info.name)
    try:
        q = quantize(values, step.format, nonfinite=nonfinite)
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
    nonfinite: Nonfinite,
    device: str,
) -> Iterator[Report]:
    """As `_convert`, on a GPU: a tensor is read while another is quantized and a third written."""
    jobs = [_job(reader, step.info, step.format) for step in plans if step.format is not None]
    pipeline = Pipeline(make_slots(device, nonfinite, jobs, SLOTS))
    started = time.perf_counter()
    with closing(pipeline.run(jobs)) as made:
        for step in plans:
            info = step.info
            if step.format is None:
                report = _keep(reader, writer, step, started)
            else:
                _, (parts, sqnr) = next(made)
                for name, part in parts.items():
                    writer.write(f"{info.name}.{name}", part)
                seconds = time.perf_counter() - started
                report = Report(
                    info.name, info.shape, None, info.nbytes, step.bytes_out, sqnr, seconds
                )
            yield report
            started = time.perf_counter()


def _job(reader: SafetensorsReader, info: TensorInfo, fmt: Format) -> Job:
    def read(staging: np.ndarray) -> None:
        reader.read_into(info.name, staging)

    return Job(info.name, info.shape, info.numpy_dtype, info.nbytes, fmt, read)
