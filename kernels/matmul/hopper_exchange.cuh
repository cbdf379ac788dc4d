// Sums of a tile [64 kRowGroups, kTokens], in the registers of wgmma, of which several have a part each: the
// kDepthGroups warpgroups of a block that share K (Exchange), and blocks that do (Handover).
#pragma once
#include "device/barrier.cuh"
#include "device/flag.cuh"
#include "device/wgmma.cuh"

namespace cuquant {

// A lane's sums of eight columns (4 of them) to floats in shared memory [columns][pitch], from row g of its warp on.
__device__ inline void put_8(const float* sum, float* to, int pitch, int t) {
#pragma unroll
    for (int e = 0; e < 4; ++e) to[(2 * t + e % 2) * pitch + e / 2 * 8] = sum[e];
}
__device__ inline float4 four_of(const float* sum) { return make_float4(sum[0], sum[1], sum[2], sum[3]); }
__device__ inline void add_four(float* sum, const float4& part) {
    sum[0] += part.x; sum[1] += part.y; sum[2] += part.z; sum[3] += part.w;
}

// Between the warpgroups of a block: each of those that share K gets the whole sums of some columns.
template <int kTokens, int kRowGroups, int kDepthGroups>
struct Exchange {
    static constexpr int kTiles = kTokens / 8;                                    // columns by eights
    static constexpr int kMost = (kTiles + kDepthGroups - 1) / kDepthGroups;      // of a warpgroup
    static constexpr int kGivers = kDepthGroups - 1, kPlaces = kGivers * kDepthGroups * kRowGroups;
    static constexpr int kRoom = kPlaces ? 12 / kPlaces : 1;                      // 24 KB
    static constexpr int kAtOnce = kMost < kRoom ? kMost : kRoom;                 // that each of them gets at a time
    static constexpr int kSlot = 128;                                             // float4s, one of each thread
    static constexpr int kBytes = kPlaces * kAtOnce * kSlot * 16, kThreads = 128 * kRowGroups * kDepthGroups;

    // Which of the warpgroups along K gets an eight of columns, where its eights begin, and how many it gets before.
    __device__ static constexpr int owner(int tile) { return tile * kDepthGroups / kTiles; }
    __device__ static constexpr int begin_of(int depth) { return (depth * kTiles + kDepthGroups - 1) / kDepthGroups; }
    __device__ static constexpr int own(int tile) { return tile - begin_of(owner(tile)); }

    // Makes some sums whole: see each. Nobody uses the area when this returns, but it may be in use before.
    __device__ static void run(float (&sum)[kTokens / 2], float4* area, int depth, int row_group, int barrier) {
        if constexpr (kDepthGroups > 1) {
            float4* const own_area = area + row_group * kDepthGroups * kGivers * kAtOnce * kSlot + threadIdx.x % 128;
            const auto slot = [&](int tile, int giver) -> float4& {
                return own_area[((owner(tile) * kGivers + giver) * kAtOnce + own(tile) % kAtOnce) * kSlot];
            };
#pragma unroll
            for (int first = 0; first < kMost; first += kAtOnce) {
                const auto is_now = [&](int tile) { return own(tile) / kAtOnce * kAtOnce == first; };
                named_barrier(barrier, kThreads);
#pragma unroll
                for (int tile = 0; tile < kTiles; ++tile)
                    if (is_now(tile) && owner(tile) != depth)
                        slot(tile, depth - (depth > owner(tile))) = four_of(sum + 4 * tile);
                named_barrier(barrier, kThreads);
#pragma unroll
                for (int tile = 0; tile < kTiles; ++tile)
                    if (is_now(tile) && owner(tile) == depth) {
#pragma unroll
                        for (int giver = 0; giver < kGivers; ++giver) add_four(sum + 4 * tile, slot(tile, giver));
                    }
            }
            named_barrier(barrier, kThreads);
        }
    }
    // Calls `take` for the eights of columns of which this warpgroup gets the whole sums, `count` from number `first`
    // on: with their number in the tile, which is known when it is compiled, and among those that it gets.
    template <class Take>
    __device__ static void each(int depth, const Take& take, int first = 0, int count = kMost) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
            if (own(tile) >= first && own(tile) < first + count && owner(tile) == depth) take(tile, own(tile));
    }
};

// Between blocks that share the units of a tile, through global memory. The block with the last unit adds up what the
// others hand over: each of them the sums of one tile at most, warp by warp in the order of registers. A warp raises a
// flag when its sums are there: the call's ticket, 62 random bits that no other call has. Memory does not hold these by
// accident, so that nobody needs to clear it before; a CUDA graph comes again with the ticket that it had, so that the
// warp that has seen a flag clears it.
// kPeers: blocks of a cluster, of which each has to do with the same one of other clusters.
template <class Parts, int kTokens, int kRowGroups, int kGroups, int kPeers>
struct Handover {
    static constexpr int kFlags = 16, kSums = kRowGroups * 4 * Parts::kTiles * 32;  // float4s
    static constexpr int kBytes = kFlags * 8 + kSums * 16;                          // of a block
    static constexpr int kInFlight = kGroups > 2 ? 8 : 16;                          // loads of a thread
    static constexpr int kTogether = Parts::kMost < kInFlight ? Parts::kMost : kInFlight;  // of a block
    static constexpr int kBlocks = kInFlight / kTogether;
    u8* memory;
    u64 ticket;
    int rank, warp, lane, depth, row_group;

    __device__ u8* place(int block) const { return memory + static_cast<i64>(block * kPeers + rank) * kBytes; }
    __device__ u64* flag(int block) const { return reinterpret_cast<u64*>(place(block)) + warp; }
    __device__ float4* sums(int block) const {
        float4* const first = reinterpret_cast<float4*>(place(block) + kFlags * 8);
        return first + (row_group * 4 + warp % 4) * Parts::kTiles * 32 + lane;
    }
    __device__ void give(const float (&sum)[kTokens / 2]) const {
        float4* const to = sums(blockIdx.x / kPeers);
        Parts::each(depth, [&](int tile, int) { to[tile * 32] = four_of(sum + 4 * tile); });
        __syncwarp();
        if (lane == 0) raise_flag(flag(blockIdx.x / kPeers), ticket);
    }
    // `gives` says which of the blocks of lower numbers have a part. Each lane waits for another one, and loads of
    // several are on their way together: one after the other they would take a microsecond each.
    template <class Gives>
    __device__ void take(float (&sum)[kTokens / 2], const Gives& gives) const {
        for (int last = static_cast<int>(blockIdx.x / kPeers) - 1; last >= 0 && gives(last); last -= 32) {
            const int block = last - lane;
            const bool waits = block >= 0 && gives(block);
            if (waits) {
                wait_for_flag(flag(block), ticket);
                *flag(block) = 0;
            }
            u32 blocks = __ballot_sync(~0u, waits);
            __syncwarp();
            while (blocks) {
                const int begin = Parts::begin_of(depth);
                const float4* from[kBlocks];
                bool there[kBlocks];
#pragma unroll
                for (int b = 0; b < kBlocks; ++b) {
                    there[b] = blocks;
                    from[b] = there[b] ? sums(last - (__ffs(blocks) - 1)) : from[0];
                    blocks &= blocks - 1;
                }
#pragma unroll
                for (int first = 0; first < Parts::kMost; first += kTogether) {
                    float4 part[kBlocks][kTogether];
#pragma unroll
                    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
                        for (int i = 0; i < kTogether; ++i)
                            part[b][i] = from[b][min(begin + first + i, Parts::kTiles - 1) * 32];
                    }
#pragma unroll
                    for (int b = 0; b < kBlocks; ++b) {
                        if (!there[b]) continue;
                        const auto add = [&](int tile, int own) { add_four(sum + 4 * tile, part[b][own - first]); };
                        Parts::each(depth, add, first, kTogether);
                    }
                }
            }
        }
    }
};

}  // namespace cuquant
