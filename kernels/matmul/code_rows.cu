// Rows of x whose elements are bytes, for matmul_hopper: each 16 columns in the order that layout/byte_fragments.cuh
// says, rows in another order where experts have them; and x's scales as floats, side by side for rows that follow each
// other. A thread makes a vector of 16 bytes, and some scales.
#include "device/overlap.cuh"
#include "matmul/coded.cuh"

namespace cuquant {

// out [all_rows, stride] and scales [groups, pitch]. Row i is row order[i] of x, or row i; those behind `rows` are 0.
__global__ void __launch_bounds__(256) code_rows(const __grid_constant__ Coded x, const i64* __restrict__ order, i64 rows, i64 all_rows,
                                                 int groups, i64 pitch, u8* __restrict__ out, float* __restrict__ scales) {
    let_next_start();
    wait_for_earlier();
    const i64 vectors = x.stride / 16, index = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
    const auto row_of = [&](i64 i) { return order ? order[i] : i; };
    if (index < all_rows * vectors) {
        const i64 row = index / vectors, at = index % vectors * 16;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row < rows) v = *reinterpret_cast<const uint4*>(x.codes + row_of(row) * x.stride + at);
        store16(out + row * x.stride + at, make_uint4(__byte_perm(v.x, v.z, 0x5140), __byte_perm(v.x, v.z, 0x7362),
                                                      __byte_perm(v.y, v.w, 0x5140), __byte_perm(v.y, v.w, 0x7362)));
    }
    const i64 threads = static_cast<i64>(gridDim.x) * 256;
    for (i64 i = index; i < groups * pitch; i += threads) {
        const i64 row = i % pitch, group = i / pitch;
        scales[i] = row < rows ? x.scaling.at(x.scaling.place(0, row_of(row)) + group) : 0.0f;
    }
}

}  // namespace cuquant
