"""What a benchmark needs of CuPy: arrays, a stream, and what machine this is."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cuquant.bench.report import Machine
from cuquant.bench.timing import Call, Engine
from cuquant.diagnosis.facts import gather
from cuquant.gpu.device import index_of, resolve
from cuquant.interop import load_cupy


class Gpu(Protocol):
    """A device and its arrays."""

    @property
    def machine(self) -> Machine:
        """Which one it is."""
        ...

    @property
    def engine(self) -> Engine:
        """Its clock."""
        ...

    def upload(self, x: np.ndarray) -> Any:
        """A NumPy array on the device."""
        ...

    def download(self, x: Any) -> np.ndarray:
        """An array of the device as NumPy's."""
        ...

    def copy(self, x: Any) -> Any:
        """The same values in other memory."""
        ...

    def poison(self, x: Any) -> None:
        """Overwrite an array with bytes that are no result."""
        ...

    def memory_calls(self, nbytes: int) -> Mapping[str, Sequence[Call]]:
        """Ways to "copy", "read" and "write" `nbytes` of memory; the fastest is the ceiling."""
        ...

    def release(self) -> None:
        """Give back the memory of arrays that are gone."""
        ...


class CupyEngine:
    """CuPy's side of `timing.Engine`: a stream of its own, which graphs can be captured from."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._stream = cupy.cuda.Stream(non_blocking=True)

    def capture(self, run: Call) -> Call:
        stream = self._stream
        with stream:
            stream.begin_capture()
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):  # a broken capture ends with an error too
                    stream.end_capture()
                raise
            graph = stream.end_capture()
        return lambda: graph.launch(stream)

    def elapsed(self, run: Call) -> float:
        event = self._cupy.cuda.Event
        start, stop = event(), event()
        self._cupy.cuda.runtime.deviceSynchronize()  # what other streams still do
        with self._stream:
            start.record(self._stream)
            run()
            stop.record(self._stream)
        stop.synchronize()
        return self._cupy.cuda.get_elapsed_time(start, stop) * 1e3


class CupyGpu:
    """See `Gpu`.

    Raises
    ------
    BackendUnavailable
        Where there is no GPU or no CuPy.
    """

    def __init__(self) -> None:
        device = resolve("cuda")
        self._cupy = load_cupy()
        self.machine = _machine(self._cupy, index_of(device))
        self.engine = CupyEngine(self._cupy)

    def upload(self, x: np.ndarray) -> Any:
        return self._cupy.asarray(x)

    def download(self, x: Any) -> np.ndarray:
        return x.get()

    def copy(self, x: Any) -> Any:
        made = self._cupy.empty_like(x)
        made.data.copy_from_device(x.data, x.nbytes)
        return made

    def poison(self, x: Any) -> None:
        x.data.memset(0xA5, x.nbytes)

    def memory_calls(self, nbytes: int) -> dict[str, list[Call]]:
        cupy = self._cupy
        stream = cupy.cuda.get_current_stream
        x = cupy.arange(nbytes // 8, dtype=np.uint64).reshape(-1, 2048)
        y = cupy.empty_like(x)
        of_rows, of_all = cupy.empty(len(x), np.uint64), cupy.empty((), np.uint64)
        return {
            "copy": [
                lambda: y.data.copy_from_device_async(x.data, x.nbytes, stream()),
                lambda: cupy.invert(x, out=y),
            ],
            # Maxima of rows of 16 KiB write a 2048th of what they read.
            "read": [lambda: x.max(axis=1, out=of_rows), lambda: x.max(out=of_all)],
            "write": [
                lambda: y.data.memset_async(0xA5, y.nbytes, stream()),
                lambda: y.fill(0xA5A5A5A5),
            ],
        }

    def release(self) -> None:
        self._cupy.get_default_memory_pool().free_all_blocks()


def _machine(cupy: Any, index: int) -> Machine:
    facts = gather(Path(__file__).parent.parent)
    properties = cupy.cuda.runtime.getDeviceProperties(index)
    cuda = cupy.cuda.runtime.runtimeGetVersion()
    return Machine(
        device=properties["name"].decode(errors="replace"),
        driver=facts.driver or "unknown",
        cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
        cupy=cupy.__version__,
        nvrtc="unknown" if facts.nvrtc is None else ".".join(map(str, facts.nvrtc)),
        cuquant=facts.cuquant,
        l2_bytes=int(properties["l2CacheSize"]),
    )
