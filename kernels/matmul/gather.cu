// Rows of 16-bit floats in another order: row i of the output is row order[i] of x, and what follows `rows` of them is 0. A
// block writes a row.
#include "device/vector.cuh"

namespace cuquant {

// x [*, columns] with any strides, in elements; out [gridDim.x, pitch], of which what lies behind `columns` is not
// written. kVectors: rows of x are contiguous, and they and `pitch` whole vectors of 8.
template <int kThreads, bool kVectors>
__global__ void __launch_bounds__(kThreads) gather(const u16* __restrict__ x, i64 row_stride, i64 column_stride, const i64* __restrict__ order,
                                                   i64 rows, i64 columns, i64 pitch, u16* __restrict__ out) {
    const bool there = blockIdx.x < rows;
    const u16* from = there ? x + order[blockIdx.x] * row_stride : x;
    u16* to = out + blockIdx.x * pitch;
    if constexpr (kVectors) {
        for (i64 i = threadIdx.x * 8; i < columns; i += kThreads * 8) store16(to + i, there ? *reinterpret_cast<const uint4*>(from + i) : make_uint4(0, 0, 0, 0));
    } else {
        for (i64 i = threadIdx.x; i < columns; i += kThreads) to[i] = there ? from[i * column_stride] : static_cast<u16>(0);
    }
}

}  // namespace cuquant
