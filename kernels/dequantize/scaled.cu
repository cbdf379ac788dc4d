// Integers times float32 numbers, subnormals and all; a thread a product.
#include "device/vector.cuh"

namespace cuquant {

template <int kThreads>
__global__ void __launch_bounds__(kThreads) scaled(
    const int* __restrict__ q, const float* __restrict__ factor, float* __restrict__ out, i64 count) {
    const i64 i = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (i < count) out[i] = __fmul_rn(static_cast<float>(q[i]), factor[i]);
}

}  // namespace cuquant
