// Arithmetic on pairs of 16-bit floats in one word, and matrix products of a warp.
#pragma once
#include "device/vector.cuh"

namespace cuquant {

// The bits of a number of few digits as float16 or bfloat16, at compile time; it must be exact.
template <class T>
__device__ constexpr u32 constant(double x) {
    constexpr bool half = is_same<T, Half>;
    constexpr int mantissa = half ? 10 : 7, excess = half ? 15 : 127;
    if (x == 0) return 0;
    const u32 sign = x < 0 ? 0x8000u : 0u;
    double size = x < 0 ? -x : x;
    int exponent = 0;
    while (size >= 2) { size /= 2; ++exponent; }
    while (size < 1) { size *= 2; --exponent; }
    const u32 steps = static_cast<u32>((size - 1) * (1 << mantissa));
    return sign | static_cast<u32>(exponent + excess) << mantissa | steps;
}
template <class T>
__device__ constexpr u32 constant_pair(double x) { return constant<T>(x) * 0x10001u; }

#ifndef CUQUANT_EMULATOR

template <class T> __device__ inline u32 fma_pair(u32 a, u32 b, u32 c) {
    u32 d;
    if constexpr (is_same<T, Half>) asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    else asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// a * b + c, where both elements of b are the lower one of `line`, and those of c the upper one.
template <class T> __device__ inline u32 fma_line(u32 a, u32 line) {
    u32 d;
    if constexpr (is_same<T, Half>) asm("{.reg .b16 l, h; .reg .b32 b, c; mov.b32 {l, h}, %2; mov.b32 b, {l, l}; mov.b32 c, {h, h}; fma.rn.f16x2 %0, %1, b, c;}" : "=r"(d) : "r"(a), "r"(line));
    else asm("{.reg .b16 l, h; .reg .b32 b, c; mov.b32 {l, h}, %2; mov.b32 b, {l, l}; mov.b32 c, {h, h}; fma.rn.bf16x2 %0, %1, b, c;}" : "=r"(d) : "r"(a), "r"(line));
    return d;
}

// (a & b) | c in one instruction, which the compiler does not find where b and c are constants.
__device__ inline u32 and_or(u32 a, u32 b, u32 c) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// d[16, 8] += a[16, 16] b[8, 16]^T. Lane 4 g + t has of a rows g, g + 8, g, g + 8 at columns 2 t + {0, 1}
// and, in the last two, 8 more; of b row g at the same columns; of d rows g and g + 8 at columns 2 t + {0, 1}.
template <class T> __device__ inline void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (is_same<T, Half>)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same of 8 columns, of which a lane has the first two.
template <class T> __device__ inline void mma_8(float (&d)[4], u32 a0, u32 a1, u32 b) {
    if constexpr (is_same<T, Half>)
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(b));
    else
        asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(b));
}

// d[16, 8] += a[16, 8] b[8, 8]^T of float32, of whose mantissas the upper 10 bits count. Lane 4 g + t has of a rows g, g + 8, g, g + 8
// at column t and, in the last two, 4 more; of b row g at the same columns; of d what mma has.
__device__ inline void mma_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same value, which the compiler works out where this is, not long before.
__device__ inline int anew(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Four matrices of 8 x 8 elements, one word of each: lanes 8 i .. 8 i + 7 hold the addresses of the rows of
// matrix i, and lane 4 g + t gets columns 2 t, 2 t + 1 of row g of each.
__device__ inline uint4 load_matrices(u32 shared_address) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(shared_address));
    return v;
}

// What lies at an address in shared memory.
__device__ inline uint4 load16_shared(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}
__device__ inline uint2 load8_shared(u32 address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
    return v;
}
__device__ inline u32 load2_shared(u32 address) {
    u32 v;
    asm volatile("{.reg .u16 two; ld.shared.u16 two, [%1]; cvt.u32.u16 %0, two;}" : "=r"(v) : "r"(address));
    return v;
}
__device__ inline u32 load4_shared(u32 address) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}

// 16 bytes to shared memory behind the back of the registers; of them `bytes` are read, the rest is 0.
__device__ inline void copy16_async(void* to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(static_cast<u32>(__cvta_generic_to_shared(to))), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Weights are read once: they leave L1 to the activations, and lines come whole.
__device__ inline uint4 load16_once(const void* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}
__device__ inline uint2 load8_once(const void* from) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
    return v;
}
__device__ inline u32 load4_once(const void* from) {
    u32 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];" : "=r"(v) : "l"(from));
    return v;
}

#endif  // CUQUANT_EMULATOR

template <class T> __device__ inline u32 mul_pair(u32 a, u32 b) { return fma_pair<T>(a, b, 0x80008000u); }
template <class T> __device__ inline u32 add_pair(u32 a, u32 b) { return fma_pair<T>(a, constant_pair<T>(1), b); }

// The two elements of a pair as floats, and back.
template <class T> __device__ inline float low_of(u32 pair) {
    if constexpr (is_same<T, Half>) return float_of_half(pair);
    else return float_of(pair << 16);
}
template <class T> __device__ inline float high_of(u32 pair) {
    if constexpr (is_same<T, Half>) return float_of_high_half(pair);
    else return float_of(pair & 0xFFFF0000u);
}

// A pair times two scales that may have no place in T, each a sum of two numbers: it is rounded once.
template <class T> __device__ inline u32 scaled_twice(u32 pair, u32 scale, u32 rest) { return fma_pair<T>(pair, scale, mul_pair<T>(pair, rest)); }

}  // namespace cuquant
