// Decoded weights on their way to a plain matrix: rounded once, to a type that is told at run time.
#pragma once
#include "format/chunk.cuh"
#include "matmul/epilogue.cuh"

namespace cuquant {

// What values become: they are multiplied by `unit`, a power of two, and rounded to a Type.
struct Rounded {
    int type;
    float unit, limit;  // what is finite and larger becomes the Type's largest number

    __device__ Rounded(int type, const float* unit_at) : type(type), unit(unit_at ? *unit_at : 1.0f) {
        const float top = type == kFloat ? Element<float>::top : type == kHalf ? Element<Half>::top : Element<Bfloat16>::top;
        limit = __fdiv_rn(top, unit);  // exact
    }
};

// 8 values to elements at .. at + 7 of an array of the Type; they start on 16 bytes.
__device__ inline void store_rounded(void* to, const Rounded& rounded, i64 at, const float* x) {
    float y[kChunk];
    bool far = false;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) far |= fabsf(y[i] = x[i]) > rounded.limit;
    if (far) {  // seldom
#pragma unroll
        for (int i = 0; i < kChunk; ++i)
            if (is_finite(y[i]) && fabsf(y[i]) > rounded.limit) y[i] = copysignf(rounded.limit, y[i]);
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) y[i] = __fmul_rn(y[i], rounded.unit);
    if (rounded.type == kFloat) {
        float* own = static_cast<float*>(to) + at;
        store16(own, words_of(y));
        store16(own + 4, words_of(y + 4));
        return;
    }
    u32 words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = rounded.type == kHalf ? halves_of(y[2 * j], y[2 * j + 1]) : pair_of<Bfloat16>(y[2 * j], y[2 * j + 1]);
    store16(static_cast<u16*>(to) + at, make_uint4(words[0], words[1], words[2], words[3]));
}

}  // namespace cuquant
