// Blocks that work together: clusters (sm_90 and newer), and sums that several of them hold.
#pragma once
#include "epilogue.cuh"

namespace cuquant {

__device__ inline u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

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
__device__ inline void cluster_meet() { asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

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
__device__ inline void cluster_meet() {}
__device__ inline float4 load_remote(const void* p, u32) { return *static_cast<const float4*>(p); }
#endif

// Which row of the output row m of a product is: itself, or where it was before rows were sorted.
struct Straight { __device__ i64 operator()(i64 m) const { return m; } };
struct Sorted {
    const i64* order;
    __device__ i64 operator()(i64 m) const { return order[m]; }
};

// Add up the partial sums of a tile in shared memory and store what they finish to: `depth` of them in
// each of the cluster's kSplit blocks, one at a distance of `apart` floats from the next, [tokens][pitch].
// Block `rank` does every kSplit-th token, each thread four rows of the weight at once. kGated: each `set`
// rows are followed by those of the second weight, and the result is silu(first) * second.
template <int kSplit, bool kGated, class Place = Straight>
__device__ void store_sums(const Epilogue& epilogue, const float* sums, int pitch, int depth, int apart, int tokens, int rows, int set,
                           i64 token, i64 row, i64 M, i64 N, int thread, int threads, int rank, Place place = {}) {
    const int fours = rows / 4;
    const auto added = [&](const float* from) {
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int d = 0; d < depth; ++d) {
            float4 part[kSplit];
#pragma unroll
            for (int r = 0; r < kSplit; ++r) part[r] = kSplit > 1 ? load_remote(from + d * apart, r) : *reinterpret_cast<const float4*>(from + d * apart);
#pragma unroll
            for (int r = 0; r < kSplit; ++r) { total.x += part[r].x; total.y += part[r].y; total.z += part[r].z; total.w += part[r].w; }
        }
        return total;
    };
#pragma unroll 1
    for (int i = thread; i < (tokens + kSplit - 1) / kSplit * fours; i += threads) {
        const int line = i / fours, own_token = line * kSplit + rank, first = (i - line * fours) * 4;
        const i64 m = token + own_token, n = row + first;
        if (own_token >= tokens || m >= M || n >= N) continue;
        const float* from = sums + own_token * pitch + (kGated ? first / set * set + first : first);
        float4 total = added(from);
        if constexpr (kGated) {
            const float4 other = added(from + set);
            total = make_float4(activated(kSilu, total.x) * other.x, activated(kSilu, total.y) * other.y,
                                activated(kSilu, total.z) * other.z, activated(kSilu, total.w) * other.w);
        }
        const float y[4] = {total.x, total.y, total.z, total.w};
        finish_4(epilogue, y, place(m), n, N);
    }
}

}  // namespace cuquant
