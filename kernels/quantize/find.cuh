// What a block's scale is made from, where neighbouring lanes of a warp hold the block.
#pragma once
#include "format/chunk.cuh"

namespace cuquant {

// The largest of a word over kLanes lanes.
template <int kLanes, typename Word>
__device__ Word lanes_max(Word word) {
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) word = max(word, __shfl_xor_sync(~0u, word, distance));
    return word;
}

// The sign bit of the first element of size `top`, which numbers of both signs have.
template <int kLanes, int kElements>
__device__ u32 sign_of_first(const float* x, u32 top, int lane) {
    u32 key = 0;  // places count down, and are above 0
#pragma unroll
    for (int i = kElements - 1; i >= 0; --i) {
        const u32 bits = bits_of(x[i]);
        if ((bits & 0x7FFFFFFFu) == top) key = ((kLanes - lane) * kElements - i) * 2 + (bits >> 31);
    }
    return lanes_max<kLanes>(key) << 31;
}

// What of a block its scale is made from: kLanes neighbouring lanes hold kElements each. Every lane of
// the block gets it.
template <class Format, int kLanes, int kElements>
__device__ typename Format::Rule::State find(const float* x, int lane) {
    using Rule = typename Format::Rule;
    if constexpr (Format::mean) {  // in index order, lane by lane
        typename Rule::State found = Rule::of(x[0], 0);
        double sum = 0.0;
#pragma unroll 1
        for (int l = 0; l < kLanes; ++l) {
            if (lane == l)
                for (int i = 0; i < kElements; ++i) sum += static_cast<double>(fabsf(x[i]));
            sum = __shfl_sync(~0u, sum, l, kLanes);
        }
        found.sum = sum;
        return found;
    } else {
        Extremes extremes = Extremes::of(bits_of(x[0]));
#pragma unroll
        for (int i = 1; i < kElements; ++i) extremes.add(bits_of(x[i]));
        if constexpr (is_same<Rule, Range>) {
            const Range::State own = Range::of(extremes);
            return {-1 - lanes_max<kLanes>(-1 - own.low), lanes_max<kLanes>(own.high)};
        } else if constexpr (is_same<Rule, SignedMax>) {
            extremes.high = lanes_max<kLanes>(extremes.high);
            extremes.low = lanes_max<kLanes>(extremes.low);
            const u32 above = extremes.above(), below = extremes.below();
            const u32 top = max(above, below);
            u32 sign = below == top;
            if (above == below) sign = 2;  // seldom: the first of both decides, or the first zero
            if (__any_sync(~0u, sign == 2)) {
                const u32 searched = sign_of_first<kLanes, kElements>(x, top, lane);
                if (sign == 2) sign = searched >> 31;
            }
            return {static_cast<u64>(top) << 32 | sign};
        } else {
            return {lanes_max<kLanes>(extremes.furthest())};
        }
    }
}

}  // namespace cuquant
