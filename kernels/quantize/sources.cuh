// What a layer does to a row before it is quantized: the steps of cuquant/reference/rows.py. A Source says which:
// adds: whether a residual is added first; norm: 1 RMS, 2 layer; gate: 1 SiLU, 2 GELU of x times another array;
// group: of a Walsh-Hadamard transform; weight, bias: vectors along the row (a transform's are signs); wide: whether
// these are float32 and not of the row's type.
#pragma once
#include "device/elementary.cuh"
#include "device/pairs.cuh"
#include "format/chunk.cuh"

namespace cuquant {

// Neighbouring elements that one thread holds, and adds up in float32.
constexpr int kUnit = 16;

struct Operands {
    const void* x;
    const void* other;   // residual, or what a gate is multiplied with
    const void* weight;  // [K]
    const void* bias;    // [K]
    void* sum;           // where x + residual goes, or null
    float eps, least_eps;  // the least one of rows in other units
    float scale;         // of a transform: 1 / sqrt(group)
    double share;        // 1 / K
};

// A unit as it lies in memory.
template <typename T>
struct Unit {
    static constexpr bool pairs = kHasPairs && sizeof(T) == 2;
    Raw<T> half[2];
    __device__ void zero() { half[0].zero(), half[1].zero(); }
    __device__ void load(const T* from) { half[0].load(from), half[1].load(from + kChunk); }
    __device__ void values(float* v) const { half[0].values(v), half[1].values(v + kChunk); }
    __device__ void round(const float* v) {
        constexpr int kEach = 16 / sizeof(T);  // elements of 16 bytes
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int i = 0; i < Raw<T>::count; ++i) half[h].part[i] = rounded(v + h * kChunk + i * kEach);
        }
    }
    __device__ static uint4 rounded(const float* v) {
        if constexpr (sizeof(T) == 4) return words_of(v);
        else return make_uint4(pair_of<T>(v[0], v[1]), pair_of<T>(v[2], v[3]), pair_of<T>(v[4], v[5]), pair_of<T>(v[6], v[7]));
    }
    __device__ void store(T* to) const {
#pragma unroll
        for (int i = 0; i < 2 * Raw<T>::count; ++i)
            store16(reinterpret_cast<uint4*>(to) + i, half[i / Raw<T>::count].part[i % Raw<T>::count]);
    }
    // f(a word of it), one after the other but for the first.
    template <class F>
    __device__ void later_words(F f) const {
#pragma unroll
        for (int i = 0; i < 2 * Raw<T>::count; ++i) {
            const uint4& part = half[i / Raw<T>::count].part[i % Raw<T>::count];
            if (i) f(part.x);
            f(part.y), f(part.z), f(part.w);
        }
    }
    // Times the signs of another unit, which are 1 and -1.
    __device__ void turn(const Unit& signs) {
        constexpr u32 kSigns = sizeof(T) == 4 ? 0x80000000u : 0x80008000u;
#pragma unroll
        for (int i = 0; i < 2 * Raw<T>::count; ++i) {
            uint4& own = half[i / Raw<T>::count].part[i % Raw<T>::count];
            const uint4& other = signs.half[i / Raw<T>::count].part[i % Raw<T>::count];
            own.x ^= other.x & kSigns, own.y ^= other.y & kSigns, own.z ^= other.z & kSigns, own.w ^= other.w & kSigns;
        }
    }
    // What the largest magnitude of units is found by: of a unit, of two, and its bits as a float32. Bits of floats
    // compare like integers of their sign, in pairs too: the signed maximum is the largest number without a sign,
    // the other one the smallest number with one; where there is none of its kind, one of the other kind.
    __device__ u32 size() const {
        if constexpr (pairs) {
            u32 above = half[0].part[0].x, below = above;
            later_words([&](u32 word) {
                above = signed_pair_max(above, word);
                below = pair_max(below, word);
            });
            return pair_max(above & 0x7FFF7FFFu, below & 0x7FFF7FFFu);
        } else {
            float v[kUnit];
            values(v);
            Extremes extremes = Extremes::of(bits_of(v[0]));
#pragma unroll
            for (int i = 1; i < kUnit; ++i) extremes.add(bits_of(v[i]));
            return extremes.furthest();
        }
    }
    __device__ static u32 larger(u32 a, u32 b) {
        if constexpr (pairs) return pair_max(a, b);
        else return max(a, b);
    }
    __device__ static u32 bits_of_size(u32 size) {
        if constexpr (!pairs) return size;
        const u32 most = max(size << 16, size & 0xFFFF0000u);
        if constexpr (is_same<T, Half>) return bits_of(float_of_high_half(most));
        return most;
    }
};

// The elements of a vector along the row that belong to a unit.
template <class Source, typename T>
struct Along : Unit<Choice<Source::wide != 0, float, T>> {
    using Own = Choice<Source::wide != 0, float, T>;
    __device__ Along(const void* from, i64 unit) { this->load(static_cast<const Own*>(from) + unit * kUnit); }
};
template <class Source, typename T>
__device__ void along_row(const void* from, i64 unit, float* v) {
    Along<Source, T>(from, unit).values(v);
}

// Eight neighbours in index order, then the two halves.
__device__ inline float unit_sum(const float* v) {
    float low = v[0], high = v[kChunk];
#pragma unroll
    for (int i = 1; i < kChunk; ++i) {
        low = __fadd_rn(low, v[i]);
        high = __fadd_rn(high, v[kChunk + i]);
    }
    return __fadd_rn(low, high);
}

// The partial sums of kLanes threads, added by a tree, for all of them. Each Terms is used once in a kernel.
template <int kLanes, class Terms>
__device__ double row_total(double sum) {
    if constexpr (kLanes > 32) {
        constexpr int kWarps = kLanes / 32;
        __shared__ double all[kLanes];
        all[threadIdx.x] = sum;
        __syncthreads();
        double of[kWarps];
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) of[warp] = all[warp * 32 + threadIdx.x % 32];
#pragma unroll
        for (int half = kWarps / 2; half; half /= 2) {
#pragma unroll
            for (int i = 0; i < half; ++i) of[i] += of[i + half];
        }
        sum = of[0];
    }
#pragma unroll
    for (int distance = (kLanes < 32 ? kLanes : 32) / 2; distance; distance /= 2)
        sum += __shfl_xor_sync(~0u, sum, distance);
    return sum;
}

// ---- norms --------------------------------------------------------------------------------------

// Mean squares that float32 sums hold well; rows with others are multiplied by a power of two.
constexpr float kLeast = 0x1p-80f, kMost = 0x1p126f, kSmall = 0x1p-100f, kLarge = 0x1p100f;

// How often a layer norm takes the mean off. The rounding of a float32's mean is as large as what a row of nearly
// equal numbers leaves, so it is taken off what is left, too; 16-bit numbers are much further apart, and sums of equal
// ones are exact.
template <class Source, typename T> constexpr int kMeans = Source::norm == 2 ? (sizeof(T) == 4 ? 2 : 1) : 0;

struct Norm {
    float unit, mean, rest, square;  // rest: the mean of what the mean leaves; square: the mean square + eps
    __device__ bool within() const { return square >= kLeast && square <= kMost; }
    __device__ float inverse() const { return __frcp_rn(__fsqrt_rn(square)); }
};

// x of a row in its unit, less the means of a layer norm: the first kCount of them.
template <int kCount, bool kScaled>
__device__ float centered(float x, const Norm& norm) {
    if constexpr (kScaled) x = __fmul_rn(x, norm.unit);
    if constexpr (kCount > 0) x = __fadd_rn(x, -norm.mean);
    if constexpr (kCount > 1) x = __fadd_rn(x, -norm.rest);
    return x;
}

// The mean of a row without the first kCount means.
template <int kCount, bool kScaled, class Sum>
__device__ float mean_of(const Norm& norm, double share, Sum sum) {
    const double total = sum([&](float* v) {
        for (int i = 0; i < kUnit; ++i) v[i] = centered<kCount, kScaled>(v[i], norm);
    });
    return static_cast<float>(total * share);
}

// The Norm of a row. `sum(f)` adds up f over the row: f turns the values of a unit into what is added.
template <int kCount, bool kScaled, class Sum>
__device__ Norm norm_in(float unit, float eps, double share, Sum sum) {
    Norm norm{unit, 0.0f, 0.0f, 0.0f};
    if constexpr (kCount > 0) norm.mean = mean_of<0, kScaled>(norm, share, sum);
    if constexpr (kCount > 1) norm.rest = mean_of<1, kScaled>(norm, share, sum);
    const double total = sum([&](float* v) {
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
            const float x = centered<kCount, kScaled>(v[i], norm);
            v[i] = __fmul_rn(x, x);
        }
    });
    norm.square = __fadd_rn(static_cast<float>(total * share), eps);
    return norm;
}

// Of a row in the units that its numbers come in.
template <int kCount, class Sum>
__device__ Norm norm_of(const Operands& operands, Sum sum) {
    return norm_in<kCount, false>(1.0f, operands.eps, operands.share, sum);
}

// Seldom: in other units, where `norm` is not within. Sums that overflow in both directions are NaN. A row that varies
// so little around a mean of 1 or more is constant: in larger units its mean might overflow.
template <int kCount, class Sum>
__device__ Norm norm_again(const Norm& norm, const Operands& operands, Sum sum) {
    const float large = fabsf(norm.mean) >= 1.0f ? 1.0f : kLarge;
    const float unit = norm.square <= 1.0f ? large : kSmall;
    const float eps = fmaxf(__fmul_rn(__fmul_rn(operands.eps, unit), unit), operands.least_eps);
    const Norm other = norm_in<kCount, true>(unit, eps, operands.share, sum);
    return norm.within() ? norm : other;
}

// ---- gates --------------------------------------------------------------------------------------

template <class Source>
__device__ float gated(float gate, float up) {
    return __fmul_rn(Source::gate == 1 ? silu_of(gate) : gelu_of(gate), up);
}

// ---- Walsh-Hadamard -----------------------------------------------------------------------------

// The sums and differences of numbers that are up to kCount / 2 apart, kApart elements for each.
template <int kCount, int kApart>
__device__ void butterflies(float* v) {
#pragma unroll
    for (int distance = 1; distance < kCount; distance *= 2) {
#pragma unroll
        for (int i = 0; i < kCount * kApart; ++i) {
            if (i / kApart & distance) continue;
            const float a = v[i], b = v[i + distance * kApart];
            v[i] = __fadd_rn(a, b);
            v[i + distance * kApart] = __fadd_rn(a, -b);
        }
    }
}

// kCount neighbours to shared memory and back, by as few accesses as may be.
template <int kCount>
__device__ void put(float* to, const float* v) {
    if constexpr (kCount % 4 == 0) {
#pragma unroll
        for (int i = 0; i < kCount; i += 4) *reinterpret_cast<float4*>(to + i) = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
    } else if constexpr (kCount == 2) {
        *reinterpret_cast<float2*>(to) = make_float2(v[0], v[1]);
    } else {
        *to = *v;
    }
}
template <int kCount>
__device__ void get(float* v, const float* from) {
    if constexpr (kCount % 4 == 0) {
#pragma unroll
        for (int i = 0; i < kCount; i += 4) {
            const float4 part = *reinterpret_cast<const float4*>(from + i);
            v[i] = part.x, v[i + 1] = part.y, v[i + 2] = part.z, v[i + 3] = part.w;
        }
    } else if constexpr (kCount == 2) {
        const float2 part = *reinterpret_cast<const float2*>(from);
        v[0] = part.x, v[1] = part.y;
    } else {
        *v = *from;
    }
}

// Where the units of a group lie in shared memory while threads hold elements of all of them. A unit and what follows
// it has 20 floats and a group 16 more than a multiple of 32, so that no two threads meet in a bank.
template <int kGroup>
struct Turn {
    static constexpr int lanes = kGroup / kUnit, own = kUnit / (lanes < kUnit ? lanes : kUnit);  // elements of each unit
    static constexpr bool used = lanes >= 4 && lanes <= kUnit;
    static constexpr int unit = 20, group = lanes * unit % 32 == 16 ? lanes * unit : lanes * unit + 16;
    __device__ static constexpr int floats(int threads) { return used ? threads / lanes * group : lanes > 32 ? threads * kUnit : 4; }
};

// The sums and differences of a group whose units are held by neighbouring threads. `exchange`, Turn::floats(threads)
// aligned to 16 bytes, is for those of a warp, and of 64 threads: a warp's and its neighbour's.
template <int kGroup>
__device__ void transform(float* v, float* exchange) {
    using Turned = Turn<kGroup>;
    constexpr int kLanes = Turned::lanes;
    butterflies<(kGroup < kUnit ? kGroup : kUnit), 1>(v);
    if constexpr (Turned::used) {  // by shuffles each distance takes two operations an element
        constexpr int own = Turned::own;
        const int lane = threadIdx.x % kLanes;
        float* group = exchange + threadIdx.x / kLanes * Turned::group;
        put<kUnit>(group + lane * Turned::unit, v);
        __syncwarp();
#pragma unroll
        for (int l = 0; l < kLanes; ++l) get<own>(v + l * own, group + l * Turned::unit + lane * own);
        butterflies<kLanes, own>(v);
#pragma unroll
        for (int l = 0; l < kLanes; ++l) put<own>(group + l * Turned::unit + lane * own, v + l * own);
        __syncwarp();
        get<kUnit>(v, group + lane * Turned::unit);  // which no other thread reads before it is written again
    } else {
        // The upper one of a pair takes its own off the other's; the product is exact.
#pragma unroll
        for (int lanes = 1; lanes < kLanes && lanes < 32; lanes *= 2) {
            const float sign = threadIdx.x & lanes ? -1.0f : 1.0f;
#pragma unroll
            for (int i = 0; i < kUnit; ++i) v[i] = __fmaf_rn(v[i], sign, __shfl_xor_sync(~0u, v[i], lanes));
        }
    }
    if constexpr (kLanes > 32) {
        const float sign = threadIdx.x & 32 ? -1.0f : 1.0f;
        __syncthreads();  // the exchange before has been read
#pragma unroll
        for (int i = 0; i < kUnit; ++i) exchange[i * blockDim.x + threadIdx.x] = v[i];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kUnit; ++i)
            v[i] = __fmaf_rn(v[i], sign, exchange[i * blockDim.x + (threadIdx.x ^ 32)]);
    }
}

// Whether a thread of the same group says so, where any thread does.
template <int kGroup>
__device__ bool group_any(bool own, float* exchange) {
    u32 any = own;
    for (int lanes = 1; lanes < kGroup / kUnit && lanes < 32; lanes *= 2) any |= __shfl_xor_sync(~0u, any, lanes);
    if constexpr (kGroup / kUnit > 32) {
        __syncthreads();
        exchange[threadIdx.x] = static_cast<float>(any);
        __syncthreads();
        any |= exchange[threadIdx.x ^ 32] != 0.0f;
    }
    return any;
}

// Whether a number of a unit is not finite.
__device__ inline bool any_lost(const float* v) {
    float probe = 0.0f;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) probe = __fmaf_rn(v[i], 0.0f, probe);
    return probe != probe;
}

// `unit` becomes its part of the orthonormal transform of its group.
template <class Source, typename T>
__device__ void hadamard(Unit<T>& unit, float scale, float* exchange) {
    constexpr int kGroup = Source::group;
    float v[kUnit], scaled[kUnit];
    unit.values(v);
    transform<kGroup>(v, exchange);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) scaled[i] = __fmul_rn(v[i], scale);
    Unit<T> turned;
    turned.round(scaled);
    if constexpr (!is_same<T, Half>) {  // whose sums are far below float32's largest number
        // What is rounded to 16 bits is infinite where the sum is, and seldom else; its size is found anyway.
        const bool maybe = Unit<T>::pairs ? Unit<T>::bits_of_size(turned.size()) >= 0x7F800000u : any_lost(v);
        if (kGroup / kUnit > 32 ? __syncthreads_or(maybe) != 0 : __any_sync(~0u, maybe) != 0) {
            // Seldom: once more to see whether sums are lost, and in units of 1 / group.
            bool lost = false;
            float share = 1.0f;
#pragma unroll 1
            for (int attempt = 0; attempt < 2; ++attempt) {
                unit.values(v);
#pragma unroll
                for (int i = 0; i < kUnit; ++i) v[i] = __fmul_rn(v[i], share);
                transform<kGroup>(v, exchange);
                if (attempt) break;
                lost = group_any<kGroup>(any_lost(v), exchange);
                share = 1.0f / kGroup;
            }
#pragma unroll
            for (int i = 0; i < kUnit; ++i) v[i] = __fmul_rn(__fmul_rn(v[i], scale), static_cast<float>(kGroup));
            if (lost) turned.round(v);
        }
    }
    unit = turned;
}

}  // namespace cuquant
