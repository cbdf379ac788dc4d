// Scales below the smallest normal number of float16 or e4m3: there are multiples of one step alone, and the
// nearest one may be far off, or 0. Those below and above are tried on the block, and the one with the smaller
// squared error is stored. As _settled in cuquant/reference/encode.py.
#pragma once
#include "format/chunk.cuh"

namespace cuquant {

template <class Format, int kFlags>
struct Contest {
    using Codec = typename Format::Codec;
    using Rule = typename Format::Rule;
    using State = typename Rule::State;
    static constexpr bool half = Format::stored == Stored::Float16;
    // The mean of sizes is best stored as the nearest; codes of an exact scale do not depend on the stored one.
    static constexpr bool possible = (half || Format::stored == Stored::E4M3) && !Format::mean && !Format::encode_exact && !(kFlags & kGiven);
    static constexpr u32 normal = half ? 1024 : 8;  // steps of the smallest normal number: bits of smaller ones count them

    u32 below, sign;
    float global, above;  // above: the inverse of the scale above
    bool open;            // else the scale is as good as any

    __device__ Contest(const Numbers& numbers, const Given& given) {
        global = half ? 1.0f : *given.global_scale;
        sign = bits_of(numbers.exact) >> 31;
        const float steps = __fmul_rn(fabsf(numbers.exact), half ? 0x1p24f : 0x1p9f), whole = floorf(steps);
        open = steps < static_cast<float>(normal) && steps != whole;
        below = open ? static_cast<u32>(whole) : 0u;
        above = __frcp_rn(effective(below + 1));
        open = open && usable(above);
    }
    __device__ float effective(u32 steps) const {
        if constexpr (half) return float_of_half(steps | sign << 15);
        return __fmul_rn(Minifloat<4, 3, Specials::OneNan>::decode(steps), global);
    }
    // `numbers` with a scale of so many steps.
    __device__ Numbers with(u32 steps, Numbers numbers, const State& found) const {
        const float scale = effective(steps);
        numbers.stored = half ? steps | sign << 15 : steps;
        numbers.inverse = __frcp_rn(scale);
        if constexpr (Format::offset == Offset::ZeroPoint) {
            const float ratio = usable(numbers.inverse) ? __fdiv_rn(-Rule::low(found, true), scale) : 0.0f;
            numbers.zero_point = static_cast<int>(rintf(fminf(fmaxf(ratio, 0.0f), Format::peak())));
        }
        return numbers;
    }
};

// The squared error of an element, whole so that sums have no order: the error is rounded to 2^-15 of the codec's
// peak times the scale above.
template <class Format>
struct Loss {
    using Codec = typename Format::Codec;
    const typename Codec::EncodeTables& tables;
    const Lookup& lookup;
    float inverse, above, share;  // of the tried scale, and of the one above; the tried one in units of that
    float minimum;
    int zero_point;

    __device__ u64 operator()(float x) const {
        if constexpr (Format::offset == Offset::Minimum) x = __fadd_rn(x, -minimum);
        const float z = usable(inverse) ? __fmul_rn(x, inverse) : 0.0f;
        float level;
        if constexpr (Codec::is_codebook) {
            level = lookup.values[Codec::encode_crowded(z, tables, lookup)];
        } else {
            const u32 code = Codec::encode(z, zero_point, tables, lookup) - Codec::bias;
            level = Codec::decode(code, Codec::shift_of(zero_point), {});
        }
        const float rest = fabsf(__fadd_rn(__fmul_rn(x, above), -__fmul_rn(level, share)));
        const u32 whole = static_cast<u32>(rintf(fminf(__fmul_rn(rest, __fdiv_rn(32768.0f, fabsf(Format::peak()))), 65535.0f)));
        return static_cast<u64>(whole) * whole;
    }
};

// Choose the scale of a block where it is open. `total` adds a Loss up over the elements of the block, for all of
// its threads; all lanes of a warp take part.
template <class Format, class Total>
__device__ void settle(
    Numbers& numbers, const typename Format::Rule::State& found, const Given& given,
    const typename Format::Codec::EncodeTables& tables, const Lookup& lookup, Total total) {
    const Contest<Format, 0> contest(numbers, given);
    if (!__any_sync(~0u, contest.open)) return;  // nearly always
    u64 lost = 0;
    bool higher = false;
#pragma unroll 1
    for (u32 up = 0; up < 2; ++up) {
        const u32 steps = contest.below + up;
        const float share = __fdiv_rn(static_cast<float>(steps), static_cast<float>(contest.below + 1));
        const Numbers tried = contest.with(steps, numbers, found);
        const u64 own = total(Loss<Format>{
            tables, lookup, tried.inverse, contest.above, share, tried.minimum, tried.zero_point});
        higher = own < lost;
        lost = own;
    }
    if (contest.open) numbers = contest.with(contest.below + higher, numbers, found);
}

// A sum over kLanes neighbouring lanes, for all of them.
template <int kLanes>
__device__ u64 lanes_sum(u64 sum) {
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    return sum;
}

}  // namespace cuquant
