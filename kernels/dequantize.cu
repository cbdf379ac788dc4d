// Unpack and rescale: decode(code) * scale, rounded once to the element type.
// dequantize: a thread makes kChunks chunks of contiguous rows. dequantize_plain: one chunk of an
// output with any strides, from codes that may lie anywhere. effective: the scale of every block.
#include "strided.cuh"

namespace cuquant {

// The arrays of a format's scales; null where it has none.
struct ScaleArrays {
    const void* scale;
    const u8* zero_point;
    const float* global_scale;   // nvfp4
    const float* nested_scale;   // double quantization: [ceil(blocks / 256)]
    const float* nested_offset;
    const float* nested_map;     // [256], the values of its codes
};

// A finite scale times a code never becomes infinite.
__device__ inline float saturated(float x, float top) {
    return fabsf(x) > top ? copysignf(top, x) : x;  // NaN stays
}

// The same for an element; a code that stands for infinity (e5m2 has two) stays infinite.
template <class Format, typename T>
__device__ float saturated_value(float x, u32 code, float shift, const typename Format::Codec::DecodeTables& tables) {
    return is_finite(Format::Codec::decode(code, shift, tables)) ? saturated(x, Element<T>::top) : x;
}

template <Stored kStored>
__device__ float scale_at(const ScaleArrays& arrays, i64 block) {
    if constexpr (kStored == Stored::Float32) return static_cast<const float*>(arrays.scale)[block];
    if constexpr (kStored == Stored::Float16) return float_of_half(static_cast<const u16*>(arrays.scale)[block]);
    if constexpr (kStored == Stored::E8M0) {
        const u32 byte = static_cast<const u8*>(arrays.scale)[block];
        return float_of(byte == 255 ? 0x7FC00000u : byte ? byte << 23 : 0x00400000u);
    }
    if constexpr (kStored == Stored::E4M3) {
        const u32 byte = static_cast<const u8*>(arrays.scale)[block];
        return __fmul_rn(Minifloat<4, 3, Specials::OneNan>::decode(byte), *arrays.global_scale);
    }
    if constexpr (kStored == Stored::Double) {
        const float inner = __fmul_rn(arrays.nested_map[static_cast<const u8*>(arrays.scale)[block]], arrays.nested_scale[block / 256]);
        return __fadd_rn(__fadd_rn(saturated(inner, kFloatMax), 0.0f), *arrays.nested_offset);
    }
    return 1.0f;
}

// decode(code) * scale of one element; `shift` is the codec's own for the block's zero point.
template <class Format>
__device__ float value_of(u32 code, float scale, float shift, const typename Format::Codec::DecodeTables& tables) {
    const float value = Format::Codec::decode(code, shift, tables);
    if constexpr (Format::stored == Stored::None) return value;
    // A codec without a -0.0 never decodes to it, whatever the scale's sign.
    if constexpr (!Format::signed_zero) return __fadd_rn(__fmul_rn(value, scale), 0.0f);
    return __fmul_rn(value, scale);
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

// kFlat: blocks are 2^shift chunks of the whole array; else `tiles` says where a chunk's block is.
// Values above `limit` times the block's scale may not fit into T.
template <class Format, typename T, int kThreads, int kChunks, int kFlat>
__global__ void __launch_bounds__(kThreads) dequantize(
    const u8* __restrict__ packed, ScaleArrays arrays, T* __restrict__ out, Lookup lookup, Tiles tiles,
    i64 chunks, i64 chunks_per_row, i64 last_word, int shift, float limit) {
    using Codec = typename Format::Codec;
    using Packing = typename Format::Packing;
    __shared__ typename Codec::DecodeTables tables;
    const i64 first = static_cast<i64>(blockIdx.x) * (kThreads * kChunks) + threadIdx.x;
    u64 bits[kChunks];
    float scale[kChunks], zero[kChunks];
#pragma unroll
    for (int u = 0; u < kChunks; ++u) {
        const i64 c = min(first + u * kThreads, chunks - 1);
        i64 block = c >> shift;
        if constexpr (!kFlat) {
            // Arrays of less than 2^32 chunks divide by 32 bits, which is several times quicker.
            const i64 row = chunks >> 32 ? c / chunks_per_row
                                         : static_cast<i64>(static_cast<u32>(c) / static_cast<u32>(chunks_per_row));
            block = tiles.block(row, (c - row * chunks_per_row) * kChunk);
        }
        bits[u] = load_packed<Packing>(packed, c, last_word);
        scale[u] = scale_at<Format::stored>(arrays, block);
        zero[u] = shift_of<Format>(arrays, block);
    }
    if constexpr (Codec::is_codebook) {
        Codec::fill(tables, lookup, threadIdx.x, kThreads);
        __syncthreads();
    }
#pragma unroll
    for (int u = 0; u < kChunks; ++u) {
        const i64 c = first + u * kThreads;
        float x[kChunk];
#pragma unroll
        for (int i = 0; i < kChunk; ++i)
            x[i] = value_of<Format>(code_at<Packing>(bits[u], i), scale[u], zero[u], tables);
        if (fabsf(scale[u]) > limit) {
#pragma unroll
            for (int i = 0; i < kChunk; ++i)
                x[i] = saturated_value<Format, T>(x[i], code_at<Packing>(bits[u], i), zero[u], tables);
        }
        store_values(out + c * kChunk, x, c < chunks);
    }
}

// fp16 and bf16, whose codes are the values: one aligned chunk a thread. What is finite stays so.
template <class Format, typename T>
__global__ void dequantize_values(const u8* __restrict__ packed, T* __restrict__ out, i64 chunks) {
    const i64 c = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    const uint4 part = load16(packed + min(c, chunks - 1) * 16);
    const u32 words[4] = {part.x, part.y, part.z, part.w};
    float x[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        x[i] = Format::Codec::decode(words[i / 2] >> 16 * (i % 2) & 0xFFFFu);
        if (is_finite(x[i])) x[i] = saturated(x[i], Element<T>::top);
    }
    store_values(out + c * kChunk, x, c < chunks);
}

template <class Format, typename T, typename Word>
__global__ void dequantize_plain(
    const Word* __restrict__ packed, ScaleArrays arrays, T* __restrict__ out, Lookup lookup, Strided target,
    Tiles tiles, i64 rows, i64 chunks_per_row, i64 row_words) {
    using Codec = typename Format::Codec;
    __shared__ typename Codec::DecodeTables tables;
    if constexpr (Codec::is_codebook) {
        Codec::fill(tables, lookup, threadIdx.x, blockDim.x);
        __syncthreads();
    }
    const i64 item = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (item >= rows * chunks_per_row) return;
    const i64 row = item / chunks_per_row, column = item % chunks_per_row * kChunk;
    T* to = out + target.row(row, target.strides);
    const Word* from = packed + row * row_words;
    for (int i = 0; i < kChunk && column + i < tiles.columns; ++i) {
        const i64 block = Format::stored == Stored::None ? 0 : tiles.block(row, column + i);
        const u32 code = Format::Packing::get(from, column + i);
        const float shift = shift_of<Format>(arrays, block);
        const float x = value_of<Format>(code, scale_at<Format::stored>(arrays, block), shift, tables);
        const float kept = saturated_value<Format, T>(x, code, shift, tables);
        Element<T>::store(to + (column + i) * target.column_stride, kept);
    }
}

template <class Format>
__global__ void effective(ScaleArrays arrays, float* __restrict__ out, i64 blocks) {
    const i64 block = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (block < blocks) out[block] = scale_at<Format::stored>(arrays, block);
}

}  // namespace cuquant
