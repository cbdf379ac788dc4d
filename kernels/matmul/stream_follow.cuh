// What follows a warp's first units of a weight, on its way to the L2 cache while x comes.
#pragma once
#include "device/overlap.cuh"
#include "layout/packed_weight.cuh"

namespace cuquant {

// x is wanted before it, but then the copy engine, which brings x, is not free for it: 4 KB by lines, of 8 bits twice that where
// there is most; of codes that take longest, and for few tokens, less by the engine. Of 3 bits as much in front of x. kAhead: units
// that are loaded first; kMinimum, kLookedUp: what decoding needs; kRing: codes by rows go through shared memory.
template <int kBits, int kAhead, bool kRows, bool kRing, bool kMinimum, bool kLookedUp>
struct Follow {
    enum class Soon { No, Run, Lines, RunBehind };
    static constexpr int kUnitBytes = 128 * kBits, kRest = 4096 / kUnitBytes - kAhead;  // units
    static constexpr Soon soon = kBits <= 2 || kMinimum || kRing ? Soon::No
                                 : kRows ? (kBits == 4 || kBits == 8 ? Soon::Lines : Soon::No)
                                 : kLookedUp ? (kRest > 0 ? Soon::RunBehind : Soon::No)
                                 : kBits == 3 ? (kRest > 0 ? Soon::Run : Soon::No) : Soon::Lines;
    // Whether it comes in front of x, when x has been asked for, or when it is there.
    static constexpr bool in_front = soon == Soon::Run;
    __device__ static bool beside(int tokens) { return soon == Soon::Lines && (!kRows || kBits == 8 || tokens <= 2); }
    __device__ static bool behind(int tokens) { return soon == Soon::RunBehind && tokens <= 2; }

    static constexpr int few = kAhead + (soon == Soon::Lines ? kAhead : kRest);  // units, which nothing follows

    // Of `count` units of a strip from `first` on.
    __device__ static void prefetch(const Prepacked& weights, i64 strip, int first, int count, int lane) {
        const u8* const codes = reinterpret_cast<const u8*>(weights.codes);
        if constexpr (soon == Soon::Lines) {
            const i64 row = strip * kStrip + lane % kStrip, row_bytes = weights.units * static_cast<i64>(8 * kBits);  // by rows, two lines of each
            const u8* const from = codes + (kRows ? row * row_bytes + (first + kAhead) * (8 * kBits) : (strip * weights.units + first + kAhead) * kUnitBytes);
            const int left = kRows && row >= weights.rows ? 0 : (count - kAhead) * (kRows ? 8 * kBits : kUnitBytes), at = (kRows ? lane / kStrip : lane) * 128;
            if (at < left) prefetch_line(from + at);
            constexpr int kFurther = kRows ? 256 : 4096;
            if (kBits == 8 && count > 4 * kAhead && at + kFurther < left) prefetch_line(from + at + kFurther);
        } else if (lane == 0) {
            prefetch_run(codes + (strip * weights.units + first + kAhead) * kUnitBytes, kRest * kUnitBytes);
        }
    }
};

}  // namespace cuquant
