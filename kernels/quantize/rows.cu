// What a layer does to rows, and their scales and codes, each row read once: a thread holds Work::units units of 16
// elements, and Work::lanes neighbouring threads a row: a part of a warp, a warp, or the whole block.
// Where there are no rows to be added up (gates, transforms, blocks of a few lanes), a "row" is any stretch.
#include "device/overlap.cuh"
#include "quantize/contest.cuh"
#include "quantize/find.cuh"
#include "quantize/quick.cuh"

namespace cuquant {

struct Values {};  // the Format that stands for none: the rounded values are stored themselves

// ---- over the threads of a row ------------------------------------------------------------------

// A word's maximum over kLanes threads, for all of them. Each kPlace is used once in a kernel.
template <int kLanes, int kPlace, typename Word>
__device__ Word row_max(Word word) {
    word = lanes_max<(kLanes < 32 ? kLanes : 32)>(word);
    if constexpr (kLanes > 32) {
        __shared__ Word words[kLanes / 32];
        if (threadIdx.x % 32 == 0) words[threadIdx.x / 32] = word;
        __syncthreads();
#pragma unroll
        for (int warp = 0; warp < kLanes / 32; ++warp) word = max(word, words[warp]);
    }
    return word;
}

// The sum of what kUnits units of each thread have: cuquant/reference/rows.py says in which order. Each Terms is used
// once in a kernel.
template <int kLanes, int kUnits, class Terms>
__device__ double row_sum(const float* sums) {
    constexpr int kPartials = 256, kLaps = kPartials / kLanes, kOwn = kLaps < kUnits ? kLaps : kUnits;
    double partial[kOwn];  // those of kLanes * i + lane
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
        const double sum = static_cast<double>(sums[u]);
        partial[u % kLaps] = u < kLaps ? 0.0 + sum : partial[u % kLaps] + sum;
    }
#pragma unroll
    for (int half = kLaps / 2; half; half /= 2) {  // those without units are 0
#pragma unroll
        for (int i = 0; i < half; ++i)
            if (i + half < kOwn) partial[i] += partial[i + half];
    }
    return row_total<kLanes, Terms>(partial[0]);
}

// Whether any row has it whose threads must stay together; rows of a warp or a block have it or not as a whole.
template <int kLanes>
__device__ bool uniform(bool of_row) {
    if constexpr (kLanes < 32) return __any_sync(~0u, of_row);
    else return of_row;
}

// ---- the units of a thread ----------------------------------------------------------------------

template <typename T, class Work>
struct Held {
    static constexpr int units = Work::units;
    Unit<T> unit[units];
    // f(values of a unit, its number), the units one after the other.
    template <class F>
    __device__ void each(F f) const {
#pragma unroll
        for (int u = 0; u < units; ++u) {
            float v[kUnit];
            unit[u].values(v);
            f(v, u);
        }
    }
    // f(a unit, its number), without unrolling, for what is seldom.
    template <class F>
    __device__ void each_slowly(F f) const {
#pragma unroll 1
        for (int n = 0; n < units; ++n) {
            Unit<T> chosen = unit[0];
#pragma unroll
            for (int u = 1; u < units; ++u)
                if (u == n) chosen = unit[u];
            f(chosen, n);
        }
    }
};

template <class Format> constexpr bool has_quotients = !Quick<Format, 0>::powers;
template <> inline constexpr bool has_quotients<Values> = false;

// Blocks that must fit a multiprocessor. Left alone, the compiler takes more registers than these thread blocks are
// worth on Hopper, or fewer; before it needs local memory for so few.
template <class Format, typename T, class Source, class Work>
__device__ constexpr int fitting() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
    constexpr int held = Work::units * static_cast<int>(sizeof(T));  // 8: 32 registers
    constexpr bool quotients = Work::share && has_quotients<Format>;
    if (held == 8 && Source::norm == 2 && !Source::wide && Work::share && Work::whole) return 512 / Work::threads;
    if (held == 8 && Source::gate) return 768 / Work::threads;
    if (held > 4 || Source::group > 32 * kUnit || (Source::norm == 2 && Source::wide)) return Work::fitting;
    if (Source::norm == 2 && quotients) return 768 / Work::threads;
    return (Source::group >= 128 && quotients ? 1024 : 896) / Work::threads;
#else
    return Work::fitting;
#endif
}

// Where a thread's units lie.
template <class Work>
struct Place {
    i64 row, first;  // the row, and its first unit in the array
    int own, along;  // units that the row has, and rows have
    int lane;
    __device__ Place(i64 units, int given) {
        constexpr bool kOne = Work::lanes == Work::threads;  // row in a block
        row = kOne ? blockIdx.x : static_cast<i64>(blockIdx.x) * (Work::threads / Work::lanes) + threadIdx.x / Work::lanes;
        lane = kOne ? threadIdx.x : threadIdx.x % Work::lanes;
        along = Work::whole ? Work::lanes * Work::units : given;
        first = row * along;
        own = Work::whole ? along : static_cast<int>(min(static_cast<i64>(along), max(units - first, 0ll)));
    }
    __device__ int unit(int u) const { return u * Work::lanes + lane; }  // in the row
    __device__ bool valid(int u) const { return Work::whole || unit(u) < own; }
    __device__ i64 at(int u) const { return first + unit(u); }  // in the array
};

template <typename T, class Work>
__device__ Unit<T> load(const void* from, const Place<Work>& place, int u) {
    Unit<T> unit;
    if (place.valid(u)) unit.load(static_cast<const T*>(from) + place.at(u) * kUnit);
    else unit.zero();
    return unit;
}

template <typename T, class Work>
__device__ void load(Held<T, Work>& held, const void* from, const Place<Work>& place) {
#pragma unroll
    for (int u = 0; u < Work::units; ++u) held.unit[u] = load<T>(from, place, u);
}

// To the L2 cache: what the block reads that starts when some of the present ones have ended. Without it warps waited
// for memory, too few of them to be busy meanwhile; from twice as far ahead it was slower than without.
constexpr int kAhead = 4 << 20;  // bytes

template <typename T, class Work>
__device__ void prefetch(const void* from, const Place<Work>& place, i64 units) {
    constexpr int kLine = 128 / (kUnit * sizeof(T));  // units
    constexpr int kBlocks = kAhead / (Work::threads * Work::units * kUnit * static_cast<int>(sizeof(T)));
    const i64 distance = static_cast<i64>(kBlocks) * (Work::threads / Work::lanes) * place.along;
#pragma unroll
    for (int u = 0; u < Work::units; ++u) {
        const i64 unit = place.at(u) + distance;
        if (threadIdx.x % kLine == 0 && unit < units) prefetch_line(static_cast<const T*>(from) + unit * kUnit);
    }
}

// x with another array: a sum, which is stored too, or what a gate lets through. All of it is loaded first, but
// where registers do not hold both.
template <class Source, typename T, class Work>
__device__ void combine(Held<T, Work>& x, const Operands& operands, const Place<Work>& place) {
    constexpr bool kAhead = Work::units <= 4;
    Held<T, Work> other;
    if constexpr (kAhead) load(other, operands.other, place);
#pragma unroll
    for (int u = 0; u < Work::units; ++u) {
        if constexpr (!kAhead) other.unit[u] = load<T>(operands.other, place, u);
        float a[kUnit], b[kUnit];
        x.unit[u].values(a);
        other.unit[u].values(b);
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
            if constexpr (Source::adds) a[i] = __fadd_rn(a[i], b[i]);
            else a[i] = gated<Source>(a[i], b[i]);
        }
        x.unit[u].round(a);
        if (Source::adds && operands.sum && place.valid(u)) x.unit[u].store(static_cast<T*>(operands.sum) + place.at(u) * kUnit);
    }
}

// What `terms` makes of the values of a unit, added up over the row. (A generic lambda is a host function to NVRTC.)
template <typename T, class Work>
struct RowSum {
    const Held<T, Work>& x;
    const Place<Work>& place;
    template <class Terms>
    __device__ double operator()(Terms terms) const {
        float sums[Work::units];
        x.each([&](float* v, int u) {
            terms(v);
            sums[u] = place.valid(u) ? unit_sum(v) : 0.0f;
        });
        return row_sum<Work::lanes, Work::units, Terms>(sums);
    }
};

template <class Source, typename T, class Work, bool kScaled>
__device__ void scale_rows(Held<T, Work>& x, const Norm& norm, const Operands& operands, const Place<Work>& place) {
    const float inverse = norm.inverse();
#pragma unroll
    for (int u = 0; u < Work::units; ++u) {
        if (!place.valid(u)) continue;
        float v[kUnit], weight[kUnit], bias[kUnit];
        x.unit[u].values(v);
        along_row<Source, T>(operands.weight, place.unit(u), weight);
        if constexpr (Source::bias) along_row<Source, T>(operands.bias, place.unit(u), bias);
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
            v[i] = __fmul_rn(__fmul_rn(centered<kMeans<Source, T>, kScaled>(v[i], norm), inverse), weight[i]);
            if constexpr (Source::bias) v[i] = __fadd_rn(v[i], bias[i]);
        }
        x.unit[u].round(v);
    }
}

// A unit times signs along the row.
template <class Source, typename T>
__device__ void turn(Unit<T>& unit, const void* signs, int at) {
    if constexpr (!Source::wide || sizeof(T) == 4) {
        unit.turn(Along<Source, T>(signs, at));
    } else {
        float v[kUnit], factors[kUnit];
        unit.values(v);
        along_row<Source, T>(signs, at, factors);
#pragma unroll
        for (int i = 0; i < kUnit; ++i) v[i] = __fmul_rn(v[i], factors[i]);
        unit.round(v);
    }
}

// x becomes what is quantized.
template <class Source, typename T, class Work>
__device__ void apply(Held<T, Work>& x, const Operands& operands, const Place<Work>& place) {
    if constexpr (Source::adds || Source::gate) combine<Source>(x, operands, place);
    if constexpr (Source::norm) {
        const RowSum<T, Work> sum{x, place};
        constexpr int means = kMeans<Source, T>;
        const Norm norm = norm_of<means>(operands, sum);
        if (uniform<Work::lanes>(!norm.within())) {  // seldom, if of any row whose threads must stay together
            if constexpr (!Source::adds) load(x, operands.x, place);  // anew: keeping it took registers
            scale_rows<Source, T, Work, true>(x, norm_again<means>(norm, operands, sum), operands, place);
        } else {
            scale_rows<Source, T, Work, false>(x, norm, operands, place);
        }
    }
    if constexpr (Source::group) {
        alignas(16) __shared__ float exchange[Turn<Source::group>::floats(Work::threads)];
        if constexpr (Source::weight) {  // all of them first: their loads take time
#pragma unroll
            for (int u = 0; u < Work::units; ++u)
                if (place.valid(u)) turn<Source>(x.unit[u], operands.weight, place.unit(u));
        }
#pragma unroll
        for (int u = 0; u < Work::units; ++u) hadamard<Source>(x.unit[u], operands.scale, exchange);
    }
}

// ---- scales and codes ---------------------------------------------------------------------------

template <typename T, class Work>
__device__ void clamp(Held<T, Work>& x) {
#pragma unroll
    for (int u = 0; u < Work::units; ++u) {
        float v[kUnit];
        x.unit[u].values(v);
#pragma unroll
        for (int i = 0; i < kUnit; ++i) v[i] = clamped<T>(v[i]);
        x.unit[u].round(v);
    }
}

template <class Rule> constexpr bool is_absmax = is_same<Rule, AbsMax> || is_same<Rule, PowerOfTwo>;

// The codes of a unit. kWithin: no element is beyond the peak by more than a rounding.
template <class Format, bool kWithin = false>
__device__ void encode_unit(
    float* v, const Numbers& numbers, u64* bits, const typename Format::Codec::EncodeTables& tables, const Lookup& lookup) {
    if constexpr (Format::Codec::is_codebook) {
        scale_values<Format, kUnit>(v, numbers.inverse, numbers.minimum);
#pragma unroll
        for (int h = 0; h < 2; ++h) bits[h] = encode_chunk<Format>(v + h * kChunk, 0, tables, lookup);
    } else {  // as scale_values, with the codes of zeros chosen, and not zeros
        const float zeros[kChunk] = {};
        const bool any = usable(numbers.inverse);
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
            if constexpr (Format::offset == Offset::Minimum) v[i] = __fadd_rn(v[i], -numbers.minimum);
            v[i] = __fmul_rn(v[i], numbers.inverse);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            bits[h] = encode_chunk<Format, kWithin>(v + h * kChunk, numbers.zero_point, tables, lookup);
            if (!any) bits[h] = encode_chunk<Format>(zeros, numbers.zero_point, tables, lookup);
        }
    }
}

// Blocks of Work::share neighbouring units. Whether any is not done: whose scale is contested, or which is not Quick.
// With kAll all are. `beyond` counts scales of Quick ones that their type cannot hold.
template <class Format, typename T, class Work, int kFlags, bool kAll>
__device__ bool quantize_blocks(
    const Unit<T>& unit, int u, const Place<Work>& place, const Quick<Format, kFlags>& quick, u8* packed, const Scales& scales,
    const Given& given, const typename Format::Codec::EncodeTables& tables, const Lookup& lookup, u32& beyond) {
    using Rule = typename Format::Rule;
    constexpr int kShare = Work::share;
    const int lane = threadIdx.x % kShare;
    const bool valid = place.valid(u);
    const i64 block = place.at(u) / kShare;
    float v[kUnit];
    typename Rule::State found;
    if constexpr (is_absmax<Rule>) {
        found.top = lanes_max<kShare>(Unit<T>::bits_of_size(unit.size()));
    } else {
        unit.values(v);
        found = find<Format, kShare, kUnit>(v, lane);
    }
    Numbers numbers;
    u64 bits[2];
    bool open = false;
    if constexpr (Quick<Format, kFlags>::possible && !kAll) {
        open = !quick.numbers(found.top, numbers) && valid;  // zeros beyond a row are none
        if (valid && lane == 0 && !open) beyond += numbers.overflows;
        numbers.overflows = 0;
        quick.encode(unit, numbers, bits, tables, lookup);
    } else {
        numbers = numbers_of<Format, kFlags>(found, kShare * kUnit, given, valid ? block : 0);
        unit.values(v);
        if constexpr (Contest<Format, kFlags>::possible && kAll) {
            settle<Format>(numbers, found, given, tables, lookup, [&](const Loss<Format>& loss) {
                u64 sum = 0;
#pragma unroll
                for (int i = 0; i < kUnit; ++i) sum += loss(v[i]);
                return lanes_sum<kShare>(sum);
            });
        } else if constexpr (Contest<Format, kFlags>::possible) {
            open = Contest<Format, kFlags>(numbers, given).open;
        }
        encode_unit<Format>(v, numbers, bits, tables, lookup);
        if constexpr (Quick<Format, kFlags>::possible) {
            Numbers before;
            if (quick.numbers(found.top, before)) numbers.overflows = 0;  // it has been counted
        }
    }
    if (valid && lane == 0) store_scale<Format>(scales, block, numbers);
    store_chunks<typename Format::Packing, 2>(packed, place.at(u), bits, valid);
    return open;
}

// What of a row its scale is made from.
template <class Format, typename T, class Work>
__device__ typename Format::Rule::State find_in_row(const Held<T, Work>& x, const Place<Work>& place) {
    using Rule = typename Format::Rule;
    constexpr int kLanes = Work::lanes;
    if constexpr (is_absmax<Rule>) {
        u32 size = 0;  // units beyond the row are zeros
#pragma unroll
        for (int u = 0; u < Work::units; ++u) size = Unit<T>::larger(size, x.unit[u].size());
        return {row_max<kLanes, 0>(Unit<T>::bits_of_size(size))};
    }
    const bool empty = !place.valid(0);  // units are the first ones
    float first[kUnit];
    x.unit[0].values(first);
    Extremes extremes = Extremes::of(bits_of(first[0]));
    x.each([&](float* v, int u) {
        if (!place.valid(u)) return;
#pragma unroll
        for (int i = 0; i < kUnit; ++i) extremes.add(bits_of(v[i]));
    });
    if constexpr (is_same<Rule, Range>) {
        const Range::State own = empty ? Range::none() : Range::of(extremes);
        return {-1 - row_max<kLanes, 0>(-1 - own.low), row_max<kLanes, 1>(own.high)};
    } else if constexpr (is_same<Rule, SignedMax>) {
        const u32 above = row_max<kLanes, 0>(empty ? 0u : extremes.above()), below = row_max<kLanes, 1>(empty ? 0u : extremes.below());
        const u32 top = max(above, below);
        u32 sign = below == top;
        const bool both = above == below;  // seldom: the first of both decides, or the first zero
        if (uniform<kLanes>(both)) {
            u32 key = 0;  // places count down, and are above 0
            x.each_slowly([&](const Unit<T>& unit, int u) {
                if (!place.valid(u)) return;
                float v[kUnit];
                unit.values(v);
                for (int i = 0; i < kUnit; ++i) {
                    const u32 bits = bits_of(v[i]), index = place.unit(u) * kUnit + i;
                    if ((bits & 0x7FFFFFFFu) == top) key = max(key, (0x3FFFFFFFu - index) * 2 + (bits >> 31));
                }
            });
            key = row_max<kLanes, 2>(key);
            if (both) sign = key & 1;
        }
        return {static_cast<u64>(top) << 32 | sign};
    }
}

// A row with one scale, which is block `block`. `lost`, where it is not null: set where the row loses a given scale
// of the whole tensor.
template <class Format, typename T, class Work, int kFlags>
__device__ void quantize_row(
    const Held<T, Work>& x, const Place<Work>& place, i64 block, u8* packed, const Scales& scales, const Given& given,
    const typename Format::Codec::EncodeTables& tables, const Lookup& lookup, u32* lost) {
    constexpr int kLanes = Work::lanes;
    const auto found = find_in_row<Format, T, Work>(x, place);
    const bool any = place.own > 0;
    Numbers numbers = numbers_of<Format, kFlags>(found, static_cast<i64>(place.own) * kUnit, given, any ? block : 0);
    if constexpr (Contest<Format, kFlags>::possible) {
        const bool open = Contest<Format, kFlags>(numbers, given).open;
        if (uniform<kLanes>(open)) {  // seldom
            settle<Format>(numbers, found, given, tables, lookup, [&](const Loss<Format>& loss) {
                u64 sum = 0;
                x.each_slowly([&](const Unit<T>& unit, int u) {
                    if (!place.valid(u)) return;
                    float v[kUnit];
                    unit.values(v);
                    for (int i = 0; i < kUnit; ++i) sum += loss(v[i]);
                });
                sum = lanes_sum<(kLanes < 32 ? kLanes : 32)>(sum);
                if constexpr (kLanes > 32) {
                    __shared__ u64 sums[kLanes / 32];
                    __syncthreads();  // the sums before have been read
                    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
                    __syncthreads();
                    sum = 0;
                    for (int warp = 0; warp < kLanes / 32; ++warp) sum += sums[warp];
                }
                return sum;
            });
        }
    }
    if (any && place.lane == 0) {
        if (block || !place.row) store_scale<Format>(scales, block, numbers);
        if (lost && Format::Rule::lost(found)) *lost = 1;  // whoever says so
    }
    // A float32 scale is the peak's share of the largest magnitude, but for a rounding.
    constexpr bool kWithin = is_same<typename Format::Rule, AbsMax> && Format::stored == Stored::Float32 && !(kFlags & kGiven);
    x.each([&](float* v, int u) {
        u64 bits[2];
        encode_unit<Format, kWithin>(v, numbers, bits, tables, lookup);
        store_chunks<typename Format::Packing, 2>(packed, place.at(u), bits, place.valid(u));
    });
}

// `units` in the array, `along` in a row (any number where there are no rows); the scale of row r is the one at
// r * step, where a scale is a row's.
template <class Format, typename T, class Source, class Work, int kFlags>
__global__ void __launch_bounds__(Work::threads, fitting<Format, T, Source, Work>()) rows(
    Operands operands, T* __restrict__ values, u8* __restrict__ packed, Scales scales, Given given, Lookup lookup,
    i64 units, int along, int step, u32* lost) {
    const Place<Work> place(units, along);
    Held<T, Work> x;
    load(x, operands.x, place);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if constexpr (!Source::adds) prefetch<T>(operands.x, place, units);  // which has enough on its way
#endif
    if constexpr (is_same<Format, Values>) {
        apply<Source>(x, operands, place);
#pragma unroll
        for (int u = 0; u < Work::units; ++u)
            if (place.valid(u)) x.unit[u].store(values + place.at(u) * kUnit);
    } else {
        __shared__ typename Format::Codec::EncodeTables tables;
        if constexpr (Format::Codec::is_codebook) {
            Format::Codec::fill(tables, lookup, threadIdx.x, Work::threads);
            __syncthreads();
        }
        const float global = Quick<Format, kFlags>::early(given);
        apply<Source>(x, operands, place);
        if constexpr (kFlags & kClamp) clamp(x);
        if constexpr (Work::share) {
            const Quick<Format, kFlags> quick(given, global);
            bool open = false;
            u32 beyond = 0;
#pragma unroll
            for (int u = 0; u < Work::units; ++u)
                open |= quantize_blocks<Format, T, Work, kFlags, false>(
                    x.unit[u], u, place, quick, packed, scales, given, tables, lookup, beyond);
            if (beyond && scales.overflow) atomicAdd(scales.overflow, beyond);
            if constexpr (Quick<Format, kFlags>::possible || Contest<Format, kFlags>::possible) {
                if (!__any_sync(~0u, open)) return;  // nearly always
                const Scales again = Quick<Format, kFlags>::possible ? scales : scales.uncounted();
                x.each_slowly([&](const Unit<T>& unit, int u) {
                    quantize_blocks<Format, T, Work, kFlags, true>(
                        unit, u, place, quick, packed, again, given, tables, lookup, beyond);
                });
            }
        } else {
            quantize_row<Format, T, Work, kFlags>(x, place, place.row * step, packed, scales, given, tables, lookup, lost);
        }
    }
}

// Where a row has lost the scale of the tensor it is NaN, and all codes are that of zero. A thread a chunk.
template <class Format, int kThreads>
__global__ void __launch_bounds__(kThreads) lose(u8* __restrict__ packed, Scales scales, Lookup lookup, i64 chunks, const u32* lost) {
    __shared__ typename Format::Codec::EncodeTables tables;
    if (!*lost) return;  // nearly always
    if constexpr (Format::Codec::is_codebook) {
        Format::Codec::fill(tables, lookup, threadIdx.x, kThreads);
        __syncthreads();
    }
    const i64 thread = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (thread == 0) {
        float effective;
        bool overflow;
        u32 stored;
        store_of<Format::stored>(float_of(0x7FC00000u), 1.0f, stored, effective, overflow);
        store_bits<Format::stored>(scales.scale, 0, stored);
    }
    const float zeros[kChunk] = {};
    const u64 bits = encode_chunk<Format>(zeros, 0, tables, lookup);
    for (i64 c = thread; c < chunks; c += static_cast<i64>(gridDim.x) * kThreads)
        store_chunk_bytes<typename Format::Packing>(packed, c, bits, chunks * Format::Packing::bits);
}

}  // namespace cuquant
