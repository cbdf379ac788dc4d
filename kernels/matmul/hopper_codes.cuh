// Products of codes of both sides in matmul_hopper: how far the tensor cores' own sums go, and what scales do to them.
//
// Hopper's sums of e4m3 keep about 14 bits, and lose them where many are added: they are added to float32 sums before
// that, those of a `segment`. Where scales of either side change along K that is where they meet them.
#pragma once
#include "device/wgmma.cuh"
#include "layout/packed_weight.cuh"
#include "matmul/coded.cuh"

namespace cuquant {

// Of x, which matmul/code_rows.cu makes: [groups, pitch], a float for each row of x; and its codes. Null but for codes.
struct TokenScales {
    const float* scale;
    i64 pitch;
    int groups, units;  // along K; units of a group, 0 where a unit has several or a row is one
    const u8* codes;    // [rows, stride]
    i64 stride, rows;
};

// What Tile says of codes, and other tiles do not have:
//   x_fine    groups of x's scales in a unit; 0: a row of x is one group, whose scale meets whole sums
//   segment   units whose products are added up by the tensor cores alone; 0: all
//   folded    operands have their share of the weight's scales: see hopper_fold.cuh
template <class Tile, bool kCodes>
struct Pace {
    static constexpr int x_fine = 0, segment = 0;
    static constexpr bool folded = false;
};
template <class Tile>
struct Pace<Tile, true> {
    static constexpr int x_fine = Tile::x_fine, segment = Tile::segment;
    static constexpr bool folded = Tile::folded;
};

// sum += part * scale of the lane's two rows * x's scales of the tokens, which lie at a shared address where kOfX: on
// 8 bytes if kEven.
template <int kTokens, bool kOfRows, bool kOfX, bool kEven, class Sum>
__device__ void add_scaled(float (&sum)[kTokens / 2], const Sum (&part)[kTokens / 2], const float (&of_rows)[2],
                           u32 of_x, int t) {
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
        float x[2];
        if constexpr (kOfX) {
            const u32 at = of_x + (8 * j + 2 * t) * 4;
            if constexpr (kEven) {
                const uint2 both = load8_shared(at);
                x[0] = float_of(both.x); x[1] = float_of(both.y);
            } else {
                x[0] = float_of(load4_shared(at)); x[1] = float_of(load4_shared(at + 4));
            }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int i = 4 * j + e;
            const float own = static_cast<float>(part[i]);
            if constexpr (kOfRows && kOfX) sum[i] = __fmaf_rn(own * x[e % 2], of_rows[e / 2], sum[i]);
            else if constexpr (kOfRows) sum[i] = __fmaf_rn(own, of_rows[e / 2], sum[i]);
            else if constexpr (kOfX) sum[i] = __fmaf_rn(own, x[e % 2], sum[i]);
            else sum[i] += own;
        }
    }
}

// The scales that whole sums meet: x's of `tokens` from `first` on, and then the rows'. `worth`: of operands.
template <int kTokens, bool kOfX>
__device__ void multiply_whole(float (&sum)[kTokens / 2], float worth, const float (&of_rows)[2], const float* of_x,
                               int t) {
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
        float x[2];
        if constexpr (kOfX) { x[0] = of_x[8 * j + 2 * t]; x[1] = of_x[8 * j + 2 * t + 1]; }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float own = sum[4 * j + e] * worth;
            if constexpr (kOfX) sum[4 * j + e] = scaled(own, x[e % 2], of_rows[e / 2]);
            else sum[4 * j + e] = own * of_rows[e / 2];
        }
    }
}

}  // namespace cuquant
