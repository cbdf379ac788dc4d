// Decoded weights on their way to a plain matrix: rounded once, to a type that is told at run time.
#pragma once
#include "format/chunk.cuh"
#include "matmul/epilogue.cuh"

namespace cuquant {

// The largest number of a Type.
__device__ inline float top_of(int type) {
    return type == kFloat ? Element<float>::top : type == kHalf ? Element<Half>::top : Element<Bfloat16>::top;
}

// 8 values times `unit`, a power of two, to elements at .. at + 7 of an array of a Type; they start on 16 bytes.
// What is finite stays so; kFits: it does anyway.
template <bool kFits = false>
__device__ inline void store_rounded(void* to, int type, i64 at, const float* x, float unit) {
    const float top = top_of(type);
    float y[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        y[i] = __fmul_rn(x[i], unit);
        if (!kFits && is_finite(x[i]) && fabsf(y[i]) > top) y[i] = copysignf(top, x[i]);
    }
    if (type == kFloat) {
        float* own = static_cast<float*>(to) + at;
        store16(own, words_of(y));
        store16(own + 4, words_of(y + 4));
        return;
    }
    u32 words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = type == kHalf ? halves_of(y[2 * j], y[2 * j + 1]) : pair_of<Bfloat16>(y[2 * j], y[2 * j + 1]);
    store16(static_cast<u16*>(to) + at, make_uint4(words[0], words[1], words[2], words[3]));
}

}  // namespace cuquant
