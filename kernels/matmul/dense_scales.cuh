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

    __device__ explicit Ends(u8* at) {
        a_scale = reinterpret_cast<float*>(at);
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
    __device__ int zero(int i) const { return side.zero_point && i < count ? side.zero_point[side.scaling.scale ? place(i) : 0] : 0; }
    __device__ int sum(int i) const { return side.sums && i < count ? side.sums[matrix * side.rows + row + i] : 0; }
};

// One thread's share of the scales of each stage.
template <class Mma, class Tile>
struct StageScales {
    using D = DenseTile<Mma, Tile>;
    static constexpr int kEach = (D::kScalesA + D::kScalesB + kStagers - 1) / kStagers;
    i64 places[kEach];
    float values[kEach][D::kSubs];

    __device__ static int second_block(const SideRows& b, int half) {  // from which column of half on; or more than there are
        const i64 tall = b.side.scaling.tall;
        return static_cast<int>(min(tall - (b.row + half * D::kPart) % tall, static_cast<i64>(D::kColumns)));
    }
    __device__ void begin(const SideRows& a, const SideRows& b, int thread) {
#pragma unroll
        for (int n = 0; n < kEach; ++n) {
            const int i = thread + n * kStagers, of_b = i - D::kScalesA;
            if (of_b < 0) places[n] = a.place(i);
            else if (of_b >= D::kScalesB) places[n] = -1;
            else if (!D::kBlocks) places[n] = b.place(of_b);
            else places[n] = b.place(of_b / 2 * D::kPart + (of_b % 2 ? second_block(b, of_b / 2) : 0));
        }
    }
    __device__ void load(const Coded& a, const Coded& b, int line, int thread) {
#pragma unroll
        for (int s = 0; s < D::kSubs; ++s) {
            const u32 k = line * kLine + s * 32;
            const auto block = [&](const Scaling& of) { return min(k / static_cast<u32>(of.wide), static_cast<u32>(of.across) - 1); };
            const u32 in_a = block(a.scaling), in_b = block(b.scaling);
#pragma unroll
            for (int n = 0; n < kEach; ++n) {
                const bool of_a = thread + n * kStagers < D::kScalesA;
                if (places[n] < 0) values[n][s] = 1.0f;
                else values[n][s] = of_a ? a.scaling.at(places[n] + in_a) : b.scaling.at(places[n] + in_b);
            }
        }
    }
    __device__ void store(float* to, int thread) const {
#pragma unroll
        for (int n = 0; n < kEach; ++n) {
            const int i = thread + n * kStagers, of_b = i - D::kScalesA;
#pragma unroll
            for (int s = 0; s < D::kSubs; ++s) {
                if (of_b < 0) to[s * D::kScalesA + i] = values[n][s];
                else if (of_b < D::kScalesB) to[D::kSubs * D::kScalesA + s * D::kScalesB + of_b] = values[n][s];
            }
        }
    }
};

// The end of a tile, by kStagers threads. Sums of integers T become T + a0 b0 + a1 b1: with zero points z, sums S of
// codes and K columns, T - za Sb - zb Sa + K za zb; or, of bits with p ones, 4 T + a0 + b0 = K - 2 (pa + pb - 2 T).
template <class Mma, class Tile>
__device__ void bring_end(const Ends<Mma, Tile>& to, const SideRows& a, const SideRows& b, const Place& place, i64 K, const Epilogue& e,
                          int thread) {
    using D = DenseTile<Mma, Tile>;
    const auto side = [&](const SideRows& own, int i, float* scale, int* terms, int rows, bool is_a) {
        if constexpr (!D::kScaled) scale[i] = own.scale(i);
        if constexpr (Mma::bits) {
            terms[i] = (is_a ? static_cast<int>(K) : 0) - 2 * own.sum(i);
        } else if constexpr (!Mma::floats) {
            const int zero = own.zero(i), sum = own.sum(i);
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
