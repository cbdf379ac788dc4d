"""The module cupy: found, or why it is not there."""

import importlib
import os
import sys
from typing import Any

from cuquant.errors import BackendUnavailable, CupyBroken, clipped_text, pip_install

INSTALL_GPU = f"{pip_install('cuda12')} (or cuda13) in cuquant's source folder"
CACHE_VARIABLE = "CUQUANT_CACHE_DIR"

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
            raise BackendUnavailable(
                f"CuPy is not installed; {INSTALL_GPU}; arrays on the CPU need none"
            ) from error
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
