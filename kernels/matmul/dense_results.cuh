// From a warpgroup's sums of a tile to results in global memory. Each warp has 16 rows of side a, which pass through
// its own place in shared memory, so that neighbours in a row of the output are stored together.
#pragma once
#include "device/mma.cuh"
#include "matmul/dense_scales.cuh"

namespace cuquant {

// Four neighbouring results of row m from column n on, of which `count` are there.
__device__ inline void finish_4(const CodedResults& results, float inverse, float4 y, i64 m, i64 n, int count,
                                bool fours) {
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
            if (e.out_type == kInt8)
                static_cast<signed char*>(e.out)[to] = static_cast<signed char>(int8_of(own[i], inverse));
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
    static_assert((kSwapped ? kPiece : 16) * kPitch <= D::kArea, "there is room");
    static_assert((kSwapped ? kFloatPiece : 16) * kFloatPitch * 4 <= D::kArea, "there is room");

    Sum (&sums)[kOwn / 2];
    const Ends<Mma, Tile>& ends;
    const CodedResults& results;
    const Place& place;
    u8* area;        // the warp's own
    int row, from;   // the warp's first of a's rows, and the first of b's
    int lane;
    float factor, scale[2];

    __device__ DenseResults(Sum (&sums)[kOwn / 2], const Ends<Mma, Tile>& ends, const CodedResults& results,
                            const Place& place, u8* area, int row, int from, int lane)
        : sums(sums), ends(ends), results(results), place(place), area(area), row(row), from(from), lane(lane) {
        factor = results.factor ? *results.factor : 1.0f;
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if constexpr (!D::kScaled) scale[h] = ends.a_scale[row + lane / 4 + 8 * h];
    }
    // A lane has two neighbours in each of two rows of a, of each eight columns of b: the first of those.
    __device__ int column_of(int j) const { return from + 8 * j + lane % 4 * 2; }

    // Sums of products of codes less their zero points, or of -1 and 1.
    __device__ void correct() const {
        int a[2][2];
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int i = 0; i < 2; ++i) a[i][h] = ends.a_terms[i * kTileRows + row + lane / 4 + 8 * h];
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
            if (j % 4 == 0) __syncwarp();  // else the compiler loads all terms at once, which have no registers
            const int2 p = *reinterpret_cast<const int2*>(ends.b_terms + column_of(j));
            int2 q = {};
            if constexpr (!Mma::bits) q = *reinterpret_cast<const int2*>(ends.b_terms + D::kColumns + column_of(j));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                Sum& sum = sums[4 * j + i];
                const int own_p = i % 2 ? p.y : p.x, own_q = i % 2 ? q.y : q.x;
                if constexpr (Mma::bits) sum = 4 * sum + a[0][i / 2] + own_p;
                else sum += a[0][i / 2] * own_p + a[1][i / 2] * own_q;
            }
        }
    }
    __device__ float2 b_scale(int j) const {
        if constexpr (D::kScaled) return make_float2(1.0f, 1.0f);
        else return *reinterpret_cast<const float2*>(ends.b_scale + column_of(j));
    }
    __device__ float scaled(Sum sum, int h, float other) const {
        const float x = static_cast<float>(sum);
        if constexpr (D::kScaled) return x * factor;
        else return cuquant::scaled(x, kSwapped ? other : scale[h], kSwapped ? scale[h] : other) * factor;
    }

    // Results of 16 bits without a residual, whole vectors of them.
    __device__ bool is_quick(i64 N) const {
        const Epilogue& e = results.epilogue;
        return !e.residual && (e.activation == kNone || e.activation == kRelu) && e.out_column == 1 && N % 8 == 0 &&
               (e.out_type == kHalf || e.out_type == kBfloat16) &&
               !((reinterpret_cast<u64>(e.out) | static_cast<u64>(e.out_stride) * 2) & 15);
    }
    // kBare: nothing happens to sums that scales have met.
    template <class T, bool kBare>
    __device__ void store_quick() const {
        const Epilogue& e = results.epilogue;
        const float least = e.activation == kRelu ? 0.0f : float_of(0xFF800000u);
        const int g = lane / 4, t = lane % 4;
        constexpr int kEights = kPiece / 8, kVectors = kSwapped ? 2 : kEights, kLines = kSwapped ? kPiece : 16;
        constexpr int kAtOnce = 32 / kVectors;
        // A lane stores vectors of 16 bytes, kAtOnce rows of the output apart.
        const int line = lane / kVectors, vector = lane % kVectors * 8;
        const int first_m = (kSwapped ? from : row) + line, first_n = (kSwapped ? row : from) + vector;
        const i64 stride = e.out_stride;
        T* to = static_cast<T*>(e.out) + (place.x.first + first_m) * stride + place.column + first_n;
        const u8* const own = area + line * kPitch + vector * 2;
        u8* const pairs_at = area + g * kPitch + t * 4;
        const u32 matrices_at = shared_address(area) + lane % 8 * kPitch + lane / 8 % 2 * 16;
        float own_bias[2] = {};
        if constexpr (kSwapped) { own_bias[0] = ends.bias[row + g]; own_bias[1] = ends.bias[row + g + 8]; }
#pragma unroll
        for (int first = 0; first < kOwn; first += kPiece) {
            float2 other[kEights], bias[kEights];  // before results are stored, which they do not wait for
#pragma unroll
            for (int j = 0; j < kEights && !kBare; ++j) {
                other[j] = b_scale(first / 8 + j);
                const float2* const own = reinterpret_cast<const float2*>(ends.bias + column_of(first / 8 + j));
                bias[j] = kSwapped ? make_float2(0.0f, 0.0f) : *own;
            }
#pragma unroll
            for (int j = 0; j < kEights; ++j) {
                float y[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const Sum sum = sums[first / 2 + 4 * j + i];
                    y[i] = static_cast<float>(sum);
                    if constexpr (kBare) continue;
                    y[i] = scaled(sum, i / 2, i % 2 ? other[j].y : other[j].x);
                    y[i] = max_or_nan(y[i] + (kSwapped ? own_bias[i / 2] : i % 2 ? bias[j].y : bias[j].x), least);
                }
                const u32 pairs[2] = {pair_of<T>(y[0], y[1]), pair_of<T>(y[2], y[3])};
                if constexpr (kSwapped) {
                    store_matrices_transposed(matrices_at + j * 8 * kPitch, pairs);
                } else {
#pragma unroll
                    for (int h = 0; h < 2; ++h) *reinterpret_cast<u32*>(pairs_at + h * 8 * kPitch + j * 16) = pairs[h];
                }
            }
            __syncwarp();
            const int in_m = kSwapped ? first : 0, in_n = kSwapped ? 0 : first;
            T* at = to + in_m * stride + in_n;
#pragma unroll
            for (int v = 0; v < (kLines + kAtOnce - 1) / kAtOnce; ++v) {
                const int more = v * kAtOnce;
                const bool inside = line + more < kLines && lane < kAtOnce * kVectors;
                if (inside && first_m + in_m + more < place.x.count && first_n + in_n < place.w.count)
                    store16(at, *reinterpret_cast<const uint4*>(own + more * kPitch));
                at += kAtOnce * stride;
            }
            __syncwarp();
        }
    }

    // Float32 results without activation and residual, and integers: straight from registers, since four lanes have
    // neighbours that fill a sector of 32 bytes; or eight lanes, where these are of a column.
    __device__ bool is_whole(i64 N) const {
        const Epilogue& e = results.epilogue;
        const bool plain = results.is_raw() || (e.out_type == kFloat && e.activation == kNone && !e.residual);
        const bool pairs = !((e.out_stride | N) & 1 || reinterpret_cast<u64>(e.out) & 7);
        return plain && e.out_column == 1 && (kSwapped || pairs);
    }
    template <bool kRaw>
    __device__ void store_whole() const {
        const int g = lane / 4, t = lane % 4;
        const i64 stride = results.epilogue.out_stride;
        const int first_m = kSwapped ? from + 2 * t : row + g, first_n = kSwapped ? row + g : from + 2 * t;
        u32* const out = static_cast<u32*>(results.epilogue.out);
        u32* const to = out + (place.x.first + first_m) * stride + place.column + first_n;
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
            u32 v[4];
            const float2 other = kRaw ? make_float2(0.0f, 0.0f) : b_scale(j);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const Sum sum = sums[4 * j + i];
                if constexpr (kRaw) v[i] = static_cast<u32>(sum);
                else
                    v[i] = bits_of(scaled(sum, i / 2, i % 2 ? other.y : other.x) +
                                   ends.bias[kSwapped ? row + g + i / 2 * 8 : column_of(j) + i % 2]);
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if constexpr (kSwapped) {
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (first_n + 8 * h < place.w.count && first_m + 8 * j + i < place.x.count)
                            to[(8 * j + i) * stride + 8 * h] = v[2 * h + i];
                } else if (first_m + 8 * h < place.x.count && first_n + 8 * j < place.w.count) {
                    *reinterpret_cast<uint2*>(to + 8 * h * stride + 8 * j) = make_uint2(v[2 * h], v[2 * h + 1]);
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
                const int m = kSwapped ? from + first + line : row + line;
                const int n = (kSwapped ? row : from + first) + 4 * four;
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
            const float2 other = b_scale(first / 8 + j);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                Sum sum = sums[first / 2 + 4 * j + i];
                float y;
                // The compiler would work all results out before the loop that stores them.
                if constexpr (is_same<Sum, float>) {
                    sum = float_of(anew(bits_of(sum)));
                    y = scaled(sum, i / 2, i % 2 ? other.y : other.x);
                } else {
                    sum = anew(sum);
                    y = raw ? float_of(sum) : scaled(sum, i / 2, i % 2 ? other.y : other.x);
                }
                const int a = g + i / 2 * 8, b = 8 * j + 2 * t + i % 2;
                to[kSwapped ? b * kFloatPitch + a : a * kFloatPitch + b] = y;
            }
        }
    }
    __device__ void store(i64 N, bool corrected) const {
        if constexpr (!Mma::floats && !D::kScaled) {
            if (corrected) correct();
        }
        if (is_whole(N)) {
            if constexpr (!is_same<Sum, float>) {
                if (results.is_raw()) return store_whole<true>();
            }
            return store_whole<false>();
        }
        if (!is_quick(N)) return store_any(N);
        const Epilogue& e = results.epilogue;
        if constexpr (D::kScaled) {
            if (!e.bias && !results.factor && e.activation == kNone)
                return e.out_type == kHalf ? store_quick<Half, true>() : store_quick<Bfloat16, true>();
        }
        if (e.out_type == kHalf) store_quick<Half, false>();
        else store_quick<Bfloat16, false>();
    }
};

}  // namespace cuquant
