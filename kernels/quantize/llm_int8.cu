// LLM.int8()'s rows: what is small in float16 becomes int8 with one scale a row, and columns that hold an outlier
// are set apart. outlier_columns marks them; llm_int8_rows, a block a row, makes codes and scales.
#include "device/reduce.cuh"
#include "format/chunk.cuh"

namespace cuquant {

constexpr u32 kSize = 0x7FFF;  // of a float16's bits: all but the sign, which order as what they stand for

template <typename T>
__device__ u32 half_bits(const T* from) {
    return halves_of(Element<T>::load(from), 0.0f) & 0xFFFFu;
}
template <>
__device__ inline u32 half_bits(const Half* from) {
    return from->bits;
}

// NaN is none; a threshold of 0 leaves none.
__device__ inline bool is_outlier(u32 bits, float threshold) {
    return threshold > 0.0f && float_of_half(bits & kSize) >= threshold;
}

// columns: zeros before. A thread a column, of every gridDim.y-th row.
template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads) outlier_columns(
    const T* __restrict__ x, u8* __restrict__ columns, float threshold, i64 rows, i64 width) {
    const i64 column = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (column >= width) return;
    bool found = false;
    for (i64 row = blockIdx.y; row < rows; row += gridDim.y) found |= is_outlier(half_bits(x + row * width + column), threshold);
    if (found) columns[column] = 1;
}

struct Largest {
    using State = u32;
    __device__ static u32 merge(u32 a, u32 b) { return max(a, b); }
};

// scales: of each row the largest size times `factor`; apart, unless null: x in columns of outliers, 0 in others.
template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads) llm_int8_rows(
    const T* __restrict__ x, const u8* __restrict__ columns, signed char* __restrict__ codes, float* __restrict__ scales,
    T* __restrict__ apart, float threshold, float factor, i64 width) {
    const i64 first = blockIdx.x * width;
    u32 most = 0;
    for (i64 i = threadIdx.x; i < width; i += kThreads) {
        const u32 bits = half_bits(x + first + i);
        if (!is_outlier(bits, threshold)) most = max(most, bits & kSize);
    }
    const float largest = float_of_half(block_reduce<Largest, kThreads>(most));
    if (threadIdx.x == 0) scales[blockIdx.x] = isnan(largest) ? float_of(0x7FC00000u) : __fmul_rn(largest, factor);
    const float inverse = __fmul_rn(__frcp_rn(largest), 127.0f);
    for (i64 i = threadIdx.x; i < width; i += kThreads) {
        const float z = __fmul_rn(float_of_half(half_bits(x + first + i)), inverse);
        const bool is_apart = threshold > 0.0f && columns[i];
        codes[first + i] = is_apart || isnan(z) ? 0 : static_cast<signed char>(rintf(z));
        if (apart) apart[first + i] = is_apart ? x[first + i] : T{};
    }
}

}  // namespace cuquant
