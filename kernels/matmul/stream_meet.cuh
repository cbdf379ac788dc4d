// Scales and zero points of several groups in a unit, by rows: on their way to a warp, and what they meet there. A sum of
// several lanes' products may have one scale only if these are of one group, for which the lanes of a row change codes or
// begin within words. Here they have codes as these lie, and scales meet operands, or sums of columns that are groups.
#pragma once
#include "device/dot.cuh"
#include "device/mma.cuh"
#include "layout/packed_weight.cuh"

namespace cuquant {

// What scales meet: sums of tokens, operands, or else the sums of so many products whose columns are groups.
enum Meet { kAtSums = 0, kAtOperands = -1 };

// Scales and zero points of a chunk of kUnits, of a strip, in its warp's ring: 16 bytes of each row, then the next 16; and of zero
// points those of 4 units. Rows begin on so many bytes.
template <class Group, int kFine, int kUnits>
struct RowGroups {
    static constexpr int scales = kUnits * kFine * Group::bytes / 16, zeros = Group::zeros ? kUnits / 4 : 0;  // pieces of a row
    static constexpr int zero_bytes = 4 * kFine, zero_at = scales * kStrip * 16, bytes = zero_at + zeros * kStrip * zero_bytes;
    static_assert(Group::bytes == 2 && kUnits % 4 == 0, "pieces that are whole");

    // From `unit` on, of those that are left `units`, a multiple of 4; of rows that are not there it gets the last one.
    __device__ static void copy(u8* to, const Prepacked& w, i64 strip, int unit, int units, int lane) {
        copy_part<scales, 16>(to, static_cast<const u8*>(w.scale) + unit * (kFine * 2), w.groups * 2, w.rows, strip, units * kFine * 2, lane);
        if constexpr (Group::zeros) copy_part<zeros, zero_bytes>(to + zero_at, w.zero_point + unit * kFine, w.groups, w.rows, strip, units * kFine, lane);
    }
    // kCount pieces of a row, `left` bytes of which there are.
    template <int kCount, int kBytes>
    __device__ static void copy_part(u8* to, const u8* from, i64 row_bytes, i64 rows, i64 strip, int left, int lane) {
#pragma unroll
        for (int i = 0; i < kCount * kStrip; i += 32) {
            const int row = (i + lane) / kCount, piece = (i + lane) % kCount;
            if (row >= kStrip || piece * kBytes >= left) continue;
            copy_ahead<kBytes>(to + (piece * kStrip + row) * kBytes, from + min(strip * kStrip + row, rows - 1) * row_bytes + piece * kBytes);
        }
    }
    // Where a row's groups from `first` on lie, which are units that are multiplied together.
    __device__ static constexpr int scale_at(int first, int row) { return (first / 8 * kStrip + row) * 16 + first % 8 * 2; }
    __device__ static constexpr int zero_of(int first, int row) { return zero_at + (first / zero_bytes * kStrip + row) * zero_bytes + first % zero_bytes; }
};
template <class Group, int kUnits> struct RowGroups<Group, 1, kUnits> { static constexpr int bytes = 0; };

// Zero points of the one or two groups of a lane's columns, of rows g and g + 8, as pairs of T: of kCount that the units have
// which are multiplied together.
template <class Group, class T, int kCount>
struct LaneZeros {
    static_assert((kCount == 2 || kCount == 4 || kCount == 8) && Group::stored == Stored::Float16, "groups of 32 or 16, and scales that RowGroups copies");
    static constexpr bool two = kCount == 8;
    u32 zero[2];

    // Lanes 2 and 3 have their last 16 columns first: see RowWords::Sides.
    struct Order {
        u32 scale, zero;
        __device__ explicit Order(int t) : scale(0), zero(0) {
            if constexpr (two) {
                scale = anew(t < 2 ? 0x3210 : 0x1032);
                if constexpr (Group::zeros) zero = anew(t < 2 ? 0x4140 : 0x4041);
            }
        }
    };
    // Of the groups from `first` on of a chunk, whose RowGroups begin at `from`.
    template <class Rows>
    __device__ void load_zeros(u32 from, int first, int g, int t, const Order& order) {
        if constexpr (!Group::zeros) return;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const u32 at = from + Rows::zero_of(first, g + 8 * h) + t * kCount / 4;
            if constexpr (!two) zero[h] = minus_zero<T>(load1_shared(at), 0);
            else if constexpr (is_same<T, Half>) zero[h] = __byte_perm(load2_shared(at), 0xE4E4E4E4u, order.zero);
            else {
                const u32 own = __byte_perm(load2_shared(at), 0, order.zero);
                zero[h] = pair_of<T>(-static_cast<float>(own & 0xFFu), -static_cast<float>(own >> 16));
            }
        }
    }
    __device__ u32 offset(int h, int low, int high) const { return Group::zeros ? of(zero[h], low, high) : 0; }
    __device__ static u32 of(u32 both, int low, int high) {
        return !two || (low == 0 && high == 1) ? both : __byte_perm(both, 0, (high ? 0x3200 : 0x1000) | (low ? 0x32 : 0x10));
    }
};

// And their scales, as pairs of T: of bfloat16, which has no place for a scale, as sums of two. A weight's product with its scale
// is rounded once.
template <class Group, class T, int kCount>
struct PairFactors : LaneZeros<Group, T, kCount> {
    using LaneZeros<Group, T, kCount>::two;
    using LaneZeros<Group, T, kCount>::of;
    using Order = typename LaneZeros<Group, T, kCount>::Order;
    // Products with larger scales may be beyond float16, if zero points are no codes too: sums have them times kShrunk then.
    static constexpr bool shrinks = is_same<T, Half>;
    static constexpr u32 kLarge = 0x5C00u;  // 256
    static constexpr float kShrunk = 0.00390625f, kBack = 256.0f;
    u32 scale[2], rest[2];
    bool shrunk[2];  // of a row

    template <class Rows>
    __device__ void load(u32 from, int first, int g, int t, const Order& order) {
        this->template load_zeros<Rows>(from, first, g, t, order);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const u32 own = from + Rows::scale_at(first, g + 8 * h) + t * kCount / 4 * 2;
            const u32 halves = two ? __byte_perm(load4_shared(own), 0, order.scale) : load2_shared(own);
            if constexpr (!shrinks) split_scales<T>(float_of_half(halves), two ? float_of_high_half(halves) : float_of_half(halves), scale[h], rest[h]);
            else scale[h] = two ? halves : __byte_perm(halves, 0, 0x1010);
        }
    }

    // `largest`: sizes of all scales so far.
    __device__ void add_to(u32& largest) const { largest = __vmaxu2(__vmaxu2(largest, scale[0] & 0x7FFF7FFFu), scale[1] & 0x7FFF7FFFu); }
    // Whether any lane's may be too large, as few weights' are: then `shrink` looks closer.
    __device__ static bool maybe_large(u32 largest) { return __any_sync(~0u, (largest & 0xFFFFu) >= kLarge || largest >> 16 >= kLarge); }
    __device__ void shrink(int lane) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const bool own = (scale[h] & 0x7FFFu) >= kLarge || (scale[h] >> 16 & 0x7FFFu) >= kLarge;
            shrunk[h] = (__ballot_sync(~0u, own) >> (lane & 28) & 15u) != 0;  // any of the row's lanes has one
            if (shrunk[h]) scale[h] = mul_pair<Half>(scale[h], constant_pair<Half>(kShrunk));
        }
    }
    // Before what is shrunk is added to them by kShrunk, and behind it by kBack.
    template <int kTiles> __device__ void resize(float (&sum)[kTiles][4], float by) const {
#pragma unroll
        for (int q = 0; q < kTiles; ++q)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (shrunk[e / 2]) sum[q][e] *= by;
    }

    // A pair of weights of row g + 8 h, whose columns are in groups `low` and `high` of the lane's.
    __device__ u32 times(u32 pair, int h, int low, int high) const {
        if constexpr (shrinks) return mul_pair<T>(pair, of(scale[h], low, high));
        else return scaled_twice<T>(pair, of(scale[h], low, high), of(rest[h], low, high));
    }
};

template <class Group, class T> struct PairFactors<Group, T, 1> {
    static constexpr bool shrinks = false;
    struct Order { __device__ explicit Order(int) {} };
};

// Groups as columns of a product: column n has token n / kCount, where lanes have codes of group n % kCount, and else 0. Each sum
// meets one scale then: those of groups 2 t and 2 t + 1, modulo kCount, are for lane t, which has these columns.
template <class Group, class T, int kCount>
struct ColumnFactors : LaneZeros<Group, T, kCount> {
    static constexpr bool shrinks = false;
    using Order = typename LaneZeros<Group, T, kCount>::Order;
    u32 scale[2];  // of rows g and g + 8

    template <class Rows>
    __device__ void load(u32 from, int first, int g, int t, const Order& order) {
        this->template load_zeros<Rows>(from, first, g, t, order);
#pragma unroll
        for (int h = 0; h < 2; ++h) scale[h] = load4_shared(from + Rows::scale_at(first, g + 8 * h) + 2 * t % kCount * 2);
    }
    __device__ float value(int e) const { return e % 2 ? float_of_high_half(scale[e / 2]) : float_of_half(scale[e / 2]); }

    // Whether x is not 0 to the lane, in its first 16 columns or those behind them: see RowWords::Sides.
    __device__ static bool has(bool behind, int g, int t) {
        if constexpr (kCount == 8) return g / 2 == t && g % 2 == (behind ? t < 2 : t >= 2);
        return g % kCount == t * kCount / 4;
    }
    // Tokens 2 t and 2 t + 1 of rows g and g + 8, as products have them whose columns are tokens: sums of the columns of kProducts.
    template <int kProducts>
    __device__ static void tokens(const float (&columns)[kProducts][4], int lane, float (&to)[4]) {
        const int t = lane % 4;
#pragma unroll
        for (int q = 0; q < kProducts; ++q)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float own = columns[q][2 * h] + columns[q][2 * h + 1];
                if constexpr (kCount >= 4) own += __shfl_xor_sync(~0u, own, 1);
                if constexpr (kCount == 8) own += __shfl_xor_sync(~0u, own, 2);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int first = (2 * t + r) * kCount;  // column
                    const float got = __shfl_sync(~0u, own, lane - t + first % 8 / 2);
                    if (q == 0 || first / 8 == q) to[2 * h + r] = got;
                }
            }
    }
};

}  // namespace cuquant
