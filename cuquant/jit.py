"""Kernel sources and their compilation at run time.

The CUDA sources ship as package data. This version has none that can be launched yet: every
entry point says so, instead of computing something else.
"""

from pathlib import Path
from typing import Any, NoReturn

from cuquant.errors import BackendUnavailable
from cuquant.interop import INSTALL_GPU


def kernel_folder() -> Path:
    """Where the CUDA sources are: `cuquant/kernels` in a wheel, `kernels` beside it in a checkout.

    Raises
    ------
    BackendUnavailable
        Where the installation lacks them.
    """
    package = Path(__file__).parent
    for folder in (package / "kernels", package.parent / "kernels"):
        if (folder / "format.cuh").is_file():
            return folder
    raise BackendUnavailable(
        f"no CUDA sources beside {package}; reinstall: pip install --force-reinstall cuquant"
    )


def precompile(*formats: str, **_: Any) -> NoReturn:
    """Compile kernels ahead of their first use.

    Raises
    ------
    BackendUnavailable
        Always, in this version: the CUDA kernels come with the next one.
    """
    raise BackendUnavailable(
        "this version of cuquant runs on the CPU only: there is nothing to precompile. "
        f"With the CUDA kernels it will need {INSTALL_GPU}"
    )
