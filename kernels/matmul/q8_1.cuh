// Products of 16 rows of ggml's blocks with q8_1's tokens on the tensor cores.
//
// For every 32 columns of a row w and a token a
//   part = sum over sub-blocks of (float)(integer dot product) * scale [+ (integer sum of a) * minimum]
//   total = part * (a's scale) + total
// with one rounding for each product and each multiply-add, in the order of the columns.
#pragma once
#include "matmul/ggml_copies.cuh"

namespace cuquant {

constexpr int kTokenBytes = 36, kTokenVectors = 19;  // of q8_1's block of 32; of a token's group
constexpr int kTokenPitch = 16 * kTokenVectors, kTokenGroup = kSteps * kTokenBytes;
constexpr int kTokenStride = kSteps + 4;  // floats of a token's row of scales

// Integers start here: the bits of 1.5 * 2^23, where the next float is one more.
constexpr int kIntegerStart = 0x4B400000;
__device__ inline float float_of_sum(int sum) { return __fadd_rn(float_of(static_cast<u32>(sum)), -12582912.0f); }

// ---- tokens -------------------------------------------------------------------------------------

// The operand words of a token's 32 columns, in the order of weights_of.
template <class Block>
__device__ void operand_of(int quants, int t, u32& first, u32& second) {
    constexpr int span = Block::lookup ? FirstOf<typename Block::Layout::Codes>::span : 0;
    if constexpr (span == 8) {  // columns 2 t, 8 + 2 t, 1 + 2 t, 9 + 2 t
        const int pairs = quants + 2 * t;
        first = __byte_perm(shared_at<u16>(pairs), shared_at<u16>(pairs + 8), 0x5140);
        second = __byte_perm(shared_at<u16>(pairs + 16), shared_at<u16>(pairs + 24), 0x5140);
    } else {
        first = shared_at<u32>(quants + 4 * t), second = shared_at<u32>(quants + 4 * t + 16);
        if constexpr (span == 16) {  // columns 4 t, 16 + 4 t, 1 + 4 t, 17 + 4 t; and the next
            const u32 low = first, high = second;
            first = __byte_perm(low, high, 0x5140);
            second = __byte_perm(low, high, 0x7362);
        }
    }
}

// A thread's share of the scales of kTokens tokens' group to a table of rows of floats; where weights have
// minimums, behind it a table of the sums of their integers over sub-blocks.
template <class Block, int kTokens, int kThreads>
__device__ void put_token_scales(int table, int stage, int tokens, int token_step, int thread) {
    using Place = Geometry<typename Block::Layout>;
    constexpr int per_step = Place::subs / kSteps;
    constexpr int kPer = kTokens * kSteps / kThreads, kLanes = kSteps / kPer;  // steps a thread; threads a token
    const int token = thread / kLanes, step = thread % kLanes * kPer;
    if (token >= tokens) return;
    const int from = stage + token * kTokenPitch + (token * token_step & 15) + step * kTokenBytes;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
        shared_at<float>(table + 4 * (token * kTokenStride + step + i)) = float_of_half(shared_at<u16>(from + i * kTokenBytes));
        if constexpr (Place::tables == 2) {
            const int sums = table + 4 * (kTokens * kTokenStride + token * Place::stride + (step + i) * per_step);
#pragma unroll
            for (int j = 0; j < per_step; ++j) {
                int sum = kIntegerStart;
#pragma unroll
                for (int word = 0; word < 8 / per_step; ++word)
                    sum = __dp4a(0x01010101, shared_at<int>(from + i * kTokenBytes + 4 + 4 * (8 / per_step * j + word)), sum);
                shared_at<float>(sums + 4 * j) = float_of_sum(sum);
            }
        }
    }
}
// Bytes of these tables.
template <class Block, int kTokens>
constexpr int token_tables = 4 * kTokens * (kTokenStride + (Geometry<typename Block::Layout>::tables == 2 ? Geometry<typename Block::Layout>::stride : 0));

// ---- products -----------------------------------------------------------------------------------

// 16 rows times kTokens tokens: 4, of which each has two of the tensor core's 8 columns and a lane looks at
// one of its two, or a multiple of 8. Tokens that are not there give results that nobody stores.
template <class Block, int kTokens>
struct Products {
    using Place = Geometry<typename Block::Layout>;
    static constexpr bool has_minimum = Place::tables == 2;
    static constexpr int own = kTokens < 8 ? 8 / kTokens : 1;  // the tensor core's columns of a token
    static constexpr int tiles = (kTokens + 7) / 8, per_step = Place::subs / kSteps;
    // Steps whose scales are in registers.
    static constexpr int ahead = tiles > 2 ? 1 : 4 / per_step / Place::tables;
    float total[tiles][4];  // rows g and g + 8, columns 2 t and 2 t + 1

    __device__ void clear() {
#pragma unroll
        for (int n = 0; n < tiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) total[n][i] = 0.0f;
    }
    // The token of total[n][i], and its row.
    __device__ static int token(int n, int i, int lane) { return own == 2 ? lane % 4 : 8 * n + 2 * (lane % 4) + i % 2; }
    __device__ static int row(int i, int lane) { return lane / 4 + i / 2 * 8; }

    // Add a group. `scales`, `token_scales`: the tables; `stage`: the tokens' group.
    template <class R>
    __device__ void add(const R& upper, const R& lower, int scales, int stage, int token_scales, int token_step, const uint4& levels, int lane) {
        const int g = lane / 4, t = lane % 4;
        // 8 tokens further the phase is the same: their bytes are a multiple of 32.
        const int quants = stage + g / own * kTokenPitch + (g / own * token_step & 15) + 4;
#pragma unroll
        for (int q = 0; q < kSteps; q += ahead) {
            // The tables are full; and where loads are made too far ahead, registers are spilled.
            if (q % 4 == 0 || has_minimum || tiles > 2) __syncwarp();
            float scale[2][ahead * per_step], minimum[2][ahead * per_step];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int from = scales + 4 * ((g + 8 * h) * Place::stride + q * per_step);
                get(scale[h], from);
                if constexpr (has_minimum) get(minimum[h], from + Place::table_bytes);
            }
            float token_scale[tiles][2][ahead], sum[tiles][2][ahead * per_step];
#pragma unroll
            for (int n = 0; n < tiles; ++n)
#pragma unroll
                for (int i = 0; i < 2; i += own) {
                    const int own_token = token(n, i, lane);
                    get(token_scale[n][i], token_scales + 4 * (own_token * kTokenStride + q));
                    if constexpr (has_minimum)
                        get(sum[n][i], token_scales + 4 * (kTokens * kTokenStride + own_token * Place::stride + q * per_step));
                }
#pragma unroll
            for (int s = 0; s < ahead; ++s) {
                if (s == 2) __syncwarp();
                u32 a[4];
                weights_of<Block>(upper, q + s, t, levels, a[0], a[2]);
                weights_of<Block>(lower, q + s, t, levels, a[1], a[3]);
#pragma unroll
                for (int n = 0; n < tiles; ++n) {
                    u32 b[2];
                    float part[4];
                    operand_of<Block>(quants + 8 * n * kTokenPitch + (q + s) * kTokenBytes, t, b[0], b[1]);
#pragma unroll
                    for (int j = 0; j < per_step; ++j) {
                        int dot[4];
                        if constexpr (per_step == 1) dot_32(dot, a[0], a[1], a[2], a[3], b[0], b[1], kIntegerStart);
                        else dot_16(dot, a[2 * j], a[2 * j + 1], b[j], kIntegerStart);
#pragma unroll
                        for (int i = 0; i < 4; i += own) {  // i / 2: the row, i % 2: the column
                            const float product = float_of_sum(dot[i]), factor = scale[i / 2][per_step * s + j];
                            part[i] = j ? __fmaf_rn(product, factor, part[i]) : __fmul_rn(product, factor);
                            if constexpr (has_minimum)
                                part[i] = __fmaf_rn(sum[n][i % 2][per_step * s + j], minimum[i / 2][per_step * s + j], part[i]);
                        }
                    }
#pragma unroll
                    for (int i = 0; i < 4; i += own) total[n][i] = __fmaf_rn(part[i], token_scale[n][i % 2][s], total[n][i]);
                }
            }
        }
    }
};

}  // namespace cuquant
