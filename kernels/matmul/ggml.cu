// x [M, K] of 16-bit floats, M up to 8 kTiles, times ggml's blocks as they lie [N, K]: memory-bound. A block takes
// some strips of 16 rows. Each of its warps has an equal share of their groups of 256 columns, which it copies to
// a ring of its own (the copy engine does, where there is one and rows start on 16 bytes: what asks for copies, and where
// their bytes lie, took a fifth of the loop), makes 16-bit floats of whole numbers, or finds those of two codes in a table, and multiplies by x
// on the tensor cores; the scales meet the float32 sums of their sub-blocks. x lies in shared memory, all of it or a
// chunk of K at a time. The sums of warps, chunks and of the blocks of a cluster, which share K, are added up always in
// the same order.
#include "matmul/ggml_copies.cuh"
#include "device/cluster.cuh"
#include "matmul/ggml_minimums.cuh"
#include "matmul/sums.cuh"

namespace cuquant {

constexpr int kRing = 2;   // groups that a warp has on their way: what follows says 0 and 1
constexpr int kLine = 20;  // floats of a token's 16 sums: lanes that are 2 lines apart meet no bank twice
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool kBlackwell = true;
#else
constexpr bool kBlackwell = false;
#endif
constexpr int kFewBytes = 8 << 10;  // of a warp's weights
constexpr int kMostWarps = kResident == 8 ? 12 : 16;  // of one tile; of two 4 less, for their registers

// 16 rows times 8 kTiles tokens.
template <class Block, class T, int kTiles, bool kWide>
struct Sums {
    using Own = FloatCodes<Block, T, kWide>;
    using Place = Geometry<typename Block::Layout>;
    // Whether lanes read scales where they lie: one number of each 32 columns.
    static constexpr bool direct = Block::Layout::elements == 32 && Block::stored == Stored::Float16;
    using Least = Choice<Place::tables == 2, Minimums<Block, T>, NoMinimums<T>>;
    using Ones = typename Least::Ones;
    // Whether lanes meet before they read them: loads made too far ahead spill registers, and constants for signed bytes
    // of bfloat16 products would be moved from uniform registers 112 times in a group.
    static constexpr bool meets = Least::any || (kTiles > 1 && Block::lookup && !direct) || (direct && Block::wide && !Block::lookup && !Own::half);
    // Whether there is a way out, which nobody takes: for sm_100 and sm_120 the compiler puts sums off, and spills what they
    // wait for, but not past one.
    static constexpr bool fine = Place::subs == 2 * kSteps;  // 16 columns a scale
    static constexpr bool leaves = Least::any && (kResident == 8 ? fine : kBlackwell && (fine || kTiles > 1));
    static constexpr int table_bytes = direct ? 0 : Place::table_bytes;
    // Steps whose scales are read together; half as many where addresses of levels take the registers.
    static constexpr int few = kTiles > 1 && Block::lookup && !direct && !kWide ? 2 : 1;
    static constexpr int per_step = Place::subs / kSteps, ahead = 4 / per_step / few;
    static constexpr float unit = direct ? Own::unit : 1.0f;  // of totals, where scales are read as they are
    float total[kTiles][4];  // rows g and g + 8, tokens 2 t and 2 t + 1

    __device__ void clear() {
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) total[n][i] = 0.0f;
    }
    // Add a group. `scales`: the table, if there is one; `x`: addresses of the lane's columns of token g of each tile.
    template <class R>
    __device__ void add(const R& upper, const R& lower, int scales, const u32 (&x)[kTiles], int columns, u32 table, const Ones& ones, int lane) {
        const int from = scales + 4 * (lane / 4) * Place::stride;
        Least least[kTiles];
        float part[kTiles][4];
        const auto begin = [&](int n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) part[n][i] = 0.0f;
        };
#pragma unroll
        for (int n = 0; n < kTiles; ++n) begin(n);
#pragma unroll
        for (int q = 0; q < kSteps; q += ahead) {
            if (meets) __syncwarp();
            if (leaves && q == kSteps / 2 && columns < 0) return;
            float scale[2][ahead * per_step];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if constexpr (direct) numbers_in<Block, false, ahead>((h ? lower : upper).after(q * Block::Layout::bytes), false, scale[h]);
                else get(scale[h], from + 4 * (8 * h * Place::stride + q * per_step));
            }
#pragma unroll
            for (int s = 0; s < ahead; ++s) {
                u32 a[2][4];
                const auto number = [&](int r, int h) { return bits_of(scale[r][per_step * s + (per_step == 2 ? h : 0)]); };
                Own::operands(upper, lower, q + s, lane % 4, table, number, a);
#pragma unroll
                for (int n = 0; n < kTiles; ++n) {
                    uint2 b[2];
                    Own::columns_of(x[n] + columns + 64 * (q + s), lane % 4, b);
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        mma<T>(part[n], a[h], b[h].x, b[h].y);
                        if constexpr (Least::any) least[n].collect(b[h], per_step * (q + s) + (per_step == 2 ? h : 0), ones);
                        if (Own::scaled || (h == 0 && per_step == 1)) continue;
                        const int j = per_step * s + (per_step == 2 ? h : 0);
#pragma unroll
                        for (int i = 0; i < 4; ++i) total[n][i] = __fmaf_rn(scale[i / 2][j], part[n][i], total[n][i]);
                        begin(n);
                    }
                }
            }
        }
        if constexpr (Least::any) {
#pragma unroll
            for (int n = 0; n < kTiles; ++n) least[n].add(upper, lower, lane % 4, 1.0f / unit, total[n]);
        }
        if constexpr (Own::scaled) {
            const float common[2] = {Own::common_of(upper), Own::common_of(lower)};
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) total[n][i] = __fmaf_rn(common[i / 2], part[n][i], total[n][i]);
        }
    }
    // [token][16 rows], lines of kLine floats.
    __device__ void put(int place, int lane) const {
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                shared_at<float>(place + 4 * ((8 * n + lane % 4 * 2 + i % 2) * kLine + lane / 4 + i / 2 * 8)) = total[n][i] * unit;
    }
};

// A warp's share of `strips` strips of `groups` groups each, which a block's warps take one after the other, some of them a
// group more than the others. A division takes as long as 30 other instructions, and the first copies wait for it:
// `reciprocal` is 2^32 / warps, rounded up.
struct Share {
    int groups, begin, count;

    __device__ Share(int strips, int groups, int warp, int warps, u32 reciprocal) : groups(groups) {
        const int items = strips * groups, each = static_cast<int>(__umulhi(items, reciprocal)), more = items - each * warps;
        begin = warp * each + min(warp, more);
        count = each + (warp < more);
    }
    // Say whose parts of a strip are the first and the last one, if they are this warp's.
    __device__ void put_owner(int strip, int warp, u32 (&owners)[2]) const {
        const int first = strip * groups - begin, last = first + groups - 1;
        if (first >= 0 && first < count) owners[0] = warp;
        if (last >= 0 && last < count) owners[1] = warp;
    }
};

// Where a warp is in its share: so many groups of this strip are left, and of others.
struct Cursor {
    int here, others, strip, group;

    __device__ void open(const Share& share) {
        others = share.count;
        group = share.begin;
        for (strip = 0; others && group >= share.groups; ++strip) group -= share.groups;
        take(share.groups);
    }
    __device__ void take(int groups) {
        here = min(others, groups - group);
        others -= here;
    }
    // On to the next group; whether this one was the last of the strip or of the share.
    __device__ bool step(int groups) {
        ++group;
        if (--here) return false;
        group = 0, ++strip;
        take(groups);
        return true;
    }
};

// 8 neighbouring elements, which start on 16 bytes where `vectors`.
template <class T>
__device__ uint4 eight_of(const T* from, int vectors) {
    if (vectors) return load16(from);
    u32 words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = from[2 * j].bits | static_cast<u32>(from[2 * j + 1].bits) << 16;
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Columns first .. first + columns - 1 of x to shared memory, [token][pitch bytes]; zeros beyond K, a multiple of 8.
template <class T>
__device__ void stage_columns(int place, int pitch, const T* x, i64 row_stride, int vectors, int tokens, i64 first, int columns, i64 K, int thread, int threads) {
    for (int vector = thread; vector < columns / 8; vector += threads) {
        const i64 k = first + vector * 8;
        const bool here = k < K;
        const T* from = here ? x + k : x;
        u8* to = dynamic_shared + place + vector * 16;
        for (int m = 0; m < tokens; ++m, from += row_stride, to += pitch) {
            if (vectors) copy_ahead(to, from, here ? 16 : 0);
            else *reinterpret_cast<uint4*>(to) = here ? eight_of(from, 0) : make_uint4(0, 0, 0, 0);
        }
    }
}

// weights, second: [N, K / elements, Layout::bytes], which start on 16 bytes. A cluster takes `strips` strips, and from
// cluster `fewer` on one less; `chunk`: groups of x that are in shared memory at a time, of `groups`. Tile, which ggml.py prints:
//   tiles   products of 8 rows of x
//   split   blocks of a cluster, which share K
//   gated   silu(x w^T) * (x second^T)
//   wide    see FloatCodes
//   boxes   the copy engine brings weights, by their tensor maps
template <class Block, class T, class Tile>
__global__ void CUQUANT_CLUSTER(Tile::split) __launch_bounds__(32 * (kMostWarps - 4 * (Tile::tiles - 1)), 1)
matmul_blocks(const T* __restrict__ x, i64 x_stride, const __grid_constant__ Choice<Tile::boxes != 0, TensorMap, const u8*> weights,
              const __grid_constant__ Choice<Tile::boxes != 0, TensorMap, const u8*> second, const uint4 levels,
              const __grid_constant__ Epilogue epilogue, i64 M, i64 N, i64 K, int strips, int fewer, int chunk, int groups, int vectors, u32 reciprocal) {
    constexpr int kTiles = Tile::tiles, kSplit = Tile::split;
    constexpr bool kGated = Tile::gated, kWide = Tile::wide, kBoxes = Tile::boxes;
    using Own = FloatCodes<Block, T, kWide>;
    using Place = Geometry<typename Block::Layout, kBoxes != 0>;
    constexpr int kTokens = 8 * kTiles, kPiece = 4 * kTokens * kLine, kSets = kGated ? 2 : 1;
    let_next_start();
    if constexpr (kBoxes) { if (threadIdx.x == 0) prefetch_map(&weights); }
    if constexpr (kSplit > 1) cluster_arrive();
    using Partial = Sums<Block, T, kTiles, kWide>;
    constexpr int kRingBytes = kRing * Place::group_bytes;
    const int thread = threadIdx.x, threads = blockDim.x, warps = threads / 32, lane = thread % 32;
    // The compiler sees that all lanes have one warp, which takes 2 to 3 % off short products; two blocks that share K have no registers for it.
    const int warp = kSplit == 1 ? __shfl_sync(~0u, thread / 32, 0) : thread / 32;
    const int rank = kSplit > 1 ? static_cast<int>(cluster_rank()) : 0;
    const Taken taken(static_cast<int>(blockIdx.x) / kSplit, strips, fewer);
    const int tokens = static_cast<int>(M), first_strip = taken.first;
    const int here = anew(taken.count), all = kSets * here;  // else the loop computes it, and spills registers
    const int first_group = groups * rank / kSplit, own_groups = groups * (rank + 1) / kSplit - first_group;

    // The table of levels; rings of warps; x; tables of scales; sums of warps, and of all of them; what the end needs; what
    // counts boxes.
    const int pitch = chunk * 2 * kGroup + Own::pad, ring = Own::table_bytes + warp * kRingBytes;
    const int staged = Own::table_bytes + warps * kRingBytes, tables = staged + tokens * pitch, scales = tables + warp * Partial::table_bytes;
    const int pieces = tables + warps * Partial::table_bytes, sums = pieces + (warps + kSets * strips) * kPiece;
    const int sum_pitch = kSets * strips * kRows + 4;
    // Of a cluster's blocks each has every other token; parts of K of their sums: [block][lines][pitch].
    const int lines = (tokens + kSplit - 1) / kSplit, parts = sums + tokens * sum_pitch * 4, part_floats = lines * sum_pitch;
    const int at_end = parts + (kSplit > 1 ? kSplit * part_floats * 4 : 0), owners = at_end + static_cast<int>(sizeof(Ending));
    u64* const arrived = &shared_at<u64>(owners + kSets * strips * 8) + warp * kRing;

    if (warp == 0 && vectors) prefetch_rows(x, x_stride, static_cast<int>(K), tokens, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), lane);
    const auto has = [&](int number) { return number * chunk < own_groups; };  // chunk `number`
    const auto groups_of = [&](int number) { return min(chunk, own_groups - number * chunk); };
    const auto share_of = [&](int number) { return Share(all, groups_of(number), warp, warps, reciprocal); };
    const auto stage = [&](int number) {
        const int first = first_group + number * chunk, columns = groups_of(number) * kGroup;
        stage_columns(staged, pitch, x, x_stride, vectors, tokens, static_cast<i64>(first) * kGroup, columns, K, thread, threads);
        close_copies();
    };

    Choice<kBoxes != 0, Boxes<Own>, Weights<Own, u32>> rows;
    Cursor next;  // to copy, of chunk `coming`
    int coming = 0;
    const auto locate = [&] {
        while (next.here == 0 && has(coming + 1)) next.open(share_of(++coming));
        const int strip = next.strip < here ? next.strip : next.strip - here;
        if (next.here) rows.begin(kGated && next.strip >= here ? second : weights, static_cast<i64>(first_strip + strip) * kRows, N, K);
    };
    const auto copy = [&](int slot) {
        const int to = ring + slot * Place::group_bytes;
        if (next.here > 0) {
            const int group = first_group + coming * chunk + next.group;
            if constexpr (kBoxes) rows.copy(to, group, lane, arrived + slot);
            else rows.copy(to, group, lane);
            if (next.step(groups_of(coming))) locate();
        }
        if constexpr (!kBoxes) close_copies();
    };

    if constexpr (kBoxes) {
        if (lane == 0) {
#pragma unroll
            for (int slot = 0; slot < kRing; ++slot) barrier_init(arrived + slot, 1);
            barrier_fence();
        }
        __syncwarp();
    }
    next.open(share_of(0));
    // Weights are on their way while the kernels before this one end. x is wanted before more of them, and would wait behind all
    // that are: where decoding takes longer than memory, and where weights are few, half of many warps ask for theirs behind it,
    // unless what threads copy has to come in order. Few warps, beside those of the kernel before, have their first group when x
    // comes, and ask for the second one when it is there, or of 5 bits and one row, whose decoding takes longest, at once.
    constexpr bool kLong = Block::lookup || Block::bits < 4, kDirectMinimums = Partial::direct && Partial::Least::any;
    const bool first = !kBoxes || warps <= kFewWarps || warp % 2 == 0 || (!kLong && (next.here + next.others) * Place::group_bytes >= kFewBytes);
    const bool waits = kBoxes && kSplit == 1 && warps <= kFewWarps && Block::bits <= 5 && !kDirectMinimums && tokens > (Block::bits == 5 ? 2 : 1);
    const bool both = kBoxes && kSplit == 1 && warps <= kFewWarps && Block::bits == 5 && tokens == 1;
    int asked = 0;
    const auto ask = [&](int until) {
#pragma unroll 1
        for (; asked < until; ++asked) copy(asked);
    };
    locate();
    ask(both ? 2 : first);
    if (thread == threads - 1) shared_at<Ending>(at_end).set(epilogue, 0, static_cast<i64>(first_strip) * kRows, M, N, tokens, here * kRows);
    if constexpr (Block::lookup) Own::put_table(levels, thread, threads);
    wait_for_earlier();
    stage(0);
    ask(waits ? 1 : first + 1);
    wait_copies<kBoxes ? 0 : 1>();
    __syncthreads();
    ask(kRing);
    if constexpr (kSplit > 1) cluster_wait();  // the other block has begun, and has room for sums

    const u32 start = shared_address(dynamic_shared), table = 4 * lane;
    u32 own_x[kTiles];  // tokens that are not there are copies of the last one, whose sums nobody stores
#pragma unroll
    for (int n = 0; n < kTiles; ++n) own_x[n] = start + staged + min(8 * n + lane / 4, tokens - 1) * pitch + lane % 4 * 8;
    const typename Partial::Ones ones(lane / 4);
    Partial own;
    own.clear();
    int slot = 0;
    u32 phase = 0;
#pragma unroll 1
    for (int number = 0; has(number); ++number) {
        Cursor now;
        now.open(share_of(number));
#pragma unroll 1
        while (now.here > 0) {
            const int stage_now = ring + slot * Place::group_bytes;
            const int group = first_group + number * chunk + now.group, columns = now.group * 2 * kGroup, strip = now.strip;
            if constexpr (kBoxes) {
                barrier_wait(arrived + slot, phase);
            } else {
                wait_copies<kRing - 1>();
                __syncwarp();  // all lanes' copies are there
            }
            if constexpr (!Partial::direct) {
                rows.template put_scales<Own>(scales, stage_now, group, lane);
                __syncwarp();
            }
            own.add(rows.at(stage_now, lane / 4, group), rows.at(stage_now, lane / 4 + 8, group), scales, own_x, columns, table, ones, lane);
            __syncwarp();  // nobody reads this stage or the table any more
            copy(slot);
            phase ^= slot, slot ^= 1;
            if (now.step(groups_of(number))) {
                own.put(pieces + (warp + strip) * kPiece, lane);
                own.clear();
            }
        }
        for (int strip = lane; strip < all; strip += 32) share_of(number).put_owner(strip, warp, shared_at<u32[2]>(owners + 8 * strip));
        __syncthreads();  // all pieces are there, and nobody reads x
        if (has(number + 1)) stage(number + 1);
        const bool last = !has(number + 1);
        const Ending& end = shared_at<Ending>(at_end);
        const bool finish = kSplit == 1 && !kGated && last && end.type >= 0;  // the whole sums are stored as they are
        for (Turn turn(all * kRows, thread, threads, kGated ? Turn::reciprocal(all * kRows) : end.reciprocal); turn.line < tokens; turn.step()) {
            const int token = turn.line, four = turn.four, strip = four / 4;
            float4& sum = shared_at<float4>(sums + 4 * (token * sum_pitch + 4 * four));
            float4 total = number ? sum : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            const uint2 warps_of = shared_at<uint2>(owners + 8 * strip);
            for (u32 w = warps_of.x; w <= warps_of.y; ++w) add_4(total, shared_at<float4>(pieces + (w + strip) * kPiece + 4 * (token * kLine + four % 4 * 4)));
            if (finish) end.store(token, 4 * four, total);
            else if (kSplit > 1 && last) InBlock(token % kSplit, &shared_at<float>(parts)).store(rank * part_floats + token / kSplit * sum_pitch + 4 * four, total);
            else sum = total;
        }
        if (finish) return;
        if (has(number + 1)) wait_copies<0>();
        if (kSplit == 1 || has(number + 1)) __syncthreads();  // so are the sums, and more of x
    }

    if constexpr (kSplit > 1) cluster_sync();
    // Where the sums lie, as above, is found out anew: it would take registers in the loop.
    const int late_sums = staged + anew(tokens) * pitch + warps * Partial::table_bytes + (warps + kSets * strips) * kPiece, late_parts = late_sums + tokens * sum_pitch * 4;
    const Ending end = shared_at<Ending>(late_parts + (kSplit > 1 ? kSplit * part_floats * 4 : 0));
    const Turn turn(here * kRows, thread, threads, end.reciprocal);
    const float* const whole = &shared_at<float>(kSplit > 1 ? late_parts : late_sums);
    if (end.type >= 0) store_whole<kSplit, kSplit, kGated != 0>(end, whole, sum_pitch, part_floats, here * kRows, turn, rank);
    else store_sums<kSplit, kSplit, kGated != 0>(epilogue, whole, sum_pitch, part_floats, tokens, here * kRows, 0, static_cast<i64>(first_strip) * kRows, M, N, turn, rank);
}

}  // namespace cuquant
