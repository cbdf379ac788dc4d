"""The emulator's tensor cores, copies, barriers and clusters: right kernels, and one planted bug at
a time."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from emulator import ORDERS, Emulator, KernelError, compiler
from emulator.compile import HERE
from oracle import DTYPES

from cuquant.gpu.jit import Launch, Program

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to compile kernels with")

F32 = np.dtype(np.float32)
PLANTED = HERE / "planted"
TYPES = {"Half": DTYPES["float16"], "Bfloat16": DTYPES["bfloat16"]}
REPORTED = {
    "warp_product": {
        "MatrixPlace": r"misaligned load_matrices",
        "MatrixBeyond": r"load_matrices: address 512 of 512 bytes of dynamic shared memory",
        "NotShared": r"is not in shared memory",
        "HalfWarp": r"it exits while thread \d+ waits for it|lane \d+ has exited",
        "MisalignedOnce": r"misaligned load8_once",
    },
    "group_product": {
        "NoInitialisation": r"a barrier that was not initialised",
        "NoCopy": r"(?s)deadlock.*barrier_wait in matrix.cu",
        "MoreArrivals": r"(?s)deadlock.*barrier_wait in matrix.cu",
        "TooManyArrivals": r"more threads arrive at a barrier than it waits for",
        "NoSwizzle": r"b is not that of swizzled rows",
        "FewAtBarrier": r"(?s)deadlock.*named_barrier in matrix.cu",
        "OtherBarrier": r"named barrier 1 of \d+ threads, where others say \d+",
        "NoMap": r"this is no tensor map",
        "BoxPlace": r"misaligned copy_box: column 4 is no multiple of 8",
        "RunPlace": r"misaligned copy_run of 16 bytes",
        "RunAhead": r"misaligned prefetch_run of 16 bytes",
        "StoredPlace": r"misaligned store_matrices_transposed",
    },
    "cluster_sum": {
        "NoArrival": r"block 1 of the cluster has no shared memory now",
        "NoLastWait": r"block \d of the cluster has no shared memory now",
    },
    "cluster_gift": {
        "NoMeeting": r"Remote::store: block 1 of the cluster has no shared memory now",
        "NoGiftBarrier": r"a barrier that was not initialised",
        "FewGifts": r"(?s)deadlock.*barrier_wait in matrix.cu",
        "GiftPlace": r"misaligned Remote::store",
        "NoGiftWait": r"Remote::store: block \d of the cluster has no shared memory now",
    },
    "flags": {
        "NoFlag": r"(?s)deadlock.*wait_for_flag in matrix.cu",
        "OtherFlag": r"(?s)deadlock.*wait_for_flag in matrix.cu",
    },
}
WRONG = {  # shown by results, or by threads that wait for ever
    "warp_product": ("NoWait", "SwappedRegisters"),
    "group_product": ("NoFullWait", "WrongParity", "NoProductWait", "OperandChanged"),
    "cluster_sum": (),
    "cluster_gift": (),
    "flags": (),
}
BUGS = [(entry, bug) for entry, bugs in REPORTED.items() for bug in bugs]


def program(entry: str, bug: str, kind: str = "Half") -> Program:
    kinds = () if entry in ("cluster_sum", "cluster_gift", "flags") else (kind,)
    arguments = (f"Bug::{bug}", *kinds)
    return Program("matrix.cu", entry, arguments)


@pytest.fixture(scope="module", autouse=True)
def built():
    bugs = [(entry, bug) for entry in WRONG for bug in ("None", *REPORTED[entry], *WRONG[entry])]
    programs = [program(entry, bug) for entry, bug in bugs]
    programs += [program(entry, "None", "Bfloat16") for entry in ("warp_product", "group_product")]
    programs += [Program("matrix.cu", "pairs", (kind,)) for kind in TYPES]
    Emulator(folders=[PLANTED]).build(programs)


def numbers(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Of few bits, so that all sums are exact, in bfloat16 too."""
    return np.random.default_rng(len(shape)).integers(-2, 3, shape).astype(dtype)


def warp_product(bug: str, order: str, kind: str) -> bool:
    emulator = Emulator(order, [PLANTED])
    a, b = numbers((16, 32), TYPES[kind]), numbers((8, 32), TYPES[kind])
    y = emulator.empty((16, 8), F32)
    pointers = map(emulator.pointer, (emulator.upload(a), emulator.upload(b), y))
    emulator.launch(Launch(program("warp_product", bug, kind), (1, 1, 1), 32, 512), *pointers)
    return np.array_equal(y, a.astype(F32) @ b.astype(F32).T)


def group_product(bug: str, order: str, kind: str) -> bool:
    """Two blocks: in one copies and products come at once, in the other one late."""
    emulator = Emulator(order, [PLANTED])
    a, x = numbers((64, 16), TYPES[kind]), numbers((7, 48), TYPES[kind])
    x_there = emulator.upload(x)
    map = emulator.tensor_map(emulator.pointer(x_there), 7, 48, 96, 8, TYPES[kind].name)
    y, turned = emulator.empty((64, 8), F32), emulator.empty((8, 64), TYPES[kind])
    pointers = [emulator.pointer(array) for array in (emulator.upload(a), y, turned)]
    wanted = np.zeros((64, 8), F32)
    wanted[:, :7] = a.astype(F32) @ x[:, :16].astype(F32).T
    found = []
    for first in (0, 1):
        launch = Launch(program("group_product", bug, kind), (first + 1, 1, 1), 160, 2056)
        emulator.launch(launch, map, *pointers)
        found.append(np.array_equal(y, wanted) and np.array_equal(turned, wanted.T))
    return all(found)


def cluster_sum(bug: str, order: str, kind: str) -> bool:
    emulator = Emulator(order, [PLANTED])
    x, y = np.arange(1, 7, dtype=F32), emulator.empty((6,), F32)
    pointers = map(emulator.pointer, (emulator.upload(x), y))
    emulator.launch(Launch(program("cluster_sum", bug), (6, 1, 1), 64), *pointers)
    return np.array_equal(y.reshape(3, 2), x.reshape(3, 2).sum(1, keepdims=True) * [1, 2])


def cluster_gift(bug: str, order: str, kind: str) -> bool:
    emulator = Emulator(order, [PLANTED])
    x, y = np.arange(1, 7, dtype=F32), emulator.empty((6,), F32)
    pointers = map(emulator.pointer, (emulator.upload(x), y))
    emulator.launch(Launch(program("cluster_gift", bug), (6, 1, 1), 64, 40), *pointers)
    return np.array_equal(y.reshape(3, 2), 4 * x.reshape(3, 2)[:, ::-1])


def flags(bug: str, order: str, kind: str) -> bool:
    emulator = Emulator(order, [PLANTED])
    x, y = np.arange(1, 6, dtype=F32), emulator.empty((5,), F32)
    raised = emulator.zeros((5,), np.dtype(np.uint64))
    pointers = map(emulator.pointer, (emulator.upload(x), y, raised))
    emulator.launch(Launch(program("flags", bug), (5, 1, 1), 32), *pointers, 1 << 61)
    return np.array_equal(y, np.cumsum(x)) and raised.tolist() == [0, 0, 0, 0, 1 << 61]


RUN = {
    "warp_product": warp_product,
    "group_product": group_product,
    "cluster_sum": cluster_sum,
    "cluster_gift": cluster_gift,
    "flags": flags,
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("entry", RUN)
def test_a_right_kernel_passes(entry, kind, order):
    assert RUN[entry]("None", order, kind)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("entry", "bug"), BUGS)
def test_a_bug_is_reported(entry, bug, order):
    with pytest.raises(KernelError, match=REPORTED[entry][bug]):
        RUN[entry](bug, order, "Half")


@pytest.mark.parametrize(("entry", "bug"), [(e, bug) for e, bugs in WRONG.items() for bug in bugs])
def test_a_bug_makes_results_wrong(entry, bug):
    try:
        assert not RUN[entry](bug, "mixed", "Half")
    except KernelError as error:
        assert "deadlock" in str(error)


def test_after_an_error_the_next_launch_is_clean():
    for entry, bug in (("group_product", "NoCopy"), ("cluster_sum", "NoLastWait")):
        with pytest.raises(KernelError):
            RUN[entry](bug, "mixed", "Half")
        assert all(RUN[other]("None", "mixed", "Half") for other in RUN)


@pytest.mark.parametrize("change", [(1, 7, 48, 96, 8), (0, 7, 48, 88, 8), (0, 7, 48, 96, 512)])
def test_maps_are_checked(change):
    with pytest.raises(KernelError, match="no tensor map"):
        Emulator().tensor_map(*change, "float16")


@pytest.mark.parametrize("width", [0, 4, 264])
def test_the_width_of_boxes_is_checked(width):
    with pytest.raises(KernelError, match="no tensor map"):
        Emulator().tensor_map(0, 7, 48, 96, 8, "uint16", width)


# ---- pairs of 16-bit floats ---------------------------------------------------------------------


def nearest(exact: Fraction, dtype: np.dtype) -> float:
    """The nearest number of a dtype, ties to even; an independent way."""
    info = ml_dtypes.finfo(dtype)
    if exact == 0:
        return 0.0
    exponent = max(_floor_log2(abs(exact)), int(info.minexp))
    step = Fraction(2) ** (exponent - int(info.nmant))
    rounded = round(exact / step) * step  # ties to even
    if abs(rounded) > Fraction(float(info.max)):
        return np.inf if exact > 0 else -np.inf
    return float(rounded)


def _floor_log2(x: Fraction) -> int:
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if Fraction(2) ** guess <= x else guess - 1


@pytest.mark.parametrize("kind", TYPES)
def test_fma_rounds_once(kind, rng):
    """Random bits; sums that cancel; and a tie that only a tiny addend breaks."""
    dtype = TYPES[kind]
    a, b, c = rng.integers(0, 1 << 16, (3, 1024), dtype=np.uint16).view(dtype)
    with np.errstate(all="ignore"):
        c[:256] = -(a[:256].astype(F32) * b[:256].astype(F32)).astype(dtype)
    half_ulp = 2.0 ** -(ml_dtypes.finfo(dtype).nmant + 1)
    tiny = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    for i, addend in enumerate((0.0, tiny, -tiny)):
        # (1 + ulp) * (1 - half ulp or so) lies between two numbers
        a[512 + i], b[512 + i], c[512 + i] = 1 + 2 * half_ulp, 0.5 + half_ulp / 2, addend
    emulator = Emulator(folders=[PLANTED])
    out = emulator.empty((512,), np.dtype(np.uint32))
    pointers = [emulator.pointer(emulator.upload(v.view(np.uint32))) for v in (a, b, c)]
    program = Program("matrix.cu", "pairs", (kind,))
    emulator.launch(Launch(program, (4, 1, 1), 128), *pointers, emulator.pointer(out))
    found = out.view(dtype)
    finite = np.isfinite(a.astype(F32)) & np.isfinite(b.astype(F32)) & np.isfinite(c.astype(F32))
    numbers = (v[finite].astype(np.float64) for v in (a, b, c, found))
    for x, y, z, result in zip(*numbers, strict=True):
        assert result == nearest(Fraction(x) * Fraction(y) + Fraction(z), dtype), (x, y, z)
    with np.errstate(all="ignore"):
        x, y, z = (v[~finite].astype(np.float64) for v in (a, b, c))
        assert np.array_equal(found[~finite].astype(np.float64), x * y + z, equal_nan=True)
