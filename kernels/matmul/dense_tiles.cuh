// How matmul/dense.cu's work is divided: what a block has in shared memory, and which tiles it takes.
#pragma once
#include "device/wgmma_codes.cuh"
#include "matmul/coded.cuh"
#include "matmul/grouped.cuh"

namespace cuquant {

constexpr int kLine = 128;              // bytes of K of a stage: what the copy engine swizzles
constexpr int kTileRows = 128;          // of side a, 64 of each warpgroup
constexpr int kMathWarps = 8, kLaneSteps = 4;  // that multiply; and products of 32 bytes in a line
constexpr int kStagers = 96;            // threads that bring scales, bias and sums of codes

// Rows of a side that a tile has, counted through all its matrices.
struct Rows { i64 first; int count; };

struct Place {
    Rows x, w;
    i64 column;  // of the output
};

// Tile, which dense.py prints:
//   columns   rows of side b; side a has kTileRows
//   stages    lines of both sides in shared memory
//   promote   bytes of K whose products the tensor cores add up, 32 or 128, before they meet others in float32; 0: all
//   scaled    each such sum is multiplied by its scales: these change along K
//   blocks    how many blocks the columns of a part, kPart of them, are of, 1 or 2; 0: each column has its own scale
//   swapped   side a is the weights, whose rows are the output's columns; else it is x
//   share     2: the two blocks of a cluster have the same rows of b, of which each brings half to both
//   split     blocks of a cluster that share K of a tile
template <class Mma, class Tile>
struct DenseTile {
    static constexpr int kColumns = Tile::columns, kStages = Tile::stages, kPromote = Tile::promote;
    static constexpr int kShare = Tile::share, kSplit = Tile::split, kCluster = kShare * kSplit;
    static constexpr bool kScaled = Tile::scaled, kSwapped = Tile::swapped;
    static constexpr int kBlocks = Tile::blocks;
    static_assert(kShare == 1 || kSplit == 1, "blocks share rows or K");
    // Sums that are promoted leave room for those of half the columns.
    static constexpr int kHalves = kPromote && kColumns > 192 ? 2 : 1, kPart = kColumns / kHalves;
    static constexpr int kSubs = kPromote == 32 ? kLaneSteps : 1;  // sums of a line
    static constexpr int kScalesA = kTileRows, kScalesB = kBlocks ? 2 * kHalves : kColumns;
    static constexpr int kScales = kScaled ? kSubs * (kScalesA + kScalesB) : 0;  // of a stage
    static constexpr int kOwn = kColumns / kSplit;  // columns whose sums a block finishes
    using Sum = Choice<(kPromote > 0), float, typename Mma::Sum>;
    // What a warp stores at a time, rows of the output, lies in this many bytes.
    static constexpr int kArea = 2560;

    static constexpr int kBytesA = kTileRows * kLine, kBytesB = kColumns * kLine;
    static constexpr int kAtB = kStages * kBytesA, kAtScales = kAtB + kStages * kBytesB;
    static constexpr int kAtEnds = kAtScales + kStages * kScales * 4;
    static constexpr int kTerms = Mma::floats ? 0 : 2;
    static constexpr int kNamed = kSwapped ? kTileRows : kColumns;  // of bias
    // Scales of both sides, bias, and what is added to sums of integers.
    static constexpr int kEnds = (kScaled ? 0 : kTileRows + kColumns) + kNamed + kTerms * (kTileRows + kColumns);
    static constexpr int kAtAreas = kAtEnds + kEnds * 4;
    static constexpr int kAtBarriers = kAtAreas + kMathWarps * kArea;

    __device__ static Place place(const Groups& groups, i64 N, int step, int a_tile, int b_tile) {
        const GroupTile rows = tile_of<kSwapped ? kColumns : kTileRows>(groups, kSwapped ? b_tile : a_tile);
        const i64 column = static_cast<i64>(kSwapped ? a_tile : b_tile) * step;
        const i64 first = min(rows.group, groups.count - 1) * N + column;
        const int count = static_cast<int>(max(min(N - column, static_cast<i64>(step)), 0ll));
        return {{rows.first, static_cast<int>(rows.count)}, {first, count}, column};
    }
    // The other block of a cluster needs what this one brings.
    __device__ static bool is_skipped(const Place& p) { return p.x.count == 0 && (kSwapped || kShare == 1); }
    __device__ static const Rows& a_of(const Place& p) { return kSwapped ? p.w : p.x; }
    __device__ static const Rows& b_of(const Place& p) { return kSwapped ? p.x : p.w; }
};

// In which order tiles are taken: bands of side a, so that what blocks read at a time is little of both sides.
struct TileOrder {
    static constexpr int kBand = 8;
    int a, b;

    __device__ int count() const { return a * b; }
    __device__ void at(int index, int& a_tile, int& b_tile) const {
        const int band = index / (kBand * b), in_band = index - band * kBand * b, wide = min(kBand, a - band * kBand);
        a_tile = band * kBand + in_band % wide;
        b_tile = in_band / wide;
    }
};

}  // namespace cuquant
