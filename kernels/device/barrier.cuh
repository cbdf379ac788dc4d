// A barrier of some of a block's warps.
#pragma once

namespace cuquant {

#ifndef CUQUANT_EMULATOR
// `number`: 1 to 15; 0 is that of __syncthreads.
__device__ inline void named_barrier(int number, int threads) { asm volatile("bar.sync %0, %1;" :: "r"(number), "r"(threads) : "memory"); }
#endif

}  // namespace cuquant
