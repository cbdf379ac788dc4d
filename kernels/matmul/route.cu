// Rows sorted by the expert that each of them goes through, in the order in which they came: a counting
// sort, by one thread block, of which every warp takes a stretch of the rows. Integers only: every run
// gives the same. Rows whose expert does not exist come last.
#include "matmul/segment.cuh"

namespace cuquant {

// Integer `i` of an array of 1, 2, 4 or 8 bytes each; below 0: they have a sign.
__device__ i64 integer_at(const void* from, int bytes, i64 i) {
    if (bytes == 8 || bytes == -8) return static_cast<const i64*>(from)[i];  // what is beyond 2^63 becomes negative
    if (bytes == 4) return static_cast<const u32*>(from)[i];
    if (bytes == -4) return static_cast<const int*>(from)[i];
    if (bytes == 2) return static_cast<const u16*>(from)[i];
    if (bytes == -2) return static_cast<const short*>(from)[i];
    if (bytes == 1) return static_cast<const u8*>(from)[i];
    return static_cast<const signed char*>(from)[i];
}

// The lanes of a warp whose number below `limit` is the same.
__device__ u32 peers_of(u32 lanes, i64 number, i64 limit) {
    for (int bit = 0; limit >> bit; ++bit) {
        const u32 set = __ballot_sync(~0u, static_cast<int>(number >> bit & 1));
        lanes &= number >> bit & 1 ? set : ~set;
    }
    return lanes;
}

// The sum of `value` over the threads before this one; `total` becomes that of all.
template <int kThreads>
__device__ i64 sum_before(i64 value, i64* shared, i64& total) {
    i64 sum = value;
    shared[threadIdx.x] = sum;
    __syncthreads();
    for (int distance = 1; distance < kThreads; distance *= 2) {
        const i64 left = static_cast<int>(threadIdx.x) >= distance ? shared[threadIdx.x - distance] : 0;
        __syncthreads();  // all have read what is overwritten
        sum += left;
        shared[threadIdx.x] = sum;
        __syncthreads();
    }
    total = shared[kThreads - 1];
    __syncthreads();  // the next sum overwrites it
    return sum - value;
}

// What each row's expert is, and where the kernel counts.
struct Experts {
    const void* at;
    int bytes;
    i64 step, known;
    i64* places;  // [known + 1, warps]
    int warps;
};

// Calls use(row, its place, lanes with rows of the same group) for rows begin..end, 32 at a time.
template <class Use>
__device__ void walk(const Experts& experts, i64 begin, i64 end, Use use) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (i64 i = begin; i < end; i += 32) {
        const bool valid = i + lane < end;
        const i64 expert = valid ? integer_at(experts.at, experts.bytes, (i + lane) * experts.step) : 0;
        const i64 group = expert >= 0 && expert < experts.known ? expert : experts.known;
        const u32 peers = peers_of(__ballot_sync(~0u, valid), group, experts.known);
        use(i + lane, experts.places + group * experts.warps + warp, valid ? peers : 0u);
        __syncwarp();  // the next 32 see the places
    }
}

// experts: [rows], `step` elements apart. Writes order [rows], segments of up to `height` rows of one
// expert, and offsets [known + 1]: where the rows of each expert begin, and those of none. places [known + 1, warps] is the kernel's own.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) route(
    const void* __restrict__ experts, int bytes, i64 step, i64 rows, i64 known, i64 height, i64* places,
    i64* __restrict__ order, i64* __restrict__ offsets, Segment* __restrict__ segments, i64* __restrict__ segment_count) {
    constexpr int kWarps = kThreads / 32;
    __shared__ i64 sums[kThreads];  // 8 KB at most
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 stretch = (rows + kThreads - 1) / kThreads * 32, begin = warp * stretch;
    const i64 end = min(begin + stretch, rows);

    const Experts all_experts{experts, bytes, step, known, places, kWarps};

    for (i64 i = threadIdx.x; i < (known + 1) * kWarps; i += kThreads) places[i] = 0;
    __syncthreads();
    walk(all_experts, begin, end, [&](i64, i64* place, u32 peers) {
        if (__ffs(static_cast<int>(peers)) - 1 == lane) *place += __popc(peers);
    });
    __syncthreads();
    i64 before = 0, segments_before = 0;
    for (i64 from = 0; from <= known; from += kThreads) {  // a thread an expert
        const i64 expert = from + threadIdx.x;
        i64 count = 0;
#pragma unroll 8
        for (int w = 0; w < kWarps && expert <= known; ++w) count += places[expert * kWarps + w];
        i64 all, all_segments;
        i64 first = before + sum_before<kThreads>(count, sums, all);
        if (expert <= known) offsets[expert] = first;
        i64 segment = segments_before + sum_before<kThreads>((count + height - 1) / height, sums, all_segments);
        for (i64 done = 0; done < count; done += height)
            segments[segment++] = {expert < known ? expert : -1, first + done, min(height, count - done)};
#pragma unroll 8
        for (int w = 0; w < kWarps && expert <= known; ++w) {
            const i64 own = places[expert * kWarps + w];
            places[expert * kWarps + w] = first;
            first += own;
        }
        before += all;
        segments_before += all_segments;
    }
    if (threadIdx.x == 0) *segment_count = segments_before;
    __syncthreads();
    walk(all_experts, begin, end, [&](i64 row, i64* place, u32 peers) {
        const i64 first = *place;
        __syncwarp();  // all have read it
        if (peers) order[first + __popc(peers & ((1u << lane) - 1))] = row;
        if (__ffs(static_cast<int>(peers)) - 1 == lane) *place = first + __popc(peers);
    });
}

}  // namespace cuquant
