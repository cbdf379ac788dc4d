// q8_1 as llama.cpp's CUDA kernel makes it: codes by a true division by the scale, and beside the scale the sum
// of the values themselves. A warp makes one block of 32, a lane one element.
#include "format/blocks.cuh"
#include "device/overlap.cuh"

namespace cuquant {

// x: contiguous [count, 32]. blocks: uint8 [count, 36], at an even address.
template <class Format, typename T, int kThreads>
__global__ void __launch_bounds__(kThreads) quantize_q8_1(const T* __restrict__ x, u8* __restrict__ blocks, Lookup lookup, i64 count) {
    using Codec = typename Format::Codec;
    using Layout = typename Format::Layout;
    static_assert(Layout::elements == 32 && Layout::is_signed && Layout::sum_byte >= 0, "a lane has an element");
    let_next_start();
    const int lane = threadIdx.x % 32;
    const i64 block = (static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x) / 32;
    if (block >= count) return;  // the whole warp
    wait_for_earlier();
    const float value = Element<T>::load(x + block * 32 + lane);
    u32 top = bits_of(value) & 0x7FFFFFFFu;
    float sum = value;
#pragma unroll
    for (int distance = 16; distance; distance /= 2) {
        top = max(top, __shfl_xor_sync(~0u, top, distance));
        sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, distance));
    }
    const float scale = __fdiv_rn(float_of(top), Format::peak());
    const bool lost = !is_finite(scale);
    const float quotient = scale > 0.0f && !lost ? __fdiv_rn(value, scale) : 0.0f;
    const typename Codec::EncodeTables none{};
    const u32 code = Codec::encode(quotient, 0, none, lookup) - Codec::bias;
    u8* const to = blocks + block * Layout::bytes;
    to[Layout::bytes - Layout::elements + lane] = static_cast<u8>(code ^ 0x80u);
    if (lane == 0) *reinterpret_cast<u16*>(to + Layout::scale_byte) = lost ? 0x7E00u : halves_of(scale, 0.0f) & 0xFFFFu;
    if (lane == 1) *reinterpret_cast<u16*>(to + Layout::sum_byte) = lost || sum != sum ? 0x7E00u : halves_of(sum, 0.0f) & 0xFFFFu;
}

}  // namespace cuquant
