"""Where arithmetic runs: the CPU, or a GPU that CuPy can use.

CuPy is imported by these functions, never by importing this module.
"""

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from cuquant.errors import BackendUnavailable, CupyBroken
from cuquant.interop import device_name, load_cupy

_said = False  # that CuPy is broken


def gpu_available() -> bool:
    """Whether CuPy is installed and finds a GPU; imports CuPy to see.

    An installed CuPy that cannot be imported is warned of, once.
    """
    global _said
    try:
        load_cupy()
    except CupyBroken as error:
        if not _said:
            _said = True
            text = f"everything is computed on the CPU: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return False
    except BackendUnavailable:
        return False
    return True


def resolve(device: object = None) -> str:
    """The device that is meant: "cpu" or "cuda:N".

    Parameters
    ----------
    device
        "cpu", "cuda" (CuPy's current one) or "cuda:N". None: a GPU where one is usable, else the
        CPU.

    Raises
    ------
    ValueError
        For another name.
    BackendUnavailable
        Where a GPU is asked for and is not there.

    Examples
    --------
    >>> resolve("cpu")
    'cpu'
    """
    if device is None:
        return resolve("cuda") if gpu_available() else "cpu"
    name = device_name(device)
    if name == "cpu":
        return name
    runtime = load_cupy().cuda.runtime
    index = int(name.partition(":")[2] or runtime.getDevice())
    count = runtime.getDeviceCount()
    if index >= count:
        raise BackendUnavailable(f"there is no cuda:{index}; the last GPU is cuda:{count - 1}")
    return f"cuda:{index}"


def index_of(device: str) -> int:
    """N of "cuda:N"."""
    return int(device.partition(":")[2] or 0)


def describe(device: str) -> str:
    """A device for people: "the CPU", "cuda:0 (NVIDIA H100 80GB HBM3)".

    >>> describe("cpu")
    'the CPU'
    """
    if device == "cpu":
        return "the CPU"
    name = load_cupy().cuda.runtime.getDeviceProperties(index_of(device))["name"]
    return f"{device} ({name.decode(errors='replace')})"


def use(device: str) -> AbstractContextManager[Any]:
    """A context in which CuPy's arrays are made on a device."""
    return nullcontext() if device == "cpu" else load_cupy().cuda.Device(index_of(device))


def synchronize(device: str) -> None:
    """Wait until a device has done all that it was given."""
    if device != "cpu":
        load_cupy().cuda.Device(index_of(device)).synchronize()
