// Rows first .. first + rows - 1 of a quantized weight, decoded to a matrix of float32, float16 or bfloat16 for
// the vendor's GEMM: each value is rounded once. A thread makes kEach chunks of 8 columns; there are zeros from
// `depth` up to the next multiple of 8.
#include "matmul/vendor_rounded.cuh"
#include "matmul/operands.cuh"

namespace cuquant {

// out: [rows, pitch]; pitch is a multiple of 8. `unit`: what values are multiplied by before they are rounded, or null. There are less than 2^32 chunks.
template <class Operand, int kThreads, int kEach>
__global__ void __launch_bounds__(kThreads) dequantize_rows(
    const __grid_constant__ Operand weights, void* __restrict__ out, int type, const float* __restrict__ unit, i64 first, i64 rows, i64 depth, i64 pitch) {
    const float factor = unit ? *unit : 1.0f;  // early, beside what else is loaded
    __shared__ typename Operand::Tables tables;
    weights.fill(tables, threadIdx.x, kThreads);
    __syncthreads();
    const u32 per_row = static_cast<u32>((depth + kChunk - 1) / kChunk), chunks = static_cast<u32>(rows) * per_row;
    const u32 begin = blockIdx.x * (kThreads * kEach) + threadIdx.x;
    float x[kEach][kChunk];
#pragma unroll
    for (int u = 0; u < kEach; ++u) {
        const u32 c = min(begin + u * kThreads, chunks - 1), row = c / per_row;
        weights.load(tables, weights.row(first, row), static_cast<i64>(c - row * per_row) * kChunk, depth, x[u]);
    }
#pragma unroll
    for (int u = 0; u < kEach; ++u) {
        const u32 c = begin + u * kThreads, row = c / per_row;
        if (c < chunks) store_rounded(out, type, row * pitch + static_cast<i64>(c - row * per_row) * kChunk, x[u], factor);
    }
}

}  // namespace cuquant
