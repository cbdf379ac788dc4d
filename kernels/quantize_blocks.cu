// Scale, encode and pack ggml's blocks of 32, the input read once: a warp makes kGroups times 8 blocks
// in shared memory and writes them as whole bytes; a lane holds a chunk of each.
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
template <class Format, typename T, int kThreads, int kGroups, int kFlags>
__global__ void __launch_bounds__(kThreads) quantize_blocks(
    const T* __restrict__ x, u8* __restrict__ blocks, Lookup lookup, i64 count, int vectors, int saturate,
    u32* __restrict__ overflow) {
    using Codec = typename Format::Codec;
    using Layout = typename Format::Layout;
    constexpr int kLanes = Layout::elements / kChunk, kGroupBytes = kGroup / Layout::elements * Layout::bytes;
    static_assert(Layout::elements == 32 && kGroups * kGroupBytes % 16 == 0, "a warp writes whole vectors");
    __shared__ __align__(16) u8 staged[kThreads / 32][kGroups * kGroupBytes];
    const int lane = threadIdx.x % 32, in_block = lane % kLanes;
    const i64 warp = (static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x) / 32;
    u8* mine = staged[threadIdx.x / 32];
    const i64 first_block = warp * kGroups * (32 / kLanes) + lane / kLanes;
    Raw<T> raw[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
        const i64 block = first_block + g * (32 / kLanes);
        if (block < count) raw[g].load(x + block * Layout::elements + in_block * kChunk);
        else raw[g].zero();
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
        float z[kChunk];
        raw[g].values(z);
        if constexpr (kFlags & kClamp) {
#pragma unroll
            for (int i = 0; i < kChunk; ++i) z[i] = clamped<T>(z[i]);
        }
        const auto found = find<Format, kLanes>(z, in_block);
        const Numbers numbers = numbers_of<Format, 0>(found, Layout::elements, Given{}, 0);
        scale_chunk<Format>(z, numbers.inverse, numbers.minimum);
        const typename Codec::EncodeTables none{};
        u64 codes = 0;
        int sum = 0;
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            const u32 code = Codec::encode(z[i], 0, none, lookup) - Codec::bias;
            codes |= static_cast<u64>(code & 0xFFu) << 8 * i;
            sum += static_cast<int>(code & 0xFFu) - Codec::offset;
        }
        u8* block = mine + g * kGroupBytes + lane / kLanes * Layout::bytes;
        Layout::Codes::write(block, Layout::is_signed ? codes ^ 0x8080808080808080ull : codes, in_block);
        if constexpr (Layout::sum_byte >= 0) {
            for (int distance = 1; distance < kLanes; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        }
        if (in_block == 0) {
            *reinterpret_cast<u16*>(block + Layout::scale_byte) = half_bits(numbers.exact, saturate);
            if constexpr (Layout::minimum_byte >= 0)
                *reinterpret_cast<u16*>(block + Layout::minimum_byte) = half_bits(numbers.minimum, saturate);
            if constexpr (Layout::sum_byte >= 0)
                *reinterpret_cast<u16*>(block + Layout::sum_byte) =
                    half_bits(__fmul_rn(numbers.exact, static_cast<float>(sum)), saturate);
            if (overflow && numbers.overflow && first_block + g * (32 / kLanes) < count) atomicAdd(overflow, 1u);
        }
    }
    __syncwarp();
    const i64 from = warp * kGroups * kGroupBytes;
    unstage(blocks + from, mine, kGroups * kGroupBytes, count * Layout::bytes - from, vectors, lane);
}

}  // namespace cuquant
