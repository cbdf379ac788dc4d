// Two 16-bit numbers in a word, of which one instruction of Hopper and newer takes two words or three.
#pragma once
#include "device/vector.cuh"

namespace cuquant {

#if defined(CUQUANT_EMULATOR) || __CUDA_ARCH__ >= 900
constexpr bool kHasPairs = true;
#else
constexpr bool kHasPairs = false;
#endif

#ifdef CUQUANT_EMULATOR

inline u32 least_of(u32 a, u32 b, u32 c) { return min(min(a, b), c); }

template <class Operation>
u32 each_of_pair(Operation operation) {
    return (operation(0) & 0xFFFFu) | operation(16) << 16;
}
inline u32 pair_max(u32 a, u32 b) {
    return each_of_pair([=](int at) { return max(a >> at & 0xFFFFu, b >> at & 0xFFFFu); });
}
inline u32 pair_min(u32 a, u32 b) {
    return each_of_pair([=](int at) { return min(a >> at & 0xFFFFu, b >> at & 0xFFFFu); });
}
inline u32 signed_pair_max(u32 a, u32 b) { return pair_max(a ^ 0x80008000u, b ^ 0x80008000u) ^ 0x80008000u; }
inline u32 bfloat16_pair_fma(u32 a, u32 b, u32 c) {
    // The product has 16 bits. Codes are made of sums that float64 holds, and nothing is rounded twice.
    return each_of_pair([=](int at) {
        const auto of = [=](u32 pair) { return static_cast<double>(float_of((pair >> at) << 16)); };
        const double sum = of(a) * of(b) + of(c);
        float odd = static_cast<float>(sum);
        if (fabs(static_cast<double>(odd)) > fabs(sum)) odd = float_of(bits_of(odd) - 1);
        if (static_cast<double>(odd) != sum) odd = float_of(bits_of(odd) | 1u);
        return bfloat16_of(odd);
    });
}

#else

// One instruction where there is one; the compiler finds it from two minimums at times only.
__device__ inline u32 least_of(u32 a, u32 b, u32 c) { return __vimin3_u32(a, b, c); }

#if __CUDA_ARCH__ >= 900

__device__ inline u32 pair_max(u32 a, u32 b) {
    u32 most;
    asm("max.u16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    return most;
}
__device__ inline u32 pair_min(u32 a, u32 b) {
    u32 least;
    asm("min.u16x2 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(b));
    return least;
}
__device__ inline u32 signed_pair_max(u32 a, u32 b) {
    u32 most;
    asm("max.s16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    return most;
}
// a * b + c, rounded once, to nearest even.
__device__ inline u32 bfloat16_pair_fma(u32 a, u32 b, u32 c) {
    u32 sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

#else  // declared for the code that kHasPairs leaves out

__device__ u32 pair_max(u32 a, u32 b);
__device__ u32 pair_min(u32 a, u32 b);
__device__ u32 signed_pair_max(u32 a, u32 b);
__device__ u32 bfloat16_pair_fma(u32 a, u32 b, u32 c);

#endif
#endif

}  // namespace cuquant
