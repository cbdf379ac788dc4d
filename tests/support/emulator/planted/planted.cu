// Sums of 64 numbers a block, times a factor, with one bug at a time. Bug::None is right.
#include "device/vector.cuh"
#include <cub/block/block_reduce.cuh>

namespace cuquant {

enum class Bug {
    None,
    ShuffleLane,        // lanes 8 apart are never added
    NoBarrier,          // the warps' sums are read before they are there
    DivergentBarrier,   // one warp waits in another line than the other
    MissedBarrier,      // half of a warp waits at a barrier, the other half for a shuffle with it
    ExitedLane,         // a shuffle with a lane that has gone
    LateExit,           // a lane goes while others wait for it
    PartialMask,        // a lane reads one that takes no part
    ForeignMask,        // a lane calls that the mask does not name
    UninitialisedShared,
    SharedIndex,        // an index one beyond a shared array
    DynamicShared,      // a write one beyond the dynamic shared memory
    WriteAfter,         // one float after the output
    WriteBefore,
    WriteFarAfter,
    ReadFarAfter,
    WriteToInput,
    Misaligned,         // load16 from 4 bytes further
    MisalignedVector,   // the same by a cast
    Shift,              // by 32
    BlockReduceLane,    // thread 1 uses the result that thread 0 has
};

template <Bug kBug>
__device__ float warp_sum(float sum) {
    for (int d = 16; d; d /= 2) {
        if (kBug == Bug::ShuffleLane && d == 8) continue;
        sum += __shfl_xor_sync(~0u, sum, d);
    }
    return sum;
}

template <Bug kBug>
__device__ float number(const float* x, int i) {
    if constexpr (kBug == Bug::ReadFarAfter) return x[i + 100000];
    const int chunk = i / 4 * 4 + (kBug == Bug::Misaligned);
    uint4 v;
    if constexpr (kBug == Bug::MisalignedVector) v = *reinterpret_cast<const uint4*>(x + chunk + 1);
    else v = load16(x + chunk);
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    return float_of(words[i % 4]);
}

// Lane 3 does what the others do not expect.
template <Bug kBug>
__device__ void misbehave(int lane) {
    if constexpr (kBug == Bug::ExitedLane || kBug == Bug::LateExit) {
        if (lane == (kBug == Bug::ExitedLane ? 0 : 31)) return;
        __shfl_sync(~0u, 1, 0);
    } else if constexpr (kBug == Bug::PartialMask) {
        if (lane < 16) __shfl_sync(0xFFFFu, lane, 16);
    } else if constexpr (kBug == Bug::ForeignMask) {
        __shfl_sync(0xFFFFu, lane, 0);
    }
}

template <Bug kBug>
__global__ void planted(const float* __restrict__ x, float factor, int shift, float* __restrict__ sums) {
    extern __shared__ __align__(16) u8 dynamic_shared[];
    __shared__ float parts[2];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const float mine = number<kBug>(x, blockIdx.x * 64 + thread);
    if constexpr (kBug >= Bug::ExitedLane && kBug <= Bug::ForeignMask) {
        misbehave<kBug>(lane);
        return;
    }
    float* const carried = reinterpret_cast<float*>(dynamic_shared);
    carried[thread] = mine;
    if constexpr (kBug == Bug::DynamicShared) carried[thread + 1] = mine;
    if constexpr (kBug == Bug::MissedBarrier)
        if (lane < 16) __syncthreads();
    const float sum = warp_sum<kBug>(carried[thread]);
    if (lane == 0 && !(kBug == Bug::UninitialisedShared && warp == 1))
        parts[kBug == Bug::SharedIndex ? warp + shift : warp] = sum;
    if constexpr (kBug == Bug::DivergentBarrier) {
        if (warp) __syncthreads();
        else
            __syncthreads();
    } else if constexpr (kBug != Bug::NoBarrier) {
        __syncthreads();  // parts are whole
    }
    float total = parts[0] + parts[1];
    if constexpr (kBug == Bug::BlockReduceLane) {
        using Reduce = cub::BlockReduce<float, 64>;
        __shared__ typename Reduce::TempStorage storage;
        total = Reduce(storage).Reduce(mine, [](float a, float b) { return a + b; });
    }
    if constexpr (kBug == Bug::Shift) total += static_cast<float>(1u << (shift + 31));
    if constexpr (kBug == Bug::WriteToInput) const_cast<float*>(x)[thread] = 0.0f;
    const int far = kBug == Bug::WriteFarAfter ? 100000 : kBug == Bug::WriteAfter ? 1
                    : kBug == Bug::WriteBefore ? -1 - static_cast<int>(2 * blockIdx.x) : 0;
    if (thread == (kBug == Bug::BlockReduceLane)) sums[static_cast<int>(blockIdx.x) + far] = total * factor;
}

}  // namespace cuquant
