// x [M, K], M of a tile up to 8 kTiles, times a prepacked weight [N, K]: memory-bound. Each warp streams
// strips of the weight straight to registers, kAhead units ahead, and multiplies them by mma with x, which
// the block holds in shared memory. Scales meet the float32 sums of their group. The warps of a block and the blocks of
// a cluster share strips and K; sums are added up in the end, always in the same order.
#include "device/cluster.cuh"
#include "device/overlap.cuh"
#include "matmul/stream_lines.cuh"
#include "device/barrier.cuh"
#include "matmul/stream_x.cuh"
#include "matmul/sums.cuh"

namespace cuquant {

// The four pairs of a step that the compiler knows, of fragments or of two rows, with their offsets.
template <class Decode, class Rows, bool kZeros, bool kRows, int kStep = 0>
__device__ void decode_step(int step, const u32* first, const u32* second, const u8* tables, u32 table, const u32 (&offset)[4], u32 (&a)[4]) {
    if (step == kStep) {
        if constexpr (kRows) Decode::template decode_rows<typename Rows::Pairs, kStep, kZeros>(first, second, tables, table, offset, a);
        else Decode::template decode<kStep, kZeros>(first, tables, table, {offset[0], offset[1]}, a);
    } else if constexpr (kStep + 1 < 4 * Rows::span) {
        decode_step<Decode, Rows, kZeros, kRows, kStep + 1>(step, first, second, tables, table, offset, a);
    }
}

// Tile, which stream.py prints:
//   tiles           products of 8 rows of x
//   strips, depth   warps of a block: neighbours have different strips, then different parts of K
//   split           blocks of a cluster that share K
//   ahead           units that are loaded ahead
//   group_units     units of a scale group, 0 where a row is one group
//   in_unit         groups in a unit, else 1
//   lie             see Lie; in rows codes are as in a QuantArray
//   gated           of two weights, one after the other: silu(x w[0]^T) * (x w[1]^T)
//   wide            see PairDecoder
//   ring            units in which K is shared where codes go through shared memory, see ChunkCopies, else 0
//   span            units that are multiplied together, of rows
// A block takes `taken` strips, and from cluster `fewer` on one less, kStrips at a time.
template <class Format, class T, class Tile>
__global__ void CUQUANT_CLUSTER(Tile::split) __launch_bounds__(32 * Tile::strips * Tile::depth, 1)
matmul_stream(const T* __restrict__ x, i64 x_stride, const __grid_constant__ Prepacked weights, const __grid_constant__ Prepacked second,
              const __grid_constant__ Epilogue epilogue, i64 M, i64 N, i64 K, int taken, int fewer, int tokens, int copies) {
    constexpr int kTiles = Tile::tiles, kStrips = Tile::strips, kDepth = Tile::depth, kSplit = Tile::split, kAhead = Tile::ahead;
    constexpr int kGroupUnits = Tile::group_units, kFine = Tile::in_unit, kLie = Tile::lie, kRing = Tile::ring;
    constexpr bool kGated = Tile::gated, kWide = Tile::wide;
    constexpr int kSpan = Tile::span, kBits = Format::Packing::bits;
    constexpr int kThreads = 32 * kStrips * kDepth, kTokens = 8 * kTiles;
    constexpr int kGroup = kGroupUnits ? kGroupUnits : 1 << 20;  // units
    constexpr bool kLong = kGroup >= kAhead;                     // groups are not shorter than what is loaded ahead
    constexpr int kGroups = kFine > 1 ? kAhead * kFine : kLong ? 1 : kAhead / kGroup;
    static_assert(kLong ? kGroup % kAhead == 0 : kAhead % kGroup == 0, "groups and units ahead do not fit");
    using Decode = Decoder<typename Format::Codec, T, kBits, kWide>;
    using Own = Group<Format, kLie>;
    constexpr bool kRows = kLie == kInRows;
    // Weights on their way leave few registers: nothing is done early.
    constexpr bool kTight = kBits > 4 && (kFine > 1 || Decode::table_bytes > 0);
    using Rows = RowWords<typename Format::Packing, kFine, (Decode::table_bytes > 0), kRing ? kAhead : 0, kSpan>;
    static_assert(!kRing || (kRows && (kAhead == 4 || kSpan == 2)), "chunks of rows");
    constexpr int kChunkScales = kFine * (kGroup < kAhead ? kAhead / kGroup : 1);
    using Scales = ChunkScales<Own, kChunkScales>;
    constexpr bool kFour = kRing && !kLong && Scales::fits;  // scales of four chunks are loaded at once
    constexpr bool kGroupRing = kLie == kInStrips && kFine > 1 && Own::stored != Stored::Double;  // groups go through shared memory
    using Copied = ChunkGroups<Own, kFine, kAhead>;
    static_assert(!kGroupRing || kAhead <= kChunkUnits, "larger chunks");
    constexpr int kRingBytes = kRing ? kStrip * Rows::row_bytes : kGroupRing ? Copied::bytes : 0;  // of a chunk
    constexpr int kWarpBytes = kRingChunks * kRingBytes + (kGroupRing ? Copied::ready_bytes : 0);
    using Loaded = Choice<kRows, Rows, Words<kBits>>;
    constexpr bool kMinimum = Own::Parts::minimums;
    let_next_start();
    if constexpr (kSplit > 1) cluster_arrive();
    extern __shared__ __align__(128) u8 shared[];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;  // the compiler sees that all lanes have one warp
    const int rank = kSplit > 1 ? static_cast<int>(cluster_rank()) : 0;
    // K is shared in whole groups, or in as many units as are loaded ahead.
    constexpr int kShare = kRing ? kRing : kLong ? kAhead : kGroup;
    const int shares = (weights.units + kShare - 1) / kShare;
    const auto border = [&](int part) { return min(static_cast<int>(static_cast<i64>(shares) * part / (kSplit * kDepth)) * kShare, weights.units); };
    const int block_first = border(rank * kDepth), block_units = border((rank + 1) * kDepth) - block_first;
    const int depth = warp / kStrips, first = border(rank * kDepth + depth), count = border(rank * kDepth + depth + 1) - first;
    const int rows = taken * kStrip, pitch = rows * (kGated + 1) + 4;
    const i64 token = static_cast<i64>(blockIdx.y) * tokens;
    const int M_here = min(static_cast<int>(M) - static_cast<int>(blockIdx.y) * tokens, tokens);
    u8* tables = shared;
    u8* ring = tables + Decode::table_bytes;
    u64* arrived = reinterpret_cast<u64*>(ring + kStrips * kDepth * kWarpBytes);
    Ending& ending = *reinterpret_cast<Ending*>(arrived + kXParts);
    float* sums = reinterpret_cast<float*>(&ending + 1);  // what the end needs is at places that are known
    u8* xs = reinterpret_cast<u8*>(sums + kDepth * kTokens * pitch);
    constexpr int kPad = kRows ? Rows::x_pad : 16;  // bytes between tokens of x: lanes that read together meet no bank twice
    const int x_pitch = (shares + 2 * kSplit - 1) / kSplit * kShare * 128 + kPad;
    // The warp's strips, each of two weights if gated: every kStrips-th, of which `turns` are left.
    const auto own_strips = [&](int most) { return Taken(static_cast<int>(blockIdx.x) / kSplit, most, fewer); };
    const int first_strip = own_strips(taken).first + warp % kStrips, all_strips = own_strips(taken).count - warp % kStrips;
    struct Chunk { int turns, at; bool other; } now = {max((all_strips + kStrips - 1) / kStrips, 0), 0, false};  // `other`: of the second weight
    const int behind_last = first_strip + now.turns * kStrips;
    const auto strip_of = [&](const Chunk& chunk) { return behind_last - chunk.turns * kStrips; };
    const auto weight_of = [&](Chunk chunk) -> const Prepacked& { return kGated && chunk.other ? second : weights; };
    const auto step = [&](Chunk& chunk) {
        chunk.at += kAhead;
        if (chunk.at < count) return;
        chunk.at = 0;
        if (!kGated || chunk.other) --chunk.turns;
        if (kGated) chunk.other = !chunk.other;
    };

    const int x_column = block_first * kUnit;  // x lies in shared memory: K is small
    const Staged<T> staged{xs, x_pitch, block_units, max((block_units + kXParts - 1) / kXParts, 1), arrived, x + token * x_stride, x_stride, x_column, copies, M_here,
                           max(min(static_cast<int>(K) - x_column, block_units * kUnit), 0)};
    // Where a warp needs much of x it multiplies what there is before all is, and of many tokens asks for late parts only then.
    constexpr bool kPairsX = kRows && Rows::pairs_x, kByParts = kDepth <= 2 && (kTiles > 1 || kSplit > 1) && !kPairsX;
    Arrival<T, kTokens, kThreads / 32, (kByParts && kTiles > 1)> arrival{staged, warp, lane, static_cast<int>(blockIdx.x) / 2};
    constexpr bool kOneWarp = arrival.one_warp;
    if constexpr (!kOneWarp) arrival.begin();
    // The next units to load: where they are, and how many.
    typename Loaded::Place next_codes;
    typename Own::Cursor next_group;
    int next_count, next_unit, last_group = 0;
    Chunk next = now;
    const i64 row_bytes = weights.units * static_cast<i64>(8 * kBits);
    const auto count_next = [&] {
        next_unit = first + next.at;
        next_count = next.turns > 0 ? count - next.at : 0;
        if (kFine > 1) last_group = static_cast<int>(weights.groups) - 1 - next_unit * kFine;
    };
    const auto locate_groups = [&] {
        const i64 group = kFine > 1 ? static_cast<i64>(next_unit) * kFine : next_unit / kGroup;
        next_group.set(weight_of(next), strip_of(next), group, g);
    };
    const auto locate = [&] {
        const Prepacked& own = weight_of(next);
        count_next();
        if constexpr (kRows) {
            const i64 at = next_unit * 8 * kBits + Rows::byte_of(t), row = strip_of(next) * static_cast<i64>(kStrip) + g;
            next_codes.first = reinterpret_cast<const u8*>(own.codes) + min(row, weights.rows - 1) * row_bytes + at;
            next_codes.second = reinterpret_cast<const u8*>(own.codes) + min(row + 8, weights.rows - 1) * row_bytes + at;
        } else {
            next_codes.set(own.codes + (strip_of(next) * static_cast<i64>(weights.units) + next_unit) * Words<kBits>::unit_words(), lane);
        }
        if constexpr (!kFour) locate_groups();
    };
    // What comes behind: in the strip of `now`, or where the warp's next one begins.
    constexpr bool kAnew = kGroupRing && Decode::table_bytes > 0;  // slower by 5 %, which no other kind is
    constexpr bool kJumps = kLie == kInStrips && !kGated && Own::stored != Stored::Double;
    const auto before = [&](int at) { return kLong ? (first + at) / kGroup - first / kGroup : at * kFine / kGroup; };  // groups in the warp's part
    // From its last chunk to the first one of the next strip: units and groups. They are known before the loop where registers are.
    constexpr bool kKnown = kTiles == 1 && kFine == 1 && !Own::zeros && kBits < 8;
    const int last_chunk = max(count - 1, 0) / kAhead * kAhead;
    const auto unit_jump = [&](int from) { return kStrips * weights.units - from; };
    const auto group_jump = [&](int from) { return kStrips * static_cast<int>(weights.groups) - before(from); };
    const int units_to_strip = unit_jump(last_chunk), groups_to_strip = group_jump(last_chunk);
    const auto follow = [&] {
        if (kAnew || (!kJumps && next.at == 0)) return locate();
        count_next();
        next_codes.move(next.at == 0 ? (kKnown ? units_to_strip : unit_jump(now.at)) : kAhead);
        if constexpr (!kFour) {
            const int inside = !kLong ? kGroups : kGroupUnits ? before(next.at) - before(now.at) : 0;
            next_group.move(next.at == 0 ? (kKnown ? groups_to_strip : group_jump(now.at)) : inside);
        }
    };
    Loaded words[kAhead];
    // By rows, groups of the units ahead are few bytes that follow each other: lane t loads those of kOwn units.
    constexpr int kOwn = kAhead / 4;
    constexpr bool kShared = kRows && kAhead % 4 == 0 && (kFine > 1 ? kOwn == 1 : !kLong && kGroup % kOwn == 0) && !kFour;
    Own groups[kFour || kGroupRing ? 1 : kShared ? kFine : kGroups], coming[kShared ? kFine : 1];  // `coming`: of the next units, where one load is for all of these
    Scales four, coming_four;
    const auto load_group = [&](Own& to, int ahead) {
        if constexpr (!kGroupRing) to.load(weight_of(next), next_group, ahead, g);
    };
    // What comes to the ring: where there is one, a chunk of codes or of groups' numbers.
    u8* own_ring = ring + warp * kWarpBytes;
    u8* own_ready = own_ring + kRingChunks * kRingBytes;
    const u32 ready_lane = shared_address(own_ready) + g * Copied::ready;
    const Choice<kRing != 0, ChunkCopies<Rows, kAhead>, Nothing> row_copies(row_bytes, lane);
    const auto copy_chunk = [&](int to, const Chunk& chunk) {
        if (chunk.turns > 0) {
            const Prepacked& own = weight_of(chunk);
            const int unit = first + chunk.at;
            if constexpr (kGroupRing) Copied::copy(own_ring + to, own, strip_of(chunk), unit, lane);
            else if constexpr (kRing)
                row_copies.copy(own_ring + to,
                    reinterpret_cast<const u8*>(own.codes) + strip_of(chunk) * (kStrip * row_bytes) + unit * 8 * kBits,
                    row_bytes, weights.rows - strip_of(chunk) * kStrip, count - chunk.at, lane);
        }
    };
    const auto copy = [&](int to, const Chunk& chunk) {
        copy_chunk(to, chunk);
        close_copies();
    };
    const auto load_codes = [&](int d, bool whole) {
        if constexpr (kRing) return;
        if (whole || d < next_count) {
            if constexpr (kRows) words[d].load(next_codes, d, t);
            else words[d].load(next_codes, d);
        }
    };
    const auto load_groups = [&](int d, bool whole) {
        if constexpr (kFine > 1 && !kShared && !kFour && !kGroupRing) {
            if (!whole && d >= next_count) return;
            Own* const to = groups + d * kFine;
            if constexpr (kRows) return Own::template load_fine<kFine>(to, weight_of(next), next_group, d, g);
#pragma unroll
            for (int f = 0; f < kFine; ++f)
                load_group(to[f], whole ? d * kFine + f : min(d * kFine + f, last_group));  // behind it x is 0
        } else if constexpr (kFine == 1 && !kLong && !kShared) {
            if ((d + kSpan) % kGroup == 0 && (whole || d + kSpan - kGroup < next_count)) load_group(groups[d / kGroup], d / kGroup);
        }
    };
    // One load for all the units ahead.
    const auto load_coming = [&](Own* to) {
        if constexpr (kShared) {
            if (t * kOwn < next_count) {
                if constexpr (kFine > 1) Own::template load_fine<kFine>(to, weight_of(next), next_group, t, g);
                else load_group(to[0], t * kOwn / kGroup);
            }
        } else if constexpr (kFine == 1 && kLong) {
            if (next_count > 0) load_group(to[0], 0);
        }
    };
    // Of the next 4 chunks of a strip.
    const bool aligned = !kFour || (Scales::aligned(weights) && Scales::aligned(second));
    constexpr int kInChunks = kFour ? kChunkScales * kShare / kAhead : 1;  // scales that begin on as many bytes as they have
    const auto zeros_of_four = [&](Scales& to) {
        if constexpr (Own::zeros) to.template load_zeros<kInChunks>(next_group, weights.groups - next_group.group, aligned, t);
    };
    const auto scales_of_four = [&](Scales& to) { to.template load_scales<kInChunks, kFine>(next_group, weights.groups - next_group.group, aligned, t); };
    const auto load_first_groups = [&] {
        if constexpr (kGroupRing) return;
        if constexpr (kFour) { if (next_count > 0) scales_of_four(four); return; }
#pragma unroll
        for (int d = 0; d < kAhead; d += kSpan) load_groups(d, false);
        load_coming(groups);
    };
    const auto copy_after = [&](int to, Chunk chunk) {
        step(chunk);
        copy(to, chunk);
    };
    // Whether a warp's weights come before x, which would wait behind those of all of many warps. Where codes have more bits memory
    // takes longest, and half of the warps ask for theirs behind it only where these are few.
    const bool early = !kRing || kThreads <= 32 * kFewWarps || warp % 2 == 0 || (kBits > 3 && count * now.turns > kRingChunks * kAhead);
    locate();
    // Weights are on their way while the kernels before this one end, to registers, and where each warp has many, what
    // comes next to L2; but scales of rows may be what those kernels write. The compiler would move loads behind the
    // wait that no branch is around.
    if (next_count > 0) {
#pragma unroll
        for (int d = 0; d < kAhead; d += kSpan) load_codes(d, false);
        if constexpr (kRingBytes) {
            static_assert(kRingChunks == 2, "what is at hand and what comes next");
            if (early) copy_chunk(0, now);
            if (early) close_copies();
            if constexpr (!kRing) copy_after(kRingBytes, now);
        }
        if constexpr (kFour) {
            locate_groups();
            zeros_of_four(four);  // which no kernel writes that lets the next one start
        }
    }
    if constexpr (!kRows) load_first_groups();
    typename Decode::template Filling<kThreads> filling;
    // The warp that copies x has its entries last, of small tables none: the others need not wait for what it waits for.
    constexpr bool kEarly = kOneWarp && kThreads > 32 && !kTight && Decode::table_bytes > 0;
    const int filler = kEarly ? (threadIdx.x + kThreads - 32) % kThreads : threadIdx.x;
    const auto load_levels = [&] { filling.load(weights.values, filler, kRows && Format::Packing::order == Order::High); };
    if constexpr (!kTight) load_levels();  // no kernel writes them
    if constexpr (kOneWarp) arrival.begin();
    if (threadIdx.x == kThreads - 1) ending.set(epilogue, token, static_cast<i64>(own_strips(taken).first) * kStrip, M, N, tokens, own_strips(taken).count * kStrip);
    if constexpr (kEarly) { if (warp != 0) filling.store(tables, filler); }
    wait_for_earlier();
    arrival.ask_first();
    if constexpr (kRows) load_first_groups();
    if (kRing && next_count > 0 && !early) copy(0, now);
    staged.copy(threadIdx.x, kThreads);
    if constexpr (kTight) load_levels();
    if (!kEarly || warp == 0) filling.store(tables, filler);
    if (copies == kVectors) copies_wait();  // else only weights are on their way so
    __syncthreads();
    if constexpr (kRing) { if (count > 0) copy_after(kRingBytes, now); }  // before these the copies of x have begun
    if constexpr (kSplit > 1) cluster_wait();  // the other block has begun, and has room for sums
    if constexpr (!kByParts) {
        staged.wait(first - block_first, first - block_first + count);
    } else if constexpr (kOneWarp) {
        arrival.skip(first - block_first);
    } else {
        if (now.turns <= 0) arrival.wait_until(block_units);  // others need what it asks for
    }

    // Without a table it is 0, but the compiler does not know: factors of pairs, to which it is added, stay in registers,
    // but for kinds that need these themselves.
    constexpr bool kKeep = Decode::table_bytes == 0 && (kSpan == 2 || (kFine == 1 && (kBits > 2 || kTiles == 1)));
    const u32 table = kKeep ? __shfl_sync(~0u, static_cast<u32>(copies) >> 8, 0) : Decode::lane_table(lane);
    const u32 ring_lane = shared_address(own_ring) + (kRing ? Rows::ring_line(g, t) : 2 * g);
    const typename Rows::Sides sides(t);
    int reading = 0;
    const u32 own_xs = shared_address(xs) + (first - block_first) * 128;
    const LinesOfX<Rows, kRows, kTiles> lines(own_xs, x_pitch, M_here, lane, sides);
    if constexpr (kPairsX) {  // for all warps that have this part of K
        u8* const own_x = xs + (first - block_first) * 128 + Rows::x_place(t);
        for (int i = warp % kStrips * 8 + g; i < M_here * (count / kSpan); i += kStrips * 8) {
            const int m = i % M_here;
            u8* const line = own_x + m * x_pitch + i / M_here * (kSpan * 128);
            Rows::pair_x(line, shared_address(line), sides);
        }
        if constexpr (kStrips > 1) named_barrier(1 + depth, 32 * kStrips);
        else __syncwarp();
    }
    float total[kTiles][4], sum[kTiles][4], x_sum[kTiles][4];
    const auto no_sums = [&] {
#pragma unroll
        for (int q = 0; q < kTiles; ++q)
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[q][e] = x_sum[q][e] = 0.0f;
    };
    no_sums();
#pragma unroll
    for (int q = 0; q < kTiles; ++q)
#pragma unroll
        for (int e = 0; e < 4; ++e) total[q][e] = 0.0f;
    using Number = Choice<kGroupRing, typename Copied::Number, Own>;
    const auto scaled = [&](int q, const Number& own) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            total[q][e] = __fmaf_rn(own.value(e / 2), sum[q][e], total[q][e]);
            sum[q][e] = 0.0f;
            if constexpr (kMinimum) {
                total[q][e] = __fmaf_rn(own.minimum_of(e / 2), x_sum[q][e], total[q][e]);
                x_sum[q][e] = 0.0f;
            }
        }
    };
    const auto all_scaled = [&](const Number& own) {
#pragma unroll
        for (int q = 0; q < kTiles; ++q) scaled(q, own);
    };
    constexpr u32 one = constant_pair<T>(1);
    const u32 ones[4] = {one, one, one, one};
    int four_lane = 0;    // that holds the scales of this chunk
    constexpr bool kFourZeros = kFour && kFine == 1 && Own::zeros;  // operands need the group before its sums do
    Own of_four;
    u32 near[3];
    if constexpr (kFour) four.make_ready();
    const auto multiply = [&](int d, int at) {  // unit `at` + d
        u32 a[4 * kSpan][4];
        u32 rows_of[2][Rows::words];
        if constexpr (kRing) words[d].load_shared(ring_lane + reading, d, t, sides);
        if constexpr (kRows) {
            words[d].template row<0>(t, rows_of[0]);
            words[d].template row<1>(t, rows_of[1]);
        }
        Number here[kFine];
#pragma unroll
        for (int f = 0; f < kFine; ++f) {
            if constexpr (kFour && kFine > 1) here[f] = four.get(d * kFine + f, four_lane, near);
            if constexpr (kGroupRing)
                here[f] = Copied::read(ready_lane, ring_lane + reading + Copied::zero_at, d * kFine + f);
            if constexpr (kShared && (kFine > 1 || Own::zeros)) here[f] = groups[f].of_lane(lane - t + d / kOwn);
        }
        const auto group_of = [&](int s) -> const Number& {
            if constexpr (kFourZeros) return of_four;
            else if constexpr (kShared || kFour || kGroupRing) return here[kFine > 1 ? s * kFine / 4 : 0];  // of what meets the sums later the operands need nothing
            else return kFine > 1 ? groups[d * kFine + s * kFine / 4] : groups[kLong ? 0 : d / kGroup];
        };
#pragma unroll
        for (int s = 0; s < 4 * kSpan; ++s) {
            const Number& own = group_of(s);
            const u32 low = own.template offset<T>(0), high = own.template offset<T>(1);  // of rows g and g + 8
            decode_step<Decode, Rows, Own::zeros, kRows>(s, kRows ? rows_of[0] : words[d].w, rows_of[1], tables, table,
                                                         {low, high, low, high}, a[s]);
        }
        const auto multiply_step = [&](int q, int s, u32 low, u32 high) {
            mma<T>(sum[q], a[s], low, high);
            if constexpr (kMinimum) mma<T>(x_sum[q], ones, low, high);
            if constexpr (kFine > 1) { if ((s + 1) * kFine % 4 == 0) scaled(q, group_of(s)); }
        };
        if constexpr (kRows) {
#pragma unroll
            for (int q = 0; q < kTiles; ++q) {
                u32 b[8 * kSpan];
                lines.read(q, at, d, b);
#pragma unroll
                for (int s = 0; s < 4 * kSpan; ++s) multiply_step(q, s, b[2 * s], b[2 * s + 1]);
            }
        } else {
#pragma unroll
            for (int s = 0; s < 4; s += 2) {
#pragma unroll
                for (int q = 0; q < kTiles; ++q) {
                    const uint4 b = load_matrices(lines.first[q] + (at + d) * 128 + s * 32);
                    multiply_step(q, s, b.x, b.y);
                    multiply_step(q, s + 1, b.z, b.w);
                }
            }
        }
    };
    // Sums are put where they are added up: each block of a cluster has every kSplit-th token, and all parts of K of its sums.
    static_assert(kSplit <= 2, "a lane has sums of an even and an odd token");
    // Whether 16 warps have too few registers for what the compiler makes of several units.
    constexpr bool kOdd = kBits == 3 || kBits > 4, kLooked = Decode::table_bytes > 0;
    constexpr bool kScarce = kTiles == 2 ? kFine > 1 || kBits == 8 || kDepth * kSplit == 8 || (kBits == 4 && kLooked) || (kBits == 3 && Own::zeros) || (kRows && kBits <= 3) || (kGated && (kBits != 4 || kDepth > 1))
                                         : (kFine == 1 ? kBits == 8 : kDepth == 2 || (kMinimum && kBits == 5)) || (kGated && (kOdd || kRows)) || (kRows && kBits == 5 && kLooked) || Own::minimums;
    constexpr bool kOneByOne = kThreads > 384 && kScarce;
    constexpr int kLines = kTokens / kSplit, kParts = kSplit * kDepth;
    int own_sums = ((rank * kDepth + depth) * kLines + 2 / kSplit * t) * pitch + warp % kStrips * kStrip + g;
#pragma unroll 1
    while (now.turns > 0) {
        const int here = count - now.at, begin = first + now.at;
        step(next);
        const bool ends = next.at == 0;
        follow();
        if constexpr (kByParts) arrival.wait_until(!kOneWarp && ends ? block_units : min(begin + kAhead, first + count) - block_first);
        load_coming(coming);
        const bool four_ends = static_cast<u32>(next.at) / kAhead % 4 == 0;
        if constexpr (kFour) {
            four_lane = lane - t + static_cast<u32>(now.at) / kAhead % 4;
            if (four_ends && next_count > 0) {
                locate_groups();
                scales_of_four(coming_four);
                zeros_of_four(coming_four);
            }
        }
        if constexpr (kRingBytes) {
            wait_copies<kRingChunks - 1>();
            __syncwarp();  // all lanes' copies are there
            if constexpr (kGroupRing) {
                Copied::make_ready(own_ready, shared_address(own_ring) + reading, begin * kFine % Copied::per_block, lane);
                __syncwarp();
            }
        }
        const auto chunk = [&](bool whole, bool more) {  // more: units to load
            if constexpr (kFine > 1 || !kLong) no_sums();  // as they are, but the compiler does not know
#pragma unroll
            for (int d = 0; d < kAhead; d += kSpan) {
                if (kOneByOne && whole && d > 0 && anew(here) <= d) break;  // never
                if (whole || d < here) {
                    if constexpr (kFourZeros) { if (d % kGroup == 0) of_four = four.get(d / kGroup, four_lane, near); }
                    multiply(d, now.at);
                    if constexpr (kFine == 1 && !kLong) {
                        if ((d + kSpan) % kGroup == 0 || (!whole && d + kSpan == here)) {
                            if constexpr (kFourZeros) all_scaled(of_four);
                            else if constexpr (kFour) all_scaled(four.get(d / kGroup, four_lane, near));
                            else if constexpr (kShared) all_scaled(groups[0].of_lane(lane - t + d / kOwn));
                            else all_scaled(groups[d / kGroup]);
                        }
                    }
                }
                if (more) {
                    load_codes(d, whole);
                    load_groups(d, whole);
                }
            }
        };
        // Without conditions the compiler mixes neighbouring units.
        constexpr bool kLoads = !kRing;  // units come one by one
        const bool more = next_count >= kAhead && (kFine == 1 || kGroupRing || last_group >= kAhead * kFine - 1);
        if (here >= kAhead && (!kLoads || more)) chunk(true, kLoads);
        else if (kLoads && here >= kAhead && next_count <= 0) chunk(true, false);
        else chunk(false, kLoads);
        if constexpr (kRingBytes) {
            __syncwarp();  // nobody reads this chunk any more
            copy_after(reading, next);
            reading = kRingBytes - reading;
        }
        if constexpr (kFine == 1 && kLong) {
            if (here > 0 && (ends || (kGroupUnits && (begin + kAhead) % kGroup == 0))) all_scaled(groups[0]);
            groups[0] = coming[0];
        }
        if constexpr (kShared) {
#pragma unroll
            for (int f = 0; f < kFine; ++f) groups[f] = coming[f];
        }
        if constexpr (kFour) {
            if (four_ends) {
                four = coming_four;
                four.make_ready();
            }
        }
        if (ends) {
            const int rows = kStrip * anew(taken), pitch = rows * (kGated + 1) + 4;
            const float factor = weights.global_scale ? (kGated && now.other ? *second.global_scale : *weights.global_scale) : 1.0f;
#pragma unroll
            for (int r = 0; r < 2; ++r) {  // tokens 2 t + r
                const Choice<(kSplit > 1), InBlock, InThis> to(r, sums + own_sums + (kSplit > 1 ? 0 : r * pitch));
#pragma unroll
                for (int q = 0; q < kTiles; ++q)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        to.store(8 / kSplit * q * pitch + half * 8, total[q][2 * half + r] * factor);
                        total[q][2 * half + r] = 0.0f;
                    }
            }
            own_sums += !kGated ? kStrips * kStrip : now.other ? kStrips * kStrip - rows : rows;
        }
        now = next;
    }

    if constexpr (kSplit > 1) cluster_sync();
    else __syncthreads();
    // What the beginning knew would take registers in the loop.
    const int late_rows = kStrip * anew(taken), late_pitch = late_rows * (kGated + 1) + 4, own_rank = kSplit > 1 ? static_cast<int>(cluster_rank()) : 0;
    const Ending end = ending;
    const Taken own = own_strips(anew(taken));
    const Turn turn(own.count * kStrip, threadIdx.x, kThreads, end.reciprocal);
    if (__builtin_expect(end.type >= 0, 1)) {
        store_whole<kSplit, kParts, kGated>(end, sums, late_pitch, kLines * late_pitch, late_rows, turn, own_rank);
    } else {
        store_sums<kSplit, kParts, kGated>(epilogue, sums, late_pitch, kLines * late_pitch, end.lines, late_rows, static_cast<i64>(blockIdx.y) * anew(tokens),
                                           static_cast<i64>(own.first) * kStrip, M, N, turn, own_rank);
    }
}

}  // namespace cuquant
