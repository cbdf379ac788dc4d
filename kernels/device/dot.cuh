// Products of signed bytes by a warp's tensor cores, and copies to shared memory that run ahead: their asm.
#pragma once
#include "device/vector.cuh"

namespace cuquant {

#ifndef CUQUANT_EMULATOR

// d[16, 8] = start + a[16, 32] b[8, 32]^T of signed bytes, four in a word. Lane 4 g + t has of a row g at
// bytes 4 t.., row g + 8 there, and both at 16 + 4 t..; of b row g at both places; of d row g at columns
// 2 t and 2 t + 1, and row g + 8 there.
__device__ inline void dot_32(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, int start) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(start));
#else  // the same in quarters: 8 rows and 16 bytes
    const auto quarter = [](int& x, int& y, u32 a, u32 b, int first, int second) {
        asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%4, %5};"
            : "=r"(x), "=r"(y) : "r"(a), "r"(b), "r"(first), "r"(second));
    };
    quarter(d[0], d[1], a0, b0, start, start);
    quarter(d[2], d[3], a1, b0, start, start);
    quarter(d[0], d[1], a2, b1, d[0], d[1]);
    quarter(d[2], d[3], a3, b1, d[2], d[3]);
#endif
}

// The first half of it: d[16, 8] = start + a[16, 16] b[8, 16]^T.
__device__ inline void dot_16(int (&d)[4], u32 a0, u32 a1, u32 b, int start) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(a0), "r"(a1), "r"(b), "r"(start));
#else
    dot_32(d, a0, a1, 0, 0, b, 0, start);
#endif
}

// 16 bytes to shared memory; both ends are aligned. The lane sees them after wait_copies, others after a barrier
// more. Before sm_80 they are there at once.
__device__ inline void copy_ahead(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    const u32 place = static_cast<u32>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" :: "r"(place), "l"(from) : "memory");
#else
    *static_cast<uint4*>(to) = load16(from);
#endif
}
// The same, where those after the first `count` are 0 and are not read.
__device__ inline void copy_ahead(void* to, const void* from, int count) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :: "r"(static_cast<u32>(__cvta_generic_to_shared(to))), "l"(from), "r"(count) : "memory");
#else
    if (count == 16) {
        *static_cast<uint4*>(to) = load16(from);
    } else {
        for (int i = 0; i < 16; ++i) static_cast<u8*>(to)[i] = i < count ? static_cast<const u8*>(from)[i] : 0;
    }
#endif
}
// What this lane copies from here on belongs to a new group.
__device__ inline void close_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Wait until all groups but the last kPending are there.
template <int kPending> __device__ inline void wait_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" :: "n"(kPending) : "memory");
#endif
}

#endif  // CUQUANT_EMULATOR

}  // namespace cuquant
