// Hopper's products of codes of a byte, and of bits: d[64, n] (+)= a[64, 32 bytes] b[n, 32 bytes]^T, both in shared
// memory, in rows of 128 bytes whose 16-byte parts the copy engine has swizzled. A kernel that includes this is
// compiled for sm_90a alone.
#pragma once
#include "device/wgmma.cuh"

namespace cuquant {

// What the bytes of a side are. Bits, low first, are multiplied as 0 and 1.
enum CodeKind { kSigned8 = 0, kUnsigned8 = 1, kE4m3 = 2, kE5m2 = 3, kBits = 4 };

// The products of two kinds: integers with each other, small floats with each other, or bits.
template <int kA, int kB>
struct Products {
    static constexpr int a = kA, b = kB;
    static constexpr bool bits = kA == kBits, floats = kA == kE4m3 || kA == kE5m2;
    static_assert(bits == (kB == kBits) && floats == (kB == kE4m3 || kB == kE5m2), "kinds that can be multiplied");
    using Sum = Choice<floats, float, int>;
};

#ifndef CUQUANT_EMULATOR

// Arrive at a named_barrier without waiting.
__device__ inline void named_barrier_arrive(int number, int threads) { asm volatile("bar.arrive %0, %1;" :: "r"(number), "r"(threads) : "memory"); }

// The larger one; NaN if one is.
__device__ inline float max_or_nan(float x, float y) {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(x), "f"(y));
    return most;
}

// A place in the shared memory of all blocks of a cluster, which lies in each where `own` does in this one.
struct OfBlocks {
    u32 own;

    __device__ explicit OfBlocks(const void* p) : own(shared_address(p)) {}
    // 16 bytes of block `rank`, `behind` bytes further.
    __device__ uint4 load(u32 rank, int behind) const {
        uint4 v;
        asm volatile("{.reg .b32 at; mapa.shared::cluster.u32 at, %4, %5; ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [at];}"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(own + behind), "r"(rank) : "memory");
        return v;
    }
};

// The products of 32 bytes of each row; `a` and `b` as `swizzled` says. `add`: to d, else they take its place.
template <int kColumns>
struct Multiply;  // a warpgroup's, with so many rows of b

// asm wants every operand written out: the names of the first 8, 16, ... 128 of them, and as many sums from i on.
#define CUQUANT_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define CUQUANT_NAMES_16 CUQUANT_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define CUQUANT_NAMES_24 CUQUANT_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define CUQUANT_NAMES_32 CUQUANT_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define CUQUANT_NAMES_40 CUQUANT_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define CUQUANT_NAMES_48 CUQUANT_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define CUQUANT_NAMES_56 CUQUANT_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define CUQUANT_NAMES_64 CUQUANT_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define CUQUANT_NAMES_72 CUQUANT_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define CUQUANT_NAMES_80 CUQUANT_NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define CUQUANT_NAMES_88 CUQUANT_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define CUQUANT_NAMES_96 CUQUANT_NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define CUQUANT_NAMES_104 CUQUANT_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define CUQUANT_NAMES_112 CUQUANT_NAMES_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define CUQUANT_NAMES_120 CUQUANT_NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define CUQUANT_NAMES_128 CUQUANT_NAMES_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define CUQUANT_SUMS_8(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define CUQUANT_SUMS_16(c, i) CUQUANT_SUMS_8(c, i), CUQUANT_SUMS_8(c, i + 8)
#define CUQUANT_SUMS_24(c, i) CUQUANT_SUMS_16(c, i), CUQUANT_SUMS_8(c, i + 16)
#define CUQUANT_SUMS_32(c, i) CUQUANT_SUMS_16(c, i), CUQUANT_SUMS_16(c, i + 16)
#define CUQUANT_SUMS_40(c, i) CUQUANT_SUMS_32(c, i), CUQUANT_SUMS_8(c, i + 32)
#define CUQUANT_SUMS_48(c, i) CUQUANT_SUMS_32(c, i), CUQUANT_SUMS_16(c, i + 32)
#define CUQUANT_SUMS_56(c, i) CUQUANT_SUMS_32(c, i), CUQUANT_SUMS_24(c, i + 32)
#define CUQUANT_SUMS_64(c, i) CUQUANT_SUMS_32(c, i), CUQUANT_SUMS_32(c, i + 32)
#define CUQUANT_SUMS_72(c, i) CUQUANT_SUMS_64(c, i), CUQUANT_SUMS_8(c, i + 64)
#define CUQUANT_SUMS_80(c, i) CUQUANT_SUMS_64(c, i), CUQUANT_SUMS_16(c, i + 64)
#define CUQUANT_SUMS_88(c, i) CUQUANT_SUMS_64(c, i), CUQUANT_SUMS_24(c, i + 64)
#define CUQUANT_SUMS_96(c, i) CUQUANT_SUMS_64(c, i), CUQUANT_SUMS_32(c, i + 64)
#define CUQUANT_SUMS_104(c, i) CUQUANT_SUMS_64(c, i), CUQUANT_SUMS_40(c, i + 64)
#define CUQUANT_SUMS_112(c, i) CUQUANT_SUMS_64(c, i), CUQUANT_SUMS_48(c, i + 64)
#define CUQUANT_SUMS_120(c, i) CUQUANT_SUMS_64(c, i), CUQUANT_SUMS_56(c, i + 64)
#define CUQUANT_SUMS_128(c, i) CUQUANT_SUMS_64(c, i), CUQUANT_SUMS_64(c, i + 64)

// `sums` is half of `columns`; what follows are the names of the operands behind them.
#define CUQUANT_PRODUCT(kind_a, kind_b, columns, shape, scales, access, sums, a, b, add) \
    if constexpr (kA == kind_a && kB == kind_b) \
        asm volatile("{.reg .b64 m, n; .reg .pred p; mov.b64 m, {" a ", 0x40000040}; mov.b64 n, {" b ", 0x40000040}; " \
                     "setp.ne.b32 p, " add ", 0; wgmma.mma_async.sync.aligned.m64n" #columns shape " {" CUQUANT_NAMES_##sums "}, m, n, p" scales ";}" \
                     : CUQUANT_SUMS_##sums(access, 0) : "r"(from_a), "r"(from_b), "r"(static_cast<int>(adds)))
#define CUQUANT_PRODUCTS(columns, ...) \
    template <> struct Multiply<columns> { \
        template <int kA, int kB> \
        __device__ static void of(Products<kA, kB>, typename Products<kA, kB>::Sum (&d)[columns / 2], u32 from_a, u32 from_b, bool adds) { \
            CUQUANT_PRODUCT(kSigned8, kSigned8, columns, "k32.s32.s8.s8", "", "+r", __VA_ARGS__); \
            CUQUANT_PRODUCT(kSigned8, kUnsigned8, columns, "k32.s32.s8.u8", "", "+r", __VA_ARGS__); \
            CUQUANT_PRODUCT(kUnsigned8, kSigned8, columns, "k32.s32.u8.s8", "", "+r", __VA_ARGS__); \
            CUQUANT_PRODUCT(kUnsigned8, kUnsigned8, columns, "k32.s32.u8.u8", "", "+r", __VA_ARGS__); \
            CUQUANT_PRODUCT(kE4m3, kE4m3, columns, "k32.f32.e4m3.e4m3", ", 1, 1", "+f", __VA_ARGS__); \
            CUQUANT_PRODUCT(kE4m3, kE5m2, columns, "k32.f32.e4m3.e5m2", ", 1, 1", "+f", __VA_ARGS__); \
            CUQUANT_PRODUCT(kE5m2, kE4m3, columns, "k32.f32.e5m2.e4m3", ", 1, 1", "+f", __VA_ARGS__); \
            CUQUANT_PRODUCT(kE5m2, kE5m2, columns, "k32.f32.e5m2.e5m2", ", 1, 1", "+f", __VA_ARGS__); \
            CUQUANT_PRODUCT(kBits, kBits, columns, "k256.s32.b1.b1.and.popc", "", "+r", __VA_ARGS__); \
        } \
    };
CUQUANT_PRODUCTS(16, 8, "%8", "%9", "%10")
CUQUANT_PRODUCTS(32, 16, "%16", "%17", "%18")
CUQUANT_PRODUCTS(48, 24, "%24", "%25", "%26")
CUQUANT_PRODUCTS(64, 32, "%32", "%33", "%34")
CUQUANT_PRODUCTS(80, 40, "%40", "%41", "%42")
CUQUANT_PRODUCTS(96, 48, "%48", "%49", "%50")
CUQUANT_PRODUCTS(112, 56, "%56", "%57", "%58")
CUQUANT_PRODUCTS(128, 64, "%64", "%65", "%66")
CUQUANT_PRODUCTS(144, 72, "%72", "%73", "%74")
CUQUANT_PRODUCTS(160, 80, "%80", "%81", "%82")
CUQUANT_PRODUCTS(176, 88, "%88", "%89", "%90")
CUQUANT_PRODUCTS(192, 96, "%96", "%97", "%98")
CUQUANT_PRODUCTS(224, 112, "%112", "%113", "%114")
CUQUANT_PRODUCTS(256, 128, "%128", "%129", "%130")

#undef CUQUANT_PRODUCTS
#undef CUQUANT_PRODUCT
#undef CUQUANT_NAMES_8
#undef CUQUANT_SUMS_8
#undef CUQUANT_NAMES_16
#undef CUQUANT_SUMS_16
#undef CUQUANT_NAMES_24
#undef CUQUANT_SUMS_24
#undef CUQUANT_NAMES_32
#undef CUQUANT_SUMS_32
#undef CUQUANT_NAMES_40
#undef CUQUANT_SUMS_40
#undef CUQUANT_NAMES_48
#undef CUQUANT_SUMS_48
#undef CUQUANT_NAMES_56
#undef CUQUANT_SUMS_56
#undef CUQUANT_NAMES_64
#undef CUQUANT_SUMS_64
#undef CUQUANT_NAMES_72
#undef CUQUANT_SUMS_72
#undef CUQUANT_NAMES_80
#undef CUQUANT_SUMS_80
#undef CUQUANT_NAMES_88
#undef CUQUANT_SUMS_88
#undef CUQUANT_NAMES_96
#undef CUQUANT_SUMS_96
#undef CUQUANT_NAMES_104
#undef CUQUANT_SUMS_104
#undef CUQUANT_NAMES_112
#undef CUQUANT_SUMS_112
#undef CUQUANT_NAMES_120
#undef CUQUANT_SUMS_120
#undef CUQUANT_NAMES_128
#undef CUQUANT_SUMS_128

#endif  // CUQUANT_EMULATOR

}  // namespace cuquant
