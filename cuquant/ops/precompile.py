"""Compiling ahead of the first use: before a CUDA graph is captured, or for another machine."""

import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cuquant.errors import did_you_mean
from cuquant.formats import Format, get_format, list_formats
from cuquant.gpu import cubins, jit
from cuquant.interop import INPUT_DTYPES
from cuquant.ops import programs

Progress = Callable[[int, int, str], object]


class Precompiled(NamedTuple):
    """What `precompile` did: kernels compiled, kernels that were there, and seconds."""

    compiled: int
    found: int
    seconds: float


def precompile(
    *formats: str | Format,
    operations: Iterable[str] = ("quantize", "dequantize"),
    dtypes: Iterable[str] = INPUT_DTYPES,
    arch: str | int | tuple[int, int] | None = None,
    export: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    progress: bool | Progress = False,
) -> Precompiled:
    """Compile kernels ahead of their first use, several at a time.

    Parameters
    ----------
    formats
        Names, strings such as "nf4:32+dq" or Formats; all formats where none is given.
    operations
        Whose kernels.
    dtypes
        Of the arrays that are quantized, or dequantized to.
    arch
        The GPU to compile for, such as "sm_90", "90" or (9, 0); it need not be there. None is the
        current device, on which the kernels are then also loaded, ready for a CUDA graph.
    export
        A folder that gets a copy of each kernel: with CUQUANT_CUBINS naming it, another machine
        runs them without compiling anything, whatever its NVRTC.
    jobs
        How many are compiled at the same time; None is one for each processor.
    progress
        True for a line on stderr, or what is called with the number done, the number of all and
        the kernel's name.

    Raises
    ------
    ValueError
        For an unknown format, operation, dtype or arch, before anything is compiled.
    BackendUnavailable
        Without NVRTC; without a GPU where no `arch` is given.
    CompileError
        Where NVRTC rejects a kernel.

    Examples
    --------
    >>> import cuquant as cq
    >>> cq.precompile("nf4", arch="sm_90", export="kernels")  # doctest: +SKIP
    Precompiled(compiled=12, found=0, seconds=1.4)
    """
    values = [get_format(name) for name in formats or list_formats()]
    dtypes = _known("dtype", dtypes, INPUT_DTYPES)
    target = jit.device_arch() if arch is None else parse_arch(arch)
    operations = _known("operation", operations, sorted(programs.PROGRAMS))
    needed = dict.fromkeys(
        program
        for operation in operations
        for fmt in values
        for program in programs.PROGRAMS[operation](fmt, dtypes=dtypes, arch=target)
    )
    jit.nvrtc()  # that it is missing is said once, not by each thread
    device = jit.current_device() if arch is None else None
    one = _Task(target, device, None if export is None else Path(export))
    report = _to_stderr if progress is True else progress or (lambda *_: None)
    return _in_parallel(list(needed), one, jobs, report)


def _known(what: str, names: Iterable[str], known: Sequence[str]) -> tuple[str, ...]:
    """The names, refused where one is unknown."""
    chosen = (names,) if isinstance(names, str) else tuple(names)
    for name in chosen:
        if name not in known:
            near = did_you_mean(str(name), known)
            raise ValueError(
                f"{what} {name!r} is unknown{near}; known: {', '.join(known) or 'none'}"
            )
    return chosen


def parse_arch(arch: str | int | tuple[int, int]) -> int:
    """90 for "sm_90", "sm_90a", "90", "9.0", 90 and (9, 0)."""
    if isinstance(arch, tuple) and len(arch) == 2:
        arch = 10 * arch[0] + arch[1]
    found = re.fullmatch(r"(?:sm_)?(\d+)\.?(\d)[af]?", str(arch))
    if found is None:
        raise ValueError(f"arch {arch!r} is unknown; pass a compute capability such as 'sm_90'")
    return int(found[1] + found[2])


@dataclass(frozen=True)
class _Task:
    """What is done with each program."""

    arch: int
    device: int | None  # where it is loaded
    export: Path | None

    def __call__(self, program: jit.Program) -> bool:
        """Whether the program had to be compiled."""
        compiled = jit.compiled(program, self.arch)
        if self.export is not None:
            name = jit.cubin_name(program, jit.source(program), self.arch)
            self.export.mkdir(parents=True, exist_ok=True)
            cubins.write(self.export / f"{name}.cubin", name, compiled)
        if self.device is not None:
            jit.load(program, self.device)
        return compiled.fresh


def _in_parallel(
    programs: list[jit.Program],
    one: Callable[[jit.Program], bool],
    jobs: int | None,
    report: Progress,
) -> Precompiled:
    """Run `one` for each program on threads: NVRTC lets go of the interpreter's lock."""
    start = time.perf_counter()
    done = made = 0
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        futures = {pool.submit(one, program): program for program in programs}
        try:
            for future in as_completed(futures):
                made += future.result()
                done += 1
                report(done, len(programs), futures[future].name)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return Precompiled(made, done - made, time.perf_counter() - start)


def _to_stderr(done: int, total: int, name: str) -> None:
    """One line that is written over on a terminal, one for each kernel in a log."""
    line = f"{done}/{total} {name[:100]}"
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        sys.stderr.write(f"\r\x1b[K{line}{end}")
    else:
        sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
