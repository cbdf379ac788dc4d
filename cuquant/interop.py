"""Kinds of array: NumPy, CuPy, torch. What comes in is what goes out.

torch and CuPy are never imported here: an array of theirs can only exist once its library is in
`sys.modules`.
"""

import importlib
import os
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from cuquant.errors import BackendUnavailable, CupyBroken, clipped_text, pip_install
from cuquant.reference.memory import aligned

INPUT_DTYPES = ("float32", "float16", "bfloat16")
INSTALL_GPU = f"{pip_install('cuda12')} (or cuda13) in cuquant's source folder"
CACHE_VARIABLE = "CUQUANT_CACHE_DIR"

MOST_WORK = 1 << 16  # of NumPy, to find out whether strided arrays meet

F = TypeVar("F", bound=Callable[..., Any])

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOATS = {np.dtype(np.float32), np.dtype(np.float16), _BFLOAT16}
# Floats that torch knows and NumPy does not: (torch's name, ml_dtypes' dtype).
_TORCH_FLOATS = {
    "bfloat16": _BFLOAT16,
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "float8_e8m0fnu": np.dtype(ml_dtypes.float8_e8m0fnu),
}


_kinds: dict[type, str] = {}  # what `kind` found; asked for many times at every call


@cache
def name_of(dtype: np.dtype) -> str:
    """A dtype's name, "float16"; NumPy makes it anew each time, which takes 4 us."""
    return dtype.name


def kind(x: object) -> str | None:
    """ "numpy", "cupy" or "torch"; None for what is no array of these libraries."""
    found = _kinds.get(type(x))
    if found is None:
        found = _kind(x)
        if found is not None:
            _kinds[type(x)] = found
    return found


def _kind(x: object) -> str | None:
    if isinstance(x, (np.ndarray, np.generic)):
        return "numpy"
    for name in ("torch", "cupy"):
        library = sys.modules.get(name)
        array = getattr(library, "Tensor" if name == "torch" else "ndarray", None)
        if isinstance(array, type) and isinstance(x, array):
            return name
    return None


def device(x: Any) -> str:
    """ "cpu" or "cuda:0" and so on."""
    which = kind(x)
    if which == "torch":
        return str(x.device)
    if which == "cupy":
        return f"cuda:{x.device.id}"
    return "cpu"


def numpy_dtype(dtype: object) -> np.dtype:
    """The NumPy dtype of a name, a NumPy or ml_dtypes type or a torch dtype.

    >>> numpy_dtype("bfloat16")
    dtype(bfloat16)
    """
    name = str(dtype)
    if name.startswith("torch."):
        dtype = name.removeprefix("torch.")
    if isinstance(dtype, str) and dtype in _TORCH_FLOATS:
        return _TORCH_FLOATS[dtype]
    try:
        return np.dtype(dtype)  # type: ignore[call-overload]
    except TypeError as error:
        raise TypeError(f"{dtype!r} is no dtype") from error


def float_dtype(dtype: object, what: str = "dtype") -> np.dtype:
    """`numpy_dtype`, refused unless it is one that cuquant computes with."""
    if isinstance(dtype, np.dtype) and dtype in _FLOATS:
        return dtype
    found = numpy_dtype(dtype)
    if found.name not in INPUT_DTYPES or not found.isnative:
        raise TypeError(
            f"{what} must be {', '.join(INPUT_DTYPES[:-1])} or {INPUT_DTYPES[-1]}, got {found}"
        )
    return found


def as_array(x: Any, name: str = "x") -> Any:
    """An array of any kind as it is; lists and what else NumPy reads as numbers, as NumPy's.

    Raises
    ------
    TypeError
        For what makes no array of numbers.
    ValueError
        For lists whose lengths differ.
    """
    if kind(x):
        return x
    try:
        found = np.asarray(x)
    except ValueError as error:
        raise ValueError(f"{name} does not make an array: {error}") from error
    if found.dtype.kind not in "biufcV":
        raise TypeError(
            f"{name} must be a NumPy, CuPy or torch array, or nested lists of numbers, got "
            f"{type(x).__name__}"
        )
    return found


def as_float(x: Any, name: str = "x") -> Any:
    """An array of numbers as one of a dtype that cuquant computes with: float64, integers and bools
    become float32, where what is beyond its range is infinite; others stay as they are.

    Raises
    ------
    TypeError
        For complex numbers, 8-bit floats and what is no number.
    """
    found = dtype_of(x)
    if found in _FLOATS:
        return x
    if not issubclass(found.type, (np.floating, np.integer, np.bool_)):
        raise TypeError(
            f"{name} must be float32, float16 or bfloat16, or float64, integers or bools, "
            f"which are computed as float32; got {found}"
        )
    native = found.newbyteorder("=")
    with np.errstate(over="ignore", under="ignore"):
        if kind(x) == "torch":
            x = x.detach()
        return astype(x, native if native in _FLOATS else np.float32)


def is_on_gpu(x: Any) -> bool:
    """Whether an array is CuPy's, or torch's on a CUDA device."""
    which = kind(x)
    return which == "cupy" or (which == "torch" and x.device.type == "cuda")


def dtype_of(x: Any) -> np.dtype:
    """The NumPy dtype of an array of any kind."""
    dtype = x.dtype
    return dtype if isinstance(dtype, np.dtype) else _of_torch(dtype)


@cache
def _of_torch(dtype: Any) -> np.dtype:
    return numpy_dtype(dtype)


def to_numpy(x: Any, name: str = "x") -> np.ndarray:
    """A CPU array as NumPy's, without a copy; torch's bfloat16 and fp8 keep their bits.

    Raises
    ------
    TypeError
        For anything that is not an array.
    BackendUnavailable
        For an array on a GPU.
    """
    which = kind(x)
    if which is None:
        raise TypeError(
            f"{name} must be a NumPy, CuPy or torch array, got {type(x).__name__}; "
            "np.asarray(x, np.float32) makes one"
        )
    refuse_gpu(x, name)
    if which == "numpy":
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError(f"{name} is a masked array; pass x.filled(value)")
        return np.asarray(x).view(np.ndarray)
    return _torch_to_numpy(x.detach())


def refuse_gpu(x: Any, name: str) -> None:
    """BackendUnavailable for an array or a QuantArray on a GPU: what calls this has no kernel."""
    place = device(x) if kind(x) else getattr(x, "device", "cpu")
    if place != "cpu":
        raise BackendUnavailable(
            f"{name} is on {place!r}, and this operation computes on the CPU only; move it there "
            "(x.get() in CuPy, x.cpu() in torch, q.to('cpu') for a QuantArray)"
        )


def _torch_to_numpy(x: Any) -> np.ndarray:
    torch = sys.modules["torch"]
    x = x.resolve_conj().resolve_neg()  # lazy views that NumPy has no word for
    name = str(x.dtype).removeprefix("torch.")
    if name not in _TORCH_FLOATS:
        return x.numpy()
    integer = {1: torch.uint8, 2: torch.int16}[x.element_size()]
    return x.view(integer).numpy().view(_TORCH_FLOATS[name])


def from_numpy(x: np.ndarray, which: str) -> Any:
    """`x` as an array of kind `which` ("numpy" or "torch"), without a copy."""
    if which == "numpy":
        return x
    torch = sys.modules["torch"]
    if not x.flags.writeable:  # torch has no read-only tensors
        x = aligned(x.copy())
    if x.dtype == _BFLOAT16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    if x.dtype.kind == "V" or x.dtype.name in _TORCH_FLOATS:  # fp8 and smaller: as bytes
        return torch.from_numpy(x.view(np.uint8))
    return torch.from_numpy(x)


LIBRARIES = ("numpy", "cupy", "torch")


def destination(library: object, device: object) -> tuple[str, str]:
    """Library and device that arrays are asked to go to; None is NumPy, CuPy on a GPU.

    Raises
    ------
    ValueError
        For an unknown one, or a library that has no arrays on that device.
    BackendUnavailable
        Where torch is asked for and not installed.

    >>> destination(None, "cuda:1"), destination("torch", None)
    (('cupy', 'cuda:1'), ('torch', 'cpu'))
    """
    if library is not None and library not in LIBRARIES:
        raise ValueError(f"library must be one of {', '.join(LIBRARIES)}, got {library!r}")
    place = device_name(device) if device is not None else "cuda" if library == "cupy" else "cpu"
    which = str(library or ("numpy" if place == "cpu" else "cupy"))
    if (which, place == "cpu") in (("numpy", False), ("cupy", True)):
        raise ValueError(f"{which} has no arrays on {place!r}; pass another library= or device=")
    if which == "torch":
        try:
            importlib.import_module("torch")  # asked for by its name, and nowhere else
        except ImportError as error:
            raise BackendUnavailable(
                "library='torch' needs PyTorch, which is not installed; see pytorch.org"
            ) from error
    return which, place


def placed(x: np.ndarray, library: str, device: str, bytes_of_fp8: bool = False) -> Any:
    """A NumPy array as one of `library` on `device` (`destination`), without a copy on the CPU.

    torch gets bfloat16 and 8-bit floats as its own; with `bytes_of_fp8`, these as bytes.
    """
    if library != "torch":
        return to_device(x, device)
    tensor = from_numpy(x, "torch")
    if x.dtype.name in _TORCH_FLOATS and x.dtype.itemsize == 1 and not bytes_of_fp8:
        tensor = tensor.view(torch_dtype(x.dtype))
    return tensor if device == "cpu" else to_device(tensor, device)


def to_device(x: Any, target: str) -> Any:
    """`x` on "cpu", "cuda" or "cuda:N": torch stays torch, NumPy becomes CuPy and back."""
    which = kind(x)
    if which == "torch":
        try:
            return x.to(target)
        except (AssertionError, RuntimeError) as error:  # torch without CUDA, or without a GPU
            raise BackendUnavailable(f"torch cannot move arrays to {target!r}: {error}") from error
    if target == "cpu":
        return x.get() if which == "cupy" else x
    cupy = load_cupy()
    index = int(target.partition(":")[2] or 0)
    with cupy.cuda.Device(index):
        return cupy.asarray(x)


def to_host(x: Any, name: str = "x") -> np.ndarray:
    """`to_numpy` that copies from a GPU too, which waits for it."""
    return to_numpy(to_device(x, "cpu"), name)


def like(x: np.ndarray, other: Any) -> Any:
    """`x` as an array of `other`'s library and on its device."""
    if not is_on_gpu(other):
        return from_numpy(x, kind(other) or "numpy")
    if kind(other) == "torch":
        return from_numpy(x, "torch").to(other.device)
    return to_device(x, device(other))


def beside(x: Any, near: Any, name: str = "x") -> Any:
    """`x` where `near` is: on its GPU, or as NumPy's on the CPU.

    Raises
    ------
    TypeError
        For anything that is not an array.
    BackendUnavailable
        For an array on a GPU while `near` is on the CPU.
    ValueError
        For an array on another GPU than `near`, or of another library on one.
    """
    if not (is_on_gpu(x) and is_on_gpu(near)):
        host = to_numpy(x, name)
        return like(host, near) if is_on_gpu(near) else host
    if (kind(x), device(x)) != (kind(near), device(near)):
        raise ValueError(
            f"{name} is a {kind(x)} array on {device(x)}, and what it belongs to a {kind(near)} "
            f"one on {device(near)}"
        )
    return x.detach() if kind(x) == "torch" else x


def astype(x: Any, dtype: object) -> Any:
    """The array converted to a NumPy dtype; itself where it has that dtype."""
    wanted = numpy_dtype(dtype)
    if kind(x) == "torch":
        return x.to(torch_dtype(wanted))
    return x.astype(wanted, copy=False)


def viewed(x: Any, dtype: object) -> Any:
    """The bits of an array as another dtype of the same size."""
    wanted = numpy_dtype(dtype)
    return x.view(torch_dtype(wanted) if kind(x) == "torch" else wanted)


def contiguous(x: Any) -> Any:
    """The array in C order: itself, or a copy."""
    return x.contiguous() if kind(x) == "torch" else namespace(x).ascontiguousarray(x)


@cache
def torch_dtype(dtype: np.dtype) -> Any:
    """torch's dtype of the same name."""
    return getattr(sys.modules["torch"], dtype.name)


def copied(x: Any) -> Any:
    """A copy of an array."""
    if kind(x) == "numpy":
        return aligned(x, copy=True)
    return x.clone() if kind(x) == "torch" else x.copy()


def device_name(target: object) -> str:
    """ "cpu", "cuda" or "cuda:N" of a string or a torch.device; ValueError otherwise."""
    name = str(target)
    base, _, index = name.partition(":")
    if base not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ValueError(f"device {name!r} is unknown; pass 'cpu', 'cuda' or 'cuda:N'")
    return "cpu" if base == "cpu" else name


_broken: tuple[str, str] | None = None  # why CuPy cannot be imported, and what to do


def import_cupy() -> Any:
    """The module cupy, whether or not it finds a GPU.

    Whatever its import raises means that there is none, and why; it is tried once in a process,
    since a package that was left half imported gives other reasons later. Where CuPy cannot keep
    its own kernels in the home directory, it gets a folder in CUQUANT_CACHE_DIR, if that is set.

    Raises
    ------
    BackendUnavailable
        Where CuPy is not installed; CupyBroken where it is, and cannot be imported.
    """
    global _broken
    if "cupy" not in sys.modules:
        if _broken is not None:
            raise CupyBroken(*_broken)
        _give_cupy_a_folder()
    try:
        return importlib.import_module("cupy")
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            raise BackendUnavailable(f"CuPy is not installed; {INSTALL_GPU}") from error
        _broken = _reason(error)
        raise CupyBroken(*_broken) from error


def _give_cupy_a_folder() -> None:
    """CuPy makes a folder when it is imported, and fails where it cannot."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if not chosen or os.environ.get("CUPY_CACHE_DIR") or _is_usable("~/.cupy/kernel_cache"):
        return
    os.environ["CUPY_CACHE_DIR"] = os.path.join(os.path.abspath(os.path.expanduser(chosen)), "cupy")


def _is_usable(folder: str) -> bool:
    """Whether a folder is there, or can be made, and can be written to."""
    path = os.path.expanduser(folder)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError:
        return False
    return os.path.isabs(path) and os.access(path, os.W_OK | os.X_OK)


def _reason(error: Exception) -> tuple[str, str]:
    """What an exception of CuPy's import says in short, and what to do about it."""
    text = clipped_text(str(error)) or type(error).__name__
    if isinstance(error, OSError) and error.filename is not None:
        home = os.environ.get("HOME") or os.path.expanduser("~")
        return text, (
            f"it keeps its kernels in CUPY_CACHE_DIR, or in HOME ({home}); set CUPY_CACHE_DIR or "
            f"{CACHE_VARIABLE} to a folder that can be written"
        )
    return text, "`cuquant doctor` tells more"


def load_cupy() -> Any:
    """The module cupy, on a machine where it finds a GPU.

    Raises
    ------
    BackendUnavailable
        Where there is no CuPy, no driver or no GPU.
    """
    cupy = import_cupy()
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # CUDARuntimeError; of a CuPy that is damaged, anything
        raise BackendUnavailable(
            f"CuPy finds no usable GPU ({error}); `cuquant doctor` tells more"
        ) from error
    if not count:
        raise BackendUnavailable("CuPy finds no GPU; `cuquant doctor` tells more")
    return cupy


def to_pickle(x: Any) -> Any:
    """`x`, or the int32 view of torch's uint32, which torch pickles but does not unpickle."""
    return viewed(x, np.int32) if kind(x) == "torch" and dtype_of(x) == np.uint32 else x


def from_pickle(x: Any, dtype: np.dtype) -> Any:
    """What `to_pickle` took, of the dtype it had."""
    return viewed(x, np.uint32) if kind(x) == "torch" and dtype == np.uint32 else x


def is_contiguous(x: Any) -> bool:
    """Whether an array's elements follow each other in C order."""
    return x.is_contiguous() if kind(x) == "torch" else bool(x.flags.c_contiguous)


def read_only(x: Any) -> Any:
    """A view of a NumPy array that cannot be written to; other libraries have none."""
    if kind(x) != "numpy" or not x.flags.writeable:
        return x
    view = x.view()
    view.flags.writeable = False
    return view


def is_writeable(x: Any) -> bool:
    """Whether an array may be written to; only NumPy's can be read-only."""
    return kind(x) != "numpy" or bool(x.flags.writeable)


def may_share_memory(a: Any, b: Any) -> bool:
    """Whether the memory that two arrays span overlaps; all devices share one address space."""
    (first, end), (other, other_end) = span(a), span(b)
    return first < other_end and other < end


def shares_memory(a: Any, b: Any) -> bool:
    """Whether two arrays have a byte in common; also where that is too hard to find out."""
    if not may_share_memory(a, b):
        return False
    try:
        return np.shares_memory(_places(a), _places(b), MOST_WORK)  # type: ignore[arg-type]
    except RuntimeError:  # NumPy's TooHardError
        return True


class _Places:
    """Where an array's elements lie, in NumPy's protocol; nobody reads them."""

    def __init__(self, x: Any) -> None:
        torch_tensor = kind(x) == "torch"
        size = x.element_size() if torch_tensor else x.itemsize
        strides = tuple(step * size for step in x.stride()) if torch_tensor else x.strides
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(x.shape),
            "strides": strides,
            "typestr": f"|V{size}",
            "data": (x.data_ptr() if torch_tensor else x.data.ptr, False),
        }


def _places(x: Any) -> np.ndarray:
    return x if kind(x) == "numpy" else np.asarray(_Places(x))


def overlaps_itself(x: Any) -> bool:
    """Whether an array may hold an element more than once; no view by slices and axes does."""
    strides = x.stride() if kind(x) == "torch" else x.strides
    if 0 in tuple(x.shape):
        return False
    reach = 1 if kind(x) == "torch" else x.itemsize
    for step, n in sorted((abs(step), n) for step, n in zip(strides, x.shape, strict=True)):
        if n > 1:
            if step < reach:
                return True
            reach += step * (n - 1)
    return False


def is_negated(x: Any) -> bool:
    """Whether an array is a view that torch negates when it is read."""
    return kind(x) == "torch" and x.is_neg()


def mark_written(x: Any) -> None:
    """Tell torch that a tensor changes, as its own operations in place do: what autograd has saved
    of it is out of date."""
    if kind(x) == "torch" and not x.is_inference():
        sys.modules["torch"].autograd.graph.increment_version(x)


def refuse_misaligned(x: Any, name: str) -> None:
    """ValueError for an array whose elements lie where a GPU cannot read them."""
    (start, _), size = span(x), dtype_of(x).itemsize
    if start % size:
        raise ValueError(
            f"{name} starts at address {start:#x}, and its elements of {size} bytes must start on "
            f"{size}; copy it to memory of its own"
        )


def span(x: Any) -> tuple[int, int]:
    """Addresses of an array's first byte and of the one behind its last."""
    torch_tensor = kind(x) == "torch"
    if torch_tensor and x.is_contiguous():
        return x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()
    if kind(x) == "cupy" and x.flags.c_contiguous:
        return x.data.ptr, x.data.ptr + x.nbytes
    size = x.element_size() if torch_tensor else x.itemsize
    strides = [step * size for step in x.stride()] if torch_tensor else x.strides
    if kind(x) == "numpy":
        start = x.ctypes.data
    else:
        start = x.data_ptr() if torch_tensor else x.data.ptr
    if 0 in tuple(x.shape):
        return start, start
    reach = [step * (n - 1) for step, n in zip(strides, x.shape, strict=True)]
    low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    return start + low, start + high + size


def wants_gradient(x: Any) -> bool:
    """Whether torch would expect a gradient to flow back to `x`, or forward from it."""
    if kind(x) != "torch":
        return False
    torch = sys.modules["torch"]
    if x.requires_grad and torch.is_grad_enabled():
        return True
    forward = torch.autograd.forward_ad
    return forward._current_level >= 0 and forward.unpack_dual(x).tangent is not None


def refuse_gradient(x: Any, name: str) -> None:
    """RuntimeError where torch would expect a gradient of `x`, which there is none of."""
    if wants_gradient(x):
        raise RuntimeError(
            f"{name} requires grad, and products with a QuantArray have no gradient; "
            "call them under torch.no_grad(), or pass x.detach()"
        )


def untraced(function: F) -> F:
    """The function, into which torch.compile does not look: a graph ends before a call of it, and
    another one begins behind."""
    hidden: list[Any] = []

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if sys.modules.get("torch._dynamo") is None or not _is_under_a_compiler():
            return function(*args, **kwargs)
        if not hidden:
            hidden.append(sys.modules["torch"].compiler.disable(function))
        return hidden[0](*args, **kwargs)

    # torch.compile keeps what it makes of a function by its code, which these would have in common.
    made: Any = called
    made.__code__ = made.__code__.replace(co_name=function.__name__)
    return made


def _is_under_a_compiler() -> bool:
    """Whether torch.compile looks at what runs now: it follows a call, or makes it in passing."""
    torch = sys.modules["torch"]
    watching = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    return torch.compiler.is_compiling() or watching is None or watching() is not None


def reject_stream(stream: object) -> None:
    """ValueError for a stream with CPU arrays, where it has no meaning."""
    if stream is not None:
        raise ValueError("stream= orders work on a GPU; leave it out for arrays on the CPU")


def namespace(x: Any) -> Any:
    """The library of an array: numpy, cupy or torch."""
    return np if kind(x) == "numpy" else sys.modules[kind(x) or "numpy"]
