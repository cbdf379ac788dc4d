// x [M, K] times weights [N, K], both of codes of a byte: see coded.cuh; or of bits, which are -1 and 1. On a warp's
// tensor cores: integers of 8 bits, e4m3 and e5m2 as float16, which has all of their numbers, and bits.
// A thread block makes Tile::rows rows of weights times Tile::tokens rows of x; its warps share rows, tokens and K.
// Rows of x lie in memory, or are patches of images: see patches.cuh.
#include "device/bulk.cuh"
#include "device/codes_mma.cuh"
#include "device/dot.cuh"
#include "matmul/coded.cuh"
#include "matmul/coded_results.cuh"
#include "matmul/grouped.cuh"
#include "matmul/patches.cuh"

namespace cuquant {

enum Code { kInt = 0, kUnsigned = 1, kE4m3 = 2, kE5m2 = 3, kBits = 4 };  // kBits: both sides

template <int kCode, int kHalf> __device__ u32 halves_of_codes(u32 word) {
    return kCode == kE4m3 ? halves_of_e4m3<kHalf>(word) : halves_of_e5m2<kHalf>(word);
}

// What zero points change in the integer sum of a segment of `count` columns.
struct Zeros {
    int x, weights;          // zero points
    int x_sum, weights_sum;  // of codes
    // Modulo 2^32, as the sum is.
    __device__ int correct(int sum, int count) const {
        const u32 own = static_cast<u32>(x), other = static_cast<u32>(weights);
        const u32 shifts = own * static_cast<u32>(weights_sum) + other * static_cast<u32>(x_sum);
        return static_cast<int>(static_cast<u32>(sum) - shifts + static_cast<u32>(count) * own * other);
    }
};

// One side's zero point and sum of codes, of a row (of all matrices) and its place among scales.
template <int kCode> __device__ int zero_of(const Coded& side, i64 place) {
    if (!side.zero_point) return 0;
    const u8 point = side.zero_point[place];
    return kCode == kInt ? static_cast<signed char>(point) : point;
}
__device__ inline int sum_of(const Coded& side, i64 row, i64 segments, i64 segment) {
    return side.sums ? side.sums[row * segments + segment] : 0;
}

// Where a row of a side's matrix stands.
struct Standing {
    i64 place, row;  // of its first scale; among the rows of all matrices
    __device__ Standing(const Coded& side, i64 matrix, i64 own) : place(side.scaling.place(matrix, own)), row(matrix * side.rows + own) {}
};

// What the whole sums of a row of either side meet.
struct End { float scale; int zero, sum; };

template <int kCode> __device__ End end_of(const Coded& side, const Standing& at) {
    return {side.scaling.at(at.place), zero_of<kCode>(side, at.place), sum_of(side, at.row, 1, 0)};
}

// Tile, which dense_warps.py prints:
//   tokens, rows               of x and of the weights of a thread block
//   row_warps, token_warps     warps beside each other that share them
//   depth_warps                that take turns along K
//   span, stages               columns that come to shared memory together, and how often
//   step                       columns of a product: 32, or 16 where segments are that short
//   segmented                  whether scales change along K
template <class Codes, class Tile>
struct CodedTile {
    static constexpr bool floats = Codes::x == kE4m3 || Codes::x == kE5m2, bits = Codes::x == kBits;
    using Sum = Choice<floats, float, int>;
    static constexpr int warps = Tile::row_warps * Tile::token_warps * Tile::depth_warps, threads = 32 * warps;
    static constexpr int row_tiles = Tile::rows / Tile::row_warps / 16, token_tiles = Tile::tokens / Tile::token_warps / 8;
    // Bytes from row to row in shared memory: 16 more than columns, so that 8 rows of 16 bytes lie in all banks.
    static constexpr int pitch = Tile::span + 16;
    static constexpr int stage_bytes = (Tile::rows + Tile::tokens) * pitch;
    static constexpr int staged_tokens = Tile::tokens < 32 ? Tile::tokens : 32;  // of sums, on their way to the output
    static constexpr int line = Tile::rows + 4;                                  // their words from token to token

    Sum sums[row_tiles][token_tiles][4];

    __device__ void clear() {
#pragma unroll
        for (int r = 0; r < row_tiles; ++r)
#pragma unroll
            for (int n = 0; n < token_tiles; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[r][n][i] = 0;
    }

    // Add the products of Tile::step columns; `rows` and `tokens` are this lane's addresses for load_matrices.
    __device__ void add(u32 rows, u32 tokens) {
        u32 b[token_tiles + 1][2];
#pragma unroll
        for (int n = 0; n < token_tiles; n += 2) {
            const uint4 both = load_matrices(tokens + n * 8 * pitch);
            b[n][0] = both.x, b[n][1] = both.y;
            b[n + 1][0] = both.z, b[n + 1][1] = both.w;
        }
#pragma unroll
        for (int r = 0; r < row_tiles; ++r) {
            const uint4 part = load_matrices(rows + r * 16 * pitch);
            const u32 a[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
            for (int n = 0; n < token_tiles; ++n) {
                if constexpr (floats) {
                    add_halves<0>(sums[r][n], a[0], a[1], b[n][0]);
                    if constexpr (Tile::step == 32) add_halves<1>(sums[r][n], a[2], a[3], b[n][1]);
                } else if constexpr (bits) {
                    mma_bits(sums[r][n], a, b[n][0], b[n][1]);
                } else {
                    constexpr bool whole = Tile::step == 32;
                    const u32 own[4] = {a[0], a[1], whole ? a[2] : 0, whole ? a[3] : 0};
                    mma_bytes<Codes::weights == kInt, Codes::x == kInt>(sums[r][n], own, b[n][0], whole ? b[n][1] : 0);
                }
            }
        }
    }

    // 16 columns: bytes 4 t .. 4 t + 3 of a lane are columns 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t of both sides alike.
    template <int kPart>
    __device__ static void add_halves(float (&d)[4], u32 upper, u32 lower, u32 token) {
        const u32 a[4] = {halves_of_codes<Codes::weights, 0>(upper), halves_of_codes<Codes::weights, 0>(lower),
                          halves_of_codes<Codes::weights, 1>(upper), halves_of_codes<Codes::weights, 1>(lower)};
        mma_halves(d, a, halves_of_codes<Codes::x, 0>(token), halves_of_codes<Codes::x, 1>(token));
    }
};

// A warp's place in its block's tile.
template <class Tile>
struct WarpPlace {
    int row, token, depth;
    __device__ explicit WarpPlace(int warp)
        : row(warp % Tile::row_warps * (Tile::rows / Tile::row_warps)),
          token(warp / Tile::row_warps % Tile::token_warps * (Tile::tokens / Tile::token_warps)),
          depth(warp / (Tile::row_warps * Tile::token_warps)) {}
};

// Blocks of a multiprocessor: elsewhere shared memory has room for one, or registers would spill.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900)
constexpr int kBlocks = 2;
#else
constexpr int kBlocks = 1;
#endif

// X: Coded, or Patches. K counts bytes: of bits `segment` has the columns, which are one segment.
template <class Codes, class Tile, class X>
__global__ void __launch_bounds__(CodedTile<Codes, Tile>::threads, Tile::segmented || CodedTile<Codes, Tile>::floats ? 1 : kBlocks) dense_warps(
    const __grid_constant__ X x, const __grid_constant__ Coded weights, const __grid_constant__ Groups groups,
    const __grid_constant__ CodedResults results, i64 N, i64 K, i64 segment, i64 token_tiles) {
    using Own = CodedTile<Codes, Tile>;
    using Sum = typename Own::Sum;
    constexpr int kThreads = Own::threads, kVectors = Tile::span / 16, kSteps = Tile::span / Tile::step;
    static_assert(kSteps % Tile::depth_warps == 0, "warps take turns");
    constexpr int kEndsAt = Own::staged_tokens * Own::line * 4, kEnds = Tile::segmented ? 0 : Tile::rows + Tile::tokens;
    static_assert(kEndsAt + kEnds * sizeof(End) <= Tile::stages * Own::stage_bytes, "sums have the place of codes");
    extern __shared__ __align__(1024) u8 shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const GroupTile tile = tile_of<Tile::tokens>(groups, static_cast<i64>(blockIdx.x) % token_tiles);
    if (tile.count <= 0) return;  // for all threads
    const i64 first_row = static_cast<i64>(blockIdx.x) / token_tiles * Tile::rows;
    const i64 segments = Tile::segmented ? (K + segment - 1) / segment : 1;
    const WarpPlace<Tile> place(warp);
    // x's matrix, where it has several: those of a batch.
    const i64 x_matrix = x.rows ? tile.first / x.rows : 0, x_row = tile.first - x_matrix * x.rows;
    const auto weights_row = [&](int r) { return min(first_row + r, N - 1); };
    const auto token_row = [&](int r) { return x_row + min(static_cast<i64>(r), tile.count - 1); };

    // A thread copies 16 bytes at the same column of several rows: where they begin, and where they go.
    constexpr int kRowsAtOnce = kThreads / kVectors, kCopies = (Tile::rows + Tile::tokens + kRowsAtOnce - 1) / kRowsAtOnce;
    const int first_copied = threadIdx.x / kVectors, column = threadIdx.x % kVectors * 16;
    const u8* sources[kCopies];
#pragma unroll
    for (int c = 0; c < kCopies; ++c) {
        const int r = min(first_copied + c * kRowsAtOnce, Tile::rows + Tile::tokens - 1);
        const bool is_x = r >= Tile::rows;
        const Coded& side = is_x ? x : weights;
        const i64 row = is_x ? x_matrix * x.rows + token_row(r - Tile::rows) : tile.group * weights.rows + weights_row(r);
        sources[c] = side.codes + row * side.stride + column;
    }
    constexpr int kOfWeights = Tile::rows / kRowsAtOnce;
    static_assert(Tile::rows % kRowsAtOnce == 0, "all threads copy rows of one side at once");
    typename X::Start starts[kCopies - kOfWeights];  // in place of x's sources, where it has no rows in memory
    if constexpr (X::is_patches) {
#pragma unroll
        for (int c = kOfWeights; c < kCopies; ++c) starts[c - kOfWeights] = x.start(token_row(min(first_copied + c * kRowsAtOnce - Tile::rows, Tile::tokens - 1)));
    }
    // The columns from `from` on, which come one span after the other.
    const auto copy = [&](int stage, i64 from) {
        const i64 left = K - from - column;
        const int count = static_cast<int>(min(max(left, 0ll), 16ll));
        u8* to = shared + stage * Own::stage_bytes + first_copied * Own::pitch + column;
        const auto tap = x.tap(count > 0 ? from + column : 0);
#pragma unroll
        for (int c = 0; c < kCopies; ++c) {
            const bool has = (c + 1) * kRowsAtOnce <= Tile::rows + Tile::tokens || first_copied + c * kRowsAtOnce < Tile::rows + Tile::tokens;
            if (X::is_patches && c >= kOfWeights) {
                const u8* const source = count > 0 ? x.source(starts[c - kOfWeights], tap) : nullptr;
                if (has) copy_ahead(to, source ? source : x.codes, source ? 16 : 0);
            } else if (has) {
                copy_ahead(to, count > 0 ? sources[c] + from : sources[c], count);
            }
            to += kRowsAtOnce * Own::pitch;
        }
    };

    // What this lane tells load_matrices: 16 rows of weights at two places, and 8 or 16 tokens.
    const u32 base = shared_address(shared);
    const int eighth = lane / 8, in_eight = lane % 8;
    const u32 row_at = base + (place.row + eighth % 2 * 8 + in_eight) * Own::pitch + eighth / 2 * 16;
    const int second_tokens = Own::token_tiles > 1 ? eighth / 2 * 8 : 0;
    const u32 token_at = base + (Tile::rows + place.token + second_tokens + in_eight) * Own::pitch + eighth % 2 * 16;

    Own products;
    products.clear();
    float totals[Tile::segmented ? Own::row_tiles : 1][Tile::segmented ? Own::token_tiles : 1][4] = {};
    // Add the sums of a segment times its scales to the totals.
    const auto promote = [&](i64 own_segment) {
        if constexpr (Tile::segmented) {
            const i64 k = own_segment * segment, x_block = k / x.scaling.wide, weights_block = k / weights.scaling.wide;
            const int count = static_cast<int>(min(segment, K - k));
            // By the warp that has the segment's first columns.
            const bool zeros = k / Tile::step % Tile::depth_warps == place.depth && (x.zero_point || weights.zero_point);
            const auto row_of = [&](int r, int h) { return Standing(weights, tile.group, weights_row(place.row + r * 16 + h * 8 + lane / 4)); };
            float scales[Own::row_tiles][2];
#pragma unroll
            for (int r = 0; r < Own::row_tiles; ++r)
#pragma unroll
                for (int h = 0; h < 2; ++h) scales[r][h] = weights.scaling.at(row_of(r, h).place + weights_block);
#pragma unroll
            for (int n = 0; n < Own::token_tiles; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const Standing token(x, x_matrix, token_row(place.token + n * 8 + lane % 4 * 2 + j));
                    const float x_scale = x.scaling.at(token.place + x_block);
#pragma unroll
                    for (int r = 0; r < Own::row_tiles; ++r)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            Sum sum = products.sums[r][n][2 * h + j];
                            if constexpr (!Own::floats) {
                                if (zeros) {
                                    const Standing row = row_of(r, h);
                                    const Zeros both{zero_of<Codes::x>(x, token.place + x_block), zero_of<Codes::weights>(weights, row.place + weights_block),
                                                     sum_of(x, token.row, segments, own_segment), sum_of(weights, row.row, segments, own_segment)};
                                    sum = both.correct(sum, count);
                                }
                            }
                            float& total = totals[r][n][2 * h + j];
                            total = plus_scaled(total, static_cast<float>(sum), x_scale, scales[r][h]);
                        }
                }
            products.clear();
        }
    };

    const i64 spans = (K + Tile::span - 1) / Tile::span;
#pragma unroll
    for (int s = 0; s < Tile::stages - 1; ++s) {
        if (s < spans) copy(s, static_cast<i64>(s) * Tile::span);
        close_copies();
    }
    i64 current = 0, segment_end = segment;  // the segment that sums belong to
    int stage = 0;
    for (i64 span = 0; span < spans; ++span) {
        wait_copies<Tile::stages - 2>();
        __syncthreads();  // this span is there, and nobody reads the one before it any more
        const i64 next = span + Tile::stages - 1;
        if (next < spans) copy((stage + Tile::stages - 1) % Tile::stages, next * Tile::span);
        close_copies();
        const u32 at = stage * Own::stage_bytes;
#pragma unroll
        for (int s = 0; s < kSteps / Tile::depth_warps; ++s) {
            const int own = (s * Tile::depth_warps + place.depth) * Tile::step;
            if constexpr (Tile::segmented) {
                const i64 k = span * Tile::span + own;
                if (k >= segment_end && k < K) {
                    promote(current);
                    current = k / segment;
                    segment_end = (current + 1) * segment;
                }
            }
            products.add(row_at + at + own, token_at + at + own);
        }
        stage = (stage + 1) % Tile::stages;
    }
    promote(current);
    wait_copies<0>();
    __syncthreads();  // sums take the place of codes

    // Of 32 tokens at a time: the sums of warps that shared K are added in their order, then all threads store.
    Sum* const staged = reinterpret_cast<Sum*>(shared);
    float* const staged_totals = reinterpret_cast<float*>(shared);
    End* const ends = reinterpret_cast<End*>(shared + kEndsAt);  // of rows of weights, and of x
    for (int i = threadIdx.x; i < kEnds; i += kThreads) {
        if (i < Tile::rows) ends[i] = end_of<Codes::weights>(weights, {weights, tile.group, weights_row(i)});
        else ends[i] = end_of<Codes::x>(x, {x, x_matrix, token_row(i - Tile::rows)});
    }
    const bool zeros = x.zero_point || weights.zero_point;
    const float inverse = results.inverse();
    for (int begin = 0; begin < Tile::tokens && begin < tile.count; begin += Own::staged_tokens) {
#pragma unroll 1
        for (int d = 0; d < Tile::depth_warps; ++d) {
            if (place.depth == d) {
#pragma unroll
                for (int r = 0; r < Own::row_tiles; ++r)
#pragma unroll
                    for (int n = 0; n < Own::token_tiles; ++n)
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const int token = place.token + n * 8 + lane % 4 * 2 + i % 2 - begin;
                            const int at = token * Own::line + place.row + r * 16 + i / 2 * 8 + lane / 4;
                            if (token < 0 || token >= Own::staged_tokens) continue;
                            if constexpr (Tile::segmented) staged_totals[at] = d ? __fadd_rn(staged_totals[at], totals[r][n][i]) : totals[r][n][i];
                            else staged[at] = d ? staged[at] + products.sums[r][n][i] : products.sums[r][n][i];
                        }
            }
            __syncthreads();
        }
#pragma unroll 1
        for (int i = threadIdx.x; i < Own::staged_tokens * Tile::rows; i += kThreads) {
            // Neighbouring threads store neighbours.
            const int token = (X::is_patches ? i % Own::staged_tokens : i / Tile::rows) + begin;
            const int own = X::is_patches ? i / Own::staged_tokens : i % Tile::rows;
            const i64 n = first_row + own, m = tile.first + token;
            if (token >= tile.count || n >= N) continue;
            const int at = (token - begin) * Own::line + own;
            const i64 target = x.out_row(m, results.epilogue.out_stride) + n * results.epilogue.out_column;
            if constexpr (Tile::segmented) {
                finish(results, inverse, staged_totals[at], m, n, target);
            } else {
                const End &right = ends[own], &left = ends[Tile::rows + token];
                Sum sum = staged[at];
                if constexpr (!Own::floats) {
                    // Of T ones that meet, of p and q ones: K - 2 (p + q - 2 T).
                    if constexpr (Own::bits) sum = static_cast<int>(segment) + 4 * sum - 2 * (left.sum + right.sum);
                    else if (zeros) sum = Zeros{left.zero, right.zero, left.sum, right.sum}.correct(sum, static_cast<int>(K));
                    if (results.is_raw()) {
                        static_cast<int*>(results.epilogue.out)[target] = sum;
                        continue;
                    }
                }
                finish(results, inverse, scaled(static_cast<float>(sum), left.scale, right.scale), m, n, target);
            }
        }
        __syncthreads();  // all have read what is overwritten
    }
}

}  // namespace cuquant
