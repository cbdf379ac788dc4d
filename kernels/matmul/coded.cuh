// A side of a product whose two sides are codes, a byte each: its rows run along the contraction. A number is
// (code - zero point) * scale.
#pragma once
#include "device/vector.cuh"
#include "format/codecs.cuh"

namespace cuquant {

// How a scale is stored.
enum ScaleType { kScaleFloat = 0, kScaleHalf = 1, kScaleBfloat16 = 2, kScaleE8m0 = 3, kScaleE4m3 = 4 };

// Whether a number has all its bits: it is not too large for float32, nor so small that it has fewer, or 0.
__device__ inline bool is_whole(float x) { return fabsf(x) >= float_of(0x00800000u) && fabsf(x) < float_of(0x7F800000u); }

// sum * first * second, which float32 may have where it does not have sum * first.
__device__ inline float scaled(float sum, float first, float second) {
    const float one = __fmul_rn(sum, first);
    return is_whole(one) || sum == 0.0f ? __fmul_rn(one, second) : __fmul_rn(sum, __fmul_rn(first, second));
}

// total + sum * first * second, where it may not have first * second.
__device__ inline float plus_scaled(float total, float sum, float first, float second) {
    const float both = __fmul_rn(first, second);
    return is_whole(both) ? __fmaf_rn(sum, both, total) : __fmaf_rn(__fmul_rn(sum, first), second, total);
}

// The scales of a side, one for each block of `tall` rows and `wide` columns of a matrix.
struct Scaling {
    const void* scale;    // [matrices, ceil(rows / tall), across]; null: codes are worth themselves
    const float* global;  // [1], which each is multiplied by; or null
    i64 tall, wide;       // as many as there are rows, or columns, or more: one block holds them all
    i64 across;           // blocks beside each other: ceil(depth / wide)
    i64 matrix;           // scales of a matrix; 0: all matrices have the same
    int type;             // a ScaleType

    // Where the scale of a row of a matrix lies, of the first block along K; those of the others follow it.
    __device__ i64 place(i64 matrix_index, i64 row) const { return matrix_index * matrix + (tall == 1 ? row : row / tall) * across; }

    __device__ float at(i64 place) const {
        if (!scale) return 1.0f;
        float own;
        if (type == kScaleFloat) {
            own = static_cast<const float*>(scale)[place];
        } else if (type == kScaleHalf || type == kScaleBfloat16) {
            const u32 bits = static_cast<const u16*>(scale)[place];
            own = type == kScaleHalf ? float_of_half(bits) : float_of(bits << 16);
        } else {
            const u32 byte = static_cast<const u8*>(scale)[place];
            if (type == kScaleE8m0) own = float_of(byte == 255 ? 0x7FC00000u : byte ? byte << 23 : 0x00400000u);
            else own = Minifloat<4, 3, Specials::OneNan>::decode(byte);
        }
        return global ? kept_finite(__fmul_rn(own, *global), own, *global) : own;
    }
};

struct Coded {
    const u8* codes;       // [matrices * rows, stride], which starts on 16 bytes; what lies behind a row's end is not 0
    i64 stride;            // bytes from row to row, a multiple of 16
    i64 rows;              // of a matrix
    Scaling scaling;
    const u8* zero_point;  // one for each scale, signed where codes are, or null: 0
    const int* sums;       // [matrices * rows, segments]: the codes' of each segment of K; or null

    static constexpr bool is_patches = false;

    // Kernels keep where rows begin themselves.
    struct Start {};
    struct Tap {};
    __device__ Start start(i64) const { return {}; }
    __device__ Tap tap(i64) const { return {}; }
    __device__ const u8* source(const Start&, const Tap&) const { return nullptr; }
    // Where row `row` of the output begins, in elements.
    __device__ i64 out_row(i64 row, i64 out_stride) const { return row * out_stride; }
};

}  // namespace cuquant
