// Looks for numbers that are not finite. first_nonfinite: the complement of their lowest flat index. largest_finite: the
// bits of the largest finite |x|, nvfp4's statistic.
#include "format/strided.cuh"

namespace cuquant {

// `first` holds 0 before. A thread looks at a chunk.
template <typename T>
__global__ void first_nonfinite(const T* __restrict__ x, u64* __restrict__ first, Strided source, i64 rows, i64 columns) {
    const i64 along = (columns + kChunk - 1) / kChunk;
    const i64 item = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (item >= rows * along) return;
    const i64 row = item / along, column = item % along * kChunk;
    const int count = static_cast<int>(min(static_cast<i64>(kChunk), columns - column));
    float values[kChunk];
    load_chunk<T, 0>(x + source.row(row, source.strides), column, count, source, values);
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
        if (i < count && !is_finite(values[i])) {
            const i64 index = source.row(row, source.flat) + (column + i) * source.column_flat;
            atomicMax(first, ~static_cast<u64>(index));
        }
}

// `top` holds 0 before. A warp merges its chunks; integers, so any order gives the same.
template <typename T, int kFlags>
__global__ void largest_finite(const T* __restrict__ x, u32* __restrict__ top, Strided source, i64 rows, i64 columns, i64 step) {
    const i64 along = (columns + kChunk - 1) / kChunk;
    u32 largest = 0;
    for (i64 item = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; item < rows * along; item += step) {
        const i64 row = item / along, column = item % along * kChunk;
        const int count = static_cast<int>(min(static_cast<i64>(kChunk), columns - column));
        float values[kChunk];
        load_chunk<T, kFlags>(x + source.row(row, source.strides), column, count, source, values);
#pragma unroll
        for (int i = 0; i < kChunk; ++i)
            if (is_finite(values[i])) largest = max(largest, bits_of(values[i]) & 0x7FFFFFFFu);
    }
    for (int distance = 16; distance; distance /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, distance));
    if (threadIdx.x % 32 == 0) atomicMax(top, largest);
}

// nvfp4: absmax / (6 * 448), 1 where that vanishes.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) global_scale_of(const u32* __restrict__ top, float* __restrict__ scale, float peak) {
    const float found = __fdiv_rn(float_of(*top), peak);
    *scale = found == 0.0f ? 1.0f : found;
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) set(float* __restrict__ out, float value) { *out = value; }

}  // namespace cuquant
