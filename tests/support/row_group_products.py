"""Products with codes by rows and several groups in a unit: cases and checks."""

import numpy as np
from fragment_products import Case, Expected, with_scale
from oracle import bits_equal
from products import values

from cuquant.ops.matmul import stream
from cuquant.ops.matmul.problem import Problem, Weight
from cuquant.ops.matmul.stream_rows import AT_OPERANDS

HOPPER, PROCESSORS = 90, 132
FORMATS = [
    (name, block)
    for bits in range(2, 8)
    for name in (f"int{bits}", f"uint{bits}")
    for block in (16, 32)
    if block == 16 or bits not in (4, 6) or name[0] == "u"
]
FORMATS += [("k2", 32), *((name, 16) for name in ("k2", "k3", "k5", "k6", "k7", "fp6_e3m2"))]
# Warps that share K, chunks that end early, and several strips a warp on few multiprocessors, which
# some are spread over. Zero points have all of it.
CASES = [
    (Case(name, dtype, rows, shape, options=(("block_size", block),)), processors)
    for name, block in FORMATS
    for dtype, rows, shape, processors, names in (
        ("float16", 1, (35, 768), PROCESSORS, "iukf"),
        ("float16", 3, (35, 768), PROCESSORS, "u"),
        ("float16", 8, (70, 1280), 3, "iukf"),
        ("float16", 13, (35, 768), PROCESSORS, "f"),
        ("bfloat16", 1, (35, 768), PROCESSORS, "u"),
        ("bfloat16", 2, (70, 1280), 3, "i"),
        ("bfloat16", 4, (70, 1280), 3, "ukf"),
        ("bfloat16", 5, (35, 768), PROCESSORS, "iu"),
        ("bfloat16", 7, (35, 768), PROCESSORS, "kf"),
        ("bfloat16", 14, (70, 1280), 3, "f"),
    )
    if name[0] in names
]
# Two groups a unit in two products; and two blocks that share K, whose tokens they have in turn.
CASES += [
    (Case(name, "bfloat16", rows, shape, options=(("block_size", 32),)), PROCESSORS)
    for name, rows, shape in (("uint7", 7, (35, 768)), ("uint5", 4, (20, 16384)))
]

# Scales that meet operands, or columns of a product, may be large.
LARGE = [("int2", 16, "float16", 2), ("uint3", 32, "float16", 5), ("int4", 16, "float16", 2)]
LARGE += [
    ("uint3", 32, "float16", 2),
    ("uint5", 16, "float16", 2),
    ("int3", 16, "bfloat16", 5),
    ("uint5", 16, "bfloat16", 3),
]
LARGE_SHAPE = (20, 512)


def division(fmt, rows=1, shape=(4096, 4096), dtype="float16", arch=HOPPER):
    found = stream.division_of(
        Problem(rows, *shape, fmt, Weight.layout, dtype, True, arch, PROCESSORS, direct=True)
    )
    assert found is not None
    return found


def expected(case):
    """What linear must give: operands that met their scales are rounded once more."""
    meet = division(case.weight.format, case.rows, case.shape, case.dtype).meet
    return Expected.of(case.x, case.weight, unit=1.0 if meet == AT_OPERANDS else None)


def large_case(name, block, dtype, rows):
    return Case(name, dtype, rows, LARGE_SHAPE, options=(("block_size", block),))


def check_large_scales(linear, case, on_gpu=False):
    """Scales of 2 and more in some rows; those of other rows, and up to 256, change nothing."""
    x, q = case.x * case.x.dtype.type(2.0**-10), case.weight
    scale, usual = q.arrays()["scale"].copy(), q.arrays()["scale"]
    for row, at, value in ((3, 5, 65504), (3, 15, -40000), (9, 0, 300), (12, 9, 255), (17, -1, 2)):
        scale[row, at] = value
    large = with_scale(q, scale)
    y, before = (linear(x, w) for w in (large, q))
    assert np.abs(values(large)).max() > 65504 and np.isfinite(y).all()
    unit = 2.0**-8 if case.dtype == "float16" else 1.0
    assert Expected.of(x, large, unit=unit).admits(y, LARGE_SHAPE[1], on_gpu=on_gpu)
    exact, usual_rows = Expected.of(x, large, unit=1.0), np.delete(np.arange(len(scale)), (3, 9))
    exact = Expected(*(part[:, usual_rows] for part in (exact.sums, exact.size, exact.off)))
    assert exact.admits(y[:, usual_rows], LARGE_SHAPE[1], on_gpu=on_gpu)
    same = (scale == usual).all(axis=1)
    assert same.sum() == len(scale) - 4 and bits_equal(y[:, same], before[:, same])


def check_rounded_once(linear, case):
    """A row of x that is 1 in one column has that column's weights for results: as they are where
    sums meet scales."""
    x, columns = np.zeros_like(case.x), 97 * np.arange(case.rows) % LARGE_SHAPE[1]
    x[np.arange(case.rows), columns] = 1
    q, meet = case.weight, division(case.weight.format, case.rows, case.shape, case.dtype).meet
    wanted = q.dequantize().astype(x.dtype if meet == AT_OPERANDS else np.float32).T[columns]
    assert bits_equal(linear(x, q), wanted.astype(np.float32))
