"""What a product of two quantized arrays runs: its own rules, asked about arrays that do not exist.

`Plan` notes what is launched, so that no rule is told twice.
"""

from dataclasses import dataclass, replace

import numpy as np

from cuquant.array.fragments import takes
from cuquant.formats import Format
from cuquant.gpu.boards import Board
from cuquant.ops.candidate import Candidate
from cuquant.ops.matmul import coded_kernels, dense, hopper_codes
from cuquant.ops.matmul.coded import Coded, Groups, bytes_of, codes_of, segment_of, sides
from cuquant.ops.matmul.dense_warps import TILES, program_of
from cuquant.ops.matmul.hopper_codes_tiles import kind_of, reckoned_us, work_of
from cuquant.ops.matmul.problem import Dense, Problem, Product, Weight
from cuquant.ops.programs import ADDRESS, Plan

RESULTS = bytes(80)  # a CodedResults
FIRST = "; laid out in rows first"
BEFORE = {"code_bytes": "; codes become bytes first", "code_sums": "; codes are added up first"}


@dataclass(frozen=True)
class Asked:
    """x [rows, depth] times weights [columns, depth], both quantized.

    Attributes
    ----------
    experts
        How many there are, whose rows of x follow each other; 0: one weight for all rows.
    gated
        Whether there are two weights, each of which is multiplied.
    """

    x: Format
    weight: Format
    rows: int
    columns: int
    depth: int
    experts: int
    gated: bool
    board: Board

    @property
    def stored(self) -> tuple[int, ...]:
        """The weights' shape."""
        return (*[self.experts] * bool(self.experts), self.columns, self.depth)

    @property
    def plan(self) -> Plan:
        return Plan(self.board.arch, self.board.multiprocessors, self.board.rates)


def explain_codes(asked: Asked) -> tuple[list[Candidate], float] | None:
    """Kernels that take a product, chosen ones first, and microseconds that tensor cores need.

    None where kernels do not multiply such codes: x is decoded then.
    """
    if codes_of(asked.x, asked.weight) is None:
        return None
    found, as_packed = [], takes(asked.weight, asked.stored)
    hoppers = asked.board.arch == hopper_codes.ARCH
    kind = kind_of(asked.x, asked.weight, asked.depth) if as_packed and hoppers else None
    if kind is not None:
        found.append(_packed(asked, kind))
    if as_packed:
        rows, _ = _in_rows(asked, "prepacked")
        found += [
            replace(c, note=c.note + FIRST, is_chosen=c.is_chosen and kind is None) for c in rows
        ]
    rows, kind_of_codes = _in_rows(asked, "as quantized")
    work = 2 * asked.rows * asked.columns * bytes_of(kind_of_codes, asked.depth)
    return found + rows, work * (1 + asked.gated) / asked.board.rates.codes


def _packed(asked: Asked, kind: str) -> Candidate:
    """Hopper's kernel for prepacked weights of 4 bits."""
    columns = asked.columns * max(asked.experts, 1)
    work = work_of(asked.plan, columns, asked.depth)
    us = reckoned_us(asked.x, asked.weight, asked.rows, work, asked.experts)
    note = f"{kind} by wgmma, weights read as 4 bits"
    return _candidate(asked, "matmul/hopper.cu", "prepacked", us, note, True)


def _in_rows(asked: Asked, weights: str) -> tuple[list[Candidate], str]:
    """The kernels for rows of codes, and what kind the tensor cores multiply."""
    plan, depth = asked.plan, asked.depth
    x, w = _weight(plan, asked.x, (asked.rows, depth)), _weight(plan, asked.weight, asked.stored)
    kinds = codes_of(asked.x, asked.weight)
    assert kinds is not None
    kinds = coded_kernels.kinds_on(plan, x, w, kinds)
    groups = Groups(max(asked.experts, 1), asked.rows, ADDRESS if asked.experts else 0)
    segment = segment_of(asked.x, asked.weight, depth)
    with sides(plan, x, w, kinds, segment) as (first, second):
        before = {program.entry for program in plan.programs}
        shape = asked.rows, asked.columns, depth
        coded_kernels.prepare(plan, first, second, shape, groups, segment)(plan, first, RESULTS)
        *_, kernel = plan.programs
        us, note = None, f"{_named(first, second)} by mma"
        if coded_kernels.is_hoppers(plan, first, second, depth):
            us, note = _by_hopper(plan, first, second, asked, groups)
    note += "".join(text for name, text in BEFORE.items() if name in before)
    found = [_candidate(asked, kernel.file, weights, us, note, True)]
    other = program_of(("int8", "int8"), TILES[-1], 32, False).file
    if other != kernel.file:
        found.append(_candidate(asked, other, weights, None, "codes by mma, on any GPU", False))
    return found, kinds[0]


def _by_hopper(
    plan: Plan, x: Coded, weights: Coded, asked: Asked, groups: Groups
) -> tuple[float, str]:
    """The rule's microseconds, and the tile that it chooses."""
    work = dense.work_of(plan, x, weights, asked.columns, asked.depth, groups)
    tile = dense.tile_of(work)
    note = f"{_named(x, weights)} by wgmma, tiles of {dense.ROWS} x {tile.columns}"
    return dense.time_us(tile, work), note


def _named(x: Coded, weights: Coded) -> str:
    return x.kind if x.kind == weights.kind else f"{x.kind} and {weights.kind}"


def _candidate(
    asked: Asked, kernel: str, weights: str, us: float | None, note: str, is_chosen: bool
) -> Candidate:
    """Of a gated unit the kernel runs once for each weight."""
    if asked.gated:
        us, note = None if us is None else 2 * us, note + "; once for each weight"
    return Candidate(kernel, weights, us, note, is_chosen)


def _weight(plan: Plan, fmt: Format, stored: tuple[int, ...]) -> Weight:
    parts = {c.name: plan.empty(c.shape, c.dtype) for c in fmt.components(stored)}
    return Weight(fmt, parts, stored)


def swapped_problem(asked: Asked) -> Problem:
    """What `matmul` asks where x is larger than the weights, which are decoded instead of it."""
    plan = asked.plan
    x = _weight(plan, asked.x, (asked.rows, asked.depth))
    floats = Dense(ADDRESS, np.dtype(np.float32), asked.depth, 1)
    product = Product(asked.columns, asked.rows, asked.depth, floats, (x,), swapped=True)
    return product.problem(plan)
