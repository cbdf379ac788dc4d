// Where the lanes of a warp read x in shared memory, which lies there token by token.
#pragma once
#include "matmul/stream_rows.cuh"

namespace cuquant {

// Where a lane reads unit 0 of its token of each product, or of any where there is none; kRows: as Rows, a RowWords,
// has columns. `xs` is where unit 0 of token 0 begins, and tokens are `pitch` bytes apart.
template <class Rows, bool kRows, int kProducts>
struct LinesOfX {
    u32 first[kProducts];
    int step;  // bytes of a unit: with a constant the compiler adds in another order, which took up to 4 registers more
    const typename Rows::Sides& sides;

    __device__ LinesOfX(u32 xs, int pitch, int tokens, int lane, const typename Rows::Sides& sides)
        : step(128), sides(sides) {
#pragma unroll
        for (int q = 0; q < kProducts; ++q) {
            const int own = 8 * q + (kRows ? lane / 4 : lane % 8);
            first[q] = xs + (own < tokens ? own : 0) * pitch + (kRows ? Rows::x_place(lane % 4) : lane / 8 * 16);
        }
    }
    // By rows: the operands of product q, of unit `at` + d.
    __device__ void read(int q, int at, int d, u32 (&b)[8 * Rows::span]) const {
        const u32 line = first[q] + at * step + d * 128;
        Rows::read_x(line, line + sides.across, b);
    }
};

}  // namespace cuquant
