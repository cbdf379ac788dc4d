// Which rows of x are whose expert's, where this is told by where experts' rows end or how many there are.
#include "matmul/grouped.cuh"

namespace cuquant {

// The group of a row, counted through the room of all; -1 where it has none.
__device__ i64 group_of(const Groups& groups, i64 row) {
    if (groups.counts) return row % groups.rows < groups.counts[row / groups.rows] ? row / groups.rows : -1;
    i64 low = 0, high = groups.count + 1;  // the first offset behind the row
    while (low < high) {
        const i64 middle = (low + high) / 2;
        if (groups.offsets[middle] <= row) low = middle + 1;
        else high = middle;
    }
    return low > groups.count ? -1 : low - 1;
}

// ids [rows]. A thread has a row.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) expert_ids(const __grid_constant__ Groups groups, i64 rows, i64* __restrict__ ids) {
    const i64 row = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (row < rows) ids[row] = group_of(groups, row);
}

// 0 in the rows of out [matrices, groups.rows, columns], with any strides, that have no group. Blocks take rows in turn.
template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads) clear_rows(
    const __grid_constant__ Groups groups, i64 rows, T* __restrict__ out, i64 columns, i64 matrix_stride, i64 row_stride, i64 column_stride) {
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        if (group_of(groups, row) >= 0) continue;
        T* const to = out + row / groups.rows * matrix_stride + row % groups.rows * row_stride;
        for (i64 c = threadIdx.x; c < columns; c += kThreads) to[c * column_stride] = 0;
    }
}

}  // namespace cuquant
