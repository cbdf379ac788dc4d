// Weights of 4 bits in the layout "fragments/1" -> operands whose elements are bytes: by operations on integers, a
// word of 8 codes at a time. cuquant/array/fragments.py says where which code lies.
//
// Of each 16 columns lane 4 g + t has columns 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t, where products of bytes want four
// neighbours. So bytes 4 t .. 4 t + 3 of an operand's 16 stand for columns 2 t, 8 + 2 t, 2 t + 1, 9 + 2 t, in this
// order: matmul/code_rows.cu brings x into the same one.
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
        first = __byte_perm(low, high, 0x6420);
        second = __byte_perm(low, high, 0x7531);
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

    // The operands of a unit, each of 64 columns / kOperands: 32, or the first and then the second half of them and 0.
    template <int kOperands>
    __device__ static void decode(const u32 (&w)[4], u32 (&to)[kOperands][4]) {
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            u32 (&own)[4] = to[part * kOperands / 4];
            const int first = part % 2 * 2;
            Rows::row_pair(w[part], own[first], own[first + 1]);
            if constexpr (kOperands == 4) own[2 - first] = own[3 - first] = 0;
        }
    }
};

}  // namespace cuquant
