// Scale, encode and pack ggml's blocks of 32, the input read once: a warp makes 16 blocks in shared
// memory and writes them as whole bytes; two lanes hold a block.
#include "blocks.cuh"
#include "find.cuh"

namespace cuquant {

// float16 bits of a number, infinite where it is too large unless it must saturate.
__device__ inline u16 half_bits(float x, bool saturate) {
    if (x != x) return 0x7E00u;
    if (saturate) x = fminf(fmaxf(x, -kHalfMax), kHalfMax);
    return static_cast<u16>(halves_of(x, 0.0f));
}

// blocks: uint8 [count, Layout::bytes], `vectors` where it starts on 16 bytes, as x does.
template <class Format, typename T, int kThreads, int kFlags>
__global__ void __launch_bounds__(kThreads) quantize_blocks(
    const T* __restrict__ x, u8* __restrict__ blocks, Lookup lookup, i64 count, int vectors, int saturate,
    u32* __restrict__ overflow) {
    using Codec = typename Format::Codec;
    using Layout = typename Format::Layout;
    constexpr int kLanes = 2, kElements = 2 * kChunk, kBlocks = 32 / kLanes, kBytes = kBlocks * Layout::bytes;
    static_assert(Layout::elements == kLanes * kElements && kBytes % 16 == 0, "a warp writes whole vectors");
    __shared__ __align__(16) u8 staged[kThreads / 32][kBytes];
    const int lane = threadIdx.x % 32, in_block = lane % kLanes;
    const i64 warp = (static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x) / 32;
    const i64 own = warp * kBlocks + lane / kLanes;
    Raw<T> raw[2];
#pragma unroll
    for (int p = 0; p < 2; ++p) {
        if (own < count) raw[p].load(x + own * Layout::elements + in_block * kElements + p * kChunk);
        else raw[p].zero();
    }
    float z[kElements];
    raw[0].values(z);
    raw[1].values(z + kChunk);
    if constexpr (kFlags & kClamp) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) z[i] = clamped<T>(z[i]);
    }
    const auto found = find<Format, kLanes, kElements>(z, in_block);
    const Numbers numbers = numbers_of<Format, 0>(found, Layout::elements, Given{}, 0);
    scale_values<Format, kElements>(z, numbers.inverse, numbers.minimum);
    const typename Codec::EncodeTables none{};
    const auto codes = [&](const float* from) {
        return pack_chunk<Packing<8, Order::Low>, Codec::bias>([&](int i) { return Codec::encode(from[i], 0, none, lookup); });
    };
    const u64 first = codes(z), second = codes(z + kChunk);
    u8* mine = staged[threadIdx.x / 32];
    u8* block = mine + lane / kLanes * Layout::bytes;
    constexpr u64 flip = Layout::is_signed ? 0x8080808080808080ull : 0;
    Layout::Codes::write(block, first ^ flip, second ^ flip, in_block);
    int sum = 0;
    if constexpr (Layout::sum_byte >= 0) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i)
            sum += static_cast<int>(first >> 8 * i & 0xFF) + static_cast<int>(second >> 8 * i & 0xFF) - 2 * Codec::offset;
        sum += __shfl_xor_sync(~0u, sum, 1);
    }
    if (in_block == 0) {
        *reinterpret_cast<u16*>(block + Layout::scale_byte) = half_bits(numbers.exact, saturate);
        if constexpr (Layout::minimum_byte >= 0)
            *reinterpret_cast<u16*>(block + Layout::minimum_byte) = half_bits(numbers.minimum, saturate);
        if constexpr (Layout::sum_byte >= 0)
            *reinterpret_cast<u16*>(block + Layout::sum_byte) =
                half_bits(__fmul_rn(numbers.exact, static_cast<float>(sum)), saturate);
        if (overflow && numbers.overflow && own < count) atomicAdd(overflow, 1u);
    }
    __syncwarp();
    const i64 from = warp * kBytes;
    unstage(blocks + from, mine, kBytes, count * Layout::bytes - from, vectors, lane);
}

}  // namespace cuquant
