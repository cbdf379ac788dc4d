// Scale, encode and pack blocks of 8 to 512 elements, the input read once: a thread holds units of
// kPer chunks, and kLanes neighbouring lanes hold a block.
// quantize: contiguous rows of whole blocks. quantize_axis: blocks along an axis that is not the last.
#include "find.cuh"

namespace cuquant {

// kPer neighbouring chunks of a block whose others are in the neighbouring lanes. `unit` is their place
// in the stream of codes, `index` and `step` the flat indices of their elements.
template <class Format, typename T, int kPer, int kLanes, int kFlags>
__device__ void quantize_unit(
    float* x, u8* packed, i64 unit, i64 block, bool valid, const Scales& scales, const Given& given,
    const typename Format::Codec::EncodeTables& tables, const Lookup& lookup, u64 seed, u64 index, u64 step) {
    constexpr int kElements = kPer * kChunk;
    const int lane = threadIdx.x % kLanes;
    if constexpr (kFlags & kClamp) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) x[i] = clamped<T>(x[i]);
    }
    const auto found = find<Format, kLanes, kElements>(x, lane);
    const Numbers numbers = numbers_of<Format, kFlags>(found, kLanes * kElements, given, valid ? block : 0);
    if (valid && lane == 0) store_scale<Format>(scales, block, numbers);
    scale_values<Format, kElements>(x, numbers.inverse, numbers.minimum);
    u64 bits[kPer];
#pragma unroll
    for (int p = 0; p < kPer; ++p) {
        const float* z = x + p * kChunk;
        if constexpr (kFlags & kStochastic)
            bits[p] = encode_chunk_stochastic<Format>(z, numbers.zero_point, tables, lookup, seed, index + p * kChunk * step, step);
        else
            bits[p] = encode_chunk<Format>(z, numbers.zero_point, tables, lookup);
    }
    store_chunks<typename Format::Packing, kPer>(packed, unit, bits, valid);
}

// Units of kPer chunks; kLanes of them make a block.
template <class Format, typename T, int kPer, int kLanes, int kThreads, int kUnits, int kFlags>
__global__ void __launch_bounds__(kThreads) quantize(
    const T* __restrict__ x, u8* __restrict__ packed, Scales scales, Given given, Lookup lookup, u64 seed, i64 units) {
    __shared__ typename Format::Codec::EncodeTables tables;
    const i64 first = static_cast<i64>(blockIdx.x) * (kThreads * kUnits) + threadIdx.x;
    Raw<T> raw[kUnits][kPer];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
        const i64 unit = first + u * kThreads;
#pragma unroll
        for (int p = 0; p < kPer; ++p) {
            if (unit < units) raw[u][p].load(x + (unit * kPer + p) * kChunk);
            else raw[u][p].zero();
        }
    }
    if constexpr (Format::Codec::is_codebook) {
        Format::Codec::fill(tables, lookup, threadIdx.x, kThreads);
        __syncthreads();
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
        const i64 unit = first + u * kThreads;
        float values[kPer * kChunk];
#pragma unroll
        for (int p = 0; p < kPer; ++p) raw[u][p].values(values + p * kChunk);
        quantize_unit<Format, T, kPer, kLanes, kFlags>(
            values, packed, unit, unit / kLanes, unit < units, scales, given, tables, lookup, seed,
            unit * (kPer * kChunk), 1);
    }
}

// x is [batch, depth, width] and contiguous; blocks run along depth, and the codes of stored row
// b * width + w are those of x[b, :, w]. A thread block turns a tile of kDepth x kWidth elements in
// shared memory; a column's elements lie there in pairs, so that lanes of one column meet no other.
template <class Format, typename T, int kPer, int kLanes, int kThreads, int kDepth, int kFlags>
__global__ void __launch_bounds__(kThreads) quantize_axis(
    const T* __restrict__ x, u8* __restrict__ packed, Scales scales, Given given, Lookup lookup, u64 seed,
    i64 depth, i64 width, i64 row_bytes, int tiles_down, int tiles_across) {
    constexpr int kVector = 16 / sizeof(T);           // elements of a 16-byte load
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
    constexpr int kLoads = kWidth / kVector * (kDepth / kPair);
    for (int i = threadIdx.x; i < kLoads; i += kThreads) {
        const int column = i % (kWidth / kVector) * kVector, row = i / (kWidth / kVector) * kPair;
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
    constexpr int kElements = kPer * kChunk, kAlong = kDepth / kElements;  // units of a column
    static_assert(kWidth * kAlong % kThreads == 0 && kThreads % kAlong == 0, "whole warps, whole columns");
#pragma unroll 1
    for (int i = threadIdx.x; i < kWidth * kAlong; i += kThreads) {
        const int column = i / kAlong, along = i % kAlong;
        const u32* from = turned + column * kPitch + along * (kElements / kPair);
        float values[kElements];
#pragma unroll
        for (int j = 0; j < kElements / kPair; ++j) Element<T>::of_word(from[j], values + j * kPair);
        const i64 k = top + along * kElements, row = batch * width + left + column;
        const bool valid = left + column < width && k < depth;
        const i64 block = row * (depth / (kLanes * kElements)) + k / (kLanes * kElements);
        quantize_unit<Format, T, kPer, kLanes, kFlags>(
            values, packed + row * row_bytes, k / kElements, block, valid, scales, given, tables, lookup, seed,
            (batch * depth + k) * width + left + column, width);
    }
}

}  // namespace cuquant
