// How many blocks have underflowed: some of a block's values are not 0, and all are stored as 0, by a scale that is
// below the smallest normal number of its type. A warp looks at a block; vanished_blocks: a thread at one of ggml's.
#include "format/blocks.cuh"
#include "quantize/plain.cu"
#include "dequantize/values.cuh"

namespace cuquant {

// Whether the scale that is stored for a block is 0 or subnormal.
template <Stored kStored>
__device__ bool is_small(const ScaleArrays& arrays, i64 block) {
    if constexpr (kStored == Stored::Float16) return (static_cast<const u16*>(arrays.scale)[block] & 0x7C00u) == 0;
    if constexpr (kStored == Stored::E8M0) return static_cast<const u8*>(arrays.scale)[block] == 0;
    if constexpr (kStored == Stored::E4M3) return (static_cast<const u8*>(arrays.scale)[block] & 0x78u) == 0;
    return (bits_of(scale_at<kStored>(arrays, block)) & 0x7F800000u) == 0;
}

template <class Format, typename T, typename Word>
__global__ void vanished(
    const T* __restrict__ x, const Word* __restrict__ packed, ScaleArrays arrays, Lookup lookup, Strided source, Tiles tiles,
    i64 blocks, i64 row_words, u32* __restrict__ count) {
    using Codec = typename Format::Codec;
    __shared__ typename Codec::DecodeTables tables;
    if constexpr (Codec::is_codebook) {
        Codec::fill(tables, lookup, threadIdx.x, blockDim.x);
        __syncthreads();
    }
    const i64 block = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
    if (block >= blocks || !is_small<Format::stored>(arrays, block)) return;  // whole warps
    const Tile tile(tiles, block);
    const float scale = scale_at<Format::stored>(arrays, block), shift = shift_of<Format>(arrays, block);
    const int lane = threadIdx.x % kWarp;
    bool given = false, kept = false;
    each<T, 0>(x, source, tile, lane, tile.chunks(), kWarp, [&](float value, i64 place) {
        const i64 r = tile.tall == 1 ? 0 : place / tile.wide, column = tile.column + place - r * tile.wide;
        const u32 code = Format::Packing::get(packed + (tile.row + r) * row_words, column);
        given = given || value != 0.0f;
        kept = kept || value_of<Format>(code, scale, shift, tables) != 0.0f;
    });
    given = __any_sync(~0u, given);
    kept = __any_sync(~0u, kept);
    if (lane == 0 && given && !kept) atomicAdd(count, 1u);
}

// x: contiguous; blocks: [blocks, Layout::bytes], on an even address.
template <class Format, typename T>
__global__ void vanished_blocks(const T* __restrict__ x, const u8* __restrict__ blocks, Lookup lookup, i64 elements, u32* __restrict__ count) {
    using Codec = typename Format::Codec;
    using Layout = typename Format::Layout;
    __shared__ typename Codec::DecodeTables tables;
    if constexpr (Codec::is_codebook) {
        Codec::fill(tables, lookup, threadIdx.x, blockDim.x);
        __syncthreads();
    }
    const i64 block = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (block * Layout::elements >= elements) return;
    const u8* own = blocks + block * Layout::bytes;
    if (own[Layout::scale_byte + 1] & 0x7Cu) return;  // a normal scale
    bool given = false;
    for (int i = 0; i < Layout::elements; ++i) given = given || Element<T>::load(x + block * Layout::elements + i) != 0.0f;
    if (!given) return;
    for (int first = 0; first < Layout::elements; first += kChunk) {
        const ChunkFields fields = read_chunk<Layout>(own, first);
        for (int i = 0; i < kChunk; ++i) {
            const u32 code = static_cast<u32>(fields.codes >> 8 * i) & 0xFFu;
            float value = __fmul_rn(Codec::decode(code, Codec::shift_of(0), tables), fields.scale);
            if constexpr (Layout::minimum_byte >= 0) value = __fadd_rn(value, fields.minimum);
            if (value != 0.0f) return;
        }
    }
    atomicAdd(count, 1u);
}

}  // namespace cuquant
