// Values, codes or scales of ggml's blocks. dequantize_blocks: a warp stages kGroups times 256 elements
// in shared memory, as whole bytes; a lane makes a chunk of each. block_scales: one sub-block a thread.
#include "format/blocks.cuh"

namespace cuquant {

// T: the element type of the values; u8: the codes themselves. `reach` is the codec's largest number.
template <class Format, typename T, int kThreads, int kGroups>
__global__ void __launch_bounds__(kThreads) dequantize_blocks(
    const u8* __restrict__ blocks, T* __restrict__ out, Lookup lookup, i64 count, int vectors, float reach) {
    using Codec = typename Format::Codec;
    using Layout = typename Format::Layout;
    constexpr int kGroupBytes = kGroup / Layout::elements * Layout::bytes;
    static_assert(kGroups * kGroupBytes % 16 == 0, "a warp reads whole vectors");
    __shared__ __align__(16) u8 staged[kThreads / 32][kGroups * kGroupBytes];
    __shared__ typename Codec::DecodeTables tables;
    const int lane = threadIdx.x % 32;
    const i64 warp = (static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x) / 32;
    const i64 from = warp * kGroups * kGroupBytes;
    u8* mine = staged[threadIdx.x / 32];
    stage(mine, blocks + from, kGroups * kGroupBytes, count * Layout::bytes - from, vectors, lane);
    if constexpr (Codec::is_codebook) {
        Codec::fill(tables, lookup, threadIdx.x, kThreads);
        __syncthreads();
    } else {
        __syncwarp();
    }
    const int in_group = lane * kChunk / Layout::elements, first = lane * kChunk % Layout::elements;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
        const i64 group = (warp * kGroups + g) * kGroup, element = group + lane * kChunk;
        if (group >= count * Layout::elements) break;  // for the whole warp
        const bool valid = element < count * Layout::elements;
        const ChunkFields fields = read_chunk<Layout>(mine + g * kGroupBytes + in_group * Layout::bytes, first);
        if constexpr (sizeof(T) == 1) {
            if (valid) *reinterpret_cast<u64*>(out + element) = fields.codes;
        } else {
            float x[kChunk];
#pragma unroll
            for (int i = 0; i < kChunk; ++i) {
                const u32 code = static_cast<u32>(fields.codes >> 8 * i) & 0xFFu;
                x[i] = __fmul_rn(Codec::decode(code, Codec::shift_of(0), tables), fields.scale);
                if constexpr (Layout::minimum_byte >= 0) x[i] = __fadd_rn(x[i], fields.minimum);
            }
            // What is finite stays so; infinite scales are ggml's.
            if (fabsf(fields.scale) * reach + fabsf(fields.minimum) > Element<T>::top) {
#pragma unroll
                for (int i = 0; i < kChunk; ++i)
                    if (is_finite(x[i]) && fabsf(x[i]) > Element<T>::top) x[i] = copysignf(Element<T>::top, x[i]);
            }
            store_values(out + element, x, valid);
        }
    }
}

// scale, minimum: float32 [count, elements / sub_block]; minimum only where the type has one.
template <class Format>
__global__ void block_scales(const u8* __restrict__ blocks, float* __restrict__ scale, float* __restrict__ minimum, i64 count) {
    using Layout = typename Format::Layout;
    constexpr int subs = Layout::elements / Layout::sub_block;
    const i64 item = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (item >= count * subs) return;
    float own_scale, own_minimum;
    read_scale<Layout>(blocks + item / subs * Layout::bytes, static_cast<int>(item % subs), own_scale, own_minimum);
    scale[item] = own_scale;
    if constexpr (Layout::minimum_byte >= 0) minimum[item] = own_minimum;
}

}  // namespace cuquant
