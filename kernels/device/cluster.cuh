// Blocks that work together: clusters (sm_90 and newer), and the shared memory of another block.
#pragma once
#include "device/bulk.cuh"

namespace cuquant {

// Of a kernel whose blocks work in clusters of so many along x; before sm_90 there are none. A macro, since attributes have no other names.
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

// The same place of the shared memory of block `rank` of the cluster, all of which must have begun.
struct InBlock {
    u32 at;

    __device__ InBlock(u32 rank, const float* p) { asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(p)), "r"(rank)); }
    // So many floats behind.
    __device__ void store(int behind, float v) const { asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(at + behind * 4), "f"(v) : "memory"); }
    __device__ void store(int behind, const float4& v) const {
        asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" :: "r"(at + behind * 4), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
    }
};
#else
__device__ inline u32 cluster_rank() { return 0; }
__device__ inline void cluster_sync() {}
__device__ inline void cluster_arrive() {}
__device__ inline void cluster_wait() {}
#endif

// A place of this block's own.
struct InThis {
    float* at;

    __device__ InThis(u32, float* p) : at(p) {}
    __device__ void store(int behind, float v) const { at[behind] = v; }
    __device__ void store(int behind, const float4& v) const { *reinterpret_cast<float4*>(at + behind) = v; }
};
#if !defined(CUQUANT_EMULATOR) && __CUDA_ARCH__ < 900
using InBlock = InThis;
#endif

}  // namespace cuquant
