// Boxes of a matrix, which the copy engine brings to shared memory: sm_90 and newer.
#pragma once
#include "bulk.cuh"

namespace cuquant {

struct alignas(64) TensorMap { u64 words[16]; };  // a CUtensorMap

#ifndef CUQUANT_EMULATOR

__device__ inline void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory"); }

// A box of a matrix, from `column` of row `row` on, to shared memory; what lies outside is 0. A box starts on
// 16 bytes of its row, and on 128 in shared memory.
__device__ inline void copy_box(void* to, const TensorMap* map, u64* barrier, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 :: "r"(shared_address(to)), "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row) : "memory");
}

#endif  // CUQUANT_EMULATOR

}  // namespace cuquant
