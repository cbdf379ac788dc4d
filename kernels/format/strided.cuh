// Arrays with any strides, as [rows, columns]: the plain kernels take what the fast ones do not.
#pragma once
#include "format/chunk.cuh"

namespace cuquant {

// Row r is made of digits of these sizes, the last one fastest. Strides are in elements, in memory
// and (`flat`) in the array's own C order.
struct Strided {
    static constexpr int most = 6;
    i64 sizes[most], strides[most], flat[most];
    i64 column_stride, column_flat;
    i64 dims;
    i64 vectors;  // whether chunks are aligned 16-byte loads or stores

    __device__ i64 row(i64 r, const i64* steps) const {
        i64 offset = 0;
        for (int d = static_cast<int>(dims) - 1; d > 0; --d) {
            const i64 digit = r % sizes[d];
            r /= sizes[d];
            offset += digit * steps[d];
        }
        return dims ? offset + r * steps[0] : 0;
    }
};

// The array as [batch, rows, columns] in blocks of [tall, wide], and how many there are each way.
struct Tiles {
    i64 rows, columns, tall, wide, down, across;

    __device__ i64 block(i64 row, i64 column) const {
        if (down == 1 && tall > 1) return (row / rows) * across + column / wide;
        const i64 line = tall == 1 ? row : row / rows * down + row % rows / tall;
        return across == 1 ? line : line * across + column / wide;
    }
};

// `count` elements from a column on; the others become 0.
template <typename T, int kFlags>
__device__ void load_chunk(const T* row, i64 column, int count, const Strided& x, float* values) {
    if (x.vectors && count == kChunk) {
        Raw<T> raw;
        raw.load(row + column);
        raw.values(values);
    } else {
#pragma unroll
        for (int i = 0; i < kChunk; ++i)
            values[i] = i < count ? Element<T>::load(row + (column + i) * x.column_stride) : 0.0f;
    }
    if constexpr (kFlags & kClamp) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) values[i] = clamped<T>(values[i]);
    }
}

// The sum of value(e) over e below `count`, one by one in float64, by a whole warp: its lanes fetch 32
// elements at a time.
template <class Value>
__device__ double ordered_sum(i64 count, Value value) {
    const int lane = threadIdx.x % 32;
    double sum = 0.0;
    float mine = lane < count ? value(lane) : 0.0f;
    for (i64 e = 0; e < count; e += 32) {
        const float next = e + 32 + lane < count ? value(e + 32 + lane) : 0.0f;
        for (int l = 0; l < 32; ++l) sum += static_cast<double>(__shfl_sync(~0u, mine, l));  // + 0.0 at the end
        mine = next;
    }
    return sum;
}

}  // namespace cuquant
