// The rounded values of rows of any length that lie anywhere, for what rows.cu does not take.
// rows_values: a thread block a row. turned: a thread block a group of a Walsh-Hadamard transform.
#include "quantize/sources.cuh"

namespace cuquant {

template <typename T> __device__ float rounded(float x);
template <> __device__ inline float rounded<float>(float x) { return x; }
template <> __device__ inline float rounded<Half>(float x) { return float_of_half(halves_of(x, 0.0f) & 0xFFFFu); }
template <> __device__ inline float rounded<Bfloat16>(float x) { return float_of(bfloat16_of(x) << 16); }

// An element of the row at `offset`, of a sum the rounded one.
template <class Source, typename T>
__device__ float element(const Operands& operands, i64 at) {
    const float x = Element<T>::load(static_cast<const T*>(operands.x) + at);
    if constexpr (!Source::adds) return x;
    return rounded<T>(__fadd_rn(x, Element<T>::load(static_cast<const T*>(operands.other) + at)));
}

template <class Source, typename T>
__device__ float along_row(const void* from, i64 column) {
    using Own = Choice<Source::wide != 0, float, T>;
    return Element<Own>::load(static_cast<const Own*>(from) + column);
}

// What `terms` makes of the values of a unit, added up over the row; a thread has a partial sum.
template <typename T, class Source, int kThreads>
struct PlainSum {
    const Operands& operands;
    i64 offset, columns;
    template <class Terms>
    __device__ double operator()(Terms terms) const {
        double partial = 0.0;
        for (i64 first = static_cast<i64>(threadIdx.x) * kUnit; first < columns; first += kThreads * kUnit) {
            float v[kUnit];
            for (int i = 0; i < kUnit; ++i) v[i] = first + i < columns ? element<Source, T>(operands, offset + first + i) : 0.0f;
            terms(v);
            for (int i = 0; i < kUnit; ++i)
                if (first + i >= columns) v[i] = 0.0f;
            partial += static_cast<double>(unit_sum(v));
        }
        return row_total<kThreads, Terms>(partial);
    }
};

template <typename T, class Source, int kThreads>
__global__ void __launch_bounds__(kThreads) rows_values(Operands operands, T* __restrict__ values, i64 columns) {
    static_assert(kThreads == 256, "a thread a partial sum");
    const i64 offset = static_cast<i64>(blockIdx.x) * columns;
    constexpr int means = kMeans<Source, T>;
    Norm norm{1.0f, 0.0f, 0.0f, 0.0f};
    if constexpr (Source::norm) {
        const PlainSum<T, Source, kThreads> sum{operands, offset, columns};
        norm = norm_of<means>(operands, sum);
        if (!norm.within()) norm = norm_again<means>(norm, operands, sum);  // seldom
    }
    const float inverse = norm.inverse();
    for (i64 column = threadIdx.x; column < columns; column += kThreads) {
        float x = element<Source, T>(operands, offset + column);
        if (Source::adds && operands.sum) Element<T>::store(static_cast<T*>(operands.sum) + offset + column, x);
        if constexpr (Source::gate) {
            x = gated<Source>(x, Element<T>::load(static_cast<const T*>(operands.other) + offset + column));
        } else if constexpr (Source::norm) {
            x = __fmul_rn(__fmul_rn(centered<means, true>(x, norm), inverse), along_row<Source, T>(operands.weight, column));
            if constexpr (Source::bias) x = __fadd_rn(x, along_row<Source, T>(operands.bias, column));
        }
        Element<T>::store(values + offset + column, x);
    }
}

// `work`, as many floats as there are elements. Groups lie one after the other; a row has `columns` elements.
template <typename T, class Source, int kThreads>
__global__ void __launch_bounds__(kThreads, 1) turned(
    Operands operands, T* __restrict__ values, float* work, i64 columns, i64 group) {
    const i64 offset = static_cast<i64>(blockIdx.x) * group;
    work += offset;
    float unit = 1.0f;
#pragma unroll 1
    for (int attempt = 0; attempt < 2; ++attempt) {
        for (i64 i = threadIdx.x; i < group; i += kThreads) {
            float x = Element<T>::load(static_cast<const T*>(operands.x) + offset + i);
            if constexpr (Source::weight) x = __fmul_rn(x, along_row<Source, T>(operands.weight, (offset + i) % columns));
            work[i] = __fmul_rn(x, unit);
        }
        __syncthreads();
        for (i64 distance = 1; distance < group; distance *= 2) {
            for (i64 pair = threadIdx.x; pair < group / 2; pair += kThreads) {
                const i64 i = pair / distance * (2 * distance) + pair % distance;
                const float a = work[i], b = work[i + distance];
                work[i] = __fadd_rn(a, b);
                work[i + distance] = __fadd_rn(a, -b);
            }
            __syncthreads();
        }
        bool lost = false;
        for (i64 i = threadIdx.x; i < group; i += kThreads) lost |= !is_finite(work[i]);
        if (attempt || !__syncthreads_or(lost)) break;
        unit = __fdiv_rn(1.0f, static_cast<float>(group));  // exact
    }
    const float back = __frcp_rn(unit);
    for (i64 i = threadIdx.x; i < group; i += kThreads)
        Element<T>::store(values + offset + i, __fmul_rn(__fmul_rn(work[i], operands.scale), back));
}

}  // namespace cuquant
