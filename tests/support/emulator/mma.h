// What kernels/mma.cuh writes in asm, for the emulator: cuda.h includes it.
#pragma once

// Addresses in shared memory are 32-bit numbers; this is where the dynamic one begins.
constexpr unsigned kEmulatorShared = 1 << 20;
std::size_t __cvta_generic_to_shared(const void* p);

namespace cuquant {

struct Half;
inline unsigned bfloat16_of(float x);

// What lies at a 32-bit address, where `bytes` of dynamic shared memory begin.
unsigned char* emulator_shared(unsigned address, unsigned bytes, const char* what);

// ---- pairs of 16-bit floats ---------------------------------------------------------------------

// The neighbour of x towards zero, or x where it is exact, whose last bit is 1 where it is not: a later
// rounding to fewer bits is then that of x itself.
float emulator_odd(double x);
double emulator_odd_sum(double a, double b);

inline float emulator_value(unsigned bits, bool half_type) { return half_type ? float_of_half(bits) : __uint_as_float(bits << 16); }
template <class T> inline float emulator_float(unsigned bits) { return emulator_value(bits, std::is_same_v<T, Half>); }
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

void emulator_mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bool half_type, Place place);
template <class T>
inline void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Place place = Place::here()) {
    emulator_mma(d, a, b0, b1, std::is_same_v<T, Half>, place);
}

template <class T>
inline void mma_8(float (&d)[4], unsigned a0, unsigned a1, unsigned b, Place place = Place::here()) {
    mma<T>(d, {a0, a1, 0, 0}, b, 0, place);
}

void mma_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Place place = Place::here());

uint4 load_matrices(unsigned shared_address, Place place = Place::here());

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
