// Scales of chunks of units on their way to a warp: many loads of few bytes take as long as large ones.
#pragma once
#include "dot.cuh"
#include "prepacked.cuh"

namespace cuquant {

constexpr int kRingChunks = 2, kChunkUnits = 4;

// The numbers of kFine groups of each of a chunk's kUnits units, of a strip: one array after the other in shared memory.
template <class Group, int kFine, int kUnits>
struct ChunkGroups {
    using Parts = typename Group::Parts;
    static constexpr int groups = kUnits * kFine, per_block = Parts::per_block;
    static constexpr int blocks = per_block == 1 ? groups : (groups - 1) / per_block + 2;  // a chunk may begin within one
    static constexpr int numbers = Group::blocks && Parts::sub_scales ? groups * kStrip : 0;  // bytes of integers
    static constexpr int minimum_at = blocks * kStrip * Group::bytes;
    static constexpr int sub_scale_at = minimum_at * (Parts::minimums ? 2 : 1), sub_minimum_at = sub_scale_at + numbers;
    static constexpr int zero_at = sub_minimum_at + (Parts::minimums ? numbers : 0);
    static constexpr int bytes = (zero_at + (Group::zeros ? groups * kStrip : 0) + 63) / 64 * 64;  // what follows begins on 128

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

    // Group e of the chunk at `from`, where numbers of one byte are, of rows g and g + 8; `block`: the one of ggml's that it lies in,
    // counted from the chunk's first. `beside`: another one of the same block.
    __device__ static Group get(u32 from, int twice_g, int e, int block, const Group* beside) {
        Group got;
        const int own = (per_block == 1 ? e : block) * kStrip * Group::bytes + twice_g * (Group::bytes - 1);
        const bool known = per_block > 1 && beside;
        if constexpr (Group::bytes == 4) {
            const uint2 v = load8_shared(from + own);
            got.scale[0] = v.x; got.scale[1] = v.y;
        } else if constexpr (Group::bytes == 2) {
            got.scale[0] = known ? beside->scale[0] : load4_shared(from + own);
        } else {
            got.scale[0] = load2_shared(from + own);
        }
        if constexpr (Parts::minimums) got.minimum = known ? beside->minimum : load4_shared(from + minimum_at + own);
        if constexpr (Parts::sub_scales) got.sub_scale = load2_shared(from + sub_scale_at + e * kStrip);
        if constexpr (Parts::sub_scales && Parts::minimums) got.sub_minimum = load2_shared(from + sub_minimum_at + e * kStrip);
        if constexpr (Group::zeros) got.zero = load2_shared(from + zero_at + e * kStrip);
        return got;
    }
};

// Scales by rows of four chunks, kCount of each, of rows g and g + 8: lane t of a row holds those of chunk t. A chunk's alone
// would be less than the 32 bytes that memory gives.
template <class Group, int kCount>
struct ChunkScales {
    static constexpr int bytes = kCount * Group::bytes, words = bytes / 4;
    static constexpr bool fits = bytes % 4 == 0 && bytes <= 16 && !Group::zeros && Group::stored != Stored::Double;
    u32 w[2][fits ? words : 1];

    // `left`: scales of a row from `from` on. `aligned`: chunks begin on as many bytes as they have. kTogether: scales
    // that do in any case.
    template <int kTogether>
    __device__ void load(const typename Group::Cursor& from, i64 left, bool aligned, int t) {
        left -= t * kCount;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u8* own = from.scale + (r ? from.apart : 0) * Group::bytes + t * bytes;
            if (aligned && left >= kCount) {
                Group::template several<bytes>(own, w[r]);
            } else {
                constexpr int each = kTogether * Group::bytes;
#pragma unroll
                for (int i = 0; i < words; ++i) w[r][i] = 0;
#pragma unroll
                for (int at = 0; at < bytes; at += each) {
                    u32 part[each / 4 + 1] = {};
                    if (at / Group::bytes < left) Group::template several<each>(own + at, part);
#pragma unroll
                    for (int i = 0; i < (each + 3) / 4; ++i) w[r][at / 4 + i] |= part[i] << at % 4 * 8;
                }
            }
        }
    }
    // Scale e of the chunk that `lane` holds; they are asked for in order, and `near` has the word of the last one.
    __device__ Group get(int e, int lane, u32 (&near)[2]) const {
        const int at = e * Group::bytes;
        if (at % 4 == 0) {
            near[0] = __shfl_sync(~0u, w[0][at / 4], lane);
            near[1] = __shfl_sync(~0u, w[1][at / 4], lane);
        }
        Group got;
        if constexpr (Group::bytes == 4) got.scale[0] = near[0], got.scale[1] = near[1];
        else if constexpr (Group::bytes == 2) got.scale[0] = __byte_perm(near[0], near[1], at % 4 ? 0x7632 : 0x5410);
        else got.scale[0] = __byte_perm(near[0], near[1], 0x40 + 0x11 * (at % 4)) & 0xFFFFu;
        return got;
    }
};

}  // namespace cuquant
