// Weights of 4 bits in the layout "fragments/1" -> operands whose elements are bytes: by operations on integers, a
// word of 8 codes at a time. cuquant/array/fragments.py says where which code lies.
//
// Of each 16 columns lane 4 g + t has columns 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t, where products of bytes want four
// neighbours. So bytes 4 t .. 4 t + 3 of an operand's 16 stand for these: of floats in this order, and of integers the
// second and the third change places. matmul/code_rows.cu brings x into the same order.
#pragma once
#include "device/bytes.cuh"
#include "layout/fragments.cuh"

namespace cuquant {

// row_pair: a lane's word of 16 columns -> four bytes of row g, and of row g + 8, each of which is a number times
// `worth`.
template <class Codec, class T> struct ByteRows;

// e2m1 has its bits in e4m3: sign to bit 7, the others to bits 2..4, also below 1. Exponents differ by 6. A byte of the
// word is a pair, of row g and g + 8 in turn.
template <Specials kSpecials>
struct ByteRows<Minifloat<2, 1, kSpecials>, E4m3> {
    static constexpr float worth = 1.0f / 64;

    __device__ static void row_pair(u32 w, u32& first, u32& second) {
        const u32 low = (w << 4 & 0x80808080u) | (w << 2 & 0x1C1C1C1Cu);
        const u32 high = (w & 0x80808080u) | (w >> 2 & 0x1C1C1C1Cu);
        first = __byte_perm(low, high, 0x6240);
        second = __byte_perm(low, high, 0x7351);
    }
};

// The same times a power of two for each row and group: e4m3 bytes of 0, 0.5, 1, 1.5 | 2, 3, 4, 6 times 64 / 2^octaves,
// which are numbers without a leading zero for up to 11 octaves. Three bits of a code choose one.
struct LowerE2m1 {
    static constexpr float worth = 64.0f;
    static constexpr int octaves = 11;
    u32 small, large;

    __device__ explicit LowerE2m1(u32 octaves)
        : small(0x6C686000u - octaves * 0x08080800u), large(0x7C787470u - octaves * 0x08080808u) {}
    // Of four codes: the lower half of `sizes`, and bit 7 of each byte of `signs`.
    __device__ u32 of(u32 sizes, u32 signs) const { return permuted(small, large, sizes) | (signs & 0x80808080u); }
    // Bytes of `kept` that are 0 make a row's numbers 0.
    __device__ static void row_pair(u32 w, u32 kept, const LowerE2m1& of_first, const LowerE2m1& of_second, u32& first,
                                    u32& second) {
        const u32 sizes = w & kept & 0x77777777u, low = w << 4;
        first = of_first.of(__byte_perm(sizes, 0, 0x4420), __byte_perm(low, w, 0x6240));
        second = of_second.of(__byte_perm(sizes, 0, 0x4431), __byte_perm(low, w, 0x7351));
    }
};

// A word's half has the codes of one column of four pairs, in four bits each: an integer + 8, which with its upper bit
// turned is the integer itself. In a byte's upper half that is 16 of it.
template <int kHigh, Rounding kRounding>
struct ByteRows<Uniform<-8, kHigh, kRounding>, Int8> {
    static constexpr float worth = 16.0f;

    __device__ static void row_pair(u32 w, u32& first, u32& second) {
        const u32 turned = w ^ 0x88888888u;
        first = turned << 4 & 0xF0F0F0F0u;
        second = turned & 0xF0F0F0F0u;
    }
};

// e4m3 numbers 0 .. 15 are those of its bytes, times 2^-9: the smallest exponent has no leading one, and the next one
// has the same steps. Of a negative integer 16 - |q| has four bits that turned, plus one, make |q|.
template <int kHigh, Rounding kRounding>
struct ByteRows<Uniform<-8, kHigh, kRounding>, E4m3> {
    static constexpr float worth = 1.0f / 512;

    __device__ static void row_pair(u32 w, u32& first, u32& second) {
        const u32 signs = ~w >> 3 & 0x11111111u, sizes = (w ^ 0x88888888u ^ signs * 15) + signs;  // no carry: 8 at most
        first = (sizes & 0x0F0F0F0Fu) | (signs << 7 & 0x80808080u);
        second = (sizes >> 4 & 0x0F0F0F0Fu) | (signs << 3 & 0x80808080u);
    }
};

// What matmul_hopper wants of a decoder.
template <class Codec, class T>
struct ByteDecoder {
    using Rows = ByteRows<Codec, T>;
    static constexpr int table_bytes = 0;
    template <int> using Filling = NoTable;
    __device__ static u32 lane_table(int) { return 0; }

    // The operands of half a unit, each of 64 columns / kOperands: 32, or the first and then the second half of them
    // and 0.
    template <int kOperands>
    __device__ static void decode(const u32 (&w)[4], int half, u32 (&to)[kOperands][4]) {
#pragma unroll
        for (int part = 2 * half; part < 2 * half + 2; ++part) {
            u32 (&own)[4] = to[part * kOperands / 4];
            const int first = part % 2 * 2;
            Rows::row_pair(w[part], own[first], own[first + 1]);
            if constexpr (kOperands == 4) own[2 - first] = own[3 - first] = 0;
        }
    }
};

}  // namespace cuquant
