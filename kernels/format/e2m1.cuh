// Eight codes of e2m1 at once: what Minifloat<2, 1, Specials::None>::encode makes one by one, by fewer operations.
//
// Codes count up the sizes 0, 1/2, 1, 3/2, 2, 3, 4, 6. A size y lies among those that are 1/2, 1 or 2 apart, where its
// code is y * 2, y + 2 or y / 2 + 4, rounded to nearest even: the smallest of the three, since each line is above the
// others where it is not meant. Adding 2^23 to a float32 rounds it to a whole number, in its low bits.
#pragma once
#include "device/pairs.cuh"
#include "format.cuh"

namespace cuquant {

template <class Codec> constexpr bool is_e2m1 = false;
template <> inline constexpr bool is_e2m1<Minifloat<2, 1, Specials::None>> = true;

// The code, plus the bits of 2^23, of y = size / kPart, which is 8 / kPart at the most. Codes 6 and 7 part above 5 alone: the
// third line is rounded up, a fifth less half a step has 5 below 6 and the next float32 above, and at 8 it is not
// above 7 yet. So nothing is left to saturate.
template <int kPart>
__device__ inline u32 e2m1_code(float y) {
    const u32 fine = bits_of(__fmaf_rn(y, 2.0f * kPart, 8388608.0f));
    const u32 middle = bits_of(__fmaf_rn(y, 1.0f * kPart, 8388610.0f));
    const u32 coarse = bits_of(__fmaf_ru(y, 0.19999998807907104f * kPart, 8388613.0f));
    return least_of(fine, middle, coarse);
}

// The word of eight codes without signs; code(i) is an e2m1_code.
template <class Packing, class Code>
__device__ inline u32 e2m1_word(Code code) {
    u32 word = 0;
#pragma unroll
    for (int p = kChunk - 1; p >= 0; --p) word = word * 16 + code(Packing::place(p));
    return word - 0xFB000000u;  // the bits of 2^23 and 16 times them; what more there is of them is shifted out
}

// The signs of eight numbers at their places in the word; the other bits mean nothing.
template <class Packing>
__device__ inline u32 e2m1_signs(const float* x) {
    u32 signs = 0;
#pragma unroll
    for (int p = kChunk - 1; p >= 0; --p) signs = __funnelshift_l(bits_of(x[Packing::place(p)]), signs, 4);
    return signs;
}

// Bytes `low` and `high` of four pairs, those of numbers 0, 2, 4, 6 and of 1, 3, 5, 7, where the codes of a word come
// from bytes of two: those of the low places, and those of the high ones.
template <class Packing, int kLow, int kHigh>
__device__ inline void e2m1_bytes(const u32* pairs, u32& low, u32& high) {
    constexpr u32 choice = (4 + kHigh) << 12 | kHigh << 8 | (4 + kLow) << 4 | kLow;
    const u32 first = __byte_perm(pairs[0], pairs[1], choice), second = __byte_perm(pairs[2], pairs[3], choice);
    constexpr bool swapped = Packing::place(0) == 1;
    low = __byte_perm(first, second, swapped ? 0x7632 : 0x5410);
    high = __byte_perm(first, second, swapped ? 0x5410 : 0x7632);
}

// The same of four pairs of float16 or bfloat16.
template <class Packing>
__device__ inline u32 e2m1_signs(const u32* pairs) {
    u32 low, high;
    e2m1_bytes<Packing, 1, 3>(pairs, low, high);
    return (low >> 4 & 0x08080808u) | (high & 0x80808080u);
}

__device__ inline u32 with_signs(u32 codes, u32 signs) { return (signs & 0x88888888u) | codes; }

// Of z; NaN is the largest number, with its sign.
template <class Packing>
__device__ inline u32 e2m1_codes(const float* z) {
    const u32 codes = e2m1_word<Packing>([&](int i) { return e2m1_code<1>(fminf(fabsf(z[i]), 8.0f)); });
    return with_signs(codes, e2m1_signs<Packing>(z));
}

// Of x * inverse, rounded to float32, for x that are not NaN, and an inverse from 2^-120 on. `with_sign` is x,
// or the pairs that x comes from.
template <class Packing, typename Signed>
__device__ inline u32 e2m1_codes(const float* x, const Signed* with_sign, float inverse) {
    const float eighth = __fmul_rn(inverse, 0.125f);
    const u32 codes = e2m1_word<Packing>([&](int i) { return e2m1_code<8>(__saturatef(__fmul_rn(fabsf(x[i]), eighth))); });
    return with_signs(codes, e2m1_signs<Packing>(with_sign));
}

// The same of four pairs of bfloat16, for an inverse that is a power of two from 2^-125 to 2^126: z has 8 bits then,
// and bfloat16 from 128 on are whole numbers. Sizes saturate at 6 / inverse.
template <class Packing>
__device__ inline u32 e2m1_codes(const u32* pairs, float inverse) {
    const u32 one = __byte_perm(bits_of(inverse), 0, 0x3232), most = 0x80408040u - one;
    u32 codes[4], low, high;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const u32 size = pair_min(pairs[j] & 0x7FFF7FFFu, most);
        const u32 fine = bfloat16_pair_fma(size, one + 0x00800080u, 0x43004300u);    // 128
        const u32 middle = bfloat16_pair_fma(size, one, 0x43024302u);                // 130
        const u32 coarse = bfloat16_pair_fma(size, one - 0x00800080u, 0x43044304u);  // 132
        codes[j] = pair_min(pair_min(fine, middle), coarse);
    }
    e2m1_bytes<Packing, 0, 2>(codes, low, high);
    return with_signs(low + 16 * high, e2m1_signs<Packing>(pairs));
}

}  // namespace cuquant
