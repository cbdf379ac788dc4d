// Sums of a tile [64 kRowGroups, kTokens] of which the kDepthGroups warpgroups of a block that share K, and
// kSplit blocks of a cluster that do, have a part each, in the registers of wgmma: each of them gets the
// whole sums of some columns.
#pragma once
#include "device/cluster.cuh"
#include "device/wgmma.cuh"

namespace cuquant {

// A lane's sums of eight columns (4 of them) to floats in shared memory [columns][pitch], from row g of its warp on.
__device__ inline void put_8(const float* sum, float* to, int pitch, int t) {
#pragma unroll
    for (int e = 0; e < 4; ++e) to[(2 * t + e % 2) * pitch + e / 2 * 8] = sum[e];
}

template <int kTokens, int kRowGroups, int kDepthGroups, int kSplit>
struct Exchange {
    static constexpr int kTiles = kTokens / 8, kOwn = kTiles / kSplit;     // columns by eights: all, and a block's
    static constexpr int kThreads = 128 * kRowGroups * kDepthGroups, kPitch = 64 * kRowGroups + 4;  // lanes of a fragment meet no bank twice
    static constexpr int kSlot = 128;                                      // float4s: four sums of each thread of a warpgroup
    // In shared memory, one behind the other: what warpgroups give each other, what the other block
    // gives, and a place for whole sums [8 kOwn][kPitch].
    static constexpr int kGiven = (kDepthGroups - 1) * kRowGroups * kTiles * kSlot, kReceived = kSplit > 1 ? kRowGroups * kOwn * kSlot : 0;
    static constexpr int kBytes = (kGiven + kReceived) * 16 + kOwn * 8 * kPitch * 4, kReceivedBytes = kReceived * 16;
    static_assert(kSplit <= 2 && kTiles % kSplit == 0, "a block has every other part of K");

    // Which of the warpgroups along K gets eight columns.
    __device__ static constexpr int owner(int tile) { return tile % kOwn * kDepthGroups / kOwn; }

    // Makes some sums whole: see each. `area` is not in use, nor is it in the other block where cluster_wait
    // returns; `received`, a barrier, waits for kReceivedBytes. Returns what is left of the area.
    __device__ static u8* run(float (&sum)[kTokens / 2], u8* area, u64* received, int depth, int row_group, int rank, int barrier) {
        const int thread = threadIdx.x % 128;
        float4* const slots = reinterpret_cast<float4*>(area);
        float4* const given = slots + row_group * kTiles * kSlot + thread;
        float4* const arriving = slots + kGiven + row_group * kOwn * kSlot + thread;
        const auto four = [&](int tile) { return make_float4(sum[4 * tile], sum[4 * tile + 1], sum[4 * tile + 2], sum[4 * tile + 3]); };
        const auto add = [&](int tile, const float4& part) {
            sum[4 * tile] += part.x; sum[4 * tile + 1] += part.y; sum[4 * tile + 2] += part.z; sum[4 * tile + 3] += part.w;
        };
        if constexpr (kDepthGroups > 1) {
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                const int place = depth - (depth > owner(tile));  // among those that give it
                if (owner(tile) != depth) given[(place * kRowGroups * kTiles + tile) * kSlot] = four(tile);
            }
            named_barrier(barrier, kThreads);
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile)
                if (owner(tile) == depth) {
#pragma unroll
                    for (int place = 0; place < kDepthGroups - 1; ++place) add(tile, given[(place * kRowGroups * kTiles + tile) * kSlot]);
                }
        }
        if constexpr (kSplit > 1) {
            cluster_wait();
            const Remote other(arriving, received, rank ^ 1);
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile)
                if (owner(tile) == depth && tile / kOwn != rank) other.store(tile % kOwn * kSlot * 16, four(tile));
            barrier_wait_remote(received, 0);
        }
        if constexpr (kSplit > 1) each(depth, rank, [&](int tile, int own) { add(tile, arriving[own * kSlot]); });
        return reinterpret_cast<u8*>(slots + kGiven + kReceived);
    }
    // Calls `take` for each eight columns of which this warpgroup has the whole sums: with their number in the
    // tile, which is known when it is compiled, and in the block's part of it.
    template <class Take>
    __device__ static void each(int depth, int rank, const Take& take) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
            if (owner(tile) == depth && (kSplit == 1 || tile / kOwn == rank)) take(tile, tile % kOwn);
    }
};

}  // namespace cuquant
