// Unpack and rescale: decode(code) * scale + minimum, rounded once to the element type.
// dequantize: a thread makes kChunks chunks of contiguous rows. dequantize_plain: one chunk of an
// output with any strides, from codes that may lie anywhere. effective: the scale of every block.
#include "dequantize/values.cuh"

namespace cuquant {

// kFlat: blocks are 2^shift chunks of the whole array; else `tiles` says where a chunk's block is.
// Values of blocks whose scale or minimum is above `limit` may not fit into T.
template <class Format, typename T, int kThreads, int kChunks, int kFlat>
__global__ void __launch_bounds__(kThreads) dequantize(
    const u8* __restrict__ packed, ScaleArrays arrays, T* __restrict__ out, Lookup lookup, Tiles tiles,
    i64 chunks, i64 chunks_per_row, i64 last_word, int shift, float limit) {
    using Codec = typename Format::Codec;
    using Packing = typename Format::Packing;
    __shared__ typename Codec::DecodeTables tables;
    const i64 first = static_cast<i64>(blockIdx.x) * (kThreads * kChunks) + threadIdx.x;
    u64 bits[kChunks];
    float scale[kChunks], minimum[kChunks], zero[kChunks];
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
        minimum[u] = minimum_at<Format>(arrays, block);
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
            x[i] = value_of<Format>(code_at<Packing>(bits[u], i), scale[u], minimum[u], zero[u], tables);
        if (fmaxf(fabsf(scale[u]), fabsf(minimum[u])) > limit) {
#pragma unroll
            for (int i = 0; i < kChunk; ++i) {
                const u32 code = code_at<Packing>(bits[u], i);
                x[i] = saturated_value<Format, T>(x[i], code, scale[u], minimum[u], zero[u], tables);
            }
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
        const float scale = scale_at<Format::stored>(arrays, block), minimum = minimum_at<Format>(arrays, block);
        const float shift = shift_of<Format>(arrays, block);
        const float x = value_of<Format>(code, scale, minimum, shift, tables);
        const float kept = saturated_value<Format, T>(x, code, scale, minimum, shift, tables);
        Element<T>::store(to + (column + i) * target.column_stride, kept);
    }
}

template <class Format>
__global__ void effective(ScaleArrays arrays, float* __restrict__ out, i64 blocks) {
    const i64 block = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (block < blocks) out[block] = scale_at<Format::stored>(arrays, block);
}

}  // namespace cuquant
