// A kernel that starts while the one before it on its stream ends (programmatic dependent launch, sm_90 and newer).
// Until it waits it reads codes, their zero points and prepacked weights alone, and writes nothing: a kernel that lets the next
// one start early never makes these. What any other kernel made is there, since it ends before this one starts.
#pragma once
#include "device/vector.cuh"

namespace cuquant {

#if !defined(CUQUANT_EMULATOR) && __CUDA_ARCH__ >= 900

// Once all blocks have said so, the next kernel may start, if it is one that waits.
__device__ inline void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Until the kernels before have ended, and what they wrote can be seen.
__device__ inline void wait_for_earlier() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// A line of 128 bytes to the L2 cache.
__device__ inline void prefetch_line(const void* from) { asm volatile("prefetch.global.L2 [%0];" :: "l"(from) : "memory"); }
// `bytes` that follow each other, whole vectors of 16, by the copy engine.
__device__ inline void prefetch_run(const void* from, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(bytes) : "memory");
}

#else

__device__ inline void let_next_start() {}
__device__ inline void wait_for_earlier() {}
#ifndef CUQUANT_EMULATOR
__device__ inline void prefetch_line(const void*) {}
__device__ inline void prefetch_run(const void*, int) {}
#endif

#endif

// Rows of x to the L2 cache, which all blocks read: each block of `blocks` has its part of the lines. Whoever writes them
// writes to that cache: this may come before the wait.
template <class T>
__device__ void prefetch_rows(const T* rows, i64 stride, int columns, int count, int block, int blocks, int lane) {
    const int lines = (columns * static_cast<int>(sizeof(T)) + 127) / 128;
    for (int row = lane; row < count; row += 32)
        for (int line = block; line < lines; line += blocks) prefetch_line(reinterpret_cast<const u8*>(rows + row * stride) + line * 128);
}

}  // namespace cuquant
