// x [M, K] times weights [N, K]^T, codes of a byte or bits on both sides, on Hopper's tensor cores. A block has
// tiles of 128 rows of side a by some rows of side b, of which either is x. One warp starts copies of lines of both
// sides; three bring scales, bias and sums of codes; two warpgroups multiply, and store results while copies go on.
#include "device/cluster.cuh"
#include "device/overlap.cuh"
#include "matmul/dense_results.cuh"

namespace cuquant {

template <class Mma>
using Product = typename Mma::Sum;

// Products of one warpgroup: its 64 rows of a, and all of b.
template <class Mma, class Tile>
struct Multiplier {
    using D = DenseTile<Mma, Tile>;
    static constexpr int kColumns = D::kColumns, kPart = D::kPart, kSubs = D::kSubs;
    using Part = Product<Mma>[kPart / 2];
    const Stages<Mma, Tile>& stages;
    u32 a, b;  // of stage 0, as `swizzled` says
    const RemoteBarriers& others_empty;
    int row, lane;  // row: the lane's first of a
    int edge;       // eights of columns before the second block's

    __device__ void release(int stage) const {
        if (lane != 0) return;
        barrier_arrive(stages.empty + stage);
        if constexpr (D::kShare > 1) others_empty.arrive(stage);
    }
    // All of K in the tensor cores' own sums.
    __device__ void run(Product<Mma> (&sums)[kColumns / 2], Ring<D::kStages>& ring, int lines) const {
        int last = 0;
#pragma unroll 1
        for (int line = 0; line < lines; ++line) {
            barrier_wait(stages.full + ring.stage, ring.parity);
            const u32 own_a = a + ring.stage * (D::kBytesA / 16), own_b = b + ring.stage * (D::kBytesB / 16);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kLaneSteps; ++k)
                Multiply<kColumns>::of(Mma{}, sums, own_a + 2 * k, own_b + 2 * k, line + k > 0);
            wgmma_commit();
            wgmma_wait<1>();
            if (line > 0) release(last);
            last = ring.stage;
            ring.step();
        }
        wgmma_wait<0>();
        if (lines > 0) release(last);
    }
    // What a part's sums are multiplied by.
    struct SumScales {
        const float* at;   // all of them: those of rows of a, then of b
        float both[2][2];  // where b has blocks: products, of two blocks or of the one of each half, by the lane's rows
    };
    // Those of sum number `sum` of a tile.
    __device__ SumScales scales_of(const Batches& batches, int sum, bool first) const {
        SumScales s = {};
        if constexpr (D::kScaled) {
            if (first && sum % kBatch == 0) batches.wait();
            s.at = stages.scales + batches.place() * D::kScales + sum % kBatch * D::kScalesOfSum;
            // Towards 0: a product that is too large stays finite, and a sum of 0 stays 0.
#pragma unroll
            for (int i = 0; i < 4 && D::kBlocks; ++i)
                s.both[i / 2][i % 2] = __fmul_rz(s.at[row + i % 2 * 8], s.at[D::kScalesA + i / 2]);
        }
        return s;
    }
    // They are not read any more.
    __device__ void leave(Batches& batches, int sum, bool last) const {
        if (D::kScaled && (sum % kBatch == kBatch - 1 || last)) batches.leave();
    }
    // Add a part's sums to those in float32.
    __device__ void promote(const Part& part, float (&all)[kColumns / 2], const SumScales& s, int half) const {
        float* const sums = all + half * kPart / 2;
        if constexpr (!D::kScaled) {
#pragma unroll
            for (int i = 0; i < kPart / 2; ++i) sums[i] += static_cast<float>(part[i]);
        } else if constexpr (D::kBlocks) {
#pragma unroll
            for (int i = 0; i < kPart / 2; ++i) {
                const int r = i / 2 % 2;
                const float scale = D::kBlocks == 1 || i / 4 < edge ? s.both[half][r] : s.both[1][r];
                sums[i] = __fmaf_rn(static_cast<float>(part[i]), scale, sums[i]);
            }
        } else {
            const float of_rows[2] = {s.at[row], s.at[row + 8]};
#pragma unroll
            for (int j = 0; j < kPart / 8; ++j) {
                const float2 b = *reinterpret_cast<const float2*>(s.at + D::kScalesA + 8 * j + lane % 4 * 2);
#pragma unroll
                for (int i = 4 * j; i < 4 * j + 4; ++i) {
                    const float sum = static_cast<float>(part[i]) * of_rows[i / 2 % 2];  // which both scales may not have
                    sums[i] = __fmaf_rn(sum, i % 2 ? b.y : b.x, sums[i]);
                }
            }
        }
    }
    __device__ void multiply(Part& part, int stage, int half, int sub, bool adds) const {
        const u32 own_a = a + stage * (D::kBytesA / 16);
        const u32 own_b = b + stage * (D::kBytesB / 16) + half * kPart * (kLine / 16);
        wgmma_fence();
        if constexpr (kSubs > 1) {
            Multiply<kPart>::of(Mma{}, part, own_a + 2 * sub, own_b + 2 * sub, adds);
        } else {
#pragma unroll
            for (int k = 0; k < kLaneSteps; ++k)
                Multiply<kPart>::of(Mma{}, part, own_a + 2 * k, own_b + 2 * k, adds || k > 0);
        }
        wgmma_commit();
    }
    __device__ void run_promoted(float (&sums)[kColumns / 2], Ring<D::kStages>& ring, Batches& batches,
                                 int lines) const {
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) sums[i] = 0.0f;
        if constexpr (D::kDouble) {  // one line is multiplied while the sums of the one before are promoted
            Part part[2];
            const auto begin = [&](Part& to, const Ring<D::kStages>& at) {
                barrier_wait(stages.full + at.stage, at.parity);
                multiply(to, at.stage, 0, 0, false);
            };
            const auto step = [&](Part& now, Part& next, bool more, int line) {
                const int stage = ring.stage;
                ring.step();
                if (more) begin(next, ring);
                const SumScales s = scales_of(batches, line, true);
                if (more) wgmma_wait<1>();
                else wgmma_wait<0>();
                release(stage);
                promote(now, sums, s, 0);
                leave(batches, line, !more);
            };
            begin(part[0], ring);
            int line = 0;
#pragma unroll 1
            for (; line + 2 < lines; line += 2) {
                step(part[0], part[1], true, line);
                step(part[1], part[0], true, line + 1);
            }
            if (line + 1 < lines) {
                step(part[0], part[1], true, line);
                step(part[1], part[0], false, line + 1);
            } else {
                step(part[0], part[1], false, line);
            }
        } else {
#pragma unroll 1
            for (int line = 0; line < lines; line += D::kRun) {
                const Ring<D::kStages> first = ring;
#pragma unroll
                for (int sub = 0; sub < kSubs; ++sub) {
#pragma unroll
                    for (int half = 0; half < D::kHalves; ++half) {
                        Part part;
                        if constexpr (D::kHalves * kSubs > 1) ring = first;
#pragma unroll
                        for (int i = 0; i < D::kRun; ++i) {
                            if (i > 0 && line + i == lines) break;
                            if (half == 0 && sub == 0) barrier_wait(stages.full + ring.stage, ring.parity);
                            multiply(part, ring.stage, half, sub, i > 0);
                            ring.step();
                        }
                        const SumScales s = scales_of(batches, line * kSubs + sub, half == 0);
                        wgmma_wait<0>();
                        if (half == D::kHalves - 1 && sub == kSubs - 1) {
                            Ring<D::kStages> own = first;
#pragma unroll
                            for (int i = 0; i < D::kRun; ++i) {
                                if (i > 0 && line + i == lines) break;
                                release(own.stage);
                                own.step();
                            }
                        }
                        promote(part, sums, s, half);
                        const bool last = sub == kSubs - 1 && line + D::kRun >= lines;
                        if (half == D::kHalves - 1) leave(batches, line * kSubs + sub, last);
                    }
                }
            }
        }
    }
};

// The sums of a tile that the blocks of a cluster have parts of: each adds up those of its kOwn columns, in the order
// of the blocks. What is in `shared` is not read any more.
template <class Mma, class Tile>
using SumOf = typename DenseTile<Mma, Tile>::Sum;

template <class Mma, class Tile>
__device__ void add_up(const SumOf<Mma, Tile> (&sums)[Tile::columns / 2],
                       SumOf<Mma, Tile> (&own)[Tile::columns / Tile::split / 2], u8* shared, int rank) {
    using D = DenseTile<Mma, Tile>;
    using Sum = typename D::Sum;
    constexpr int kGroups = Tile::columns / 8, kEach = kGroups / Tile::split, kThreads = 32 * kMathWarps;
    static_assert(kGroups % Tile::split == 0 && kThreads * kGroups * 16 <= D::kRing, "columns for each, and room");
    named_barrier(1, kThreads);
    const auto bits = [](Sum v) {
        if constexpr (is_same<Sum, float>) return bits_of(v);
        else return static_cast<u32>(v);
    };
    const auto value = [](u32 v) {
        if constexpr (is_same<Sum, float>) return float_of(v);
        else return static_cast<int>(v);
    };
    uint4* const to = reinterpret_cast<uint4*>(shared) + threadIdx.x;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
        const Sum* const s = sums + 4 * j;
        to[j * kThreads] = make_uint4(bits(s[0]), bits(s[1]), bits(s[2]), bits(s[3]));
    }
    cluster_sync();
    const OfBlocks all(to + rank * kEach * kThreads);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        uint4 parts[Tile::split];
#pragma unroll
        for (int r = 0; r < Tile::split; ++r) parts[r] = all.load(r, j * kThreads * 16);
        Sum total[4] = {};
#pragma unroll
        for (int r = 0; r < Tile::split; ++r) {
            total[0] += value(parts[r].x); total[1] += value(parts[r].y);
            total[2] += value(parts[r].z); total[3] += value(parts[r].w);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) own[4 * j + i] = total[i];
    }
}

// `a_tiles` and `b_tiles` of the two sides; tiles of the weights begin `step` rows behind each other, and boxes have
// `a_box` and `b_box` rows. K in bytes is `lines` lines, the last of which may have fewer.
template <class Mma, class Tile>
__global__ void CUQUANT_CLUSTER(Tile::share * Tile::split) __launch_bounds__(32 * (kMathWarps + 4), 1)
matmul_dense(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
             const __grid_constant__ Coded a, const __grid_constant__ Coded b, const __grid_constant__ Groups groups,
             const __grid_constant__ CodedResults results,
             i64 N, i64 K, int lines, int a_tiles, int b_tiles, int step, int a_box, int b_box) {
    using D = DenseTile<Mma, Tile>;
    constexpr int kStages = D::kStages;
    let_next_start();
    extern __shared__ __align__(1024) u8 shared[];
    const Stages<Mma, Tile> stages(shared);
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
    if (threadIdx.x == 32 * kMathWarps) {
        prefetch_map(&a_map);
        prefetch_map(&b_map);
        stages.init();
        barrier_fence();
    }
    __syncthreads();
    if constexpr (D::kShare > 1) cluster_sync();
    wait_for_earlier();

    const int rank = blockIdx.x % D::kCluster, cluster = blockIdx.x / D::kCluster, clusters = gridDim.x / D::kCluster;
    const TileOrder order{(a_tiles + D::kShare - 1) / D::kShare, b_tiles};
    const TileWalk<D> walk{order, groups, N, step, cluster, clusters, D::kShare > 1 ? rank : 0};
    const int first_line = lines * (D::kSplit > 1 ? rank : 0) / D::kSplit;
    const int own_lines = lines * (D::kSplit > 1 ? rank + 1 : 1) / D::kSplit - first_line;
    Ring<kStages> ring;
    if (warp >= kMathWarps) {
        registers_down<D::kFew>();
        ring.parity = 1;
        if (warp == kMathWarps) {
            walk.each([&](const Place& place, int) {
                const int a_row = static_cast<int>(D::a_of(place).first);
                const int b_row = static_cast<int>(D::b_of(place).first) + (D::kShare > 1 ? rank * b_box : 0);
#pragma unroll 1
                for (int line = first_line; line < first_line + own_lines; ++line) {
                    barrier_wait(stages.empty + ring.stage, ring.parity);
                    if (lane == 0) {
                        u64* const ready = stages.full + ring.stage;
                        u8* const to_b = stages.b + ring.stage * D::kBytesB;
                        barrier_expect(ready, (a_box + b_box * D::kShare) * kLine);
                        copy_box(stages.a + ring.stage * D::kBytesA, &a_map, ready, line * kLine, a_row);
                        const int k = line * kLine;
                        u8* const own_b = to_b + (D::kShare > 1 ? rank * b_box * kLine : 0);
                        if constexpr (D::kShare > 1) copy_box_to_both(own_b, &b_map, ready, k, b_row);
                        else copy_box(own_b, &b_map, ready, k, b_row);
                    }
                    __syncwarp();
                    ring.step();
                }
            });
        } else {
            const int thread = threadIdx.x - 32 * (kMathWarps + 1);
            Batches batches;
            walk.each([&](const Place& place, int number) {
                if constexpr (D::kScaled) {
                    const SideRows a_rows(a, D::a_of(place)), b_rows(b, D::b_of(place));
                    StageScales<Mma, Tile> own(a_rows, b_rows, first_line, thread);
#pragma unroll 1
                    for (int line = first_line; line < first_line + own_lines; line += D::kTogether) {
                        own.load(line);  // long before there is room
                        batches.wait_free();
                        own.store(stages.scales + batches.place() * D::kScales);
                        batches.give();
                    }
                }
                const SideRows a_rows(a, D::a_of(place)), b_rows(b, D::b_of(place));
                const EndShare<Mma, Tile> end(a_rows, b_rows, place, static_cast<int>(K), results.epilogue, thread);
                barrier_wait(stages.end_empty, number & 1 ^ 1);
                end.store(Ends<Mma, Tile>(stages.ends));
                barrier_arrive(stages.end_full);
            });
        }
    } else {
        registers_up<D::kMany>();
        const int row = warp * 16;
        const Ends<Mma, Tile> ends(stages.ends);
        const RemoteBarriers others_empty(stages.empty, D::kShare > 1 ? rank ^ 1 : rank);
        const u32 own_a = swizzled(stages.a) + warp / 4 * (64 * kLine / 16);
        Multiplier<Mma, Tile> multiplier{stages, own_a, swizzled(stages.b), others_empty, row + lane / 4, lane, 0};
        using Results = DenseResults<Mma, Tile>;
        const bool corrected = a.sums || b.sums;
        u8* const area = shared + D::kAtAreas + warp * D::kArea;
        Batches batches;
        walk.each([&](const Place& place, int number) {
            const u32 parity = number & 1;
            typename D::Sum sums[D::kColumns / 2];
            if constexpr (D::kPromote) {
                const SideRows b_rows(b, D::b_of(place));
                if constexpr (D::kBlocks == 2) multiplier.edge = StageScales<Mma, Tile>::second_block(b_rows) / 8;
                multiplier.run_promoted(sums, ring, batches, own_lines);
            } else {
                multiplier.run(sums, ring, own_lines);
            }
            if constexpr (D::kSplit > 1) {
                typename D::Sum own[D::kOwn / 2];
                add_up<Mma, Tile>(sums, own, shared, rank);
                barrier_wait(stages.end_full, parity);
                Results(own, ends, results, place, area, row, rank * D::kOwn, anew(lane)).store(N, corrected);
                cluster_sync();  // others may still read this block's sums
            } else {
                barrier_wait(stages.end_full, parity);
                const int here = anew(lane);  // else what follows from it takes registers while sums need them
                Results(sums, ends, results, place, area, row, 0, here).store(N, corrected);
            }
            barrier_arrive(stages.end_empty);
        });
    }
    if constexpr (D::kShare > 1) {  // the other block still gives rows, and barriers their arrivals
        cluster_arrive();
        cluster_wait();
    }
}

}  // namespace cuquant
