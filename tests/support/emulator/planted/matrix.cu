// Products of a warp and of a warpgroup, and what blocks hand to each other, with one bug at a time. Bug::None is right.
#include "device/wgmma.cuh"
#include "device/mma.cuh"
#include "device/flag.cuh"

namespace cuquant {

enum class Bug {
    None,
    // of `warp_product`
    NoWait,             // what was copied is read before it is waited for
    MatrixPlace,        // a matrix from 4 bytes further
    MatrixBeyond,       // one behind the shared memory
    NotShared,          // one in global memory
    HalfWarp,           // half of the lanes multiply
    SwappedRegisters,   // of rows and columns
    MisalignedOnce,     // load8_once from 4 bytes further
    // of `group_product`
    NoInitialisation,   // of a barrier
    NoFullWait,         // x is read before it has come
    WrongParity,        // the same, by waiting for the phase before
    NoCopy,             // x is waited for and never comes
    MoreArrivals,       // a barrier waits for one more than there are
    TooManyArrivals,    // or is met by one more
    NoSwizzle,          // b as rows that were not swizzled
    NoProductWait,      // sums are read before they are waited for
    OperandChanged,     // a is overwritten before its product is waited for
    FewAtBarrier,       // a named barrier that a warp does not meet
    OtherBarrier,       // one that warps give different numbers of threads
    NoMap,              // bytes that are no tensor map
    BoxPlace,           // a box from 8 bytes further
    RunPlace,           // a run from 4 bytes further
    RunAhead,           // the same, where it is only brought nearer
    StoredPlace,        // a stored matrix from 2 bytes further
    // of `cluster_sum`
    NoArrival,          // the other block may not have begun
    NoLastWait,         // a block goes while the other one stores there
    // of `cluster_gift`
    NoMeeting,          // the other block may not have begun
    NoGiftBarrier,      // nothing counts what comes
    FewGifts,           // more bytes are waited for than come
    GiftPlace,          // misaligned
    NoGiftWait,         // a block goes before what comes is there
    // of `flags`
    NoFlag,             // a block waits for what no other one says
    OtherFlag,          // or says to nobody
};

// y[16, 8] = a[16, 32] b[8, 32]^T
template <Bug kBug, class T>
__global__ void warp_product(const u32* __restrict__ a, const u32* __restrict__ b, float* __restrict__ y) {
    extern __shared__ __align__(128) u8 dynamic_shared[];  // 512 bytes: b
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    copy16_async(dynamic_shared + lane * 16, b + lane * 4, 16);
    if constexpr (kBug != Bug::NoWait) copies_wait();
    __syncwarp();
    u32 from = static_cast<u32>(__cvta_generic_to_shared(dynamic_shared)) + lane % 8 * 64 + lane / 8 * 16;
    if constexpr (kBug == Bug::MatrixPlace) from += 4;
    if constexpr (kBug == Bug::MatrixBeyond) from += 16;
    if constexpr (kBug == Bug::NotShared) from = static_cast<u32>(__cvta_generic_to_shared(b));
    const uint4 rows = load_matrices(from);
    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int step = 0; step < 2; ++step) {
        u32 own[4];
        for (int r = 0; r < 4; ++r) own[r] = load4_once(a + (g + r % 2 * 8) * 16 + step * 8 + r / 2 * 4 + t);
        if constexpr (kBug == Bug::MisalignedOnce) own[0] = load8_once(a + g * 16 + 1).x;
        if constexpr (kBug == Bug::SwappedRegisters) { const u32 first = own[1]; own[1] = own[2]; own[2] = first; }
        if (kBug != Bug::HalfWarp || lane < 16) mma<T>(d, own, step ? rows.z : rows.x, step ? rows.w : rows.y);
    }
    for (int i = 0; i < 4; ++i) y[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
}

// y[64, 8] = a[64, 16] x[8, 16]^T, twice: as float32, and as `turned` [8, 64] of T. Four warps, and one that
// copies x [8, 64].
template <Bug kBug, class T>
__global__ void group_product(const __grid_constant__ TensorMap map, const u32* __restrict__ a, float* __restrict__ y, u16* __restrict__ turned) {
    extern __shared__ __align__(1024) u8 dynamic_shared[];  // 1,024 bytes of x, 1,024 of results, a barrier
    u8* const results = dynamic_shared + 1024;
    u64* const full = reinterpret_cast<u64*>(dynamic_shared + 2048);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if (threadIdx.x == 0 && kBug != Bug::NoInitialisation) barrier_init(full, kBug == Bug::MoreArrivals ? 2 : 1);
    __syncthreads();
    if (warp == 4) {
        if (lane == 0) {
            TensorMap wrong = map;
            wrong.words[7] = 0;
            barrier_expect(full, 1024);
            if constexpr (kBug == Bug::TooManyArrivals) barrier_arrive(full);
            const u8* const run = reinterpret_cast<const u8*>(a) + 4;
            if constexpr (kBug == Bug::RunPlace) copy_run(results, run, 16, full);
            if constexpr (kBug == Bug::RunAhead) prefetch_run(run, 16);
            if constexpr (kBug != Bug::NoCopy) copy_box(dynamic_shared, kBug == Bug::NoMap ? &wrong : &map, full, kBug == Bug::BoxPlace ? 4 : 0, 0);
        }
        return;
    }
    if constexpr (kBug != Bug::NoFullWait) barrier_wait(full, kBug == Bug::WrongParity ? 1 : 0);
    u32 own[4];
    for (int r = 0; r < 4; ++r) own[r] = a[(warp * 16 + g + r % 2 * 8) * 8 + r / 2 * 4 + t];
    float d[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    wgmma_fence();
    const u32 b = swizzled(dynamic_shared);
    wgmma<T, 8, false>(d, own, kBug == Bug::NoSwizzle ? b & 0x3FFF : b);
    wgmma_commit();
    if constexpr (kBug == Bug::OperandChanged) own[0] = 0;
    if constexpr (kBug != Bug::NoProductWait) wgmma_wait<0>();
    for (int i = 0; i < 4; ++i) y[(warp * 16 + g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
    wgmma_wait<0>();
    const u32 pairs[2] = {pair_of<T>(d[0], d[1]), pair_of<T>(d[2], d[3])};
    u32 to = shared_address(results) + lane % 8 * 128 + warp * 32 + lane / 8 % 2 * 16;
    if constexpr (kBug == Bug::StoredPlace) to += 2;
    store_matrices_transposed(to, pairs);
    if (kBug != Bug::FewAtBarrier || warp) named_barrier(1, kBug == Bug::OtherBarrier && warp == 2 ? 96 : 128);
    for (int i = threadIdx.x; i < 512; i += 128) turned[i] = reinterpret_cast<u16*>(results)[i];
}

// y[block] = the numbers of both blocks of a cluster, times the block's rank + 1.
template <Bug kBug>
__global__ void cluster_sum(const float* __restrict__ x, float* __restrict__ y) {
    __shared__ __align__(16) float numbers[2];
    cluster_arrive();
    if constexpr (kBug != Bug::NoArrival) cluster_wait();
    if (threadIdx.x < 2) InBlock(threadIdx.x, numbers + cluster_rank()).store(0, x[blockIdx.x]);
    cluster_arrive();
    if constexpr (kBug != Bug::NoLastWait) cluster_wait();
    if (threadIdx.x == 0) y[blockIdx.x] = (numbers[0] + numbers[1]) * (cluster_rank() + 1);
}

// y[block] = four times the number of the other block of the cluster, which that block stores here.
template <Bug kBug>
__global__ void cluster_gift(const float* __restrict__ x, float* __restrict__ y) {
    extern __shared__ __align__(128) u8 dynamic_shared[];  // 40 bytes
    float* const given = reinterpret_cast<float*>(dynamic_shared);
    u64* const barrier = reinterpret_cast<u64*>(dynamic_shared + 32);
    if (kBug != Bug::NoGiftBarrier && threadIdx.x == 0) {
        barrier_init(barrier, 1);
        barrier_expect(barrier, kBug == Bug::FewGifts ? 32 : 16);
        barrier_fence();
    }
    __syncthreads();
    if constexpr (kBug != Bug::NoMeeting) { cluster_arrive(); cluster_wait(); }
    const Remote other(given, barrier, cluster_rank() ^ 1);
    const float number = x[blockIdx.x];
    if (threadIdx.x == 0) other.store(kBug == Bug::GiftPlace ? 4 : 0, make_float4(number, number, number, number));
    if constexpr (kBug != Bug::NoGiftWait) barrier_wait_remote(barrier, 0);
    if (threadIdx.x == 0) y[blockIdx.x] = given[0] + given[1] + given[2] + given[3];
}

// y[block] = the sum of the numbers up to the block's, which each hands to the next one.
template <Bug kBug>
__global__ void flags(const float* __restrict__ x, float* y, u64* raised, u64 ticket) {
    const int block = blockIdx.x;
    if (threadIdx.x == 0) {
        if (block) { wait_for_flag(raised + block - 1, ticket); raised[block - 1] = 0; }
        y[block] = x[block] + (block ? y[block - 1] : 0.0f);
        if (kBug != Bug::NoFlag) raise_flag(raised + block, ticket + (kBug == Bug::OtherFlag));
    }
}

// a * b + c of pairs.
template <class T>
__global__ void pairs(const u32* __restrict__ a, const u32* __restrict__ b, const u32* __restrict__ c, u32* __restrict__ out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = fma_pair<T>(a[i], b[i], c[i]);
}

}  // namespace cuquant
