// Scale, encode and pack blocks of 8 to 512 elements, the input read once: a thread holds units of
// Work::per chunks, and Work::lanes neighbouring lanes hold a block.
// quantize: contiguous rows of whole blocks. quantize_axis: blocks along an axis that is not the last.
#include "quantize/contest.cuh"
#include "quantize/find.cuh"
#include "quantize/turn.cuh"

namespace cuquant {

// A thread's elements: those of kPer chunks from an aligned address on.
template <typename T, int kPer>
struct Chunks {
    const T* from;
    bool valid;
    __device__ float value(int i) const { return valid ? Element<T>::load(from + i) : 0.0f; }
    __device__ void values(float* x) const {
#pragma unroll
        for (int p = 0; p < kPer; ++p) {
            Raw<T> raw;
            if (valid) raw.load(from + p * kChunk);
            else raw.zero();
            raw.values(x + p * kChunk);
        }
    }
};

// Those of a column of a tile, from row `first` on.
template <class Tile, int kElements>
struct Column {
    const Tile& tile;
    int column, first;
    __device__ float value(int i) const { return tile.value(column, first + i); }
    __device__ void values(float* x) const { tile.template values<kElements>(column, first, x); }
};

// Neighbouring chunks of a block whose others are in the neighbouring lanes. `unit` is their place
// in the stream of codes, `index` and `step` the flat indices of their elements. Whether the block's scale is
// contested: then it is called again with kSettle.
template <class Format, typename T, class Work, int kFlags, bool kSettle, class Source>
__device__ bool quantize_unit(
    float* x, const Source& source, u8* packed, i64 unit, i64 block, bool valid, const Scales& scales, const Given& given,
    const typename Format::Codec::EncodeTables& tables, const Lookup& lookup, u64 seed, u64 index, u64 step) {
    constexpr int kPer = Work::per, kLanes = Work::lanes, kElements = kPer * kChunk;
    const int lane = threadIdx.x % kLanes;
    const auto clamp = [&] {
        if constexpr (kFlags & kClamp) {
#pragma unroll
            for (int i = 0; i < kElements; ++i) x[i] = clamped<T>(x[i]);
        }
    };
    clamp();
    const auto found = find<Format, kLanes, kElements>(x, lane);
    Numbers numbers = numbers_of<Format, kFlags>(found, kLanes * kElements, given, valid ? block : 0);
    bool contested = false;
    if constexpr (kSettle) {
        settle<Format>(numbers, found, given, tables, lookup, [&](const Loss<Format>& loss) {
            u64 sum = 0;
#pragma unroll 1
            for (int i = 0; i < kElements; ++i) sum += loss(kFlags & kClamp ? clamped<T>(source.value(i)) : source.value(i));
            return lanes_sum<kLanes>(sum);
        });
        source.values(x);  // anew: keeping them took registers
        clamp();
    } else if constexpr (Contest<Format, kFlags>::possible) {
        contested = Contest<Format, kFlags>(numbers, given).open;
    }
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
    return contested;
}

// Told how many blocks must fit, the compiler needs no local memory where scales are contested; left alone (0) it
// takes 8 bytes for codebooks and, on sm_100, for integers and e2m1, and 16 for small floats before sm_90.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 900 || __CUDA_ARCH__ >= 1200)
constexpr int kFloatsFit = 0;
#else
constexpr int kFloatsFit = 4;
#endif
template <class Format, typename T, int kFlags>
constexpr int fitting = !Contest<Format, kFlags>::possible ? 0
    : Format::Codec::is_codebook ? (sizeof(T) == 4 ? 6 : 4)
    : Format::integers ? (sizeof(T) == 4 ? 0 : 4) : kFloatsFit;

// A thread takes Work::units units.
template <class Format, typename T, class Work, int kFlags>
__global__ void __launch_bounds__(Work::threads, fitting<Format, T, kFlags>) quantize(
    const T* __restrict__ x, u8* __restrict__ packed, Scales scales, Given given, Lookup lookup, u64 seed, i64 units) {
    constexpr int kPer = Work::per, kLanes = Work::lanes, kThreads = Work::threads, kUnits = Work::units;
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
    bool contested = false;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
        const i64 unit = first + u * kThreads;
        const Chunks<T, kPer> source{x + unit * (kPer * kChunk), unit < units};
        float values[kPer * kChunk];
#pragma unroll
        for (int p = 0; p < kPer; ++p) raw[u][p].values(values + p * kChunk);
        contested |= quantize_unit<Format, T, Work, kFlags, false>(
            values, source, packed, unit, unit / kLanes, unit < units, scales, given, tables, lookup, seed,
            unit * (kPer * kChunk), 1);
    }
    if constexpr (Contest<Format, kFlags>::possible) {
        if (!__any_sync(~0u, contested)) return;  // nearly always
        const Scales again = scales.uncounted();
#pragma unroll 1
        for (int u = 0; u < kUnits; ++u) {
            const i64 unit = first + u * kThreads;
            const Chunks<T, kPer> source{x + unit * (kPer * kChunk), unit < units};
            float values[kPer * kChunk];
            source.values(values);
            quantize_unit<Format, T, Work, kFlags, true>(
                values, source, packed, unit, unit / kLanes, unit < units, again, given, tables, lookup, seed,
                unit * (kPer * kChunk), 1);
        }
    }
}

// Units of a tile's columns, see quantize_axis; whether scales of any are contested. With kSettle: those decided.
template <class Format, typename T, class Work, int kFlags, bool kSettle, class Tile>
__device__ bool quantize_columns(
    const Tile& turned, u8* packed, i64 top, i64 left, i64 batch, i64 depth, i64 width, i64 row_bytes, const Scales& scales,
    const Given& given, const typename Format::Codec::EncodeTables& tables, const Lookup& lookup, u64 seed) {
    constexpr int kLanes = Work::lanes, kElements = Work::per * kChunk, kAlong = Work::depth / kElements;  // units of a column
    bool contested = false;
#pragma unroll 1
    for (int i = threadIdx.x; i < Work::width * kAlong; i += Work::threads) {
        const int column = i / kAlong, along = i % kAlong;
        const Column<Tile, kElements> source{turned, column, along * kElements};
        float values[kElements];
        source.values(values);
        const i64 k = top + along * kElements, row = batch * width + left + column;
        const bool valid = left + column < width && k < depth;
        const i64 block = row * (depth / (kLanes * kElements)) + k / (kLanes * kElements);
        contested |= quantize_unit<Format, T, Work, kFlags, kSettle>(
            values, source, packed + row * row_bytes, k / kElements, block, valid, scales, given, tables, lookup, seed,
            (batch * depth + k) * width + left + column, width);
    }
    return contested;
}

// x is [batch, depth, width] and contiguous; blocks run along depth, and the codes of stored row
// b * width + w are those of x[b, :, w]. Told that four blocks must fit, the compiler needs no local
// memory; left alone it takes 8 bytes on sm_80 to 89.
template <class Format, typename T, class Work, int kFlags>
__global__ void __launch_bounds__(Work::threads, 4) quantize_axis(
    const T* __restrict__ x, u8* __restrict__ packed, Scales scales, Given given, Lookup lookup, u64 seed,
    i64 depth, i64 width, i64 row_bytes, u32 tiles_down, u32 tiles_across) {
    constexpr int kThreads = Work::threads, kDepth = Work::depth, kWidth = Work::width;
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
    constexpr int kAlong = kDepth / (Work::per * kChunk);
    static_assert(kWidth * kAlong % kThreads == 0 && kThreads % kAlong == 0, "whole warps, whole columns");
    const bool contested = quantize_columns<Format, T, Work, kFlags, false>(
        turned, packed, top, left, batch, depth, width, row_bytes, scales, given, tables, lookup, seed);
    if constexpr (Contest<Format, kFlags>::possible) {
        if (!__any_sync(~0u, contested)) return;  // nearly always
        const Scales again = scales.uncounted();
        quantize_columns<Format, T, Work, kFlags, true>(
            turned, packed, top, left, batch, depth, width, row_bytes, again, given, tables, lookup, seed);
    }
}

}  // namespace cuquant
