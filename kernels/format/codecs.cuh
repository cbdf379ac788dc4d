// Codecs: a number in the codec's range <-> an unsigned code. As cuquant/formats/codecs.py.
#pragma once
#include "device/vector.cuh"

namespace cuquant {

// What a codebook's kernels are told about its levels; Python computes it exactly.
struct Lookup {
    const uint4* image;    // the EncodeTables, ready to be copied to shared memory
    const float* levels;   // [count], ascending
    const float* values;   // [256], the level of each code
    const u8* codes;       // [count], the code of each rank
    float to_unit, scale;  // even grids: a number's place in 0..1, and four times the last cell
    u32 lowest, per_sign;  // float grid: the lowest cell's bits, and the cells of each sign
    int vectors;           // of the image
    int steps;             // borders in the fullest cell
};

// How a number finds its cell. Even: cells of the same width; a cell has its border and its rank.
// Mirrored: the same for sizes, and codes of negative numbers are 8 higher (bitsandbytes' fp4).
// Float: cells by the upper bits of a float, whose relative width is even (levels that crowd around
// zero).
enum class Grid { Even, Mirrored, Float };

__device__ constexpr int cells_of(int count) { return count <= 16 ? 32 : count <= 32 ? 64 : count <= 64 ? 128 : count <= 128 ? 256 : 512; }

template <Grid kGrid, int kCount>
struct alignas(16) EncodeImage {
    float border[cells_of(kCount)];  // of a cell
    u32 rank[cells_of(kCount)];      // of the lowest number in a cell; Mirrored: two codes, a byte each
    float borders[(kCount + 3) / 4 * 4];  // all of them, the last one +inf
};
template <int kCount>
struct alignas(16) EncodeImage<Grid::Float, kCount> {
    float borders[(kCount + 3) / 4 * 4];
    u8 ranks[6400];
};

__device__ inline void copy_image(void* to, const void* from, int vectors, int thread, int threads) {
#pragma unroll 1
    for (int i = thread; i < vectors; i += threads) static_cast<uint4*>(to)[i] = static_cast<const uint4*>(from)[i];
}

// kCodes: how many a packing can hold; kSorted: the code is the rank.
template <int kCount, Grid kGrid, bool kSorted, int kCodes>
struct Codebook {  // the nearest of kCount levels
    static constexpr bool is_codebook = true;
    static constexpr u32 bias = 0;
    static constexpr int count = kCount;
    static constexpr int float_bits = 17;  // dropped: cells have 6 bits of mantissa

    using EncodeTables = EncodeImage<kGrid, kCount>;
    struct alignas(16) DecodeTables { float values[kCodes <= 16 ? 16 : 256]; };

    __device__ static void fill(EncodeTables& tables, const Lookup& lookup, int thread, int threads) {
        copy_image(&tables, lookup.image, lookup.vectors, thread, threads);
    }
    __device__ static void fill(DecodeTables& tables, const Lookup& lookup, int thread, int threads) {
        // Codes above the count stand for nothing, and for NaN.
        copy_image(&tables, lookup.values, sizeof(DecodeTables) / 16, thread, threads);
    }

    // Four times the cell in an even grid. Adding 2^23 rounds to an integer, in the low bits.
    __device__ static u32 even_cell(float unit, const Lookup& lookup) {
        return bits_of(__fmaf_rn(unit, lookup.scale, 8388608.0f)) & (4 * cells_of(kCount) - 4);
    }
    template <typename Entry>
    __device__ static Entry at(const Entry* table, u32 bytes) {
        return *reinterpret_cast<const Entry*>(reinterpret_cast<const u8*>(table) + bytes);
    }

    __device__ static u32 encode(float x, int, const EncodeTables& tables, const Lookup& lookup) {
        if constexpr (kGrid == Grid::Even) {
            const u32 cell = even_cell(__saturatef(__fmaf_rn(x, lookup.to_unit, 0.5f)), lookup);
            return at(tables.rank, cell) + (x > at(tables.border, cell));
        } else if constexpr (kGrid == Grid::Mirrored) {
            const u32 cell = even_cell(__saturatef(__fmul_rn(fabsf(x), lookup.to_unit)), lookup);
            const u32 code = __byte_perm(at(tables.rank, cell), 0, fabsf(x) > at(tables.border, cell) ? 0x4441 : 0x4440);
            return code + (x < 0.0f ? 8 : 0);
        } else {
            const u32 rank = tables.ranks[float_cell(x, lookup)];
            return rank + (x > tables.borders[rank]);
        }
    }
    __device__ static u32 float_cell(float x, const Lookup& lookup) {
        const u32 size = (bits_of(x) & 0x7FFFFFFFu) >> float_bits;
        const u32 cell = min(max(size, lookup.lowest) - lookup.lowest, lookup.per_sign - 1);
        return bits_of(x) >> 31 ? cell + lookup.per_sign : cell;
    }

    // The same where a cell may hold several borders.
    __device__ static u32 encode_crowded(float x, const EncodeTables& tables, const Lookup& lookup) {
        u32 rank;
        if constexpr (kGrid == Grid::Even) rank = at(tables.rank, even_cell(__saturatef(__fmaf_rn(x, lookup.to_unit, 0.5f)), lookup));
        else if constexpr (kGrid == Grid::Float) rank = tables.ranks[float_cell(x, lookup)];
        else return encode(x, 0, tables, lookup);
#pragma unroll 1
        for (int step = 0; step < lookup.steps; ++step) rank += x > tables.borders[rank];
        return rank;
    }

    // One of the two levels around x, the upper one where draw < its share of the distance.
    __device__ static u32 encode_stochastic(
        float x, float draw, int, const EncodeTables&, const Lookup& lookup) {
        int below = 0;
        for (int step = 128; step; step /= 2)  // the last level not above x, but for the top one
            if (below + step < kCount - 1 && lookup.levels[below + step] <= x) below += step;
        const float low = lookup.levels[below], high = lookup.levels[below + 1];
        const float share = __fdiv_rn(__fadd_rn(x, -low), __fadd_rn(high, -low));
        return lookup.codes[below + (draw < share)];
    }

    __device__ static float decode(u32 code, float, const DecodeTables& tables) { return tables.values[code]; }
    __device__ static float shift_of(int) { return 0.0f; }
};

enum class Rounding { HalfEven, HalfAway, HalfUp };

// Whether a codec's codes of what is not above the peak, in size, are those that `round` makes.
template <class Codec, int kPeakBits> constexpr bool is_rounding = false;

template <int kLow, int kHigh, Rounding kRounding>
struct Uniform {  // the integers kLow..kHigh; the code is the integer plus offset
    static constexpr bool is_codebook = false;
    struct EncodeTables {};
    struct DecodeTables {};
    template <class Tables>
    __device__ static void fill(Tables&, const Lookup&, int, int) {}

    __device__ static constexpr int bit_length(int value) { return value ? 1 + bit_length(value / 2) : 0; }
    static constexpr int offset = kLow < 0 ? 1 << (bit_length(kHigh - kLow) - 1) : 0;
    static constexpr float low = kLow, high = kHigh;

    // Adding 2^23 (or 1.5 * 2^23, which leaves room below) makes a float round to an integer and
    // keep it in its low bits. `encode` gives these bits: code + bias; packing takes the bias off.
    static constexpr u32 bias = kRounding == Rounding::HalfUp ? 0x4B000000u : 0x4B400000u;
    static constexpr float magic = kRounding == Rounding::HalfUp ? 8388608.0f : 12582912.0f;

    // Saturates after the zero point is added, as ONNX does.
    __device__ static u32 encode(float x, int zero_point, const EncodeTables&, const Lookup&) {
        if constexpr (kRounding == Rounding::HalfUp) {  // ggml: trunc(x + offset + 0.5)
            const float raised = fmaxf(__fadd_rn(x, offset + 0.5f), 0.0f);
            return bits_of(__fadd_rd(fminf(raised, high + offset), magic));
        } else if constexpr (kRounding == Rounding::HalfAway) {
            // Towards zero the sum reaches no integer that |x| + 0.5 itself does not reach.
            const float size = __fadd_rz(__fadd_rz(fminf(fabsf(x), high), 0.5f), 8388608.0f);
            return bits_of(__fadd_rn(copysignf(__fadd_rn(size, -8388608.0f), x), magic + offset));
        } else {
            // The offset is even: which integer is the nearest even one does not change.
            const float clipped = fminf(fmaxf(x, low - zero_point), high - zero_point);
            return bits_of(__fadd_rn(clipped, magic + offset)) + zero_point;
        }
    }

    // The same of x that need no saturation, without a zero point.
    __device__ static u32 round(float x) { return bits_of(__fadd_rn(x, magic + offset)); }

    // floor(x), or one more where draw < x - floor(x).
    __device__ static u32 encode_stochastic(
        float x, float draw, int zero_point, const EncodeTables&, const Lookup&) {
        const float floor = floorf(x);
        const float whole = __fadd_rn(floor, draw < __fadd_rn(x, -floor) ? 1.0f : 0.0f);
        const float clipped = fminf(fmaxf(whole, low - zero_point), high - zero_point);
        return bits_of(__fadd_rn(clipped, magic + offset)) + zero_point;
    }

    // `shift` is 2^23 + offset + zero point.
    __device__ static float decode(u32 code, float shift, const DecodeTables&) {
        return __fadd_rn(float_of(code | 0x4B000000u), -shift);
    }
    __device__ static float shift_of(int zero_point) { return 8388608.0f + static_cast<float>(offset + zero_point); }
};

template <int kLow, int kHigh, int kPeakBits>
constexpr bool is_rounding<Uniform<kLow, kHigh, Rounding::HalfEven>, kPeakBits> = kPeakBits == 0x42FE0000 && kLow <= -127 && kHigh >= 127;

// What the highest exponent holds: values (fp4, fp6), values and one NaN (e4m3), or Inf and NaN.
enum class Specials { None, OneNan, Ieee };

template <int kExponent, int kMantissa, Specials kSpecials>
struct Minifloat {  // the bits of a small float; saturating, round to nearest even
    static constexpr bool is_codebook = false;
    static constexpr u32 bias = 0;  // of codes
    static constexpr int exponent = kExponent, mantissa = kMantissa;
    struct EncodeTables {};
    struct DecodeTables {};
    template <class Tables>
    __device__ static void fill(Tables&, const Lookup&, int, int) {}

    static constexpr int excess = (1 << (kExponent - 1)) - 1;
    static constexpr u32 sign = 1u << (kExponent + kMantissa);
    // The largest finite code: all ones, less what is special.
    static constexpr u32 peak_code = sign - 1 - (kSpecials == Specials::OneNan ? 1u
                                     : kSpecials == Specials::Ieee ? 1u << kMantissa : 0u);
    static constexpr bool is_16_bit = kExponent + kMantissa == 15;

    // A size is a number of steps, 2^(e - kMantissa) for its exponent e, which is not below that of
    // the smallest normal; adding 1.5 * 2^23 steps rounds to nearest even and leaves that number
    // in the low bits. A step above the largest of an exponent is the first of the next one, so the
    // code is the number of steps and 2^kMantissa more for each exponent.
    __device__ static u32 encode(float x, int = 0) {
        u32 code;
        if constexpr (is_16_bit) {
            code = encode_16_bit(bits_of(x) & 0x7FFFFFFFu);
        } else {
            constexpr u32 smallest = static_cast<u32>(128 - excess) << 23;
            constexpr u32 magic = static_cast<u32>(23 - kMantissa) << 23 | 0x400000u;
            const float size = fminf(fabsf(x), float_of(largest));
            const u32 exponent = max(bits_of(size) & 0x7F800000u, smallest);
            const u32 rounded = bits_of(__fadd_rn(size, float_of(exponent + magic)));
            code = rounded - exponent + (exponent >> (23 - kMantissa)) - (magic + (smallest >> (23 - kMantissa)));
        }
        return code | (bits_of(x) >> (31 - kExponent - kMantissa) & sign);
    }
    // The bits of the largest number, at which sizes saturate.
    static constexpr u32 largest = (peak_code + (static_cast<u32>(127 - excess) << kMantissa)) << (23 - kMantissa);

    // Sizes below the smallest normal are integers in steps of 2^(1 - excess - kMantissa); larger
    // ones are float32 with fewer mantissa bits, rounded by adding half a step, less one where the
    // kept part is even. Infinity and NaN keep codes of their own: these carry no scale.
    __device__ static u32 encode_16_bit(u32 size) {
        constexpr u32 smallest_normal = static_cast<u32>(128 - excess) << 23;
        constexpr int dropped = 23 - kMantissa;
        u32 code;
        if (kExponent < 8 && size < smallest_normal) {  // bf16 has float32's exponents, and its steps
            constexpr u32 step = static_cast<u32>((126 + excess + kMantissa) & 255) << 23;
            code = static_cast<u32>(static_cast<int>(rintf(__fmul_rn(float_of(size), float_of(step)))));
        } else {
            const u32 rounded = size + ((1u << (dropped - 1)) - 1) + (size >> dropped & 1);
            code = (rounded >> dropped) - (static_cast<u32>(127 - excess) << kMantissa);
        }
        code = min(code, peak_code);
        if (size >= 0x7F800000u) code = peak_code + 1 + (size == 0x7F800000u ? 0u : 1u << (kMantissa - 1));
        return code;
    }
    __device__ static u32 encode(float x, int, const EncodeTables&, const Lookup&) { return encode(x); }

    // One of the two neighbours of x, the one further from zero where draw < its share.
    __device__ static u32 encode_stochastic(
        float x, float draw, int, const EncodeTables&, const Lookup&) {
        if (!is_finite(x)) return encode(x);
        constexpr u32 top = (peak_code + (static_cast<u32>(127 - excess) << kMantissa)) << (23 - kMantissa);
        const double size = fminf(fabsf(x), float_of(top));
        const int own = static_cast<int>(__double_as_longlong(size) >> 52) - 1023;
        const int step = max(own, 1 - excess) - kMantissa;  // a step is 2^step
        const double steps = size * power(-step), floor = ::floor(steps);
        const double rounded = (floor + (draw < steps - floor ? 1.0 : 0.0)) * power(step);
        return encode(copysignf(static_cast<float>(rounded), x));
    }
    __device__ static double power(int exponent) {
        return __longlong_as_double(static_cast<long long>(exponent + 1023) << 52);
    }

    __device__ static float decode(u32 code, float = 0.0f) {
        const u32 size = code & (sign - 1);
        if constexpr (kExponent == 8) return float_of(code << 16);
        else if constexpr (is_16_bit) return float_of_half(code);
        else {
            // As the bits of a float16, of which it has a part; only the bias differs.
            const u32 half = (code & sign ? 0x8000u : 0u) | size << (10 - kMantissa);
            constexpr u32 rebias = static_cast<u32>(127 + 15 - excess) << 23;
            const float value = __fmul_rn(float_of_half(half), float_of(rebias));
            if constexpr (kSpecials == Specials::OneNan)
                return size > peak_code ? float_of(0x7FC00000u) : value;
            return value;
        }
    }
    __device__ static float decode(u32 code, float, const DecodeTables&) { return decode(code); }
    __device__ static float shift_of(int) { return 0.0f; }
};

// Whether kernels look pairs of codes up, of which the layout "fragments/1" therefore makes a byte.
template <class Codec, int kBits> inline constexpr bool is_joined = kBits == 4;
template <int kLow, int kHigh, Rounding kRounding, int kBits> inline constexpr bool is_joined<Uniform<kLow, kHigh, kRounding>, kBits> = false;

}  // namespace cuquant
