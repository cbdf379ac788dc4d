// Double quantization (QLoRA): scales less their mean become 8-bit codes themselves.
// offset_parts, offset: the mean of the finite scales. shift: scales less it. encoding: what codes are
// made with once the scales are stored.
#include "dequantize.cu"

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
};

// One thread sums every `parts`-th scale.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) offset_parts(const float* __restrict__ scales, ScaleSum* __restrict__ found, i64 blocks, int parts) {
    const int part = blockIdx.x * blockDim.x + threadIdx.x;
    if (part >= parts) return;
    ScaleSum mine = {0.0, OrderedSum::none(), 0};
    for (i64 i = part; i < blocks; i += parts) mine.add(scales[i]);
    found[part] = mine;
}

// One thread puts the parts together, or goes through all scales where their order matters.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) offset(
    const float* __restrict__ scales, const ScaleSum* __restrict__ found, float* __restrict__ mean, i64 blocks, int parts) {
    ScaleSum all = {0.0, OrderedSum::none(), 0};
    for (int part = 0; part < parts; ++part) {
        all.sum += found[part].sum;
        all.size = OrderedSum::merge(all.size, found[part].size);
        all.count += found[part].count;
    }
    if (!all.size.any_order()) {
        all.sum = 0.0;
        for (i64 i = 0; i < blocks; ++i)
            if (is_finite(scales[i])) all.sum += static_cast<double>(scales[i]);
    }
    *mean = all.count ? static_cast<float>(all.sum / static_cast<double>(all.count)) : 0.0f;
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
