"""The commands `bench ...`: how fast operations are on this GPU, and tables of such results."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from cuquant.cli.bench_output import (
    check_outputs,
    chosen_peers,
    kept,
    print_products,
    print_table,
    refuse_wrong_products,
    typed,
)
from cuquant.cli.demo import find_model
from cuquant.cli.options import (
    Commands,
    DeviceOption,
    FormatsOption,
    ShapesOption,
    complete_format,
    parse_device,
    parse_products,
    parse_shapes,
    split_names,
)
from cuquant.cli.show import console
from cuquant.disk import replace_file
from cuquant.errors import BackendUnavailable, clipped, pip_install
from cuquant.gpu.device import resolve, use

ResultsOption = Annotated[
    Path | None,
    typer.Option(
        "--json",
        "--output",
        "-o",
        metavar="FILE",
        dir_okay=False,
        help="Write the results to a file, as JSON.",
    ),
]

bench = typer.Typer(
    cls=Commands,
    name="bench",
    no_args_is_help=True,
    help="Measure operations on this machine's GPU.",
)


@bench.command()
def quantize(
    formats: FormatsOption = None,
    dtypes: Annotated[
        list[str] | None,
        typer.Option(metavar="A,B", help="float16, bfloat16, float32; repeatable."),
    ] = None,
    shapes: ShapesOption = None,
    size: Annotated[
        float | None, typer.Option(metavar="MB", min=0.001, help="Instead: 10^6 bytes of values.")
    ] = None,
    json: ResultsOption = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Draw them: png, svg or pdf."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=10, help="Rounds of which the median counts.")] = 20,
    peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Time bitsandbytes beside it.")
    ] = True,
) -> None:
    """Time quantize and dequantize, and check what was timed; exit code 1 if it is wrong.

    Matrices are 4096x14336 and 16384x16384 unless --shape or --size is given.
    """
    from cuquant.bench import quantize as cases
    from cuquant.bench import roofline
    from cuquant.bench.gpu import CupyGpu
    from cuquant.bench.peers import find_peers
    from cuquant.bench.quantize_report import NUMBERS, Results, headings, rows

    if shapes and size is not None:
        raise typer.BadParameter("pass --shape or --size, not both", param_hint="--size")
    check_outputs(json, plot)
    matrices = int(size * 1e6) if size is not None else parse_shapes(shapes)
    settings = cases.Settings(
        cases.parse_formats(split_names(formats or []) or cases.FORMATS),
        cases.check_dtypes(split_names(dtypes or []) or cases.DTYPES),
        matrices or cases.SHAPES,
        repeats,
    )
    gpu = CupyGpu()
    beside, notes = find_peers() if peers else ([], [])
    with console(stderr=True).status("measuring the memory") as status:
        ceilings = roofline.measure_ceilings(gpu, repeats)
        gpu.release()
        measured = tuple(cases.run(gpu, settings, beside, status.update))
    results = Results(gpu.machine, ceilings, cases.FORMULA, measured, typed(), tuple(notes))
    drop = ("of read", "of copy", "peer", "peer us", "faster", "TB/s", "dtype")
    print_table(headings(results), NUMBERS, rows(results), results.header(), drop)
    if json is not None:
        replace_file(json, results.to_json().encode())
    if plot is not None:
        roofline.plot(results, plot)
    if not results.exact:
        console(stderr=True).print(
            "error: results marked WRONG differ from the NumPy reference", style="red"
        )
        raise typer.Exit(1)


@bench.command()
def matmul(
    formats: FormatsOption = None,
    dtypes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B", help="Of x and y: float16 (if not given), bfloat16, float32; repeatable."
        ),
    ] = None,
    shapes: ShapesOption = None,
    batch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="M,...", help="Rows of x; 1,2,4,... up to 4096 if not given; repeatable."
        ),
    ] = None,
    prepack: Annotated[
        bool, typer.Option("--prepack/--no-prepack", help="Lay weights out for the kernels first.")
    ] = True,
    json: ResultsOption = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Draw a roofline: png, svg or pdf."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=10, help="Rounds of which the median counts.")] = 20,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B|none",
            help="Of cublas, bitsandbytes, tinygemm, humming, gemlite; all by default; repeatable.",
        ),
    ] = None,
    cold: Annotated[
        bool,
        typer.Option(
            "--cold/--warm",
            help="Let each call have other weights, or the same ones, which stay in the L2 cache "
            "where they fit; then --peers none.",
        ),
    ] = True,
) -> None:
    """Time linear beside other libraries, and check what was timed; exit code 1 if it is wrong.

    Weights are int4 and nf4, in five shapes of LLM layers, unless -f or --shape is given.
    """
    from cuquant.bench import matmul as cases
    from cuquant.bench import roofline
    from cuquant.bench.gpu import CupyGpu
    from cuquant.bench.matmul_peers import PEERS, cublas, find_product_peers
    from cuquant.bench.matmul_report import NUMBERS, ProductResults, headings, rows
    from cuquant.bench.peers import reason
    from cuquant.bench.quantize import check_dtypes, parse_formats

    check_outputs(json, plot)
    settings = cases.Settings(
        parse_formats(split_names(formats or []) or cases.FORMATS),
        check_dtypes(split_names(dtypes or []) or cases.DTYPES),
        parse_shapes(shapes) or cases.SHAPES,
        tuple(_count(text, "--batch") for text in split_names(batch or [])) or cases.BATCHES,
        prepack,
        repeats,
        cold,
    )
    chosen = chosen_peers(peers, PEERS)
    if chosen and not cold:
        raise typer.BadParameter("peers have cold weights: --peers none", param_hint="--warm")
    gpu = CupyGpu()
    beside, notes = find_product_peers(chosen, PEERS)
    notes.append("weights: prepacked" if prepack else "weights: QuantArrays, not prepacked")
    if not cold:
        notes.append(
            "weights: the same ones in each call, in the L2 cache where they fit; "
            "a time may be below the floor, which is that of memory"
        )
    with console(stderr=True).status("measuring memory and cuBLAS") as status:
        ceilings, gemm = roofline.measure_ceilings(gpu, repeats), {}
        try:
            vendor = cublas()
            gemm = {d: roofline.measure_gemm(vendor, gpu, d, repeats) for d in settings.dtypes}
        except Exception as error:  # no cuBLAS, or one that cannot be loaded
            notes.append(f"no cuBLAS here, the floor is that of the bytes alone: {reason(error)}")
        gpu.release()
        results = ProductResults(
            gpu.machine, ceilings, cases.FORMULA, (), typed(), tuple(notes), gemm
        )
        results = kept(results, cases.run(gpu, settings, beside, status.update), json)
    print_products(results, headings(results), NUMBERS, rows(results), ("of floor", "dtype"))
    if plot is not None:
        roofline.plot_products(results, plot)
    refuse_wrong_products(results)


@bench.command()
def gemm(
    pairs: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            "--formats",
            "-f",
            metavar="X@W,...",
            autocompletion=complete_format,
            help="Formats of x and of w, such as int8@int4; one format is for both; repeatable.",
        ),
    ] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            "--shapes",
            metavar="MxNxK,...",
            help="Sizes of products, such as 64x14336x4096; repeatable.",
        ),
    ] = None,
    json: ResultsOption = None,
    repeats: Annotated[int, typer.Option(min=10, help="Rounds of which the median counts.")] = 20,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B|none",
            help="Of cublas, int_mm, scaled_mm, scaled_mm_fast, humming, deep_gemm; all by "
            "default; repeatable.",
        ),
    ] = None,
) -> None:
    """Time products of two quantized arrays beside other libraries, and check what was timed; exit
    code 1 if it is wrong.

    Pairs are int8, fp8 and narrower weights, in eight shapes, unless -f or --shape is given.
    """
    from cuquant.bench import gemm as cases
    from cuquant.bench import roofline
    from cuquant.bench.gemm_peers import PEERS
    from cuquant.bench.gemm_report import NUMBERS, GemmResults, headings, rows
    from cuquant.bench.gpu import CupyGpu
    from cuquant.bench.matmul_peers import find_product_peers

    check_outputs(json, None)
    settings = cases.Settings(
        cases.parse_pairs(split_names(pairs or []) or cases.PAIRS),
        parse_products(shapes) or cases.SHAPES,
        repeats,
    )
    chosen = chosen_peers(peers, PEERS)
    gpu = CupyGpu()
    beside, notes = find_product_peers(chosen, PEERS)
    with console(stderr=True).status("measuring the memory") as status:
        ceilings = roofline.measure_ceilings(gpu, repeats)
        gpu.release()
        results = GemmResults(gpu.machine, ceilings, cases.FORMULA, (), typed(), tuple(notes))
        results = kept(results, cases.run(gpu, settings, beside, status.update), json)
    print_products(results, headings(results), NUMBERS, rows(results), ("y",))
    refuse_wrong_products(results)


@bench.command()
def formats(
    names: FormatsOption = None,
    rows: Annotated[
        list[str] | None,
        typer.Option(metavar="M,...", help="Rows of x; 1,2048 if not given; repeatable."),
    ] = None,
    passages: Annotated[int, typer.Option(min=2, help="Passages of text to embed.")] = 128,
    device: DeviceOption = "auto",
    json: ResultsOption = None,
    repeats: Annotated[int, typer.Option(min=10, help="Rounds of which the median counts.")] = 20,
) -> None:
    """Compare formats on the demo's model: memory, speed beside fp32 and fp16, error, retrieval.

    Without a GPU the times are the CPU's, which is the reference and no fast path.
    """
    from cuquant.bench import formats as cases
    from cuquant.bench.gpu import CupyGpu
    from cuquant.demo.run import pick_device

    check_outputs(json, None)
    chosen = cases.chosen(split_names(names or []))
    sizes = tuple(_count(text, "--rows") for text in split_names(rows or [])) or cases.ROWS
    model = find_model(plot=False)
    where, reason = pick_device(parse_device(device))
    with use(where), console(stderr=True).status("reading the model") as status:
        gpu = None if where == "cpu" else CupyGpu()
        ran = cases.describe_cpu() + reason if gpu is None else str(gpu.machine)
        made = cases.compare(
            model, chosen, gpu=gpu, device=where, rows=sizes, count=passages, repeats=repeats,
            begin=status.update,
        )  # fmt: skip
    note = cases.ON_CPU if gpu is None else cases.ON_GPU
    results = cases.FormatResults(typed(), ran, (note, cases.COLUMNS), tuple(made))
    columns = cases.headings(results)
    drop = (
        "cosine",
        "MB",
        *(name for names in cases.speed_headings(results)[::-1] for name in names),
    )
    print_table(columns, columns[1:], cases.rows(results), results.header(), drop)
    if json is not None:
        replace_file(json, results.to_json().encode())


@bench.command()
def model(
    names: FormatsOption = None,
    size: Annotated[
        str, typer.Option("--model", metavar="NAME", help="llama-8b, llama-1b or tiny.")
    ] = "llama-8b",
    rows: Annotated[int, typer.Option(min=1, help="Sequences of a step of one token.")] = 1,
    train: Annotated[
        bool, typer.Option("--train/--no-train", help="Train adapters too: LoRA of rank 16.")
    ] = True,
    device: DeviceOption = "auto",
    json: ResultsOption = None,
    repeats: Annotated[int, typer.Option(min=10, help="Rounds of which the median counts.")] = 10,
    peers: Annotated[
        list[str] | None,
        typer.Option(metavar="A,B|none", help="bitsandbytes, or none; repeatable."),
    ] = None,
) -> None:
    """Time a decoder of Llama's shape in PyTorch, with float and with quantized layers: memory,
    tokens, prompts, training; exit code 1 if results are wrong.

    Weights are random, and all kinds are in memory at once: llama-8b is for GPUs of 80 GB.
    """
    from cuquant.bench import model as cases
    from cuquant.bench.formats import describe_cpu
    from cuquant.bench.gpu import CupyGpu
    from cuquant.bench.quantize import parse_formats

    check_outputs(json, None)
    sizes = cases.sizes_of(size)
    chosen = tuple(parse_formats(split_names(names or []) or cases.FORMATS))
    if find_spec("torch") is None:
        raise BackendUnavailable(f"bench model needs PyTorch; {pip_install('torch')}")
    from cuquant.bench import decoder

    beside = tuple(chosen_peers(peers, decoder.PEERS))
    where = resolve(parse_device(device))
    dtype = "float32" if where == "cpu" else "float16"  # no CPU multiplies the latter well
    settings = cases.Settings(sizes, chosen, beside, dtype, rows, train=train, repeats=repeats)
    with console(stderr=True).status("making models") as status:
        ran = describe_cpu() if where == "cpu" else str(CupyGpu().machine)
        made, notes = decoder.run(settings, where, status.update)
    results = cases.ModelResults(
        typed(), f"{ran}, torch {decoder.VERSION}", (*settings.notes(), *notes), tuple(made)
    )
    columns = cases.headings(results)
    print_table(columns, columns[1:], cases.rows(results), results.header(), columns[:1:-1])
    if json is not None:
        replace_file(json, results.to_json().encode())
    for row in results.rows:
        if row.problem is not None:
            console(stderr=True).print(f"error: {row.weights}: {row.problem}", style="red")
    if not results.right:
        raise typer.Exit(1)


@bench.command(name="rows")
def row_quantizers(
    formats: FormatsOption = None,
    operations: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B",
            help="Of rmsnorm, add_rmsnorm, layernorm, silu_mul, gelu_mul, hadamard; repeatable.",
        ),
    ] = None,
    dtypes: Annotated[
        list[str] | None,
        typer.Option(metavar="A,B", help="bfloat16 (if not given), float16, float32; repeatable."),
    ] = None,
    shapes: ShapesOption = None,
    json: ResultsOption = None,
    repeats: Annotated[int, typer.Option(min=10, help="Rounds of which the median counts.")] = 20,
) -> None:
    """Time norms, gates and transforms with the quantization behind them, and check what was
    timed; exit code 1 if it is wrong.

    Matrices are 16384x4096, 4096x14336 and 16384x5120 unless --shape is given.
    """
    from cuquant.bench import roofline
    from cuquant.bench import rows as cases
    from cuquant.bench.gpu import CupyGpu
    from cuquant.bench.quantize import check_dtypes, parse_formats
    from cuquant.bench.quantize_report import NUMBERS, headings, rows

    check_outputs(json, None)
    settings = cases.Settings(
        parse_formats(split_names(formats or []) or cases.FORMATS),
        cases.check_operations(split_names(operations or []) or cases.OPERATIONS),
        check_dtypes(split_names(dtypes or []) or cases.DTYPES),
        parse_shapes(shapes) or cases.SHAPES,
        repeats,
    )
    gpu = CupyGpu()
    with console(stderr=True).status("measuring the memory") as status:
        ceilings = roofline.measure_ceilings(gpu, repeats)
        gpu.release()
        measured = tuple(cases.run(gpu, settings, status.update))
    results = cases.RowResults(gpu.machine, ceilings, cases.FORMULA, measured, typed())
    drop = ("of read", "of copy", "TB/s", "dtype")
    print_table(headings(results), NUMBERS, rows(results), results.header(), drop)
    if json is not None:
        replace_file(json, results.to_json().encode())
    if not results.exact:
        console(stderr=True).print(
            "error: results marked WRONG differ from the NumPy reference", style="red"
        )
        raise typer.Exit(1)


@bench.command()
def calibrate(
    repeats: Annotated[int, typer.Option(min=10, help="Rounds of which the median counts.")] = 20,
) -> None:
    """Measure what the choice of a product's kernel is reckoned from, and print it as its table's
    row: MEASURED in cuquant/gpu/rates.py. On Hopper that takes minutes."""
    from cuquant.bench import roofline, tiles
    from cuquant.bench.gpu import CupyGpu
    from cuquant.bench.matmul_peers import cublas

    gpu = CupyGpu()
    with console(stderr=True).status("measuring memory and cuBLAS") as status:
        rates = roofline.measure_rates(gpu, cublas(), repeats)
        costs = tiles.calibrated(gpu, repeats, status.update)
    values = f"read={rates.read:.3g}, tensor={rates.tensor:.3g}, float32={rates.float32:.3g}"
    if costs is not None:
        values += f", tiles={costs}"
    print(f'"{gpu.machine.device}": Rates({values}),')


@bench.command()
def table(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Results that --json wrote.")
    ],
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            help="Draw how many times as fast as cuBLAS one file's products are: png, svg or pdf.",
        ),
    ] = None,
) -> None:
    """Print results as Markdown tables, as examples/benchmarks.md holds them."""
    from cuquant.bench.markdown import markdown, product_table
    from cuquant.bench.matmul_report import ProductResults

    check_outputs(None, plot)
    texts = [file.read_text(encoding="utf-8") for file in files]
    for file, text in zip(files, texts, strict=True):
        try:
            made = markdown(text)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        print(made, end="\n" if file != files[-1] else "")
    if plot is not None:
        from cuquant.bench.speedup import plot_speedups

        results = ProductResults.from_json(texts[0])
        plot_speedups(product_table(results), results.machine.device, plot)


def _count(text: str, option: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise typer.BadParameter(f"{clipped(text)} is no number of rows", param_hint=option)
    return int(text)
