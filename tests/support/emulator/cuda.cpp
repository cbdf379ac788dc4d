// What cuda.h declares: a part of runtime.cpp.
#include "launch.h"

#include <algorithm>

unsigned __brev(unsigned x) {
    unsigned y = 0;
    for (int i = 0; i < 32; ++i) y |= (x >> i & 1u) << (31 - i);
    return y;
}

unsigned permuted(unsigned low, unsigned high, unsigned selectors) {
    const unsigned long long bytes = static_cast<unsigned long long>(high) << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned selector = selectors >> (4 * i);
        unsigned byte = static_cast<unsigned>(bytes >> (8 * (selector & 7))) & 0xFFu;
        if (selector & 8) byte = byte & 0x80u ? 0xFFu : 0u;  // the sign, replicated
        result |= byte << (8 * i);
    }
    return result;
}

unsigned __vmaxu2(unsigned first, unsigned second) {
    const unsigned low = std::max(first & 0xFFFFu, second & 0xFFFFu), high = std::max(first >> 16, second >> 16);
    return high << 16 | low;
}

unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
    for (int i = 0; i < 4; ++i) sum += (a >> 8 * i & 0xFFu) * (b >> 8 * i & 0xFFu);
    return sum;
}

int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 32; i += 8) sum += static_cast<signed char>(a >> i) * static_cast<signed char>(b >> i);
    return sum;
}

namespace cuquant {

float float_of_half(unsigned bits) {
    const unsigned half = bits & 0xFFFFu;
    const unsigned exponent = half >> 10 & 31, mantissa = half & 1023;
    float size;
    if (exponent == 31) size = mantissa ? __uint_as_float(0x7FFFFFFFu) : INFINITY;  // NaN: cvt's bits
    else if (exponent == 0) size = static_cast<float>(mantissa) * 0x1p-24f;
    else size = __uint_as_float((exponent + 112u) << 23 | mantissa << 13);
    return half & 0x8000u && size == size ? -size : size;
}

unsigned emulator_half_of(float x) {
    if (x != x) return 0x7FFFu;
    const unsigned sign = __float_as_uint(x) >> 16 & 0x8000u;
    const float size = fabsf(x);
    if (size >= 65520.0f) return sign | 0x7C00u;
    if (size < 0x1p-14f) return sign | static_cast<unsigned>(rintf(size * 0x1p24f));
    const unsigned bits = __float_as_uint(size) - (112u << 23);  // the exponent of a float16
    return sign | ((bits + 0xFFFu + (bits >> 13 & 1u)) >> 13);
}

}  // namespace cuquant

namespace emulator {

[[noreturn]] void fail_at(const Found& found, const char* what) {
    const Place place{found.file, static_cast<int>(found.line)};
    fail("%s in %s", what, place.text().c_str());
}

}  // namespace emulator

extern "C" {
#define EMULATOR_HANDLER extern __attribute__((visibility("hidden"), used)) void
EMULATOR_HANDLER __ubsan_handle_out_of_bounds(emulator::Found* found, void*);
EMULATOR_HANDLER __ubsan_handle_shift_out_of_bounds(emulator::Found* found, void*, void*);
EMULATOR_HANDLER __ubsan_handle_type_mismatch_v1(emulator::Found* found, void*);
void __ubsan_handle_out_of_bounds(emulator::Found* found, void*) {
    emulator::fail_at(*found, "an index outside its array");
}
void __ubsan_handle_shift_out_of_bounds(emulator::Found* found, void*, void*) {
    emulator::fail_at(*found, "a shift by the width of its type, or more");
}
void __ubsan_handle_type_mismatch_v1(emulator::Found* found, void*) {
    emulator::fail_at(*found, "a misaligned access");
}
#undef EMULATOR_HANDLER
}
