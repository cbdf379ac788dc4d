"""How matmul/ggml.cu divides a product, which weights come by boxes, and what goes there."""

import pytest
from emulator import Recorder
from ggml_products import NAMES, of_bytes
from in_turn import in_turn
from products import Products, normal

import cuquant as cq
from cuquant.gpu.limits import SHARED
from cuquant.ops.matmul import ggml as blocks_product
from cuquant.ops.matmul.ggml import Shape, divide, in_boxes
from cuquant.ops.matmul.q8_1 import operand


@pytest.mark.parametrize("name", NAMES)
@in_turn("arch", [80, 86, 90, 100, 120, 999])
def test_a_block_fits_and_all_strips_are_taken(name, arch):
    limit = SHARED.get(arch, SHARED[86])
    for rows in (1, 8, 9, 16):
        for columns, depth in ((1, 256), (4096, 14336), (14336, 4096), (152064, 8192), (64, 65536)):
            for sets, boxes in ((1, False), (2, False), (1, True), (2, True)):
                shape = divide(name, rows, columns, depth, arch, 132, sets == 2, boxes)
                assert shape.boxes == boxes
                assert blocks_product.shared_bytes(operand(name), rows, shape, sets) <= limit
                groups = -(-depth // 256)
                assert 1 <= shape.chunk <= -(-groups // shape.split) and shape.split <= groups
                assert 4 <= shape.warps <= (16 if arch in (80, 90, 100) else 12) - 4 * (rows > 8)


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "arch", "split", "strips", "warps", "chunk"),
    [
        (1, 4096, 14336, 90, 1, 2, 16, 56),  # one wave: 256 strips on 132 multiprocessors
        (8, 4096, 14336, 90, 2, 4, 16, 28),  # two blocks share x, which is too large for one
        (8, 14336, 4096, 90, 1, 7, 16, 16),
        (16, 4096, 14336, 90, 2, 4, 8, 14),  # half of a block's x at a time
        (1, 1024, 4096, 90, 2, 1, 16, 8),  # 64 strips for 132 multiprocessors
        (1, 152064, 4096, 90, 1, 36, 16, 16),  # two waves
        (8, 4096, 4096, 80, 1, 2, 14, 16),  # 163 KB
        (8, 4096, 4096, 86, 1, 2, 8, 8),  # 99 KB,
    ],
)
def test_how_products_are_divided(rows, columns, depth, arch, split, strips, warps, chunk):
    assert divide("q4_0", rows, columns, depth, arch, 132) == Shape(split, strips, warps, chunk)


@pytest.mark.parametrize(
    ("name", "rows", "columns", "depth", "arch", "gated", "spread"),
    [
        ("q4_0", 1, 4096, 4096, 90, False, True),
        ("q4_0", 8, 4096, 4096, 90, False, True),
        ("q3_k", 1, 6144, 4096, 90, False, True),
        ("q4_0", 1, 2048, 4096, 90, False, False),  # fewer strips than multiprocessors
        ("q4_0", 1, 4096, 14336, 90, False, False),  # memory is busy for long
        ("q4_0", 1, 4096, 4096, 90, True, False),  # so it is with two weights
        ("q4_0", 9, 4096, 4096, 90, False, False),
        ("q4_0", 1, 4096, 4096, 86, False, False),  # no product begins beside another
        ("iq4_nl", 8, 4096, 4096, 90, False, True),
    ],
)
def test_short_products_are_spread(name, rows, columns, depth, arch, gated, spread):
    shape = divide(name, rows, columns, depth, arch, 132, gated)
    assert (shape.spread, shape.warps == 8) == (spread, spread)


@pytest.mark.parametrize(
    ("rows", "warps", "wide"), [(1, 16, True), (4, 16, True), (6, 16, False), (8, 12, False)]
)
def test_a_table_of_levels_takes_warps_where_x_is_large(rows, warps, wide):
    """The larger table takes none."""
    shape = divide("iq4_nl", rows, 4096, 14336, 90, 132)
    assert (shape.warps, shape.wide) == (warps, wide)
    short = divide("iq4_nl", rows, 4096, 4096, 90, 132)
    assert short.spread and short.wide == (rows > 2)  # the next block beside it has one too


@pytest.mark.parametrize(
    ("name", "rows", "depth", "pointers", "arch", "wanted"),
    [
        ("q4_0", 16, 256, (256, 512), 90, True),
        ("q4_0", 1, 256, (256,), 100, True),
        ("q4_0", 1, 256, (256,), 80, False),  # no copy engine
        ("q4_0", 1, 256, (256,), 120, False),
        ("q4_0", 1, 288, (256,), 90, False),  # rows that start within a vector
        ("q4_0", 1, 256, (256, 520), 90, False),
        ("q6_k", 8, 2048, (256,), 90, True),  # 240 bytes instead of 210
        ("q3_k", 8, 2048, (256,), 90, False),  # 144 instead of 110, in a short product
        ("q3_k", 8, 14336, (256,), 90, True),
        ("q3_k", 9, 2048, (256,), 90, True),
    ],
)
def test_which_weights_come_by_boxes(name, rows, depth, pointers, arch, wanted):
    assert in_boxes(name, rows, 4096, depth, pointers, arch, 132) == wanted


@pytest.mark.parametrize(
    ("rows", "dtype", "step", "arch", "taken"),
    [
        (1, "float16", 1, 80, True),
        (16, "bfloat16", 1, 120, True),
        (17, "float16", 1, 80, False),
        (1, "float32", 1, 80, False),
        (3, "float16", 2, 80, False),
        (1, "float16", 1, 75, False),
    ],
)
def test_the_choice(rows, dtype, step, arch, taken):
    recorder = Recorder(arch=arch)
    x = normal((rows, 512 * step), dtype)[:, ::step]
    Products(recorder)(cq.linear, x, of_bytes("q4_k", 16, 512))
    assert ("matmul/ggml.cu" in {program.file for program in recorder.programs}) == taken
