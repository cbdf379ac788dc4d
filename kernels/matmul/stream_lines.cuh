// Where the lanes of a warp read x in shared memory, which lies there token by token.
#pragma once
#include "matmul/stream_meet.cuh"
#include "matmul/stream_rows.cuh"

namespace cuquant {

// Where a lane reads unit 0 of its token of each product, or of any where there is none. `xs` is where unit 0 of token 0 begins, and
// tokens are `pitch` bytes apart.
template <int kProducts>
struct LinesOfX {
    u32 first[kProducts];

    template <class Sides>
    __device__ LinesOfX(u32 xs, int pitch, int tokens, u32, int lane, const Sides&) {
#pragma unroll
        for (int q = 0; q < kProducts; ++q) {
            const int own = 8 * q + lane % 8, m = own < tokens ? own : 0;
            first[q] = xs + m * pitch + lane / 8 * 16;
        }
    }
};

// The same as Rows, a RowWords, has columns. Of columns that are groups a lane may have none of x, or not the first 16 columns, or not
// those behind them; there it reads zeros, from `no_x` on, which no steps lead away from. kGroups: groups that are columns of a token, or 1.
template <class Rows, class Factors, int kProducts, int kGroups>
struct RowsOfX {
    static constexpr bool columns = kGroups > 1, parted = kGroups == 8;
    u32 first[kProducts], behind[parted ? kProducts : 1];
    int step, step_behind;
    const typename Rows::Sides& sides;

    __device__ RowsOfX(u32 xs, int pitch, int tokens, u32 no_x, int lane, const typename Rows::Sides& sides) : step(128), step_behind(128), sides(sides) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int q = 0; q < kProducts; ++q) {
            const int own = (8 * q + g) / kGroups;
            first[q] = xs + (own < tokens ? own : 0) * pitch + Rows::x_place(t);
            if constexpr (columns) {
                if constexpr (parted) behind[q] = Factors::has(true, g, t) ? first[q] + sides.across : no_x;
                if (!Factors::has(false, g, t)) first[q] = no_x;
            }
        }
        if constexpr (columns) {
            step = anew(Factors::has(false, g, t) ? 128 : 0);
            if constexpr (parted) step_behind = anew(Factors::has(true, g, t) ? 128 : 0);
        }
    }
    // The operands of product q, of unit `at` + d.
    __device__ void read(int q, int at, int d, u32 (&b)[8 * Rows::span]) const {
        const u32 line = first[q] + at * step + d * 128;
        Rows::read_x(line, parted ? behind[q] + at * step_behind + d * 128 : line + sides.across, b);
    }
};

}  // namespace cuquant
