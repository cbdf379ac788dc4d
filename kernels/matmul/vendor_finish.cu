// What happens to sums of products that the vendor's GEMM left in float32: an Epilogue. A thread takes four columns.
#include "matmul/epilogue.cuh"

namespace cuquant {

// sums: [rows, pitch]; pitch is a multiple of 4. There are less than 2^32 fours of columns.
__global__ void __launch_bounds__(256) finish_sums(
    const float* __restrict__ sums, const __grid_constant__ Epilogue epilogue, i64 rows, i64 columns, i64 pitch) {
    const u32 per_row = static_cast<u32>((columns + 3) / 4), item = blockIdx.x * 256 + threadIdx.x, row = item / per_row;
    if (row >= rows) return;
    const i64 column = static_cast<i64>(item - row * per_row) * 4;
    finish_4(epilogue, *reinterpret_cast<const float4*>(sums + row * pitch + column), row, column, columns, has_fours(epilogue, columns));
}

}  // namespace cuquant
