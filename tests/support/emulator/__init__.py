"""Kernels on the CPU: CUDA C++ compiled by g++, every CUDA thread a fiber.

The reference on NumPy says what an operation means, and this runs the kernels that a GPU gets, so
both can be compared where there is no GPU. Use it as any other backend::

    from emulator import Emulator, Recorder

    emulator = Emulator()
    x = emulator.upload(host)                      # guarded, read-only for kernels
    out = emulator.empty(shape, dtype)             # guarded, filled with 0xEE
    emulator.launch(launch, emulator.pointer(x), emulator.pointer(out), count)

A program that was not built is compiled alone, in about a second. Many are compiled together,
in parallel and once for all processes, by running the orchestration twice::

    recorder = Recorder()                          # launches nothing
    for case in cases: orchestrate(recorder, case)
    emulator.build(recorder.programs)

What a launch reports, as a KernelError with the source line where there is one:

- reads and writes up to 1 MB outside an array, except those less than 256 bytes after its end or
  less than 4096 before its start;
- writes there, to uploaded arrays, and after the dynamic shared memory;
- misaligned accesses, shifts by 32 or more, indices outside arrays of known size;
- barriers and shuffles that not everybody reaches, that name threads which have exited, or whose
  sources do not take part;
- barriers of shared memory that were not initialised or that too many threads arrive at, tensor
  maps that are none, reads of a cluster's block that has gone;
- parameters of another number, kind or range than the kernel's.

Two neighbouring blocks may be a cluster, and no more. Asynchronous copies and products come as late
as a GPU may do them, or, in every other block, at once.

Shared memory starts with NaN bytes in every block, and the threads take turns in another order
from block to block (`order=`), so that a missing barrier shows in the results. Dynamic shared
memory is `extern __shared__ __align__(16) u8 dynamic_shared[];` in namespace cuquant, or `shared`.
NaN that arithmetic makes has x86's sign bit here and none on a GPU: compare NaN as NaN.
"""

from emulator.backend import ORDERS, Emulator, KernelError, Recorder
from emulator.compile import compiler, source_of

__all__ = ["ORDERS", "Emulator", "KernelError", "Recorder", "compiler", "source_of"]
