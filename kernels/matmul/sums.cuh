// Sums that several warps or blocks hold a part of: who stores which of them, and how they are added up and stored.
#pragma once
#include "matmul/epilogue.cuh"

namespace cuquant {

struct Nothing {  // of what there is not
    template <class... Arguments> __device__ Nothing(Arguments...) {}
};

constexpr int kFewWarps = 8;  // of a block, whose first weights may all be on their way before x: with more it would wait behind them

// The strips of a cluster: `most`, and from cluster number `fewer` on one less.
struct Taken {
    int first, count;

    __device__ Taken(int cluster, int most, int fewer) : first(cluster * (most - 1) + min(cluster, fewer)), count(most - (cluster >= fewer)) {}
};

// Which row of the output row m of a product is: itself, or where it was before rows were sorted.
struct Straight {
    static constexpr bool straight = true;
    __device__ i64 operator()(i64 m) const { return m; }
};
struct Sorted {
    static constexpr bool straight = false;
    const i64* order;
    __device__ i64 operator()(i64 m) const { return order[m]; }
};

// Which fours of a tile's sums a thread stores, one after the other. To divide takes a while: a kernel may find the reciprocal early.
struct Turn {
    static constexpr int kPlaces = 21;  // of a reciprocal: exact for up to 1024 threads
    int fours, next_line, next_four;    // of a line, and from one to the next
    int line, four;

    __device__ Turn(int rows, int thread, int threads) : Turn(rows, thread, threads, reciprocal(rows)) {}
    __device__ Turn(int rows, int thread, int threads, u32 reciprocal) : fours(rows / 4) {
        next_line = threads * reciprocal >> kPlaces; next_four = threads - next_line * fours;
        line = thread * reciprocal >> kPlaces; four = thread - line * fours;
    }
    __device__ static u32 reciprocal(int rows) { return (1u << kPlaces) / static_cast<u32>(rows / 4) + 1; }
    __device__ void step() {
        line += next_line; four += next_four;
        if (four >= fours) { four -= fours; ++line; }
    }
};

// Four rows of a token: its kParts partial sums in shared memory, one at a distance of `apart` floats from the next.
template <int kParts>
__device__ float4 added(const float* from, int apart) {
    constexpr int kTogether = 8;  // that do not wait for each other
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f), part[kTogether];
#pragma unroll
    for (int first = 0; first < kParts; first += kTogether) {
#pragma unroll
        for (int d = first; d < kParts && d < first + kTogether; ++d) part[d - first] = *reinterpret_cast<const float4*>(from + d * apart);
#pragma unroll
        for (int d = first; d < kParts && d < first + kTogether; ++d) add_4(total, part[d - first]);
    }
    return total;
}

// The same of what is stored: kGated: those of the second weight are `set` floats further, and the result is silu(first) * second.
template <int kParts, bool kGated>
__device__ float4 result_of(const float* line, int first, int set, int apart) {
    float4 total = added<kParts>(line + first, apart);
    if constexpr (kGated) {
        activate_4<kSilu>(total);
        const float4 other = added<kParts>(line + first + set, apart);
        total = make_float4(total.x * other.x, total.y * other.y, total.z * other.z, total.w * other.w);
    }
    return total;
}

// Add up partial sums, [lines][pitch], and store what they finish to. The blocks of a cluster have every kSplit-th token, this
// one those from token `rank` on; a thread does four rows of the weight at once.
template <int kSplit, int kParts, bool kGated, class Place = Straight>
__device__ void store_sums(const Epilogue& epilogue, const float* sums, int pitch, int apart, int tokens, int set,
                           i64 token, i64 row, i64 M, i64 N, Turn turn, int rank, Place place = {}) {
    const int lines = (static_cast<int>(min(M - token, static_cast<i64>(tokens))) - rank + kSplit - 1) / kSplit;
    const bool whole = has_fours(epilogue, N), plain = whole && is_plain(epilogue);
    for (; turn.line < lines; turn.step()) {
        const int first = turn.four * 4;
        const float4 total = result_of<kParts, kGated>(sums + turn.line * pitch, first, set, apart);
        const i64 n = row + first;
        if (n < N) {
            const i64 m = place(token + turn.line * kSplit + rank);
            if (plain) store_4(epilogue, total, m, n);
            else finish_4(epilogue, total, m, n, N, whole);
        }
    }
}

// What the end of a kernel needs to know, which one thread finds out at the beginning, where nobody waits for it: parameters
// that are read for the first time, products of 64 bits and a division, one after the other, take as long as x.
struct alignas(16) Ending {
    u8* out;             // the block's first result
    i64 stride;          // bytes from token to token
    int lines, columns;  // tokens, and rows of the weight, that are there
    u32 reciprocal;      // see Turn
    int type;            // of results that are stored as they are, four at a time; else -1

    __device__ void set(const Epilogue& e, i64 token, i64 row, i64 M, i64 N, int tokens, int rows) {
        const int bytes = e.out_type == kFloat ? 4 : 2;
        out = static_cast<u8*>(e.out) + (token * e.out_stride + row) * bytes;
        stride = e.out_stride * bytes;
        lines = static_cast<int>(min(M - token, static_cast<i64>(tokens)));
        columns = static_cast<int>(min(N - row, static_cast<i64>(rows)));
        reciprocal = Turn::reciprocal(rows);
        type = has_fours(e, N) && is_plain(e) ? e.out_type : -1;
    }
    // Four results of a token, where `type` says that they are stored so.
    __device__ void store(int token, int first, const float4& y) const {
        if (first >= columns) return;
        u8* const to = out + token * stride;
        if (type == kFloat) reinterpret_cast<float4*>(to)[first / 4] = y;
        else reinterpret_cast<uint2*>(to)[first / 4] = pairs_of(y, type);
    }
};

// store_sums where results are stored as they are, four at a time.
template <int kSplit, int kParts, bool kGated>
__device__ void store_whole(const Ending& end, const float* sums, int pitch, int apart, int set, Turn turn, int rank) {
    for (; turn.line * kSplit + rank < end.lines; turn.step())
        end.store(turn.line * kSplit + rank, turn.four * 4, result_of<kParts, kGated>(sums + turn.line * pitch, turn.four * 4, set, apart));
}

}  // namespace cuquant
