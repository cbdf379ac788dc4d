"""The CUDA sources as one text: our headers inlined once each, the lines' true names kept.

The text is all that decides what a kernel is, so the cache needs to look at nothing else, and a
header that was edited can never leave an old kernel behind.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cuquant.errors import SOURCE, BackendUnavailable, CompileError
from cuquant.interop import INSTALL_GPU

_OURS = re.compile(r'^\s*#\s*include\s*"([^"]+)"')
_SYSTEM = re.compile(r"^\s*#\s*include\s*<", re.MULTILINE)
_PERHAPS = re.compile(r"include\s*<")  # is found ten times as fast
_ONCE = re.compile(r"^\s*#\s*pragma\s+once\b")
_HEADER_VERSION = re.compile(r"^#define\s+CUDART_VERSION\s+(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Headers:
    """A folder with cuda_fp16.h."""

    folder: Path
    cuda: tuple[int, int]  # major, minor


def kernel_folder() -> Path:
    """Where the CUDA sources are: `cuquant/kernels` in a wheel, `kernels` beside it in a checkout.

    Raises
    ------
    BackendUnavailable
        Where the installation lacks them.
    """
    package = Path(__file__).parent.parent
    for folder in (package / "kernels", package.parent / "kernels"):
        if (folder / "format.cuh").is_file():
            return folder
    raise BackendUnavailable(
        f"no CUDA sources beside {package}; reinstall: pip install --force-reinstall {SOURCE}"
    )


def flatten(folder: Path, file: str, facts: str = "") -> str:
    """format.cuh, then `facts` in namespace cuquant::formats, then `file`, as one text.

    An include of ours is replaced by the file where it first stands, and by nothing after that, so
    it must not stand in a condition. `#line` directives name the files as `kernels/quantize.cu`,
    wherever the folder is. The names of namespace cuquant are visible at the end of the text, so
    that a template argument may be written as in the sources.

    Raises
    ------
    CompileError
        Where a file does not exist, or lies outside the folder.
    """
    seen: set[str] = set()
    parts = [_inlined(folder, "format.cuh", seen, "the list of headers")]
    if facts:
        parts.append(
            f'namespace cuquant {{ namespace formats {{\n#line 1 "facts"\n{facts}\n}} }}\n'
        )
    parts.append(_inlined(folder, file, seen, "the program"))
    parts.append('#line 1 "instantiation"\nusing namespace cuquant;\n')
    return "".join(parts)


def _inlined(folder: Path, name: str, seen: set[str], asker: str) -> str:
    """The text of a file with its includes; nothing where it is in the text already."""
    if name in seen:
        return ""
    seen.add(name)
    inside = not Path(name).is_absolute() and ".." not in Path(name).parts
    path = folder / name
    if not inside or not path.is_file():
        raise CompileError(f'{asker}: "{name}" is no file of the kernel folder {folder}')
    called, parts = f"kernels/{name}", []
    at = path.stat()
    for text, included, number in _pieces(path, called, at.st_mtime_ns, at.st_size):
        parts.append(text)
        if included:
            inner = _inlined(folder, included, seen, f"{called}({number})")
            parts.append(f'{inner}#line {number + 1} "{called}"\n' if inner else "\n")
    return "".join(parts)


@lru_cache(maxsize=512)
def _pieces(path: Path, called: str, changed: int, size: int) -> list[tuple[str, str, int]]:
    """The text before each include of ours, the name it includes and its line; then the rest.

    Read once while `changed` and `size`, which the caller finds in the file's status, stay.
    """
    pieces, lines = [], [f'#line 1 "{called}"\n']
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if found := _OURS.match(line):
            pieces.append(("".join(lines), found[1], number))
            lines = []
        else:
            lines.append("\n" if _ONCE.match(line) else f"{line}\n")
    return [*pieces, ("".join(lines), "", 0)]


def needs_system_headers(text: str) -> bool:
    """Whether a text includes <...>."""
    return _PERHAPS.search(text) is not None and _SYSTEM.search(text) is not None


def cuda_headers() -> Iterator[Headers]:
    """Folders with cuda_fp16.h: those of NVIDIA's wheels, CUDA_PATH, conda and /usr/local/cuda."""
    seen: set[Path] = set()
    for folder in _include_folders():
        if not (folder / "cuda_fp16.h").is_file() or folder.resolve() in seen:
            continue
        seen.add(folder.resolve())
        file = folder / "cuda_runtime_api.h"
        if not file.is_file():
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        if found := _HEADER_VERSION.search(text):
            yield Headers(folder, cuda_version(int(found.group(1))))


def fitting_headers(version: tuple[int, int]) -> Headers:
    """CUDA's headers for an NVRTC: those of another major version do not parse.

    Raises
    ------
    BackendUnavailable
        Where there are none.
    """
    fitting = [headers for headers in cuda_headers() if headers.cuda[0] == version[0]]
    if not fitting:
        raise BackendUnavailable(
            f"no CUDA headers (cuda_fp16.h) for NVRTC {version[0]}.{version[1]}; {INSTALL_GPU}"
        )
    return min(fitting, key=lambda headers: headers.cuda != version)


def system_folders(cupy: Path, version: tuple[int, int]) -> list[Path]:
    """Where <...> is looked for: CUB, which CuPy brings in its folder, and CUDA's own headers."""
    cccl = cupy / "_core/include/cupy/_cccl"
    folders = [cccl / part for part in ("cub", "thrust", "libcudacxx")]
    return [*folders, fitting_headers(version).folder]


def cuda_version(number: int) -> tuple[int, int]:
    """CUDA's own way to write a version: 12090 is 12.9."""
    return number // 1000, number % 1000 // 10


def _include_folders() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")  # a namespace: nothing of it is run
    folders: list[Path] = []
    for root in (spec.submodule_search_locations or ()) if spec else ():
        folders += sorted(Path(root).glob("cu*/include"))
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        if os.environ.get(variable):
            folders.append(Path(os.environ[variable], "include"))
    folders += sorted(Path(sys.prefix, "targets").glob("*/include"))
    return [*folders, Path("/usr/local/cuda/include")]
