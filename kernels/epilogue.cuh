// What happens to a sum of products before it is stored: bias, activation and residual in float32, then
// one rounding to the type of the output. All of it is told at run time: one kernel serves every epilogue.
#pragma once
#include "vector.cuh"

namespace cuquant {

enum Type { kFloat = 0, kHalf = 1, kBfloat16 = 2 };  // of an array that is told at run time
// kGated: silu(residual) * sum, the second half of a gated unit.
enum Activation { kNone = 0, kRelu = 1, kGelu = 2, kSilu = 3, kGated = 4 };

struct Epilogue {
    void* out;
    const void* bias;      // [N] or null
    const void* residual;  // [M, N] or null; its columns follow each other
    i64 out_stride, out_column, residual_stride;  // in elements: from row to row, and from column to column
    int out_type, bias_type, residual_type, activation;
};

// Element `i` of an array of a Type.
__device__ inline float load_typed(const void* from, int type, i64 i) {
    if (type == kFloat) return static_cast<const float*>(from)[i];
    const u32 bits = static_cast<const u16*>(from)[i];
    return type == kHalf ? float_of_half(bits) : float_of(bits << 16);
}

// The same rounded to nearest even; what is too large becomes infinite.
__device__ inline void store_typed(void* to, int type, i64 i, float x) {
    if (type == kFloat) static_cast<float*>(to)[i] = x;
    else static_cast<u16*>(to)[i] = static_cast<u16>(type == kHalf ? halves_of(x, 0.0f) & 0xFFFFu : bfloat16_of(x));
}

// relu, exact gelu or silu; NaN stays.
__device__ inline float activated(int activation, float x) {
    if (activation == kRelu) return x < 0.0f ? 0.0f : x;
    if (activation == kGelu) return x * (1.0f + erff(x * 0.70710678118654752f)) * 0.5f;
    if (activation == kSilu) return x / (1.0f + expf(-x));
    return x;
}

// activation(sum + bias[n]) + residual[m, n]
__device__ inline float finished(const Epilogue& e, float sum, i64 m, i64 n) {
    if (e.activation == kGated) return activated(kSilu, load_typed(e.residual, e.residual_type, m * e.residual_stride + n)) * sum;
    if (e.bias) sum += load_typed(e.bias, e.bias_type, n);
    sum = activated(e.activation, sum);
    if (e.residual) sum += load_typed(e.residual, e.residual_type, m * e.residual_stride + n);
    return sum;
}

__device__ inline void finish(const Epilogue& e, float sum, i64 m, i64 n) {
    store_typed(e.out, e.out_type, m * e.out_stride + n * e.out_column, finished(e, sum, m, n));
}

// Four neighbouring columns n .. n + 3, those below N; n is a multiple of 4.
__device__ inline void finish_4(const Epilogue& e, const float (&sums)[4], i64 m, i64 n, i64 N) {
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = n + i < N ? finished(e, sums[i], m, n + i) : 0.0f;
    const i64 at = m * e.out_stride + n * e.out_column;
    const bool whole = e.out_column == 1 && n + 4 <= N;
    if (whole && e.out_type != kFloat && !((reinterpret_cast<u64>(e.out) | static_cast<u64>(at) * 2) & 7)) {
        const bool half = e.out_type == kHalf;
        *reinterpret_cast<uint2*>(static_cast<u16*>(e.out) + at) =
            make_uint2(half ? halves_of(y[0], y[1]) : pair_of<Bfloat16>(y[0], y[1]), half ? halves_of(y[2], y[3]) : pair_of<Bfloat16>(y[2], y[3]));
    } else if (whole && e.out_type == kFloat && !((reinterpret_cast<u64>(e.out) | static_cast<u64>(at) * 4) & 15)) {
        *reinterpret_cast<float4*>(static_cast<float*>(e.out) + at) = make_float4(y[0], y[1], y[2], y[3]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (n + i < N) store_typed(e.out, e.out_type, at + i * e.out_column, y[i]);
    }
}

}  // namespace cuquant
