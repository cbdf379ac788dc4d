// How many blocks have underflowed: their scale is 0 or subnormal, and a number is wrong by as much as the largest of
// them; where the scale is 0 codes say nothing, and an eighth is enough. Rows are the blocks of a format without scales.
// vanished: a warp looks at a block; vanished_blocks: a thread at one of ggml's.
#include "format/blocks.cuh"
#include "quantize/find.cuh"
#include "quantize/plain.cu"
#include "dequantize/values.cuh"

namespace cuquant {

// Whether a block's scale is 0 or subnormal: the number that is stored, or `scale`, what it stands for.
template <Stored kStored>
__device__ bool is_small(const ScaleArrays& arrays, i64 block, float scale) {
    if constexpr (kStored == Stored::None) return true;
    if constexpr (kStored == Stored::Float16) return (static_cast<const u16*>(arrays.scale)[block] & 0x7C00u) == 0;
    if constexpr (kStored == Stored::E8M0)
        if (static_cast<const u8*>(arrays.scale)[block] == 0) return true;
    if constexpr (kStored == Stored::E4M3)
        if ((static_cast<const u8*>(arrays.scale)[block] & 0x78u) == 0) return true;
    return (bits_of(scale) & 0x7F800000u) == 0;
}

__device__ bool is_lost(float largest, float error, bool zero_scale) {
    return largest > 0.0f && error >= (zero_scale ? __fmul_rn(0.125f, largest) : largest);
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
    if (block >= blocks) return;  // whole warps
    const float scale = scale_at<Format::stored>(arrays, block);
    if (!is_small<Format::stored>(arrays, block, scale)) return;
    const Tile tile(tiles, block);
    const float shift = shift_of<Format>(arrays, block), minimum = minimum_at<Format>(arrays, block);
    const int lane = threadIdx.x % kWarp;
    float largest = 0.0f, error = 0.0f;
    each<T, 0>(x, source, tile, lane, tile.chunks(), kWarp, [&](float value, i64 place) {
        const i64 r = tile.tall == 1 ? 0 : place / tile.wide, column = tile.column + place - r * tile.wide;
        const u32 code = Format::Packing::get(packed + (tile.row + r) * row_words, column);
        largest = fmaxf(largest, fabsf(value));
        error = fmaxf(error, fabsf(__fsub_rn(value, value_of<Format>(code, scale, minimum, shift, tables))));
    });
    largest = lanes_max<kWarp>(largest);
    error = lanes_max<kWarp>(error);
    if (lane == 0 && is_lost(largest, error, scale == 0.0f)) atomicAdd(count, 1u);
}

// Whether the scale of a block of ggml's, or of its sub-block, is 0 or subnormal as it is stored.
template <class Layout>
__device__ bool is_small(const u8* block, float scale) {
    if constexpr (Layout::stored == Stored::HalfE4M3) return scale < 0x1p-7f;
    if constexpr (Layout::stored == Stored::HalfE8M0) return scale < 0x1p-126f;
    return (block[Layout::scale_byte + 1] & 0x7Cu) == 0;
}
// And whether it is 0: d, and not a product with it.
template <class Layout>
__device__ bool is_zero(const u8* block, float scale) {
    if constexpr (Layout::stored != Stored::Float16) return scale == 0.0f;
    return block[Layout::scale_byte] == 0 && (block[Layout::scale_byte + 1] & 0x7Fu) == 0;
}

// x: contiguous; blocks: [blocks, Layout::bytes], on an even address. A thread looks at what has a scale of its own as
// it is stored, a block or a sub-block.
template <class Format, typename T>
__global__ void vanished_blocks(const T* __restrict__ x, const u8* __restrict__ blocks, Lookup lookup, i64 elements, u32* __restrict__ count) {
    using Codec = typename Format::Codec;
    using Layout = typename Format::Layout;
    __shared__ typename Codec::DecodeTables tables;
    if constexpr (Codec::is_codebook) {
        Codec::fill(tables, lookup, threadIdx.x, blockDim.x);
        __syncthreads();
    }
    constexpr int each = Layout::stored == Stored::Float16 ? Layout::elements : Layout::sub_block;
    const i64 begin = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * each;
    if (begin >= elements) return;
    const i64 block = begin / Layout::elements;
    const int start = static_cast<int>(begin % Layout::elements);
    const u8* own = blocks + block * Layout::bytes;
    float scale, minimum;
    read_scale<Layout>(own, start / Layout::sub_block, scale, minimum);
    if (!is_small<Layout>(own, scale)) return;
    float largest = 0.0f, error = 0.0f;
    for (int first = start; first < start + each; first += kChunk) {
        const ChunkFields fields = read_chunk<Layout>(own, first);
        for (int i = 0; i < kChunk; ++i) {
            const u32 code = static_cast<u32>(fields.codes >> 8 * i) & 0xFFu;
            const float given = Element<T>::load(x + block * Layout::elements + first + i);
            float value = __fmul_rn(Codec::decode(code, Codec::shift_of(0), tables), fields.scale);
            if constexpr (Layout::minimum_byte >= 0) value = __fadd_rn(value, fields.minimum);
            largest = fmaxf(largest, fabsf(given));
            error = fmaxf(error, fabsf(__fsub_rn(given, value)));
        }
    }
    if (is_lost(largest, error, is_zero<Layout>(own, scale))) atomicAdd(count, 1u);
}

}  // namespace cuquant
