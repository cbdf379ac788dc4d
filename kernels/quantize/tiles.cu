// Scale, encode and pack blocks that one thread block holds in registers, the input read once: rows,
// long blocks and tiles of [tall, wide]. A thread holds up to kChunks chunks of its block.
#include "quantize/contest.cuh"
#include "device/reduce.cuh"
#include "format/strided.cuh"

namespace cuquant {

template <class Format, typename T, int kThreads, int kChunks, int kFlags>
__global__ void __launch_bounds__(kThreads) quantize_tiles(
    const T* __restrict__ x, u8* __restrict__ packed, Scales scales, Given given, Lookup lookup, u64 seed,
    Tiles tiles, i64 row_bytes) {
    using Rule = typename Format::Rule;
    __shared__ typename Format::Codec::EncodeTables tables;
    const u32 block = blockIdx.x, line = block / static_cast<u32>(tiles.across);
    const i64 across = block % static_cast<u32>(tiles.across);
    const i64 down = line % static_cast<u32>(tiles.down), batch = line / static_cast<u32>(tiles.down);
    const int tall = static_cast<int>(min(tiles.tall, tiles.rows - down * tiles.tall));
    const int wide = static_cast<int>(min(tiles.wide, tiles.columns - across * tiles.wide));
    const int along = wide / kChunk, chunks = tall * along;
    const i64 row = batch * tiles.rows + down * tiles.tall, column = across * tiles.wide;
    const T* corner = x + row * tiles.columns + column;

    const auto load = [&](int u, Raw<T>& part) {
        const int c = u * kThreads + threadIdx.x, r = tall == 1 ? 0 : c / along;
        if (c < chunks) part.load(corner + r * tiles.columns + (c - r * along) * kChunk);
        else part.zero();
    };
    Raw<T> raw[kChunks];
#pragma unroll
    for (int u = 0; u < kChunks; ++u) load(u, raw[u]);
    if constexpr (Format::Codec::is_codebook) Format::Codec::fill(tables, lookup, threadIdx.x, kThreads);

    auto found = Rule::none();
#pragma unroll
    for (int u = 0; u < kChunks; ++u) {
        const int c = u * kThreads + threadIdx.x;
        float values[kChunk];
        raw[u].values(values);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            const float value = kFlags & kClamp ? clamped<T>(values[i]) : values[i];
            if (c < chunks) found = Rule::merge(found, Rule::of(value, c * kChunk + i));
        }
    }
    found = block_reduce<Rule, kThreads>(found);
    if constexpr (Format::mean) {
        __shared__ double in_order;
        if (!found.any_order() && !Rule::lost(found)) {  // for all threads alike
            if (threadIdx.x < 32) {
                const double sum = ordered_sum(static_cast<i64>(tall) * wide, [&](i64 e) {
                    const i64 r = tall == 1 ? 0 : e / wide;
                    const float value = Element<T>::load(corner + r * tiles.columns + (e - r * wide));
                    return fabsf(kFlags & kClamp ? clamped<T>(value) : value);
                });
                if (threadIdx.x == 0) in_order = sum;
            }
            __syncthreads();
            found.sum = in_order;
        }
    }
    Numbers numbers = numbers_of<Format, kFlags>(found, static_cast<i64>(tall) * wide, given, block);
    if constexpr (Contest<Format, kFlags>::possible) {
        if (Contest<Format, kFlags>(numbers, given).open) {  // seldom, and for all threads alike
            __shared__ u64 sums[kThreads / 32];
            settle<Format>(numbers, found, given, tables, lookup, [&](const Loss<Format>& loss) {
                u64 sum = 0;
#pragma unroll 1
                for (int u = 0; u * kThreads + static_cast<int>(threadIdx.x) < chunks; ++u) {
                    Raw<T> part;
                    load(u, part);
                    float values[kChunk];
                    part.values(values);
#pragma unroll
                    for (int i = 0; i < kChunk; ++i) sum += loss(kFlags & kClamp ? clamped<T>(values[i]) : values[i]);
                }
                sum = lanes_sum<32>(sum);
                __syncthreads();  // the sums before have been read
                if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
                __syncthreads();
                sum = 0;
                for (int warp = 0; warp < kThreads / 32; ++warp) sum += sums[warp];
                return sum;
            });
#pragma unroll
            for (int u = 0; u < kChunks; ++u) load(u, raw[u]);  // anew: keeping them took registers
        }
    }
    if (threadIdx.x == 0) store_scale<Format>(scales, block, numbers);

#pragma unroll
    for (int u = 0; u < kChunks; ++u) {
        const int c = u * kThreads + threadIdx.x, r = tall == 1 ? 0 : c / along;
        if (u * kThreads >= chunks) break;  // for all threads alike
        float z[kChunk];
        raw[u].values(z);
        if constexpr (kFlags & kClamp) {
#pragma unroll
            for (int i = 0; i < kChunk; ++i) z[i] = clamped<T>(z[i]);
        }
        scale_values<Format>(z, numbers.inverse, numbers.minimum);
        const i64 place = column / kChunk + (c - r * along);
        u64 bits;
        if constexpr (kFlags & kStochastic) {
            const u64 index = (row + r) * tiles.columns + column + static_cast<i64>(c - r * along) * kChunk;
            bits = encode_chunk_stochastic<Format>(z, numbers.zero_point, tables, lookup, seed, index, 1);
        } else {
            bits = encode_chunk<Format>(z, numbers.zero_point, tables, lookup);
        }
        u8* to = packed + (row + r) * row_bytes;
        if constexpr (Format::Packing::whole_words) {
            store_chunks<typename Format::Packing, 1>(to, place, &bits, c < chunks);
        } else if (c < chunks) {  // a row may end within a word: the last chunk fills it up
            store_chunk_bytes<typename Format::Packing>(to, place, bits, row_bytes);
        }
    }
}

}  // namespace cuquant
