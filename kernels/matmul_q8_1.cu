// ggml's blocks times q8_1 activations, few tokens. A thread block makes 16 rows of weights times kTokens tokens; its
// warps take turns along the columns, 256 at a time, each with a ring of copies of its own.
#include "q8_1.cuh"

namespace cuquant {

// weights: [m, columns / elements, Layout::bytes]; activations: [n, columns / 32, 36]; out: [m, n]. Both
// start on 16 bytes, and columns are less than 2^38. `levels`: of each code of 4 bits, as bytes, or 16 times
// 128. A warp has the groups that are congruent to its number; the warps' totals are added in their order.
template <class Block, int kTokens, int kWarps, int kStages>
__global__ void __launch_bounds__(32 * kWarps, kTokens > 8 ? 1 : kResident / kWarps) matmul_q8_1(
    const u8* __restrict__ weights, const u8* __restrict__ activations, float* __restrict__ out, uint4 levels,
    i64 m, i64 n, i64 columns) {
    using Place = Geometry<typename Block::Layout>;
    using Own = Products<Block, kTokens>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 token_tiles = static_cast<u32>((n + kTokens - 1) / kTokens);  // grids have less than 2^31
    // A division would hold up the first copies.
    const u32 row_tile = token_tiles == 1 ? blockIdx.x : blockIdx.x / token_tiles;
    const i64 first_row = static_cast<i64>(row_tile) * kRows;
    const i64 first_token = static_cast<i64>(blockIdx.x - row_tile * token_tiles) * kTokens;
    const int tokens = static_cast<int>(min(static_cast<i64>(kTokens), n - first_token));
    const i64 token_bytes = columns / 32 * kTokenBytes;
    const u8* const own_tokens = activations + first_token * token_bytes;
    const int groups = static_cast<int>((columns + kGroup - 1) / kGroup), token_step = static_cast<int>(token_bytes % 16);

    // A warp's own: kStages groups of weights and activations, then the tables of scales.
    constexpr int kStageBytes = Place::group_bytes + kTokens * kTokenPitch;
    constexpr int kWarpBytes = kStages * kStageBytes + Place::tables * Place::table_bytes + token_tables<Block, kTokens>;
    const int ring = warp * kWarpBytes, scales = ring + kStages * kStageBytes;
    const int token_scales = scales + Place::tables * Place::table_bytes;

    Weights<Block> rows;
    Copies<kTokens, 32, 32 / kTokens, kTokenGroup, kTokenPitch> token_copies;
    rows.begin(weights, first_row, m, columns);
    token_copies.begin(own_tokens + warp * kTokenGroup, token_bytes, tokens, lane);
    const int easy_tokens = easy_groups(columns, token_bytes);
    const auto copy_group = [&](int group, int stage) {
        if (group < groups) {
            const i64 start = static_cast<i64>(group) * kTokenGroup;
            rows.copy(stage, group, lane);
            if (group < easy_tokens) token_copies.copy(stage + Place::group_bytes, kWarps * kTokenGroup, lane);
            else copy_last<32, kTokenVectors, kTokenPitch>(stage + Place::group_bytes, own_tokens + start, token_bytes, token_bytes - start, tokens, lane);
        }
        close_copies();
    };
#pragma unroll 1
    for (int s = 0; s < kStages; ++s) copy_group(warp + s * kWarps, ring + s * kStageBytes);

    Own products;
    products.clear();
    int stage = ring;
    for (int group = warp; group < groups; group += kWarps) {
        wait_copies<kStages - 1>();
        __syncwarp();  // all lanes' copies are there
        rows.put_scales(scales, stage, group, lane);
        put_token_scales<Block, kTokens, 32>(token_scales, stage + Place::group_bytes, tokens, token_step, lane);
        products.add(rows.at(stage, lane / 4, group), rows.at(stage, lane / 4 + 8, group), scales, stage + Place::group_bytes, token_scales, token_step, levels, lane);
        __syncwarp();  // nobody reads this stage or the tables any more
        copy_group(group + kStages * kWarps, stage);
        stage = stage == ring + (kStages - 1) * kStageBytes ? ring : stage + kStageBytes;
    }
    wait_copies<0>();
    __syncwarp();  // nor writes there

    // Warp by warp to shared memory, then one thread adds the warps of a result.
#pragma unroll
    for (int j = 0; j < Own::tiles; ++j)
#pragma unroll
        for (int i = 0; i < 4; i += Own::own)
            shared_at<float>(ring + 4 * (Own::row(i, lane) * kTokens + Own::token(j, i, lane))) = products.total[j][i];
    __syncthreads();
    for (int i = threadIdx.x; i < kRows * kTokens; i += 32 * kWarps) {
        const int row = i / kTokens, token = i % kTokens;
        if (row >= rows.rows || token >= tokens) continue;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum = __fadd_rn(sum, shared_at<float>(w * kWarpBytes + 4 * i));
        out[(first_row + row) * n + first_token + token] = sum;
    }
}

}  // namespace cuquant
