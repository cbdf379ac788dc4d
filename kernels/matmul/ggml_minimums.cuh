// What minimums of ggml's blocks, as they lie, add to products: they meet the sums of those columns of x that share one. Tensor
// cores make the sums, and multiply them in two parts of 11 bits (tf32); minimums have no more.
#pragma once
#include "matmul/ggml_codes.cuh"

namespace cuquant {

template <class Block, class T>
struct Minimums {
    using Layout = typename Block::Layout;
    static constexpr bool any = Layout::minimum_byte >= 0;
    static constexpr bool whole = Layout::ScaleRuns::any;  // integers, which a block's own minimum multiplies
    static constexpr int subs = Geometry<Layout>::subs, each = subs / 4;  // each: of a row, lane t has every fourth from t on

    // Ones in those two columns of a product where lane t has sums t and t + 4 of 8 sub-blocks: the compiler would find them out
    // again for each of these.
    struct Ones {
        u32 of[8];
        __device__ explicit Ones(int g) {
#pragma unroll
            for (int sub = 0; sub < 8; ++sub) of[sub] = anew(g == sub % 4 * 2 + sub / 4 ? constant_pair<T>(1) : 0u);
        }
    };
    float sum[each / 2][4] = {};  // of a group's columns, in products whose rows g and g + 8 both have some of token g

    // Four columns of token g, all of sub-block `sub`.
    __device__ void collect(uint2 x, int sub, const Ones& ones) { mma_8<T>(sum[sub / 8], x.x, x.y, ones.of[sub % 8]); }

    // Add what minimums make of a group's columns. `factor`: a power of two for those that are floats.
    template <class R>
    __device__ void add(const R& upper, const R& lower, int t, float factor, float (&total)[4]) const {
        float first[each], second[each], part[4] = {};
        of_row(upper, t, factor, first);
        of_row(lower, t, factor, second);
        float (&to)[4] = whole ? part : total;
#pragma unroll
        for (int i = 0; i < each; i += 2) {
            const u32 minimums[4] = {bits_of(first[i]), bits_of(second[i]), bits_of(first[i + 1]), bits_of(second[i + 1])};
            const float (&own)[4] = sum[i / 2];
            const u32 low = bits_of(own[0] + own[2]), high = bits_of(own[1] + own[3]);
            mma_tf32(to, minimums, low & kUpper, high & kUpper);
            mma_tf32(to, minimums, rest_of(low), rest_of(high));
        }
        if constexpr (whole) {
            const float common[2] = {-float_of_half(upper.half(Layout::minimum_byte)), -float_of_half(lower.half(Layout::minimum_byte))};
#pragma unroll
            for (int i = 0; i < 4; ++i) total[i] = __fmaf_rn(common[i / 2], part[i], total[i]);
        }
    }

  private:
    static constexpr u32 kUpper = 0xFFFFE000u;
    // What the upper part leaves; of what is not finite it is nothing.
    __device__ static u32 rest_of(u32 x) {
        const float rest = __fsub_rn(float_of(x), float_of(x & kUpper));
        return bits_of(rest == rest ? rest : 0.0f);
    }
    template <class R>
    __device__ static void of_row(const R& row, int t, float factor, float (&own)[each]) {
#pragma unroll
        for (int i = 0; i < each; ++i) {
            if constexpr (whole) own[i] = float_of_byte(four_of(typename Layout::MinimumRuns{}, row, 4 * i), t, 0.0f);
            else own[i] = factor * float_of_half(row.half((4 * i + t) * Layout::bytes + Layout::minimum_byte));
        }
    }
};
template <class T> struct NoMinimums {
    struct Ones { __device__ explicit Ones(int) {} };
    static constexpr bool any = false;
};

}  // namespace cuquant
