// ggml's blocks times q8_1 activations, few tokens. A thread block makes 16 rows of weights, or twice as many, times
// kTokens tokens; its warps take turns along the columns, 256 at a time, each with a ring of copies of its own, or two
// warps with different rows share one of tokens.
#include "device/barrier.cuh"
#include "matmul/q8_1.cuh"

namespace cuquant {

// weights: [m, columns / elements, Layout::bytes]; activations: [n, columns / 32, 36]; out: [m, n]. Both
// start on 16 bytes, and columns are less than 2^38. `levels`: of each code of 4 bits, as bytes, or 16 times
// 128. A turn has the groups that are congruent to its number; the turns' totals are added in their order.
// kTurns: of warps along the columns; kShare: warps of a turn, of which each has 16 rows.
template <class Block, int kTokens, int kTurns, int kStages, int kShare>
__global__ void __launch_bounds__(32 * kTurns * kShare, kTokens > 8 || kShare > 1 ? 1 : kResident / kTurns) matmul_q8_1(
    const u8* __restrict__ weights, const u8* __restrict__ activations, float* __restrict__ out, uint4 levels,
    i64 m, i64 n, i64 columns) {
    using Place = Geometry<typename Block::Layout>;
    using Own = Products<Block, kTokens>;
    constexpr int kThreads = 32 * kShare;  // of a turn
    let_next_start();
    const int lane = threadIdx.x % 32, thread = threadIdx.x % kThreads, share = thread / 32, turn = threadIdx.x / kThreads;
    const u32 token_tiles = static_cast<u32>((n + kTokens - 1) / kTokens);  // grids have less than 2^31
    // A division would hold up the first copies.
    const u32 row_tile = token_tiles == 1 ? blockIdx.x : blockIdx.x / token_tiles;
    const i64 first_row = static_cast<i64>(row_tile) * (kRows * kShare);
    const i64 first_token = static_cast<i64>(blockIdx.x - row_tile * token_tiles) * kTokens;
    const int tokens = static_cast<int>(min(static_cast<i64>(kTokens), n - first_token));
    const i64 token_bytes = columns / 32 * kTokenBytes;
    const u8* const own_tokens = activations + first_token * token_bytes;
    const int groups = static_cast<int>((columns + kGroup - 1) / kGroup), token_step = static_cast<int>(token_bytes % 16);

    // A turn's own: kStages groups of weights and activations, then the tables of scales.
    constexpr int kTables = Place::tables * Place::table_bytes, kTokensAt = kShare * Place::group_bytes;
    constexpr int kStageBytes = kTokensAt + kTokens * kTokenPitch;
    constexpr int kTurnBytes = kStages * kStageBytes + kShare * kTables + token_tables<Block, kTokens>;
    const int ring = turn * kTurnBytes, own_place = share * Place::group_bytes;
    const int scales = ring + kStages * kStageBytes + share * kTables, token_scales = ring + kStages * kStageBytes + kShare * kTables;
    const auto meet = [&] {
        if constexpr (kShare > 1) named_barrier(1 + turn, kThreads);
        else __syncwarp();
    };

    Weights<Block> rows;
    Copies<kTokens, kThreads, kThreads / kTokens, kTokenGroup, kTokenPitch> token_copies;
    rows.begin(weights, first_row + share * kRows, m, columns);
    token_copies.begin(own_tokens + turn * kTokenGroup, token_bytes, tokens, thread);
    const int easy_tokens = easy_groups(columns, token_bytes);
    const auto copy_weights = [&](int group, int stage) {
        if (group < groups && (kShare == 1 || rows.rows > 0)) rows.copy(stage + own_place, group, lane);
    };
    const auto copy_tokens = [&](int group, int stage) {
        if (group < groups) {
            const i64 start = static_cast<i64>(group) * kTokenGroup;
            if (group < easy_tokens) token_copies.copy(stage + kTokensAt, kTurns * kTokenGroup, thread);
            else copy_last<kThreads, kTokenVectors, kTokenPitch>(stage + kTokensAt, own_tokens + start, token_bytes, token_bytes - start, tokens, thread);
        }
        close_copies();
    };
    // Weights are on their way while the kernels before this one end.
#pragma unroll 1
    for (int s = 0; s < kStages; ++s) copy_weights(turn + s * kTurns, ring + s * kStageBytes);
    wait_for_earlier();
#pragma unroll 1
    for (int s = 0; s < kStages; ++s) copy_tokens(turn + s * kTurns, ring + s * kStageBytes);

    Own products;
    products.clear();
    int stage = ring;
    for (int group = turn; group < groups; group += kTurns) {
        wait_copies<kStages - 1>();
        meet();  // all copies are there
        rows.put_scales(scales, stage + own_place, group, lane);
        constexpr int kPutting = kTokens * kSteps < kThreads ? kTokens * kSteps : kThreads;
        if (thread < kPutting) put_token_scales<Block, kTokens, kPutting>(token_scales, stage + kTokensAt, tokens, token_step, thread);
        if constexpr (kShare > 1) meet();
        products.add(rows.at(stage + own_place, lane / 4, group), rows.at(stage + own_place, lane / 4 + 8, group), scales, stage + kTokensAt, token_scales, token_step, levels, lane);
        meet();  // nobody reads this stage or the tables any more
        copy_weights(group + kStages * kTurns, stage);
        copy_tokens(group + kStages * kTurns, stage);
        stage = stage == ring + (kStages - 1) * kStageBytes ? ring : stage + kStageBytes;
    }
    wait_copies<0>();
    meet();  // nor writes there

    // Turn by turn to shared memory, then one thread adds the turns of a result.
#pragma unroll
    for (int j = 0; j < Own::tiles; ++j)
#pragma unroll
        for (int i = 0; i < 4; i += Own::own)
            shared_at<float>(ring + 4 * ((share * kRows + Own::row(i, lane)) * kTokens + Own::token(j, i, lane))) = products.total[j][i];
    __syncthreads();
    const int all_rows = static_cast<int>(min(m - first_row, static_cast<i64>(kRows * kShare)));
    for (int i = threadIdx.x; i < kRows * kShare * kTokens; i += kThreads * kTurns) {
        const int row = i / kTokens, token = i % kTokens;
        if (row >= all_rows || token >= tokens) continue;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kTurns; ++w) sum = __fadd_rn(sum, shared_at<float>(w * kTurnBytes + 4 * i));
        out[(first_row + row) * n + first_token + token] = sum;
    }
}

}  // namespace cuquant
