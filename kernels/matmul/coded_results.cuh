// From scaled sums of products of codes to what is stored: an Epilogue, or integers of 8 bits whose scale is known;
// or the integer sums themselves.
#pragma once
#include "format.cuh"
#include "matmul/epilogue.cuh"

namespace cuquant {

enum CodedType { kInt8 = 3, kInt32 = 4 };  // of an output, beside those of Type

struct CodedResults {
    Epilogue epilogue;       // its out_type may be a CodedType; kInt32: sums are stored as they are, and nothing else is looked at
    const float* factor;     // [1], by which scaled sums are multiplied before all else; or null
    const float* out_scale;  // [1], of kInt8

    __device__ bool is_raw() const { return epilogue.out_type == kInt32; }
    __device__ float multiplied(float sum) const { return factor ? __fmul_rn(sum, *factor) : sum; }
    // 1 / out_scale, which `finish` is given; 0 for other outputs.
    __device__ float inverse() const { return epilogue.out_type == kInt8 ? __frcp_rn(*out_scale) : 0.0f; }
};

// result / scale to nearest even, in -127..127; NaN is 0, and so is all where the scale is: as `quantize` with a given scale.
__device__ inline int int8_of(float result, float inverse) {
    const float x = usable(inverse) ? __fmul_rn(result, inverse) : 0.0f;
    return x != x ? 0 : static_cast<int>(rintf(fminf(fmaxf(x, -127.0f), 127.0f)));
}

// Store the result of a scaled sum at an element of the output.
__device__ inline void finish(const CodedResults& results, float inverse, float sum, i64 m, i64 n, i64 at) {
    const Epilogue& e = results.epilogue;
    const float result = completed(e, results.multiplied(sum), m, n);
    if (e.out_type == kInt8) static_cast<signed char*>(e.out)[at] = static_cast<signed char>(int8_of(result, inverse));
    else store_typed(e.out, e.out_type, at, result);
}
__device__ inline void finish(const CodedResults& results, float inverse, float sum, i64 m, i64 n) {
    finish(results, inverse, sum, m, n, m * results.epilogue.out_stride + n * results.epilogue.out_column);
}

}  // namespace cuquant
