"""Kinds of array: NumPy, CuPy, torch. What comes in is what goes out.

torch and CuPy are never imported here: an array of theirs can only exist once its library is in
`sys.modules`.
"""

import importlib
import sys
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from cuquant.errors import BackendUnavailable, clipped, clipped_text, shortened
from cuquant.interop.find_cupy import load_cupy
from cuquant.reference.memory import aligned

INPUT_DTYPES = ("float32", "float16", "bfloat16")

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
        raise TypeError(f"{clipped(dtype)} is no dtype") from error


def float_dtype(dtype: object, what: str = "dtype") -> np.dtype:
    """`numpy_dtype`, refused unless it is one that cuquant computes with."""
    if isinstance(dtype, np.dtype) and dtype in _FLOATS:
        return dtype
    found = None if dtype is None else numpy_dtype(dtype)  # NumPy's None is float64
    if found is None or found.name not in INPUT_DTYPES or not found.isnative:
        raise TypeError(
            f"{what} must be {', '.join(INPUT_DTYPES[:-1])} or {INPUT_DTYPES[-1]}, "
            f"got {shortened(str(found))}"
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
            f"which are computed as float32; got {shortened(str(found))}"
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
    refuse_other(x, name, "float32")
    which = kind(x)
    refuse_gpu(x, name)
    if which == "numpy":
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError(f"{name} is a masked array; pass x.filled(value)")
        return np.asarray(x).view(np.ndarray)
    return _torch_to_numpy(x.detach())


def refuse_other(x: Any, name: str, dtype: str | None = None) -> None:
    """TypeError for what is no array; it names a dtype that one would be taken in."""
    if kind(x) is None:
        hint = f"; np.asarray(x, np.{dtype}) makes one" if dtype else ""
        raise TypeError(
            f"{name} must be a NumPy, CuPy or torch array, got {type(x).__name__}{hint}"
        )


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
        return _seen(x)
    integer = {1: torch.uint8, 2: torch.int16}[x.element_size()]
    return _seen(x.view(integer)).view(_TORCH_FLOATS[name])


def _seen(x: Any) -> np.ndarray:
    """`x.numpy()`, which forbids that the memory is ever resized, as FSDP does with parameters."""
    torch = sys.modules["torch"]
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.layout != torch.strided:
        return x.numpy()
    return np.asarray(_Memory(x))


class _Memory:
    """A tensor's memory in NumPy's protocol; the array keeps it, and it the tensor."""

    def __init__(self, x: Any) -> None:
        self.tensor, size = x, x.element_size()
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(x.shape),
            "strides": tuple(step * size for step in x.stride()),
            "typestr": _of_torch(x.dtype).str,
            "data": (x.data_ptr(), False),
        }


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

    >>> destination(None, "cuda:1"), destination("numpy", None)
    (('cupy', 'cuda:1'), ('numpy', 'cpu'))
    """
    if library is not None and library not in LIBRARIES:
        raise ValueError(f"library must be one of {', '.join(LIBRARIES)}, got {clipped(library)}")
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
            raise BackendUnavailable(
                f"torch cannot move arrays to {clipped(target)}: {clipped_text(str(error))}"
            ) from error
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
        raise ValueError(f"device {clipped(name)} is unknown; pass 'cpu', 'cuda' or 'cuda:N'")
    return "cpu" if base == "cpu" else name


def reject_stream(stream: object) -> None:
    """ValueError for a stream with CPU arrays, where it has no meaning."""
    if stream is not None:
        raise ValueError("stream= orders work on a GPU; leave it out for arrays on the CPU")


def fill(x: Any, value: float) -> None:
    """Write a number to all elements of an array."""
    if kind(x) == "torch":
        x.detach().fill_(value)
    else:
        x.fill(value)


def namespace(x: Any) -> Any:
    """The library of an array: numpy, cupy or torch."""
    return np if kind(x) == "numpy" else sys.modules[kind(x) or "numpy"]
