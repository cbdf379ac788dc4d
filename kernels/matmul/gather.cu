// Rows in another order: row i of sorted rows is row order[i] of the others. A block copies a row.
#include "device/vector.cuh"

namespace cuquant {

// x [*, columns] with any strides, in elements; out [gridDim.x, pitch], of which what lies behind `columns` is not
// written, and what follows `rows` rows is 0. kVectors: rows of x are contiguous, and they and `pitch` whole vectors.
template <typename T, int kThreads, bool kVectors>
__global__ void __launch_bounds__(kThreads) gather(const T* __restrict__ x, i64 row_stride, i64 column_stride, const i64* __restrict__ order,
                                                   i64 rows, i64 columns, i64 pitch, T* __restrict__ out) {
    constexpr int kWidth = 16 / sizeof(T);
    const bool there = blockIdx.x < rows;
    const T* from = there ? x + order[blockIdx.x] * row_stride : x;
    T* to = out + blockIdx.x * pitch;
    if constexpr (kVectors) {
        for (i64 i = threadIdx.x * kWidth; i < columns; i += kThreads * kWidth) store16(to + i, there ? *reinterpret_cast<const uint4*>(from + i) : make_uint4(0, 0, 0, 0));
    } else {
        for (i64 i = threadIdx.x; i < columns; i += kThreads) to[i] = there ? from[i * column_stride] : static_cast<T>(0);
    }
}

// Sorted rows of floats [*, columns] back to out, with any strides; from row *end on they are NaN: all ones are one.
template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads) scatter(const T* __restrict__ x, const i64* __restrict__ order, const i64* __restrict__ end,
                                                    i64 columns, T* __restrict__ out, i64 row_stride, i64 column_stride) {
    const bool there = blockIdx.x < *end;
    const T* const from = x + blockIdx.x * columns;
    T* const to = out + order[blockIdx.x] * row_stride;
    for (i64 i = threadIdx.x; i < columns; i += kThreads) to[i * column_stride] = there ? from[i] : static_cast<T>(~0ull);
}

}  // namespace cuquant
