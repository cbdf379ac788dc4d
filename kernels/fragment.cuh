// Weights in the layout "fragments/1": a lane's 32 codes of 16 rows x 64 columns -> operands of matrix
// products. cuquant/fragments.py says where which code lies.
#pragma once
#include "format.cuh"
#include "mma.cuh"

namespace cuquant {

constexpr int kStrip = 16, kUnit = 64;  // rows, columns

// ---- loading ------------------------------------------------------------------------------------

template <int kBits>
struct Words {  // of one lane and unit
    u32 w[kBits];

    __device__ static constexpr i64 unit_words() { return 32 * kBits; }
    __device__ void load(const u32* unit, int lane) {
#pragma unroll
        for (int v = 0; v < kBits / 4; ++v) {
            const uint4 part = load16_once(unit + (v * 32 + lane) * 4);
            w[4 * v] = part.x; w[4 * v + 1] = part.y; w[4 * v + 2] = part.z; w[4 * v + 3] = part.w;
        }
        constexpr int fours = kBits / 4 * 4;
        if constexpr (kBits & 2) {
            const uint2 part = load8_once(unit + fours * 32 + lane * 2);
            w[fours] = part.x; w[fours + 1] = part.y;
        }
        if constexpr (kBits & 1) w[kBits - 1] = load4_once(unit + (kBits - 1) * 32 + lane);
    }
};

// 16 codes of each of rows g and g + 8 of a matrix packed by rows, of 2, 4 or 8 bits.
template <class Packing>
struct RowWords {
    static constexpr int bits = Packing::bits, each = bits / 2;
    u32 w[bits];

    __device__ void load(const u8* first, const u8* second) {
        load_row(first, w);
        load_row(second, w + each);
#pragma unroll
        for (int i = 0; i < bits; ++i) w[i] ^= Packing::flip;
    }
    __device__ static void load_row(const u8* from, u32* to) {
        if constexpr (each == 1) to[0] = load4_once(from);
        else if constexpr (each == 2) { const uint2 v = load8_once(from); to[0] = v.x; to[1] = v.y; }
        else { const uint4 v = load16_once(from); to[0] = v.x; to[1] = v.y; to[2] = v.z; to[3] = v.w; }
    }
    // Which column of the 64 of a unit a lane has as element `e` of half `h` of step `s`: pairs are what lies
    // 16 bits apart, and pair 2 s + h is half h of step s.
    __device__ static constexpr int column(int t, int s, int h, int e) {
        constexpr int fields = 16 / bits;  // pairs of a word
        const int pair = 2 * s + h, i = pair / fields * 2 * fields + pair % fields + e * fields;
        return 16 * t + Packing::place(i);
    }
};

// ---- where a pair's codes are -------------------------------------------------------------------

__device__ constexpr bool odd_bits(int bits) { return bits == 3 || bits == 5; }
__device__ constexpr int fields_of(int bits) { return odd_bits(bits) ? 15 / bits : 16 / bits; }
// One field holds the whole code: all pairs of 1, 2, 4, 8 bits, and 15 of the 16 of 3 and 5.
__device__ constexpr bool one_field(int bits, int pair) { return odd_bits(bits) ? pair < 15 : bits < 6 || bits == 8; }

template <int kBits, int kPair>
__device__ u32 raw_codes(const u32* w) {  // a pair's codes, each in the low bits of its half
    constexpr u32 ones = 0x00010001u;
    if constexpr (kBits == 6) return raw_codes<4, kPair>(w) | raw_codes<2, kPair>(w + 4) << 4;
    else if constexpr (kBits == 7) return raw_codes<6, kPair>(w) | raw_codes<1, kPair>(w + 6) << 6;
    else if constexpr (!one_field(kBits, kPair)) {
        u32 codes = 0;
#pragma unroll
        for (int i = 0; i < kBits; ++i) codes |= (w[i] >> (15 - i)) & (ones << i);
        return codes;
    } else {
        constexpr int fields = fields_of(kBits), at = kBits * (kPair % fields);
        return w[kPair / fields] >> at & ((1u << kBits) - 1) * ones;
    }
}

// ---- integers -----------------------------------------------------------------------------------

// Or-ing a code into the bits of 1024 (bfloat16: 128) makes 1024 + code; further up by `place` bits it
// makes 1024 + 2^place code. One fused multiply-add makes that code - offset, exactly.
template <class T, int kBits, int kPair>
struct Magic {
    static constexpr int reach = is_same<T, Half> ? 10 : 7;
    static constexpr double base = is_same<T, Half> ? 1024 : 128;
    static constexpr u32 bits = is_same<T, Half> ? 0x64006400u : 0x43004300u;
    static constexpr bool direct = one_field(kBits, kPair);
    static constexpr int at = direct ? kBits * (kPair % fields_of(kBits)) : 0;
    // Neighbours share a shift by 8 where that brings the field into reach.
    static constexpr bool by_8 = at + kBits > reach && at >= 8 && at - 8 + kBits <= (reach < 8 ? reach : 8);
    static constexpr int shift = at + kBits <= reach ? 0 : by_8 ? 8 : at;
    static constexpr int place = at - shift;

    __device__ static u32 raised(const u32* w) {
        if constexpr (kBits == 8) return __byte_perm(w[kPair / 2], bits, kPair % 2 ? 0x7351 : 0x7250);
        else if constexpr (!direct) return raw_codes<kBits, kPair>(w) | bits;
        else return and_or(w[kPair / fields_of(kBits)] >> shift, (((1u << kBits) - 1) << place) * 0x10001u, bits);
    }
    // To be added: -(base / 2^place + offset).
    static constexpr double zero = -base / (1 << place);
};

template <class T, int kBits, int kPair>
__device__ u32 integers(const u32* w, int, u32 minus_offset) {  // minus_offset: a pair of T
    if constexpr (kBits == 8 && !is_same<T, Half>) {
        // 8 bits are more than bfloat16's 7 hold beside the leading one.
        const u32 word = w[kPair / 2];
        const float low = float_of(__byte_perm(word, 0x4B000000u, 0x7650 + kPair % 2));
        const float high = float_of(__byte_perm(word, 0x4B000000u, 0x7652 + kPair % 2));
        const float minus = low_of<T>(minus_offset) - 8388608.0f;
        return pair_of<T>(low + minus, high + minus);
    } else {
        using M = Magic<T, kBits, kPair>;
        return fma_pair<T>(M::raised(w), constant_pair<T>(1.0 / (1 << M::place)), add_pair<T>(minus_offset, constant_pair<T>(M::zero)));
    }
}
template <class T, int kBits, int kPair, int kOffset>
__device__ u32 integers(const u32* w) {
    if constexpr (kBits == 8 && !is_same<T, Half>) {
        return integers<T, kBits, kPair>(w, 0, constant_pair<T>(-kOffset));
    } else {
        using M = Magic<T, kBits, kPair>;
        return fma_pair<T>(M::raised(w), constant_pair<T>(1.0 / (1 << M::place)), constant_pair<T>(M::zero - kOffset));
    }
}

// ---- one decoder a codec ------------------------------------------------------------------------

// decode_row<kStep>: the pairs of step kStep of one row, of RowWords. decode<kStep>: the 4 pairs of step kStep, in the order of mma's registers. `tables` are in shared
// memory, and `lane` is lane_table of it: where the lane's own part of an entry lies; `offset` has a row's minus zero point as a pair of T, for rows g
// and g + 8.
template <class Codec, class T, int kBits> struct Decoder;

template <int kLow, int kHigh, Rounding kRounding, class T, int kBits>
struct Decoder<Uniform<kLow, kHigh, kRounding>, T, kBits> {
    static constexpr int table_bytes = 0;
    __device__ static void fill(u8*, const float*, int, int) {}
    __device__ static u32 lane_table(int) { return 0; }

    template <int kStep, bool kZeroPoint>
    __device__ static void decode(const u32* w, const u8*, u32, const u32 (&offset)[2], u32 (&a)[4]) {
        one<kStep, kZeroPoint, 0>(w, offset, a);
        one<kStep, kZeroPoint, 1>(w, offset, a);
        one<kStep, kZeroPoint, 2>(w, offset, a);
        one<kStep, kZeroPoint, 3>(w, offset, a);
    }
    template <int kStep, bool kZeroPoint>
    __device__ static void decode_row(const u32* w, const u8*, u32, u32 offset, u32& first, u32& second) {
        if constexpr (kZeroPoint) {
            first = integers<T, kBits, 2 * kStep>(w, 0, offset);
            second = integers<T, kBits, 2 * kStep + 1>(w, 0, offset);
        } else {
            first = integers<T, kBits, 2 * kStep, Uniform<kLow, kHigh, kRounding>::offset>(w);
            second = integers<T, kBits, 2 * kStep + 1, Uniform<kLow, kHigh, kRounding>::offset>(w);
        }
    }
    template <int kStep, bool kZeroPoint, int kRegister>
    __device__ static void one(const u32* w, const u32 (&offset)[2], u32 (&a)[4]) {
        if constexpr (kZeroPoint) a[kRegister] = integers<T, kBits, 4 * kStep + kRegister>(w, 0, offset[kRegister % 2]);
        else a[kRegister] = integers<T, kBits, 4 * kStep + kRegister, Uniform<kLow, kHigh, kRounding>::offset>(w);
    }
};

// Codebooks: tables in shared memory. Up to 4 bits an entry is a pair of levels, and each lane has a
// copy of its own; above, it is one level, and some lanes share a copy.
template <int kCount, Grid kGrid, bool kSorted, int kCodes, class T, int kBits>
struct Decoder<Codebook<kCount, kGrid, kSorted, kCodes>, T, kBits> {
    static constexpr bool pairs = kBits <= 4;
    static constexpr int entries = pairs ? 1 << 2 * kBits : 1 << kBits;
    static constexpr int copies = pairs || kBits < 7 ? 32 : kBits == 7 ? 16 : 8;
    static constexpr int table_bytes = entries * copies * 4;
    static constexpr u32 mask = (1u << kBits) - 1;

    __device__ static void fill(u8* table, const float* values, int thread, int threads) {
        for (int i = thread; i < entries * copies / 4; i += threads) {
            const int e = i / (copies / 4);
            const u32 v = pairs ? pair_of<T>(values[e & mask], values[e >> kBits & mask]) : pair_of<T>(values[e], values[e]);
            reinterpret_cast<uint4*>(table)[i] = make_uint4(v, v, v, v);
        }
    }
    __device__ static u32 lane_table(int lane) { return lane % copies * 4; }
    // Entry `code`, where that stands `at` bits from the low end of a word.
    __device__ static u32 look_up(u32 word, int at, const u8* tables, u32 lane) {
        constexpr int size = copies == 32 ? 7 : copies == 16 ? 6 : 5;  // log2 of the bytes from entry to entry
        const u32 moved = at < size ? word << (size - at) : word >> (at - size);
        return *reinterpret_cast<const u32*>(tables + and_or(moved, static_cast<u32>(entries - 1) << size, lane));
    }

    template <int kStep, bool>
    __device__ static void decode(const u32* w, const u8* tables, u32 lane, const u32 (&)[2], u32 (&a)[4]) {
        if constexpr (kBits == 4) {
            // A byte holds an element of two neighbouring pairs: look both up, then sort them.
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 low = look_up(w[kStep], 8 * i, tables, lane), high = look_up(w[kStep], 16 + 8 * i, tables, lane);
                a[2 * i] = __byte_perm(low, high, 0x5410);
                a[2 * i + 1] = __byte_perm(low, high, 0x7632);
            }
        } else {
            a[0] = one<4 * kStep>(w, tables, lane);
            a[1] = one<4 * kStep + 1>(w, tables, lane);
            a[2] = one<4 * kStep + 2>(w, tables, lane);
            a[3] = one<4 * kStep + 3>(w, tables, lane);
        }
    }
    template <int kStep, bool>
    __device__ static void decode_row(const u32* w, const u8* tables, u32 lane, u32, u32& first, u32& second) {
        if constexpr (kBits == 4) {
            const u32 low = look_up(w[kStep / 2], kStep % 2 * 8, tables, lane), high = look_up(w[kStep / 2], 16 + kStep % 2 * 8, tables, lane);
            first = __byte_perm(low, high, 0x5410);
            second = __byte_perm(low, high, 0x7632);
        } else {
            first = one<2 * kStep>(w, tables, lane);
            second = one<2 * kStep + 1>(w, tables, lane);
        }
    }
    template <int kPair>
    __device__ static u32 one(const u32* w, const u8* tables, u32 lane) {
        const u32 codes = raw_codes<kBits, kPair>(w);
        if constexpr (pairs) return look_up(codes | codes >> (16 - kBits), 0, tables, lane);
        else return __byte_perm(look_up(codes, 0, tables, lane), look_up(codes, 16, tables, lane), 0x5410);
    }
};

template <int kExponent, int kMantissa, Specials kSpecials, class T, int kBits>
struct Decoder<Minifloat<kExponent, kMantissa, kSpecials>, T, kBits> {
    using Codec = Minifloat<kExponent, kMantissa, kSpecials>;
    static constexpr int table_bytes = 0;
    __device__ static void fill(u8*, const float*, int, int) {}
    __device__ static u32 lane_table(int) { return 0; }

    template <int kStep, bool>
    __device__ static void decode(const u32* w, const u8*, u32, const u32 (&)[2], u32 (&a)[4]) {
        a[0] = one<4 * kStep>(w);
        a[1] = one<4 * kStep + 1>(w);
        a[2] = one<4 * kStep + 2>(w);
        a[3] = one<4 * kStep + 3>(w);
    }
    template <int kStep, bool>
    __device__ static void decode_row(const u32* w, const u8*, u32, u32, u32& first, u32& second) {
        first = one<2 * kStep>(w);
        second = one<2 * kStep + 1>(w);
    }
    template <int kPair>
    __device__ static u32 one(const u32* w) {
        if constexpr (kBits == 8) {
            const u32 word = w[kPair / 2];
            u32 halves;
            if constexpr (kExponent == 5) {
                halves = __byte_perm(word, 0, kPair % 2 ? 0x3414 : 0x2404);
            } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
                halves = halves_of_e4m3_pair(__byte_perm(word, 0, kPair % 2 ? 0x4431 : 0x4420));
#else
                halves = halves_of(Codec::decode(word >> 8 * (kPair % 2) & 0xFFu), Codec::decode(word >> (16 + 8 * (kPair % 2)) & 0xFFu));
#endif
            }
            if constexpr (is_same<T, Half>) return halves;
            else return pair_of<T>(float_of_half(halves), float_of_high_half(halves));
        } else {
            // The bits of a 16-bit float of which it has a part; only the bias differs.
            constexpr int mantissa = is_same<T, Half> ? 10 : 7, excess = is_same<T, Half> ? 15 : 127;
            constexpr u32 sign = 1u << (kBits - 1);
            const u32 codes = raw_codes<kBits, kPair>(w);
            const u32 placed = (codes & sign * 0x10001u) << (16 - kBits) | (codes & (sign - 1) * 0x10001u) << (mantissa - kMantissa);
            return mul_pair<T>(placed, static_cast<u32>(2 * excess - Codec::excess) << mantissa | static_cast<u32>(2 * excess - Codec::excess) << (mantissa + 16));
        }
    }
};

}  // namespace cuquant
