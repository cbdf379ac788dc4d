// A kernel that starts while the one before it on its stream ends (programmatic dependent launch, sm_90 and newer):
// until it waits it must neither read nor write what other kernels have to do with. It may do what it needs no data for,
// and bring weights to the L2 cache, of which later writes make no other copy.
#pragma once
#include "vector.cuh"

namespace cuquant {

#if !defined(CUQUANT_EMULATOR) && __CUDA_ARCH__ >= 900

// Once all blocks have said so, the next kernel may start, if it is one that waits.
__device__ inline void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Until the kernels before have ended, and what they wrote can be seen.
__device__ inline void wait_for_earlier() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The line of 128 bytes at `from`, to the L2 cache.
__device__ inline void prefetch_line(const void* from) { asm volatile("prefetch.global.L2 [%0];" :: "l"(from) : "memory"); }

#else

__device__ inline void let_next_start() {}
__device__ inline void wait_for_earlier() {}
__device__ inline void prefetch_line(const void*) {}

#endif

// `bytes` that follow each other, by `threads` threads.
__device__ inline void prefetch_lines(const u8* from, int bytes, int thread, int threads) {
    for (int at = thread * 128; at < bytes; at += threads * 128) prefetch_line(from + at);
}

}  // namespace cuquant
