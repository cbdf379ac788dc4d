// What a block's scale is made from, where neighbouring lanes of a warp hold the block.
#pragma once
#include "chunk.cuh"

namespace cuquant {

__device__ inline AbsMax::State shuffle(AbsMax::State s, int distance) { return {__shfl_xor_sync(~0u, s.top, distance)}; }
__device__ inline Range::State shuffle(Range::State s, int distance) {
    return {__shfl_xor_sync(~0u, s.low, distance), __shfl_xor_sync(~0u, s.high, distance)};
}

// What of a block its scale is made from; every lane of the block gets it.
template <class Format, int kLanes>
__device__ typename Format::Rule::State find(const float* x, int lane) {
    using Rule = typename Format::Rule;
    typename Rule::State found = Rule::of(x[0], 0);
    if constexpr (Format::mean) {  // in index order, lane by lane
        double sum = 0.0;
#pragma unroll 1
        for (int l = 0; l < kLanes; ++l) {
            if (lane == l)
                for (int i = 0; i < kChunk; ++i) sum += static_cast<double>(fabsf(x[i]));
            sum = __shfl_sync(~0u, sum, l, kLanes);
        }
        found.sum = sum;
    } else if constexpr (Rule::by_index) {
        u32 top = bits_of(x[0]);
#pragma unroll
        for (int i = 1; i < kChunk; ++i) top = Rule::further(top, bits_of(x[i]));
#pragma unroll
        for (int distance = 1; distance < kLanes; distance *= 2) {
            const u32 other = __shfl_xor_sync(~0u, top, distance);
            top = lane & distance ? Rule::further(other, top) : Rule::further(top, other);
        }
        found = Rule::of_bits(top);
    } else {
#pragma unroll
        for (int i = 1; i < kChunk; ++i) found = Rule::merge(found, Rule::of(x[i], 0));
#pragma unroll
        for (int distance = 1; distance < kLanes; distance *= 2)
            found = Rule::merge(found, shuffle(found, distance));
    }
    return found;
}

}  // namespace cuquant
