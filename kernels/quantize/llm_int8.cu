// LLM.int8()'s rows: what is small in float16 becomes int8 with one scale a row, and columns that hold an outlier
// are set apart. outlier_columns marks them; llm_int8_rows, a block a row, makes codes and scales.
#include "device/reduce.cuh"
#include "format/chunk.cuh"

namespace cuquant {

// Neighbours that are loaded and stored together.
template <typename T, int kUnit>
struct alignas(sizeof(T) * kUnit < 16 ? sizeof(T) * kUnit : 16) Neighbours {
    T at[kUnit];
    __device__ static Neighbours of(const T* from) { return *reinterpret_cast<const Neighbours*>(from); }
    __device__ void store(T* to) const { *reinterpret_cast<Neighbours*>(to) = *this; }
};

// An element rounded to float16.
template <typename T>
__device__ float half_of(const T& x) {
    return float_of_half(halves_of(Element<T>::load(&x), 0.0f) & 0xFFFFu);
}
template <>
__device__ inline float half_of(const Half& x) {
    return Element<Half>::load(&x);
}

// NaN is none; a threshold of 0 leaves none.
__device__ inline bool is_outlier(float x, float threshold) { return threshold > 0.0f && fabsf(x) >= threshold; }

// columns: zeros before, where several blocks share one. A thread kUnit columns, of every gridDim.y-th row.
template <typename T, int kUnit, int kThreads>
__global__ void __launch_bounds__(kThreads) outlier_columns(
    const T* __restrict__ x, u8* __restrict__ columns, float threshold, i64 rows, i64 width) {
    const i64 column = (static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x) * kUnit;
    if (column >= width) return;
    bool found[kUnit] = {};
    for (i64 row = blockIdx.y; row < rows; row += gridDim.y) {
        const auto run = Neighbours<T, kUnit>::of(x + row * width + column);
#pragma unroll
        for (int i = 0; i < kUnit; ++i) found[i] |= is_outlier(half_of(run.at[i]), threshold);
    }
#pragma unroll
    for (int i = 0; i < kUnit; ++i)
        if (found[i] || gridDim.y == 1) columns[column + i] = found[i];
}

// Scales of a weight, of its rows' largest sizes.
struct Divided {
    const float* absmax;
    float* scales;
    i64 count;  // 0: there are none to be made
    float inverse;
};

struct Largest {
    using State = u32;
    __device__ static u32 merge(u32 a, u32 b) { return max(a, b); }
};

// columns: null where a row's outliers are its own alone. scales: of each row the largest size times `factor`; apart,
// unless null: x in columns of outliers, 0 in others. Blocks behind those of `rows` make the weight's scales.
template <typename T, int kUnit, int kThreads>
__global__ void __launch_bounds__(kThreads) llm_int8_rows(
    const T* __restrict__ x, const u8* __restrict__ columns, signed char* __restrict__ codes,
    float* __restrict__ scales, T* __restrict__ apart, Divided weight, float threshold, float factor, i64 rows,
    i64 width) {
    if (blockIdx.x >= rows) {
        const i64 i = (blockIdx.x - rows) * kThreads + threadIdx.x;
        if (i < weight.count) weight.scales[i] = __fmul_rn(weight.absmax[i], weight.inverse);
        return;
    }
    const i64 first = blockIdx.x * width;
    u32 most = 0;  // of the sizes' bits, which order as they do, and NaN above all
    for (i64 c = threadIdx.x * kUnit; c < width; c += kThreads * kUnit) {
        const auto run = Neighbours<T, kUnit>::of(x + first + c);
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
            const float value = half_of(run.at[i]);
            if (!is_outlier(value, threshold)) most = max(most, bits_of(fabsf(value)));
        }
    }
    const float largest = float_of(block_reduce<Largest, kThreads>(most));
    if (threadIdx.x == 0) scales[blockIdx.x] = isnan(largest) ? float_of(0x7FC00000u) : __fmul_rn(largest, factor);
    const float inverse = __fmul_rn(__frcp_rn(largest), 127.0f);
    for (i64 c = threadIdx.x * kUnit; c < width; c += kThreads * kUnit) {
        const auto run = Neighbours<T, kUnit>::of(x + first + c);
        Neighbours<u8, kUnit> marked{};
        if (columns) marked = Neighbours<u8, kUnit>::of(columns + c);
        Neighbours<signed char, kUnit> code;
        Neighbours<T, kUnit> kept;
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
            const float value = half_of(run.at[i]);
            const float z = __fmul_rn(value, inverse);
            const bool is_apart = columns ? marked.at[i] != 0 : is_outlier(value, threshold);
            code.at[i] = is_apart || isnan(z) ? 0 : static_cast<signed char>(rintf(z));
            kept.at[i] = is_apart ? run.at[i] : T{};
        }
        code.store(codes + first + c);
        if (apart) kept.store(apart + first + c);
    }
}

}  // namespace cuquant
