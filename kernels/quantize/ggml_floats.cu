// ggml's mxfp4 and nvfp4 from contiguous rows: a byte for the scale of each sub-block, and the nearest levels by
// comparisons; see cuquant/reference/float_blocks.py. A lane holds 16 elements, and neighbouring lanes a block.
#include "format/blocks.cuh"
#include "quantize/find.cuh"

namespace cuquant {

constexpr int kElements = 2 * kChunk;  // of a lane

// Where the nibbles of a block's codes lie: halves of kSpan elements share bytes.
template <class Codes> struct Nibbles;
template <int kByte, int kSpan>
struct Nibbles<Fields<Field<kByte, 4, kSpan, 0>>> {
    static constexpr int byte = kByte, span = kSpan;
};

// floorf(log2f(size)) - 2 + 127 as C has it, from 0 on: a size 2^k (1 - j 2^-24) has the logarithm k - j 2^-24 / ln 2,
// which float32 rounds to k where it is within half a step of the numbers below k.
__device__ inline u32 exponent_byte(u32 size) {
    const int own = static_cast<int>(size >> 23) - 127, above = own + 1, reach = abs(above);
    const u32 below = 0x800000u - (size & 0x7FFFFFu);  // j
    int power = reach ? 31 - __clz(reach) : 0;
    if (above > 0 && reach == 1 << power) --power;
    const u32 most = power > 0 ? 0xB17217F7u >> (32 - power) : 0u;  // 2^power ln 2
    const int rounds = above != 0 && below <= most;
    return static_cast<u32>(max(own + rounds - 2 + 127, 0));
}

// ggml_fp32_to_ue4m3: ties away from zero, and 448 for all that is rounded to 256 or more.
__device__ inline u32 unsigned_e4m3(float x) {
    x = fminf(x, 448.0f);
    if (x < 0x1p-6f) return min(static_cast<u32>(__fadd_rn(__fmul_rn(x, 512.0f), 0.5f)), 7u);
    const u32 code = ((bits_of(x) + (1u << 19)) >> 20) - (120u << 3);
    return code >= 0x78u ? 0x7Eu : code;
}

// Above the i-th border times the scale the code is i + 1: the products are exact.
__device__ inline u32 float_code(float x, float scale) {
    const float size = fabsf(x);
    const float borders[7] = {0.5f, 1.5f, 2.5f, 3.5f, 5.0f, 7.0f, 10.0f};
    u32 code = 0;
#pragma unroll
    for (const float border : borders) code += size > __fmul_rn(border, scale);
    if (scale == 0.0f) code = 0;
    return code + (x < 0.0f && code ? 8u : 0u);
}

template <class Format, typename T, int kThreads, int kFlags>
__global__ void __launch_bounds__(kThreads) quantize_float_blocks(
    const T* __restrict__ x, u8* __restrict__ blocks, i64 count, u32* __restrict__ overflow) {
    using Layout = typename Format::Layout;
    using Codes = Nibbles<typename Layout::Codes>;
    constexpr int kLanes = Layout::elements / kElements, kSubLanes = Layout::sub_block / kElements;
    const i64 item = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x, own = item / kLanes;
    const int lane = static_cast<int>(item % kLanes);
    const bool valid = own < count;
    float z[kElements];
    u32 top = 0;
#pragma unroll
    for (int p = 0; p < 2; ++p) {
        Raw<T> raw;
        if (valid) raw.load(x + item * kElements + p * kChunk);
        else raw.zero();
        raw.values(z + p * kChunk);
    }
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
        z[i] = clamped<T>(z[i]);  // there is no NaN
        top = max(top, bits_of(z[i]) & 0x7FFFFFFFu);
    }
    top = lanes_max<kSubLanes>(top);
    bool beyond = false;
    u32 byte;
    if constexpr (Layout::stored == Stored::HalfE8M0) {
        byte = exponent_byte(top);
    } else {
        const float wanted = __fdiv_rn(float_of(top), 6.0f);
        beyond = wanted > 448.0f;
        byte = unsigned_e4m3(wanted);
    }
    const float scale = scale_of_byte<Layout::stored>(byte);
    u64 codes[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kElements; ++i)
        codes[i / kChunk] |= static_cast<u64>(float_code(z[i], scale)) << 8 * (i % kChunk);
    u64 bytes;
    if constexpr (Codes::span == kElements) {  // the other lane has what shares bytes: each gives half away
        const u64 got = __shfl_xor_sync(~0u, lane % 2 ? codes[0] : codes[1], 1);
        bytes = lane % 2 ? got | codes[1] << 4 : codes[0] | got << 4;
    } else {
        static_assert(Codes::span == kChunk, "a lane has both halves");
        bytes = codes[0] | codes[1] << 4;
    }
    if (!valid) return;
    u8* to = blocks + own * Layout::bytes;
#pragma unroll
    for (int b = 0; b < 8; ++b) to[Codes::byte + lane * 8 + b] = static_cast<u8>(bytes >> 8 * b);
    if (lane % kSubLanes) return;
    to[Layout::scale_byte + lane / kSubLanes] = static_cast<u8>(byte);
    if (overflow && beyond) atomicAdd(overflow, 1u);
}

}  // namespace cuquant
