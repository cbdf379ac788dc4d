// What `finish` of epilogue.cuh stores, before its rounding: for outputs that it does not know.
#pragma once
#include "matmul/epilogue.cuh"

namespace cuquant {

// activation(sum + bias[n]) + residual[m, n]
__device__ inline float completed(const Epilogue& e, float sum, i64 m, i64 n) {
    if (e.activation == kGated) return sum * activated(kSilu, load_typed(e.residual, e.residual_type, m * e.residual_stride + n));
    if (e.bias) sum += load_typed(e.bias, e.bias_type, n);
    sum = activated(e.activation, sum);
    if (e.residual) sum += load_typed(e.residual, e.residual_type, m * e.residual_stride + n);
    return sum;
}

// The same of four columns n .. n + 3, those below N; n is a multiple of 4.
__device__ inline float4 completed_4(const Epilogue& e, float4 y, i64 m, i64 n, int count) {
    if (e.activation == kGated) {
        float4 gate = load_4(e.residual, e.residual_type, m * e.residual_stride + n, count);
        activate_4<kSilu>(gate);
        return make_float4(gate.x * y.x, gate.y * y.y, gate.z * y.z, gate.w * y.w);
    }
    if (e.bias) add_4(y, load_4(e.bias, e.bias_type, n, count));
    if (e.activation == kRelu) activate_4<kRelu>(y);
    if (e.activation == kGelu) activate_4<kGelu>(y);
    if (e.activation == kSilu) activate_4<kSilu>(y);
    if (e.residual) add_4(y, load_4(e.residual, e.residual_type, m * e.residual_stride + n, count));
    return y;
}

}  // namespace cuquant
