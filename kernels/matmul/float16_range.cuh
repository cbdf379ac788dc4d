// The power of two that brings weights into float16's range, from the scales as they are when a product runs.
#pragma once
#include "device/vector.cuh"

namespace cuquant {

// A scale's part in the largest weight: nothing where it is not finite, since no power of two helps what is not.
__device__ inline float size_of(float scale, float reach) {
    const float size = fabsf(scale);
    return size <= kFloatMax ? fminf(size * reach, kFloatMax) : 0.0f;
}

// The largest of a warp's, in every lane.
__device__ inline float warp_max(float x) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
    return x;
}

__device__ inline int floor_log2(float x) { return static_cast<int>(bits_of(x) >> 23 & 0xFFu) - 127; }  // -127 below 2^-126

// Weights of at most `largest` times this are below 2^14, a quarter of float16's largest number, and their scales below 2^15:
// where codes stand for numbers of at most `reach`, less than 1, scales are larger than weights. Its inverse is finite.
__device__ inline float unit_for(float largest, float reach) {
    const int exponent = 13 - floor_log2(largest) + min(floor_log2(reach), 0);
    return float_of(static_cast<u32>(max(min(exponent, 126), -126) + 127) << 23);
}

}  // namespace cuquant
