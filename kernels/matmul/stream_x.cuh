// x on its way to shared memory, where warps read it again and again.
#pragma once
#include "device/bulk.cuh"
#include "device/mma.cuh"
#include "layout/packed_weight.cuh"

namespace cuquant {

// How x comes to shared memory: by elements, by vectors of 16 bytes, or in runs by the copy engine (sm_90 and newer).
enum Copies { kElements = 0, kVectors = 1, kRuns = 2 };
constexpr int kXParts = 4;  // a warp waits for those that it needs

// x of a block in shared memory: `units` from column `column` on, token by token, `pitch` bytes apart.
template <class T>
struct Staged {
    u8* to;
    int pitch, units, part;  // part: units that a barrier counts
    u64* arrived;
    const T* x;
    i64 row_stride, column;
    int copies, M, inside;  // inside: columns that x has

    __device__ int runs() const { return kHasEngine && copies == kRuns ? inside / 8 : 0; }  // vectors that the engine copies
    __device__ int run_bytes(int p) const { return max(min((runs() - p * part * 8) * 16, part * 128), 0); }
    // Before anything is copied.
    __device__ void begin(int thread) const {
        if (thread != 0) return;
#pragma unroll
        for (int p = 0; p < kXParts; ++p) barrier_init(arrived + p, 1);
        barrier_fence();
#pragma unroll
        for (int p = 0; p < kXParts; ++p) barrier_expect(arrived + p, M * run_bytes(p));
    }
    // What the engine copies, parts one after the other: run `first` of all tokens' and every `step`-th from there, before
    // `last`. Blocks begin with different ones by their number, or all would ask the same part of the L2 cache at the same time.
    template <int kTokens>
    __device__ void copy_runs(int first, int step, int last, int block) const {
#pragma unroll 1
        for (int run = first; run < last; run += step) {
            constexpr bool kFew = kTokens == 8;
            const int p = kFew ? (run / kTokens + block) % kXParts : run / kTokens;
            const int m = (run + (kFew ? block / kXParts : block)) % kTokens, bytes = run_bytes(p);
            if (m < M && bytes > 0) copy_run(to + m * pitch + p * part * 128, x + m * row_stride + column + p * part * kUnit, bytes, arrived + p);
        }
    }
    // Everything else. Zeros beyond K.
    __device__ void copy(int thread, int threads) const {
        const int begin = runs(), vectors = units * 8 - begin;
        if (vectors == 0) return;
        int m = 0, vector = thread;
        for (; m < M; vector += threads) {
            while (vector >= vectors) { vector -= vectors; if (++m == M) return; }
            const int own = begin + vector, here = max(min(inside - own * 8, 8), 0);
            u8* place = to + m * pitch + own * 16;
            const T* from = x + (here ? m * row_stride + column + own * 8 : 0);
            if (copies == kVectors) {
                copy16_async(place, from, here * 2);
            } else {
                u32 w[4] = {0, 0, 0, 0};
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    if (j < here) w[j / 2] |= static_cast<u32>(from[j].bits) << 16 * (j % 2);
                *reinterpret_cast<uint4*>(place) = make_uint4(w[0], w[1], w[2], w[3]);
            }
        }
    }
    // Wait for what the engine copies of units first .. last - 1.
    __device__ void wait(int first, int last) const {
        if constexpr (kHasEngine) {
            if (copies == kRuns)
#pragma unroll
                for (int p = 0; p < kXParts; ++p)
                    if (p * part < last && (p + 1) * part > first) barrier_wait(arrived + p, 0);
        }
    }
};

// A warp of kWarps and what the engine copies. One warp asks for runs of few tokens; of more all have their turns, since who
// asks waits while the engine is busy. kLate: two parts are asked for first, and another one whenever the warp is about to wait.
template <class T, int kTokens, int kWarps, bool kLate>
struct Arrival {
    static constexpr bool one_warp = kTokens == 8;
    static constexpr int first_parts = kLate ? 2 : kXParts;
    const Staged<T>& x;
    int warp, lane, block;
    int parts = 0, units = 0;  // that the warp has waited for

    __device__ bool runs() const { return kHasEngine && x.copies == kRuns; }
    __device__ void begin() const {
        if constexpr (kHasEngine) { if (runs()) x.begin(threadIdx.x); }
    }
    __device__ void ask(int from, int to) const {
        if (one_warp || lane == 0)
            x.template copy_runs<kTokens>(from * kTokens + (one_warp ? lane : warp), one_warp ? 32 : kWarps, to * kTokens, block);
    }
    // After `begin`.
    __device__ void ask_first() const {
        if constexpr (kHasEngine) {
            if (!runs() || (one_warp && warp != 0)) return;
            if (one_warp) __syncwarp();
            else __syncthreads();
            ask(0, first_parts);
        }
    }
    // It need not wait for the first `count` units.
    __device__ void skip(int count) {
        static_assert(!kLate, "others wait for what this warp asks for");
        while (units + x.part <= count) {
            ++parts;
            units += x.part;
        }
    }
    // For the first `count` units.
    __device__ void wait_until(int count) {
        if constexpr (kHasEngine) {
            while (units < count) {
                if constexpr (kLate) { if (runs() && parts + first_parts < kXParts) ask(parts + first_parts, parts + first_parts + 1); }
                if (runs()) barrier_wait(x.arrived + parts, 0);
                ++parts;
                units += x.part;
            }
        }
    }
};

}  // namespace cuquant
