// What scales do to the operands of a prepacked weight, 16-bit floats, where they cannot wait for the sums.
#pragma once
#include "prepacked.cuh"

namespace cuquant {

// What a group's operands are multiplied by, for rows g and g + 8, as pairs of T: scales that have no place in T are a sum
// of two, so that their product with a weight is rounded once. Integers times float16 scales are in range, unless `kWide`,
// where `unit` brings them there.
template <class Format, class T, int kLie, bool kWide>
struct Factor {
    using Own = Group<Format, kLie>;
    static constexpr bool plain = Own::stored == Stored::Float16 && is_same<T, Half> && !Format::Codec::is_codebook && !Own::blocks && !kWide;
    static constexpr bool exact = plain || (!Own::blocks && (Own::stored == Stored::E4M3 || Own::stored == Stored::E8M0 || (Own::stored == Stored::Float16 && is_same<T, Half>)));
    static constexpr bool minimums = Own::Parts::minimums;
    u32 high[2], low[2];
    float scale[2], minimum[2];  // of weights with minimums

    __device__ void set(const Group<Format, kLie>& own, float unit) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if constexpr (plain) {
                high[h] = __byte_perm(own.scale[0], 0, h ? 0x3232 : 0x1010);
            } else {
                const float s = own.value(h) * unit;
                if constexpr (minimums) {
                    scale[h] = s; minimum[h] = own.minimum_of(h) * unit;
                } else {
                    high[h] = pair_of<T>(s, s);
                    if constexpr (!exact) {
                        const float near = low_of<T>(high[h]), rest = fabsf(near) <= kFloatMax ? s - near : 0.0f;
                        low[h] = pair_of<T>(rest, rest);  // split_scales would do it twice, and spill
                    }
                }
            }
        }
    }
    __device__ void apply(u32 (&a)[4]) const {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int h = r % 2;
            if constexpr (minimums) a[r] = pair_of<T>(__fmaf_rn(low_of<T>(a[r]), scale[h], minimum[h]), __fmaf_rn(high_of<T>(a[r]), scale[h], minimum[h]));
            else if constexpr (exact) a[r] = mul_pair<T>(a[r], high[h]);
            else a[r] = scaled_twice<T>(a[r], high[h], low[h]);
        }
    }
};

}  // namespace cuquant
