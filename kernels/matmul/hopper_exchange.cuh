// Sums of a tile [64 kRowGroups, kTokens], in the registers of wgmma, of which several have a part each: the
// kDepthGroups warpgroups of a block that share K, and the two blocks of a cluster that do (Exchange); and blocks that
// share the units of several tiles (Handover).
#pragma once
#include "device/barrier.cuh"
#include "device/cluster.cuh"
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

// Between those that share K of one tile, warpgroups of kSplit blocks: each gets the whole sums of some columns. They
// are numbered one block's after the other's. Tile is matmul_hopper's; kOnce: the area has room for all of them.
template <class Tile>
struct Exchange {
    static constexpr int kTokens = Tile::tokens, kRowGroups = Tile::row_groups, kDepthGroups = Tile::depth_groups;
    static constexpr int kSplit = Tile::split, kOwners = kSplit * kDepthGroups;
    static constexpr bool kOnce = Tile::once;
    static constexpr int kTiles = kTokens / 8;                                    // columns by eights
    static constexpr int kMost = (kTiles + kOwners - 1) / kOwners;                // of a warpgroup
    static constexpr int kGivers = kDepthGroups - 1, kPlaces = kGivers * kDepthGroups * kRowGroups;
    static constexpr int kAll = kSplit * kMost;                                   // and of those of a depth
    static constexpr int kRoom = kOnce ? kAll : kPlaces ? 12 / kPlaces : 1;       // else 24 KB
    static constexpr int kAtOnce = kAll < kRoom ? kAll : kRoom;                   // that each of them gets at a time
    static constexpr int kSlot = 128;                                             // float4s, one of each thread
    static constexpr int kGiven = kPlaces * kAtOnce * kSlot, kThreads = 128 * kRowGroups * kDepthGroups;
    static constexpr int kHalf = kTiles / kSplit, kReceivedBytes = kSplit > 1 ? kRowGroups * kHalf * kSlot * 16 : 0;
    static constexpr int kBytes = kGiven * 16 + kReceivedBytes;

    // Who gets an eight of columns, where its eights begin, and how many it gets before.
    __device__ static constexpr int owner(int tile) { return tile * kOwners / kTiles; }
    __device__ static constexpr int begin_of(int owner) { return (owner * kTiles + kOwners - 1) / kOwners; }
    __device__ static constexpr int own(int tile) { return tile - begin_of(owner(tile)); }

    // Makes some sums whole, but for the other block's part: see each. The area may be in use before, and is not when
    // this returns, but for kOnce.
    __device__ static void run(float (&sum)[kTokens / 2], float4* area, int depth, int row_group, int barrier) {
        if constexpr (kDepthGroups > 1) {
            float4* const own_area = area + row_group * kDepthGroups * kGivers * kAtOnce * kSlot + threadIdx.x % 128;
            const auto taker = [](int tile) { return owner(tile) % kDepthGroups; };
            const auto number = [](int tile) { return owner(tile) / kDepthGroups * kMost + own(tile); };
            const auto slot = [&](int tile, int giver) -> float4& {
                return own_area[((taker(tile) * kGivers + giver) * kAtOnce + number(tile) % kAtOnce) * kSlot];
            };
#pragma unroll
            for (int first = 0; first < kAll; first += kAtOnce) {
                const auto is_now = [&](int tile) { return number(tile) / kAtOnce * kAtOnce == first; };
                named_barrier(barrier, kThreads);
#pragma unroll
                for (int tile = 0; tile < kTiles; ++tile)
                    if (is_now(tile) && taker(tile) != depth)
                        slot(tile, depth - (depth > taker(tile))) = four_of(sum + 4 * tile);
                named_barrier(barrier, kThreads);
#pragma unroll
                for (int tile = 0; tile < kTiles; ++tile)
                    if (is_now(tile) && taker(tile) == depth) {
#pragma unroll
                        for (int giver = 0; giver < kGivers; ++giver) add_four(sum + 4 * tile, slot(tile, giver));
                    }
            }
            if constexpr (!kOnce) named_barrier(barrier, kThreads);
        }
    }
    // Gives the other block what it gets of this one's sums, and adds what comes, behind what `run` has in the area.
    // All threads have called cluster_arrive since both blocks used these bytes; `received`, a barrier, waits for them.
    __device__ static void meet(float (&sum)[kTokens / 2], float4* area, u64* received, int depth, int row_group,
                                int rank) {
        float4* const arriving = area + kGiven + row_group * kHalf * kSlot + threadIdx.x % 128;
        cluster_wait();
        const Remote other(arriving, received, rank ^ 1);
        each((rank ^ 1) * kDepthGroups + depth,
             [&](int tile, int) { other.store(tile % kHalf * kSlot * 16, four_of(sum + 4 * tile)); });
        barrier_wait_remote(received, 0);
        each(rank * kDepthGroups + depth,
             [&](int tile, int) { add_four(sum + 4 * tile, arriving[tile % kHalf * kSlot]); });
    }
    // Calls `take` for the eights of columns that `whose` gets, `count` from number `first` on: with their number in
    // the tile, which is known when it is compiled, and among those that it gets.
    template <class Take>
    __device__ static void each(int whose, const Take& take, int first = 0, int count = kMost) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
            if (own(tile) >= first && own(tile) < first + count && owner(tile) == whose) take(tile, own(tile));
    }
};

// Between blocks that share the units of a tile, through global memory. The block with the last unit adds up what the
// others hand over: each of them the sums of one tile at most, warp by warp in the order of registers. A warp raises a
// flag when its sums are there: the call's ticket, 62 random bits that no other call has. Memory does not hold these by
// accident, so that nobody needs to clear it before; a CUDA graph comes again with the ticket that it had, so that the
// warp that has seen a flag clears it.
// Each of the two blocks of a cluster that share x has to do with the same one of other clusters.
template <class Tile>
struct Handover {
    using Parts = Exchange<Tile>;
    static constexpr int kTokens = Tile::tokens, kRowGroups = Tile::row_groups, kPeers = Tile::shared_x ? 2 : 1;
    static constexpr int kGroups = kRowGroups * Tile::depth_groups;
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
