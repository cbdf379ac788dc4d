"""A GPU for tests where there is none: arrays that look like CuPy's or like torch's on CUDA, and
cuquant.gpu.arrays as it is, but for its launches, which go to a backend of the emulator.

CuPy's arrays are no NumPy arrays here either, and refuse what CuPy refuses: an array that slips
through to NumPy fails instead of being computed on the host.
"""

import operator
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from emulator import Emulator, compiler

from cuquant import interop
from cuquant.errors import BackendUnavailable
from cuquant.gpu import arrays as gpu

try:
    import torch
except ImportError:
    torch = None

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no g++ to compile kernels with")
needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")
# Arrays that only look like a library's, and real ones: what `use` takes.
KINDS = [
    pytest.param("fake cupy", marks=needs_compiler),
    pytest.param("fake torch", marks=[needs_compiler, needs_torch]),
    pytest.param("cupy", marks=pytest.mark.gpu),
    pytest.param("torch", marks=pytest.mark.gpu),
]

OPERATORS = "add sub mul truediv and_ or_ xor lshift rshift eq ne lt le gt ge"
SWAPPED = "add sub mul truediv and_ or_ xor"
UNARY = "neg abs invert"
METHODS = "reshape transpose view astype argsort copy fill sum min max any all"
FUNCTIONS = (
    "abs ascontiguousarray broadcast_to clip concatenate empty_like full isfinite isinf moveaxis"
    " multiply ones_like prod reciprocal rint signbit stack take where"
)
PLAIN = "shape dtype ndim size nbytes itemsize strides flags"


class CupyArray:
    """As much of cupy.ndarray as cuquant uses, around a NumPy array."""

    def __init__(self, host: Any) -> None:
        self.host = np.asarray(host)

    @property
    def data(self) -> SimpleNamespace:
        return SimpleNamespace(ptr=self.host.ctypes.data, device_id=0)

    @property
    def device(self) -> SimpleNamespace:
        return SimpleNamespace(id=0)

    @property
    def T(self) -> "CupyArray":
        return CupyArray(self.host.T)

    def get(self) -> np.ndarray:
        return self.host.copy()

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __getitem__(self, index: Any) -> "CupyArray":
        return CupyArray(self.host[_plain(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.host[_plain(index)] = _operand(value)

    def __len__(self) -> int:
        return len(self.host)

    def __bool__(self) -> bool:
        return bool(self.host)

    def __int__(self) -> int:
        return int(self.host)

    def __float__(self) -> float:
        return float(self.host)


def _operand(value: Any) -> Any:
    """What CuPy computes with: its own arrays and numbers."""
    if isinstance(value, CupyArray):
        return value.host
    if isinstance(value, np.ndarray):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    return value


def _plain(index: Any) -> Any:
    """An index, of which CuPy takes NumPy arrays too."""
    if isinstance(index, tuple):
        return tuple(_plain(entry) for entry in index)
    return index.host if isinstance(index, CupyArray) else index


def _binary(name: str) -> Any:
    compute = getattr(operator, name)
    return lambda a, b: CupyArray(compute(a.host, _operand(b)))


def _swapped(name: str) -> Any:
    compute = getattr(operator, name)
    return lambda a, b: CupyArray(compute(_operand(b), a.host))


def _method(name: str) -> Any:
    def call(self: CupyArray, *args: Any, **kwargs: Any) -> CupyArray:
        return CupyArray(getattr(self.host, name)(*args, **kwargs))

    return call


def _function(name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> CupyArray:
        plain = [[_operand(a) for a in x] if isinstance(x, list) else _operand(x) for x in args]
        named = {key: _operand(value) for key, value in kwargs.items()}
        return CupyArray(getattr(np, name)(*plain, **named))

    return call


for _name in OPERATORS.split():
    setattr(CupyArray, f"__{_name.strip('_')}__", _binary(_name))
for _name in SWAPPED.split():
    setattr(CupyArray, f"__r{_name.strip('_')}__", _swapped(_name))
for _name in UNARY.split():
    setattr(CupyArray, f"__{_name}__", _method(f"__{_name}__"))
for _name in METHODS.split():
    setattr(CupyArray, _name, _method(_name))
for _name in PLAIN.split():
    setattr(CupyArray, _name, property(operator.attrgetter(f"host.{_name}")))
CupyArray.__hash__ = None  # type: ignore[assignment]


class Context:
    """A stream or a device that is current in a with block."""

    def __init__(self, ptr: int = 0, *_: Any) -> None:
        self.ptr = self.cuda_stream = ptr

    def __enter__(self) -> "Context":
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class Event:
    """A CUDA event: the work of a GPU that is not there is always done."""

    ptr, done = 0, True

    def __init__(self, **_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


def cupy_module(memory: Any) -> ModuleType:
    """The module cupy, with arrays in `memory`, an emulator."""

    def asarray(x: Any) -> CupyArray:
        host = np.asarray(x)
        array = memory.empty(host.shape, host.dtype)
        array[...] = host
        return CupyArray(array)

    module: Any = ModuleType("cupy")
    module.ndarray = CupyArray
    module.empty = lambda shape, dtype: CupyArray(memory.empty(shape, np.dtype(dtype)))
    module.zeros = lambda shape, dtype: asarray(np.zeros(shape, dtype))
    module.asarray = module.array = asarray
    module.full = lambda shape, value, dtype: asarray(np.full(shape, value, dtype))
    for name in FUNCTIONS.split():
        setattr(module, name, _function(name))
    runtime = SimpleNamespace(
        getDevice=lambda: 0,
        setDevice=lambda index: None,
        getDeviceCount=lambda: 1,
        streamIsCapturing=lambda stream: False,
        eventRecord=lambda event, stream: None,
        streamWaitEvent=lambda stream, event, flags: None,
        CUDARuntimeError=type("CUDARuntimeError", (RuntimeError,), {}),
    )
    module.cuda = SimpleNamespace(
        runtime=runtime,
        get_current_stream=Context,
        ExternalStream=Context,
        Device=Context,
        Event=Event,
    )
    return module


if torch is not None:

    class CudaTensor(torch.Tensor):
        """A tensor on the CPU that says it is on cuda:0; so are all that are made from it."""

        @property
        def device(self) -> Any:
            return torch.device("cuda", 0)

        def numpy(self, *_: Any, **__: Any) -> np.ndarray:
            raise TypeError("can't convert cuda:0 device type tensor to numpy.")

        __array__ = numpy

        def cpu(self) -> Any:
            return self.as_subclass(torch.Tensor).clone()

        def to(self, target: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(target, (str, torch.device)):
                return super().to(target, *args, **kwargs)
            return self.cpu() if str(target) == "cpu" else self

        def record_stream(self, stream: Any) -> None:
            pass

        def __reduce_ex__(self, protocol: int) -> Any:
            return _unpickled, (self.cpu(),)

    def _unpickled(x: Any) -> "CudaTensor":
        return x.as_subclass(CudaTensor)


class TorchBackend(gpu.TorchBackend):
    """Memory of torch's on the CPU, whatever device it is asked for."""

    @property
    def _place(self) -> str:
        return "cpu"

    def empty(self, *args: Any) -> Any:
        return super().empty(*args).as_subclass(CudaTensor)

    def zeros(self, *args: Any) -> Any:
        return super().zeros(*args).as_subclass(CudaTensor)

    def array(self, host: np.ndarray) -> Any:
        return super().array(host).clone().as_subclass(CudaTensor)

    def broadcast(self, *args: Any) -> Any:
        return super().broadcast(*args).as_subclass(CudaTensor)


def _install_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.Tensor.to

    def to(self: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if str(target).startswith("cuda"):
            return self.clone().as_subclass(CudaTensor)
        return original(self, target, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: Context())
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda ptr, device: Context(ptr))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(gpu, "TorchBackend", TorchBackend)


def install(kind: str, monkeypatch: pytest.MonkeyPatch, backend: Any = None) -> Any:
    """Make the library look as if it had a GPU, and give what moves NumPy arrays to it.

    Parameters
    ----------
    kind
        "cupy" or "torch".
    backend
        Of the emulator: what runs the kernels (an Emulator, if None) or notes them (a Recorder).
    """
    backend = backend or Emulator()
    cupy = cupy_module(backend)

    def launch(self: Any, *arguments: Any) -> None:
        backend.launch(*arguments)

    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(gpu.Gpu, "launch", launch)
    monkeypatch.setattr(gpu.Gpu, "has_vendor", backend.has_vendor)
    monkeypatch.setattr(gpu.Gpu, "upload", lambda self, array: CupyArray(backend.upload(array)))
    monkeypatch.setattr(gpu, "_multiprocessors", lambda device: backend.multiprocessors)
    monkeypatch.setattr(gpu, "_arch", lambda device: backend.arch)
    monkeypatch.setattr(gpu, "rates_of", lambda device: backend.rates)
    if kind == "torch":
        _install_torch(monkeypatch)
    return mover(kind)


def mover(kind: str) -> Any:
    """A function that copies NumPy arrays to the GPU, as arrays of a library."""

    def to(x: Any) -> Any:
        if kind == "torch" and isinstance(x, np.ndarray):
            return interop.from_numpy(x.copy(), "torch").to("cuda")
        return sys.modules["cupy"].asarray(x) if isinstance(x, np.ndarray) else x

    return to


def real(kind: str) -> Any:
    """The same for a real GPU; skips where there is none."""
    try:
        interop.load_cupy()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    if kind == "torch" and (torch is None or not torch.cuda.is_available()):
        pytest.skip("torch has no GPU")
    return mover(kind)


def use(kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`install` or `real`, for one of KINDS."""
    *fake, library = kind.split()
    return install(library, monkeypatch) if fake else real(library)
