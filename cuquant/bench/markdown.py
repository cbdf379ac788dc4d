"""Markdown tables of the JSON that the benchmarks write: those that the guide to them holds.

A table of products has a row for each shape and number of rows of x, and a column for each format
or pair of formats, and each peer: microseconds. That of quantize and dequantize has a row for each
format, dtype and shape; so has that of norms and gates, with a column of TB/s for each. Formats on
the demo's model, and weights of a decoder, are compared in the columns of their commands.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from cuquant.bench import formats, model
from cuquant.bench.gemm_report import GemmResults
from cuquant.bench.matmul_report import ProductResults
from cuquant.bench.product_report import ProductRun
from cuquant.bench.quantize_report import Results
from cuquant.bench.report import Comparison, Run
from cuquant.bench.rows import RowResults
from cuquant.bench.timing import Timing

DENSE = "cuBLAS"  # a peer that multiplies with decoded weights: one time for every format
PRODUCTS: dict[str, type[ProductRun[Any]]] = {
    kind.SCHEMA: kind for kind in (ProductResults, GemmResults)
}
QUANTIZERS: dict[str, type[Results]] = {kind.SCHEMA: kind for kind in (Results, RowResults)}
Row = tuple[str, ...]


def markdown(text: str) -> str:
    """What the guide says of one run: machine, command, ceilings and the table.

    Parameters
    ----------
    text
        The JSON that `cuquant bench quantize --json`, or another benchmark, wrote.

    Raises
    ------
    ValueError
        For a text that is neither, and for results that the run found wrong.
    """
    described = json.loads(text)
    schema = described.get("schema") if isinstance(described, dict) else None
    if schema == formats.FormatResults.SCHEMA:
        compared = formats.FormatResults.from_json(text)
        return _page(compared, [formats.headings(compared), *formats.rows(compared)])
    if schema == model.ModelResults.SCHEMA:
        timed = model.ModelResults.from_json(text)
        _refuse_wrong(timed.right)
        return _page(timed, [model.headings(timed), *model.rows(timed)])
    results: Run[Any]
    if schema in QUANTIZERS:
        results = QUANTIZERS[schema].from_json(text)
        of_rows = isinstance(results, RowResults)
        rows, right = (row_table if of_rows else quantize_table)(results), results.exact
    elif schema in PRODUCTS:
        results = PRODUCTS[schema].from_json(text)
        rows, right = product_table(results), results.right
    else:
        others = (formats.FormatResults.SCHEMA, model.ModelResults.SCHEMA)
        known = ", ".join(map(repr, (*QUANTIZERS, *PRODUCTS, *others)))
        raise ValueError(f"no results of a benchmark; their schemas are {known}")
    _refuse_wrong(right)
    measured = f"Measured: {', '.join(results.rates())}."
    lines = [f"{results.machine}:", f"`{results.command}`.", measured, *results.notes]
    return "\n".join(lines) + "\n\n" + _table(rows)


def _page(results: Comparison, rows: Sequence[Row]) -> str:
    lines = [f"{results.device}:", f"`{results.command}`.", *results.notes]
    return "\n".join(lines) + "\n\n" + _table(rows)


def _refuse_wrong(right: bool) -> None:
    if not right:
        raise ValueError("some of these results are wrong, and a table does not show which")


def _table(rows: Sequence[Row]) -> str:
    first, *others = rows
    return "".join(f"| {' | '.join(row)} |\n" for row in (first, ("---",) * len(first), *others))


def _time(timing: Timing) -> str:
    """Microseconds, and whether the host's time is in them.

    >>> _time(Timing(4.36, 4.3, 4.4, True, 10, 8)), _time(Timing(1153.2, 1150, 1160, False, 10, 8))
    ('4.4', '1153 (no graph)')
    """
    digits = 0 if timing.microseconds >= 1000 else 1
    return f"{timing.microseconds:.{digits}f}" + ("" if timing.graph else " (no graph)")


def _filled(keys: Iterable[Row], columns: dict[str, dict[Row, str]]) -> list[Row]:
    return [(*key, *(cells.get(key, "") for cells in columns.values())) for key in keys]


# ---- products -----------------------------------------------------------------------------------


def product_table(results: ProductRun[Any]) -> list[Row]:
    """The heading and the rows of a run's products; a peer stands behind its format."""
    dtypes = {m.dtype for m in results.measurements}
    columns: dict[str, dict[Row, str]] = {}
    dense: dict[str, dict[Row, str]] = {}  # behind all others
    keys: dict[Row, None] = {}
    for m in results.measurements:
        keys[m.key] = None
        which = m.format if len(dtypes) == 1 else f"{m.format} {m.dtype}"
        columns.setdefault(which, {})[m.key] = _time(m.timing)
        for peer in m.peers:
            if peer.timing is None:
                continue
            name = peer.name.partition(" (")[0]
            group, label = (dense, m.dtype) if name == DENSE else (columns, which)
            group.setdefault(f"{name}, {label}", {})[m.key] = _time(peer.timing)
    columns |= dense
    return [(*results.KEYS, *columns), *_filled(keys, columns)]


# ---- quantize and dequantize --------------------------------------------------------------------


def quantize_table(results: Results) -> list[Row]:
    """The heading and the rows of a run of quantize and dequantize."""
    columns: dict[str, dict[Row, str]] = {
        f"{operation}, {unit}": {}
        for operation in ("quantize", "dequantize")
        for unit in ("us", "TB/s")
    }
    keys: dict[Row, None] = {}
    for m in results.measurements:
        key = (m.format, m.dtype, " x ".join(map(str, m.shape)))
        keys[key] = None
        columns[f"{m.operation}, us"][key] = _time(m.timing)
        columns[f"{m.operation}, TB/s"][key] = f"{m.tbps:.2f}"
        if m.peer is not None and m.peer.timing is not None:
            label = f"{m.peer.name}: {m.operation}, us"
            columns.setdefault(label, {})[key] = _time(m.peer.timing)
    return [("format", "dtype", "shape", *columns), *_filled(keys, columns)]


def row_table(results: Results) -> list[Row]:
    """The heading and the rows of a run of norms, gates and transforms with quantization."""
    columns: dict[str, dict[Row, str]] = {}
    keys: dict[Row, None] = {}
    for m in results.measurements:
        key = (m.format, m.dtype, " x ".join(map(str, m.shape)))
        keys[key] = None
        columns.setdefault(f"{m.operation}, TB/s", {})[key] = f"{m.tbps:.2f}"
    return [("format", "dtype", "shape", *columns), *_filled(keys, columns)]
