// Rows of codes as bytes, for kernels that multiply bytes; and the sums of their segments, which zero points need.
// code_bytes: a thread makes 8 neighbouring codes. code_sums: a warp adds a segment of a row.
#include "device/dot.cuh"
#include "device/overlap.cuh"
#include "matmul/coded.cuh"
#include "matmul/operands.cuh"

namespace cuquant {

enum Made { kAsStored = 0, kAsInt8 = 1, kAsE4m3 = 2 };  // of codes: bytes as they lie, or what they stand for before scales

// To `out`, [rows, stride]; beyond the depth there is 0.
template <class Format, typename Word, int kMade>
__global__ void __launch_bounds__(256, 1) code_bytes(Rows<Format, Word> from, u8* __restrict__ out, i64 rows, i64 depth, i64 stride) {
    using Codec = typename Format::Codec;
    __shared__ typename Codec::DecodeTables tables;
    if constexpr (Codec::is_codebook) {
        from.fill(tables, threadIdx.x, 256);
        __syncthreads();
    }
    const i64 chunks = stride / kChunk, index = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
    if (index >= rows * chunks) return;
    const i64 row = index / chunks, k = index % chunks * kChunk;
    u64 bytes = 0;
    if (k < depth) {
        const auto own = from.row(0, row);
        u32 codes[kChunk];
        from.load_codes(own.packed, k, depth, codes);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            u32 byte = codes[i] ^ (Format::Packing::flip & 0xFFu);
            if constexpr (kMade != kAsStored) {
                const float shift = shift_of<Format>(from.arrays, from.block_of(own, min(k + i, depth - 1)));
                const float number = Codec::decode(codes[i], shift, tables);
                byte = kMade == kAsInt8 ? static_cast<u32>(static_cast<int>(number)) & 0xFFu
                                        : Minifloat<4, 3, Specials::OneNan>::encode(number) & 0xFFu;
            }
            if (k + i < depth) bytes |= static_cast<u64>(byte) << 8 * i;
        }
    }
    *reinterpret_cast<u64*>(out + row * stride + k) = bytes;
}

enum Summed { kUnsignedBytes = 0, kSignedBytes = 1, kOnes = 2 };  // bytes, or the ones of their bits

// Sums of `segment` bytes each: sums[row, s] = codes[row, s * segment ..].
template <int kSummed>
__global__ void __launch_bounds__(256) code_sums(
    const u8* __restrict__ codes, int* __restrict__ sums, i64 rows, i64 depth, i64 stride, i64 segment, i64 segments) {
    let_next_start();
    const i64 index = static_cast<i64>(blockIdx.x) * 8 + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (index >= rows * segments) return;  // for a whole warp
    const i64 begin = index % segments * segment, end = min(begin + segment, depth);
    const u8* const row = codes + index / segments * stride;
    int sum = 0;
    for (i64 k = begin + lane * 16; k < end; k += 32 * 16) {
        const uint4 part = load16(row + k);
        const u32 words[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const i64 left = end - (k + 4 * w);
            const u32 mask = left >= 4 ? ~0u : left <= 0 ? 0u : (1u << 8 * static_cast<int>(left)) - 1;
            if constexpr (kSummed == kOnes) sum += __popc(words[w] & mask);
            else if constexpr (kSummed == kSignedBytes) sum = __dp4a(0x01010101, static_cast<int>(words[w] & mask), sum);
            else sum = static_cast<int>(__dp4a(0x01010101u, words[w] & mask, static_cast<u32>(sum)));
        }
    }
#pragma unroll
    for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    wait_for_earlier();
    if (lane == 0) sums[index] = sum;
}

}  // namespace cuquant
