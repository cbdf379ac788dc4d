// The power of two that brings a weight into float16's range, for the vendor's GEMM, whose factor is one number for all rows.
// scale_sizes: each block finds the largest of its scales. unit_of_sizes: one warp takes the largest of all.
#include "matmul/float16_range.cuh"

namespace cuquant {

enum ScaleType { kFloatScale = 0, kHalfScale = 1, kExponentScale = 2, kBfloat16Scale = 3, kHalfExponentScale = 4 };

// `count` scales that begin `step` bytes apart, on 2 bytes or on their own size; `reach`: the largest number that is multiplied by one.
struct Scales {
    const u8* first;
    i64 count, step;
    int type;
    float reach;
};

__device__ inline float scale_of(const Scales& scales, i64 i) {
    const u8* const at = scales.first + i * scales.step;
    if (scales.type == kFloatScale) return *reinterpret_cast<const float*>(at);
    if (scales.type == kHalfScale) return float_of_half(*reinterpret_cast<const u16*>(at));
    if (scales.type == kBfloat16Scale) return float_of(static_cast<u32>(*reinterpret_cast<const u16*>(at)) << 16);
    if (scales.type == kHalfExponentScale) return float_of(max(static_cast<u32>(*at), 1u) - 1u << 23);
    return *at == 255 ? float_of(0x7FC00000u) : float_of(max(static_cast<u32>(*at) << 23, 0x00400000u));
}

__device__ inline float largest_of(const Scales& scales, i64 step) {
    float largest = 0.0f;
#pragma unroll 4
    for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < scales.count; i += step) largest = fmaxf(largest, size_of(scale_of(scales, i), scales.reach));
    return largest;
}

// sizes: [blocks]. A weight is at most a number times a scale, and one of `added`.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) scale_sizes(const __grid_constant__ Scales scales, const __grid_constant__ Scales added, float* __restrict__ sizes) {
    __shared__ float of_warp[2][kThreads / 32];
    const i64 step = static_cast<i64>(gridDim.x) * kThreads;
    const float own = warp_max(largest_of(scales, step)), other = warp_max(largest_of(added, step));
    if (threadIdx.x % 32 == 0) { of_warp[0][threadIdx.x / 32] = own; of_warp[1][threadIdx.x / 32] = other; }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    const bool has = threadIdx.x < kThreads / 32;
    const float scale = warp_max(has ? of_warp[0][threadIdx.x % (kThreads / 32)] : 0.0f), sum = warp_max(has ? of_warp[1][threadIdx.x % (kThreads / 32)] : 0.0f);
    if (threadIdx.x == 0) sizes[blockIdx.x] = fminf(scale + sum, kFloatMax);
}

// units: the power of two, its inverse, and 0, as a GEMM's factors.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) unit_of_sizes(const float* __restrict__ sizes, int count, float reach, float* __restrict__ units) {
    static_assert(kThreads == 32, "one warp");
    float largest = 0.0f;
    for (int i = threadIdx.x; i < count; i += 32) largest = fmaxf(largest, sizes[i]);
    const float unit = unit_for(warp_max(largest), reach);
    if (threadIdx.x == 0) { units[0] = unit; units[1] = 1.0f / unit; units[2] = 0.0f; }
}

}  // namespace cuquant
