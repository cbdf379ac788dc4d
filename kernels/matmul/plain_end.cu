// From float32 sums of products of plain floats to what is stored: scales one after the other, what is added, one rounding.
// A thread an element.
#include "matmul/epilogue.cuh"

namespace cuquant {

// Numbers that an output [matrices, rows, columns] meets: steps in elements, 0 where they are repeated.
struct Plane {
    const void* at;  // or null: 1
    i64 matrix, row, column;
    int type;  // a Type

    __device__ float number(i64 m, i64 r, i64 c) const { return load_typed(at, type, m * matrix + r * row + c * column); }
    __device__ float times(float x, i64 m, i64 r, i64 c) const { return at ? __fmul_rn(x, number(m, r, c)) : x; }
};

struct Ending {
    Plane first, second, third;  // scales
    Plane added, beta;           // beta is one number; where it is 0 `added` is not read
    i64 rows, columns;           // of a matrix
    int out_type, relu;
};

__global__ void __launch_bounds__(256) plain_end(
    const float* __restrict__ sums, const __grid_constant__ Ending ending, void* __restrict__ out, i64 blocks) {
    const i64 row = static_cast<i64>(blockIdx.x) / blocks, column = static_cast<i64>(blockIdx.x) % blocks * 256 + threadIdx.x;
    if (column >= ending.columns) return;
    const i64 m = row / ending.rows, r = row % ending.rows, at = row * ending.columns + column;
    float x = ending.first.times(sums[at], m, r, column);
    x = ending.third.times(ending.second.times(x, m, r, column), m, r, column);
    if (ending.added.at && (!ending.beta.at || ending.beta.number(0, 0, 0) != 0.0f)) {
        const float added = ending.added.number(m, r, column);
        x = __fadd_rn(x, ending.beta.times(added, 0, 0, 0));
    }
    store_typed(out, ending.out_type, at, ending.relu ? activated(kRelu, x) : x);
}

}  // namespace cuquant
