// Scale, encode and pack ggml's blocks of 32, the input read once: a warp makes 16 blocks in shared
// memory and writes them as whole bytes; two lanes hold a block.
// quantize_blocks_axis: blocks along an axis that is not the last, from tiles in shared memory.
#include "format/blocks.cuh"
#include "quantize/find.cuh"
#include "quantize/turn.cuh"

namespace cuquant {

// float16 bits of a number, infinite where it is too large unless it must saturate.
__device__ inline u16 half_bits(float x, bool saturate) {
    if (x != x) return 0x7E00u;
    if (saturate) x = fminf(fmaxf(x, -kHalfMax), kHalfMax);
    return static_cast<u16>(halves_of(x, 0.0f));
}

constexpr int kLanes = 2, kElements = 2 * kChunk;  // lanes that hold a block, and elements of each

// The bytes of a block of which two lanes hold 16 elements each; all lanes of the warp take part.
template <class Format, typename T, int kFlags>
__device__ void make_block(
    float* z, u8* block, bool valid, const Lookup& lookup, int saturate, u32* overflow) {
    using Codec = typename Format::Codec;
    using Layout = typename Format::Layout;
    static_assert(Layout::elements == kLanes * kElements, "two lanes hold a block");
    const int lane = threadIdx.x % kLanes;
    if constexpr (kFlags & kClamp) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) z[i] = clamped<T>(z[i]);
    }
    const auto found = find<Format, kLanes, kElements>(z, lane);
    const Numbers numbers = numbers_of<Format, 0>(found, Layout::elements, Given{}, 0);
    scale_values<Format, kElements>(z, numbers.inverse, numbers.minimum);
    const typename Codec::EncodeTables none{};
    const auto codes = [&](const float* from) {
        return pack_chunk<Packing<8, Order::Low>, Codec::bias>([&](int i) { return Codec::encode(from[i], 0, none, lookup); });
    };
    const u64 first = codes(z), second = codes(z + kChunk);
    constexpr u64 flip = Layout::is_signed ? 0x8080808080808080ull : 0;
    Layout::Codes::write(block, first ^ flip, second ^ flip, lane);
    int sum = 0;
    if constexpr (Layout::sum_byte >= 0) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i)
            sum += static_cast<int>(first >> 8 * i & 0xFF) + static_cast<int>(second >> 8 * i & 0xFF) - 2 * Codec::offset;
        sum += __shfl_xor_sync(~0u, sum, 1);
    }
    if (lane) return;
    *reinterpret_cast<u16*>(block + Layout::scale_byte) = half_bits(numbers.exact, saturate);
    if constexpr (Layout::minimum_byte >= 0)
        *reinterpret_cast<u16*>(block + Layout::minimum_byte) = half_bits(numbers.minimum, saturate);
    if constexpr (Layout::sum_byte >= 0)
        *reinterpret_cast<u16*>(block + Layout::sum_byte) =
            half_bits(__fmul_rn(numbers.exact, static_cast<float>(sum)), saturate);
    if (overflow && numbers.overflows && valid) atomicAdd(overflow, 1u);
}

// x: contiguous. blocks: uint8 [count, Layout::bytes], `vectors` where it starts on 16 bytes.
template <class Format, typename T, int kThreads, int kFlags>
__global__ void __launch_bounds__(kThreads) quantize_blocks(
    const T* __restrict__ x, u8* __restrict__ blocks, Lookup lookup, i64 count, int vectors, int saturate,
    u32* __restrict__ overflow) {
    using Layout = typename Format::Layout;
    constexpr int kBlocks = 32 / kLanes, kBytes = kBlocks * Layout::bytes;
    static_assert(kBytes % 16 == 0, "a warp writes whole vectors");
    __shared__ __align__(16) u8 staged[kThreads / 32][kBytes];
    const int lane = threadIdx.x % 32;
    const i64 warp = (static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x) / 32;
    const i64 own = warp * kBlocks + lane / kLanes;
    Raw<T> raw[2];
#pragma unroll
    for (int p = 0; p < 2; ++p) {
        if (own < count) raw[p].load(x + own * Layout::elements + lane % kLanes * kElements + p * kChunk);
        else raw[p].zero();
    }
    float z[kElements];
    raw[0].values(z);
    raw[1].values(z + kChunk);
    u8* mine = staged[threadIdx.x / 32];
    make_block<Format, T, kFlags>(z, mine + lane / kLanes * Layout::bytes, own < count, lookup, saturate, overflow);
    __syncwarp();
    const i64 from = warp * kBytes;
    unstage(blocks + from, mine, kBytes, count * Layout::bytes - from, vectors, lane);
}

// x is [batch, depth, width] and contiguous; the blocks of x[b, :, w] are those of row b * width + w.
// words: whether rows start on 4 bytes, and take a multiple of 4.
template <class Format, typename T, int kThreads, int kDepth, int kWidth, int kFlags>
__global__ void __launch_bounds__(kThreads) quantize_blocks_axis(
    const T* __restrict__ x, u8* __restrict__ blocks, Lookup lookup, i64 depth, i64 width, u32 tiles_down,
    u32 tiles_across, int words, int saturate, u32* __restrict__ overflow) {
    using Layout = typename Format::Layout;
    using Tile = Turned<T, kDepth, kWidth>;
    constexpr int kAlong = kDepth / kElements, kBytes = kDepth / Layout::elements * Layout::bytes;
    __shared__ Tile turned;
    __shared__ __align__(16) u8 staged[kWidth][kBytes];
    const u32 tile = blockIdx.x, line = tile / tiles_across;
    const i64 across = tile % tiles_across, down = line % tiles_down, batch = line / tiles_down;
    const i64 top = down * kDepth, left = across * kWidth;
    turned.load(x + (batch * depth + top) * width + left, width, depth - top, width - left, threadIdx.x, kThreads);
    __syncthreads();
    static_assert(kWidth * kAlong % kThreads == 0, "whole warps");
#pragma unroll 1
    for (int i = threadIdx.x; i < kWidth * kAlong; i += kThreads) {
        const int column = i / kAlong, along = i % kAlong;
        float z[kElements];
        turned.template values<kElements>(column, along * kElements, z);
        const bool valid = left + column < width && top + along * kElements < depth;
        make_block<Format, T, kFlags>(z, staged[column] + along / kLanes * Layout::bytes, valid, lookup, saturate, overflow);
    }
    __syncthreads();
    // A row's blocks may start on any address: by words where they can, else by bytes.
    const i64 row_bytes = depth / Layout::elements * Layout::bytes, start = down * kBytes;
    u8* first = blocks + (batch * width + left) * row_bytes + start;
    const int columns = static_cast<int>(min(static_cast<i64>(kWidth), width - left));
    const int nbytes = static_cast<int>(min(static_cast<i64>(kBytes), row_bytes - start));
    if (words) {
        for (int i = threadIdx.x; i < columns * (kBytes / 4); i += kThreads) {
            const int column = i / (kBytes / 4), at = i % (kBytes / 4) * 4;
            if (at < nbytes) *reinterpret_cast<u32*>(first + column * row_bytes + at) = *reinterpret_cast<const u32*>(staged[column] + at);
        }
    } else {
        for (int i = threadIdx.x; i < columns * kBytes; i += kThreads) {
            const int column = i / kBytes, at = i % kBytes;
            if (at < nbytes) first[column * row_bytes + at] = staged[column][at];
        }
    }
}

}  // namespace cuquant
