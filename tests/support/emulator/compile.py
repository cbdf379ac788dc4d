"""Programs to shared libraries: one C++ file for many of them, by g++, kept by content.

Beside the libraries of _cache_folder() lies a note for each program: in which of them it is, and
where. So a program is compiled once, whatever others it was wanted with.
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cuquant.gpu.jit import Program, kernel_folder

HERE = Path(__file__).parent
FLAGS = (
    "-std=c++17",
    "-w",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-fno-extern-tls-init",
    "-U_FORTIFY_SOURCE",
)
# -O1 takes longer to compile than it saves.
KERNELS = ("-Og", "-fsanitize=bounds,shift-exponent,alignment")
RUNTIME = ("-O2",)  # of what is compiled once, and linked to all libraries
HEAD = '#include "cuda.h"\n#include "launch.h"\n#include "format.cuh"\n'  # of every C++ file
MOST = 32  # programs in one C++ file
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_STRUCT = re.compile(r"^(?=struct )", re.MULTILINE)

Function = Callable[..., bytes | None]  # run_0(launch, arguments, their count, fault)
_functions: dict[tuple[Program, tuple[Path, ...]], Function] = {}
_lock = threading.Lock()


def compiler() -> str | None:
    """The path of g++, or None."""
    return shutil.which("g++")


def functions(programs: Iterable[Program], folders: Sequence[Path] = ()) -> list[Function]:
    """What runs each program, compiled where that has not happened; see `start` in launch.h.

    Programs of one kernel file are compiled together, two files at a time. Kernel files are looked
    for in `folders`, then in cuquant's own.
    """
    programs, places = list(programs), (*folders, kernel_folder())
    with _lock:
        missing = [p for p in dict.fromkeys(programs) if (p, places) not in _functions]
        if missing:
            _load(missing, places)
        return [_functions[program, places] for program in programs]


def _load(programs: list[Program], places: tuple[Path, ...]) -> None:
    """Into _functions, compiled where there is no note of them."""
    digest = _digester([HERE, *places])
    notes = {p: _cache_folder() / f"{digest(source_of([p]))}.at" for p in programs}
    groups = _groups([p for p in programs if not notes[p].exists()])
    for group, library in zip(groups, _libraries(groups, places, digest), strict=True):
        for index, program in enumerate(group):
            _write(notes[program], f"{library.name} {index}")
    for program, note in notes.items():
        name, index = note.read_text().split()
        function = getattr(_loaded(_cache_folder() / name), f"run_{index}")
        function.restype = ctypes.c_char_p
        _functions[program, places] = function


_loaded = functools.cache(ctypes.CDLL)


def _write(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as work:
        work.write(text)
    os.replace(work.name, path)


def _groups(programs: list[Program]) -> list[list[Program]]:
    by_file: dict[str, list[Program]] = {}
    for program in programs:
        by_file.setdefault(program.file, []).append(program)
    groups = []
    for members in by_file.values():
        size = min(MOST, -(-len(members) // 2)) if len(members) > 4 else len(members)
        groups += [members[i : i + size] for i in range(0, len(members), size)]
    return groups


def source_of(programs: Sequence[Program]) -> str:
    """The C++ of some programs: structs of facts that they share are there once."""
    structs = (part for program in programs for part in _STRUCT.split(program.facts))
    facts = dict.fromkeys(part.rstrip() for part in structs if part)
    files = dict.fromkeys(program.file for program in programs)
    lines = [HEAD, "namespace cuquant { namespace formats {", *facts, "} }"]
    lines += [f'#include "{file}"' for file in files]
    lines.append("namespace cuquant {")
    for index, program in enumerate(programs):
        lines += [
            f'extern "C" __attribute__((visibility("default"))) const char* run_{index}(',
            "    const emulator::Launch* launch, const emulator::Argument* given, int count,",
            "    void** fault)",
            f"{{ return emulator::start({program.name}, *launch, given, count, fault); }}",
        ]
    lines.append("}")
    return "\n".join(lines) + "\n"


def _libraries(
    groups: list[list[Program]], places: Sequence[Path], digest: Callable[[str], str]
) -> list[Path]:
    """A library for each group, two compiled at a time."""
    folders = [HERE, *places]
    include = [f"-I{folder}" for folder in folders]
    kept = [_cache_folder() / f"{digest(source_of(group))}.so" for group in groups]
    missing = [(group, path) for group, path in zip(groups, kept, strict=True) if not path.exists()]
    if missing:
        header = _header(digest, include)  # its object file beside it
    for start in range(0, len(missing), 2):
        with ExitStack() as stack:
            running = [
                stack.enter_context(_compiling(group, path, header, include))
                for group, path in sorted(missing[start : start + 2], key=lambda pair: pair[1])
            ]
            for finish in running:
                finish()
    return kept


def _header(digest: Callable[[str], str], include: Sequence[str]) -> Path:
    """HEAD in a file; beside it its precompiled form, which g++ takes in its place, and what it
    declares (runtime.cpp) as an object file."""
    header = _cache_folder() / f"{digest(HEAD)}.h"
    with _alone(header) as work:
        if not header.exists():
            (work / "head.h").write_text(HEAD, encoding="utf-8")
            words = [*KERNELS, "-x", "c++-header", "head.h", "-o", "head.gch"]
            _wait(_start(*include, *words, folder=work), work)
            words = [*RUNTIME, "-c", str(HERE / "runtime.cpp"), "-o", "runtime.o"]
            _wait(_start(*include, *words, folder=work), work)
            os.replace(work / "runtime.o", header.with_suffix(".o"))
            os.replace(work / "head.gch", header.with_suffix(".h.gch"))
            os.replace(work / "head.h", header)
    return header


@contextmanager
def _compiling(
    group: list[Program], library: Path, header: Path, include: Sequence[str]
) -> Iterator[Callable[[], None]]:
    """g++ at work on a library, and what waits for it; nothing where another process made it."""
    with _alone(library) as work:
        if library.exists():
            yield lambda: None
            return
        (work / "programs.cpp").write_text(source_of(group), encoding="utf-8")
        words = ["-include", str(header), "-shared", "programs.cpp", str(header.with_suffix(".o"))]
        process = _start(*KERNELS, *include, *words, "-o", "programs.so", folder=work)

        def finish() -> None:
            _wait(process, work)
            os.replace(work / "programs.so", library)

        try:
            yield finish
        finally:
            process.kill()
            process.wait()


@contextmanager
def _alone(kept: Path) -> Iterator[Path]:
    """A folder to make a file of the cache in, while other processes that want it wait."""
    with open(kept.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with tempfile.TemporaryDirectory(dir=kept.parent) as work:
            yield Path(work)


def _start(*words: str, folder: Path) -> "subprocess.Popen[bytes]":
    with open(folder / "errors", "wb") as errors:
        return subprocess.Popen(["g++", *FLAGS, *words], cwd=folder, stderr=errors)


def _wait(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    if process.wait():
        text = (folder / "errors").read_text(errors="replace")
        raise RuntimeError(f"g++ found errors in the kernels:\n{text[:8000]}")


def _digester(folders: Sequence[Path]) -> Callable[[str], str]:
    """Of all that decides what a source becomes: its text and what it includes, flags, compiler."""

    @functools.cache
    def included(names: tuple[str, ...]) -> bytes:
        digest, pending, seen = hashlib.sha256(), list(names), set()
        while pending:
            name = pending.pop()
            found = next((f / name for f in folders if (f / name).is_file()), None)
            if found and found not in seen:
                seen.add(found)
                text = found.read_text(encoding="utf-8")
                digest.update(text.encode())
                pending += _INCLUDE.findall(text)
        for path in (HERE / "cub/block/block_reduce.cuh", *sorted(HERE.glob("*.cpp"))):
            digest.update(path.read_bytes())
        return digest.digest()

    def digest(source: str) -> str:
        own = hashlib.sha256(repr((FLAGS, KERNELS, RUNTIME, _version())).encode() + source.encode())
        own.update(included(tuple(_INCLUDE.findall(source))))
        return own.hexdigest()[:32]

    return digest


@functools.cache
def _version() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True).stdout


@functools.cache
def _cache_folder() -> Path:
    """A folder of this user's alone, for all processes; a fresh one where that is not to be had."""
    folder = Path(tempfile.gettempdir()) / f"cuquant-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
        return Path(tempfile.mkdtemp(prefix="cuquant-emulator-"))
    return folder
