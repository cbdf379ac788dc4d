// From a warpgroup's sums of a tile to results in global memory. Each warp has 16 rows of side a, which pass through its
// own place in shared memory, so that neighbours in a row of the output are stored together.
#pragma once
#include "device/mma.cuh"
#include "matmul/dense_scales.cuh"

namespace cuquant {

// Four neighbouring results of row m from column n on, of which `count` are there.
__device__ inline void finish_4(const CodedResults& results, float inverse, float4 y, i64 m, i64 n, int count, bool fours) {
    const Epilogue& e = results.epilogue;
    const i64 at = m * e.out_stride + n;
    if (results.is_raw()) {
        const float own[4] = {y.x, y.y, y.z, y.w};
        if (fours) {
            *reinterpret_cast<float4*>(static_cast<float*>(e.out) + at) = y;
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (i < count) static_cast<u32*>(e.out)[m * e.out_stride + (n + i) * e.out_column] = bits_of(own[i]);
        }
        return;
    }
    y = completed_4(e, y, m, n, count);
    const float own[4] = {y.x, y.y, y.z, y.w};
    if (fours && e.out_type != kInt8) {
        store_4(e, y, m, n);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i >= count) continue;
            const i64 to = m * e.out_stride + (n + i) * e.out_column;
            if (e.out_type == kInt8) static_cast<signed char*>(e.out)[to] = static_cast<signed char>(int8_of(own[i], inverse));
            else store_typed(e.out, e.out_type, to, own[i]);
        }
    }
}

// How many of so many columns of b are stored at a time.
__device__ constexpr int piece_of(int columns, int most) {
    while (columns % most) most = most == 64 ? 48 : most == 48 ? 32 : most / 2;
    return most;
}

template <class Mma, class Tile>
struct DenseResults {
    using D = DenseTile<Mma, Tile>;
    using Sum = typename D::Sum;
    static constexpr int kOwn = D::kOwn, kGroups = kOwn / 8;
    static constexpr bool kSwapped = D::kSwapped;
    static constexpr int kPiece = piece_of(kOwn, kSwapped ? 32 : 64), kFloatPiece = piece_of(kOwn, 32);
    static constexpr int kPitch = kSwapped ? 48 : kPiece * 2 + 16;                // bytes of a row of the output
    static constexpr int kFloatPitch = kSwapped ? 20 : kFloatPiece + 4;           // floats
    static_assert((kSwapped ? kPiece : 16) * kPitch <= D::kArea && (kSwapped ? kFloatPiece : 16) * kFloatPitch * 4 <= D::kArea, "there is room");

    const Sum* sums;  // [kOwn / 2]
    const Ends<Mma, Tile>& ends;
    const CodedResults& results;
    const Place& place;
    u8* area;        // the warp's own
    int row, from;   // the warp's first of a's rows, and the first of b's
    int lane;
    float factor, scale[2];
    int terms[2][2];
    bool corrected;

    __device__ DenseResults(const Sum* sums, const Ends<Mma, Tile>& ends, const CodedResults& results, const Place& place,
                            u8* area, int row, int from, int lane, bool corrected)
        : sums(sums), ends(ends), results(results), place(place), area(area), row(row), from(from), lane(lane), corrected(corrected) {
        factor = results.factor ? *results.factor : 1.0f;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int own = row + lane / 4 + 8 * h;
            if constexpr (!D::kScaled) scale[h] = ends.a_scale[own];
            if constexpr (!Mma::floats) {
                terms[h][0] = ends.a_terms[own];
                if constexpr (!Mma::bits) terms[h][1] = ends.a_terms[kTileRows + own];
            }
        }
    }

    // A lane's sums of eight columns of b: two neighbours in each of two rows of a.
    __device__ void exact(int j, Sum (&t)[4]) const {
        const int column = from + 8 * j + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // the compiler would work all results out before a loop that stores them
            if constexpr (is_same<Sum, float>) t[i] = float_of(anew(bits_of(sums[4 * j + i])));
            else t[i] = anew(sums[4 * j + i]);
        }
        if constexpr (Mma::bits) {
            const int2 b = *reinterpret_cast<const int2*>(ends.b_terms + column);
#pragma unroll
            for (int i = 0; i < 4; ++i) t[i] = 4 * t[i] + terms[i / 2][0] + (i % 2 ? b.y : b.x);
        } else if constexpr (!Mma::floats && !D::kScaled) {
            if (corrected) {
                const int2 p = *reinterpret_cast<const int2*>(ends.b_terms + column);
                const int2 q = *reinterpret_cast<const int2*>(ends.b_terms + D::kColumns + column);
#pragma unroll
                for (int i = 0; i < 4; ++i) t[i] += terms[i / 2][0] * (i % 2 ? p.y : p.x) + terms[i / 2][1] * (i % 2 ? q.y : q.x);
            }
        }
    }
    __device__ void scaled(int j, float (&y)[4]) const {
        Sum t[4];
        exact(j, t);
        if constexpr (D::kScaled) {
#pragma unroll
            for (int i = 0; i < 4; ++i) y[i] = t[i] * factor;
        } else {
            const float2 b = *reinterpret_cast<const float2*>(ends.b_scale + from + 8 * j + lane % 4 * 2);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float own = i % 2 ? b.y : b.x, x = static_cast<float>(t[i]);
                y[i] = (kSwapped ? x * own * scale[i / 2] : x * scale[i / 2] * own) * factor;
            }
        }
    }

    // Results of 16 bits without a residual, whole vectors of them.
    __device__ bool is_quick(i64 N) const {
        const Epilogue& e = results.epilogue;
        return !e.residual && (e.activation == kNone || e.activation == kRelu) && e.out_column == 1 && N % 8 == 0 &&
               (e.out_type == kHalf || e.out_type == kBfloat16) && !((reinterpret_cast<u64>(e.out) | static_cast<u64>(e.out_stride) * 2) & 15);
    }
    template <class T>
    __device__ void store_quick() const {
        const Epilogue& e = results.epilogue;
        const bool relu = e.activation == kRelu;
        const int g = lane / 4, t = lane % 4;
        float own_bias[2] = {};
        if constexpr (kSwapped) { own_bias[0] = ends.bias[row + g]; own_bias[1] = ends.bias[row + g + 8]; }
#pragma unroll
        for (int first = 0; first < kOwn; first += kPiece) {
#pragma unroll
            for (int j = first / 8; j < (first + kPiece) / 8; ++j) {
                float y[4];
                scaled(j, y);
                float2 bias = make_float2(0.0f, 0.0f);
                if constexpr (!kSwapped) bias = *reinterpret_cast<const float2*>(ends.bias + from + 8 * j + 2 * t);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    y[i] += kSwapped ? own_bias[i / 2] : i % 2 ? bias.y : bias.x;
                    if (relu) y[i] = activated(kRelu, y[i]);
                }
                const u32 pairs[2] = {pair_of<T>(y[0], y[1]), pair_of<T>(y[2], y[3])};
                const int in_piece = 8 * j - first;
                if constexpr (kSwapped) {
                    store_matrices_transposed(shared_address(area) + (in_piece + lane % 8) * kPitch + lane / 8 % 2 * 16, pairs);
                } else {
#pragma unroll
                    for (int h = 0; h < 2; ++h) *reinterpret_cast<u32*>(area + (g + 8 * h) * kPitch + (in_piece + 2 * t) * 2) = pairs[h];
                }
            }
            __syncwarp();
            constexpr int kVectors = kSwapped ? 2 : kPiece / 8, kLines = kSwapped ? kPiece : 16;
#pragma unroll
            for (int v = 0; v < (kVectors * kLines + 31) / 32; ++v) {
                const int own = lane + 32 * v, line = own / kVectors, vector = own % kVectors;
                const int m = kSwapped ? from + first + line : row + line, n = (kSwapped ? row : from + first) + 8 * vector;
                if ((kVectors * kLines % 32 && line >= kLines) || m >= place.x.count || n >= place.w.count) continue;
                store16(static_cast<T*>(e.out) + (place.x.first + m) * e.out_stride + place.column + n,
                        *reinterpret_cast<const uint4*>(area + line * kPitch + vector * 16));
            }
            __syncwarp();
        }
    }

    // Float32 results without activation and residual, and integers: straight from registers, since four lanes have
    // neighbours that fill a sector of 32 bytes; or eight lanes, where these are of a column.
    __device__ bool is_whole(i64 N) const {
        const Epilogue& e = results.epilogue;
        const bool plain = results.is_raw() || (e.out_type == kFloat && e.activation == kNone && !e.residual);
        return plain && e.out_column == 1 && (kSwapped || !((e.out_stride | N) & 1 || reinterpret_cast<u64>(e.out) & 7));
    }
    template <bool kRaw>
    __device__ void store_whole() const {
        const int g = lane / 4, t = lane % 4;
        u32* const out = static_cast<u32*>(results.epilogue.out) + place.column;
        const i64 stride = results.epilogue.out_stride;
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
            u32 v[4];
            const int column = from + 8 * j + 2 * t;
            if constexpr (kRaw) {
                Sum whole[4];
                exact(j, whole);
#pragma unroll
                for (int i = 0; i < 4; ++i) v[i] = static_cast<u32>(whole[i]);
            } else {
                float y[4];
                scaled(j, y);
#pragma unroll
                for (int i = 0; i < 4; ++i) v[i] = bits_of(y[i] + ends.bias[kSwapped ? row + g + i / 2 * 8 : column + i % 2]);
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int own = row + g + 8 * h;
                if constexpr (kSwapped) {
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (own < place.w.count && column + i < place.x.count) out[(place.x.first + column + i) * stride + own] = v[2 * h + i];
                } else if (own < place.x.count && column < place.w.count) {
                    *reinterpret_cast<uint2*>(out + (place.x.first + own) * stride + column) = make_uint2(v[2 * h], v[2 * h + 1]);
                }
            }
        }
    }

    // All others: by fours through floats, or the bits of integers.
    __device__ void store_any(i64 N) const {
        const Epilogue& e = results.epilogue;
        const bool raw = results.is_raw(), fours = e.out_column == 1 && !((e.out_stride | N) & 3) &&
                   !(reinterpret_cast<u64>(e.out) & (e.out_type == kFloat || raw ? 15 : 7));
        const float inverse = results.inverse();
        float* const floats = reinterpret_cast<float*>(area);
        // The code that stores is there once: it knows every epilogue.
#pragma unroll 1
        for (int first = 0; first < kOwn; first += kFloatPiece) {
#pragma unroll
            for (int own = 0; own < kOwn; own += kFloatPiece)
                if (own == first) put_floats(own, floats, raw);
            __syncwarp();
            constexpr int kFours = kSwapped ? 4 : kFloatPiece / 4, kLines = kSwapped ? kFloatPiece : 16;
#pragma unroll 1
            for (int own = lane; own < kFours * kLines; own += 32) {
                const int line = own / kFours, four = own % kFours;
                const int m = kSwapped ? from + first + line : row + line, n = (kSwapped ? row : from + first) + 4 * four;
                if (m >= place.x.count || n >= place.w.count) continue;
                const float4 y = *reinterpret_cast<const float4*>(floats + line * kFloatPitch + 4 * four);
                finish_4(results, inverse, y, place.x.first + m, place.column + n, min(place.w.count - n, 4), fours);
            }
            __syncwarp();
        }
    }
    __device__ void put_floats(int first, float* to, bool raw) const {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int j = 0; j < kFloatPiece / 8; ++j) {
            float y[4];
            scaled(first / 8 + j, y);
            if constexpr (!Mma::floats && !D::kScaled) {
                if (raw) {
                    Sum whole[4];
                    exact(first / 8 + j, whole);
#pragma unroll
                    for (int i = 0; i < 4; ++i) y[i] = float_of(static_cast<u32>(whole[i]));
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int a = g + i / 2 * 8, b = 8 * j + 2 * t + i % 2;
                to[kSwapped ? b * kFloatPitch + a : a * kFloatPitch + b] = y[i];
            }
        }
    }
    __device__ void store(i64 N) const {
        if (is_whole(N)) {
            if constexpr (!Mma::floats && !D::kScaled) {
                if (results.is_raw()) return store_whole<true>();
            }
            return store_whole<false>();
        }
        if (!is_quick(N)) store_any(N);
        else if (results.epilogue.out_type == kHalf) store_quick<Half>();
        else store_quick<Bfloat16>();
    }
};

}  // namespace cuquant
