// Quantizers that look for their scales, K-quants and iq4: cuquant/formats/search.py, operation by
// operation. A lane has a sub-block in registers and adds over its elements in order; the lanes of a
// block add over sub-blocks in order; a warp has 32 sub-blocks and puts the bits of their blocks
// together from one byte a field, in shared memory.
//
// A Facts struct, written by Python from the same candidates, has
//   low, high: the levels' range; uneven: whether there are gaps, and then levels, level(i): how
//     many there are, and which; elements, bytes, sub_block: of the type's blocks
//   anchor_step: between anchors, seven around each center
//   sub_low, sub_high: the range of integer scales of sub-blocks; 1, 1: there are none
//   sub_zero: what is added to those that are stored
//   has_min: whether sub-blocks have integer minimums to subtract, too
#include "format/chunk.cuh"
#include "quantize/search.cuh"

namespace cuquant {

__device__ inline float furthest(float top, float bottom) { return top >= -bottom ? top : bottom; }

// x' = level * sc * d - m * dmin; d and dmin are not in units, sc and m are integers.
struct Fit { float d, dmin, sc, m; };

struct ScaleMinimum { float scale, minimum; };

// Sums over the elements of a sub-block: of levels l, of l * l and of l * x.
struct Sums { float l, ll, lx; };

// The i-th of what is added to integers, the likeliest first: 0, -1, 1, -2, 2.
__device__ inline float step_of(int i) {
    return static_cast<float>(i % 2 ? -(i + 1) / 2 : i / 2);
}

template <class Facts>
struct SubBlock {
    using Levels = cuquant::Levels<Facts>;
    using Tables = typename Levels::Tables;
    static constexpr int count = Facts::sub_block, lanes = Facts::elements / count;
    using Block = Together<lanes>;

    float x[count];         // in units
    float top, bottom;      // the largest and the smallest of them
    float unit, per_unit;   // a power of two, the block's, and its inverse

    // From values to units: the largest magnitude of a block is then in [1, 4), or less where the
    // block's was below 2^-126.
    __device__ void to_units() {
        top = bottom = x[0];
#pragma unroll
        for (int i = 1; i < count; ++i) {
            top = fmaxf(top, x[i]);
            bottom = fminf(bottom, x[i]);
        }
        const float size = Block::largest(fmaxf(fabsf(top), fabsf(bottom)));
        const u32 exponent = min(max(bits_of(size) >> 23, 1u), 253u);
        unit = float_of(exponent << 23);
        per_unit = float_of((254u - exponent) << 23);
#pragma unroll
        for (int i = 0; i < count; ++i) x[i] = __fmul_rn(x[i], per_unit);
        top = __fmul_rn(top, per_unit);
        bottom = __fmul_rn(bottom, per_unit);
    }

    __device__ float total() const {
        float sum = x[0];
#pragma unroll
        for (int i = 1; i < count; ++i) sum = __fadd_rn(sum, x[i]);
        return sum;
    }

    // The levels nearest to (x + by) * inverse, and their sums.
    __device__ Sums sums(float by, float inverse, const Tables& tables) const {
        const float factor = Levels::factor(inverse);
        Sums sums;
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const float level = Levels::level(__fadd_rn(x[i], by), factor, tables);
            const float square = __fmul_rn(level, level), product = __fmul_rn(level, x[i]);
            sums.l = i ? __fadd_rn(sums.l, level) : level;
            sums.ll = i ? __fadd_rn(sums.ll, square) : square;
            sums.lx = i ? __fadd_rn(sums.lx, product) : product;
        }
        return sums;
    }

    // What is left of x + by when it is rounded with `scale`.
    __device__ float squared_error(float by, float scale, const Tables& tables) const {
        const float factor = Levels::factor(divide(1.0f, scale));
        float error;
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const float raised = __fadd_rn(x[i], by);
            const float rest = __fsub_rn(__fmul_rn(Levels::level(raised, factor, tables), scale), raised);
            const float square = __fmul_rn(rest, rest);
            error = i ? __fadd_rn(error, square) : square;
        }
        return error;
    }

    // ---- candidates of a sub-block alone -------------------------------------------------------

    // Levels on which to place the extreme value: seven around each center.
    static constexpr int anchors = Facts::has_min ? 7 : 14;
    __device__ static float anchor(int i) {
        const int center = Facts::has_min || i >= 7 ? Facts::high : Facts::low;
        return static_cast<float>(__dadd_rn(center, __dmul_rn(Facts::anchor_step, i % 7 - 3)));
    }

    // With levels l the best scale is sum(l x) / sum(l l), and it takes sum(l x)^2 / sum(l l) off
    // the sum of squares.
    __device__ float best_scale(const Tables& tables) const {
        const float extreme = furthest(top, bottom);
        float best = 0.0f, most = 0.0f;
#pragma unroll 1
        for (int i = 0; i < anchors; ++i) {
            const Sums found = sums(-0.0f, divide(anchor(i), extreme), tables);
            const float scale = divide(found.lx, found.ll);
            const float gain = __fmul_rn(scale, found.lx);
            if (gain > most) {
                best = scale;
                most = gain;
            }
        }
        return best;
    }

    // With levels l, (scale, -minimum) is the least-squares line through (l, x); where it would
    // need a negative minimum, or all l are equal, the line through 0.
    __device__ ScaleMinimum best_minimum(const Tables& tables) const {
        const float sum = total(), n = static_cast<float>(count);
        ScaleMinimum best{0.0f, fmaxf(__fdiv_rn(-sum, n), 0.0f)};
        float most = __fmul_rn(-best.minimum, sum);  // the mean, which suits constant sub-blocks
        const float floor = fminf(bottom, 0.0f), span = __fsub_rn(top, floor);
#pragma unroll 1
        for (int i = 0; i < anchors; ++i) {
            const Sums found = sums(-floor, divide(anchor(i), span), tables);
            const float spread = __fsub_rn(__fmul_rn(n, found.ll), __fmul_rn(found.l, found.l));
            float slope = divide(__fsub_rn(__fmul_rn(n, found.lx), __fmul_rn(found.l, sum)), spread);
            float below = divide(__fsub_rn(__fmul_rn(found.l, found.lx), __fmul_rn(found.ll, sum)), spread);
            if (below < 0.0f || spread <= 0.0f) {
                slope = divide(found.lx, found.ll);
                below = 0.0f;
            }
            const float gain = __fsub_rn(__fmul_rn(slope, found.lx), __fmul_rn(below, sum));
            if (gain > most) {
                best = {slope, below};
                most = gain;
            }
        }
        return best;
    }

    // ---- together with the other sub-blocks ----------------------------------------------------

    // A scale in units as a number for float16; subnormals go away from zero. Never -0.
    __device__ float range_half(float scale) const {
        scale = __fmul_rn(scale, unit);
        const float size = fabsf(scale);
        const float steps = copysignf(__fmul_rn(ceilf(__fmul_rn(size, 0x1p24f)), 0x1p-24f), scale);
        return __fadd_rn(size < 0x1p-14f ? steps : scale, 0.0f);
    }

    // What float16 makes of a number, in units; it saturates.
    __device__ float stored(float number) const {
        const float half = float_of_half(halves_of(fminf(fmaxf(number, -kHalfMax), kHalfMax), 0.0f));
        return __fmul_rn(half, per_unit);
    }

    // The scale and minimum that decoding will see, in units.
    __device__ ScaleMinimum effective(const Fit& fit) const {
        return {__fmul_rn(fit.sc, stored(fit.d)), __fmul_rn(fit.m, stored(fit.dmin))};
    }

    // The integers nearest to each sub-block's own scale and minimum.
    __device__ Fit first_fit(const Tables& tables) const {
        ScaleMinimum own;
        if constexpr (Facts::has_min) own = best_minimum(tables);
        else own = {best_scale(tables), 0.0f};
        constexpr float low = Facts::sub_low ? Facts::sub_low : Facts::sub_high, high = Facts::sub_high;
        const float extreme = furthest(Block::largest(own.scale), Block::smallest(own.scale));
        Fit fit;
        fit.d = range_half(__fdiv_rn(extreme, low));
        fit.dmin = range_half(__fdiv_rn(Block::largest(own.minimum), high));
        const float sc = rintf(__fmul_rn(own.scale, divide(1.0f, stored(fit.d))));
        const float m = rintf(__fmul_rn(own.minimum, divide(1.0f, stored(fit.dmin))));
        fit.sc = clip(sc, Facts::sub_low, Facts::sub_high);
        fit.m = clip(m, 0, Facts::sub_high);
        return fit;
    }

    // `fit` with those integers, one of `steps` steps away, that leave the least squared error.
    __device__ Fit nearby(const Fit& fit, int steps, const Tables& tables) const {
        const float d = stored(fit.d), dmin = stored(fit.dmin);
        Fit best = fit;
        float least = float_of(0x7F800000u);
#pragma unroll 1
        for (int i = 0; i < (Facts::has_min ? steps : 1); ++i) {
            const float m = clip(__fadd_rn(fit.m, step_of(i)), 0, Facts::sub_high);
            const float by = __fmul_rn(m, dmin);
#pragma unroll 1
            for (int j = 0; j < steps; ++j) {
                const float sc = clip(__fadd_rn(fit.sc, step_of(j)), Facts::sub_low, Facts::sub_high);
                const float error = squared_error(by, __fmul_rn(sc, d), tables);
                if (error < least) {
                    best.sc = sc;
                    best.m = m;
                    least = error;
                }
            }
        }
        return best;
    }

    // `fit` with the least-squares d and dmin of its integers and levels: x is about d a - dmin m
    // with a = sc * level. Where the two normal equations have no positive solution dmin stays.
    __device__ Fit refit(const Fit& fit, const Tables& tables) const {
        const ScaleMinimum now = effective(fit);
        const Sums own = sums(now.minimum, divide(1.0f, now.scale), tables);
        const float aa = Block::sum(__fmul_rn(__fmul_rn(fit.sc, fit.sc), own.ll));
        const float am = Block::sum(__fmul_rn(__fmul_rn(fit.sc, fit.m), own.l));
        const float mm = __fmul_rn(Block::sum(__fmul_rn(fit.m, fit.m)), static_cast<float>(count));
        const float ax = Block::sum(__fmul_rn(fit.sc, own.lx));
        const float mx = Block::sum(__fmul_rn(fit.m, total()));
        const float spread = __fsub_rn(__fmul_rn(aa, mm), __fmul_rn(am, am));
        const float d = divide(__fsub_rn(__fmul_rn(ax, mm), __fmul_rn(mx, am)), spread);
        const float dmin = divide(__fsub_rn(__fmul_rn(ax, am), __fmul_rn(mx, aa)), spread);
        const float d_alone = divide(__fadd_rn(ax, __fmul_rn(stored(fit.dmin), am)), aa);
        const bool both = spread > 0.0f && d > 0.0f && dmin > 0.0f;
        return {__fmul_rn(both ? d : d_alone, unit), both ? __fmul_rn(dmin, unit) : fit.dmin, fit.sc, fit.m};
    }

    // Whether float16 makes a subnormal of a number, or 0 of one that is not 0.
    __device__ static bool is_subnormal(float x) { return fabsf(x) < 0x1p-14f && x != 0.0f; }

    // Of float16's subnormals the one below or above a scale that errs less.
    __device__ float better_half(float scale, const Tables& tables) const {
        const float steps = __fmul_rn(fabsf(scale), 0x1p24f), whole = floorf(steps);
        if (!(steps < 1024.0f) || steps == whole) return scale;
        float best = scale, least = float_of(0x7F800000u);
#pragma unroll 1
        for (int up = 0; up < 2; ++up) {
            const float tried = __fadd_rn(copysignf(__fmul_rn(__fadd_rn(whole, up), 0x1p-24f), scale), 0.0f);
            const float error = squared_error(-0.0f, stored(tried), tables);
            if (!(error < least)) continue;
            best = tried;
            least = error;
        }
        return best;
    }

    __device__ float total_error(const Fit& fit, const Tables& tables) const {
        const ScaleMinimum now = effective(fit);
        return Block::sum(squared_error(now.minimum, now.scale, tables));
    }

    __device__ Fit search(const Tables& tables) const {
        if constexpr (Facts::sub_high == 1) {
            return {better_half(__fmul_rn(best_scale(tables), unit), tables), 0.0f, 1.0f, 0.0f};
        } else {
            const Fit first = nearby(first_fit(tables), 5, tables);
            Fit fit = refit(first, tables);
            const bool coarse = is_subnormal(fit.d) || is_subnormal(fit.dmin);
            fit = nearby(fit, 3, tables);
            if (__any_sync(~0u, coarse)) {  // seldom: the least-squares fit was rounded, and may be worse
                const bool worse = total_error(first, tables) < total_error(fit, tables);
                if (coarse && worse) fit = first;
            }
            return fit;
        }
    }
};

// ---- bytes --------------------------------------------------------------------------------------

// What a block holds, one byte a field; a half has two. `pieces` count fields in this order.
template <class Facts>
struct alignas(4) Staged {
    static constexpr int lanes = Facts::elements / Facts::sub_block;
    u8 codes[Facts::elements];
    u8 sc[lanes], m[lanes];
    u8 halves[4];  // d and dmin
};

// float16 bits of a number, infinite where it is too large unless it must saturate.
__device__ inline u32 searched_half(float x, bool saturate) {
    if (saturate) x = fminf(fmaxf(x, -kHalfMax), kHalfMax);
    return halves_of(x, 0.0f) & 0xFFFFu;
}

template <class Facts>
__device__ void stage_fields(
    Staged<Facts>& block, int sub, const SubBlock<Facts>& x, const Fit& fit, bool lost, bool saturate,
    const typename Levels<Facts>::Tables& tables) {
    using Levels = cuquant::Levels<Facts>;
    const ScaleMinimum now = x.effective(fit);
    const float factor = Levels::factor(divide(1.0f, now.scale));
    u32* words = reinterpret_cast<u32*>(block.codes + sub * Facts::sub_block);
#pragma unroll
    for (int i = 0; i < Facts::sub_block; i += 4) {
        u32 word = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j)
            word |= Levels::code(__fadd_rn(x.x[i + j], now.minimum), factor, tables) << 8 * j;
        words[i / 4] = word;
    }
    block.sc[sub] = static_cast<u8>(static_cast<int>(fit.sc) + Facts::sub_zero);
    block.m[sub] = static_cast<u8>(static_cast<int>(fit.m));
    if (sub) return;
    const u32 d = lost ? 0x7E00u : searched_half(fit.d, saturate), dmin = searched_half(fit.dmin, saturate);
    block.halves[0] = static_cast<u8>(d);
    block.halves[1] = static_cast<u8>(d >> 8);
    block.halves[2] = static_cast<u8>(dmin);
    block.halves[3] = static_cast<u8>(dmin >> 8);
}

// A byte of a block. Its `pieces`, from its lowest bit upwards, are bits of fields: the field's
// number, the first bit above 512's, how many less one above that.
template <class Facts>
__device__ u32 byte_of(const Staged<Facts>& block, const u16* pieces) {
    const u8* fields = block.codes;
    u32 byte = 0;
    for (int low = 0; low < 8; ++pieces) {
        const u32 piece = *pieces, bits = (piece >> 12) + 1;
        byte |= (fields[piece & 511u] >> (piece >> 9 & 7u) & ((1u << bits) - 1)) << low;
        low += static_cast<int>(bits);
    }
    return byte;
}

// ---- kernel -------------------------------------------------------------------------------------

// A lane's elements as float32; whether all of the block's are finite. Those of a block that are
// not become 0, after NaN and infinities were replaced if they are to be clamped.
template <class Facts, typename T>
__device__ bool load(SubBlock<Facts>& sub, const T* from, bool inside, bool clamp) {
    bool finite = true;
#pragma unroll
    for (int i = 0; i < Facts::sub_block; i += kChunk) {
        Raw<T> raw;
        if (inside) raw.load(from + i);
        else raw.zero();
        raw.values(sub.x + i);
    }
#pragma unroll
    for (int i = 0; i < Facts::sub_block; ++i) {
        if (clamp) sub.x[i] = clamped<T>(sub.x[i]);
        finite = finite && is_finite(sub.x[i]);
    }
    const bool lost = SubBlock<Facts>::Block::any(!finite);
#pragma unroll
    for (int i = 0; i < Facts::sub_block; ++i) sub.x[i] = lost ? 0.0f : sub.x[i];
    return !lost;
}

// Blocks of a multiprocessor: with room for registers, or some spill; on sm_120 three are too many.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kSearches = 2;
#else
constexpr int kSearches = 3;
#endif

// x: [count, elements], on 16 bytes; pieces: [bytes, 8], see byte_of; blocks: [count, bytes];
// overflow: null, or counts the effective scales that are not finite.
template <class Facts, typename T, int kThreads>
__global__ void __launch_bounds__(kThreads, kSearches) search(
    const T* __restrict__ x, const u16* __restrict__ pieces, i64 count, bool saturate, bool clamp,
    u8* __restrict__ blocks, u32* __restrict__ overflow) {
    constexpr int kLanes = SubBlock<Facts>::lanes, kBlocks = 32 / kLanes, kWarps = kThreads / 32;
    __shared__ typename Levels<Facts>::Tables tables;
    __shared__ Staged<Facts> staged[kWarps][kBlocks];  // 5 KB at most
    const int lane = threadIdx.x % 32, sub = lane % kLanes;
    Staged<Facts>* mine = staged[threadIdx.x / 32];
    Levels<Facts>::fill(tables, threadIdx.x, kThreads);
    __syncthreads();  // the tables are whole
    const i64 step = static_cast<i64>(gridDim.x) * kWarps * kBlocks;
    i64 first = (static_cast<i64>(blockIdx.x) * kWarps + threadIdx.x / 32) * kBlocks;
    for (; first < count; first += step) {
        const i64 block = first + lane / kLanes;
        SubBlock<Facts> values;
        const T* from = x + block * Facts::elements + sub * Facts::sub_block;
        const bool finite = load(values, from, block < count, clamp);
        values.to_units();
        const Fit fit = values.search(tables);
        stage_fields(mine[lane / kLanes], sub, values, fit, !finite, saturate, tables);
        if (overflow && block < count && finite && (searched_half(fit.d, saturate) & 0x7FFFu) == 0x7C00u)
            atomicAdd(overflow, 1u);
        __syncwarp();  // the fields are whole
        const i64 limit = (count - first) * Facts::bytes;
        for (int i = lane; i < kBlocks * Facts::bytes && i < limit; i += 32)
            blocks[first * Facts::bytes + i] =
                static_cast<u8>(byte_of(mine[i / Facts::bytes], pieces + i % Facts::bytes * 8));
        __syncwarp();  // they have been read
    }
}

}  // namespace cuquant
