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
    return min(min(fine, middle), coarse);
}

// The word of eight codes, and the signs of x: code(i) is an e2m1_code.
template <class Packing, class Code>
__device__ inline u32 e2m1_word(const float* x, Code code) {
    u32 codes = 0, signs = 0;
#pragma unroll
    for (int p = kChunk - 1; p >= 0; --p) {
        codes = codes * 16 + code(Packing::place(p));
        signs = __funnelshift_l(bits_of(x[Packing::place(p)]), signs, 4);
    }
    codes -= 0xFB000000u;  // the bits of 2^23 and 16 times them; what more there is of them is shifted out
    return (signs & 0x88888888u) | codes;
}

// Of z; NaN is the largest number, with its sign.
template <class Packing>
__device__ inline u32 e2m1_codes(const float* z) {
    return e2m1_word<Packing>(z, [&](int i) { return e2m1_code<1>(fminf(fabsf(z[i]), 8.0f)); });
}

// Of x * inverse, rounded to float32; for x that are not NaN, and an inverse from 2^-120 on.
template <class Packing>
__device__ inline u32 e2m1_codes(const float* x, float inverse) {
    const float eighth = __fmul_rn(inverse, 0.125f);
    return e2m1_word<Packing>(x, [&](int i) { return e2m1_code<8>(__saturatef(__fmul_rn(fabsf(x[i]), eighth))); });
}

// The same of pairs of bfloat16, `words` as they lie in memory, for an inverse that is a power of two from 2^-125 to
// 2^126: z has 8 bits then, and bfloat16 from 128 on are whole numbers. Sizes saturate at `limit`, 6 / inverse.
template <class Packing>
__device__ inline u32 e2m1_codes(const uint4& words, u32 inverse, u32 limit) {
    const u32 pairs[4] = {words.x, words.y, words.z, words.w};
    const u32 one = __byte_perm(inverse, 0, 0x3232), most = __byte_perm(limit, 0, 0x3232);
    u32 codes[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const u32 size = pair_min(pairs[j] & 0x7FFF7FFFu, most);
        const u32 fine = bfloat16_pair_fma(size, one + 0x00800080u, 0x43004300u);     // 128
        const u32 middle = bfloat16_pair_fma(size, one, 0x43024302u);                 // 130
        const u32 coarse = bfloat16_pair_fma(size, one - 0x00800080u, 0x43044304u);   // 132
        codes[j] = pair_min(pair_min(fine, middle), coarse);
    }
    // Bytes 0 of the words have the codes of even elements, bytes 2 those of odd ones; bytes 1 and 3 the signs.
    constexpr bool high = Packing::order == Order::High;
    const u32 low_codes = __byte_perm(codes[0], codes[1], 0x6240), high_codes = __byte_perm(codes[2], codes[3], 0x6240);
    const u32 low_signs = __byte_perm(pairs[0], pairs[1], 0x7351), high_signs = __byte_perm(pairs[2], pairs[3], 0x7351);
    constexpr u32 evens = high ? 0x7632 : 0x5410, odds = high ? 0x5410 : 0x7632;
    const u32 both = __byte_perm(low_codes, high_codes, evens) + 16 * __byte_perm(low_codes, high_codes, odds);
    const u32 even = __byte_perm(low_signs, high_signs, evens) >> 4 & 0x08080808u;
    const u32 odd = __byte_perm(low_signs, high_signs, odds) & 0x80808080u;
    return both | even | odd;
}

}  // namespace cuquant
