// What matmul_hopper brings to the L2 cache before it copies or loads it.
#pragma once
#include "device/overlap.cuh"
#include "layout/packed_weight.cuh"
#include "matmul/grouped.cuh"

namespace cuquant {

// Brings what a strip has beside codes to the L2 cache: its groups from `first` to `last`.
template <class Format, int kLie>
__device__ void prefetch_groups(const Prepacked& w, i64 strip, i64 first, i64 last) {
    using Own = Group<Format, kLie>;
    if constexpr (kLie == kInStrips) {
        const auto bring = [&](const void* from, i64 each, i64 begin, i64 end, int bytes) {
            prefetch_run(static_cast<const u8*>(from) + (strip * each + begin) * kStrip * bytes,
                         static_cast<int>(end - begin + 1) * kStrip * bytes);
        };
        constexpr int kBlock = Own::blocks ? Own::Parts::per_block : 1;
        const i64 each = Own::blocks ? w.blocks : w.groups;
        bring(w.scale, each, first / kBlock, last / kBlock, Own::bytes);
        if constexpr (Own::zeros) bring(w.zero_point, w.groups, first, last, 1);
        if constexpr (Own::Parts::minimums) bring(w.minimum, each, first / kBlock, last / kBlock, Own::bytes);
        if constexpr (Own::Parts::sub_scales) bring(w.sub_scale, w.groups, first, last, 1);
        if constexpr (Own::Parts::sub_scales && Own::Parts::minimums) bring(w.sub_minimum, w.groups, first, last, 1);
    }
}

// While kernels before this one end: to the L2 cache the beginning of what warp `own` of four brings of the block's
// first tile, if each of `experts` has one, as matmul_hopper counts tiles. Else it is another block's, or nobody's.
template <int kTogether>
__device__ void prefetch_first(const Prepacked& w, int experts, int row_tiles, int tile_rows, int row_groups, int own,
                               int unit_bytes) {
    constexpr int kSoon = 8192;  // bytes of a strip
    const int set = blockIdx.x / (kTogether * row_tiles), in_set = blockIdx.x - set * kTogether * row_tiles;
    const int wide = min(kTogether, experts - set * kTogether);
    if (wide <= 0) return;
    const int expert = set * kTogether + in_set % wide, row = in_set / wide * tile_rows;
    for (int r = 0; r < row_groups; ++r) {
        const int strip = row / kStrip + 4 * r + own;
        if (strip >= w.strips) return;
        const i64 before = (static_cast<i64>(expert) * w.strips + strip) * w.units * unit_bytes;
        prefetch_run(reinterpret_cast<const u8*>(w.codes) + before, min(w.units * unit_bytes, kSoon));
    }
}

}  // namespace cuquant
