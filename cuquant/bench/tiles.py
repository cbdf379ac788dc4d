"""What tiles of matmul/hopper.cu take: likely ways to divide products, timed, and from these the
TileCosts by which the fastest is chosen."""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from cuquant.array.packed_weight import PackedWeight, prepack
from cuquant.bench.gpu import Gpu
from cuquant.bench.matmul import copy_weight
from cuquant.bench.quantize import random_values
from cuquant.bench.timing import Call, copies, measure
from cuquant.formats import Format, get_format
from cuquant.gpu import jit
from cuquant.gpu.arrays import CupyBackend, backend_of
from cuquant.gpu.rates import TileCosts
from cuquant.ops.layout.packed_weight import Groups
from cuquant.ops.matmul.epilogue import Epilogue
from cuquant.ops.matmul.hopper import Hopper, program_of
from cuquant.ops.matmul.hopper_tiles import Decoding, Shape, Work, time_us, ways
from cuquant.ops.matmul.problem import Dense, Product, Weight
from cuquant.ops.quantize.door import quantize

FORMATS = ("int4:128", "nf4", "int8:128", "q4_k")  # one of each kind of Decoding
LAYERS = (  # N, K
    (2112, 7168), (2048, 8192), (4096, 4096), (5120, 5120), (7168, 2048), (8192, 8192),
    (10240, 8192), (18944, 3584), (28672, 4096), (3584, 14336), (5120, 13824),
)  # fmt: skip
ROWS = (16, 24, 32, 48, 64, 96, 128, 160, 256, 384, 512, 1024)
LIKELY, MOST_WAYS = 1.5, 8  # ways that may take so many times the fastest's time, at most so many
CLOSE = 3.0  # a way that is slower than the fastest by 1 / CLOSE counts e times less
STEPS = (0.2, 0.1, 0.05, 0.02)  # by which a cost is changed, until no change of any is better
PRECISION = 3  # digits


class Case(NamedTuple):
    """A product of so many rows of x, and ways to divide it."""

    rows: int
    work: Work
    ways: tuple[Shape, ...]


class Timed(NamedTuple):
    """A Case, and the microseconds that each of its ways took."""

    case: Case
    us: tuple[float, ...]


def calibrated(gpu: Gpu, repeats: int, begin: Callable[[str], None]) -> TileCosts | None:
    """The costs of the current device; None where it has no such tiles."""
    backend = CupyBackend(jit.current_device(), 0)
    if backend.arch != 90:
        return None
    known = backend.rates.tiles
    timed = list(measure_tiles(gpu, backend.multiprocessors, known, repeats, begin))
    begin("fitting the costs of tiles")
    return fit(timed, known)


def likely(rows: int, work: Work) -> Case:
    """The ways that may be the fastest, one for each way of sharing the work."""
    found = sorted(ways(rows, work), key=lambda way: way[0])
    kinds: dict[tuple[object, ...], Shape] = {}
    for time, s in found:
        kind = s.streamed, s.split, s.once, s.row_groups, s.depth_groups
        if time <= LIKELY * found[0][0] and len(kinds) < MOST_WAYS:
            kinds.setdefault(kind, s)
    return Case(rows, work, tuple(kinds.values()))


def measure_tiles(
    gpu: Gpu,
    processors: int,
    costs: TileCosts,
    repeats: int,
    begin: Callable[[str], None] = lambda text: None,
) -> Iterator[Timed]:
    """Time likely ways to divide all products; `costs` tell which ones these are.

    `begin` is called with a text before each part.
    """
    for name in FORMATS:
        fmt = get_format(name)
        cases = {
            (n, k): [likely(m, Work(n, k, Decoding.of(fmt, k), processors, costs)) for m in ROWS]
            for n, k in LAYERS
        }
        begin(f"{name}: compiling")
        programs = dict.fromkeys(
            program_of(fmt, "float16", shape, Groups.of(fmt, k))
            for (_, k), of_layer in cases.items()
            for case in of_layer
            for shape in case.ways
        )
        with ThreadPoolExecutor() as pool:  # NVRTC lets other threads run
            list(pool.map(lambda program: jit.compiled(program, 90), programs))
        for (n, k), of_layer in cases.items():
            begin(f"{name} {n}x{k}")
            weights = _weights(gpu, random_values((n, k), "float16"), fmt)
            x = gpu.upload(random_values((max(ROWS), k), "float16"))
            y = gpu.upload(np.empty((max(ROWS), n), np.float16))
            for case in of_layer:
                of_case = [
                    calls_of(shape, x[: case.rows], weights, y[: case.rows]) for shape in case.ways
                ]
                timings = [measure(gpu.engine, calls, repeats) for calls in of_case]
                yield Timed(case, tuple(timing.microseconds for timing in timings))
            del weights, x, y
            gpu.release()


def _weights(gpu: Gpu, values: np.ndarray, fmt: Format) -> list[Any]:
    """A weight, as often as exceeds the cache."""
    weight = prepack(quantize(gpu.upload(values), fmt))
    count = copies(gpu.machine.l2_bytes, weight.nbytes)
    return [weight, *(copy_weight(gpu, weight) for _ in range(count - 1))]


def calls_of(shape: Shape, x: Any, weights: Sequence[PackedWeight], y: Any) -> list[Call]:
    """What multiplies each of the weights, divided so, on the stream that is current then."""
    (rows, depth), columns = x.shape, y.shape[1]
    dense = Dense(x.data.ptr, np.dtype(np.float16), depth, 1)
    calls = []
    with backend_of(x) as backend:
        packed = Epilogue(y, "float16", columns).pack(backend)
        for w in weights:
            weight = Weight(w.format, dict(w.components), w.shape, 1, w.layout)
            product = Product(rows, columns, depth, dense, (weight,))
            run = Hopper(shape).prepare(backend, product)(rows)

            def call(run: Any = run) -> None:
                with backend_of(x) as own:
                    run(own, x.data.ptr, packed)

            calls.append(call)
    return calls


# ---- costs --------------------------------------------------------------------------------------


def fit(timed: Sequence[Timed], costs: TileCosts) -> TileCosts:
    """Costs that reckon the times of the faster ways well and tell the fastest, from `costs` on.

    Each cost is changed by STEPS, up and down, as long as that makes the loss smaller.
    """
    numbers, shape = _numbers(costs), costs
    best = loss(timed, costs)
    for step in STEPS:
        improves = True
        while improves:
            improves = False
            for i, number in enumerate(numbers):
                for changed in (number * (1 + step), number / (1 + step)):
                    tried = [*numbers[:i], changed, *numbers[i + 1 :]]
                    found = loss(timed, _costs(tried, shape))
                    if found < best * (1 - 1e-4):
                        best, numbers, improves = found, tried, True
                        break
    return _costs([float(f"{number:.{PRECISION}g}") for number in numbers], shape)


def loss(timed: Sequence[Timed], costs: TileCosts) -> float:
    """Three times the mean squared error of reckoned times, as logarithms, and what the ways that
    are chosen take longer than the fastest."""
    error = weight = longer = 0.0
    for case, us in timed:
        work = case.work._replace(costs=costs)
        reckoned = [time_us(shape, case.rows, work) for shape in case.ways]
        fastest = min(us)
        chosen = min(range(len(us)), key=reckoned.__getitem__)
        longer += math.log(us[chosen] / fastest)
        for found, measured in zip(reckoned, us, strict=True):
            own = math.exp(-CLOSE * (measured / fastest - 1))
            error += own * math.log(found / measured) ** 2
            weight += own
    return 3 * error / weight + longer / len(timed)


def _numbers(costs: TileCosts) -> list[float]:
    return [x for field in costs for x in (field if isinstance(field, tuple) else (field,))]


def _costs(numbers: Sequence[float], like: TileCosts) -> TileCosts:
    """Costs of these numbers, with pairs where `like` has them."""
    left = iter(numbers)
    fields: list[Any] = [
        (next(left), next(left)) if isinstance(field, tuple) else next(left) for field in like
    ]
    return TileCosts(*fields)
