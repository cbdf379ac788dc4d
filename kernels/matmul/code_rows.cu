// Rows of x whose elements are bytes, for matmul_hopper: each 16 columns in the order that layout/byte_fragments.cuh
// says (`first` and `second` choose 4 bytes of 4 columns and of those 8 behind them), rows in another order where experts have them; and x's scales as floats, side by side for rows that follow each
// other. A thread makes a vector of 16 bytes, and some scales. Of groups one warp finds the segments.
#include "device/overlap.cuh"
#include "matmul/coded.cuh"
#include "matmul/grouped.cuh"
#include "matmul/segment.cuh"

namespace cuquant {

// Where segments of groups go; null: there are none to be made.
struct Segments {
    Segment* at;
    i64* count;
    i64* order;   // [rows], which becomes 0, 1, ...
    i64 height;   // rows of a segment at most
};

// Rows that follow each other and have one group, or none: of each group, and then those that no group has.
__device__ inline Segment span_of(const Groups& groups, i64 all, i64 index) {
    const i64 group = index < groups.count ? index : index - groups.count;
    if (index < groups.count) return {group, groups.first(group), groups.size(group)};
    if (groups.counts) return {kNoExpert, groups.first(group) + groups.size(group), groups.rows - groups.size(group)};
    if (group > 0) return {kNoExpert, groups.first(groups.count), all - groups.first(groups.count)};
    return {kNoExpert, 0, groups.first(0)};
}

// By a warp: segments of all spans of `all` rows, each cut into so many that none is too high.
__device__ inline void make_segments(const Groups& groups, i64 all, const Segments& to) {
    const int lane = threadIdx.x % 32;
    const i64 spans = groups.count + (groups.counts ? groups.count : 2);
    i64 made = 0;
    for (i64 begin = 0; begin < spans; begin += 32) {
        Segment own{0, 0, 0};
        if (begin + lane < spans) own = span_of(groups, all, begin + lane);
        const i64 parts = (own.count + to.height - 1) / to.height;
        i64 end = parts;  // of this span and of those before
        for (int d = 1; d < 32; d *= 2) {
            const i64 other = __shfl_up_sync(~0u, end, d);
            if (lane >= d) end += other;
        }
        for (i64 i = 0; i < parts; ++i)
            to.at[made + end - parts + i] = {own.expert, own.first + i * to.height,
                                             min(own.count - i * to.height, to.height)};
        made += __shfl_sync(~0u, end, 31);
    }
    if (lane == 0) *to.count = made;
}

// out [all_rows, stride] and scales [x_groups, pitch]. Row i is row order[i] of x, or row i; those behind `rows` are 0.
__global__ void __launch_bounds__(256) code_rows(
    const __grid_constant__ Coded x, const __grid_constant__ Groups groups, const __grid_constant__ Segments segments,
    const i64* order, i64 rows, i64 all_rows, int x_groups, i64 pitch, u32 first, u32 second, u8* out, float* scales) {
    let_next_start();
    wait_for_earlier();
    const i64 threads = static_cast<i64>(gridDim.x) * 256, index = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
    const auto row_of = [&](i64 i) { return order ? order[i] : i; };
    const i64 vectors = x.stride / 16, own = index / vectors;
    if (own < all_rows) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (own < rows) v = *reinterpret_cast<const uint4*>(x.codes + row_of(own) * x.stride + index % vectors * 16);
        store16(out + index * 16, make_uint4(__byte_perm(v.x, v.z, first), __byte_perm(v.x, v.z, second),
                                             __byte_perm(v.y, v.w, first), __byte_perm(v.y, v.w, second)));
    }
    for (i64 i = index; i < x_groups * pitch; i += threads) {
        const i64 row = i % pitch, group = i / pitch;
        scales[i] = row < rows ? x.scaling.at(x.scaling.place(0, row_of(row)) + group) : 0.0f;
    }
    if (!segments.at) return;
    for (i64 i = index; i < rows; i += threads) segments.order[i] = i;
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x < 32) make_segments(groups, rows, segments);
}

}  // namespace cuquant
