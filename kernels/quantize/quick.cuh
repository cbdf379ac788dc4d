// Scales and codes of nearly all blocks of a power of two or of an e4m3 scale, by fewer operations: of blocks whose
// scale is a normal number. They are those that numbers_of, scale_values and encode_chunk make.
#pragma once
#include "quantize/sources.cuh"

namespace cuquant {

// The e4m3 number nearest to x, which is 2^-6 or more, saturating, and its value.
__device__ inline u32 e4m3_of(float x, float& value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    const u32 code = e4m3_pair_of(x, 0.0f) & 0xFFu;
    value = float_of_half(halves_of_e4m3_pair(code));
#else
    const u32 code = Minifloat<4, 3, Specials::OneNan>::encode(x);
    value = Minifloat<4, 3, Specials::OneNan>::decode(code);
#endif
    return code;
}

template <class Format, int kFlags>
struct Quick {
    using Rule = typename Format::Rule;
    static constexpr bool powers = Format::stored == Stored::E8M0 && is_same<Rule, PowerOfTwo>;
    static constexpr bool e4m3 = Format::stored == Stored::E4M3 && is_same<Rule, AbsMax>;
    static constexpr bool possible =
        (powers || e4m3) && Format::offset == Offset::None && !Format::encode_exact && !Format::mean && !(kFlags & kGiven);

    float global, peak, reciprocal;  // peak: the largest number of a block whose scale is 1
    bool within, counts;  // counts: scales beyond e4m3

    // What a thread loads before anything else, since it waits for it.
    __device__ static float early(const Given& given) {
        if constexpr (possible && e4m3) return *given.global_scale;
        else return 1.0f;
    }

    // What the blocks of a thread share.
    __device__ Quick(const Given& given, float global) : global(global) {
        if constexpr (possible && e4m3) {
            peak = __fmul_rn(Format::peak(), global);
            reciprocal = __frcp_rn(peak);
            within = peak > 0x1p-60f && peak < 0x1p60f;
            counts = !given.global_from_data;
        }
    }

    // The numbers of a block whose largest magnitude has the bits `top`; false where it takes numbers_of.
    __device__ bool numbers(u32 top, Numbers& numbers) const {
        numbers.exact = numbers.minimum = 0.0f;
        numbers.zero_point = 0;
        numbers.stored_minimum = numbers.overflows = 0;
        if constexpr (possible && powers) {
            constexpr u32 peak_exponent = (static_cast<u32>(Format::peak_bits) >> 23) - 127;  // of a scale's codes
            constexpr u32 least = (peak_exponent + 1) << 23, most = 254u << 23;
            static_assert(peak_exponent >= 1, "what the inverse's exponent is at the least");
            const u32 own = top & 0x7F800000u;
            numbers.stored = (own >> 23) - peak_exponent;
            numbers.inverse = float_of(most + (peak_exponent << 23) - own);
            return own - least <= most - least;
        } else if constexpr (possible) {
            // By the reciprocal, and twice its rest: correctly rounded, as Markstein shows, where nothing is near
            // the ends of the exponents. NaN and infinity become NaN, and a scale of 0 is too small.
            const float x = float_of(top);
            float scale = __fmul_rn(x, reciprocal);
            scale = __fmaf_rn(__fmaf_rn(-scale, peak, x), reciprocal, scale);
            scale = __fmaf_rn(__fmaf_rn(-scale, peak, x), reciprocal, scale);
            float value;
            numbers.stored = e4m3_of(scale, value);
            numbers.inverse = inverse_of(__fmul_rn(value, global));
            numbers.overflows = counts && scale > 464.0f;
            return within && scale >= 0x1p-6f && scale <= 0x1p60f;  // below it is contested
        }
        return false;
    }

    // The codes of a unit of such a block.
    template <typename T>
    __device__ static void encode(
        const Unit<T>& unit, const Numbers& numbers, u64* bits, const typename Format::Codec::EncodeTables& tables,
        const Lookup& lookup) {
        using Packing = typename Format::Packing;
        constexpr bool small = is_e2m1<typename Format::Codec> && Packing::bits == 4;
        if constexpr (small && powers && Unit<T>::pairs && is_same<T, Bfloat16>) {
            static_assert(Format::peak_bits == 0x40C00000, "6, where sizes saturate");
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint4& part = unit.half[h].part[0];
                const u32 pairs[4] = {part.x, part.y, part.z, part.w};
                bits[h] = e2m1_codes<Packing>(pairs, numbers.inverse);
            }
        } else {
            float v[kUnit];
            unit.values(v);
            if constexpr (!small) {
#pragma unroll
                for (int i = 0; i < kUnit; ++i) v[i] = __fmul_rn(v[i], numbers.inverse);
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint4& part = unit.half[h].part[0];
                const u32 pairs[4] = {part.x, part.y, part.z, part.w};
                const float* x = v + h * kChunk;
                if constexpr (small && sizeof(T) == 2) bits[h] = e2m1_codes<Packing>(x, pairs, numbers.inverse);
                else if constexpr (small) bits[h] = e2m1_codes<Packing>(x, x, numbers.inverse);
                else bits[h] = encode_chunk<Format>(x, 0, tables, lookup);
            }
        }
    }
};

}  // namespace cuquant
