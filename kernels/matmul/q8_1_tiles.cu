// ggml's blocks times q8_1 activations, many tokens. A thread block makes 16 rows of weights for each of its warps times
// kTokens tokens, whose groups of 256 columns all warps share; a warp has the rings of its own weights.
#include "matmul/q8_1.cuh"

namespace cuquant {

// As matmul_q8_1, but for the sums: a result adds all groups in their order. Two groups are on their way.
template <class Block, int kTokens, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, kResident / kWarps) matmul_q8_1_tiles(
    const u8* __restrict__ weights, const u8* __restrict__ activations, float* __restrict__ out, uint4 levels,
    i64 m, i64 n, i64 columns) {
    using Place = Geometry<typename Block::Layout>;
    using Own = Products<Block, kTokens>;
    constexpr int kThreads = 32 * kWarps;
    let_next_start();
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const u32 token_tiles = static_cast<u32>((n + kTokens - 1) / kTokens);  // grids have less than 2^31
    const i64 first_row = (static_cast<i64>(blockIdx.x / token_tiles) * kWarps + warp) * kRows;
    const i64 first_token = static_cast<i64>(blockIdx.x % token_tiles) * kTokens;
    const int tokens = static_cast<int>(min(static_cast<i64>(kTokens), n - first_token));
    const i64 token_bytes = columns / 32 * kTokenBytes;
    const u8* const own_tokens = activations + first_token * token_bytes;
    const int groups = static_cast<int>((columns + kGroup - 1) / kGroup), token_step = static_cast<int>(token_bytes % 16);

    // Two groups of all tokens and the table of their scales; then two groups and the tables of each warp.
    constexpr int kTokensBytes = kTokens * kTokenPitch, kShared = 2 * kTokensBytes + token_tables<Block, kTokens>;
    constexpr int kWarpBytes = 2 * Place::group_bytes + Place::tables * Place::table_bytes;
    const int ring = kShared + warp * kWarpBytes, scales = ring + 2 * Place::group_bytes;
    constexpr int kTokenScales = 2 * kTokensBytes;

    Weights<Block> rows;
    Copies<kTokens, kThreads, kThreads / kTokens, kTokenGroup, kTokenPitch> token_copies;
    rows.begin(weights, min(first_row, (m - 1) / kRows * kRows), m, columns);  // warps without rows repeat the last ones
    token_copies.begin(own_tokens, token_bytes, tokens, thread);
    const int easy_tokens = easy_groups(columns, token_bytes);
    const auto copy_weights = [&](int group) {
        if (group < groups) rows.copy(ring + group % 2 * Place::group_bytes, group, lane);
    };
    const auto copy_tokens = [&](int group) {
        const int half = group % 2;
        if (group < groups) {
            const i64 start = static_cast<i64>(group) * kTokenGroup;
            if (group < easy_tokens) token_copies.copy(half * kTokensBytes, kTokenGroup, thread);
            else copy_last<kThreads, kTokenVectors, kTokenPitch>(half * kTokensBytes, own_tokens + start, token_bytes, token_bytes - start, tokens, thread);
        }
        close_copies();
    };
    copy_weights(0);  // on their way while the kernels before this one end
    copy_weights(1);
    wait_for_earlier();
    copy_tokens(0);
    copy_tokens(1);

    Own products;
    products.clear();
#pragma unroll 1
    for (int group = 0; group < groups; ++group) {
        const int stage = ring + group % 2 * Place::group_bytes, token_stage = group % 2 * kTokensBytes;
        wait_copies<1>();
        __syncthreads();  // all threads' copies are there
        rows.put_scales(scales, stage, group, lane);
        put_token_scales<Block, kTokens, kThreads>(kTokenScales, token_stage, tokens, token_step, thread);
        __syncthreads();  // the tables are full
        products.add(rows.at(stage, lane / 4, group), rows.at(stage, lane / 4 + 8, group), scales, token_stage, kTokenScales, token_step, levels, lane);
        __syncthreads();  // nobody reads these groups or the tables any more
        copy_weights(group + 2);
        copy_tokens(group + 2);
    }
#pragma unroll
    for (int j = 0; j < Own::tiles; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const i64 row = first_row + Own::row(i, lane);
            const int token = Own::token(j, i, lane);
            if (row < m && token < tokens) out[row * n + first_token + token] = products.total[j][i];
        }
    wait_copies<0>();
}

}  // namespace cuquant
