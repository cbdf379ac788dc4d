// Codecs, scale rules and packings: what a Format struct is made of. The same words, with the same
// meaning, as cuquant/formats. A thread's unit is a chunk: 8 consecutive elements of a row.
#pragma once
#include "vector.cuh"

namespace cuquant {

constexpr int kChunk = 8;

template <class A, class B> constexpr bool is_same = false;
template <class A> constexpr bool is_same<A, A> = true;
constexpr float kFloatMax = 3.4028234663852886e38f, kHalfMax = 65504.0f;

__device__ inline bool is_finite(float x) { return (bits_of(x) & 0x7FFFFFFFu) < 0x7F800000u; }

// Whether 1 / scale is a finite number but 0. Where it is not, every code is that of zero: one rule for
// zero, vanishing and non-finite blocks.
__device__ inline bool usable(float inverse) { return (bits_of(inverse) << 1) - 1u < 0xFEFFFFFFu; }

// x / kPeak, correctly rounded; by a power of two that is a product.
template <int kPeakBits>
__device__ inline float divided(float x) {
    constexpr int exponent = (kPeakBits >> 23 & 0xFF) - 127;
    if constexpr ((kPeakBits & 0x7FFFFF) == 0) {
        return __fmul_rn(x, float_of(static_cast<u32>((kPeakBits & 0x80000000) | (127 - exponent) << 23)));
    } else {
        // One Newton step on x times the reciprocal: exact for every mantissa of the peaks that formats
        // have (tested), away from the ends of the exponents.
        const float peak = float_of(static_cast<u32>(kPeakBits)), reciprocal = __frcp_rn(peak);
        const float quotient = __fmul_rn(x, reciprocal);
        const float rest = __fmaf_rn(-quotient, peak, x);
        if (fabsf(x) > 1e-30f && fabsf(x) < 1e38f) return __fmaf_rn(rest, reciprocal, quotient);
        return __fdiv_rn(x, peak);
    }
}

// 2^(floor(log2 top) - emax) of an absmax, 0 for 0.
__device__ inline float power_below(u32 top, int emax) {
    if (top == 0) return 0.0f;
    const int own = top >> 23 ? static_cast<int>(top >> 23) - 127 : -118 - __clz(top);
    const int exponent = min(max(own - emax, -127), 127);
    return float_of(exponent == -127 ? 0x00400000u : static_cast<u32>(exponent + 127) << 23);
}

// ---- codecs: a number in the codec's range <-> an unsigned code ---------------------------------

// What a codebook's kernels are told about its levels; Python computes it exactly.
struct Lookup {
    const uint4* image;    // the EncodeTables, ready to be copied to shared memory
    const float* levels;   // [count], ascending
    const float* values;   // [256], the level of each code
    const u8* codes;       // [count], the code of each rank
    float to_unit, scale;  // even grids: a number's place in 0..1, and four times the last cell
    u32 lowest, per_sign;  // float grid: the lowest cell's bits, and the cells of each sign
    int vectors;           // of the image
    int steps;             // borders in the fullest cell
};

// How a number finds its cell. Even: cells of the same width; a cell has its border and its rank.
// Mirrored: the same for sizes, and codes of negative numbers are 8 higher (bitsandbytes' fp4).
// Float: cells by the upper bits of a float, whose relative width is even (levels that crowd around
// zero).
enum class Grid { Even, Mirrored, Float };

__device__ constexpr int cells_of(int count) { return count <= 16 ? 32 : count <= 32 ? 64 : count <= 64 ? 128 : count <= 128 ? 256 : 512; }

template <Grid kGrid, int kCount>
struct alignas(16) EncodeImage {
    float border[cells_of(kCount)];  // of a cell
    u32 rank[cells_of(kCount)];      // of the lowest number in a cell; Mirrored: two codes, a byte each
    float borders[(kCount + 3) / 4 * 4];  // all of them, the last one +inf
};
template <int kCount>
struct alignas(16) EncodeImage<Grid::Float, kCount> {
    float borders[(kCount + 3) / 4 * 4];
    u8 ranks[6400];
};

__device__ inline void copy_image(void* to, const void* from, int vectors, int thread, int threads) {
#pragma unroll 1
    for (int i = thread; i < vectors; i += threads) static_cast<uint4*>(to)[i] = static_cast<const uint4*>(from)[i];
}

template <int kCount, Grid kGrid, bool kSorted>
struct Codebook {  // the nearest of kCount levels; kSorted: the code is the rank
    static constexpr bool is_codebook = true;
    static constexpr u32 bias = 0;
    static constexpr int count = kCount;
    static constexpr int float_bits = 17;  // dropped: cells have 6 bits of mantissa

    using EncodeTables = EncodeImage<kGrid, kCount>;
    struct alignas(16) DecodeTables { float values[kCount <= 16 ? 16 : 256]; };

    __device__ static void fill(EncodeTables& tables, const Lookup& lookup, int thread, int threads) {
        copy_image(&tables, lookup.image, lookup.vectors, thread, threads);
    }
    __device__ static void fill(DecodeTables& tables, const Lookup& lookup, int thread, int threads) {
        // Codes above the count stand for nothing; packings of few bits cannot hold them.
        copy_image(&tables, lookup.values, sizeof(DecodeTables) / 16, thread, threads);
    }

    // Four times the cell in an even grid. Adding 2^23 rounds to an integer, in the low bits.
    __device__ static u32 even_cell(float unit, const Lookup& lookup) {
        return bits_of(__fmaf_rn(unit, lookup.scale, 8388608.0f)) & (4 * cells_of(kCount) - 4);
    }
    template <typename Entry>
    __device__ static Entry at(const Entry* table, u32 bytes) {
        return *reinterpret_cast<const Entry*>(reinterpret_cast<const u8*>(table) + bytes);
    }

    __device__ static u32 encode(float x, int, const EncodeTables& tables, const Lookup& lookup) {
        if constexpr (kGrid == Grid::Even) {
            const u32 cell = even_cell(__saturatef(__fmaf_rn(x, lookup.to_unit, 0.5f)), lookup);
            return at(tables.rank, cell) + (x > at(tables.border, cell));
        } else if constexpr (kGrid == Grid::Mirrored) {
            const u32 cell = even_cell(__saturatef(__fmul_rn(fabsf(x), lookup.to_unit)), lookup);
            const u32 code = __byte_perm(at(tables.rank, cell), 0, fabsf(x) > at(tables.border, cell) ? 0x4441 : 0x4440);
            return code + (x < 0.0f ? 8 : 0);
        } else {
            const u32 rank = tables.ranks[float_cell(x, lookup)];
            return rank + (x > tables.borders[rank]);
        }
    }
    __device__ static u32 float_cell(float x, const Lookup& lookup) {
        const u32 size = (bits_of(x) & 0x7FFFFFFFu) >> float_bits;
        const u32 cell = min(max(size, lookup.lowest) - lookup.lowest, lookup.per_sign - 1);
        return bits_of(x) >> 31 ? cell + lookup.per_sign : cell;
    }

    // The same where a cell may hold several borders.
    __device__ static u32 encode_crowded(float x, const EncodeTables& tables, const Lookup& lookup) {
        u32 rank;
        if constexpr (kGrid == Grid::Even) rank = at(tables.rank, even_cell(__saturatef(__fmaf_rn(x, lookup.to_unit, 0.5f)), lookup));
        else if constexpr (kGrid == Grid::Float) rank = tables.ranks[float_cell(x, lookup)];
        else return encode(x, 0, tables, lookup);
#pragma unroll 1
        for (int step = 0; step < lookup.steps; ++step) rank += x > tables.borders[rank];
        return rank;
    }

    // One of the two levels around x, the upper one where draw < its share of the distance.
    __device__ static u32 encode_stochastic(
        float x, float draw, int, const EncodeTables&, const Lookup& lookup) {
        int below = 0;
        for (int step = 128; step; step /= 2)  // the last level not above x, but for the top one
            if (below + step < kCount - 1 && lookup.levels[below + step] <= x) below += step;
        const float low = lookup.levels[below], high = lookup.levels[below + 1];
        const float share = __fdiv_rn(__fadd_rn(x, -low), __fadd_rn(high, -low));
        return lookup.codes[below + (draw < share)];
    }

    __device__ static float decode(u32 code, float, const DecodeTables& tables) { return tables.values[code]; }
    __device__ static float shift_of(int) { return 0.0f; }
};

enum class Rounding { HalfEven, HalfAway, HalfUp };

template <int kLow, int kHigh, Rounding kRounding>
struct Uniform {  // the integers kLow..kHigh; the code is the integer plus offset
    static constexpr bool is_codebook = false;
    struct EncodeTables {};
    struct DecodeTables {};
    template <class Tables>
    __device__ static void fill(Tables&, const Lookup&, int, int) {}

    __device__ static constexpr int bit_length(int value) { return value ? 1 + bit_length(value / 2) : 0; }
    static constexpr int offset = kLow < 0 ? 1 << (bit_length(kHigh - kLow) - 1) : 0;
    static constexpr float low = kLow, high = kHigh;

    // Adding 2^23 (or 1.5 * 2^23, which leaves room below) makes a float round to an integer and
    // keep it in its low bits. `encode` gives these bits: code + bias; packing takes the bias off.
    static constexpr u32 bias = kRounding == Rounding::HalfUp ? 0x4B000000u : 0x4B400000u;
    static constexpr float magic = kRounding == Rounding::HalfUp ? 8388608.0f : 12582912.0f;

    // Saturates after the zero point is added, as ONNX does.
    __device__ static u32 encode(float x, int zero_point, const EncodeTables&, const Lookup&) {
        if constexpr (kRounding == Rounding::HalfUp) {  // ggml: trunc(x + offset + 0.5)
            const float raised = fmaxf(__fadd_rn(x, offset + 0.5f), 0.0f);
            return bits_of(__fadd_rd(fminf(raised, high + offset), magic));
        } else if constexpr (kRounding == Rounding::HalfAway) {
            // Towards zero the sum reaches no integer that |x| + 0.5 itself does not reach.
            const float size = __fadd_rz(__fadd_rz(fminf(fabsf(x), high), 0.5f), 8388608.0f);
            return bits_of(__fadd_rn(copysignf(__fadd_rn(size, -8388608.0f), x), magic + offset));
        } else {
            // The offset is even: which integer is the nearest even one does not change.
            const float clipped = fminf(fmaxf(x, low - zero_point), high - zero_point);
            return bits_of(__fadd_rn(clipped, magic + offset)) + zero_point;
        }
    }

    // floor(x), or one more where draw < x - floor(x).
    __device__ static u32 encode_stochastic(
        float x, float draw, int zero_point, const EncodeTables&, const Lookup&) {
        const float floor = floorf(x);
        const float whole = __fadd_rn(floor, draw < __fadd_rn(x, -floor) ? 1.0f : 0.0f);
        const float clipped = fminf(fmaxf(whole, low - zero_point), high - zero_point);
        return bits_of(__fadd_rn(clipped, magic + offset)) + zero_point;
    }

    // `shift` is 2^23 + offset + zero point.
    __device__ static float decode(u32 code, float shift, const DecodeTables&) {
        return __fadd_rn(float_of(code | 0x4B000000u), -shift);
    }
    __device__ static float shift_of(int zero_point) { return 8388608.0f + static_cast<float>(offset + zero_point); }
};

// What the highest exponent holds: values (fp4, fp6), values and one NaN (e4m3), or Inf and NaN.
enum class Specials { None, OneNan, Ieee };

template <int kExponent, int kMantissa, Specials kSpecials>
struct Minifloat {  // the bits of a small float; saturating, round to nearest even
    static constexpr bool is_codebook = false;
    static constexpr u32 bias = 0;  // of codes
    static constexpr int exponent = kExponent, mantissa = kMantissa;
    struct EncodeTables {};
    struct DecodeTables {};
    template <class Tables>
    __device__ static void fill(Tables&, const Lookup&, int, int) {}

    static constexpr int excess = (1 << (kExponent - 1)) - 1;
    static constexpr u32 sign = 1u << (kExponent + kMantissa);
    // The largest finite code: all ones, less what is special.
    static constexpr u32 peak_code = sign - 1 - (kSpecials == Specials::OneNan ? 1u
                                     : kSpecials == Specials::Ieee ? 1u << kMantissa : 0u);
    static constexpr bool is_16_bit = kExponent + kMantissa == 15;

    // A size is a number of steps, 2^(e - kMantissa) for its exponent e, which is not below that of
    // the smallest normal; adding 1.5 * 2^23 steps rounds to nearest even and leaves that number
    // in the low bits. A step above the largest of an exponent is the first of the next one, so the
    // code is the number of steps and 2^kMantissa more for each exponent.
    __device__ static u32 encode(float x, int = 0) {
        u32 code;
        if constexpr (is_16_bit) {
            code = encode_16_bit(bits_of(x) & 0x7FFFFFFFu);
        } else {
            constexpr u32 smallest = static_cast<u32>(128 - excess) << 23;
            constexpr u32 magic = static_cast<u32>(23 - kMantissa) << 23 | 0x400000u;
            const float size = fminf(fabsf(x), float_of(largest));
            const u32 exponent = max(bits_of(size) & 0x7F800000u, smallest);
            const u32 rounded = bits_of(__fadd_rn(size, float_of(exponent + magic)));
            code = rounded - exponent + (exponent >> (23 - kMantissa)) - (magic + (smallest >> (23 - kMantissa)));
        }
        return code | (bits_of(x) >> (31 - kExponent - kMantissa) & sign);
    }
    // The bits of the largest number, at which sizes saturate.
    static constexpr u32 largest = (peak_code + (static_cast<u32>(127 - excess) << kMantissa)) << (23 - kMantissa);

    // Sizes below the smallest normal are integers in steps of 2^(1 - excess - kMantissa); larger
    // ones are float32 with fewer mantissa bits, rounded by adding half a step, less one where the
    // kept part is even. Infinity and NaN keep codes of their own: these carry no scale.
    __device__ static u32 encode_16_bit(u32 size) {
        constexpr u32 smallest_normal = static_cast<u32>(128 - excess) << 23;
        constexpr int dropped = 23 - kMantissa;
        u32 code;
        if (kExponent < 8 && size < smallest_normal) {  // bf16 has float32's exponents, and its steps
            constexpr u32 step = static_cast<u32>((126 + excess + kMantissa) & 255) << 23;
            code = static_cast<u32>(static_cast<int>(rintf(__fmul_rn(float_of(size), float_of(step)))));
        } else {
            const u32 rounded = size + ((1u << (dropped - 1)) - 1) + (size >> dropped & 1);
            code = (rounded >> dropped) - (static_cast<u32>(127 - excess) << kMantissa);
        }
        code = min(code, peak_code);
        if (size >= 0x7F800000u) code = peak_code + 1 + (size == 0x7F800000u ? 0u : 1u << (kMantissa - 1));
        return code;
    }
    __device__ static u32 encode(float x, int, const EncodeTables&, const Lookup&) { return encode(x); }

    // One of the two neighbours of x, the one further from zero where draw < its share.
    __device__ static u32 encode_stochastic(
        float x, float draw, int, const EncodeTables&, const Lookup&) {
        if (!is_finite(x)) return encode(x);
        constexpr u32 top = (peak_code + (static_cast<u32>(127 - excess) << kMantissa)) << (23 - kMantissa);
        const double size = fminf(fabsf(x), float_of(top));
        const int own = static_cast<int>(__double_as_longlong(size) >> 52) - 1023;
        const int step = max(own, 1 - excess) - kMantissa;  // a step is 2^step
        const double steps = size * power(-step), floor = ::floor(steps);
        const double rounded = (floor + (draw < steps - floor ? 1.0 : 0.0)) * power(step);
        return encode(copysignf(static_cast<float>(rounded), x));
    }
    __device__ static double power(int exponent) {
        return __longlong_as_double(static_cast<long long>(exponent + 1023) << 52);
    }

    __device__ static float decode(u32 code, float = 0.0f) {
        const u32 size = code & (sign - 1);
        if constexpr (kExponent == 8) return float_of(code << 16);
        else if constexpr (is_16_bit) return float_of_half(code);
        else {
            // As the bits of a float16, of which it has a part; only the bias differs.
            const u32 half = (code & sign ? 0x8000u : 0u) | size << (10 - kMantissa);
            constexpr u32 rebias = static_cast<u32>(127 + 15 - excess) << 23;
            const float value = __fmul_rn(float_of_half(half), float_of(rebias));
            if constexpr (kSpecials == Specials::OneNan)
                return size > peak_code ? float_of(0x7FC00000u) : value;
            return value;
        }
    }
    __device__ static float decode(u32 code, float, const DecodeTables&) { return decode(code); }
    __device__ static float shift_of(int) { return 0.0f; }
};

// ---- scale rules: what of a block its scale is made from ----------------------------------------
//
// `State` is merged over the elements of a block in any order; `lost` says that something in it
// was not finite.

// Bits of floats compare like integers of their sign: the largest int is the largest number that is
// not negative, the largest u32 the smallest negative one. NaN lies beyond infinity either way.
struct Extremes {
    int high;   // below 0: there is no number without a sign
    u32 low;    // below 2^31: there is no number with a sign
    u32 least;  // the smallest u32: the number nearest to zero of the first kind there is
    __device__ static Extremes of(u32 bits) { return {static_cast<int>(bits), bits, bits}; }
    __device__ void add(u32 bits) {
        high = max(high, static_cast<int>(bits));
        low = max(low, bits);
        least = min(least, bits);
    }
    // Magnitudes of the largest and of the smallest number, 0 where there is none of that sign.
    __device__ u32 above() const { return static_cast<u32>(max(high, 0)); }
    __device__ u32 below() const { return low >> 31 ? low & 0x7FFFFFFFu : 0u; }
    __device__ u32 furthest() const { return max(above(), low >= 0x80000000u ? low & 0x7FFFFFFFu : 0u); }
};

struct AbsMax {  // as unsigned integers |x| order like floats, and keep NaN above infinity
    struct State { u32 top; };
    __device__ static State none() { return {0}; }
    __device__ static State of(float x, i64) { return {bits_of(x) & 0x7FFFFFFFu}; }
    __device__ static State of(const Extremes& e) { return {e.furthest()}; }
    __device__ static State merge(State a, State b) { return {max(a.top, b.top)}; }
    __device__ static bool lost(State s) { return s.top >= 0x7F800000u; }
    __device__ static float statistic(State s, bool) { return float_of(s.top); }
};

struct PowerOfTwo : AbsMax {};  // OCP MX: 2^(floor(log2 absmax) - emax)

struct SignedMax {  // the element furthest from zero, sign kept; of equals the one of lowest index
    struct State { u64 key; };  // |x|, then the complement of the index above the sign
    __device__ static State none() { return {0}; }
    __device__ static State of(float x, i64 index) {
        const u32 bits = bits_of(x);
        const u64 order = 0x7FFFFFFFu - static_cast<u32>(index);  // blocks are smaller than 2^31
        return {static_cast<u64>(bits & 0x7FFFFFFFu) << 32 | order << 1 | bits >> 31};
    }
    __device__ static State merge(State a, State b) { return {max(a.key, b.key)}; }
    __device__ static bool lost(State s) { return s.key >> 32 >= 0x7F800000u; }
    __device__ static float statistic(State s, bool) {
        return float_of(static_cast<u32>(s.key >> 32) | static_cast<u32>(s.key & 1) << 31);
    }
};

struct Range {  // the smallest and the largest, as integers in the order of the floats, -0 below 0
    struct State { int low, high; };
    __device__ static int order(u32 bits) {
        return static_cast<int>(bits) ^ (static_cast<int>(bits) >> 31 & 0x7FFFFFFF);
    }
    __device__ static float value(int order) { return float_of(static_cast<u32>(order ^ (order >> 31 & 0x7FFFFFFF))); }
    __device__ static State none() { return {0x7FFFFFFF, static_cast<int>(0x80000000u)}; }
    __device__ static State of(float x, i64) { return {order(bits_of(x)), order(bits_of(x))}; }
    __device__ static State of(const Extremes& e) {
        return {order(e.low >> 31 ? e.low : e.least), order(e.high < 0 ? e.least : static_cast<u32>(e.high))};
    }
    __device__ static State merge(State a, State b) { return {min(a.low, b.low), max(a.high, b.high)}; }
    __device__ static bool lost(State s) { return !is_finite(value(s.low)) || !is_finite(value(s.high)); }
    // With a zero point zero must have a code.
    __device__ static float low(State s, bool zero) { return zero ? fminf(value(s.low), 0.0f) : value(s.low); }
    __device__ static float high(State s, bool zero) { return zero ? fmaxf(value(s.high), 0.0f) : value(s.high); }
    __device__ static float statistic(State s, bool zero) { return __fadd_rn(high(s, zero), -low(s, zero)); }
};

// A float64 sum that is asked to be the one in index order. While every term is a multiple of
// 2^lowest and the sum is below 2^(lowest + 53), nothing is ever rounded and every order is right.
struct OrderedSum {
    double sum;   // of the sizes: no partial sum is larger
    int lowest;
    __device__ static OrderedSum none() { return {0.0, 4096}; }
    __device__ static OrderedSum of(float size) {
        const u32 bits = bits_of(size) & 0x7FFFFFFFu;
        if (bits == 0) return none();
        const int exponent = max(static_cast<int>(bits >> 23), 1) - 150;
        const u32 digits = (bits & 0x7FFFFFu) | (bits >> 23 ? 0x800000u : 0u);
        return {static_cast<double>(float_of(bits)), exponent + __ffs(static_cast<int>(digits)) - 1};
    }
    __device__ static OrderedSum merge(OrderedSum a, OrderedSum b) { return {a.sum + b.sum, min(a.lowest, b.lowest)}; }
    __device__ bool any_order() const {
        const int exponent = static_cast<int>(__double_as_longlong(sum) >> 52 & 0x7FF) - 1023;
        return sum == 0.0 || exponent - lowest < 53;
    }
};

struct MeanAbs {  // the mean of |x|: a float64 sum in index order, rounded once
    using State = OrderedSum;
    __device__ static State none() { return OrderedSum::none(); }
    __device__ static State of(float x, i64) { return OrderedSum::of(x); }
    __device__ static State merge(State a, State b) { return OrderedSum::merge(a, b); }
    __device__ static bool lost(State s) { return !(s.sum < 1e300); }
};

// ---- packings: where the bits of code i of a row are --------------------------------------------

enum class Order { Low, High, Dense, Word, Planes };

template <int kBits, Order kOrder, bool kSigned = false>
struct Packing {
    static constexpr int bits = kBits;
    static constexpr Order order = kOrder;
    static constexpr u32 mask = (1u << kBits) - 1;
    // A chunk takes kBits whole bytes of its own in these orders.
    static constexpr bool by_chunk = kOrder == Order::Low || kOrder == Order::High || kOrder == Order::Dense;
    // Whether these bytes are whole words; else four chunks make kBits words together.
    static constexpr bool whole_words = kBits % 4 == 0;
    // int8 is stored as two's complement: code ^ 128.
    static constexpr u32 flip = kSigned ? 0x80808080u : 0u;

    // Which place from the low end code i of a chunk has.
    __device__ static constexpr int place(int i) {
        constexpr int per_byte = kBits < 8 ? 8 / kBits : 1;
        return kOrder == Order::High ? i / per_byte * per_byte + (per_byte - 1 - i % per_byte) : i;
    }

    // The code at `i` of a row of bytes (Low, High) or of uint32 words (the others).
    template <typename Word>
    __device__ static u32 get(const Word* row, i64 i) {
        if constexpr (kBits == 16) {
            return row[i];
        } else if constexpr (kOrder == Order::Low || kOrder == Order::High) {
            constexpr int per_byte = 8 / kBits;
            const int lane = static_cast<int>(i % per_byte);
            const int shift = (kOrder == Order::Low ? lane : per_byte - 1 - lane) * kBits;
            return ((row[i / per_byte] ^ (kSigned ? 0x80u : 0u)) >> shift) & mask;
        } else if constexpr (kOrder == Order::Word) {
            constexpr int per_word = 32 / kBits;
            return row[i / per_word] >> static_cast<int>(i % per_word) * kBits & mask;
        } else if constexpr (kOrder == Order::Planes) {
            u32 code = 0;
            for (int b = 0; b < kBits; ++b) code |= (row[i / 32 * kBits + b] >> (i % 32) & 1u) << b;
            return code;
        } else {  // a stream: the code may run on in the next word
            const i64 bit = i * kBits;
            const int shift = static_cast<int>(bit % 32);
            u64 window = row[bit / 32];
            if (shift + kBits > 32) window |= static_cast<u64>(row[bit / 32 + 1]) << 32;
            return static_cast<u32>(window >> shift) & mask;
        }
    }

    // Word `w` of a row, from its codes: code(i) gives the one at i, also beyond the row's end.
    template <class Code>
    __device__ static u32 word(i64 w, Code code) {
        u32 bits = 0;
        if constexpr (kBits == 16) {
            bits = code(w);
        } else if constexpr (kOrder == Order::Low || kOrder == Order::High) {
            constexpr int per_byte = 8 / kBits;
            for (int j = 0; j < per_byte; ++j)
                bits |= code(w * per_byte + j) << (kOrder == Order::Low ? j : per_byte - 1 - j) * kBits;
            bits ^= kSigned ? 0x80u : 0u;
        } else if constexpr (kOrder == Order::Word) {
            constexpr int per_word = 32 / kBits;
            for (int j = 0; j < per_word; ++j) bits |= code(w * per_word + j) << j * kBits;
        } else if constexpr (kOrder == Order::Planes) {
            const int b = static_cast<int>(w % kBits);
            for (int j = 0; j < 32; ++j) bits |= (code(w / kBits * 32 + j) >> b & 1u) << j;
        } else {
            const i64 first = w * 32 / kBits;  // the code that holds the word's lowest bit
            for (i64 i = first; i * kBits < (w + 1) * 32; ++i) {
                const int shift = static_cast<int>(i * kBits - w * 32);
                bits |= shift < 0 ? code(i) >> -shift : code(i) << shift;
            }
        }
        return bits;
    }
};

// ---- formats ------------------------------------------------------------------------------------

enum class Stored { None, Float32, Float16, E8M0, E4M3, Double };  // how a scale is held
enum class Offset { None, ZeroPoint, Minimum };

// Where the bits of ggml's blocks lie; defined in blocks.cuh.
template <int kByte, int kBits, int kSpan, int kShift> struct Field;
template <int kByte, int kCount, int kFirst, int kLow, int kBits, int kShift, int kStep> struct Run;
template <class... Parts> struct Fields;
template <class... Parts> struct Runs;

}  // namespace cuquant
