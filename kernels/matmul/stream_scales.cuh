// Scales of chunks of units on their way to a warp: many loads of few bytes take as long as large ones.
#pragma once
#include "device/dot.cuh"
#include "layout/packed_weight.cuh"

namespace cuquant {

constexpr int kRingChunks = 2, kChunkUnits = 4;

// What the sums of a group meet, of rows g and g + 8, and its zero points.
template <bool kZeros>
struct Ready {
    float scale[2], minimum[2];
    u32 zero;
    __device__ float value(int h) const { return scale[h]; }
    __device__ float minimum_of(int h) const { return minimum[h]; }
    template <class T> __device__ u32 offset(int h) const {
        if constexpr (kZeros) return minus_zero<T>(zero, h);
        else return 0;
    }
};

// The numbers of kFine groups of each of a chunk's kUnits units, of a strip: one array after the other in shared memory.
// From there the lanes of a warp make floats of them, which takes one lane's time for each where 4 need them.
template <class Group, int kFine, int kUnits>
struct ChunkGroups {
    using Parts = typename Group::Parts;
    static constexpr int groups = kUnits * kFine, per_block = Parts::per_block;
    static constexpr int blocks = per_block == 1 ? groups : (groups - 1) / per_block + 2;  // a chunk may begin within one
    static constexpr int numbers = Group::blocks && Parts::sub_scales ? groups * kStrip : 0;  // bytes of integers
    static constexpr int minimum_at = blocks * kStrip * Group::bytes;
    static constexpr int sub_scale_at = minimum_at * (Parts::minimums ? 2 : 1), sub_minimum_at = sub_scale_at + numbers;
    static constexpr int zero_at = sub_minimum_at + (Parts::minimums ? numbers : 0);
    static constexpr int bytes = zero_at + (Group::zeros ? groups * kStrip : 0);

    // From unit `unit` of a strip on. What is beyond the last group is 0.
    __device__ static void copy(u8* to, const Prepacked& w, i64 strip, int unit, int lane) {
        const int group = unit * kFine, block = group / per_block;
        const i64 first_group = strip * w.groups + group, first_block = per_block == 1 ? first_group : strip * w.blocks + block;
        const int left = static_cast<int>(w.groups) - group, blocks_left = per_block == 1 ? left : static_cast<int>(w.blocks) - block;
        copy_part<blocks, Group::bytes>(to, static_cast<const u8*>(w.scale), first_block, blocks_left, lane);
        if constexpr (Parts::minimums) copy_part<blocks, Group::bytes>(to + minimum_at, static_cast<const u8*>(w.minimum), first_block, blocks_left, lane);
        if constexpr (Parts::sub_scales) copy_part<groups, 1>(to + sub_scale_at, w.sub_scale, first_group, left, lane);
        if constexpr (Parts::sub_scales && Parts::minimums) copy_part<groups, 1>(to + sub_minimum_at, w.sub_minimum, first_group, left, lane);
        if constexpr (Group::zeros) copy_part<groups, 1>(to + zero_at, w.zero_point, first_group, left, lane);
    }
    // kCount entries of 16 rows, kBytes each.
    template <int kCount, int kBytes>
    __device__ static void copy_part(u8* to, const u8* from, i64 first, int left, int lane) {
#pragma unroll
        for (int v = 0; v < kCount * kBytes; v += 32)
            if (v + 32 <= kCount * kBytes || v + lane < kCount * kBytes)
                copy_ahead(to + (v + lane) * 16, from + (first * kBytes + v + lane) * 16, v + lane < left * kBytes ? 16 : 0);
    }

    // Group e of the chunk at `from`, rows g and g + 8; `block`: the one of ggml's that it lies in, counted from the chunk's first.
    __device__ static Group get(u32 from, int e, int block, int g) {
        Group got;
        const u32 entry = from + ((per_block == 1 ? e : block) * kStrip + 2 * g) * Group::bytes, number = from + e * kStrip + 2 * g;
        if constexpr (Group::bytes == 4) {
            const uint2 v = load8_shared(entry);
            got.scale[0] = v.x; got.scale[1] = v.y;
        } else if constexpr (Group::bytes == 2) {
            got.scale[0] = load4_shared(entry);
        } else {
            got.scale[0] = load2_shared(entry);
        }
        if constexpr (Parts::minimums && Group::bytes == 4) {
            const uint2 v = load8_shared(entry + minimum_at);
            got.minimum[0] = v.x; got.minimum[1] = v.y;
        } else if constexpr (Parts::minimums) {
            got.minimum[0] = load4_shared(entry + minimum_at);
        }
        if constexpr (Parts::sub_scales) got.sub_scale = load2_shared(number + sub_scale_at);
        if constexpr (Parts::sub_scales && Parts::minimums) got.sub_minimum = load2_shared(number + sub_minimum_at);
        return got;
    }
    // The chunk's floats, [group][8 of g]: scales of both rows, and behind them minimums. `phase`: groups of the first block
    // that come before the chunk.
    static constexpr int ready = Parts::minimums ? 16 : 8, ready_bytes = groups * 8 * ready;
    __device__ static void make_ready(u8* to, u32 from, int phase, int lane) {
#pragma unroll
        for (int i = 0; i < groups * 8; i += 32) {
            const int e = (i + lane) / 8;
            if (groups * 8 % 32 && e >= groups) return;
            const Group own = get(from, e, (phase + e) / per_block, lane % 8);
            u8* const place = to + (i + lane) * ready;
            if constexpr (Parts::minimums) *reinterpret_cast<float4*>(place) = make_float4(own.value(0), own.value(1), own.minimum_of(0), own.minimum_of(1));
            else *reinterpret_cast<float2*>(place) = make_float2(own.value(0), own.value(1));
        }
    }
    // Group e of them; `lane_ready`: where row g has group 0, `lane_zero`: its zero points.
    using Number = Ready<Group::zeros>;
    __device__ static Number read(u32 lane_ready, u32 lane_zero, int e) {
        Number got;
        if constexpr (Parts::minimums) {
            const uint4 v = load16_shared(lane_ready + e * 8 * ready);
            got.scale[0] = float_of(v.x); got.scale[1] = float_of(v.y);
            got.minimum[0] = float_of(v.z); got.minimum[1] = float_of(v.w);
        } else {
            const uint2 v = load8_shared(lane_ready + e * 8 * ready);
            got.scale[0] = float_of(v.x); got.scale[1] = float_of(v.y);
        }
        if constexpr (Group::zeros) got.zero = load2_shared(lane_zero + e * kStrip);
        return got;
    }
};

// Scales and zero points by rows of four chunks, kCount of each, of rows g and g + 8: lane t of a row holds those of chunk t.
// A chunk's alone would be less than the 32 bytes that memory gives.
template <class Group, int kCount>
struct ChunkScales {
    static constexpr int bytes = kCount * Group::bytes, words = bytes / 4;
    static constexpr bool plain = Group::stored != Stored::Double && !Group::minimums;
    static constexpr bool fits = bytes % 4 == 0 && bytes <= 16 && (!Group::zeros || kCount <= 4) && plain;
    u32 w[2][fits ? words : 1];
    u32 zeros[2];  // of a row, then of both rows in turn

    // Whether chunks of these rows begin on as many bytes as they have.
    __device__ static bool aligned(const Prepacked& rows) {
        const u64 zero = Group::zeros ? reinterpret_cast<u64>(rows.zero_point) : 0;
        return ((reinterpret_cast<u64>(rows.scale) | static_cast<u64>(rows.groups * Group::bytes)) & (bytes - 1)) == 0 && (zero & (kCount - 1)) == 0;
    }

    // `left`: scales of a row from `from` on. So many of them, which begin on as many bytes as they have, are loaded
    // together: kAligned where rows are aligned, kTogether in any case; of zero points one.
    template <int kAligned, int kTogether>
    __device__ void load_scales(const typename Group::Cursor& from, i64 left, bool aligned, int t) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u8* const own = from.scale + ((r ? from.apart : 0) + t * kCount) * Group::bytes;
            if (aligned) several<kAligned, Group::bytes>(own, left - t * kCount, w[r]);
            else several<kTogether, Group::bytes>(own, left - t * kCount, w[r]);
        }
    }
    template <int kAligned>
    __device__ void load_zeros(const typename Group::Cursor& from, i64 left, bool aligned, int t) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u8* const zero = from.zero + (r ? from.apart : 0) + t * kCount;
            u32 own[1];
            if (aligned) several<kAligned, 1>(zero, left - t * kCount, own);
            else several<1, 1>(zero, left - t * kCount, own);
            zeros[r] = own[0];
        }
    }
    // Before `get`, and late: it waits for the zero points.
    __device__ void make_ready() {
        if constexpr (Group::zeros) {
            const u32 first = zeros[0], second = zeros[1];
            zeros[0] = __byte_perm(first, second, 0x5140), zeros[1] = __byte_perm(first, second, 0x7362);
        }
    }
    // kCount numbers of kBytes, kEach at a time; 0 behind the last one.
    template <int kEach, int kBytes, int kWords>
    __device__ static void several(const u8* from, i64 left, u32 (&to)[kWords]) {
        constexpr int each = kEach * kBytes;
#pragma unroll
        for (int i = 0; i < kWords; ++i) to[i] = 0;
#pragma unroll
        for (int at = 0; at < kCount * kBytes; at += each) {
            u32 part[each / 4 + 1] = {};
            if (at / kBytes < left) Group::template several<each>(from + at, part);
#pragma unroll
            for (int i = 0; i < (each + 3) / 4; ++i) to[at / 4 + i] |= part[i] << at % 4 * 8;
        }
    }
    // Scale e of the chunk that `lane` holds; they are asked for in order, and `near` has the words of the last one.
    __device__ Group get(int e, int lane, u32 (&near)[3]) const {
        const int at = e * Group::bytes;
        if (at % 4 == 0) {
            near[0] = __shfl_sync(~0u, w[0][at / 4], lane);
            near[1] = __shfl_sync(~0u, w[1][at / 4], lane);
        }
        Group got;
        if constexpr (Group::zeros) {
            if (e % 2 == 0) near[2] = __shfl_sync(~0u, zeros[e / 2], lane);
            got.zero = near[2] >> e % 2 * 16;
        }
        if constexpr (Group::bytes == 4) got.scale[0] = near[0], got.scale[1] = near[1];
        else if constexpr (Group::bytes == 2) got.scale[0] = __byte_perm(near[0], near[1], at % 4 ? 0x7632 : 0x5410);
        else got.scale[0] = __byte_perm(near[0], near[1], 0x40 + 0x11 * (at % 4)) & 0xFFFFu;
        return got;
    }
};

}  // namespace cuquant
