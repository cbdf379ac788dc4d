// Results of 16 bits on their way from sums in registers to global memory, in whole vectors through shared memory.
#pragma once
#include "epilogue.cuh"
#include "hopper.cuh"

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
    // A lane's sums of 16 rows x 8 tokens; `to`: where the first of them goes.
    __device__ static void put_8(const float* sum, const Bias& bias, u32 to, int lane) {
        const u32 r[2] = {pair_of<T>(sum[0] + bias.b[0], sum[1] + bias.b[0]), pair_of<T>(sum[2] + bias.b[1], sum[3] + bias.b[1])};
        store_matrices_transposed(to + lane % 8 * kPitch + lane / 8 % 2 * 16, r);
    }
    template <int kTokens, int kThreads, class Place>
    __device__ static void store(const Epilogue& e, const u8* from, i64 token, i64 row, i64 M, i64 row_end, int thread, Place place) {
        constexpr int kVectors = kRows / 8, kCount = kTokens * kVectors, kEach = (kCount + kThreads - 1) / kThreads, kTogether = kEach < 4 ? kEach : 4;
#pragma unroll
        for (int begin = thread; begin < kCount; begin += kTogether * kThreads) {
            uint4 v[kTogether];
#pragma unroll
            for (int k = 0; k < kTogether; ++k) {
                const int i = min(begin + k * kThreads, kCount - 1);
                v[k] = *reinterpret_cast<const uint4*>(from + i / kVectors * kPitch + i % kVectors * 16);
            }
#pragma unroll
            for (int k = 0; k < kTogether; ++k) {
                const int i = begin + k * kThreads;
                const i64 m = token + i / kVectors, n = row + i % kVectors * 8;
                if (i < kCount && m < M && n < row_end) store16(static_cast<u16*>(e.out) + place(m) * e.out_stride + n, v[k]);
            }
        }
    }
};

}  // namespace cuquant
