// ggml's interleaved blocks: where the bits of codes and scales lie, and reading and writing them in
// shared memory. Format::Layout, written by Python from cuquant/formats/blocks.py, has
//   elements, bytes, sub_block (elements that share an effective scale), align (of a block's fields)
//   Codes: the Fields of the codes; is_signed: codes are stored as two's complement of code - 128
//   scale_byte, minimum_byte, sum_byte: offsets of float16 numbers, -1 where there is none
//   stored: how a scale is, if other than Float16: a byte for each sub-block from scale_byte on
//   ScaleRuns, MinimumRuns, scale_zero: the integer scales and minimums of sub-blocks
#pragma once
#include "format/chunk.cuh"

namespace cuquant {

constexpr int kGroup = 256;  // elements that a warp works on together: a chunk a lane

template <int kAlign>
__device__ inline u64 read_8_bytes(const u8* from) {
    if constexpr (kAlign % 4 == 0) {
        const u32* words = reinterpret_cast<const u32*>(from);
        return static_cast<u64>(words[1]) << 32 | words[0];
    } else if constexpr (kAlign == 1) {
        u64 bytes = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) bytes |= static_cast<u64>(from[i]) << 8 * i;
        return bytes;
    } else {
        const u16* words = reinterpret_cast<const u16*>(from);
        return static_cast<u64>(words[3] << 16 | words[2]) << 32 | static_cast<u32>(words[1] << 16 | words[0]);
    }
}

__device__ inline void write_8_bytes(u8* to, u64 bytes) {  // at an even address
#pragma unroll
    for (int i = 0; i < 4; ++i) reinterpret_cast<u16*>(to)[i] = static_cast<u16>(bytes >> 16 * i);
}

// kBits of every code, from bit kShift upwards, in ggml's order: see Field in blocks.py.
template <int kByte, int kBits, int kSpan, int kShift>
struct Field {
    static constexpr int lanes = 8 / kBits;  // codes that share a byte

    // These bits of codes first .. first + 7, a byte each; `first` is a multiple of 8.
    template <int kAlign>
    __device__ static u64 read(const u8* block, int first) {
        constexpr u32 ones = 0x01010101u, mask = ((1u << kBits) - 1) * ones;
        if constexpr (kSpan == 1) {
            static_assert(kBits == 1, "neighbours that share a byte have one bit each");
            const u32 byte = block[kByte + first / 8];
            // The product puts bit i of a nibble at bit 8 i, among others.
            const u32 low = ((byte & 15u) * 0x00204081u) & ones, high = ((byte >> 4) * 0x00204081u) & ones;
            return (static_cast<u64>(high) << 32 | low) << kShift;
        } else {
            const int lane = first / kSpan % lanes;
            const int byte = kByte + first / (kSpan * lanes) * kSpan + first % kSpan;
            const u64 bytes = read_8_bytes<kAlign>(block + byte) >> lane * kBits;
            return (bytes & (static_cast<u64>(mask) << 32 | mask)) << kShift;
        }
    }

    // Write these bits of a block of 32 codes, of which each of two lanes holds 16, a byte each. All
    // lanes of the warp take part.
    __device__ static void write(u8* block, u64 first, u64 second, int lane) {
        if constexpr (kSpan == 1) {
            block[kByte + 2 * lane] = gathered(first);
            block[kByte + 2 * lane + 1] = gathered(second);
        } else if constexpr (kBits == 8) {
            write_8_bytes(block + kByte + 16 * lane, first);
            write_8_bytes(block + kByte + 16 * lane + 8, second);
        } else {
            static_assert(kBits == 4 && kSpan == 16, "the nibbles of a block of 32");
            // Lane 0 holds the low nibbles, lane 1 the high ones: each gives half of them away.
            constexpr u64 mask = 0x0F0F0F0F0F0F0F0Full;
            const u64 got = __shfl_xor_sync(~0u, lane ? first : second, 1) & mask;
            write_8_bytes(block + kByte + 8 * lane, lane ? got | (second & mask) << 4 : (first & mask) | got << 4);
        }
    }
    // Bit kShift of 8 bytes.
    __device__ static u8 gathered(u64 codes) {
        const u32 low = static_cast<u32>(codes) >> kShift & 0x01010101u;
        const u32 high = static_cast<u32>(codes >> 32) >> kShift & 0x01010101u;
        return static_cast<u8>((low * 0x01020408u >> 24 & 15u) | (high * 0x01020408u >> 24 & 15u) << 4);
    }
};

template <class... Parts>
struct Fields {
    template <int kAlign>
    __device__ static u64 read(const u8* block, int first) { return (Parts::template read<kAlign>(block, first) | ...); }
    __device__ static void write(u8* block, u64 first, u64 second, int lane) { (Parts::write(block, first, second, lane), ...); }
};

// kCount small integers, one in each of kCount neighbouring bytes from kByte on: see Run in blocks.py.
template <int kByte, int kCount, int kFirst, int kLow, int kBits, int kShift, int kStep>
struct Run {
    // The bits of integer `i` that lie here, in their place; 0 where it does not.
    __device__ static u32 read(const u8* block, int i) {
        const int at = (i - kFirst) / kStep;
        if (i < kFirst || at >= kCount || (i - kFirst) % kStep) return 0;
        return (block[kByte + at] >> kLow & ((1u << kBits) - 1)) << kShift;
    }
};

template <class... Parts>
struct Runs {
    static constexpr bool any = sizeof...(Parts) > 0;
    __device__ static int read(const u8* block, int i) { return static_cast<int>((Parts::read(block, i) | ... | 0u)); }
};

__device__ inline float read_half(const u8* from) { return float_of_half(from[0] | from[1] << 8); }

// A scale of a byte.
template <Stored kStored>
__device__ float scale_of_byte(u32 byte) {
    if constexpr (kStored == Stored::E8M0)
        return float_of(byte == 0 ? 0x00400000u : byte == 255 ? 0x7FC00000u : byte << 23);
    if constexpr (kStored == Stored::HalfE8M0) return float_of(byte < 2 ? 0x00200000u << byte : (byte - 1) << 23);
    if constexpr (kStored == Stored::HalfE4M3)
        return byte == 127 ? 0.0f : __fmul_rn(Minifloat<4, 3, Specials::None>::decode(byte & 0x7Fu), 0.5f);
    return Minifloat<4, 3, Specials::OneNan>::decode(byte & 0x7Fu);
}

// Codes and the effective scale and minimum of 8 neighbouring elements.
struct ChunkFields {
    u64 codes;
    float scale, minimum;
};

// The effective scale and minimum of sub-block `sub`: products in float32, as in ggml.
template <class Layout>
__device__ void read_scale(const u8* block, int sub, float& scale, float& minimum) {
    if constexpr (Layout::stored != Stored::Float16) {
        scale = scale_of_byte<Layout::stored>(block[Layout::scale_byte + sub]);
        minimum = 0.0f;
        return;
    }
    scale = read_half(block + Layout::scale_byte);
    if constexpr (Layout::ScaleRuns::any) {
        const int factor = Layout::ScaleRuns::read(block, sub) - Layout::scale_zero;
        scale = __fmul_rn(scale, static_cast<float>(static_cast<signed char>(factor)));
    }
    minimum = 0.0f;
    if constexpr (Layout::minimum_byte >= 0) {
        minimum = read_half(block + Layout::minimum_byte);
        if constexpr (Layout::MinimumRuns::any)
            minimum = -__fmul_rn(minimum, static_cast<float>(Layout::MinimumRuns::read(block, sub)));
    }
}

template <class Layout>
__device__ ChunkFields read_chunk(const u8* block, int first) {
    ChunkFields fields;
    fields.codes = Layout::Codes::template read<Layout::align>(block, first);
    if constexpr (Layout::is_signed) fields.codes ^= 0x8080808080808080ull;
    read_scale<Layout>(block, first / Layout::sub_block, fields.scale, fields.minimum);
    return fields;
}

// A warp copies `count` bytes from global to shared memory, which is aligned to 16; `vectors`: so is
// the other end. Beyond `limit` there is nothing.
__device__ inline void stage(u8* to, const u8* from, int count, i64 limit, bool vectors, int lane) {
    const int whole = vectors ? static_cast<int>(min(static_cast<i64>(count), max(limit, static_cast<i64>(0)))) / 16 : 0;
    for (int i = lane; i < whole; i += 32) reinterpret_cast<uint4*>(to)[i] = load16(from + 16 * i);
    for (int i = 16 * whole + lane; i < count && i < limit; i += 32) to[i] = from[i];
}

// The other way.
__device__ inline void unstage(u8* to, const u8* from, int count, i64 limit, bool vectors, int lane) {
    const int whole = vectors ? static_cast<int>(min(static_cast<i64>(count), max(limit, static_cast<i64>(0)))) / 16 : 0;
    for (int i = lane; i < whole; i += 32) store16(to + 16 * i, reinterpret_cast<const uint4*>(from)[i]);
    for (int i = 16 * whole + lane; i < count && i < limit; i += 32) to[i] = from[i];
}

}  // namespace cuquant
