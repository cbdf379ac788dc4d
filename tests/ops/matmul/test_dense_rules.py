"""How products of codes with codes are divided: pure rules, and what the kernel is told."""

import math
import re
import struct
from dataclasses import replace
from itertools import product

import pytest

from cuquant.gpu.limits import SHARED
from cuquant.gpu.rates import H100
from cuquant.ops.matmul import dense as rules
from cuquant.ops.matmul.coded import Coded, Groups, Scaling
from cuquant.ops.matmul.dense import LINE, ROWS, Cut, Tile, Work, cut_of, tile_of, time_us, ways

PAIRS = [("int8", "int8"), ("fp8_e4m3", "fp8_e4m3"), ("bits", "bits")]
NUMBERS = (1, 3, 64, 129, 2112, 14336)
SCALINGS = [(0, 0, 1), (256, 0, 1), (128, 1, 128), (128, 2, 48), (128, 1, 1), (32, 2, 1)]


def works():
    for kinds, rows, columns, lines in product(PAIRS, NUMBERS, NUMBERS, (1, 2, 7, 56)):
        for promote, scaled, tall in SCALINGS:
            yield Work(rows, columns, lines, kinds, promote, scaled, tall)


def test_every_product_has_a_tile():
    for work in works():
        tile = tile_of(work)
        assert rules.LEAST_STAGES <= tile.stages <= rules.MOST_STAGES
        assert rules.shared_bytes(tile, is_float=work.is_float) <= SHARED[90]
        assert (tile.promote, tile.scaled) == (work.promote, work.scaled)


def test_tiles_are_what_the_kernel_takes():
    """The static_asserts of DenseTile."""
    for work in list(works())[::17]:
        for tile in ways(work):
            assert tile.columns <= 256 and 1 in (tile.split, tile.share)
            assert tile.split <= work.lines and tile.columns // 8 % tile.split == 0
            assert tile.share == 1 or tile.columns // 2 % 8 == 0  # boxes begin on 1024 bytes
            if tile.scaled and rules.halves_of(tile) == 2:
                assert tile.blocks == 1


def test_columns_of_a_tile_are_of_so_many_blocks_of_scales():
    for columns, tall, many in product(rules.COLUMNS, (8, 16, 48, 128, 256, 1000), (300, 4096)):
        work = Work(64, many, 8, PAIRS[1], 128, 1, tall)
        tile = Tile(columns, promote=128, scaled=1)
        blocks = rules.blocks_of(tile, work)
        part = columns // rules.halves_of(tile)
        for first in range(0, many, part):
            last = min(first + part, many) - 1
            spans = last // tall - first // tall + 1
            assert not blocks or spans <= blocks
            if blocks == 2 and spans == 2:  # eights of columns have one scale
                assert (tall - first % tall) % 8 == 0


def test_tiles_of_weights_reach_all_columns():
    for work in works():
        tile = tile_of(work)
        cut = cut_of(tile, work)
        w_tiles, x_tiles = (cut.a, cut.b) if tile.swapped else (cut.b, cut.a)
        assert w_tiles * cut.step >= work.columns > (w_tiles - 1) * cut.step
        assert cut.step % 8 == 0 and cut.step <= (ROWS if tile.swapped else tile.columns)
        assert x_tiles == math.ceil(work.rows / (tile.columns if tile.swapped else ROWS))


def test_blocks_that_share_k_run_together():
    for work in works():
        tile = tile_of(work)
        if tile.split > 1:
            assert cut_of(tile, work).blocks(tile) <= work.processors


@pytest.mark.parametrize("told", ["offsets", "counts", ""])
def test_groups_have_room_for_their_tiles(told):
    work = Work(40, 512, 8, PAIRS[0], groups=6, told=told)
    tile = tile_of(work)
    height = tile.columns if tile.swapped else ROWS
    tiles = cut_of(tile, work).b if tile.swapped else cut_of(tile, work).a
    each = math.ceil(40 / height)
    assert tiles == (each + 6 if told == "offsets" else 6 * each)
    assert tile.share == 1 or tile.swapped  # neighbours may have other weights


def test_few_rows_are_side_b():
    for rows in (1, 16, 64):
        assert tile_of(Work(rows, 14336, 32, PAIRS[0])).swapped
    assert not tile_of(Work(4096, 14336, 32, PAIRS[0])).swapped


def test_large_products_reach_what_rates_say():
    work = Work(8192, 8192, 64, PAIRS[0])
    assert 0.9 < 2 * 8192**3 / time_us(tile_of(work), work) / H100.codes < 1.1
    twice = replace_work(work, codes=2 * H100.codes)
    assert time_us(tile_of(twice), twice) < 0.6 * time_us(tile_of(work), work)


def test_reading_takes_its_time():
    work = Work(1, 28672, 64, PAIRS[0])
    assert time_us(tile_of(work), work) >= 28672 * 64 * LINE / (rules.READ * work.read)


def replace_work(work: Work, **changes) -> Work:
    return work._replace(**changes)


# ---- which scales ------------------------------------------------------------------------------


def side(kind: str, wide: int, tall: int = 1, zero_point: int = 0, **scaling) -> Coded:
    return Coded(kind, 16, 1024, 64, Scaling(8, 0, tall, wide, 1, 64, **scaling), zero_point)


def test_segments_of_k():
    def segments(*wides):
        return rules.promoted(*(side("int8", wide) for wide in wides), 1000)

    assert segments(1000, 4096) == 0
    assert segments(128, 1000) == segments(128, 256) == 128
    assert segments(32, 128) == segments(96, 1000) == 32
    assert segments(16, 1000) is segments(128, 48) is None


def test_zero_points_have_one_segment():
    assert rules.takes(side("uint8", 1000, zero_point=8), side("int8", 1000), 1000)
    assert not rules.takes(side("uint8", 128, zero_point=8), side("int8", 1000), 1000)
    assert not rules.takes(side("int8", 16), side("int8", 16), 1000)
    assert not rules.takes(side("bits", 128), side("bits", 128), 1000)


def test_small_floats_are_added_up_by_runs():
    def work(kind, wide, depth=1000):
        sides = side(kind, wide), side(kind, 1000)
        return rules.work_of(Notes(), *sides, 64, depth, Groups(1, 8))  # type: ignore[arg-type]

    assert work("int8", 1000).promote == work("fp8_e4m3", 1000, depth=256).promote == 0
    assert work("fp8_e4m3", 1000)[4:6] == work("fp8_e5m2", 1000, depth=257)[4:6] == (256, 0)
    assert work("fp8_e4m3", 128)[4:6] == (128, 1)
    assert work("fp8_e4m3", 32).promote == 32


# ---- the launch ----------------------------------------------------------------------------------


class Notes:
    """A Backend that notes maps and launches."""

    arch, multiprocessors, rates = 90, 132, H100

    def __init__(self) -> None:
        self.maps, self.launches = [], []

    def tensor_map(self, *numbers) -> bytes:
        self.maps.append(numbers)
        return bytes([len(self.maps) - 1]) * 128

    def launch(self, launch, *arguments) -> None:
        self.launches.append((launch, arguments))


def launched(x: Coded, w: Coded, *numbers, **options):
    notes = Notes()
    rules.dense(notes, x, w, *numbers, bytes(80), **options)  # type: ignore[arg-type]
    [(launch, arguments)] = notes.launches
    return [notes.maps[given[0]] for given in arguments[:2]], launch, arguments


def test_sides_are_swapped_with_their_kinds():
    x, w = side("fp8_e5m2", 4096), replace(side("fp8_e4m3", 4096), codes=32)
    groups = Groups(1, 16)
    for swapped in (False, True):
        tile = rules.staged(Tile(16, swapped=swapped), is_float=True)
        maps, launch, arguments = launched(x, w, 256, 1024, groups, tile=tile)
        kinds = re.search(r"Products<(\d), (\d)>", launch.program.arguments[0]).groups()
        assert kinds == (("2", "3") if swapped else ("3", "2"))
        assert [m[0] for m in maps] == ([32, 16] if swapped else [16, 32])
        assert [struct.unpack_from("<Q", a)[0] for a in arguments[2:4]] == [m[0] for m in maps]
        assert [m[1] for m in maps] == ([256, 16] if swapped else [16, 256])
        assert all(m[2:4] == (1024, 1024) and m[5:] == ("uint8", LINE) for m in maps)
        assert launch.threads == 384 and len(arguments) == 15 - 1


def test_boxes_of_a_cluster_are_halves():
    tile = rules.staged(Tile(256, share=2), is_float=False)
    maps, launch, arguments = launched(
        side("int8", 4096), side("int8", 4096), 4096, 4096, Groups(1, 4096), tile=tile
    )
    assert [m[4] for m in maps] == [ROWS, 128]
    assert launch.grid == (132, 1, 1)
    assert arguments[6:] == (4096, 4096, 32, 32, 16, 256, ROWS, 128)


def test_rows_of_bits_are_an_eighth():
    maps, _, arguments = launched(side("bits", 9000), side("bits", 9000), 64, 1001, Groups(1, 64))
    assert [m[2] for m in maps] == [126, 126]
    assert arguments[8] == 1


def test_a_batch_has_the_rows_of_all_its_matrices():
    maps, *_ = launched(side("int8", 512), side("int8", 512), 40, 512, Groups(3, 64))
    assert sorted(m[1] for m in maps) == [120, 192]
    maps, *_ = launched(side("int8", 512), side("int8", 512), 40, 512, Groups(3, 64, offsets=8))
    assert sorted(m[1] for m in maps) == [64, 120]


def test_no_more_clusters_than_tiles_or_multiprocessors():
    work = Work(4096, 4096, 32, PAIRS[0])
    for tile, cut, blocks in (
        (Tile(256, share=2), Cut(3, 1, 256), 4),
        (Tile(256, share=2), Cut(32, 16, 256), 132),
        (Tile(64, split=8), Cut(9, 1, 64), 72),
        (Tile(128), Cut(1, 1, 128), 1),
    ):
        tile = rules.staged(tile, is_float=False)
        assert rules.launch_of(work, tile, cut).grid == (blocks, 1, 1)


def test_programs_are_few():
    assert len(rules.programs()) < 130
