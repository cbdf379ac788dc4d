// x [M, K] times a prepacked weight [N, K], on Hopper's tensor cores. A warpgroup takes 64 rows of the
// weight: each warp decodes the codes of its strip in registers to the A operand; x is the B operand. Both
// come to shared memory by the copy engine, which a warp of its own starts. The warpgroups of a block share
// rows or K; blocks take tiles, and the last ones share K: see Schedule; or the two blocks of a cluster share
// that of one tile. Of a gated unit the two
// warpgroups of a block have the same rows of two weights. With experts x is sorted by expert, and a tile is
// a segment of its rows times 64 rows, or more, of that expert's weight. T is what x has and codes become: floats of 16
// bits, or bytes where x is codes too, whose columns then lie in another order: see layout/byte_fragments.cuh.
#include "layout/byte_fragments.cuh"
#include "matmul/hopper_codes.cuh"
#include "matmul/hopper_drain.cuh"
#include "matmul/hopper_factor.cuh"
#include "matmul/hopper_fold.cuh"
#include "matmul/hopper_prefetch.cuh"
#include "matmul/hopper_schedule.cuh"
#include "device/cluster.cuh"
#include "device/overlap.cuh"
#include "matmul/segment.cuh"

namespace cuquant {

constexpr int kMostWarps = 16;  // that multiply

enum Kind { kOne = 0, kTwo = 1, kExperts = 2 };  // of weights: one, the two of a gated unit, or experts'

// The rows of x that each expert has; null but for kExperts.
struct Routed {
    const i64* order;
    const Segment* segments;
    const i64* count;  // of segments
};

// What a warp needs again after the products of a tile.
struct Kept { int tile, left, token, row, done; };

// Tile, which hopper.py prints:
//   tokens         rows of x of a block
//   row_groups     warpgroups of a block that have different rows of the weight
//   depth_groups   and that take turns along K
//   stages, span   parts of x and of the weight in shared memory, and units of each
//   buffers        operands of a warpgroup, 2 where one is decoded while the other is multiplied
//   slices         those of 16 columns of each. Products that read registers keep a warp waiting for the ones before,
//                  so that with few slices it has less to wait for; but all four warps meet at each
//   group_units    units of a scale group, 0 where a row is one group
//   fine           groups in a unit, else 1
//   lie, kind      see Lie, and Kind
//   wide           see PairDecoder
//   shared_x       the two blocks of a cluster have the same rows of x, of which each brings half to both
//   streamed       blocks share the units of the last tiles: see Schedule, for `whole` too
//   once           no block has two tiles, so that sums that meet take the place of x
//   split          blocks that share K of a tile: 2 are those of a cluster
// and where x is codes what Pace says.
// `y` is the map of the output where whole tiles of it may be stored by the copy engine. `tile_rows` of the weight,
// whole strips, are a tile's, and `tile_tokens` of x: there may be room for more, which would take the copy engine long
// where x has no more. With experts and codes `whole` is how many experts probably have rows, of the first ones, and
// x's map has boxes of 16. `handed` is memory for a Handover, and `ticket` its ticket; `of_tokens` are scales of codes.
template <class Format, class T, class Tile>
__global__ void CUQUANT_CLUSTER(Tile::shared_x ? 2 : Tile::split)
__launch_bounds__(128 * (Tile::row_groups * Tile::depth_groups + 1), 1)
matmul_hopper(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap y,
              const __grid_constant__ Prepacked weights, const __grid_constant__ Prepacked second,
              const __grid_constant__ Epilogue epilogue, const __grid_constant__ Routed routed, i64 M, i64 N,
              int token_tiles, int row_tiles, int tile_tokens, int tile_rows, int whole, u8* handed, u64 ticket,
              const __grid_constant__ TokenScales of_tokens) {
    constexpr int kTokens = Tile::tokens, kRowGroups = Tile::row_groups, kDepthGroups = Tile::depth_groups;
    constexpr int kStages = Tile::stages, kSpan = Tile::span, kBuffers = Tile::buffers, kSlices = Tile::slices;
    constexpr int kGroupUnits = Tile::group_units, kFine = Tile::fine, kLie = Tile::lie, kSplit = Tile::split;
    constexpr bool kSharedX = Tile::shared_x, kStreamed = Tile::streamed, kOnce = Tile::once;
    constexpr bool kSingle = Tile::kind == kOne, kPair = Tile::kind == kTwo, kRouted = Tile::kind == kExperts;
    constexpr int kBits = Format::Packing::bits, kGroups = kRowGroups * kDepthGroups, kThreads = 128 * kGroups;
    constexpr bool kCodes = Operand<T>::bytes == 1;
    constexpr int kSegment = Pace<Tile, kCodes>::segment, kFineX = Pace<Tile, kCodes>::x_fine;
    constexpr int kBoxBytes = kTokens * kUnit * Operand<T>::bytes, kUnitBytes = 128 * kBits;
    constexpr int kStrips = 4 * kRowGroups, kCodeBytes = kStrips * kUnitBytes;
    static_assert(kSpan <= 4 && 4 % kSlices == 0, "each of four warps copies the x of one unit");
    static_assert(!kPair || kRowGroups == 2, "a weight for each warpgroup of rows");
    // Each slot of a stage belongs to one group of warps, which so waits for all phases of its barrier: that of another
    // one might be two behind, and would not be seen.
    static_assert(kStages % kDepthGroups == 0 && kStages >= 2 * kDepthGroups,
                  "a group of warps releases a stage when it has the next one");
    constexpr bool kAlone = kDepthGroups == 1;  // sums need no other part of K
    static_assert(!kSharedX || (kAlone && kSingle && kSpan == 1), "two blocks with the same rows of x");
    static_assert(!kRouted || !(kStreamed || kSplit > 1), "how many tiles there are is not known before");
    static_assert(!kOnce || (!kSharedX && !kStreamed && kDepthGroups * kSplit > 1), "sums that meet before others do");
    static_assert(kSplit == 1 || kOnce, "sums have a place in the other block");
    using Drained = Drain<typename Operand<T>::Result, Tile, Tile::wide && kTokens == 256>;
    using Parts = typename Drained::Parts;
    static_assert(!kOnce || Parts::kBytes + Drained::kAll <= kStages * kSpan * (kBoxBytes + kCodeBytes),
                  "sums have the place of x");
    constexpr int kPeers = kSharedX ? 2 : 1, kCluster = kPeers * kSplit;
    using Between = Handover<Tile>;
    using Codec = typename Format::Codec;
    using Decode = Choice<kCodes, ByteDecoder<Codec, T>, Decoder<Codec, T, kBits, Tile::wide>>;
    // Results go by the copy engine, while the next tile is multiplied: of the most tokens, from boxes that begin on
    // 1024 bytes.
    constexpr bool kSends = kAlone && kSplit == 1 && kSingle && kTokens > 128 && Decode::table_bytes % 1024 == 0;
    using Own = Group<Format, kLie>;
    constexpr bool kWhole = Own::blocks && Own::Parts::per_block % kFine == 0;  // a unit lies in one block of ggml's
    // Where sums are fewer than operands, scales meet the sums of a unit; else they meet operands.
    constexpr bool kLate = kCodes || (kTokens <= 32 && kFine == 1 && !Own::Parts::minimums && kBuffers > 1);
    // Parts of a unit of codes whose scales differ, and its operands: of groups of 16 columns each has one half alone.
    constexpr bool kFolded = Pace<Tile, kCodes>::folded;
    constexpr int kFineOwn = kFolded ? 1 : kFine;  // groups whose scales meet sums
    constexpr int kPieces = kFineOwn > kFineX ? kFineOwn : kFineX > 1 ? kFineX : 1, kOperands = kPieces > 2 ? 4 : 2;
    constexpr bool kGrouped = kFine > 1 || kGroupUnits > 0;  // the weight's scales change along K
    static_assert(!kCodes || (kBits == 4 && !Own::zeros && !Own::Parts::minimums), "weights that become bytes");
    static_assert(!kCodes || (!kPair && !kSharedX && kBuffers == 2), "how products of codes are divided");
    static_assert(!kCodes || kPieces == 1 || kSegment == 1, "scales that differ in a unit");
    constexpr int kScaleRoom = kTokens + (kRouted ? 4 : 0), kScaleBytes = kFineX * kScaleRoom * 4;  // of a unit
    // Codes come to registers while the unit before is multiplied, and one more stage is held.
    constexpr bool kEarly = !kLate && kBits <= 4 && kStages >= 3 * kDepthGroups;
    constexpr bool kAhead = kFolded && kStages >= 3 * kDepthGroups;
    constexpr bool kHalves = kFolded && kFineX == 0;  // where there are registers for it
    let_next_start();
    extern __shared__ __align__(1024) u8 shared[];
    u8* stages = shared;
    u8* coded = stages + kStages * kSpan * kBoxBytes;
    u8* const unit_scales = coded + kStages * kSpan * kCodeBytes;  // x's
    u8* tables = unit_scales + kStages * kSpan * kScaleBytes;
    u8* const beside = tables + Decode::table_bytes;
    u8* area = kOnce ? stages : beside;
    float* drain = reinterpret_cast<float*>(area + (kOnce ? Parts::kBytes : 0));
    float* strip_units = reinterpret_cast<float*>(beside + (kOnce ? 0 : Drained::kBytes));  // of each strip: see Factor
    Kept* all_kept = reinterpret_cast<Kept*>(strip_units + kMostWarps);
    u64* full = reinterpret_cast<u64*>(all_kept + kMostWarps);
    u64 *empty = full + kStages, *received = empty + kStages;
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);  // the compiler sees that all lanes have one
    if (threadIdx.x == kThreads) prefetch_map(&x);
    if (kSends && threadIdx.x == 0) prefetch_map(&y);
    if (lane == 0) {
#pragma unroll
        for (int s = warp; s < kStages; s += 4 * kGroups + 4) {
            barrier_init(full + s, 1);
            barrier_init(empty + s, 4 * kRowGroups * kPeers);
        }
        if (kSplit > 1 && warp == 0) {
            barrier_init(received, 1);
            barrier_expect(received, Parts::kReceivedBytes);
        }
        barrier_fence();
    }
    __syncthreads();
    if constexpr (kSharedX) { cluster_arrive(); cluster_wait(); }

    const int rank = blockIdx.x % kCluster;  // in a register where it is needed, which cluster_rank would always be
    if constexpr (kCodes && kRouted)
        if (warp >= 4 * kGroups && elect_one())
            prefetch_first<4>(weights, whole, row_tiles, tile_rows, kRowGroups, warp - 4 * kGroups, kUnitBytes);
    if constexpr (kRouted) {
        wait_for_earlier();
        token_tiles = static_cast<int>(*routed.count);
    }
    row_tiles /= kPeers;  // which take neighbours
    const int tiles = token_tiles * row_tiles;
    using Share = Schedule<kSpan * kDepthGroups, kStreamed>;
    const auto share = [&] {
        return Share(kStreamed ? whole / kPeers : tiles, tiles, weights.units, blockIdx.x / kCluster,
                     gridDim.x / kCluster, rank % kSplit, kSplit);
    };
    constexpr int kTogether = 4;  // token tiles that follow each other, so that their x stays in L2
    int token, row, end = 0, expert = 0;  // end: behind the rows of x of this tile's expert
    const auto locate = [&](int tile) {
        const int set = tile / (kTogether * row_tiles), in_set = tile - set * kTogether * row_tiles;
        const int wide = min(kTogether, token_tiles - set * kTogether);
        const int own = set * kTogether + in_set % wide;
        token = own * tile_tokens;
        if constexpr (kRouted) {
            const Segment segment = routed.segments[own];
            token = static_cast<int>(segment.first); expert = static_cast<int>(segment.expert);
            end = token + static_cast<int>(segment.count);
        }
        row = (in_set / wide * kPeers + rank % kPeers) * tile_rows;
    };

    const auto group_of = [](u32 unit) {
        return kFine > 1 ? unit * kFine : kGroupUnits ? unit / (kGroupUnits ? kGroupUnits : 1) : 0;
    };

    // A block has the registers that it was launched with; the warps that copy leave theirs to the others.
    constexpr int kLaunched = 65536 / (kThreads + 128) / 8 * 8 * (kGroups + 1);  // of a thread of each warpgroup
    constexpr int kFew = kGroups <= 2 ? 40 : 32, kMany = (kLaunched - kFew) / kGroups / 8 * 8;
    static_assert(kGroups >= 2 && kGroups <= 4,
                  "a multiprocessor has registers for four warpgroups and one that copies");
    if (warp >= 4 * kGroups) {
        registers_down<kFew>();
        // Each of the four has its strip of every 64 rows, and its part of x.
        const int own = warp - 4 * kGroups, strips = kPair ? kStrips : tile_rows / kStrip;
        const auto has = [&](int r) { return kPair || 4 * r + own < strips; };
        if (elect_one()) {
            int stage = 0; u32 parity = 1;
            constexpr bool kBoxes = kCodes && kRouted;  // of kBoxRows rows of x, as many as the expert has
            constexpr int kBoxRows = 16;
            int x_bytes = tile_tokens * kUnit * Operand<T>::bytes, boxes = 1;
            const int scale_bytes = kFineX ? (tile_tokens + 3 + kScaleRoom - kTokens) / 4 * 16 : 0;  // of a group
            bool begun = kRouted;
            Share schedule = share();
            while (schedule.next()) {
                locate(schedule.tile);
                const int first_unit = schedule.first, units = schedule.stop - first_unit;
                if (kRouted && expert < 0) continue;
                if constexpr (kBoxes) {
                    boxes = (end - token + kBoxRows - 1) / kBoxRows;
                    x_bytes = boxes * kBoxRows * kUnit;
                }
                // Beyond the last strip any will do.
                const auto strip_of = [&](int row, int r) {
                    const i64 before = kRouted ? static_cast<i64>(expert) * weights.strips : 0;
                    return min(row / kStrip + own + (kPair ? 0 : 4 * r), weights.strips - 1) + before;
                };
                const auto weights_of = [&](int r) -> const Prepacked& { return kPair && r ? second : weights; };
                // Groups come to the L2 cache a while before they are loaded; the first ones would keep codes waiting.
                constexpr int kBefore = 16;  // units
                const auto prefetch = [&](int begin) {
                    const int end = min(begin + kBefore, units);
                    if (begin >= end) return;
                    const i64 first = group_of(first_unit + begin);
                    const i64 behind = static_cast<i64>(group_of(first_unit + end - 1)) + kFine;
                    const i64 last = min(behind, weights.groups) - 1;
#pragma unroll
                    for (int r = 0; r < kRowGroups; ++r)
                        if (has(r)) prefetch_groups<Format, kLie>(weights_of(r), strip_of(anew(row), r), first, last);
                };
                const u8* from[kRowGroups];
#pragma unroll
                for (int r = 0; r < kRowGroups; ++r)
                    from[r] = reinterpret_cast<const u8*>(weights_of(r).codes) +
                              (strip_of(row, r) * weights.units + first_unit) * kUnitBytes;
                if (!begun) {  // to L2 while the kernels before this one end
                    constexpr int kSoon = (4096 / (kRowGroups * kUnitBytes) + kSpan - 1) / kSpan * kSpan;  // units
#pragma unroll
                    for (int r = 0; r < kRowGroups; ++r)
                        if (has(r)) prefetch_run(from[r], min(units, kSoon) * kUnitBytes);
                    wait_for_earlier();
                    begun = true;
                }
#pragma unroll 1
                for (int i = 0; i < units; i += kSpan) {
                    const int count = kSpan > 1 ? min(kSpan, units - i) : 1;
                    u64* ready = full + stage;
                    barrier_wait(empty + stage, parity);
                    if (own == 0) barrier_expect(ready, count * (x_bytes + strips * kUnitBytes + kFineX * scale_bytes));
                    if constexpr (kSharedX) {
                        u8* const to = stages + stage * kBoxBytes;
                        const int column = (first_unit + i) * kUnit;
                        const int first_token = token + rank * tile_tokens / 2;
                        if (own == 0) copy_box_to_both(to + rank * x_bytes / 2, &x, ready, column, first_token);
                    } else if constexpr (kBoxes) {
                        for (int part = own; part < count * boxes; part += 4) {
                            const int of_stage = part / boxes, box = part - of_stage * boxes;
                            u8* const to = stages + (stage * kSpan + of_stage) * kBoxBytes + box * kBoxRows * kUnit;
                            copy_box(to, &x, ready, (first_unit + i + of_stage) * kUnit, token + box * kBoxRows);
                        }
                    } else if (own < count) {
                        u8* const to = stages + (stage * kSpan + own) * kBoxBytes;
                        copy_box(to, &x, ready, (first_unit + i + own) * kUnit, token);
                    }
                    if constexpr (kFineX > 0) {
                        const int unit = first_unit + i + own;
                        u8* const to = unit_scales + (stage * kSpan + own) * kScaleBytes;
#pragma unroll
                        for (int f = 0; f < kFineX; ++f) {
                            if (own >= count) break;
                            const int group = min(of_tokens.units ? unit / of_tokens.units : unit * kFineX + f,
                                                  of_tokens.groups - 1);
                            copy_run(to + f * kScaleRoom * 4, of_tokens.scale + group * of_tokens.pitch + token / 4 * 4,
                                     scale_bytes, ready);
                        }
                    }
#pragma unroll
                    for (int r = 0; r < kRowGroups; ++r) {
                        u8* const to = coded + (stage * kStrips + 4 * r + own) * kSpan * kUnitBytes;
                        if (has(r)) copy_run(to, from[r], count * kUnitBytes, ready);
                        from[r] += kSpan * kUnitBytes;
                    }
                    if (++stage == kStages) { stage = 0; parity ^= 1; }
                    if (i == 0) prefetch(0);
                    if (i % kBefore == 0) prefetch(i + kBefore);
                }
            }
        }
        __syncwarp();
        return;
    }
    registers_up<kMany>();
    if constexpr (Decode::table_bytes > 0) {  // while the first copies are under way; no kernel writes levels
        typename Decode::template Filling<kThreads> filling;
        filling.load(weights.values, threadIdx.x, false);
        filling.store(tables, threadIdx.x);
        named_barrier(1 + kGroups, kThreads);
    }
    const int group = warp / 4, row_group = group % kRowGroups, depth = kAlone ? 0 : group / kRowGroups;
    const int g = lane / 4, t = lane % 4;
    const u32 table = Decode::lane_table(lane);
    const u32 own_codes = shared_address(coded) + (row_group * 4 + warp % 4) * kSpan * kUnitBytes;
    const u32 own_x = swizzled(stages);
    int done = 0;  // stages of earlier tiles
    const Choice<kSharedX, RemoteBarriers, Nothing> others_empty(empty, rank ^ 1);
    Prepacked moved;
    if constexpr (kPair) {
        moved = weights;
        if (row_group) moved = second;
    }
    const Prepacked& own_weights = kSingle ? weights : moved;
    Kept& kept = all_kept[warp];
    u32* const in_tile = reinterpret_cast<u32*>(strip_units) + warp;  // of Fold: the first unit, and kMet
    Share schedule = share();
    const auto come_back = [&] {
        schedule.tile = kept.tile; schedule.left = kept.left; done = kept.done;
        __syncwarp();  // before lane 0 overwrites them
    };
    for (; schedule.next(); come_back()) {
        locate(schedule.tile);
        const bool lost = kRouted && expert < 0;
        const int first_unit = schedule.first, stop = lost ? first_unit : schedule.stop;
        int stage = (done + depth) % kStages, last = -1;  // `last`: one that is not released yet
        u32 parity = (done + depth) / kStages & 1;
        // What comes after the products waits in shared memory, and leaves them its registers.
        if (lane == 0) kept = {schedule.tile, schedule.left, token, row,
                               done + (stop - first_unit + kSpan - 1) / kSpan};
        if (kFolded && lane == 0) *in_tile = first_unit;
        __syncwarp();
        if constexpr (kRouted) moved = of_expert<Format, kLie>(weights, lost ? 0 : expert);
        const auto own_strip = [&] {
            return min(row / kStrip + (kPair ? 0 : row_group * 4) + warp % 4, weights.strips - 1);
        };
        const i64 strip = own_strip();
        const i64 before = kRouted && !lost ? static_cast<i64>(expert) * weights.strips : 0;  // strips of other experts
        typename Own::Strip lies;
        lies.set(own_weights, strip, before, g);
        keep(lies.scale);
        Own groups[2][kFine];
        const auto fetch = [&](int d, int i) {
            const u32 unit = min(i, weights.units - 1);
            const u32 first = group_of(unit);
#pragma unroll
            for (int f = 0; f < kFine; ++f) {  // beyond the last group x is 0
                const u32 last = static_cast<u32>(weights.groups) - 1;
                const u32 group = kWhole || kFine == 1 ? first + f : min(first + f, last);
                groups[d][f].load(lies, group, kWhole && f ? &groups[d][0] : nullptr);
            }
        };
        // Of this warpgroup's units, those of a stage and then of its next one: the one `n` behind unit 0 of a stage.
        const auto behind = [](int n) { return n / kSpan * kDepthGroups * kSpan + n % kSpan; };
        int i = first_unit + depth * kSpan;
        Choice<kFolded, Fold<Format, Tile>, NotFolded> fold;
        const auto fetch_four = [&](int n) {  // units from unit n on
            if constexpr (kFolded) fold.fetch(lies, own_weights, i + behind(n + anew(lane) % 4));
        };
        if constexpr (kFolded) {
            fetch_four(0);
        } else {
            fetch(0, i);
            fetch(1, i + behind(1));
        }
        // Scales may have been overwritten since the last product: what brings them into range is found each time.
        if constexpr (!kLate) {
            const int last = min(static_cast<int>(group_of(stop - 1)) + kFine, static_cast<int>(weights.groups)) - 1;
            const float found = Factor<Format, T, kLie>::unit_of(own_weights, lies, group_of(first_unit), last, lane);
            if (lane == 0) strip_units[warp] = found;
            __syncwarp();
        }
        if constexpr (!kRouted) wait_for_earlier();
        // In shared memory: with several groups in a unit and minimums there is no register for it.
        const auto own_unit = [&] { return kLate ? 1.0f : *static_cast<volatile float*>(strip_units + warp); };

        float sum[kTokens / 2];
#pragma unroll
        for (int j = 0; j < kTokens / 2; ++j)
            sum[j] = lost && !(kCodes && expert == kNoExpert) ? float_of(0x7FC00000u) : 0.0f;
        constexpr int kSteps = 4 / kSlices;  // of a unit
        // Of two, products read one while the other is made.
        u32 a[kBuffers][kCodes ? kOperands : kLate ? 4 : kSlices][4];
        constexpr int kParts = kPieces > 1 && kTokens <= 64 ? 2 : 1;
        typename Operand<T>::Sum part[kCodes ? kParts : 1][kTokens / 2];  // of codes: sums of the tensor cores
        const auto leave = [&](int stage) {
            if (lane != 0) return;
            barrier_arrive(empty + stage);
            if constexpr (kSharedX) others_empty.arrive(stage);
        };
        const auto release = [&] {
            if constexpr (kFineX > 0) __syncwarp();  // all lanes have read x's scales
            if (last >= 0) leave(last);
        };
        Words<kBits> words;
        const auto load = [&](int of_stage) {
            if (of_stage == 0) barrier_wait(full + stage, parity);
            words.load_shared(own_codes + stage * (kSpan * kCodeBytes) + of_stage * kUnitBytes, lane);
        };
        Factor<Format, T, kLie> scaled;
        const auto decode_slice = [&](int s, const Own (&from)[kFine], u32 (&to)[4]) {
            const Own& own = from[s * kFine / 4];
            if constexpr (!kLate) {
                if (s * kFine % 4 == 0) scaled.set(own, own_unit());
            }
            const u32 offset[2] = {own.template offset<T>(0), own.template offset<T>(1)};
            if constexpr (!kCodes) {
                if (s == 0) Decode::template decode<0, Own::zeros>(words.w, tables, table, offset, to);
                if (s == 1) Decode::template decode<1, Own::zeros>(words.w, tables, table, offset, to);
                if (s == 2) Decode::template decode<2, Own::zeros>(words.w, tables, table, offset, to);
                if (s == 3) Decode::template decode<3, Own::zeros>(words.w, tables, table, offset, to);
            }
            if constexpr (!kLate) scaled.apply(to);
        };
        const auto decode_step = [&](int step, const Own (&from)[kFine], u32 (*to)[4]) {
#pragma unroll
            for (int s = 0; s < kSlices; ++s) decode_slice(step * kSlices + s, from, to[s]);
        };
        // What is known of unit n before its codes are there.
        const auto turn_to = [&](int n) {
            if constexpr (kFolded) {
                if (n % 4 == 0) {
                    if (fold.begin() && anew(lane) == 0) *in_tile |= fold.kMet;
                    fetch_four(n + 4);
                }
                fold.choose(n % 4);
            }
        };
        const auto decode_codes = [&](int half, u32 (&to)[kCodes ? kOperands : kLate ? 4 : kSlices][4]) {
            if constexpr (kFolded) fold.template decode<kOperands>(words.w, half, to);
            else if constexpr (kCodes) Decode::template decode<kOperands>(words.w, half, to);
        };
        const auto place_of_x = [&](int of_stage) { return own_x + (stage * kSpan + of_stage) * (kBoxBytes / 16); };
        const auto step_stage = [&] {
            stage += kDepthGroups;
            if (stage >= kStages) { stage -= kStages; parity ^= 1; }
        };
        if constexpr (kCodes) {
            if constexpr (kSegment == 0) {
#pragma unroll
                for (int j = 0; j < kTokens / 2; ++j) part[0][j] = 0;
            }
            if (i < stop) {
                load(0);
                turn_to(0);
                decode_codes(0, a[0]);
                decode_codes(1, a[0]);
            }
        } else if constexpr (kLate) {
            if (i < stop) {
                load(0);
#pragma unroll
                for (int step = 0; step < kSteps; ++step) decode_step(step, groups[0], a[0] + step * kSlices);
            }
        }
        if (kEarly && i < stop) load(0);
        // The unit `n` behind unit 0 of the stage that unit i begins; `more`: another one comes.
        const auto unit = [&](int n, bool more) {
            const int d = n % 2, of_stage = n % kSpan, own_stage = stage;
            const u32 b = place_of_x(of_stage);
            if constexpr (kCodes) {
                // Operands of a piece. Between the two halves of a unit the next one's are made: products keep a warp
                // waiting for the ones before.
                constexpr int kEach = kHalves ? 1 : kOperands / kPieces;
                const auto multiply = [&](int piece) {
                    const bool adds = kPieces == 1 && (kSegment == 0 || piece > 0 || n % (kSegment ? kSegment : 1) != 0);
                    wgmma_fence();
#pragma unroll
                    for (int e = 0; e < kEach; ++e) {
                        const int o = piece * kEach + e;
                        const u32 at = b + 2 * (2 * o / kOperands);
                        if (e > 0 || adds) wgmma<T, kTokens, true>(part[piece % kParts], a[d][o], at);
                        else wgmma<T, kTokens, false>(part[piece % kParts], a[d][o], at);
                    }
                    wgmma_commit();
                };
                const u32 of_x = shared_address(unit_scales) + (stage * kSpan + of_stage) * kScaleBytes +
                                 (kRouted ? token % 4 * 4 : 0);
                const auto largest = [&] { if constexpr (kFolded) return fold.largest; else return 0u; }();
                const auto scale_of = [&](int piece, int h) {
                    if constexpr (kFolded) return fold.scale_of(largest, h);
                    else if constexpr (kGrouped) return groups[d][piece * kFine / kPieces].value(h);
                    else return 1.0f;
                };
                const auto add = [&](int piece) {
                    const float scale[2] = {scale_of(piece, 0), scale_of(piece, 1)};
                    const u32 at = of_x + piece * kFineX / kPieces * (kScaleRoom * 4);
                    add_scaled<kTokens, kGrouped, (kFineX > 0), !kRouted>(sum, part[piece % kParts], scale, at, t);
                };
                multiply(0);
                if constexpr (kPieces > 1 && kParts > 1) multiply(1);
                if (of_stage == kSpan - 1) step_stage();
                // Not where nothing is done: a branch around it makes arrays of operands memory.
                if constexpr (kFolded) if (more) turn_to(n + 1);
                if constexpr (kAhead) if (more) load((n + 1) % kSpan);
                wgmma_wait<kParts>();  // for those of the unit before: the next one's operand has their place
                if (of_stage == 0) release();
                last = own_stage;
                if (more) {
                    if constexpr (!kAhead) load((n + 1) % kSpan);
                    decode_codes(0, a[1 - d]);
                    if constexpr (!kHalves) decode_codes(1, a[1 - d]);
                }
                if constexpr (kHalves) {
                    multiply(1);
                    if (more) decode_codes(1, a[1 - d]);
                }
                if constexpr (kPieces > 1) {
#pragma unroll
                    for (int piece = 0; piece < kPieces; ++piece) {
                        if (kParts > 1 && piece + 1 < kPieces) wgmma_wait<1>();
                        else wgmma_wait<0>();
                        add(piece);
                        if (piece + kParts < kPieces) multiply(piece + kParts);
                    }
                } else if (kSegment > 0 && ((n + 1) % (kSegment ? kSegment : 1) == 0 || !more)) {
                    wgmma_wait<0>();
                    add(0);
                }
                if constexpr (kGrouped && !kFolded) fetch(d, i + behind(n + 2));
            } else if constexpr (kLate) {
                float part[kTokens / 2];
                const auto multiply = [&](int step) {
                    wgmma_fence();
#pragma unroll
                    for (int s = step * kSlices; s < (step + 1) * kSlices; ++s)
                        if (s == 0) wgmma<T, kTokens, false>(part, a[d][s], b);
                        else wgmma<T, kTokens, true>(part, a[d][s], b + 2 * s);
                    wgmma_commit();
                };
                multiply(0);
                const float scale[2] = {groups[d][0].value(0), groups[d][0].value(1)};
                fetch(d, i + behind(n + 2));
                if (of_stage == kSpan - 1) step_stage();
                if (more) {
                    load((n + 1) % kSpan);
#pragma unroll
                    for (int step = 0; step < kSteps; ++step) {
                        decode_step(step, groups[1 - d], a[1 - d] + step * kSlices);
                        if (step < kSteps - 1) multiply(step + 1);
                    }
                } else {
#pragma unroll
                    for (int step = 1; step < kSteps; ++step) multiply(step);
                }
                wgmma_wait<0>();
                if (of_stage == kSpan - 1 || !more) leave(own_stage);
#pragma unroll
                for (int j = 0; j < kTokens / 2; ++j) sum[j] = __fmaf_rn(scale[j / 2 % 2], part[j], sum[j]);
            } else {
                if constexpr (!kEarly) load(of_stage);
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    if (step > 0 || kBuffers == 1) {
                        wgmma_wait<kBuffers - 1>();
                        if (step == kBuffers - 1 && of_stage == 0) release();
                    }
                    u32 (*const now)[4] = a[(n * kSteps + step) % kBuffers];
                    decode_step(step, groups[d], now);
                    wgmma_fence();
#pragma unroll
                    for (int s = 0; s < kSlices; ++s)
                        wgmma<T, kTokens, true>(sum, now[s], b + 2 * (step * kSlices + s));
                    wgmma_commit();
                }
                fetch(d, i + behind(n + 2));
                if (of_stage == kSpan - 1) step_stage();
                if (kEarly && more) load((n + 1) % kSpan);
                if constexpr (kBuffers > 1) {
                    wgmma_wait<1>();
                    if (kSteps == 1 && of_stage == 0) release();
                }
                last = own_stage;
            }
        };
        constexpr int kStaged = kFolded ? 4 : kSpan > 1 ? kSpan : 2, kRound = kSegment > kStaged ? kSegment : kStaged;  // units
        static_assert(kSegment == 0 || kRound % kSegment == 0, "whole segments");
        static_assert(kRound % 2 == 0, "units have the two operands in turn");
#pragma unroll 1
        for (; i + behind(kRound - 1) < stop; i += behind(kRound)) {
#pragma unroll
            for (int n = 0; n < kRound; ++n) unit(n, n + 1 < kRound || i + behind(kRound) < stop);
        }
#pragma unroll
        for (int n = 0; n < kRound - 1; ++n)
            if (i + behind(n) < stop) unit(n, i + behind(n + 1) < stop);
        wgmma_wait<0>();
        token = kept.token; row = kept.row;
        float factor = 1.0f / own_unit();
        if constexpr (kCodes && kSegment == 0) {
#pragma unroll
            for (int j = 0; j < kTokens / 2; ++j) sum[j] = lost ? sum[j] : static_cast<float>(part[0][j]);
        }
        if constexpr (kFolded) {
            __syncwarp();  // behind the last mark
            const u32 known = *in_tile;
            const int first = static_cast<int>(known & ~fold.kMet) + depth * kSpan;
            const auto unit_at = [&](int n) { return first + behind(n); };
            if (known & fold.kMet)
                fold.template add_far<kTokens, (kFineX > 0)>(sum, own_weights, lies, own_strip() + before, unit_at,
                                                             stop, of_tokens, token, anew(lane));
        }
        if constexpr (Own::stored == Stored::E4M3)
            factor *= own_weights.global_scale ? *own_weights.global_scale : 1.0f;
        if (factor != 1.0f && !(kCodes && lost)) {
#pragma unroll
            for (int j = 0; j < kTokens / 2; ++j) sum[j] *= factor;
        }
        const i64 rows = kRouted ? end : min(M, static_cast<i64>(token) + tile_tokens);
        const auto place = [&] {
            if constexpr (kRouted) return Sorted{routed.order};
            else return Straight{};
        }();
        release();
        if constexpr (kSplit > 1) cluster_arrive();  // this thread needs no x any more
        Parts::run(sum, reinterpret_cast<float4*>(area), depth, row_group, 1 + kGroups);
        if constexpr (kSplit > 1) Parts::meet(sum, reinterpret_cast<float4*>(area), received, depth, row_group, rank);
        if constexpr (kStreamed) {
            const Between between{handed, ticket, rank, warp, lane, depth, row_group};
            if (stop < weights.units) {
                between.give(sum);
                continue;
            }
            come_back();
            if (schedule.begins_within()) between.take(sum, [&](int block) { return schedule.is_shared_with(block); });
        }
        if constexpr (kCodes) {  // exact sums, of those that share K too, are rounded once for each scale
            const Own& own = groups[0][0];
            const float of_rows[2] = {kGrouped ? 1.0f : own.value(0), kGrouped ? 1.0f : own.value(1)};
            const float* const of_x = of_tokens.scale + token;
            if (!lost) multiply_whole<kTokens, kFineX == 0>(sum, kFolded ? 1.0f : 1.0f / Decode::Rows::worth, of_rows, of_x, kFolded ? anew(lane) % 4 : t);
        }
        const i64 row_end = min(N, static_cast<i64>(row) + tile_rows);
        const Bounds own_tile{token, row, rows, row_end, N, tile_tokens,
                            token_tiles > 1 && tile_tokens % Drained::kDrain ? Drained::kBox : Drained::kDrain};
        const int own = warp % 4, whose = rank % kSplit * kDepthGroups + depth;
        if constexpr (kPair) Drained::store_gated(sum, drain, epilogue, own_tile, row_group, whose, own, lane);
        else Drained::template store<kSends>(sum, drain, epilogue, y, own_tile, row_group, whose, own, lane, place);
        if constexpr (kOnce) break;  // the compiler need not keep what another tile would take
    }
    if (kSends && threadIdx.x % 128 == 0) wait_sent();
    if constexpr (kSharedX) {  // the other block still gives x, and barriers their arrivals
        cluster_arrive();
        cluster_wait();
    }
}

}  // namespace cuquant
