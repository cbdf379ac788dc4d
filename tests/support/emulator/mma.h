// What kernels/mma.cuh writes in asm, for the emulator: cuda.h includes it.
#pragma once

// Addresses in shared memory are 32-bit numbers; this is where the dynamic one begins.
constexpr unsigned kEmulatorShared = 1 << 20;
inline std::size_t __cvta_generic_to_shared(const void* p) {
    const std::ptrdiff_t at = static_cast<const unsigned char*>(p) - cuquant::dynamic_shared;
    if (at <= -static_cast<std::ptrdiff_t>(kEmulatorShared) || at >= static_cast<std::ptrdiff_t>(kEmulatorShared))
        emulator::fail("%p is not in shared memory", p);
    return static_cast<std::size_t>(kEmulatorShared + at);
}

namespace cuquant {

struct Half;
inline unsigned bfloat16_of(float x);

// What lies at a 32-bit address, where `bytes` of dynamic shared memory begin.
inline unsigned char* emulator_shared(unsigned address, unsigned bytes, const char* what) {
    if (address % bytes) emulator::fail("misaligned %s: %u is no multiple of %u", what, address, bytes);
    if (address < kEmulatorShared || address + bytes > kEmulatorShared + emulator::machine.shared)
        emulator::fail("%s: address %d of %d bytes of dynamic shared memory", what,
                       static_cast<int>(address - kEmulatorShared), emulator::machine.shared);
    return dynamic_shared + (address - kEmulatorShared);
}

// ---- pairs of 16-bit floats ---------------------------------------------------------------------

// The neighbour of x towards zero, or x where it is exact, whose last bit is 1 where it is not: a later
// rounding to fewer bits is then that of x itself.
inline float emulator_odd(double x) {
    float near = static_cast<float>(x);
    if (near != near || static_cast<double>(near) == x) return near;
    if (fabs(static_cast<double>(near)) > fabs(x)) near = nextafterf(near, 0.0f);
    return __uint_as_float(__float_as_uint(near) | 1u);
}
inline double emulator_odd_sum(double a, double b) {
    const double sum = a + b;
    if (!(fabs(sum) <= std::numeric_limits<double>::max())) return sum;
    const double part = sum - a, rest = (a - (sum - part)) + (b - part);
    if (rest == 0) return sum;
    const double low = (rest < 0) == (sum < 0) ? sum : nextafter(sum, 0.0);
    return __longlong_as_double(__double_as_longlong(low) | 1);
}

template <class T> inline float emulator_float(unsigned bits) {
    return std::is_same_v<T, Half> ? float_of_half(bits) : __uint_as_float(bits << 16);
}
template <class T> inline unsigned emulator_fma(unsigned a, unsigned b, unsigned c) {
    const double product = static_cast<double>(emulator_float<T>(a)) * emulator_float<T>(b);
    const float sum = emulator_odd(emulator_odd_sum(product, emulator_float<T>(c)));
    if (sum != sum) return 0x7FFFu;
    return std::is_same_v<T, Half> ? emulator_half_of(sum) : bfloat16_of(sum);
}
template <class T> inline unsigned fma_pair(unsigned a, unsigned b, unsigned c) {
    return emulator_fma<T>(a & 0xFFFFu, b & 0xFFFFu, c & 0xFFFFu) | emulator_fma<T>(a >> 16, b >> 16, c >> 16) << 16;
}
template <class T> inline unsigned fma_line(unsigned a, unsigned line) {
    return fma_pair<T>(a, (line & 0xFFFFu) * 0x10001u, (line >> 16) * 0x10001u);
}
inline unsigned and_or(unsigned a, unsigned b, unsigned c) { return (a & b) | c; }

// ---- products of a warp -------------------------------------------------------------------------

template <class T>
inline void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Place place = Place::here()) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
    EmulatorOperands* const lanes = emulator_operands[emulator::machine.rank][warp];
    lanes[lane] = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    __syncwarp(~0u, place);
    for (int i = 0; i < 4; ++i) {
        for (int t = 0; t < 4; ++t) {
            const EmulatorOperands& left = lanes[4 * row + t];
            const EmulatorOperands& right = lanes[4 * (column + i % 2) + t];
            for (int half = 0; half < 2; ++half)
                for (int e = 0; e < 32; e += 16)
                    d[i] += emulator_float<T>(left.a[2 * half + i / 2] >> e & 0xFFFFu) * emulator_float<T>(right.b[half] >> e & 0xFFFFu);
        }
    }
    __syncwarp(~0u, place);
}

template <class T>
inline void mma_8(float (&d)[4], unsigned a0, unsigned a1, unsigned b, Place place = Place::here()) {
    mma<T>(d, {a0, a1, 0, 0}, b, 0, place);
}

inline void mma_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Place place = Place::here()) {
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

inline uint4 load_matrices(unsigned shared_address, Place place = Place::here()) {
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

// ---- memory -------------------------------------------------------------------------------------

inline uint4 load16_shared(unsigned address) {
    return *reinterpret_cast<const uint4*>(emulator_shared(address, 16, "load16_shared"));
}
inline uint2 load8_shared(unsigned address) {
    return *reinterpret_cast<const uint2*>(emulator_shared(address, 8, "load8_shared"));
}

inline void copy16_async(void* to, const void* from, int bytes) { copy_ahead(to, from, bytes); }
inline void copies_wait() {
    close_copies();
    wait_copies<0>();
}

inline int anew(int x) { return x; }

inline unsigned load2_shared(unsigned address) {
    return *reinterpret_cast<const unsigned short*>(emulator_shared(address, 2, "load2_shared"));
}
inline unsigned load4_shared(unsigned address) {
    return *reinterpret_cast<const unsigned*>(emulator_shared(address, 4, "load4_shared"));
}

template <class T> inline T emulator_load(const void* from, const char* what) {
    if (reinterpret_cast<std::uintptr_t>(from) % sizeof(T))
        emulator::fail("misaligned %s: %p is no multiple of %d", what, from, static_cast<int>(sizeof(T)));
    return *static_cast<const T*>(from);
}
inline uint4 load16_once(const void* from) { return emulator_load<uint4>(from, "load16_once"); }
inline uint2 load8_once(const void* from) { return emulator_load<uint2>(from, "load8_once"); }
inline unsigned load4_once(const void* from) { return emulator_load<unsigned>(from, "load4_once"); }

}  // namespace cuquant
