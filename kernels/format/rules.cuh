// Scale rules: what of a block its scale is made from, and how. As cuquant/formats/scales.py.
#pragma once
#include "device/vector.cuh"

namespace cuquant {

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
    // Half of it, exact where the whole is beyond float32.
    __device__ static float half(State s, bool zero) {
        return __fadd_rn(__fmul_rn(high(s, zero), 0.5f), -__fmul_rn(low(s, zero), 0.5f));
    }
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

}  // namespace cuquant
