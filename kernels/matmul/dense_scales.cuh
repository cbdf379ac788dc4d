// What a warpgroup needs beside codes, brought to shared memory by warps that do not multiply: of each stage its
// scales, where these change along K; and at the end of a tile its scales otherwise, bias and sums of codes.
#pragma once
#include "matmul/coded_results.cuh"
#include "matmul/dense_tiles.cuh"

namespace cuquant {

// The ends of tiles: arrays in shared memory, of rows of a and of b.
template <class Mma, class Tile>
struct Ends {
    using D = DenseTile<Mma, Tile>;
    float *a_scale, *b_scale, *bias;
    int *a_terms, *b_terms;  // [2][rows]

    __device__ explicit Ends(float* at) {
        a_scale = at;
        b_scale = a_scale + kTileRows;
        bias = D::kScaled ? a_scale : b_scale + D::kColumns;
        a_terms = reinterpret_cast<int*>(bias + D::kNamed);
        b_terms = a_terms + 2 * kTileRows;
    }
};

// The scales, and their zero points, of one side's rows of a tile.
struct SideRows {
    const Coded& side;
    i64 matrix, row;  // of the first
    int count;

    __device__ SideRows(const Coded& side, const Rows& rows) : side(side), count(rows.count) {
        matrix = rows.first / side.rows;
        row = rows.first - matrix * side.rows;
    }
    // Where the scales of row i lie, from its first block along K on; -1: there is no such row.
    __device__ i64 place(int i) const { return i < count ? side.scaling.place(matrix, row + i) : -1; }
    __device__ float scale(int i) const { return i < count ? side.scaling.at(place(i)) : 1.0f; }
    // Zero points are signed where codes of `kind` are.
    __device__ int zero(int i, int kind) const {
        if (!side.zero_point || i >= count) return 0;
        const u8 point = side.zero_point[place(i)];
        return kind == kSigned8 ? static_cast<signed char>(point) : point;
    }
    __device__ int sum(int i) const { return side.sums && i < count ? side.sums[matrix * side.rows + row + i] : 0; }
};

// Which block of a side's scales a line is in, one line after the other.
struct BlockCursor {
    int block = 0, in_block = 0, each, last;  // each: lines of a block

    __device__ BlockCursor(const Scaling& of, int line) : last(static_cast<int>(of.across) - 1) {
        each = static_cast<int>(min(of.wide, 1ll << 30)) / kLine;
        if (each > 0) { block = line / each; in_block = line - block * each; }
    }
    __device__ void step() {
        if (++in_block == each) { in_block = 0; block = min(block + 1, last); }
    }
};

// One thread's share of the scales of each stage.
template <class Mma, class Tile>
struct StageScales {
    using D = DenseTile<Mma, Tile>;
    static constexpr int kEach = (D::kScalesA + D::kScalesB + kStagers - 1) / kStagers;
    // Lines whose scales are on their way.
    static constexpr int kAhead = !D::kFloatScales || D::kSubs > 1 ? 1 : kEach > 5 ? 2 : 4;
    const Coded &a, &b;
    int thread;
    BlockCursor in_a, in_b;
    i64 first_a, first_b;  // where the scales of the first rows lie
    int places[kEach];     // those of others behind these; -1: there is no such row
    float values[kAhead][kEach][D::kSubs];

    // From which column on the second block has them; or more than there are.
    __device__ static int second_block(const SideRows& b) {
        const i64 tall = b.side.scaling.tall;
        return static_cast<int>(min(tall - b.row % tall, static_cast<i64>(D::kColumns)));
    }
    // The first column of block `i` of those that are staged: of one, of two, or of both halves.
    __device__ static int first_of(const SideRows& b, int i) {
        return i == 0 ? 0 : D::kBlocks == 1 ? i * D::kPart : second_block(b);
    }
    __device__ StageScales(const SideRows& a_rows, const SideRows& b_rows, int line, int thread)
        : a(a_rows.side), b(b_rows.side), thread(thread), in_a(a.scaling, line), in_b(b.scaling, line) {
        first_a = a.scaling.place(a_rows.matrix, a_rows.row);
        first_b = b.scaling.place(b_rows.matrix, b_rows.row);
#pragma unroll
        for (int n = 0; n < kEach; ++n) {
            const int i = thread + n * kStagers, of_b = i - D::kScalesA;
            if (of_b < 0) places[n] = behind(a_rows, i, first_a);
            else if (of_b >= (D::kBlocks == 1 ? D::kHalves : D::kBlocks ? 2 : D::kColumns)) places[n] = -1;
            else if (!D::kBlocks) places[n] = behind(b_rows, of_b, first_b);
            else places[n] = behind(b_rows, first_of(b_rows, of_b), first_b);
        }
    }
    __device__ static int behind(const SideRows& rows, int i, i64 first) {
        return i < rows.count ? static_cast<int>(rows.place(i) - first) : -1;
    }
    // Those of the next line, as number `own` of kAhead; `line`: which that is.
    __device__ void load(int own, int line) {
        if constexpr (D::kFloatScales && D::kSubs == 1) {
            const float* const from_a = static_cast<const float*>(a.scaling.scale) + first_a + in_a.block;
            const float* const from_b = static_cast<const float*>(b.scaling.scale) + first_b + in_b.block;
#pragma unroll
            for (int n = 0; n < kEach; ++n) {
                const float* const from = thread + n * kStagers < D::kScalesA ? from_a : from_b;
                values[own][n][0] = places[n] < 0 ? 1.0f : from[places[n]];
            }
            in_a.step();
            in_b.step();
        } else {
#pragma unroll
            for (int s = 0; s < D::kSubs; ++s) {
                const u32 k = line * kLine + s * 32;
                const auto block = [&](const Scaling& of) {
                    return min(k / static_cast<u32>(of.wide), static_cast<u32>(of.across) - 1);
                };
                const u32 block_a = block(a.scaling), block_b = block(b.scaling);
#pragma unroll
                for (int n = 0; n < kEach; ++n) {
                    const bool of_a = thread + n * kStagers < D::kScalesA;
                    const Scaling& of = of_a ? a.scaling : b.scaling;
                    const i64 place = (of_a ? first_a : first_b) + places[n] + (of_a ? block_a : block_b);
                    if (places[n] < 0) values[own][n][s] = 1.0f;
                    else if constexpr (D::kFloatScales) values[own][n][s] = static_cast<const float*>(of.scale)[place];
                    else values[own][n][s] = of.at(place);
                }
            }
        }
    }
    __device__ void store(int own, float* to) const {
#pragma unroll
        for (int n = 0; n < kEach; ++n) {
            const int i = thread + n * kStagers, of_b = i - D::kScalesA;
#pragma unroll
            for (int s = 0; s < D::kSubs; ++s) {
                if (of_b < 0) to[s * D::kScalesA + i] = values[own][n][s];
                else if (of_b < D::kScalesB) to[D::kSubs * D::kScalesA + s * D::kScalesB + of_b] = values[own][n][s];
            }
        }
    }
};

// The end of a tile, by kStagers threads. Sums of integers T become T + a0 b0 + a1 b1: with zero points z, sums S of
// codes and K columns, T - za Sb - zb Sa + K za zb; or, of bits with p ones, 4 T + a0 + b0 = K - 2 (pa + pb - 2 T).
template <class Mma, class Tile>
__device__ void bring_end(const Ends<Mma, Tile>& to, const SideRows& a, const SideRows& b, const Place& place, i64 K,
                          const Epilogue& e, int thread) {
    using D = DenseTile<Mma, Tile>;
    const auto side = [&](const SideRows& own, int i, float* scale, int* terms, int rows, bool is_a) {
        if constexpr (!D::kScaled) scale[i] = own.scale(i);
        if constexpr (D::kTerms == 0) {
        } else if constexpr (Mma::bits) {
            terms[i] = (is_a ? static_cast<int>(K) : 0) - 2 * own.sum(i);
        } else {
            const int zero = own.zero(i, is_a ? Mma::a : Mma::b), sum = own.sum(i);
            terms[i] = is_a ? -zero : sum - static_cast<int>(K) * zero;
            terms[rows + i] = is_a ? -sum : zero;
        }
    };
    for (int i = thread; i < kTileRows; i += kStagers) side(a, i, to.a_scale, to.a_terms, kTileRows, true);
    for (int i = thread; i < D::kColumns; i += kStagers) side(b, i, to.b_scale, to.b_terms, D::kColumns, false);
    for (int i = thread; i < D::kNamed; i += kStagers)
        to.bias[i] = e.bias && i < place.w.count ? load_typed(e.bias, e.bias_type, place.column + i) : 0.0f;
}

}  // namespace cuquant
