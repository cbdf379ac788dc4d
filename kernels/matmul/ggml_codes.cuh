// Codes of ggml's blocks in shared memory -> operands of products of 16-bit floats.
#pragma once
#include "matmul/ggml_groups.cuh"
#include "device/mma.cuh"

namespace cuquant {

// Codes as floats of x's type, and what undoes their factor: Block's own facts, whose bytes are whole numbers
// plus `zero`, or signed ones. kWide: entries of the table of levels are 256 bytes apart, so that one byte permutation
// makes an address.
template <class Block, class T, bool kWide>
struct FloatCodes : Block {
    static constexpr bool half = is_same<T, Half>;
    // A byte u alone is the float16 u * 2^-24, which tensor cores multiply as exactly as any other.
    static constexpr bool tiny = half && Block::zero == 0 && !Block::wide;
    // Whether codes times the integers that scale them are whole numbers of T, so that products have these: such an integer,
    // from -most_number up, makes the factor of a multiply-add that is there anyway, and what it adds. A byte u alone is
    // u * 2^-tiny_bits of T; what comes out is divided by 2^excess, so that neither is out of range.
    using Layout = typename Block::Layout;
    static constexpr int most_number = Layout::scale_zero, tiny_bits = half ? 24 : 133, excess = half ? 14 : 13;
    static constexpr bool scaled = Layout::ScaleRuns::any && Layout::minimum_byte < 0 && !Block::wide
                                && most_number > 0 && (most_number << (Block::bits - 1)) <= (half ? 2048 : 256);
    static constexpr float unit = tiny ? Block::unit * 16777216.0f : scaled ? Block::unit * (1 << excess) : Block::unit;
    static constexpr int zero = Block::wide ? 128 : Block::zero;
    static constexpr u32 flip = half && Block::wide ? 0x80808080u : 0u;  // float16 wants them unsigned
    // Of the table of pairs of levels, where codes are looked up: an entry a byte of two codes, a copy a lane.
    static constexpr int apart = kWide ? 256 : 128, table_bytes = Block::lookup ? 256 * apart : 0;
    // Bytes between tokens of x: what lanes read at a time, 8 bytes by 4 lanes of 4 tokens, is of all banks.
    static constexpr int pad = 32;

    // Bytes i and j of a word, exactly, that are 2^kLeft times codes. A byte u below 0x64 is the float16 1024 + u; below 0x43 and
    // up to 127, the bfloat16 128 + u. Of signed bytes the top bit takes off another 128: it makes -256 of the bfloat16 -128.
    template <int i, int j, int kLeft = 0>
    __device__ static u32 pair(u32 word) {
        constexpr u32 order = 0x4040u | i | j << 8;
        constexpr double part = 1.0 / (1 << kLeft);
        if constexpr (tiny) return __byte_perm(word, 0u, order);
        else if constexpr (half) return fma_pair<T>(__byte_perm(word, 0x64646464u, order), constant_pair<T>(part), constant_pair<T>(-1024 * part - zero));
        else if constexpr (!Block::wide) return fma_pair<T>(__byte_perm(word, 0x43434343u, order), constant_pair<T>(part), constant_pair<T>(-128 * part - zero));
        else return add_pair<T>(__byte_perm(word & 0x7F7F7F7Fu, 0x43434343u, order), __byte_perm(word & 0x80808080u, 0xC3C3C3C3u, order));
    }
    // The same times the integer that `number` has in its halves, as a factor and an addend: see numbers.
    template <int i, int j>
    __device__ static u32 scaled_pair(u32 word, u32 number) {
        return fma_line<T>(__byte_perm(word, 0u, 0x4040u | i | j << 8), number);
    }
    // The same of `left` that the compiler knows.
    template <int i, int j, int kLeft = 0>
    __device__ static u32 pair(u32 word, int left) {
        if constexpr (kLeft < 8) {
            if (left != kLeft) return pair<i, j, kLeft + 1>(word, left);
            return pair<i, j, kLeft>(word);
        }
        return 0;
    }
    // How far from their bytes' lowest bit codes of half a step are left: where their first bits lie, if there is room.
    __device__ static constexpr int left_of(int step, int part) {
        using First = FirstOf<typename Layout::Codes>;
        const int place = (32 * step % Layout::elements + 16 * part) / First::span % (8 / First::bits) * First::bits - First::shift;
        return !tiny && !Block::wide && place > 0 && place + Block::bits <= (half ? 8 : 7) ? place : 0;
    }
    // What scales meet: kCount of a group's, as numbers_in has them or, where codes are scaled, a pair of T for each.
    // `upper`: the second half of them.
    static constexpr bool minimums = false;  // which meet sums of x
    template <bool kMinimum, int kCount, class R>
    __device__ static void numbers(const R& row, bool upper, float* out) {
        if constexpr (!scaled) return numbers_in<FloatCodes, kMinimum, kCount>(row, upper, out);
        constexpr int subs = 32 / Layout::sub_block, mantissa = half ? 10 : 7, bias = half ? 15 : 127;
        constexpr u32 addend = constant<T>(-Block::zero / static_cast<double>(1 << excess)) << 16;
        using Integers = typename Layout::ScaleRuns;
#pragma unroll
        for (int i = 0; i < kCount; i += 4) {
            const u32 low = four_of(Integers{}, row, i), high = four_of(Integers{}, row, kCount + i), four = upper ? high : low;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int left = left_of((i + j) / subs, (i + j) % subs);  // of both halves
                const u32 factor = static_cast<u32>(bias + tiny_bits - excess - left) << mantissa;
                const u32 both = __byte_perm(four, half ? 0x64646464u : 0x43434343u, 0x4040u | j * 0x101u);
                const u32 integer = add_pair<T>(both, constant_pair<T>((half ? -1024.0 : -128.0) - most_number));
                out[i + j] = float_of(mul_pair<T>(integer, factor | addend));
            }
        }
    }
    // What the whole block is multiplied by where codes are scaled.
    template <class R>
    __device__ static float common_of(const R& row) { return in_units<FloatCodes>(float_of_half(row.half(Layout::scale_byte))); }
    // The entry of byte i of a word; `table`: where the lane's own copy of the first one lies, which is where shared memory begins.
    template <int i>
    __device__ static u32 entry(u32 word, u32 table) {
        if constexpr (kWide) return shared_at<u32>(__byte_perm(word, table, 0x5504u | i << 4));
        else return shared_at<u32>(table + 128 * __byte_perm(word, 0u, 0x4440u | i));
    }
    // The table: all threads store their share of its vectors.
    __device__ static void put_table(const uint4& levels, int thread, int threads) {
        for (int i = thread; i < 256 * 8; i += threads) {
            const u32 two = levels_of(i / 8, levels);
            const u32 v = pair_of<T>(static_cast<float>(static_cast<signed char>(two)), static_cast<float>(static_cast<signed char>(two >> 8)));
            shared_at<uint4>(i / 8 * apart + i % 8 * 16) = make_uint4(v, v, v, v);
        }
    }
    // The operands of 32 columns, rows g and g + 8. Lane t has columns 4 t .. 4 t + 3 of both halves of them: first
    // those of one half, or two of each where codes are looked up. `number`: what codes of a half of a row are scaled by.
    template <class R, class Numbers>
    __device__ static void operands(const R& upper, const R& lower, int step, int t, u32 table, const Numbers& number, u32 (&a)[2][4]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const R& row = r ? lower : upper;
            if constexpr (Block::lookup) {
                const u32 word = looked_up<FloatCodes>(row, step, t);  // of two bytes each
                a[0][r] = entry<0>(word, table), a[0][2 + r] = entry<1>(word, table);
                a[1][r] = entry<2>(word, table), a[1][2 + r] = entry<3>(word, table);
            } else {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int left = left_of(step, h);
                    const u32 word = codes_in<FloatCodes>(row, step, h, t, left) ^ flip;
                    if constexpr (scaled) {
                        a[h][r] = scaled_pair<0, 1>(word, number(r, h)), a[h][2 + r] = scaled_pair<2, 3>(word, number(r, h));
                    } else {
                        a[h][r] = pair<0, 1>(word, left), a[h][2 + r] = pair<2, 3>(word, left);
                    }
                }
            }
        }
    }
    // Those of x. `x`: the address of the lane's columns 4 t .. 4 t + 3.
    __device__ static void columns_of(u32 x, int t, uint2 (&b)[2]) {
        if constexpr (Block::lookup && FirstOf<typename Layout::Codes>::span == 8) {  // i and i + 8 share a byte
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const u32 from = x - 4 * t + 32 * h, low = load4_shared(from), high = load4_shared(from + 16);
                b[h] = make_uint2(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
            }
            return;
        }
        const uint2 first = load8_shared(x), second = load8_shared(x + 32);
        b[0] = first, b[1] = second;
        if constexpr (Block::lookup) {  // columns i and i + 16 share a byte
            b[0] = make_uint2(__byte_perm(first.x, second.x, 0x5410), __byte_perm(first.x, second.x, 0x7632));
            b[1] = make_uint2(__byte_perm(first.y, second.y, 0x5410), __byte_perm(first.y, second.y, 0x7632));
        }
    }
};

}  // namespace cuquant
