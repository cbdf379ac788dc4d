// Quantization of any array in three steps, for what the fast kernels do not take (strides, odd
// blocks, misalignment) and for blocks that no thread block can hold.
// statistics: a warp looks at a part of a block. scales: a warp merges the parts of a block and makes
// its numbers. encode: a thread encodes and packs a chunk with them.
#include "quantize/contest.cuh"
#include "format/strided.cuh"

namespace cuquant {

constexpr int kWarp = 32;

template <class State>
__device__ State from_lane(State state, int distance) {
    constexpr int words = sizeof(State) / 4;
    u32 bits[words];
    memcpy(bits, &state, sizeof(State));
#pragma unroll
    for (int i = 0; i < words; ++i) bits[i] = __shfl_xor_sync(~0u, bits[i], distance);
    memcpy(&state, bits, sizeof(State));
    return state;
}

template <class Rule>
__device__ typename Rule::State warp_reduce(typename Rule::State state) {
    for (int distance = 1; distance < kWarp; distance *= 2) state = Rule::merge(state, from_lane(state, distance));
    return state;
}

// A block's own extent and place.
struct Tile {
    i64 row, column, tall, wide;
    __device__ Tile(const Tiles& tiles, i64 block) {
        const i64 across = block % tiles.across, down = block / tiles.across % tiles.down;
        row = block / tiles.across / tiles.down * tiles.rows + down * tiles.tall;
        column = across * tiles.wide;
        tall = min(tiles.tall, tiles.rows - down * tiles.tall);
        wide = min(tiles.wide, tiles.columns - column);
    }
    __device__ i64 along() const { return (wide + kChunk - 1) / kChunk; }
    __device__ i64 chunks() const { return tall * along(); }
};

// Give chunks [from, to) of a block, every `step`-th, to `take`: values, and their places in the block.
template <typename T, int kFlags, class Take>
__device__ void each(const T* x, const Strided& source, const Tile& tile, i64 from, i64 to, int step, Take take) {
    const i64 along = tile.along();
    for (i64 c = from; c < to; c += step) {
        const i64 r = tile.tall == 1 ? 0 : c / along, column = (c - r * along) * kChunk;
        const int count = static_cast<int>(min(static_cast<i64>(kChunk), tile.wide - column));
        float values[kChunk];
        load_chunk<T, kFlags>(x + source.row(tile.row + r, source.strides), tile.column + column, count, source, values);
#pragma unroll
        for (int i = 0; i < kChunk; ++i)
            if (i < count) take(values[i], r * tile.wide + column + i);
    }
}

template <class Format, typename T, int kFlags>
__global__ void statistics(
    const T* __restrict__ x, typename Format::Rule::State* __restrict__ parts, Strided source, Tiles tiles,
    i64 blocks, i64 splits, i64 chunks_per_split) {
    using Rule = typename Format::Rule;
    const i64 item = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
    if (item >= blocks * splits) return;  // whole warps
    const Tile tile(tiles, item / splits);
    const i64 from = item % splits * chunks_per_split, to = min(from + chunks_per_split, tile.chunks());
    const int lane = threadIdx.x % kWarp;
    auto found = Rule::none();
    each<T, kFlags>(x, source, tile, from + lane, to, kWarp, [&](float value, i64 place) { found = Rule::merge(found, Rule::of(value, place)); });
    found = warp_reduce<Rule>(found);
    if (lane == 0) parts[item] = found;
}

template <class Format, typename T, int kFlags>
__global__ void scales(
    const T* __restrict__ x, const typename Format::Rule::State* __restrict__ parts, Strided source, Tiles tiles,
    Scales scales, Given given, Lookup lookup, i64 blocks, i64 splits) {
    using Rule = typename Format::Rule;
    using Codec = typename Format::Codec;
    constexpr bool contested = Contest<Format, kFlags>::possible;
    __shared__ typename Codec::EncodeTables tables;
    if constexpr (contested && Codec::is_codebook) {
        Codec::fill(tables, lookup, threadIdx.x, blockDim.x);
        __syncthreads();
    }
    const i64 block = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
    if (block >= blocks) return;
    const int lane = threadIdx.x % kWarp;
    auto found = Rule::none();
    for (i64 s = lane; s < splits; s += kWarp) found = Rule::merge(found, parts[block * splits + s]);
    found = warp_reduce<Rule>(found);
    const Tile tile(tiles, block);
    if constexpr (Format::mean) {
        if (!found.any_order() && !Rule::lost(found)) {  // for all lanes alike
            found.sum = ordered_sum(tile.tall * tile.wide, [&](i64 e) {
                const i64 r = tile.tall == 1 ? 0 : e / tile.wide, c = tile.column + e - r * tile.wide;
                const float value = Element<T>::load(x + source.row(tile.row + r, source.strides) + c * source.column_stride);
                return fabsf(kFlags & kClamp ? clamped<T>(value) : value);
            });
        }
    }
    Numbers numbers = numbers_of<Format, kFlags>(found, tile.tall * tile.wide, given, block);
    if constexpr (contested) {
        settle<Format>(numbers, found, given, tables, lookup, [&](const Loss<Format>& loss) {
            u64 sum = 0;
            each<T, kFlags>(x, source, tile, lane, tile.chunks(), kWarp, [&](float value, i64) { sum += loss(value); });
            return lanes_sum<kWarp>(sum);
        });
    }
    if (lane) return;
    store_scale<Format>(scales, block, numbers);
    if (scales.encoding) {
        scales.encoding[2 * block] = numbers.inverse;
        const float point = static_cast<float>(numbers.zero_point);
        scales.encoding[2 * block + 1] = Format::offset == Offset::Minimum ? numbers.minimum : point;
    }
}

// encoding: [blocks, 2], the inverse and the zero point, or the minimum, of each; a row takes row_bytes; aligned:
// whether its chunks can be stored as words.
template <class Format, typename T, int kFlags>
__global__ void encode(
    const T* __restrict__ x, const float* __restrict__ encoding, u8* __restrict__ packed, Strided source,
    Tiles tiles, Lookup lookup, u64 seed, i64 rows, i64 chunks_per_row, i64 row_bytes, int aligned) {
    using Codec = typename Format::Codec;
    using Packing = typename Format::Packing;
    __shared__ typename Codec::EncodeTables tables;
    if constexpr (Codec::is_codebook) {
        Codec::fill(tables, lookup, threadIdx.x, blockDim.x);
        __syncthreads();
    }
    const i64 item = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (item >= rows * chunks_per_row) return;
    const i64 row = item / chunks_per_row, c = item % chunks_per_row, column = c * kChunk;
    const int count = static_cast<int>(max(min(static_cast<i64>(kChunk), tiles.columns - column), static_cast<i64>(0)));
    float z[kChunk];
    load_chunk<T, kFlags>(x + source.row(row, source.strides), column, count, source, z);
    int zero_point[kChunk];
    const bool alone = tiles.wide < kChunk && tiles.across > 1;  // every element has a block of its own
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        zero_point[i] = 0;
        if constexpr (Format::stored != Stored::None) {
            if (i < count) {
                const i64 block = tiles.block(row, column + (alone ? i : 0));
                const float inverse = encoding[2 * block], other = encoding[2 * block + 1];
                if constexpr (Format::offset == Offset::Minimum) z[i] = __fadd_rn(z[i], -other);
                else zero_point[i] = static_cast<int>(other);
                z[i] = usable(inverse) ? __fmul_rn(z[i], inverse) : 0.0f;
            }
        }
    }
    const i64 index = kFlags & kStochastic ? source.row(row, source.flat) + column * source.column_flat : 0;
    const auto code = [&](int i) {
        if (!(kFlags & kStochastic) || i >= count) {
            if constexpr (Codec::is_codebook) return Codec::encode_crowded(z[i], tables, lookup);
            else return Codec::encode(z[i], zero_point[i], tables, lookup);
        }
        const float draw = uniform_draw(seed, index + i * source.column_flat);
        return Codec::encode_stochastic(z[i], draw, zero_point[i], tables, lookup);
    };
    if constexpr (Packing::bits == 16) {
        u16* to = reinterpret_cast<u16*>(packed) + row * tiles.columns + column;
        if (aligned && count == kChunk) {
            u32 words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) words[j] = code(2 * j) | code(2 * j + 1) << 16;
            store16(to, make_uint4(words[0], words[1], words[2], words[3]));
        } else {
#pragma unroll
            for (int i = 0; i < kChunk; ++i)
                if (i < count) to[i] = static_cast<u16>(code(i));
        }
    } else {
        const u64 bits = pack_chunk<Packing, Codec::bias>(code);
        u8* to = packed + row * row_bytes;
        if (Packing::whole_words && aligned && count == kChunk) {
            if constexpr (Packing::bits == 8) reinterpret_cast<u64*>(to)[c] = bits;
            if constexpr (Packing::bits == 4) reinterpret_cast<u32*>(to)[c] = static_cast<u32>(bits);
        } else {
            store_chunk_bytes<Packing>(to, c, bits, row_bytes);
        }
    }
}

}  // namespace cuquant
