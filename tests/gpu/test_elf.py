"""What a cubin says of its kernel, and files that are no cubins."""

from contextlib import suppress

import pytest
from planted import AFFINE

import cuquant as cq
from cuquant.gpu import elf, jit
from cuquant.gpu.jit import Program


def test_a_cubin_that_is_cut_or_changed_is_a_format_error(nvrtc, rng):
    """Bounded, and never another exception: the file may come from anywhere."""
    whole = jit.compiled(AFFINE, 90).code
    for length in range(0, len(whole) // 2, 37):
        with pytest.raises(cq.FormatError):
            elf.resources(whole[:length], "affine")
    for _ in range(300):
        data = bytearray(whole)
        for at in rng.integers(0, len(data), 8):
            data[at] = rng.integers(256)
        with suppress(cq.FormatError):
            elf.resources(bytes(data), "affine")


def test_the_wanted_kernel_is_picked(nvrtc, kernels):
    text = "namespace cuquant { __global__ void one(int* x) { *x = 1; }\n"
    (kernels / "two.cu").write_text(text + "__global__ void once(int* x) { *x = 2; } }\n")
    code = jit.compiled(Program("two.cu", "one"), 90).code
    assert elf.resources(code, "one").name == "_ZN7cuquant3oneEPi"
    assert elf.resources(code, "once").name == "_ZN7cuquant4onceEPi"
    for entry in (None, "on"):
        with pytest.raises(cq.FormatError, match="must have one kernel"):
            elf.resources(code, entry)
