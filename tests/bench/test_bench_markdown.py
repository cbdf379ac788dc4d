"""Markdown tables of what the benchmarks wrote."""

from dataclasses import fields, replace

import pytest
from bench_results import product_results, quantize_results
from fake_bench import MACHINE
from typer.testing import CliRunner

from cuquant.bench import speedup
from cuquant.bench.formats import FormatResults, FormatRow, Speed
from cuquant.bench.markdown import markdown, product_table
from cuquant.bench.report import PeerTiming
from cuquant.bench.rows import RowResults
from cuquant.cli import app


def products():
    """int4 beside two peers at 1 and 4096 rows, and nf4 beside none."""
    found = product_results()
    first, second, third = found.measurements
    slow = replace(second.timing, microseconds=1153.2, graph=True)
    second = replace(second, right=True, timing=slow)
    return replace(found, measurements=(first, second, replace(third, batch=4096)))


def test_products_have_a_row_for_each_number_of_rows_and_a_column_for_each_library():
    lines = markdown(products().to_json()).splitlines()
    assert lines[:4] == [
        f"{MACHINE}:",
        "`cuquant bench matmul`.",
        "Measured: copy 2.50 TB/s, read 3.00, write 3.20, cuBLAS float16 800 TFLOP/s.",
        "a note",
    ]
    assert lines[4:] == [
        "",
        "| N x K | M | int4 | humming 0.1.19, int4 | nf4 | cuBLAS, float16 |",
        "| --- | --- | --- | --- | --- | --- |",
        "| 4096 x 4096 | 1 | 10.0 | 15.0 |  | 20.0 |",
        "| 4096 x 4096 | 4096 | 1153 |  | 10.0 | 20.0 |",
    ]


def test_products_of_two_dtypes_have_columns_of_their_own():
    found = products()
    other = replace(found.measurements[0], dtype="bfloat16")
    both = replace(found, measurements=(found.measurements[0], other))
    heading = markdown(both.to_json()).splitlines()[5]
    assert heading == (
        "| N x K | M | int4 float16 | humming 0.1.19, int4 float16 | int4 bfloat16 "
        "| humming 0.1.19, int4 bfloat16 | cuBLAS, float16 | cuBLAS, bfloat16 |"
    )


def test_norms_and_gates_have_a_column_each():
    found = quantize_results()
    kept = {field.name: getattr(found, field.name) for field in fields(found)}
    first = replace(found.measurements[0], operation="rmsnorm", exact=True)
    second = replace(first, operation="silu_mul")
    lines = markdown(RowResults(**kept | {"measurements": (first, second)}).to_json()).splitlines()
    assert lines[-3] == "| format | dtype | shape | rmsnorm, TB/s | silu_mul, TB/s |"
    assert lines[-1].endswith(f" | {first.tbps:.2f} | {first.tbps:.2f} |")


def test_formats_are_compared_as_the_command_does():
    rows = [
        FormatRow(name, bits, mb, None, 1.0, 0.5, (Speed(1, us),))
        for name, bits, mb, us in (("fp32", 32.0, 4.0, 8.0), ("fp16", 16.0, 2.0, 4.0))
    ]
    found = FormatResults("cuquant bench formats", "a GPU", ("a note",), tuple(rows))
    assert FormatResults.from_json(found.to_json()) == found
    lines = markdown(found.to_json()).splitlines()
    assert lines[:4] == ["a GPU:", "`cuquant bench formats`.", "a note", ""]
    assert lines[-1] == "| fp16 | 16 | 2.0 | 50.0% | 4 | 2.00x | 1.00x |  | 1.00000 | 50.0% |"


def test_quantize_and_dequantize_share_a_row():
    found = quantize_results()
    first, back, plain, larger = found.measurements
    problem = PeerTiming("other 1.0", None, "broken")
    both = replace(
        found,
        measurements=(first, replace(back, peer=problem), replace(plain, exact=True), larger),
    )
    assert markdown(both.to_json()).splitlines()[5:] == [
        "| format | dtype | shape | quantize, us | quantize, TB/s | dequantize, us "
        "| dequantize, TB/s | other 1.0: quantize, us |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| nf4 | float16 | 4096 x 14336 | 50.0 | 3.00 | 50.0 | 3.00 | 600.0 |",
        "| int8 | float16 | 4096 x 14336 | 75.0 (no graph) | 2.00 |  |  |  |",
        "| nf4 | float16 | 16384 x 16384 | 75.0 (no graph) | 9.16 |  |  |  |",
    ]


@pytest.mark.parametrize("found", [quantize_results(), product_results()])
def test_wrong_results_have_no_table(found):
    with pytest.raises(ValueError, match="wrong"):
        markdown(found.to_json())


@pytest.mark.parametrize("text", ["[]", "{}", '{"schema": "cuquant.bench/9"}'])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match=r"cuquant\.bench/1.*cuquant\.bench\.matmul/1"):
        markdown(text)


def test_the_command_prints_each_file(tmp_path):
    text = products().to_json()
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(text)
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    result = CliRunner().invoke(app, ["bench", "table", *files])
    assert result.exit_code == 0 and result.stdout == f"{markdown(text)}\n{markdown(text)}"
    (tmp_path / "b.json").write_text("[]")
    result = CliRunner().invoke(app, ["bench", "table", *files])
    assert result.exit_code == 1 and "b.json: no results" in result.output


# ---- the picture --------------------------------------------------------------------------------


def test_the_command_draws_times_beside_cublas(tmp_path):
    pytest.importorskip("matplotlib")
    results, picture = tmp_path / "a.json", tmp_path / "speed.png"
    results.write_text(products().to_json())
    done = CliRunner().invoke(app, ["bench", "table", str(results), "--plot", str(picture)])
    assert done.exit_code == 0 and picture.read_bytes().startswith(b"\x89PNG")


def test_bars_are_the_time_of_cublas_over_ones_own(monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(speedup, "replace_picture", lambda path, figure: drawn.append(figure))
    speedup.plot_speedups(product_table(products()), "a device", None)
    (axes,) = drawn[0].axes
    bars = {bar.get_label(): [patch.get_height() for patch in bar] for bar in axes.containers}
    assert bars == {
        "int4": [2.0, pytest.approx(20 / 1153)],
        "humming 0.1.19, int4": [pytest.approx(20 / 15)],
        "nf4": [2.0],
    }


def test_a_picture_of_five_shapes_has_three_panels_side_by_side(monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(speedup, "replace_picture", lambda path, figure: drawn.append(figure))
    (heading, *_), shapes = product_table(products()), [f"{n} x 8" for n in range(5)]
    rows = [(shape, "1", "10.0", "", "", "20.0") for shape in shapes]
    speedup.plot_speedups([heading, *rows], "a device", None)
    *panels, empty = drawn[0].axes
    assert [axes.get_title() for axes in panels] == [f"weight {shape}" for shape in shapes]
    assert [axes.get_subplotspec().rowspan.start for axes in panels] == [0, 0, 0, 1, 1]
    assert not empty.axison and empty.get_title() == ""


def test_a_picture_without_cublas_is_refused():
    table = [("N x K", "M", "int4"), ("8 x 8", "1", "10.0")]
    with pytest.raises(ValueError, match="cuBLAS"):
        speedup.plot_speedups(table, "a device", None)
