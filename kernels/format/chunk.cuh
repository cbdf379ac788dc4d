// A chunk, 8 consecutive elements, on its way between an array and packed codes.
#pragma once
#include "device/random.cuh"
#include "format/e2m1.cuh"
#include "format/scaling.cuh"

namespace cuquant {

template <typename T> struct Element;
template <> struct Element<float> {
    static constexpr float top = kFloatMax;
    __device__ static void of_word(u32 word, float* x) { x[0] = float_of(word); }
    __device__ static float load(const float* from) { return *from; }
    __device__ static void store(float* to, float x) { *to = x; }
};
template <> struct Element<Half> {
    static constexpr float top = kHalfMax;
    __device__ static void of_word(u32 word, float* x) {
        x[0] = float_of_half(word);
        x[1] = float_of_high_half(word);
    }
    __device__ static float load(const Half* from) { return float_of_half(from->bits); }
    __device__ static void store(Half* to, float x) { to->bits = static_cast<u16>(halves_of(x, 0.0f)); }
};
template <> struct Element<Bfloat16> {
    static constexpr float top = 3.3895313892515355e38f;
    __device__ static void of_word(u32 word, float* x) {
        x[0] = float_of(word << 16);
        x[1] = float_of(word & 0xFFFF0000u);
    }
    __device__ static float load(const Bfloat16* from) { return float_of(static_cast<u32>(from->bits) << 16); }
    __device__ static void store(Bfloat16* to, float x) { to->bits = static_cast<u16>(bfloat16_of(x)); }
};

// The loads of a chunk, still as they came: 16 bytes of float16 or bfloat16, 32 of float32.
template <typename T>
struct Raw {
    static constexpr int count = sizeof(T) / 2;
    uint4 part[count];

    __device__ void zero() {
#pragma unroll
        for (int i = 0; i < count; ++i) part[i] = make_uint4(0, 0, 0, 0);
    }
    // `from` is aligned to 16 bytes.
    __device__ void load(const T* from) {
#pragma unroll
        for (int i = 0; i < count; ++i) part[i] = load16(reinterpret_cast<const uint4*>(from) + i);
    }
    __device__ void values(float* x) const {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const u32 words[4] = {part[i].x, part[i].y, part[i].z, part[i].w};
#pragma unroll
            for (int j = 0; j < 4; ++j)
                Element<T>::of_word(words[j], x + (4 * i + j) * 4 / static_cast<int>(sizeof(T)));
        }
    }
};

// NaN becomes 0 and an infinity the largest number of T.
template <typename T>
__device__ inline float clamped(float x) {
    if (is_finite(x)) return x;
    return x != x ? 0.0f : copysignf(Element<T>::top, x);
}

// What codes are made from: (x - minimum) * inverse, or 0 in blocks without a usable scale.
template <class Format, int kElements = kChunk>
__device__ inline void scale_values(float* x, float inverse, float minimum) {
    if constexpr (Format::stored == Stored::None) return;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
        if constexpr (Format::offset == Offset::Minimum) x[i] = __fadd_rn(x[i], -minimum);
        x[i] = __fmul_rn(x[i], inverse);
    }
    if (!usable(inverse)) {  // seldom: NaN or infinity times 0 would not be 0
#pragma unroll
        for (int i = 0; i < kElements; ++i) x[i] = 0.0f;
    }
}

// `fields` times `bias` at distances of `bits`.
__device__ constexpr u32 spread(u32 bias, int bits, int fields) {
    u32 sum = 0;
    for (int i = 0; i < fields; ++i) sum = (sum << bits) + bias;
    return sum;
}

// The codes of a chunk, each with the bias `kBias`, as its bytes in memory; up to 8 bits a code.
template <class Packing, u32 kBias, class Code>
__device__ inline u64 pack_chunk(Code code) {
    constexpr int bits = Packing::bits, half = kChunk / 2;
    u32 low = 0, high = 0;
    if constexpr (bits <= 4) {
#pragma unroll
        for (int p = kChunk - 1; p >= 0; --p) low = low * (1u << bits) + code(Packing::place(p));
        low -= spread(kBias, bits, kChunk);
        if constexpr (bits < 4) low &= (1u << kChunk * bits) - 1;
        return low;
    } else {  // in two halves of 32 bits or less
#pragma unroll
        for (int p = half - 1; p >= 0; --p) {
            low = low * (1u << bits) + code(p);
            high = high * (1u << bits) + code(half + p);
        }
        low -= spread(kBias, bits, half);
        high -= spread(kBias, bits, half);
        if constexpr (bits < 8) {
            low &= (1u << half * bits) - 1;
            high &= (1u << half * bits) - 1;
        }
        return static_cast<u64>(high ^ Packing::flip) << half * bits | (low ^ Packing::flip);
    }
}

// Encode and pack a chunk: its bytes in memory. kWithin: no element is beyond the peak by more than a rounding.
template <class Format, bool kWithin = false>
__device__ inline u64 encode_chunk(
    const float* z, int zero_point, const typename Format::Codec::EncodeTables& tables, const Lookup& lookup) {
    using Codec = typename Format::Codec;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    if constexpr (is_same<Codec, Minifloat<4, 3, Specials::OneNan>>) {
        return e4m3_pair_of(z[0], z[1]) | e4m3_pair_of(z[2], z[3]) << 16
             | static_cast<u64>(e4m3_pair_of(z[4], z[5]) | e4m3_pair_of(z[6], z[7]) << 16) << 32;
    } else if constexpr (is_same<Codec, Minifloat<5, 2, Specials::Ieee>>) {
        return e5m2_pair_of(z[0], z[1]) | e5m2_pair_of(z[2], z[3]) << 16
             | static_cast<u64>(e5m2_pair_of(z[4], z[5]) | e5m2_pair_of(z[6], z[7]) << 16) << 32;
    } else
#endif
    if constexpr (is_e2m1<Codec> && Format::Packing::bits == 4) return e2m1_codes<typename Format::Packing>(z);
    if constexpr (Codec::is_codebook) {
        if (lookup.steps > 1)
            return pack_chunk<typename Format::Packing, 0>(
                [&](int i) { return Codec::encode_crowded(z[i], tables, lookup); });
    }
    if constexpr (kWithin && is_rounding<Codec, Format::peak_bits>)
        return pack_chunk<typename Format::Packing, Codec::bias>([&](int i) { return Codec::round(z[i]); });
    return pack_chunk<typename Format::Packing, Codec::bias>([&](int i) { return Codec::encode(z[i], zero_point, tables, lookup); });
}

// The same with stochastic rounding; element i has flat index `index + i * step` in its array.
template <class Format>
__device__ inline u64 encode_chunk_stochastic(
    const float* z, int zero_point, const typename Format::Codec::EncodeTables& tables, const Lookup& lookup,
    u64 seed, u64 index, u64 step) {
    return pack_chunk<typename Format::Packing, Format::Codec::bias>([&](int i) {
        const float draw = uniform_draw(seed, index + i * step);
        return Format::Codec::encode_stochastic(z[i], draw, zero_point, tables, lookup);
    });
}

// Store the bytes of the neighbouring chunks `bits`, the first of which is chunk kChunks * unit of a row
// or stream at `packed`; the warp's lanes hold neighbouring units, of which 32 elements start at whole
// words. All 32 lanes take part.
template <class Packing, int kChunks>
__device__ inline void store_chunks(u8* packed, i64 unit, const u64* bits, bool valid) {
    constexpr int k = Packing::bits, nbytes = k * kChunks;
    u8* to = packed + unit * nbytes;
    if constexpr (k == 8 && kChunks == 2) {
        if (valid) store16(to, make_uint4(static_cast<u32>(bits[0]), static_cast<u32>(bits[0] >> 32), static_cast<u32>(bits[1]), static_cast<u32>(bits[1] >> 32)));
    } else if constexpr (nbytes == 8) {
        if (valid) *reinterpret_cast<u64*>(to) = k == 8 ? bits[0] : bits[0] | bits[kChunks - 1] << 32;
    } else if constexpr (nbytes == 4) {
        if (valid) *reinterpret_cast<u32*>(to) = static_cast<u32>(kChunks == 2 ? bits[0] | bits[kChunks - 1] << 8 * k : bits[0]);
    } else if constexpr (nbytes == 2) {
        if (valid) *reinterpret_cast<u16*>(to) = static_cast<u16>(kChunks == 2 ? bits[0] | bits[kChunks - 1] << 8 * k : bits[0]);
    } else if constexpr (nbytes == 1) {
        if (valid) *to = static_cast<u8>(bits[0]);
    } else {
        // The lanes that hold 32 elements make k words together. A lane writes those that begin in
        // its bits, of which the last one may end in the next lane's.
        constexpr int lanes = 32 / (kChunk * kChunks), own = 8 * nbytes;  // bits
        u32 words[4] = {static_cast<u32>(bits[0]), static_cast<u32>(bits[0] >> 32), 0, 0};
        if constexpr (kChunks == 2) {  // the second chunk's bits follow the first one's
            constexpr int at = 8 * k / 32, shift = 8 * k % 32;
            const u32 low = static_cast<u32>(bits[1]), high = static_cast<u32>(bits[1] >> 32);
            words[at] |= low << shift;
            words[at + 1] = shift ? __funnelshift_l(low, high, shift) : high;
            if constexpr (at + 2 < 4) words[at + 2] = shift ? high >> (32 - shift) : 0;
        }
        const u32 next = __shfl_down_sync(~0u, words[0], 1);
        constexpr int end = own / 32;
        words[end] |= own % 32 ? next << own % 32 : next;
        if constexpr (own % 32 && end + 1 < 4) words[end + 1] = next >> (32 - own % 32);
        const int i = static_cast<int>(unit % lanes);
        const int word = (own * i + 31) / 32, count = (own * (i + 1) + 31) / 32 - word, skip = 32 * word - own * i;
        u32* row = reinterpret_cast<u32*>(packed) + unit / lanes * k + word;
#pragma unroll
        for (int j = 0; j < (own + 31) / 32; ++j)
            if (valid && j < count) row[j] = __funnelshift_r(words[j], j < 3 ? words[j + 1] : 0u, skip);
    }
}

// The same for lanes that hold anything, byte by byte: `limit` bytes belong to the row.
template <class Packing>
__device__ inline void store_chunk_bytes(u8* packed, i64 c, u64 bits, i64 limit) {
    for (int b = 0; b < Packing::bits; ++b)
        if (c * Packing::bits + b < limit) packed[c * Packing::bits + b] = static_cast<u8>(bits >> 8 * b);
}

__device__ inline uint4 words_of(const float* x) {
    return make_uint4(bits_of(x[0]), bits_of(x[1]), bits_of(x[2]), bits_of(x[3]));
}

// 8 values to 8 elements at `to`, which is aligned to 16 bytes; the warp's lanes hold neighbouring chunks
// and all take part.
template <typename T>
__device__ inline void store_values(T* to, const float* x, bool valid) {
    if constexpr (sizeof(T) == 4) {
        // Pairs of lanes trade halves, so that each store fills whole sectors: 32 bytes apart, half
        // sectors took 1.5 times as long.
        const bool odd = threadIdx.x & 1;
        uint4 got, own = odd ? words_of(x + 4) : words_of(x);
        const uint4 given = odd ? words_of(x) : words_of(x + 4);
        got.x = __shfl_xor_sync(~0u, given.x, 1);
        got.y = __shfl_xor_sync(~0u, given.y, 1);
        got.z = __shfl_xor_sync(~0u, given.z, 1);
        got.w = __shfl_xor_sync(~0u, given.w, 1);
        const bool other = __shfl_xor_sync(~0u, static_cast<int>(valid), 1);
        if (odd ? other : valid) store16(odd ? to - 4 : to, odd ? got : own);
        if (odd ? valid : other) store16(odd ? to + 4 : to + 8, odd ? own : got);
    } else {
        u32 words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) words[j] = pair_of<T>(x[2 * j], x[2 * j + 1]);
        if (valid) store16(to, make_uint4(words[0], words[1], words[2], words[3]));
    }
}

}  // namespace cuquant
