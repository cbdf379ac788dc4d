// From what was found in a block to its stored scale, its zero point and what its codes are made with.
#pragma once
#include "format.cuh"

namespace cuquant {

// Numbers that were known before; null where the data decides.
struct Given {
    const float* scale;         // [blocks], effective
    const u8* zero_point;       // [blocks]
    const float* global_scale;  // [1], nvfp4's
    i64 global_from_data;       // whether it was computed from this data, and block scales saturate
};

// Where a block's numbers go.
struct Scales {
    void* scale;      // [blocks] of the stored type
    u8* zero_point;   // [blocks]
    void* minimum;    // [blocks] of the stored type
    float* encoding;  // [blocks, 2] or null: inverse, and zero point or minimum, for a kernel that encodes later
    u32* overflow;    // or null: counts scales and minimums that their type cannot hold
    __device__ Scales uncounted() const { return {scale, zero_point, minimum, encoding, nullptr}; }
};

struct Numbers {
    float exact;     // the scale before it was rounded; NaN where the block is lost
    float inverse;   // codes are encode(x * inverse); where it is not usable, encode(0)
    float minimum;   // taken off x before that
    int zero_point;
    u32 stored;      // the bits of the stored scale
    u32 stored_minimum;
    u32 overflows;   // of both
};

// A float64 in float16's precision: through the float32 that keeps, in its last bit, whether
// anything was cut off; so it is rounded once.
__device__ inline float to_odd(double x) {
    float cut = static_cast<float>(x);
    if (fabs(static_cast<double>(cut)) > fabs(x)) cut = float_of(bits_of(cut) - 1);
    return static_cast<double>(cut) == x ? cut : float_of(bits_of(cut) | 1u);
}

// The stored bits of a scale, and the value they have.
template <Stored kStored>
__device__ void store_of(float exact, float global, u32& stored, float& effective, bool& overflow) {
    const bool lost = exact != exact;
    overflow = false;
    if constexpr (kStored == Stored::Float16) {
        stored = halves_of(exact, 0.0f) & 0xFFFFu;
        if ((stored & 0x7FFFu) >= 0x7C00u) {  // seldom
            overflow = !lost;
            stored = lost ? 0x7E00u : stored - 1;  // 65504 of the same sign
        }
        effective = float_of_half(stored);
    } else if constexpr (kStored == Stored::BFloat16) {
        const u32 bits = bits_of(exact), sign = bits >> 16 & 0x8000u;
        stored = lost ? 0x7FC0u : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
        overflow = !lost && (stored & 0x7FFFu) == 0x7F80u;
        if (overflow) stored = sign | 0x7F7Fu;
        effective = float_of(stored << 16);
    } else if constexpr (kStored == Stored::E8M0) {
        const u32 bits = bits_of(exact);
        stored = lost ? 255u : exact == 0.0f ? 0u : bits >> 23;
        effective = exact;
    } else if constexpr (kStored == Stored::E4M3) {
        overflow = exact > 464.0f;           // 464 is half way to the next step, and goes to even
        stored = lost ? 0x7Fu : Minifloat<4, 3, Specials::OneNan>::encode(exact) & 0x7Fu;
        effective = __fmul_rn(Minifloat<4, 3, Specials::OneNan>::decode(stored), global);
    } else {
        const u32 size = bits_of(exact) & 0x7FFFFFFFu;
        overflow = size == 0x7F800000u;
        stored = lost ? 0x7FC00000u : overflow ? bits_of(exact) - 1 : bits_of(exact);
        effective = float_of(stored);
    }
}

// kFlags of the kernels that encode.
enum Flags { kClamp = 1, kStochastic = 2, kGiven = 4 };

template <class Format, int kFlags>
__device__ Numbers numbers_of(typename Format::Rule::State found, i64 elements, const Given& given, i64 block) {
    using Rule = typename Format::Rule;
    constexpr bool zero = Format::offset == Offset::ZeroPoint;
    constexpr bool mean = Format::mean;
    Numbers numbers;
    bool lost = Rule::lost(found);
    float global = 1.0f, exact;
    if constexpr (Format::stored == Stored::E4M3) global = *given.global_scale;
    if constexpr (kFlags & kGiven) {
        if constexpr (Format::integers) lost = false;  // they were clamped: their codes have no NaN
        exact = given.scale[block];
        if constexpr (Format::stored == Stored::E4M3) exact = __fdiv_rn(exact, global);
        if constexpr (mean && Format::stored == Stored::Float16) exact = to_odd(exact);
    } else if constexpr (mean) {
        const double average = found.sum / static_cast<double>(elements > 1 ? elements : 1);
        exact = Format::stored == Stored::Float16 ? to_odd(average) : static_cast<float>(average);
    } else {
        const float statistic = Rule::statistic(found, zero);
        if constexpr (Format::stored == Stored::E4M3)
            exact = __fdiv_rn(statistic, __fmul_rn(Format::peak(), global));
        else if constexpr (Format::stored == Stored::E8M0)
            exact = power_below(bits_of(statistic), (Format::peak_bits >> 23) - 127);
        else
            exact = divided<Format::peak_bits>(statistic);
        if constexpr (zero) {
            if (exact == float_of(0x7F800000u))  // seldom
                exact = __fmul_rn(divided<Format::peak_bits>(Rule::half(found, zero)), 2.0f);
        }
        if (Format::stored == Stored::E4M3 && given.global_from_data) exact = fminf(exact, 448.0f);
    }
    if (lost) exact = float_of(0x7FC00000u);
    numbers.exact = exact;
    numbers.minimum = 0.0f;
    numbers.zero_point = 0;
    float effective;
    bool overflow;
    store_of<Format::stored>(exact, global, numbers.stored, effective, overflow);
    numbers.overflows = overflow;
    if constexpr (Format::offset == Offset::Minimum) {
        numbers.minimum = lost ? float_of(0x7FC00000u) : Rule::low(found, false);
        if constexpr (!Format::encode_exact) {  // ggml's are rounded when blocks are packed
            const float low = numbers.minimum;
            store_of<Format::stored>(low, 1.0f, numbers.stored_minimum, numbers.minimum, overflow);
            numbers.overflows += overflow;
        }
    }
    numbers.inverse = __frcp_rn(Format::encode_exact ? exact : effective);
    if constexpr (zero && (kFlags & kGiven)) {
        numbers.zero_point = given.zero_point[block];
    } else if constexpr (zero) {
        if (usable(numbers.inverse)) {
            // By the reciprocal, which is within a few ulp, unless that is close to a half.
            const float low = -Rule::low(found, true);
            float ratio = __fmul_rn(low, numbers.inverse);
            const float whole = __fadd_rn(__fadd_rn(ratio, 12582912.0f), -12582912.0f);
            if (fabsf(ratio - whole) > 0.499f) ratio = __fdiv_rn(low, effective);
            numbers.zero_point = static_cast<int>(rintf(fminf(fmaxf(ratio, 0.0f), Format::peak())));
        }
    }
    // Codes are signs, whatever the scale.
    if (mean && !(kFlags & kStochastic)) numbers.inverse = usable(numbers.inverse) ? 1.0f : 0.0f;
    return numbers;
}

// Stored bits to their array. A zero is a positive one.
template <Stored kStored>
__device__ void store_bits(void* to, i64 block, u32 bits) {
    if constexpr (kStored == Stored::Float16 || kStored == Stored::BFloat16)
        static_cast<u16*>(to)[block] = static_cast<u16>(bits == 0x8000u ? 0u : bits);
    else if constexpr (kStored == Stored::E8M0 || kStored == Stored::E4M3)
        static_cast<u8*>(to)[block] = static_cast<u8>(bits);
    else
        static_cast<u32*>(to)[block] = bits == 0x80000000u ? 0u : bits;
}

template <class Format>
__device__ void store_scale(const Scales& scales, i64 block, const Numbers& numbers) {
    store_bits<Format::stored>(scales.scale, block, numbers.stored);
    if constexpr (Format::offset == Offset::ZeroPoint)
        scales.zero_point[block] = static_cast<u8>(numbers.zero_point);
    if constexpr (Format::offset == Offset::Minimum)
        store_bits<Format::stored>(scales.minimum, block, numbers.stored_minimum);
    if (scales.overflow && numbers.overflows) atomicAdd(scales.overflow, numbers.overflows);
}

}  // namespace cuquant
