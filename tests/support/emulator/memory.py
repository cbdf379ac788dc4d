"""Arrays for kernels on the CPU: what lies beside them cannot be touched unnoticed."""

import ctypes
import mmap
import weakref

import numpy as np

PAGE = mmap.PAGESIZE
GUARD = 1 << 20  # bytes before and after the pages of an array that fault
POISON = 0xEE  # what uninitialised memory holds
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_PROT_NONE, _PROT_READ = 0, 1
_PLAIN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE: guards cost no memory


class Guarded(np.ndarray):
    """The bytes of some pages between others that nobody may touch; an array is a part of them."""

    start: int
    nbytes_wanted: int

    @property
    def address(self) -> int:
        return self.ctypes.data + self.start

    def changed(self) -> str:
        """What happened to the bytes around the array; "" where nothing did."""
        before, after = self[: self.start], self[self.start + self.nbytes_wanted :]
        for side, text in ((before, "before the start"), (after, "after the end")):
            changed = np.flatnonzero(np.asarray(side) != POISON)
            if len(changed):
                away = len(side) - changed[-1] if side is before else changed[0] + 1
                return f"a write to byte {away} {text} of an array of {self.nbytes_wanted} bytes"
        return ""


class Memory:
    """All guarded arrays that are alive."""

    def __init__(self) -> None:
        self._alive: dict[int, weakref.ref] = {}

    def empty(self, shape: tuple[int, ...], dtype: np.dtype, alignment: int = 256) -> np.ndarray:
        """A poisoned array that starts on `alignment` bytes and ends just before the guard."""
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
        room = -(-max(nbytes, 1) // alignment) * alignment
        pages = -(-room // PAGE)
        mapping = mmap.mmap(-1, pages * PAGE + 2 * GUARD, flags=_PLAIN)
        raw = np.frombuffer(mapping, np.uint8, pages * PAGE, GUARD).view(Guarded)
        raw.start, raw.nbytes_wanted = raw.nbytes - room, nbytes
        raw[...] = POISON
        for guard in (raw.ctypes.data - GUARD, raw.ctypes.data + raw.nbytes):
            _protect(guard, GUARD, _PROT_NONE)
        key = id(raw)
        self._alive[key] = weakref.ref(raw, lambda _: self._alive.pop(key, None))
        whole = raw[raw.start : raw.start + nbytes].view(np.ndarray)
        return whole.view(dtype).reshape(shape)

    def protect(self, array: np.ndarray) -> None:
        """Make an array of this memory read-only, for kernels too."""
        for raw in self._living():
            if raw.address == array.ctypes.data:
                _protect(raw.ctypes.data, raw.nbytes, _PROT_READ)

    def changed(self) -> str:
        """What happened beside some array; "" where nothing did."""
        return next((text for raw in self._living() if (text := raw.changed())), "")

    def describe(self, address: int) -> str:
        """Where an address is, seen from the nearest array; "" where none is near."""
        reach = GUARD + PAGE
        distances = [(address - raw.address, raw) for raw in self._living()]
        near = [(d, raw) for d, raw in distances if -reach < d < raw.nbytes_wanted + reach]
        if not near:
            return ""
        distance, raw = min(near, key=lambda pair: abs(pair[0]))
        if 0 <= distance < raw.nbytes_wanted:
            return f": byte {distance} of an array of {raw.nbytes_wanted} bytes, read-only"
        return f": byte {distance} of an array of {raw.nbytes_wanted} bytes"

    def _living(self) -> list[Guarded]:
        return [raw for ref in list(self._alive.values()) if (raw := ref()) is not None]


def _protect(address: int, nbytes: int, how: int) -> None:
    if _libc.mprotect(address, nbytes, how):
        raise OSError(ctypes.get_errno(), "mprotect")
