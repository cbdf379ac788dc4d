// Barriers in shared memory, and copies by the engine that these count: sm_90 and newer.
#pragma once
#include "device/vector.cuh"

namespace cuquant {

__device__ inline u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

#if defined(CUQUANT_EMULATOR) || __CUDA_ARCH__ >= 900
constexpr bool kHasEngine = true;
#else
constexpr bool kHasEngine = false;
#endif

#ifndef CUQUANT_EMULATOR

__device__ inline void barrier_init(u64* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// What was initialised can be seen by the copy engine and by other blocks of the cluster.
__device__ inline void barrier_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void barrier_expect(u64* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ inline void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}
// Wait until the phase of this parity is over.
__device__ inline void barrier_wait(u64* barrier, u32 parity) {
    asm volatile("{.reg .pred p;\n"
                 "again_%=: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra done_%=;\n"
                 "bra again_%=;\n"
                 "done_%=:}" :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}

// `bytes` that follow each other, a multiple of 16, as both places are.
__device__ inline void copy_run(void* to, const void* from, int bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}

#endif  // CUQUANT_EMULATOR

}  // namespace cuquant
