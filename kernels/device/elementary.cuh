// exp, SiLU and GELU by operations that every processor rounds alike: the steps of
// cuquant/reference/elementary.py, whose coefficients these are. Errors are stated there.
#pragma once
#include "device/vector.cuh"

namespace cuquant {

// 1 / x, correctly rounded, for x from 1 to 2^126: the hardware's estimate and a Newton step, as the compiler makes
// of __frcp_rn, without its branch for other x, which is half of its instructions.
__device__ inline float inverse_of(float x) {
#ifdef CUQUANT_EMULATOR
    return __frcp_rn(x);
#else
    float near;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(x));
    return __fmaf_rn(near, -__fmaf_rn(near, x, -1.0f), near);
#endif
}

// A polynomial by Horner's rule, highest power first.
template <int kCount>
__device__ inline float polynomial(const float (&coefficients)[kCount], float x) {
    float value = coefficients[0];
#pragma unroll
    for (int i = 1; i < kCount; ++i) value = __fadd_rn(__fmul_rn(value, x), coefficients[i]);
    return value;
}

__device__ inline float exp_of(float x) {
    constexpr float powers[] = {0.0013843632768839598f, 0.008374173194169998f, 0.04166800156235695f, 0.16666431725025177f,
                                0.4999999403953552f, 1.0f, 1.0f};
    const float near = fminf(fmaxf(x, -80.0f), 87.0f);
    const float shifted = __fadd_rn(__fmul_rn(near, 1.4426950408889634f), 12582912.0f);
    const float whole = __fadd_rn(shifted, -12582912.0f);
    // The products are exact: 8 bits times 15, and 16.
    const float rest = __fmaf_rn(-whole, 1.4286197256296873e-06f, __fmaf_rn(-whole, 0.693145751953125f, near));
    return float_of(bits_of(polynomial(powers, rest)) + (bits_of(shifted) << 23));
}

__device__ inline float silu_of(float x) {
    return __fmul_rn(x < -87.0f ? __fmul_rn(x, 0.0f) : x, inverse_of(__fadd_rn(1.0f, exp_of(-x))));
}

__device__ inline float gelu_of(float x) {
    constexpr float above[] = {4.4290480307976735e-08f, 1.271304098279325e-05f, 0.0003477014801373833f,
                               0.009414518928110866f, 0.06875224230332741f, 0.7978844431234919f};
    constexpr float below[] = {1.1802089579448173e-06f, 7.510186251903776e-05f, 0.00191297836059386f,
                               0.028940093694292734f, 0.2528338703344978f, 1.0f};
    // Of the size, and the sign afterwards: nothing else depends on it.
    const float near = fminf(fabsf(x), 6.0f), square = __fmul_rn(near, near);
    const float ratio = __saturatef(__fmul_rn(__fmul_rn(near, polynomial(above, square)), inverse_of(polynomial(below, square))));
    return __fmul_rn(__fmul_rn(x, 0.5f), __fadd_rn(1.0f, copysignf(ratio, x)));
}

}  // namespace cuquant
