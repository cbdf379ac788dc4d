// What happens to a sum of products before it is stored: bias, activation and residual in float32, then
// one rounding to the type of the output. All of it is told at run time: one kernel serves every epilogue.
#pragma once
#include "device/vector.cuh"

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
    if (activation == kGelu) return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));  // half first: x may be the largest
    if (activation == kSilu) return x / (1.0f + expf(-x));
    return x;
}

// activation(sum + bias[n]) + residual[m, n]
__device__ inline float completed(const Epilogue& e, float sum, i64 m, i64 n) {
    if (e.activation == kGated) {
        sum *= activated(kSilu, load_typed(e.residual, e.residual_type, m * e.residual_stride + n));
    } else {
        if (e.bias) sum += load_typed(e.bias, e.bias_type, n);
        sum = activated(e.activation, sum);
        if (e.residual) sum += load_typed(e.residual, e.residual_type, m * e.residual_stride + n);
    }
    return sum;
}
__device__ inline void finish(const Epilogue& e, float sum, i64 m, i64 n) {
    sum = completed(e, sum, m, n);
    store_typed(e.out, e.out_type, m * e.out_stride + n * e.out_column, sum);
}

// Elements first .. first + 3 of an array, of which there are `count`.
__device__ inline float4 load_4(const void* from, int type, i64 first, int count) {
    float x[4];
    if (type == kFloat) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = i < count ? static_cast<const float*>(from)[first + i] : 0.0f;
    } else {
        u32 bits[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) bits[i] = i < count ? static_cast<const u16*>(from)[first + i] : 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = type == kHalf ? float_of_half(bits[i]) : float_of(bits[i] << 16);
    }
    return make_float4(x[0], x[1], x[2], x[3]);
}

template <int kActivation>
__device__ void activate_4(float4& y) {
    y = make_float4(activated(kActivation, y.x), activated(kActivation, y.y), activated(kActivation, y.z), activated(kActivation, y.w));
}
__device__ inline void add_4(float4& y, const float4& x) { y.x += x.x; y.y += x.y; y.z += x.z; y.w += x.w; }

// Whether each four columns of the output are aligned together.
__device__ inline bool has_fours(const Epilogue& e, i64 N) {
    return e.out_column == 1 && !((e.out_stride | N) & 3) && !(reinterpret_cast<u64>(e.out) & (e.out_type == kFloat ? 15 : 7));
}
// Whether sums are stored as they are.
__device__ inline bool is_plain(const Epilogue& e) { return e.activation == kNone && !e.bias && !e.residual; }

// Four results of a type of 16 bits.
__device__ inline uint2 pairs_of(const float4& y, int type) {
    const bool half = type == kHalf;
    return make_uint2(half ? halves_of(y.x, y.y) : pair_of<Bfloat16>(y.x, y.y), half ? halves_of(y.z, y.w) : pair_of<Bfloat16>(y.z, y.w));
}

// Four neighbouring columns of row m from n on, if has_fours.
__device__ inline void store_4(const Epilogue& e, const float4& y, i64 m, i64 n) {
    const i64 at = m * e.out_stride + n;
    if (e.out_type == kFloat) {
        *reinterpret_cast<float4*>(static_cast<float*>(e.out) + at) = y;
    } else {
        *reinterpret_cast<uint2*>(static_cast<u16*>(e.out) + at) = pairs_of(y, e.out_type);
    }
}

// What `completed` is, of four columns n .. n + 3, of which `count` are below N; n is a multiple of 4.
__device__ inline float4 completed_4(const Epilogue& e, float4 y, i64 m, i64 n, int count) {
    if (e.activation == kGated) {
        float4 gate = load_4(e.residual, e.residual_type, m * e.residual_stride + n, count);
        activate_4<kSilu>(gate);
        y = make_float4(gate.x * y.x, gate.y * y.y, gate.z * y.z, gate.w * y.w);
    } else {
        if (e.bias) add_4(y, load_4(e.bias, e.bias_type, n, count));
        if (e.activation == kRelu) activate_4<kRelu>(y);
        if (e.activation == kGelu) activate_4<kGelu>(y);
        if (e.activation == kSilu) activate_4<kSilu>(y);
        if (e.residual) add_4(y, load_4(e.residual, e.residual_type, m * e.residual_stride + n, count));
    }
    return y;
}
// And stored. `fours`: has_fours.
__device__ inline void finish_4(const Epilogue& e, float4 y, i64 m, i64 n, i64 N, bool fours) {
    const int count = static_cast<int>(min(N - n, static_cast<i64>(4)));
    y = completed_4(e, y, m, n, count);
    if (fours) {
        store_4(e, y, m, n);
    } else {
        const float own[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i < count) store_typed(e.out, e.out_type, m * e.out_stride + (n + i) * e.out_column, own[i]);
    }
}

}  // namespace cuquant
