// Double quantization (QLoRA): scales less their mean become 8-bit codes themselves.
// offset_parts, offset: the mean of the finite scales. shift: scales less it. encoding: what codes are
// made with once the scales are stored.
#include "dequantize/dequantize.cu"

namespace cuquant {

// A sum of finite scales in index order, and of how many.
struct ScaleSum {
    double sum;
    OrderedSum size;
    i64 count;
    __device__ void add(float scale) {
        if (!is_finite(scale)) return;
        sum += static_cast<double>(scale);
        size = OrderedSum::merge(size, OrderedSum::of(scale));
        ++count;
    }
    __device__ void merge(const ScaleSum& other) {  // of other scales; the sums are exact, or not used
        sum += other.sum;
        size = OrderedSum::merge(size, other.size);
        count += other.count;
    }
};

// The sums of a warp's lanes, for all of them.
__device__ inline ScaleSum warp_merged(ScaleSum all) {
    for (int distance = 1; distance < 32; distance *= 2) {
        all.merge({__shfl_xor_sync(~0u, all.sum, distance),
                   {__shfl_xor_sync(~0u, all.size.sum, distance), __shfl_xor_sync(~0u, all.size.lowest, distance)},
                   __shfl_xor_sync(~0u, all.count, distance)});
    }
    return all;
}

// Each of `warps` warps sums its share of the scales.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) offset_parts(const float* __restrict__ scales, ScaleSum* __restrict__ found, i64 blocks, int warps) {
    const int thread = blockIdx.x * kThreads + threadIdx.x;
    if (thread >= 32 * warps) return;  // whole warps
    ScaleSum mine = {0.0, OrderedSum::none(), 0};
    for (i64 i = thread; i < blocks; i += 32 * warps) mine.add(scales[i]);
    mine = warp_merged(mine);
    if (thread % 32 == 0) found[thread / 32] = mine;
}

// A warp puts the parts together, or goes through all scales where their order matters.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) offset(
    const float* __restrict__ scales, const ScaleSum* __restrict__ found, float* __restrict__ mean, i64 blocks, int parts) {
    static_assert(kThreads == 32, "one warp");
    ScaleSum all = {0.0, OrderedSum::none(), 0};
    for (int part = threadIdx.x; part < parts; part += kThreads) all.merge(found[part]);
    all = warp_merged(all);
    if (!all.size.any_order())  // for all lanes alike
        all.sum = ordered_sum(blocks, [&](i64 i) { return is_finite(scales[i]) ? scales[i] : 0.0f; });
    if (threadIdx.x == 0) *mean = all.count ? static_cast<float>(all.sum / static_cast<double>(all.count)) : 0.0f;
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) shift(const float* __restrict__ scales, const float* __restrict__ mean, float* __restrict__ out, i64 blocks) {
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < blocks) out[i] = __fadd_rn(scales[i], -*mean);
}

// encoding: [blocks, 2], the inverse of the scale that decoding will see, and no zero point.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) encoding(ScaleArrays arrays, float* __restrict__ out, i64 blocks) {
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= blocks) return;
    out[2 * i] = __frcp_rn(scale_at<Stored::Double>(arrays, i));
    out[2 * i + 1] = 0.0f;
}

}  // namespace cuquant
