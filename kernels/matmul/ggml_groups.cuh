// Groups of 256 columns of ggml's blocks in shared memory: where their rows lie, and how scales and codes are read there.
#pragma once
#include "format/blocks.cuh"

namespace cuquant {

extern __shared__ __align__(16) u8 dynamic_shared[];

constexpr int kRows = 16, kSteps = 8;  // of a warp; of 32 columns in a group
// Warps of a multiprocessor that shared memory has room for; registers must not be what limits them.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int kResident = 8;
#else
constexpr int kResident = 16;
#endif

// How the groups of a row of weights lie in shared memory. Vectors that start on 16 bytes are copied, so
// a group begins up to 14 bytes after its first one; rows that boxes of the copy engine hold start on 16 bytes
// themselves. An odd number of vectors lets 8 rows use all banks.
template <class Layout, bool kBoxes = false>
struct Geometry {
    static constexpr int blocks = kGroup / Layout::elements, bytes = blocks * Layout::bytes;
    // Whether the groups of a row keep their place in a word; where not, shifts are made at run time.
    static constexpr bool in_place = bytes % 4 == 0;
    static constexpr int step = bytes % 16 ? bytes & -bytes : 16, behind = kBoxes ? 16 - step : in_place ? 12 : 14;
    static constexpr int vectors = (bytes + behind + 15) / 16, pitch = 16 * (vectors | 1);
    static constexpr int group_bytes = kRows * pitch;  // of all rows
    static constexpr int subs = kGroup / Layout::sub_block, stride = subs + 4;  // a row of scales, padded
    static constexpr int tables = Layout::minimum_byte >= 0 ? 2 : 1, table_bytes = 4 * kRows * stride;
};

// Places in shared memory are 32-bit numbers: bytes from its start.
template <class T> __device__ inline T& shared_at(int place) { return *reinterpret_cast<T*>(dynamic_shared + place); }

// A row's group in shared memory: words from any byte on.
template <bool kInPlace>
struct Row {
    int place;  // a multiple of 4
    int skip;   // bytes before the group, less than 4; 0 where groups are in place

    // Little-endian, as all of ggml's numbers.
    __device__ u32 word(int offset) const {
        const int first = place + (offset & ~3);
        if constexpr (kInPlace) {
            const u32 low = shared_at<u32>(first);
            return offset & 3 ? __funnelshift_r(low, shared_at<u32>(first + 4), 8 * (offset & 3)) : low;
        } else {
            const int odd = skip + (offset & 3), low = first + (odd & ~3);
            return __funnelshift_r(shared_at<u32>(low), shared_at<u32>(low + 4), 8 * (odd & 3));
        }
    }
    __device__ u32 half(int offset) const { return shared_at<u16>(place + skip + offset); }  // an even place
    __device__ u32 byte(int offset) const { return shared_at<u8>(place + skip + offset); }
    __device__ Row after(int bytes) const { return {place + bytes, skip}; }  // a multiple of 4
};

// ---- scales -------------------------------------------------------------------------------------

// Small integers i .. i + 3, a byte each, from a word that has those of neighbouring bytes.
template <class R, int kByte, int kCount, int kFirst, int kLow, int kBits, int kShift, int kStep>
__device__ u32 four_of(Run<kByte, kCount, kFirst, kLow, kBits, kShift, kStep>, const R& row, int i) {
    if constexpr (kStep == 1 && kCount % 4 == 0 && kFirst % 4 == 0) {
        if (i < kFirst || i >= kFirst + kCount) return 0;
        return (row.word(kByte + i - kFirst) >> kLow & ((1u << kBits) - 1) * 0x01010101u) << kShift;
    } else {
        u32 four = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int at = (i + j - kFirst) / kStep;
            if (i + j < kFirst || at >= kCount || (i + j - kFirst) % kStep) continue;
            four |= (row.byte(kByte + at) >> kLow & ((1u << kBits) - 1)) << (kShift + 8 * j);
        }
        return four;
    }
}
template <class R, class... Parts>
__device__ u32 four_of(Runs<Parts...>, const R& row, int i) { return (four_of(Parts{}, row, i) | ... | 0u); }

// float(byte i of `four`) - bias, exactly.
__device__ inline float float_of_byte(u32 four, int i, float bias) {
    return __fadd_rn(float_of(__byte_perm(four, 0x4B000000u, 0x7440u | i)), -8388608.0f - bias);
}

template <class Block> __device__ float in_units(float scale) {
    if constexpr (Block::unit == 1.0f) return scale;
    else return __fmul_rn(scale, Block::unit);
}

// kCount of a group's scales (kMinimum: minimums): the first half of them, or the second one where `upper`.
template <class Block, bool kMinimum, int kCount, class R>
__device__ void numbers_in(const R& row, bool upper, float* out) {
    using Layout = typename Block::Layout;
    constexpr int subs = Layout::elements / Layout::sub_block;
    constexpr int at = kMinimum ? Layout::minimum_byte : Layout::scale_byte;
    if constexpr (subs > kCount) {  // the integers of one block
        using Integers = Choice<kMinimum, typename Layout::MinimumRuns, typename Layout::ScaleRuns>;
        constexpr u32 flip = kMinimum ? 0u : 0x80808080u;  // scales have signs, minimums have none
        constexpr float bias = kMinimum ? 0.0f : 128.0f + Layout::scale_zero;
        const float d = float_of_half(row.half(at)), common = kMinimum ? -d : in_units<Block>(d);
#pragma unroll
        for (int i = 0; i < kCount; i += 4) {
            const u32 low = four_of(Integers{}, row, i), high = four_of(Integers{}, row, kCount + i);
            const u32 four = (upper ? high : low) ^ flip;
#pragma unroll
            for (int j = 0; j < 4; ++j) out[i + j] = __fmul_rn(common, float_of_byte(four, j, bias));
        }
    } else {
        constexpr int blocks = kCount / subs;
        const R mine = row.after(upper ? blocks * Layout::bytes : 0);
#pragma unroll
        for (int i = 0; i < blocks; ++i) {
            const int byte = i * Layout::bytes + at;
            if constexpr (kMinimum) {
                out[i] = float_of_half(mine.half(byte));
            } else if constexpr (Block::stored == Stored::Float16) {
                out[i] = in_units<Block>(float_of_half(mine.half(byte)));
            } else if constexpr (subs == 1) {
                out[i] = in_units<Block>(scale_of_byte<Block::stored>(mine.byte(byte)));
            } else {
                const u32 four = mine.word(byte);
#pragma unroll
                for (int j = 0; j < subs; ++j)
                    out[i * subs + j] = in_units<Block>(scale_of_byte<Block::stored>(four >> 8 * j & 0xFFu));
            }
        }
    }
}

// Numbers of a group, all as floats; FloatCodes has another way.
template <class Block> struct FloatNumbers {
    static constexpr bool minimums = true;
    template <bool kMinimum, int kCount, class R>
    __device__ static void numbers(const R& row, bool upper, float* out) { numbers_in<Block, kMinimum, kCount>(row, upper, out); }
};

// Between registers and tables, by 16 bytes.
template <int kCount>
__device__ inline void put(int place, const float (&from)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4)
        shared_at<float4>(place + 4 * i) = make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]);
}
template <int kCount>
__device__ inline void get(float (&to)[kCount], int place) {
    if constexpr (kCount == 1) to[0] = shared_at<float>(place);
    if constexpr (kCount == 2) {
        const float2 two = shared_at<float2>(place);
        to[0] = two.x, to[1] = two.y;
    }
#pragma unroll
    for (int i = 0; i + 4 <= kCount; i += 4) {
        const float4 four = shared_at<float4>(place + 4 * i);
        to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
    }
}

// ---- codes --------------------------------------------------------------------------------------

// Of a sub-block's columns e + 4 t .. e + 4 t + 3 as signed bytes, times 2^left: one field's bits. e is a
// multiple of 16, known when this is compiled.
template <class R, int kByte, int kBits, int kSpan, int kShift>
__device__ u32 field_of(Field<kByte, kBits, kSpan, kShift>, const R& row, int block, int e, int t, int left) {
    constexpr u32 ones = 0x01010101u, mask = (1u << kBits) - 1;
    if constexpr (kSpan == 1) {
        static_assert(kShift >= 4, "the half of a byte that t has is not moved");
        const int odd = 4 * (t % 2);
        const u32 four = R{row.place + t / 2, row.skip}.byte(block + kByte + e % 32 / 8) & 15u << odd;
        // The product puts bit i of the half at bit 8 i + kShift + left, among others.
        return four * (0x00204081u << (kShift + left - odd)) & ones << (kShift + left);
    } else {
        const int lane = e / kSpan % (8 / kBits), byte = kByte + e / (kSpan * (8 / kBits)) * kSpan + e % kSpan;
        const int place = kShift + left - lane * kBits;
        const u32 word = row.after(4 * t).word(block + byte);
        return (place >= 0 ? word << place : word >> -place) & mask * ones << (kShift + left);
    }
}
template <class R, class... Parts>
__device__ u32 codes_of(Fields<Parts...>, const R& row, int block, int e, int t, int left) {
    return (field_of(Parts{}, row, block, e, t, left) | ...);
}

// The levels of four codes, in the nibbles of the low 16 bits.
__device__ inline u32 levels_of(u32 nibbles, const uint4& levels) {
    const u32 in_half = nibbles & 0x7777u, half = (nibbles >> 1 & 0x4444u) | 0x3210u;
    return __byte_perm(__byte_perm(levels.x, levels.y, in_half), __byte_perm(levels.z, levels.w, in_half), half);
}

template <class... Parts> struct FirstOf;
template <int kByte, int kBits, int kSpan, int kShift, class... Rest>
struct FirstOf<Fields<Field<kByte, kBits, kSpan, kShift>, Rest...>> {
    static constexpr int byte = kByte, bits = kBits, span = kSpan, shift = kShift;
};

// The codes that are looked up of columns 32 step .. of a row, where nibbles of 32 columns lie in 16 bytes: of columns
// 4 t .. 4 t + 3 and of those 16 further. Where those of 16 lie in 8 bytes: of 2 t and 2 t + 1 of each half, and of
// those 8 further.
template <class Block, class R>
__device__ u32 looked_up(const R& row, int step, int t) {
    using Layout = typename Block::Layout;
    using First = FirstOf<typename Layout::Codes>;
    const int at = 32 * step / Layout::elements * Layout::bytes + First::byte + 32 * step % Layout::elements / 2;
    if constexpr (First::span == 8) {
        const R pair{row.place + 2 * t, row.skip};
        return pair.half(at) | pair.half(at + 8) << 16;
    } else {
        static_assert(First::span == 16, "nibbles of 32 columns in 16 bytes");
        return row.after(4 * t).word(at);
    }
}

// Of columns 32 step .. of a row, the first 16 or the others (`part`), codes of columns 4 t .. 4 t + 3: see field_of.
template <class Block, class R>
__device__ u32 codes_in(const R& row, int step, int part, int t, int left) {
    using Layout = typename Block::Layout;
    const int block = 32 * step / Layout::elements * Layout::bytes, e = 32 * step % Layout::elements;
    return codes_of(typename Layout::Codes{}, row, block, e + 16 * part, t, left);
}

// The operand words of columns 32 step .. of a row: four bytes of the first 16 columns and of the others.
// Where codes are looked up, a word has the columns that share bytes of nibbles: see operand_of in matmul/q8_1.cuh.
template <class Block, class R>
__device__ void weights_of(const R& row, int step, int t, const uint4& levels, u32& first, u32& second) {
    using Layout = typename Block::Layout;
    if constexpr (Block::lookup) {
        const u32 word = looked_up<Block>(row, step, t);
        first = levels_of(word, levels);
        second = levels_of(word >> 16, levels);
    } else {
        const u32 flip = Block::centred ? levels.x : 0u;  // the top bit of each byte
        constexpr int left = Block::centred ? 8 - Block::bits : 0;
        first = codes_in<Block>(row, step, 0, t, left) ^ flip;
        second = codes_in<Block>(row, step, 1, t, left) ^ flip;
    }
}

}  // namespace cuquant
