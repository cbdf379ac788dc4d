"""CuPy and torch arrays on a GPU: the Backend that launches kernels on them."""

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import numpy as np

from cuquant import interop
from cuquant.gpu import jit
from cuquant.gpu.backend import Gemm
from cuquant.gpu.cublas import Cublas, CublasError, library
from cuquant.gpu.jit import Launch
from cuquant.gpu.rates import Rates, rates_of
from cuquant.gpu.tensor_map import tensor_map
from cuquant.gpu.view import View
from cuquant.gpu.workspace import workspace

# Constant tables by device and identity: the CuPy array, and the NumPy one that it copies.
_uploaded: dict[tuple[int, int], tuple[Any, np.ndarray]] = {}


def stream_handle(stream: object) -> int:
    """The handle of a CuPy or torch stream, or of any object with `__cuda_stream__`.

    Raises
    ------
    TypeError
        For anything else.
    """
    for name in ("ptr", "cuda_stream"):  # CuPy's and torch's
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return handle
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version_and_handle: Any = protocol() if callable(protocol) else protocol
        return int(version_and_handle[1])
    raise TypeError(
        f"stream must be a CuPy or torch stream or have __cuda_stream__, got {stream!r}"
    )


@cache
def _multiprocessors(device: int) -> int:
    import cupy  # type: ignore[import-not-found]

    return cupy.cuda.Device(device).attributes["MultiProcessorCount"]


@cache
def _arch(device: int) -> int:
    return jit.device_arch(device)


_vendors: dict[int, Cublas | None] = {}  # by device
_vendors_lock = threading.Lock()


def _vendor(device: int, stream: int) -> Cublas | None:
    """cuBLAS on the current device, made at the first call; None where it is not, or does not work.

    Raises
    ------
    RuntimeError
        At the first call, where `stream` is being captured into a CUDA graph.
    """
    if device in _vendors:
        return _vendors[device]
    import cupy  # type: ignore[import-not-found]

    found = library(cupy.cuda.runtime.runtimeGetVersion() // 1000)
    if found is not None:
        jit.refuse_capture(stream, "cuBLAS")
    with _vendors_lock:
        if device not in _vendors:
            try:
                _vendors[device] = None if found is None else Cublas(found)
            except CublasError:
                _vendors[device] = None
        return _vendors[device]


class Gpu:
    """A Backend on one device and stream; subclasses say where memory comes from."""

    def __init__(self, device: int, stream: int) -> None:
        self.device, self.stream = device, stream

    @property
    def multiprocessors(self) -> int:
        return _multiprocessors(self.device)

    @property
    def arch(self) -> int:
        return _arch(self.device)

    @property
    def rates(self) -> Rates:
        return rates_of(self.device)

    def upload(self, array: np.ndarray) -> Any:
        """A CuPy copy that every call on the device shares, on whatever stream.

        Kept by the identity of `array`, which must not change.
        """
        found = _uploaded.get((self.device, id(array)))
        return found[0] if found is not None else self._upload(array)

    def _upload(self, array: np.ndarray) -> Any:
        import cupy  # type: ignore[import-not-found]

        jit.refuse_capture(self.stream, "a table")
        with cupy.cuda.Stream(non_blocking=True) as own:
            copy = cupy.asarray(array)
            own.synchronize()
        return _uploaded.setdefault((self.device, id(array)), (copy, array))[0]

    tensor_map = staticmethod(tensor_map)

    @property
    def has_vendor(self) -> bool:
        return _vendor(self.device, self.stream) is not None

    def gemm(self, gemm: Gemm) -> None:
        vendor = _vendor(self.device, self.stream)
        assert vendor is not None
        vendor.gemm(self.stream, gemm)

    def workspace(self, nbytes: int) -> AbstractContextManager[int]:
        return workspace(self, nbytes)  # type: ignore[arg-type]

    def mark(self, event: Any) -> Any:
        """A CUDA event at the end of the stream's work until now: `event` itself, or a new one."""
        cuda = sys.modules["cupy"].cuda
        found = cuda.Event(disable_timing=True) if event is None else event
        cuda.runtime.eventRecord(found.ptr, self.stream)
        return found

    def wait_for(self, event: Any) -> None:
        """Let what the stream is given from now on wait for an event."""
        sys.modules["cupy"].cuda.runtime.streamWaitEvent(self.stream, event.ptr, 0)

    def launch(self, launch: Launch, *arguments: int | float | bytes) -> None:
        kernel = jit.load(launch.program, self.device, self.stream)
        kernel.launch(launch.grid, launch.threads, launch.shared, arguments, self.stream)

    def view(self, array: Any) -> View:
        """Where an array of the backend's library lies."""
        raise NotImplementedError


class CupyBackend(Gpu):
    """Memory from CuPy's pool; the stream is CuPy's current one."""

    kind = "cupy"

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        return sys.modules["cupy"].empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        return sys.modules["cupy"].zeros(shape, dtype)

    def array(self, host: np.ndarray) -> Any:
        """A copy of a NumPy array."""
        return sys.modules["cupy"].asarray(host)

    def pointer(self, array: Any) -> int:
        return array.data.ptr

    def contiguous(self, x: Any, axis: int) -> Any:
        moved = sys.modules["cupy"].moveaxis(x, axis, -1)
        aligned = moved.flags.c_contiguous and moved.data.ptr % 16 == 0
        return moved if aligned else moved.copy(order="C")

    def read(self, array: Any) -> np.ndarray:
        return array.get()

    def view(self, array: Any) -> View:
        size = array.dtype.itemsize
        strides = tuple(step // size for step in array.strides)
        return View(array.data.ptr, array.shape, strides, array.dtype)

    def permuted(self, array: Any, axes: tuple[int, ...]) -> Any:
        """The array with its axes in this order."""
        return array.transpose(axes)

    def broadcast(self, array: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """A contiguous copy of a number or an array of them, in this shape and dtype."""
        cupy = sys.modules["cupy"]
        if not interop.is_on_gpu(array):
            return cupy.full(shape, array, dtype)
        return cupy.ascontiguousarray(cupy.broadcast_to(array, shape).astype(dtype))

    def copy_into(self, target: Any, source: Any) -> None:
        """target[...] = source."""
        target[...] = source

    def count_above(self, x: Any, bound: float) -> int:
        """How many magnitudes are larger; waits for the device."""
        return int((abs(x.astype(np.float32)) > np.float32(bound)).sum())


class TorchBackend(Gpu):
    """Memory from torch's allocator; the stream is torch's current one."""

    kind = "torch"

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=interop.torch_dtype(dtype), device=self._place)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        torch = sys.modules["torch"]
        wide = {"uint32": torch.int32, "uint64": torch.int64}.get(dtype.name)  # same zeros
        return torch.zeros(shape, dtype=wide or interop.torch_dtype(dtype), device=self._place)

    @property
    def _place(self) -> Any:
        return _torch_device(self.device)

    def array(self, host: np.ndarray) -> Any:
        """A copy of a NumPy array."""
        return interop.from_numpy(np.ascontiguousarray(host), "torch").to(self._place)

    def pointer(self, array: Any) -> int:
        return array.data.ptr if interop.kind(array) == "cupy" else array.data_ptr()

    def contiguous(self, x: Any, axis: int) -> Any:
        moved = sys.modules["torch"].movedim(x.detach(), axis, -1)
        aligned = moved.is_contiguous() and moved.data_ptr() % 16 == 0
        return moved if aligned else moved.clone(memory_format=_contiguous_format())

    def read(self, array: Any) -> np.ndarray:
        return interop.to_numpy(array.cpu())

    def view(self, array: Any) -> View:
        dtype = interop.dtype_of(array)
        return View(array.data_ptr(), tuple(array.shape), array.stride(), dtype)

    def permuted(self, array: Any, axes: tuple[int, ...]) -> Any:
        """The array with its axes in this order."""
        return array.permute(axes)

    def broadcast(self, array: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """A contiguous copy of a number or an array of them, in this shape and dtype."""
        if not interop.is_on_gpu(array):
            kind = interop.torch_dtype(dtype)
            return sys.modules["torch"].full(shape, float(array), dtype=kind, device=self._place)
        return array.detach().to(interop.torch_dtype(dtype)).expand(shape).contiguous()

    def copy_into(self, target: Any, source: Any) -> None:
        """target[...] = source."""
        target.copy_(source)

    def count_above(self, x: Any, bound: float) -> int:
        """How many magnitudes are larger; waits for the device."""
        return int((x.detach().float().abs() > bound).sum())


def _contiguous_format() -> Any:
    return sys.modules["torch"].contiguous_format


@cache
def _torch_device(index: int) -> Any:
    return sys.modules["torch"].device("cuda", index)


def _torch_stream(device: int) -> int:
    """The handle of torch's current stream; the short way where torch has it, as its compiler."""
    torch = sys.modules["torch"]
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw(device) if raw is not None else torch.cuda.current_stream(device).cuda_stream


class _Handle:
    """A stream's handle, as CUDA's stream protocol hands it over."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def _external(cupy: Any, handle: int, device: int) -> Any:
    """CuPy's stream of a handle; the way of CuPy 14, or the one before."""
    from_external = getattr(cupy.cuda.Stream, "from_external", None)
    if from_external is not None:
        return from_external(_Handle(handle))
    return cupy.cuda.ExternalStream(handle, device)


GpuBackend = CupyBackend | TorchBackend


def current_backend(kind: str, device: int) -> GpuBackend | None:
    """What `backend_of` gives where no stream is named; None where another device is current.

    For calls that must be quick: nothing is switched, and nothing needs to be put back.
    """
    cuda = sys.modules["cupy"].cuda
    if cuda.runtime.getDevice() != device:
        return None
    if kind == "torch":
        return TorchBackend(device, _torch_stream(device))
    return CupyBackend(device, cuda.get_current_stream().ptr)


@contextmanager
def backend_of(x: Any, stream: object = None) -> Iterator[GpuBackend]:
    """The backend of a GPU array, on its device and on `stream` or its library's current one.

    Device and stream are current inside, and what they were afterwards.
    """
    cupy = interop.load_cupy()
    torch_tensor = interop.kind(x) == "torch"
    index = x.device.index if torch_tensor else x.device.id
    before = cupy.cuda.runtime.getDevice()
    if before != index:
        cupy.cuda.runtime.setDevice(index)
    try:
        if torch_tensor:
            torch = sys.modules["torch"]
            if stream is None:
                yield TorchBackend(index, _torch_stream(index))
                return
            own = torch.cuda.ExternalStream(stream_handle(stream), device=index)
            with torch.cuda.stream(own):
                x.record_stream(own)
                yield TorchBackend(index, own.cuda_stream)
            return
        if stream is None:
            yield CupyBackend(index, cupy.cuda.get_current_stream().ptr)
            return
        own = _external(cupy, stream_handle(stream), index)
        with own:
            yield CupyBackend(index, own.ptr)
    finally:
        if before != index:
            cupy.cuda.runtime.setDevice(before)


def contiguous(backend: GpuBackend, parts: Mapping[str, Any], alignment: int = 1) -> dict[str, Any]:
    """Arrays in C order that start on whole elements and on `alignment` bytes, or copies."""
    found = dict(parts)
    for name, part in parts.items():
        view = backend.view(part)
        if view.is_contiguous and view.pointer % max(view.dtype.itemsize, alignment) == 0:
            continue
        if part.ndim:
            found[name] = backend.contiguous(part, -1)
        elif view.pointer % view.dtype.itemsize:
            found[name] = backend.broadcast(part, (), view.dtype)
    return found
