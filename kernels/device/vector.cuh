// Element types, 16-byte accesses and the conversions that the hardware does: the asm of memory-bound
// kernels. A build that defines CUQUANT_EMULATOR brings its own versions of the same names.
#pragma once

namespace cuquant {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr int kChunk = 8;

template <class A, class B> constexpr bool is_same = false;
template <class A> constexpr bool is_same<A, A> = true;
template <bool kFirst, class A, class B> struct Either { using Type = A; };
template <class A, class B> struct Either<false, A, B> { using Type = B; };
template <bool kFirst, class A, class B> using Choice = typename Either<kFirst, A, B>::Type;
constexpr float kFloatMax = 3.4028234663852886e38f, kHalfMax = 65504.0f;

struct Half { u16 bits; };      // IEEE binary16
struct Bfloat16 { u16 bits; };  // the upper half of a float32
struct E4m3 { u8 bits; };       // 4 bits of exponent, 3 of mantissa, no infinity
struct Int8 { signed char bits; };

__device__ inline float float_of(u32 bits) { return __uint_as_float(bits); }
__device__ inline u32 bits_of(float x) { return __float_as_uint(x); }

__device__ inline bool is_finite(float x) { return (bits_of(x) & 0x7FFFFFFFu) < 0x7F800000u; }

// What is made of finite numbers never becomes infinite.
__device__ inline float saturated(float x, float top) {
    return fabsf(x) > top ? copysignf(top, x) : x;  // NaN stays
}

// The same of x, the sum or product of a and b.
__device__ inline float kept_finite(float x, float a, float b) {
    return is_finite(a) && is_finite(b) ? saturated(x, kFloatMax) : x;
}

#ifndef CUQUANT_EMULATOR

// The float16 in the low 16 bits of `half`, exactly.
__device__ inline float float_of_half(u32 half) {
    float x;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}" : "=f"(x) : "r"(half));
    return x;
}

// The one in the high 16 bits.
__device__ inline float float_of_high_half(u32 pair) {
    float x;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high;}" : "=f"(x) : "r"(pair));
    return x;
}

// Two float16 in one word, rounded to nearest even; what is too large becomes infinite.
__device__ inline u32 halves_of(float low, float high) {
    u32 pair;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("{.reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}"
        : "=r"(pair) : "f"(low), "f"(high));
#endif
    return pair;
}

#if __CUDA_ARCH__ >= 890
// Two saturating 8-bit floats in the low 16 bits, rounded to nearest even.
__device__ inline u32 e4m3_pair_of(float low, float high) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ inline u32 e5m2_pair_of(float low, float high) {
    u16 pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}
// Two float16 of the two 8-bit floats in the low 16 bits, exactly.
__device__ inline u32 halves_of_e4m3_pair(u32 pair) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<u16>(pair)));
    return halves;
}
#endif

// 16 aligned bytes that this kernel does not write. They pass through L1, where the lanes whose loads
// share a sector meet: without it 16-bit inputs took 4 % longer, and float32 ones 10 %.
__device__ inline uint4 load16(const void* from) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

__device__ inline void store16(void* to, uint4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

#endif  // CUQUANT_EMULATOR

// To nearest even by adding half a step, less one where the kept part is even.
__device__ inline u32 bfloat16_of(float x) {
    const u32 bits = bits_of(x);
    return x != x ? (bits >> 16) | 0x40u : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
}

// Two elements of 16 bits in one word.
template <typename T> __device__ inline u32 pair_of(float low, float high);
template <> __device__ inline u32 pair_of<Half>(float low, float high) { return halves_of(low, high); }
template <> __device__ inline u32 pair_of<Bfloat16>(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return bfloat16_of(low) | bfloat16_of(high) << 16;
#endif
}

}  // namespace cuquant
