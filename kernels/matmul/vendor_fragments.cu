// Strips of a weight of layout "fragments/1", decoded to a matrix of float32, float16 or bfloat16 for the vendor's
// GEMM: each value is rounded once. A warp takes a unit of 16 rows x 64 columns at a time and turns it in shared
// memory, so that a lane stores 8 neighbours.
#include "layout/packed_weight.cuh"
#include "matmul/vendor_rounded.cuh"
#include "matmul/float16_range.cuh"
#include "dequantize/values.cuh"

namespace cuquant {

constexpr int kTurnPitch = kUnit + 8;  // floats: lanes of 4 rows meet different banks

template <class Format, int kLie>
struct UnitDecoder {
    using Own = Group<Format, kLie>;
    using Codec = typename Format::Codec;
    using Tables = typename Codec::DecodeTables;
    static constexpr int bits = Format::Packing::bits;

    // decode(code) * scale + minimum, in float32 as `dequantize` has it; kSaturated: what is made of finite numbers
    // is finite too.
    template <bool kSaturated>
    __device__ static float value(u32 code, float scale, float minimum, float shift, const Tables& tables) {
        if constexpr (Own::blocks) {
            const float x = __fmul_rn(Codec::decode(code, shift, tables), scale);
            if constexpr (Own::Parts::minimums) return __fadd_rn(x, minimum);
            return x;
        } else {
            const float x = value_of<Format>(code, scale, minimum, shift, tables);
            return kSaturated ? saturated_value<Format, float>(x, code, scale, minimum, shift, tables) : x;
        }
    }
    // Registers 0 .. 3 of step kStep: see cuquant/array/fragments.py. They return the largest magnitude.
    template <bool kSaturated, int kStep, int kRegister>
    __device__ static float one(const Prepacked& w, const u32* words, const Own& own, const Tables& tables, float* turned, int g, int t) {
        constexpr int h = kRegister % 2;
        const u32 codes = raw_codes<PairsOf<Codec, bits>, bits, 4 * kStep + kRegister>(words);
        float scale = own.value(h), shift = Codec::shift_of(0);
        if constexpr (!Own::blocks && Own::stored == Stored::E4M3) scale = kept_finite(__fmul_rn(scale, *w.global_scale), scale, *w.global_scale);
        if constexpr (Own::zeros) shift = Codec::shift_of(own.zero >> 8 * h & 0xFFu);
        const float low = value<kSaturated>(codes & 0xFFFFu, scale, own.minimum_of(h), shift, tables);
        const float high = value<kSaturated>(codes >> 16, scale, own.minimum_of(h), shift, tables);
        float* to = turned + (g + 8 * h) * kTurnPitch + 16 * kStep + 2 * t + kRegister / 2 * 8;
        *reinterpret_cast<float2*>(to) = make_float2(low, high);
        return fmaxf(fabsf(low), fabsf(high));
    }
    template <bool kSaturated, int kStep>
    __device__ static float step(const Prepacked& w, const u32* words, const Own& own, const Tables& tables, float* turned, int g, int t) {
        const float a = one<kSaturated, kStep, 0>(w, words, own, tables, turned, g, t);
        const float b = one<kSaturated, kStep, 1>(w, words, own, tables, turned, g, t);
        const float c = one<kSaturated, kStep, 2>(w, words, own, tables, turned, g, t);
        const float d = one<kSaturated, kStep, 3>(w, words, own, tables, turned, g, t);
        return fmaxf(fmaxf(a, b), fmaxf(c, d));
    }
    // A unit, of which load(s) brings to `own` what step s needs.
    template <bool kSaturated, typename Load>
    __device__ static float unit(const Prepacked& w, const u32* words, const Own& own, const Load& load, const Tables& tables, float* turned, int g, int t) {
        load(0);
        float largest = step<kSaturated, 0>(w, words, own, tables, turned, g, t);
        load(1);
        largest = fmaxf(largest, step<kSaturated, 1>(w, words, own, tables, turned, g, t));
        load(2);
        largest = fmaxf(largest, step<kSaturated, 2>(w, words, own, tables, turned, g, t));
        load(3);
        return fmaxf(largest, step<kSaturated, 3>(w, words, own, tables, turned, g, t));
    }
};

// Where a unit goes: rows and columns from `row` and `k` on of a matrix [rows, pitch] of a Type.
struct UnitOut {
    void* out;
    int type;
    i64 row, k, rows, depth, pitch;

    // A lane stores chunks of 4 rows; kFits: see store_rounded.
    template <bool kFits>
    __device__ void store(const float* turned, int lane, float unit) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int r = 4 * i + lane / 8, column = lane % 8 * kChunk;
            if (row + r < rows && k + column < depth)
                store_rounded<kFits>(out, type, (row + r) * pitch + k + column, turned + r * kTurnPitch + column, unit);
        }
    }
};

// out: [rows, pitch] from row 16 first of the weight on; pitch is a multiple of 8. `fine`: groups in a unit, else 1;
// `group_units`: units of a group, 0 where a row is one; `unit`: what values are
// multiplied by before they are rounded, or null. There are less than 2^32 units.
template <class Format, int kLie, int kWarps, int kEach>
__global__ void __launch_bounds__(32 * kWarps) dequantize_fragments(
    const __grid_constant__ Prepacked weights, const __grid_constant__ Lookup lookup, void* __restrict__ out, int type, const float* __restrict__ unit, i64 first, i64 rows,
    i64 depth, i64 pitch, int group_units, int fine) {
    using Decode = UnitDecoder<Format, kLie>;
    const float factor = unit ? *unit : 1.0f;  // early, beside what else is loaded
    __shared__ typename Decode::Tables tables;
    __shared__ __align__(16) float staged[kWarps][kStrip * kTurnPitch];
    if constexpr (Decode::Codec::is_codebook) {
        Decode::Codec::fill(tables, lookup, threadIdx.x, 32 * kWarps);
        __syncthreads();
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float* turned = staged[warp];
    const u32 across = weights.units, units = static_cast<u32>((rows + kStrip - 1) / kStrip) * across;
#pragma unroll 1
    for (int u = 0; u < kEach; ++u) {
        const u32 own_unit = (blockIdx.x * kEach + u) * kWarps + warp;
        if (own_unit >= units) return;
        const u32 strip = own_unit / across, column = own_unit - strip * across;
        Words<Decode::bits> words;
        words.load(weights.codes + ((first + strip) * across + column) * Words<Decode::bits>::unit_words(), lane);
        typename Decode::Own own;
        typename Decode::Own::Strip groups;
        groups.set(weights, first + strip, 0, g);
        // Beyond the last group there are columns of the padding only.
        const auto load = [&](int s) {
            if (s * fine % 4) return;
            const i64 group = fine > 1 ? min(static_cast<i64>(column) * fine + s * fine / 4, weights.groups - 1) : group_units ? column / group_units : 0;
            own.load(groups, static_cast<u32>(group));
        };
        const float largest = Decode::template unit<false>(weights, words.w, own, load, tables, turned, g, t);
        if (!Decode::Own::blocks && largest > Element<float>::top)  // seldom
            Decode::template unit<true>(weights, words.w, own, load, tables, turned, g, t);
        __syncwarp();
        const float far = __fmul_rn(warp_max(largest), factor);
        const UnitOut to = {out, type, static_cast<i64>(strip) * kStrip, static_cast<i64>(column) * kUnit, rows, depth, pitch};
        if (far > top_of(type)) to.store<false>(turned, lane, factor);  // seldom
        else to.store<true>(turned, lane, factor);
        __syncwarp();
    }
}

}  // namespace cuquant
