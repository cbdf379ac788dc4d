// Which rows of x are whose expert's, where this is told by where experts' rows end or how many there are.
#include "device/vector.cuh"

namespace cuquant {

// The expert of each row; -1 where it has none. offsets: [known + 1], expert e has rows offsets[e] .. offsets[e + 1]; or
// counts: [known], of the `height` rows of an expert the first count. A thread has a row.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) expert_ids(
    const i64* __restrict__ offsets, const i64* __restrict__ counts, i64 rows, i64 known, i64 height, i64* __restrict__ ids) {
    const i64 row = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (row >= rows) return;
    if (counts) {
        const i64 expert = row / height;
        ids[row] = row % height < counts[expert] ? expert : -1;
        return;
    }
    i64 low = 0, high = known + 1;  // the first offset behind the row
    while (low < high) {
        const i64 middle = (low + high) / 2;
        if (offsets[middle] <= row) low = middle + 1;
        else high = middle;
    }
    ids[row] = low > known ? -1 : low - 1;
}

// Where the rows of each expert begin among ids that ascend: offsets [known + 1]. A thread has an expert.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) expert_offsets(const i64* __restrict__ ids, i64 rows, i64 known, i64* __restrict__ offsets) {
    const i64 expert = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (expert > known) return;
    i64 low = 0, high = rows;  // the first row of this expert or a later one
    while (low < high) {
        const i64 middle = (low + high) / 2;
        if (ids[middle] < expert) low = middle + 1;
        else high = middle;
    }
    offsets[expert] = low;
}

// 0 in the rows that have no expert. A block has a row.
template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads) clear_rows(
    const i64* __restrict__ ids, T* __restrict__ out, i64 columns, i64 row_stride, i64 column_stride) {
    const i64 row = blockIdx.x;
    if (ids[row] >= 0) return;
    for (i64 c = threadIdx.x; c < columns; c += kThreads) out[row * row_stride + c * column_stride] = 0;
}

}  // namespace cuquant
