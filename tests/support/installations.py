"""A healthy installation, as `doctor` sees it, and what it says once something has changed."""

from dataclasses import replace
from pathlib import Path

from cuquant.diagnosis.checks import examine
from cuquant.diagnosis.facts import Facts, Gpu
from cuquant.gpu.cubins import Folder
from cuquant.gpu.source import Headers

INCLUDE = Path("/venv/nvidia/cuda_runtime/include")

H100 = Gpu("NVIDIA H100", (9, 0), 80 * 2**30)

HEALTHY = Facts(
    python="3.12.1",
    platform="Linux",
    cuquant="0.1.0",
    numpy="2.1.0",
    ml_dtypes="0.5.1",
    cupy_wheels={"cupy-cuda12x": "14.2.0"},
    nvrtc=(12, 9),
    nvrtc_archs=(75, 80, 86, 89, 90, 100, 120),
    headers=(Headers(INCLUDE, (12, 9)),),
    driver="575.51",
    driver_cuda=(12, 9),
    gpus=(H100,),
    cublas=12,
    cache=Folder(Path("/home/u/.cache/cuquant")),
    kernels=Path("/venv/cuquant/kernels"),
)


def check(name, **changes):
    """The check called `name` on a healthy installation with these changes."""
    return {c.name: c for c in examine(replace(HEALTHY, **changes))}[name]
