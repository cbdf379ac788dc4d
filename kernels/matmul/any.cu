// Products x @ w.T of float arrays with operands of any kind, shape and strides, in float32: what the fast
// kernels do not take, and what they are measured against. Two matrices are multiplied at once: those of a
// gated unit, or neighbouring rows of one.
// matmul_tiles: a thread block makes a tile of the output from tiles in shared memory, a thread 4 x 8 of it.
// matmul_rows: for few rows of x; a warp (or several, each a part of the depth) takes two rows of weights.
#include "matmul/segment.cuh"
#include "matmul/operands.cuh"

namespace cuquant {

// Where matrices begin, for products of many: a batch index is made of digits of these sizes, the last one
// fastest.
struct Batch {
    static constexpr int most = 6;
    i64 dims;
    i64 sizes[most], x[most], weights[most], out[most];

    __device__ i64 offset(i64 batch, const i64* steps) const {
        i64 sum = 0;
        for (int d = static_cast<int>(dims) - 1; d >= 0; --d) {
            sum += batch % sizes[d] * steps[d];
            batch /= sizes[d];
        }
        return sum;
    }
};

struct Problem {
    i64 rows, columns, depth;              // of x, of the weights, and of both
    i64 row_tiles, column_tiles, tiles;    // all of them are row_tiles * column_tiles for each of a batch
    const i64* order;                      // null, or the rows of x sorted by expert
    const Segment* segments;               // [row_tiles], of which the first *segment_count count
    const i64* segment_count;
    i64 expert_step;                       // from the weights of an expert to those of the next
    int gated;                             // silu(first) * second; else `second` is `first`
    int swapped;                           // rows of x are columns of the output
    i64 splits;                            // matmul_rows: warps that share rows of weights
    Batch batch;
};

// What a thread block works on.
struct Place {
    i64 x, weights, out;  // where its matrices begin
    i64 first, count;     // rows
    i64 column;           // the first
    const i64* order;
    bool lost;            // rows without weights

    __device__ i64 row(i64 r) const { return order ? order[first + r] : first + r; }
};

__device__ Place place_of(const Problem& p, i64 tile, i64 rows, i64 columns) {
    const i64 down = tile % p.row_tiles, across = tile / p.row_tiles % p.column_tiles;
    Place place{0, 0, 0, down * rows, 0, across * columns, p.order, false};
    if (p.order) {
        if (down >= *p.segment_count) return place;
        const Segment segment = p.segments[down];
        place.first = segment.first;
        place.count = segment.count;
        place.lost = segment.expert < 0;
        place.weights = place.lost ? 0 : segment.expert * p.expert_step;
        return place;
    }
    place.count = min(rows, p.rows - place.first);
    if (p.batch.dims) {
        const i64 batch = tile / p.row_tiles / p.column_tiles;
        place.x = p.batch.offset(batch, p.batch.x);
        place.weights = p.batch.offset(batch, p.batch.weights);
        place.out = p.batch.offset(batch, p.batch.out);
    }
    return place;
}

// Finish and store element `r`, `column` of what a block works on.
__device__ void store(const Epilogue& epilogue, const Problem& p, const Place& place, i64 r, i64 column, float a, float b) {
    if (r >= place.count || column >= p.columns) return;
    if (p.gated) a = activated(kSilu, a) * b;
    if (place.lost) a = float_of(0x7FC00000u);
    Epilogue own = epilogue;
    own.out = static_cast<u8*>(epilogue.out) + place.out * (epilogue.out_type == kFloat ? 4 : 2);
    const i64 row = place.row(r);
    finish(own, a, p.swapped ? column : row, p.swapped ? row : column);
}

constexpr int kTile = 64, kHalfTile = kTile / 2, kStep = 32, kTileThreads = 256;

// A tile of one operand in shared memory, [kStep][kTile]: 8 KB. Rows are swapped in groups of 8, other ones
// for each chunk, so that the 4 chunks of 8 rows, which a warp stores, lie in 32 banks.
struct Tile {
    float values[kStep * kTile];

    __device__ void store(int row, int chunk, const float* x) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) values[(chunk * kChunk + i) * kTile + (row ^ chunk * 8)] = x[i];
    }
    // Rows `row`..`row` + 3, a multiple of 4, at depth k.
    __device__ float4 load(int row, int k) const {
        return *reinterpret_cast<const float4*>(values + k * kTile + (row ^ k / kChunk * 8));
    }
};

__device__ inline void add_products(float (&sum)[4][4], const float4& x, const float4& w) {
    const float left[4] = {x.x, x.y, x.z, x.w}, right[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = __fmaf_rn(left[i], right[j], sum[i][j]);
}

template <class First, class Second>
__global__ void __launch_bounds__(kTileThreads, 2) matmul_tiles(Dense x, First first, Second second, Epilogue epilogue, Problem p) {
    __shared__ __align__(16) union Shared {
        struct { Tile x, first, second; } step;
        float4 sums[2][kHalfTile][kTile / 4];  // 16 KB
    } shared;  // 24 KB
    __shared__ typename First::Tables first_tables;
    __shared__ typename Second::Tables second_tables;
    first.fill(first_tables, threadIdx.x, kTileThreads);
    second.fill(second_tables, threadIdx.x, kTileThreads);
    __syncthreads();
    const int beside = p.gated ? 0 : kTile;  // columns from the first operand's to the second's
    const int own = threadIdx.x / 4, chunk = threadIdx.x % 4;          // what this thread loads
    const int down = threadIdx.x / 16 * 4, across = threadIdx.x % 16 * 4;  // and what it makes
    for (i64 tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        const Place place = place_of(p, tile, kTile, kTile + beside);
        if (place.count <= 0) continue;  // for all threads
        const Dense::Tables none{};
        const i64 x_row = x.row(place.x, place.row(min(static_cast<i64>(own), place.count - 1)));
        const auto first_row = first.row(place.weights, min(place.column + own, p.columns - 1));
        const auto second_row = second.row(place.weights, min(place.column + own + beside, p.columns - 1));
        float a[4][4] = {}, b[4][4] = {};
        const i64 depth = place.lost ? 0 : p.depth;
        for (i64 k = 0; k < depth; k += kStep) {
            float values[kChunk];
            const i64 from = k + chunk * kChunk;
            x.load(none, x_row, from, depth, values);
            shared.step.x.store(own, chunk, values);
            first.load(first_tables, first_row, from, depth, values);
            shared.step.first.store(own, chunk, values);
            second.load(second_tables, second_row, from, depth, values);
            shared.step.second.store(own, chunk, values);
            __syncthreads();
#pragma unroll 8
            for (int d = 0; d < kStep; ++d) {
                const float4 left = shared.step.x.load(down, d);
                add_products(a, left, shared.step.first.load(across, d));
                add_products(b, left, shared.step.second.load(across, d));
            }
            __syncthreads();  // all have read what the next step overwrites
        }
        // Through shared memory, half of the rows at a time: neighbouring threads store neighbours.
        for (int half = 0; half < 2; ++half) {
            if (down / kHalfTile == half) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    shared.sums[0][down % kHalfTile + i][across / 4] = make_float4(a[i][0], a[i][1], a[i][2], a[i][3]);
                    shared.sums[1][down % kHalfTile + i][across / 4] = make_float4(b[i][0], b[i][1], b[i][2], b[i][3]);
                }
            }
            __syncthreads();
            const float* first_sums = &shared.sums[0][0][0].x;
            const float* second_sums = &shared.sums[1][0][0].x;
#pragma unroll 1
            for (int e = threadIdx.x; e < kHalfTile * kTile; e += kTileThreads) {
                const i64 r = half * kHalfTile + e / kTile, column = place.column + e % kTile;
                store(epilogue, p, place, r, column, first_sums[e], second_sums[e]);
                if (!p.gated) store(epilogue, p, place, r, column + beside, second_sums[e], 0.0f);
            }
            __syncthreads();  // all have read what is overwritten
        }
    }
}

constexpr int kFew = 8, kRowThreads = 256, kWarps = kRowThreads / 32;

template <class First, class Second>
__global__ void __launch_bounds__(kRowThreads, 2) matmul_rows(Dense x, First first, Second second, Epilogue epilogue, Problem p) {
    __shared__ typename First::Tables first_tables;
    __shared__ typename Second::Tables second_tables;
    __shared__ float parts[kWarps][2][kFew];  // 512 bytes: the sums of each warp
    __shared__ i64 x_rows[kFew];
    first.fill(first_tables, threadIdx.x, kRowThreads);
    second.fill(second_tables, threadIdx.x, kRowThreads);
    __syncthreads();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int splits = static_cast<int>(p.splits);
    const int pair = warp / splits, split = warp % splits, pairs = kWarps / splits;
    const int each = p.gated ? 1 : 2;  // columns of a pair of rows
    for (i64 tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        const Place place = place_of(p, tile, kFew, pairs * each);
        if (place.count <= 0) continue;  // for all threads
        const int count = static_cast<int>(place.count);
        const Dense::Tables none{};
        if (static_cast<int>(threadIdx.x) < count) x_rows[threadIdx.x] = x.row(place.x, place.row(threadIdx.x));
        __syncthreads();
        const i64 column = place.column + pair * each;
        const auto first_row = first.row(place.weights, min(column, p.columns - 1));
        const auto second_row = second.row(place.weights, min(column + each - 1, p.columns - 1));
        float a[kFew] = {}, b[kFew] = {};
        const i64 depth = place.lost || column >= p.columns ? 0 : p.depth;
        for (i64 k = (split * 32 + lane) * kChunk; k < depth; k += splits * 32 * kChunk) {
            float left[kChunk], right[kChunk], values[kChunk];
            first.load(first_tables, first_row, k, depth, left);
            second.load(second_tables, second_row, k, depth, right);
#pragma unroll
            for (int m = 0; m < kFew; ++m) {
                if (m >= count) break;  // for all threads
                x.load(none, x_rows[m], k, depth, values);
#pragma unroll
                for (int i = 0; i < kChunk; ++i) {
                    a[m] = __fmaf_rn(values[i], left[i], a[m]);
                    b[m] = __fmaf_rn(values[i], right[i], b[m]);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < kFew; ++m) {
            for (int distance = 16; distance; distance /= 2) {
                a[m] += __shfl_xor_sync(~0u, a[m], distance);
                b[m] += __shfl_xor_sync(~0u, b[m], distance);
            }
            if (lane == 0) {
                parts[warp][0][m] = a[m];
                parts[warp][1][m] = b[m];
            }
        }
        __syncthreads();
        const int m = threadIdx.x % kFew, own = threadIdx.x / kFew;  // a row, and a pair or one of a pair
        if (own < pairs * each) {
            float sum = 0.0f, other = 0.0f;
            const int from = own / each * splits, which = own % each;
            for (int s = 0; s < splits; ++s) {
                sum += parts[from + s][which][m];
                other += parts[from + s][1][m];
            }
            store(epilogue, p, place, m, place.column + own, sum, other);
        }
        __syncthreads();  // all have read what the next tile overwrites
    }
}

}  // namespace cuquant
