// Which rows of x go through which matrix of weights, and which of them a tile has: known on the device alone.
#pragma once
#include "device/vector.cuh"

namespace cuquant {

// A plain product has one group; a batch has as many as matrices, of which each has `rows` rows of x.
struct Groups {
    i64 count;           // matrices of weights
    i64 rows;            // of x that a group has room for; with offsets all there are
    const i64* offsets;  // [count + 1]: group g has rows offsets[g] .. offsets[g + 1] of x; or null
    const i64* counts;   // [count]: of the room of group g only so many are multiplied; or null

    __device__ i64 first(i64 group) const {
        return offsets ? min(max(offsets[group], 0ll), rows) : group * rows;
    }
    __device__ i64 size(i64 group) const {
        if (offsets) return max(first(group + 1) - first(group), 0ll);
        return counts ? min(max(counts[group], 0ll), rows) : rows;
    }
};

// Of a segment in the place of an expert: results of its rows are 0.
constexpr i64 kNoExpert = -2;

// Rows first .. first + count - 1 of x, and of the output, and their matrix; none where count is 0.
struct GroupTile { i64 group, first, count; };

// Tile `index` of kRows rows, counted through all groups. A whole warp calls it, and all its lanes have the result.
template <int kRows>
__device__ GroupTile tile_of(const Groups& groups, i64 index) {
    if (!groups.offsets && !groups.counts) {
        const i64 each = (groups.rows + kRows - 1) / kRows, group = index / each, row = index % each * kRows;
        return {group, group * groups.rows + row, group < groups.count ? min(groups.rows - row, static_cast<i64>(kRows)) : 0};
    }
    const int lane = threadIdx.x % 32;
    for (i64 begin = 0; begin < groups.count; begin += 32) {
        const i64 group = begin + lane, size = group < groups.count ? groups.size(group) : 0;
        const i64 tiles = (size + kRows - 1) / kRows;
        i64 end = tiles;  // tiles of this group and of those before
        for (int d = 1; d < 32; d *= 2) {
            const i64 other = __shfl_up_sync(~0u, end, d);
            if (lane >= d) end += other;
        }
        const u32 behind = __ballot_sync(~0u, index < end);
        if (behind) {
            const int owner = __ffs(static_cast<int>(behind)) - 1;
            const i64 row = (index - (end - tiles)) * kRows;
            const i64 from = group < groups.count ? groups.first(group) + row : 0;
            const i64 count = min(size - row, static_cast<i64>(kRows));
            return {begin + owner, __shfl_sync(~0u, from, owner), __shfl_sync(~0u, count, owner)};
        }
        index -= __shfl_sync(~0u, end, 31);
    }
    return {0, 0, 0};
}

}  // namespace cuquant
