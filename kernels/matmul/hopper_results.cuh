// Results of 16 bits on their way from sums in registers to global memory, in whole vectors through shared memory.
#pragma once
#include "matmul/epilogue.cuh"
#include "device/wgmma.cuh"

namespace cuquant {

// A tile of 16-bit results in shared memory, [tokens][kRows], that is stored in whole vectors.
template <class T, int kRows>
struct Results {
    static constexpr int kPitch = kRows * 2 + 16;  // bytes

    __device__ static bool possible(const Epilogue& e, i64 N) {
        return !e.residual && e.activation == kNone && e.out_column == 1 && N % 8 == 0 && e.out_type == (is_same<T, Half> ? kHalf : kBfloat16) &&
               !((reinterpret_cast<u64>(e.out) | static_cast<u64>(e.out_stride) * 2) & 15);
    }
    // Of rows `row` + lane / 4, and 8 further.
    struct Bias {
        float b[2];
        __device__ Bias(const Epilogue& e, i64 row, i64 N, int lane) {
#pragma unroll
            for (int h = 0; h < 2; ++h) b[h] = e.bias && row + lane / 4 + 8 * h < N ? load_typed(e.bias, e.bias_type, row + lane / 4 + 8 * h) : 0.0f;
        }
    };
    // A lane's sums of 16 rows x 8 tokens. `to`: of 8 rows of a token, those that the lane has the address of.
    __device__ static void put_at(const float* sum, const Bias& bias, u32 to) {
        const u32 r[2] = {pair_of<T>(sum[0] + bias.b[0], sum[1] + bias.b[0]), pair_of<T>(sum[2] + bias.b[1], sum[3] + bias.b[1])};
        store_matrices_transposed(to, r);
    }
    // The same; `to`: where the first of them goes.
    __device__ static void put_8(const float* sum, const Bias& bias, u32 to, int lane) { put_at(sum, bias, to + lane % 8 * kPitch + lane / 8 % 2 * 16); }
    // The same of strip `strip` for the copy engine, which wants 64 rows in swizzled lines of 128 bytes.
    __device__ static void put_swizzled(const float* sum, const Bias& bias, u32 to, int strip, int lane) {
        put_at(sum, bias, to + lane % 8 * 128 + ((2 * strip + lane / 8 % 2) ^ lane % 8) * 16);
    }
    // Vectors of `kTokens` tokens from `token` on, those below M, and of columns from `row` on, those below row_end.
    template <int kTokens, int kThreads, class Place>
    __device__ static void store(const Epilogue& e, const u8* from, i64 token, i64 row, i64 M, i64 row_end, int thread, Place place) {
        constexpr int kVectors = kRows / 8, kAtOnce = kThreads / kVectors, kEach = (kTokens + kAtOnce - 1) / kAtOnce, kTogether = kEach < 4 ? kEach : 4;
        static_assert(kThreads % kVectors == 0, "a thread has the same columns of every token");
        const int first = thread / kVectors, column = thread % kVectors * 8;
        from += first * kPitch + column * 2;
        u16* const to = static_cast<u16*>(e.out) + row + column;
        const i64 step = kAtOnce * e.out_stride;
        u16* at = to + (token + first) * e.out_stride;
        if constexpr (Place::straight) keep(at);  // the compiler would rather multiply for each vector
        const int tokens = row + column < row_end ? static_cast<int>(min(M - token, static_cast<i64>(kTokens))) : 0;
#pragma unroll
        for (int k = 0; k < kEach; k += kTogether) {
            uint4 v[kTogether] = {};  // else it has registers, or local memory, throughout the kernel
#pragma unroll
            for (int j = 0; j < kTogether; ++j)
                if (first + (k + j) * kAtOnce < tokens) v[j] = *reinterpret_cast<const uint4*>(from + (k + j) * kAtOnce * kPitch);
#pragma unroll
            for (int j = 0; j < kTogether; ++j) {
                const int m = first + (k + j) * kAtOnce;
                if (m < tokens) store16(Place::straight ? at : to + place(token + m) * e.out_stride, v[j]);
                if constexpr (Place::straight) at += step;
            }
        }
    }
};

}  // namespace cuquant
