// Whole sums of a block's tile, which its warpgroups have in registers, on their way to the output: some rows of x at a
// time, through shared memory, and by the copy engine where whole boxes of results may be stored.
#pragma once
#include "matmul/hopper_exchange.cuh"
#include "layout/fragments.cuh"
#include "matmul/hopper_results.cuh"
#include "matmul/sums.cuh"

namespace cuquant {

// Where a warpgroup puts sums before they are stored: floats of each token, and those that it has room for, so that
// 16-bit results of twice as many tokens fit.
constexpr int kDrainPitch = 68, kDrainRoom = 72;

// A lane's sums of 64 rows x kTokens to floats in shared memory, from row g of its warp on.
template <int kTokens>
__device__ void put_all(const float* sum, float* to, int pitch, int t) {
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) put_8(sum + 4 * j, to + 8 * j * pitch, pitch, t);
}

// Which tokens a tile has, from `token` on, those below `rows`; and which of the N columns of the output, those below
// row_end.
struct Bounds {
    int token, row;
    i64 rows, row_end, N;
    int tokens, box_tokens;  // box_tokens: of which there are whole ones in a tile, or no other tile behind it
};

// How many tokens are stored at a time, `most` or fewer: those of a warpgroup by an even number of times, or by any
// where several warpgroups meet before.
__device__ constexpr int drain_of(int tokens, int depth_groups, int most) {
    const int all = tokens % (8 * depth_groups) ? 8 : tokens / depth_groups;
    int each = all < most ? all : most;
    while (all % each || (depth_groups == 1 && each < all && all / each % 2)) each -= 8;
    return each;
}

// Tile is matmul_hopper's. kSlight: little shared memory is left.
template <class T, class Tile, bool kSlight>
struct Drain {
    using Parts = Exchange<Tile>;
    static constexpr int kTokens = Tile::tokens, kRowGroups = Tile::row_groups, kDepthGroups = Tile::depth_groups;
    static constexpr int kGroups = kRowGroups * kDepthGroups;
    static constexpr int kMost = kDepthGroups > 1 || kTokens == 192 || kSlight ? 32 : 64;
    static constexpr int kDrain = drain_of(kTokens / Tile::split, kDepthGroups, kMost), kParts = kTokens / kDrain;
    static constexpr int kBox = kDrain % 16 ? 8 : 16;       // by the copy engine, where a tile has no whole kDrain
    static constexpr int kWhole = kTokens > 128 ? 256 : 1;  // floats of 1024 bytes, on which boxes begin
    static constexpr int floats = (kDrain * kDrainRoom + kWhole - 1) / kWhole * kWhole;  // of a warpgroup
    static constexpr int kAll = kGroups * floats * 4;
    static constexpr int kBytes = kAll > Parts::kBytes ? kAll : Parts::kBytes;  // an Exchange has the same place before
    using Whole = Results<T, 64>;
    static constexpr int kPartBytes = kDrain * Whole::kPitch;
    static_assert(2 * kPartBytes <= floats * 4, "results of every other part have a place of their own");
    // And the first of a tile another one than the last of the tile before, unless all warpgroups meet in between.
    static_assert(kParts == 1 || kParts % 2 == 0 || kDepthGroups > 1 || Tile::once, "see drain_of");

    static constexpr int kTurns = (Parts::kMost * 8 + kDrain - 1) / kDrain;  // of a warpgroup, of a part or none

    // Calls `put` with the sums of the part that a warpgroup stores in a turn, and returns its number; -1: there is
    // none.
    template <class Put>
    __device__ static int in_turn(const float (&sum)[kTokens / 2], int turn, int whose, const Put& put) {
        int found = -1;
#pragma unroll
        for (int part = 0; part < kParts; ++part)
            if (Parts::own(part * kDrain / 8) == turn * kDrain / 8 && Parts::owner(part * kDrain / 8) == whose) {
                put(sum + part * kDrain / 2);
                found = part;
            }
        return found;
    }

    // A gated unit's, of which two warpgroups have the two sums of the same rows. `whose`: see Exchange.
    __device__ static void store_gated(const float (&sum)[kTokens / 2], float* area, const Epilogue& epilogue,
                                       const Bounds& tile, int row_group, int whose, int warp, int lane) {
        const int depth = whose % kDepthGroups;
        constexpr int kPitch = 2 * 64 + 4;
        float* const sums = area + depth * 2 * floats;
        float* const own = sums + row_group * 64 + warp * kStrip + lane / 4;
        const int barrier = 1 + depth;
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn) {
            const auto put = [&](const float* from) { put_all<kDrain>(from, own, kPitch, lane % 4); };
            const int part = in_turn(sum, turn, whose, put);
            if (part < 0) continue;
            named_barrier(barrier, 256);
            store_sums<1, 1, true>(epilogue, sums, kPitch, 0, kDrain, 64, tile.token + part * kDrain, tile.row,
                                   tile.rows, tile.N, Turn(64, threadIdx.x % 256, 256), 0);
            named_barrier(barrier, 256);
        }
    }

    // A warpgroup's. `y` is the map of the output where kSends, and `place` says where rows go.
    template <bool kSends, class Place>
    __device__ static void store(const float (&sum)[kTokens / 2], float* area, const Epilogue& epilogue,
                                 const TensorMap& y, const Bounds& tile, int row_group, int whose, int warp, int lane,
                                 Place place) {
        static_assert(!kSends || (kWhole > 1 && Parts::kOwners == 1), "boxes have a place");
        const int group = whose % kDepthGroups * kRowGroups + row_group, barrier = 1 + group;
        const int thread = threadIdx.x % 128, first_row = tile.row + row_group * 64;
        float* const sums = area + group * floats;
        const bool quick = Whole::possible(epilogue, tile.N);
        const typename Whole::Bias bias(epilogue, first_row + warp * kStrip, quick ? tile.N : 0, lane);
        const bool own_box = first_row + 64 <= tile.row_end || tile.row_end == tile.N;  // without rows of another tile
        if (kSends && quick && own_box) {
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                u8* const box = reinterpret_cast<u8*>(sums) + part % 2 * kDrain * 128;
#pragma unroll
                for (int j = 0; j < kDrain / 8; ++j) {
                    const u32 to = shared_address(box) + j * 1024;
                    Whole::put_swizzled(sum + part * kDrain / 2 + 4 * j, bias, to, warp, lane);
                }
                show_copies();
                if (thread == 0) wait_sent();  // the box before, whose place is the next one's
                named_barrier(barrier, 128);
                if (thread == 0)
                    for (int first = 0; first < min(kDrain, tile.tokens - part * kDrain); first += tile.box_tokens)
                        send_box(&y, box + first * 128, first_row, tile.token + part * kDrain + first);
            }
        } else if (quick) {
            if constexpr (kSends) {  // the tile before may still be read
                if (thread == 0) wait_sent();
                named_barrier(barrier, 128);
            }
#pragma unroll
            for (int turn = 0; turn < kTurns; ++turn) {
                u8* const results = reinterpret_cast<u8*>(sums) + turn % 2 * kPartBytes;
                const auto put = [&](const float* from) {
                    const u32 to = shared_address(results) + warp * kStrip * 2;
#pragma unroll
                    for (int j = 0; j < kDrain / 8; ++j)
                        Whole::put_8(from + 4 * j, bias, to + j * 8 * Whole::kPitch, lane);
                };
                const int part = in_turn(sum, turn, whose, put);
                if (part < 0) continue;
                named_barrier(barrier, 128);
                Whole::template store<kDrain, 128>(epilogue, results, tile.token + part * kDrain, first_row, tile.rows,
                                                   tile.row_end, thread, place);
                // Else nobody reads these any more when all have the next ones.
                if (kParts == 1) named_barrier(barrier, 128);
            }
        } else {
            float* const own = sums + warp * kStrip + lane / 4;
#pragma unroll
            for (int turn = 0; turn < kTurns; ++turn) {
                const auto put = [&](const float* from) { put_all<kDrain>(from, own, kDrainPitch, lane % 4); };
                const int part = in_turn(sum, turn, whose, put);
                if (part < 0) continue;
                named_barrier(barrier, 128);
                store_sums<1, 1, false>(epilogue, sums, kDrainPitch, 0, kDrain, 64, tile.token + part * kDrain,
                                        first_row, tile.rows, tile.row_end, Turn(64, thread, 128), 0, place);
                named_barrier(barrier, 128);
            }
        }
    }
};

}  // namespace cuquant
