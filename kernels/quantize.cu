// Scale, encode and pack blocks of 8 to 256 elements, the input read once: a thread holds kChunks
// chunks, and kLanes neighbouring lanes hold a block.
// quantize: contiguous rows of whole blocks. quantize_axis: blocks along an axis that is not the last.
#include "find.cuh"

namespace cuquant {

// One chunk whose block's other chunks are in the neighbouring lanes. `c` is the chunk's place in the
// stream of its codes, `index` and `step` the flat indices of its elements.
template <class Format, typename T, int kLanes, int kFlags>
__device__ void quantize_chunk(
    float* x, u8* packed, i64 c, i64 block, bool valid, const Scales& scales, const Given& given,
    const typename Format::Codec::EncodeTables& tables, const Lookup& lookup, u64 seed, u64 index, u64 step) {
    const int lane = threadIdx.x % kLanes;
    if constexpr (kFlags & kClamp) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) x[i] = clamped<T>(x[i]);
    }
    const auto found = find<Format, kLanes>(x, lane);
    Numbers numbers = numbers_of<Format, kFlags>(found, kLanes * kChunk, given, valid ? block : 0);
    scale_chunk<Format>(x, numbers.inverse, numbers.minimum);
    u64 bits;
    if constexpr (kFlags & kStochastic)
        bits = encode_chunk_stochastic<Format>(x, numbers.zero_point, tables, lookup, seed, index, step);
    else
        bits = encode_chunk<Format>(x, numbers.zero_point, tables, lookup);
    store_chunk<typename Format::Packing>(packed, c, bits, valid);
    if (valid && lane == 0) store_scale<Format>(scales, block, numbers);
}

template <class Format, typename T, int kLanes, int kThreads, int kChunks, int kFlags>
__global__ void __launch_bounds__(kThreads) quantize(
    const T* __restrict__ x, u8* __restrict__ packed, Scales scales, Given given, Lookup lookup, u64 seed, i64 chunks) {
    __shared__ typename Format::Codec::EncodeTables tables;
    const i64 first = static_cast<i64>(blockIdx.x) * (kThreads * kChunks) + threadIdx.x;
    Raw<T> raw[kChunks];
#pragma unroll
    for (int u = 0; u < kChunks; ++u) {
        const i64 c = first + u * kThreads;
        if (c < chunks) raw[u].load(x + c * kChunk);
        else raw[u].zero();
    }
    if constexpr (Format::Codec::is_codebook) {
        Format::Codec::fill(tables, lookup, threadIdx.x, kThreads);
        __syncthreads();
    }
#pragma unroll
    for (int u = 0; u < kChunks; ++u) {
        const i64 c = first + u * kThreads;
        float values[kChunk];
        raw[u].values(values);
        quantize_chunk<Format, T, kLanes, kFlags>(
            values, packed, c, c / kLanes, c < chunks, scales, given, tables, lookup, seed, c * kChunk, 1);
    }
}

// x is [batch, depth, width] and contiguous; blocks run along depth, and the codes of stored row
// b * width + w are those of x[b, :, w]. A thread block turns a tile of kDepth x kWidth elements in
// shared memory; a column's elements lie there in pairs, so that lanes of one column meet no other.
template <class Format, typename T, int kLanes, int kThreads, int kDepth, int kFlags>
__global__ void __launch_bounds__(kThreads) quantize_axis(
    const T* __restrict__ x, u8* __restrict__ packed, Scales scales, Given given, Lookup lookup, u64 seed,
    i64 depth, i64 width, i64 row_bytes, int tiles_down, int tiles_across) {
    constexpr int kPer = 16 / sizeof(T);           // elements of a 16-byte load
    constexpr int kWidth = 128 / sizeof(T);        // of a tile: full sectors, whatever the type
    constexpr int kPair = 4 / sizeof(T);           // elements of a word
    constexpr int kPitch = kDepth / kPair + 1;     // words of a column: odd
    __shared__ u32 turned[kWidth * kPitch];
    __shared__ typename Format::Codec::EncodeTables tables;
    const i64 tile = blockIdx.x;
    const i64 across = tile % tiles_across, down = tile / tiles_across % tiles_down;
    const i64 batch = tile / tiles_across / tiles_down;
    const i64 top = down * kDepth, left = across * kWidth;
    const T* corner = x + (batch * depth + top) * width + left;
    // Each thread loads 16 bytes of kPair rows and writes them as words of kPair elements.
    constexpr int kLoads = kWidth / kPer * (kDepth / kPair);
    for (int i = threadIdx.x; i < kLoads; i += kThreads) {
        const int column = i % (kWidth / kPer) * kPer, row = i / (kWidth / kPer) * kPair;
        uint4 part[kPair];
#pragma unroll
        for (int r = 0; r < kPair; ++r)
            part[r] = left + column < width && top + row + r < depth
                    ? load16(corner + (row + r) * width + column) : make_uint4(0, 0, 0, 0);
        const u32 a[4] = {part[0].x, part[0].y, part[0].z, part[0].w};
        u32* to = turned + column * kPitch + row / kPair;
        if constexpr (sizeof(T) == 4) {
#pragma unroll
            for (int j = 0; j < 4; ++j) to[j * kPitch] = a[j];
        } else {
            const u32 b[4] = {part[1].x, part[1].y, part[1].z, part[1].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                to[2 * j * kPitch] = (a[j] & 0xFFFFu) | b[j] << 16;
                to[(2 * j + 1) * kPitch] = a[j] >> 16 | (b[j] & 0xFFFF0000u);
            }
        }
    }
    if constexpr (Format::Codec::is_codebook) Format::Codec::fill(tables, lookup, threadIdx.x, kThreads);
    __syncthreads();
    constexpr int kAlong = kDepth / kChunk;        // chunks of a column
    static_assert(kWidth * kAlong % kThreads == 0 && kThreads % kAlong == 0, "whole warps, whole columns");
#pragma unroll 1
    for (int i = threadIdx.x; i < kWidth * kAlong; i += kThreads) {
        const int column = i / kAlong, along = i % kAlong;
        const u32* from = turned + column * kPitch + along * (kChunk / kPair);
        float values[kChunk];
#pragma unroll
        for (int j = 0; j < kChunk / kPair; ++j) Element<T>::of_word(from[j], values + j * kPair);
        const i64 k = top + along * kChunk, row = batch * width + left + column;
        const bool valid = left + column < width && k < depth;
        const i64 block = row * (depth / (kLanes * kChunk)) + k / (kLanes * kChunk);
        quantize_chunk<Format, T, kLanes, kFlags>(
            values, packed + row * row_bytes, k / kChunk, block, valid, scales, given, tables, lookup, seed,
            (batch * depth + k) * width + left + column, width);
    }
}

}  // namespace cuquant
