// The part of CUDA C++ that our kernels use, for g++: qualifiers, vector types, intrinsics, and what
// kernels/vector.cuh writes in asm. Floats are IEEE; NaN has the GPU's bits only where a comment says so.
#pragma once
#define CUQUANT_EMULATOR

#include "fibers.h"

#include <cfenv>
#include <climits>
#include <limits>
#include <math.h>
#include <stdlib.h>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __shared__ thread_local
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __grid_constant__
#undef __noinline__
#define __noinline__ __attribute__((noinline))

// ---- vector types -------------------------------------------------------------------------------

#define EMULATOR_VECTORS(name, type)                                                       \
    struct alignas(2 * sizeof(type)) name##2 { type x, y; };                               \
    struct name##3 { type x, y, z; };                                                      \
    struct alignas(sizeof(type) < 4 ? 4 * sizeof(type) : 16) name##4 { type x, y, z, w; }; \
    inline name##2 make_##name##2(type x, type y) { return {x, y}; }                       \
    inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }            \
    inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
EMULATOR_VECTORS(char, signed char)
EMULATOR_VECTORS(uchar, unsigned char)
EMULATOR_VECTORS(short, short)
EMULATOR_VECTORS(ushort, unsigned short)
EMULATOR_VECTORS(int, int)
EMULATOR_VECTORS(uint, unsigned)
EMULATOR_VECTORS(float, float)
EMULATOR_VECTORS(longlong, long long)
EMULATOR_VECTORS(ulonglong, unsigned long long)
EMULATOR_VECTORS(double, double)
#undef EMULATOR_VECTORS

// ---- bits ---------------------------------------------------------------------------------------

template <class To, class From>
inline To emulator_bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    std::memcpy(&result, &value, sizeof result);
    return result;
}
inline unsigned __float_as_uint(float x) { return emulator_bits<unsigned>(x); }
inline int __float_as_int(float x) { return emulator_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return emulator_bits<float>(x); }
inline float __int_as_float(int x) { return emulator_bits<float>(x); }
inline long long __double_as_longlong(double x) { return emulator_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return emulator_bits<double>(x); }

inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
unsigned __brev(unsigned x);
inline unsigned long long __brevll(unsigned long long x) {
    return static_cast<unsigned long long>(__brev(static_cast<unsigned>(x))) << 32 |
           __brev(static_cast<unsigned>(x >> 32));
}
unsigned permuted(unsigned low, unsigned high, unsigned selectors);
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selectors) {
    return permuted(low, high, selectors & 0x7777u);
}
unsigned __vmaxu2(unsigned first, unsigned second);
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
    return static_cast<unsigned>(both >> (shift & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
    return static_cast<unsigned>(both << (shift & 31) >> 32);
}
inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<long long>(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
int __dp4a(int a, int b, int sum);
unsigned __dp4a(unsigned a, unsigned b, unsigned sum);

// ---- min and max: CUDA has them for every pair of integers, in the unsigned type if one is ------

template <class A, class B>
using EmulatorCommon = std::conditional_t<std::is_integral_v<A> && std::is_integral_v<B>,
                                          decltype(A{} + B{}), std::common_type_t<A, B>>;
template <class A, class B>
inline EmulatorCommon<A, B> min(A a, B b) {
    using T = EmulatorCommon<A, B>;
    if constexpr (std::is_floating_point_v<T>) return fmin(static_cast<T>(a), static_cast<T>(b));
    else return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(a) : static_cast<T>(b);
}
template <class A, class B>
inline EmulatorCommon<A, B> max(A a, B b) {
    using T = EmulatorCommon<A, B>;
    if constexpr (std::is_floating_point_v<T>) return fmax(static_cast<T>(a), static_cast<T>(b));
    else return static_cast<T>(a) > static_cast<T>(b) ? static_cast<T>(a) : static_cast<T>(b);
}

// ---- arithmetic with a named rounding -----------------------------------------------------------

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __frsqrt_rn(float a) { return static_cast<float>(1.0 / sqrt(static_cast<double>(a))); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }

// volatile: the operation may not move out of the lines in which its rounding holds.
template <class Operation>
inline float emulator_rounded(int mode, float a, float b, Operation operation) {
    volatile float left = a, right = b;
    std::fesetround(mode);
    volatile float result = operation(left, right);
    std::fesetround(FE_TONEAREST);
    return result;
}
inline float __fadd_rz(float a, float b) {
    return emulator_rounded(FE_TOWARDZERO, a, b, [](float x, float y) { return x + y; });
}
inline float __fadd_rd(float a, float b) {
    return emulator_rounded(FE_DOWNWARD, a, b, [](float x, float y) { return x + y; });
}
inline float __fadd_ru(float a, float b) {
    return emulator_rounded(FE_UPWARD, a, b, [](float x, float y) { return x + y; });
}
inline float __fmul_rz(float a, float b) {
    return emulator_rounded(FE_TOWARDZERO, a, b, [](float x, float y) { return x * y; });
}
inline float __fmul_rd(float a, float b) {
    return emulator_rounded(FE_DOWNWARD, a, b, [](float x, float y) { return x * y; });
}
inline float __fmul_ru(float a, float b) {
    return emulator_rounded(FE_UPWARD, a, b, [](float x, float y) { return x * y; });
}
inline float __fmaf_ru(float a, float b, float c) {
    volatile float factor = a;
    return emulator_rounded(FE_UPWARD, b, c, [&](float x, float y) { return fmaf(factor, x, y); });
}
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

// Saturating; NaN becomes 0.
template <class Int>
inline Int emulator_whole(float x) {
    if (x != x) return 0;
    if (x <= static_cast<float>(std::numeric_limits<Int>::min())) return std::numeric_limits<Int>::min();
    if (x >= static_cast<float>(std::numeric_limits<Int>::max())) return std::numeric_limits<Int>::max();
    return static_cast<Int>(x);
}
inline int __float2int_rn(float x) { return emulator_whole<int>(rintf(x)); }
inline int __float2int_rz(float x) { return emulator_whole<int>(truncf(x)); }
inline int __float2int_rd(float x) { return emulator_whole<int>(floorf(x)); }
inline int __float2int_ru(float x) { return emulator_whole<int>(ceilf(x)); }
inline unsigned __float2uint_rn(float x) { return emulator_whole<unsigned>(rintf(x)); }
inline unsigned __float2uint_rz(float x) { return emulator_whole<unsigned>(truncf(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __ull2float_rn(unsigned long long x) { return static_cast<float>(x); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }
inline float rsqrtf(float x) { return __frsqrt_rn(x); }

// ---- together with other threads ----------------------------------------------------------------

using emulator::Place;
using emulator::WarpOperation;

inline void __syncthreads(Place place = Place::here()) { emulator::barrier(false, place); }
inline int __syncthreads_count(int predicate, Place place = Place::here()) {
    return emulator::barrier(predicate, place);
}
inline int __syncthreads_or(int predicate, Place place = Place::here()) {
    return emulator::barrier(predicate, place) > 0;
}
inline int __syncthreads_and(int predicate, Place place = Place::here()) {
    return emulator::barrier(!predicate, place) == 0;
}
inline void __syncwarp(unsigned mask = ~0u, Place place = Place::here()) {
    emulator::warp_operation({WarpOperation::Sync, mask, 0, 0, 32, place});
}
inline void __threadfence() {}
inline void __threadfence_block() {}

template <class T>
inline T emulator_shuffle(WarpOperation::Kind kind, unsigned mask, T value, int argument, int width,
                          Place place) {
    static_assert(std::is_arithmetic_v<T> && sizeof(T) >= 4, "CUDA shuffles 4- and 8-byte numbers");
    std::uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    bits = emulator::warp_operation({kind, mask, bits, argument, width, place});
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, Place place = Place::here()) {
    return emulator_shuffle(WarpOperation::Index, mask, value, lane, width, place);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, Place place = Place::here()) {
    return emulator_shuffle(WarpOperation::Up, mask, value, static_cast<int>(by), width, place);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, Place place = Place::here()) {
    return emulator_shuffle(WarpOperation::Down, mask, value, static_cast<int>(by), width, place);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int by, int width = 32, Place place = Place::here()) {
    return emulator_shuffle(WarpOperation::Xor, mask, value, by, width, place);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, Place place = Place::here()) {
    const std::uint64_t vote = predicate != 0;
    return static_cast<unsigned>(
        emulator::warp_operation({WarpOperation::Ballot, mask, vote, 0, 32, place}));
}
inline int __any_sync(unsigned mask, int predicate, Place place = Place::here()) {
    return __ballot_sync(mask, predicate, place) != 0;
}
inline int __all_sync(unsigned mask, int predicate, Place place = Place::here()) {
    return __ballot_sync(mask, predicate, place) == mask;
}

// One thread runs at a time, so plain operations are atomic. All give back what was there.
template <class T, class Operation>
inline T emulator_atomic(T* where, Operation operation) {
    const T before = *where;
    *where = operation(before);
    return before;
}
template <class T>
using EmulatorValue = std::common_type_t<T>;  // not deduced: atomicAdd(&counter, 1)
template <class T>
inline T atomicAdd(T* where, EmulatorValue<T> value) {
    return emulator_atomic(where, [=](T x) { return static_cast<T>(x + value); });
}
template <class T>
inline T atomicMax(T* where, EmulatorValue<T> value) {
    return emulator_atomic(where, [=](T x) { return x > value ? x : value; });
}
template <class T>
inline T atomicMin(T* where, EmulatorValue<T> value) {
    return emulator_atomic(where, [=](T x) { return x < value ? x : value; });
}
template <class T>
inline T atomicOr(T* where, EmulatorValue<T> value) {
    return emulator_atomic(where, [=](T x) { return static_cast<T>(x | value); });
}
template <class T>
inline T atomicAnd(T* where, EmulatorValue<T> value) {
    return emulator_atomic(where, [=](T x) { return static_cast<T>(x & value); });
}
template <class T>
inline T atomicExch(T* where, EmulatorValue<T> value) {
    return emulator_atomic(where, [=](T) { return value; });
}
template <class T>
inline T atomicCAS(T* where, EmulatorValue<T> wanted, EmulatorValue<T> value) {
    return emulator_atomic(where, [=](T x) { return x == wanted ? value : x; });
}

template <class T>
inline T __ldg(const T* from) { return *from; }
template <class T>
inline T __ldcs(const T* from) { return *from; }
template <class T>
inline void __stcs(T* to, T value) { *to = value; }

// ---- what kernels/vector.cuh writes in asm ------------------------------------------------------

namespace cuquant {

float float_of_half(unsigned bits);

inline float float_of_high_half(unsigned pair) { return float_of_half(pair >> 16); }

// The float16 nearest to x; ties to even, NaN has cvt's bits.
unsigned emulator_half_of(float x);
inline unsigned halves_of(float low, float high) {
    return emulator_half_of(low) | emulator_half_of(high) << 16;
}

inline void emulator_check_alignment(const void* address, const char* what) {
    if (reinterpret_cast<std::uintptr_t>(address) % 16)
        emulator::fail("misaligned %s: %p is no multiple of 16", what, address);
}
inline uint4 load16(const void* from) {
    emulator_check_alignment(from, "load16");
    return *static_cast<const uint4*>(from);
}
inline void store16(void* to, uint4 value) {
    emulator_check_alignment(to, "store16");
    *static_cast<uint4*>(to) = value;
}

}  // namespace cuquant

// ---- what device/dot.cuh, device/mma.cuh and device/wgmma.cuh write in asm ----------------------------------

#include "dot.h"
#include "mma.h"
#include "hopper.h"

// ---- what g++ found with -fsanitize=bounds,shift-exponent,alignment -----------------------------

namespace emulator {

struct Found { const char* file; unsigned line, column; };  // begins all of the sanitizer's records

[[noreturn]] void fail_at(const Found& found, const char* what);

}  // namespace emulator

