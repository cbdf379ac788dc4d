// Every intrinsic that has a subtle meaning, one result a thread: the emulator's words against
// results that are known.
#include "device/vector.cuh"

namespace cuquant {

struct Pair { int first; float second; };

__global__ void words(u64* __restrict__ out, Pair pair, bool flag, i64 large) {
    const int lane = threadIdx.x % 32;
    const u32 self = lane;
    u64* const mine = out + threadIdx.x * 16;
    mine[0] = __shfl_up_sync(~0u, self, 3);
    mine[1] = __shfl_down_sync(~0u, self, 3, 8);
    mine[2] = __shfl_xor_sync(~0u, self, 12, 8);
    mine[3] = __shfl_sync(~0u, self, 5, 4);
    mine[4] = static_cast<u64>(__double_as_longlong(__shfl_sync(~0u, 1.0 / (lane + 1), 31)));
    mine[5] = __ballot_sync(~0u, lane % 3 == 0);
    mine[6] = __any_sync(~0u, lane == 40) * 2 + __all_sync(~0u, lane < 32);
    mine[7] = lane < 8 ? __shfl_sync(0xFFu, static_cast<u64>(self) << 40, 1) : 0;
    mine[8] = __syncthreads_count(lane < 3);
    mine[9] = __funnelshift_r(0x11223344u, 0xAABBCCDDu, 8);
    mine[10] = __byte_perm(0x11223344u, 0xAABBCC80u, 0x0CF5u);
    mine[11] = __umulhi(0x80000000u, 6u) + (static_cast<u64>(__clz(1)) << 32);
    mine[12] = bits_of(__fadd_rz(1.0f, -0x1p-30f)) | static_cast<u64>(bits_of(__fadd_rd(1.0f, -0x1p-30f))) << 32;
    mine[13] = pair.first + static_cast<u64>(pair.second) + (flag ? 100 : 0);
    mine[14] = large;
    mine[15] = min(-1, 7) + max(3u, 5u);
}

__global__ void halves(const u32* __restrict__ bits, u32* __restrict__ out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 pair = halves_of(float_of(bits[i]), 1.0f);
    out[2 * i] = pair;
    out[2 * i + 1] = bits_of(float_of_half(pair));
}

__global__ void count(int* total, u32* most) {
    atomicAdd(total, 1);
    atomicMax(most, blockIdx.x * blockDim.x + threadIdx.x);
}

}  // namespace cuquant
