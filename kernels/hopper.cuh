// Hopper's own: barriers in shared memory, the copy engine, matrix products of a warpgroup.
// A kernel that includes this is compiled for sm_90a alone.
#pragma once
#include "cluster.cuh"

#if !defined(CUQUANT_EMULATOR) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "hopper.cuh needs -arch=sm_90a"
#endif

namespace cuquant {

struct alignas(64) TensorMap { u64 words[16]; };  // a CUtensorMap

// What products read in shared memory, rows of 128 bytes whose 16-byte parts the copy engine has
// swizzled: address / 16, and 1,024 bytes from 8 rows to the next 8. A step of 16 elements along K is 2 more.
__device__ inline u64 swizzled(const void* p) {
    return static_cast<u64>((shared_address(p) & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

#ifndef CUQUANT_EMULATOR

// ---- barriers in shared memory ------------------------------------------------------------------

__device__ inline void barrier_init(u64* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// What was initialised can be seen by the copy engine and by other blocks of the cluster.
__device__ inline void barrier_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void barrier_expect(u64* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ inline void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}
// Wait until the phase of this parity is over.
__device__ inline void barrier_wait(u64* barrier, u32 parity) {
    asm volatile("{.reg .pred p;\n"
                 "again_%=: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra done_%=;\n"
                 "bra again_%=;\n"
                 "done_%=:}" :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}

// ---- copies -------------------------------------------------------------------------------------

__device__ inline void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory"); }

// A box of a matrix, from `column` of row `row` on, to shared memory; what lies outside is 0.
__device__ inline void copy_box(void* to, const TensorMap* map, u64* barrier, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 :: "r"(shared_address(to)), "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row) : "memory");
}

// ---- warps with different tasks -----------------------------------------------------------------

template <int kRegisters> __device__ inline void registers_up() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(kRegisters)); }
template <int kRegisters> __device__ inline void registers_down() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(kRegisters)); }
// A barrier of some of the block's warps; number 0 is that of __syncthreads.
__device__ inline void named_barrier(int number, int threads) { asm volatile("bar.sync %0, %1;" :: "r"(number), "r"(threads) : "memory"); }

// Four matrices of 8 x 8 elements, one word of each in a lane (2 columns of a row), column by column: lane
// 8 i + j has the address of column j of matrix i.
__device__ inline void store_matrices_transposed(u32 shared_address, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" :: "r"(shared_address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

// ---- products of a warpgroup --------------------------------------------------------------------

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ inline void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(kPending) : "memory"); }

// d[64, n] = a[64, 16] b[n, 16]^T, added to d where `keep`; a in registers, b in shared memory.
template <class T, int kColumns>
__device__ inline void wgmma(float (&d)[kColumns / 2], const u32 (&a)[4], u64 b, int keep);

#define CUQUANT_WGMMA_8(T, TYPE) \
    template <> __device__ inline void wgmma<T, 8>(float (&d)[4], const u32 (&a)[4], u64 b, int keep) { \
        asm volatile("{.reg .pred p; setp.ne.b32 p, %9, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32." TYPE "." TYPE " {" \
            "%0, %1, %2, %3" \
            "}, {%4, %5, %6, %7}, %8, p, 1, 1, 0;}" \
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep)); \
    }
CUQUANT_WGMMA_8(Half, "f16")
CUQUANT_WGMMA_8(Bfloat16, "bf16")
#undef CUQUANT_WGMMA_8

#define CUQUANT_WGMMA_16(T, TYPE) \
    template <> __device__ inline void wgmma<T, 16>(float (&d)[8], const u32 (&a)[4], u64 b, int keep) { \
        asm volatile("{.reg .pred p; setp.ne.b32 p, %13, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32." TYPE "." TYPE " {" \
            "%0, %1, %2, %3, %4, %5, %6, %7" \
            "}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;}" \
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]) \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep)); \
    }
CUQUANT_WGMMA_16(Half, "f16")
CUQUANT_WGMMA_16(Bfloat16, "bf16")
#undef CUQUANT_WGMMA_16

#define CUQUANT_WGMMA_32(T, TYPE) \
    template <> __device__ inline void wgmma<T, 32>(float (&d)[16], const u32 (&a)[4], u64 b, int keep) { \
        asm volatile("{.reg .pred p; setp.ne.b32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " {" \
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
            "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;}" \
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]) \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep)); \
    }
CUQUANT_WGMMA_32(Half, "f16")
CUQUANT_WGMMA_32(Bfloat16, "bf16")
#undef CUQUANT_WGMMA_32

#define CUQUANT_WGMMA_64(T, TYPE) \
    template <> __device__ inline void wgmma<T, 64>(float (&d)[32], const u32 (&a)[4], u64 b, int keep) { \
        asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" \
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31" \
            "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;}" \
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]) \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep)); \
    }
CUQUANT_WGMMA_64(Half, "f16")
CUQUANT_WGMMA_64(Bfloat16, "bf16")
#undef CUQUANT_WGMMA_64

#define CUQUANT_WGMMA_128(T, TYPE) \
    template <> __device__ inline void wgmma<T, 128>(float (&d)[64], const u32 (&a)[4], u64 b, int keep) { \
        asm volatile("{.reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" \
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63" \
            "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;}" \
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
              "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
              "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
              "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
              "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]) \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep)); \
    }
CUQUANT_WGMMA_128(Half, "f16")
CUQUANT_WGMMA_128(Bfloat16, "bf16")
#undef CUQUANT_WGMMA_128

#define CUQUANT_WGMMA_256(T, TYPE) \
    template <> __device__ inline void wgmma<T, 256>(float (&d)[128], const u32 (&a)[4], u64 b, int keep) { \
        asm volatile("{.reg .pred p; setp.ne.b32 p, %133, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {" \
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
            "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
            "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
            "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
            "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127" \
            "}, {%128, %129, %130, %131}, %132, p, 1, 1, 0;}" \
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
              "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
              "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
              "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
              "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), \
              "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), \
              "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), \
              "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), \
              "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), \
              "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), \
              "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), \
              "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), \
              "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127]) \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep)); \
    }
CUQUANT_WGMMA_256(Half, "f16")
CUQUANT_WGMMA_256(Bfloat16, "bf16")
#undef CUQUANT_WGMMA_256

#endif  // CUQUANT_EMULATOR

}  // namespace cuquant
