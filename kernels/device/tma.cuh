// Boxes of a matrix, which the copy engine brings to shared memory: sm_90 and newer.
#pragma once
#include "device/bulk.cuh"

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

// The same to the same place of both blocks of a cluster, each of whose barriers counts it.
__device__ inline void copy_box_to_both(void* to, const TensorMap* map, u64* barrier, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;"
                 :: "r"(shared_address(to)), "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "h"(static_cast<u16>(3)) : "memory");
}

// A box to global memory, but for what lies outside the matrix; a thread waits until its own are read.
__device__ inline void send_box(const TensorMap* map, const void* from, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
                 :: "l"(map), "r"(shared_address(from)), "r"(column), "r"(row) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ inline void wait_sent() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// What this thread has written to shared memory is there for the copy engine.
__device__ inline void show_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#endif  // CUQUANT_EMULATOR

}  // namespace cuquant
