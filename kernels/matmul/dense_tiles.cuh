// How matmul/dense.cu's work is divided: what a block has in shared memory, and which tiles it takes.
#pragma once
#include "device/wgmma_codes.cuh"
#include "matmul/coded.cuh"
#include "matmul/grouped.cuh"

namespace cuquant {

constexpr int kLine = 128;              // bytes of K of a stage: what the copy engine swizzles
constexpr int kTileRows = 128;          // of side a, 64 of each warpgroup
constexpr int kMathWarps = 8, kLaneSteps = 4;  // that multiply; and products of 32 bytes in a line

// Rows of a side that a tile has, counted through all its matrices.
struct Rows { i64 first; int count; };

struct Place {
    Rows x, w;
    i64 column;  // of the output
};

// Tile, which dense.py prints:
//   columns   rows of side b; side a has kTileRows
//   pipes     2: each of the two warpgroups has tiles, and stages, of its own, so that one stores results while the other
//             multiplies; 1: they have 64 rows each of the same tile
//   stages    lines of both sides in shared memory, of a pipe
//   promote   bytes of K whose products the tensor cores add up, 32 or 128, before they meet others in float32; 0: all
//   scaled    1 or 2: each such sum is multiplied by its scales, which change along K; 1: all of them are float32
//   blocks    how many blocks of scales the columns are of, 1 or 2; 0: each has its own scale
//   swapped   side a is the weights, whose rows are the output's columns; else it is x
//   share     2: the two blocks of a cluster have the same rows of b, of which each brings half to both
//   split     blocks of a cluster that share K of a tile
template <class Mma, class Tile>
struct DenseTile {
    static constexpr int kColumns = Tile::columns, kPipes = Tile::pipes, kStages = Tile::stages, kPromote = Tile::promote;
    static constexpr int kBlocks = Tile::blocks, kShare = Tile::share, kSplit = Tile::split, kCluster = kShare * kSplit;
    static constexpr bool kScaled = Tile::scaled, kFloatScales = Tile::scaled == 1, kSwapped = Tile::swapped;
    static_assert(kSplit == 1 || kShare * kPipes == 1, "K is shared by whole blocks, of a cluster that shares nothing else");
    static constexpr int kPipeWarps = kMathWarps / kPipes, kWaves = kPipes;  // times 64 rows of a warpgroup
    static constexpr int kStagers = kPipes > 1 ? 32 : 96;  // threads of a pipe that bring scales, bias and sums of codes
    static_assert(kColumns * kWaves <= 256 && (!kPromote || kColumns <= 192), "sums have registers, and those that are promoted too");
    static constexpr int kSubs = kPromote == 32 ? kLaneSteps : 1;  // sums of a line
    static constexpr int kScalesA = kTileRows, kScalesB = kBlocks ? 4 : kColumns;  // of two blocks, and room
    static constexpr int kScales = kScaled ? kSubs * (kScalesA + kScalesB) : 0;    // of a stage
    static constexpr int kOwn = kColumns / kSplit;  // columns whose sums a block finishes
    using Sum = Choice<(kPromote > 0), float, typename Mma::Sum>;
    // What a warp stores at a time, rows of the output, lies in this many bytes.
    static constexpr int kArea = 2560;

    // Of a pipe: stages, then what lies beside them; and at the end places of warps, and barriers.
    static constexpr int kBytesA = kTileRows * kLine, kBytesB = kColumns * kLine, kRing = kStages * (kBytesA + kBytesB);
    static constexpr int kTerms = Mma::floats ? 0 : 2;
    static constexpr int kNamed = kSwapped ? kTileRows : kColumns;  // of bias
    // Scales of both sides, bias, and what is added to sums of integers.
    static constexpr int kEnds = (kScaled ? 0 : kTileRows + kColumns) + kNamed + kTerms * (kTileRows + kColumns);
    static constexpr int kBeside = (kStages * kScales + kEnds) * 4, kPipeBarriers = 2 * kStages + 2;
    static constexpr int kAtBeside = kPipes * kRing, kAtAreas = kAtBeside + kPipes * kBeside;
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

// Pipes take tiles in turn.
template <class D>
struct TileWalk {
    TileOrder order;
    const Groups& groups;
    i64 N;
    int step, cluster, clusters, rank;  // rank: of the blocks that have neighbours on side a

    // `take` does what a warp of a pipe does with a tile.
    template <class Take>
    __device__ void each(int pipe, const Take& take) const {
#pragma unroll 1
        for (int tile = cluster + pipe * clusters; tile < order.count(); tile += clusters * D::kPipes) {
            int a_tile, b_tile;
            order.at(tile, a_tile, b_tile);
            const Place place = D::place(groups, N, step, a_tile * D::kShare + rank, b_tile);
            if (!D::is_skipped(place)) take(place);
        }
    }
};

// What a pipe has in shared memory.
template <class Mma, class Tile>
struct Pipe {
    using D = DenseTile<Mma, Tile>;
    u8 *a, *b;  // stages
    float *scales, *ends;
    u64 *full, *empty, *end_full, *end_empty;

    __device__ Pipe(u8* shared, int number) {
        a = shared + number * D::kRing;
        b = a + D::kStages * D::kBytesA;
        scales = reinterpret_cast<float*>(shared + D::kAtBeside + number * D::kBeside);
        ends = scales + D::kStages * D::kScales;
        full = reinterpret_cast<u64*>(shared + D::kAtBarriers) + number * D::kPipeBarriers;
        empty = full + D::kStages;
        end_full = empty + D::kStages;
        end_empty = end_full + 1;
    }
    __device__ void init() const {
        for (int s = 0; s < D::kStages; ++s) {
            barrier_init(full + s, D::kScaled ? 1 + D::kStagers / 32 : 1);
            barrier_init(empty + s, D::kPipeWarps * D::kShare);
        }
        barrier_init(end_full, D::kStagers / 32);
        barrier_init(end_empty, D::kPipeWarps);
    }
};

}  // namespace cuquant
