// Codecs, scale rules and packings: what a Format struct is made of. The same words, with the same
// meaning, as cuquant/formats; a test compiles this file for the CPU and holds both together.
#pragma once

namespace cuquant {

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// ---- codecs: a number in the codec's range <-> an unsigned code ---------------------------------

template <int kCount>
struct Codebook {  // the nearest of kCount levels
    // Kernel arguments, made by Python: a learned codebook compiles nothing.
    struct Tables {
        const float* borders;      // [kCount - 1], ascending
        const u8* ranks_to_codes;  // [kCount]
        const float* values;       // [256], by code
    };

    // Rank = how many borders lie strictly below x; ties are part of the borders.
    __device__ static u32 encode(float x, const Tables& tables) {
        int low = 0, high = kCount - 1;
        while (low < high) {
            const int middle = (low + high) / 2;
            if (x > tables.borders[middle]) low = middle + 1;
            else high = middle;
        }
        return tables.ranks_to_codes[low];
    }

    __device__ static float decode(u32 code, const Tables& tables) { return tables.values[code]; }
};

enum class Rounding { HalfEven, HalfAway, HalfUp };

template <int kLow, int kHigh, Rounding kRounding>
struct Uniform {  // the integers kLow..kHigh; the code is the integer plus offset
    struct Tables {};

    static constexpr int bit_length(int value) { return value ? 1 + bit_length(value / 2) : 0; }
    static constexpr int offset = kLow < 0 ? 1 << (bit_length(kHigh - kLow) - 1) : 0;

    __device__ static float round(float x) {
        if constexpr (kRounding == Rounding::HalfEven) return rintf(x);
        else if constexpr (kRounding == Rounding::HalfAway) return roundf(x);
        else return floorf(__fadd_rn(x, offset + 0.5f)) - offset;  // ggml: trunc(x + offset + 0.5)
    }

    // Saturates after the zero point is added, as ONNX does.
    __device__ static u32 encode(float x, const Tables&, int zero_point = 0) {
        const float shifted = __fadd_rn(round(x), static_cast<float>(zero_point));
        const float clipped = fminf(fmaxf(shifted, static_cast<float>(kLow)), static_cast<float>(kHigh));
        return static_cast<u32>(static_cast<int>(clipped) + offset);
    }

    __device__ static float decode(u32 code, const Tables&, int zero_point = 0) {
        return static_cast<float>(static_cast<int>(code) - offset - zero_point);
    }
};

// What the highest exponent holds: values (fp4, fp6), values and one NaN (e4m3), or Inf and NaN.
enum class Specials { None, OneNan, Ieee };

template <int kExponent, int kMantissa, Specials kSpecials>
struct Minifloat {  // the bits of a small float; saturating, round to nearest even
    struct Tables {};

    static constexpr int bias = (1 << (kExponent - 1)) - 1;
    static constexpr u32 sign = 1u << (kExponent + kMantissa);
    // The largest finite code: all ones, less what is special.
    static constexpr u32 peak_code = sign - 1 - (kSpecials == Specials::OneNan ? 1u
                                     : kSpecials == Specials::Ieee ? 1u << kMantissa : 0u);

    // Sizes below the smallest normal are integers in steps of 2^(1 - bias - kMantissa); larger
    // ones are float32 with fewer mantissa bits, rounded by adding half a step, less one where the
    // kept part is even. A carry into the exponent is the right next value.
    __device__ static u32 encode(float x, const Tables&) {
        const u32 bits = __float_as_uint(x), size = bits & 0x7FFFFFFFu;
        constexpr u32 smallest_normal = static_cast<u32>(128 - bias) << 23;
        constexpr int dropped = 23 - kMantissa;
        u32 code;
        if (kExponent < 8 && size < smallest_normal) {  // bf16 has float32's exponents, and its steps
            const float step = __uint_as_float(static_cast<u32>((126 + bias + kMantissa) & 255) << 23);
            code = static_cast<u32>(rintf(__fmul_rn(__uint_as_float(size), step)));
        } else {
            const u32 rounded = size + ((1u << (dropped - 1)) - 1) + (size >> dropped & 1);
            code = (rounded >> dropped) - (static_cast<u32>(127 - bias) << kMantissa);
        }
        return (code < peak_code ? code : peak_code) | (bits >> 31 ? sign : 0u);
    }

    __device__ static float decode(u32 code, const Tables&) {
        const u32 size = code & (sign - 1);
        float value;
        if (kSpecials != Specials::None && size > peak_code) {
            const bool infinite = kSpecials == Specials::Ieee && size == peak_code + 1;
            value = __uint_as_float(infinite ? 0x7F800000u : 0x7FC00000u);
        } else if (kExponent == 8 || size >> kMantissa) {
            value = __uint_as_float((size + (static_cast<u32>(127 - bias) << kMantissa)) << (23 - kMantissa));
        } else {
            const float step = __uint_as_float(static_cast<u32>((128 - bias - kMantissa) & 255) << 23);
            value = __fmul_rn(static_cast<float>(size), step);
        }
        return code & sign ? -value : value;
    }
};

// ---- scale rules: what of a block its scale is made from ----------------------------------------

struct AbsMax {  // as unsigned integers |x| order like floats, and keep NaN above infinity
    using State = u32;
    __device__ static State of(float x, u32) { return __float_as_uint(x) & 0x7FFFFFFFu; }
    __device__ static State combine(State a, State b) { return a > b ? a : b; }
    __device__ static float statistic(State a) { return __uint_as_float(a); }
};

struct SignedMax {  // the element furthest from zero, sign kept; of equals the one of lowest index
    using State = u64;  // |x|, then the complement of the index above the sign
    __device__ static State of(float x, u32 index) {
        const u32 bits = __float_as_uint(x);
        const u64 order = 0x7FFFFFFFu - index;  // index below 2^31: a larger block is split
        return static_cast<u64>(bits & 0x7FFFFFFFu) << 32 | order << 1 | bits >> 31;
    }
    __device__ static State combine(State a, State b) { return a > b ? a : b; }
    __device__ static float statistic(State a) {
        return __uint_as_float(static_cast<u32>(a >> 32) | static_cast<u32>(a & 1) << 31);
    }
};

// 1 / scale; 0 where that is not finite, and then every code is that of zero: one rule for zero,
// vanishing and non-finite blocks.
__device__ inline float inverse_of(float scale) {
    const float inverse = __frcp_rn(scale);
    return (__float_as_uint(inverse) & 0x7FFFFFFFu) < 0x7F800000u ? inverse : 0.0f;
}

// ---- packings: where the bits of code i of a row are --------------------------------------------

enum class Order { Low, High, Dense, Word, Planes };

template <int kBits, Order kOrder>
struct Packing {
    static constexpr u32 mask = (1u << kBits) - 1;

    // The code at `i` of a row of bytes (Low, High) or of uint32 words (the others).
    template <typename T>
    __device__ static u32 get(const T* row, i64 i) {
        if constexpr (kOrder == Order::Low || kOrder == Order::High) {
            constexpr int per_byte = 8 / kBits;
            const int lane = static_cast<int>(i % per_byte);
            const int place = kOrder == Order::Low ? lane : per_byte - 1 - lane;
            return row[i / per_byte] >> place * kBits & mask;
        } else if constexpr (kOrder == Order::Word) {
            constexpr int per_word = 32 / kBits;
            return row[i / per_word] >> static_cast<int>(i % per_word) * kBits & mask;
        } else if constexpr (kOrder == Order::Planes) {
            u32 code = 0;
            for (int b = 0; b < kBits; ++b) code |= (row[i / 32 * kBits + b] >> (i % 32) & 1u) << b;
            return code;
        } else {  // a stream: the code may run on in the next word
            const i64 bit = i * kBits;
            const int shift = static_cast<int>(bit % 32);
            u64 window = row[bit / 32];
            if (shift + kBits > 32) window |= static_cast<u64>(row[bit / 32 + 1]) << 32;
            return static_cast<u32>(window >> shift) & mask;
        }
    }
};

}  // namespace cuquant
