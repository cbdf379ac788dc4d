// What scales do to the operands of a prepacked weight, 16-bit floats, where they cannot wait for the sums.
#pragma once
#include "layout/packed_weight.cuh"
#include "matmul/float16_range.cuh"

namespace cuquant {

// What a group's operands are multiplied by, for rows g and g + 8, as pairs of T: scales that have no place in T are a sum
// of two, so that their product with a weight is rounded once. `unit`, a power of two, brings weights into float16's range.
template <class Format, class T, int kLie>
struct Factor {
    using Own = Group<Format, kLie>;
    static constexpr Stored as_t = is_same<T, Half> ? Stored::Float16 : Stored::BFloat16;
    static constexpr bool exact = !Own::blocks && (Own::stored == Stored::E4M3 || Own::stored == Stored::E8M0 || Own::stored == as_t);
    static constexpr bool minimums = Own::Parts::minimums;
    // Whether weights stay in the range of T: bfloat16 has float32's, and e4m3 times a code is small.
    static constexpr bool in_range = !is_same<T, Half> || (!Own::blocks && (Own::stored == Stored::E4M3 || Own::stored == Stored::None));
    u32 high[2], low[2];
    float scale[2], minimum[2];  // of weights with minimums

    // The unit of a warp's strip, of its groups first .. last. Scales that lie one behind the other are read by fours or
    // eights, by all lanes; those that are made of several numbers as products read them, by the four lanes of a row.
    static constexpr bool plain = Own::stored == Stored::Float16 || Own::stored == Stored::Float32;
    static constexpr bool runs = kLie == kInStrips && !Own::blocks && !minimums && plain;
    static constexpr int kBatch = runs ? 4 : 8;  // on their way, one latency for all; with 6 some kernels spilled
    __device__ static float unit_of(const Prepacked& w, const typename Own::Strip& lies, int first, int last, int lane) {
        if constexpr (in_range) return 1.0f;
        float largest = 0.0f;
        const auto meet = [&](float size) { largest = fmaxf(largest, size); };
        if constexpr (runs) {
            const u8* const scales = lies.scale - lane / 4 * (2 * Own::bytes);  // of the strip's first row
            const uint4* const from = reinterpret_cast<const uint4*>(scales) + first * Own::bytes;
            const int count = (last - first + 1) * Own::bytes;
#pragma unroll 1
            for (int begin = lane; begin < count; begin += 32 * kBatch) {
                u32 own[kBatch][4];
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    if (begin + 32 * i >= count) break;
                    const uint4 v = from[begin + 32 * i];
                    own[i][0] = v.x; own[i][1] = v.y; own[i][2] = v.z; own[i][3] = v.w;
                }
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    if (begin + 32 * i >= count) break;
#pragma unroll
                    for (const u32 word : own[i]) {
                        if constexpr (Own::bytes == 4) meet(size_of(float_of(word), w.reach));
                        else meet(fmaxf(size_of(Own::half_of(word, 0), w.reach), size_of(Own::half_of(word, 1), w.reach)));
                    }
                }
            }
        } else {
#pragma unroll 1
            for (int begin = first + lane % 4; begin <= last; begin += 4 * kBatch) {
                Own own[kBatch];
#pragma unroll
                for (int i = 0; i < kBatch; ++i) own[i].load(lies, static_cast<u32>(min(begin + 4 * i, last)));
#pragma unroll
                for (int i = 0; i < kBatch; ++i)
#pragma unroll
                    for (int h = 0; h < 2; ++h) meet(size_of(own[i].value(h), w.reach) + (minimums ? size_of(own[i].minimum_of(h), 1.0f) : 0.0f));
            }
        }
        return unit_for(warp_max(largest), w.reach);
    }
    __device__ void set(const Own& own, float unit) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float s = own.value(h) * unit;
            if constexpr (minimums) {
                scale[h] = s; minimum[h] = own.minimum_of(h) * unit;
            } else {
                high[h] = pair_of<T>(s, s);
                if constexpr (!exact) {
                    const float near = low_of<T>(high[h]), rest = fabsf(near) <= kFloatMax ? s - near : 0.0f;
                    low[h] = pair_of<T>(rest, rest);
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
