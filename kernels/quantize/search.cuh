// What searching quantizers round to, and what the lanes of a block do together. Levels<Facts> tells
// the level nearest to x * inverse, and its code; cuquant/formats/search.py has the same words.
#pragma once
#include "format.cuh"

namespace cuquant {

// float32 a / b where that is finite, else 0.
__device__ inline float divide(float a, float b) {
    const float quotient = __fdiv_rn(a, b);
    return is_finite(quotient) ? quotient : 0.0f;
}

__device__ inline float clip(float x, int low, int high) {
    return fminf(fmaxf(x, static_cast<float>(low)), static_cast<float>(high));
}

constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23

template <class Facts, bool kUneven = Facts::uneven>
struct Levels {  // all integers from low to high
    struct Tables {};
    __device__ static void fill(Tables&, int, int) {}
    __device__ static float factor(float inverse) { return inverse; }
    __device__ static float level(float x, float factor, const Tables&) {
        // To nearest even: above 1.5 * 2^23 floats are whole. Clipping first gives the same.
        const float clipped = clip(__fmul_rn(x, factor), Facts::low, Facts::high);
        return __fsub_rn(__fadd_rn(clipped, kWhole), kWhole);
    }
    __device__ static u32 code(float x, float factor, const Tables& tables) {
        return static_cast<u32>(static_cast<int>(level(x, factor, tables)) - Facts::low);
    }
};

// Ascending integers with gaps. All x in ((i - 257) / 2, (i - 256) / 2] have the same nearest level:
// midpoints are halves, so they end cells, and a tie goes to the lower level.
template <class Facts>
struct Levels<Facts, true> {
    static constexpr int cells = 512, half = cells / 2;
    struct Tables {
        float levels[cells];
        u8 codes[cells];
    };

    __device__ static void fill(Tables& tables, int thread, int threads) {
        for (int cell = thread; cell < cells; cell += threads) {
            int code = 0, level = Facts::low;
#pragma unroll
            for (int i = 1; i < Facts::levels; ++i) {
                if (Facts::level(i - 1) + Facts::level(i) >= cell - half) continue;
                code = i;
                level = Facts::level(i);
            }
            tables.levels[cell] = static_cast<float>(level);
            tables.codes[cell] = static_cast<u8>(code);
        }
    }
    __device__ static float factor(float inverse) { return __fmul_rn(2.0f, inverse); }
    __device__ static int cell(float x, float factor) {
        // The upper end, from 0: the lowest bits of kWhole + half are those of `half`. NaN, which
        // is 0 times infinity, counts as the lowest.
        const float clipped = clip(__fmul_rn(x, factor), -half, half - 1);
        return static_cast<int>(bits_of(__fadd_ru(clipped, kWhole + half)) & (cells - 1));
    }
    __device__ static float level(float x, float factor, const Tables& tables) {
        return tables.levels[cell(x, factor)];
    }
    __device__ static u32 code(float x, float factor, const Tables& tables) {
        return tables.codes[cell(x, factor)];
    }
};

// A value that each lane has, seen by the kLanes lanes of its block.
template <int kLanes>
struct Together {
    __device__ static float largest(float x) {
#pragma unroll
        for (int distance = 1; distance < kLanes; distance *= 2)
            x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
        return x;
    }
    __device__ static float smallest(float x) { return -largest(-x); }
    __device__ static bool any(bool lane_has_it) {
        return largest(lane_has_it ? 1.0f : 0.0f) > 0.0f;
    }
    // In the order of lanes: ((x[0] + x[1]) + x[2]) + ...
    __device__ static float sum(float x) {
        float total = __shfl_sync(~0u, x, 0, kLanes);
#pragma unroll
        for (int lane = 1; lane < kLanes; ++lane)
            total = __fadd_rn(total, __shfl_sync(~0u, x, lane, kLanes));
        return total;
    }
};

}  // namespace cuquant
