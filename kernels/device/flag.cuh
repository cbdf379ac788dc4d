// Numbers in global memory by which a warp tells warps of other blocks that what it wrote before is there.
#pragma once
#include "device/vector.cuh"

namespace cuquant {

#ifndef CUQUANT_EMULATOR

// By one lane, after __syncwarp: for what all lanes wrote.
__device__ inline void raise_flag(u64* flag, u64 value) {
    asm volatile("fence.acq_rel.gpu; st.relaxed.gpu.global.u64 [%0], %1;" :: "l"(flag), "l"(value) : "memory");
}
// Other lanes may read what is there after __syncwarp. A fence would wait for this thread's own stores too.
__device__ inline void wait_for_flag(const u64* flag, u64 value) {
    u64 found;
    do asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(flag) : "memory");
    while (found != value);
}

#endif

}  // namespace cuquant
