"""Kernel sources and their compilation at run time.

The CUDA sources ship as package data. This version has none that can be launched yet: every
entry point says so, instead of computing something else.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from cuquant.errors import BackendUnavailable
from cuquant.interop import INSTALL_GPU


@dataclass(frozen=True)
class Program:
    """One kernel to compile: a template of a file, instantiated for the facts of a format.

    Attributes
    ----------
    file
        Of the kernel folder, "quantize.cu".
    entry
        The `__global__` template in namespace cuquant, "quantize".
    arguments
        Its template arguments as C++ text or ints: ("formats::nf4", "Half", 8, 256).
    facts
        C++ that goes into namespace cuquant::formats before the file: the structs of the formats.
    features
        Whether it needs the instructions of one architecture alone (sm_90a).
    contract
        Whether a * b + c may become one operation; never where bytes are a promise.
    """

    file: str
    entry: str
    arguments: tuple[str | int, ...] = ()
    facts: str = ""
    features: bool = False
    contract: bool = False

    @property
    def name(self) -> str:
        """The instantiation: "cuquant::quantize<cuquant::formats::nf4, ...>"."""
        if not self.arguments:
            return f"cuquant::{self.entry}"
        return f"cuquant::{self.entry}<{', '.join(map(str, self.arguments))}>"


@dataclass(frozen=True)
class Launch:
    """How a program is started: blocks, threads in each and bytes of dynamic shared memory."""

    program: Program
    grid: tuple[int, int, int]
    threads: int
    shared: int = 0


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
