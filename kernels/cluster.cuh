// Blocks that work together: clusters (sm_90 and newer), and sums that several of them hold.
#pragma once
#include "bulk.cuh"
#include "epilogue.cuh"

namespace cuquant {

// Of a kernel whose blocks work in clusters of so many along x; before sm_90 there are none.
#if __CUDA_ARCH__ >= 900
#define CUQUANT_CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define CUQUANT_CLUSTER(blocks)
#endif

#ifdef CUQUANT_EMULATOR  // which has its own
#elif __CUDA_ARCH__ >= 900
__device__ inline u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// All threads of the cluster that have not ended come here; what they wrote before can then be read by the others.
__device__ inline void cluster_sync() { asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// The same, but for what they wrote: nobody waits until that is where others see it.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Read what lies at the same place of another block's shared memory.
__device__ inline float4 load_remote(const void* p, u32 rank) {
    float4 v;
    asm volatile("{.reg .u32 a; mapa.shared::cluster.u32 a, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [a];}"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(shared_address(p)), "r"(rank) : "memory");
    return v;
}
#else
__device__ inline u32 cluster_rank() { return 0; }
__device__ inline void cluster_sync() {}
__device__ inline void cluster_arrive() {}
__device__ inline void cluster_wait() {}
__device__ inline float4 load_remote(const void* p, u32) { return *static_cast<const float4*>(p); }
#endif

__device__ inline void cluster_meet() { cluster_arrive(); cluster_wait(); }

// Which row of the output row m of a product is: itself, or where it was before rows were sorted.
struct Straight { __device__ i64 operator()(i64 m) const { return m; } };
struct Sorted {
    const i64* order;
    __device__ i64 operator()(i64 m) const { return order[m]; }
};

// Which fours of a tile's sums a thread stores, one after the other. To divide takes a while: a kernel may do it early.
struct Turn {
    int fours, next_line, next_four;  // of a line, and from one to the next
    int line, four;

    __device__ Turn(int rows, int thread, int threads) : fours(rows / 4) {
        next_line = threads / fours; next_four = threads - next_line * fours;
        line = thread / fours; four = thread - line * fours;
    }
    // The compiler divides here.
    __device__ void keep() {
#ifndef CUQUANT_EMULATOR
        asm volatile("" : "+r"(line), "+r"(four));
#endif
    }
    __device__ void step() {
        line += next_line; four += next_four;
        if (four >= fours) { four -= fours; ++line; }
    }
};

// Add up the partial sums of a tile in shared memory and store what they finish to: kDepth of them in each of
// the cluster's kSplit blocks, one at a distance of `apart` floats from the next, [tokens][pitch]. Block
// `rank` does every kSplit-th token, each thread four rows of the weight at once. kGated: each `set` rows are
// followed by those of the second weight, and the result is silu(first) * second.
template <int kSplit, int kDepth, bool kGated, class Place = Straight>
__device__ void store_sums(const Epilogue& epilogue, const float* sums, int pitch, int apart, int tokens, int set,
                           i64 token, i64 row, i64 M, i64 N, Turn turn, int rank, Place place = {}) {
    const int lines = (static_cast<int>(min(M - token, static_cast<i64>(tokens))) - rank + kSplit - 1) / kSplit;
    const auto added = [&](const float* from) {
        constexpr int kTogether = 4;  // that do not wait for each other
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f), part[kTogether][kSplit];
#pragma unroll
        for (int first = 0; first < kDepth; first += kTogether) {
#pragma unroll
            for (int d = first; d < kDepth && d < first + kTogether; ++d)
#pragma unroll
                for (int r = 0; r < kSplit; ++r) {
                    const float* own = from + d * apart;
                    part[d - first][r] = kSplit > 1 && r != rank ? load_remote(own, r) : *reinterpret_cast<const float4*>(own);
                }
#pragma unroll
            for (int d = first; d < kDepth && d < first + kTogether; ++d)
#pragma unroll
                for (int r = 0; r < kSplit; ++r) add_4(total, part[d - first][r]);
        }
        return total;
    };
    const bool whole = has_fours(epilogue, N), plain = whole && is_plain(epilogue);
    for (; turn.line < lines; turn.step()) {
        const int own_token = turn.line * kSplit + rank, first = turn.four * 4;
        const float* from = sums + own_token * pitch + (kGated ? first / set * set + first : first);
        float4 total = added(from);
        if constexpr (kGated) {
            activate_4<kSilu>(total);
            const float4 other = added(from + set);
            total = make_float4(total.x * other.x, total.y * other.y, total.z * other.z, total.w * other.w);
        }
        const i64 n = row + first;
        if (n < N) {
            const i64 m = place(token + own_token);
            if (plain) store_4(epilogue, total, m, n);
            else finish_4(epilogue, total, m, n, N, whole);
        }
    }
}

}  // namespace cuquant
