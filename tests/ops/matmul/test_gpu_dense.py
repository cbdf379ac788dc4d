"""Products of codes with codes on Hopper's tensor cores, against float64 and exact integers."""

from contextlib import suppress
from dataclasses import replace

import pytest
from dense_products import Case, Side, multiply
from gpu_products import compile_together

from cuquant.gpu import arrays
from cuquant.gpu.rates import H100
from cuquant.ops.matmul.dense import MOST_SCALED, RUN, WAYS, Tile, staged

pytestmark = pytest.mark.gpu

INT, UINT, E4M3, E5M2, BITS = (Side(k) for k in ("int8", "uint8", "fp8_e4m3", "fp8_e5m2", "bits"))
BARE = {kind: Side(kind, None) for kind in ("int8", "uint8", "bits")}
SHAPES = (
    (1, 1, 1), (3, 5, 17), (16, 200, 128), (64, 1000, 300), (130, 264, 129), (300, 513, 1000),
    (512, 768, 4096),
)  # fmt: skip
KINDS = [(INT, INT), (UINT, UINT), (INT, UINT), (UINT, INT), (E4M3, E4M3), (E5M2, E4M3),
         (E4M3, E5M2), (E5M2, E5M2), (BITS, BITS)]  # fmt: skip
LINE, BLOCK, TENSOR = (1, 128), (128, 128), (0, 0)


def sides(kind: str, *blocks, **options) -> tuple[Side, ...]:
    return tuple(Side(kind, block, **options) for block in blocks)


def tile(columns: int, *, is_float: bool = False, **options) -> Tile:
    return staged(Tile(columns, **options), is_float=is_float)


CASES: dict[str, Case] = {}
for _x, _w in KINDS:
    for _shape in SHAPES:
        _out = "bfloat16" if _shape[1] % 8 == 0 else "float32"
        CASES[f"{_x.kind}-{_w.kind}-{_shape}"] = Case(_x, _w, _shape, _out, bias=True)
for _kind in BARE:
    for _shape in SHAPES:
        _raw = BARE[_kind]
        CASES[f"raw-{_kind}-{_shape}"] = Case(_raw, _raw, _shape, "int32")
for _out in ("float32", "float16", "bfloat16", "int8"):
    for _activation in (None, "relu", "gelu", "silu"):
        for _shape in ((37, 72, 256), (200, 136, 256)):
            CASES[f"{_out}-{_activation}-{_shape}"] = Case(
                INT, INT, _shape, _out, True, _activation, factor=0.01, padding=8
            )
CASES["residual"] = Case(E4M3, E4M3, (70, 88, 384), "float16", True, "silu", True, 0.1, padding=3)
for _shape in ((5, 300, 1000), (200, 520, 640), (512, 768, 4096), (129, 33, 77)):
    for _kind in ("fp8_e4m3", "fp8_e5m2", "int8"):
        for _name, _blocks in {
            "1x128-128x128": (LINE, BLOCK), "1x128-1x128": (LINE, LINE),
            "row-128x128": ((1, 0), BLOCK), "tensor": (TENSOR, TENSOR),
            "1x32": ((1, 32), (1, 32)), "1x64-row": ((1, 64), (1, 0)),
            "1x256-256x256": ((1, 256), (256, 256)), "1x128-48x128": (LINE, (48, 128)),
            "1x96-7x32": ((1, 96), (7, 32)),
        }.items():  # fmt: skip
            CASES[f"{_name}-{_kind}-{_shape}"] = Case(*sides(_kind, *_blocks), _shape, "bfloat16")
for _dtype in ("float16", "bfloat16", "e8m0"):
    CASES[f"scales-{_dtype}"] = Case(
        *sides("fp8_e4m3", (1, 32), (1, 32), dtype=_dtype), (70, 90, 256)
    )
# Products of scales that float32 does not have, of sums that it has: those of blocks of both sides
# come first, so that only sums of 0 are right there.
for _name, (_of_x, _of_w, _code) in {
    "small": (1e-30, 1e-14, 16.0), "large": (1e25, 1e16, 2.0**-8), "apart": (1e33, 1e-25, 1.0),
    "zero": (1e25, 1e16, 0.0),
}.items():  # fmt: skip
    for _blocks in ((LINE, BLOCK), (LINE, (48, 128)), (LINE, LINE), ((1, 32),) * 2, ((1, 0),) * 2):
        if _name in ("small", "large") and _blocks[1][0] > 1:
            continue
        for _kind in ("fp8_e4m3", "fp8_e5m2", "int8"):
            if _kind == "int8" and (_name in ("large", "zero") or _blocks[0][1] > 0):
                continue
            for _shape in ((37, 264, 640), (200, 520, 640)):
                CASES[f"far-{_name}-{_kind}-{_blocks}-{_shape}"] = Case(
                    Side(_kind, _blocks[0], size=_of_x, code_size=_code),
                    Side(_kind, _blocks[1], size=_of_w, code_size=_code), _shape,
                )  # fmt: skip
for _shape in SHAPES:
    _zeros = Side("uint8", (1, 0), zeros=True)
    CASES[f"zeros-{_shape}"] = Case(_zeros, _zeros, _shape)
    CASES[f"zeros-x-{_shape}"] = Case(_zeros, INT, _shape)
    CASES[f"zeros-tensor-{_shape}"] = Case(replace(_zeros, block=TENSOR), _zeros, _shape, "int8")
for _by, _counts in {
    "offsets": (0, 5, 130, 0, 1, 64), "counts": (0, 40, 5, 64, 64), "batch": (7, 7, 7),
}.items():  # fmt: skip
    for _kind, _blocks in {
        "int8": ((1, 0), (1, 0)), "fp8_e4m3": (LINE, BLOCK), "fp8_e5m2": ((1, 0), (1, 0)),
    }.items():  # fmt: skip
        for _shape in ((64, 136, 300), (150, 264, 128)):
            if _by == "counts":
                _counts = tuple(min(c, _shape[0]) for c in _counts)
            CASES[f"{_by}-{_kind}-{_shape}"] = Case(
                *sides(_kind, *_blocks), _shape, "bfloat16", counts=_counts, by=_by
            )
for _k in (255, 256, 257, 512, 513, 14336):  # small floats by runs of 256
    CASES[f"runs-{_k}"] = Case(E4M3, E5M2, (200, 264, _k))
# Each way to divide, whatever the rule would choose.
for _swapped in (False, True):
    for _columns in (16, 48, 112, 128, 192, 224, 256):
        for _share, _split in WAYS:
            if _columns // 8 % _split or (_columns > 192 and _split > 1):
                continue
            _way = dict(swapped=_swapped, share=_share, split=_split)
            _id = f"{_columns}-{'swapped' if _swapped else 'straight'}-{_share}-{_split}"
            _shape = (1300, 1000, 2000) if _split == 1 else (300, 1000, 2000)
            CASES[f"tile-{_id}"] = Case(INT, INT, _shape, "bfloat16", tile=tile(_columns, **_way))
            CASES[f"tile-runs-{_id}"] = Case(
                E4M3, E4M3, _shape, "bfloat16",
                tile=tile(_columns, is_float=True, promote=RUN, **_way),
            )  # fmt: skip
            _blocks = 0 if _swapped else 1 if 128 % _columns == 0 or _columns == 256 else 2
            if _columns > MOST_SCALED[_blocks]:
                continue
            _way |= dict(promote=128, scaled=1, blocks=_blocks)
            CASES[f"tile-blocks-{_id}"] = Case(
                *sides("fp8_e4m3", LINE, BLOCK), _shape, "bfloat16",
                tile=tile(_columns, is_float=True, **_way),
            )  # fmt: skip


@pytest.fixture(scope="module")
def backend(gpu):
    found = arrays.CupyBackend(0, 0)
    if found.arch != 90:
        pytest.skip("no Hopper GPU")
    compile_all()
    return found


class Noted(Exception):
    """A program is known, and nothing is multiplied."""


def compile_all() -> None:
    """All programs of the cases, by all processors."""
    programs: dict = {}

    class Notes:
        arch, multiprocessors, rates = 90, 132, H100

        @staticmethod
        def tensor_map(*_) -> bytes:
            return bytes(128)

        @staticmethod
        def launch(launch, *_) -> None:
            programs[launch.program] = None
            raise Noted

    class NoArrays:
        class asarray:
            def __init__(self, array) -> None:
                self.array = array
                self.data = type("Data", (), {"ptr": id(self)})

            def get(self):
                return self.array

    for case in CASES.values():
        with suppress(Noted):
            multiply(case, NoArrays, Notes)
    compile_together(list(programs), 90)


# Of each kind of scales and sums, for compute-sanitizer; scales along K come by named barriers.
NAMED = (
    "1x128-128x128-fp8_e4m3-(512, 768, 4096)", "1x128-1x128-int8-(200, 520, 640)",
    "1x32-fp8_e5m2-(200, 520, 640)", "offsets-fp8_e4m3-(150, 264, 128)",
)  # fmt: skip
SAMPLE = (
    "int8-int8-(130, 264, 129)", "zeros-(300, 513, 1000)", "bits-bits-(512, 768, 4096)",
    "fp8_e4m3-fp8_e4m3-(512, 768, 4096)", "tile-256-straight-2-1", "tile-112-swapped-1-2", *NAMED,
)  # fmt: skip
assert set(SAMPLE) <= set(CASES)


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    named = [pytest.mark.named_barriers] if name in NAMED else []
    return [pytest.mark.sanitize, *named] if name in SAMPLE else []


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in CASES])
def test_products(name, gpu, backend):
    outcome = multiply(CASES[name], gpu, backend)
    assert outcome.untouched, "elements that are no result were overwritten"
    assert outcome.worst <= 1, f"{outcome.worst} times what is allowed"


def test_the_same_bits_in_every_run(gpu, backend):
    for name in ("tile-blocks-112-straight-1-2", "fp8_e4m3-fp8_e4m3-(512, 768, 4096)"):
        first, second = (multiply(CASES[name], gpu, backend).got for _ in range(2))
        assert first.tobytes() == second.tobytes()
