// From codes to values: decode(code) * scale + minimum, with a format's scales in whatever form they are stored.
#pragma once
#include "format/strided.cuh"

namespace cuquant {

// The arrays of a format's scales; null where it has none.
struct ScaleArrays {
    const void* scale;
    const u8* zero_point;
    const void* minimum;         // as scales are stored
    const float* global_scale;   // nvfp4
    const float* nested_scale;   // double quantization: [ceil(blocks / 256)]
    const float* nested_offset;
    const float* nested_map;     // [256], the values of its codes
};

// What is made of finite numbers never becomes infinite: of an element; one whose scale or minimum is infinite stays so,
// and one whose code stands for infinity (e5m2 has two).
template <class Format, typename T>
__device__ float saturated_value(
    float x, u32 code, float scale, float minimum, float shift, const typename Format::Codec::DecodeTables& tables) {
    const bool finite = is_finite(scale) && is_finite(minimum) && is_finite(Format::Codec::decode(code, shift, tables));
    return finite ? saturated(x, Element<T>::top) : x;
}

// Of an array of float32, float16 or bfloat16.
template <Stored kStored>
__device__ float number_at(const void* array, i64 block) {
    if constexpr (kStored == Stored::Float32) return static_cast<const float*>(array)[block];
    const u32 bits = static_cast<const u16*>(array)[block];
    return kStored == Stored::Float16 ? float_of_half(bits) : float_of(bits << 16);
}

template <Stored kStored>
__device__ float scale_at(const ScaleArrays& arrays, i64 block) {
    if constexpr (kStored == Stored::Float32 || kStored == Stored::Float16 || kStored == Stored::BFloat16)
        return number_at<kStored>(arrays.scale, block);
    if constexpr (kStored == Stored::E8M0) {
        const u32 byte = static_cast<const u8*>(arrays.scale)[block];
        return float_of(byte == 255 ? 0x7FC00000u : byte ? byte << 23 : 0x00400000u);
    }
    if constexpr (kStored == Stored::E4M3) {
        const u32 byte = static_cast<const u8*>(arrays.scale)[block];
        const float own = Minifloat<4, 3, Specials::OneNan>::decode(byte), global = *arrays.global_scale;
        return kept_finite(__fmul_rn(own, global), own, global);
    }
    if constexpr (kStored == Stored::Double) {
        const float level = arrays.nested_map[static_cast<const u8*>(arrays.scale)[block]], nested = arrays.nested_scale[block / 256];
        const float inner = __fadd_rn(kept_finite(__fmul_rn(level, nested), level, nested), 0.0f), offset = *arrays.nested_offset;
        return kept_finite(__fadd_rn(inner, offset), inner, offset);
    }
    return 1.0f;
}

// What is added to a block's values, 0 where the format has no such number.
template <class Format>
__device__ float minimum_at(const ScaleArrays& arrays, i64 block) {
    if constexpr (Format::offset == Offset::Minimum) return number_at<Format::stored>(arrays.minimum, block);
    return 0.0f;
}

// decode(code) * scale + minimum of one element; `shift` is the codec's own for the block's zero point.
template <class Format>
__device__ float value_of(
    u32 code, float scale, float minimum, float shift, const typename Format::Codec::DecodeTables& tables) {
    const float value = Format::Codec::decode(code, shift, tables);
    if constexpr (Format::stored == Stored::None) return value;
    // A codec without a -0.0 never decodes to it, whatever the scale's sign.
    float product = __fmul_rn(value, scale);
    if constexpr (!Format::signed_zero) product = __fadd_rn(product, 0.0f);
    return Format::offset == Offset::Minimum ? __fadd_rn(product, minimum) : product;
}

template <class Format>
__device__ float shift_of(const ScaleArrays& arrays, i64 block) {
    if constexpr (Format::offset == Offset::ZeroPoint) return Format::Codec::shift_of(arrays.zero_point[block]);
    return Format::Codec::shift_of(0);
}

// The bytes of chunk `c` of a stream of aligned words; the last word is `last`.
template <class Packing>
__device__ u64 load_packed(const u8* packed, i64 c, i64 last) {
    constexpr int k = Packing::bits;
    if constexpr (k == 8) {
        const uint2 both = reinterpret_cast<const uint2*>(packed)[c];
        return static_cast<u64>(both.y ^ Packing::flip) << 32 | (both.x ^ Packing::flip);
    } else if constexpr (k == 4) {
        return reinterpret_cast<const u32*>(packed)[c];
    } else if constexpr (k == 2) {
        return reinterpret_cast<const u16*>(packed)[c];
    } else if constexpr (k == 1) {
        return packed[c];
    } else {
        const u32* words = reinterpret_cast<const u32*>(packed);
        const i64 word = c * k / 4;
        const int skip = static_cast<int>(c * k % 4) * 8;
        const u32 first = words[word], second = words[min(word + 1, last)];
        const u32 low = __funnelshift_r(first, second, skip);
        if constexpr (k <= 4) return low;
        u32 high = second >> skip;
        if constexpr (k == 7) high = __funnelshift_r(second, words[min(word + 2, last)], skip);
        return static_cast<u64>(high) << 32 | low;
    }
}

template <class Packing>
__device__ u32 code_at(u64 bits, int i) {
    return static_cast<u32>(bits >> Packing::place(i) * Packing::bits) & Packing::mask;
}

}  // namespace cuquant
