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
constexpr int kBatch = 4, kBatches = 2;  // sums whose scales are brought together; and how many such there is room for

// Rows of a side that a tile has, counted through all its matrices.
struct Rows { i64 first; int count; };

struct Place {
    Rows x, w;
    i64 column;  // of the output
};

// Tile, which dense.py prints:
//   columns   rows of side b; side a has kTileRows
//   stages    lines of both sides in shared memory
//   promote   bytes of K whose products the tensor cores add up, 32, 128 or 256, before they meet others in float32;
//             0: all
//   scaled    1 or 2: each such sum is multiplied by its scales, which change along K; 1: all of them are float32
//   blocks    how many blocks of scales the columns of a part are of, 1 or 2; 0: each has its own scale
//   swapped   side a is the weights, whose rows are the output's columns; else it is x
//   share     2: the two blocks of a cluster have the same rows of b, of which each brings half to both
//   split     blocks of a cluster that share K of a tile
template <class Mma, class Tile>
struct DenseTile {
    static constexpr int kColumns = Tile::columns, kStages = Tile::stages;
    static constexpr int kPromote = Tile::promote;
    static constexpr int kBlocks = Tile::blocks, kShare = Tile::share, kSplit = Tile::split, kCluster = kShare * kSplit;
    static constexpr bool kScaled = Tile::scaled, kFloatScales = Tile::scaled == 1, kSwapped = Tile::swapped;
    static_assert(kSplit == 1 || kShare == 1, "blocks that share K share nothing else");
    static_assert(kColumns <= 256, "sums have registers");
    // Sums that are promoted leave room for those of half the columns.
    static constexpr int kHalves = kPromote && kColumns > 192 ? 2 : 1, kPart = kColumns / kHalves;
    // Registers: a block has those it was launched with. Warps that bring a scale of every column want more, and have
    // them where sums are few too.
    static constexpr bool kFewSums = kColumns * (kPromote ? 2 : 1) <= 128;
    static constexpr int kFew = (kScaled && !(kBlocks && kFloatScales)) || kFewSums ? 72 : 56;
    static constexpr int kMany = (3 * 168 - kFew) / 2;
    static_assert(kHalves == 1 || !kScaled || kBlocks == 1, "registers for no more scales");
    // There are registers for the sums of two lines.
    static constexpr bool kDouble = kPromote == 128 && kColumns <= ((kScaled && !kBlocks) || kSplit > 1 ? 64 : 128);
    static constexpr int kSubs = kPromote == 32 ? kLaneSteps : 1;                  // sums of a line
    static constexpr int kTogether = kBatch / kSubs;                               // lines whose scales come together
    static constexpr int kRun = kPromote > kLine ? kPromote / kLine : 1;           // or lines of a sum
    static_assert(kRun == 1 || !kScaled, "scales change with each line");
    static constexpr int kScalesA = kTileRows, kScalesB = kBlocks ? 4 : kColumns;  // of two blocks of each half
    static constexpr int kScalesOfSum = kScalesA + kScalesB, kScales = kScaled ? kBatch * kScalesOfSum : 0;
    static constexpr int kOwn = kColumns / kSplit;  // columns whose sums a block finishes
    using Sum = Choice<(kPromote > 0), float, typename Mma::Sum>;
    // What a warp stores at a time, rows of the output, lies in this many bytes.
    static constexpr int kArea = 2560;

    // In shared memory: stages, scales, the end of a tile, places of warps, barriers.
    static constexpr int kBytesA = kTileRows * kLine, kBytesB = kColumns * kLine, kRing = kStages * (kBytesA + kBytesB);
    static constexpr int kTerms = Mma::floats || kScaled ? 0 : 2;
    static constexpr int kNamed = kSwapped ? kTileRows : kColumns;  // of bias
    // Scales of both sides, bias, and what is added to sums of integers.
    static constexpr int kEnds = (kScaled ? 0 : kTileRows + kColumns) + kNamed + kTerms * (kTileRows + kColumns);
    static constexpr int kAtEnds = kRing + kBatches * kScales * 4, kAtAreas = kAtEnds + kEnds * 4;
    static constexpr int kAtBarriers = kAtAreas + kMathWarps * kArea;

    __device__ static Place place(const Groups& groups, i64 N, int step, int a_tile, int b_tile) {
        constexpr int kRows = kSwapped ? kColumns : kTileRows;
        const int tile = kSwapped ? b_tile : a_tile;
        const i64 column = static_cast<i64>(kSwapped ? a_tile : b_tile) * step;
        const int count = static_cast<int>(max(min(N - column, static_cast<i64>(step)), 0ll));
        if (groups.count == 1 && !groups.offsets && !groups.counts) {  // without divisions
            const i64 row = static_cast<i64>(tile) * kRows, left = groups.rows - row;
            return {{row, static_cast<int>(max(min(left, static_cast<i64>(kRows)), 0ll))}, {column, count}, column};
        }
        const GroupTile rows = tile_of<kRows>(groups, tile);
        const i64 first = min(rows.group, groups.count - 1) * N + column;
        return {{rows.first, static_cast<int>(rows.count)}, {first, count}, column};
    }
    // The other block of a cluster needs what this one brings.
    __device__ static bool is_skipped(const Place& p) { return p.x.count == 0 && (kSwapped || kShare == 1); }
    __device__ static const Rows& a_of(const Place& p) { return kSwapped ? p.w : p.x; }
    __device__ static const Rows& b_of(const Place& p) { return kSwapped ? p.x : p.w; }
};

// In which order tiles are taken: bands of side a, so that what blocks read at a time is little of both sides.
struct TileOrder {
    static constexpr u32 kBand = 8;
    int a, b;

    __device__ int count() const { return a * b; }
    __device__ void at(int index, int& a_tile, int& b_tile) const {
        const u32 band = index / (kBand * b), in_band = index - band * kBand * b, left = a - band * kBand;
        u32 in_a = in_band % kBand, in_b = in_band / kBand;
        if (left < kBand) {
            in_b = in_band / left;
            in_a = in_band - in_b * left;
        }
        a_tile = band * kBand + in_a;
        b_tile = in_b;
    }
};

// The tiles of a block, which all its warps walk through.
template <class D>
struct TileWalk {
    TileOrder order;
    const Groups& groups;
    i64 N;
    int step, cluster, clusters, rank;  // rank: of the blocks that have neighbours on side a

    // `take` is given a tile, and its number among those that have rows.
    template <class Take>
    __device__ void each(const Take& take) const {
        int number = 0;
#pragma unroll 1
        for (int tile = cluster; tile < order.count(); tile += clusters) {
            int a_tile, b_tile;
            order.at(tile, a_tile, b_tile);
            const Place place = D::place(groups, N, step, a_tile * D::kShare + rank, b_tile);
            if (!D::is_skipped(place)) take(place, number++);
        }
    }
};

// What a block has in shared memory.
template <class Mma, class Tile>
struct Stages {
    using D = DenseTile<Mma, Tile>;
    u8 *a, *b;
    float *scales, *ends;
    u64 *full, *empty, *end_full, *end_empty;

    __device__ explicit Stages(u8* shared) {
        a = shared;
        b = a + D::kStages * D::kBytesA;
        scales = reinterpret_cast<float*>(shared + D::kRing);
        ends = reinterpret_cast<float*>(shared + D::kAtEnds);
        full = reinterpret_cast<u64*>(shared + D::kAtBarriers);
        empty = full + D::kStages;
        end_full = empty + D::kStages;
        end_empty = end_full + 1;
    }
    __device__ void init() const {
        for (int s = 0; s < D::kStages; ++s) {
            barrier_init(full + s, 1);
            barrier_init(empty + s, kMathWarps * D::kShare);
        }
        barrier_init(end_full, kStagers);
        barrier_init(end_empty, 32 * kMathWarps);
    }
};

// Lines of both sides in shared memory, one behind the other: which one comes next.
template <int kStages>
struct Ring {
    int stage = 0;
    u32 parity = 0;

    __device__ void step() {
        if (++stage == kStages) { stage = 0; parity ^= 1; }
    }
};

// Batches of scales, which two warpgroups read: barriers that count warps tell each of them that a batch is there, and
// those who bring it that its place is free again.
struct Batches {
    static constexpr int kMath = 32 * kMathWarps, kFirst = 2;  // of barriers
    u32 number = 0;

    __device__ u32 place() const { return number % kBatches; }
    __device__ int here(int group) const { return kFirst + kBatches + 2 * place() + group; }
    __device__ int free() const { return kFirst + place(); }
    // By those who bring them.
    __device__ void wait_free() const {
        if (number >= kBatches) named_barrier(free(), kStagers + kMath);
    }
    __device__ void give() {
        for (int group = 0; group < 2; ++group) named_barrier_arrive(here(group), kStagers + kMath / 2);
        ++number;
    }
    // By those who read them.
    __device__ void wait() const { named_barrier(here(threadIdx.x / 128), kStagers + kMath / 2); }
    __device__ void leave() {
        named_barrier_arrive(free(), kStagers + kMath);
        ++number;
    }
};

}  // namespace cuquant
