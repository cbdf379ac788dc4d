"""Small kernels, and as much of CuPy as loading them asks for, for the tests of compiling."""

from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

from cuquant.gpu.jit import Program

FORMAT = """#pragma once
namespace cuquant {
using i64 = long long;
}
"""
SCALE = """#pragma once
#include "format.cuh"

namespace cuquant {
template <class Format> __device__ int scaled(int x) { return x * Format::factor; }
}
"""
KERNEL = """// y = factor * x + k
#include "format.cuh"
#include "deep/scale.cuh"

namespace cuquant {
template <class Format, int k>
__global__ void __launch_bounds__(128) affine(const int* x, int* y, i64 n, bool reverse) {
    __shared__ int cell[32];
    cell[threadIdx.x % 32] = x[threadIdx.x];
    __syncthreads();
    y[n] = scaled<Format>(cell[reverse ? 0 : k]) + k;
}
}
"""
ADDING = """// y[i] = x[i] + sum of the struct + s, through dynamic shared memory
#include "format.cuh"

namespace cuquant {
struct Five { int values[5]; };
__global__ void adding(const float* x, float* y, Five five, float s, i64 n) {
    extern __shared__ float cells[];
    int sum = 0;
    for (int value : five.values) sum += value;
    cells[n + threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = cells[n + threadIdx.x] + static_cast<float>(sum) + s;
}
}
"""
SPILLING = """
namespace cuquant {
template <int n> __global__ void spilling(float* p, const int* at) {
    float a[n];
    for (int i = 0; i < n; ++i) a[i] = p[i];
    for (int i = 0; i < n; ++i) a[at[i]] += a[at[i + 1]];
    for (int i = 0; i < n; ++i) p[i] = a[i];
}
}
"""
FACTS = "struct twice { static constexpr int factor = 2; };"
ADD = Program("adding.cu", "adding")
AFFINE = Program("affine.cu", "affine", ("formats::twice", 3), FACTS)


def files(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.exists() else []


def failing(error):
    def fail(*_, **__):
        raise error

    return fail


class FakeError(RuntimeError):
    """CuPy's CUDARuntimeError."""


class FakeCupy:
    """As much of CuPy as loading asks for, with one GPU of compute capability 9.0."""

    def __init__(self, capturing=False, error=False):
        self.modules, self.calls, self.error = [], [], error
        runtime = SimpleNamespace(
            CUDARuntimeError=FakeError,
            streamIsCapturing=self.named("capturing", capturing),
            getDevice=self.named("device", 0),
            deviceGetAttribute=lambda number, device: self.checked({75: 9, 76: 0}[number]),
            free=self.named("free", None),
        )
        self.__version__, self.__file__ = "14", __file__
        self.cuda = SimpleNamespace(
            runtime=runtime, Device=self.device, function=SimpleNamespace(Module=self.module)
        )
        with suppress(ImportError):
            import cupy

            self.cuda.nvrtc = cupy.cuda.nvrtc

    def checked(self, value):
        if self.error:
            raise FakeError("insufficient driver")
        return value

    def named(self, name, value):
        def call(*arguments):
            self.calls.append((name, *arguments))
            if isinstance(value, Exception):
                raise value
            return self.checked(value)

        return call

    def device(self, index):
        return nullcontext(self.calls.append(("use", index)))

    def module(self):
        made = SimpleNamespace(
            load=lambda code: self.modules.append(code),
            get_function=lambda name: SimpleNamespace(ptr=77, name=name),
        )
        return made
