"""The GPU suite's kernels, compiled by the NVRTC that is here:
`PYTHONPATH=tests/support python tests/compile/gpu_cubins.py FOLDER`.

With CUQUANT_CUBINS naming the folder, the suite runs on a machine with another NVRTC, or with none.
"""

import argparse
import sys
from pathlib import Path

import kernel_cases as cases
from emulator import Recorder
from on_emulator import OnEmulator
from oracle import DTYPES

import cuquant as cq
from cuquant import ahead
from cuquant.gpu import jit
from cuquant.ops.programs import PROGRAMS
from cuquant.ops.quantize.finite import first_nonfinite

VERSION = "nvrtc.txt"  # in the folder: which NVRTC made it


def programs() -> list[jit.Program]:
    """What the matrix, and the formats' usual shapes, launch."""
    recorder = Recorder()
    run = OnEmulator(recorder)
    for case in (*cases.ALL, *cases.ONLY_ON_GPU):
        q = run.case(case)
        for dtype in DTYPES:
            run.dequantize(q, dtype)
        run.codes(q), run.packed(q)
        run.effective(q, "scale")
    for dtype in DTYPES.values():
        first_nonfinite(recorder, recorder.view(recorder.empty((2, 40), dtype)))
    usual = (
        program
        for operation in ("quantize", "dequantize")
        for name in cq.list_formats()
        for program in PROGRAMS[operation](cq.get_format(name))
    )
    return list(dict.fromkeys([*recorder.programs, *usual]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="sm_90")
    options = parser.parse_args()
    task = ahead._Task(ahead.parse_arch(options.arch), None, options.folder)
    found = programs()
    done = ahead._in_parallel(found, task, None, lambda *_: None)
    wanted = {
        f"{jit.cubin_name(p, jit.source(p), ahead.parse_arch(options.arch))}.cubin" for p in found
    }
    for stale in options.folder.glob("*.cubin"):
        if stale.name not in wanted:
            stale.unlink()
    version = ".".join(map(str, jit.nvrtc().getVersion()))
    (options.folder / VERSION).write_text(f"{version}\n", encoding="utf-8")
    nbytes = sum(path.stat().st_size for path in options.folder.iterdir())
    sys.stdout.write(f"{len(found)} kernels, {nbytes / 2**20:.1f} MB, {done}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
