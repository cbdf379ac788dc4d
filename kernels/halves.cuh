// Rows of a weight that the two blocks of a cluster have in common, the 64 of one warpgroup: each multiplies half of K.
#pragma once
#include "exchange.cuh"

namespace cuquant {

// Of a block's tiles, which are its own: the last one's last warpgroup in block 0 has the rows of the first one in block 1. Each has
// every other stage, of kSpan units, of these, and the whole sums of half of the rows of x in the end.
template <int kRowGroups, int kSpan>
struct Halves {
    int rank, tiles;

    // The warpgroup whose rows are the other block's too.
    __device__ int group() const { return rank ? 0 : kRowGroups - 1; }
    __device__ bool has(int tile, int row_group) const { return tile == tiles - 1 && row_group == group(); }
    // Whether a stage, which begins with unit `unit`, is the other block's.
    __device__ bool is_other(int unit) const { return unit / kSpan % 2 != rank; }
    __device__ int first_row(int tile, int rank) const {
        const int last = tile == tiles - 1, before = (2 * tiles * kRowGroups - 1) * (blockIdx.x / 2) + 2 * tile * kRowGroups;
        return (before + rank * (kRowGroups - last)) * 64;
    }
    // The block's own `i`-th unit, and how many of `units` it has.
    __device__ int unit(int i) const { return i / kSpan * 2 * kSpan + rank * kSpan + i % kSpan; }
    __device__ int own_units(int units) const {
        const int stages = (units + kSpan - 1) / kSpan, own = (stages - rank + 1) / 2;
        return own * kSpan - ((stages - 1) % 2 == rank ? stages * kSpan - units : 0);
    }
    // Whether the block has whole sums of a part of the rows of x.
    __device__ bool has_sums(int part, int parts) const { return part * 2 / parts == rank; }
};

}  // namespace cuquant
