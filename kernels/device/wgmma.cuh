// Hopper's own: stores to another block, matrix products of a warpgroup.
// A kernel that includes this is compiled for sm_90a alone.
#pragma once
#include "device/bytes.cuh"
#include "device/tma.cuh"
#include "device/barrier.cuh"

#if !defined(CUQUANT_EMULATOR) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "products of a warpgroup need -arch=sm_90a"
#endif

namespace cuquant {

// Elements of both sides of a product: their bytes, how many columns one product takes, and what it adds up.
template <class T> struct Operand {
    static constexpr int bytes = 2, columns = 16;
    using Sum = float;
    using Result = T;  // of 16 bits, what sums are rounded to
};
template <> struct Operand<E4m3> {  // its sums keep about 14 bits: see matmul/hopper_codes.cuh
    static constexpr int bytes = 1, columns = 32;
    using Sum = float;
    using Result = Bfloat16;
};
template <> struct Operand<Int8> {
    static constexpr int bytes = 1, columns = 32;
    using Sum = int;
    using Result = Bfloat16;
};

// What products read in shared memory, rows of 128 bytes (of 64 where an element is a byte) whose 16-byte parts the copy
// engine has swizzled: address / 16. The upper word, which wgmma adds, says so, and that it is 1,024 bytes (512) from 8
// rows to the next 8. The columns of a product, 32 bytes along K, are 2 more.
__device__ inline u32 swizzled(const void* p) { return (shared_address(p) & 0x3FFFF) >> 4 | 1u << 16; }

// The compiler keeps a pointer in registers, where it would compute it anew.
template <class E>
__device__ void keep(E*& p) {
#ifndef CUQUANT_EMULATOR
    asm volatile("" : "+l"(p));
    __builtin_assume(__isGlobal(p));
#endif
}

#ifndef CUQUANT_EMULATOR

// barrier_wait, of a barrier that counts bytes which another block of the cluster stores.
__device__ inline void barrier_wait_remote(u64* barrier, u32 parity) {
    asm volatile("{.reg .pred p;\n"
                 "again_%=: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra done_%=;\n"
                 "bra again_%=;\n"
                 "done_%=:}" :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}

// The barriers of block `rank` of the cluster that lie where `own` do in this one.
struct RemoteBarriers {
    u32 first;

    __device__ RemoteBarriers(const u64* own, u32 rank) { asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(first) : "r"(shared_address(own)), "r"(rank)); }
    __device__ void arrive(int i) const { asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(first + i * 8) : "memory"); }
};

// A place in the shared memory of block `rank` of the cluster, and a barrier there that counts the bytes
// which are stored: where `to` and `barrier` lie in this block's.
struct Remote {
    u32 to, barrier;

    __device__ Remote(const void* own, const u64* own_barrier, u32 rank) {
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(own)), "r"(rank));
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                     : "=r"(barrier) : "r"(shared_address(own_barrier)), "r"(rank));
    }
    __device__ void store(int offset, const float4& v) const {
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                     :: "r"(to + offset), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier) : "memory");
    }
};

// ---- warps with different tasks -----------------------------------------------------------------

// True in one lane of a whole warp.
__device__ inline bool elect_one() {
    u32 chosen;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xFFFFFFFF; selp.u32 %0, 1, 0, p;}" : "=r"(chosen));
    return chosen;
}
template <int kRegisters> __device__ inline void registers_up() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(kRegisters)); }
template <int kRegisters> __device__ inline void registers_down() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(kRegisters)); }

// Two matrices of 8 x 8 elements, one word of each in a lane (2 columns of a row), column by column: lane
// 8 i + j has the address of column j of matrix i.
__device__ inline void store_matrices_transposed(u32 shared_address, const u32 (&r)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" :: "r"(shared_address), "r"(r[0]), "r"(r[1]) : "memory");
}

// ---- products of a warpgroup --------------------------------------------------------------------

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ inline void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(kPending) : "memory"); }

// d[64, n] = a[64, k] b[n, k]^T, added to d if kAdd; a in registers, b in shared memory. k is Operand's columns.
template <class T, int kColumns, bool kAdd>
__device__ inline void wgmma(typename Operand<T>::Sum (&d)[kColumns / 2], const u32 (&a)[4], u32 b);

// asm wants every operand written out: the names of the first 8, 16, ... 128 of them, and as many sums from i on.
#define CUQUANT_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define CUQUANT_NAMES_16 CUQUANT_NAMES_8 \
    ", %8, %9, %10, %11, %12, %13, %14, %15"
#define CUQUANT_NAMES_32 CUQUANT_NAMES_16 \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define CUQUANT_NAMES_48 CUQUANT_NAMES_32 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define CUQUANT_NAMES_64 CUQUANT_NAMES_48 \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define CUQUANT_NAMES_80 CUQUANT_NAMES_64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define CUQUANT_NAMES_96 CUQUANT_NAMES_80 \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define CUQUANT_NAMES_112 CUQUANT_NAMES_96 \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define CUQUANT_NAMES_128 CUQUANT_NAMES_112 \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define CUQUANT_SUMS_4(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define CUQUANT_SUMS_8(c, i) CUQUANT_SUMS_4(c, i), CUQUANT_SUMS_4(c, i + 4)
#define CUQUANT_SUMS_16(c, i) CUQUANT_SUMS_8(c, i), CUQUANT_SUMS_8(c, i + 8)
#define CUQUANT_SUMS_32(c, i) CUQUANT_SUMS_16(c, i), CUQUANT_SUMS_16(c, i + 16)
#define CUQUANT_SUMS_48(c, i) CUQUANT_SUMS_32(c, i), CUQUANT_SUMS_16(c, i + 32)
#define CUQUANT_SUMS_64(c, i) CUQUANT_SUMS_32(c, i), CUQUANT_SUMS_32(c, i + 32)
#define CUQUANT_SUMS_80(c, i) CUQUANT_SUMS_64(c, i), CUQUANT_SUMS_16(c, i + 64)
#define CUQUANT_SUMS_96(c, i) CUQUANT_SUMS_64(c, i), CUQUANT_SUMS_32(c, i + 64)
#define CUQUANT_SUMS_112(c, i) CUQUANT_SUMS_96(c, i), CUQUANT_SUMS_16(c, i + 96)
#define CUQUANT_SUMS_128(c, i) CUQUANT_SUMS_64(c, i), CUQUANT_SUMS_64(c, i + 64)

// `sums` is half of `columns`; what follows are the names of the operands behind them. `more` are numbers behind `add`.
#define CUQUANT_WGMMA(T, kind, upper, more, add, access, columns, sums, a0, a1, a2, a3, matrix) \
    template <> __device__ inline void wgmma<T, columns, add>(Operand<T>::Sum (&d)[sums], const u32 (&a)[4], u32 b) { \
        asm volatile("{.reg .b64 m; mov.b64 m, {" matrix ", " upper "}; " \
                     "wgmma.mma_async.sync.aligned.m64n" #columns kind " {" CUQUANT_NAMES_##sums "}, " \
                     "{" a0 ", " a1 ", " a2 ", " a3 "}, m, " #add more ";}" \
                     : CUQUANT_SUMS_##sums(access, 0) \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b)); \
    }
#define CUQUANT_WGMMAS_OF(T, kind, upper, more, type, ...) \
    CUQUANT_WGMMA(T, kind, upper, more, 0, "=" type, __VA_ARGS__) CUQUANT_WGMMA(T, kind, upper, more, 1, "+" type, __VA_ARGS__)
#define CUQUANT_WGMMAS(...) \
    CUQUANT_WGMMAS_OF(Half, "k16.f32.f16.f16", "0x40000040", ", 1, 1, 0", "f", __VA_ARGS__) \
    CUQUANT_WGMMAS_OF(Bfloat16, "k16.f32.bf16.bf16", "0x40000040", ", 1, 1, 0", "f", __VA_ARGS__) \
    CUQUANT_WGMMAS_OF(E4m3, "k32.f32.e4m3.e4m3", "0x80000020", ", 1, 1", "f", __VA_ARGS__) \
    CUQUANT_WGMMAS_OF(Int8, "k32.s32.s8.s8", "0x80000020", "", "r", __VA_ARGS__)
CUQUANT_WGMMAS(16, 8, "%8", "%9", "%10", "%11", "%12")
CUQUANT_WGMMAS(32, 16, "%16", "%17", "%18", "%19", "%20")
CUQUANT_WGMMAS(64, 32, "%32", "%33", "%34", "%35", "%36")
CUQUANT_WGMMAS(96, 48, "%48", "%49", "%50", "%51", "%52")
CUQUANT_WGMMAS(128, 64, "%64", "%65", "%66", "%67", "%68")
CUQUANT_WGMMAS(160, 80, "%80", "%81", "%82", "%83", "%84")
CUQUANT_WGMMAS(192, 96, "%96", "%97", "%98", "%99", "%100")
CUQUANT_WGMMAS(224, 112, "%112", "%113", "%114", "%115", "%116")
CUQUANT_WGMMAS(256, 128, "%128", "%129", "%130", "%131", "%132")

#undef CUQUANT_WGMMAS
#undef CUQUANT_WGMMAS_OF
#undef CUQUANT_WGMMA
#undef CUQUANT_SUMS_4
#undef CUQUANT_NAMES_8
#undef CUQUANT_SUMS_8
#undef CUQUANT_NAMES_16
#undef CUQUANT_SUMS_16
#undef CUQUANT_NAMES_32
#undef CUQUANT_SUMS_32
#undef CUQUANT_NAMES_48
#undef CUQUANT_SUMS_48
#undef CUQUANT_NAMES_64
#undef CUQUANT_SUMS_64
#undef CUQUANT_NAMES_80
#undef CUQUANT_SUMS_80
#undef CUQUANT_NAMES_96
#undef CUQUANT_SUMS_96
#undef CUQUANT_NAMES_112
#undef CUQUANT_SUMS_112
#undef CUQUANT_NAMES_128
#undef CUQUANT_SUMS_128

#endif  // CUQUANT_EMULATOR

}  // namespace cuquant
