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

// One thread's share of the scales of kBatch sums, which lie in shared memory sum by sum: those of a's rows, then b's.
template <class Mma, class Tile>
struct StageScales {
    using D = DenseTile<Mma, Tile>;
    static constexpr int kEach = (D::kScalesOfSum + kStagers - 1) / kStagers, kBytes = kLine / D::kSubs;
    const Scaling &a, &b;
    int thread;
    bool vectors;          // a thread's scales lie side by side, in whole vectors
    i64 first_a, first_b;  // where the scales of the first rows lie
    int places[kEach];     // those of others behind these; -1: there is no such row
    float values[kBatch][kEach];

    // From which column on the second block has them; or more than there are.
    __device__ static int second_block(const SideRows& b) {
        const i64 tall = b.side.scaling.tall;
        return static_cast<int>(min(tall - b.row % tall, static_cast<i64>(D::kColumns)));
    }
    // The first column of block `i` of those that are brought: of one, of two, or of both halves.
    __device__ static int first_of(const SideRows& b, int i) {
        return i == 0 ? 0 : D::kBlocks == 1 ? i * D::kPart : second_block(b);
    }
    __device__ StageScales(const SideRows& a_rows, const SideRows& b_rows, int line, int thread)
        : a(a_rows.side.scaling), b(b_rows.side.scaling), thread(thread) {
        first_a = a.place(a_rows.matrix, a_rows.row);
        first_b = b.place(b_rows.matrix, b_rows.row);
        const auto has_vectors = [&](const Scaling& of) {
            return of.wide == kBytes && of.across % kBatch == 0 && !(reinterpret_cast<u64>(of.scale) & 15);
        };
        vectors = D::kFloatScales && line * D::kSubs % kBatch == 0 && has_vectors(a) && has_vectors(b);
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
    // Those from `line` on.
    __device__ void load(int line) {
        const u32 sum = line * D::kSubs;
        if constexpr (D::kFloatScales) {
            if (vectors) {
                // One by one they are a request of each row for each sum, which the tensor cores' reading waits for.
#pragma unroll
                for (int n = 0; n < kEach; ++n) {
                    const bool of_a = thread + n * kStagers < D::kScalesA;
                    const float* const from = static_cast<const float*>((of_a ? a : b).scale);
                    const i64 place = (of_a ? first_a : first_b) + places[n] + sum;
                    float4 v = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
                    if (places[n] >= 0) v = *reinterpret_cast<const float4*>(from + place);
                    values[0][n] = v.x; values[1][n] = v.y; values[2][n] = v.z; values[3][n] = v.w;
                }
                return;
            }
        }
#pragma unroll
        for (int s = 0; s < kBatch; ++s) {
            const auto block = [&](const Scaling& of) {
                return min((sum + s) * kBytes / static_cast<u32>(of.wide), static_cast<u32>(of.across) - 1);
            };
            const u32 block_a = block(a), block_b = block(b);
#pragma unroll
            for (int n = 0; n < kEach; ++n) {
                const bool of_a = thread + n * kStagers < D::kScalesA;
                const Scaling& of = of_a ? a : b;
                const i64 place = (of_a ? first_a : first_b) + places[n] + (of_a ? block_a : block_b);
                if (places[n] < 0) values[s][n] = 1.0f;
                else if constexpr (D::kFloatScales) values[s][n] = static_cast<const float*>(of.scale)[place];
                else values[s][n] = of.at(place);
            }
        }
    }
    __device__ void store(float* to) const {
#pragma unroll
        for (int n = 0; n < kEach; ++n) {
            const int i = thread + n * kStagers;
#pragma unroll
            for (int s = 0; s < kBatch; ++s)
                if (i < D::kScalesOfSum) to[s * D::kScalesOfSum + i] = values[s][n];
        }
    }
};

// The end of a tile, of which each of kStagers threads has a share in registers until there is room for it. Sums of
// integers T become T + a0 b0 + a1 b1: with zero points z, sums S of codes and K columns, T - za Sb - zb Sa + K za zb;
// or, of bits with p ones, 4 T + a0 + b0 = K - 2 (pa + pb - 2 T).
template <class Mma, class Tile>
struct EndShare {
    using D = DenseTile<Mma, Tile>;
    __device__ static constexpr int each(int rows) { return (rows + kStagers - 1) / kStagers; }
    template <int kRows>
    struct Side { float scale[each(kRows)]; int terms[2][each(kRows)]; };
    Side<kTileRows> a;
    Side<D::kColumns> b;
    float bias[each(D::kNamed)];
    int thread;

    __device__ EndShare(const SideRows& a_rows, const SideRows& b_rows, const Place& place, int depth,
                        const Epilogue& e, int thread) : thread(thread) {
        load<true>(a, a_rows, depth);
        load<false>(b, b_rows, depth);
#pragma unroll
        for (int n = 0; n < each(D::kNamed); ++n) {
            const int i = thread + n * kStagers;
            const bool has = e.bias && i < min(place.w.count, D::kNamed);
            bias[n] = has ? load_typed(e.bias, e.bias_type, place.column + i) : 0.0f;
        }
    }
    template <bool kIsA, int kRows>
    __device__ void load(Side<kRows>& to, const SideRows& rows, int depth) const {
#pragma unroll
        for (int n = 0; n < each(kRows); ++n) {
            const int i = thread + n * kStagers;
            if constexpr (!D::kScaled) to.scale[n] = rows.scale(i);
            if constexpr (D::kTerms == 0) continue;
            const int sum = rows.sum(i);
            if constexpr (Mma::bits) {
                to.terms[0][n] = (kIsA ? depth : 0) - 2 * sum;
            } else {
                const int zero = rows.zero(i, kIsA ? Mma::a : Mma::b);
                to.terms[0][n] = kIsA ? -zero : sum - depth * zero;
                to.terms[1][n] = kIsA ? -sum : zero;
            }
        }
    }
    __device__ void store(const Ends<Mma, Tile>& to) const {
        store(a, to.a_scale, to.a_terms);
        store(b, to.b_scale, to.b_terms);
#pragma unroll
        for (int n = 0; n < each(D::kNamed); ++n)
            if (thread + n * kStagers < D::kNamed) to.bias[thread + n * kStagers] = bias[n];
    }
    template <int kRows>
    __device__ void store(const Side<kRows>& from, float* scale, int* terms) const {
#pragma unroll
        for (int n = 0; n < each(kRows); ++n) {
            const int i = thread + n * kStagers;
            if (i >= kRows) continue;
            if constexpr (!D::kScaled) scale[i] = from.scale[n];
            if constexpr (D::kTerms > 0) terms[i] = from.terms[0][n];
            if constexpr (D::kTerms > 0 && !Mma::bits) terms[kRows + i] = from.terms[1][n];
        }
    }
};

}  // namespace cuquant
