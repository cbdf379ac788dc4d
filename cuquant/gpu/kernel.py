"""A loaded kernel and its launch: the host's share of every operation on a GPU."""

import ctypes
import importlib
import struct
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from cuquant.gpu.driver import CONFIG, OVERLAP, Start
from cuquant.gpu.elf import Resources

Argument = int | float | bytes

_PLAIN_SHARED = 48 * 1024  # bytes a block may have without asking for more
_DYNAMIC_SHARED = 8  # the function attribute that asks
_WORD = 2**64 - 1
_INVALID_CONTEXT = 201  # the driver's answer to a thread that has used no GPU yet


class _Slots(NamedTuple):
    """Memory for the parameters of one launch: the driver copies them before it returns."""

    values: Any
    pointers: Any  # keeps the addresses alive
    address: int  # of `pointers`
    config: Any  # how the kernel is started, where it may overlap others
    config_address: int


class _Layout:
    """Where the parameters of a launch stand, by the kinds of the first launch's arguments."""

    def __init__(self, arguments: tuple[Argument, ...]):
        self.struct = struct.Struct("<" + "".join(map(_slot, arguments)))
        sizes = [8 if not isinstance(a, bytes) else -(-len(a) // 8) * 8 for a in arguments]
        self.offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self.blocks = [(i, len(a)) for i, a in enumerate(arguments) if isinstance(a, bytes)]
        self.free: list[_Slots] = []  # appending and popping are atomic: no lock is needed

    def slots(self) -> _Slots:
        values = ctypes.create_string_buffer(max(self.struct.size, 1))
        start = ctypes.addressof(values)
        pointers = (ctypes.c_void_p * max(len(self.offsets), 1))(
            *(start + offset for offset in self.offsets)
        )
        config = ctypes.create_string_buffer(CONFIG.size)
        addresses = ctypes.addressof(pointers), ctypes.addressof(config)
        return _Slots(values, pointers, addresses[0], config, addresses[1])


_overlap = ctypes.create_string_buffer(OVERLAP, len(OVERLAP))
_OVERLAP_ADDRESS = ctypes.addressof(_overlap)


def _slot(argument: Argument) -> str:
    """The struct code of an argument in a slot of a multiple of 8 bytes."""
    if isinstance(argument, bytes):
        return f"{-(-len(argument) // 8) * 8}s"
    return "f4x" if isinstance(argument, float) else "Q"


class Kernel:
    """A kernel on one device; any number of threads may launch it.

    Attributes
    ----------
    registers, local_bytes
        Of one thread; local memory holds spilled registers and arrays.
    shared_bytes
        Of one block, without the dynamic ones.
    threads_limit
        The most threads of a block.
    start
        What starts a kernel that waits for those before it itself; None for one that does not.
    """

    def __init__(
        self, driver: Any, function: Any, resources: Resources, start: Start | None = None
    ):
        self.name = resources.name
        self.registers = resources.registers
        self.local_bytes = resources.local_bytes
        self.shared_bytes = resources.shared_bytes
        self.threads_limit = resources.threads_limit
        self._parameters = resources.parameters
        self._driver = driver
        self._launch, self._start = driver.launchKernel, start
        self._function = function  # keeps the module loaded
        self._pointer = function.ptr
        self._allowed = _PLAIN_SHARED - resources.shared_bytes
        self._layout: _Layout | None = None
        self._lock = threading.Lock()

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        shared: int,
        arguments: tuple[Argument, ...],
        stream: int,
    ) -> None:
        """Start the kernel; the current device must be the kernel's.

        Parameters
        ----------
        grid
            Blocks along x, y, z.
        threads
            Of a block.
        shared
            Dynamic shared memory of a block, in bytes.
        arguments
            An int is a pointer or an integer parameter, a float a float32 one, bytes a struct that
            is passed by value.
        stream
            The stream's handle; 0 is the default stream.
        """
        if shared > self._allowed:
            self._allow(shared)
        layout = self._layout
        if layout is None:
            layout = self._layout = self._checked(arguments)
        try:
            slots = layout.free.pop()
        except IndexError:
            slots = layout.slots()
        try:
            layout.struct.pack_into(slots.values, 0, *arguments)
        except struct.error:  # a negative int, or other kinds than the first launch had
            return self._launch_other(grid, threads, shared, arguments, stream)
        for position, size in layout.blocks:
            if len(arguments[position]) != size:  # type: ignore[arg-type]
                return self._launch_other(grid, threads, shared, arguments, stream)
        self._started(slots, grid, threads, shared, stream)
        layout.free.append(slots)

    def _launch_other(self, grid, threads, shared, arguments, stream) -> None:
        layout = self._checked(arguments)
        words = [a & _WORD if isinstance(a, int) else a for a in arguments]
        slots = layout.slots()
        layout.struct.pack_into(slots.values, 0, *words)
        self._started(slots, grid, threads, shared, stream)

    def _started(
        self, slots: _Slots, grid: tuple[int, int, int], threads: int, shared: int, stream: int
    ) -> None:
        start = self._start
        if start is None:
            size = *grid, threads, 1, 1
            _in_context(self._launch, self._pointer, *size, shared, stream, slots.address, 0)
            return
        x, y, z = grid
        numbers = x, y, z, threads, 1, 1, shared, stream, _OVERLAP_ADDRESS, 1
        CONFIG.pack_into(slots.config, 0, *numbers)
        where = slots.config_address, self._pointer, slots.address, 0
        status = start(*where)
        if status == _INVALID_CONTEXT:
            _make_context()
            status = start(*where)
        if status:
            self._driver.check_status(status)

    def _checked(self, arguments: tuple[Argument, ...]) -> _Layout:
        """The layout of these arguments; TypeError where the kernel has other parameters."""
        sizes = self._parameters
        fits = len(sizes) == len(arguments) and all(map(_fits, arguments, sizes))
        if sizes and not fits:
            given = ", ".join(
                f"{len(a)} bytes" if isinstance(a, bytes) else type(a).__name__ for a in arguments
            )
            raise TypeError(f"{self.name} has parameters of {sizes} bytes, and is given: {given}")
        return _Layout(arguments)

    def _allow(self, shared: int) -> None:
        """Tell the driver once that blocks may have more than 48 KB of shared memory."""
        with self._lock:
            if shared > self._allowed:
                _in_context(self._driver.funcSetAttribute, self._pointer, _DYNAMIC_SHARED, shared)
                self._allowed = shared


def _in_context(call: Callable[..., Any], *arguments: Any) -> None:
    """A call of the driver; once more where the thread had no context."""
    try:
        call(*arguments)
    except RuntimeError as error:
        if getattr(error, "status", None) != _INVALID_CONTEXT:
            raise
        _make_context()
        call(*arguments)


def _make_context() -> None:
    """CUDA's runtime makes one for this thread."""
    importlib.import_module("cupy").cuda.runtime.free(0)


def _fits(argument: Argument, size: int) -> bool:
    if isinstance(argument, bytes):
        return size <= len(argument) < size + 8
    return size == 4 if isinstance(argument, float) else size <= 8
