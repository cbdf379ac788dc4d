// Products of bytes by a warp's tensor cores, signed or not on either side, and of bits; and small floats as pairs of
// float16.
#pragma once
#include "device/mma.cuh"

namespace cuquant {

#ifndef CUQUANT_EMULATOR

#define CUQUANT_MMA_BYTES(a_type, b_type) \
    asm("mma.sync.aligned.m16n8k32.row.col.s32." a_type "." b_type ".s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
#define CUQUANT_MMA_QUARTER(a_type, b_type) \
    asm("mma.sync.aligned.m8n8k16.row.col.s32." a_type "." b_type ".s32 {%0, %1}, {%2}, {%3}, {%0, %1};" \
        : "+r"(d[2 * i]), "+r"(d[2 * i + 1]) : "r"(a[i + 2 * half]), "r"(half ? b1 : b0))

// d[16, 8] += a[16, 32] b[8, 32]^T, four bytes in a word. Lane 4 g + t has of a row g at bytes 4 t.., row g + 8
// there, and both at 16 + 4 t..; of b row g at both places; of d rows g and g + 8 at columns 2 t + {0, 1}.
template <bool kSignedA, bool kSignedB>
__device__ inline void mma_bytes(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    if constexpr (kSignedA && kSignedB) CUQUANT_MMA_BYTES("s8", "s8");
    else if constexpr (kSignedA) CUQUANT_MMA_BYTES("s8", "u8");
    else if constexpr (kSignedB) CUQUANT_MMA_BYTES("u8", "s8");
    else CUQUANT_MMA_BYTES("u8", "u8");
#else  // the same in quarters: 8 rows and 16 bytes
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if constexpr (kSignedA && kSignedB) CUQUANT_MMA_QUARTER("s8", "s8");
            else if constexpr (kSignedA) CUQUANT_MMA_QUARTER("s8", "u8");
            else if constexpr (kSignedB) CUQUANT_MMA_QUARTER("u8", "s8");
            else CUQUANT_MMA_QUARTER("u8", "u8");
        }
#endif
}
#undef CUQUANT_MMA_BYTES
#undef CUQUANT_MMA_QUARTER

// d[16, 8] += how many ones each row of a[16, 256] and of b[8, 256] share: 32 bits lie where mma_bytes has four bytes.
// From sm_80 on; from sm_100 on there is no such instruction, and the compiler calls a function.
__device__ inline void mma_bits(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    __trap();  // rules choose bytes
#endif
}

#endif  // CUQUANT_EMULATOR

// As mma<Half>, of GPUs before sm_80 too.
__device__ inline void mma_halves(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if defined(CUQUANT_EMULATOR) || __CUDA_ARCH__ >= 800
    mma<Half>(d, a, b0, b1);
#else
    mma_8<Half>(d, a[0], a[1], b0);
    mma_8<Half>(d, a[2], a[3], b1);
#endif
}

// Two e5m2 of a word's lower or upper half, as float16: its upper byte.
template <int kHalf> __device__ inline u32 halves_of_e5m2(u32 word) { return __byte_perm(word, 0, kHalf ? 0x3424 : 0x1404); }

// The same of e4m3, exactly; NaN stays.
template <int kHalf> __device__ inline u32 halves_of_e4m3(u32 word) {
#if !defined(CUQUANT_EMULATOR) && __CUDA_ARCH__ >= 890
    return halves_of_e4m3_pair(kHalf ? word >> 16 : word);
#else
    const u32 wide = halves_of_e5m2<kHalf>(word), sizes = wide & 0x7F007F00u;
    const u32 nans = (sizes + 0x01000100u) & 0x80008000u;  // only all ones carry
    // With the exponent in its place a number is 2^8 too small.
    const u32 value = fma_pair<Half>((wide & 0x80008000u) | sizes >> 1, 0x5C005C00u, 0);
    return value | (nans - (nans >> 15));
#endif
}

}  // namespace cuquant
