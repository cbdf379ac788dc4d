// ONNX's DynamicQuantizeLinear: x / scale, rounded, plus the zero point, saturated to uint8. It divides,
// where all formats multiply by the reciprocal. A thread an element.
#include "format/chunk.cuh"

namespace cuquant {

template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads) quotients(
    const T* __restrict__ x, const float* __restrict__ scale, const u8* __restrict__ zero_point, u8* __restrict__ codes, i64 count) {
    const i64 i = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= count) return;
    const bool found = usable(__frcp_rn(*scale));  // not so of zeros, and of what is not finite
    const float q = found ? rintf(__fdiv_rn(Element<T>::load(x + i), *scale)) + static_cast<float>(*zero_point) : 0.0f;
    codes[i] = static_cast<u8>(fminf(fmaxf(q, 0.0f), 255.0f));
}

}  // namespace cuquant
