// Scale, encode and pack blocks of 8 to 512 elements, the input read once: a thread holds units of
// kPer chunks, and kLanes neighbouring lanes hold a block.
// quantize: contiguous rows of whole blocks. quantize_axis: blocks along an axis that is not the last.
#include "find.cuh"
#include "turn.cuh"

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
// b * width + w are those of x[b, :, w]. Told that four blocks must fit, the compiler needs no local
// memory; left alone it takes 8 bytes on sm_80 to 89.
template <class Format, typename T, int kPer, int kLanes, int kThreads, int kDepth, int kWidth, int kFlags>
__global__ void __launch_bounds__(kThreads, 4) quantize_axis(
    const T* __restrict__ x, u8* __restrict__ packed, Scales scales, Given given, Lookup lookup, u64 seed,
    i64 depth, i64 width, i64 row_bytes, u32 tiles_down, u32 tiles_across) {
    using Tile = Turned<T, kDepth, kWidth>;
    __shared__ Tile turned;
    __shared__ typename Format::Codec::EncodeTables tables;
    static_assert(sizeof(Tile) + sizeof(tables) <= 48 * 1024, "what a block has without asking for more");
    const u32 tile = blockIdx.x, line = tile / tiles_across;  // 64-bit divisions took a third of the time
    const i64 across = tile % tiles_across, down = line % tiles_down, batch = line / tiles_down;
    const i64 top = down * kDepth, left = across * kWidth;
    turned.load(x + (batch * depth + top) * width + left, width, depth - top, width - left, threadIdx.x, kThreads);
    if constexpr (Format::Codec::is_codebook) Format::Codec::fill(tables, lookup, threadIdx.x, kThreads);
    __syncthreads();
    constexpr int kElements = kPer * kChunk, kAlong = kDepth / kElements;  // units of a column
    static_assert(kWidth * kAlong % kThreads == 0 && kThreads % kAlong == 0, "whole warps, whole columns");
#pragma unroll 1
    for (int i = threadIdx.x; i < kWidth * kAlong; i += kThreads) {
        const int column = i / kAlong, along = i % kAlong;
        float values[kElements];
        turned.template values<kElements>(column, along * kElements, values);
        const i64 k = top + along * kElements, row = batch * width + left + column;
        const bool valid = left + column < width && k < depth;
        const i64 block = row * (depth / (kLanes * kElements)) + k / (kLanes * kElements);
        quantize_unit<Format, T, kPer, kLanes, kFlags>(
            values, packed + row * row_bytes, k / kElements, block, valid, scales, given, tables, lookup, seed,
            (batch * depth + k) * width + left + column, width);
    }
}

}  // namespace cuquant
