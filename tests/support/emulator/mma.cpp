// What mma.h declares: a part of runtime.cpp.
#include "launch.h"

std::size_t __cvta_generic_to_shared(const void* p) {
    const std::ptrdiff_t at = static_cast<const unsigned char*>(p) - cuquant::dynamic_shared;
    if (at <= -static_cast<std::ptrdiff_t>(kEmulatorShared) || at >= static_cast<std::ptrdiff_t>(kEmulatorShared))
        emulator::fail("%p is not in shared memory", p);
    return static_cast<std::size_t>(kEmulatorShared + at);
}

namespace cuquant {

unsigned char* emulator_shared(unsigned address, unsigned bytes, const char* what) {
    if (address % bytes) emulator::fail("misaligned %s: %u is no multiple of %u", what, address, bytes);
    if (address < kEmulatorShared || address + bytes > kEmulatorShared + emulator::machine.shared)
        emulator::fail("%s: address %d of %d bytes of dynamic shared memory", what,
                       static_cast<int>(address - kEmulatorShared), emulator::machine.shared);
    return dynamic_shared + (address - kEmulatorShared);
}

float emulator_odd(double x) {
    float near = static_cast<float>(x);
    if (near != near || static_cast<double>(near) == x) return near;
    if (fabs(static_cast<double>(near)) > fabs(x)) near = nextafterf(near, 0.0f);
    return __uint_as_float(__float_as_uint(near) | 1u);
}

double emulator_odd_sum(double a, double b) {
    const double sum = a + b;
    if (!(fabs(sum) <= std::numeric_limits<double>::max())) return sum;
    const double part = sum - a, rest = (a - (sum - part)) + (b - part);
    if (rest == 0) return sum;
    const double low = (rest < 0) == (sum < 0) ? sum : nextafter(sum, 0.0);
    return __longlong_as_double(__double_as_longlong(low) | 1);
}

void emulator_mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bool half_type, Place place) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
    EmulatorOperands* const lanes = emulator_operands[emulator::machine.rank][warp];
    const auto value = [half_type](unsigned bits) { return emulator_value(bits, half_type); };
    lanes[lane] = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    __syncwarp(~0u, place);
    for (int i = 0; i < 4; ++i) {
        for (int t = 0; t < 4; ++t) {
            const EmulatorOperands& left = lanes[4 * row + t];
            const EmulatorOperands& right = lanes[4 * (column + i % 2) + t];
            for (int half = 0; half < 2; ++half)
                for (int e = 0; e < 32; e += 16)
                    d[i] += value(left.a[2 * half + i / 2] >> e & 0xFFFFu) * value(right.b[half] >> e & 0xFFFFu);
        }
    }
    __syncwarp(~0u, place);
}

void mma_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Place place) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
    EmulatorOperands* const lanes = emulator_operands[emulator::machine.rank][warp];
    const auto cut = [](unsigned x) { return __uint_as_float(x & 0xFFFFE000u); };
    lanes[lane] = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    __syncwarp(~0u, place);
    for (int i = 0; i < 4; ++i)
        for (int t = 0; t < 4; ++t)
            for (int half = 0; half < 2; ++half)
                d[i] += cut(lanes[4 * row + t].a[2 * half + i / 2]) * cut(lanes[4 * (column + i % 2) + t].b[half]);
    __syncwarp(~0u, place);
}

uint4 load_matrices(unsigned shared_address, Place place) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    EmulatorOperands* const lanes = emulator_operands[emulator::machine.rank][warp];
    lanes[lane].a[0] = shared_address;
    __syncwarp(~0u, place);
    unsigned words[4];
    for (int i = 0; i < 4; ++i)
        std::memcpy(&words[i], emulator_shared(lanes[8 * i + lane / 4].a[0], 16, "load_matrices") + lane % 4 * 4, 4);
    __syncwarp(~0u, place);
    return {words[0], words[1], words[2], words[3]};
}

}  // namespace cuquant
