"""The emulator finds what a GPU would not say: a kernel with one planted bug at a time."""

import numpy as np
import pytest
from emulator import ORDERS, Emulator, KernelError, Recorder, compiler
from emulator.compile import HERE

from cuquant.gpu.jit import Launch, Program

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to compile kernels with")

PLANTED = HERE / "planted"
BLOCKS = 6
REPORTED = {  # what the message has to say
    "DivergentBarrier": r"divergent barrier: it waits in planted.cu:\d+, thread \d+ in planted.cu",
    "MissedBarrier": r"(?s)deadlock.*__syncthreads in planted.cu.*__shfl_xor_sync",
    "ExitedLane": r"lane \d+ has exited|it exits while thread \d+ waits for it",
    "LateExit": r"lane \d+ has exited|it exits while thread \d+ waits for it",
    "PartialMask": r"lane 0 reads lane 16, which is not in the mask",
    "ForeignMask": r"the mask lacks the calling lane \d+",
    "SharedIndex": r"an index outside its array in planted.cu:\d+",
    "DynamicShared": r"a write to byte 256 of 256 bytes of dynamic shared memory",
    "WriteAfter": r"a write to byte 1 after the end of an array of 24 bytes",
    "WriteBefore": r"a write to byte \d+ before the start of an array of 24 bytes",
    "WriteFarAfter": r"invalid access at address",
    "ReadFarAfter": r"invalid access at address",
    "WriteToInput": r"invalid access at address .*: byte \d+ of an array of 1536 bytes, read-only",
    "Misaligned": r"misaligned load16",
    "MisalignedVector": r"a misaligned access in planted.cu:\d+",
    "Shift": r"a shift by the width of its type, or more in planted.cu:\d+",
}
WRONG = ("ShuffleLane", "NoBarrier", "UninitialisedShared", "BlockReduceLane")  # shown by results


def program(bug: str) -> Program:
    return Program("planted.cu", "planted", (f"Bug::{bug}",))


def words(entry: str) -> Program:
    return Program("words.cu", entry)


@pytest.fixture(scope="module", autouse=True)
def built():
    bugs = [program(bug) for bug in ("None", *REPORTED, *WRONG)]
    Emulator(folders=[PLANTED]).build([*bugs, *map(words, ("words", "halves", "count"))])


def sums(bug: str, order: str = "mixed") -> tuple[np.ndarray, np.ndarray]:
    """What the kernel finds, and what is right."""
    emulator = Emulator(order, [PLANTED])
    x = np.arange(BLOCKS * 64, dtype=np.float32)
    given, found = emulator.upload(x), emulator.empty((BLOCKS,), np.dtype(np.float32))
    launch = Launch(program(bug), (BLOCKS, 1, 1), 64, 256)
    emulator.launch(launch, emulator.pointer(given), 2.0, 1, emulator.pointer(found))
    return found, x.reshape(BLOCKS, 64).sum(axis=1) * 2


@pytest.mark.parametrize("order", ORDERS)
def test_a_right_kernel_passes(order):
    found, right = sums("None", order)
    assert np.array_equal(found, right)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bug", REPORTED)
def test_a_bug_is_reported(bug, order):
    with pytest.raises(KernelError, match=REPORTED[bug]):
        sums(bug, order)


@pytest.mark.parametrize("bug", WRONG)
def test_a_bug_makes_results_wrong(bug):
    found, right = sums(bug)
    assert not np.array_equal(found, right)


def test_uninitialised_shared_memory_is_nan():
    found, _ = sums("UninitialisedShared")
    assert np.isnan(found).all()  # the next block does not see the last one's numbers


def test_after_an_error_the_next_launch_is_clean():
    with pytest.raises(KernelError):
        sums("MissedBarrier")
    test_a_right_kernel_passes("mixed")


ARGUMENTS = [
    ((1, 2.0, 1), "the kernel has 4 parameters, got 3"),
    ((1, 2, 1, 1), "parameter 1 wants 'f'.*got 'i'"),
    ((1, 2.0, 1 << 31, 1), "parameter 2 has 4 bytes and cannot hold 2147483648"),
    ((1, 2.0, b"12345678", 1), "parameter 2 wants 'i'.*got 'b'"),
]


@pytest.mark.parametrize(("arguments", "message"), ARGUMENTS, ids=[m for _, m in ARGUMENTS])
def test_parameters_are_checked(arguments, message):
    launch = Launch(program("None"), (1, 1, 1), 64, 256)
    with pytest.raises(KernelError, match=message):
        Emulator(folders=[PLANTED]).launch(launch, *arguments)


@pytest.mark.parametrize(
    "launch",
    [
        Launch(program("None"), (0, 1, 1), 64),
        Launch(program("None"), (1, 1 << 16, 1), 64),
        Launch(program("None"), (1, 1, 1), 1025),
        Launch(program("None"), (1, 1, 1), 64, 1 << 20),
    ],
)
def test_limits_of_a_launch_are_checked(launch):
    for backend in (Emulator(folders=[PLANTED]), Recorder()):
        with pytest.raises(KernelError):
            backend.launch(launch)


def test_a_kernel_with_errors_does_not_compile(tmp_path):
    (tmp_path / "wrong.cu").write_text("namespace cuquant { __global__ void wrong() { nothing; } }")
    emulator = Emulator(folders=[tmp_path])
    with pytest.raises(RuntimeError, match=r"wrong\.cu:1"):
        emulator.launch(Launch(Program("wrong.cu", "wrong"), (1, 1, 1), 32))


def test_facts_come_before_the_file_and_equal_ones_once(tmp_path):
    text = (
        "namespace cuquant { template <class Facts, int kAdd> __global__ void told(int* out) "
        "{ *out = Facts::number + kAdd; } }"
    )
    (tmp_path / "told.cu").write_text(text)
    facts = "struct seven { static constexpr int number = 7; };"
    programs = [Program("told.cu", "told", ("formats::seven", i), facts) for i in range(5)]
    emulator = Emulator(folders=[tmp_path])
    emulator.build(programs)
    for i, each in enumerate(programs):
        out = emulator.empty((1,), np.dtype(np.int32))
        emulator.launch(Launch(each, (1, 1, 1), 1), emulator.pointer(out))
        assert out[0] == 7 + i


def test_the_recorder_notes_each_program_once():
    recorder = Recorder()
    for bug in ("None", "Shift", "None"):
        recorder.launch(Launch(program(bug), (1, 1, 1), 64), 1, 2.0, b"123")
    assert recorder.programs == [program("None"), program("Shift")]
    assert len(recorder.launches) == 3


def test_arrays_are_aligned_and_poisoned():
    emulator = Emulator()
    for shape in ((), (0,), (3, 5), (100000,)):
        array = emulator.empty(shape, np.dtype(np.uint8))
        assert emulator.pointer(array) % 256 == 0
        assert array.shape == shape and (array == 0xEE).all()


def test_an_uploaded_table_travels_once():
    emulator = Emulator()
    table = np.arange(5.0)
    assert emulator.upload(table) is emulator.upload(table.copy())
    assert emulator.upload(table) is not emulator.upload(table + 1)


def test_words():
    emulator = Emulator(folders=[PLANTED])
    out = emulator.empty((64, 16), np.dtype(np.uint64))
    pair = np.array([(5, 7.0)], [("first", "<i4"), ("second", "<f4")]).tobytes()
    arguments = (emulator.pointer(out), pair, True, -1)
    emulator.launch(Launch(words("words"), (1, 1, 1), 64), *arguments)
    lane = np.arange(64) % 32
    assert (out[:, 0] == np.where(lane < 3, lane, lane - 3)).all()
    assert (out[:, 1] == np.where(lane % 8 < 5, lane + 3, lane)).all()
    # xor 12 in groups of 8: a lower group may be read, a higher one may not.
    assert (out[:, 2] == np.where(lane & 8, lane ^ 12, lane)).all()
    assert (out[:, 3] == lane // 4 * 4 + 1).all()
    assert (out[:, 4] == np.float64(1 / 32).view(np.uint64)).all()
    assert (out[:, 5] == sum(1 << i for i in range(0, 32, 3))).all()
    assert (out[:, 6] == 1).all()
    assert (out[:, 7] == np.where(lane < 8, 1 << 40, 0)).all()
    assert (out[:, 8] == 6).all()
    assert (out[:, 9] == 0xDD112233).all()
    # Selectors 5, F, C, 0, of which three bits count: bytes 1, 3 and 0 of the upper word, byte 0.
    assert (out[:, 10] == 0x4480AACC).all()
    assert (out[:, 11] == 3 + (31 << 32)).all()
    below = int(np.nextafter(np.float32(1), np.float32(0)).view(np.uint32))
    assert (out[:, 12] == below | below << 32).all()
    assert (out[:, 13] == 112).all()
    assert (out[:, 14] == 2**64 - 1).all()
    assert (out[:, 15] == 4).all()


def test_halves_are_numpys(rng):
    every = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    with np.errstate(all="ignore"):
        above = np.nextafter(every, np.float32(np.inf))
        between = (every[:-1] + every[1:]) / 2
    wild = rng.integers(0, 1 << 32, 65536, dtype=np.uint32).view(np.float32)
    x = np.concatenate([every, above, between, np.zeros(1, np.float32), wild])
    emulator = Emulator(folders=[PLANTED])
    out = emulator.empty((len(x), 2), np.dtype(np.uint32))
    given = emulator.upload(x.view(np.uint32))
    launch = Launch(words("halves"), (len(x) // 256, 1, 1), 256)
    emulator.launch(launch, emulator.pointer(given), emulator.pointer(out))
    with np.errstate(all="ignore"):
        wanted = x.astype(np.float16)
    found = (out[:, 0] & 0xFFFF).astype(np.uint16)
    nan = np.isnan(wanted)
    assert (found[nan] == 0x7FFF).all() and (found[~nan] == wanted.view(np.uint16)[~nan]).all()
    assert (out[:, 0] >> 16 == 0x3C00).all()
    back = out[:, 1].copy().view(np.float32)
    assert np.array_equal(back, wanted.astype(np.float32), equal_nan=True)
    assert (np.signbit(back) == np.signbit(wanted))[~nan].all()


def test_atomics():
    emulator = Emulator(folders=[PLANTED])
    total, most = (emulator.empty((1,), np.dtype(kind)) for kind in (np.int32, np.uint32))
    total[0] = most[0] = 0
    launch = Launch(words("count"), (5, 1, 1), 96)
    emulator.launch(launch, emulator.pointer(total), emulator.pointer(most))
    assert (total[0], most[0]) == (480, 479)


def test_arrays_of_a_view_and_copies():
    emulator = Emulator()
    x = emulator.array(np.arange(24, dtype=np.float16).reshape(2, 3, 4))
    view = emulator.view(x[:, ::2].transpose(2, 0, 1))
    assert (view.shape, view.strides) == ((4, 2, 2), (1, 12, 8))
    assert emulator.pointer(emulator.contiguous(x, -1)) == emulator.pointer(x)  # no copy
    moved = emulator.contiguous(x, 0)
    assert np.array_equal(moved, np.moveaxis(x, 0, -1)) and moved.flags.c_contiguous
    spread = emulator.broadcast(2.5, (3, 2), np.dtype(np.float32))
    assert spread.dtype == np.float32 and (spread == 2.5).all()
    assert not emulator.zeros((5,), np.dtype(np.int64)).any()
